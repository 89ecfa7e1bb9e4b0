"""Safetensors files are restored like checkpoints, on any mesh, or refused by name.

A kind of damage is a function that damages a folder, and returns the tensors or files concerned.
Numbers are changed where there are checksums only. ``DAMAGES=100 pytest`` draws more of them.
"""

import functools
import json
import os
import shutil
import warnings

import jax
import jax.numpy as jnp
import ml_dtypes  # noqa: F401 (With it NumPy knows bfloat16 and float8 by name.)
import numpy as np
import pytest
from penzai import pz

import penzai_shard as pzs
from penzai_shard.checkpoints.records import read_manifest
from penzai_shard.errors import CheckpointDamagedError, CheckpointNotFoundError
from tests.checkpoints.safetensors_files import (
    INDEX,
    draw,
    make_texts,
    read_file,
    write_file,
    write_one,
    write_parts,
    write_tensors,
)
from tests.checkpoints.test_damages import (
    change_field,
    choose,
    draw_verdicts,
    replace_path,
    rewrite_file,
    sign,
)
from tests.refusals import refused

COUNT = int(os.environ.get("DAMAGES", "45"))
WIDE = pzs.make_mesh({"data": 4, "model": 2})
RULES = {"a": "data", "b": "model"}
# The first file of two has every other tensor.
AXES = {"up.weight": "ab", "half": "ba", "scales": "ab", "float8": "ca", "count": "", "empty": "ec"}
SIZES = {"a": 8, "b": 8, "c": 16, "e": 0}
DTYPES = {"half": "bfloat16", "float8": "float8_e4m3fn", "count": "int32"}
FIRST, SECOND = (f"model-0000{i}-of-00002.safetensors" for i in (1, 2))


def make_tensors(seed):
    rng = np.random.default_rng(seed)
    shapes = {name: [SIZES[axis] for axis in axes] for name, axes in AXES.items()}
    return {n: draw(rng, shape, DTYPES.get(n, "float32")) for n, shape in shapes.items()}


TENSORS = make_tensors(0)
TEXTS_OF_OURS = make_texts(TENSORS, AXES)
MODEL = {name: pz.nx.wrap(jnp.zeros_like(x), *AXES[name]) for name, x in TENSORS.items()}
WITHOUT_NAMES = pytest.warns(pzs.ShardingWarning, match="no logical axis names")
refuse_damage = functools.partial(refused, CheckpointDamagedError)


@pytest.mark.parametrize("given", ["model.safetensors", ".", INDEX])
def test_restore_params_of_files_of_others(tmp_path, given):
    write = write_one if given == "model.safetensors" else write_parts
    write(tmp_path, TENSORS, {"format": "pt"})
    if given == ".":
        (tmp_path / INDEX).unlink()
    with WITHOUT_NAMES:
        restored = pzs.restore_params(tmp_path / given, MODEL, WIDE, RULES)
    for name, tensor in TENSORS.items():
        assert np.asarray(restored[name].data_array).tobytes() == tensor.tobytes(), name
    assert restored["up.weight"].data_array.sharding.spec == jax.P("data", "model")
    donated = jax.jit(lambda x: x, donate_argnums=0)(restored)
    assert donated["count"].data_array == TENSORS["count"]


def test_restore_params_of_our_files_compares_names_and_numbers(tmp_path):
    write_parts(tmp_path, TENSORS, TEXTS_OF_OURS)
    turned = MODEL | {"up.weight": pz.nx.zeros({"b": 8, "a": 8})}
    differing = refused(pzs.CheckpointMismatchError, pzs.restore_params, tmp_path, turned)
    assert differing.keys() == {"up.weight"}
    restored = pzs.restore_params(tmp_path, turned, WIDE, RULES, allow="transpose")
    np.testing.assert_array_equal(restored["up.weight"].data_array, TENSORS["up.weight"].T)
    header, data = read_file(tmp_path / FIRST)
    write_file(tmp_path / FIRST, header, bytes([data[0] ^ 1]) + data[1:])
    assert refuse_damage(pzs.restore_params, tmp_path, MODEL).keys() == {"up.weight"}


def test_restore_params_of_our_files_of_two_saves(tmp_path):
    for name, tensors in {"new": TENSORS, "old": make_tensors(1)}.items():
        (tmp_path / name).mkdir()
        write_parts(tmp_path / name, tensors, make_texts(tensors, AXES))
    shutil.copy(tmp_path / "old" / SECOND, tmp_path / "new")
    assert refuse_damage(read_manifest, tmp_path / "new").keys() == {SECOND}
    lost = refuse_damage(read_manifest, tmp_path / "old" / SECOND)
    assert lost.keys() == {*list(TENSORS)[::2]}


def test_restore_params_of_numbers_at_odd_places(tmp_path):
    header = {"w": {"dtype": "F32", "shape": [8, 8], "data_offsets": [0, 256]}}
    numbers, text = TENSORS["scales"], json.dumps(header).encode()
    write_file(tmp_path / "w.safetensors", text + b" " * (1 + len(text) % 2), numbers.tobytes())
    like = {"net": {"w": pz.nx.zeros({"a": 8, "b": 8}, "bfloat16")}}
    options = {"names": {"**": "net/**"}, "allow": "cast"}
    with WITHOUT_NAMES:
        restored = pzs.restore_params(tmp_path / "w.safetensors", like, WIDE, RULES, **options)
    np.testing.assert_array_equal(restored["net"]["w"].data_array, numbers.astype("bfloat16"))


# What cannot be read


# What the index says then, and what is named.
@pytest.mark.parametrize(
    ("edit", "paths"),
    [
        ({"half": FIRST}, {"half"}),
        ({"other": FIRST}, {"other"}),
        ({"half": None}, {"half"}),
        # Of the second file nothing is left.
        ({"half": "x", "float8": "x", "empty": "y"}, {"x", "y"}),
        ({"half": f"../{FIRST}"}, {INDEX}),
        ({"half": f"/dev/{FIRST}"}, {INDEX}),
        (None, {INDEX}),
    ],
)
def test_read_manifest_of_an_index_that_files_contradict(tmp_path, edit, paths):
    write_parts(tmp_path, TENSORS)
    where = json.loads((tmp_path / INDEX).read_text())["weight_map"] | (edit or {})
    where = {"weight_map": {name: file for name, file in where.items() if file}}
    (tmp_path / INDEX).write_text(json.dumps({} if edit is None else where))
    problems = refuse_damage(read_manifest, tmp_path)
    assert problems.keys() == {*paths}
    assert edit or "weight_map" in problems[INDEX].what


def test_read_manifest_of_files_that_cannot_be_read_says_why(tmp_path):
    for name in "ab":
        write_tensors(tmp_path / f"{name}.safetensors", {"w": TENSORS["half"]})
    assert refuse_damage(read_manifest, tmp_path).keys() == {"w"}
    path = tmp_path / "a.safetensors"
    write_file(path, {"w": {"dtype": "F4", "shape": [4], "data_offsets": [0, 2]}}, bytes(2))
    assert "w has dtype F4" in refuse_damage(read_manifest, path)[path.name].what
    path.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 12\n")
    assert "run git lfs pull" in refuse_damage(read_manifest, path)[path.name].what
    # Of a mark of this library that was damaged.
    texts = {key.replace("shard", "shord"): text for key, text in TEXTS_OF_OURS.items()}
    write_tensors(path, TENSORS, texts)
    assert refuse_damage(read_manifest, path).keys() == {path.name}


def test_read_manifest_of_other_forms_says_what_to_do(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (problem,) = refused(CheckpointNotFoundError, read_manifest, "google/gemma-2b").values()
    assert "huggingface_hub.snapshot_download" in problem.fix
    write_one(tmp_path, TENSORS)
    (problem,) = refused(CheckpointNotFoundError, read_manifest, "modle.safetensors").values()
    assert str(tmp_path / "model.safetensors") in problem.fix


# Damages


def choose_file(rng, copy):
    file = choose(rng, sorted(copy.glob("*.safetensors")))
    return file, *read_file(file)


def choose_tensor(rng, header):
    return choose(rng, [name for name in header if name != "__metadata__"])


def change_bytes_of_header(rng, copy, twin):
    """Its length, or a bit of it."""
    file, *_ = choose_file(rng, copy)
    content = bytearray(file.read_bytes())
    length = int.from_bytes(content[:8], "little")
    other = choose(rng, [0, 2, length - 8, length + 8, 2**31, 2**40, 2**63, 2**64 - 1])
    if rng.integers(2):
        content[:8] = other.to_bytes(8, "little")
    else:
        content[int(rng.integers(8, 8 + length))] ^= 1 << rng.integers(8)
    file.write_bytes(content)
    return file


SHIFTS = [(-4, -4), (4, 4), (0, 2**40), (0, -4), (-(2**63), 0)]
FIELDS = {
    "data_offsets": [[8, 0], [2**63, 2**64], [0], [0, 8, 8], None],
    "dtype": ["F33", "I64", "F64", "F4", "F8_E8M0", "I32", "F16", None, 3],
    "shape": [[-1], [2**62, 4], "8, 8", [1.5], [[8]], [4, 16], [64, 1], [8, 8, 1], None],
}


def change_entry(rng, copy, twin):
    file, header, data = choose_file(rng, copy)
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
    """Any field of it; or a name stands there twice."""
    file, header, data = choose_file(rng, copy)
    texts = header.pop("__metadata__", {})
    name, other = choose_tensor(rng, header), choose_tensor(rng, header)
    own = json.dumps(header[name])
    again = choose(rng, [own, json.dumps(header[other]), own.replace("F32", "I32")])
    twice = (json.dumps(header)[:-1] + f', "{name}": {again}}}').encode()
    header = choose(rng, [change_field(rng, header), [header], None, b"[" * 100_000, *[twice] * 2])
    if isinstance(header, dict) and texts:
        header["__metadata__"] = texts
    write_file(file, header, data)
    return file


def change_index(rng, copy, twin):
    if not (copy / INDEX).exists():
        return rewrite_file(rng, copy, twin)
    content = json.loads((copy / INDEX).read_bytes())
    where = content["weight_map"]
    name = choose(rng, where)
    others = ["model-00003-of-00003.safetensors", "../other.safetensors", "/dev/zero", "", "."]
    others += [None, ["a"], {}, 3, "config.json", *where.values()]
    edits = [lambda: where.update({name: choose(rng, others)})] * 3
    edits += [lambda: where.pop(name), lambda: where.update(half2=where[name])]
    choose(rng, edits)()
    wrong = [[content], None, where, {"weight_map": {}}, {"weight_map": [name]}]
    (copy / INDEX).write_text(json.dumps(choose(rng, [*[content] * 4, *wrong])))
    return copy / INDEX


def change_texts(rng, copy, twin):
    """What this library says, in one file or in all, with a checksum that is right or is not."""
    files = sorted(copy.glob("*.safetensors"))
    texts = read_file(files[0])[0]["__metadata__"]
    section = change_field(rng, json.loads(texts["penzai_shard"]))
    if rng.integers(2) and isinstance(section, dict):
        sign(section)
    texts["penzai_shard"] = choose(rng, ["", "null", "[1]", *[json.dumps(section)] * 4])
    unmarked = {key.replace("shard", "shord"): text for key, text in texts.items()}
    for file in choose(rng, [files, files[:1]]):
        header, data = read_file(file)
        header["__metadata__"] = choose(rng, [texts, texts, unmarked, {"format": "pt"}, None])
        write_file(file, {k: v for k, v in header.items() if v is not None}, data)
    return files[0]


def change_numbers(rng, copy, twin):
    file, header, data = choose_file(rng, copy)
    changed = bytearray(data)
    changed[int(rng.integers(len(data)))] ^= 1 << rng.integers(8)
    write_file(file, header, bytes(changed))
    return file


def exchange_tensors(rng, copy, twin):
    """Of one shape and dtype, in one file."""
    header, data = read_file(copy / FIRST)
    header["up.weight"], header["scales"] = header["scales"], header["up.weight"]
    write_file(copy / FIRST, header, data)
    return "up.weight"


KINDS = [rewrite_file, replace_path, change_bytes_of_header, change_entry, change_header]
KINDS += [change_bytes_of_header, change_entry, change_header, change_index]
KINDS_OF_OURS = [change_texts, change_texts, change_numbers, change_numbers, exchange_tensors]


def test_restore_params_of_damaged_safetensors(tmp_path):
    folders = {name: tmp_path / name for name in ("one", "several", "ours", "twin")}
    for seed, folder in zip((0, 0, 0, 1), folders.values(), strict=True):
        folder.mkdir()
        tensors = make_tensors(seed)
        texts = make_texts(tensors, AXES) if folder.name in ("ours", "twin") else None
        write = write_one if folder.name == "one" else write_parts
        write(folder, tensors, texts)
    *judged, ours, _ = folders.values()
    arrays = {name: pz.nx.wrap(jnp.asarray(x), *AXES[name]) for name, x in TENSORS.items()}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", pzs.ShardingWarning)
        draw_verdicts(
            COUNT,
            [*judged, ours, ours],
            arrays,
            lambda folder: KINDS + KINDS_OF_OURS * (folder == ours),
        )
