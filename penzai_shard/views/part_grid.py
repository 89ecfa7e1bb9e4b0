"""The parts of an array as rows and columns, drawn as text and as HTML.

A dimension that is split runs along the rows or along the columns; of several, the last runs along
the columns. Nothing here reads an array.
"""

import dataclasses
import functools
import html
import itertools
from collections.abc import Iterator, Sequence

from penzai_shard.path_folding import number_runs
from penzai_shard.report_trees import printable
from penzai_shard.text_tables import Segments
from penzai_shard.views.array_parts import ArrayPart, ArrayParts, Interval

Key = tuple[Interval, ...]
"""Where a row or a column is: for each dimension that runs along it, an interval."""

# More rows or columns than this are not drawn: the first and the last ones stand for them.
MOST_ROWS = 32
MOST_COLUMNS = 16
# One dimension in more parts than this runs down instead of across.
MOST_ACROSS = 8
# Also where they are wider than they may be.
FEWEST_COLUMNS = 3
# Rows of text without a line between them.
MOST_RULED_ROWS = 8
# So many runs of devices are named in a cell; the others are left out before the last.
NAMED_RUNS = 3

GAP = "..."
_STYLES = ("cyan", "green", "yellow", "magenta", "blue", "red")
# Hues that follow each other are far apart on the wheel: by the golden angle.
_HUE_STEP = 137.508

# Notebooks have styles for all tables, hence the emphasis. The tones are for light and dark pages.
_CSS = (
    ".pzs-parts{overflow-x:auto;margin:.5em 0}"
    "table.pzs-grid{border-collapse:separate;border-spacing:2px;font-size:90%;width:auto;margin:0}"
    "table.pzs-grid tr{background:none!important}"
    "table.pzs-grid th,table.pzs-grid td{border:0;padding:.25em .6em;color:inherit;"
    "white-space:nowrap;font-variant-numeric:tabular-nums}"
    "table.pzs-grid th{font-weight:400;opacity:.75;text-align:left!important;background:none}"
    "table.pzs-grid th.d{font-weight:600;opacity:1}"
    "table.pzs-grid th.c{text-align:center!important}"
    "table.pzs-grid td{text-align:center!important;border-radius:3px;min-width:2.5em;"
    "height:1.6em;background:hsla(var(--hue),65%,50%,.28)}"
    "table.pzs-grid td.gap{background:none}"
    "table.pzs-grid td.own{outline:2px solid hsla(var(--hue),65%,50%,.9);outline-offset:-2px}"
)


@dataclasses.dataclass(frozen=True)
class PartGrid:
    """The parts of an array in rows and columns.

    Attributes:
        across: The dimensions, by number, that run along the columns.
        down: Those that run along the rows.
        columns: Where each column is.
        rows: Where each row is.
        cells: The part in each row and column, by its number; it is absent if no device holds it.
        parts: The array.
    """

    across: tuple[int, ...]
    down: tuple[int, ...]
    columns: tuple[Key, ...]
    rows: tuple[Key, ...]
    cells: dict[tuple[Key, Key], int]
    parts: ArrayParts

    def part(self, row: Key, column: Key) -> tuple[int, ArrayPart] | None:
        """The part in a row and a column, with its number."""
        number = self.cells.get((row, column))
        return None if number is None else (number, self.parts.parts[number])

    def names(self, dimensions: Sequence[int]) -> list[str]:
        """What some dimensions are called."""
        return [printable(str(self.parts.dimensions[i].name)) for i in dimensions]


def part_grid(parts: ArrayParts, most_across: int = MOST_ACROSS) -> PartGrid:
    """The rows and columns for the parts of an array.

    Args:
        parts: The array.
        most_across: A single dimension in more parts than this runs down.

    >>> from jax.sharding import AbstractMesh, NamedSharding, PartitionSpec
    >>> from penzai_shard.views.array_parts import array_parts
    >>> mesh = AbstractMesh((2, 2), ("data", "model"))
    >>> grid = part_grid(array_parts((4, 6), NamedSharding(mesh, PartitionSpec(None, "model"))))
    >>> grid.rows, grid.columns
    ((((0, 4),),), (((0, 3),), ((3, 6),)))
    """
    split = [i for i, each in enumerate(parts.dimensions) if len(each.intervals) > 1]
    # A matrix is drawn as one, whichever of its dimensions are split.
    whole = [i for i in reversed(range(len(parts.dimensions))) if i not in split]
    drawn = sorted({*split, *whole[: max(2 - len(split), 0)]})
    across = drawn[-1:]
    if len(drawn) == 1 and len(parts.dimensions[drawn[0]].intervals) > most_across:
        across = []
    down = drawn[: len(drawn) - len(across)]

    def keys(dimensions: list[int]) -> tuple[Key, ...]:
        return tuple(itertools.product(*(parts.dimensions[i].intervals for i in dimensions)))

    cells = {
        (
            tuple(part.intervals[i] for i in down),
            tuple(part.intervals[i] for i in across),
        ): number
        for number, part in enumerate(parts.parts)
    }
    return PartGrid(tuple(across), tuple(down), keys(across), keys(down), cells, parts)


def devices_text(devices: Sequence[int]) -> str:
    """Devices by their numbers, runs without gaps by their ends; of many runs the first and last.

    >>> devices_text([0, 1, 2, 3, 6]), devices_text(range(0, 64, 8))
    ('0-3, 6', '0, 8, ..., 56')
    """
    runs = [str(a) if a == b else f"{a}-{b}" for a, b in number_runs(devices)]
    if len(devices) <= NAMED_RUNS + 1:
        runs = list(map(str, devices))
    elif len(runs) > NAMED_RUNS + 1:
        runs = [*runs[: NAMED_RUNS - 1], GAP, runs[-1]]
    return ", ".join(runs)


def cell_text(parts: ArrayParts, part: ArrayPart) -> str:
    """Who holds a part: devices, and the processes that they belong to where there are several.

    >>> cell_text(ArrayParts((), ()), ArrayPart((), (0, 1)))
    '0, 1'
    """
    text = devices_text(part.devices)
    if parts.is_on_others:
        text += f" (process {devices_text(part.processes)})" + " *" * parts.is_own(part)
    return text


def elided(keys: Sequence[Key], most: int) -> list[Key | None]:
    """The first and the last of many rows or columns, with None between them for the others.

    >>> elided([((i, i + 1),) for i in range(9)], 3)
    [((0, 1),), None, ((8, 9),)]
    """
    if len(keys) <= most:
        return list(keys)
    first = most // 2
    return [*keys[:first], None, *keys[len(keys) - (most - first - 1) :]]


def remark_on_elided(grid: PartGrid, most_columns: int = MOST_COLUMNS) -> str:
    """What is said where not all rows and columns are drawn; empty otherwise."""
    left_out = [
        f"{len(keys):,} {what}"
        for keys, most, what in (
            (grid.rows, MOST_ROWS, "rows"),
            (grid.columns, most_columns, "columns"),
        )
        if len(keys) > most
    ]
    if not left_out:
        return ""
    return f"of {' and '.join(left_out)} the first and the last are drawn"


# As text


def text_drawing(grid: PartGrid, width: int) -> Iterator[Segments]:
    """The drawing in lines of text, as wide as it may be; the first and last column at least."""
    rows = elided(grid.rows, MOST_ROWS)
    labels = _labels(rows, len(grid.down))
    names = grid.names(grid.down)
    margins = [
        max(map(len, (name, *(label[i] for label in labels))), default=0)
        for i, name in enumerate(names)
    ]
    corner = grid.names(grid.across)
    margin = max(sum(margins) + 2 * len(margins), *(len(name) + 2 for name in corner), 0)
    shown = _columns_that_fit(grid, rows, width - margin)
    columns = [column for column, _ in shown]
    if None in columns and not grid.down:
        # All of it fits if it runs down.
        yield from text_drawing(part_grid(grid.parts, most_across=0), width)
        return
    for name, heads in zip(
        corner, zip(*_labels(columns, len(grid.across)), strict=True), strict=True
    ):
        line: Segments = [(name.ljust(margin), "bold")]
        for head, (_, cell) in zip(heads, shown, strict=True):
            line.append((f"  {head.ljust(cell)} ", ""))
        yield line
    widths = [cell for _, cell in shown]
    yield [(_joined(names, margins).ljust(margin), "bold"), (_rule("┌┬┐", widths), "")]
    for i, (row, label) in enumerate(zip(rows, labels, strict=True)):
        if i and len(rows) <= MOST_RULED_ROWS:
            yield [(" " * margin + _rule("├┼┤", widths), "")]
        yield [(_joined(label, margins).ljust(margin), ""), *_row(grid, row, shown)]
    yield [(" " * margin + _rule("└┴┘", widths), "")]
    if remark := remark_on_elided(grid, most_columns=_most_columns(grid, columns)):
        yield [(remark, "")]


def _most_columns(grid: PartGrid, columns: Sequence[Key | None]) -> int:
    return len(columns) if None in columns else len(grid.columns)


def _columns_that_fit(
    grid: PartGrid, rows: Sequence[Key | None], width: int
) -> list[tuple[Key | None, int]]:
    """The columns that are drawn, each with its width within the lines."""

    @functools.cache
    def widest(column: Key | None) -> int:
        return max(len(_cell(grid, row, column)[0]) for row in rows)

    def shown(most: int) -> list[tuple[Key | None, int]]:
        columns = elided(grid.columns, most)
        heads = [max(map(len, label), default=0) for label in _labels(columns, len(grid.across))]
        return [(c, max(head, widest(c))) for c, head in zip(columns, heads, strict=True)]

    for most in range(min(len(grid.columns), MOST_COLUMNS), FEWEST_COLUMNS, -1):
        if sum(cell + 3 for _, cell in shown(most)) + 1 <= width:
            return shown(most)
    return shown(FEWEST_COLUMNS)


def _cell(grid: PartGrid, row: Key | None, column: Key | None) -> tuple[str, str]:
    """The text of a cell and its style."""
    if row is None or column is None:
        return GAP, ""
    found = grid.part(row, column)
    if found is None:
        return "", ""
    number, part = found
    return cell_text(grid.parts, part), _STYLES[number % len(_STYLES)]


def _row(
    grid: PartGrid, row: Key | None, columns: Sequence[tuple[Key | None, int]]
) -> Iterator[tuple[str, str]]:
    yield "│", ""
    for column, width in columns:
        text, style = _cell(grid, row, column)
        yield f" {text.ljust(width)} ", style
        yield "│", ""


def _rule(corners: str, widths: Sequence[int]) -> str:
    return corners[0] + corners[1].join("─" * (width + 2) for width in widths) + corners[2]


def _joined(texts: Sequence[str], widths: Sequence[int]) -> str:
    return "".join(f"{text.ljust(width)}  " for text, width in zip(texts, widths, strict=True))


def _labels(keys: Sequence[Key | None], rank: int) -> list[tuple[str, ...]]:
    """The text of each interval, empty where it is that of the row or column before."""
    labels = []
    before: Key = ()
    for key in keys:
        if key is None:
            labels.append((GAP,) * rank)
            continue
        texts = []
        same = bool(before)
        for i, (start, stop) in enumerate(key):
            # An outer interval that is new is written with all that follow it.
            same = same and before[i] == (start, stop)
            texts.append("" if same else f"{start}:{stop}")
        labels.append(tuple(texts))
        before = key
    return labels


# As HTML


def html_drawing(grid: PartGrid) -> str:
    """The drawing as a piece of HTML that needs nothing else, for light and dark pages."""
    rows, columns = elided(grid.rows, MOST_ROWS), elided(grid.columns, MOST_COLUMNS)
    row_labels = _labels(rows, len(grid.down))
    column_labels = _labels(columns, len(grid.across))
    down = grid.names(grid.down)
    parts = [f'<style>{_CSS}</style><div class="pzs-parts"><table class="pzs-grid">']
    for i, name in enumerate(grid.names(grid.across)):
        heads = "".join(f'<th class="c">{label[i]}</th>' for label in column_labels)
        span = f' colspan="{len(down)}"' if len(down) > 1 else ""
        corner = f'<th class="d"{span}>{html.escape(name)}</th>'
        parts.append(f"<tr>{corner}{heads}</tr>")
    if down:
        heads = "".join(f'<th class="d">{html.escape(name)}</th>' for name in down)
        parts.append(f"<tr>{heads}</tr>")
    margin = "<th></th>" if grid.across and not down else ""
    for row, label in zip(rows, row_labels, strict=True):
        heads = "".join(f"<th>{text}</th>" for text in label) or margin
        cells = "".join(_html_cell(grid, row, column) for column in columns)
        parts.append(f"<tr>{heads}{cells}</tr>")
    parts.append("</table></div>")
    if remark := remark_on_elided(grid):
        parts.append(f"<div>{remark}</div>")
    return "".join(parts)


def _html_cell(grid: PartGrid, row: Key | None, column: Key | None) -> str:
    text, _ = _cell(grid, row, column)
    found = None if row is None or column is None else grid.part(row, column)
    if found is None:
        return f'<td class="gap">{text}</td>'
    number, part = found
    several = grid.parts.is_on_others
    kind = ' class="own"' if several and grid.parts.is_own(part) else ""
    intervals = ", ".join(
        f"{dimension.name} {start}:{stop}"
        for dimension, (start, stop) in zip(grid.parts.dimensions, part.intervals, strict=True)
    )
    title = html.escape(f"{printable(intervals)} on {', '.join(map(str, part.devices))}")
    hue = round(number * _HUE_STEP % 360)
    return f'<td{kind} style="--hue:{hue}" title="{title}">{text}</td>'
