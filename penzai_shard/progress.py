"""Shows one bar with rate and time for what takes long."""

import contextlib
import importlib.util
import sys
import time
from collections.abc import Iterator
from typing import Any

from penzai_shard.errors import require

SECONDS_BETWEEN_LINES = 10.0
"""How often figures are written where no bar can be drawn."""


class Bar:
    """How far something is; any thread may advance it."""

    def __init__(self, total: int | None, unit: str, shown: bool, bars: Any) -> None:
        self._total, self._unit, self._is_shown, self._bars = total, unit, shown, bars
        self._done, self._line, self._due = 0, "", 0.0
        self._task = bars and bars.add_task("", total=total, figures="")

    def advance(self, count: int = 1) -> None:
        """Moves on by what was done."""
        self._done += count
        if self._bars:
            self._bars.advance(self._task, count)

    def show(self, figures: str) -> None:
        """Shows a line of figures in place of the one before; lines say how far it is."""
        if self._is_shown:
            self._line = f"{self._done:,}/{self._total or '?'} {self._unit}: {figures}"
        if self._bars:
            self._bars.update(self._task, figures=figures)
        elif time.monotonic() >= self._due:
            self.write()

    def write(self) -> None:
        """Writes the last line, unless it was written."""
        if self._line:
            print(self._line, file=sys.stderr, flush=True)
        self._line, self._due = "", time.monotonic() + SECONDS_BETWEEN_LINES


@contextlib.contextmanager
def progress(total: int | None, unit: str, shown: bool | None = True) -> Iterator[Bar]:
    """A bar on standard error, of which the last figures stay when the block ends.

    Where standard error is no terminal, as in a pipe or a notebook, figures are lines, at most one
    in ten seconds and the last; nothing else is shown there.

    Args:
        total: How much there is to do; None if nobody knows.
        unit: What is counted. ``"bytes"`` are shown as MB or GB, anything else as it is.
        shown: Whether to show it; None shows it where rich is installed.

    Raises:
        MissingExtraError: rich is not installed, and the bar is to be shown.

    >>> with progress(2, "steps") as bar:
    ...     bar.advance()
    """
    if shown is None:
        shown = importlib.util.find_spec("rich") is not None
    bars = _draw(unit) if shown and sys.stderr.isatty() else None
    bar = Bar(total, unit, shown, bars)
    try:
        with bars or contextlib.nullcontext():
            yield bar
    finally:
        bar.write()


def _draw(unit: str) -> Any:
    rich = require("rich.progress", "train")
    is_bytes = unit == "bytes"
    columns = [
        "" if is_bytes else unit,
        rich.BarColumn(),
        rich.DownloadColumn() if is_bytes else rich.MofNCompleteColumn(),
        rich.TimeRemainingColumn(),
        rich.TextColumn("{task.fields[figures]}", markup=False),
    ]
    return rich.Progress(*columns, console=rich.Console(stderr=True), transient=True)
