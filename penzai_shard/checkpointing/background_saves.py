"""Saves that a thread finishes while training goes on, and whose failures are never lost."""

import sys
import threading
from collections.abc import Callable

from penzai_shard.checkpointing.orbax_store import BegunSave
from penzai_shard.library_apis.python_api import before_threads_end
from penzai_shard.processes import before_job_ends

# Those of which nobody has waited for the end yet.
_unfinished: dict["BackgroundSave", None] = {}


class BackgroundSave:
    """A save that was begun, and that a thread finishes.

    Attributes:
        where: The path to which it saves.
    """

    def __init__(self, begun: BegunSave, then: Callable[[], None], name: str) -> None:
        """Starts the thread.

        Args:
            begun: The save.
            then: Called by the thread once the checkpoint is at its path.
            name: Of the thread. In a job of several processes the threads of one name do the same
                in the same order, so that there must be one at a time.
        """
        self.where = begun.where
        self._error: Exception | None = None
        # What was begun has copies of the arrays, so that nothing else refers to it.
        self._thread = threading.Thread(
            target=self._finish, args=(begun, then), name=f"penzai-shard-saving {name}"
        )
        _report_at_exit()
        _unfinished[self] = None
        self._thread.start()

    def join(self) -> None:
        """Waits for its end, however it ends."""
        self._thread.join()

    def raise_failure(self) -> None:
        """Raises what went wrong, if anything did, and does not report it at exit any more."""
        _unfinished.pop(self, None)
        if self._error is not None:
            raise self._error

    def _finish(self, begun: BegunSave, then: Callable[[], None]) -> None:
        try:
            begun.finish()
            then()
        except Exception as error:
            self._error = error


def _report_at_exit() -> None:
    """Has the program wait for saves at its end, once for all of them."""
    global _is_registered
    if not _is_registered:
        _is_registered = True
        before_threads_end(_wait_for_all)
        before_job_ends(_wait_for_all)


_is_registered = False


def _wait_for_all() -> None:
    """Ends the saves that nobody waited for, and says which of them failed.

    Those fail too that need another thread where Python starts none any more.
    """
    for save in list(_unfinished):
        try:
            save.join()
            save.raise_failure()
        except KeyboardInterrupt:
            text = f"interrupted while {save.where} was being written, which may not be complete."
        except Exception as error:
            text = (
                f"{error} Before a program ends, call wait() or close() of its CheckpointManager, "
                "which raise this, or use it in a with statement."
            )
        else:
            continue
        print(f"penzai_shard: {text}", file=sys.stderr)
