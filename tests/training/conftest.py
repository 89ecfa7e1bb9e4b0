"""Small models, losses and batches for the training tests."""

import collections

import jax
import jax.numpy as jnp
import pytest
from penzai import pz
from penzai.models.simple_mlp import MLP

from penzai_shard.meshes import make_mesh


@pytest.fixture
def mesh():
    return make_mesh({"data": 4, "model": 2})


@pytest.fixture
def explicit_mesh():
    kinds = (jax.sharding.AxisType.Explicit,) * 2
    return jax.make_mesh((4, 2), ("data", "model"), axis_types=kinds)


@pytest.fixture
def make_model():
    """Builds a tiny MLP, always with the same values."""

    def build(sizes=(8, 16, 8)):
        return MLP.from_config(name="mlp", init_base_rng=jax.random.key(0), feature_sizes=sizes)

    return build


class CountedLoss:
    """A squared error that counts how often it is traced."""

    def __init__(self):
        self.traces = 0

    def __call__(self, model, rng, state, x, y):
        self.traces += 1
        error = model(x).untag("features", "batch") - y.untag("features", "batch")
        loss = jnp.mean(error.unwrap() ** 2)
        return loss, state, {"loss": loss}


@pytest.fixture
def loss_fn():
    return CountedLoss()


@pytest.fixture
def batch():
    """Sixteen examples of eight features."""

    def named(key):
        values = jax.random.normal(jax.random.key(key), (16, 8))
        return pz.nx.wrap(values, "batch", "features")

    return {"x": named(1), "y": named(2)}


@pytest.fixture
def linear():
    """Bare named weights and a loss for them."""
    weights = {"w": pz.nx.wrap(jnp.linspace(-1.0, 1.0, 64).reshape(8, 8), "in", "features")}

    def loss_fn(model, rng, state, x, y):
        weight = model["w"].unwrap("in", "features")
        out = x.unwrap("batch", "features") @ weight
        loss = jnp.mean((out - y.unwrap("batch", "features")) ** 2)
        return loss, state, {"loss": loss}

    return collections.namedtuple("Linear", "weights loss_fn")(weights, loss_fn)
