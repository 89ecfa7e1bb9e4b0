"""What reports say of checkpoints, of two of them, and of damaged ones."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint.experimental.v1 as ocp_v1
import pytest
from penzai import pz

import penzai_shard as pzs
from tests.checkpoints.safetensors_files import write_tensors
from tests.checkpoints.trees import structs_of
from tests.models import counted_mlp, model
from tests.refusals import refused

MLP = model("penzai mlp")
FIRST = "mlp/Affine_0/Linear.weights"


def rows_of(report):
    rows = report.to_data()["rows"]
    assert len({row["path"] for row in rows}) == len(rows)
    return {row.pop("path"): row for row in rows}


def whats(report):
    return {path: row["what"] for path, row in rows_of(report).items()}


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    mesh = pzs.make_mesh({"data": 4, "model": 2})
    placed = pzs.place(MLP, mesh, {"features": "data", "features_out": "model"})
    return pzs.save_params(tmp_path_factory.mktemp("saved") / "mlp", placed)


# What one holds


def test_describe_checkpoint_of_parameters(saved, tmp_path):
    report = pzs.describe_checkpoint(saved)
    assert report.facts == {"path": saved, "kind": "params"}
    assert rows_of(report)[FIRST] == {"array": "float32[features=8, features_out=16]", "size": 512}
    assert FIRST in str(report)
    # Blocks are one row, whatever their numbers.
    path = pzs.save_params(tmp_path / "a", {f"block_{i}/w": jnp.ones(2) * i for i in range(3)})
    assert "block_{0-2}/w" in str(pzs.describe_checkpoint(path))


def test_describe_checkpoint_of_other_programs(tmp_path):
    tree = {"w": jnp.ones((2, 4)), "v": np.ones(3, np.int32)}
    ocp_v1.save(tmp_path / "plain", tree)
    write_tensors(tmp_path / "model.safetensors", {k: np.asarray(v) for k, v in tree.items()})
    for path in (tmp_path / "plain", tmp_path / "model.safetensors"):
        report = pzs.describe_checkpoint(path)
        arrays = {path: row["array"] for path, row in rows_of(report).items()}
        assert arrays == {"v": "int32[3]", "w": "float32[2, 4]"}
        assert len(report.notes) == 1
        verified = pzs.verify_checkpoint(path)
        assert verified.ok
        assert {row["state"] for row in rows_of(verified).values()} == {"unchecked"}
        # Numbers without checksums are read.
        assert pzs.compare_checkpoints(path, tree).ok
        other = tree | {"v": np.zeros(3, np.int32)}
        assert whats(pzs.compare_checkpoints(path, other)) == {"v": "values"}


def test_describe_checkpoint_of_a_run(tmp_path):
    metrics = {1: {"loss": 2.0}, 2: {"loss": 1.5, "accuracy": 0.250000001}, 3: None}
    with pzs.CheckpointManager(tmp_path, keep_last=None, asynchronous=False) as manager:
        for step, numbers in metrics.items():
            manager.save(step, {"step": jnp.int32(step), "w": jnp.ones(256)}, numbers)
    rows = pzs.describe_checkpoint(tmp_path).to_data()["rows"]
    assert [row["step"] for row in rows] == [1, 2, 3]
    assert [row["loss"] for row in rows] == [2.0, 1.5, None]
    assert [row["accuracy"] for row in rows] == [None, 0.25, None]
    assert {row["size"] for row in rows} == {1028}
    (tmp_path / "step_00000003" / "_CHECKPOINT_METADATA").write_text("{}")
    refused(pzs.CheckpointDamagedError, pzs.describe_checkpoint, tmp_path)


def test_reports_of_nothing(tmp_path):
    refused(pzs.CheckpointNotFoundError, pzs.describe_checkpoint, tmp_path)
    refused(pzs.CheckpointNotFoundError, pzs.verify_checkpoint, tmp_path)
    refused(pzs.RuleTypeError, pzs.compare_checkpoints, {}, tmp_path)


# In what two differ


def test_compare_checkpoints_names_every_difference(tmp_path):
    equal = {"same": pz.nx.ones({"a": 2, "b": 3}), "number": 2, "wide": np.linspace(0, 1, 7)}
    ones = jnp.ones(3)
    # What differs, and both sides.
    differing = {
        "values": (jnp.arange(6.0), jnp.arange(6.0)[::-1]),
        "axes": (pz.nx.ones({"a": 2}), pz.nx.ones({"c": 2})),
        "axes, sizes": (pz.nx.ones({"a": 2, "b": 3}), pz.nx.ones({"b": 3, "a": 2})),
        "sizes": (ones, jnp.ones(4)),
        "dtype": (ones, jnp.ones(3, jnp.bfloat16)),
        "sizes, dtype": (ones, jnp.ones((3, 1), jnp.int8)),
        "keys": (jax.random.key(1), jax.random.key(2)),
    }
    first, second = (equal | {path: pair[i] for path, pair in differing.items()} for i in (0, 1))
    first, second = first | {"only in first": ones}, second | {"only in second": ones}
    paths = [pzs.save_params(tmp_path / n, t) for n, t in (("a", first), ("b", second))]
    expected = {path: path for path in [*differing, "only in first", "only in second"]}
    for sides in ([paths[0], paths[1]], [paths[0], second], [first, paths[1]], [first, second]):
        report = pzs.compare_checkpoints(*sides)
        assert whats(report) == expected | {"keys": "values"}
        assert not report.ok
    for sides in ([paths[0], first], [second, paths[1]], [paths[0], paths[0]]):
        assert pzs.compare_checkpoints(*sides).ok
    report = pzs.compare_checkpoints(paths[0], structs_of(first))
    assert report.ok
    assert "no values were compared" in report.verdict


def test_compare_checkpoints_of_parameters_states_and_models(saved, tmp_path):
    state = pzs.TrainState.initial_state(MLP, optax.adam(1e-3), jax.random.key(0))
    state_path = pzs.save_train_state(tmp_path / "state", state)
    counted = pzs.save_train_state(tmp_path / "counted", counted_mlp())
    equal = [saved, state_path, state, MLP, pzs.param_dict(MLP), counted_mlp()]
    for first in equal[:3]:
        for second in equal:
            assert pzs.compare_checkpoints(first, second).ok, (first, second)
    assert whats(pzs.compare_checkpoints(counted, MLP)) == {"count": "only in first"}
    later = state.replace(step=state.step + 1)
    assert whats(pzs.compare_checkpoints(state_path, later)) == {"step": "values"}
    without = pzs.TrainState.initial_state(MLP, optax.sgd(1e-3), jax.random.key(0))
    found = whats(pzs.compare_checkpoints(state_path, without))
    assert found
    assert set(found.values()) == {"only in first"}
    assert all(path.startswith("opt_state/") for path in found)


# Whether it is as it was saved


def test_verify_checkpoint_and_compare_checkpoints_find_what_is_damaged(tmp_path):
    arrays = {f"w{i}": jax.random.normal(jax.random.key(i), (256, 256)) for i in range(3)}
    path = pzs.save_params(tmp_path / "a", arrays | {"empty": jnp.ones((0, 2))})

    def states_of(path):
        report = pzs.verify_checkpoint(path)
        states = {name: row["state"] for name, row in rows_of(report).items()}
        assert report.ok == ({*states.values()} == {"ok"})
        return states

    assert states_of(path) == dict.fromkeys([*arrays, "empty"], "ok")
    # Another save's data in the place of an array's: each can be read, and some are not the same.
    other = pzs.save_params(tmp_path / "b", {path: x + 1 for path, x in arrays.items()})
    (tmp_path / "a" / "state").rename(tmp_path / "old")
    (tmp_path / "b" / "state").rename(tmp_path / "a" / "state")
    damaged = dict.fromkeys(arrays, "damaged")
    assert states_of(path) == {**damaged, "empty": "ok"}
    assert pzs.verify_checkpoint(path).rows[0][0] == "w0"
    expected = dict.fromkeys(arrays, "values") | {"empty": "only in first"}
    assert whats(pzs.compare_checkpoints(path, arrays)) == expected
    assert states_of(other) == dict.fromkeys(arrays, "unreadable")
    # Its metadata.
    (tmp_path / "a" / "_CHECKPOINT_METADATA").write_text("{}")
    assert {*states_of(path).values()} == {"unreadable"}
