"""How far an array may be from its exact value: as far as the original's rounding errors reach.

Each array is measured against itself, element by element. Its yardstick is what the original's
own rounding does to it: the difference between the original as it runs and in float64, and those
of several runs in float64 whose every operation is rounded at random (``wider_arithmetic``).
Where an exact value is near zero by cancellation, such as the gradient of a key bias under a
softmax, the yardstick is what is left of the larger numbers that cancel.
"""

import dataclasses
from collections.abc import Sequence

import numpy as np

from penzai_shard.surgery.equivalence.comparable_arrays import equal_elements, widest

# One run's error of one element may be small by chance, that of many elements is not.
_TIMES_SLICE = 8.0
_TIMES_ELEMENT = 64.0
_ULPS = 4.0
_LEAST_OF_SLICE = 2.0**-10
_FEWEST_IN_SLICE = 16


@dataclasses.dataclass(frozen=True)
class Deviation:
    """How far one array is from its exact value, and how far it may be.

    Attributes:
        off_by: How far the element is off that exceeds the most, or comes nearest to it, relative
            to the largest value of its array (to the largest rounding error if that is larger).
        allowed: How far that element may be off, relative to the same.
        excess: The one divided by the other, which is at most 1 if all is well.
        problem: What differs in more than rounding.
    """

    off_by: float = 0.0
    allowed: float = 0.0
    excess: float = 0.0
    problem: str = ""

    @property
    def ok(self) -> bool:
        """Whether the array is where it may be."""
        return not self.problem and self.excess <= 1


def errors_of(exact: np.ndarray, runs: Sequence[np.ndarray]) -> np.ndarray:
    """The largest error of each element over some runs; zero where there is no finite number.

    >>> errors_of(np.float64([1, 2]), [np.float64([1.5, 2]), np.float64([1, 1.75])])
    array([0.5 , 0.25])
    """
    largest = np.zeros(exact.shape)
    with np.errstate(invalid="ignore", over="ignore"):
        for run in runs:
            error = np.abs(widest(run) - exact)
            largest = np.maximum(largest, np.where(np.isfinite(error), error, 0))
    return largest


def allowances(exact: np.ndarray, errors: np.ndarray, epsilon: float) -> np.ndarray:
    """How far each element may be off.

    An element may have eight times the largest error of its row, column and so on, whichever is
    least, and 64 times its own; in addition four units in the last place of its value.

    Args:
        exact: The exact values.
        errors: The original's errors.
        epsilon: The machine epsilon of the dtype that the values are rounded to.

    >>> exact, errors = np.float64([1, 1e6]), np.float64([1e-7, 0.1])
    >>> np.round(allowances(exact, errors, 0.0), 6)
    array([0.006256, 0.8     ])
    """
    if not exact.size:
        return errors
    finite = np.where(np.isfinite(exact), np.abs(exact), 0)
    shared = np.full(exact.shape, errors.max())
    for dimension in range(exact.ndim):
        others = tuple(other for other in range(exact.ndim) if other != dimension)
        if exact.size // exact.shape[dimension] >= _FEWEST_IN_SLICE:
            shared = np.minimum(shared, errors.max(axis=others, keepdims=True))
    own = errors + _LEAST_OF_SLICE * shared
    units = _ULPS * epsilon * finite
    return np.minimum(_TIMES_SLICE * shared, _TIMES_ELEMENT * own) + units


def deviation(exact: np.ndarray, found: np.ndarray, allowed: np.ndarray, scale: float) -> Deviation:
    """Compares an array with its exact values.

    Args:
        exact: The exact values.
        found: The values found, of the same shape.
        allowed: How far each may be off.
        scale: What the figures are to be relative to.

    >>> found = deviation(np.float64([1, 2]), np.float64([1, 3]), np.float64([0.1, 0.1]), 2.0)
    >>> found.off_by, found.allowed, found.ok
    (0.5, 0.05, False)
    """
    found = widest(found)
    same = equal_elements(exact, found)
    finite = np.isfinite(exact) & np.isfinite(found)
    if not np.all(same | finite):
        off = int(np.sum(~(same | finite)))
        return Deviation(
            np.inf, 0.0, np.inf, f"{off} of {exact.size} elements are not finite alike"
        )
    scale = scale or 1.0
    if np.all(same):
        return Deviation(allowed=float(allowed.max(initial=0)) / scale)
    apart = np.abs(np.where(same, 0, exact) - np.where(same, 0, found))
    with np.errstate(divide="ignore", invalid="ignore"):
        excess = np.where(apart > 0, apart / allowed, 0)
    worst = np.unravel_index(np.argmax(excess), excess.shape)
    return Deviation(
        float(apart[worst]) / scale, float(allowed[worst]) / scale, float(excess[worst])
    )


def largest_of(array: np.ndarray) -> float:
    """The largest finite magnitude in an array; zero if there is none.

    >>> largest_of(np.float64([1, -3, np.inf]))
    3.0
    """
    magnitudes = np.abs(array[np.isfinite(array)])
    return float(magnitudes.max(initial=0))
