"""Batches on a mesh: by name, by their first axis, and as structs."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from penzai import pz

import penzai_shard as pzs

MESH = pzs.make_mesh({"data": 4, "model": 2})
RULES = {"batch": "data", "seq": "model"}


def named():
    return pz.nx.wrap(np.arange(32.0, dtype=np.float32).reshape(8, 4)).tag("batch", "seq")


@pytest.mark.parametrize("local", [False, True])
def test_shard_batch_by_name(local):
    batch = {"x": named(), "scale": 0.5, "mask": None}
    placed = pzs.shard_batch(batch, MESH, RULES, local=local)
    assert placed["x"].data_array.sharding.spec == P("data", "model")
    np.testing.assert_array_equal(placed["x"].data_array, named().data_array)
    assert placed["scale"].sharding.is_fully_replicated
    plan = pzs.make_plan({"x": named()}, MESH, RULES)
    again = pzs.shard_batch({"x": placed["x"]}, plan=plan)
    assert again["x"].data_array.sharding == placed["x"].data_array.sharding


def test_shard_batch_first_axis():
    batch = {"x": np.ones((8, 3)), "y": np.arange(8), "n": np.float32(1), "named": named()}
    placed = pzs.shard_batch(batch, MESH, RULES, first_axis="batch")
    assert placed["x"].sharding.spec == placed["y"].sharding.spec == P("data")
    assert placed["n"].sharding.spec == P()
    assert placed["named"].data_array.sharding.spec == P("data", "model")
    assert isinstance(placed["x"], jax.Array)


def test_shard_batch_structs():
    structs = {"x": jax.eval_shape(named), "y": jax.ShapeDtypeStruct((8, 2), jnp.int32)}
    abstract = pzs.make_mesh({"data": 16, "model": 4}, abstract=True)
    for mesh, rules in ((MESH, RULES), (abstract, {"batch": None, "seq": "model"})):
        made = pzs.shard_batch(structs, mesh, rules, first_axis="batch")
        assert made["x"].data_array.sharding.spec == P(rules["batch"], "model")
        assert made["x"].data_array.sharding.mesh == mesh
        assert made["y"].sharding.spec == P(*filter(None, [rules["batch"]]))
