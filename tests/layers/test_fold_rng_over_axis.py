"""Random keys of code that runs per device."""

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from penzai_shard import fold_rng_over_axis
from penzai_shard.errors import RuleTypeError, ShardingError
from penzai_shard.meshes import make_mesh


@pytest.fixture(scope="module")
def mesh():
    return make_mesh({"data": 4, "model": 2})


def drawn(mesh, mesh_axis, key=None, **options):
    """What each device draws, as an array of the mesh's shape."""

    def draw(rng):
        return jax.random.uniform(fold_rng_over_axis(rng, mesh_axis), (1, 1))

    mapped = jax.shard_map(
        draw, mesh=mesh, in_specs=PartitionSpec(), out_specs=PartitionSpec("data", "model")
    )
    return np.asarray(jax.jit(mapped)(jax.random.key(0) if key is None else key))


def test_devices_along_the_axis_differ_and_others_agree(mesh):
    numbers = drawn(mesh, "data")
    assert len(set(numbers[:, 0])) == 4
    np.testing.assert_array_equal(numbers[:, 0], numbers[:, 1])
    expected = [jax.random.uniform(jax.random.fold_in(jax.random.key(0), i)) for i in range(4)]
    np.testing.assert_array_equal(numbers[:, 0], expected)


def test_several_axes_count_as_one_the_first_major(mesh):
    numbers = drawn(mesh, ("data", "model"))
    expected = [jax.random.uniform(jax.random.fold_in(jax.random.key(0), i)) for i in range(8)]
    np.testing.assert_array_equal(numbers.reshape(-1), expected)
    np.testing.assert_array_equal(
        drawn(mesh, ("model", "data")).T.reshape(-1), expected, "the last is the minor one"
    )


def test_untyped_keys_are_folded_too(mesh):
    assert len(set(drawn(mesh, "data", jax.random.PRNGKey(0))[:, 0])) == 4


@pytest.mark.parametrize("jit", [False, True])
def test_code_that_the_compiler_splits_is_told_that_nothing_is_to_be_folded(jit):
    def fold(rng):
        return fold_rng_over_axis(rng, "data")

    with pytest.raises(
        ShardingError, match="needs code that runs per device along mesh axis 'data'"
    ) as caught:
        (jax.jit(fold) if jit else fold)(jax.random.key(0))
    text = str(caught.value)
    assert "build_train_step_fn(..., manual_axes=('data',))" in text
    assert "taken over here: none" in text
    assert "use rng as it is" in text


def test_a_mesh_axis_that_is_not_taken_over_is_named(mesh):
    def fold(rng):
        return fold_rng_over_axis(rng, "model")

    mapped = jax.shard_map(
        fold, mesh=mesh, in_specs=PartitionSpec(), out_specs=PartitionSpec(), axis_names={"data"}
    )
    with pytest.raises(ShardingError, match="mesh axis 'model'; the mesh axes taken over here: 'd"):
        jax.jit(mapped)(jax.random.key(0))


@pytest.mark.parametrize("rng", [0, None, jax.numpy.ones(2), "key"])
def test_something_else_than_a_key_is_refused(rng):
    with pytest.raises(RuleTypeError, match=r"rng must be a random key, not a \w+\. Pass a key"):
        fold_rng_over_axis(rng, "data")


@pytest.mark.parametrize("axis", [0, None, ("data", 1)])
def test_something_else_than_mesh_axes_is_refused(axis):
    with pytest.raises(RuleTypeError, match="mesh_axis must be a name or a sequence of names"):
        fold_rng_over_axis(jax.random.key(0), axis)
