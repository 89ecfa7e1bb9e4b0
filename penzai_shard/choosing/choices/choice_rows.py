"""Which choices share a row: those that cost nearly the same, and one layout run otherwise."""

import dataclasses
import math
from collections.abc import Iterable, Sequence

from penzai_shard.choosing.candidates import Candidate
from penzai_shard.choosing.choices.choice import Choice
from penzai_shard.choosing.choices.layout_words import laid_out_words, step_words
from penzai_shard.report_trees import bytes_text, count_text

# Figures that differ by less than this part are nearly the same.
_NEARLY = 0.01


@dataclasses.dataclass
class ChoiceRow:
    """A choice, and the later ones that its row stands for.

    Attributes:
        index: Its index among the choices.
        choice: The choice, the best of the row.
        alike: Those that run in the same way at nearly the same costs.
        otherwise: Those laid out like it, or like one of ``alike``, with other microbatches or
            another rematerialisation. They take as long or longer.
    """

    index: int
    choice: Choice
    alike: list[Choice] = dataclasses.field(default_factory=list)
    otherwise: list[Choice] = dataclasses.field(default_factory=list)

    @property
    def stands_for_others(self) -> bool:
        """Whether it stands for others too."""
        return bool(self.alike or self.otherwise)

    def takes(self, choice: Choice, is_leanest: bool) -> bool:
        """Takes a later choice that needs no row of its own; says whether it did.

        Args:
            choice: The choice.
            is_leanest: Whether nothing holds less memory. It is what to take where another step
                does not fit after all, so that it is seen.
        """
        if _is_near(choice, self.choice):
            self.alike.append(choice)
        elif not is_leanest and any(
            _table(choice) == _table(each) for each in (self.choice, *self.alike)
        ):
            self.otherwise.append(choice)
        else:
            return False
        return True

    def words(self) -> str:
        """Its layout in words, and for how many others it stands."""
        others = []
        if self.alike:
            verb = "costs" if len(self.alike) == 1 else "cost"
            others.append(f"{count_text(len(self.alike), 'layout')} that {verb} nearly the same")
        if self.otherwise:
            others.append(self._otherwise_words())
        also = f" (and {', and '.join(others)})" if others else ""
        return f"{self.choice.words()}{also}"

    def _otherwise_words(self) -> str:
        """How many run otherwise, in which way, the least that one holds, and the longest time.

        All are reached by their indexes; what is said is whether to look at them.
        """
        candidates = [each.priced.candidate for each in self.otherwise]
        own = self.choice.priced.candidate
        ways = []
        parts = sorted({each.microbatches for each in candidates} - {own.microbatches})
        if parts:
            ways.append(_microbatches_words(parts))
        if any(each.layout.rematerialise != own.layout.rematerialise for each in candidates):
            ways.append("another rematerialisation")
        how = f" with {' or '.join(ways)}" if ways else ""
        least, most = ("from ", "up to ") if len(candidates) > 1 else ("", "")
        held = bytes_text(min(each.memory_bytes for each in self.otherwise))
        slower = max(each.seconds for each in self.otherwise) / self.choice.seconds - 1
        longest = f", {most}{slower:.0%} slower" if slower >= _NEARLY else ""
        return f"{len(candidates)} more{how}, {least}{held}{longest}"


def choice_rows(choices: Sequence[Choice], *, collapse: bool) -> list[ChoiceRow]:
    """The rows of choices.

    Args:
        choices: The choices, the best first.
        collapse: Whether rows stand for several; else each choice has its own.
    """
    rows: list[ChoiceRow] = []
    leanest = min(choices, key=lambda each: each.memory_bytes, default=None)
    for index, choice in enumerate(choices):
        if not (collapse and _is_taken(rows, choice, choice is leanest)):
            rows.append(ChoiceRow(index, choice))
    return rows


def _is_taken(rows: Iterable[ChoiceRow], choice: Choice, is_leanest: bool) -> bool:
    return any(row.takes(choice, is_leanest) for row in rows)


def _table(choice: Choice) -> tuple[object, ...]:
    """What choices have alike that are laid out alike."""
    candidate = choice.priced.candidate
    layout = dataclasses.replace(candidate.layout, rematerialise=None)
    return (
        choice.priced_by,
        candidate.mesh_axes,
        laid_out_words(Candidate(candidate.mesh_axes, layout, padded=candidate.padded)),
    )


def _microbatches_words(parts: Sequence[int]) -> str:
    """Numbers of microbatches in words.

    >>> _microbatches_words([1]), _microbatches_words([2, 4, 8])
    ('1 microbatch', '2 to 8 microbatches')
    """
    if len(parts) == 1:
        return f"{parts[0]} microbatch{'es' if parts[0] > 1 else ''}"
    return f"{parts[0]} to {parts[-1]} microbatches"


def _is_near(one: Choice, other: Choice) -> bool:
    """Whether two choices run the same step on the same mesh at nearly the same costs."""
    if step_words(one.priced.candidate) != step_words(other.priced.candidate):
        return False
    figures, others = (
        (each.seconds, each.priced.time.compute, *each.traffic_seconds.values(), each.memory_bytes)
        for each in (one, other)
    )
    return one.priced_by == other.priced_by and all(
        math.isclose(figure, another, rel_tol=_NEARLY)
        for figure, another in zip(figures, others, strict=True)
    )
