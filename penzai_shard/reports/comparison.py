"""Compares two reports of the same columns: one row for each value that differs.

What is worse comes first. A row that only one of the reports has is one difference, with all that
it says.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

from penzai_shard.errors import Problem, SelectionError
from penzai_shard.reports.report import SUMMED, Column, Report, add_rows

GREW, SHRANK, CHANGED, NEW, GONE = CHANGES = ("grew", "shrank", "changed", "new", "gone")
_COLUMNS = (
    *map(Column, ("what", "before", "now", "change")),
    Column("by", "percent"),
    Column("ok", "ok", shown=False),
)

_Row = tuple[Any, ...]


def compare_reports(now: Report, before: Report, tolerance: float) -> Report:
    """What differs between two reports; see ``HasReport.compare``."""
    names = [column.name for column in now.columns]
    key = now.key or names[:1]
    if names != [column.name for column in before.columns]:
        what = f"the columns are {names}; of the earlier report {[c.name for c in before.columns]}"
        raise SelectionError("compare:", [Problem("", what, "Compare reports of one kind.")])

    rows_now, rows_before = _rows_by_key(now, key), _rows_by_key(before, key)
    # Sentences and verdicts follow from the other columns.
    others = [(i, column) for i, column in enumerate(now.columns) if column.name not in key]
    compared = {i: column for i, column in others if column.kind not in ("detail", "ok")}
    rows: list[_Row] = []
    for own in rows_now | rows_before:
        old, new = rows_before.get(own), rows_now.get(own)
        if new and old:
            for i, column in compared.items():
                if change := _change(column, old[i], new[i], tolerance):
                    texts = column.text(old[i]), column.text(new[i])
                    rows.append((*own, column.name, *texts, *change))
        elif new:
            rows.append((*own, "", "", _row_text(compared, new), NEW, None, False))
        elif old:
            rows.append((*own, "", _row_text(compared, old), "", GONE, None, True))
    # First what is bad, then what is neither, and last what is good.
    rows.sort(key=lambda row: (row[-1] is not False, row[-1] is True))

    counts = Counter(row[-3] for row in rows)
    said = [f"{counts[change]} {change}" for change in CHANGES if counts[change]]
    columns = [column for column in now.columns if column.name in key]
    verdict = "; ".join([", ".join(said), *_write_sums(now, before)]) if rows else "nothing differs"
    return Report(now.title, verdict, (*columns, *_COLUMNS), rows, ok=not rows)


def _write_sums(now: Report, before: Report) -> Iterator[str]:
    """What the quantities of all rows come to, now and before."""
    for i, column in enumerate(now.columns):
        if column.kind in SUMMED:
            sums = [sum(row[i] or 0 for row in report.rows) for report in (now, before)]
            texts = [column.text(total) for total in sums]
            if texts[0] != texts[1]:
                yield f"{column.name} {texts[0]}, before {texts[1]}"


def _rows_by_key(report: Report, key: Sequence[str]) -> dict[_Row, _Row]:
    numbers = [i for i, column in enumerate(report.columns) if column.name in key]
    groups: dict[_Row, list[_Row]] = {}
    for row in report.rows:
        groups.setdefault(tuple(row[i] for i in numbers), []).append(row)
    return {own: add_rows(report.columns, rows) for own, rows in groups.items()}


def _row_text(columns: dict[int, Column], row: _Row) -> str:
    said = (f"{c.name} {c.text(row[i])}" for i, c in columns.items() if row[i] is not None)
    return ", ".join(said)


def _change(
    column: Column, before: Any, now: Any, tolerance: float
) -> tuple[str, float | None, bool | None] | None:
    """How a value changed, by which fraction, and whether that is good; None if it did not."""
    if column.kind in SUMMED:
        before, now = before or 0, now or 0
    # What prints alike is no difference to whoever reads it.
    if column.text(before) == column.text(now):
        return None
    if column.kind not in SUMMED:
        return CHANGED, None, None
    # A tolerance is for sizes: one operation more or less is another program.
    by = now / before - 1 if before else None
    if column.kind != "count" and by is not None and abs(by) <= tolerance:
        return None
    return (GREW, by, False) if now > before else (SHRANK, by, True)
