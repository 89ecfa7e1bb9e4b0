"""Damaged safetensors files are refused by the name of a tensor or a file, or read to the bit.

A kind of damage is a function that damages a folder, and returns the tensors or files concerned.
Numbers are changed where there are checksums only. ``DAMAGES=100 pytest`` draws more of them.
"""

import hashlib
import json
import os
import shutil
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
    write_parts,
    write_tensors,
)
from tests.checkpoints.test_damages import TEXTS, change_field, choose
from tests.checkpoints.trees import contents

COUNT = int(os.environ.get("DAMAGES", "30"))
WIDE = pzs.make_mesh({"data": 4, "model": 2})
# The first file of two has every other tensor.
AXES = {"square": "ab", "half": "ac", "other_square": "ab", "mlp.bias": "a", "empty": "ec"}
SIZES = {"a": 8, "b": 8, "c": 16, "e": 0}


def make_tensors(seed):
    rng = np.random.default_rng(seed)
    shapes = {name: [SIZES[axis] for axis in axes] for name, axes in AXES.items()}
    dtypes = {"half": "bfloat16", "mlp.bias": "int32"}
    return {n: draw(rng, shape, dtypes.get(n, "float32")) for n, shape in shapes.items()}


def make_arrays(tensors):
    return {name: pz.nx.wrap(jnp.asarray(x), *AXES[name]) for name, x in tensors.items()}


def judge(folder, tensors, damage, rng):
    """What restoring a damaged copy does: "exact", "refused", or what is wrong with it."""
    arrays = make_arrays(tensors)
    copy = shutil.copytree(folder, folder.with_name("copy"))
    try:
        concerned = damage(rng, copy)
        restored = pzs.restore_params(copy, arrays, WIDE, {"a": "data"})
    except (
        pzs.CheckpointDamagedError,
        pzs.CheckpointMismatchError,
        pzs.CheckpointNotFoundError,
    ) as error:
        said = [problem.path for problem in error.problems]
        is_named = any(name in path for name in (*concerned, str(copy)) for path in said)
        return "refused" if is_named else f"{damage.__name__}: names {said}, not {concerned}"
    except Exception as error:
        return f"{damage.__name__} raises {error!r}"
    finally:
        shutil.rmtree(copy)
    return "exact" if contents(restored) == contents(arrays) else damage.__name__


def choose_file(rng, copy):
    return choose(rng, sorted(copy.glob("*.safetensors")))


def choose_tensor(rng, header):
    return choose(rng, [name for name in header if name != "__metadata__"])


# Files


def rewrite_file(rng, copy):
    file = choose(rng, sorted(copy.iterdir()))
    content, other = file.read_bytes(), choose(rng, sorted(copy.iterdir())).read_bytes()
    cuts = [content[:n] for n in (0, 4, 8, 40, len(content) // 2, -1)]
    grown = [content + more for more in (b"\0", b"\n", content, bytes(512))]
    file.write_bytes(choose(rng, choose(rng, [cuts, cuts, grown, [other], TEXTS])))
    return [file.name, *AXES]


def replace_file(rng, copy):
    """By nothing, or by what is no file; some of it would never end if it were read."""
    file = choose(rng, sorted(copy.iterdir()))
    file.unlink()
    make = choose(rng, [None, os.mkfifo, os.mkdir, "nowhere", "/dev/zero", "."])
    if make is not None:
        file.symlink_to(make) if isinstance(make, str) else make(file)
    return [file.name, *AXES]


# Headers


def change_length_of_header(rng, copy):
    file = choose_file(rng, copy)
    content = file.read_bytes()
    length = int.from_bytes(content[:8], "little")
    other = choose(rng, [0, 2, length - 8, length + 8, 2**31, 2**40, 2**63, 2**64 - 1])
    file.write_bytes(other.to_bytes(8, "little") + content[8:])
    return [file.name]


def flip_byte_of_header(rng, copy):
    file = choose_file(rng, copy)
    content = bytearray(file.read_bytes())
    content[int(rng.integers(8, 8 + int.from_bytes(content[:8], "little")))] ^= 1 << rng.integers(8)
    file.write_bytes(content)
    return [file.name, *AXES]


def shift(first, last):
    def edit(header, name):
        start, end = header[name]["data_offsets"]
        header[name]["data_offsets"] = [start + first, end + last]

    return edit


def put(field, *values):
    def edit(header, name):
        others = [value for value in values if value != header[name][field]]
        header[name][field] = others[0]

    return edit


EDITS = [
    *(shift(*ends) for ends in [(-4, -4), (4, 4), (0, 2**40), (0, -4), (-(2**63), 0)]),
    *(put("data_offsets", ends) for ends in [[8, 0], [2**63, 2**64], [0], [0, 8, 8], None]),
    *(put("dtype", code) for code in ["F33", "I64", "F64", "F4", "F8_E8M0", None, 3]),
    put("dtype", "I32", "F32"),
    put("dtype", "BF16", "F16"),
    *(put("shape", shape) for shape in [[-1], [2**62, 4], "8, 8", [1.5], [[8]], None]),
    put("shape", [4, 16], [64, 2]),
    lambda header, name: header[name]["shape"].append(1),
    lambda header, name: header[name].pop(choose(np.random.default_rng(0), header[name])),
    lambda header, name: header.update({f"{name}x": header.pop(name)}),
    lambda header, name: header.pop(name),
    lambda header, name: header.update({name: None}),
]


def change_entry(rng, copy):
    file = choose_file(rng, copy)
    header, data = read_file(file)
    name = choose_tensor(rng, header)
    choose(rng, EDITS)(header, name)
    write_file(file, header, data)
    return [file.name, name]


def change_header(rng, copy):
    file = choose_file(rng, copy)
    header, data = read_file(file)
    texts = header.pop("__metadata__", {})
    header = choose(rng, [change_field(rng, header), [header], None, b"[" * 100_000])
    if isinstance(header, dict) and texts:
        header["__metadata__"] = texts
    write_file(file, header, data)
    return [file.name, *AXES]


def write_name_twice(rng, copy):
    file = choose_file(rng, copy)
    header, data = read_file(file)
    name = choose_tensor(rng, header)
    own, other = (str(header[key]).replace("'", '"') for key in (name, choose_tensor(rng, header)))
    text = choose(rng, [own, other, own.replace("F32", "I32")])
    write_file(file, (json.dumps(header)[:-1] + f', "{name}": {text}}}').encode(), data)
    return [file.name, name]


# The index


def change_index(rng, copy):
    if not (copy / INDEX).exists():
        return rewrite_file(rng, copy)
    content = json.loads((copy / INDEX).read_bytes())
    where = content["weight_map"]
    name = choose(rng, where)
    others = ["model-00003-of-00003.safetensors", "../other.safetensors", "/dev/zero", "", "."]
    others += [None, ["a"], {}, 3, "config.json", *where.values()]
    edits = [lambda: where.update({name: choose(rng, others)})] * 3
    edits += [lambda: where.pop(name), lambda: where.update(other=where[name])]
    choose(rng, edits)()
    wrong = [change_field(rng, content), [content], None, where, {"weight_map": {}}]
    (copy / INDEX).write_text(json.dumps(choose(rng, [*[content] * 4, *wrong])))
    return [INDEX, name, "other", "model-0000", *AXES]


# What this library says


def change_texts(rng, copy):
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
    return [*(file.name for file in files), *AXES]


def change_numbers(rng, copy):
    file = choose_file(rng, copy)
    content = bytearray(file.read_bytes())
    start = len(content) - len(read_file(file)[1])
    content[int(rng.integers(start, len(content)))] ^= 1 << rng.integers(8)
    file.write_bytes(content)
    return [*AXES]


def exchange_tensors(rng, copy):
    """Of one shape and dtype, in one file."""
    header, data = read_file(file := copy / "model-00001-of-00002.safetensors")
    header["square"], header["other_square"] = header["other_square"], header["square"]
    write_file(file, header, data)
    return ["square", "other_square"]


KINDS = [rewrite_file, replace_file, change_length_of_header, flip_byte_of_header, change_entry]
KINDS += [change_entry, change_header, write_name_twice, change_index]
KINDS_OF_OURS = [change_texts, change_texts, change_numbers, change_numbers, exchange_tensors]


def test_restore_params_of_damaged_safetensors(tmp_path):
    tensors = make_tensors(1)
    folders = {name: tmp_path / name for name in ("one", "several", "ours")}
    for folder in folders.values():
        folder.mkdir()
    write_tensors(folders["one"] / "model.safetensors", tensors)
    write_parts(folders["several"], tensors)
    write_parts(folders["ours"], tensors, make_texts(tensors, AXES))

    verdicts = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", pzs.ShardingWarning)
        for number in range(COUNT):
            rng = np.random.default_rng([1, number])
            name = choose(rng, ["one", "several", "ours", "ours"])
            kinds = KINDS + KINDS_OF_OURS if name == "ours" else KINDS
            damage = kinds[number % len(kinds)]
            verdicts.append(judge(folders[name], tensors, damage, rng))
        assert {*verdicts} == {"exact", "refused"}
        # A judge that takes everything for exact would find nothing either.
        assert verdicts.count("refused") > COUNT // 2
        for folder in folders.values():
            assert judge(folder, tensors, lambda *_: (), None) == "exact"
