"""Running an original and an edited model, and comparing what they compute, array by array.

Each model runs as it is, and in float64, where a program shows the function that it computes
without its rounding. The functions must agree far more closely than the original rounds; the
results as they are, as closely as the original's own rounding errors reach (``yardsticks``).
"""

import dataclasses
from collections.abc import Sequence

import jax.numpy as jnp
import numpy as np

from penzai_shard.path_folding import folding_key
from penzai_shard.surgery.equivalence.array_comparisons import (
    ArrayComparison,
    Comparison,
    difference,
)
from penzai_shard.surgery.equivalence.comparable_arrays import epsilon_of, is_float, widest
from penzai_shard.surgery.equivalence.divergence import Divergence, first_to_differ
from penzai_shard.surgery.equivalence.model_steps import (
    GRADIENTS,
    OUTPUTS,
    STATE,
    ModelStep,
    Results,
    largest_errors,
)
from penzai_shard.surgery.equivalence.random_rounding import WIDEST_EPSILON
from penzai_shard.surgery.equivalence.yardsticks import allowances, deviation, largest_of

_RUNS_OF_CONSTANTS = 8

# Twice how far half a unit in the last place of each constant moves a result.
_OF_CONSTANTS = 2.0 / 8.0


class PairedRuns:
    """What an original and an edited model compute, and how it compares.

    Args:
        original: The original's step.
        edited: The edited model's.
        rtol: What may differ in any case, relative to the largest value of an array.
        notes: Gets what else there is to know.

    Attributes:
        comparisons: One per group of values; again with other roundings where the first yardstick
            was not enough.
        precision: The dtype that the edited model rounds to where the original keeps more digits,
            if that was needed to call them equivalent.
    """

    def __init__(
        self, original: ModelStep, edited: ModelStep, rtol: float, notes: list[str]
    ) -> None:
        self._original, self._edited = original, edited
        self._groups = (OUTPUTS, STATE, GRADIENTS) if original.gradients else (OUTPUTS, STATE)
        self._rtol, self._notes = rtol, notes
        self.precision = ""
        self._own = original.results, edited.results
        self._in_float64 = self._runs_in_float64()
        if self._in_float64:
            self._exact = original.wider.results, edited.wider.results
        else:
            self._exact = _widened(original.results), _widened(edited.results)
        self._closeness = self._part_of_rounding()
        self._errors = original.rounding_errors(self._in_float64)
        # The errors that the original would have in the edited model's precision, if that is
        # lower; the machine epsilon that all was rounded to for that.
        self._own_errors, self._coarsest = self._errors, 0.0
        # How far the edited model moves if the constants that it brings in are rounded, if that
        # was tried.
        self._of_constants: Results = {}
        self.comparisons = self._compared()
        self._allow_for_new_constants()
        self._allow_for_lower_precision()

    def _runs_in_float64(self) -> bool:
        try:
            for step in (self._original, self._edited):
                step.wider  # noqa: B018 (it is made when it is first asked for)
        # Any layer may fail in any way where its arrays have another dtype than it was written for.
        except Exception as error:
            self._notes.append(
                "The models do not run in float64, so that a change smaller than rounding is not "
                f"found ({_first_line_of(error)})."
            )
            return False
        return True

    def _part_of_rounding(self) -> float:
        """By which part of what rounding explains the functions may differ.

        It is 1 if they are not known any better than the results as they are.
        """
        if not self._in_float64:
            return 1.0
        if opaque := sorted(self._original.wider.opaque | self._edited.wider.opaque):
            self._notes.append(
                "not run in float64, so that a change in them that is smaller than rounding "
                f"is not found: {', '.join(opaque)}"
            )
            return 1.0
        finest = min(self._original.epsilons, default=WIDEST_EPSILON)
        # Halfway between what float64 rounds and what the model rounds.
        return float(np.sqrt(WIDEST_EPSILON / max(finest, WIDEST_EPSILON)))

    def _allow_for_new_constants(self) -> None:
        """Where the functions differ: a new constant is known to half a unit of its last place."""
        if not self._in_float64 or self._same_functions or not self._edited.wider.has_new_constants:
            return
        rounded = self._edited.wider.rounded(_RUNS_OF_CONSTANTS, scale=1.0)
        self._of_constants = largest_errors(self._exact[1], rounded)
        self.comparisons = self._compared()

    def _allow_for_lower_precision(self) -> None:
        """Where the results differ: the original may be rounded as coarsely as the edited model."""
        coarsest = max(self._edited.epsilons, default=0.0)
        # Where the functions are compared in float64, a lower precision in some places is safe.
        usual = min if self._closeness < 1 else max
        is_lower = coarsest > usual(self._original.epsilons, default=coarsest)
        if not is_lower or all(comparison.ok for comparison in self.comparisons):
            return
        self._own_errors = self._original.rounding_errors(self._in_float64, coarsest)
        self._coarsest = coarsest
        before, self.comparisons = self.comparisons, self._compared()
        if sum(one.ok for one in self.comparisons) > sum(one.ok for one in before):
            self.precision = _dtype_of(coarsest)
            self._notes.append(
                "The edited model rounds to fewer digits than the original: it may be off by "
                f"what the original would be if it rounded all to {self.precision}."
            )

    @property
    def has_float_outputs(self) -> bool:
        """Whether an output of the original is an array of real numbers."""
        return any(of == OUTPUTS and is_float(array) for (of, _), array in self._own[0].items())

    @property
    def _same_functions(self) -> bool:
        """Whether no array differs in float64, as far as that is known."""
        return all(array.same_function for each in self.comparisons for array in each.arrays)

    def first_divergence(self) -> Divergence | None:
        """The first layer that both have whose output differs; None if it cannot be found."""
        epsilons = {*self._original.epsilons, *self._edited.epsilons} or {WIDEST_EPSILON}
        in_float64 = not self._same_functions
        if not in_float64:
            tolerance = 2 * max(epsilons) ** 0.75
        elif self._of_constants:
            tolerance = min(epsilons)
        else:
            tolerance = float(np.sqrt(WIDEST_EPSILON * min(epsilons)))
        try:
            original, edited = (
                step.recordings(in_float64) for step in (self._original, self._edited)
            )
        # A callback is not allowed everywhere, and a layer may refuse one in any way.
        except Exception as error:
            self._notes.append(
                "the first layer to differ was not found: with a callback around every layer the "
                f"models do not run ({_first_line_of(error)})"
            )
            return None
        return first_to_differ(original, edited, max(tolerance, self._rtol))

    def _compared(self) -> list[Comparison]:
        return [self._group(group) for group in self._groups]

    def _group(self, group: str) -> Comparison:
        original, edited = (
            dict.fromkeys(name for of, name in results if of == group) for results in self._own
        )
        word = group.removesuffix("s")
        problems = [
            f"{name or 'the output'}: {word} is missing from the edited model"
            for name in original
            if name not in edited
        ]
        # State that only the edited model has is reported in a note, parameters by themselves.
        if group == OUTPUTS:
            problems += [
                f"{name or 'the output'}: {word} of the edited model alone"
                for name in edited
                if name not in original
            ]
        arrays = [self._array(group, name) for name in original if name in edited]
        problems += [f"{name}: {word} {text}" for name, text in _what_is_off(arrays)]
        return Comparison(group, len(arrays), tuple(arrays), tuple(problems))

    def _array(self, group: str, name: str) -> ArrayComparison:
        key = group, name
        one, other = (results[key] for results in self._own)
        apart = difference(name or "the output", one, other)
        if one.dtype != other.dtype or one.shape != other.shape or not is_float(one):
            return apart
        exact, own_errors = self._exact[0][key], self._own_errors[key]
        largest, rounding = largest_of(exact), float(own_errors.max(initial=0))
        scale = max(largest, rounding)
        epsilon = max(epsilon_of(one), self._coarsest)
        allowed = np.maximum(allowances(exact, own_errors, epsilon), self._rtol * largest)
        # Where float64 reaches further than the model, both must have no number there.
        numbers = np.isfinite(exact) & np.isfinite(widest(one))
        reference = np.where(numbers, exact, widest(one))
        with np.errstate(invalid="ignore"):
            beyond = 64 * epsilon * np.where(np.isfinite(reference), np.abs(reference), 0)
        own = deviation(reference, other, np.where(numbers, allowed, beyond), scale)
        if np.array_equal(one, other, equal_nan=True):
            own = dataclasses.replace(own, off_by=0.0, excess=0.0, problem="")
        function = None
        if self._closeness < 1:
            explained = allowances(exact, self._errors[key], epsilon_of(one))
            close = np.maximum(self._closeness * explained, self._rtol * largest)
            if key in self._of_constants:
                moved = allowances(exact, self._of_constants[key], 0.0)
                close = close + _OF_CONSTANTS * moved
            function = deviation(exact, self._exact[1][key], close, scale)
        return dataclasses.replace(
            apart,
            rounding=rounding / scale if scale else 0.0,
            own=own,
            function=function,
            cancels=0 < largest <= 8 * rounding,
        )


def _first_line_of(error: Exception) -> str:
    first, _, _ = str(error).strip().partition("\n")
    return f"{type(error).__name__}: {first}"


def _what_is_off(arrays: Sequence[ArrayComparison]) -> list[tuple[str, str]]:
    """The arrays that differ by name, the worst first, and in what.

    Arrays alike get the figures of the worst of them, so that they are one line for people.
    """
    alike: dict[tuple[str, bool], list[ArrayComparison]] = {}
    for array in sorted(arrays, key=lambda array: -array.excess):
        if not array.ok:
            name = array.name if array.problem else folding_key(array.name)
            alike.setdefault((name, array.same_function), []).append(array)
    return [
        (array.name, _figures(members[0], "up to " if len(members) > 1 else ""))
        for members in alike.values()
        for array in members
    ]


def _figures(array: ArrayComparison, up_to: str) -> str:
    if array.problem:
        return array.problem
    if array.function is not None and not array.function.ok:
        return (
            f"is off by {up_to}{array.function.off_by:.1g} in float64, where "
            f"{array.function.allowed:.1g} is allowed"
        )
    return f"is off by {up_to}{array.own.off_by:.1g}, and rounding explains {array.own.allowed:.1g}"


def _widened(results: Results) -> Results:
    return {key: widest(array) if is_float(array) else array for key, array in results.items()}


def _dtype_of(epsilon: float) -> str:
    """The dtype that rounds so coarsely."""
    for dtype in ("float64", "float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2"):
        if float(jnp.finfo(dtype).eps) == epsilon:
            return dtype
    return f"units of {epsilon:.1g}"
