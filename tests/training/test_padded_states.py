"""Train states whose arrays are stored padded: true lengths in a step, zeros in the padding."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from penzai import pz

from penzai_shard import (
    TrainState,
    build_train_step_fn,
    make_mesh,
    place,
)
from penzai_shard.padded_arrays import is_padded, without_padding
from tests.training.test_optimizer_states import OPTIMIZERS as COMMON

MESH = make_mesh({"data": 4, "model": 2})
RULES = {"in": "data", "out": "model", "batch": "data"}

OPTIMIZERS = COMMON | {
    "adafactor of small arrays": lambda: optax.adafactor(1e-2, min_dim_size_to_factor=2),
    "noisy_sgd": lambda: optax.noisy_sgd(1e-2, key=jax.random.key(5)),
    "ema": lambda: optax.chain(optax.adam(1e-2), optax.ema(0.9)),
}


def weights(prefix="", seed=0):
    w, b = (jax.random.key(seed + i) for i in range(2))
    return {
        f"{prefix}weights": pz.nx.wrap(jax.random.normal(w, (5, 7)), "in", "out"),
        f"{prefix}bias": pz.nx.wrap(jax.random.normal(b, (7,)), "out"),
    }


def inputs(examples=8):
    return {"x": pz.nx.wrap(jax.random.normal(jax.random.key(9), (examples, 5)), "batch", "in")}


def squares(model, rng, state, x, prefix=""):
    y = (model[f"{prefix}weights"] * x).untag("in").sum() + model[f"{prefix}bias"]
    loss = jnp.mean(y.untag("batch", "out").unwrap() ** 2)
    return loss, state, {"loss": loss}


def padded(tree, mesh=MESH, rules=RULES):
    return place(tree, mesh, rules, on_indivisible="pad")


def padded_nodes(tree):
    return [node for node in jax.tree.leaves(tree, is_leaf=is_padded) if is_padded(node)]


def assert_padding_is_zero(tree):
    nodes = padded_nodes(tree)
    assert nodes
    for node in nodes:
        padding = np.array(node.stored)
        assert padding.shape != node.data_array.shape
        padding[tuple(map(slice, node.data_array.shape))] = 0
        assert not padding.any()


def numbers(tree):
    leaves = jax.tree.leaves(without_padding(tree))
    return [
        np.asarray(jax.random.key_data(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x)
        for x in leaves
    ]


def assert_same(tree, other, tolerance=1e-5):
    for one, two in zip(numbers(tree), numbers(other), strict=True):
        np.testing.assert_allclose(one, two, rtol=tolerance, atol=tolerance)


def trained(model, optimizer, loss_fn=squares, steps=3, **options):
    state = TrainState.initial_state(model, optimizer, jax.random.key(1))
    step = build_train_step_fn(loss_fn, **options)
    auxes = []
    for _ in range(steps):
        state, aux = step(state, **inputs())
        auxes.append(aux)
    return state, auxes


def of_all(model, rng, state, x):
    """The sum of the losses of a copy of the weights for each optimizer."""
    losses = {name: squares(model, rng, state, x, f"{name}/")[0] for name in OPTIMIZERS}
    return sum(losses.values()), state, losses


@pytest.fixture(scope="module")
def all_optimizers():
    """A few steps of all optimizers, each with weights of its own; and the same without padding."""
    model = {k: v for name in OPTIMIZERS for k, v in weights(f"{name}/").items()}
    optimizer = optax.partition(
        {name: make() for name, make in OPTIMIZERS.items()},
        {k: k.partition("/")[0] for k in model},
    )
    return trained(padded(model), optimizer, of_all), trained(model, optimizer, of_all)


@pytest.mark.parametrize("name", list(OPTIMIZERS))
def test_losses_parameters_and_states_are_those_of_true_lengths(all_optimizers, name):
    (state, losses), (expected, expected_losses) = all_optimizers
    assert_same([x[name] for x in losses], [x[name] for x in expected_losses])
    of_one = [
        (
            [x for key, x in each.params.items() if key.startswith(f"{name}/")],
            each.opt_state.inner_states[name],
        )
        for each in (state, expected)
    ]
    assert_same(*of_one)
    assert_padding_is_zero(of_one[0][0])
    if padded_nodes(of_one[0][1]):
        assert_padding_is_zero(of_one[0][1])
