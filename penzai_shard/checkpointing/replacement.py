"""Replacing a directory in one step, so that its old content is lost at no moment.

A new checkpoint is written into a staging directory beside its path, on the same file system, and
then exchanged with what the path has: one system call on Linux (``renameat2``) and macOS
(``renamex_np``). Where the file system has no exchange, two renames do it, and a reader that is
killed between finds the old one set aside. A staging directory is locked while it is in use; what
a killed process left is known by its free lock, and the next save beside it clears it away.
"""

import contextlib
import ctypes
import errno
import os
import pathlib
import shutil
import sys
from collections.abc import Iterator
from typing import Any

from penzai_shard.errors import CheckpointExistsError
from penzai_shard.library_apis.orbax_api import TEMPORARY_SUFFIX

SUFFIX = ".penzai-shard-saving"

_AT_FDCWD, _RENAME_EXCHANGE, _RENAME_SWAP = -100, 2, 2
# In place of a descriptor, on file systems that cannot lock files.
_NO_LOCKS = -1


def is_temporary(name: str) -> bool:
    """Whether a directory's name says that something unfinished is in it.

    >>> is_temporary(".params.penzai-shard-saving"), is_temporary("params")
    (True, False)
    """
    return name.endswith(SUFFIX) or TEMPORARY_SUFFIX in name


def staging_of(final: pathlib.Path) -> pathlib.Path:
    """The directory beside a path in which its next content is written.

    >>> str(staging_of(pathlib.Path("/runs/params")))
    '/runs/.params.penzai-shard-saving'
    """
    return final.with_name(f".{final.name}{SUFFIX}")


def final_of(staging: pathlib.Path) -> pathlib.Path:
    """The path whose next content is written in a staging directory.

    >>> str(final_of(pathlib.Path("/runs/.params.penzai-shard-saving")))
    '/runs/params'
    """
    return staging.with_name(staging.name.removesuffix(SUFFIX)[1:])


def where_content_is(final: pathlib.Path) -> pathlib.Path:
    """The path itself, or where its content was set aside by a save that was killed."""
    aside = staging_of(final) / "old"
    return aside if not final.exists() and aside.is_dir() else final


class Replacement:
    """A directory that is being written beside the path at which it will be.

    Attributes:
        final: Where it will be; symbolic links are followed.
        new: Where it is to be written.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as directory:
    ...     replacement = Replacement(f"{directory}/params")
    ...     replacement.begin()
    ...     replacement.new.mkdir()
    ...     replacement.commit()
    ...     os.listdir(directory)
    ['params']
    """

    def __init__(self, path: str) -> None:
        self.final = pathlib.Path(os.path.realpath(path))
        self._staging = staging_of(self.final)
        self._lock: int | None = None
        self._writing = self._staging / "writing"
        self.new = self._writing / "new"

    def begin(self) -> None:
        """Makes the staging directory, and clears away what killed saves left beside it.

        Raises:
            CheckpointExistsError: Another process is saving to this path.
            OSError: Nothing can be written there.
        """
        self.final.parent.mkdir(parents=True, exist_ok=True)
        for leftover in self.final.parent.glob(f".*{SUFFIX}"):
            _clear(leftover, is_own=leftover == self._staging)
        shutil.rmtree(self.final.with_name(self.final.name + TEMPORARY_SUFFIX), ignore_errors=True)
        for _ in range(10):
            self._staging.mkdir(exist_ok=True)
            with contextlib.suppress(FileNotFoundError):
                self._lock = _locked(self._staging)
                if self._lock is None:
                    break
                if self._lock == _NO_LOCKS or _is_lock_of(self._lock, self._staging):
                    self._writing.mkdir()
                    return
            # Another save took the new directory for a leftover before it was locked.
        raise CheckpointExistsError(
            f"cannot save to {self.final}: another process is saving there now. Wait for it, "
            "or choose another path."
        )

    def commit(self) -> None:
        """Puts the new directory at its path in one step, then removes the old one.

        Raises:
            OSError: It cannot be put at the path, which still has what it had.
        """
        _synchronise(self.new)
        aside = self._staging / "old"
        if not self.final.exists() or self.new.is_file():
            # Of a file this replaces what is there.
            os.replace(self.new, self.final)
        elif not _exchanged(self.new, self.final):
            os.rename(self.final, aside)
            try:
                os.rename(self.new, self.final)
            except OSError:
                os.rename(aside, self.final)
                raise
        _synchronise_directory(self.final.parent)
        self.discard()

    def stop_writers(self) -> None:
        """Makes all that is still being written fail: a file stands where its directory was."""
        if self._lock is not None:
            with contextlib.suppress(OSError):
                os.rename(self._writing, self._staging / "stopped")
                self._writing.touch()

    def discard(self) -> None:
        """Removes the staging directory; the path keeps what it has."""
        if self._lock is not None:
            shutil.rmtree(self._staging, ignore_errors=True)
            _release(self._lock)
            self._lock = None


def _clear(leftover: pathlib.Path, *, is_own: bool) -> None:
    """Removes a staging directory that nobody uses, once nothing in it is needed."""
    try:
        lock = _locked(leftover)
    except FileNotFoundError:
        return
    # Without locks nobody can tell whether another path's directory is in use.
    if lock is None or (lock == _NO_LOCKS and not is_own):
        return
    try:
        final = final_of(leftover)
        aside = leftover / "old"
        if aside.is_dir() and not final.exists():
            os.rename(aside, final)
        shutil.rmtree(leftover, ignore_errors=True)
    finally:
        _release(lock)


def _locked(staging: pathlib.Path) -> int | None:
    """A descriptor that holds a staging directory's lock, or None if another one does.

    The lock is held by the open file, so that the kernel frees it however the process ends.
    """
    lock = os.open(staging / "lock", os.O_CREAT | os.O_RDWR, 0o666)
    try:
        import fcntl  # not on Windows

        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (ImportError, OSError) as error:
        os.close(lock)
        is_taken = isinstance(error, OSError) and error.errno in (errno.EWOULDBLOCK, errno.EACCES)
        return None if is_taken else _NO_LOCKS
    return lock


def _is_lock_of(lock: int, staging: pathlib.Path) -> bool:
    return os.path.samestat(os.fstat(lock), os.stat(staging / "lock"))


def _release(lock: int) -> None:
    if lock != _NO_LOCKS:
        os.close(lock)


def _exchanged(first: pathlib.Path, second: pathlib.Path) -> bool:
    """Exchanges two directories in one step; False where the system cannot."""
    paths = os.fsencode(first), os.fsencode(second)
    try:
        library: Any = ctypes.CDLL(None, use_errno=True)
        if sys.platform == "darwin":
            failed = library.renamex_np(*paths, _RENAME_SWAP)
        else:
            failed = library.renameat2(_AT_FDCWD, paths[0], _AT_FDCWD, paths[1], _RENAME_EXCHANGE)
    except (AttributeError, OSError, TypeError):
        return False
    return not failed


def _synchronise(directory: pathlib.Path) -> None:
    """Has everything in a directory on the disk, before anything older is removed."""
    for place, _, names in os.walk(directory):
        for name in names:
            with open(os.path.join(place, name), "rb") as file:
                os.fsync(file.fileno())
        _synchronise_directory(pathlib.Path(place))


def _synchronise_directory(directory: pathlib.Path) -> None:
    # Not every file system synchronises directories.
    with contextlib.suppress(OSError), _opened(directory) as descriptor:
        os.fsync(descriptor)


@contextlib.contextmanager
def _opened(directory: pathlib.Path) -> Iterator[int]:
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        yield descriptor
    finally:
        os.close(descriptor)
