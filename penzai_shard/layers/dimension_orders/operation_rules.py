"""How single operations run on arrays whose dimensions stand in another order.

A rule takes an equation and its operands, and says on which arrays the same operation, with other
parameters, gives the same results. What has no rule runs on arrays in the order of the program.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from penzai_shard.layers.dimension_orders.ordered_arrays import OrderedArray, common_order
from penzai_shard.traced_programs import ELEMENTWISE, asks_for_sharding


@dataclasses.dataclass(frozen=True)
class Ready:
    """An operation that is ready to run.

    Attributes:
        arrays: Its operands.
        dims: For each result, which dimensions of the program's result it has, in its order.
        parameters: Parameters that differ from those of the equation.
    """

    arrays: Sequence[Any]
    dims: Sequence[tuple[int, ...]]
    parameters: dict[str, Any] = dataclasses.field(default_factory=dict)


Rule = Callable[[Any, list[OrderedArray]], "Ready | OrderedArray | None"]
"""Gives what is to be run, or the result itself where only the counting of dimensions changes, or
None for an equation that it does not know how to run."""


def _elementwise(equation: Any, operands: list[OrderedArray]) -> Ready | None:
    shape = equation.outvars[0].aval.shape
    if asks_for_sharding(equation) or not all(_fits(o.shape, shape) for o in operands):
        return None
    # A dimension of length one stands for the same element at every index.
    values = [o.renamed(range(len(shape)), shape) if o.shape else o for o in operands]
    order = common_order(values)
    arrays = [v.in_order(order) if v.shape == shape else v.array for v in values]
    return Ready(arrays, [order])


def _fits(operand: Sequence[int], result: Sequence[int]) -> bool:
    """Whether an operand of this shape is a scalar, or is as long as the result or one."""
    if not operand:
        return True
    return len(operand) == len(result) and all(
        length in (1, whole) for length, whole in zip(operand, result, strict=True)
    )


def _copy(equation: Any, operands: list[OrderedArray]) -> OrderedArray:
    return operands[0]


def _transpose(equation: Any, operands: list[OrderedArray]) -> OrderedArray:
    permutation = equation.params["permutation"]
    new = [permutation.index(dim) for dim in range(len(permutation))]
    return operands[0].renamed(new, equation.outvars[0].aval.shape)


def _broadcast(equation: Any, operands: list[OrderedArray]) -> OrderedArray | None:
    if asks_for_sharding(equation) or len(operands) > 1:
        return None
    return operands[0].renamed(
        equation.params["broadcast_dimensions"], equation.outvars[0].aval.shape
    )


def _of_length_one_removed(shape: Sequence[int], removed: Sequence[int]) -> list[int | None]:
    kept = iter(range(len(shape)))
    return [None if dim in removed else next(kept) for dim in range(len(shape))]


def _squeeze(equation: Any, operands: list[OrderedArray]) -> OrderedArray:
    (operand,) = operands
    new = _of_length_one_removed(operand.shape, equation.params["dimensions"])
    return operand.renamed(new, equation.outvars[0].aval.shape)


def _reshape(equation: Any, operands: list[OrderedArray]) -> OrderedArray | None:
    """Dimensions of length one come and go; any other change of shape needs the whole value."""
    before, after = operands[0].shape, equation.outvars[0].aval.shape
    places = [dim for dim, length in enumerate(after) if length != 1]
    if asks_for_sharding(equation) or equation.params.get("dimensions") is not None:
        return None
    if [n for n in before if n != 1] != [n for n in after if n != 1] or 0 in before:
        return None
    remaining = iter(places)
    return operands[0].renamed([None if n == 1 else next(remaining) for n in before], after)


def _reduction(equation: Any, operands: list[OrderedArray]) -> Ready | None:
    axes = equation.params["axes"]
    if asks_for_sharding(equation) or len(operands) > 1:
        return None
    (operand,) = operands
    order = operand.order_with(axes)
    left = _of_length_one_removed(operand.shape, axes)
    places = tuple(sorted(order.index(axis) for axis in axes))
    dims = tuple(dim for old in order if (dim := left[old]) is not None)
    return Ready([operand.in_order(order)], [dims], {"axes": places})


def _along(parameter: str) -> Rule:
    """A rule for operations along one dimension, or several, that keep the number of dimensions."""

    def rule(equation: Any, operands: list[OrderedArray]) -> Ready | None:
        along = equation.params[parameter]
        several = isinstance(along, tuple)
        if asks_for_sharding(equation) or any(not operand.shape for operand in operands):
            return None
        order = common_order(operands, along if several else (along,))
        places = tuple(map(order.index, along)) if several else order.index(along)
        arrays = [operand.in_order(order) for operand in operands]
        return Ready(arrays, [order] * len(equation.outvars), {parameter: places})

    return rule


def _slice(equation: Any, operands: list[OrderedArray]) -> Ready:
    (operand,) = operands
    parameters = {
        name: None if value is None else tuple(value[dim] for dim in operand.dims)
        for name, value in equation.params.items()
        if name in ("start_indices", "limit_indices", "strides")
    }
    return Ready([operand.array], [operand.dims], parameters)


def _pad(equation: Any, operands: list[OrderedArray]) -> Ready:
    operand, filling = operands
    order = operand.order_with(range(len(operand.shape)))
    padding = tuple(equation.params["padding_config"][dim] for dim in order)
    return Ready([operand.in_order(order), filling.whole()], [order], {"padding_config": padding})


def _sharding_constraint(equation: Any, operands: list[OrderedArray]) -> Ready | None:
    (operand,) = operands
    sharding = equation.params["sharding"]
    if not isinstance(sharding, NamedSharding):
        return None
    if equation.params["unconstrained_dims"] or equation.params.get("layout") is not None:
        return None
    order = operand.order_with(range(len(operand.shape)))
    entries = (*sharding.spec, *(None for _ in range(len(order) - len(sharding.spec))))
    spec = PartitionSpec(*(entries[dim] for dim in order))
    moved = NamedSharding(sharding.mesh, spec, memory_kind=sharding.memory_kind)
    return Ready([operand.in_order(order)], [order], {"sharding": moved})


def dot_general(
    equation: Any, operands: list[OrderedArray], moved: Sequence[int] | None = None
) -> Ready | OrderedArray | None:
    """Runs a matrix product.

    Args:
        equation: The equation.
        operands: The operands.
        moved: The order that the program moves the result's dimensions to, if it does so.
    """
    if asks_for_sharding(equation):
        return None
    contracted, batch = equation.params["dimension_numbers"]
    used = [(*contracted[side], *batch[side]) for side in (0, 1)]
    free = [
        [dim for dim in range(len(operand.shape)) if dim not in used[side]]
        for side, operand in enumerate(operands)
    ]
    # Which dimension of the result each dimension of an operand becomes.
    starts = len(batch[0]), len(batch[0]) + len(free[0])
    became = [
        dict(zip(batch[side], range(len(batch[0])), strict=True))
        | {dim: starts[side] + i for i, dim in enumerate(free[side])}
        for side in (0, 1)
    ]
    if not contracted[0] and not (free[0] and free[1]):
        return _product(equation, operands, became)
    orders = [operand.order_with(used[side]) for side, operand in enumerate(operands)]
    frees = [[became[side][dim] for dim in orders[side] if dim in free[side]] for side in (0, 1)]
    wanted = range(len(equation.outvars[0].aval.shape)) if moved is None else moved
    # The result has the dimensions of the first operand before those of the second.
    first = int(_inversions(frees[1] + frees[0], wanted) < _inversions(frees[0] + frees[1], wanted))
    sides = (first, 1 - first)
    places, pairs = [], []
    for numbers in (contracted, batch):
        pairs = sorted(zip(*numbers, strict=True), key=lambda p: orders[first].index(p[first]))
        places.append(tuple(tuple(orders[s].index(pair[s]) for pair in pairs) for s in sides))
    parameters: dict[str, Any] = {"dimension_numbers": tuple(places)}
    if first and isinstance(equation.params["precision"], tuple):
        parameters["precision"] = equation.params["precision"][::-1]
    dims = [became[0][pair[0]] for pair in pairs] + frees[sides[0]] + frees[sides[1]]
    arrays = [operands[side].in_order(orders[side]) for side in sides]
    return Ready(arrays, [tuple(dims)], parameters)


def _inversions(order: Sequence[int], wanted: Sequence[int]) -> int:
    """How many pairs of dimensions are the other way round than wanted."""
    places = [wanted.index(dim) for dim in order]
    return sum(a > b for i, a in enumerate(places) for b in places[i + 1 :])


def _product(
    equation: Any, operands: list[OrderedArray], became: list[dict[int, int]]
) -> OrderedArray:
    """A matrix product that sums over nothing: each element times its factor."""
    result = equation.outvars[0].aval
    values = [
        operand.renamed([became[side][dim] for dim in range(len(operand.shape))], result.shape)
        for side, operand in enumerate(operands)
    ]
    order = common_order(values)
    # A result may be narrower than its factors, which are not rounded then.
    wide = jnp.result_type(result.dtype, *(value.array.dtype for value in values))
    left, right = (jax.lax.convert_element_type(value.in_order(order), wide) for value in values)
    product = jax.lax.convert_element_type(jax.lax.mul(left, right), result.dtype)
    return OrderedArray(product, order, result.shape)


def _gather(equation: Any, operands: list[OrderedArray]) -> Ready:
    operand, indices = operands
    numbers = equation.params["dimension_numbers"]
    order = operand.order_with(range(len(operand.shape)))
    vector = len(indices.shape) - 1
    index_order = (*(dim for dim in indices.order_with(range(vector)) if dim != vector), vector)
    pairs = sorted(
        (order.index(of), index_order.index(at))
        for of, at in zip(
            numbers.operand_batching_dims, numbers.start_indices_batching_dims, strict=True
        )
    )
    taken = {*numbers.collapsed_slice_dims, *numbers.operand_batching_dims}
    kept = [dim for dim in range(len(order)) if dim not in taken]
    # Dimensions of the result: those of the indices, and those that are kept of the operand.
    of_kept = dict(zip(kept, numbers.offset_dims, strict=True))
    of_indices = [dim for dim in range(vector + len(kept)) if dim not in numbers.offset_dims]
    dims = [of_indices[dim] for dim in index_order[:-1]]
    dims += [of_kept[dim] for dim in order if dim in of_kept]
    moved = numbers._replace(
        offset_dims=tuple(range(vector, vector + len(kept))),
        collapsed_slice_dims=tuple(sorted(map(order.index, numbers.collapsed_slice_dims))),
        start_index_map=tuple(map(order.index, numbers.start_index_map)),
        operand_batching_dims=tuple(of for of, _ in pairs),
        start_indices_batching_dims=tuple(at for _, at in pairs),
    )
    parameters: dict[str, Any] = {
        "dimension_numbers": moved,
        "slice_sizes": tuple(equation.params["slice_sizes"][dim] for dim in order),
    }
    if index_order != tuple(range(vector + 1)) or order != tuple(range(len(order))):
        parameters["indices_are_sorted"] = False
    arrays = [operand.in_order(order), indices.in_order(index_order)]
    return Ready(arrays, [tuple(dims)], parameters)


_REDUCTIONS = "sum prod max min and or xor"
RULES: dict[str, Rule] = {
    **dict.fromkeys((*ELEMENTWISE, "name"), _elementwise),
    **dict.fromkeys((f"reduce_{kind}" for kind in _REDUCTIONS.split()), _reduction),
    **dict.fromkeys(("argmax", "argmin"), _reduction),
    **dict.fromkeys(("cumsum", "cumprod", "cummax", "cummin", "cumlogsumexp"), _along("axis")),
    "broadcast_in_dim": _broadcast,
    "concatenate": _along("dimension"),
    "copy": _copy,
    "dot_general": dot_general,
    "gather": _gather,
    "pad": _pad,
    "reshape": _reshape,
    "rev": _along("dimensions"),
    "sharding_constraint": _sharding_constraint,
    "slice": _slice,
    "sort": _along("dimension"),
    "split": _along("axis"),
    "squeeze": _squeeze,
    "transpose": _transpose,
}
"""The rule of each operation that has one."""
