"""Layouts and where they come from as a table and in sentences, equal blocks in one row."""

import dataclasses
from collections.abc import Iterable, Sequence

from penzai_shard.inspection.sharding_causes.records import ShardingCause, WayStep, WhyRow
from penzai_shard.path_folding import folded_path, folding_key
from penzai_shard.text_tables import PreparedTable

WHOLE = "whole on every device"


class WhyTable(PreparedTable):
    """Layouts with their causes; ``print`` and notebooks show them."""

    headings = ("array", "count", "axes", "where the layout comes from")
    right_aligned = frozenset({"count"})
    paths = frozenset({"array"})
    below = "where the layout comes from"
    has_headings_alone = False


@dataclasses.dataclass(frozen=True)
class RowGroup:
    """Rows that are alike, but for the numbers of blocks.

    Attributes:
        rows: The rows.
    """

    rows: tuple[WhyRow, ...]

    @property
    def what(self) -> str:
        """What they are about."""
        return folded_path([row.what for row in self.rows])

    @property
    def short(self) -> str:
        """Where their layout comes from, for a table."""
        return folded_path([_short(row) for row in self.rows])

    def sentence(self, with_way: bool = False) -> str:
        """What they are about and where their layout comes from.

        Args:
            with_way: Whether to say through which operations.
        """
        texts = [_sentence(row, with_way) for row in self.rows]
        # The ways of equal blocks may differ.
        if len({folding_key(text) for text in texts}) > 1:
            texts = texts[:1]
        return folded_path(texts)


def groups_of(rows: Iterable[WhyRow], collapse: bool = True) -> list[RowGroup]:
    """Rows in groups of those alike, in their order.

    Args:
        rows: The rows.
        collapse: Whether rows are alike that differ in the numbers of their names only.
    """
    groups: dict[tuple[str, ...], list[WhyRow]] = {}
    for row in rows:
        texts = (row.what, _short(row), _sentence(row, with_way=False))
        key = (row.axes, row.dtype, *(map(folding_key, texts) if collapse else texts))
        groups.setdefault(key, []).append(row)
    return [RowGroup(tuple(members)) for members in groups.values()]


def table_rows(groups: Sequence[RowGroup]) -> tuple[tuple[str, ...], ...]:
    """The rows of the table."""
    return tuple(
        (group.what, str(len(group.rows)), group.rows[0].axes, group.short) for group in groups
    )


def _short(row: WhyRow) -> str:
    by_source: dict[str, list[str]] = {}
    for cause in row.causes:
        by_source.setdefault(_short_cause(cause), []).append(cause.mesh_axis)
    parts = [f"{', '.join(axes)}: {source}" for source, axes in by_source.items()]
    if row.is_whole:
        parts.append(f"{WHOLE}{_because(row)}")
    for loss in row.losses:
        where = f" in {loss.layer}" if loss.layer else ""
        what = f"{loss.gathered} gathered over {loss.mesh_axis}"
        if not loss.gathered:
            what = f"{loss.mesh_axis} lost"
        parts.append(f"{what} at {loss.operation}{where}")
    return "; ".join(parts)


def _short_cause(cause: ShardingCause) -> str:
    if cause.kind == "unknown":
        return cause.source
    kind = "" if cause.kind == "other argument" else f"{cause.kind} "
    text = kind + cause.path.removeprefix("params/").removeprefix("inputs/")
    if cause.rule:
        return f"{text} ({cause.rule})"
    return text if cause.logical_axis is None else f"{text} ({cause.logical_axis})"


def _sentence(row: WhyRow, with_way: bool) -> str:
    text = f"{row.what} [{row.axes}]"
    text = text[0].upper() + text[1:]
    groups: dict[tuple[str, str], list[ShardingCause]] = {}
    for cause in row.causes:
        more = _more_text(cause) if with_way else ""
        groups.setdefault((cause.source, more), []).append(cause)
    parts = []
    for (source, more), causes in groups.items():
        axes = " and ".join(repr(cause.mesh_axis) for cause in causes)
        verb = "comes" if len(causes) == 1 else "come"
        reasons = ", ".join(cause.reason for cause in causes)
        parts.append(f"{axes} {verb} from {source}: {reasons}{more}")
    if row.is_whole:
        parts.append(f"it is {WHOLE}{_because(row)}")
    parts += map(str, row.losses)
    return f"{text}: {'; '.join(parts)}".removesuffix(".") + "."


def _because(row: WhyRow) -> str:
    """Why an array is whole, to be read after that it is."""
    return f": {row.whole_because}" if row.whole_because else ""


def _more_text(cause: ShardingCause) -> str:
    """Through what it came, and what else has proposed the same."""
    text = f"; it came through {_way_text(cause.way)}" if cause.way else ""
    if cause.also:
        text += f"; {' and '.join(cause.also)} would have given the same"
    return text


def _way_text(way: Sequence[WayStep]) -> str:
    """The operations on a way; those of one layer together."""
    groups: list[tuple[str, list[str]]] = []
    for step in way:
        if not groups or groups[-1][0] != step.layer:
            groups.append((step.layer, []))
        if step.operation not in groups[-1][1]:
            groups[-1][1].append(step.operation)
    return ", then ".join(
        ", ".join(operations) + (f" in {layer}" if layer else "") for layer, operations in groups
    )
