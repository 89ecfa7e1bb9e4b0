"""A damaged checkpoint is refused by the name of an array or a file, or restored to the bit.

A kind of damage is a function that damages a copy, and returns the array or file concerned. Edits
make every checksum anew that can be made without the arrays' numbers. ``DAMAGES=416 pytest`` draws
more of them.
"""

import hashlib
import json
import os
import re
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import tensorstore as ts
from hypothesis import given, settings
from hypothesis import strategies as st
from penzai import pz

import penzai_shard as pzs
from penzai_shard.checkpoints.value_checksums import sum_piece
from tests.checkpoints.trees import contents

WIDE = pzs.make_mesh({"data": 4, "model": 2})
COUNT = int(os.environ.get("DAMAGES", "60"))
METADATA = "_CHECKPOINT_METADATA"
RULES = {"a": "data", "b": "model"}
SHAPES = {
    "square": ("float32", {"a": 8, "b": 8}),
    "other_square": ("float32", {"b": 8, "a": 8}),
    "half": ("bfloat16", {"c": 8, "a": 16}),
    "mlp/bias": ("int32", {"a": 8}),
    # Orbax stores each device's part of it as a chunk.
    "large": ("float32", {"a": 64, "b": 256}),
}
NAMES = [*SHAPES, "key"]
ERRORS = pzs.CheckpointDamagedError, pzs.CheckpointMismatchError, pzs.CheckpointNotFoundError


def make_arrays(seed):
    rng = np.random.default_rng(seed)
    arrays = {"empty": pz.nx.zeros({"a": 0, "c": 3}), "key": jax.random.key(seed)}
    for name, (dtype, axes) in SHAPES.items():
        numbers = jnp.asarray(rng.normal(size=(*axes.values(),)) * 50, dtype)
        arrays[name] = pz.nx.wrap(numbers, *axes)
    return pzs.place(arrays, WIDE, RULES)


def judge(folder, arrays, damage, rng):
    """What restoring a damaged copy does: "exact", "refused", or what is wrong with it."""
    copy = shutil.copytree(folder, folder.with_name("copy"))
    try:
        concerned = damage(rng, copy, folder.with_name("twin"))
        # A damaged file may concern any array, and a damaged index any file.
        is_name = isinstance(concerned, str)
        names = [concerned] if is_name else [concerned.name, *arrays, ".safetensors", str(copy)]
        restored = pzs.restore_params(copy, arrays, WIDE, RULES)
    except ERRORS as error:
        said = [problem.path for problem in error.problems]
        is_named = any(name in path for name in names for path in said)
        return "refused" if is_named else f"{damage.__name__}: names {said}, not {names}"
    except Exception as error:
        return f"{damage.__name__} raises {error!r}"
    finally:
        shutil.rmtree(copy)
    return "exact" if contents(restored) == contents(arrays) else damage.__name__


def choose(rng, options):
    options = list(options)
    return options[int(rng.integers(len(options)))]


# Files

TEXTS = [b"", b"[" * 100_000, "{}".encode("utf-16"), b"NaN", b"null", b"[1]", b"{}", b"1" * 20_000]


def find_files(folder):
    return sorted(path for path in folder.rglob("*") if path.is_file())


def rewrite_file(rng, copy, twin):
    file = choose(rng, find_files(copy))
    content = file.read_bytes()
    others = [choose(rng, find_files(folder)).read_bytes() for folder in (copy, twin)]
    cuts = [content[:n] for n in (0, 4, 8, 40, len(content) // 2, -1)]
    grown = [content + more for more in (b"\0", b"\n", content, bytes(512))]
    file.write_bytes(choose(rng, choose(rng, [cuts, grown, others, TEXTS])))
    return file


def change_bytes(rng, copy, twin):
    file = choose(rng, find_files(copy))
    changed = bytearray(file.read_bytes())
    for place in rng.integers(len(changed), size=choose(rng, [1, 4, 64]) if changed else 0):
        changed[place] ^= int(rng.integers(1, 256))
    file.write_bytes(changed)
    return file


def replace_path(rng, copy, twin):
    """By nothing, or by what is no file; some of it would never end if it were read."""
    path = choose(rng, sorted(copy.rglob("*")))
    (shutil.rmtree if path.is_dir() else os.remove)(path)
    make = choose(rng, [None, os.mkfifo, os.mkdir, "nowhere", "/dev/zero", "."])
    if make is not None:
        path.symlink_to(make) if isinstance(make, str) else make(path)
    return path


def take_path_of_another_checkpoint(rng, copy, twin):
    name = choose(rng, ["state", "state/d", "state/ocdbt.process_0", METADATA, "state/_METADATA"])
    if (twin / name).is_dir():
        shutil.rmtree(copy / name)
    (shutil.copytree if (twin / name).is_dir() else shutil.copy)(twin / name, copy / name)
    return copy / name


# The storage of arrays, edited with the library that wrote it


def open_storage(path):
    """A mapping of keys: ``large/c/0/1`` for a chunk, ``large/zarr.json``."""
    base = {"driver": "file", "path": f"{path}/state/"}
    return ts.KvStore.open({"driver": "ocdbt", "base": base}).result()


def change_chunks(rng, copy, twin):
    """Exchanged, flipped, cut, replaced by junk, removed, or those of another array."""
    storage, name = open_storage(copy), choose(rng, [*NAMES, "large"])
    chunks = sorted(key.decode() for key in storage.list().result() if b"zarr.json" not in key)
    one, other = (choose(rng, [c for c in chunks if c.startswith(f"{name}/")]) for _ in range(2))
    content, flipped = storage[one], bytearray(storage[one])
    flipped[int(rng.integers(len(content)))] ^= 1 << int(rng.integers(8))
    junk = [bytes(flipped), content[: len(content) // 2], rng.bytes(len(content)), None]
    others = [open_storage(twin)[one], storage["square/c/0/0"], storage[other]]
    storage[other], storage[one] = content, choose(rng, junk + others)
    return name


# JSON, any field of which gets another value, or is gone

VALUES = [None, -1, [-8, 8], 2**70, float("inf"), 1.5, True, "abc", "", [], {}, [[["a"]]]]
VALUES += ["uint32", "float33", ["a", "other"], [0, 3], {"endian": "big"}]


def change_field(rng, content):
    kinds = (type(None), list) if rng.integers(2) else type(None)
    leaves, structure = jax.tree.flatten(content, lambda value: isinstance(value, kinds))
    leaves[rng.integers(len(leaves))] = choose(rng, VALUES + leaves)
    text = json.dumps(structure.unflatten(leaves))
    name = choose(rng, [None, None, None, *re.findall(r'"\w+":', text)])
    return json.loads(text.replace(name, '"other":', 1) if name else text)


def sign(section):
    """Gives a section the checksum that it would have been saved with."""
    section.pop("checksum", None)
    text = json.dumps(section, sort_keys=True)
    section["checksum"] = hashlib.sha256(text.encode()).hexdigest()[:16]


def change_description(rng, copy, twin):
    storage, name = open_storage(copy), choose(rng, NAMES)
    content = change_field(rng, json.loads(storage[f"{name}/zarr.json"]))
    storage[f"{name}/zarr.json"] = json.dumps(content).encode()
    return name


def change_metadata(rng, copy, twin):
    """What is said of the arrays, with a checksum that is right."""
    file = copy / METADATA
    content = json.loads(file.read_bytes())
    section = change_field(rng, content["custom_metadata"]["penzai_shard"])
    if "checksum" in section:
        sign(section)
    content["custom_metadata"]["penzai_shard"] = section
    file.write_text(json.dumps(content))
    return file


KINDS = [rewrite_file, change_bytes, replace_path, take_path_of_another_checkpoint]
KINDS += [change_chunks, change_chunks, change_description, change_metadata]


def draw_verdicts(count, folders, arrays, kinds_of):
    """Of so many damages, of which each folder has its kinds."""
    verdicts = []
    for number in range(count):
        rng = np.random.default_rng([1, number])
        folder = choose(rng, folders)
        kinds = kinds_of(folder)
        verdicts.append(judge(folder, arrays, kinds[number % len(kinds)], rng))
    assert {*verdicts} == {"exact", "refused"}
    # A judge that takes everything for exact would find nothing either.
    assert verdicts.count("refused") > count // 2
    assert {judge(x, arrays, lambda rng, copy, twin: copy, None) for x in folders} == {"exact"}


def test_restore_params_of_damaged_checkpoints(tmp_path):
    for seed, name in enumerate(["params", "twin"], 1):
        pzs.save_params(tmp_path / name, make_arrays(seed))
    draw_verdicts(COUNT, [tmp_path / "params"], make_arrays(1), lambda folder: KINDS)


# Checksums


WORDS = st.integers(0, 3) | st.integers(0, 2**32 - 1)


@settings(max_examples=200)
@given(st.data(), st.lists(WORDS, min_size=2, max_size=64))
def test_sum_piece_tells_exchanged_and_other_words(data, words):
    others = st.lists(WORDS, min_size=len(words), max_size=len(words))
    other = data.draw(st.permutations(words) | others)
    sums = {sum_piece(np.array(x, np.uint32), (0,), (len(x),)) for x in (words, other)}
    assert len(sums) == (1 if other == words else 2)
