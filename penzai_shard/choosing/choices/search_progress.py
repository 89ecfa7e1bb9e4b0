"""How far a search is, shown where it runs."""

import contextlib
import importlib.util
from types import TracebackType
from typing import Any, Self

from penzai_shard.choosing.choices.priced_candidates import StageName
from penzai_shard.pretrained.byte_progress import ByteProgress, byte_progress

_LABELS: dict[StageName, str] = {
    "names": "pricing by names",
    "propagation": "pricing by propagation",
    "compiled": "compiling",
}


class SearchProgress:
    """Shows a bar for each stage of a search; in a terminal through rich, if that is installed.

    Args:
        progress: As for ``byte_progress``.
    """

    def __init__(self, progress: Any) -> None:
        if progress is None and importlib.util.find_spec("rich") is None:
            progress = False
        self._progress = progress
        self._shown = contextlib.ExitStack()
        self._display: ByteProgress = byte_progress(progress, "")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._shown.close()

    def watch(self, stage: StageName, done: int, total: int) -> None:
        """Shows how many candidates of a stage are priced."""
        if not done:
            self._shown.close()
            shown = byte_progress(self._progress, _LABELS[stage], "layouts")
            self._display = self._shown.enter_context(shown)
            self._display.begin(total)
            return
        if total > self._display.total:
            # More is compiled than was meant to be.
            self._display.begin(total)
        self._display.advance(done - self._display.done)
