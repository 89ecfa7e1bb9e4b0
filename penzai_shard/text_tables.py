"""Tables for people: plain text of any width, colours through rich, HTML in notebooks.

One layout serves text and rich. It breaks lines at spaces, and paths after a slash, never within a
word. Where a table is too wide for that, each row starts with its first cell on a line of its own.
"""

import abc
import dataclasses
import html
import re
import shutil
import sys
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, ClassVar

from penzai_shard.report_trees import ReportTree, printable, treescope_part

# Without a terminal to ask, as in a pipe.
PLAIN_WIDTH = 100
# More lines than this in one cell are worse to read than the narrow layout.
MOST_LINES = 4
# Cells with more characters keep a width that can be read, however narrow the page is: it scrolls.
_LONG_TEXT = 60
# A row of more cells is wider than a page, and its last text stands below it.
_MOST_CELLS = 6
# A table in a notebook shows at most so many rows; its text shows them all.
NOTEBOOK_ROWS = 250

Segments = list[tuple[str, str]]
"""One line: pieces of text, each with its rich style."""

_GAP = "  "
_INDENT = "    "
_WORDS = re.compile(r"\S+\s*|\s+")
_PATH_PARTS = re.compile(r"[^\s/]*/|[^\s/]+|\s+")
# Middle tones, to be read on light and on dark pages.
_HTML_STYLES = {"green": "color:#2a9d4a", "red": "color:#e5484d", "bold": "font-weight:600"}
# Notebooks align every cell of every table to the right, hence the emphasis.
_CSS = (
    ".pzs-table{border-collapse:collapse;font-size:90%;margin:.3em 0}"
    "table.pzs-table th,table.pzs-table td{text-align:left!important;vertical-align:top!important;"
    "padding:.15em .7em;"
    "background:none;color:inherit;border:0;border-bottom:1px solid rgba(128,128,128,.3);"
    "max-width:34em;white-space:normal;word-break:normal;overflow-wrap:normal}"
    "table.pzs-table .r{text-align:right!important;font-variant-numeric:tabular-nums}"
    "table.pzs-table .n{white-space:nowrap}"
    "table.pzs-table .w{min-width:14em}table.pzs-table .b{max-width:none;padding-left:2em}"
    "table.pzs-table tr:has(+tr>.b) td{border-bottom:0}"
)


class NotebookView(abc.ABC):
    """A value that a notebook shows as a table, its verdict first.

    Jupyter takes ``_repr_html_``, with treescope as the default renderer and without it. Treescope
    itself, and whatever other value it renders with this one inside, shows the value's tree if it
    has one; or else the verdict, which unfolds to the table.

    At the end of a cell ``tree()`` is the tree that unfolds, if treescope is the default renderer
    (``treescope.basic_interactive_setup()``), and its lines as text if not.
    ``treescope.display(value)`` shows the tree either way.
    """

    __slots__ = ()

    @abc.abstractmethod
    def notebook_table(self) -> "TextTable":
        """The table to show."""

    def tree(self, *, collapse: bool = True) -> ReportTree | None:
        """How it unfolds: its lines with their figures, nested; None if it is a table alone.

        Args:
            collapse: Show equal blocks as one node with a count.
        """
        del collapse
        return None

    def _repr_html_(self) -> str:
        return self.notebook_table().html()

    def __treescope_repr__(self, path: str | None, subtree_renderer: Any) -> Any:
        """The tree, or the verdict; treescope itself adds the HTML, folded."""
        del subtree_renderer
        if (tree := self.tree()) is not None:
            return treescope_part(tree, path)
        from treescope import rendering_parts

        table = self.notebook_table()
        verdict = printable(table.text_verdict() or " | ".join(table.headings))
        return rendering_parts.build_one_line_tree_node(
            line=rendering_parts.text(f"<{type(self).__name__}: {verdict}>"), path=path
        )


class TextTable(NotebookView):
    """A value that prints as a table: a verdict, the rows, and lines below them.

    ``str`` and ``repr`` are plain text as wide as the terminal, whatever standard output is;
    colours come through rich alone (``rich.print(table)``).

    Attributes:
        headings: One per column.
        right_aligned: The headings of columns of numbers, which are not wrapped either.
        unwrapped: The headings of other columns that are not wrapped.
        paths: The headings of columns of paths, which are broken after a slash.
        below: The heading of a last column that a narrow table shows below each row, if any.
        wide: The width, in columns, from which on the table is not narrow; 0 for whatever its
            words need.
        has_headings_alone: Whether headings are shown without any row below them.
    """

    headings: ClassVar[tuple[str, ...]]
    right_aligned: ClassVar[frozenset[str]] = frozenset()
    unwrapped: ClassVar[frozenset[str]] = frozenset()
    paths: ClassVar[frozenset[str]] = frozenset()
    below: ClassVar[str | None] = None
    wide: ClassVar[int] = 0
    has_headings_alone: ClassVar[bool] = True

    @abc.abstractmethod
    def text_rows(self) -> Sequence[tuple[str, ...]]:
        """The rows, one text per column."""

    def text_verdict(self) -> str:
        """The first line, which says what comes of it all; empty for none."""
        return ""

    def verdict_style(self) -> str:
        """The rich style of the verdict."""
        return "bold"

    def text_summary(self) -> Sequence[str]:
        """The lines below the table; none by default."""
        return ()

    def style_of(self, row: int, heading: str) -> str:
        """The rich style of a cell; none by default."""
        del row, heading
        return ""

    def notebook_table(self) -> "TextTable":
        """This table."""
        return self

    def plain_text(self, width: int | None = None) -> str:
        """The table as text without colours or control characters.

        Args:
            width: How wide it may be, in columns; by default as wide as the terminal, or
                ``PLAIN_WIDTH`` without one. A word that is longer is not broken.
        """
        if width is None:
            width = shutil.get_terminal_size((PLAIN_WIDTH, 0)).columns
        lines = ("".join(text for text, _ in line).rstrip() for line in self.lines(width))
        return "\n".join(lines)

    def __str__(self) -> str:
        return self.plain_text()

    def __repr__(self) -> str:
        return self.plain_text()

    def __rich_console__(self, console: Any, options: Any) -> Iterator[Any]:
        """The table for rich's ``print`` and consoles, as wide as the console."""
        from rich.text import Text

        for line in self.lines(options.max_width):
            yield Text.assemble(*line)

    def html(self) -> str:
        """The table as a piece of HTML that needs nothing else, for light and dark pages."""
        rows = self.text_rows()
        parts = [f"<style>{_CSS}</style>"]
        if verdict := self.text_verdict():
            # A code host that drops styles shows it in bold all the same.
            shown = _element("strong", verdict, "", self.verdict_style())
            parts.append(f"<div>{shown}</div>")
        if rows or self.has_headings_alone:
            # Wider than the page it scrolls, and not the page.
            table = "".join(self._html_table(rows, styled=True))
            parts.append(f'<section style="overflow-x:auto">{table}</section>')
        parts += [_element("div", line) for line in (*self.text_summary(), *_left_out(rows))]
        return "".join(parts)

    def html_rows(self) -> str:
        """The rows alone as HTML, for a page that has a style and shows the rest itself.

        Its classes are ``pzs-table``, ``r`` for cells of numbers, ``n`` for what is not wrapped,
        ``w`` for long texts, ``b`` for what is below a row, and the words of rich's styles.
        """
        rows = self.text_rows()
        if not rows and not self.has_headings_alone:
            return ""
        parts = [*self._html_table(rows, styled=False)]
        return "".join([*parts, *(_element("div", line) for line in _left_out(rows))])

    def _html_table(self, rows: Sequence[tuple[str, ...]], styled: bool) -> Iterator[str]:
        classes = [
            "r n" if heading in self.right_aligned else "n" if heading in self.unwrapped else ""
            for heading in self.headings
        ]
        below = self.headings[-1] == self.below and len(self.headings) > _MOST_CELLS
        next_row = f'</tr><tr><td colspan="{len(self.headings) - 1}" class="b">'
        yield '<table class="pzs-table"><thead><tr>'
        for heading, kind in zip(self.headings[: -1 if below else None], classes, strict=False):
            yield _element("th", heading, kind)
        yield "</tr></thead><tbody>"
        for number, row in enumerate(rows[:NOTEBOOK_ROWS]):
            yield "<tr>"
            for heading, kind, cell in zip(self.headings, classes, row, strict=True):
                style = self.style_of(number, heading)
                if below and heading == self.below:
                    yield f"{next_row}{_element('span', cell, '', style, styled)}</td>"
                    continue
                kind = kind or ("w" if len(cell) > _LONG_TEXT else "")
                yield _element("td", cell, kind, style, styled, heading in self.paths)
            yield "</tr>"
        yield "</tbody></table>"

    def lines(self, width: int) -> Iterator[Segments]:
        """The verdict, the table and the lines below it, none of them wider than it must be."""
        if verdict := self.text_verdict():
            yield from _paragraph(verdict, width, self.verdict_style())
        rows = [tuple(map(printable, row)) for row in self.text_rows()]
        if rows or self.has_headings_alone:
            yield from self._table_lines(rows, width)
        for line in self.text_summary():
            yield from _paragraph(line, width, "")

    def _table_lines(self, rows: Sequence[tuple[str, ...]], width: int) -> Iterator[Segments]:
        columns = list(range(len(self.headings)))
        widths = self._widths(columns, rows, width)
        narrow = widths is None
        below = len(columns) - 1 if narrow and self.headings[-1] == self.below else None
        if widths is None:
            columns = [i for i in columns[1:] if i != below]
            widths = self._widths(columns, rows, width - len(_INDENT), outermost=False)
        if widths is None:
            widths = [self._least(i, rows) for i in columns]

        def lines_of(row: Sequence[str], styles: Sequence[str]) -> Iterator[Segments]:
            if narrow:
                at_slash = self.headings[0] in self.paths
                yield from _paragraph(row[0], width, styles[0] or "bold", "", at_slash)
            for line in self._row_lines(columns, widths, row, styles):
                yield [(_INDENT, ""), *line] if narrow else line
            if below is not None:
                yield from _paragraph(row[below], width, styles[below], _INDENT)

        yield from lines_of(self.headings, ["bold"] * len(self.headings))
        rule = "-" * _total(widths) if narrow else _GAP.join("-" * each for each in widths)
        yield [((_INDENT.replace(" ", "-") if narrow else "") + rule, "bold")]
        for number, row in enumerate(rows):
            yield from lines_of(row, [self.style_of(number, heading) for heading in self.headings])

    def _row_lines(
        self, columns: list[int], widths: list[int], row: Sequence[str], style: Sequence[str]
    ) -> Iterator[Segments]:
        cells = [
            wrapped(row[i], width, self.headings[i] in self.paths)
            for i, width in zip(columns, widths, strict=True)
        ]
        for line in range(max(map(len, cells), default=0)):
            segments: Segments = []
            for i, width, cell in zip(columns, widths, cells, strict=True):
                text = cell[line] if line < len(cell) else ""
                right = self.headings[i] in self.right_aligned
                segments.append((text.rjust(width) if right else text.ljust(width), style[i]))
                segments.append((_GAP, ""))
            yield segments[:-1]

    def _least(self, column: int, rows: Sequence[Sequence[str]]) -> int:
        """The width of a column that breaks no word in it."""
        heading = self.headings[column]
        cells = [heading, *(row[column] for row in rows)]
        if heading in self.right_aligned | self.unwrapped:
            return max(map(len, cells))
        pattern = _PATH_PARTS if heading in self.paths else _WORDS
        return max(len(p.rstrip()) for cell in {*cells, "-"} for p in pattern.findall(cell))

    def _widths(
        self,
        columns: list[int],
        rows: Sequence[Sequence[str]],
        width: int,
        outermost: bool = True,
    ) -> list[int] | None:
        """Widths that fit, the widest columns cut first; None if a word would be broken, or, of
        the outermost layout, if it is better narrow."""
        natural = [max(len(line[i]) for line in [self.headings, *rows]) for i in columns]
        if _total(natural) <= width:
            return natural
        least = [self._least(i, rows) for i in columns]
        if _total(least) > width or (outermost and width < self.wide):
            return None
        cap = max(natural)
        while _total(cut := [max(a, min(b, cap)) for a, b in zip(least, natural, strict=True)]) > (
            width
        ):
            cap -= 1
        crowded = any(
            len(wrapped(row[i], each, self.headings[i] in self.paths)) > MOST_LINES
            for row in rows
            for i, each in zip(columns, cut, strict=True)
        )
        return None if crowded and outermost else cut


@dataclasses.dataclass(frozen=True, repr=False)
class PreparedTable(TextTable):
    """A table whose texts are given; a subclass says what its columns are.

    Attributes:
        rows: The rows, one text per column.
        verdict: The first line; empty for none.
        summary: The lines below the table.
    """

    rows: tuple[tuple[str, ...], ...]
    verdict: str = ""
    summary: tuple[str, ...] = ()

    def text_rows(self) -> tuple[tuple[str, ...], ...]:
        """The rows."""
        return self.rows

    def text_verdict(self) -> str:
        """The first line."""
        return self.verdict

    def text_summary(self) -> tuple[str, ...]:
        """The lines below the table."""
        return self.summary


@dataclasses.dataclass(frozen=True, repr=False)
class FindingsTable(PreparedTable):
    """What was found, below a verdict that is green or red; headings only if there are rows.

    Attributes:
        ok: Whether the verdict is good.
    """

    has_headings_alone = False

    ok: bool = True

    def verdict_style(self) -> str:
        """Green or red."""
        return "bold green" if self.ok else "bold red"


class Report(NotebookView):
    """A value with more to it than a table, which its ``str`` and ``repr`` show."""

    __slots__ = ()

    @abc.abstractmethod
    def table(self, *, collapse: bool = True) -> TextTable:
        """The table.

        Args:
            collapse: Show what differs only in the numbers of its names as one row with a count.
        """

    @abc.abstractmethod
    def to_json(self) -> str:
        """All of it as JSON text, for programs."""

    def notebook_table(self) -> TextTable:
        """The table, equal blocks in one row."""
        return self.table()

    def __rich_console__(self, console: Any, options: Any) -> Iterator[Any]:
        return self.table().__rich_console__(console, options)

    def __repr__(self) -> str:
        return str(self.table())


def is_in_notebook() -> bool:
    """Whether a kernel runs this, which shows more than text."""
    shell = sys.modules.get("IPython")
    current = None if shell is None else shell.get_ipython()
    return current is not None and hasattr(current, "kernel")


def wrapped(text: str, width: int, at_slash: bool = False) -> list[str]:
    """Text in lines of at most ``width``, broken at spaces only, and after slashes on request.

    >>> wrapped("model/block_0/attention/query.weights", 20, at_slash=True)
    ['model/block_0/', 'attention/', 'query.weights']
    """
    if len(text) <= width:
        return [text]
    lines = [""]
    for piece in (_PATH_PARTS if at_slash else _WORDS).findall(text):
        if lines[-1] and len(lines[-1]) + len(piece.rstrip()) > width:
            lines.append("")
        lines[-1] += piece
    return [line.rstrip() for line in lines]


def _paragraph(
    text: str, width: int, style: str, indent: str = "", at_slash: bool = False
) -> Iterator[Segments]:
    """A text over the whole width; lines after the first stand further in."""
    text = printable(text)
    lines = [text]
    if len(indent) + len(text) > width:
        lines = wrapped(text, max(width - len(indent) - len(_INDENT), 1), at_slash)
    for number, line in enumerate(lines):
        yield [(indent + _INDENT * (number > 0), ""), (line, style)]


def _total(widths: Iterable[int]) -> int:
    widths = list(widths)
    return sum(widths) + len(_GAP) * max(len(widths) - 1, 0)


def _left_out(rows: Sequence[tuple[str, ...]]) -> list[str]:
    """What is said of rows that are not shown."""
    more = len(rows) - NOTEBOOK_ROWS
    return [f"and {more:,} more rows; print shows them all"] if more > 0 else []


def _element(
    tag: str,
    text: str,
    kind: str = "",
    style: str = "",
    styled: bool = True,
    path: bool = False,
) -> str:
    known = [word for word in style.split() if word in _HTML_STYLES]
    css = ";".join(_HTML_STYLES[word] for word in known) if styled else ""
    if not styled:
        kind = " ".join([kind, *known]).strip()
    attributes = (f' class="{kind}"' if kind else "") + (f' style="{css}"' if css else "")
    words = []
    for word in printable(text).split(" "):
        shown = html.escape(word)
        if path:
            shown = shown.replace("/", "/<wbr>")
        elif "-" in word:
            # A browser would break a line after a hyphen, and so within an arrow.
            shown = f'<span class="n">{shown}</span>'
        words.append(shown)
    return f"<{tag}{attributes}>{' '.join(words)}</{tag}>"
