"""Writes and edits safetensors files by what their format says."""

import json

import numpy as np

from penzai_shard.checkpoints.records import ArrayRecord, write_texts
from penzai_shard.checkpoints.value_checksums import compute_checksums

CODES = {
    "bfloat16": "BF16",
    "float16": "F16",
    "float32": "F32",
    "float64": "F64",
    "float8_e4m3fn": "F8_E4M3",
    "int32": "I32",
}
INDEX = "model.safetensors.index.json"


def write_file(path, header, data):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)


def read_file(path):
    content = path.read_bytes()
    end = 8 + int.from_bytes(content[:8], "little")
    return json.loads(content[8:end]), content[end:]


def write_tensors(path, tensors, texts=None):
    header, data = {}, b""
    if texts:
        header["__metadata__"] = texts
    for name, array in tensors.items():
        offsets = [len(data), len(data) + array.nbytes]
        dtype = CODES[array.dtype.name]
        header[name] = {"dtype": dtype, "shape": array.shape, "data_offsets": offsets}
        data += array.tobytes()
    write_file(path, header, data)


def write_one(folder, tensors, texts=None):
    write_tensors(folder / "model.safetensors", tensors, texts)


def write_parts(folder, tensors, texts=None):
    """Two files and their index."""
    names, weight_map = [*tensors], {}
    for i in range(2):
        file = f"model-0000{i + 1}-of-00002.safetensors"
        weight_map |= dict.fromkeys(names[i::2], file)
        write_tensors(folder / file, {name: tensors[name] for name in names[i::2]}, texts)
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def make_texts(tensors, axes):
    """What this library says of tensors in each of its files."""
    sums = compute_checksums(tensors)
    return write_texts(
        {
            name: ArrayRecord(array.shape, array.dtype.name, tuple(axes[name]), values=sums[name])
            for name, array in tensors.items()
        }
    )


def draw(rng, shape, dtype="float32"):
    return np.asarray(rng.normal(size=shape) * 50, dtype)
