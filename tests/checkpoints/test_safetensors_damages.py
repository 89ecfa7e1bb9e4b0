"""Damaged safetensors files are refused by the name of a tensor or a file, or read to the bit.

A kind of damage is a function that damages a folder, and returns the tensors or files concerned.
Numbers are changed where there are checksums only. ``DAMAGES=100 pytest`` draws more of them.
"""

import hashlib
import json
import os
import warnings

import jax.numpy as jnp
import numpy as np
from penzai import pz

import penzai_shard as pzs
from tests.checkpoints.safetensors_files import (
    INDEX,
    draw,
    make_texts,
    read_file,
    write_file,
    write_one,
    write_parts,
)
from tests.checkpoints.test_damages import TEXTS, change_field, choose, draw_verdicts

COUNT = int(os.environ.get("DAMAGES", "30"))
# The first file of two has every other tensor.
AXES = {"square": "ab", "half": "ac", "other_square": "ab", "mlp.bias": "a", "empty": "ec"}
SIZES = {"a": 8, "b": 8, "c": 16, "e": 0}


def make_tensors(seed):
    rng = np.random.default_rng(seed)
    shapes = {name: [SIZES[axis] for axis in axes] for name, axes in AXES.items()}
    dtypes = {"half": "bfloat16", "mlp.bias": "int32"}
    return {n: draw(rng, shape, dtypes.get(n, "float32")) for n, shape in shapes.items()}


def choose_file(rng, copy):
    return choose(rng, sorted(copy.glob("*.safetensors")))


def choose_tensor(rng, header):
    return choose(rng, [name for name in header if name != "__metadata__"])


# Files


def rewrite_file(rng, copy, twin):
    file = choose(rng, sorted(copy.iterdir()))
    content = file.read_bytes()
    others = [choose(rng, sorted(folder.iterdir())).read_bytes() for folder in (copy, twin)]
    cuts = [content[:n] for n in (0, 4, 8, 40, len(content) // 2, -1)]
    grown = [content + more for more in (b"\0", b"\n", content, bytes(512))]
    file.write_bytes(choose(rng, choose(rng, [cuts, grown, others, TEXTS])))
    return file


def replace_file(rng, copy, twin):
    """By nothing, or by what is no file; some of it would never end if it were read."""
    file = choose(rng, sorted(copy.iterdir()))
    file.unlink()
    make = choose(rng, [None, os.mkfifo, os.mkdir, "nowhere", "/dev/zero", "."])
    if make is not None:
        file.symlink_to(make) if isinstance(make, str) else make(file)
    return file


# Headers


def change_length_of_header(rng, copy, twin):
    file = choose_file(rng, copy)
    content = file.read_bytes()
    length = int.from_bytes(content[:8], "little")
    other = choose(rng, [0, 2, length - 8, length + 8, 2**31, 2**40, 2**63, 2**64 - 1])
    file.write_bytes(other.to_bytes(8, "little") + content[8:])
    return file


def flip_byte_of_header(rng, copy, twin):
    file = choose_file(rng, copy)
    content = bytearray(file.read_bytes())
    content[int(rng.integers(8, 8 + int.from_bytes(content[:8], "little")))] ^= 1 << rng.integers(8)
    file.write_bytes(content)
    return file


SHIFTS = [(-4, -4), (4, 4), (0, 2**40), (0, -4), (-(2**63), 0)]
FIELDS = {
    "data_offsets": [[8, 0], [2**63, 2**64], [0], [0, 8, 8], None],
    "dtype": ["F33", "I64", "F64", "F4", "F8_E8M0", "I32", "F16", None, 3],
    "shape": [[-1], [2**62, 4], "8, 8", [1.5], [[8]], [4, 16], [64, 1], [8, 8, 1], None],
}


def change_entry(rng, copy, twin):
    file = choose_file(rng, copy)
    header, data = read_file(file)
    name = choose_tensor(rng, header)
    entry, field = header[name], choose(rng, FIELDS)
    shifted = [a + b for a, b in zip(entry["data_offsets"], choose(rng, SHIFTS), strict=True)]
    others = [{**entry, field: value} for value in FIELDS[field]]
    others += [{k: v for k, v in entry.items() if k != field}, None]
    others += [{**entry, "data_offsets": shifted}] * 3
    del header[name]
    if rng.integers(10):
        header[choose(rng, [*[name] * 9, f"{name}x"])] = choose(rng, others)
    write_file(file, header, data)
    return file


def change_header(rng, copy, twin):
    file = choose_file(rng, copy)
    header, data = read_file(file)
    texts = header.pop("__metadata__", {})
    header = choose(rng, [change_field(rng, header), [header], None, b"[" * 100_000])
    if isinstance(header, dict) and texts:
        header["__metadata__"] = texts
    write_file(file, header, data)
    return file


def write_name_twice(rng, copy, twin):
    file = choose_file(rng, copy)
    header, data = read_file(file)
    name = choose_tensor(rng, header)
    own, other = (str(header[key]).replace("'", '"') for key in (name, choose_tensor(rng, header)))
    text = choose(rng, [own, other, own.replace("F32", "I32")])
    write_file(file, (json.dumps(header)[:-1] + f', "{name}": {text}}}').encode(), data)
    return file


# The index


def change_index(rng, copy, twin):
    if not (copy / INDEX).exists():
        return rewrite_file(rng, copy, twin)
    content = json.loads((copy / INDEX).read_bytes())
    where = content["weight_map"]
    name = choose(rng, where)
    others = ["model-00003-of-00003.safetensors", "../other.safetensors", "/dev/zero", "", "."]
    others += [None, ["a"], {}, 3, "config.json", *where.values()]
    edits = [lambda: where.update({name: choose(rng, others)})] * 3
    edits += [lambda: where.pop(name), lambda: where.update(square2=where[name])]
    choose(rng, edits)()
    wrong = [[content], None, where, {"weight_map": {}}, {"weight_map": [name]}]
    (copy / INDEX).write_text(json.dumps(choose(rng, [*[content] * 4, *wrong])))
    return copy / INDEX


# What this library says


def change_texts(rng, copy, twin):
    """In one file, or in all of them, with a checksum that is right or is not."""
    files = sorted(copy.glob("*.safetensors"))
    header, _ = read_file(files[0])
    texts = header["__metadata__"]
    section = change_field(rng, json.loads(texts["penzai_shard"]))
    if rng.integers(2) and isinstance(section, dict):
        section.pop("checksum", None)
        text = json.dumps(section, sort_keys=True)
        section["checksum"] = hashlib.sha256(text.encode()).hexdigest()[:16]
    junk = ["", "null", "[1]", *[json.dumps(section)] * 4]
    texts["penzai_shard"] = choose(rng, junk)
    for file in choose(rng, [files, files[:1]]):
        header, data = read_file(file)
        header["__metadata__"] = choose(rng, [texts, texts, {"format": "pt"}, None])
        write_file(file, {k: v for k, v in header.items() if v is not None}, data)
    return files[0]


def change_numbers(rng, copy, twin):
    file = choose_file(rng, copy)
    content = bytearray(file.read_bytes())
    start = len(content) - len(read_file(file)[1])
    content[int(rng.integers(start, len(content)))] ^= 1 << rng.integers(8)
    file.write_bytes(content)
    return file


def exchange_tensors(rng, copy, twin):
    """Of one shape and dtype, in one file."""
    header, data = read_file(file := copy / "model-00001-of-00002.safetensors")
    header["square"], header["other_square"] = header["other_square"], header["square"]
    write_file(file, header, data)
    return "square"


KINDS = [rewrite_file, replace_file, change_length_of_header, flip_byte_of_header, change_entry]
KINDS += [change_entry, change_header, write_name_twice, change_index]
KINDS_OF_OURS = [change_texts, change_texts, change_numbers, change_numbers, exchange_tensors]


def test_restore_params_of_damaged_safetensors(tmp_path):
    folders = {name: tmp_path / name for name in ("one", "several", "ours", "twin")}
    for seed, folder in zip((1, 1, 1, 2), folders.values(), strict=True):
        folder.mkdir()
        tensors = make_tensors(seed)
        texts = make_texts(tensors, AXES) if folder.name in ("ours", "twin") else None
        write = write_one if folder.name == "one" else write_parts
        write(folder, tensors, texts)
    *judged, ours, _ = folders.values()

    def kinds_of(folder):
        return KINDS + KINDS_OF_OURS if folder == ours else KINDS

    tensors = make_tensors(1)
    arrays = {name: pz.nx.wrap(jnp.asarray(x), *AXES[name]) for name, x in tensors.items()}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", pzs.ShardingWarning)
        draw_verdicts(COUNT, [*judged, ours, ours], arrays, kinds_of)
