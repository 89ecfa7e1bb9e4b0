"""Where the weights of a model are: files, their index, and what is near a path."""

import dataclasses
import json
import os
import pathlib
import re
from collections.abc import Mapping
from typing import Any

from penzai_shard.checkpointing.file_kinds import problem_of_file
from penzai_shard.checkpointing.locations import absolute_path, is_checkpoint, is_remote, shown_path
from penzai_shard.checkpointing.replacement import is_temporary, where_content_is
from penzai_shard.errors import CheckpointDamagedError, CheckpointNotFoundError, raise_all
from penzai_shard.pretrained.safetensors_header import SUFFIX

INDEX_SUFFIX = ".index.json"
ONE_FILE = "model.safetensors"
INDEX = f"{ONE_FILE}{INDEX_SUFFIX}"

# Weights in other formats, and what makes safetensors of them.
_OTHER_FORMATS = (".bin", ".pt", ".pth", ".ckpt")
_NOT_READ = (".gguf", ".h5", ".msgpack", ".npz", ".onnx")
_HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+")


@dataclasses.dataclass(frozen=True)
class WeightFiles:
    """The files that make up the weights at a path.

    Attributes:
        where: The path, absolute.
        files: The safetensors files.
        index: The index, None if there is none.
        weight_map: What it says: the name of the file of each tensor.
    """

    where: str
    files: tuple[str, ...]
    index: str | None = None
    weight_map: Mapping[str, str] | None = None


def found_files(path: Any) -> WeightFiles:
    """Finds the files of the weights at a path.

    Args:
        path: A safetensors file, an index, or a directory with either.

    Raises:
        CheckpointNotFoundError: There are no weights, or it is not clear which.
        CheckpointDamagedError: The index cannot be read, or names files that are not there.
    """
    where = absolute_path(path)
    if is_remote(where):
        raise CheckpointNotFoundError(
            f"cannot read {where}: weights are read from a file system. Copy them to a local "
            "disk, or mount the bucket."
        )
    place = where_content_is(pathlib.Path(where))
    if place.is_file():
        if place.name.endswith(INDEX_SUFFIX):
            return _indexed(where, place)
        if place.name.endswith(SUFFIX):
            _refuse_one_of_several(where, place)
            return WeightFiles(where, (str(place),))
    if not place.is_dir():
        raise _not_found(where, place)
    indexes = sorted(p for p in place.iterdir() if p.name.endswith(SUFFIX + INDEX_SUFFIX))
    if (place / INDEX).exists():
        indexes = [place / INDEX]
    files = sorted(str(p) for p in place.iterdir() if p.name.endswith(SUFFIX))
    if len(indexes) == 1:
        return _indexed(where, indexes[0])
    if os.path.lexists(place / ONE_FILE):
        return WeightFiles(where, (str(place / ONE_FILE),))
    if len(files) == 1 and not indexes:
        return WeightFiles(where, tuple(files))
    if files or indexes:
        listed = ", ".join(os.path.basename(f) for f in [*files, *map(str, indexes)][:4])
        raise CheckpointNotFoundError(
            f"cannot tell which weights in {where} are meant: it has {listed}"
            f"{', ...' if len(files) + len(indexes) > 4 else ''}, and no {INDEX} that says what "
            "belongs together. Give the path of one file, or download the index too."
        )
    raise _not_found(where, place)


def _refuse_one_of_several(where: str, place: pathlib.Path) -> None:
    """Refuses a file that is one of several which an index beside it names."""
    index = place.with_name(INDEX)
    if not index.exists() or place.name == ONE_FILE:
        return
    files = {os.path.basename(file) for file in _indexed(where, index).files}
    if place.name in files and len(files) > 1:
        raise CheckpointNotFoundError(
            f"{where} is one of {len(files)} files of a model, which belong together. Give "
            f"their directory: {place.parent}"
        )


def _indexed(where: str, index: pathlib.Path) -> WeightFiles:
    headline = f"cannot read the weights at {where}:"

    def refuse(problem: str) -> CheckpointDamagedError:
        return CheckpointDamagedError(headline, [f"{index.name}: {problem}"])

    # A pipe in its place would never end.
    if problem := problem_of_file(index):
        raise refuse(f"{problem}.")
    try:
        content = json.loads(index.read_text(encoding="utf-8"))
    except OSError as error:
        raise refuse(f"cannot be opened: {error.strerror or error}.") from error
    except (ValueError, RecursionError) as error:
        raise refuse("is not JSON. Download or copy it again.") from error
    found = content.get("weight_map") if isinstance(content, Mapping) else None
    is_map = isinstance(found, Mapping) and all(isinstance(file, str) for file in found.values())
    if not is_map or not found:
        raise refuse(
            "does not say which tensor is in which file: it should have an object 'weight_map' "
            "from tensors to files. Download or copy it again."
        )
    tensors: dict[str, list[str]] = {}
    for name, file in found.items():
        tensors.setdefault(file, []).append(name)
    problems = []
    for file, names in sorted(tensors.items()):
        if file != os.path.basename(file) or file in ("", ".", ".."):
            problems.append(
                f"{index.name}: names the file {file!r}, and may name files beside it alone."
            )
        elif not os.path.lexists(index.parent / file):
            problems.append(
                f"{file}: is not there, and the index says that it has {len(names):,} tensors, "
                f"such as {names[0]!r}. Download it too."
            )
    raise_all(CheckpointDamagedError, headline, problems)
    return WeightFiles(
        where, tuple(str(index.parent / file) for file in sorted(tensors)), str(index), found
    )


def _not_found(where: str, place: pathlib.Path) -> CheckpointNotFoundError:
    return CheckpointNotFoundError(
        f"there are no safetensors weights at {where}: {_what_it_is(where, place)}"
    )


def _what_it_is(where: str, place: pathlib.Path) -> str:
    """What is at a path that has no weights, and what to do."""
    near = _nearby(place)
    if not os.path.lexists(place):
        given = shown_path(where)
        hint = ""
        if not near and _HUB_NAME.fullmatch(given) and not place.parent.exists():
            hint = (
                " If it is a name on the Hugging Face Hub, download it first and give where it "
                f"is: huggingface_hub.snapshot_download({given!r})."
            )
        return f"the path does not exist.{near}{hint}"
    if place.is_dir() and is_checkpoint(place):
        return "it is a checkpoint of save_params. Read it with restore_params."
    names = [place.name] if place.is_file() else [entry.name for entry in place.iterdir()]
    if others := [name for name in names if name.endswith(_OTHER_FORMATS)]:
        return (
            f"it has {others[0]}, which torch wrote. Save them as safetensors, once: "
            f"transformers.AutoModelForCausalLM.from_pretrained(path).save_pretrained(new_path)."
            f"{near}"
        )
    if others := [name for name in names if name.endswith(_NOT_READ)]:
        return f"it has {others[0]}, a format that is not read. Get the weights as safetensors."
    if place.is_file():
        return f"the name of such a file ends in {SUFFIX}.{near}"
    return f"the directory has no file whose name ends in {SUFFIX}.{near}"


def _nearby(place: pathlib.Path) -> str:
    """Names the weights in a directory, below it, or next to a path that has none."""
    parent = place if place.is_dir() else place.parent
    found: list[str] = []
    for pattern in ("", "*/", "*/*/"):
        for file in sorted(parent.glob(f"{pattern}*{SUFFIX}"))[:200]:
            if not any(map(is_temporary, file.parts)):
                # Of several files in a directory the directory, as their index is there.
                count = len(list(file.parent.glob(f"*{SUFFIX}")))
                found.append(str(file if count == 1 and pattern == "" else file.parent))
        if found:
            break
    distinct = list(dict.fromkeys(found))
    return f" Did you mean {' or '.join(distinct[:3])}?" if distinct else ""
