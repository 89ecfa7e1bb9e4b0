"""How many bytes or other things are done, as a bar in a terminal or a notebook."""

import functools
import sys
import threading
import time
from types import TracebackType
from typing import Any

import jax

from penzai_shard.errors import RuleTypeError, require_extra
from penzai_shard.text_tables import is_in_notebook

_SECONDS_BETWEEN_DRAWINGS = 0.2
_SECONDS_BETWEEN_LINES = 10.0


class ByteProgress:
    """Shows nothing; the others derive from it. To be used in a ``with`` statement.

    Attributes:
        total: How many bytes, or other things, there are.
        done: How many are done. Several threads may advance it.
    """

    def __init__(self) -> None:
        self.total = self.done = 0
        self._lock = threading.Lock()

    def __enter__(self) -> "ByteProgress":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        with self._lock:
            self.close()

    def begin(self, total: int) -> None:
        """Says how many there are."""
        with self._lock:
            self.total = total
            self.draw()

    def advance(self, count: int) -> None:
        """Says that so many more are done."""
        with self._lock:
            self.done += count
            self.draw()

    def draw(self) -> None:
        """Shows how far it is."""

    def close(self) -> None:
        """Shows it for the last time."""


class _TerminalBar(ByteProgress):
    """A bar of rich.

    Args:
        console: The terminal, a ``rich.console.Console``.
        label: What is being done.
        counted: What is counted, if not bytes.
    """

    def __init__(self, console: Any, label: str, counted: str) -> None:
        super().__init__()
        progress = require_extra("rich.progress", "safetensors")
        of_bytes = progress.DownloadColumn(binary_units=True), progress.TransferSpeedColumn()
        self._bar = progress.Progress(
            "{task.description}",
            progress.BarColumn(),
            *((progress.MofNCompleteColumn(), counted) if counted else of_bytes),
            progress.TimeRemainingColumn(),
            console=console,
        )
        self._task = self._bar.add_task(label, total=None)

    def draw(self) -> None:
        """As for the base class."""
        self._bar.start()
        self._bar.update(self._task, completed=self.done, total=self.total)

    def close(self) -> None:
        """As for the base class."""
        self._bar.stop()


class _DrawnNowAndThen(ByteProgress):
    """What draws itself anew at intervals, and once at the end.

    Args:
        label: What is being done.
        counted: What is counted, if not bytes.
        seconds: The shortest interval.
    """

    def __init__(self, label: str, counted: str, seconds: float) -> None:
        super().__init__()
        self._label, self._counted = label, counted
        self._seconds = seconds
        self._start = self._next = time.monotonic()

    def text(self) -> str:
        """How far it is, in words."""
        if self._counted:
            return f"{self._label}: {self.done:,} of {self.total:,} {self._counted}"
        seconds = max(time.monotonic() - self._start, 1e-3)
        speed = self.done / seconds / 2**20
        return (
            f"{self._label}: {self.done / 2**20:,.1f} of {self.total / 2**20:,.1f} MiB "
            f"({speed:,.0f} MiB/s)"
        )

    def draw(self) -> None:
        """As for the base class."""
        if time.monotonic() >= self._next:
            self._next = time.monotonic() + self._seconds
            self.write()

    def close(self) -> None:
        """As for the base class."""
        if self.total:
            self.write()

    def write(self) -> None:
        """Shows how far it is now."""


class _PlainLines(_DrawnNowAndThen):
    """A line at intervals, for output that is kept: a file, a pipe."""

    def __init__(self, write: Any, label: str, counted: str) -> None:
        super().__init__(label, counted, _SECONDS_BETWEEN_LINES)
        self._next += _SECONDS_BETWEEN_LINES
        self._write = write

    def write(self) -> None:
        """As for the base class."""
        self._write(self.text())


class _NotebookBar(_DrawnNowAndThen):
    """A bar in a notebook, which needs no widgets: one output, replaced now and then."""

    def __init__(self, label: str, counted: str) -> None:
        super().__init__(label, counted, _SECONDS_BETWEEN_DRAWINGS)
        self._handle: Any = None

    def write(self) -> None:
        """As for the base class."""
        display = require_extra("IPython.display", "notebook").display
        bar = f'<progress value="{self.done}" max="{self.total}"></progress> {self.text()}'
        data = {"text/plain": self.text(), "text/html": bar}
        if self._handle is None:
            self._handle = display(data, raw=True, display_id=True)
        else:
            self._handle.update(data, raw=True)


def byte_progress(progress: Any, label: str, counted: str = "") -> ByteProgress:
    """What shows how many bytes, or other things, are done where the program runs.

    Args:
        progress: None to show a bar in a terminal or a notebook and nothing elsewhere; True to
            show lines elsewhere; False to show nothing; or the ``rich.console.Console`` to show it
            on.
        label: What is being done.
        counted: What is counted, such as ``"layouts"``, if not bytes.

    Returns:
        Of several processes only the first one shows anything.

    Raises:
        RuleTypeError: It is none of these.

    >>> with byte_progress(False, "loading") as shown:
    ...     shown.begin(2)
    ...     shown.advance(2)
    """
    is_console = all(hasattr(progress, name) for name in ("print", "is_terminal", "is_jupyter"))
    if not (progress is None or isinstance(progress, bool) or is_console):
        raise RuleTypeError(
            f"progress must be None, True, False or a rich.console.Console, not {progress!r:.80}."
        )
    if progress is False or jax.process_index() != 0:
        return ByteProgress()
    if is_console:
        if progress.is_terminal:
            return _TerminalBar(progress, label, counted)
        write = functools.partial(progress.print, highlight=False, markup=False)
        return _PlainLines(write, label, counted)
    if is_in_notebook():
        return _NotebookBar(label, counted)
    # Where it goes to a terminal at all; other output may be data that something reads.
    if sys.stderr is not None and sys.stderr.isatty():
        console = require_extra("rich.console", "safetensors").Console(stderr=True)
        return _TerminalBar(console, label, counted)
    if progress is None:
        return ByteProgress()
    return _PlainLines(lambda text: print(text, file=sys.stderr, flush=True), label, counted)
