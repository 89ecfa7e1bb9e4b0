"""Holds what a function found out: a verdict, rows of raw values, and notes.

Text, HTML, treescope, the tree and JSON are views of the same rows, and two reports are compared by
them. The rows of equal blocks are folded once, here, so that all views fold them in the same way.
"""

import dataclasses
import json
import shutil
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

from penzai_shard.errors import Problem, SelectionError
from penzai_shard.paths import fold_paths, group_paths
from penzai_shard.reports.quantities import FORMATS, plain_text

if TYPE_CHECKING:
    from penzai_shard.reports.tree import Tree

Kind = Literal["path", "text", "detail", "bytes", "count", "seconds", "percent", "ok"]
# Quantities of these kinds add up over blocks and over what is below a path.
SUMMED = frozenset({"bytes", "count", "seconds"})
Row = tuple[Any, ...]
# A line of a drawing in pieces, each with the style that HTML gives it.
Line = Sequence[tuple[str, str]]


@dataclasses.dataclass(frozen=True)
class Column:
    """One column of a report.

    Attributes:
        name: Its heading, and its key in JSON.
        kind: How its values are written. Bytes, counts and seconds add up over equal blocks; a
            percentage is a fraction of 1; a detail is a sentence that stands below its row; the
            rows whose "ok" is False are coloured. Text and paths may be any value.
        shown: Whether tables have it. The tree and JSON have every column.

    >>> Column("bytes_per_device", "bytes").text(4096)
    '4.0 KiB'
    """

    name: str
    kind: Kind = "text"
    shown: bool = True

    def text(self, value: Any) -> str:
        """A value of this column as people read it; empty for None."""
        return "" if value is None else FORMATS.get(self.kind, plain_text)(value)


# How many equal blocks a folded row stands for.
FOLDED = Column("x", "count")


class HasReport:
    """A value that prints, shows itself in a notebook and becomes JSON by its report.

    A subclass writes ``report()`` and nothing else. If it is a dataclass, it needs ``repr=False``.
    """

    def report(self) -> "Report":
        """The report that all views show."""
        raise NotImplementedError

    def table(self, *, collapse: bool = True) -> "Report":
        """The report as it prints.

        Args:
            collapse: Whether equal blocks are one row.
        """
        return dataclasses.replace(self.report(), collapse=collapse)

    def tree(self, *, collapse: bool = True) -> "Tree":
        """The rows nested by their paths, with sums and shares; notebooks unfold it.

        Args:
            collapse: Whether equal blocks are one row.
        """
        from penzai_shard.reports.tree import make_tree

        return make_tree(self.table(collapse=collapse))

    def largest(self, column: str, count: int) -> "Report":
        """The rows with the most of a column, the largest first; the others as one row, their sum.

        Args:
            column: The name of a column of bytes, counts or seconds.
            count: How many rows to keep. Equal blocks are one row.

        Raises:
            SelectionError: No column has this name.
        """
        # Folded first, or a block would hide what its twins hold together.
        report = self.report().fold()
        names = [each.name for each in report.columns]
        if column not in names:
            fix = f"Write one of {', '.join(map(repr, names))}."
            raise SelectionError("largest:", [Problem("", f"there is no column {column!r}", fix)])
        index = names.index(column)
        rows = sorted(report.rows, key=lambda row: row[index] or 0, reverse=True)
        rest = [row for row in rows[count:] if (row[index] or 0) >= 0]
        # What is taken off, as donated bytes are, comes last and stands by itself.
        kept, taken_off = rows[:count], rows[count + len(rest) :]
        if rest:
            _, *sums = add_rows(report.columns, rest)
            kept.append((f"({len(rest):,} more)", *sums))
        return dataclasses.replace(report, rows=[*kept, *taken_off], collapse=False)

    def compare(self, before: "HasReport", *, tolerance: float = 0.0) -> "Report":
        """What differs from an earlier report with the same columns.

        Rows are found again by the columns of the report's ``key``.

        Args:
            before: The earlier one.
            tolerance: By which fraction bytes and seconds may differ. Counts may not.

        Returns:
            A report with one row for each value that differs. Its truth value is whether nothing
            does. What is bad of it, and red, is a quantity that grew or a row that is new.

        Raises:
            SelectionError: The columns are others.

        >>> columns = (Column("path", "path"), Column("bytes", "bytes"))
        >>> now, before = (Report("step", "", columns, [("w", n)]) for n in (96, 64))
        >>> now.compare(before)
        1 grew; bytes 96 B, before 64 B
        path  what   before  now   change  by
        w     bytes    64 B  96 B  grew    50%
        """
        return _compare_reports(self.report(), before.report(), tolerance)

    def to_data(self) -> dict[str, Any]:
        """The report as a dictionary: its facts, and each row with the names of the columns."""
        report = self.report()
        names = [column.name for column in report.columns]
        return {
            **report.facts,
            "title": report.title,
            "verdict": report.verdict,
            "ok": report.ok,
            "rows": [dict(zip(names, row, strict=True)) for row in report.rows],
            "notes": list(report.notes),
        }

    def to_json(self) -> str:
        """``to_data()`` as JSON; what JSON cannot hold is written as text."""

        # The JSON module does not know NumPy's numbers.
        def plain(value: Any) -> Any:
            return value.tolist() if hasattr(value, "tolist") else str(value)

        return json.dumps(self.to_data(), indent=2, default=plain)

    def __str__(self) -> str:
        from penzai_shard.reports.text import write_lines

        width = shutil.get_terminal_size((100, 0)).columns
        return "\n".join(line.rstrip() for line in write_lines(self.report(), width))

    __repr__ = __str__

    def _repr_html_(self) -> str:
        from penzai_shard.reports.html import write_table

        return write_table(self.report())

    def __treescope_repr__(self, path: str | None, subtree_renderer: Any) -> Any:
        return self.tree(collapse=self.report().collapse).__treescope_repr__(path, subtree_renderer)


@dataclasses.dataclass(frozen=True, repr=False)
class Report(HasReport):
    """A verdict, rows of raw values, and notes.

    Attributes:
        title: What it is a report of.
        verdict: The first line.
        columns: What the rows hold. If the first is of kind "path", equal blocks can be folded.
        rows: One tuple per row, with a value or None for each column.
        notes: Sentences below the table.
        ok: Whether the verdict is good, which is the truth value; None if nothing is judged.
        facts: What JSON says besides, for instance the mesh.
        collapse: Whether the views show equal blocks as one row.
        key: The columns that together name a row; by default the first.
        drawing: What writes, for a width, what stands below the rows; JSON does not have it.

    >>> columns = (Column("path", "path"), Column("bytes", "bytes"))
    >>> Report("arrays", "2 arrays", columns, [("block_0/w", 4096), ("block_1/w", 4096)])
    2 arrays
    path           x    bytes
    block_{0-1}/w  2  8.0 KiB
    """

    title: str
    verdict: str
    columns: Sequence[Column] = ()
    rows: Sequence[Row] = ()
    notes: Sequence[str] = ()
    ok: bool | None = None
    facts: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    collapse: bool = True
    key: Sequence[str] = ()
    drawing: Callable[[int], Iterable[Line]] = dataclasses.field(default=lambda width: ())

    def report(self) -> "Report":
        """This report."""
        return self

    def __bool__(self) -> bool:
        return self.ok is None or bool(self.ok)

    def fold(self) -> "Report":
        """The same with equal blocks as one row, and a column ``x`` that counts them.

        Rows are one if they read the same but for the numbers in their paths and for quantities.
        """
        if not (self.collapse and self.columns and self.columns[0].kind == "path"):
            return self
        # By their texts: what reads the same is the same to a reader, and texts can be hashed.
        others = [(i, c) for i, c in enumerate(self.columns) if i and c.kind not in SUMMED]
        groups = group_paths(
            (str(row[0]), tuple(c.text(row[i]) for i, c in others)) for row in self.rows
        )
        rows = []
        for members in groups:
            block = [self.rows[i] for i in members]
            _, *sums = add_rows(self.columns, block)
            rows.append((fold_paths([str(row[0]) for row in block]), len(block), *sums))
        if len(rows) == len(self.rows):
            return self
        columns = (self.columns[0], FOLDED, *self.columns[1:])
        return dataclasses.replace(self, columns=columns, rows=rows, collapse=False)

    def condense(self) -> "Report":
        """The same, folded, without columns that say nothing.

        A column of text that says the same in each of several rows becomes a note.
        """
        report = self.fold()
        kept, said = [], []
        for index, column in enumerate(report.columns):
            # In a table of one row every column says one thing, and stays.
            texts = {column.text(row[index]) for row in report.rows}
            says_one_thing = column.shown and column.kind in ("text", "ok") and len(report.rows) > 1
            if texts <= {""} or (says_one_thing and len(texts) == 1):
                said += [f"{column.name} {text}" for text in texts if text]
            else:
                kept.append(index)
        notes = [f"In all rows: {'; '.join(said)}."] if said else []
        return dataclasses.replace(
            report,
            columns=[report.columns[i] for i in kept],
            rows=[tuple(row[i] for i in kept) for row in report.rows],
            notes=[*notes, *report.notes],
        )


def add_rows(columns: Sequence[Column], rows: Sequence[Row]) -> Row:
    """Several rows as one: quantities add up, and another value is None where rows differ in it."""

    def add(column: Column, values: Sequence[Any]) -> Any:
        if column.kind not in SUMMED:
            return values[0] if len(set(map(column.text, values))) == 1 else None
        given = [value for value in values if value is not None]
        return sum(given) if given else None

    return tuple(map(add, columns, zip(*rows, strict=True)))


# Comparing

_CHANGES = ("grew", "shrank", "changed", "new", "gone")
_DIFFERENCES = (
    *map(Column, ("what", "before", "now", "change")),
    Column("by", "percent"),
    Column("ok", "ok", shown=False),
)


def _compare_reports(now: Report, before: Report, tolerance: float) -> Report:
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
    rows: list[Row] = []
    for own in rows_now | rows_before:
        old, new = rows_before.get(own), rows_now.get(own)
        if new and old:
            for i, column in compared.items():
                if change := _change(column, old[i], new[i], tolerance):
                    texts = column.text(old[i]), column.text(new[i])
                    rows.append((*own, column.name, *texts, *change))
        elif new:
            rows.append((*own, "", "", _row_text(compared, new), "new", None, False))
        elif old:
            rows.append((*own, "", _row_text(compared, old), "", "gone", None, True))
    # First what is bad, then what is neither, and last what is good.
    rows.sort(key=lambda row: (row[-1] is not False, row[-1] is True))

    counts = Counter(row[-3] for row in rows)
    said = [f"{counts[change]} {change}" for change in _CHANGES if counts[change]]
    columns = [column for column in now.columns if column.name in key]
    verdict = "; ".join([", ".join(said), *_write_sums(now, before)]) if rows else "nothing differs"
    return Report(now.title, verdict, (*columns, *_DIFFERENCES), rows, ok=not rows)


def _write_sums(now: Report, before: Report) -> Iterator[str]:
    """What the quantities of all rows come to, now and before."""
    for i, column in enumerate(now.columns):
        if column.kind in SUMMED:
            sums = [sum(row[i] or 0 for row in report.rows) for report in (now, before)]
            texts = [column.text(total) for total in sums]
            if texts[0] != texts[1]:
                yield f"{column.name} {texts[0]}, before {texts[1]}"


def _rows_by_key(report: Report, key: Sequence[str]) -> dict[Row, Row]:
    numbers = [i for i, column in enumerate(report.columns) if column.name in key]
    groups: dict[Row, list[Row]] = {}
    for row in report.rows:
        groups.setdefault(tuple(row[i] for i in numbers), []).append(row)
    return {own: add_rows(report.columns, rows) for own, rows in groups.items()}


def _row_text(columns: dict[int, Column], row: Row) -> str:
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
        return "changed", None, None
    # A tolerance is for sizes: one operation more or less is another program.
    by = now / before - 1 if before else None
    if column.kind != "count" and by is not None and abs(by) <= tolerance:
        return None
    return ("grew", by, False) if now > before else ("shrank", by, True)
