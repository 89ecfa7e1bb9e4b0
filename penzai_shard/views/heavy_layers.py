"""The parts of a model that hold most and move most: what a page shows first."""

import collections
import dataclasses
from collections.abc import Collection, Iterable, Mapping, Sequence

from penzai_shard.inspection.memory.memory_report import MemoryReport
from penzai_shard.inspection.steps.layer_groups import OTHER_OWNERS, parts_of_model
from penzai_shard.inspection.steps.layer_labels import layer_of_parameter
from penzai_shard.inspection.steps.step_parts import StepPart, part_of_field
from penzai_shard.inspection.traffic.collective_report import CollectiveReport
from penzai_shard.path_folding import folding_key, ranged_paths
from penzai_shard.planning import ShardingPlan, bytes_text
from penzai_shard.report_trees import count_text
from penzai_shard.tree_paths import common_parts

_UNKNOWN = "of no known layer"
_WHOLE = "the whole model"
# So many are named of what a layer's bytes are.
_LISTED = 3


@dataclasses.dataclass(frozen=True)
class HeavyLayer:
    """A part of a model, equal blocks together, and what it costs on one device.

    Attributes:
        layer: Its name, with the numbers of equal blocks in braces.
        what: What the bytes are.
        bytes: How many there are.
        share: Their share of the whole, from 0 to 1.
    """

    layer: str
    what: str
    bytes: float
    share: float


@dataclasses.dataclass(frozen=True)
class _Part:
    """Some bytes.

    Attributes:
        labels: The labels of the layers that they are of.
        what: What they are.
        bytes: How many there are.
        aside: What they are of, if not of layers.
    """

    labels: tuple[str, ...]
    what: str
    bytes: float
    aside: str = ""


def heavy_in_plan(plan: ShardingPlan) -> tuple[HeavyLayer, ...]:
    """What each part of a model, or of its train state, holds on each device, the most first."""
    parts = []
    for leaf in plan.leaves:
        part = part_of_field(leaf.path) if plan.transient else "parameters"
        path = leaf.path if plan.transient else f"/{leaf.path}"
        aside = "" if leaf.shape else "scalars"
        parts.append(_part_of_state(path, part, part, leaf.bytes_per_device, aside))
    for leaf in plan.transient:
        parts.append(_part_of_state(leaf.path, "parameters", "gradients", leaf.bytes_per_device))
    return _heaviest(_grouped(parts), plan.bytes_per_device)


def heavy_in_memory(report: MemoryReport) -> tuple[HeavyLayer, ...]:
    """What each part of a model holds on each device while a step runs, the most first.

    Its parameters with their optimizer's state, and what it holds when most of the temporaries are
    there, such as what it keeps for the backward pass; that is an estimate.
    """
    parts = []
    for group in report.groups(collapse=False):
        held = ((group.part, group.array_bytes), ("optimizer state", group.optimizer_bytes))
        parts += [_part_of_state(group.path, group.part, *each) for each in held]
    parts.append(_Part((), "inputs", report.inputs, "inputs"))
    for one in report.temporaries_by_layer:
        parts.append(_Part((one.label,) if one.label else (), one.kind, one.bytes))
    if not report.temporaries_by_layer:
        parts.append(_Part((), "temporaries", max(report.temporaries, 0)))
    return _heaviest(_grouped(parts), report.total)


def heavy_in_traffic(report: CollectiveReport) -> tuple[HeavyLayer, ...]:
    """What each part of a model has each device send in one step, the most first."""
    parts = []
    for one in report.collectives:
        for part in one.parts:
            share = part.payload_bytes / one.payload_bytes if one.payload_bytes else 0.0
            sent = share * one.wire_bytes * (one.times or 0)
            parts.append(_Part(part.labels, f"{one.kind} over {one.axes_text}", sent))
    return _heaviest(_grouped(parts), report.wire_bytes)


def _part_of_state(path: str, part: StepPart, what: str, size: int, aside: str = "") -> _Part:
    """An array of a state: of the layer that the parameter of that path is in, or of none."""
    if part != "parameters" or aside:
        return _Part((), what, size, aside or part)
    return _Part(("/".join(layer_of_parameter(path.partition("/")[2])),), what, size)


def _grouped(parts: Sequence[_Part]) -> list[HeavyLayer]:
    """Bytes by parts of the model, equal blocks together; what the bytes are is listed."""
    own = {label for part in parts for label in part.labels}.difference(OTHER_OWNERS)
    root = common_parts([label.split("/") for label in sorted(own)])
    places = [parts_of_model(part.labels, root) for part in parts]
    # What a layer without parameters has goes to the one around it that has some.
    homes = {
        path
        for part, paths in zip(parts, places, strict=True)
        if part.what == "parameters"
        for path in paths
    }
    groups: dict[tuple[str, ...], list[tuple[_Part, list[str]]]] = {}
    for part, paths in zip(parts, places, strict=True):
        at = [_within(path, homes) for path in paths]
        key = (part.aside,) if part.aside else ("", *map(folding_key, at))
        groups.setdefault(key, []).append((part, at))
    found = []
    for (aside, *_), members in groups.items():
        inside = {path for _, at in members for path in at}
        layers = ranged_paths(path for path in inside if path not in OTHER_OWNERS)
        names = [*layers, *(name for name in OTHER_OWNERS if name in inside)]
        sums: dict[str, float] = collections.defaultdict(float)
        for part, _ in members:
            sums[part.what] += part.bytes
        text = aside or " + ".join(filter(None, names)) or (_WHOLE if inside else _UNKNOWN)
        found.append(HeavyLayer(text, _listed(sums), sum(sums.values()), 0.0))
    return found


def _within(path: str, homes: Collection[str]) -> str:
    """The innermost of some layers that a layer is or is in; itself if it is in none."""
    names = path.split("/")
    around = ("/".join(names[:n]) for n in range(len(names), 0, -1))
    return next((each for each in around if each in homes), path)


def _listed(sums: Mapping[str, float]) -> str:
    """What bytes are, the most first: ``parameters 2.0 KiB, optimizer state 1.0 KiB``."""
    ordered = sorted(sums.items(), key=lambda item: (-item[1], item[0]))
    if len(ordered) == 1:
        return ordered[0][0]
    shown = [f"{what} {bytes_text(round(size))}" for what, size in ordered if size]
    others = len(shown) - _LISTED
    more = [count_text(others, "other")] if others > 0 else []
    return ", ".join([*shown[:_LISTED], *more])


def _heaviest(found: Iterable[HeavyLayer], whole: float) -> tuple[HeavyLayer, ...]:
    ordered = sorted(found, key=lambda layer: (-layer.bytes, layer.layer))
    return tuple(
        dataclasses.replace(layer, share=layer.bytes / whole if whole else 0.0)
        for layer in ordered
        if layer.bytes > 0
    )
