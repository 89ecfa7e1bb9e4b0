"""A plan as a table: rich in a terminal, plain text anywhere else."""

import dataclasses
import io
import re
import sys
from collections.abc import Iterable, Iterator
from typing import Any

Row = tuple[str, str, str, int, str]

_HEADINGS = ("array", "count", "logical axes/mesh axes", "dtype", "per device", "reason")
# Columns that a terminal needs to show the reasons legibly.
_WIDE = 110
_NUMBER = re.compile(r"\d+")


def bytes_text(count: int) -> str:
    """A number of bytes for people, in powers of 1024.

    >>> bytes_text(512), bytes_text(3 * 2**20)
    ('512 B', '3.0 MiB')
    """
    size, unit = float(count), "B"
    for larger in ("KiB", "MiB", "GiB", "TiB"):
        if size < 1024:
            break
        size, unit = size / 1024, larger
    return f"{count} B" if unit == "B" else f"{size:.1f} {unit}"


@dataclasses.dataclass(frozen=True, repr=False)
class PlanTable:
    """Rows and totals of a plan; ``print`` shows them.

    Attributes:
        rows: One row of texts per array, or per group of arrays alike.
        summary: Lines below the table.
    """

    rows: tuple[tuple[str, ...], ...]
    summary: tuple[str, ...]

    @classmethod
    def of(
        cls,
        rows: Iterable[Row],
        *,
        mesh: str,
        total_bytes: int,
        bytes_per_device: int,
        replicated_bytes: int,
        unused_rules: tuple[str, ...],
        collapse: bool,
    ) -> "PlanTable":
        """Makes the table; see ``ShardingPlan.table``."""
        groups: dict[tuple[str, ...], list[Row]] = {}
        for row in rows:
            path, axes, dtype, _, reason = row
            place = path
            if collapse:
                place = "(scalars)" if axes == "scalar" else _NUMBER.sub("*", path)
            groups.setdefault((place, axes, dtype, reason), []).append(row)
        shown = []
        for (place, axes, dtype, reason), members in groups.items():
            path = members[0][0] if len(members) == 1 else place
            held = bytes_text(sum(member[3] for member in members))
            shown.append((path, str(len(members)), axes, dtype, held, reason))
        arrays = sum(len(members) for members in groups.values())
        summary = [
            f"{arrays} arrays, {bytes_text(total_bytes)}; on mesh ({mesh}) each device holds "
            f"{bytes_text(bytes_per_device)}, of which replicated {bytes_text(replicated_bytes)}"
        ]
        if unused_rules:
            summary.append("rules that match nothing here: " + "; ".join(unused_rules))
        return cls(tuple(shown), tuple(summary))

    def plain_text(self) -> str:
        """The table as text without colours or control characters."""
        lines = [_HEADINGS, *self.rows]
        widths = [max(len(line[i]) for line in lines) for i in range(len(_HEADINGS) - 1)]
        ruled = tuple("-" * width for width in [*widths, len(_HEADINGS[-1])])
        text = [
            "  ".join([*(cell.ljust(w) for cell, w in zip(line, widths, strict=False)), line[-1]])
            for line in (_HEADINGS, ruled, *self.rows)
        ]
        return "\n".join([*text, *self.summary])

    def __rich_console__(self, console: Any, options: Any) -> Iterator[Any]:
        """The table for rich's ``print`` and consoles; a narrow one does without the reasons."""
        from rich.table import Table
        from rich.text import Text

        shown = len(_HEADINGS) if options.max_width >= _WIDE else len(_HEADINGS) - 1
        table = Table(header_style="bold", row_styles=["", "dim"], box=None, pad_edge=False)
        for heading in _HEADINGS[:shown]:
            right = heading in ("count", "per device")
            table.add_column(
                heading,
                justify="right" if right else "left",
                overflow="fold",
                no_wrap=right or heading == "dtype",
            )
        for row in self.rows:
            table.add_row(*(Text(cell) for cell in row[:shown]))
        yield table
        for line in self.summary:
            yield Text(line)

    def __str__(self) -> str:
        """Rich in a terminal where rich is installed, plain text otherwise."""
        if sys.stdout.isatty():
            try:
                from rich.console import Console
            except ModuleNotFoundError:
                return self.plain_text()
            width = Console().width
            console = Console(file=io.StringIO(), force_terminal=True, width=width)
            console.print(self)
            return console.file.getvalue().rstrip("\n")  # type: ignore[attr-defined]
        return self.plain_text()

    def __repr__(self) -> str:
        return str(self)
