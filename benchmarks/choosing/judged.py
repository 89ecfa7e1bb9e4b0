"""The picks of ``choose_layout``, judged by the compiled steps of all sane layouts."""

import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence

import numpy as np
from scipy import stats

from benchmarks.choosing.judge import Verdict, verdict
from benchmarks.choosing.pairs import Pair
from penzai_shard.choosing.candidates import Candidate
from penzai_shard.choosing.choices import Choices
from penzai_shard.choosing.choices.asked_devices import AskedDevices
from penzai_shard.choosing.choices.asked_problem import AskedProblem
from penzai_shard.choosing.choices.choose import searched
from penzai_shard.choosing.choices.layout_words import candidate_words
from penzai_shard.choosing.choices.search import ExtrapolatingStage, Stage
from penzai_shard.choosing.choices.stages import stages_of
from penzai_shard.choosing.step_costs import StepCost
from penzai_shard.choosing.step_times import StepTime
from penzai_shard.errors import NothingFitsError, ShardingError

# Of all layouts this part fits; of the last one a single one does.
FITTING: Mapping[str, float] = {"all fit": 1.0, "half": 0.5, "a tenth": 0.1, "one": 0.0}
# So many layouts for each that is priced by propagation, and for each that is compiled at first.
PER_PROPAGATED, PER_COMPILED = 2, 6
MOST_COMPILED = 12
# The judge's linear programs are solved to about nine digits.
_ALIKE = 1e-6
# Limits are above what the last one that fits needs by so much.
_SLACK = 1e-3
# What is said to be nearest may need so much more than what needs least.
_NEAREST = 1.05


@dataclasses.dataclass(frozen=True)
class Picked:
    """What became of the question with one limit of memory.

    Attributes:
        fitting: How many layouts fit, by the judge.
        compiled: How many layouts the search compiled.
        slower: By which part the pick takes longer than the best that fits; infinite without a
            pick.
        over: How much more memory it needs than there is, as a part of the limit.
    """

    fitting: int
    compiled: int
    slower: float
    over: float

    @property
    def is_best(self) -> bool:
        """Whether nothing that fits is faster."""
        return self.slower <= _ALIKE


@dataclasses.dataclass(frozen=True)
class Judged:
    """What became of a pair.

    Attributes:
        count: How many layouts the judge compiled.
        spearman: Of each quicker way to price, the coefficient with the judge's price.
        picks: By how much fits.
        apart: By which part times and memory as the search compiled them differ from the judge's,
            at most.
        is_refused: Whether, where nothing fits, it was said so with a layout that needs little.
    """

    count: int
    spearman: Mapping[str, float]
    picks: Mapping[str, Picked]
    apart: tuple[float, float]
    is_refused: bool


class Remembered:
    """A stage that prices each candidate once, however often it is asked."""

    def __init__(self, stage: Stage) -> None:
        self.name = stage.name
        self.known: dict[Candidate, StepCost | ShardingError] = {}
        self._stage = stage

    def costs(self, candidates: Sequence[Candidate]) -> Iterator[StepCost | ShardingError]:
        """What each costs."""
        asked = self._stage.costs([one for one in candidates if one not in self.known])
        for one in candidates:
            if one not in self.known:
                self.known[one] = next(asked)
            yield self.known[one]

    @property
    def is_extrapolating(self) -> bool:
        """Whether costs follow from those of fewer blocks."""
        return isinstance(self._stage, ExtrapolatingStage) and self._stage.is_extrapolating

    def closer_costs(self, candidates: Sequence[Candidate]) -> Iterator[StepCost | ShardingError]:
        """What each costs, extrapolated from one block more."""
        assert isinstance(self._stage, ExtrapolatingStage)
        yield from self._stage.closer_costs(candidates)

    def whole_costs(self, candidates: Sequence[Candidate]) -> Iterator[StepCost | ShardingError]:
        """What each costs, extrapolated from nothing."""
        assert isinstance(self._stage, ExtrapolatingStage)
        yield from self._stage.whole_costs(candidates)

    def close(self) -> None:
        """Keeps everything for the next search."""


def judged(pair: Pair) -> Judged:
    """Compiles every layout of a pair, and judges prices and picks by that."""
    asked = pair.asked()
    found = pair.candidates(asked)
    verdicts = dict(_verdicts(pair, asked, found))
    stages = stages_of(asked.problem)
    remembered = [Remembered(stage) for stage in stages]
    try:
        for stage in remembered[:2]:
            list(stage.costs(list(verdicts)))
        picks = {
            name: _picked(pair, asked, verdicts, remembered, part) for name, part in FITTING.items()
        }
        is_refused = _is_refused(pair, asked, verdicts, remembered)
    finally:
        for stage in stages:
            stage.close()
    times = [
        {
            one: StepTime.of(cost, one.mesh_shape, pair.hardware)
            for one, cost in stage.known.items()
            if isinstance(cost, StepCost) and one in verdicts
        }
        for stage in remembered
    ]
    spearman = {
        stage.name: spearman_of(
            [(time.bound, time.without_overlap) for time in prices.values()],
            [verdicts[one].price for one in prices],
        )
        for stage, prices in zip(remembered[:2], times, strict=False)
    }
    compiled = remembered[2].known
    apart = (
        max(abs(time.bound / verdicts[one].time - 1) for one, time in times[2].items()),
        max(abs(compiled[one].memory_bytes / verdicts[one].memory - 1) for one in times[2]),
    )
    return Judged(len(verdicts), spearman, picks, apart, is_refused)


def _verdicts(
    pair: Pair, asked: AskedProblem, found: Sequence[Candidate]
) -> Iterator[tuple[Candidate, Verdict]]:
    """What each layout costs, without those that cannot be laid out."""
    for one in found:
        try:
            yield one, verdict(asked.problem, one, pair.hardware)
        except ShardingError:
            continue


def _search(
    pair: Pair,
    asked: AskedProblem,
    found: Sequence[Candidate],
    stages: Sequence[Stage],
    limit: int,
) -> Choices:
    """As ``choose_layout`` searches, with fewer places for the later stages."""
    devices = AskedDevices(pair.hardware, pair.mesh, limit)
    most = {
        "names": len(found),
        "propagation": max(len(found) // PER_PROPAGATED, 1),
        "compiled": min(max(len(found) // PER_COMPILED, 1), MOST_COMPILED),
    }
    return searched(asked, devices, found, stages, most=most, progress=False)


def _picked(
    pair: Pair,
    asked: AskedProblem,
    verdicts: Mapping[Candidate, Verdict],
    stages: Sequence[Stage],
    part: float,
) -> Picked:
    held = sorted(one.memory for one in verdicts.values())
    limit = round(held[min(int(part * len(held)), len(held) - 1)] * (1 + _SLACK))
    fitting = [one for one in verdicts.values() if one.memory <= limit]
    best = min(one.time for one in fitting)
    try:
        choices = _search(pair, asked, list(verdicts), stages, limit)
    except NothingFitsError:
        return Picked(len(fitting), 0, math.inf, 0.0)
    pick = verdicts[choices.best.priced.candidate]
    compiled = len(choices.found.priced["compiled"])
    return Picked(
        len(fitting), compiled, max(pick.time / best - 1, 0.0), max(pick.memory / limit - 1, 0.0)
    )


def _is_refused(
    pair: Pair,
    asked: AskedProblem,
    verdicts: Mapping[Candidate, Verdict],
    stages: Sequence[Stage],
) -> bool:
    """Whether it is said that nothing fits into half of what is needed, and what needs least."""
    least = min(one.memory for one in verdicts.values())
    try:
        _search(pair, asked, list(verdicts), stages, least // 2)
    except NothingFitsError as error:
        said = str(error)
        return any(
            one.memory <= _NEAREST * least and f": {candidate_words(candidate)}." in said
            for candidate, one in verdicts.items()
        )
    return False


def spearman_of(one: Sequence[tuple[float, float]], other: Sequence[tuple[float, float]]) -> float:
    """The coefficient of two rankings; of equal bounds the sum of what overlaps decides."""
    ranks = [
        np.unique([_rounded(price) for price in side], axis=0, return_inverse=True)[1]
        for side in (one, other)
    ]
    if any(len(set(rank.tolist())) == 1 for rank in ranks):
        return 1.0 if (ranks[0] == ranks[1]).all() else 0.0
    return float(stats.spearmanr(ranks[0].ravel(), ranks[1].ravel()).statistic)


def _rounded(price: tuple[float, float]) -> list[float]:
    return [float(f"{figure:.6g}") for figure in price]
