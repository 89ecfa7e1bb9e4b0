"""What is said of a checkpoint is what was saved, judged by the arrays themselves."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding
from penzai import pz

import penzai_shard as pzs
from penzai_shard.checkpointing import read_manifest
from penzai_shard.errors import CheckpointNotFoundError
from penzai_shard.library_apis import orbax_api

MESH = pzs.make_mesh({"data": 4, "model": 2})


def arrays():
    """Arrays of every sort that differs in a checkpoint, on the mesh and off it."""
    keys = jax.random.split(jax.random.key(0, impl="rbg"), 3)
    on_mesh = {
        "block_0/w": pz.nx.ones({"in": 8, "out": 4}),
        "block_1/w": pz.nx.ones({"in": 8, "out": 4}),
        "block_10/w": pz.nx.ones({"in": 16, "out": 4}).astype(jnp.bfloat16),
        "replicated": pz.nx.zeros({"other": 3}),
        "positional": pz.nx.wrap(jnp.ones((2, 8)), "first", "in").untag("first"),
        "scalar": pz.nx.wrap(jnp.float32(1)),
    }
    placed = pzs.place(on_mesh, MESH, {"in": ("data", "model"), "out": None})
    host = {"host": np.arange(6, dtype=np.int8), "empty": pz.nx.zeros({"in": 0, "out": 2})}
    return {**placed, **host, "keys": keys, "single": pz.nx.ones({"in": 2})}


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    return pzs.save_params(tmp_path_factory.mktemp("described") / "params", arrays())


def test_names_axes_shapes_dtypes_sizes_and_shardings_are_those_of_the_arrays(saved):
    found = {array.name: array for array in pzs.describe_checkpoint(saved).arrays}
    assert found.keys() == arrays().keys()
    for name, value in arrays().items():
        data = getattr(value, "data_array", value)
        own = found[name]
        assert own.record.shape == data.shape
        assert own.record.dtype == str(data.dtype)
        size = jax.random.key_data(data).nbytes if name == "keys" else data.nbytes
        assert own.record.nbytes == size
        if hasattr(value, "data_array"):
            axes = dict(zip(own.record.axes, data.shape, strict=True))
            assert {axis: size for axis, size in axes.items() if axis} == dict(value.named_shape)
        sharding = getattr(data, "sharding", None)
        if isinstance(sharding, NamedSharding):
            assert own.mesh == dict(MESH.shape)
            assert own.spec == sharding.spec
        elif name in ("host", "empty"):
            # NumPy's have none, and Orbax stores no empty arrays.
            assert own.mesh is None
        else:
            assert own.mesh == {}


def test_a_description_prints_equal_blocks_as_one_row_and_the_layout_as_a_plan_does(saved):
    description = pzs.describe_checkpoint(saved)
    rows = {row[0]: row[1:] for row in description.table().rows}
    assert rows["block_*/w"] == ("2", "in=8/data+model, out=4", "float32", "256 B")
    assert rows["block_10/w"] == ("1", "in=16/data+model, out=4", "bfloat16", "128 B")
    assert rows["single"][1] == "in=2 (on one device)"
    assert rows["host"][1] == "6"
    total = sum(array.record.nbytes for array in description.arrays)
    assert description.table().verdict == (
        f"parameters: 10 arrays, {total} B; saved on mesh (data=4, model=2)"
    )
    assert {row[0] for row in description.table(collapse=False).rows} == arrays().keys()
    text = description.table().plain_text(width=80)
    assert max(map(len, text.splitlines())) <= 80
    assert str(description) == repr(description)
    assert "block_*/" in description._repr_html_()


def test_json_says_all_of_it(saved):
    found = json.loads(pzs.describe_checkpoint(saved).to_json())
    assert (found["path"], found["kind"]) == (str(saved), "params")
    by_name = {array["name"]: array for array in found["arrays"]}
    assert by_name["block_0/w"] == {
        "name": "block_0/w",
        "axes": ["in", "out"],
        "shape": [8, 4],
        "dtype": "float32",
        "key_impl": None,
        "bytes": 128,
        "checksum": by_name["block_1/w"]["checksum"],
        "mesh": {"data": 4, "model": 2},
        "spec": [["data", "model"]],
    }
    assert by_name["keys"]["key_impl"] == "rbg"
    checksums = {array["checksum"] for array in by_name.values()}
    assert len(checksums) == 9, "equal for the two equal blocks alone"
    assert all(len(checksum) == 16 for checksum in checksums)
    assert found["total_bytes"] == sum(array["bytes"] for array in found["arrays"])


def test_no_array_is_read(saved, monkeypatch):
    def read(*_, **__):
        raise AssertionError("an array is read")

    monkeypatch.setattr(orbax_api, "load", read)
    assert len(pzs.describe_checkpoint(saved).arrays) == 10
    pzs.compare_checkpoints(saved, saved)
    pzs.compare_checkpoints(saved, arrays())


def test_a_train_state_has_its_parts_with_their_sizes(tmp_path):
    model = {f"block_{i}/w": pz.nx.ones({"in": 8, "out": 4}) for i in range(2)}
    state = pzs.TrainState.initial_state(model, optax.adam(1e-2), jax.random.key(0))
    path = pzs.save_train_state(tmp_path / "state", state)
    description = pzs.describe_checkpoint(path)
    assert str(description).startswith("train state: ")
    data = [leaf for leaf in jax.tree.leaves(state) if hasattr(leaf, "nbytes")]
    assert len(description.arrays) == len(data)
    remarks = " ".join(description.table().summary)
    assert "params 256 B (2 arrays)" in remarks
    assert "opt_state 516 B (5 arrays)" in remarks


def test_a_checkpoint_of_plain_orbax_is_described_without_axes_and_with_its_metadata(tmp_path):
    ocp = orbax_api.orbax()
    tree = {"layers": [{"w": jnp.ones((2, 3))} for _ in range(3)], "step": jnp.int32(2)}
    note = {"note": "a run", "config": {"depth": 3}}
    ocp.save(tmp_path / "plain", tree, custom_metadata=note)
    description = pzs.describe_checkpoint(tmp_path / "plain")
    assert {a.name: a.record.axes for a in description.arrays}["layers/0/w"] is None
    text = str(description)
    for part in ("plain Orbax", "layers/*/w", "2, 3", "note: a run", '{"depth": 3}', "no logical"):
        assert part in text
    assert json.loads(description.to_json())["metadata"] == note


def test_hundreds_of_equal_blocks_are_one_row(tmp_path):
    model = {f"lm/block_{i}/mlp/w": pz.nx.ones({"in": 2}) for i in range(300)}
    path = pzs.save_params(tmp_path / "many", model)
    description = pzs.describe_checkpoint(path)
    (row,) = description.table().rows
    assert row == ("lm/block_*/mlp/w", "300", "in=2", "float32", "2.3 KiB")
    assert description.total_bytes == 2400


def test_what_is_no_checkpoint_is_refused_with_what_is_near(saved, tmp_path):
    with pytest.raises(CheckpointNotFoundError, match=r"does not exist\. Did you mean .*params"):
        pzs.describe_checkpoint(saved + "_2")
    with pytest.raises(CheckpointNotFoundError, match=r"a part of one\. Restore the whole"):
        pzs.describe_checkpoint(f"{saved}/state")
    with pytest.raises(CheckpointNotFoundError, match="does not recognise"):
        pzs.describe_checkpoint(tmp_path)
    assert read_manifest(saved).kind == "params"


def test_a_run_lists_its_checkpoints_with_their_metrics_and_names_damaged_ones(tmp_path):
    state = {"w": pz.nx.ones({"in": 8}), "step": jnp.int32(1)}
    with pzs.CheckpointManager(tmp_path / "run", keep_last=None) as manager:
        for step in (1, 20, 300):
            path = manager.save(step, state, {"loss": 1 / step})
    found = pzs.describe_run(tmp_path / "run")
    assert [each.step for each in found.checkpoints] == [1, 20, 300]
    assert {each.bytes for each in found.checkpoints} == {36}
    assert found.checkpoints[1].metrics == {"loss": 0.05}
    assert 'metrics: {"loss": 0.05}' in str(pzs.describe_checkpoint(found.checkpoints[1].path))
    assert " ".join(str(found).split()).endswith(f"the newest: {path}")
    assert len(json.loads(found.to_json())["checkpoints"]) == 3
    (tmp_path / "run" / "step_00000300" / "penzai_shard.json").write_text("{")
    damaged = pzs.describe_run(tmp_path / "run")
    assert "DAMAGED" in damaged.table().rows[2][-1]
    assert str(damaged).endswith(found.checkpoints[1].path)
    with pytest.raises(CheckpointNotFoundError, match="there is no checkpoint"):
        pzs.describe_run(tmp_path)
