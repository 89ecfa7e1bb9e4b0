"""How far one array of an edited model is from the original's."""

import dataclasses
from typing import Any

import jax.numpy as jnp
import numpy as np

from penzai_shard.surgery.equivalence.comparable_arrays import is_float, to_numpy, widest
from penzai_shard.surgery.equivalence.yardsticks import Deviation, deviation, largest_of


@dataclasses.dataclass(frozen=True)
class ArrayComparison:
    """How far one array of the edited model is from the original's.

    Attributes:
        name: Its name.
        ulps: The largest difference between the two models as they are, in units in the last place.
        relative: The same relative to the largest value of the array.
        rounding: The largest rounding error of the original, relative to the largest value of
            the array: the yardstick.
        own: How far the edited model as it is is from the original in float64.
        function: How far the two are from each other in float64; None if that is not known.
        cancels: Whether the exact value is near zero by cancellation, so that the original itself
            gives little more than its rounding errors.
    """

    name: str
    ulps: float = 0.0
    relative: float = 0.0
    rounding: float = 0.0
    own: Deviation = dataclasses.field(default_factory=Deviation)
    function: Deviation | None = None
    cancels: bool = False

    @property
    def same_function(self) -> bool:
        """Whether nothing differs in float64, as far as that is known."""
        return self.function is None or self.function.ok

    @property
    def ok(self) -> bool:
        """Whether nothing differs beyond what rounding explains."""
        return self.own.ok and self.same_function

    @property
    def excess(self) -> float:
        """What is off divided by what is allowed, the larger of the two."""
        return max(self.own.excess, self.function.excess if self.function else 0.0)

    @property
    def problem(self) -> str:
        """What differs in more than rounding; empty if figures say it all."""
        if self.function is not None and self.function.problem:
            return f"{self.function.problem} in float64"
        return self.own.problem


@dataclasses.dataclass(frozen=True)
class Comparison:
    """One group of values of both models.

    Attributes:
        what: ``"outputs"``, ``"gradients"``, ``"state variables"`` or ``"parameters"``.
        count: How many arrays, or names in the case of the parameters, were compared.
        arrays: One per array; of the parameters those of which the values differ.
        problems: What differs in more than rounding.
    """

    what: str
    count: int = 0
    arrays: tuple[ArrayComparison, ...] = ()
    problems: tuple[str, ...] = ()

    @property
    def ok(self) -> bool:
        """Whether nothing differs beyond what rounding explains."""
        return not self.problems and all(array.ok for array in self.arrays)

    @property
    def furthest(self) -> ArrayComparison | None:
        """The array that exceeds the most what is allowed, or comes nearest to it."""
        return max(self.arrays, key=lambda array: (array.excess, array.relative), default=None)

    @property
    def worst(self) -> str:
        """Its name; empty if all arrays are equal."""
        furthest = self.furthest
        equal = furthest is None or (furthest.excess == 0 and furthest.relative == 0)
        return "" if furthest is None or equal else furthest.name

    @property
    def ulps(self) -> float:
        """The largest difference of an array, in units in the last place."""
        return max((array.ulps for array in self.arrays), default=0.0)

    @property
    def relative(self) -> float:
        """The largest difference of an array, relative to the largest value of that array."""
        return max((array.relative for array in self.arrays), default=0.0)

    def with_problems(self, problems: tuple[str, ...]) -> "Comparison":
        """The same with further problems before its own."""
        return dataclasses.replace(self, problems=(*problems, *self.problems))


def difference(name: str, original: Any, edited: Any) -> ArrayComparison:
    """Compares two arrays, and allows no difference.

    Args:
        name: What to call them.
        original: An array.
        edited: Another.

    Returns:
        The comparison; its differences are infinite where only one of the two has a number.

    >>> import numpy as np
    >>> found = difference("w", np.float32([1, 2]), np.float32([1, np.nextafter(np.float32(2), 3)]))
    >>> found.ulps, found.relative < 2e-7, found.ok
    (1.0, True, False)
    """
    one, other = to_numpy(original), to_numpy(edited)
    if one.shape != other.shape:
        return incomparable(name, f"shape {list(one.shape)} became {list(other.shape)}")
    if one.dtype != other.dtype:
        return incomparable(name, f"dtype {one.dtype} became {other.dtype}")
    if np.array_equal(one, other):
        return ArrayComparison(name)
    if not is_float(one):
        return incomparable(name, f"{int(np.sum(one != other))} of {one.size} elements differ")
    largest = largest_of(widest(one))
    found = deviation(widest(one), other, np.ones(one.shape), largest)
    if found.problem:
        return incomparable(name, found.problem)
    if not found.off_by:
        return ArrayComparison(name)
    relative = found.off_by if largest else float(np.inf)
    ulps = float(_ulps_apart(one, other).max())
    return ArrayComparison(name, ulps, relative, own=Deviation(relative, 0.0, np.inf))


def incomparable(name: str, problem: str = "") -> ArrayComparison:
    """Two arrays that differ by no number that could be given.

    >>> incomparable("w", "shape [2] became [3]").ok
    False
    """
    return ArrayComparison(name, np.inf, np.inf, own=Deviation(np.inf, 0.0, np.inf, problem))


def _ulps_apart(one: np.ndarray, other: np.ndarray) -> np.ndarray:
    """Differences in units in the last place of the larger number of each two."""
    if jnp.issubdtype(one.dtype, jnp.complexfloating):
        return np.maximum(_ulps_apart(one.real, other.real), _ulps_apart(one.imag, other.imag))
    limits = jnp.finfo(one.dtype)
    wide_one, wide_other = widest(one), widest(other)
    finite = np.isfinite(wide_one) & np.isfinite(wide_other)
    wide_one, wide_other = np.where(finite, wide_one, 0), np.where(finite, wide_other, 0)
    larger = np.maximum(np.abs(wide_one), np.abs(wide_other))
    exponent = np.frexp(np.maximum(larger, float(limits.tiny)))[1] - 1
    return np.abs(wide_one - wide_other) / np.ldexp(float(limits.eps), exponent)
