"""How split dimensions pass through operations that take or write elements by their position.

Along a split dimension they must take all elements, or take each by an index of its own.
"""

from collections.abc import Collection

from penzai_shard.layers.shard_map_regions.split_values import (
    Dimension,
    Dimensions,
    MixesElementsError,
    Operation,
    join,
)


def slice_rule(op: Operation) -> list[Dimensions]:
    """The rule of ``slice``."""
    for dimension, dim in enumerate(op.dims()):
        bounds = [
            (
                params["start_indices"][dimension],
                params["limit_indices"][dimension],
                1 if params["strides"] is None else params["strides"][dimension],
            )
            for params in (op.whole, op.part)
        ]
        full = bounds == [(0, shape[dimension], 1) for shape in op.inputs[0]]
        if not full:
            op.not_split(dim, "takes a slice of")
        if dim is None and bounds[0] != bounds[1]:
            raise MixesElementsError("its bounds depend on the length of a split dimension")
    return [op.dims()]


def _check_slice_sizes(
    op: Operation,
    verb: str,
    indexed: Collection[int] = (),
    unchecked: Collection[int] = (),
) -> None:
    """Refuses slices of which a split dimension is not taken whole, or is taken by an index."""
    sizes = zip(op.whole["slice_sizes"], op.part["slice_sizes"], strict=True)
    for dimension, (of_whole, of_part) in enumerate(sizes):
        if dimension in unchecked:
            continue
        if dimension in indexed or not op.spans(0, dimension, of_whole, of_part):
            op.not_along(0, (dimension,), verb)
        if of_whole != of_part and op.dims()[dimension] is None:
            raise MixesElementsError("its sizes depend on the length of a split dimension")


def dynamic_slice_rule(op: Operation) -> list[Dimensions]:
    """The rule of ``dynamic_slice``."""
    _check_slice_sizes(op, "takes a slice of")
    return [op.dims()]


def dynamic_update_slice_rule(op: Operation) -> list[Dimensions]:
    """The rule of ``dynamic_update_slice``."""
    dims = list(op.dims(0))
    for dimension, (into, update) in enumerate(zip(op.dims(0), op.dims(1), strict=True)):
        if not op.spans(0, dimension, *(shape[dimension] for shape in op.inputs[1])):
            op.not_split(into or update, "writes into a part of")
        dims[dimension] = join((into, update))
    return [tuple(dims)]


def gather_rule(op: Operation) -> list[Dimensions]:
    """The rule of ``gather``."""
    numbers = op.whole["dimension_numbers"]
    operand, indices = op.dims(0), op.dims(1)
    op.not_split(indices[-1], "takes the coordinates of indices from")
    batching = dict(
        zip(numbers.operand_batching_dims, numbers.start_indices_batching_dims, strict=True)
    )
    indexed = {*numbers.start_index_map, *numbers.collapsed_slice_dims}
    _check_slice_sizes(op, "takes elements by index from", indexed, unchecked=batching)
    batch = list(indices[:-1])
    for dimension, position in batching.items():
        batch[position] = join((operand[dimension], batch[position]))
    window: list[Dimension] = [
        dim
        for dimension, dim in enumerate(operand)
        if dimension not in batching and dimension not in numbers.collapsed_slice_dims
    ]
    taken = dict(zip(numbers.offset_dims, window, strict=True))
    rest = iter(batch)
    rank = len(batch) + len(window)
    return [tuple(taken[i] if i in taken else next(rest) for i in range(rank))]


def scatter_rule(op: Operation) -> list[Dimensions]:
    """The rule of ``scatter``."""
    numbers = op.whole["dimension_numbers"]
    operand, indices, updates = op.dims(0), op.dims(1), op.dims(2)
    op.not_split(indices[-1], "takes the coordinates of indices from")
    batching = dict(
        zip(numbers.operand_batching_dims, numbers.scatter_indices_batching_dims, strict=True)
    )
    scattered = [i for i in range(len(updates)) if i not in numbers.update_window_dims]
    for position, (of_indices, update) in enumerate(zip(indices[:-1], scattered, strict=True)):
        if position not in batching.values():
            op.not_split(of_indices or updates[update], "writes to one place from many of")
    windows = iter(numbers.update_window_dims)
    dims = list(operand)
    for dimension, dim in enumerate(operand):
        if dimension in batching:
            position = batching[dimension]
            dims[dimension] = join((dim, indices[position], updates[scattered[position]]))
        elif dimension in numbers.inserted_window_dims:
            op.not_split(dim, "writes by index into")
        else:
            update = next(windows)
            sizes = [shape[update] for shape in op.inputs[2]]
            by_index = dimension in numbers.scatter_dims_to_operand_dims
            if by_index or not op.spans(0, dimension, *sizes):
                op.not_split(dim or updates[update], "writes by index into")
            dims[dimension] = join((dim, updates[update]))
    return [tuple(dims)]
