"""Weights as safetensors files: what is loaded back is what was saved, to the bit, or refused."""

import json
import os

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec
from penzai import pz
from safetensors import safe_open
from safetensors.numpy import load_file

import penzai_shard as pzs
from penzai_shard import (
    CheckpointDamagedError,
    CheckpointExistsError,
    CheckpointMismatchError,
    load_safetensors,
    save_safetensors,
)
from penzai_shard.pretrained import saving
from penzai_shard.pretrained.safetensors_header import DTYPES

RULES = {"neurons": "model", "embedding": "data"}
UP = np.arange(32, dtype=np.float32).reshape(4, 8)
FILES = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
INDEX = "model.safetensors.index.json"


@pytest.fixture(scope="module")
def mesh():
    return pzs.make_mesh({"data": 4, "model": 2})


def named(array, *axes):
    return pz.nx.wrap(jnp.asarray(array)).tag(*axes)


def weights():
    return {"up": named(UP, "embedding", "neurons"), "down": named(UP.T, "neurons", "embedding")}


def test_every_dtype_of_the_format_comes_back_to_the_bit(tmp_path, mesh):
    arrays = {}
    for dtype in sorted({*DTYPES.values()} - {"int64", "uint64", "float64"}):
        bits = np.random.default_rng(0).integers(0, 256, (8, 4 * np.dtype(dtype).itemsize), "uint8")
        arrays[dtype] = jnp.asarray(bits % 2 == 0 if dtype == "bool" else bits.view(dtype))
    arrays |= {"scalar": jnp.float32(1.5), "none": jnp.ones((0, 3))}
    numbers = {"number": 2.5, "numpy": np.arange(6, dtype=np.int32).reshape(2, 3)}
    placed = pzs.place(arrays, mesh, {}, on_unnamed="replicate")
    path = save_safetensors(tmp_path / "weights", placed | numbers)
    arrays |= {name: jnp.asarray(value) for name, value in numbers.items()}
    loaded = load_safetensors(path, mesh, {}, into=arrays, on_unnamed="replicate")
    for name, array in arrays.items():
        assert loaded[name].dtype == array.dtype
        assert np.asarray(loaded[name]).tobytes() == np.asarray(array).tobytes()


def test_sharded_arrays_are_one_whole_that_others_read(tmp_path, mesh):
    for rules in (RULES, {}, {"neurons": ("data", "model")}):
        placed = pzs.place(weights(), mesh, rules)
        path = save_safetensors(tmp_path / "w.safetensors", placed, overwrite=True)
        found = load_file(path)
        np.testing.assert_array_equal(found["up"], UP)
        np.testing.assert_array_equal(found["down"], UP.T)
        with safe_open(path, framework="numpy") as file:
            assert file.metadata()["format"] == "pt"
        (tmp_path / "any").touch()
        assert os.stat(path).st_mode == os.stat(tmp_path / "any").st_mode


def test_a_model_goes_out_and_back_onto_another_layout(tmp_path, mesh):
    model = pz.nn.Affine.from_config("mlp", jax.random.key(0), {"embedding": 4}, {"neurons": 8})
    path = save_safetensors(tmp_path / "weights", pzs.place(model, mesh, RULES))
    for rules in ({}, {"embedding": "model"}):
        loaded = load_safetensors(path, mesh, rules, into=model)
        plan = {leaf.path: leaf.sharding for leaf in pzs.make_plan(model, mesh, rules).leaves}
        for name, value in pzs.param_dict(model).items():
            back = pzs.param_dict(loaded)[name]
            np.testing.assert_array_equal(back.data_array, value.data_array)
            assert back.data_array.sharding == plan[name]


def test_another_order_of_axes_is_put_right_and_other_names_are_refused(tmp_path, mesh):
    path = save_safetensors(tmp_path / "weights", {"w": named(UP[:, :4], "embedding", "neurons")})
    turned = {"w": named(np.zeros((4, 4)), "neurons", "embedding")}
    loaded = load_safetensors(path, mesh, RULES, into=turned, dtype="bfloat16")["w"].data_array
    assert loaded.sharding.spec == PartitionSpec("model", "data")
    np.testing.assert_array_equal(loaded, UP[:, :4].T.astype(jnp.bfloat16))
    other = {"w": named(np.zeros((4, 4)), "embedding", "hidden")}
    with pytest.raises(CheckpointMismatchError, match=r"rename_axes=\{'neurons': 'hidden'\}"):
        load_safetensors(path, mesh, {}, into=other)
    contrary = {"w": ("neurons", "embedding")}
    with pytest.raises(CheckpointMismatchError, match=r"axes says .* and the file \('embedding', "):
        load_safetensors(path, mesh, RULES, into=turned, axes=contrary)
    plain = {"w": jnp.zeros((4, 4))}
    with pytest.raises(CheckpointMismatchError, match=r"w: the file has .*embedding=4, neurons=4"):
        load_safetensors(path, mesh, {}, into=plain, on_unnamed="replicate")


def test_files_are_divided_by_size_with_an_index(tmp_path, mesh, monkeypatch):
    held = []
    real = saving._write_file
    monkeypatch.setattr(
        saving,
        "_write_file",
        lambda path, host, saved: (held.append(list(host)), real(path, host, saved)),
    )
    path = save_safetensors(
        tmp_path / "weights", weights() | {"b": named(UP[0], "neurons")}, max_file_bytes=128
    )
    assert held == [["b"], ["down"], ["up"]]
    assert sorted(os.listdir(path))[:2] == [f"model-0000{i}-of-00003.safetensors" for i in (1, 2)]
    index = json.loads((tmp_path / "weights" / INDEX).read_text())
    assert index["metadata"] == {"total_size": 288}
    assert index["weight_map"]["up"] == "model-00003-of-00003.safetensors"
    loaded = load_safetensors(path, mesh, RULES, into=weights(), on_extra="ignore")
    np.testing.assert_array_equal(loaded["down"].data_array, UP.T)
    one = save_safetensors(tmp_path / "one", weights(), max_file_bytes=256)
    assert os.listdir(one) == ["model.safetensors"]


def test_names_and_dtypes_may_be_others_in_the_file(tmp_path, mesh):
    model = {f"block_{i}/w": named(UP + i / 3, "embedding", "neurons") for i in range(2)}
    model["count"] = jnp.arange(2)
    names = {"block_*/w": "model.layers.*.weight", "count": None}
    path = save_safetensors(tmp_path / "w.safetensors", model, names=names, dtype="bfloat16")
    found = load_file(path)
    assert found.keys() == {"model.layers.0.weight", "model.layers.1.weight"}
    np.testing.assert_array_equal(found["model.layers.1.weight"], (UP + 1 / 3).astype(jnp.bfloat16))
    back = {"model.layers.*.weight": "block_*/w"}
    wanted = {name: value for name, value in model.items() if name != "count"}
    loaded = load_safetensors(path, mesh, RULES, into=wanted, names=back, dtype="bfloat16")
    np.testing.assert_array_equal(loaded["block_1/w"].data_array, found["model.layers.1.weight"])


WRONG_NAMES = {
    "nothing": ({"blok_*/w": "w*"}, "the pattern matches no array of the model. Did you mean 'blo"),
    "wildcards": ({"block_*/w": "w"}, "each wildcard is carried over"),
    "several": ({"block_*/w": "a*", "*/w": "b*"}, "block_0/w: matched by 'block_..w' and"),
    "same": ({"block_0/w": "w", "block_1/w": "w"}, "w: 2 arrays would have this name"),
    "unclear": ({"*_*/*": "*.*.*", "**": "**"}, "matched by"),
    "metadata": ({"block_0/w": "__metadata__"}, "no tensor may be called __metadata__"),
    "text": ("w", "give a mapping from patterns"),
}


@pytest.mark.parametrize("case", WRONG_NAMES)
def test_names_that_cannot_be_are_refused(case, tmp_path):
    names, text = WRONG_NAMES[case]
    model = {f"block_{i}/w": jnp.ones(2) for i in range(2)}
    with pytest.raises(pzs.ShardingError, match=text):
        save_safetensors(tmp_path / "weights", model, names=names)
    assert os.listdir(tmp_path) == []


def test_what_the_format_does_not_have_is_refused_by_name(tmp_path):
    model = {
        "key": jax.random.key(0),
        "small": jnp.ones(2, jnp.int4),
        "abstract": jax.ShapeDtypeStruct((2,), "float32"),
        "wide": np.ones(2),
        "packed": jnp.ones(2, jnp.float4_e2m1fn),
    }
    with pytest.raises(CheckpointMismatchError) as caught:
        save_safetensors(tmp_path / "weights", model)
    assert [p.partition(".")[0] for p in caught.value.problems] == [
        "abstract: has a shape and no values",
        "key: is a random key, and safetensors holds numbers alone",
        "packed: is of float4_e2m1fn, which safetensors does not have",
        "small: is of int4, which safetensors does not have",
        "wide: NumPy's float64 would be restored as float32",
    ]
    assert os.listdir(tmp_path) == []


def test_only_what_was_saved_here_is_replaced(tmp_path, mesh):
    path = tmp_path / "weights"
    save_safetensors(path, weights(), max_file_bytes=128)
    with pytest.raises(CheckpointExistsError, match="Pass overwrite=True"):
        save_safetensors(path, weights())
    save_safetensors(path, weights(), overwrite=True)
    assert os.listdir(path) == ["model.safetensors"]
    (path / "tokenizer.json").touch()
    with pytest.raises(CheckpointExistsError, match=r"it has tokenizer\.json too"):
        save_safetensors(path, weights(), overwrite=True)
    with pytest.raises(CheckpointExistsError, match="it is a file, and weights are saved as a dir"):
        save_safetensors(path / "tokenizer.json", weights(), overwrite=True)
    (path / "x.safetensors").mkdir()
    with pytest.raises(CheckpointExistsError, match="it is a directory, and its name is that of"):
        save_safetensors(path / "x.safetensors", weights(), overwrite=True)
    with pytest.raises(pzs.CheckpointWriteError, match="weights are written to a file system"):
        save_safetensors("gs://bucket/weights", weights())
    for size in (0, 1.5, True):
        with pytest.raises(TypeError, match="max_file_bytes="):
            save_safetensors(tmp_path / "other", weights(), max_file_bytes=size)
    with pytest.raises(TypeError, match="max_file_bytes is an option of a directory"):
        save_safetensors(tmp_path / "w.safetensors", weights(), max_file_bytes=10)
    assert sorted(os.listdir(tmp_path)) == ["weights"]


def test_a_save_that_fails_leaves_what_was_there(tmp_path, mesh, monkeypatch):
    for path in (tmp_path / "weights", tmp_path / "w.safetensors"):
        save_safetensors(path, weights())
        saved = path.stat().st_ino

        def full(*_, **__):
            raise saving._safetensors_error()("I/O error: No space left on device (os error 28)")

        with monkeypatch.context() as patched:
            patched.setattr(saving, "_write_file", full)
            with pytest.raises(
                pzs.CheckpointWriteError, match=r"the disk is full.* stays as it was"
            ):
                save_safetensors(path, weights(), overwrite=True)
        assert path.stat().st_ino == saved
    assert sorted(os.listdir(tmp_path)) == ["w.safetensors", "weights"]


@pytest.fixture(scope="module")
def two_files(tmp_path_factory):
    path = tmp_path_factory.mktemp("two") / "weights"
    big = named(np.arange(2**17, dtype=np.float32).reshape(4, -1), "embedding", "neurons")
    save_safetensors(path, {"big": big, "w": named(UP, "embedding", "neurons")}, max_file_bytes=1)
    return path


def test_numbers_that_changed_are_refused_under_every_layout(two_files, tmp_path, mesh):
    into = {
        "big": pz.nx.zeros({"neurons": 2**15, "embedding": 4}),
        "w": pz.nx.zeros({"embedding": 4, "neurons": 8}),
    }
    load_safetensors(two_files, mesh, RULES, into=into)
    for name, file in zip(("big", "w"), FILES, strict=True):
        for place in (-1, -40):
            damaged = tmp_path / f"{name}{place}"
            damaged.mkdir()
            for entry in two_files.iterdir():
                (damaged / entry.name).write_bytes(entry.read_bytes())
            content = bytearray((damaged / file).read_bytes())
            content[place] ^= 1
            (damaged / file).write_bytes(content)
            for rules, options in ((RULES, {}), ({}, {"dtype": "bfloat16"})):
                with pytest.raises(CheckpointDamagedError) as caught:
                    load_safetensors(damaged, mesh, rules, into=into, **options)
                (problem,) = caught.value.problems
                assert problem.startswith(f"{name}: the tensor {name!r} in {damaged}/{file} does n")
    with pytest.warns(pzs.ShardingWarning, match="are not compared with their checksums"):
        load_safetensors(damaged, mesh, {}, into=into, verify=False)


def changed_header(path, change):
    content = path.read_bytes()
    length = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + length])
    change(header)
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + content[8 + length :])


def said(change):
    def on_header(header):
        content = json.loads(header["__metadata__"]["penzai_shard"])
        change(content)
        header["__metadata__"]["penzai_shard"] = json.dumps(content)

    return on_header


OTHERWISE = {
    "axes": (said(lambda c: c["arrays"]["w"].update(axes=["neurons", "embedding"])), "w: what sa"),
    "values": (said(lambda c: c["arrays"]["w"].update(values="0" * 16)), "w: what save_safetens"),
    "removed": (said(lambda c: c["arrays"].clear()), "w: what save_safetensors wrote of it in"),
    "null": (said(lambda c: c.update(arrays=None)), f"{FILES[1]}: what save_safetensors wrote in"),
    "no save": (said(lambda c: c.pop("save")), f"{FILES[1]}: what save_safetensors wrote in it"),
    "save": (said(lambda c: c.update(save="0" * 16)), "w: what save_safetensors wrote of it"),
    "number": (said(lambda c: c.update(save=1)), f"{FILES[1]}: what save_safetensors wrote in it"),
    "version": (said(lambda c: c.update(version=2)), "another version of this library .form 2"),
    "not JSON": (lambda h: h["__metadata__"].update(penzai_shard="{"), "wrote in it of its arrays"),
    "nothing": (lambda h: h.pop("__metadata__"), f"{FILES[1]}: of another save than {FILES[0]}"),
    "shape": (lambda h: h["w"].update(shape=[8, 4]), "w: what save_safetensors wrote of it"),
    "dtype": (lambda h: h["w"].update(dtype="I32"), "w: what save_safetensors wrote of it"),
    "name": (lambda h: h.update(v=h.pop("w")), f"w: the index says that it is in {FILES[1]}"),
}


@pytest.mark.parametrize("case", OTHERWISE)
def test_what_is_said_otherwise_than_it_was_saved_is_refused(case, two_files, tmp_path):
    change, text = OTHERWISE[case]
    for entry in two_files.iterdir():
        (tmp_path / entry.name).write_bytes(entry.read_bytes())
    changed_header(tmp_path / FILES[1], change)
    with pytest.raises(CheckpointDamagedError, match=text):
        load_safetensors(tmp_path, pzs.make_mesh({"data": 8}), {}, into=weights())


def test_files_of_two_saves_are_not_taken_for_one(two_files, tmp_path):
    other = tmp_path / "other"
    model = {
        "big": pz.nx.zeros({"embedding": 4, "neurons": 2**15}),
        "w": named(UP, "embedding", "neurons"),
    }
    save_safetensors(other, model, max_file_bytes=1)
    (other / FILES[0]).write_bytes((two_files / FILES[0]).read_bytes())
    with pytest.raises(
        CheckpointDamagedError, match=f"{FILES[1]}: of another save than {FILES[0]}"
    ):
        load_safetensors(other, pzs.make_mesh({"data": 8}), {}, into=model)
