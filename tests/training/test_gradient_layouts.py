"""Gradients stay split, and updates are computed where the optimizer keeps its part."""

import dataclasses
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P
from penzai import pz

from penzai_shard.meshes import make_mesh
from penzai_shard.training import (
    TrainState,
    build_train_step_fn,
    shard_batch,
    train_state_sharding,
)
from penzai_shard.training.declared_layout import DeclaredState
from penzai_shard.training.train_state import to_flat
from penzai_shard.training.update_layout import UpdateLayout
from tests.simulated_devices import USERS_FUSIONS

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
    # Which of the gradients the loop carries in which order is a matter of fusions.
    text = step.lower(state, **batch).compile(compiler_options=USERS_FUSIONS).as_text()
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


def layouts_of(optimizer, rules, optimizer_rules, changed=lambda shardings: shardings):
    """The specs of parameters in the loss and in the update, by name."""
    mesh = make_mesh({"data": 4, "model": 2})
    state = jax.eval_shape(
        lambda: TrainState.initial_state(weights(), optimizer, jax.random.key(0))
    )
    shardings = changed(
        train_state_sharding(state, mesh, rules, optimizer_rules, on_unnamed="replicate")
    )
    flat = to_flat(state)
    declared, _ = flat.form.parted(DeclaredState(shardings).of(flat.form))
    layout = UpdateLayout.of(state, flat.form, declared)
    return [
        {name: None if found is None else found.spec for name, (found,) in sorted(part.items())}
        for part in (layout.loss, layout.update)
    ]


WHOLE = {"embeddings": P(), "readout": P()}
SPLIT = {"embeddings": P(None, "data"), "readout": P("data")}


@pytest.mark.parametrize(
    ("optimizer", "update"),
    [
        (optax.sgd(0.1), WHOLE),
        (optax.adam(0.1), SPLIT),
        (optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(0.1)), SPLIT),
        (optax.masked(optax.adam(0.1), {"embeddings": True, "readout": False}), None),
        (
            optax.multi_transform(
                {"a": optax.adam(0.1), "b": optax.sgd(0.1)}, {"embeddings": "a", "readout": "b"}
            ),
            None,
        ),
        # Rows and columns are not as long as the parameter.
        (optax.adafactor(0.1, min_dim_size_to_factor=8), WHOLE),
        (optax.MultiSteps(optax.sgd(0.1), 2).gradient_transformation(), SPLIT),
        (optax.lbfgs(memory_size=3), SPLIT),
    ],
)
def test_an_update_is_computed_where_the_moments_are(optimizer, update):
    loss, found = layouts_of(optimizer, {}, {"features": "data"})
    assert loss == WHOLE
    # Of a parameter without moments the update is where the parameter is.
    assert found == (update or {"embeddings": SPLIT["embeddings"], "readout": P()})


def test_moments_split_further_than_parameters_take_the_gradient_with_them():
    optimizer = optax.adam(0.1)
    loss, update = layouts_of(optimizer, {"features": "data"}, {"features": ("data", "model")})
    assert loss["readout"] == P("data")
    assert update["readout"] == P(("data", "model"))


def test_what_is_not_declared_is_left_to_the_compiler():
    def undeclared(shardings):
        return dataclasses.replace(shardings, params=None, opt_state=None)

    nothing = {"embeddings": None, "readout": None}
    assert layouts_of(optax.adam(0.1), {}, None, undeclared) == [nothing, nothing]


def test_moments_in_host_memory_are_computed_with_on_the_devices():
    def on_host(shardings):
        moved = jax.tree.map(lambda s: s.with_memory_kind("pinned_host"), shardings.opt_state)
        return dataclasses.replace(shardings, opt_state=moved)

    _, update = layouts_of(optax.adam(0.1), {}, {"features": "data"}, on_host)
    assert update == SPLIT
