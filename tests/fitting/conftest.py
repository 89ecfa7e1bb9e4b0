"""One tiny model on eight devices, its step compiled once for all tests of a file."""

import collections
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from penzai import pz

from penzai_shard import TrainState, build_train_step_fn, make_mesh, place, shard_batch

RULES = {"batch": "data", "features": None}


class CountedLoss:
    """A squared error with noise of the step's key, which counts how often it is traced."""

    def __init__(self):
        self.traces = 0

    def __call__(self, model, rng, state, x):
        self.traces += 1
        weights = model["w"].unwrap("features")
        values = x.unwrap("batch", "seq", "features")
        noise = jax.random.normal(rng, weights.shape)
        loss = jnp.mean((values @ weights - 1.0) ** 2) + 0.1 * jnp.mean(noise * weights)
        return loss, state, {"loss": loss, "largest": jnp.max(jnp.abs(weights))}


Setting = collections.namedtuple("Setting", "make_state step loss_fn mesh place")


@pytest.fixture(scope="module")
def setting():
    mesh = make_mesh({"data": 8})
    loss_fn = CountedLoss()

    def make_state():
        optimizer = optax.inject_hyperparams(optax.adam)(learning_rate=0.125)
        model = place({"w": pz.nx.wrap(jnp.zeros(4), "features")}, mesh, RULES)
        return TrainState.initial_state(model, optimizer, jax.random.key(0))

    step = build_train_step_fn(loss_fn, donate_params_and_state=True)
    return Setting(
        make_state, step, loss_fn, mesh, functools.partial(shard_batch, mesh=mesh, rules=RULES)
    )


def numbers(count=None, start=0):
    """Batches of named NumPy arrays: the number of each decides its values."""
    number = start
    while count is None or number < start + count:
        values = np.random.default_rng(number).normal(size=(8, 3, 4)).astype(np.float32)
        yield {"x": pz.nx.wrap(values, "batch", "seq", "features")}
        number += 1


class CountingIterator:
    """An iterator that says where it stands, as those of grain do."""

    def __init__(self):
        self.number = 0
        self.states_set = []

    def __iter__(self):
        return self

    def __next__(self):
        (batch,) = numbers(1, self.number)
        self.number += 1
        return batch

    def get_state(self):
        return {"next": self.number}

    def set_state(self, state):
        self.states_set.append(state)
        self.number = state["next"]
