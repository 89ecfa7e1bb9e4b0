"""Comparing what two models computed, array by array, on the yardstick of rounding errors."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from penzai_shard.path_folding import folding_key
from penzai_shard.surgery.equivalence.differences import difference
from penzai_shard.surgery.equivalence.model_steps import Results
from penzai_shard.surgery.equivalence.program_constants import is_float, widest
from penzai_shard.surgery.equivalence.report import ArrayComparison, Comparison
from penzai_shard.surgery.equivalence.yardsticks import (
    Deviation,
    allowances,
    deviation,
    errors_of,
    largest_of,
)

GROUPS = ("outputs", "state variables", "gradients")

# Twice how far half a unit in the last place of each constant moves a result.
_OF_CONSTANTS = 2.0 / 8.0


@dataclasses.dataclass
class Runs:
    """What an original and an edited model computed.

    Attributes:
        own: The results of both as they are.
        exact: The same in float64.
        errors: The original's rounding errors.
        lower_errors: Those that it would have in the edited model's precision, if that is lower.
        closeness: The part of what rounding explains by which the functions may differ; 1 if
            they are not known any better than the results as they are.
        coarsest: The machine epsilon that all was rounded to; 0 if to each operation's own.
        of_constants: How far the edited model moves if the constants that it brings in are
            rounded; None if that was not tried.
    """

    own: tuple[Results, Results]
    exact: tuple[Results, Results]
    errors: Results
    closeness: float
    lower_errors: Results | None = None
    coarsest: float = 0.0
    of_constants: Results | None = None


def in_groups(results: Results, change: Callable[[Any], Any]) -> Results:
    """The results with each array of real numbers changed."""
    return tuple(  # type: ignore[return-value]
        {name: change(array) if is_float(array) else array for name, array in group.items()}
        for group in results
    )


def largest_errors(exact: Results, runs: Sequence[Results]) -> Results:
    """The largest error of each element over some runs, for all arrays of real numbers."""
    return tuple(  # type: ignore[return-value]
        {
            name: errors_of(widest(array), [run[number][name] for run in runs])
            for name, array in group.items()
            if is_float(array)
        }
        for number, group in enumerate(exact)
    )


def joined_errors(one: Results, other: Results) -> Results:
    """The larger of two errors, for each element."""
    return tuple(  # type: ignore[return-value]
        {name: np.maximum(error, others[name]) for name, error in group.items()}
        for group, others in zip(one, other, strict=True)
    )


def functions_agree(comparisons: Sequence[Comparison]) -> bool:
    """Whether no array differs in float64."""
    return all(
        array.function is None or array.function.ok
        for comparison in comparisons
        for array in comparison.arrays
    )


def compared(
    runs: Runs, groups: Sequence[str], rtol: float, added: Sequence[str]
) -> list[Comparison]:
    """Compares two models' results.

    Args:
        runs: What they computed.
        groups: Which of ``GROUPS`` to compare.
        rtol: What is allowed in any case, relative to the largest value of an array.
        added: Names of parameters that the edited model has alone.
    """
    return [_group(number, what, runs, rtol, added) for number, what in enumerate(groups)]


def _group(number: int, what: str, runs: Runs, rtol: float, added: Sequence[str]) -> Comparison:
    original, edited = runs.own[0][number], runs.own[1][number]
    word = what.removesuffix("s")
    problems = [
        f"{name or 'the output'}: {word} is missing from the edited model"
        for name in original
        if name not in edited
    ]
    # What only the edited model has by way of state was told; so were the parameters.
    if what == "outputs":
        problems += [
            f"{name or 'the output'}: {word} of the edited model alone"
            for name in edited
            if name not in original
        ]
    arrays = [_array(name, number, runs, rtol) for name in original if name in edited]
    off = sorted((array for array in arrays if not array.ok), key=lambda array: -array.excess)
    # Arrays alike get the figures of the worst of them, so that they are one line for people.
    alike: dict[str, list[ArrayComparison]] = {}
    for array in off:
        in_float64 = array.function is not None and not array.function.ok
        key = array.name if _told(array) else f"{in_float64} {folding_key(array.name)}"
        alike.setdefault(key, []).append(array)
    problems += [
        f"{array.name}: {word} {_what_is_off(members[0], 'up to ' if len(members) > 1 else '')}"
        for members in alike.values()
        for array in members
    ]
    return Comparison(what, len(arrays), tuple(arrays), tuple(problems))


def _told(array: ArrayComparison) -> str:
    """What differs in more than rounding; empty if there are figures for it."""
    for found, where in ((array.function, " in float64"), (array.own, "")):
        if found is not None and found.problem:
            return f"{found.problem}{where}"
    return ""


def _what_is_off(array: ArrayComparison, up_to: str) -> str:
    if told := _told(array):
        return told
    if array.function is not None and not array.function.ok:
        return (
            f"is off by {up_to}{array.function.off_by:.1g} in float64, where "
            f"{array.function.allowed:.1g} is allowed"
        )
    return f"is off by {up_to}{array.own.off_by:.1g}, and rounding explains {array.own.allowed:.1g}"


def _array(name: str, number: int, runs: Runs, rtol: float) -> ArrayComparison:
    one, other = runs.own[0][number][name], runs.own[1][number][name]
    apart = difference(name or "the output", one, other)
    if apart.problem and (
        one.dtype != other.dtype or one.shape != other.shape or not is_float(one)
    ):
        return ArrayComparison(
            apart.name,
            apart.ulps,
            apart.relative,
            own=Deviation(np.inf, 0.0, np.inf, apart.problem),
        )
    if not is_float(one):
        return ArrayComparison(apart.name)
    exact, errors = runs.exact[0][number][name], runs.errors[number][name]
    own_errors = (runs.lower_errors or runs.errors)[number][name]
    largest = largest_of(exact)
    rounding = float(own_errors.max(initial=0))
    scale = max(largest, rounding)
    own_epsilon = float(jnp.finfo(one.dtype).eps)
    epsilon = max(own_epsilon, runs.coarsest)
    allowed = np.maximum(allowances(exact, own_errors, epsilon), rtol * largest)
    # Where float64 reaches further than the model, both must have no number there.
    numbers = np.isfinite(exact) & np.isfinite(widest(one))
    reference = np.where(numbers, exact, widest(one))
    with np.errstate(invalid="ignore"):
        beyond = 64 * epsilon * np.where(np.isfinite(reference), np.abs(reference), 0)
    own = deviation(reference, other, np.where(numbers, allowed, beyond), scale)
    function = None
    if runs.closeness < 1:
        explained = allowances(exact, errors, own_epsilon)
        close = np.maximum(runs.closeness * explained, rtol * largest)
        if runs.of_constants is not None and name in runs.of_constants[number]:
            close = close + _OF_CONSTANTS * allowances(exact, runs.of_constants[number][name], 0.0)
        function = deviation(exact, runs.exact[1][number][name], close, scale)
    if np.array_equal(one, other, equal_nan=True):
        own = dataclasses.replace(own, off_by=0.0, excess=0.0, problem="")
    return ArrayComparison(
        apart.name,
        apart.ulps,
        apart.relative,
        rounding / scale if scale else 0.0,
        own,
        function,
        cancels=0 < largest <= 8 * rounding,
    )
