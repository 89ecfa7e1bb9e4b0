"""Shows one bar with rate and time for what takes long."""

import contextlib
import dataclasses
import sys
from collections.abc import Callable, Iterator

from penzai_shard.errors import require


@dataclasses.dataclass(frozen=True)
class Bar:
    """How far something is; any thread may advance it.

    Attributes:
        add: Takes how much more is done.
    """

    add: Callable[[int], None]

    def advance(self, count: int = 1) -> None:
        """Moves on by what was done."""
        self.add(count)


@contextlib.contextmanager
def progress(total: int, unit: str, shown: bool = True) -> Iterator[Bar]:
    """A bar on standard error, which is gone when the block ends.

    Args:
        total: How much there is to do.
        unit: What is counted. ``"bytes"`` are shown as MB or GB, anything else as it is.
        shown: Whether to show it. Nothing is shown where standard error is a file or a pipe.

    Raises:
        MissingExtraError: rich is not installed, and the bar is to be shown.

    >>> with progress(2, "steps") as bar:
    ...     bar.advance()
    """
    if not (shown and sys.stderr.isatty()):
        yield Bar(lambda count: None)
        return
    rich = require("rich.progress", "train")
    is_bytes = unit == "bytes"
    columns = [
        "" if is_bytes else unit,
        rich.BarColumn(),
        rich.DownloadColumn() if is_bytes else rich.MofNCompleteColumn(),
        rich.TimeRemainingColumn(),
    ]
    console = require("rich.console", "train").Console(stderr=True)
    with rich.Progress(*columns, console=console, transient=True) as bars:
        task = bars.add_task("", total=total)
        yield Bar(lambda count: bars.advance(task, count))
