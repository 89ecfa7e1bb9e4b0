"""How split dimensions pass through each primitive operation that is known to be harmless.

A rule says what the dimensions of the results are, or raises ``MixesElementsError``. An operation
without a rule is refused. The claim that every rule keeps: what a device holds of a value is what
stands at the device's position in the value that the whole program computes.
"""

import dataclasses
import math
from collections.abc import Callable, Sequence

from penzai_shard.layers.shard_map_regions import indexing_rules as indexing
from penzai_shard.layers.shard_map_regions.split_values import (
    UNIFORM,
    Dimension,
    Dimensions,
    MixesElementsError,
    Operation,
    Shape,
    Split,
    join,
    mesh_axes_of,
    unsplit,
)
from penzai_shard.traced_programs import ELEMENTWISE

Apply = Callable[[Operation], Sequence[Dimensions]]


@dataclasses.dataclass(frozen=True)
class Rule:
    """A rule for a primitive.

    Attributes:
        apply: What the dimensions of the results are.
        shapes: Parameters that the rule looks at itself, because they may depend on lengths. All
            others must be the same in the whole and in a part; None if none needs to be.
    """

    apply: Apply
    shapes: tuple[str, ...] | None = ()


# Operations whose result at an index depends on the operands at this index alone.


def _joined(op: Operation) -> Dimensions:
    """The dimensions of an elementwise result; operands of length 1 are stretched."""
    dims = []
    for dimension in range(max(len(flow.dims) for flow in op.flows)):
        lengths = [own[dimension] if own else 1 for own, _ in op.inputs]
        stretched = {1} if set(lengths) != {1} else set()
        dims.append(
            join(
                [
                    flow.dims[dimension]
                    for flow, length in zip(op.flows, lengths, strict=True)
                    if flow.dims and length not in stretched
                ]
            )
        )
    return tuple(dims)


def _elementwise(op: Operation) -> list[Dimensions]:
    return [_joined(op)] * len(op.outputs)


def _each_operand(op: Operation) -> list[Dimensions]:
    return [flow.dims for flow in op.flows]


# Operations that mix elements along some dimensions, and treat all others independently.


def _mixes(
    along: str | Callable[[Operation], Sequence[int]], verb: str, drops: bool = False
) -> Apply:
    """The rule of such an operation.

    Args:
        along: Which dimensions, or the parameter that says it.
        verb: What it does along them, for messages.
        drops: Whether the result does not have them.
    """

    def rule(op: Operation) -> list[Dimensions]:
        found = op.whole[along] if isinstance(along, str) else along(op)
        dimensions = found if isinstance(found, Sequence) else (found,)
        for operand, flow in enumerate(op.flows):
            if flow.dims:  # A scalar is what a reduction starts from, or padding.
                op.not_along(operand, dimensions, verb)
        dims = _joined(op)
        if drops:
            dims = tuple(dim for index, dim in enumerate(dims) if index not in dimensions)
        return [dims] * len(op.outputs)

    return rule


def _reduced(op: Operation) -> Sequence[int]:
    axes = op.whole.get("axes", op.whole.get("dimensions"))
    if axes is None:
        raise MixesElementsError("it reduces dimensions that are not followed")
    return axes


_reduction = _mixes(_reduced, "reduces", drops=True)


def _reduce_sum(op: Operation) -> Sequence[Dimensions]:
    if not op.gradient:
        return _reduction(op)
    axes = _reduced(op)
    if any(op.dims()[axis] == UNIFORM for axis in axes):
        raise MixesElementsError("it reduces a dimension whose length depends on the device")
    return [tuple(dim for index, dim in enumerate(op.dims()) if index not in axes)]


def _ranked(op: Operation) -> tuple[int]:
    axis = op.whole.get("axis", op.whole.get("operand_axis", op.whole.get("reduction_dimension")))
    return (-1 if axis is None else axis,)


def _repeated(op: Operation) -> list[int]:
    repeats = op.whole["reps"]
    if len(repeats) != len(op.dims()):
        raise MixesElementsError("it adds dimensions in a way that is not followed")
    return [dimension for dimension, count in enumerate(repeats) if count != 1]


def _padded(op: Operation) -> list[int]:
    configs = op.whole["padding_config"]
    return [dimension for dimension, config in enumerate(configs) if tuple(config) != (0, 0, 0)]


_TRIVIAL_WINDOW = {
    "window_dimensions": 1,
    "window_strides": 1,
    "padding": (0, 0),
    "base_dilation": 1,
    "window_dilation": 1,
}


def _windowed(op: Operation) -> list[int]:
    def is_trivial(dimension: int) -> bool:
        given = {key: op.whole[key] for key in _TRIVIAL_WINDOW if op.whole[key] is not None}
        found = {key: value[dimension] for key, value in given.items()}
        return all(
            (tuple(value) if isinstance(value, list) else value) == _TRIVIAL_WINDOW[key]
            for key, value in found.items()
        )

    return [dimension for dimension in range(len(op.dims())) if not is_trivial(dimension)]


def _transformed(op: Operation) -> range:
    return range(len(op.dims()) - len(op.whole["fft_lengths"]), len(op.dims()))


def _matrices(op: Operation) -> list[Dimensions]:
    """Operations on the matrices in the last two dimensions, all others being batches of them."""
    leading = len(op.dims()) - (1 if op.name == "lu_pivots_to_permutation" else 2)
    for operand, flow in enumerate(op.flows):
        op.not_along(operand, range(leading, len(flow.dims)), "does linear algebra along")
    columns = zip(*(flow.dims[:leading] for flow in op.flows), strict=True)
    batch = tuple(join(column) for column in columns)
    return [(*batch, *unsplit(len(shape) - leading)) for shape, _ in op.outputs]


def _dot_general(op: Operation) -> list[Dimensions]:
    (left_sum, right_sum), (left_batch, right_batch) = op.whole["dimension_numbers"]
    left, right = op.dims(0), op.dims(1)
    for one, other in zip(left_sum, right_sum, strict=True):
        summed = join((left[one], right[other]))
        if not (op.gradient and isinstance(summed, Split)):
            op.not_split(summed, "contracts")
    dims = [join((left[a], right[b])) for a, b in zip(left_batch, right_batch, strict=True)]
    dims += [d for i, d in enumerate(left) if i not in (*left_sum, *left_batch)]
    dims += [d for i, d in enumerate(right) if i not in (*right_sum, *right_batch)]
    return [tuple(dims)]


def _conv(op: Operation) -> list[Dimensions]:
    numbers = op.whole["dimension_numbers"]
    batch, kernel_out = numbers.lhs_spec[0], numbers.rhs_spec[0]
    one_batch = op.whole["batch_group_count"] == 1
    one_group = op.whole["feature_group_count"] == 1
    others = [i for i in range(len(op.dims(0))) if i != batch or not one_batch]
    op.not_along(0, others, "convolves along")
    others = [i for i in range(len(op.dims(1))) if i != kernel_out or not (one_batch and one_group)]
    op.not_along(1, others, "convolves along")
    dims = list(unsplit(len(op.dims(0))))
    dims[numbers.out_spec[0]] = op.dims(0)[batch]
    dims[numbers.out_spec[1]] = op.dims(1)[kernel_out]
    return [tuple(dims)]


# Operations that make dimensions, or rearrange them.


def _new_dimensions(shapes: tuple[Shape, Shape]) -> list[Dimension]:
    """Dimensions along which nothing changes, UNIFORM where the length depends on the device."""
    return [None if one == other else UNIFORM for one, other in zip(*shapes, strict=True)]


def _iota(op: Operation) -> list[Dimensions]:
    dims = _new_dimensions(op.outputs[0])
    if dims[op.whole["dimension"]] is not None:
        raise MixesElementsError("it counts positions along a dimension that is split")
    return [tuple(dims)]


def _broadcast_in_dim(op: Operation) -> list[Dimensions]:
    dims = _new_dimensions(op.outputs[0])
    for source, target in enumerate(op.whole["broadcast_dimensions"]):
        if op.spans(0, source, *(shape[target] for shape in op.outputs[0])):
            dims[target] = op.dims()[source]
        elif op.dims()[source] is not None:
            raise MixesElementsError(f"it repeats {op.dims()[source]}")
    return [tuple(dims)]


def _groups(one: Sequence[int], other: Sequence[int]) -> list[tuple[list[int], list[int]]]:
    """Dimensions of two shapes that a reshape turns into each other; those of length 1 left out."""
    left = [index for index, size in enumerate(one) if size != 1]
    right = [index for index, size in enumerate(other) if size != 1]
    groups: list[tuple[list[int], list[int]]] = []
    while left and right:
        group = ([left.pop(0)], [right.pop(0)])
        while (a := math.prod(one[i] for i in group[0])) != (
            b := math.prod(other[i] for i in group[1])
        ):
            side, rest = (0, left) if a < b else (1, right)
            group[side].append(rest.pop(0))
        groups.append(group)
    return groups


def _reshape(op: Operation) -> list[Dimensions]:
    (of_whole, of_part), (to_whole, _) = op.inputs[0], op.outputs[0]
    if op.whole.get("dimensions") is not None or 0 in of_whole:
        raise MixesElementsError("it rearranges elements in a way that is not followed")
    dims = list(unsplit(len(to_whole)))
    for sources, targets in _groups(of_whole, to_whole):
        major, *minor = (op.dims()[source] for source in sources)
        if any(minor):
            raise MixesElementsError(f"it merges {next(filter(None, minor))} into another")
        if major == UNIFORM and (len(sources), len(targets)) != (1, 1):
            major = _as_split(op, of_whole[sources[0]], of_part[sources[0]])
        if isinstance(major, Split) and to_whole[targets[0]] % major.parts:
            raise MixesElementsError(f"it divides {major} so that parts do not stay together")
        dims[targets[0]] = major
    return [tuple(dims)]


def _as_split(op: Operation, length: int, own: int) -> Split:
    """What a dimension along which nothing changes may be taken for."""
    fitting = [split for split in op.splits if split.parts * own == length]
    if len(fitting) != 1:
        raise MixesElementsError("it rearranges a dimension whose length depends on the device")
    return fitting[0]


def _transpose(op: Operation) -> list[Dimensions]:
    return [tuple(op.dims()[index] for index in op.whole["permutation"])]


def _stack(op: Operation) -> list[Dimensions]:
    dims, axis = _joined(op), op.whole["axis"]
    return [(*dims[:axis], None, *dims[axis:])]


def _trailing_bits(op: Operation) -> list[Dimensions]:
    """Elements seen as several smaller ones in a trailing dimension, or the reverse."""
    rank, into = len(op.dims()), len(op.outputs[0][0])
    if into < rank:
        op.not_along(0, (rank - 1,), "merges the bytes of")
    return [(*op.dims()[:into], *unsplit(into - rank))]


def _nothing(op: Operation) -> list[Dimensions]:
    return [unsplit(len(shape)) for shape, _ in op.outputs]


# Random numbers.


def _random_bits(op: Operation) -> list[Dimensions]:
    """Numbers of their own for every device, from a stream that differs between them."""
    rank = len(op.dims())
    of_whole, of_part = (shape[rank:] for shape in op.outputs[0])
    if not op.flows[0].random and of_whole != of_part:
        raise MixesElementsError(
            "it draws the same random numbers for every part; a pz.RandomStream draws others"
        )
    return [(*op.dims(), *(dim for dim, _ in _drawn(op)))]


def drawn_axes(op: Operation) -> frozenset[str]:
    """The mesh axes along which the dimensions of random numbers are split."""
    return op.flows[0].mesh_axes.union(*(axes for _, axes in _drawn(op)))


def _drawn(op: Operation) -> list[tuple[Dimension, frozenset[str]]]:
    """What each dimension of random numbers is, and the mesh axes that it may be split over.

    Numbers that are independent of each other fit any part, so of several dimensions that are as
    long as several splits make them it does not matter which is which.
    """
    rank = len(op.dims())
    lengths = list(zip(*(shape[rank:] for shape in op.outputs[0]), strict=True))
    found: list[tuple[Dimension, frozenset[str]]] = []
    for one, other in lengths:
        if one == other:
            found.append((None, frozenset()))
            continue
        fitting = [split for split in op.splits if split.parts * other == one]
        alike = [(a, b) for a, b in lengths if a != b and a * other == b * one]
        if len(fitting) != len(alike):
            found.append((UNIFORM, frozenset()))
        else:
            found.append((fitting[0] if len(fitting) == 1 else UNIFORM, mesh_axes_of(fitting)))
    return found


_BY_NAMES = {
    """igamma_grad_a layout_constraint name random_clone random_fold_in random_gamma_grad
    random_seed sharding_constraint threefry2x32""": Rule(_elementwise),
    "optimization_barrier": Rule(_each_operand),
    "debug_callback debug_print": Rule(_nothing, None),
    "cumsum cumprod cummax cummin cumlogsumexp": Rule(_mixes("axis", "accumulates along")),
    "reduce_sum": Rule(_reduce_sum),
    """reduce_prod reduce_max reduce_min reduce_and reduce_or reduce_xor argmax argmin
    reduce""": Rule(_reduction),
    "reduce_window reduce_window_sum reduce_window_max reduce_window_min": Rule(
        _mixes(_windowed, "slides a window along")
    ),
    "sort": Rule(_mixes("dimension", "sorts along")),
    "top_k approx_top_k": Rule(_mixes(_ranked, "takes the largest along")),
    "rev": Rule(_mixes("dimensions", "reverses")),
    "fft": Rule(_mixes(_transformed, "transforms")),
    "tile": Rule(_mixes(_repeated, "repeats")),
    "pad": Rule(_mixes(_padded, "pads")),
    "concatenate": Rule(_mixes("dimension", "concatenates along")),
    "split": Rule(_mixes("axis", "divides")),
    "unstack": Rule(_mixes("axis", "divides", drops=True)),
    "squeeze": Rule(_mixes("dimensions", "drops", drops=True)),
    """cholesky eigh svd lu geqrf geqp3 qr householder_product triangular_solve
    lu_pivots_to_permutation""": Rule(_matrices),
    "dot_general": Rule(_dot_general),
    "conv_general_dilated": Rule(_conv),
    "iota": Rule(_iota, ("shape",)),
    "broadcast_in_dim": Rule(_broadcast_in_dim, ("shape",)),
    "reshape": Rule(_reshape, ("new_sizes",)),
    "transpose": Rule(_transpose),
    "stack": Rule(_stack),
    "bitcast_convert_type random_wrap random_unwrap": Rule(_trailing_bits),
    "random_bits random_split": Rule(_random_bits, ("shape",)),
    "slice": Rule(indexing.slice_rule, ("start_indices", "limit_indices")),
    "dynamic_slice": Rule(indexing.dynamic_slice_rule, ("slice_sizes",)),
    "dynamic_update_slice": Rule(indexing.dynamic_update_slice_rule),
    "gather": Rule(indexing.gather_rule, ("slice_sizes",)),
    "scatter scatter-add scatter-sub scatter-mul scatter-min scatter-max": Rule(
        indexing.scatter_rule
    ),
}

RULES: dict[str, Rule] = {
    **dict.fromkeys(ELEMENTWISE, Rule(_elementwise)),
    **{name: rule for names, rule in _BY_NAMES.items() for name in names.split()},
}
"""The rule of each primitive that is known, except those that run other programs."""
