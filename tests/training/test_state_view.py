"""A train state shows what it holds and how that lies, the verdict first."""

import dataclasses

import jax
import jax.numpy as jnp
import optax
from penzai import pz

from penzai_shard import TrainState, build_train_step_fn, make_mesh, place


def model():
    key = jax.random.key(0)
    layers = [
        pz.nn.Linear.from_config(f"block_{i}/up", key, {"embedding": 8}, {"neurons": 8})
        for i in range(3)
    ]
    return pz.nn.Sequential(layers)


def placed_state():
    mesh = make_mesh({"data": 4, "model": 2})
    placed = place(model(), mesh, {"embedding": "data", "neurons": "model"})
    return TrainState.initial_state(
        placed,
        optax.adam(1e-3),
        jax.random.key(0),
        trainable=lambda parameter: "block_0" not in parameter.label,
    )


def test_the_table_groups_equal_blocks_and_says_what_each_part_is_for():
    table = placed_state().notebook_table()
    # Each of 3 parameters and of 2 x 2 moments has 64 numbers, an eighth of them on each device.
    assert table.text_verdict() == (
        "TrainState at step 0, 2 trainable, 1 frozen, 0 state variables; each device holds 228 B"
    )
    axes = "embedding=8/data, neurons=8/model"
    alike = "as the trained parameters"
    assert sorted(table.text_rows()) == sorted(
        [
            ("block_0/up.weights", "1", axes, "float32", "32 B", "frozen"),
            ("block_*/up.weights", "2", axes, "float32", "64 B", "trained"),
            ("opt_state/0/count", "1", "scalar", "int32", "4 B", "optimizer"),
            ("opt_state/0/mu/...", "2", alike, "float32", "64 B", "optimizer"),
            ("opt_state/0/nu/...", "2", alike, "float32", "64 B", "optimizer"),
        ]
    )


def test_moments_that_lie_otherwise_than_their_parameters_are_listed():
    state = placed_state()
    moments = state.opt_state[0]
    (name, *_) = moments.mu
    moved = {**moments.mu, name: jax.device_put(moments.mu[name], jax.devices()[0])}
    state = dataclasses.replace(state, opt_state=(moments._replace(mu=moved), *state.opt_state[1:]))
    shown = {(row[0], row[1], row[4]) for row in state.notebook_table().text_rows()}
    assert ("opt_state/0/nu/...", "2", "64 B") in shown
    assert ("opt_state/0/mu/" + name, "1", "256 B") in shown


def test_a_view_of_a_state_changes_nothing_in_it():
    def loss_fn(model, rng, state, x):
        return model(x).untag("batch", "neurons").mean().unwrap(), state, {}

    # A state of a step builds its fields when they are read; showing it reads none for good.
    square = TrainState.initial_state(
        pz.nn.Linear.from_config("w", jax.random.key(0), {"embedding": 4}, {"neurons": 4}),
        optax.sgd(0.1),
        jax.random.key(0),
    )
    x = pz.nx.ones({"batch": 2, "embedding": 4})
    step = build_train_step_fn(loss_fn, donate_params_and_state=True)
    after, _ = step(square, x=x)
    fields = set(vars(after))
    assert "at step 1, " in after._repr_html_()
    assert set(vars(after)) == fields
    # And of a donated one it says that it was donated.
    step(after, x=x)
    assert "was donated" in after._repr_html_()


def test_an_abstract_state_has_a_view_too():
    state = jax.eval_shape(lambda: TrainState.initial_state(
        {"w": jnp.ones((2, 3))}, optax.sgd(0.1), jax.random.key(0)
    ))  # fmt: skip
    table = state.notebook_table()
    assert table.text_verdict().startswith("TrainState at a step not known yet, 1 trainable")
    assert ("w", "1", "2, 3", "float32", "24 B", "trained") in table.text_rows()
