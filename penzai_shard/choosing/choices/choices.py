"""What ``choose_layout`` found: layouts, the best first."""

import dataclasses
import functools
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, overload

from penzai_shard.choosing.choices.choice import PRICED_BY, Choice
from penzai_shard.choosing.choices.cost_differences import (
    CostDifference,
    differences,
    memory_difference,
    seconds_text,
    times_of,
)
from penzai_shard.choosing.choices.layout_words import layout_words, step_words
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
# Of the pick it is said what it pays most for.
_PAID_SHOWN = 3
_REFUSED_SHOWN = 2


@dataclasses.dataclass(frozen=True, repr=False)
class ChoicesTable(PreparedTable):
    """Layouts with their prices, the best first; ``print`` and notebooks show it."""

    headings = ("layout", "step", "computing", "sending", "memory", "priced", "why")
    right_aligned = frozenset({"step", "computing", "memory"})
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
        times = [self._times(one) for one in ranked]
        return tuple(
            Choice(
                one,
                differences(own, times[0], ranked[0].time.bound) if number else _paid_for(own, one),
                memory_difference(one, ranked[0]) if number else "",
                {**self.step_options, "accumulate_steps": one.candidate.microbatches},
                self._origin(number + 1),
                number == 0,
            )
            for number, (one, own) in enumerate(zip(ranked, times, strict=True))
        )

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
        return self._rows[index]

    def __len__(self) -> int:
        return len(self._rows)

    def __iter__(self) -> Iterator[Choice]:
        return iter(self._rows)

    def table(self, *, collapse: bool = True) -> ChoicesTable:
        """The choices as a table.

        Args:
            collapse: Show layouts that cost the same as one row with a count.
        """
        rows = []
        for number, alike in self._numbered(collapse):
            choice, time = alike[0], alike[0].priced.time
            over = [
                f"{axis} {seconds_text(seconds)}"
                for axis, seconds in choice.traffic_seconds.items()
                if seconds
            ]
            others = f" (and {count_text(len(alike) - 1, 'layout')} that cost the same)"
            rows.append(
                (
                    f"{number}. {choice.words()}{others if len(alike) > 1 else ''}",
                    seconds_text(choice.seconds),
                    seconds_text(time.compute),
                    f"{seconds_text(time.traffic)} ({', '.join(over)})" if over else "nothing",
                    bytes_text(choice.memory_bytes),
                    PRICED_BY[choice.priced_by],
                    f"{choice.pays_words()}.",
                )
            )
        return ChoicesTable(tuple(rows), self._verdict(), tuple(self._remarks()))

    def tree(self, *, collapse: bool = True) -> ReportTree:
        """The choices as a tree: what each holds, and what it pays for.

        Args:
            collapse: As for ``table``.
        """
        return ReportTree(
            "Choices",
            self._verdict(),
            tuple(_tree_node(number, alike) for number, alike in self._numbered(collapse)),
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
                        "mesh": dict(one.candidate.mesh_axes),
                        "microbatches": one.candidate.microbatches,
                        "layout": layout_words(one.candidate.layout),
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
            MissingExtraError: matplotlib is not installed.
        """
        from penzai_shard.choosing.choices.choices_plot import plot_choices

        return plot_choices(self, axes)

    def _times(self, one: Priced) -> dict[str, float]:
        return times_of(one, self.hardware.of_mesh(one.candidate.mesh_shape))

    def _numbered(self, collapse: bool) -> list[tuple[int, list[Choice]]]:
        """The choices with their numbers; those that cost the same under that of the first."""
        found: dict[Any, tuple[int, list[Choice]]] = {}
        for number, choice in enumerate(self, 1):
            step = step_words(choice.priced.candidate)
            cost = (choice.priced.price, choice.memory_bytes, step, 0 if collapse else number)
            found.setdefault(cost, (number, []))[1].append(choice)
        return list(found.values())

    def _verdict(self) -> str:
        best = self.best
        how = "the best so far, after an interruption" if self.interrupted else "the best"
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
        counts = [f"{len(priced):,} {PRICED_BY[stage]}" for stage, priced in self._stages()]
        over = sum(one.memory > self.memory_limit for one in self.priced)
        yield f"Priced: {', '.join(counts)}; of all, {over:,} need more memory than there is."
        if self.found.refused:
            reasons = [
                f"{step_words(candidate)}: {why}"
                for candidate, why in self.found.refused[:_REFUSED_SHOWN]
            ]
            count = count_text(len(self.found.refused), "layout")
            yield f"{count} cannot be built, and are left out. {' '.join(reasons)}"
        yield from self.notes

    def _stages(self) -> list[tuple[Any, list[Priced]]]:
        return [(stage, priced) for stage, priced in self.found.priced.items() if priced]

    def _origin(self, number: int) -> tuple[str, ...]:
        place = "The best" if number == 1 else f"Number {number}"
        count = count_text(len(self.priced), "layout")
        so_far = ", when the search was interrupted" if self.interrupted else ""
        return (
            f"{place} of {count} for {self.asked}{so_far}, as choose_layout found.",
            "Price it again: penzai-shard price MODEL --rules THIS_FILE",
        )


def _paid_for(times: Mapping[str, float], pick: Priced) -> tuple[CostDifference, ...]:
    """What the pick pays most for."""
    paid = differences(dict(times), {}, pick.time.bound)
    return paid[:_PAID_SHOWN]


def _tree_node(number: int, alike: Sequence[Choice]) -> TreeNode:
    choice = alike[0]
    label = f"{number}. {step_words(choice.priced.candidate)}"
    held = tuple(
        TreeNode(part, f"{label}/{part}", figures=(TreeFigure("memory", size),))
        for part, size in choice.memory.items()
        if size
    )
    return TreeNode(
        label,
        label,
        f"at least {seconds_text(choice.seconds)}; {layout_words(choice.layout)}",
        (TreeFigure("memory", choice.memory_bytes),),
        (f"{choice.pays_words()}.",),
        children=held,
    )


def _data(choice: Choice) -> dict[str, Any]:
    cost, time = choice.priced.cost, choice.priced.time
    return {
        "mesh": choice.mesh_shape,
        "microbatches": choice.microbatches,
        "layout": layout_words(choice.layout),
        "toml": choice.to_toml(),
        "priced_by": choice.priced_by,
        "seconds": {
            "bound": time.bound,
            "compute": time.compute,
            "traffic": time.traffic,
            "by_mesh_axis": dict(time.by_mesh_axis),
        },
        "flops": cost.flops,
        "memory": {**choice.memory, "total": choice.memory_bytes},
        "sent": [dataclasses.asdict(sent) for sent in cost.sent],
        "against_the_pick": [dataclasses.asdict(one) for one in choice.pays],
    }
