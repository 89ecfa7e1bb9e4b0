"""The compiled step updates each parameter in the layout of its moments."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import penzai_shard as pzs

MESH = pzs.make_mesh({"data": 8})
NAMES = {"up*": ("embed", "mlp"), "down*": ("mlp", "embed"), "b*": ("embed",)}


def make_arrays():
    key, arrays = jax.random.key(0), {}
    for block in range(3):
        for name, shape in {"up": (32, 64), "down": (64, 32), "b": (32,)}.items():
            arrays[f"{name}{block}"] = jax.random.normal(key, shape) / 8
    return arrays


def loss_fn(model, rng, state, x):
    for block in range(3):
        hidden = jax.nn.gelu(x @ model[f"up{block}"])
        x = x + hidden @ model[f"down{block}"] + model[f"b{block}"]
    return jnp.mean(x**2), state, {}


def test_step_updates_in_the_layout_of_the_moments():
    model = pzs.name_axes(make_arrays(), NAMES)
    options = {"optimizer_def": optax.adamw(1e-3), "root_rng": jax.random.key(0)}
    state = pzs.TrainState.initial_state(model, **options, plain_arrays=True)
    state = jax.device_put(state, pzs.train_state_sharding(state, MESH, {}, {"embed": "data"}))
    x = jax.device_put(np.ones((32, 32), np.float32), NamedSharding(MESH, P("data")))
    step = pzs.build_train_step_fn(loss_fn, donate_params_and_state=True)
    lowered = step.lower(state, x=x)
    for path in state.trained_arrays:
        assert f"gradient/{path}/sharding_constraint" in lowered.as_text(debug_info=True)
    text = lowered.compile().as_text()
    # Each device computes the moments of its own part, and gathers parameters only.
    shapes = set(re.findall(r"f32\[(\d+),(\d+)\]\S* sqrt", text))
    assert shapes == {("4", "64"), ("64", "4")}
    assert len(re.findall(r" all-gather(?:-start)?\(", text)) <= len(state.trained_arrays)
    after, _ = step(state, x=x)
    assert after.trained_arrays["up0"].sharding.is_fully_replicated
    assert after.opt_arrays[0].mu["up0"].sharding.spec == P("data")
