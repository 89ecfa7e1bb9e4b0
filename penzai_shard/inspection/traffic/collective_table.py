"""The collectives of a step as a table: what costs most comes first, equal blocks in one row."""

import itertools
from collections.abc import Iterable, Sequence
from typing import Any

from penzai_shard.inspection.steps.layer_groups import (
    OTHER_OWNERS,
    folded_owners_text,
    group_of,
)
from penzai_shard.inspection.traffic.collective_records import (
    Collective,
    CollectivePart,
    CollectiveTotal,
)
from penzai_shard.report_trees import bytes_text, share_text
from penzai_shard.text_tables import PreparedTable
from penzai_shard.tree_paths import common_parts

# A folded table shows at most so many rows, each with at least such a share of the bytes sent. What
# moves less is summed up in one more.
MOST_ROWS = 20
LEAST_SHARE = 0.005

_NO_CELLS = ("",) * 4
# By how it is described; the first that fits.
_SORTS = {
    "gradient of activation": "activation gradients",
    "gradient of": "gradients",
    "activation": "activations",
    "new value of": "new values",
    "params/": "parameters",
    "opt_state/": "optimizer state",
}


class CollectiveTable(PreparedTable):
    """Collectives by what one device sends; ``print`` and notebooks show them."""

    headings = ("layer", "count", "collective", "mesh axes", "phase", "moves", "sent", "share")
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
    parts = [(one, part) for one in collectives for part in one.parts]
    groups = owner_groups(part for _, part in parts) if collapse else [p.labels for _, p in parts]
    alike: dict[tuple[Any, ...], list[tuple[Collective, CollectivePart]]] = {}
    for (one, part), group in zip(parts, groups, strict=True):
        key = (group, one.kind, _axes_text(one), part.phase or "-")
        alike.setdefault(key, []).append((one, part))
    rows: list[tuple[Sequence[str], CollectiveTotal]] = [
        (
            (owners_of(part for _, part in members), *cells, moves_text(members)),
            CollectiveTotal.of_parts(members),
        )
        for (_, *cells), members in alike.items()
    ]
    rows.sort(key=lambda row: -row[1].wire_bytes - row[1].unknown_wire_bytes)
    whole = CollectiveTotal.of_parts(parts).wire_bytes
    if collapse and len(rest := rows[_shown(rows, whole) :]) > 1:
        total = sum((total for _, total in rest), CollectiveTotal())
        rows = [*rows[: -len(rest)], ((f"{len(rest)} more rows", *_NO_CELLS), total)]
    return tuple(
        (layer, _count_text(each), *cells, _sent_text(each), share_text(each.wire_bytes, whole))
        for (layer, *cells), each in rows
    )


def _shown(rows: Sequence[tuple[Sequence[str], CollectiveTotal]], whole: float) -> int:
    """How many rows are worth to be shown, of those that are sorted by what is sent."""
    shown = (
        total.unknown_places or not whole or total.wire_bytes / whole >= LEAST_SHARE
        for _, total in rows[:MOST_ROWS]
    )
    return sum(1 for _ in itertools.takewhile(bool, shown))


def _axes_text(one: Collective) -> str:
    """The mesh axes alone; in which part of them it goes is too long for a table."""
    if one.mesh_axes is None:
        return "none"
    names = " x ".join(one.mesh_axes)
    return names if names == one.axes_text else f"{names}, in part"


def moves_text(members: Iterable[tuple[Collective, CollectivePart]]) -> str:
    """What some collectives move, by sorts."""
    sorts = {
        next((sort for start, sort in _SORTS.items() if part.moves.startswith(start)), "arguments")
        if part.moves
        else "others"
        for _, part in members
    }
    return ", ".join(sorted(sorts - {"others"}) + ["others"] * ("others" in sorts))


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


def owner_groups(parts: Iterable[CollectivePart]) -> list[tuple[str, ...]]:
    """For each part what it has in common with those that belong to it; see ``group_of``."""
    parts = list(parts)
    layers = {label for part in parts for label in part.labels}.difference(OTHER_OWNERS)
    root = common_parts([label.split("/") for label in layers])
    return [group_of(part.labels, root) for part in parts]


def owners_of(parts: Iterable[CollectivePart]) -> str:
    """The owners of some parts in a short text."""
    return folded_owners_text(label for part in parts for label in part.labels)
