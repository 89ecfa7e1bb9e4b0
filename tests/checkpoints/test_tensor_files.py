"""Safetensors files are restored like checkpoints, on any mesh, or refused by name."""

import json
import shutil

import equinox as eqx
import jax
import jax.numpy as jnp
import ml_dtypes  # noqa: F401 (With it NumPy knows bfloat16 and float8 by name.)
import numpy as np
import pytest
from penzai import pz

import penzai_shard as pzs
from penzai_shard.checkpoints.records import read_manifest
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
from tests.checkpoints.trees import paths_of

WIDE = pzs.make_mesh({"data": 4, "model": 2})
RULES = {"a": "data", "b": "model"}
RNG = np.random.default_rng(0)
TENSORS = {
    "up.weight": draw(RNG, (8, 8)),
    "down": draw(RNG, (8, 16), "bfloat16"),
    "scales": draw(RNG, (4, 8), "float8_e4m3fn"),
    "count": np.asarray(3, "int32"),
    "empty": np.zeros((0, 3), "float32"),
}
AXES = {
    "up.weight": ("a", "b"),
    "down": ("b", "a"),
    "scales": ("c", "a"),
    "count": (),
    "empty": ("e", "c"),
}
MODEL = {
    n: pz.nx.zeros(dict(zip(AXES[n], x.shape, strict=True)), x.dtype) for n, x in TENSORS.items()
}
WITHOUT_NAMES = pytest.warns(pzs.ShardingWarning, match="no logical axis names")


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
    assert jax.jit(lambda x: x, donate_argnums=0)(restored)["count"].data_array == 3


def test_restore_params_of_our_files_compares_names_and_numbers(tmp_path):
    write_parts(tmp_path, TENSORS, make_texts(TENSORS, AXES))
    turned = MODEL | {"up.weight": pz.nx.zeros({"b": 8, "a": 8})}
    with pytest.raises(pzs.CheckpointMismatchError) as caught:
        pzs.restore_params(tmp_path, turned, WIDE, RULES)
    assert paths_of(caught) == {"up.weight"}
    restored = pzs.restore_params(tmp_path, turned, WIDE, RULES, allow="transpose")
    np.testing.assert_array_equal(restored["up.weight"].data_array, TENSORS["up.weight"].T)

    header, data = read_file(tmp_path / FIRST)
    write_file(tmp_path / FIRST, header, bytes([data[0] ^ 1]) + data[1:])
    with pytest.raises(pzs.CheckpointDamagedError) as caught:
        pzs.restore_params(tmp_path, MODEL, WIDE, RULES)
    assert paths_of(caught) == {"up.weight"}


def test_restore_params_of_our_files_never_takes_them_for_those_of_others(tmp_path):
    texts = make_texts(TENSORS, AXES)
    texts["penzai_shord"] = texts.pop("penzai_shard")
    write_one(tmp_path, TENSORS, texts)
    with pytest.raises(pzs.CheckpointDamagedError) as caught:
        pzs.restore_params(tmp_path, MODEL)
    assert paths_of(caught) == {"model.safetensors"}


def test_restore_params_of_numbers_at_odd_places(tmp_path):
    header = {"w": {"dtype": "F32", "shape": [8, 4], "data_offsets": [0, 128]}}
    numbers, text = draw(RNG, (8, 4)), json.dumps(header).encode()
    write_file(tmp_path / "w.safetensors", text + b" " * (1 + len(text) % 2), numbers.tobytes())
    like = {"w": pz.nx.zeros({"a": 8, "b": 4}, "bfloat16")}
    with WITHOUT_NAMES:
        restored = pzs.restore_params(tmp_path, like, WIDE, RULES, allow="cast")
    np.testing.assert_array_equal(restored["w"].data_array, numbers.astype("bfloat16"))


def test_restore_params_of_our_files_of_two_saves(tmp_path):
    other = {name: tensor + tensor.dtype.type(1) for name, tensor in TENSORS.items()}
    for name, tensors in {"new": TENSORS, "old": other}.items():
        (tmp_path / name).mkdir()
        write_parts(tmp_path / name, tensors, make_texts(tensors, AXES))
    second = "model-00002-of-00002.safetensors"
    shutil.copy(tmp_path / "old" / second, tmp_path / "new")
    with pytest.raises(pzs.CheckpointDamagedError) as caught:
        pzs.restore_params(tmp_path / "new", MODEL)
    assert paths_of(caught) == {second}
    with pytest.raises(pzs.CheckpointDamagedError) as caught:
        pzs.restore_params(tmp_path / "old" / second, MODEL)
    assert paths_of(caught) == {"up.weight", "scales", "empty"}


def test_restore_params_of_a_model_of_ones_own(tmp_path):
    class Net(eqx.Module):
        up: eqx.nn.Linear
        bias: jax.Array

    tensors = {
        "net.up.weight": draw(RNG, (6, 4)),
        "net.up.bias": draw(RNG, 6, "bfloat16"),
        "net.b": draw(RNG, 8),
    }
    write_tensors(tmp_path / "net.safetensors", tensors)
    net = Net(eqx.nn.Linear(4, 6, key=jax.random.key(0)), jnp.zeros(8))
    names = {"net.b": "bias", "net.**": "**"}
    with WITHOUT_NAMES:
        restored = pzs.restore_params(tmp_path / "net.safetensors", net, names=names, allow="cast")
    np.testing.assert_array_equal(restored.up.weight, tensors["net.up.weight"])
    np.testing.assert_array_equal(restored.up.bias, tensors["net.up.bias"].astype("float32"))
    np.testing.assert_array_equal(restored.bias, tensors["net.b"])


# What cannot be read


FIRST, OTHERS = "model-00001-of-00002.safetensors", ["x.safetensors", "y.safetensors"]
# What the index says then, and what is named.
INDEX_EDITS = {
    "the other file": ({"down": FIRST}, ["down"]),
    "a tensor of none": ({"other": FIRST}, ["other"]),
    "a tensor forgotten": ({"down": None}, ["down"]),
    "files missing": (
        dict(zip(["down", "count"], OTHERS, strict=True)),
        OTHERS,
    ),
}


@pytest.mark.parametrize("case", INDEX_EDITS)
def test_read_manifest_of_an_index_that_files_contradict(tmp_path, case):
    edit, paths = INDEX_EDITS[case]
    write_parts(tmp_path, TENSORS)
    where = json.loads((tmp_path / INDEX).read_text())["weight_map"] | edit
    where = {name: file for name, file in where.items() if file}
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": where}))
    with pytest.raises(pzs.CheckpointDamagedError) as caught:
        read_manifest(tmp_path)
    assert paths_of(caught) == {*paths}


def test_read_manifest_of_a_tensor_in_two_files(tmp_path):
    for name in "ab":
        write_tensors(tmp_path / f"{name}.safetensors", {"w": TENSORS["down"]})
    with pytest.raises(pzs.CheckpointDamagedError) as caught:
        read_manifest(tmp_path)
    assert paths_of(caught) == {"w"}


def test_read_manifest_of_other_forms_says_what_to_do(tmp_path, monkeypatch):
    torch = tmp_path / "torch" / "pytorch_model.bin"
    torch.parent.mkdir()
    torch.touch()
    monkeypatch.chdir(tmp_path)
    fixes = dict.fromkeys([torch, torch.parent], "safetensors.torch.save_file")
    for path, fix in {**fixes, "google/gemma-2b": "snapshot_download('google/gemma-2b')"}.items():
        with pytest.raises(pzs.CheckpointNotFoundError) as caught:
            read_manifest(path)
        assert fix in caught.value.problems[0].fix
    write_tensors(tmp_path / "model.safetensors", TENSORS)
    with pytest.raises(pzs.CheckpointNotFoundError, match=r"Write '.*/model.safetensors'"):
        read_manifest(tmp_path / "modle.safetensors")
    pointer = tmp_path / "model.safetensors"
    pointer.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 12\n")
    with pytest.raises(pzs.CheckpointDamagedError, match="run git lfs pull") as caught:
        read_manifest(pointer)
    assert paths_of(caught) == {pointer.name}


def test_restore_train_state_refuses_files_of_tensors(tmp_path):
    write_tensors(tmp_path / "model.safetensors", TENSORS)
    with pytest.raises(pzs.CheckpointMismatchError, match="restore_params"):
        pzs.restore_train_state(tmp_path, MODEL)


def test_restore_params_refuses_a_dtype_that_numpy_does_not_have(tmp_path):
    header = {"w": {"dtype": "F4", "shape": [4], "data_offsets": [0, 2]}}
    write_file(tmp_path / "w.safetensors", header, bytes(2))
    with pytest.raises(pzs.CheckpointDamagedError, match="w has dtype F4, which is not read"):
        read_manifest(tmp_path)
