"""Every way in which two checkpoints differ is found, and nothing else; no array is read."""

import json

import jax
import jax.numpy as jnp
import optax
import pytest
from penzai import pz

import penzai_shard as pzs
from penzai_shard.errors import CheckpointMismatchError
from penzai_shard.library_apis import orbax_api


def build():
    weights = {f"block_{i}/w": pz.nx.ones({"in": 8, "out": 4}) for i in range(3)}
    weights["zero"] = pz.nx.zeros({"a": 2})
    weights["rows"] = pz.nx.arange("a", 3).astype(jnp.float32)
    weights["empty"] = pz.nx.zeros({"a": 0})
    return {**weights, "square": pz.nx.ones({"a": 4, "b": 4}), "plain": jnp.ones((2, 3))}


W = "block_1/w"
CHANGES = {
    "an axis renamed": (W, pz.nx.ones({"in": 8, "units": 4}), ("axes",)),
    "a square turned": ("square", pz.nx.ones({"b": 4, "a": 4}), ("order of axes",)),
    "axes in another order": (W, pz.nx.ones({"out": 4, "in": 8}), ("order of axes",)),
    "turned and longer": (W, pz.nx.ones({"out": 4, "in": 9}), ("order of axes", "sizes")),
    "sizes exchanged": (W, pz.nx.ones({"in": 4, "out": 8}), ("sizes",)),
    "a positional axis": (W, pz.nx.ones({"in": 8, "out": 4}).untag("out"), ("axes",)),
    "another shape": ("plain", jnp.ones((3, 2)), ("sizes",)),
    "another dtype": (W, pz.nx.ones({"in": 8, "out": 4}).astype(jnp.bfloat16), ("dtype",)),
    "all of it": (W, pz.nx.ones({"x": 2}).astype(jnp.int32), ("axes", "sizes", "dtype")),
    "a number changed": (
        W,
        pz.nx.ones({"in": 8, "out": 4}).at[{"in": 3, "out": 2}].set(2),
        ("values",),
    ),
    "the sign of a zero": ("zero", pz.nx.wrap(-jnp.zeros(2), "a"), ("values",)),
    "rows exchanged": ("rows", pz.nx.wrap(jnp.array([1.0, 0.0, 2.0]), "a"), ("values",)),
    "missing": (W, None, ("only in the first",)),
    "another name": ("block_1/v", pz.nx.ones({"in": 8, "out": 4}), ("only in the second",)),
}


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    return pzs.save_params(tmp_path_factory.mktemp("compared") / "params", build())


@pytest.mark.parametrize("change", CHANGES)
def test_one_changed_array_is_the_one_difference(change, saved, tmp_path):
    name, value, what = CHANGES[change]
    other = {**build(), name: value}
    if value is None:
        del other[name]
    path = pzs.save_params(tmp_path / "other", other)
    found = pzs.compare_checkpoints(saved, path)
    assert [(each.name, each.what) for each in found.differences] == [(name, what)]
    assert found.are_different
    assert not found.are_equal
    assert name in str(found)
    assert what[0] in str(found)
    # The other way round it is the same, but for which of the two has it.
    (back,) = pzs.compare_checkpoints(path, saved).differences
    turned = {"only in the first": "only in the second", "only in the second": "only in the first"}
    assert back.what == tuple(turned.get(each, each) for each in what)


def test_equal_blocks_that_differ_alike_are_one_row(saved, tmp_path):
    other = {name: value.astype(jnp.bfloat16) for name, value in build().items() if "block" in name}
    path = pzs.save_params(tmp_path / "other", {**build(), **other})
    found = pzs.compare_checkpoints(saved, path)
    (row,) = found.table().rows
    first, second = (f"(in=8, out=4) {dtype}" for dtype in ("float32", "bfloat16"))
    assert row == ("block_*/w", "3", "dtype", first, second)
    assert len(found.table(collapse=False).rows) == 3
    assert json.loads(found.to_json())["differences"][0]["second"]["dtype"] == "bfloat16"


def test_another_mesh_is_no_difference(saved, tmp_path):
    mesh = pzs.make_mesh({"data": 8})
    placed = pzs.place(build(), mesh, {"in": "data"}, on_unnamed="replicate")
    path = pzs.save_params(tmp_path / "placed", placed)
    found = pzs.compare_checkpoints(saved, path)
    assert found.are_equal
    assert str(found).startswith("equal: 8 arrays, values compared by checksum")
    assert json.loads(found.to_json())["equal"] is True


def test_values_without_checksums_are_said_not_to_be_compared(saved, tmp_path):
    ocp = orbax_api.orbax()
    for name in ("first", "second"):
        ocp.save(tmp_path / name, {"w": jnp.ones(3), "v": jnp.ones(2)})
    found = pzs.compare_checkpoints(tmp_path / "first", tmp_path / "second")
    assert sorted(found.not_compared) == ["v", "w"]
    assert not found.are_different
    assert not found.are_equal
    assert "not all values compared" in str(found)
    assert "logical axes not compared: neither has their names" in str(found)
    assert pzs.compare_checkpoints(saved, tmp_path / "first").kinds == ("params", "orbax")


def test_parameters_and_a_train_state_with_the_same_ones_differ_in_kind_alone(saved, tmp_path):
    state = pzs.TrainState.initial_state(build(), optax.adam(1e-2), jax.random.key(0))
    path = pzs.save_train_state(tmp_path / "state", state)
    found = pzs.compare_checkpoints(path, saved)
    assert not found.differences
    assert found.are_different
    assert "of the train state the parameters were compared" in str(found)
    momentum = pzs.TrainState.initial_state(build(), optax.sgd(1e-2), jax.random.key(0))
    other = pzs.save_train_state(tmp_path / "momentum", momentum)
    found = pzs.compare_checkpoints(path, other)
    assert "the states of different optimizers" in str(found)
    assert all(each.name.startswith("opt_state/") for each in found.differences)


@pytest.mark.parametrize("change", CHANGES)
def test_a_model_is_refused_in_the_words_of_restore_params(change, saved):
    name, value, what = CHANGES[change]
    if what == ("values",):
        assert pzs.compare_checkpoints(saved, {**build(), name: value}).fits
        return
    model = {**build(), name: value}
    if value is None:
        del model[name]
    with pytest.raises(CheckpointMismatchError) as refused:
        pzs.restore_params(saved, model, pzs.make_mesh({"data": 8}), {}, on_unnamed="replicate")
    found = pzs.compare_checkpoints(saved, model)
    assert not found.fits
    assert (found.headline, found.problems) == (
        str(refused.value).splitlines()[0],
        refused.value.problems,
    )
    assert json.loads(found.to_json())["fits"] is False


def test_a_model_that_fits_is_said_to(saved):
    found = pzs.compare_checkpoints(saved, build())
    assert found.fits
    assert str(found).startswith("fits: 8 arrays of the model can be restored")
