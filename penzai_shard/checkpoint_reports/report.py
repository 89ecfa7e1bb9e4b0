"""What prints as a table: in colours through rich, as HTML in a notebook."""

import abc
import dataclasses
from collections.abc import Iterator
from typing import Any

from penzai_shard.text_tables import NotebookView, PreparedTable, TextTable


class Report(NotebookView):
    """A value whose ``str`` and ``repr`` are its table, as wide as the terminal."""

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
