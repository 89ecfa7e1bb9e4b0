"""The files of a model's weights: which there are, whether they are whole, and reading their parts.

A directory has one file, or several with an index that says which tensor is in which. Everything
that can be wrong with them is found from their headers, before any tensor is read.
"""

import dataclasses
import json
import math
import mmap
import os
import pathlib
import types
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import ml_dtypes  # noqa: F401 (NumPy knows bfloat16 and float8 by name once it is imported)
import numpy as np

from penzai_shard.checkpointing.array_records import ArrayRecord
from penzai_shard.checkpointing.file_kinds import problem_of_file
from penzai_shard.errors import (
    CheckpointDamagedError,
    CheckpointNotFoundError,
    RuleTypeError,
    raise_all,
)
from penzai_shard.pretrained.axis_metadata import SavedRecords, read_records
from penzai_shard.pretrained.safetensors_header import (
    FileHeader,
    UnreadableFileError,
    read_header,
)
from penzai_shard.pretrained.stored_tensors import Index, StoredTensor
from penzai_shard.pretrained.weight_locations import WeightFiles, found_files

_ATTEMPTS = 5


@dataclasses.dataclass(eq=False)
class SafetensorsReader:
    """Tensors in one or several safetensors files, of which parts can be read.

    Files are mapped into memory when they are opened, so that what is read is of the files that
    were checked, also if others are put in their places meanwhile. Reading is safe from several
    threads.

    Attributes:
        where: The file or directory.
        files: The files.
        tensors: All tensors by name, in the order of the files and of their bytes.
        records: What ``save_safetensors`` wrote of each tensor: its logical axes above all. Empty
            for files of others.
    """

    where: str
    files: tuple[str, ...]
    tensors: Mapping[str, StoredTensor]
    records: Mapping[str, ArrayRecord]
    _starts: Mapping[str, int]
    _mapped: Mapping[str, mmap.mmap]

    def read(self, name: str, index: Index) -> np.ndarray[Any, Any]:
        """The part of a tensor at an index, and nothing more of it; its own memory."""
        tensor = self.tensors[name]
        count = math.prod(tensor.shape)
        # NumPy refuses to look at nothing behind the end of a file.
        start = self._starts[name] if count else 0
        mapped = self._mapped[tensor.file]
        whole = np.frombuffer(mapped, np.dtype(tensor.dtype), count, start)
        return np.array(whole.reshape(tensor.shape)[index], order="C")

    def forget(self, names: Iterable[str]) -> None:
        """Lets go of the memory that maps tensors; they can still be read."""
        for name in names:
            tensor = self.tensors[name]
            size = math.prod(tensor.shape) * np.dtype(tensor.dtype).itemsize
            first = -(-self._starts[name] // mmap.PAGESIZE) * mmap.PAGESIZE
            # Not every system has it.
            if hasattr(mmap, "MADV_DONTNEED") and self._starts[name] + size > first:
                length = self._starts[name] + size - first
                self._mapped[tensor.file].madvise(mmap.MADV_DONTNEED, first, length)

    def description(self) -> dict[str, str]:
        """What differs between two sets of files whose tensors are not the same, in short texts."""
        return {
            os.path.basename(file): " ".join(
                f"{name} {tensor.dtype}{list(tensor.shape)}"
                for name, tensor in self.tensors.items()
                if tensor.file == file
            )
            for file in self.files
        }


def open_tensors(path: Any) -> SafetensorsReader:
    """Opens the weights at a path, and checks everything but the numbers.

    Args:
        path: A safetensors file, an index, or a directory that has either.

    Raises:
        CheckpointNotFoundError: There are no weights at the path.
        CheckpointDamagedError: With one line per file that is not whole, tensor that is not where
            the index says, or tensor that is in two files.
        MissingExtraError: safetensors is not installed.
    """
    for _ in range(_ATTEMPTS):
        found = found_files(path)
        before = _identities(found)
        problems: list[str] = []
        headers = _headers(found, problems)
        mapped = _mapped([header.path for header in headers], problems)
        if _identities(found) == before:
            return _reader(found, headers, mapped, problems)
    raise CheckpointDamagedError(
        f"the weights at {found.where} were replaced {_ATTEMPTS} times while they were being "
        "opened. Load them once whatever writes them is done."
    )


def _identities(found: WeightFiles) -> list[Any]:
    """Equal for two looks at files between which none was replaced or changed."""

    def identity(path: str) -> Any:
        try:
            status = os.stat(path)
        except OSError:
            return None
        return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns

    return [identity(path) for path in (*found.files, *([found.index] if found.index else []))]


def _headers(found: WeightFiles, problems: list[str]) -> list[FileHeader]:
    headers = []
    for path in found.files:
        try:
            headers.append(read_header(path))
        except UnreadableFileError as error:
            problems.append(f"{os.path.basename(path)}: {error}")
    return headers


def _mapped(paths: Sequence[str], problems: list[str]) -> dict[str, mmap.mmap]:
    mapped: dict[str, mmap.mmap] = {}
    for path in paths:
        try:
            with open(path, "rb") as file:
                mapped[path] = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except (OSError, ValueError) as error:
            problems.append(f"{os.path.basename(path)}: cannot be mapped into memory: {error}.")
    return mapped


def _reader(
    found: WeightFiles,
    headers: Sequence[FileHeader],
    mapped: Mapping[str, mmap.mmap],
    problems: list[str],
) -> SafetensorsReader:
    homes: dict[str, list[str]] = {}
    for header in headers:
        for name in header.tensors:
            homes.setdefault(name, []).append(os.path.basename(header.path))
    problems += [
        f"{name}: is in {' and in '.join(files)}. Remove the file that does not belong to the "
        "others."
        for name, files in homes.items()
        if len(files) > 1
    ]
    if found.weight_map is not None:
        read = {os.path.basename(header.path) for header in headers}
        problems += _not_as_indexed(found.weight_map, homes, read)
    saved = SavedRecords({}, "")
    if not problems:
        saved = read_records(headers, problems)
    raise_all(CheckpointDamagedError, f"cannot read the weights at {found.where}:", problems)
    return SafetensorsReader(
        found.where,
        tuple(header.path for header in headers),
        types.MappingProxyType({n: t for header in headers for n, t in header.tensors.items()}),
        types.MappingProxyType(dict(saved.records)),
        {name: start for header in headers for name, start in header.starts.items()},
        mapped,
    )


def _not_as_indexed(
    weight_map: Mapping[str, str], homes: Mapping[str, Sequence[str]], read: set[str]
) -> list[str]:
    """What is not where the index says, of the files that could be read."""
    problems = []
    for name, file in weight_map.items():
        if file in read and file not in homes.get(name, ()):
            there = f"It is in {homes[name][0]}. " if name in homes else ""
            problems.append(
                f"{name}: the index says that it is in {file}, which does not have it. {there}"
                "Download the index and the file again."
            )
    problems += [
        f"{name}: is in {files[0]}, and the index does not know it. Download the index again."
        for name, files in homes.items()
        if name not in weight_map
    ]
    return problems


def read_config(config: Any, where: str) -> tuple[Mapping[str, Any], str]:
    """The configuration of a model, and what messages call it.

    Args:
        config: What the caller gave: its attributes, the path of a JSON file, or an object of
            transformers; None for the ``config.json`` beside the weights.
        where: The file or directory of the weights.

    Raises:
        CheckpointNotFoundError: There is none.
        CheckpointDamagedError: It is not a JSON object.
        RuleTypeError: It was given in a form that cannot be read as one.
    """
    if isinstance(config, Mapping):
        return config, "config"
    if callable(getattr(config, "to_dict", None)):
        return config.to_dict(), "config"
    if config is not None and not isinstance(config, str | os.PathLike):
        raise RuleTypeError(
            f"config is a {type(config).__name__}: give a dictionary of attributes, or the path of "
            "a JSON file."
        )
    if config is None:
        path = pathlib.Path(where)
        path = (path if path.is_dir() else path.parent) / "config.json"
    else:
        path = pathlib.Path(config)
        path = path / "config.json" if path.is_dir() else path
    advice = (
        "Give one, config={...} or config='path/config.json'; or fill a model of your own, "
        "into=model."
    )
    if path.exists() and (problem := problem_of_file(path)):
        raise CheckpointNotFoundError(f"the configuration {path} {problem}. {advice}")
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise CheckpointNotFoundError(f"there is no configuration {path}. {advice}") from None
    except OSError as error:
        raise CheckpointNotFoundError(
            f"the configuration {path} cannot be opened: {error.strerror or error}. {advice}"
        ) from error
    except (ValueError, RecursionError) as error:
        raise CheckpointDamagedError(
            f"the configuration {path} is not JSON: {error}. {advice}"
        ) from error
    if not isinstance(content, Mapping):
        raise CheckpointDamagedError(f"the configuration {path} is not a JSON object. {advice}")
    return content, path.name
