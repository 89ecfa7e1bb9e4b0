"""Gradients stay split, and updates are computed where the optimizer keeps its part."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from penzai import pz

from penzai_shard.meshes import make_mesh
from penzai_shard.training import (
    TrainState,
    build_train_step_fn,
    shard_batch,
    train_state_sharding,
)

SIZE = 64


def weights():
    embedding = jnp.sin(jnp.arange(SIZE * SIZE, dtype=jnp.float32)).reshape(SIZE, SIZE)
    return {
        "embeddings": pz.nx.wrap(embedding, "vocabulary", "features"),
        "readout": pz.nx.wrap(jnp.cos(embedding), "features", "classes"),
    }


def loss_fn(model, rng, state, tokens):
    """Looks tokens up and predicts the next class: the first gradient is a scatter."""
    found = model["embeddings"].unwrap("vocabulary", "features")[tokens.unwrap("batch")]
    logits = found @ model["readout"].unwrap("features", "classes")
    loss = -jnp.mean(jax.nn.log_softmax(logits)[:, 0])
    return loss, state, {"loss": loss}


def rolled(momentum=0.9):
    """An optimizer whose update needs whole gradients, so that nothing else keeps them split."""

    def roll(grads, _):
        return jax.tree.map(lambda g: jnp.roll(g.reshape(-1), 1).reshape(g.shape), grads)

    return optax.chain(optax.stateless(roll), optax.sgd(0.5, momentum=momentum))


LAYOUTS = {
    "fully_sharded": ({"features": "data"}, None),
    "zero1": ({}, {"features": "data"}),
}


def laid_out(mesh, rules, optimizer_rules):
    state = TrainState.initial_state(weights(), rolled(), jax.random.key(0))
    shardings = train_state_sharding(state, mesh, rules, optimizer_rules)
    return jax.device_put(state, shardings), shardings


@pytest.fixture(scope="module")
def tokens():
    return pz.nx.wrap(jnp.arange(32) * 7 % SIZE, "batch")


@pytest.fixture(scope="module")
def expected(tokens):
    """Parameters after two steps on one device."""
    state = TrainState.initial_state(weights(), rolled(), jax.random.key(0))
    step = build_train_step_fn(loss_fn)
    for _ in range(2):
        state, _ = step(state, tokens=tokens)
    return state.params


@pytest.mark.parametrize("layout", LAYOUTS)
def test_accumulated_gradient_is_split_in_the_loop_and_in_the_update(layout, tokens, expected):
    mesh = make_mesh({"data": 8})
    state, shardings = laid_out(mesh, *LAYOUTS[layout])
    step = build_train_step_fn(loss_fn, train_state_shardings=shardings, accumulate_steps=4)
    batch = {"tokens": shard_batch(tokens, mesh, {"batch": "data"})}
    text = step.lower(state, **batch).compile().as_text()
    (loop,) = re.findall(r"= \((.*)\) while\(", text)
    # The loop carries its counter, the two gradients, and then what it only reads.
    carried = re.findall(r"\w+\[[\d,]*\]", loop)
    assert carried[:3] == ["s32[]", f"f32[{SIZE},{SIZE // 8}]", f"f32[{SIZE // 8},{SIZE}]"]
    for _ in range(2):
        state, _ = step(state, **batch)
    for name, value in expected.items():
        np.testing.assert_allclose(
            state.params[name].data_array, value.data_array, rtol=1e-4, atol=1e-5
        )
