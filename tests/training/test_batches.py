import re
from pathlib import Path

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec
from penzai import pz

from penzai_shard.errors import PlanError, RuleTypeError, ShardingError
from penzai_shard.layouts import Layout
from penzai_shard.meshes import auto_twin
from penzai_shard.planning import make_plan
from penzai_shard.training import shard_batch


def test_batch_lies_as_its_names_say(mesh):
    batch = {
        "x": pz.nx.NamedArray.wrap(np.ones((8, 6))).tag("batch", "features"),
        "n": 3,
        "host": pz.nx.wrap(np.zeros((2, 8)), "features", "batch"),
    }
    placed = shard_batch(batch, mesh, {"batch": ("data", "model")})
    assert placed["x"].data_array.sharding == NamedSharding(mesh, PartitionSpec(("data", "model")))
    assert placed["host"].data_array.addressable_shards[0].data.shape == (2, 1)
    assert placed["n"].sharding == NamedSharding(mesh, PartitionSpec())


def test_structs_are_given_the_layout_that_arrays_would_get(mesh):
    arrays = {"x": pz.nx.wrap(np.ones((8, 6)), "batch", "features"), "y": np.ones(8), "n": 3}
    structs = jax.eval_shape(lambda: arrays)
    placed = shard_batch(arrays, mesh, {"batch": "data"}, first_axis="batch")
    for on in (mesh, mesh.abstract_mesh):
        described = shard_batch(structs, on, {"batch": "data"}, first_axis="batch")
        assert jax.tree.structure(described) == jax.tree.structure(placed)
        for struct, array in zip(jax.tree.leaves(described), jax.tree.leaves(placed), strict=True):
            assert isinstance(struct, jax.ShapeDtypeStruct)
            assert (struct.shape, struct.dtype) == (array.shape, array.dtype)
            assert struct.sharding == NamedSharding(on, array.sharding.spec)
    plan = make_plan(arrays["x"], mesh, {"batch": "model"})
    described = shard_batch(structs["x"], plan=plan).data_array
    assert described.sharding == NamedSharding(mesh, PartitionSpec("model"))


def test_what_structs_of_a_batch_cannot_be(mesh):
    struct = {"x": jax.ShapeDtypeStruct((9,), "float32")}
    with pytest.raises(RuleTypeError, match=r"structs describe the whole batch.*local=True"):
        shard_batch(struct, mesh, {"batch": "data"}, first_axis="batch", local=True)
    with pytest.raises(PlanError, match=r"x: logical axis 'batch' \(9\) does not divide"):
        shard_batch(struct, mesh, {"batch": "data"}, first_axis="batch")


def test_positional_dimensions_stay_whole(mesh):
    array = pz.nx.wrap(np.ones((5, 8)), "time", "batch").untag("time").with_positional_prefix()
    placed = shard_batch(array, mesh, {"batch": "data"})
    assert placed.data_array.addressable_shards[0].data.shape == (5, 2)


def test_explicit_mesh_is_replaced_by_its_twin(explicit_mesh):
    placed = shard_batch(pz.nx.ones({"data": 8}), explicit_mesh)
    assert placed.data_array.sharding == NamedSharding(
        auto_twin(explicit_mesh), PartitionSpec("data")
    )


def test_arrays_without_names_are_refused(mesh):
    batch = {"x": np.ones((8, 2)), "y": np.ones(8)}
    with pytest.raises(ShardingError, match="no logical axis names") as caught:
        shard_batch(batch, mesh, {"batch": "data"})
    assert len(caught.value.problems) == 2
    assert "name_axes" in str(caught.value)


def test_batch_that_does_not_divide_is_refused(mesh):
    with pytest.raises(ShardingError, match=r"logical axis 'batch' \(6\) does not divide"):
        shard_batch({"x": pz.nx.ones({"batch": 6})}, mesh, {"batch": "data"})


def test_placed_batch_is_not_copied(mesh):
    placed = shard_batch(pz.nx.ones({"batch": 8}), mesh, {"batch": "data"})
    again = shard_batch(placed, mesh, {"batch": "data"})
    pointers = [
        [shard.data.unsafe_buffer_pointer() for shard in array.data_array.addressable_shards]
        for array in (placed, again)
    ]
    assert pointers[0] == pointers[1]
    assert isinstance(again.data_array, jax.Array)


def test_plain_arrays_are_placed_by_their_first_axis_and_stay_plain(mesh):
    batch = {
        "x": np.arange(48.0, dtype=np.float32).reshape(8, 6),
        "y": np.ones(8),
        "n": 3,
        "named": pz.nx.ones({"features": 2, "batch": 8}),
    }
    placed = shard_batch(batch, mesh, {"batch": "data", "features": "model"}, first_axis="batch")
    for name in ("x", "y"):
        assert placed[name].sharding == NamedSharding(mesh, PartitionSpec("data"))
        np.testing.assert_array_equal(placed[name], batch[name])
    assert placed["n"].sharding == NamedSharding(mesh, PartitionSpec())
    assert placed["named"].named_shape == {"features": 2, "batch": 8}
    assert placed["named"].data_array.sharding.spec == PartitionSpec("model", "data")


def test_a_first_axis_that_does_not_divide_or_stands_beside_a_plan_is_refused(mesh):
    rules = {"batch": "data"}
    with pytest.raises(PlanError, match=r"x: logical axis 'batch' \(6\) does not divide"):
        shard_batch({"x": np.ones((6, 8))}, mesh, rules, first_axis="batch")
    plan = make_plan({"x": pz.nx.ones({"batch": 8})}, mesh, rules)
    with pytest.raises(RuleTypeError, match="give either plan, or mesh, rules and first_axis"):
        shard_batch({"x": np.ones(8)}, plan=plan, first_axis="batch")


def test_the_refusal_of_plain_arrays_says_how_they_are_placed(mesh):
    with pytest.raises(PlanError, match='first dimension of plain ones is, first_axis="batch"'):
        shard_batch({"x": np.ones((8, 2))}, mesh, {"batch": "data"})
    with pytest.raises(PlanError, match="no valid layout for some arrays:"):
        shard_batch({"x": pz.nx.ones({"batch": 6})}, mesh, {"batch": "data"})


def test_a_layout_places_plain_batches_by_its_own_rules(mesh):
    layout = Layout(parameters={}, compute={"batch": ("data", "model"), "features": "model"})
    placed = layout.shard_batch({"x": np.ones((8, 2))}, mesh, first_axis="batch")
    assert placed["x"].sharding == NamedSharding(mesh, PartitionSpec(("data", "model")))
    with pytest.raises(RuleTypeError, match="no array of this batch has logical axis 'batch'"):
        layout.shard_batch({"x": np.ones((8, 2))}, mesh, first_axis="examples")


def test_the_documented_example_of_plain_batches_runs_as_pasted(monkeypatch, capsys):
    monkeypatch.setenv("XLA_FLAGS", "")  # Put back afterwards.
    page = (Path(__file__).parents[2] / "docs" / "models_from_elsewhere.md").read_text("utf-8")
    section = page.partition("## Batches\n")[2].partition("\n## ")[0]
    [code] = re.findall(r"```python\n(.*?)```", section, re.DOTALL)
    exec(code, {"__name__": "pasted"})
    assert capsys.readouterr().out == "P('data',)\n"
