"""Reads parts of tensors from safetensors files, which it maps into memory.

The safetensors library decides whether a file is whole. It does not read the parts: it has no
float8 for NumPy, and it would read each part through a tensor of its own.
"""

import json
import mmap
import os
import pathlib
import threading
from collections.abc import Iterable
from typing import Any

import ml_dtypes  # noqa: F401 (With it NumPy knows bfloat16 and float8 by name.)
import numpy as np

from penzai_shard.checkpoints.storage import refuse_damage
from penzai_shard.errors import CheckpointNotFoundError, Problem, require

SUFFIX, _INDEX_SUFFIX = ".safetensors", ".safetensors.index.json"
_INDEX = f"model{_INDEX_SUFFIX}"
_DTYPES = {
    "BOOL": "bool",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2",
    "F8_E8M0": "float8_e8m0fnu",
    "F8_E4M3FNUZ": "float8_e4m3fnuz",
    "F8_E5M2FNUZ": "float8_e5m2fnuz",
    "BF16": "bfloat16",
    "C64": "complex64",
    **{f"F{bits}": f"float{bits}" for bits in (16, 32, 64)},
    **{f"I{bits}": f"int{bits}" for bits in (8, 16, 32, 64)},
    **{f"U{bits}": f"uint{bits}" for bits in (8, 16, 32, 64)},
}
# Pages of files that were looked at count as memory of the process until they are let go.
_MAPPED_BYTES = 8 * 2**20


def is_tensors(path: pathlib.Path) -> bool:
    """Whether a path is a safetensors file, an index of such files, or a folder with either."""
    files = path.iterdir() if path.is_dir() else [path] if os.path.lexists(path) else []
    return any(file.name.endswith((SUFFIX, _INDEX_SUFFIX)) for file in files)


class TensorStore:
    """The tensors of safetensors files, of which any thread can read parts.

    The files must stay as they are while they are read: other ones may take their paths.

    Args:
        path: What the caller gave, for messages.
        content: A file, an index, or a folder. In a folder ``model.safetensors.index.json`` says
            which files belong together; without one, all do.

    Attributes:
        names: The tensors.
        texts: Of each file the texts that its writer added.

    Raises:
        CheckpointDamagedError: Files are not whole, tensors are in two files, or files and index
            disagree; all that is wrong is in it.
        CheckpointNotFoundError: A file only points to one of Git LFS.
        MissingExtraError: safetensors is not installed.
    """

    def __init__(self, path: pathlib.Path, content: pathlib.Path) -> None:
        self._safetensors = require("safetensors", "safetensors")
        self._mapped: list[mmap.mmap] = []
        self._tensors: dict[str, np.ndarray] = {}
        self.texts: dict[str, dict[str, str]] = {}
        self._lock, self._looked_at = threading.Lock(), 0
        index = content / _INDEX if content.is_dir() else content
        weight_map: dict[str, str] = {}
        files = sorted(content.glob(f"*{SUFFIX}")) if content.is_dir() else [content]
        if index.name.endswith(_INDEX_SUFFIX) and os.path.lexists(index):
            weight_map = _read_index(path, index)
            files = [index.parent / name for name in sorted({*weight_map.values()})]

        damaged, homes = {}, dict[str, str]()
        for file in files:
            try:
                tensors = self._open_file(file)
            except CheckpointNotFoundError:
                raise
            # What a file holds that is no JSON of this form.
            except (OSError, ValueError, LookupError, TypeError, RecursionError) as error:
                damaged[file.name] = f"it is no whole safetensors file: {error!s:.100}"
                continue
            for name in tensors:
                if homes.setdefault(name, file.name) != file.name:
                    damaged[name] = f"it is in {homes[name]} and in {file.name}"
            self._tensors |= tensors
        for name, home in weight_map.items() | homes.items() if weight_map else ():
            found, said = homes.get(name), weight_map.get(name)
            if found != said and home not in damaged:
                damaged[name] = f"{index.name} says that it is in {said}, and it is in {found}"
        refuse_damage(path, damaged)
        self.names = tuple(self._tensors)

    def _open_file(self, file: pathlib.Path) -> dict[str, np.ndarray]:
        # Opening a pipe would never end.
        if not (file.is_file() and os.access(file, os.R_OK)):
            raise OSError("it is missing, or no readable file")
        try:
            with self._safetensors.safe_open(file, framework="numpy"):
                pass
        except self._safetensors.SafetensorError as error:
            with file.open("rb") as opened:
                if opened.read(20).startswith(b"version https://git"):
                    what, fix = "it only points to a file of Git LFS", "Run git lfs pull."
                    problem = Problem(file.name, what, fix)
                    raise CheckpointNotFoundError("there are no weights:", [problem]) from None
            raise ValueError(error) from None
        with file.open("rb") as opened:
            mapped = mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ)
        self._mapped.append(mapped)
        start = 8 + int.from_bytes(mapped[:8], "little")
        header = json.loads(mapped[8:start])
        self.texts[file.name] = header.pop("__metadata__", None) or {}
        return {name: _view(mapped, start, name, entry) for name, entry in header.items()}

    def open(self, names: Iterable[str]) -> dict[str, tuple[tuple[int, ...], str]]:
        """The shape and dtype of tensors, which are open already."""
        tensors = {name: self._tensors[name] for name in names}
        return {name: (tensor.shape, tensor.dtype.name) for name, tensor in tensors.items()}

    def read(
        self, name: str, index: tuple[slice, ...], shape: tuple[int, ...] | None = None
    ) -> np.ndarray:
        """A part of a tensor, in the memory of its file; see ``Store.read``."""
        tensor = self._tensors[name]
        rows = (tensor if shape is None else tensor.reshape(shape))[index[:1]]
        with self._lock:
            self._looked_at += rows.nbytes
            if self._looked_at > _MAPPED_BYTES and hasattr(mmap, "MADV_DONTNEED"):
                self._looked_at = 0
                # Whoever still looks at them gets them again from the system's cache.
                for mapped in self._mapped:
                    mapped.madvise(mmap.MADV_DONTNEED)
        return rows[(slice(None), *index[1:])] if index else rows


def _view(mapped: mmap.mmap, start: int, name: str, entry: Any) -> np.ndarray:
    (begin, end), shape = entry["data_offsets"], entry["shape"]
    if entry["dtype"] not in _DTYPES:
        raise ValueError(f"{name} has dtype {entry['dtype']}, which NumPy does not have")
    dtype = np.dtype(_DTYPES[entry["dtype"]])
    # NumPy does not look at nothing behind the end of a file.
    first = start + begin if end > begin else 0
    return np.frombuffer(mapped, dtype, (end - begin) // dtype.itemsize, first).reshape(shape)


def _read_index(path: pathlib.Path, index: pathlib.Path) -> dict[str, str]:
    """The file of each tensor, which is beside the index."""
    try:
        if not index.is_file():
            raise OSError("it is no file")
        weight_map = dict(json.loads(index.read_bytes())["weight_map"])
        names = {*weight_map.values()}
        is_beside = (pathlib.Path(x).name == x and x.endswith(SUFFIX) for x in names)
        if not names or not all(is_beside):
            raise ValueError("it does not name safetensors files beside it")
    except (OSError, ValueError, LookupError, TypeError, RecursionError) as error:
        refuse_damage(path, {index.name: f"it cannot be read: {error!r:.100}"})
    return weight_map


def explain_absence(path: str) -> Problem | None:
    """What a path without weights that can be read is, if it looks like another form of some."""
    given = pathlib.Path(path)
    names = [file.name for file in given.iterdir()] if given.is_dir() else [given.name]
    if any(name.endswith((".bin", ".pt", ".pth")) for name in names) and given.exists():
        fix = "Write model.save_pretrained(path) once, where torch is: it saves safetensors."
        return Problem(path, "it has weights of torch", fix)
    if path.count("/") == 1 and not given.parent.exists():
        fix = f"If it is a name on a hub, write huggingface_hub.snapshot_download({path!r})."
        return Problem(path, "there is no such path", fix)
    return None
