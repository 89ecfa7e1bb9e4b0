"""Where checkpoints are: paths, what lies at them, and what lies near them."""

import os
import pathlib
import re
from typing import Any

from penzai_shard.checkpointing.orbax_calls import orbax
from penzai_shard.checkpointing.replacement import is_temporary, where_content_is
from penzai_shard.errors import (
    CheckpointExistsError,
    CheckpointNotFoundError,
    MissingExtraError,
    RuleTypeError,
)

PathLike = str | os.PathLike[str]

_MARKERS = ("orbax.checkpoint", "_CHECKPOINT_METADATA", "_METADATA", "penzai_shard.json")
# The files of Orbax' directories, our seal, and what a removal cut short may leave of them.
_FILES = re.compile(
    r"orbax\.checkpoint|_CHECKPOINT_METADATA|_METADATA|_sharding|commit_success\.txt|"
    r"manifest\.ocdbt|penzai_shard\.json|process_\d+|[0-9a-f]{32}"
)


def absolute_path(path: PathLike) -> str:
    """The form of a path that Orbax takes: absolute, or with a scheme such as ``gs://``.

    Raises:
        RuleTypeError: It is not a path.

    >>> absolute_path("gs://bucket/run/params")
    'gs://bucket/run/params'
    """
    if not isinstance(path, str | os.PathLike) or not os.fspath(path):
        told = f"={path!r}" if isinstance(path, str | bytes | int | float | None) else ""
        told = told or f" is a {type(path).__name__}"
        raise RuleTypeError(
            f"path{told}: give the path of a directory, such as 'run/params'. It comes first, "
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


def path_object(where: str) -> Any:
    """A path with the interface of ``pathlib.Path``, wherever it is."""
    return orbax().Context().file.path_class(where) if is_remote(where) else pathlib.Path(where)


def content_of(where: str) -> Any:
    """The path object of what a path holds, wherever a save that was killed left it."""
    if is_remote(where):
        return _reachable(where)
    return where_content_is(pathlib.Path(os.path.realpath(where)))


def _reachable(where: str) -> Any:
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
        CheckpointNotFoundError: There is no such directory.
    """
    directory = content_of(where)
    if not directory.exists():
        raise CheckpointNotFoundError(
            f"there is no checkpoint at {where}: the path does not exist.{nearby(where)}"
        )
    if not directory.is_dir():
        raise CheckpointNotFoundError(
            f"there is no checkpoint at {where}: {what_it_is(directory)}{nearby(where)}"
        )
    return directory


def refuse_existing(where: str, overwrite: bool) -> None:
    """Refuses a path at which something is that may not be replaced.

    Raises:
        CheckpointExistsError: There is.
    """
    directory = content_of(where)
    if not directory.exists():
        return
    if not overwrite:
        raise CheckpointExistsError(
            f"cannot save to {where}: it exists. "
            "Pass overwrite=True to replace it, or choose another path."
        )
    if is_remote(where):
        raise CheckpointExistsError(
            f"cannot save to {where}: it exists, and an object store cannot replace a directory "
            f"in one step. Choose a new path, for instance {where.rstrip('/')}_2."
        )
    if not directory.is_dir():
        raise CheckpointExistsError(
            f"cannot save to {where}: it is a file, and a checkpoint is a directory. Choose "
            f"another path, for instance {where}_checkpoint."
        )
    if not (_is_checkpoint(directory) or _belongs(directory)):
        # Replacing removes the whole directory, so it must be one that Orbax made.
        raise CheckpointExistsError(
            f"cannot save to {where}: it exists and is no checkpoint, so overwrite=True does not "
            f"remove it. Choose a new directory: {where.rstrip('/')}/params"
        )


def nearby(where: str) -> str:
    """Names the checkpoints next to or inside a path that is none."""
    if is_remote(where):
        return ""
    path = pathlib.Path(where)
    parent = path if path.is_dir() else path.parent
    try:
        found = [str(entry) for entry in sorted(parent.iterdir())[:100] if _is_checkpoint(entry)]
    except OSError:
        return ""
    return f" Did you mean {' or '.join(found[:3])}?" if found else ""


def what_it_is(directory: Any) -> str:
    """What lies at a path that is no checkpoint, as far as names tell, and what to do."""
    is_file = not directory.is_dir()
    names = {directory.name} if is_file else {entry.name for entry in directory.iterdir()}
    if "config.json" in names or any(name.endswith((".safetensors", ".bin")) for name in names):
        return (
            "it looks like a model of Hugging Face. Load it there, convert it with Penzai, for "
            "instance with penzai.models.transformer.variants.llama."
            "llama_from_huggingface_model, and save that with save_params."
        )
    return "it is a file." if is_file else "Orbax does not recognise the directory."


def _is_checkpoint(directory: Any) -> bool:
    """Whether a directory has the files that every Orbax checkpoint has.

    Orbax' own test also takes directories of anything else for old checkpoints.
    """
    return not is_temporary(directory.name) and any(
        (directory / marker).exists() for marker in _MARKERS
    )


def _belongs(entry: Any) -> bool:
    """Whether a file is one that Orbax makes, or a directory holds only such."""
    if entry.is_dir():
        return all(_belongs(child) for child in entry.iterdir())
    return _FILES.fullmatch(entry.name) is not None
