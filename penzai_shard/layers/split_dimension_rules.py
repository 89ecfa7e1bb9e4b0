"""How split dimensions pass through each primitive operation that is known to be harmless.

A rule says what the dimensions of the results are, or raises ``MixesElementsError``. An operation
without a rule is refused. The claim that every rule keeps: what a device holds of a value is what
stands at the device's position in the value that the whole program computes.
"""

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

from penzai_shard.layers import split_indexing_rules as indexing
from penzai_shard.layers.split_dimensions import (
    UNIFORM,
    Dimension,
    Dimensions,
    MixesElementsError,
    Operation,
    Split,
    join,
    whole,
)

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


_ELEMENTWISE = """
    abs acos acosh add add_any and asin asinh atan atan2 atanh bessel_i0e bessel_i1e cbrt ceil
    clamp clz complex conj convert_element_type copy cos cosh digamma div eq eq_to erf erf_inv erfc
    exp exp2 expm1 floor ge gt igamma igamma_grad_a igammac imag integer_pow is_finite
    layout_constraint le le_to lgamma log log1p logistic lt lt_to max min mul mulhi name ne neg
    nextafter not or polygamma population_count pow random_clone random_fold_in random_gamma_grad
    random_seed real reduce_precision regularized_incomplete_beta rem round rsqrt select_n
    sharding_constraint shift_left shift_right_arithmetic shift_right_logical sign sin sinh sqrt
    square stop_gradient sub tan tanh threefry2x32 xor zeta"""
ELEMENTWISE = frozenset(_ELEMENTWISE.split())
"""Operations whose result at an index depends on the operands at this index alone."""


def _elementwise(op: Operation) -> list[Dimensions]:
    rank = max(len(flow.dims) for flow in op.flows)
    dims = []
    for dimension in range(rank):
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
    return [tuple(dims)] * len(op.outputs)


def _each_operand(op: Operation) -> list[Dimensions]:
    return [flow.dims for flow in op.flows]


def _broadcast_in_dim(op: Operation) -> list[Dimensions]:
    (of_whole, of_part), (to_whole, to_part) = op.inputs[0], op.outputs[0]
    dims: list[Dimension] = [
        None if one == other else UNIFORM for one, other in zip(to_whole, to_part, strict=True)
    ]
    for source, target in enumerate(op.whole["broadcast_dimensions"]):
        if (of_whole[source], of_part[source]) == (to_whole[target], to_part[target]):
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
    dims = list(whole(len(to_whole)))
    for sources, targets in _groups(of_whole, to_whole):
        states = [op.dims()[source] for source in sources]
        major, *minor = states
        if not any(states):
            continue
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


def _squeeze(op: Operation) -> list[Dimensions]:
    gone = op.whole["dimensions"]
    op.not_along(0, gone, "drops")
    return [tuple(dim for index, dim in enumerate(op.dims()) if index not in gone)]


def _transpose(op: Operation) -> list[Dimensions]:
    return [tuple(op.dims()[index] for index in op.whole["permutation"])]


def _reduction(op: Operation) -> list[Dimensions]:
    axes = op.whole.get("axes", op.whole.get("dimensions"))
    if axes is None:
        raise MixesElementsError("it reduces dimensions that are not followed")
    if not (op.gradient and op.name == "reduce_sum"):
        for operand in range(len(op.outputs)):
            op.not_along(operand, axes, "reduces")
    elif any(op.dims()[axis] == UNIFORM for axis in axes):
        raise MixesElementsError("it reduces a dimension whose length depends on the device")
    dims = _elementwise(op)[0] if len(op.outputs) > 1 else op.dims()
    return [tuple(dim for index, dim in enumerate(dims) if index not in axes)] * len(op.outputs)


def _along_one(parameter: str, verb: str) -> Apply:
    """Operations that mix along one dimension, and treat all others independently."""

    def rule(op: Operation) -> list[Dimensions]:
        for operand in range(len(op.flows)):
            op.not_along(operand, (op.whole[parameter],), verb)
        return [_elementwise(op)[0] if len(op.flows) > 1 else op.dims()] * len(op.outputs)

    return rule


def _concatenate(op: Operation) -> list[Dimensions]:
    along = op.whole["dimension"]
    for operand in range(len(op.flows)):
        op.not_along(operand, (along,), "concatenates along")
    columns = zip(*(flow.dims for flow in op.flows), strict=True)
    return [tuple(join(column) for column in columns)]


def _stack(op: Operation) -> list[Dimensions]:
    dims = list(_elementwise(op)[0]) if op.dims() else []
    return [(*dims[: op.whole["axis"]], None, *dims[op.whole["axis"] :])]


def _unstack(op: Operation) -> list[Dimensions]:
    axis = op.whole["axis"]
    op.not_along(0, (axis,), "divides")
    return [(*op.dims()[:axis], *op.dims()[axis + 1 :])] * len(op.outputs)


def _tile(op: Operation) -> list[Dimensions]:
    repeats = op.whole["reps"]
    if len(repeats) != len(op.dims()):
        raise MixesElementsError("it adds dimensions in a way that is not followed")
    op.not_along(0, [i for i, count in enumerate(repeats) if count != 1], "repeats")
    return [op.dims()]


def _sort(op: Operation) -> list[Dimensions]:
    dims = _elementwise(op)[0]
    op.not_split(dims[op.whole["dimension"]], "sorts along")
    return [dims] * len(op.outputs)


def _top_k(op: Operation) -> list[Dimensions]:
    axis = op.whole.get("axis", op.whole.get("operand_axis", op.whole.get("reduction_dimension")))
    axis = -1 if axis is None else axis
    op.not_along(0, (axis,), "takes the largest along")
    return [op.dims()] * len(op.outputs)


def _rev(op: Operation) -> list[Dimensions]:
    op.not_along(0, op.whole["dimensions"], "reverses")
    return [op.dims()]


def _pad(op: Operation) -> list[Dimensions]:
    for dimension, config in enumerate(op.whole["padding_config"]):
        if tuple(config) != (0, 0, 0):
            op.not_along(0, (dimension,), "pads")
    return [op.dims()]


def _iota(op: Operation) -> list[Dimensions]:
    of_whole, of_part = op.outputs[0]
    dims: Dimensions = tuple(
        None if one == other else UNIFORM for one, other in zip(of_whole, of_part, strict=True)
    )
    if dims[op.whole["dimension"]] is not None:
        raise MixesElementsError("it counts positions along a dimension that is split")
    return [dims]


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
    dims = list(whole(len(op.dims(0))))
    dims[numbers.out_spec[0]] = op.dims(0)[batch]
    dims[numbers.out_spec[1]] = op.dims(1)[kernel_out]
    return [tuple(dims)]


def _window(op: Operation) -> list[Dimensions]:
    trivial = {
        "window_dimensions": 1,
        "window_strides": 1,
        "padding": (0, 0),
        "base_dilation": 1,
        "window_dilation": 1,
    }
    for operand in range(len(op.outputs)):
        for dimension in range(len(op.dims(operand))):
            if any(
                op.whole[key] is not None and _plain(op.whole[key][dimension]) != value
                for key, value in trivial.items()
            ):
                op.not_along(operand, (dimension,), "slides a window along")
    return [_elementwise(op)[0] if len(op.outputs) > 1 else op.dims()] * len(op.outputs)


def _plain(value: Any) -> Any:
    return tuple(value) if isinstance(value, list | tuple) else value


def _fft(op: Operation) -> list[Dimensions]:
    rank = len(op.dims())
    last = range(rank - len(op.whole["fft_lengths"]), rank)
    op.not_along(0, last, "transforms")
    return [op.dims()]


_MATRICES = """
    cholesky eigh svd lu geqrf geqp3 qr householder_product triangular_solve
    lu_pivots_to_permutation"""


def _matrices(op: Operation) -> list[Dimensions]:
    """Operations on the matrices in the last two dimensions, all others being batches of them."""
    kept = 1 if op.name == "lu_pivots_to_permutation" else 2
    leading = len(op.dims()) - kept
    for operand, flow in enumerate(op.flows):
        op.not_along(operand, range(leading, len(flow.dims)), "does linear algebra along")
    columns = zip(*(flow.dims[:leading] for flow in op.flows), strict=True)
    batch = tuple(join(column) for column in columns)
    return [(*batch, *whole(len(shape) - leading)) for shape, _ in op.outputs]


def _bitcast(op: Operation) -> list[Dimensions]:
    rank, into = len(op.dims()), len(op.outputs[0][0])
    if into < rank:
        op.not_along(0, (rank - 1,), "merges the bytes of")
    return [(*op.dims()[: min(rank, into)], *whole(max(0, into - rank)))]


def _new_trailing(op: Operation) -> list[Dimensions]:
    into = len(op.outputs[0][0])
    return [(*op.dims()[:into], *whole(into - len(op.dims())))]


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
            axes = frozenset(name for split in fitting for name in split.mesh_axes)
            found.append((fitting[0] if len(fitting) == 1 else UNIFORM, axes))
    return found


def _nothing(op: Operation) -> list[Dimensions]:
    return [whole(len(shape)) for shape, _ in op.outputs]


def _table() -> dict[str, Rule]:
    rules: dict[str, Rule] = {name: Rule(_elementwise) for name in ELEMENTWISE}
    cumulative = _along_one("axis", "accumulates along")
    rules |= {f"cum{kind}": Rule(cumulative) for kind in ("sum", "prod", "max", "min", "logsumexp")}
    reductions = [f"reduce_{kind}" for kind in ("sum", "prod", "max", "min", "and", "or", "xor")]
    rules |= {name: Rule(_reduction) for name in (*reductions, "argmax", "argmin", "reduce")}
    windows = ("reduce_window", *(f"reduce_window_{kind}" for kind in ("sum", "max", "min")))
    rules |= {name: Rule(_window) for name in windows}
    scatters = ("scatter", *(f"scatter-{kind}" for kind in ("add", "sub", "mul", "min", "max")))
    rules |= {name: Rule(indexing.scatter_rule) for name in scatters}
    rules |= {name: Rule(_matrices) for name in _MATRICES.split()}
    random = {"random_bits": ("shape",), "random_split": ("shape",)}
    rules |= {name: Rule(_random_bits, shapes) for name, shapes in random.items()}
    trailing = ("random_wrap", "random_unwrap")
    rules |= {name: Rule(_new_trailing) for name in trailing}
    quiet = ("debug_callback", "debug_print")
    return rules | {
        **{name: Rule(_nothing, None) for name in quiet},
        "tile": Rule(_tile),
        "stack": Rule(_stack),
        "unstack": Rule(_unstack),
        "optimization_barrier": Rule(_each_operand),
        "broadcast_in_dim": Rule(_broadcast_in_dim, ("shape",)),
        "reshape": Rule(_reshape, ("new_sizes",)),
        "squeeze": Rule(_squeeze),
        "transpose": Rule(_transpose),
        "split": Rule(_along_one("axis", "divides")),
        "concatenate": Rule(_concatenate),
        "sort": Rule(_sort),
        "top_k": Rule(_top_k),
        "approx_top_k": Rule(_top_k),
        "rev": Rule(_rev),
        "slice": Rule(indexing.slice_rule, ("start_indices", "limit_indices")),
        "dynamic_slice": Rule(indexing.dynamic_slice_rule, ("slice_sizes",)),
        "dynamic_update_slice": Rule(indexing.dynamic_update_slice_rule),
        "pad": Rule(_pad),
        "iota": Rule(_iota, ("shape",)),
        "dot_general": Rule(_dot_general),
        "conv_general_dilated": Rule(_conv),
        "gather": Rule(indexing.gather_rule, ("slice_sizes",)),
        "fft": Rule(_fft),
        "bitcast_convert_type": Rule(_bitcast),
    }


RULES = _table()
"""The rule of each primitive that is known, except those that run other programs."""
