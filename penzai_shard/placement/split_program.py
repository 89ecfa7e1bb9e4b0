"""Splits the program of an initialiser, so that each large output is computed by itself.

Traced as a whole, an initialiser is one long program with a result for every parameter: slow to
compile, and all its temporaries are in memory at once. So small values (keys, scales, biases) are
computed first, one operation after the other, and each large output gets the operations that it
needs beyond them. Outputs whose operations are the same share one compiled program: the time to
compile does not grow with depth.
"""

import dataclasses
import itertools
import math
from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from penzai_shard.jax_internals.tracing import (
    DERIVATIVE_RULES,
    ClosedJaxpr,
    Jaxpr,
    JaxprEqn,
    Literal,
    Var,
    is_weak_type,
    jaxpr_as_fun,
    without_shardings,
)
from penzai_shard.programs import EXACT, equations_in, make_program, open_program, walk

# Results with at most so many elements are small. At 4,096, weights of 64 x 64 were computed one
# operation after the other too, and compiled serially: 7.5 s of CPU for 96 blocks against 4.4.
MOST_SMALL_ELEMENTS = 1024

# These say where arrays lie and change no value. The plan decides that, and a part that is compiled
# for one device could not contain a constraint to a mesh.
_LAYOUT_ONLY = {"device_put", "layout_constraint", "mesh_cast", "reshard", "sharding_constraint"}
# Done before, outside of the parts: outputs that differ in their key only then share a program.
_KEY_DERIVATIONS = {"random_seed", "random_wrap", "random_fold_in", "random_split"}
# Each output that reads one of these computes it again: compilers fuse it into what reads it.
_FREE = {"broadcast_in_dim", "iota", "reshape", "squeeze", "random_wrap", "random_unwrap"}


@dataclasses.dataclass(frozen=True, eq=False)
class Part:
    """Some outputs that are computed together.

    Attributes:
        outputs: The numbers of these outputs.
        program: What computes them; its arguments are small values and constants.
        key: Equal for parts whose programs do the same.
        is_exact: Whether its results have the same bits in any layout.
    """

    outputs: tuple[int, ...]
    program: ClosedJaxpr
    key: Hashable
    is_exact: bool


@dataclasses.dataclass(frozen=True, eq=False)
class SplitProgram:
    """The program of an initialiser, in parts.

    Attributes:
        parts: The parts, that with the largest output first.
        values: Constants and small values, by the variables that programs of parts take.
        known: The other outputs, by number: they are constants, or small, or literals.
    """

    parts: list[Part]
    values: dict[Var, Any]
    known: dict[int, Any]


def split_program(traced: ClosedJaxpr, wanted: Iterable[int]) -> SplitProgram:
    """Splits the program of an initialiser, and computes its small values.

    Args:
        traced: The program, without arguments.
        wanted: The numbers of the outputs that are to be computed.

    Effects of small operations happen here, those of the others in one part that holds them all.

    >>> import jax
    >>> def initializer():
    ...     keys = jax.random.split(jax.random.key(0), 3)
    ...     return [jax.numpy.zeros(4), *(jax.random.normal(key, (64, 64)) for key in keys)]
    >>> split = split_program(jax.make_jaxpr(initializer)(), range(4))
    >>> [part.outputs for part in split.parts], len({part.key for part in split.parts})
    ([(1,), (2,), (3,)], 1)
    >>> split.known
    {0: Array([0., 0., 0., 0.], dtype=float32)}
    """
    # One flat list of equations, without those of which nothing wanted and no effect comes.
    flattener = _Flattener({}, opens_calls=True)
    results = flattener.inline(traced, ())
    outputs = {number: results[number] for number in wanted}
    known = {number: atom.val for number, atom in outputs.items() if isinstance(atom, Literal)}
    outputs = {number: atom for number, atom in outputs.items() if number not in known}
    needed = _Dependencies(flattener.equations).needed_for(outputs.values())
    equations = [flattener.equations[index] for index in needed]

    # The small values, then the parts that compute all else.
    values = flattener.constants
    equations = _compute_small(equations, values)
    known |= {number: values[atom] for number, atom in outputs.items() if atom in values}
    large = {number: atom for number, atom in outputs.items() if number not in known}
    parts = _make_parts(equations, large) if equations else []
    return SplitProgram(parts, values, known)


# Flattening


def _is_opened(equation: JaxprEqn) -> bool:
    """Whether a call's operations are written one by one, as outputs may need them apart.

    Other calls stay one operation: JAX has traced and lowers their function once for all of them.
    """
    if equation.primitive.name != "jit":
        return False
    names = {inner.primitive.name for inner in equations_in(equation.params["jaxpr"])}
    return len(equation.outvars) > 1 or not names.isdisjoint(_KEY_DERIVATIONS)


class _Flattener:
    """Writes programs into one list of equations, without what they say of layouts."""

    def __init__(self, rewritten: dict[int, Any], opens_calls: bool) -> None:
        self.equations: list[JaxprEqn] = []
        self.constants: dict[Var, Any] = {}
        self._variables: dict[int, Var] = {}
        # Programs in equations, by the id of the original. Calls of one function hold one object,
        # and do so afterwards: it is read once, and JAX lowers it once.
        self._rewritten = rewritten
        self._opens_calls = opens_calls

    def inline(self, program: Any, arguments: Sequence[Any]) -> list[Any]:
        """Writes a program; gives the variables and literals that are its results."""
        return walk(program, arguments, self.write, constant=self._add_constant)

    def _add_constant(self, value: Any) -> Var:
        variable = self._variables.setdefault(id(value), Var(jax.typeof(value)))
        self.constants[variable] = value
        return variable

    def write(self, equation: JaxprEqn, operands: list[Any]) -> Sequence[Any]:
        """Writes an equation that reads these operands; gives the variables of its results."""
        if equation.primitive.name in _LAYOUT_ONLY:
            return operands
        if self._opens_calls and _is_opened(equation):
            return self.inline(equation.params["jaxpr"], operands)
        results = [Var(variable.aval) for variable in equation.outvars]
        params = {name: self._rewrite(value) for name, value in equation.params.items()}
        plain = equation.replace(invars=operands, outvars=results, params=params)
        if equation.primitive.name == "jit":
            plain = plain.replace(params=without_shardings(plain))
        self.equations.append(plain)
        return results

    def _rewrite(self, program: Any) -> Any:
        """A program in an equation without layouts; any other parameter as it is."""
        if type(program) is tuple:
            return tuple(map(self._rewrite, program))
        if not isinstance(program, Jaxpr | ClosedJaxpr):
            return program
        if id(program) not in self._rewritten:
            jaxpr, constants = open_program(program)
            inner = _Flattener(self._rewritten, opens_calls=False)
            # Arguments and constants stand for themselves.
            itself = ClosedJaxpr(jaxpr, jaxpr.constvars)
            results = walk(itself, jaxpr.invars, inner.write)
            plain: Any = jaxpr.replace(eqns=inner.equations, outvars=results)
            # Most programs say nothing of layouts, and stay the objects that JAX has compiled.
            if [e.params for e in inner.equations] == [e.params for e in jaxpr.eqns]:
                plain = program
            elif isinstance(program, ClosedJaxpr):
                plain = ClosedJaxpr(plain, constants)
            self._rewritten[id(program)] = plain
        return self._rewritten[id(program)]


# Small values


def _variables(equation: JaxprEqn) -> list[Var]:
    return [atom for atom in equation.invars if isinstance(atom, Var)]


def _element_count(variables: Iterable[Any]) -> int:
    """The number of elements of the largest array."""
    return max((math.prod(getattr(v.aval, "shape", ())) for v in variables), default=0)


def _compute_small(equations: Sequence[JaxprEqn], values: dict[Var, Any]) -> list[JaxprEqn]:
    """Computes the small results of small values; returns the other equations."""
    # What is small. Effects keep their order: none happens here after one that does not.
    ready = {variable for variable in values if _element_count([variable]) <= MOST_SMALL_ELEMENTS}
    small: list[JaxprEqn] = []
    others: list[JaxprEqn] = []
    for equation in equations:
        is_late = bool(equation.effects) and any(other.effects for other in others)
        is_small = _element_count(equation.outvars) <= MOST_SMALL_ELEMENTS
        if is_small and not is_late and ready.issuperset(_variables(equation)):
            ready.update(equation.outvars)
            small.append(equation)
        else:
            others.append(equation)

    # Outside of jax.jit each operation runs by itself, compiled once for its shapes.
    inputs = list(dict.fromkeys(v for e in small for v in _variables(e) if v in values))
    computed = [variable for equation in small for variable in equation.outvars]
    run = jaxpr_as_fun(make_program(small, inputs, computed, "initialize"))
    values.update(zip(computed, run(*map(values.__getitem__, inputs)), strict=True))
    return others


# Parts


class _Dependencies:
    """What each equation of a list depends on."""

    def __init__(self, equations: Sequence[JaxprEqn]) -> None:
        producers = {v: i for i, equation in enumerate(equations) for v in equation.outvars}
        self._producers = producers
        self._sources = [[producers[v] for v in _variables(e) if v in producers] for e in equations]
        self._effects = [index for index, equation in enumerate(equations) if equation.effects]

    def needed_for(self, variables: Iterable[Var]) -> list[int]:
        """Which equations these variables and all effects come of, in order."""
        pending = [*self._effects]
        pending += [self._producers[v] for v in variables if v in self._producers]
        needed: set[int] = set()
        while pending:
            index = pending.pop()
            if index not in needed:
                needed.add(index)
                pending += self._sources[index]
        return sorted(needed)


def _type_key(atom: Any) -> Hashable:
    return atom.aval.shape, atom.aval.dtype, is_weak_type(atom.aval)


class _Keys:
    """Makes keys of programs, equal where the programs do the same.

    Equations are compared by what they do, never by their text: functions of equal text that hold
    other arrays, and callbacks, would be taken for one. Objects that cannot be compared enter by
    their ids, which stay valid as long as the program is there.
    """

    def __init__(self) -> None:
        # Programs inside of equations are numbered, so that no key holds the key of another.
        self._numbers: dict[Hashable, int] = {}
        self._inner: dict[int, int] = {}

    def key(self, program: Any) -> Hashable:
        """The key of a program."""
        variables = itertools.count()
        body: list[Hashable] = []

        def step(equation: JaxprEqn, operands: list[Any]) -> list[int]:
            params = tuple(
                (name, self._value_key(value))
                for name, value in sorted(equation.params.items())
                if name not in DERIVATIVE_RULES
            )
            body.append((equation.primitive, equation.ctx, params, tuple(operands)))
            return [next(variables) for _ in equation.outvars]

        arguments = open_program(program)[0].invars
        results = walk(
            program,
            [next(variables) for _ in arguments],
            step,
            constant=lambda value: ("constant", id(value)),
            literal=lambda atom: (_type_key(atom), np.asarray(atom.val).tobytes()),
        )
        return tuple(map(_type_key, arguments)), tuple(body), tuple(results)

    def _value_key(self, value: Any) -> Hashable:
        match value:
            case None | bool() | int() | float() | np.generic():
                return type(value), repr(value)  # 0.0 equals -0.0, and 1 equals True.
            case tuple() | list():
                return tuple(map(self._value_key, value))
            case Jaxpr() | ClosedJaxpr():
                if id(value) not in self._inner:
                    number = self._numbers.setdefault(self.key(value), len(self._numbers))
                    self._inner[id(value)] = number
                return "program", self._inner[id(value)]
        # A function equals only itself.
        return value if isinstance(value, Hashable) else ("object", id(value))


def _make_parts(equations: Sequence[JaxprEqn], outputs: Mapping[int, Var]) -> list[Part]:
    """The parts that compute these outputs, that with the largest output first."""
    # Outputs that share something expensive belong together; they hold the same list. Effects
    # belong to all outputs, so that each happens once, and in order.
    dependencies = _Dependencies(equations)
    groups = {number: [number] for number in outputs} or {-1: []}
    first_readers: dict[int, int] = {}
    for number, variable in outputs.items():
        for index in dependencies.needed_for([variable]):
            if equations[index].primitive.name in _FREE:
                continue
            group = groups[first_readers.setdefault(index, number)]
            if group is not groups[number]:
                group += groups[number]
                groups.update(dict.fromkeys(groups[number], group))

    # A program for each group; if only effects are left, for a group without outputs.
    keys = _Keys()
    parts = []
    for numbers in {id(group): group for group in groups.values()}.values():
        results = [outputs[number] for number in numbers]
        own = [equations[index] for index in dependencies.needed_for(results)]
        computed = {variable for equation in own for variable in equation.outvars}
        inputs = dict.fromkeys(v for e in own for v in _variables(e) if v not in computed)
        program = make_program(own, [*inputs], results, "initialize")
        is_exact = {equation.primitive.name for equation in equations_in(program)} <= EXACT
        parts.append(Part((*numbers,), program, keys.key(program), is_exact))
    return sorted(parts, key=lambda part: -_element_count(part.program.jaxpr.outvars))
