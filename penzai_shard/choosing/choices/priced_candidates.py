"""Candidates with what they cost, in the order in which they are preferred."""

import dataclasses
import functools
from typing import Literal, TypeAlias

from penzai_shard.choosing.candidates import Candidate
from penzai_shard.choosing.choices.layout_words import candidate_words
from penzai_shard.choosing.step_costs import StepCost
from penzai_shard.choosing.step_times import StepTime

StageName: TypeAlias = Literal["names", "propagation", "compiled"]
Rank: TypeAlias = tuple[float, float, int, bool, float, int, str]

# So many digits of a figure count: the last ones depend on the order of a sum.
_DIGITS = 9


@dataclasses.dataclass(frozen=True)
class Priced:
    """A candidate with what its step costs.

    Attributes:
        candidate: The candidate.
        stage: By what it was priced: by logical axis names, by propagation, or compiled.
        cost: What a step costs one device.
        time: The least time of that.
    """

    candidate: Candidate
    stage: StageName
    cost: StepCost
    time: StepTime

    @property
    def memory(self) -> int:
        """What a device holds at once, in bytes."""
        return self.cost.memory_bytes

    @functools.cached_property
    def price(self) -> tuple[float, float]:
        """What candidates are compared by: the time, and that of what would not overlap."""
        return _rounded(self.time.bound), _rounded(self.time.without_overlap)

    @functools.cached_property
    def rank(self) -> Rank:
        """The better of two comes first.

        Memory is a limit and not a price: of two that take as long, the one with fewer microbatches
        and without rematerialisation comes first, which both cost what no roofline counts; then
        the one that holds less, and the one with fewer rules, and then by text.
        """
        candidate = self.candidate
        words = candidate_words(candidate)
        return (
            *self.price,
            candidate.microbatches,
            candidate.layout.rematerialise is not None,
            _rounded(self.memory),
            len(words),
            words,
        )


def _rounded(figure: float) -> float:
    return float(f"{figure:.{_DIGITS}g}")
