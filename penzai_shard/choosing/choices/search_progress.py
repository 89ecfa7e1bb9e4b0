"""How far a search is, shown where it runs."""

import contextlib
import importlib.util
from collections.abc import Iterator
from typing import Any

from penzai_shard.choosing.choices.priced_candidates import StageName
from penzai_shard.choosing.choices.search import Watch
from penzai_shard.pretrained.byte_progress import byte_progress

_LABELS: dict[StageName, str] = {
    "names": "pricing by names",
    "propagation": "pricing by propagation",
    "compiled": "compiling",
}


@contextlib.contextmanager
def search_progress(progress: Any) -> Iterator[Watch]:
    """Shows a bar for each stage of a search; in a terminal through rich, if that is installed.

    Args:
        progress: As for ``byte_progress``.
    """
    if progress is None and importlib.util.find_spec("rich") is None:
        progress = False
    display = byte_progress(progress, "")
    with contextlib.ExitStack() as shown:

        def watch(stage: StageName, done: int, total: int) -> None:
            nonlocal display
            if not done:
                shown.close()
                display = shown.enter_context(byte_progress(progress, _LABELS[stage], "layouts"))
            # More may be compiled than was meant to be.
            if not done or total > display.total:
                display.begin(total)
            if done:
                display.advance(done - display.done)

        yield watch
