import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding, PartitionSpec
from penzai import pz

from penzai_shard.errors import ShardingError
from penzai_shard.meshes import auto_twin, make_mesh
from penzai_shard.training import (
    TrainState,
    build_train_step_fn,
    shard_batch,
    train_state_sharding,
)

RULES = {"features": None, "features_out": "model", "batch": "data"}


def initial(model, optimizer=None, **kwargs):
    return TrainState.initial_state(
        model, optimizer or optax.adam(1e-2), jax.random.key(3), **kwargs
    )


def values(tree):
    return [np.asarray(leaf) for leaf in jax.tree.leaves(tree)]


def assert_close(a, b, **kwargs):
    for left, right in zip(values(a), values(b), strict=True):
        np.testing.assert_allclose(left, right, **({"rtol": 1e-5, "atol": 1e-6} | kwargs))


def _assert_lies(leaf, sharding):
    assert leaf.sharding == sharding
    assert leaf.sharding.shard_shape(leaf.shape) == leaf.addressable_shards[0].data.shape


def test_inferred_layout_is_pinned_to_that_of_the_first_state(make_model, loss_fn, batch, mesh):
    state = initial(make_model())
    shardings = train_state_sharding(state, mesh, RULES)
    state = jax.device_put(state, shardings)
    step = build_train_step_fn(loss_fn, donate_params_and_state=True)
    placed = shard_batch(batch, mesh, RULES)
    for _ in range(3):
        state, _ = step(state, **placed)
        jax.tree.map(_assert_lies, state, shardings)
    assert loss_fn.traces == 1
    assert next(iter(step._programs.values())).run._cache_size() == 1


def test_state_on_one_device_follows_a_batch_on_a_mesh(make_model, loss_fn, batch, mesh):
    step = build_train_step_fn(loss_fn)
    state, _ = step(initial(make_model()), **shard_batch(batch, mesh, {"batch": "data"}))
    replicated = NamedSharding(mesh, PartitionSpec())
    assert {leaf.sharding for leaf in jax.tree.leaves(state)} == {replicated}


def test_declared_shardings_hold_exactly(make_model, loss_fn, batch, mesh):
    state = initial(make_model())
    shardings = train_state_sharding(state, mesh, RULES, {"features_out": ("data", "model")})
    step = build_train_step_fn(loss_fn, train_state_shardings=shardings)
    state = jax.device_put(state, shardings)
    for _ in range(3):
        state, _ = step(state, **shard_batch(batch, mesh, RULES))
        jax.tree.map(_assert_lies, state, shardings)
    assert next(iter(step._programs.values())).run._cache_size() == 1


def test_state_that_does_not_lie_as_declared_is_refused(make_model, loss_fn, batch, mesh):
    state = initial(make_model())
    shardings = train_state_sharding(state, mesh, RULES)
    step = build_train_step_fn(loss_fn, train_state_shardings=shardings)
    other = train_state_sharding(state, mesh, {})
    with pytest.raises(ShardingError, match=r"jax.device_put\(state, shardings\)") as caught:
        step(jax.device_put(state, other), **batch)
    weights = [p for p in caught.value.problems if p.startswith("params/mlp/Affine_0/Linear")]
    assert weights == [
        "params/mlp/Affine_0/Linear.weights: has P() on mesh data=4, model=2, "
        "declared P(None, 'model') on mesh data=4, model=2."
    ]
    assert len(caught.value.problems) == 6
    with pytest.raises(ShardingError, match="has device 0, declared"):
        step(state, **batch)


def test_shardings_of_another_state_are_refused(make_model, loss_fn, batch, mesh):
    shardings = train_state_sharding(initial(make_model()), mesh, RULES)
    step = build_train_step_fn(loss_fn, train_state_shardings=shardings)
    with pytest.raises(ShardingError, match="not shaped like this train state"):
        step(initial(make_model((8, 8))), **batch)


def test_input_shardings_place_free_arrays_and_refuse_others(make_model, loss_fn, batch, mesh):
    layout = NamedSharding(mesh, PartitionSpec("data"))
    state = jax.device_put(initial(make_model()), NamedSharding(mesh, PartitionSpec()))
    step = build_train_step_fn(loss_fn, input_kwarg_shardings={"x": layout})
    step(state, **batch)
    wrong = jax.device_put(batch["x"], NamedSharding(mesh, PartitionSpec("model")))
    with pytest.raises(ShardingError, match=r"input x: has P\('model',\)"):
        step(state, x=wrong, y=batch["y"])
    with pytest.raises(ShardingError, match=r"z: the inputs are \['x', 'y'\]"):
        build_train_step_fn(loss_fn, input_kwarg_shardings={"z": layout})(state, **batch)


@pytest.mark.parametrize("ambient", [False, True])
@pytest.mark.parametrize("jit", [True, False])
def test_explicit_meshes_work(make_model, loss_fn, batch, explicit_mesh, ambient, jit):
    reference, _ = build_train_step_fn(loss_fn)(initial(make_model()), **batch)
    layout = NamedSharding(explicit_mesh, PartitionSpec())
    model = make_model()
    for parameter in pz.unbind_params(model)[1]:
        parameter.value = jax.device_put(parameter.value, layout)
    inputs = jax.device_put(batch, NamedSharding(explicit_mesh, PartitionSpec("data")))
    with jax.set_mesh(explicit_mesh if ambient else make_mesh({"data": 4, "model": 2})):
        step = build_train_step_fn(loss_fn, jit=jit)
        state = initial(model)
        for _ in range(3):
            state, _ = step(state, **inputs)
            if int(jax.device_get(state.step)) == 1:
                assert_close(state.params, reference.params, rtol=1e-4, atol=1e-5)
    twin = auto_twin(explicit_mesh)
    assert {leaf.sharding.mesh for leaf in jax.tree.leaves(state)} == {twin}


def test_state_of_explicit_arrays_is_relabelled(linear, batch, explicit_mesh):
    layout = NamedSharding(explicit_mesh, PartitionSpec())
    state = jax.device_put(initial(linear.weights), layout)
    state, _ = build_train_step_fn(linear.loss_fn)(state, **jax.device_put(batch, layout))
    assert {x.sharding.mesh for x in jax.tree.leaves(state)} == {auto_twin(explicit_mesh)}


def test_lower_gives_the_compiled_program(linear, batch, mesh):
    step = build_train_step_fn(linear.loss_fn)
    state = initial(linear.weights)
    shardings = train_state_sharding(state, mesh, {"in": "data"})
    abstract = jax.tree.map(
        lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), state, shardings
    )
    text = step.lower(abstract, **batch).as_text()
    assert "sdy.sharding" in text
    assert step.lower(state, **batch).compile() is not None


def test_state_that_jax_may_place_stays_so(linear, batch, mesh):
    step = build_train_step_fn(linear.loss_fn, donate_params_and_state=True)
    state = initial({"w": jax.tree.map(jnp.copy, linear.weights["w"])})
    for _ in range(3):
        state, aux = step(state, **batch)
    assert not any(leaf.committed for leaf in jax.tree.leaves((state, aux)))
    (program,) = step._programs.values()
    assert program.run._cache_size() == 1
    for _ in range(3):
        state, _ = step(state, **shard_batch(batch, mesh, {"batch": "data"}))
    replicated = NamedSharding(mesh, PartitionSpec())
    assert {leaf.sharding for leaf in jax.tree.leaves(state)} == {replicated}
    assert [program.run._cache_size() for program in step._programs.values()] == [1, 1]
