"""How split dimensions pass through operations that take or write elements by their position.

Along a split dimension they must take all elements, or take each by an index of its own.
"""

from penzai_shard.layers.split_dimensions import (
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
        if dim is not None and not full:
            op.not_split(dim, "takes a slice of")
        if dim is None and bounds[0] != bounds[1]:
            raise MixesElementsError("its bounds depend on the length of a split dimension")
    return [op.dims()]


def dynamic_slice_rule(op: Operation) -> list[Dimensions]:
    """The rule of ``dynamic_slice``."""
    sizes = zip(op.whole["slice_sizes"], op.part["slice_sizes"], strict=True)
    for dimension, (of_whole, of_part) in enumerate(sizes):
        if not op.spans(0, dimension, of_whole, of_part):
            op.not_along(0, (dimension,), "takes a slice of")
        if of_whole != of_part and op.dims()[dimension] is None:
            raise MixesElementsError("its sizes depend on the length of a split dimension")
    return [op.dims()]


def dynamic_update_slice_rule(op: Operation) -> list[Dimensions]:
    """The rule of ``dynamic_update_slice``."""
    dims = list(op.dims(0))
    for dimension, (into, update) in enumerate(zip(op.dims(0), op.dims(1), strict=True)):
        if into is None and update is None:
            continue
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
    batch = list(indices[:-1])
    window: list[Dimension] = []
    sizes = zip(op.whole["slice_sizes"], op.part["slice_sizes"], strict=True)
    for dimension, (of_whole, of_part) in enumerate(sizes):
        if dimension in batching:
            batch[batching[dimension]] = join((operand[dimension], batch[batching[dimension]]))
            continue
        if dimension in numbers.start_index_map or not op.spans(0, dimension, of_whole, of_part):
            op.not_along(0, (dimension,), "takes elements by index from")
        if of_whole != of_part and operand[dimension] is None:
            raise MixesElementsError("its sizes depend on the length of a split dimension")
        if dimension not in numbers.collapsed_slice_dims:
            window.append(operand[dimension])
        else:
            op.not_along(0, (dimension,), "takes elements by index from")
    rank = len(batch) + len(window)
    taken = dict(zip(numbers.offset_dims, window, strict=True))
    rest = iter(batch)
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
    for position, (of_indices, of_updates) in enumerate(
        zip(indices[:-1], (updates[i] for i in scattered), strict=True)
    ):
        if position not in batching.values():
            op.not_split(of_indices or of_updates, "writes to one place from many of")
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
            if not (dim is None and updates[update] is None):
                sizes = [shape[update] for shape in op.inputs[2]]
                indexed = dimension in numbers.scatter_dims_to_operand_dims
                if indexed or not op.spans(0, dimension, *sizes):
                    op.not_split(dim or updates[update], "writes by index into")
                dims[dimension] = join((dim, updates[update]))
    return [tuple(dims)]
