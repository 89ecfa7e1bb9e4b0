"""Small models and recipes that several tests of surgery use."""

import functools
import io

import jax
import jax.numpy as jnp
import numpy as np
from penzai import pz
from rich.console import Console

from tests.model_families import transformer


@pz.pytree_dataclass(has_implicitly_inherited_fields=True)
class Block(pz.nn.Sequential):
    """A block of a small model."""


@functools.cache
def keyed(rng):
    return jax.random.key(rng)


def linear(name, rng=0, size=4):
    return pz.nn.Linear.from_config(name, keyed(rng), {"embedding": size}, {"neurons": 2 * size})


def mlp_block(name, rng=0, size=4):
    key = jax.random.key(rng) if isinstance(rng, int) else rng
    up = pz.nn.Linear.from_config(f"{name}/up", key, {"embedding": size}, {"neurons": 2 * size})
    down = pz.nn.Linear.from_config(f"{name}/down", key, {"neurons": 2 * size}, {"embedding": size})
    return Block([pz.nn.Residual(pz.nn.Sequential([up, pz.nn.Elementwise(jnp.tanh), down]))])


def mlp(blocks=2, size=4):
    return pz.nn.Sequential([mlp_block(f"block_{i}", i, size) for i in range(blocks)])


@functools.cache
def stacked_mlp(layers=2, size=4):
    """Like ``mlp``, its blocks in one layer stack."""

    def block(init_base_rng):
        return mlp_block("block", init_base_rng, size)

    return pz.nn.Sequential(
        [
            pz.nn.LayerStack.from_sublayer_builder(
                block, "layers", layers, init_base_rng=jax.random.key(0), builder_kwargs={}
            )
        ]
    )


@functools.cache
def llama(blocks=2, values=False, **overrides):
    """A transformer; without ``values`` it has slots where its parameters would be."""
    build = functools.partial(
        transformer, "llama", name="t", num_decoder_blocks=blocks, **overrides
    )
    if not values:
        return build(None)
    # Much faster than to draw each parameter with the initializer of its own.
    like = jax.eval_shape(lambda rng: pz.unbind_params(build(rng), freeze=True)[1], keyed(0))
    draw = np.random.default_rng(0)
    frozen = jax.tree.map(lambda x: jnp.asarray(draw.normal(size=x.shape) * 0.3, x.dtype), like)
    return pz.bind_variables(build(None), frozen, unfreeze_as_copy=True)


def tokens(batch=4, length=3):
    data = jax.random.randint(jax.random.key(1), (batch, length), 0, 16)
    return pz.nx.wrap(data, "batch", "seq")


def features(size=4, batch=8):
    data = jax.random.normal(jax.random.key(2), (batch, size))
    return pz.nx.wrap(data, "batch", "embedding")


def parameter_names(model):
    return [parameter.label for parameter in pz.unbind_params(model)[1]]


def scaled(layer):
    """A wrapper that changes what is computed."""
    return pz.nn.Sequential([layer, pz.nn.ConstantRescale(by=1.01)])


def shown_by_rich(value):
    console = Console(width=200, file=io.StringIO())
    console.print(value)
    return console.file.getvalue()
