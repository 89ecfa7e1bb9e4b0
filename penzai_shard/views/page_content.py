"""What a page says before anything is unfolded: the verdict, key figures, the heaviest layers."""

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Literal

from penzai_shard.inspection.memory.memory_report import MemoryReport
from penzai_shard.inspection.sharding_causes import WhyReport
from penzai_shard.inspection.traffic.collective_report import CollectiveReport
from penzai_shard.linting import LintReport
from penzai_shard.planning import ShardingPlan, bytes_text
from penzai_shard.report_trees import count_text, share_text
from penzai_shard.text_tables import Report
from penzai_shard.views.heavy_layers import (
    HeavyLayer,
    heavy_in_memory,
    heavy_in_plan,
    heavy_in_traffic,
)
from penzai_shard.views.page_trees import exact_text

State = Literal["good", "bad", ""]

# So many are shown of the layers that hold or move most.
HEAVY_SHOWN = 3


@dataclasses.dataclass(frozen=True)
class Missing:
    """Why a report is not on the page.

    Attributes:
        reason: A sentence.
        problems: What is in the way, a line for each.
    """

    reason: str
    problems: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True)
class KeyFigure:
    """A figure of the headline.

    Attributes:
        name: What it is.
        text: The figure in a readable unit.
        exact: The same exactly; empty if the text is.
        remark: What there is to say of it.
        state: Whether it is good or bad; empty if neither.
        share: Of a figure that has a limit, its share of that, 1 or more if it is too much.
        section: The section of the page that has more of it.
    """

    name: str
    text: str
    exact: str = ""
    remark: str = ""
    state: State = ""
    share: float | None = None
    section: str = ""


@dataclasses.dataclass(frozen=True)
class Ranking:
    """The parts of a model that cost most of something.

    Attributes:
        title: Of what.
        section: The section of the page that has more of it.
        layers: The parts, the costliest first.
        rest: How many more there are.
    """

    title: str
    section: str
    layers: tuple[HeavyLayer, ...]
    rest: int


@dataclasses.dataclass(frozen=True)
class PageContent:
    """The reports of a page, each of them or why there is none.

    Attributes:
        title: What it is about.
        mesh: The mesh in words; empty without one.
        plan: The layout of the model.
        memory: What the step needs of each device.
        collectives: What it moves.
        lint: What is probably a mistake or a waste.
        why: Where the layouts in the step come from.
        notes: What else there is to know, in sentences.
    """

    title: str
    mesh: str
    plan: ShardingPlan | Missing
    memory: MemoryReport | Missing
    collectives: CollectiveReport | Missing
    lint: LintReport | Missing
    why: WhyReport | Missing
    notes: tuple[str, ...] = ()

    def sections(self) -> Mapping[str, ShardingPlan | Report | Missing]:
        """The reports by the titles of their sections."""
        return {
            "Plan": self.plan,
            "Memory": self.memory,
            "Collectives": self.collectives,
            "Findings": self.lint,
            "Why": self.why,
        }

    def verdict(self) -> tuple[State, str]:
        """Whether all is well, as far as that is known, and in a sentence what comes of it."""
        state, text = self._need()
        if not isinstance(self.lint, LintReport) or self.lint.ok:
            return state, text
        found = len(self.lint.findings)
        there_are = f"There {'is' if found == 1 else 'are'} {count_text(found, 'finding')}"
        return "bad" if state == "bad" else "", f"{text} {there_are}."

    def _need(self) -> tuple[State, str]:
        if isinstance(self.memory, Missing):
            if isinstance(self.plan, Missing):
                return "bad", "There is no valid layout."
            held = bytes_text(self.plan.bytes_per_device)
            return "", f"Each device holds {held} of {bytes_text(self.plan.total_bytes)}."
        needs = f"needs {bytes_text(self.memory.total)} of each device's"
        if self.memory.limit is None:
            kind = self.memory.program.device_kind
            return "", f"The step {needs} memory; how much a device has is not known ({kind})."
        limit = bytes_text(self.memory.limit)
        if self.memory.fits:
            return "good", f"The step fits: it {needs} {limit}."
        return "bad", f"The step does not fit: it {needs} {limit}."

    def key_figures(self) -> Iterator[KeyFigure]:
        """The figures of the headline."""
        if isinstance(self.memory, MemoryReport):
            yield _memory_figure(self.memory)
        if isinstance(self.collectives, CollectiveReport):
            yield _traffic_figure(self.collectives)
        if isinstance(self.plan, ShardingPlan):
            yield _plan_figure(self.plan)
        if isinstance(self.lint, LintReport):
            yield _lint_figure(self.lint)

    def rankings(self) -> Iterator[Ranking]:
        """The layers that hold most and move most."""
        if isinstance(self.memory, MemoryReport):
            yield _ranking("Most memory", "memory", heavy_in_memory(self.memory))
        elif isinstance(self.plan, ShardingPlan):
            yield _ranking("Most memory", "plan", heavy_in_plan(self.plan))
        if isinstance(self.collectives, CollectiveReport):
            yield _ranking("Most traffic", "collectives", heavy_in_traffic(self.collectives))


def _memory_figure(memory: MemoryReport) -> KeyFigure:
    state: State = ""
    if memory.limit is None:
        remark, share = "of a limit that is not known", None
    else:
        share = memory.total / memory.limit
        remark = f"{share_text(memory.total, memory.limit)} of {bytes_text(memory.limit)}"
        state = "good" if memory.fits else "bad"
    return KeyFigure(
        "Memory per device",
        bytes_text(memory.total),
        exact_text(memory.total, "bytes"),
        remark,
        state,
        share,
        "memory",
    )


def _traffic_figure(collectives: CollectiveReport) -> KeyFigure:
    total = collectives.total
    return KeyFigure(
        "Sent per device and step",
        bytes_text(round(collectives.wire_bytes)),
        exact_text(collectives.wire_bytes, "bytes"),
        total.executed_text(),
        section="collectives",
    )


def _plan_figure(plan: ShardingPlan) -> KeyFigure:
    share = share_text(plan.replicated_bytes, plan.bytes_per_device)
    return KeyFigure(
        "Stored per device",
        bytes_text(plan.bytes_per_device),
        exact_text(plan.bytes_per_device, "bytes"),
        f"of {bytes_text(plan.total_bytes)}; replicated {share}",
        section="plan",
    )


def _lint_figure(lint: LintReport) -> KeyFigure:
    wasted = lint.wasted_bytes
    remark = f"{bytes_text(wasted)} wasted per device"
    if not wasted:
        remark = "nothing found" if lint.ok else f"the worst: {lint.findings[0].kind}"
    return KeyFigure(
        "Findings",
        f"{len(lint.findings):,}",
        exact_text(wasted, "bytes") + " wasted" if wasted else "",
        remark,
        "good" if lint.ok else "bad",
        section="findings",
    )


def _ranking(title: str, section: str, found: tuple[HeavyLayer, ...]) -> Ranking:
    return Ranking(title, section, found[:HEAVY_SHOWN], max(len(found) - HEAVY_SHOWN, 0))
