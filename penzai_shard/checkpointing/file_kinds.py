"""What stands in a checkpoint where its files should: a pipe in place of one would never end."""

import os
import pathlib
import stat
from collections.abc import Iterator
from typing import Any

from penzai_shard.checkpointing.locations import is_name_of_file

_KINDS = {
    stat.S_IFDIR: "a directory",
    stat.S_IFIFO: "a pipe (FIFO)",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}


def problems_of_files(directory: Any) -> list[str]:
    """One line for each file of a checkpoint that is none, or that may not be read.

    Files of other names than a checkpoint's do not concern it, whatever they are.

    Args:
        directory: A path object. Only what is on a file system can be anything but a file.
    """
    if not isinstance(directory, pathlib.Path):
        return []
    return [
        f"{file.relative_to(directory)}: {problem}."
        for file in _files(directory)
        if (problem := problem_of_file(file))
    ]


def _files(directory: pathlib.Path) -> Iterator[pathlib.Path]:
    """All that has the name of a file of a checkpoint, at any depth."""
    for place, folders, names in os.walk(directory):
        for name in sorted([*folders, *names]):
            if is_name_of_file(name):
                yield pathlib.Path(place, name)
        folders[:] = [name for name in folders if not is_name_of_file(name)]


def problem_of_file(file: pathlib.Path) -> str:
    """Why something cannot be read as a file; empty if it can.

    >>> problem_of_file(pathlib.Path("/"))
    'is not a file, but a directory'
    """
    try:
        kind = stat.S_IFMT(file.stat().st_mode)
    except OSError as error:
        if not file.is_symlink():
            return f"cannot be read ({error.strerror})"
        return f"is a link to {os.readlink(file)}, which cannot be read ({error.strerror})"
    if kind != stat.S_IFREG:
        return f"is not a file, but {_KINDS.get(kind, 'something else')}"
    return "" if os.access(file, os.R_OK) else "cannot be read (Permission denied)"
