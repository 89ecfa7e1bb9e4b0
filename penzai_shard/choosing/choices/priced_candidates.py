"""Candidates with what they cost, in the order in which they are preferred."""

import dataclasses
import functools
from typing import Literal, TypeAlias

from penzai_shard.choosing.candidates import Candidate
from penzai_shard.choosing.choices.layout_words import candidate_words
from penzai_shard.choosing.step_costs import StepCost
from penzai_shard.choosing.step_times import StepTime

StageName: TypeAlias = Literal["names", "propagation", "compiled"]
Rank: TypeAlias = tuple[float, float, float, int, str]

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
    def price(self) -> tuple[float, float, float]:
        """What candidates are compared by: the time, what does not overlap, the memory."""
        figures = (self.time.bound, self.time.without_overlap, self.memory)
        bound, apart, memory = map(_rounded, figures)
        return bound, apart, memory

    @functools.cached_property
    def rank(self) -> Rank:
        """The better of two comes first; of equal ones the one with fewer rules, then by text."""
        words = candidate_words(self.candidate)
        return (*self.price, len(words), words)


def _rounded(figure: float) -> float:
    return float(f"{figure:.{_DIGITS}g}")
