"""The collectives of a step as a table: what costs most comes first, equal blocks in one row."""

from collections.abc import Callable, Iterable, Sequence

from penzai_shard.inspection.collective_records import Collective, CollectiveTotal
from penzai_shard.path_folding import NUMBER, folding_key, varying_numbers
from penzai_shard.planning import bytes_text
from penzai_shard.text_tables import PreparedTable

# The rows that a folded table shows; what moves less is summed up in one more.
MOST_ROWS = 20


class CollectiveTable(PreparedTable):
    """Collectives by what one device sends; ``print`` and notebooks show them."""

    headings = ("layer", "count", "collective", "mesh axes", "phase", "sent", "share")
    right_aligned = frozenset({"count", "sent", "share"})
    unwrapped = frozenset({"collective", "mesh axes", "phase"})
    paths = frozenset({"layer"})
    has_headings_alone = False


def collective_rows(
    collectives: Iterable[Collective], collapse: bool
) -> tuple[tuple[str, ...], ...]:
    """The rows of the table.

    Args:
        collectives: Those of a step.
        collapse: Show those alike that differ only in the numbers of their layers' paths as one
            row, and the many small ones as one at the end.
    """
    collectives = list(collectives)
    alike: dict[tuple[str, ...], list[Collective]] = {}
    for one in collectives:
        owner = folding_key(one.owner) if collapse else one.owner
        key = (owner, one.kind, one.axes_text, one.phase or "-")
        alike.setdefault(key, []).append(one)
    rows: list[tuple[Sequence[str], CollectiveTotal]] = [
        ((ranged_path([one.owner for one in members]), *cells), CollectiveTotal.of(members))
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


def ranged_path(paths: Sequence[str]) -> str:
    """Paths that differ in their numbers only as one, with the ranges of their numbers.

    >>> ranged_path(["blocks/0/mlp", "blocks/1/mlp", "blocks/2/mlp"])
    'blocks/0..2/mlp'
    >>> ranged_path(["blocks/0/mlp", "blocks/5/mlp"])
    'blocks/*/mlp'
    """
    varying = iter(varying_numbers(paths))
    return NUMBER.sub(lambda number: _range(next(varying)) or number.group(), paths[0])


def _range(values: tuple[int, ...] | None) -> str | None:
    if values is None:
        return None
    first, last = min(values), max(values)
    return f"{first}..{last}" if len(set(values)) == last - first + 1 else "*"


def costliest(
    collectives: Sequence[Collective], key: Callable[[Collective], str]
) -> tuple[str, float]:
    """What has the largest part of the bytes sent, by some text, and how many bytes that is."""
    sums: dict[str, float] = {}
    for one in collectives:
        sums[key(one)] = sums.get(key(one), 0.0) + one.wire_bytes * (one.times or 0)
    return max(sums.items(), key=lambda item: item[1])
