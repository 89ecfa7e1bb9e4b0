"""Tells how far two arrays are apart, and how far they may be.

The yardstick is what rounding does to the original: the largest difference between the original as
it runs and in float64. The edited model as it runs may be off by a few times as much; in float64,
where both compute without rounding, by a tiny part of it.
"""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from penzai_shard.surgery.equivalence.values import is_float, to_array

EPSILON_64 = 2.0**-52
# Rounding of the original that an edited model may have, and units in the last place besides.
_TIMES, _ULPS = 8.0, 4.0
# Without a run in float64, nobody knows how the original rounds; sums of many terms have this much.
_ULPS_UNKNOWN = 64.0
# Rounding by more is that of a choice which falls the other way; in float64 it seldom does.
_MOST_NOISE = 0.01


@dataclasses.dataclass(frozen=True)
class Allowance:
    """What two models may differ by.

    Attributes:
        rtol: What is allowed in any case, relative to the largest value of an array.
        finest: The smallest machine epsilon to which the original rounds, in which case the models
            may differ in float64 by a small part of that; 0 if some of their operations rounded in
            float64 too.
        has_new_constants: Whether the edited model computes with constants that are not the
            original's, and may be rounded.
        coarser: How many times coarser than the original the edited model rounds.
    """

    rtol: float = 0.0
    finest: float = 0.0
    has_new_constants: bool = False
    coarser: float = 1.0


@dataclasses.dataclass(frozen=True)
class Difference:
    """How far two arrays are apart, relative to the largest value of the first.

    Attributes:
        size: The largest difference as the models run.
        allowed: How large it may be.
        size_in_float64: The largest difference in float64; None if that is not known.
        allowed_in_float64: How large it may be.
        fact: What differs in more than figures, without a full stop.
    """

    size: float = 0.0
    allowed: float = 0.0
    size_in_float64: float | None = None
    allowed_in_float64: float = 0.0
    fact: str = ""

    @property
    def ok(self) -> bool:
        """Whether the arrays are close enough."""
        is_same_function = (self.size_in_float64 or 0.0) <= self.allowed_in_float64
        return not self.fact and self.size <= self.allowed and is_same_function


def compare(own: Sequence[Any], exact: Sequence[Any] | None, allowance: Allowance) -> Difference:
    """Compares an array of two models.

    Args:
        own: The original's and the edited model's, as they run.
        exact: The same in float64.
        allowance: What they may differ by.
    """
    one, other = own
    if one.shape != other.shape or one.dtype != other.dtype:
        return Difference(fact=f"{one.dtype}{one.shape} became {other.dtype}{other.shape}")
    if not is_float(one):
        count = int(np.sum(one != other))
        return Difference(fact=f"{count} of {one.size} elements differ" if count else "")
    pairs = [[as_float64(array) for array in own], *([exact] if exact else [])]
    if not all(_has_same_finite_elements(*pair) for pair in pairs):
        return Difference(fact="other elements are not finite")

    # As the models run: both are measured against what the original is without rounding.
    (one, other), epsilon = pairs[0], epsilon_of(own[0])
    reference = np.where(np.isfinite(pairs[-1][0]), pairs[-1][0], one)
    size, noise = _largest(reference), _largest(one, reference)
    scale = max(size, noise) or 1.0
    most = _TIMES * noise + (_ULPS if exact else _ULPS_UNKNOWN) * epsilon * size
    most = max(most * allowance.coarser, allowance.rtol * size) / scale
    apart = 0.0 if is_equal(one, other) else _largest(other, reference) / scale
    if not exact:
        return Difference(apart, most)

    # In float64: what differs by more is another function.
    close = _TIMES * min(noise, _MOST_NOISE * scale) + _ULPS * epsilon * size
    close *= math.sqrt(EPSILON_64 / max(allowance.finest, EPSILON_64))
    close += allowance.has_new_constants * epsilon * size
    close = max(close, allowance.rtol * size) / scale
    return Difference(apart, most, _largest(exact[1], exact[0]) / scale, close)


def epsilon_of(value: Any) -> float:
    """The machine epsilon of the dtype of an array."""
    return float(jnp.finfo(value.dtype).eps)  # type: ignore[no-untyped-call]


def as_float64(array: Any) -> Any:
    """An array in float64 or complex128, if it has real or complex numbers."""
    return array.astype(np.promote_types(array.dtype, float)) if is_float(array) else array


def is_equal(one: Any, other: Any) -> bool:
    """Whether two arrays of one dtype have the same elements; NaN equals NaN."""
    a, b = (as_float64(np.asarray(to_array(x))) for x in (one, other))
    return one is other or np.array_equal(a, b, equal_nan=True)


def _largest(array: Any, other: Any = 0.0) -> float:
    """The largest finite element of an array, or difference of two."""
    with np.errstate(invalid="ignore"):
        apart = np.abs(array - other)
    return float(apart[np.isfinite(apart)].max(initial=0))


def _has_same_finite_elements(one: Any, other: Any) -> bool:
    is_same = (one == other) | ((one != one) & (other != other))
    return bool(np.all(is_same | (np.isfinite(one) & np.isfinite(other))))
