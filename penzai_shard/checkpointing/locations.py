"""Where checkpoints are: paths, what is at them, and what is near them."""

import difflib
import itertools
import os
import pathlib
import re
from typing import Any

from penzai_shard.checkpointing.replacement import is_temporary, where_content_is
from penzai_shard.errors import (
    CheckpointExistsError,
    CheckpointNotFoundError,
    MissingExtraError,
    RuleTypeError,
)
from penzai_shard.library_apis import orbax_api

PathLike = str | os.PathLike[str]

SEAL = "penzai_shard.json"
"""The file of a checkpoint's that is this library's own; see ``manifest``."""

# The files of Orbax' directories, our seal, and what a removal cut short may leave of them.
_FILES = re.compile(f"{orbax_api.FILE_NAMES}|{re.escape(SEAL)}")

# How many directories the files of a checkpoint are below it at most.
_DEEPEST = 4

STEP = re.compile(r"step_(\d{8,})")
"""The names of the checkpoints in the folder of a run."""


def absolute_path(path: PathLike) -> str:
    """The form of a path that Orbax takes: absolute, or with a scheme such as ``gs://``.

    Raises:
        RuleTypeError: It is not a path.

    >>> absolute_path("gs://bucket/run/params")
    'gs://bucket/run/params'
    """
    if not isinstance(path, str | os.PathLike) or not os.fspath(path):
        is_short = isinstance(path, str | bytes | int | float | None)
        what = f"={path!r}" if is_short else f" is a {type(path).__name__}"
        raise RuleTypeError(
            f"path{what}: give the path of a directory, such as 'run/params'. It comes first, "
            "before the model or the state."
        )
    text = os.fspath(path)
    return text if is_remote(text) else os.path.abspath(os.path.expanduser(text))


def is_remote(where: str) -> bool:
    """Whether a path has a scheme, as those of object stores have.

    >>> is_remote("gs://bucket/params"), is_remote("run/params")
    (True, False)
    """
    return "://" in where


def shown_path(where: str) -> str:
    """A path for people: from the working directory, if it is in there.

    >>> shown_path(os.path.abspath("run/params")), shown_path("gs://bucket/run")
    ('run/params', 'gs://bucket/run')
    """
    if is_remote(where):
        return where
    from_here = os.path.relpath(where)
    return where if from_here.startswith(os.pardir) else from_here


def path_object(where: str) -> Any:
    """A path with the interface of ``pathlib.Path``, wherever it is."""
    return orbax_api.path_object(where) if is_remote(where) else pathlib.Path(where)


def content_of(where: str) -> Any:
    """The path object of what a path holds, wherever a save that was killed left it.

    Raises:
        MissingExtraError: A package is missing that reaches the object store.
    """
    if not is_remote(where):
        return where_content_is(pathlib.Path(os.path.realpath(where)))
    path = path_object(where)
    try:
        path.exists()
    except ImportError as error:
        package = getattr(error.__cause__, "name", None) or getattr(error, "name", None)
        install = f" Install it with: pip install {package}" if package else ""
        raise MissingExtraError(f"cannot reach {where}: {error}.{install}") from error
    return path


def found_directory(where: str) -> Any:
    """The directory that holds a checkpoint's content.

    Raises:
        CheckpointNotFoundError: There is no such directory, or it is a part of a checkpoint.
    """
    directory = content_of(where)
    if not directory.exists():
        raise no_checkpoint(where, directory)
    if whole := _whole_around(where, directory):
        raise CheckpointNotFoundError(
            f"there is no checkpoint at {where}: it is a part of one. Restore the whole: {whole}"
        )
    if not directory.is_dir():
        raise no_checkpoint(where, directory)
    return directory


def _whole_around(where: str, directory: Any) -> str:
    """The path of the checkpoint that a file or directory is a part of; empty if of none."""
    if (directory / SEAL).exists():
        return ""
    for around in itertools.islice(directory.parents, 1 if is_remote(where) else _DEEPEST):
        where = os.path.dirname(where.rstrip("/"))
        if (around / SEAL).exists():
            return where
    return ""


def no_checkpoint(where: str, directory: Any) -> CheckpointNotFoundError:
    """The error for a path that is not a checkpoint: what it is, and what is near it."""
    if not directory.exists():
        what = f"the path does not exist.{_nearby(where)}"
    elif newest := _newest_of_run(directory):
        what = f"it is the folder of a run. Give one of its checkpoints; the newest is {newest}"
    else:
        what = _what_it_is(directory) + _nearby(where)
    return CheckpointNotFoundError(f"there is no checkpoint at {where}: {what}")


def _newest_of_run(directory: Any) -> str:
    """The path of the newest checkpoint in the folder of a run; empty if it is none."""
    if not directory.is_dir():
        return ""
    steps = [entry for entry in directory.iterdir() if STEP.fullmatch(entry.name)]
    whole = [entry for entry in steps if (entry / SEAL).exists()]
    return str(max(whole, key=lambda entry: int(entry.name.removeprefix("step_")), default=""))


def refuse_existing(where: str, overwrite: bool) -> None:
    """Refuses a path at which something is that may not be replaced.

    Raises:
        CheckpointExistsError: There is.
    """
    directory = content_of(where)
    if not directory.exists():
        return
    if not overwrite:
        reason = "it exists. Pass overwrite=True to replace it, or choose another path."
    elif is_remote(where):
        reason = (
            "it exists, and an object store cannot replace a directory in one step. Choose a new "
            f"path, for instance {where.rstrip('/')}_2."
        )
    elif not directory.is_dir():
        reason = (
            "it is a file, and a checkpoint is a directory. Choose another path, for instance "
            f"{where}_checkpoint."
        )
    elif not (is_checkpoint(directory) or _belongs(directory)):
        # Replacing removes the whole directory, so it must be one that Orbax made.
        reason = (
            "it exists and is not a checkpoint, so overwrite=True does not remove it. Choose a "
            f"new directory: {where.rstrip('/')}/params"
        )
    else:
        return
    raise CheckpointExistsError(f"cannot save to {where}: {reason}")


def _nearby(where: str) -> str:
    """Names the checkpoints next to or inside a path that is not one, those like it first."""
    if is_remote(where):
        return ""
    path = pathlib.Path(where)
    parent = path if path.is_dir() else path.parent
    try:
        found = [entry.name for entry in sorted(parent.iterdir())[:100] if is_checkpoint(entry)]
    except OSError:
        return ""
    like = difflib.get_close_matches(path.name, found, 3, 0.0)
    return f" Did you mean {' or '.join(str(parent / name) for name in like)}?" if like else ""


def _what_it_is(directory: Any) -> str:
    """What is at a path that is not a checkpoint, as far as names say, and what to do."""
    is_file = not directory.is_dir()
    names = {directory.name} if is_file else {entry.name for entry in directory.iterdir()}
    if any(name.endswith(".safetensors") for name in names):
        return "it has weights as safetensors. Load them with load_safetensors(path, mesh, rules)."
    if "config.json" in names or any(name.endswith(".bin") for name in names):
        return (
            "it looks like a model of Hugging Face, without weights as safetensors. Save it with "
            "them, model.save_pretrained(path), and load that: load_safetensors(path, mesh, rules)."
        )
    return "it is a file." if is_file else "Orbax does not recognise the directory."


def is_checkpoint(directory: Any) -> bool:
    """Whether a directory has the files that every Orbax checkpoint has.

    Orbax' own test also takes directories of anything else for old checkpoints.
    """
    return not is_temporary(directory.name) and any(
        (directory / marker).exists() for marker in (*orbax_api.MARKER_FILES, SEAL)
    )


def _belongs(entry: Any) -> bool:
    """Whether a file is one that Orbax makes, or a directory holds only such."""
    if entry.is_dir():
        return all(_belongs(child) for child in entry.iterdir())
    return is_name_of_file(entry.name)


def is_name_of_file(name: str) -> bool:
    """Whether files of a checkpoint have this name.

    >>> is_name_of_file(SEAL), is_name_of_file("notes.txt")
    (True, False)
    """
    return _FILES.fullmatch(name) is not None
