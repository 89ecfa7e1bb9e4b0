"""A train state comes back as it was, whatever its optimizer; a run goes on as if never stopped."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from penzai import pz

from penzai_shard.checkpointing import CheckpointManager, restore_train_state, save_train_state
from penzai_shard.training import (
    DynamicLossScaling,
    TrainState,
    build_train_step_fn,
    shard_batch,
    train_state_sharding,
)
from tests.training.test_optimizer_states import ASKING, OPTIMIZERS, small_weights

EVERY = {**OPTIMIZERS, **ASKING}
RULES = {"features": "data", "features_out": "model"}
# What is most easily lost on the way.
SPECIAL = [np.nan, np.inf, -np.inf, -0.0, 1e-45, 3.4e38]


def abstract_state(optimizer):
    """The state that a step begins with, without its values."""

    def build():
        weights = {f"{name}.weights": value for name, value in small_weights().items()}
        counts = {"seen": jnp.int32(0), "mean": jnp.zeros(3, jnp.bfloat16)}
        return TrainState.initial_state(
            weights, optimizer(), jax.random.key(0), counts, on_unnamed="replicate"
        )

    return jax.eval_shape(build)


def filled(state, shardings, seed):
    """A state with random values, none of which is as an initial one."""
    random = np.random.default_rng(seed)

    def fill(leaf, sharding):
        if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            return jax.device_put(jax.random.key(seed), sharding)
        if jnp.issubdtype(leaf.dtype, jnp.floating):
            values = random.normal(size=leaf.size)
            values[: len(SPECIAL)] = SPECIAL[: leaf.size]
        else:
            values = random.integers(0, 2 if leaf.dtype == bool else 1000, size=leaf.size)
        with np.errstate(over="ignore"):
            return jax.device_put(values.reshape(leaf.shape).astype(leaf.dtype), sharding)

    return jax.tree.map(fill, state, shardings)


def bits(leaf):
    if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        leaf = jax.random.key_data(leaf)
    return np.asarray(leaf).tobytes()


@pytest.fixture(scope="module")
def states(tmp_path_factory, wide, tall):
    """By optimizer: a state, and what came back of it on another mesh; all were saved as one."""
    abstract = {name: abstract_state(optimizer) for name, optimizer in EVERY.items()}

    def laid_out(mesh):
        return {
            name: train_state_sharding(state, mesh, RULES, on_unnamed="replicate")
            for name, state in abstract.items()
        }

    given = {
        name: filled(abstract[name], shardings, seed)
        for seed, (name, shardings) in enumerate(laid_out(wide).items())
    }
    path = save_train_state(tmp_path_factory.mktemp("states") / "all", given)
    elsewhere = laid_out(tall)
    restored = restore_train_state(path, abstract, shardings=elsewhere)
    return {name: (given[name], restored[name], elsewhere[name]) for name in EVERY}


@pytest.mark.parametrize("name", list(EVERY))
def test_the_state_of_every_optimizer_comes_back_bit_for_bit_on_another_mesh(states, name):
    given, restored, shardings = states[name]
    assert jax.tree.structure(restored) == jax.tree.structure(given)
    leaves = [jax.tree.leaves(tree) for tree in (given, restored, shardings)]
    assert len(leaves[0]) > 5
    for before, after, sharding in zip(*leaves, strict=True):
        assert (after.shape, after.dtype) == (before.shape, before.dtype)
        assert after.sharding == sharding
        assert bits(after) == bits(before)


# A whole run

EXAMPLES, STEPS, SAVED_AT = 16, 10, 5
OPTIMIZER = optax.MultiSteps(optax.adamw(1e-2, eps=1e-3), 2).gradient_transformation()
SCALING = DynamicLossScaling(growth_interval=3)
# Sums over examples, of which devices of another mesh have other parts, are taken in another order:
# each of the steps since rounds a sum of so many terms of float32 anew.
BOUND = (STEPS - SAVED_AT) * EXAMPLES * 2.0**-24


def loss_fn(model, rng, state, x):
    """It depends on all that a state has: parameters, the random key, what was seen before."""
    up = model["up"].unwrap("features", "features_out")
    down = model["down"].unwrap("features_out", "features")
    x = x.unwrap("batch", "features")
    noise = jax.random.normal(rng, x.shape)
    out = jnp.tanh((x + 0.1 * noise) @ up) @ down + model["bias"].unwrap("features")
    loss = jnp.mean((out - 1) ** 2)
    mean = 0.9 * state["mean"] + 0.1 * loss
    return loss * mean, {"mean": mean}, {"loss": loss}


def batch_of(number, mesh):
    values = np.random.default_rng(number).normal(size=(EXAMPLES, 8)).astype("float32")
    return shard_batch({"x": pz.nx.wrap(values, "batch", "features")}, mesh, {"batch": "data"})


def initial():
    return TrainState.initial_state(
        small_weights(),
        OPTIMIZER,
        jax.random.key(0),
        {"mean": jnp.zeros(())},
        loss_scaling=SCALING,
        skip_nonfinite=True,
    )


@pytest.fixture(scope="module")
def run(tmp_path_factory, wide, tall):
    """A run that was never stopped, its step, and a manager that has saved the fifth one."""
    step = build_train_step_fn(
        loss_fn, donate_params_and_state=True, loss_scaling=SCALING, skip_nonfinite=True
    )

    def go_on(state, mesh):
        losses = []
        while int(state.step) < STEPS:
            state, aux = step(state, **batch_of(int(state.step), mesh))
            losses.append(float(aux["loss"]))
            if int(state.step) == SAVED_AT and mesh is wide and not manager.steps():
                manager.save(SAVED_AT, state)
        return state, losses

    manager = CheckpointManager(tmp_path_factory.mktemp("run"))
    state = jax.device_put(initial(), train_state_sharding(initial(), wide, RULES))
    whole = go_on(state, wide)
    manager.wait()
    return go_on, manager, whole


def test_a_run_restored_on_another_mesh_and_back_goes_on_bit_for_bit(run, tmp_path, wide, tall):
    go_on, manager, (whole, losses) = run
    elsewhere = manager.restore(initial(), mesh=tall, rules=RULES)
    path = save_train_state(tmp_path / "elsewhere", elsewhere)
    abstract = jax.eval_shape(initial)
    for restored in (
        manager.restore(abstract, mesh=wide, rules=RULES),
        restore_train_state(path, abstract, wide, RULES),
    ):
        assert int(restored.step) == SAVED_AT
        state, later = go_on(restored, wide)
        assert later == losses[SAVED_AT:]
        assert jax.tree.structure(state) == jax.tree.structure(whole)
        for after, before in zip(jax.tree.leaves(state), jax.tree.leaves(whole), strict=True):
            assert after.sharding == before.sharding
            assert bits(after) == bits(before)


def test_a_run_restored_on_another_mesh_differs_by_the_rounding_of_sums_alone(run, tall):
    go_on, manager, (whole, losses) = run
    state, later = go_on(manager.restore(initial(), mesh=tall, rules=RULES), tall)
    np.testing.assert_allclose(later, losses[SAVED_AT:], rtol=BOUND)
    for after, before in zip(jax.tree.leaves(state), jax.tree.leaves(whole), strict=True):
        if not jnp.issubdtype(before.dtype, jnp.floating):
            assert bits(after) == bits(before)
            continue
        after, before = np.asarray(after), np.asarray(before)
        np.testing.assert_allclose(after, before, rtol=0, atol=BOUND * np.abs(before).max())
    # Far less than what the steps have changed.
    start = manager.restore(initial(), mesh=tall, rules=RULES)
    for name, value in whole.params.items():
        moved = np.abs(np.asarray(value.data_array) - np.asarray(start.params[name].data_array))
        assert moved.max() > 1000 * BOUND
