"""Batches on a mesh: by name, by their first axis, and as structs."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from penzai import pz

import penzai_shard as pzs
from penzai_shard import PlanError, RuleTypeError, ShardingError

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
    again = pzs.shard_batch(placed, MESH, RULES)
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
    made = pzs.shard_batch(structs, MESH, RULES, first_axis="batch")
    assert made["x"].data_array.sharding.spec == P("data", "model")
    assert made["y"].sharding.spec == P("data")
    abstract = pzs.make_mesh({"data": 16, "model": 4}, abstract=True)
    rules = {"batch": None, "seq": "model"}
    assert pzs.shard_batch(structs["x"], abstract, rules).data_array.sharding.mesh == abstract


def test_shard_batch_plan():
    plan = pzs.make_plan({"x": named()}, MESH, RULES)
    placed = pzs.shard_batch({"x": named()}, plan=plan)
    assert placed["x"].data_array.sharding.spec == P("data", "model")


def test_shard_batch_refusals():
    cases = [
        (PlanError, "x", lambda: pzs.shard_batch({"x": np.ones((8, 2))}, MESH, RULES)),
        (
            PlanError,
            "y",
            lambda: pzs.shard_batch({"y": np.ones(6)}, MESH, RULES, first_axis="batch"),
        ),
        (ShardingError, "t", lambda: pzs.shard_batch({"t": np.int64(2**40)}, MESH, RULES)),
        (
            RuleTypeError,
            "local",
            lambda: pzs.shard_batch(jax.eval_shape(named), MESH, RULES, local=True),
        ),
        (
            RuleTypeError,
            "first_axis",
            lambda: pzs.shard_batch(
                named(), plan=pzs.make_plan(named(), MESH, RULES), first_axis="batch"
            ),
        ),
    ]
    for error, path, call in cases:
        with pytest.raises(error) as caught:
            call()
        assert [problem.path for problem in caught.value.problems] == [path]
