"""The search: all candidates priced quickly, the best of them more and more exactly."""

import collections
import dataclasses
import itertools
import math
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from typing import Protocol, TypeAlias, runtime_checkable

from penzai_shard.choosing.candidates import Candidate
from penzai_shard.choosing.choices.estimate_errors import (
    MARGIN_IF_CHECKED,
    EstimateErrors,
    computing_kind,
    way_of_computing,
)
from penzai_shard.choosing.choices.priced_candidates import Priced, Rank, StageName
from penzai_shard.choosing.choices.selection import (
    Price,
    as_bound,
    as_priced,
    best_by_price,
    leanest,
    price_of,
    selected,
    without,
)
from penzai_shard.choosing.step_costs import StepCost
from penzai_shard.choosing.step_times import StepTime
from penzai_shard.errors import ShardingError

# What is compiled is chosen in so many parts.
_PARTS = 3
# So many times as much is compiled if others seem to be clearly faster than the best that fits, or
# if nothing fits yet.
_MOST_IF_ANY_FITS = 2
_MOST_ROUNDS = 4
_CLEARLY_LESS = 0.98
# Bytes are whole numbers, so that an estimate of as much memory may seem to be less by this.
_BUT_FOR_ROUNDING = 1 - 1e-8
# What is thought to take no more than so many times as long as the best that is left may be better.
_MAY_BE_QUICKER = 1.5
# What seems to be over the limit by less than this may fit.
_NEARLY = 1.05
# What is held but for what is stored follows this well from one block and two (9 % too little at
# most was seen of microbatches in a deep model, whose first block is ordered otherwise), from two
# and three (3 %, where the compiler orders the third otherwise), and from all.
_EXTRAPOLATED_WITHIN = (0.12, 0.05, 0.0)
# So many that seem to be over the limit by no more than that are priced once more, because they may
# fit, so many of these by all of their blocks.
_MOST_DOUBTFUL = (8, 4)


class Stage(Protocol):
    """A way to price candidates."""

    @property
    def name(self) -> StageName:
        """What it is called."""

    def costs(self, candidates: Sequence[Candidate]) -> Iterator[StepCost | ShardingError]:
        """What each costs, in their order; or why it cannot be laid out so."""

    def close(self) -> None:
        """Ends what it holds, such as processes; once more does nothing."""


@runtime_checkable
class ExtrapolatingStage(Stage, Protocol):
    """A stage whose costs of deep models may follow from those of fewer blocks."""

    @property
    def is_extrapolating(self) -> bool:
        """Whether they do."""

    def closer_costs(self, candidates: Sequence[Candidate]) -> Iterator[StepCost | ShardingError]:
        """What each costs, extrapolated from one block more."""

    def whole_costs(self, candidates: Sequence[Candidate]) -> Iterator[StepCost | ShardingError]:
        """What each costs, extrapolated from nothing."""


TimeOf: TypeAlias = Callable[[Candidate, StepCost], StepTime]
CostsOf: TypeAlias = Callable[[Sequence[Candidate]], Iterator[StepCost | ShardingError]]
Watch: TypeAlias = Callable[[StageName, int, int], None]
"""Told of a stage, how many of its candidates are priced, and how many there are."""


@dataclasses.dataclass
class Found:
    """What a search has found so far.

    Attributes:
        priced: What was priced, by the stage.
        asked: How many candidates each stage was asked for.
        refused: Candidates that turned out not to be possible, with the reason.
        is_interrupted: Whether it was ended before it was through.
        in_doubt: Where nothing that was compiled fits, how many others may, as much as estimates
            of memory err.
    """

    priced: dict[StageName, list[Priced]] = dataclasses.field(default_factory=dict)
    asked: collections.Counter[StageName] = dataclasses.field(default_factory=collections.Counter)
    refused: list[tuple[Candidate, str]] = dataclasses.field(default_factory=list)
    is_interrupted: bool = False
    in_doubt: int = 0

    def all_priced(self) -> list[Priced]:
        """Every candidate with its most exact price."""
        last: dict[Candidate, Priced] = {}
        for stage in self.priced.values():
            for one in stage:
                last[one.candidate] = one
        return list(last.values())

    @property
    def refusals(self) -> list[str]:
        """The reasons, each once, if a stage refused all that it was asked for."""
        if self.is_interrupted or all(self.priced.values()):
            return []
        return list(dict.fromkeys(why for _, why in self.refused))

    def last_priced(self) -> list[Priced]:
        """What the most exact stage that priced anything has priced."""
        return next((stage for stage in reversed(self.priced.values()) if stage), [])

    def ranked(self, limit: int) -> list[Priced]:
        """The candidates to choose from, the best first.

        Those of the last stage alone that are within the limit by it. Of a search that was
        interrupted before any of these was found, those of the stage before, without what turned
        out to be over the limit since.
        """
        exact = {one.candidate: one for one in self.all_priced()}
        for stage in reversed(self.priced.values()):
            fitting = [one for one in stage if exact[one.candidate] is one and one.memory <= limit]
            if fitting or not self.is_interrupted:
                return sorted(fitting, key=lambda one: one.rank)
        return []


@dataclasses.dataclass(frozen=True)
class Search:
    """How candidates are searched.

    Attributes:
        limit: The memory of a device, in bytes.
        time_of: The least time of a cost.
        most: How many candidates each later stage prices.
        watch: Told how far it is.
        found: What is found so far.
    """

    limit: int
    time_of: TimeOf
    most: dict[StageName, int]
    watch: Watch
    found: Found = dataclasses.field(default_factory=Found)

    def run(self, candidates: Sequence[Candidate], stages: Sequence[Stage]) -> Found:
        """Prices candidates by one stage after the other.

        Args:
            candidates: All of them.
            stages: From the quickest to the most exact one.

        Returns:
            What was found, also if it is interrupted by ``KeyboardInterrupt`` once something
            is priced.
        """
        found = self.found
        try:
            first, *later = stages
            self._price(first, candidates)
            before = first
            for stage in later:
                before.close()
                priced = found.priced[before.name]
                price = self._compile if stage.name == "compiled" else self._narrow
                price(stage, priced)
                before = stage
        except KeyboardInterrupt:
            if not any(found.priced.values()):
                raise
            found.is_interrupted = True
        finally:
            for stage in stages:
                stage.close()
        return found

    def _price(
        self,
        stage: Stage,
        candidates: Sequence[Candidate],
        expected: int = 0,
        costs_of: CostsOf | None = None,
    ) -> None:
        found = self.found
        priced = found.priced.setdefault(stage.name, [])
        before = found.asked[stage.name]
        count = max(expected, before + len(candidates))
        self.watch(stage.name, before, count)
        costs = (costs_of or stage.costs)(candidates)
        for number, (candidate, cost) in enumerate(zip(candidates, costs, strict=True), 1):
            if isinstance(cost, ShardingError):
                found.refused.append((candidate, str(cost)))
            elif unfit := cost.unfit_figure:
                reason = f"the stage {stage.name!r} gave no price: {unfit}."
                found.refused.append((candidate, reason))
            else:
                time = self.time_of(candidate, cost)
                priced.append(Priced(candidate, stage.name, cost, time))
            found.asked[stage.name] = before + number
            self.watch(stage.name, before + number, count)

    def _narrow(self, stage: Stage, estimated: Sequence[Priced]) -> None:
        """Prices the best in several parts, each chosen by what is known of those before."""
        checked = self.found.priced.setdefault(stage.name, [])
        most = min(self.most[stage.name], len(estimated))
        left, prices = list(estimated), set[Price]()
        for part in _parts(most):
            errors = EstimateErrors.of(checked, estimated)
            fitting = [one for one in left if errors.likely_memory(one) <= self.limit]
            time = min((one.time.bound for one in fitting), default=math.inf)
            ways = self._best_of_unchecked_ways(left, checked, errors)
            best = ways[: part // 2 if checked else part - part // _PARTS]
            doubtful = without(left, [*fitting, *best])
            best += self._quicker_of_kinds(doubtful, errors, time, (part - len(best)) // 2)
            # Which of the two stages is right is not known yet.
            learned = errors.likely_memory, errors.likely_time
            for memory_of, time_of in (learned, (as_priced, as_bound)):
                open_ = part - len(best)
                places = open_ if memory_of is as_priced else open_ - open_ // _PARTS
                rest = without(left, best)
                best += selected(rest, self.limit, places, memory_of, time_of, prices)
            best = best or leanest(left, part, errors.likely_memory)
            self._price(stage, [one.candidate for one in best], most)
            prices.update(price_of(one) for one in best)
            left = without(left, best)

    def _compile(self, stage: Stage, estimated: Sequence[Priced]) -> None:
        """Compiles the best in several parts, each chosen by what is known of the ones before.

        Both stages before say what is best: each is wrong at times, and seldom at the same ones.
        Their estimates of memory are wrong by a factor that candidates share which compute alike,
        so that the first part says what else fits.
        """
        found = self.found
        compiled = found.priced.setdefault(stage.name, [])
        if not estimated:
            return
        possible = {one.candidate for one in estimated}
        first = [one for one in next(iter(found.priced.values())) if one.candidate in possible]
        views = [estimated, first] if first[0].stage != estimated[0].stage else [estimated]
        most, tried = self.most[stage.name], 0
        while tried < _MOST_ROUNDS * most:
            times = [one.time.bound for one in self._fitting(compiled)]
            part = min(max(most // _PARTS, 2), most - tried if tried < most else most)
            best = self._worth_compiling(views, min(times, default=math.inf), part)
            if tried >= most and times:
                bound = min(times) * _CLEARLY_LESS
                best = [one for one in best if one.time.bound < bound]
                if tried >= _MOST_IF_ANY_FITS * most:
                    break
            if not best:
                break
            some = list(dict.fromkeys(one.candidate for one in best))
            self._price(stage, some, most)
            tried += len(some)
        whole = next(iter(found.priced.values()))
        checked: dict[Candidate, int] = {}
        before = -1
        while before < found.asked[stage.name]:
            before = found.asked[stage.name]
            self._look_for_any_that_fits(stage, [estimated, whole])
            if isinstance(stage, ExtrapolatingStage) and stage.is_extrapolating:
                self._check_the_best(stage, checked)
            if self._fitting(compiled):
                break

    def _fitting(self, priced: Iterable[Priced]) -> list[Priced]:
        return [one for one in priced if one.memory <= self.limit]

    def _check_the_best(self, stage: ExtrapolatingStage, checked: dict[Candidate, int]) -> None:
        """Prices the best by more blocks where it is too near to the limit to be told by fewer.

        First by one block more, then by all. So on with the next, until the best is one that is
        certain to fit. What seems to be over the limit by no more than that may fit too, and a few
        of these are priced so as well.

        Args:
            stage: The stage that compiles.
            checked: How often each candidate was priced again, to which more are added.
        """
        compiled, doubtful = self.found.priced[stage.name], list(_MOST_DOUBTFUL)

        def margin(one: Priced) -> float:
            return _EXTRAPOLATED_WITHIN[checked.get(one.candidate, 0)] * _not_stored(one)

        def may_be_checked(one: Priced) -> bool:
            return margin(one) > 0 and doubtful[checked.get(one.candidate, 0)] > 0

        while True:
            fitting = self._fitting(compiled)
            near = [
                one
                for one in compiled
                if 0 < one.memory - self.limit <= margin(one) and may_be_checked(one)
            ]
            # Where nothing fits, what is nearest most likely does.
            best = min(
                [*fitting, *near],
                key=lambda one: one.rank if fitting else (one.memory,),
                default=None,
            )
            if best is None or best.memory + margin(best) <= self.limit:
                return
            times = checked.get(best.candidate, 0)
            doubtful[times] -= best.memory > self.limit
            checked[best.candidate] = times + 1
            costs_of = stage.whole_costs if times else stage.closer_costs
            self._price(stage, [best.candidate], costs_of=costs_of)
            compiled[:] = [each for each in compiled if each is not best]

    def _look_for_any_that_fits(self, stage: Stage, views: Sequence[Sequence[Priced]]) -> None:
        """Compiles what may fit although it does not seem to, or hold less than the nearest.

        Else it cannot be said that nothing fits. What a stage before left out may be among it.
        """
        compiled, most = self.found.priced[stage.name], _MOST_ROUNDS * self.most[stage.name]
        while not self._fitting(compiled):
            nearest = min((one.memory for one in compiled), default=math.inf)
            least: dict[Candidate, None] = {}
            doubtful: set[Candidate] = set()
            for view in views:
                left, errors = self._left(view)
                bounds = [(errors.least_memory(one), one.rank, one.candidate) for one in left]
                doubtful |= {one for bytes_, _, one in bounds if bytes_ <= self.limit}
                if bounds and min(bounds)[0] < max(
                    nearest * _BUT_FOR_ROUNDING, self.limit * MARGIN_IF_CHECKED
                ):
                    least[min(bounds)[2]] = None
            self.found.in_doubt = len(doubtful)
            if not least or len(compiled) >= most:
                break
            self._price(stage, list(least))

    def _left(self, view: Sequence[Priced]) -> tuple[list[Priced], EstimateErrors]:
        """What was not compiled yet, by what it holds; and how wrong that is thought to be."""
        compiled = self.found.priced["compiled"]
        errors = EstimateErrors.of(compiled, view)
        done = {one.candidate for one in compiled} | {one for one, _ in self.found.refused}
        left = [one for one in view if one.candidate not in done]
        return leanest(left, len(left), errors.likely_memory), errors

    def _worth_compiling(
        self, views: Sequence[Sequence[Priced]], best_time: float, most: int
    ) -> list[Priced]:
        """The best of what seems to fit, and what is quicker and may fit, by each stage before."""
        compiled = self.found.priced["compiled"]
        chosen: list[Priced] = []
        for view, places in zip(views, (most - most // 2, most // 2), strict=False):
            left, errors = self._left(view)
            taken = {one.candidate for one in chosen}
            left = [one for one in left if one.candidate not in taken]
            if compiled:
                left = [one for one in left if errors.may_fit(one, self.limit)]
            places = places if len(views) > 1 else most
            likely = [one for one in left if errors.likely_memory(one) <= self.limit * _NEARLY]
            time = min([best_time, *(errors.likely_time(one) for one in likely)])
            quicker = self._quicker_of_kinds(
                without(left, likely), errors, time, places - min(len(likely), (places + 1) // 2)
            )
            best = [*quicker, *best_by_price(likely, places - len(quicker), errors.likely_time)]
            # Those that hold least come nearest, where none seems to fit.
            best = best or left[:places]
            if not compiled and places > 1:
                best = [*(one for one in best if one is not left[0])][: places - 1] + left[:1]
            chosen += best
        return chosen

    def _best_of_unchecked_ways(
        self, estimated: Iterable[Priced], checked: Iterable[Priced], errors: EstimateErrors
    ) -> list[Priced]:
        """The best of each way to compute of which none was checked, what seems to fit first.

        Estimates err alike for all that compute alike, so that a way would be left out as a whole.
        """
        known = {way_of_computing(one.candidate) for one in checked}

        def order(one: Priced) -> tuple[bool, float, Rank]:
            return errors.likely_memory(one) > self.limit, errors.likely_time(one), one.rank

        may_fit = sorted((one for one in estimated if errors.may_fit(one, self.limit)), key=order)
        longest = min(map(errors.likely_time, may_fit), default=0.0) * _MAY_BE_QUICKER
        best: dict[Hashable, Priced] = {}
        for one in may_fit:
            way = way_of_computing(one.candidate)
            if way not in known and errors.likely_time(one) <= longest:
                best.setdefault(way, one)
        return list(best.values())

    def _quicker_of_kinds(
        self, doubtful: Sequence[Priced], errors: EstimateErrors, time: float, most: int
    ) -> list[Priced]:
        """Candidates that are quicker than a time and may fit, of kinds that were not checked.

        One of each kind, because its price tells which others of its kind fit.
        """
        found: dict[Hashable, Priced] = {}
        for one in sorted(doubtful, key=lambda one: one.rank):
            if errors.likely_time(one) >= time * _CLEARLY_LESS:
                continue
            if not errors.is_checked(one) and errors.may_fit(one, self.limit):
                found.setdefault(computing_kind(one.candidate), one)
        return list(found.values())[:most]


def _not_stored(one: Priced) -> float:
    """What a candidate holds beside what is stored, in bytes."""
    memory = one.cost.memory
    return memory.get("activations", 0.0) + memory.get("gradients", 0.0)


def _parts(most: int) -> list[int]:
    """A number in parts, the first ones not larger than the others."""
    ends = [most * number // _PARTS for number in range(_PARTS + 1)]
    return [end - start for start, end in itertools.pairwise(ends) if end > start]
