"""The search: all candidates priced quickly, the best of them more and more exactly."""

import dataclasses
import statistics
from collections.abc import Callable, Iterator, Sequence
from typing import Protocol, TypeAlias

from penzai_shard.choosing.candidates import Candidate
from penzai_shard.choosing.choices.priced_candidates import Priced, StageName
from penzai_shard.choosing.choices.selection import may_fit, selected
from penzai_shard.choosing.step_costs import StepCost
from penzai_shard.choosing.step_times import StepTime
from penzai_shard.errors import ShardingError

# Compiling stops when so many fit, or after so many rounds.
_ENOUGH_THAT_FIT = 3
_MOST_ROUNDS = 4


class Stage(Protocol):
    """A way to price candidates."""

    @property
    def name(self) -> StageName:
        """What it is called."""

    def costs(self, candidates: Sequence[Candidate]) -> Iterator[StepCost | ShardingError]:
        """What each costs, in their order; or why it cannot be laid out so."""


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
        return found

    def _price(self, stage: Stage, candidates: Sequence[Candidate], found: Found) -> None:
        priced = found.priced.setdefault(stage.name, [])
        self.watch(stage.name, 0, len(candidates))
        costs = stage.costs(candidates)
        for number, (candidate, cost) in enumerate(zip(candidates, costs, strict=True), 1):
            if isinstance(cost, ShardingError):
                found.refused.append((candidate, str(cost)))
            else:
                time = self.time_of(candidate, cost)
                priced.append(Priced(candidate, stage.name, cost, time))
            self.watch(stage.name, number, len(candidates))

    def _compile(self, stage: Stage, estimated: Sequence[Priced], found: Found) -> None:
        """Compiles the best, and if too few of them fit, others that then seem to."""
        found.priced.setdefault(stage.name, [])
        left = [one for one in estimated if may_fit(one, self.limit)]
        likely: Sequence[Priced] = left
        for _ in range(_MOST_ROUNDS):
            best = selected(likely, self.limit, self.most[stage.name], with_leaner=False)
            self._price(stage, [one.candidate for one in best], found)
            compiled = found.priced[stage.name]
            fitting = [one for one in compiled if one.memory <= self.limit]
            tried = {id(one) for one in best}
            left = [one for one in left if id(one) not in tried]
            if not left or len(fitting) >= min(_ENOUGH_THAT_FIT, self.most[stage.name]):
                break
            likely = self._likely_to_fit(left, estimated, compiled)

    def _likely_to_fit(
        self, left: Sequence[Priced], estimated: Sequence[Priced], compiled: Sequence[Priced]
    ) -> Sequence[Priced]:
        """Those whose memory is within the limit if it is as wrong as that of those compiled."""
        guessed = {one.candidate: one.memory for one in estimated}
        ratios = [one.memory / max(guessed[one.candidate], 1) for one in compiled]
        ratio = statistics.median(ratios) if ratios else 1.0
        likely = [one for one in left if one.memory * ratio <= self.limit]
        if likely:
            return likely
        # None seems to fit, of which those that hold least come nearest.
        return sorted(left, key=lambda one: (one.memory, one.rank))[: self.most["compiled"]]
