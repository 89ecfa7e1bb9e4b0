"""How far a training loop is, shown in a terminal, in a notebook, in a file, or not at all."""

import html
import sys
import time
from collections.abc import Callable
from types import TracebackType
from typing import Any

import jax

from penzai_shard.errors import RuleTypeError, require_extra
from penzai_shard.fitting.log_records import LogRecord
from penzai_shard.text_tables import is_in_notebook

# A bar is drawn anew at most so often, and a line printed at most so often between the first and
# the last.
SECONDS_BETWEEN_DRAWINGS = 0.2
SECONDS_BETWEEN_LINES = 10.0
BAR_WIDTH = 16


class ProgressDisplay:
    """Shows nothing; the others derive from it. To be used in a ``with`` statement."""

    def __enter__(self) -> "ProgressDisplay":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def begin(self, done: int, last: int | None) -> None:
        """Says between which steps the run is; ``last`` is None if nobody knows."""

    def advance(self, done: int) -> None:
        """Says how many steps were given to the devices; called at every step."""

    def show(self, record: LogRecord) -> None:
        """Shows the figures of a step."""

    def say(self, text: str) -> None:
        """Shows a line that stays."""

    def close(self) -> None:
        """Shows the last figures, and nothing more."""


class PlainLines(ProgressDisplay):
    """A line at intervals, for output that is kept: a file, a pipe.

    Args:
        write: Writes a line.
        clock: Seconds.

    >>> lines = PlainLines(print)
    >>> lines.begin(0, 20)
    >>> lines.show(LogRecord(10, 0.25, None, 0.5, None, 0.0, None, None))
    step 10/20: loss 0.2500, 500.0 ms/step
    """

    def __init__(
        self, write: Callable[[str], Any], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._write = write
        self._clock = clock
        self._next_line = float("-inf")
        self._last: int | None = None
        self._held: LogRecord | None = None

    def begin(self, done: int, last: int | None) -> None:
        """As for the base class."""
        self._last = last

    def show(self, record: LogRecord) -> None:
        """As for the base class."""
        now = self._clock()
        if now < self._next_line and record.evaluation is None:
            self._held = record
            return
        self._next_line = now + SECONDS_BETWEEN_LINES
        self._print(record)

    def say(self, text: str) -> None:
        """As for the base class."""
        self.close()
        self._write(text)

    def close(self) -> None:
        """As for the base class."""
        if self._held is not None:
            self._print(self._held)

    def _print(self, record: LogRecord) -> None:
        self._held = None
        total = "" if self._last is None else f"/{self._last}"
        self._write(f"step {record.step}{total}: {record}")


class _Bar(ProgressDisplay):
    """What bars have in common: they are drawn now and then, and once at the end."""

    def __init__(self) -> None:
        self.done = 0
        self.last: int | None = None
        self.record: LogRecord | None = None
        self._next_drawing = float("-inf")

    def begin(self, done: int, last: int | None) -> None:
        """As for the base class."""
        self.done, self.last = done, last
        self.draw()

    def advance(self, done: int) -> None:
        """As for the base class."""
        self.done = done
        now = time.monotonic()
        if now >= self._next_drawing:
            self._next_drawing = now + SECONDS_BETWEEN_DRAWINGS
            self.draw()

    def show(self, record: LogRecord) -> None:
        """As for the base class."""
        self.record = record

    def figures(self) -> str:
        """The figures of the last record."""
        return "compiling" if self.record is None else str(self.record)

    def draw(self) -> None:
        """Draws the bar."""


class TerminalBar(_Bar):
    """A bar of rich, in a terminal.

    Args:
        console: The terminal, a ``rich.console.Console``.
    """

    def __init__(self, console: Any) -> None:
        super().__init__()
        progress = require_extra("rich.progress", "train")
        self._console = console
        # Drawn by the loop, so that no thread takes time from it.
        self._bar = progress.Progress(
            "step",
            progress.MofNCompleteColumn(),
            progress.BarColumn(bar_width=BAR_WIDTH),
            progress.TimeRemainingColumn(),
            "{task.fields[figures]}",
            console=console,
            auto_refresh=False,
        )
        self._task: Any = None

    def begin(self, done: int, last: int | None) -> None:
        """As for the base class."""
        self._task = self._bar.add_task("training", total=last, completed=done, figures="compiling")
        self._bar.start()
        super().begin(done, last)

    def figures(self) -> str:
        """As many figures of the last record as the terminal has room for."""
        if self.record is None:
            return super().figures()
        total = "?" if self.last is None else str(self.last)
        room = self._console.width - len(f"step {total}/{total} {'':{BAR_WIDTH}} 0:00:00 ")
        text = ""
        for part in self.record.parts():
            longer = f"{text}, {part}" if text else part
            if len(longer) > room:
                break
            text = longer
        return text

    def draw(self) -> None:
        """As for the base class."""
        self._bar.update(self._task, completed=self.done, figures=self.figures())
        self._bar.refresh()

    def say(self, text: str) -> None:
        """As for the base class."""
        self._console.print(text, highlight=False, markup=False, soft_wrap=True)

    def close(self) -> None:
        """As for the base class."""
        if self._task is not None:
            self.draw()
            self._bar.stop()
            self._task = None


class NotebookBar(_Bar):
    """A bar in a notebook, which needs no widgets: one output, replaced now and then."""

    def __init__(self) -> None:
        super().__init__()
        self._handle: Any = None
        self._lines: list[str] = []

    def say(self, text: str) -> None:
        """As for the base class."""
        self._lines.append(text)
        self.draw()

    def draw(self) -> None:
        """As for the base class."""
        display = require_extra("IPython.display", "notebook").display
        data = {"text/plain": self._text(), "text/html": self._html()}
        if self._handle is None:
            self._handle = display(data, raw=True, display_id=True)
        else:
            self._handle.update(data, raw=True)

    def close(self) -> None:
        """As for the base class."""
        if self._handle is not None:
            self.draw()

    def _position(self) -> str:
        return f"step {self.done}" + ("" if self.last is None else f"/{self.last}")

    def _text(self) -> str:
        return "\n".join([*self._lines, f"{self._position()}: {self.figures()}"])

    def _html(self) -> str:
        value = "" if self.last is None else f' value="{self.done}" max="{self.last}"'
        lines = "".join(f"<div>{html.escape(line)}</div>" for line in self._lines)
        return (
            f"{lines}<div><progress{value}></progress> {html.escape(self._position())}: "
            f"{html.escape(self.figures())}</div>"
        )


def progress_display(progress: Any) -> ProgressDisplay:
    """What shows the progress of a run where it runs.

    Args:
        progress: Whether to show it; or the ``rich.console.Console`` to show it on.

    Returns:
        A bar in a terminal and in a notebook, lines elsewhere; of several processes only the
        first one shows anything.

    Raises:
        RuleTypeError: It is neither.
    """
    is_console = all(hasattr(progress, name) for name in ("print", "is_terminal", "is_jupyter"))
    if not (isinstance(progress, bool) or is_console):
        raise RuleTypeError(
            f"progress must be True, False or a rich.console.Console, not {progress!r:.80}."
        )
    if progress is False or jax.process_index() != 0:
        return ProgressDisplay()
    if is_console:
        if progress.is_terminal:
            return TerminalBar(progress)
        return PlainLines(lambda text: progress.print(text, highlight=False, markup=False))
    if is_in_notebook():
        return NotebookBar()
    if sys.stdout is not None and sys.stdout.isatty():
        return TerminalBar(require_extra("rich.console", "train").Console())
    return PlainLines(lambda text: print(text, flush=True))
