"""Compares two reports of the same columns: one row for each value that differs."""

from collections import Counter
from collections.abc import Sequence
from typing import Any

from penzai_shard.errors import Problem, SelectionError
from penzai_shard.reports.report import SUMMED, Column, Report, add_rows

GREW, SHRANK, CHANGED, NEW, GONE = CHANGES = ("grew", "shrank", "changed", "new", "gone")
_COLUMNS = (
    Column("what"),
    Column("before"),
    Column("now"),
    Column("change"),
    Column("by", "percent"),
    Column("ok", "ok", shown=False),
)


def compare_reports(now: Report, before: Report, key: Sequence[str], tolerance: float) -> Report:
    """What differs between two reports; see ``HasReport.compare``."""
    names = [column.name for column in now.columns]
    key = tuple(key) or tuple(names[:1])
    if names != [column.name for column in before.columns] or not {*key} <= {*names}:
        what = f"its columns are {names}, and the earlier report is to have the same with {[*key]}"
        raise SelectionError("compare:", [Problem("", what, "Compare reports of one kind.")])
    rows_now, rows_before = _rows_by_key(now, key), _rows_by_key(before, key)
    rows, absent = [], (None,) * len(names)
    for own in rows_now | rows_before:
        sides = (rows_before.get(own, absent), rows_now.get(own, absent))
        for column, *pair in zip(now.columns, *sides, strict=True):
            change = _change(column, pair[0], pair[1], tolerance)
            if change and column.name not in key:
                rows.append((*own, column.name, *map(column.text, pair), *change))
    counts = Counter(row[-3] for row in rows)
    said = [f"{counts[change]} {change}" for change in CHANGES if counts[change]]
    columns = [column for column in now.columns if column.name in key]
    verdict = ", ".join(said) or "nothing differs"
    return Report(now.title, verdict, (*columns, *_COLUMNS), rows, ok=not rows)


def _rows_by_key(report: Report, key: Sequence[str]) -> dict[tuple[Any, ...], tuple[Any, ...]]:
    numbers = [i for i, column in enumerate(report.columns) if column.name in key]
    groups: dict[tuple[Any, ...], list[tuple[Any, ...]]] = {}
    for row in report.rows:
        groups.setdefault(tuple(row[i] for i in numbers), []).append(row)
    return {own: add_rows(report.columns, rows) for own, rows in groups.items()}


def _change(
    column: Column, before: Any, now: Any, tolerance: float
) -> tuple[str, float | None, bool | None] | None:
    """How a value changed, by which fraction, and whether that is good; None if it did not."""
    if column.kind not in SUMMED:
        if column.kind in ("detail", "ok") or column.text(before) == column.text(now):
            return None
        change = NEW if before is None else GONE if now is None else CHANGED
        return change, None, None
    if before == now:
        return None
    if not before or not now:
        return (NEW, None, False) if now else (GONE, None, True) if before else None
    by = now / before - 1
    if abs(by) <= tolerance and column.kind != "count":
        return None
    return (GREW, by, False) if by > 0 else (SHRANK, by, True)
