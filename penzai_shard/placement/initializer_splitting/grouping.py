"""Grouping the subprograms of a traced initialiser that one compiled program can serve."""

import dataclasses
import itertools
from collections.abc import Collection, Hashable, Mapping, Sequence
from typing import Any

import numpy as np
from jax.sharding import Sharding

from penzai_shard.library_apis.jax_api import (
    ClosedJaxpr,
    Jaxpr,
    JaxprEqn,
    Literal,
    Var,
    is_weakly_typed,
)
from penzai_shard.placement.initializer_splitting import equation_traits
from penzai_shard.placement.initializer_splitting.subprograms import (
    Result,
    Subprogram,
    split_by_output,
)
from penzai_shard.traced_programs import equations as all_equations
from penzai_shard.traced_programs import program_of

# What custom derivative rules hold is made anew by each trace and says nothing about the value.
_IRRELEVANT_PARAMS = {
    "custom_jvp_call": frozenset({"jvp_jaxpr_fun", "jvp_jaxpr_thunk"}),
    "custom_vjp_call": frozenset({"fwd_jaxpr_thunk", "fwd", "bwd", "out_trees"}),
    "jit": frozenset({"name"}),
}


_GroupKey = tuple[Hashable, tuple[Sharding | None, ...], bool]


@dataclasses.dataclass(frozen=True, eq=False)
class Program:
    """Something to compile once and to call for each subprogram that it serves.

    Attributes:
        traced: What it computes, a function of arrays and then of integers.
        shardings: The layout of each result; None where JAX may choose.
        on_one_device: Whether it must run on one device, and the results be spread afterwards,
            because partial sums over several devices would make values depend on the layout.
    """

    traced: ClosedJaxpr
    shardings: tuple[Sharding | None, ...]
    on_one_device: bool


@dataclasses.dataclass(frozen=True)
class Call:
    """One call of a program.

    Attributes:
        program: The program.
        arguments: The values that it reads.
        integers: Its further arguments, for instance the offset that derives a parameter's key.
        results: What it gives: values that other calls read, or positions of outputs.
    """

    program: Program
    arguments: tuple[Var, ...]
    integers: tuple[Any, ...]
    results: tuple[Result, ...]


@dataclasses.dataclass(frozen=True)
class SplitInitializer:
    """A traced initialiser as programs to be compiled and called one by one.

    Attributes:
        constants: Arrays that the initialiser closed over.
        calls: The calls, in an order in which each value is computed before it is read.
        available: For positions of outputs that no call gives: the constant, or the result of a
            call that others read too.
        shardings: The layouts of the outputs to compute, by position.
    """

    constants: Mapping[Var, Any]
    calls: Sequence[Call]
    available: Mapping[int, Var]
    shardings: Mapping[int, Sharding | None]


def split_initializer(
    flat: ClosedJaxpr, shardings: Mapping[int, Sharding | None]
) -> SplitInitializer:
    """Splits an initialiser into programs, each of which serves all outputs that are alike.

    Args:
        flat: What ``flat_program`` gives for an initialiser.
        shardings: The layout of each output to compute, by position; None where JAX may choose.

    Returns:
        The programs and how to call them; see ``run_split``.

    >>> import jax
    >>> from penzai_shard.placement.initializer_splitting.flat_programs import flat_program
    >>> def initializer():
    ...     keys = jax.random.split(jax.random.key(0), 3)
    ...     return [jax.random.normal(key, (4, 4)) for key in keys]
    >>> flat = flat_program(jax.make_jaxpr(initializer)())
    >>> split = split_initializer(flat, {0: None, 1: None, 2: None})
    >>> len(split.calls), len({call.program for call in split.calls})
    (3, 1)
    """
    subprograms, available = split_by_output(flat, shardings.keys())
    keys = _StructuralKeys()
    groups: dict[_GroupKey, list[tuple[Subprogram, list[Literal]]]] = {}
    for subprogram in subprograms:
        integers: list[Literal] = []
        structure = keys.of_program(subprogram.traced.jaxpr, integers)
        layouts = tuple(shardings[r] if isinstance(r, int) else None for r in subprogram.results)
        key = structure, layouts, subprogram.is_shared
        groups.setdefault(key, []).append((subprogram, integers))
    calls: dict[tuple[Result, ...], Call] = {}
    for (_, layouts, _), members in groups.items():
        of_members = zip(*(integers for _, integers in members), strict=True)
        differing = [i for i, same in enumerate(of_members) if len({int(x.val) for x in same}) > 1]
        first, _ = members[0]
        program = Program(
            traced=_with_integer_arguments(first.traced, differing),
            shardings=layouts,
            on_one_device=_runs_on_one_device(first),
        )
        for subprogram, integers in members:
            calls[subprogram.results] = Call(
                program=program,
                arguments=tuple(subprogram.traced.jaxpr.invars),
                integers=tuple(_argument(integers[index]) for index in differing),
                results=subprogram.results,
            )
    return SplitInitializer(
        constants=dict(zip(flat.jaxpr.constvars, flat.consts, strict=True)),
        calls=[calls[subprogram.results] for subprogram in subprograms],
        available=available,
        shardings=shardings,
    )


def _with_integer_arguments(program: ClosedJaxpr, chosen: Collection[int]) -> ClosedJaxpr:
    """The program with some of the integers in its equations, in order, as further arguments."""
    order = itertools.count()
    arguments: list[Var] = []

    def operand(atom: Any) -> Any:
        if isinstance(atom, Var) or not _is_integer(atom) or next(order) not in chosen:
            return atom
        arguments.append(Var(atom.aval))
        return arguments[-1]

    equations = [one.replace(invars=list(map(operand, one.invars))) for one in program.eqns]
    jaxpr = program.jaxpr
    name = jaxpr.debug_info.func_name
    return program_of(equations, [*jaxpr.invars, *arguments], jaxpr.outvars, name)


def _runs_on_one_device(subprogram: Subprogram) -> bool:
    program = subprogram.traced
    nested = list(all_equations(program))
    if any(map(equation_traits.runs_on_its_own_mesh, nested)):
        return False
    return (
        subprogram.is_shared
        or bool(program.effects)
        # JAX does not divide an empty result over devices; placing one afterwards does.
        or any(0 in getattr(aval, "shape", ()) for aval in program.out_avals)
        or not all(map(equation_traits.keeps_values_in_any_layout, nested))
    )


def _is_integer(literal: Literal) -> bool:
    aval: Any = literal.aval
    dtype = getattr(aval, "dtype", None)
    return isinstance(dtype, np.dtype) and dtype.kind in "iu" and aval.shape == ()


def _argument(literal: Literal) -> Any:
    """An integer literal as an argument of exactly its type; Python integers are weakly typed."""
    aval: Any = literal.aval
    return int(literal.val) if is_weakly_typed(aval) else np.asarray(literal.val, aval.dtype)[()]


def _type_key(aval: Any) -> Hashable:
    return (
        getattr(aval, "shape", None),
        getattr(aval, "dtype", type(aval)),
        is_weakly_typed(aval),
    )


def _array_key(value: Any) -> Hashable:
    array = np.asarray(value)
    return array.shape, array.dtype.str, array.tobytes()


class _StructuralKeys:
    """Keys of programs that are equal where the programs do the same.

    Variables are numbered by their first occurrence. Nested programs are numbered by their keys, so
    that comparing two keys never reads a nested program again. Numbers of programs seen before are
    found by identity: JAX gives the same nested program to every call of one jitted function with
    arguments of one type.
    """

    def __init__(self) -> None:
        self._number_of_key: dict[Hashable, int] = {}
        self._number_of_jaxpr: dict[int, int] = {}
        self._compared: list[Any] = []

    def of_program(self, jaxpr: Jaxpr, integers: list[Literal] | None = None) -> Hashable:
        """The key of a program.

        Args:
            jaxpr: The program.
            integers: Filled with the single integers that are written into its equations, in order,
                not those of nested programs. The key says nothing of their values then.
        """
        numbers: dict[Var, int] = {}

        def bind(variables: Sequence[Var]) -> Hashable:
            numbers.update(zip(variables, itertools.count(len(numbers))))
            return tuple(_type_key(variable.aval) for variable in variables)

        def read(atom: Any) -> Hashable:
            if isinstance(atom, Var):
                return numbers[atom]
            if integers is not None and _is_integer(atom):
                integers.append(atom)
                return _type_key(atom.aval)
            return _type_key(atom.aval), _array_key(atom.val)

        head = bind(jaxpr.constvars), bind(jaxpr.invars)
        body = []
        for equation in jaxpr.eqns:
            operands = tuple(map(read, equation.invars))
            body.append((equation.primitive, self._of_params(equation), operands))
            bind(equation.outvars)
        return head, tuple(body), tuple(map(read, jaxpr.outvars))

    def _of_params(self, equation: JaxprEqn) -> Hashable:
        context = equation.ctx
        irrelevant = _IRRELEVANT_PARAMS.get(equation.primitive.name, ())
        return (
            tuple(
                (name, self._of(value))
                for name, value in sorted(equation.params.items())
                if name not in irrelevant
            ),
            getattr(context, "compute_type", None),
            getattr(context, "threefry_partitionable", None),
            self._of(getattr(context, "xla_metadata", None)),
        )

    def _of(self, value: Any) -> Hashable:
        match value:
            case bool() | int() | float() | str() | bytes() | None:
                return type(value), repr(value)  # Not equal where 0.0 and -0.0, 1 and True are.
            case tuple() | list():
                return tuple(map(self._of, value))
            case dict():
                return tuple(sorted((repr(key), self._of(item)) for key, item in value.items()))
            case ClosedJaxpr():
                return self._of_nested(value.jaxpr), tuple(map(self._by_identity, value.consts))
            case Jaxpr():
                return self._of_nested(value)
            case np.ndarray() | np.generic():
                return _array_key(value)
        try:
            hash(value)
        except TypeError:
            return self._by_identity(value)
        return value

    def _by_identity(self, value: Any) -> Hashable:
        self._compared.append(value)  # So that no later object gets its id.
        return "object", id(value)

    def _of_nested(self, jaxpr: Jaxpr) -> Hashable:
        if id(jaxpr) not in self._number_of_jaxpr:
            self._by_identity(jaxpr)
            key = self.of_program(jaxpr)
            number = self._number_of_key.setdefault(key, len(self._number_of_key))
            self._number_of_jaxpr[id(jaxpr)] = number
        return "jaxpr", self._number_of_jaxpr[id(jaxpr)]
