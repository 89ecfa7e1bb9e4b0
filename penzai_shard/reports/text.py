"""Writes a report as lines of text that are no wider than a given width.

Lines break at spaces, and in paths after a slash; never within a word. Where a word with its indent
is wider than the width, so is its line.
"""

import re
from collections.abc import Iterator, Sequence

from penzai_shard.reports.quantities import plain_text
from penzai_shard.reports.report import Column, Report

QUANTITIES = frozenset({"bytes", "count", "seconds", "percent"})
_GAP = "  "
_INDENT = "    "
_PIECES = {
    "": re.compile(r"\S+\s*|\s+"),
    # After a slash, and in long labels after all dots but the last.
    "path": re.compile(r"[^\s/.]*\.(?=[^\s/]*\.)|[^\s/]*/|[^\s/]+\s*|\s+"),
    # After the bracket of a call too, as in the names of several wrappers.
    "text": re.compile(r"(?:[^\s(]|(?<!\w)\()+(?:\(|\s*)|\(|\s+"),
}


def write_lines(report: Report, width: int) -> Iterator[str]:
    """The verdict, the rows and the notes."""
    report = report.condense()
    yield from wrap(plain_text(report.verdict), width)
    columns, cells = table_cells(report)
    if columns:
        names = [column.name for column in columns]
        widths = _column_widths(columns, [names, *cells], width)
        # Without columns each value stands behind the name of its column.
        if widths:
            yield from _write_row(columns, names, widths, width)
        for row, texts in zip(report.rows, cells, strict=True):
            yield from _write_row(columns, texts, widths, width)
            for detail in row_details(report, row):
                yield from wrap(detail, width, indent=_INDENT)
    for pieces in report.drawing(width):
        yield "".join(text for text, _ in pieces)
    for note in report.notes:
        yield from wrap(plain_text(note), width)


def table_cells(report: Report) -> tuple[list[Column], list[list[str]]]:
    """The columns that a table shows, and the texts of its rows."""
    shown = [i for i, c in enumerate(report.columns) if c.shown and c.kind != "detail"]
    texts = [[report.columns[i].text(row[i]) for i in shown] for row in report.rows]
    return [report.columns[i] for i in shown], texts


def is_bad(report: Report, row: tuple[object, ...]) -> bool:
    """Whether a row says that something is not as it should be."""
    judged = [row[i] for i, c in enumerate(report.columns) if c.kind == "ok"]
    return any(value is not None and not value for value in judged)


def row_details(report: Report, row: tuple[object, ...]) -> list[str]:
    """The sentences that stand below a row."""
    return [c.text(row[i]) for i, c in enumerate(report.columns) if c.kind == "detail" and row[i]]


def _pieces(text: str, kind: str) -> list[str]:
    return _PIECES.get(kind, _PIECES[""]).findall(text)


def wrap(text: str, width: int, kind: str = "", indent: str = "") -> list[str]:
    """Text in lines of at most ``width`` characters, with an indent; at least one line.

    What stands in a column breaks as its kind does, all else at spaces.

    >>> wrap("decoder/block_0/attention", 16, "path")
    ['decoder/block_0/', 'attention']
    """
    lines = [indent]
    for piece in _pieces(text, kind):
        if lines[-1] != indent and len(lines[-1]) + len(piece.rstrip()) > width:
            lines.append(indent)
        lines[-1] += piece
    return [line.rstrip() for line in lines]


def _column_widths(
    columns: Sequence[Column], rows: Sequence[Sequence[str]], width: int
) -> list[int] | None:
    """The widths of the columns, the widest cut first; None if a word would be broken."""
    texts_of = [*zip(*rows, strict=True)]
    natural = [max(map(len, texts)) for texts in texts_of]
    room = width - len(_GAP) * (len(columns) - 1)
    # Within calls cells break only where there is no table without.
    for with_calls in (False, True):
        least = []
        for column, size, texts in zip(columns, natural, texts_of, strict=True):
            kind = "" if column.kind == "text" and not with_calls else column.kind
            pieces = [p.rstrip() for text in texts for p in _pieces(text, kind)]
            # A number and its unit stay together.
            least.append(size if kind in QUANTITIES else max(map(len, pieces)))
        if sum(least) <= room:
            break
    else:
        return None
    # The widest give way first: mostly paths and reasons, which break well.
    cap = max(natural)
    while sum(widths := [max(a, min(b, cap)) for a, b in zip(least, natural, strict=True)]) > room:
        cap -= 1
    return widths


def _write_row(
    columns: Sequence[Column], texts: Sequence[str], widths: Sequence[int] | None, width: int
) -> Iterator[str]:
    if widths:
        wrapped = [wrap(text, w, c.kind) for c, text, w in zip(columns, texts, widths, strict=True)]
        for number in range(max(map(len, wrapped))):
            cells = [lines[number] if number < len(lines) else "" for lines in wrapped]
            cells = [
                cell.rjust(w) if c.kind in QUANTITIES else cell.ljust(w)
                for c, cell, w in zip(columns, cells, widths, strict=True)
            ]
            yield _GAP.join(cells).rstrip()
        return
    # Too narrow for columns: the path, and each other value on a line of its own.
    yield from wrap(texts[0], width, columns[0].kind)
    for column, text in zip(columns[1:], texts[1:], strict=True):
        if text:
            yield from wrap(f"{column.name}: {text}", width, indent=_INDENT)
