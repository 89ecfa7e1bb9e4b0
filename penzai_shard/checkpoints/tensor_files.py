"""Reads parts of tensors from safetensors files, which it maps into memory.

The safetensors library decides whether a file is whole. It does not read the parts: it has no
float8 for NumPy, and it would read each part through a tensor of its own.
"""

import json
import mmap
import os
import pathlib
from collections.abc import Iterable

import ml_dtypes  # noqa: F401 (With it NumPy knows bfloat16 and float8 by name.)
import numpy as np

from penzai_shard.checkpoints.storage import UNREADABLE, refuse_damage, refuse_unreadable
from penzai_shard.errors import require

SUFFIX, INDEX_SUFFIX = ".safetensors", ".safetensors.index.json"
INDEX = f"model{INDEX_SUFFIX}"
DTYPES = {
    "BOOL": "bool",
    "BF16": "bfloat16",
    "C64": "complex64",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2",
    **{f"F{bits}": f"float{bits}" for bits in (16, 32, 64)},
    **{f"I{bits}": f"int{bits}" for bits in (8, 16, 32, 64)},
    **{f"U{bits}": f"uint{bits}" for bits in (8, 16, 32, 64)},
}
FRACTIONS = tuple(dtype for dtype in DTYPES.values() if "float" in dtype)
# Pages of files that were looked at count as memory of the process until they are let go.
_MAPPED_BYTES = 8 * 2**20


def is_tensors(path: pathlib.Path) -> bool:
    """Whether a path is a safetensors file, an index of such files, or a folder with either."""
    files = path.glob("*") if path.is_dir() else [path] if os.path.lexists(path) else []
    return any(file.name.endswith((SUFFIX, INDEX_SUFFIX)) for file in files)


class TensorStore:
    """The tensors of safetensors files, of which any thread can read parts.

    The files must stay as they are while they are read: other ones may take their paths.

    Args:
        path: A file, an index, or a folder. In a folder ``model.safetensors.index.json`` says
            which files belong together; without one, all do.

    Attributes:
        names: The tensors.
        texts: Of each file the texts that its writer added.

    Raises:
        CheckpointDamagedError: Files are not whole, tensors are in two files, or files and index
            disagree; all that is wrong is in it.
        MissingExtraError: safetensors is not installed.
    """

    def __init__(self, path: pathlib.Path) -> None:
        self._safetensors = require("safetensors", "safetensors")
        self.texts: dict[str, dict[str, str]] = {}
        self._tensors: dict[str, np.ndarray] = {}
        self._mapped: list[mmap.mmap] = []
        self._looked_at = 0

        files = sorted(path.glob(f"*{SUFFIX}")) if path.is_dir() else [path]
        index = path / INDEX if path.is_dir() else path
        weight_map: dict[str, str] = {}
        if index.name.endswith(INDEX_SUFFIX) and os.path.lexists(index):
            with refuse_unreadable(path, index.name):
                # Opening a pipe would never end.
                text = index.read_bytes() if index.is_file() else b""
                weight_map = dict(json.loads(text)["weight_map"])
                for name in weight_map.values():
                    if pathlib.Path(name).name != name:
                        refuse_damage(path, {index.name: f"it names {name!r}, no file beside it"})
                files = sorted({index.parent / name for name in weight_map.values()})

        damaged: dict[str, str] = {}
        homes: dict[str, str] = {}
        for file in files:
            try:
                tensors = self._open_file(file)
            except (self._safetensors.SafetensorError, *UNREADABLE) as error:
                damaged[file.name] = f"it is no whole safetensors file: {error!s:.100}"
                continue
            for name in tensors.keys() & homes.keys():
                damaged[name] = f"{homes[name]} and {file.name} have it; give the path of one"
            homes |= dict.fromkeys(tensors, file.name)
            self._tensors |= tensors
        for name, home in weight_map.items() ^ homes.items() if weight_map else ():
            if home not in damaged:
                damaged[name] = f"{index.name} and {home} disagree on whether it is in that file"
        refuse_damage(path, damaged)
        self.names = tuple(self._tensors)

    def _open_file(self, file: pathlib.Path) -> dict[str, np.ndarray]:
        if not file.is_file():
            raise OSError("it is missing, or no file")
        with file.open("rb") as opened:
            mapped = mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ)
        if mapped[:12] == b"version http":
            raise ValueError("it is a pointer of Git LFS to one; run git lfs pull")
        with self._safetensors.safe_open(file, framework="numpy"):
            start = 8 + int.from_bytes(mapped[:8], "little")
        header = json.loads(mapped[8:start])
        self.texts[file.name] = header.pop("__metadata__", None) or {}
        self._mapped.append(mapped)
        tensors = {}
        for name, entry in header.items():
            if entry["dtype"] not in DTYPES:
                raise ValueError(f"{name} has dtype {entry['dtype']}, which is not read")
            dtype, first = np.dtype(DTYPES[entry["dtype"]]), start + entry["data_offsets"][0]
            tensors[name] = np.ndarray(entry["shape"], dtype, mapped, first)
        return tensors

    def open(self, names: Iterable[str]) -> dict[str, tuple[tuple[int, ...], str]]:
        """The shape and dtype of tensors, which are open already."""
        tensors = {name: self._tensors[name] for name in names}
        return {name: (tensor.shape, tensor.dtype.name) for name, tensor in tensors.items()}

    def chunk(self, name: str) -> tuple[int, ...]:
        """As ``Store.chunk``: nothing is packed."""
        return (1,) * self._tensors[name].ndim

    def read(
        self, name: str, index: tuple[slice, ...], shape: tuple[int, ...] | None = None
    ) -> np.ndarray:
        """A part of a tensor, in the memory of its file; see ``Store.read``."""
        tensor = self._tensors[name] if shape is None else self._tensors[name].reshape(shape)
        # All columns of these rows, as a page holds many of them. Threads may lose a count.
        self._looked_at += tensor[index[:1]].nbytes
        if self._looked_at > _MAPPED_BYTES and hasattr(mmap, "MADV_DONTNEED"):
            self._looked_at = 0
            # Whoever still looks at pages gets them again from the system's cache.
            for mapped in self._mapped:
                mapped.madvise(mmap.MADV_DONTNEED)
        return tensor[index]
