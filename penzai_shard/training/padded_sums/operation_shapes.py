"""Of which shapes an operation's operands are to be, for a result that is longer than it was.

The result begins with what the operation gave before. What is behind it may be anything.
"""

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax

from penzai_shard.library_apis.jax_api import JaxprEqn
from penzai_shard.traced_programs import ELEMENTWISE, asks_for_sharding

Shape = tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class PaddedOperation:
    """An operation that gives a longer result.

    Attributes:
        operands: The shapes of its operands.
        parameters: Parameters that are others then.
        sums: The operands that it sums up. They need not be padded before they come here.
        limits: The largest indices that its second operand may have, where larger ones mean these.
    """

    operands: Sequence[Shape]
    parameters: dict[str, Any] = dataclasses.field(default_factory=dict)
    sums: tuple[int, ...] = ()
    limits: Shape | None = None


def padded_operation(equation: JaxprEqn, shape: Shape) -> PaddedOperation | None:
    """The operation that gives a result of a shape; None where there is no rule for it.

    Args:
        equation: An operation with one result.
        shape: The lengths that are wanted, at least those of its result.

    >>> product = jax.make_jaxpr(jax.numpy.dot)(jax.numpy.ones((4, 3)), jax.numpy.ones((3, 5)))
    >>> padded_operation(product.eqns[0], (4, 8)).operands
    [(4, 3), (3, 8)]
    """
    rule = _RULES.get(equation.primitive.name)
    if rule is None:
        return None
    if equation.primitive.name != "sharding_constraint" and asks_for_sharding(equation):
        return None
    return rule(equation, shape)


def shape_of(atom: Any) -> Shape:
    """The shape of a variable or a literal of a program."""
    return tuple(atom.aval.shape)


def _shapes(equation: JaxprEqn) -> list[Shape]:
    return list(map(shape_of, equation.invars))


def _longer(equation: JaxprEqn, shape: Shape) -> list[int]:
    """The dimensions of the result that are to be longer."""
    true = shape_of(equation.outvars[0])
    return [i for i, (want, have) in enumerate(zip(shape, true, strict=True)) if want != have]


def _elementwise(equation: JaxprEqn, shape: Shape) -> PaddedOperation | None:
    operands = _shapes(equation)
    if any(operand and len(operand) != len(shape) for operand in operands):
        return None
    true = shape_of(equation.outvars[0])
    return PaddedOperation(
        [
            tuple(
                want if own == have else own
                for own, want, have in zip(operand, shape, true, strict=True)
            )
            if operand
            else ()
            for operand in operands
        ]
    )


def _sharding_constraint(equation: JaxprEqn, shape: Shape) -> PaddedOperation:
    return PaddedOperation([shape], {"sharding": equation.params["sharding"]})


def _transpose(equation: JaxprEqn, shape: Shape) -> PaddedOperation:
    permutation = equation.params["permutation"]
    return PaddedOperation([tuple(shape[permutation.index(i)] for i in range(len(shape)))])


def _broadcast(equation: JaxprEqn, shape: Shape) -> PaddedOperation | None:
    operand, *others = _shapes(equation)
    if others:
        return None
    true = shape_of(equation.outvars[0])
    places = equation.params["broadcast_dimensions"]
    # The same element at every index needs no more of them.
    lengths = (
        shape[i] if own == true[i] and own > 1 else own
        for own, i in zip(operand, places, strict=True)
    )
    return PaddedOperation([tuple(lengths)], {"shape": shape})


def _reshape(equation: JaxprEqn, shape: Shape) -> PaddedOperation | None:
    """Only dimensions that stay as they are can be longer: as many elements before and behind."""
    operand, *others = _shapes(equation)
    true = shape_of(equation.outvars[0])
    if others or equation.params["dimensions"] is not None:
        return None
    lengths = list(operand)
    taken: set[int] = set()
    for i in _longer(equation, shape):
        before = math.prod(true[:i])
        same = [
            j
            for j, own in enumerate(operand)
            # Of several dimensions of length 1 each can be but one.
            if own == true[i] and math.prod(operand[:j]) == before and j not in taken
        ]
        if not same or 0 in true:
            return None
        lengths[same[0]] = shape[i]
        taken.add(same[0])
    return PaddedOperation([tuple(lengths)], {"new_sizes": shape})


def _squeeze(equation: JaxprEqn, shape: Shape) -> PaddedOperation:
    (operand,) = _shapes(equation)
    removed, kept = equation.params["dimensions"], iter(shape)
    return PaddedOperation([tuple(1 if i in removed else next(kept) for i in range(len(operand)))])


def _slice(equation: JaxprEqn, shape: Shape) -> PaddedOperation | None:
    (operand,) = _shapes(equation)
    if any(shape[i] < operand[i] or not _is_whole(equation, i) for i in _longer(equation, shape)):
        return None
    limits, lengths = list(equation.params["limit_indices"]), list(operand)
    for i in _longer(equation, shape):
        limits[i] = lengths[i] = shape[i]
    return PaddedOperation([tuple(lengths)], {"limit_indices": tuple(limits)})


def _is_whole(equation: JaxprEqn, dimension: int) -> bool:
    return shape_of(equation.outvars[0])[dimension] == shape_of(equation.invars[0])[dimension]


def _pad(equation: JaxprEqn, shape: Shape) -> PaddedOperation | None:
    operand, filling = _shapes(equation)
    longer = _longer(equation, shape)
    if any(equation.params["padding_config"][i] != (0, 0, 0) for i in longer):
        return None
    lengths = (shape[i] if i in longer else own for i, own in enumerate(operand))
    return PaddedOperation([tuple(lengths), filling])


def _concatenate(equation: JaxprEqn, shape: Shape) -> PaddedOperation | None:
    along = equation.params["dimension"]
    if along in _longer(equation, shape):
        return None
    operands = _shapes(equation)
    return PaddedOperation([(*shape[:along], own[along], *shape[along + 1 :]) for own in operands])


def _reduce_sum(equation: JaxprEqn, shape: Shape) -> PaddedOperation:
    (operand,) = _shapes(equation)
    summed, kept = equation.params["axes"], iter(shape)
    lengths = (own if i in summed else next(kept) for i, own in enumerate(operand))
    return PaddedOperation([tuple(lengths)], sums=(0,))


def _dot_general(equation: JaxprEqn, shape: Shape) -> PaddedOperation:
    contracted, batch = equation.params["dimension_numbers"]
    lengths = [list(operand) for operand in _shapes(equation)]
    shared, free = shape[: len(batch[0])], iter(shape[len(batch[0]) :])
    for side in (0, 1):
        for place, length in zip(batch[side], shared, strict=True):
            lengths[side][place] = length
        for place in range(len(lengths[side])):
            if place not in (*contracted[side], *batch[side]):
                lengths[side][place] = next(free)
    return PaddedOperation(list(map(tuple, lengths)), sums=(0, 1))


def _scatter_add(equation: JaxprEqn, shape: Shape) -> PaddedOperation | None:
    operand, indices, updates = _shapes(equation)
    numbers, mode = equation.params["dimension_numbers"], equation.params["mode"]
    beside = (*numbers.inserted_window_dims, *numbers.operand_batching_dims)
    windows = dict.fromkeys(beside, 1)
    kept = [i for i in range(len(operand)) if i not in beside]
    windows |= {i: updates[at] for i, at in zip(kept, numbers.update_window_dims, strict=True)}
    lengths = list(updates)
    for i in _longer(equation, shape):
        if i in numbers.operand_batching_dims:
            return None
        if i in kept and windows[i] == operand[i]:
            lengths[numbers.update_window_dims[kept.index(i)]] = shape[i]
        elif windows[i] > 1 and mode == jax.lax.GatherScatterMode.FILL_OR_DROP:
            # What reaches beyond the end is left out, and would begin before the padding.
            return None
    limits = None
    if mode == jax.lax.GatherScatterMode.CLIP:
        limits = tuple(operand[i] - windows[i] for i in numbers.scatter_dims_to_operand_dims)
    return PaddedOperation([shape, indices, tuple(lengths)], sums=(1, 2), limits=limits)


_RULES: dict[str, Callable[[JaxprEqn, Shape], PaddedOperation | None]] = {
    **dict.fromkeys((*ELEMENTWISE, "name"), _elementwise),
    "broadcast_in_dim": _broadcast,
    "concatenate": _concatenate,
    "dot_general": _dot_general,
    "pad": _pad,
    "reduce_sum": _reduce_sum,
    "reshape": _reshape,
    "scatter-add": _scatter_add,
    "sharding_constraint": _sharding_constraint,
    "slice": _slice,
    "squeeze": _squeeze,
    "transpose": _transpose,
}
