"""What ``choose_layout`` found: layouts, the best first."""

import dataclasses
import functools
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, overload

from penzai_shard.choosing.candidates import Candidate
from penzai_shard.choosing.choices.choice import PRICED_BY, Choice
from penzai_shard.choosing.choices.choice_rows import ChoiceRow, choice_rows
from penzai_shard.choosing.choices.cost_differences import (
    Comparison,
    PaidTimes,
    compared,
    seconds_text,
)
from penzai_shard.choosing.choices.layout_words import laid_out_words, step_words
from penzai_shard.choosing.choices.priced_candidates import Priced
from penzai_shard.choosing.choices.search import Found
from penzai_shard.inspection.devices.hardware import Hardware
from penzai_shard.report_trees import (
    ReportTree,
    TreeFigure,
    TreeNode,
    bytes_text,
    count_text,
)
from penzai_shard.text_tables import PreparedTable, Report

# So many of the best are choices; the rest is in what was priced.
MOST_CHOICES = 24
# So many rows of them are shown at first.
_ROWS_SHOWN = 10
# Of the pick it is said what it pays most for.
_PAID_SHOWN = 3
_REFUSED_SHOWN = 2


@dataclasses.dataclass(frozen=True, repr=False)
class ChoicesTable(PreparedTable):
    """Layouts with their prices, the best first; ``print`` and notebooks show it."""

    headings = ("layout", "step", "computing", "sending", "updating", "memory", "priced", "why")
    right_aligned = frozenset({"step", "computing", "updating", "memory"})
    unwrapped = frozenset({"priced"})
    below = "why"
    wide = 240


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Choices(Report, Sequence[Choice]):
    """The layouts that ``choose_layout`` found, the best first; at most two dozen of them.

    Attributes:
        found: What was priced.
        hardware: The devices.
        memory_limit: The memory of a device, in bytes; no choice is above it.
        asked: What was asked for, in words.
        step_options: What a train step is to be given beside a layout.
        notes: What else there is to know, in sentences.
    """

    found: Found
    hardware: Hardware
    memory_limit: int
    asked: str
    step_options: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    notes: tuple[str, ...] = ()

    @functools.cached_property
    def _rows(self) -> tuple[Choice, ...]:
        ranked = self.found.ranked(self.memory_limit)[:MOST_CHOICES]
        paid = [PaidTimes(one, self.hardware.of_mesh(one.candidate.mesh_shape)) for one in ranked]
        rows = []
        for number, (one, times) in enumerate(zip(ranked, paid, strict=True), 1):
            is_pick = number == 1
            against = (
                Comparison(pays=times.most_paid(_PAID_SHOWN))
                if is_pick
                else compared(times, paid[0])
            )
            options = {**self.step_options, "accumulate_steps": one.candidate.microbatches}
            rows.append(Choice(one, against, options, self._origin(number), is_pick))
        return tuple(rows)

    @property
    def best(self) -> Choice:
        """The pick."""
        return self._rows[0]

    @property
    def interrupted(self) -> bool:
        """Whether the search was ended before it was through; these are the best so far."""
        return self.found.is_interrupted

    @functools.cached_property
    def priced(self) -> tuple[Priced, ...]:
        """All layouts that were priced, also those above the memory limit, the best first."""
        return tuple(sorted(self.found.all_priced(), key=lambda one: one.rank))

    @overload
    def __getitem__(self, index: int) -> Choice: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Choice]: ...
    def __getitem__(self, index: int | slice) -> Choice | Sequence[Choice]:
        rows = self._rows
        try:
            return rows[index]
        except (IndexError, TypeError) as error:
            raise type(error)(
                f"choices[{index!r}]: there are {count_text(len(self), 'choice')}, choices[0], "
                f"which is choices.best, to choices[{len(self) - 1}]. All layouts that were "
                "priced, without what builds them, are in choices.priced."
            ) from None

    # Type checkers know that there is none without being told.
    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            # Also reached where a property of this class fails: then its own error is the answer.
            if name.startswith("_") or hasattr(type(self), name) or not _is_of_choice(name):
                return super().__getattribute__(name)
            call = "(...)" if callable(getattr(Choice, name, None)) else ""
            raise AttributeError(
                f"these are several choices, and {name} is that of one. Write "
                f"choices.best.{name}{call}, or choices[1].{name}{call} for the second best.",
                name=name,
                obj=self,
            )

    def __len__(self) -> int:
        return len(self._rows)

    def __iter__(self) -> Iterator[Choice]:
        return iter(self._rows)

    def table(self, *, collapse: bool = True) -> ChoicesTable:
        """The choices as a table.

        Args:
            collapse: Show layouts on one mesh whose figures differ by less than 1 % as one row, and
                under the best way to run a layout also the others, which differ in microbatches
                or rematerialisation, each with a count; and the first ten rows alone. What holds
                least memory has its row.

        What a row begins with is the index of its choice: ``choices[4]`` is the row ``[4]``.
        """
        numbered = choice_rows(self, collapse=collapse)
        shown = numbered[: _ROWS_SHOWN if collapse else None]
        rows = tuple(
            (
                f"[{row.index}] {row.words()}",
                *_figure_texts(row.choice),
                f"{row.choice.pays_words()}.",
            )
            for row in shown
        )
        remarks = [*self._remarks()]
        left = len(numbered) - len(shown)
        if left or any(row.stands_for_others for row in shown):
            which = count_text(left, "more row") if left else "Those that share a row"
            remarks.insert(
                0,
                f"{which}, up to choices[{len(self) - 1}]: print(choices.table(collapse=False)), "
                "or --all at the shell.",
            )
        return ChoicesTable(rows, self._verdict(), tuple(remarks))

    def tree(self, *, collapse: bool = True) -> ReportTree:
        """The choices as a tree: what each holds, and what it pays for.

        Args:
            collapse: As for ``table``.
        """
        return ReportTree(
            "Choices",
            self._verdict(),
            tuple(map(_tree_node, choice_rows(self, collapse=collapse))),
            notes=tuple(self._remarks()),
        )

    def to_json(self) -> str:
        """All of it as JSON text: seconds, bytes, and each layout as the text of its file."""
        return json.dumps(
            {
                "hardware": self.hardware.name,
                "devices": self.hardware.device_count,
                "asked": self.asked,
                "memory_limit": self.memory_limit,
                "interrupted": self.interrupted,
                "counts": {stage: len(priced) for stage, priced in self.found.priced.items()},
                "choices": [_data(choice) for choice in self],
                "priced": [
                    {
                        **_laid_out_data(one.candidate),
                        "seconds": one.time.bound,
                        "memory": one.memory,
                        "priced_by": one.stage,
                    }
                    for one in self.priced
                ],
                "notes": [*self._remarks()],
            },
            indent=2,
            default=str,
        )

    def plot(self, axes: Any = None) -> Any:
        """Draws all layouts that were priced: the memory of a device against the time of a step.

        By matplotlib, which the extra ``notebook`` brings.

        Args:
            axes: The ``matplotlib.axes.Axes`` to draw on; by default those of a new figure.

        Returns:
            The axes.

        Raises:
            RuleTypeError: ``axes`` is something else, such as a path.
            MissingExtraError: matplotlib is not installed.
        """
        from penzai_shard.choosing.choices.choices_plot import plot_choices

        return plot_choices(self, axes)

    def _verdict(self) -> str:
        best = self.best
        how = "the best so far (interrupted)" if self.interrupted else "the best"
        count = count_text(len(self.priced), "layout")
        return (
            f"{how} of {count} for {self.asked}: {step_words(best.priced.candidate)}; at least "
            f"{seconds_text(best.seconds)} in each step, {bytes_text(best.memory_bytes)} of "
            f"{bytes_text(self.memory_limit)} on each device"
        )

    def _remarks(self) -> Iterator[str]:
        if self.interrupted:
            yield (
                "Interrupted: later stages would have priced the best of these more exactly. "
                "Choose again to have them all."
            )
        counts = [
            f"{len(priced):,} {PRICED_BY[stage]}"
            for stage, priced in self.found.priced.items()
            if priced
        ]
        over = sum(one.memory > self.memory_limit for one in self.priced)
        need = f"{over:,} of all need" if over else "none needs"
        yield f"Priced: {', '.join(counts)}; {need} more memory than there is."
        if self.best.priced_by != "compiled":
            better = "" if self.interrupted else " What is compiled has a better one: compiled=12."
            yield (
                f"Memory {PRICED_BY[self.best.priced_by]} is an estimate, which may be wrong by a "
                f"factor of 2 for some layouts.{better}"
            )
        if self.found.refused:
            reasons = [
                f"{step_words(candidate)}: {why}"
                for candidate, why in self.found.refused[:_REFUSED_SHOWN]
            ]
            count = count_text(len(self.found.refused), "layout")
            yield f"{count} cannot be built, and are left out. {' '.join(reasons)}"
        yield from self.notes

    def _origin(self, number: int) -> tuple[str, ...]:
        place = "The best" if number == 1 else f"Number {number}"
        count = count_text(len(self.priced), "layout")
        so_far = ", when the search was interrupted" if self.interrupted else ""
        return (
            f"{place} of {count} for {self.asked}{so_far}, as choose_layout found.",
            "Price it again: penzai-shard price MODEL --rules THIS_FILE",
        )


def _is_of_choice(name: str) -> bool:
    return hasattr(Choice, name) or name in {field.name for field in dataclasses.fields(Choice)}


def _figure_texts(choice: Choice) -> tuple[str, ...]:
    """The figures of a choice, as its row has them."""
    time = choice.priced.time
    over = [
        f"{axis} {seconds_text(seconds)}"
        for axis, seconds in choice.traffic_seconds.items()
        if seconds
    ]
    return (
        seconds_text(choice.seconds),
        seconds_text(time.compute),
        f"{seconds_text(time.traffic)} ({', '.join(over)})" if over else "nothing",
        seconds_text(time.update) if time.update else "nothing",
        bytes_text(choice.memory_bytes),
        PRICED_BY[choice.priced_by],
    )


def _tree_node(row: ChoiceRow) -> TreeNode:
    choice = row.choice
    label = f"[{row.index}] {step_words(choice.priced.candidate)}"
    held = tuple(
        TreeNode(part, f"{label}/{part}", figures=(TreeFigure("memory", size),))
        for part, size in choice.memory.items()
        if size
    )
    return TreeNode(
        label,
        label,
        f"at least {seconds_text(choice.seconds)}; {laid_out_words(choice.priced.candidate)}",
        (TreeFigure("memory", choice.memory_bytes),),
        (f"{choice.pays_words()}.",),
        children=held,
    )


def _laid_out_data(candidate: Candidate) -> dict[str, Any]:
    return {
        "mesh": dict(candidate.mesh_axes),
        "microbatches": candidate.microbatches,
        "on_indivisible": candidate.on_indivisible,
        "layout": laid_out_words(candidate),
    }


def _data(choice: Choice) -> dict[str, Any]:
    cost, time = choice.priced.cost, choice.priced.time
    return {
        **_laid_out_data(choice.priced.candidate),
        "toml": choice.to_toml(),
        "priced_by": choice.priced_by,
        "seconds": {
            "bound": time.bound,
            "compute": time.compute,
            "traffic": time.traffic,
            "update": time.update,
            "by_mesh_axis": dict(time.by_mesh_axis),
        },
        "flops": cost.flops,
        "memory": {**choice.memory, "total": choice.memory_bytes},
        "sent": [dataclasses.asdict(sent) for sent in cost.sent],
        "against_the_pick": [dataclasses.asdict(one) for one in choice.pays],
    }
