"""Writes what a change costs as Markdown, from the locks before it and with it."""

import html
from collections.abc import Iterator
from typing import Any

from penzai_shard.inspection.locks import MESH, RECOMPILATION, ShardingLock
from penzai_shard.reports.quantities import bytes_text
from penzai_shard.reports.report import SUMMED, Column, Report

# A comment in a pull request is to be read.
_MOST_SUMS, _MOST_ROWS = 18, 30
_TOTALS = ("memory", "sent")


def write_bill(base: ShardingLock, head: ShardingLock, tolerance: float) -> tuple[str, bool]:
    """What a change costs, as Markdown, and whether something grew.

    Args:
        base: The lock before the change.
        head: The lock with it.
        tolerance: By which fraction bytes may differ.
    """
    report = head.compare(base, tolerance=tolerance)
    lines, is_same_compiler = [], base.made_by == head.made_by
    if report.rows and is_same_compiler:
        totals = (_write_total(name, base.total(name), head.total(name)) for name in _TOTALS)
        lines += [f"### Sharding bill: {', '.join(totals)}", ""]
    else:
        lines += [f"### Sharding bill: {report.verdict}", "", f"- now {head.report().verdict}"]
    lines += [f"- {remark}" for remark in _find_remarks(report)]
    if is_same_compiler:
        sums = _add_up(head).compare(_add_up(base), tolerance=tolerance)
        lines += ["", *_write_table(sums, 1, _MOST_SUMS)]
    if report.rows:
        lines += ["", "<details><summary>By layer and array</summary>", ""]
        lines += [*_write_table(report, 2, _MOST_ROWS), "", "</details>"]
    return "\n".join(lines), any(row[-1] is False for row in report.rows)


def _write_total(name: str, before: int, now: int) -> str:
    """``memory 2.4 MiB -> 5.3 MiB (+120%)``."""
    change = f" ({now / before - 1:+,.0%})" if before else ""
    return f"{name} {bytes_text(before)} -> {bytes_text(now)}{change}"


def _find_remarks(report: Report) -> Iterator[str]:
    """What sums of bytes do not say."""
    rows = report.to_data()["rows"]
    for row in rows:
        if (row["path"], row["item"]) == MESH:
            yield f"another mesh: {row['before']} -> {row['now']}"
    lost = sum(row["what"] == "donated" and row["now"] == "no" for row in rows)
    again = sum(row["item"] == RECOMPILATION and row["change"] == "new" for row in rows)
    changed = {(row["path"], row["item"]) for row in rows if row["what"] in ("spec", "type")}
    for count, what in (
        (lost, "not donated any more"),
        (again, "for which the second step compiles again"),
        (len(changed - {MESH}), "with another layout or type"),
    ):
        if count:
            yield f"arrays {what}: {count:,}"
    yield from report.notes


def _add_up(lock: ShardingLock) -> Report:
    """What all arrays of a part come to, and all layers in one kind of collective."""
    columns = [column for column in lock.report().columns if column.kind in SUMMED]
    rows = [(row.item, *(getattr(row, column.name) for column in columns)) for row in lock.rows]
    return Report("", "", (Column("item"), *columns), rows)


def _write_table(report: Report, key_count: int, most: int) -> Iterator[str]:
    """Markdown with a row for all that differs under one key."""
    names = [column.name for column in report.columns]
    values: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for row in report.rows:
        own = dict(zip(names, row, strict=True))
        values.setdefault(row[:key_count], []).append(own)
    columns = [*report.columns[:key_count], *map(Column, ("before", "now", "change"))]
    rows = [(*key, *_write_cells(own)) for key, own in values.items()]
    # Equal blocks are one row. A folded report has a column more, behind the path.
    folded = [(row[0], *row[-key_count - 2 :]) for row in Report("", "", columns, rows).fold().rows]

    if folded:
        yield f"| {' | '.join(column.name for column in columns)} |"
        yield "|---" * len(columns) + "|"
    for row in folded[:most]:
        yield f"| {' | '.join(map(_escape, columns, row))} |"
    if len(folded) > most:
        yield f"\nand {len(folded) - most:,} more rows"


def _write_cells(values: list[dict[str, Any]]) -> Iterator[str]:
    """What was before, what is now, and how it changed; what is new or gone has no ``what``."""
    for side in ("before", "now"):
        yield ", ".join(f"{value['what']} {value[side]}".strip() for value in values if value[side])
    changes = [v["change"] if v["by"] is None else f"{v['by']:+,.0%}" for v in values]
    yield ", ".join(f"{v['what']} {c}".strip() for v, c in zip(values, changes, strict=True))


def _escape(column: Column, text: str) -> str:
    if column.kind == "path":
        # As code, since names such as __call__ would be bold.
        return "`" + text.replace("`", "'").replace("|", "\\|") + "`"
    # A type such as key<fry>[] is no tag.
    return html.escape(text, False).replace("|", "&#124;")
