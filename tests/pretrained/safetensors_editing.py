"""Files of safetensors and their index, written and edited by what the format says alone."""

import json
import pathlib
from typing import Any

import numpy as np

from tests.checkpointing.checkpoint_editing import as_text

INDEX = "model.safetensors.index.json"


def read_file(path: pathlib.Path) -> tuple[dict[str, Any], bytes]:
    """Header and data of a file."""
    content = path.read_bytes()
    length = int.from_bytes(content[:8], "little")
    return json.loads(content[8 : 8 + length]), content[8 + length :]


def write_file(path: pathlib.Path, header: Any, data: bytes) -> None:
    """Writes header and data of a file."""
    text = header if isinstance(header, bytes) else as_text(header).encode()
    text += b" " * (-len(text) % 8)
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)


def write_tensors(path: pathlib.Path, tensors: dict[str, np.ndarray]) -> None:
    """Writes float32 tensors."""
    header, data = {}, b""
    for name, array in tensors.items():
        offsets = [len(data), len(data) + array.nbytes]
        header[name] = {"dtype": "F32", "shape": list(array.shape), "data_offsets": offsets}
        data += array.astype("<f4").tobytes()
    write_file(path, header, data)


def write_parts(folder: pathlib.Path, tensors: dict[str, np.ndarray]) -> None:
    """Writes two files and their index, as Hugging Face does."""
    names = list(tensors)
    parts = {"model-00001-of-00002.safetensors": names[::2]}
    parts["model-00002-of-00002.safetensors"] = names[1::2]
    for file, members in parts.items():
        write_tensors(folder / file, {name: tensors[name] for name in members})
    size = sum(array.nbytes for array in tensors.values())
    where = {name: file for file, members in parts.items() for name in members}
    content = {"metadata": {"total_size": size}, "weight_map": dict(sorted(where.items()))}
    (folder / INDEX).write_text(json.dumps(content, indent=2))
