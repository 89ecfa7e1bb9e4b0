"""`Layout.build`: a state and a step in one line, every array where it stays."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from penzai import pz

from penzai_shard import Layout, make_mesh, strip
from tests.model_families import transformer

build_model = functools.partial(transformer, "llama", embedding_dim=16, mlp_hidden_dim=32)
TOKENS = pz.nx.wrap(jnp.arange(8 * 9).reshape(8, 9) % 16, "batch", "seq")


def loss_fn(model, rng, state, tokens):
    logits = model(tokens[{"seq": pz.slice[:-1]}])
    log_probs = pz.nx.nmap(jax.nn.log_softmax)(logits.untag("vocabulary")).tag("vocabulary")
    right = log_probs[{"vocabulary": tokens[{"seq": pz.slice[1:]}]}]
    loss = -right.untag("batch", "seq").mean().unwrap()
    return loss, state, {"loss": loss}


def losses(layout, mesh, steps=3):
    state, step = layout.build(
        build_model,
        jax.random.key(0),
        mesh=mesh,
        loss_fn=loss_fn,
        optimizer=optax.adamw(1e-2),
        rng=jax.random.key(1),
    )
    history = []
    for _ in range(steps):
        state, aux = step(state, tokens=layout.shard_batch(TOKENS, mesh))
        history.append(float(aux["loss"]))
    return history, state


@functools.cache
def losses_on_one_device():
    return losses(Layout.data_parallel(), make_mesh({"data": 1}, jax.devices()[:1]))[0]


LAYOUTS = {
    "data_parallel": (Layout.data_parallel(), {"data": 8}),
    "zero1": (Layout.zero1(min_size=64), {"data": 8}),
    "fully_sharded": (Layout.fully_sharded(min_size=64), {"data": 8}),
    "fully_sharded, gathered again": (
        Layout.fully_sharded(min_size=64, reshard_after_forward=True),
        {"data": 8},
    ),
    "tensor_parallel": (Layout.tensor_parallel(), {"data": 4, "model": 2}),
    "two_dimensional": (Layout.two_dimensional(min_size=64), {"data": 4, "model": 2}),
    "hybrid": (Layout.hybrid(min_size=64), {"replica": 2, "data": 4}),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_every_preset_trains_as_one_device_does(name):
    layout, shape = LAYOUTS[name]
    history, state = losses(layout, make_mesh(shape))
    np.testing.assert_allclose(history, losses_on_one_device(), rtol=2e-5)
    assert strip(state.model).body is not None
