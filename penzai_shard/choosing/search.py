"""Searches for the quickest candidate that fits: estimates rank, exact prices decide.

An estimate may be wrong by a factor, mostly by the same one for candidates that are alike. So what
is compiled corrects the estimates of what is not. Nothing here knows what a candidate is.
"""

import collections
import math
import statistics
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import NamedTuple

# How these four were found: 764 layouts of 16 models, each compiled, searched under limits into
# which all, half, a tenth and one of them fit. 62 of 64 picks were within 2 % of the best.

# Over the limit by no more than this, a corrected estimate still counts as likely to fit.
_LIKELY = 1.02
# By no more than this, the candidate may fit: it is compiled where it would be clearly quicker.
_POSSIBLY = 1.25
# Below this part of the best time a candidate is clearly quicker.
_QUICKER = 0.98
# What is slower than all can be by no more than this part is as good as any.
CERTAIN = 0.005
# Candidates are compiled in so many lots, so that each lot learns of those before.
_LOTS = 3


class Price(NamedTuple):
    """What a candidate costs; of two the smaller is the better one.

    Attributes:
        seconds: The time of a step.
        total: The time without any overlap, which decides between equal times.
        memory: What one device holds, in bytes.
    """

    seconds: float
    total: float
    memory: float


def search(
    estimates: Mapping[int, Price],
    kinds: Mapping[int, Sequence[Hashable]],
    compile: Callable[[list[int]], Sequence[Price]],
    limit: float,
    most: int,
    least: float = 0.0,
) -> dict[int, Price]:
    """Finds exact prices of the candidates that matter.

    It stops after ``most``; where something is likely quicker than the best that fits, after twice
    as many; where nothing fits yet, after four times as many; and at once where nothing can be
    quicker.

    Args:
        estimates: What each candidate costs, about, by its number.
        kinds: What each has in common with others, the closest first.
        compile: Gives the exact prices of some candidates.
        limit: The memory of a device, in bytes.
        most: How many candidates to compile.
        least: The seconds below which none can be.

    Returns:
        The exact price of each candidate that was compiled.

    >>> estimates = {7: Price(1.0, 1.0, 9.0), 8: Price(2.0, 2.0, 5.0)}
    >>> exact = {7: Price(1.1, 1.1, 9.0), 8: Price(2.1, 2.1, 5.0)}
    >>> kinds = {7: [()], 8: [()]}
    >>> search(estimates, kinds, lambda numbers: [exact[i] for i in numbers], 6.0, 3)[8]
    Price(seconds=2.1, total=2.1, memory=5.0)
    """
    exact: dict[int, Price] = {}
    end = 4 * most
    while len(exact) < end:
        corrected = _correct(estimates, exact, kinds)
        left = [number for number in estimates if number not in exact]
        best = min((p.seconds for p in exact.values() if p.memory <= limit), default=None)
        if best is not None:
            # However late the first that fits is found, some that may be quicker are compiled.
            end = min(end, max(2 * most, len(exact) + max(most // 2, 1)))
            if best <= least * (1 + CERTAIN):
                break
        # Once there are enough, only what would be quicker counts.
        slowest = best * _QUICKER if best is not None and len(exact) >= most else math.inf
        left = [number for number in left if corrected[number].seconds < slowest]
        likely = [number for number in left if corrected[number].memory <= limit * _LIKELY]
        rest = [number for number in left if corrected[number].memory > limit * _LIKELY]
        if slowest < math.inf:
            rest = [number for number in rest if corrected[number].memory <= limit * _POSSIBLY]
        likely.sort(key=lambda number: (corrected[number].seconds, estimates[number]))
        rest.sort(key=lambda number: (corrected[number].memory, estimates[number]))
        lot = [*likely, *rest][: max(most // _LOTS, 1)]
        if not lot:
            break
        exact.update(zip(lot, compile(lot), strict=True))
    return exact


def _correct(
    estimates: Mapping[int, Price],
    exact: Mapping[int, Price],
    kinds: Mapping[int, Sequence[Hashable]],
) -> dict[int, Price]:
    """The estimates times the median error of what was compiled and is the most alike."""
    errors = collections.defaultdict[Hashable, list[tuple[float, float]]](list)
    for number, price in exact.items():
        estimate = estimates[number]
        error = price.seconds / (estimate.seconds or 1e-12), price.memory / (estimate.memory or 1)
        for kind in kinds[number]:
            errors[kind].append(error)
    corrected = {}
    for number, (seconds, total, held) in estimates.items():
        alike = next((errors[kind] for kind in kinds[number] if kind in errors), [(1.0, 1.0)])
        time, memory = map(statistics.median, zip(*alike, strict=True))
        corrected[number] = Price(seconds * time, total * time, held * memory)
    return corrected
