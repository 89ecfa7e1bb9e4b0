"""The collectives of a step as a table: what costs most comes first, equal blocks in one row."""

from collections.abc import Hashable, Iterable, Sequence
from typing import Any

from penzai_shard.inspection.collective_records import Collective, CollectiveTotal
from penzai_shard.inspection.layer_groups import (
    OTHER_OWNERS,
    common_parts,
    folded_owners_text,
    group_of,
)
from penzai_shard.planning import bytes_text
from penzai_shard.text_tables import PreparedTable

# The rows that a folded table shows; what moves less is summed up in one more.
MOST_ROWS = 20


class CollectiveTable(PreparedTable):
    """Collectives by what one device sends; ``print`` and notebooks show them."""

    headings = ("layer", "count", "collective", "mesh axes", "phase", "sent", "share")
    right_aligned = frozenset({"count", "sent", "share"})
    unwrapped = frozenset({"collective", "phase"})
    paths = frozenset({"layer"})
    has_headings_alone = False


def collective_rows(
    collectives: Iterable[Collective], collapse: bool
) -> tuple[tuple[str, ...], ...]:
    """The rows of the table.

    Args:
        collectives: Those of a step.
        collapse: Show those of equal blocks and of layers side by side in one row, and the many
            small ones in one at the end.
    """
    collectives = list(collectives)
    groups = owner_groups(collectives) if collapse else [one.labels for one in collectives]
    alike: dict[tuple[Any, ...], list[Collective]] = {}
    for one, group in zip(collectives, groups, strict=True):
        key = (group, one.kind, one.axes_text, one.phase or "-")
        alike.setdefault(key, []).append(one)
    rows: list[tuple[Sequence[str], CollectiveTotal]] = [
        ((owners_of(members), *cells), CollectiveTotal.of(members))
        for (_, *cells), members in alike.items()
    ]
    rows.sort(key=lambda row: -row[1].wire_bytes - row[1].unknown_wire_bytes)
    if collapse and len(rows) > MOST_ROWS + 1:
        rest = sum((total for _, total in rows[MOST_ROWS:]), CollectiveTotal())
        rows = [*rows[:MOST_ROWS], ((f"{len(rows) - MOST_ROWS} more rows", "", "", ""), rest)]
    whole = CollectiveTotal.of(collectives).wire_bytes
    return tuple(
        (layer, _count_text(each), *cells, _sent_text(each), share_text(each.wire_bytes, whole))
        for (layer, *cells), each in rows
    )


def _count_text(total: CollectiveTotal) -> str:
    if not total.unknown_places:
        return f"{total.executed:,}"
    return f"{total.executed:,} + ?" if total.places else "?"


def _sent_text(total: CollectiveTotal) -> str:
    sent = bytes_text(round(total.wire_bytes))
    if not total.unknown_places:
        return sent
    each = f"? x {bytes_text(round(total.unknown_wire_bytes))}"
    return f"{sent} + {each}" if total.places else each


def share_text(part: float, whole: float) -> str:
    """A share in percent; ``"-"`` of nothing.

    >>> share_text(1, 3), share_text(1, 1000), share_text(999, 1000), share_text(0, 0)
    ('33%', '<1%', '>99%', '-')
    """
    if not whole:
        return "-"
    percent = 100 * part / whole
    if 0 < percent < 0.5 or 99.5 < percent < 100:
        return "<1%" if percent < 1 else ">99%"
    return f"{percent:.0f}%"


def owner_groups(collectives: Sequence[Collective]) -> list[tuple[str, ...]]:
    """For each collective what it has in common with those that belong to it; see ``group_of``."""
    layers = {label for one in collectives for label in one.labels}.difference(OTHER_OWNERS)
    root = common_parts([label.split("/") for label in layers])
    return [group_of(one.labels, root) for one in collectives]


def owners_of(collectives: Iterable[Collective]) -> str:
    """The owners of some collectives in a short text."""
    return folded_owners_text(label for one in collectives for label in one.labels)


def costliest(
    collectives: Sequence[Collective], keys: Sequence[Hashable]
) -> tuple[list[Collective], float]:
    """Of collectives in groups those that send most, and how many bytes that is."""
    groups: dict[Hashable, list[Collective]] = {}
    for one, key in zip(collectives, keys, strict=True):
        groups.setdefault(key, []).append(one)
    sums = {key: CollectiveTotal.of(members).wire_bytes for key, members in groups.items()}
    most = max(sums, key=lambda key: sums[key])
    return groups[most], sums[most]
