"""Files that are written whole: whoever reads one finds all of it, or what was there before."""

import os
import pathlib

from penzai_shard.errors import RuleTypeError


def write_whole(path: str | os.PathLike[str], text: str) -> pathlib.Path:
    """Writes a text file in the place of one that is there.

    Args:
        path: The file; its folder is made if there is none.
        text: What it shall hold, in UTF-8; lines end as they do in the text.

    Returns:
        The file.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     write_whole(f"{folder}/new/file.txt", "all of it").read_text()
    'all of it'
    """
    path = pathlib.Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    # Nobody reads half of it, also if several processes write.
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with open(beside, "w", encoding="utf-8", newline="\n") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        beside.replace(path)
    finally:
        beside.unlink(missing_ok=True)
    return path


def refuse_unwritable(path: str | os.PathLike[str], option: str, file: str, what: str) -> None:
    """Refuses a path that no file can be written to, best before anything is computed for it.

    Args:
        path: Where the file is to be written.
        option: How that is said.
        file: What the file may be called.
        what: What is written.

    Raises:
        RuleTypeError: A folder is there; or what it would be in is no folder, or may not be written
            to.
    """
    given = os.fspath(path)
    # An empty path is the folder that one is in.
    if os.path.isdir(given or "."):
        raise RuleTypeError(
            f"{given or 'an empty path'} is a folder, and the {what} is one file. "
            f"Give {option}{os.path.join(given, file)!r}."
        )
    above = pathlib.Path(os.path.abspath(given)).parents
    folder = next(each for each in above if os.path.lexists(each))
    if not folder.is_dir():
        raise RuleTypeError(
            f"{given} cannot be written, because {folder} is a file and no folder. Give "
            f"{option}{str(folder.with_name(file))!r}."
        )
    if not os.access(folder, os.W_OK | os.X_OK):
        raise RuleTypeError(
            f"{given} cannot be written, because nothing may be written to the folder {folder}. "
            f"Give {option}{file!r}, or another folder that is yours."
        )
