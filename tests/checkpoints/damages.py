"""Damages of every kind to a saved checkpoint, drawn from a seed, and verdicts on restoring it.

A kind is a function that damages a copy, and returns the arrays and files concerned: a refusal must
name one of them. Edits are written from Orbax' formats, and make every checksum anew that can be
made without the arrays' numbers. The judge keeps what was saved as bytes.
"""

import contextlib
import hashlib
import json
import os
import pathlib
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import tensorstore as ts
from penzai import pz

import penzai_shard as pzs

METADATA = "_CHECKPOINT_METADATA"
RULES = {"a": "data", "b": "model"}
SHAPES = {
    "square": ("float32", {"a": 8, "b": 8}),
    "other_square": ("float32", {"b": 8, "a": 8}),
    "half": (jnp.bfloat16, {"c": 8, "a": 16}),
    "mlp/bias": ("int32", {"a": 8}),
    # Orbax stores each device's part of it as a chunk.
    "large": ("float32", {"a": 64, "b": 256}),
}


def make_arrays(seed):
    rng = np.random.default_rng(seed)
    arrays = {
        name: pz.nx.wrap(jnp.asarray(rng.normal(size=(*axes.values(),)) * 50, dtype)).tag(*axes)
        for name, (dtype, axes) in SHAPES.items()
    }
    return {**arrays, "empty": pz.nx.zeros({"a": 0, "c": 3}), "key": jax.random.key(seed)}


def contents(arrays):
    """Axes, dtype and bits of every array."""
    key = jax.random.key_data(arrays["key"]).tobytes()
    return key, [
        (name, dict(array.named_shape), str(array.dtype), np.asarray(array.data_array).tobytes())
        for name, array in arrays.items()
        if name != "key"
    ]


class Checkpoint:
    """A checkpoint to be damaged, and another one of the same model."""

    def __init__(self, folder):
        self.mesh = pzs.make_mesh({"data": 4, "model": 2})
        self.arrays, other = (pzs.place(make_arrays(i), self.mesh, RULES) for i in (1, 2))
        self.path = pathlib.Path(pzs.save_params(folder / "params", self.arrays))
        self.twin = pathlib.Path(pzs.save_params(folder / "twin", other))
        self.copy = folder / "copy"
        self.names = sorted([*SHAPES, "key"])

    def judge(self, damage, rng):
        """What restoring a damaged copy does: "exact", "refused", or what is wrong with it."""
        shutil.copytree(self.path, self.copy)
        try:
            concerned = damage(rng, self)
            restored = pzs.restore_params(self.copy, self.arrays, self.mesh, RULES)
        except pzs.ShardingError as error:
            said = [problem.path for problem in error.problems]
            is_named = any(name in path for name in concerned for path in said)
            return "refused" if is_named else f"names {said}, and not {concerned}"
        except Exception as error:
            return f"raises {error!r}"
        finally:
            shutil.rmtree(self.copy)
        return "exact" if contents(restored) == contents(self.arrays) else "WRONG"

    def files(self):
        return sorted(path for path in self.copy.rglob("*") if path.is_file())

    def concern(self, path):
        """A damaged file may concern any array."""
        return [str(path.relative_to(self.copy)), *self.arrays]


def draw_verdicts(checkpoint, seed, count):
    """The kind and verdict of so many damages, as equally many of every kind as possible."""
    for number in range(count):
        kind = KINDS[number % len(KINDS)]
        yield kind.__name__, checkpoint.judge(kind, np.random.default_rng([seed, number]))


def choose(rng, options):
    options = list(options)
    return options[int(rng.integers(len(options)))]


# Files


def bytes_flipped(rng, checkpoint):
    file = choose(rng, checkpoint.files())
    content = bytearray(file.read_bytes())
    for _ in range(choose(rng, [1, 1, 4, 64]) if content else 0):
        content[int(rng.integers(len(content)))] ^= int(rng.integers(1, 256))
    file.write_bytes(content)
    return checkpoint.concern(file)


TEXTS = [b"[" * 100_000, "{}".encode("utf-16"), b"NaN", b"null", b"[1]", b"{}", b"1" * 20_000]


def file_rewritten(rng, checkpoint):
    file, other = choose(rng, checkpoint.files()), choose(rng, checkpoint.files())
    content = file.read_bytes()
    cuts = [content[: int(rng.integers(len(content) + 1))], content[:-1], b""]
    grown = [content + bytes(512), content * 2, bytes(len(content)), content + b"\n"]
    file.write_bytes(choose(rng, choose(rng, [cuts, grown, TEXTS, [other.read_bytes()]])))
    return checkpoint.concern(file)


def path_removed(rng, checkpoint):
    path = choose(rng, sorted(checkpoint.copy.rglob("*")))
    (shutil.rmtree if path.is_dir() else os.remove)(path)
    return checkpoint.concern(path)


def no_file(rng, checkpoint):
    """Something stands in place of a file; some of it would never end if it were read."""
    file = choose(rng, checkpoint.files())
    file.unlink()
    make = choose(rng, [os.mkfifo, os.mkdir, "nowhere", "/dev/zero", "."])
    file.symlink_to(make) if isinstance(make, str) else make(file)
    return checkpoint.concern(file)


def path_of_another_checkpoint(rng, checkpoint):
    name = choose(rng, ["state", "state/d", "state/ocdbt.process_0", METADATA, "state/_METADATA"])
    here, there = checkpoint.copy / name, checkpoint.twin / name
    if there.is_dir():
        shutil.rmtree(here)
    (shutil.copytree if there.is_dir() else shutil.copy)(there, here)
    return checkpoint.concern(here)


# The storage of arrays, edited with the library that wrote it


def open_storage(path):
    """A mapping of keys: ``large/c/0/1`` for a chunk, ``large/zarr.json``."""
    base = {"driver": "file", "path": f"{path}/state/"}
    return ts.KvStore.open({"driver": "ocdbt", "base": base}).result()


def chunks_of(storage, name):
    keys = (key.decode() for key in storage.list().result())
    return sorted(key for key in keys if key.startswith(f"{name}/c"))


def chunks_changed(rng, checkpoint):
    """Exchanged, flipped, cut, replaced by junk, removed, or those of another array."""
    storage, name = open_storage(checkpoint.copy), choose(rng, [*checkpoint.names, "large"])
    one, other = (choose(rng, chunks_of(storage, name)) for _ in range(2))
    content, flipped = storage[one], bytearray(storage[one])
    flipped[int(rng.integers(len(content)))] ^= 1 << int(rng.integers(8))
    twin, square = open_storage(checkpoint.twin)[one], storage["square/c/0/0"]
    junk = [bytes(flipped), content[: len(content) // 2], rng.bytes(len(content)), twin, square]
    storage[other] = content
    storage[one] = choose(rng, [storage[other], *junk, None])
    return [name]


def numbers_changed(rng, checkpoint):
    name = choose(rng, checkpoint.names)
    kvstore = {"driver": "ocdbt", "base": f"file://{checkpoint.copy}/state/", "path": f"{name}/"}
    array = ts.open({"driver": "zarr3", "kvstore": kvstore}).result()
    numbers = np.array(array.read().result())
    bits = numbers.reshape(-1).view(f"u{numbers.dtype.itemsize}")
    flipped, exchanged = bits.copy(), bits.copy()
    flipped[rng.integers(bits.size)] ^= bits.dtype.type(1 << int(rng.integers(8 * bits.itemsize)))
    exchanged[[0, -1]] = bits[[-1, 0]]
    changed = choose(rng, [flipped, flipped, exchanged, bits[::-1].copy(), np.roll(bits, 1)])
    array.write(changed.view(numbers.dtype).reshape(numbers.shape)).result()
    return [name]


# JSON, any field of which gets another value, or is gone

VALUES = [None, -1, [-8, 8], 2**70, float("inf"), 1.5, True, "abc", "", [], {}, [[["a"]]]]
VALUES += ["uint32", "float33", ["a", "other"], [0, 3], {"endian": "big"}]


def walk(value):
    """Every container in a value of JSON, with each of its keys."""
    keys = range(len(value)) if isinstance(value, list) else value
    for key in keys if isinstance(value, dict | list) else ():
        yield value, key
        yield from walk(value[key])


def change_field(rng, content):
    parent, key = choose(rng, walk(content))
    value = parent[key]
    others = [other[place] for other, place in walk(content) if place == key]
    turned = value[::-1] if isinstance(value, list | str) else value
    changed = choose(rng, choose(rng, [VALUES, others, [turned]]))
    parent[key] = json.loads(json.dumps(changed))
    if not rng.integers(5):
        del parent[key]


def description_changed(rng, checkpoint):
    storage, name = open_storage(checkpoint.copy), choose(rng, checkpoint.names)
    content = json.loads(storage[f"{name}/zarr.json"])
    change_field(rng, content)
    storage[f"{name}/zarr.json"] = json.dumps(content).encode()
    return [name]


def metadata_changed(rng, checkpoint):
    """What is said of the arrays, with a checksum that is right."""
    file = checkpoint.copy / choose(rng, [METADATA] * 4 + ["state/_METADATA"])
    content = json.loads(file.read_bytes())
    custom = content.get("custom_metadata") or {}
    change_field(rng, custom.get("penzai_shard", content))
    with contextlib.suppress(KeyError, TypeError):
        del custom["penzai_shard"]["checksum"]
        text = json.dumps(custom["penzai_shard"], sort_keys=True)
        custom["penzai_shard"]["checksum"] = hashlib.sha256(text.encode()).hexdigest()[:16]
    file.write_text(json.dumps(content))
    return checkpoint.concern(file)


KINDS = [
    bytes_flipped,
    file_rewritten,
    path_removed,
    no_file,
    path_of_another_checkpoint,
    chunks_changed,
    numbers_changed,
    description_changed,
    metadata_changed,
]
