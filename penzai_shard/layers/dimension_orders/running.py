"""Running a traced program without moving dimensions."""

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import jax

from penzai_shard.layers.dimension_orders.inner_programs import run_with_inner_programs
from penzai_shard.layers.dimension_orders.operation_rules import (
    RULES,
    Ready,
    dot_general,
)
from penzai_shard.layers.dimension_orders.ordered_arrays import OrderedArray
from penzai_shard.library_apis.jax_api import Literal, scope_path
from penzai_shard.traced_programs import (
    called_program,
    evaluate,
    is_plain_call,
    opened,
    walk,
    with_parameters,
)


def run_in_place(program: Any, arguments: Sequence[OrderedArray]) -> list[OrderedArray]:
    """Runs a program; dimensions stay where they are unless an operation needs them elsewhere.

    Args:
        program: The program, closed or not.
        arguments: Its arguments.

    Returns:
        Its results, in whatever order they came out.

    >>> program = jax.make_jaxpr(lambda x: jax.numpy.sum(x.T, 0))(jax.numpy.ones((2, 3)))
    >>> (result,) = run_in_place(program, [OrderedArray.of(jax.numpy.ones((2, 3)))])
    >>> result.whole()
    Array([3., 3.], dtype=float32)
    """
    moved = _permutations_of_results(program)
    return walk(
        program,
        arguments,
        lambda equation, operands: _run_equation(equation, operands, moved),
        constant=lambda value, _: OrderedArray.of(value),
        literal=_literal,
    )


def _literal(literal: Literal) -> OrderedArray:
    # As it is: a number in a program may be weakly typed.
    return OrderedArray(literal.val, (), ())


def _permutations_of_results(program: Any) -> dict[Any, tuple[int, ...]]:
    """For each variable that the program brings into another order, that order."""
    return {
        equation.invars[0]: equation.params["permutation"]
        for equation in opened(program)[0].eqns
        if equation.primitive.name == "transpose" and not isinstance(equation.invars[0], Literal)
    }


def _run_equation(
    equation: Any, operands: list[OrderedArray], moved: dict[Any, tuple[int, ...]]
) -> list[OrderedArray]:
    with _scope_of(equation):
        if is_plain_call(equation):
            return run_in_place(called_program(equation), operands)
        ready = _made_ready(equation, operands, moved)
    if isinstance(ready, OrderedArray):
        return [ready]
    if ready is None:
        return run_with_inner_programs(equation, operands, run_in_place)
    results = evaluate(with_parameters(equation, ready.parameters), ready.arrays)
    return [
        OrderedArray(array, dims, variable.aval.shape)
        for array, dims, variable in zip(results, ready.dims, equation.outvars, strict=True)
    ]


def _scope_of(equation: Any) -> AbstractContextManager[None]:
    """The scope of an equation, for what is done on its behalf."""
    path = scope_path(equation)
    return jax.named_scope(path) if path else nullcontext()


def _made_ready(
    equation: Any, operands: list[OrderedArray], moved: dict[Any, tuple[int, ...]]
) -> Ready | OrderedArray | None:
    rule = RULES.get(equation.primitive.name)
    if rule is None:
        return None
    if rule is dot_general:
        return dot_general(equation, operands, moved.get(equation.outvars[0]))
    return rule(equation, operands)
