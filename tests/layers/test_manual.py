"""Random keys of code that runs per device."""

import jax
import numpy as np
from jax.sharding import PartitionSpec as P
from penzai import pz

import penzai_shard as pzs

MESH = pzs.make_mesh({"data": 4, "model": 2})


def draw(key, axis_name, make=lambda key: key):
    """What each device draws, as an array of the mesh's shape."""

    def draw_part(key):
        folded = pzs.fold_rng_over_axis(make(key), axis_name)
        key = folded.next_key() if isinstance(folded, pz.RandomStream) else folded
        return jax.random.uniform(key, (1, 1))

    specs = {"in_specs": P(), "out_specs": P("data", "model")}
    return np.asarray(jax.jit(jax.shard_map(draw_part, mesh=MESH, **specs))(key))


def test_fold_rng_over_axis_numbers():
    key = jax.random.key(0)
    by_device = [jax.random.uniform(jax.random.fold_in(key, i)) for i in range(8)]
    np.testing.assert_array_equal(draw(key, "data"), np.array([by_device[:4]] * 2).T)
    np.testing.assert_array_equal(draw(key, ("data", "model")).reshape(-1), by_device)
    np.testing.assert_array_equal(draw(key, ("model", "data")).T.reshape(-1), by_device)
    stream = draw(key, "data", pz.RandomStream.from_base_key)
    for numbers in (stream, draw(jax.random.PRNGKey(0), "data")):
        assert [len(set(numbers[:, 0])), len(set(numbers[0]))] == [4, 1]
