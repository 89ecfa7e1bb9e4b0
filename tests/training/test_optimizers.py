"""Optimizers of optax: their state keeps its layout, and they get what they ask for."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from penzai import pz

import penzai_shard as pzs
from tests.models import OPTIMIZERS
from tests.training.losses import KEY, mean_square

MESH = pzs.make_mesh({"data": 4, "model": 2})
RULES = {"in": "data", "out": "model"}
X = np.linspace(-1, 1, 64, dtype=np.float32).reshape(4, 16)


def make_model():
    w = jax.random.normal(KEY, (16, 8)) / 4
    return {"w": pz.nx.wrap(w, "in", "out"), "b": pz.nx.zeros({"out": 8})}


def loss_fn(model, rng, state, x):
    out = x @ model["w"].unwrap("in", "out") + model["b"].unwrap("out")
    return mean_square(out), state, {}


def run_steps(state, **options):
    step = pzs.build_train_step_fn(loss_fn, step_metrics=["loss", "gradient_norm"], **options)
    losses = []
    for _ in range(3):
        state, aux = step(state, x=X)
        losses.append(float(aux["loss"]))
    (prepared,) = step.programs.values()
    assert prepared.run._cache_size() == 1
    return state, losses


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_state_of_each_optimizer_keeps_its_layout(name):
    make = OPTIMIZERS[name]
    state = pzs.TrainState.initial_state(make_model(), make(0.01), KEY)
    shardings = pzs.train_state_sharding(state, MESH, RULES)
    placed = jax.device_put(state, shardings)
    after, _ = run_steps(placed, train_state_shardings=shardings, donate_params_and_state=True)
    arrays = zip(jax.tree.leaves(after), jax.tree.leaves(shardings), strict=True)
    assert all(array.sharding == sharding for array, sharding in arrays)
    on_mesh = pzs.TrainState.initial_state(pzs.place(make_model(), MESH, RULES), make(0.01), KEY)
    pairs = zip(jax.tree.leaves(on_mesh), jax.tree.leaves(shardings), strict=True)
    assert all(array.sharding == sharding for array, sharding in pairs)


def test_optimizer_gets_what_it_asks_for():
    asked = {}

    def update(updates, state, params=None, **extra):
        asked.update(extra)
        asked["at_zero"] = extra["value_fn"](jax.tree.map(jnp.zeros_like, params))
        slope = extra["grad_fn"](params)
        same = jax.tree.map(lambda a, b: jnp.allclose(a, b), slope, updates)
        return updates, {"same": jnp.stack(jax.tree.leaves(same)).all(), "zero": asked["at_zero"]}

    optimizer = optax.GradientTransformationExtraArgs(
        lambda params: {"same": jnp.zeros((), bool), "zero": jnp.zeros(())}, update
    )
    state = pzs.TrainState.initial_state(make_model(), optimizer, KEY)
    state, _ = pzs.build_train_step_fn(loss_fn)(state, x=X)
    assert asked.keys() == {"value", "grad", "value_fn", "grad_fn", "obj_fn", "at_zero"}
    assert bool(state.opt_arrays["same"])
    assert float(state.opt_arrays["zero"]) == 1


def test_bfloat16_parameters_keep_their_dtype():
    model = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), make_model())
    state = pzs.TrainState.initial_state(model, optax.adamw(0.01), KEY)
    dtypes = [leaf.dtype for leaf in jax.tree.leaves(state)]
    state, losses = run_steps(state)
    assert [leaf.dtype for leaf in jax.tree.leaves(state)] == dtypes
    assert losses[-1] < losses[0]
