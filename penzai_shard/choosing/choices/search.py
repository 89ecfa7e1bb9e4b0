"""The search: all candidates priced quickly, the best of them more and more exactly."""

import dataclasses
import statistics
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from typing import Protocol, TypeAlias

from penzai_shard.choosing.candidates import Candidate
from penzai_shard.choosing.choices.priced_candidates import Priced, StageName
from penzai_shard.choosing.choices.selection import best_by_price, may_fit, selected
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
# What seems to be over the limit by less than this may fit.
_NEARLY = 1.05


class Stage(Protocol):
    """A way to price candidates."""

    @property
    def name(self) -> StageName:
        """What it is called."""

    def costs(self, candidates: Sequence[Candidate]) -> Iterator[StepCost | ShardingError]:
        """What each costs, in their order; or why it cannot be laid out so."""

    def close(self) -> None:
        """Ends what it holds, such as processes."""


TimeOf: TypeAlias = Callable[[Candidate, StepCost], StepTime]
Watch: TypeAlias = Callable[[StageName, int, int], None]
"""Told of a stage, how many of its candidates are priced, and how many there are."""


@dataclasses.dataclass
class Found:
    """What a search has found so far.

    Attributes:
        priced: What was priced, by the stage.
        refused: Candidates that turned out not to be possible, with the reason.
        is_interrupted: Whether it was ended before it was through.
    """

    priced: dict[StageName, list[Priced]] = dataclasses.field(default_factory=dict)
    refused: list[tuple[Candidate, str]] = dataclasses.field(default_factory=list)
    is_interrupted: bool = False

    def all_priced(self) -> list[Priced]:
        """Every candidate with its most exact price."""
        last: dict[Candidate, Priced] = {}
        for stage in self.priced.values():
            for one in stage:
                last[one.candidate] = one
        return list(last.values())

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
    """

    limit: int
    time_of: TimeOf
    most: dict[StageName, int]
    watch: Watch

    def run(self, candidates: Sequence[Candidate], stages: Sequence[Stage]) -> Found:
        """Prices candidates by one stage after the other.

        Args:
            candidates: All of them.
            stages: From the quickest to the most exact one.

        Returns:
            What was found, also if it is interrupted by ``KeyboardInterrupt`` once something
            is priced.
        """
        found = Found()
        try:
            first, *later = stages
            self._price(first, candidates, found)
            before = first
            for stage in later:
                priced = found.priced[before.name]
                if stage.name == "compiled":
                    self._compile(stage, priced, found)
                else:
                    best = selected(priced, self.limit, self.most[stage.name])
                    self._price(stage, [one.candidate for one in best], found)
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
        self, stage: Stage, candidates: Sequence[Candidate], found: Found, expected: int = 0
    ) -> None:
        priced = found.priced.setdefault(stage.name, [])
        before = len(priced)
        count = max(expected, before + len(candidates))
        self.watch(stage.name, before, count)
        costs = stage.costs(candidates)
        for number, (candidate, cost) in enumerate(zip(candidates, costs, strict=True), 1):
            if isinstance(cost, ShardingError):
                found.refused.append((candidate, str(cost)))
            else:
                time = self.time_of(candidate, cost)
                priced.append(Priced(candidate, stage.name, cost, time))
            self.watch(stage.name, before + number, count)

    def _compile(self, stage: Stage, estimated: Sequence[Priced], found: Found) -> None:
        """Compiles the best in several parts, each chosen by what is known of the ones before.

        The estimates of time are good, those of memory wrong by a factor that candidates share
        that keep alike for the backward pass. So the first part says what else fits.
        """
        compiled = found.priced.setdefault(stage.name, [])
        left = [one for one in estimated if may_fit(one, self.limit)]
        guessed = {one.candidate: one.memory for one in estimated}
        most, tried = self.most[stage.name], 0
        while left and tried < _MOST_ROUNDS * most:
            errors = MemoryErrors.of(compiled, guessed)
            fitting = [one for one in compiled if one.memory <= self.limit]
            limit = self.limit * _NEARLY
            likely = [one for one in left if errors.likely_memory(one) <= limit]
            if tried >= most and fitting:
                bound = min(one.time.bound for one in fitting) * _CLEARLY_LESS
                likely = [one for one in likely if one.time.bound < bound]
                if not likely or tried >= _MOST_IF_ANY_FITS * most:
                    break
            part = min(max(most // _PARTS, 1), most - tried if tried < most else most)
            # Those that hold least come nearest, where none seems to fit.
            leanest = sorted(left, key=lambda one: (errors.likely_memory(one), one.rank))
            best = best_by_price(likely, part) or leanest[:part]
            if not compiled and part > 1:
                best = [*(one for one in best if one is not leanest[0])][: part - 1] + leanest[:1]
            self._price(stage, [one.candidate for one in best], found, most)
            tried += len(best)
            done = {id(one) for one in best}
            left = [one for one in left if id(one) not in done]


@dataclasses.dataclass(frozen=True)
class MemoryErrors:
    """How wrong estimates of memory are, by those that were checked.

    Attributes:
        by_kind: The ratios of exact to estimated memory, by what blocks keep.
    """

    by_kind: Mapping[Hashable, Sequence[float]]

    @classmethod
    def of(cls, exact: Sequence[Priced], guessed: Mapping[Candidate, int]) -> "MemoryErrors":
        """The errors of those estimates of which the truth is known."""
        by_kind: dict[Hashable, list[float]] = {}
        for one in exact:
            ratio = one.memory / max(guessed[one.candidate], 1)
            by_kind.setdefault(_kind(one.candidate), []).append(ratio)
        return cls(by_kind)

    def likely_memory(self, estimated: Priced) -> float:
        """The memory of a candidate, if its estimate is as wrong as those of its like."""
        everything = [ratio for ratios in self.by_kind.values() for ratio in ratios]
        ratios = self.by_kind.get(_kind(estimated.candidate)) or everything or [1.0]
        return estimated.memory * statistics.median(ratios)


def _kind(candidate: Candidate) -> Hashable:
    layout = candidate.layout
    return layout.rematerialise, layout.reshard_after_forward, candidate.microbatches > 1
