"""Replaces a directory in one step, so that its old content is lost at no moment.

The new content is written into a staging directory beside the path, whose lock the writer holds as
long as it lives. A staging directory that nobody locks is what a killed writer left. Both contents
are exchanged in one step; where the system has none, nothing is replaced.
"""

import contextlib
import ctypes
import errno
import os
import pathlib
import shutil
import threading
import time
from typing import Any, NoReturn

from penzai_shard.errors import CheckpointWriteError, Problem

_SUFFIX = ".penzai-shard-saving"
_EXCHANGE = 2  # RENAME_EXCHANGE of Linux, RENAME_SWAP of macOS.
_HERE = -100  # AT_FDCWD.
_SECONDS_TO_STOP = 5.0


def refuse_save(path: object, what: str, fix: str) -> NoReturn:
    """Refuses to save to a path.

    Raises:
        CheckpointWriteError: In any case.
    """
    raise CheckpointWriteError("cannot save:", [Problem(str(path), what, fix)])


class Replacement:
    """A directory that is written beside a path, to be put in its place.

    Args:
        final: The path.

    Attributes:
        final: The path, without symbolic links: what one leads to is replaced.
        new: Where the new content is to be written; its parent exists after ``begin``.
    """

    def __init__(self, final: pathlib.Path) -> None:
        self.final = pathlib.Path(os.path.realpath(final))
        self._staging = self.final.with_name(f".{self.final.name}{_SUFFIX}")
        self._lock: Any = None
        self._threads = {*threading.enumerate()}
        self.new = self._staging / "writing" / "new"

    def begin(self) -> None:
        """Makes the staging directory, and removes those that killed writers left.

        Raises:
            OSError: A directory cannot be made, or what is at the path cannot be replaced.
            CheckpointWriteError: Somebody else is saving to the path.
        """
        self.final.parent.mkdir(parents=True, exist_ok=True)
        for leftover in self.final.parent.glob(f".*{_SUFFIX}"):
            _clear(leftover)
        self._staging.mkdir(exist_ok=True)
        self._lock = _lock(self._staging)
        # Whoever held the lock may have removed the file in the meantime.
        if self._lock is None or not (self._staging / "lock").exists():
            fix = "Wait for it, or save to another path."
            refuse_save(self.final, "somebody else is saving there now", fix)
        self.new.parent.mkdir()
        if self.final.exists():  # It is tried before a large model is written.
            (self._staging / "other").mkdir()
            exchange(self.new.parent, self._staging / "other")

    def check_disk(self) -> None:
        """Checks in another process than the one that began that it writes to the same disk.

        Raises:
            OSError, CheckpointWriteError: It does not see the staging directory.
        """
        # A file server is asked anew for a list, where a name may be remembered as missing.
        if self._staging.name not in os.listdir(self.final.parent):
            fix = "Save to a disk that they share."
            refuse_save(self.final, "not all processes see this directory", fix)

    def commit(self) -> None:
        """Puts the new content in the place of the old; it is on the disk when this returns."""
        for folder, _, names in os.walk(self.new):
            for name in names:
                _synchronise(os.path.join(folder, name))
            _synchronise(folder)
        put_in_place = exchange if self.final.exists() else os.rename
        put_in_place(self.new, self.final)
        _synchronise(self.final.parent)

    def stop_writers(self) -> None:
        """Makes everything fail that still writes: a file stands where its directory was."""
        if self._lock is not None:  # What others write at the path is theirs.
            with contextlib.suppress(OSError):
                os.rename(self.new.parent, self._staging / "stopped")
                self.new.parent.touch()
        # Orbax' threads end then. Their own ``join`` raises what the save has failed with.
        end = time.monotonic() + _SECONDS_TO_STOP
        for thread in {*threading.enumerate()} - {*self._threads, threading.current_thread()}:
            if not thread.daemon and not thread.name.startswith("asyncio_"):
                threading.Thread.join(thread, max(0.0, end - time.monotonic()))

    def close(self) -> None:
        """Removes the staging directory, and frees the path for other savers."""
        if self._lock is not None:
            shutil.rmtree(self._staging, ignore_errors=True)
            self._lock.close()
            self._lock = None


def _clear(leftover: pathlib.Path) -> None:
    """Removes a staging directory if nobody uses it."""
    with contextlib.suppress(FileNotFoundError):
        if (lock := _lock(leftover)) is not None:
            with lock:
                shutil.rmtree(leftover, ignore_errors=True)


def _lock(staging: pathlib.Path) -> Any:
    """An open file that holds the lock of a staging directory; None if somebody else has it."""
    import fcntl  # Windows, where nothing can be saved, has none.

    file = (staging / "lock").open("a")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError):
        file.close()
        return None
    return file


def exchange(first: pathlib.Path, second: pathlib.Path) -> None:
    """Exchanges two directories in one step.

    Raises:
        OSError: The file system cannot (some network disks), or the system, which is another.
    """
    library, paths = ctypes.CDLL(None), (os.fsencode(first), os.fsencode(second))
    if hasattr(library, "renamex_np"):  # macOS.
        failed = library.renamex_np(*paths, _EXCHANGE)
    else:
        rename = getattr(library, "renameat2", lambda *_: -1)
        failed = rename(_HERE, paths[0], _HERE, paths[1], _EXCHANGE)
    if failed:
        raise OSError(errno.ENOTSUP, "nothing can be replaced in one step on this file system")


def _synchronise(path: str | os.PathLike[str]) -> None:
    """Has the system write a file or directory to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
