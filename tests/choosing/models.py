"""Steps that a layout is chosen for: transformers, plain weights, one model in each library."""

import equinox as eqx
import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
from flax import nnx
from penzai import pz

import penzai_shard as pzs
from penzai_shard.choosing.workload import read_workload
from tests.layouts.transformers import build_llama


def token_loss(model, rng, state, tokens):
    return pzs.cross_entropy(model(tokens), tokens), state, {}


def read_llama(batch=16, seq=32, optimizer=None, **sizes):
    model = pzs.abstract_model(build_llama, **sizes)
    return read_workload(model, token_loss, optimizer or optax.adam(1e-3), batch, seq)


def build_layers(embedding=64, neurons=256):
    """Two layers of Penzai, for ``square_loss``."""
    key, narrow, wide = jax.random.key(0), {"embedding": embedding}, {"neurons": neurons}
    up = pz.nn.Linear.from_config("up", key, narrow, wide)
    return pz.nn.Sequential([up, pz.nn.Linear.from_config("down", key, wide, narrow)])


def square_loss(model, rng, state, x):
    return (model(x).untag("batch", "embedding") ** 2).mean().unwrap(), state, {}


def mlp_weights(embedding, neurons):
    """The same layers, for ``read_weights``."""
    up = {"embedding": embedding, "neurons": neurons}
    return {"up": up, "down": dict(reversed(up.items()))}


def read_weights(loss, weights, x, optimizer=None):
    """A step of plain arrays, ``loss(weights, x)``; for each weight the lengths of its axes."""

    def loss_fn(model, rng, state, x):
        return loss(model, x), state, {}

    structs = {
        path: jax.ShapeDtypeStruct(tuple(axes.values()), "float32")
        for path, axes in weights.items()
    }
    model = pzs.name_axes(structs, {path: tuple(axes) for path, axes in weights.items()})
    return read_workload(model, loss_fn, optimizer or optax.sgd(0.1), {"x": x}, plain_arrays=True)


# One model in each library: a table, which also makes the logits, and a layer between


class Equinox(eqx.Module):
    embed: jax.Array
    up: jax.Array
    down: jax.Array

    def __call__(self, tokens):
        x = self.embed[tokens]
        return (x + jax.nn.relu(x @ self.up) @ self.down) @ self.embed.T


class Linen(nn.Module):
    @nn.compact
    def __call__(self, tokens):
        def init(*names):
            return nn.with_logical_partitioning(nn.initializers.lecun_normal(), names)

        embed = nn.Embed(64, 32, embedding_init=init("vocab", "embed"))
        x = embed(tokens)
        y = nn.relu(nn.Dense(128, use_bias=False, kernel_init=init("embed", "mlp"))(x))
        return embed.attend(x + nn.Dense(32, use_bias=False, kernel_init=init("mlp", "embed"))(y))


class Nnx(nnx.Module):
    def __init__(self, rngs):
        def init(*names):
            return nnx.with_partitioning(nnx.initializers.lecun_normal(), names)

        self.embed = nnx.Embed(64, 32, embedding_init=init("vocab", "embed"), rngs=rngs)
        options = {"use_bias": False, "rngs": rngs}
        self.up = nnx.Linear(32, 128, kernel_init=init("embed", "mlp"), **options)
        self.down = nnx.Linear(128, 32, kernel_init=init("mlp", "embed"), **options)

    def __call__(self, tokens):
        x = self.embed(tokens)
        return self.embed.attend(x + self.down(jax.nn.relu(self.up(x))))


TOKENS = jnp.arange(16 * 8).reshape(16, 8) * 7 % 64


def make_weights():
    shapes = {"embed": (64, 32), "up": (32, 128), "down": (128, 32)}
    keys = jax.random.split(jax.random.key(0), len(shapes))
    return {n: jax.random.normal(k, s) / 8 for k, (n, s) in zip(keys, shapes.items(), strict=True)}


def build_equinox():
    model = Equinox(**make_weights())
    return pzs.name_axes(model, pzs.infer_names(lambda model, x: model(x), model, TOKENS))


def build_nnx():
    with nnx.use_eager_sharding(False):
        return Nnx(nnx.Rngs(0))


def build_dict():
    axes = ("vocabulary", "embedding"), ("embedding", "neurons"), ("neurons", "embedding")
    return pzs.name_axes(make_weights(), dict(zip(("embed", "up", "down"), axes, strict=True)))


# By library: what builds the model, its logits, and whether arrays are trained as they are.
LIBRARIES = {
    "equinox": (build_equinox, lambda model, x: model(x), False),
    "linen": (lambda: Linen().init(jax.random.key(0), TOKENS), Linen().apply, False),
    "nnx": (build_nnx, lambda model, x: model(x), False),
    "dict": (build_dict, lambda model, x: Equinox(**model)(x), True),
}
