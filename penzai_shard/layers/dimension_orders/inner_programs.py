"""Operations that run programs: rematerialised parts, loops and branches.

A rematerialised part takes arrays in the order that they have, and gives them in the order in which
they come out. In a loop what is carried has the same order before and after each turn, that which
it had before the first. Programs of other operations begin and end in their own order.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax

from penzai_shard.layers.dimension_orders.ordered_arrays import OrderedArray
from penzai_shard.library_apis.jax_api import ClosedJaxpr, Jaxpr, scan_counts
from penzai_shard.traced_programs import (
    called_program,
    evaluate,
    in_place_of,
    is_call_with_options,
    opened,
)

Run = Callable[[Any, Sequence[OrderedArray]], list[OrderedArray]]
"""Runs a program in place."""

_OTHERS = ("cond", "scan", "while")


def run_with_inner_programs(
    equation: Any, operands: list[OrderedArray], run: Run
) -> list[OrderedArray]:
    """Runs an operation that has no rule, the programs in it in place.

    Args:
        equation: The operation.
        operands: Its operands.
        run: Runs a program in place.

    Returns:
        Its results.
    """
    name = equation.primitive.name
    results = None
    if is_call_with_options(equation):
        results = _call(equation, operands, run)
    elif name == "scan":
        results = _scan(equation, operands, run)
    if results is not None:
        return results
    if name in _OTHERS:
        equation = _with_programs_in_place(equation, run)
    whole = [operand.whole() for operand in operands]
    return list(map(OrderedArray.of, evaluate(equation, whole)))


def _call(equation: Any, operands: list[OrderedArray], run: Run) -> list[OrderedArray] | None:
    dims: list[tuple[int, ...]] = []

    def body(*arrays: Any) -> list[Any]:
        held = [
            OrderedArray(array, operand.dims, operand.shape)
            for array, operand in zip(arrays, operands, strict=True)
        ]
        results = run(called_program(equation), held)
        dims[:] = [result.dims for result in results]
        return [result.array for result in results]

    arrays = [operand.array for operand in operands]
    return _evaluated(equation, called_program(equation), body, arrays, arrays, dims)


def _scan(equation: Any, operands: list[OrderedArray], run: Run) -> list[OrderedArray] | None:
    """A loop, in which what is carried keeps the order that it had before."""
    constants, carried = scan_counts(equation.params)
    first_slice = constants + carried
    # All dimensions of what is carried, and of slices: later turns may not be alike along them.
    orders = [
        operand.dims if i < constants else operand.order_with(range(len(operand.shape)))
        for i, operand in enumerate(operands)
    ]
    for i in range(first_slice, len(operands)):
        orders[i] = (0, *(dim for dim in orders[i] if dim != 0))
    inside = [
        orders[i] if i < first_slice else tuple(dim - 1 for dim in orders[i][1:])
        for i in range(len(operands))
    ]
    shapes = [o.shape if i < first_slice else o.shape[1:] for i, o in enumerate(operands)]
    dims: list[tuple[int, ...]] = []

    def body(*arrays: Any) -> list[Any]:
        held = list(map(OrderedArray, arrays, inside, shapes))
        after = run(equation.params["jaxpr"], held)
        stacked = [result.order_with(range(len(result.shape))) for result in after[carried:]]
        dims[:] = [
            *orders[constants:first_slice],
            *((0, *(dim + 1 for dim in order)) for order in stacked),
        ]
        wanted = [*orders[constants:first_slice], *stacked]
        return [result.in_order(order) for result, order in zip(after, wanted, strict=True)]

    arrays = [operand.in_order(order) for operand, order in zip(operands, orders, strict=True)]
    slices = [
        jax.ShapeDtypeStruct(array.shape[1:], array.dtype) if i >= first_slice else array
        for i, array in enumerate(arrays)
    ]
    return _evaluated(equation, equation.params["jaxpr"], body, slices, arrays, dims)


def _evaluated(
    equation: Any,
    program: Any,
    body: Callable[..., list[Any]],
    inside: Sequence[Any],
    arrays: Sequence[Any],
    dims: list[tuple[int, ...]],
) -> list[OrderedArray] | None:
    """The operation with another program in it; None if that cannot take the program's place."""
    changed = in_place_of(program, body, inside)
    if changed is None:
        return None
    (name,) = (name for name, value in equation.params.items() if value is program)
    results = evaluate(equation.replace(params={**equation.params, name: changed}), arrays)
    shapes = [variable.aval.shape for variable in equation.outvars]
    return list(map(OrderedArray, results, dims, shapes))


def _with_programs_in_place(equation: Any, run: Run) -> Any:
    """The operation, the programs in it without moves, but for their beginnings and ends."""

    def in_place(program: Any) -> Any:
        def body(*arrays: Any) -> list[Any]:
            return [result.whole() for result in run(program, list(map(OrderedArray.of, arrays)))]

        types = [variable.aval for variable in opened(program)[0].invars]
        return in_place_of(program, body, types) or program

    changed: dict[str, Any] = {}
    for name, value in equation.params.items():
        if isinstance(value, tuple) and value and all(isinstance(v, ClosedJaxpr) for v in value):
            changed[name] = tuple(map(in_place, value))
        elif isinstance(value, Jaxpr | ClosedJaxpr):
            changed[name] = in_place(value)
    return equation.replace(params={**equation.params, **changed})
