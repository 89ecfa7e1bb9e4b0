"""Replaces a directory in one step, so that its old content is lost at no moment.

The new content is written into a staging directory beside the path, whose lock the writer holds as
long as it lives. A staging directory that nobody locks is what a killed writer left.
"""

import contextlib
import ctypes
import os
import pathlib
import shutil
from typing import Any, NoReturn

from penzai_shard.errors import CheckpointWriteError, Problem

_SUFFIX = ".penzai-shard-saving"
_EXCHANGE = 2  # RENAME_EXCHANGE.
_HERE = -100  # AT_FDCWD.


def refuse_save(path: object, what: str, fix: str) -> NoReturn:
    """Refuses to save to a path.

    Raises:
        CheckpointWriteError: In any case.
    """
    raise CheckpointWriteError("cannot save:", [Problem(str(path), what, fix)])


def content_of(final: pathlib.Path) -> pathlib.Path:
    """The directory whose content counts as that of a path.

    It is another one only if a save was killed between two renames.
    """
    aside = _staging_of(final) / "old"
    return aside if not final.exists() and aside.is_dir() else final


def _staging_of(final: pathlib.Path) -> pathlib.Path:
    final = pathlib.Path(os.path.realpath(final))
    return final.with_name(f".{final.name}{_SUFFIX}")


def paths_in(folder: pathlib.Path) -> set[pathlib.Path]:
    """The paths in a folder, with those whose content was set aside by a save that was killed."""
    entries = {*folder.iterdir()} if folder.is_dir() else set()
    staged = {entry for entry in entries if entry.name.endswith(_SUFFIX)}
    return (entries - staged) | {_final_of(staging) for staging in staged}


def _final_of(staging: pathlib.Path) -> pathlib.Path:
    return staging.with_name(staging.name.removesuffix(_SUFFIX)[1:])


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
        self._staging = _staging_of(final)
        self._lock: Any = None
        self.new = self._staging / "writing" / "new"

    def begin(self) -> None:
        """Makes the staging directory, and removes those that killed writers left.

        Raises:
            OSError: A directory cannot be made.
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
        if not self.final.exists():
            os.rename(self.new, self.final)
        elif not exchange(self.new, self.final):
            # If the second of these fails, ``close`` undoes the first.
            os.rename(self.final, self._staging / "old")
            os.rename(self.new, self.final)
        _synchronise(self.final.parent)

    def stop_writers(self) -> None:
        """Makes everything fail that still writes: a file stands where its directory was."""
        if self._lock is not None:  # What others write at the path is theirs.
            with contextlib.suppress(OSError):
                os.rename(self.new.parent, self._staging / "stopped")
                self.new.parent.touch()

    def close(self) -> None:
        """Removes the staging directory, and frees the path for other savers."""
        if self._lock is not None:
            _discard(self._staging, self.final)
            self._lock.close()
            self._lock = None


def _clear(leftover: pathlib.Path) -> None:
    """Removes a staging directory if nobody uses it."""
    with contextlib.suppress(FileNotFoundError):
        if (lock := _lock(leftover)) is not None:
            with lock:
                _discard(leftover, _final_of(leftover))


def _discard(staging: pathlib.Path, final: pathlib.Path) -> None:
    """Removes a staging directory, once nothing in it is needed."""
    if (staging / "old").is_dir() and not final.exists():
        os.rename(staging / "old", final)
    shutil.rmtree(staging, ignore_errors=True)


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


def exchange(first: pathlib.Path, second: pathlib.Path) -> bool:
    """Exchanges two directories in one step; False where the system, if not Linux, cannot."""
    try:
        rename = ctypes.CDLL(None).renameat2
    except (AttributeError, OSError, TypeError):
        return False
    return not rename(_HERE, os.fsencode(first), _HERE, os.fsencode(second), _EXCHANGE)


def _synchronise(path: str | os.PathLike[str]) -> None:
    """Has the system write a file or directory to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
