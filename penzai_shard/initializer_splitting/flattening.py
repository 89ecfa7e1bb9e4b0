"""Writing a jaxpr out as a flat list of steps over numbered values."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax.extend import core as jex_core

from penzai_shard.initializer_splitting import equation_traits

Atom = int | jex_core.Literal
"""What a step reads: the number of a value, or a literal."""

_SMALL_SLICED_OPERAND = 2**16


@dataclasses.dataclass(frozen=True)
class Step:
    """One equation, between numbered values.

    Attributes:
        equation: The equation; its own variables mean nothing here.
        inputs: What it reads.
        outputs: Numbers of the values that it gives.
    """

    equation: jex_core.JaxprEqn
    inputs: tuple[Atom, ...]
    outputs: tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class FlatTrace:
    """A traced function as a flat list of steps.

    Attributes:
        steps: The steps, in an order in which they can be run.
        types: Abstract value of each numbered value.
        constants: The arrays that the function closed over, by number.
        outputs: What the function returns.
    """

    steps: tuple[Step, ...]
    types: tuple[Any, ...]
    constants: dict[int, Any]
    outputs: tuple[Atom, ...]


def flatten_trace(traced: jex_core.ClosedJaxpr) -> FlatTrace:
    """Writes a traced function without arguments out as a flat list of steps.

    Nested ``jax.jit`` calls are opened where that helps to tell outputs apart: those with several
    results, and those that derive random keys. Others stay one step. Slices at a fixed place are
    written as slices at a given place, so that taking the first and the second of many keys is the
    same operation with another integer.

    Args:
        traced: What ``jax.make_jaxpr`` gives for a function without arguments.

    Returns:
        The same function as a flat list of steps.

    >>> trace = flatten_trace(jax.make_jaxpr(lambda: jax.jit(lambda x: (x + 1, x * 2))(3))())
    >>> [step.equation.primitive.name for step in trace.steps]
    ['add', 'mul']
    """
    flattener = _Flattener()
    outputs = flattener.inline(traced, ())
    return FlatTrace(
        steps=tuple(flattener.steps),
        types=tuple(flattener.types),
        constants=flattener.constants,
        outputs=tuple(outputs),
    )


class _Flattener:
    def __init__(self) -> None:
        self.steps: list[Step] = []
        self.types: list[Any] = []
        self.constants: dict[int, Any] = {}
        self._number_of_constant: dict[int, int] = {}

    def _number(self, aval: Any) -> int:
        self.types.append(aval)
        return len(self.types) - 1

    def _constant(self, value: Any, aval: Any) -> int:
        number = self._number_of_constant.get(id(value))
        if number is None:
            number = self._number(aval)
            self._number_of_constant[id(value)] = number
            self.constants[number] = value
        return number

    def inline(self, closed: jex_core.ClosedJaxpr, arguments: Sequence[Atom]) -> list[Atom]:
        jaxpr = closed.jaxpr
        known: dict[Any, Atom] = dict(zip(jaxpr.invars, arguments, strict=True))
        for var, value in zip(jaxpr.constvars, closed.consts, strict=True):
            known[var] = self._constant(value, var.aval)

        def read(atom: Any) -> Atom:
            return atom if isinstance(atom, jex_core.Literal) else known[atom]

        for equation in jaxpr.eqns:
            inputs = tuple(map(read, equation.invars))
            outputs = self._add(equation, inputs)
            known.update(zip(equation.outvars, outputs, strict=True))
        return list(map(read, jaxpr.outvars))

    def _add(self, equation: jex_core.JaxprEqn, inputs: tuple[Atom, ...]) -> Sequence[Atom]:
        if _should_open(equation):
            return self.inline(equation.params["jaxpr"], inputs)
        equation, inputs = _with_given_start(equation, inputs)
        outputs = tuple(self._number(var.aval) for var in equation.outvars)
        self.steps.append(Step(equation, inputs, outputs))
        return outputs


def _should_open(equation: jex_core.JaxprEqn) -> bool:
    if not equation_traits.is_jit(equation.primitive):
        return False
    params = equation.params
    placed = [*params.get("in_shardings", ()), *params.get("out_shardings", ())]
    if any(type(sharding).__name__ != "UnspecifiedValue" for sharding in placed):
        return False
    return len(equation.outvars) > 1 or equation_traits.derives_keys(params["jaxpr"].jaxpr)


def _with_given_start(
    equation: jex_core.JaxprEqn, inputs: tuple[Atom, ...]
) -> tuple[jex_core.JaxprEqn, tuple[Atom, ...]]:
    """A short slice at a fixed place as a slice whose place is an operand."""
    if equation.primitive.name != "slice":
        return equation, inputs
    operand: Any = equation.invars[0].aval
    result: Any = equation.outvars[0].aval
    params = equation.params
    if (
        any(stride != 1 for stride in params["strides"] or ())
        or not operand.shape
        or equation_traits.element_count([operand]) > _SMALL_SLICED_OPERAND
    ):
        return equation, inputs
    starts = [
        jex_core.Literal(np.int32(start), jax.typeof(np.int32(0)))
        for start in params["start_indices"]
    ]
    dynamic = equation.replace(
        primitive=jex_core.primitives.dynamic_slice_p,
        params={"slice_sizes": tuple(result.shape)},
        invars=[equation.invars[0], *starts],
    )
    return dynamic, (*inputs, *starts)


def build_jaxpr(
    steps: Sequence[Step],
    inputs: Sequence[int],
    outputs: Sequence[Atom],
    types: Callable[[int], Any],
    given: dict[tuple[int, int], int],
) -> jex_core.ClosedJaxpr:
    """Makes a jaxpr of some steps.

    Args:
        steps: The steps, in order.
        inputs: Numbers of the values that become arguments.
        outputs: What the jaxpr returns.
        types: Gives the abstract value of a numbered value.
        given: Which literals become further arguments, by step and operand, and which argument
            (counted from the first after ``inputs``).

    Returns:
        The jaxpr; its arguments are ``inputs`` and then the given literals.
    """
    new_var = jex_core.gensym()
    var_of = {number: new_var(types(number)) for number in inputs}
    literal_vars: dict[int, Any] = {}
    equations = []
    for step_index, step in enumerate(steps):
        invars: list[Any] = []
        for operand_index, atom in enumerate(step.inputs):
            argument = given.get((step_index, operand_index))
            if isinstance(atom, jex_core.Literal):
                if argument is None:
                    invars.append(atom)
                    continue
                if argument not in literal_vars:
                    literal_vars[argument] = new_var(atom.aval)
                invars.append(literal_vars[argument])
            else:
                invars.append(var_of[atom])
        outvars = []
        for number in step.outputs:
            var_of[number] = new_var(types(number))
            outvars.append(var_of[number])
        equations.append(step.equation.replace(invars=invars, outvars=outvars))
    invars = [
        *(var_of[number] for number in inputs),
        *(literal_vars[argument] for argument in sorted(literal_vars)),
    ]
    jaxpr = jex_core.Jaxpr(
        constvars=[],
        invars=invars,
        outvars=[atom if isinstance(atom, jex_core.Literal) else var_of[atom] for atom in outputs],
        eqns=equations,
        effects=frozenset().union(*(step.equation.effects for step in steps)),
        debug_info=jex_core.DebugInfo(
            traced_for="jit",
            func_src_info="initialize",
            arg_names=("",) * len(invars),
            result_paths=("",) * len(outputs),
        ),
    )
    return jex_core.ClosedJaxpr(jaxpr, [])
