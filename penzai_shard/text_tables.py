"""Tables for people: rich in a terminal where rich is installed, plain text anywhere else."""

import abc
import io
import sys
from collections.abc import Iterator, Sequence
from typing import Any, ClassVar


class TextTable(abc.ABC):
    """A value that prints as a table with lines below it.

    Attributes:
        headings: One per column.
        right_aligned: The headings of columns of numbers, which are not wrapped either.
        unwrapped: The headings of other columns that are not wrapped.
        wide: What a terminal needs, in columns, to show the last column too; 0 for always.
    """

    headings: ClassVar[tuple[str, ...]]
    right_aligned: ClassVar[frozenset[str]] = frozenset()
    unwrapped: ClassVar[frozenset[str]] = frozenset()
    wide: ClassVar[int] = 0

    @abc.abstractmethod
    def text_rows(self) -> Sequence[tuple[str, ...]]:
        """The rows, one text per column."""

    @abc.abstractmethod
    def text_summary(self) -> Sequence[str]:
        """The lines below the table."""

    def style_of(self, row: int, heading: str) -> str:
        """The rich style of a cell; none by default."""
        del row, heading
        return ""

    def plain_text(self) -> str:
        """The table as text without colours or control characters."""
        rows = self.text_rows()
        widths = [
            max(len(line[i]) for line in [self.headings, *rows]) for i in range(len(self.headings))
        ]
        widths[-1] = len(self.headings[-1])
        ruled = tuple("-" * width for width in widths)
        text = [
            "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
            for line in (self.headings, ruled, *rows)
        ]
        return "\n".join([*text, *self.text_summary()])

    def __rich_console__(self, console: Any, options: Any) -> Iterator[Any]:
        """The table for rich's ``print`` and consoles; a narrow one does without the last column
        if it is not ``wide`` enough."""
        from rich.table import Table
        from rich.text import Text

        shown = self.headings if options.max_width >= self.wide else self.headings[:-1]
        table = Table(header_style="bold", row_styles=["", "dim"], box=None, pad_edge=False)
        for heading in shown:
            right = heading in self.right_aligned
            table.add_column(
                heading,
                justify="right" if right else "left",
                overflow="fold",
                no_wrap=right or heading in self.unwrapped,
            )
        for number, row in enumerate(self.text_rows()):
            cells = zip(shown, row, strict=False)
            table.add_row(*(Text(cell, self.style_of(number, name)) for name, cell in cells))
        yield table
        for line in self.text_summary():
            yield Text(line)

    def __str__(self) -> str:
        """Rich in a terminal where rich is installed, plain text otherwise."""
        if sys.stdout.isatty():
            try:
                from rich.console import Console
            except ModuleNotFoundError:
                return self.plain_text()
            written = io.StringIO()
            Console(file=written, force_terminal=True, width=Console().width).print(self)
            return written.getvalue().rstrip("\n")
        return self.plain_text()

    def __repr__(self) -> str:
        return str(self)
