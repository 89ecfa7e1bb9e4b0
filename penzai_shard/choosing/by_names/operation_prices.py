"""What one operation costs a device: the cheapest way to run it for where its arrays are.

An operation may be split along any of its factors. What its operands are not split by has to be
gathered or exchanged before, and what it sums up over split factors is reduced behind it.
"""

import dataclasses
import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from penzai_shard.choosing.by_names.placements import (
    Moved,
    Placement,
    Tensor,
    dimension_of,
)

# What compilers weigh where nothing says how an operation is split: about as many floating point
# operations take as long as sending a byte, on the accelerators of today.
_FLOPS_PER_BYTE = 2000.0


@dataclasses.dataclass(frozen=True)
class OperationForm:
    """All of an operation that its price depends on, beside where its arrays are.

    Attributes:
        operands: The arrays that it takes.
        results: The arrays that it makes.
        factors: Of each array, operands first: of each dimension the factor, None if none counts.
        sizes: The length of each factor.
        reduced: The factors that are summed up.
        whole: The factors along which it cannot be split.
        is_product: Whether it is a matrix product, which multiplies and adds.
        makes_gradients: Whether its results are gradients, which are padded before they are summed.
    """

    operands: tuple[Tensor, ...]
    results: tuple[Tensor, ...]
    factors: tuple[tuple[int | None, ...], ...]
    sizes: tuple[int, ...]
    reduced: frozenset[int]
    whole: frozenset[int]
    is_product: bool
    makes_gradients: bool = False

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """The operands, then the results."""
        return self.operands + self.results

    def of_tensors(self, *tensors: Tensor) -> "OperationForm":
        """The same operation of arrays of other lengths."""
        sizes = list(self.sizes)
        for before, after, factors in zip(self.tensors, tensors, self.factors, strict=True):
            for old, new, factor in zip(before.dimensions, after.dimensions, factors, strict=True):
                if factor is not None and old.size != new.size:
                    sizes[factor] = self.sizes[factor] * new.size // old.size
        count = len(self.operands)
        return dataclasses.replace(
            self, operands=tensors[:count], results=tensors[count:], sizes=tuple(sizes)
        )


class TensorMoves(NamedTuple):
    """What is sent for one array of an operation.

    Attributes:
        position: Which array, the operands first.
        needed: Which logical axis, or dimension without a name, each mesh axis splits there.
        moved: What is sent.
    """

    position: int
    needed: tuple[tuple[str, Any], ...]
    moved: tuple[Moved, ...]


class OperationPrice(NamedTuple):
    """What one operation costs a device.

    Attributes:
        flops: Floating point operations.
        sent: What is sent, without arrays for which nothing is.
    """

    flops: float
    sent: tuple[TensorMoves, ...]


def price(
    form: OperationForm,
    placements: Sequence[Placement],
    mesh: Mapping[str, int],
    pads: bool = False,
) -> OperationPrice:
    """The price of the cheapest way to run an operation.

    Args:
        form: The operation.
        placements: Where its operands are, and where its results have to be.
        mesh: The sizes of the mesh axes.
        pads: Whether lengths that do not divide are split too, the last part padded.
    """
    given = [
        {
            axis: factor
            for axis, dimension in dimension_of(placement).items()
            if (factor := factors[dimension]) is not None
        }
        for placement, factors in zip(placements, form.factors, strict=True)
    ]
    count = len(form.operands)
    choices: dict[str, list[int | None]] = {}
    for axis in mesh:
        # A product is split as its operands are, and where they are whole, as its result is to
        # be. Where several ways offer themselves, it is the cheapest.
        sides = (given[:count], given[count:]) if form.is_product else (given,)
        for arrays in sides:
            offered = dict.fromkeys(by[axis] for by in arrays if axis in by)
            if offered and axis not in choices:
                choices[axis] = [f for f in offered if f not in form.whole] or [None]
    best: tuple[float, OperationPrice] | None = None
    for picked in itertools.product(*choices.values()):
        chosen = {axis: f for axis, f in zip(choices, picked, strict=True) if f is not None}
        if not pads:
            chosen = _dividing(form, chosen, mesh)
        found = _price_of(form, placements, chosen, mesh)
        total = found.flops / _FLOPS_PER_BYTE + sum(
            moved.bytes for each in found.sent for moved in each.moved
        )
        if best is None or total < best[0] * (1 - 1e-9):
            best = total, found
    assert best is not None  # There is one choice at least.
    return best[1]


def _dividing(
    form: OperationForm, chosen: Mapping[str, int], mesh: Mapping[str, int]
) -> dict[str, int]:
    """The mesh axes that factors divide over, those that do not left out."""
    parts: dict[int, int] = {}
    found = {}
    for axis, factor in chosen.items():
        count = parts.get(factor, 1) * mesh[axis]
        if form.sizes[factor] % count == 0:
            parts[factor], found[axis] = count, factor
    return found


def _price_of(
    form: OperationForm,
    placements: Sequence[Placement],
    chosen: Mapping[str, int],
    mesh: Mapping[str, int],
) -> OperationPrice:
    flops = 0.0
    if form.is_product:
        parts = [1] * len(form.sizes)
        for axis, factor in chosen.items():
            parts[factor] *= mesh[axis]
        flops = 2.0 * math.prod(-(-size // n) for size, n in zip(form.sizes, parts, strict=True))
    sent = []
    partial = {axis: factor for axis, factor in chosen.items() if factor in form.reduced}
    for position, tensor in enumerate(form.tensors):
        factors = form.factors[position]
        at = dimension_of(placements[position])
        needed = {axis: factors.index(f) for axis, f in chosen.items() if f in factors}
        if position < len(form.operands):
            moved = tensor.moves(at, needed, {}, mesh)
        else:
            moved = tensor.moves(needed, at, partial, mesh, form.makes_gradients)
        if moved:
            names = tensor.names
            key = tuple((a, i if names[i] is None else names[i]) for a, i in needed.items())
            sent.append(TensorMoves(position, key, moved))
    return OperationPrice(flops, tuple(sent))
