"""Small models of every library that is read, and the optimizers of optax.

``MODELS`` has functions of a seed, ``OPTIMIZERS`` functions of a learning rate.
"""

import functools
import warnings

import equinox as eqx
import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
from flax import nnx
from flax.training import train_state
from penzai import pz
from penzai.deprecated.v1 import pz as pz_v1
from penzai.deprecated.v1.example_models import simple_mlp as simple_mlp_v1
from penzai.models import simple_mlp
from penzai.models.transformer.variants import llamalike_common

with warnings.catch_warnings():
    # Haliax imports what JAX has deprecated.
    warnings.simplefilter("ignore", DeprecationWarning)
    import haliax as hax

# Penzai


def llama(seed=0, tied=False, stacked=False, kv_heads=2, multiplier=2, blocks=2):
    """A transformer with the axes of Penzai's own models, 0.02 MB."""
    config = llamalike_common.LlamalikeTransformerConfig(
        num_kv_heads=kv_heads,
        query_head_multiplier=multiplier,
        embedding_dim=8,
        projection_dim=4,
        mlp_hidden_dim=16,
        num_decoder_blocks=blocks,
        vocab_size=16,
        mlp_variant="swiglu",
        tie_embedder_and_logits=tied,
        use_layer_stack=stacked,
    )
    return llamalike_common.build_llamalike_transformer(config, jax.random.key(seed))


def penzai_mlp(seed=0, sizes=(8, 16, 4)):
    return simple_mlp.MLP.from_config(jax.random.key(seed), [*sizes])


@pz.pytree_dataclass
class Counted(pz.nn.Layer):
    """A layer around another that counts its calls."""

    body: pz.nn.Layer
    count: pz.StateVariable

    def __call__(self, x, /, **side_inputs):
        self.count.value = self.count.value + 1
        return self.body(x, **side_inputs)


def counted_mlp(seed=0):
    return Counted(penzai_mlp(seed), pz.StateVariable(value=jnp.zeros(()), label="count"))


def mlp_v1(seed=0):
    return pz_v1.nn.initialize_parameters(uninitialized_mlp_v1(), jax.random.key(seed))


def uninitialized_mlp_v1(seed=0):
    del seed
    return simple_mlp_v1.MLP.from_config([8, 16, 4])


# Flax


class LinenBlock(nn.Module):
    @nn.compact
    def __call__(self, x):
        init = nn.initializers.lecun_normal()
        x = nn.Dense(16, kernel_init=nn.with_logical_partitioning(init, ("embed", "mlp")))(x)
        x = nn.BatchNorm(use_running_average=True)(x)
        return nn.Dense(8, kernel_init=nn.with_partitioning(init, ("mlp", "embed")))(x)


def linen(seed=0):
    return LinenBlock().init(jax.random.key(seed), jnp.ones((2, 8)))


def linen_state(seed=0):
    apply, params = LinenBlock().apply, linen(seed)["params"]
    return train_state.TrainState.create(apply_fn=apply, params=params, tx=optax.adamw(1e-3))


class NnxBlock(nnx.Module):
    """A tied layer, running means, a dropout with its stream of random numbers."""

    def __init__(self, rngs):
        init = nnx.with_partitioning(nnx.initializers.lecun_normal(), ("embed", "mlp"))
        self.first = nnx.Linear(8, 8, kernel_init=init, rngs=rngs)
        self.norm = nnx.BatchNorm(8, rngs=rngs)
        self.dropout = nnx.Dropout(0.1, rngs=rngs)
        self.tied = self.first

    def __call__(self, x):
        return self.tied(self.dropout(self.norm(self.first(x))))


def nnx_block(seed=0):
    # Otherwise Flax asks for a mesh that has the logical axes.
    with nnx.use_eager_sharding(False):
        return NnxBlock(nnx.Rngs(seed))


def nnx_optimizer(seed=0, optimizer=None):
    with nnx.use_eager_sharding(False):
        return nnx.Optimizer(nnx_block(seed), optimizer or optax.adam(1e-3), wrt=nnx.Param)


# Haliax, Equinox, plain trees

EMBED, MLP = hax.Axis("embed", 8), hax.Axis("mlp", 16)


def haliax_mlp(seed=0):
    return hax.nn.MLP.init(EMBED, EMBED, MLP, 2, key=jax.random.key(seed))


class EquinoxBlock(eqx.Module):
    mlp: eqx.nn.MLP
    dropout: eqx.nn.Dropout


def equinox(seed=0):
    mlp = eqx.nn.MLP(8, 8, 16, 2, key=jax.random.key(seed))
    return EquinoxBlock(mlp, eqx.nn.Dropout(0.1))


def plain(seed=0):
    key = jax.random.key(seed)
    return {"w": jax.random.normal(key, (4, 8)), "rate": 0.5, "act": jax.nn.relu, "empty": None}


MODELS = {
    "llama": llama,
    "tied llama": lambda seed=0: llama(seed, tied=True),
    "stacked llama": lambda seed=0: llama(seed, stacked=True),
    "penzai mlp": penzai_mlp,
    "counted mlp": counted_mlp,
    "v1 mlp": mlp_v1,
    "uninitialized v1 mlp": uninitialized_mlp_v1,
    "linen": linen,
    "linen state": linen_state,
    "nnx": nnx_block,
    "nnx optimizer": nnx_optimizer,
    "haliax linear": lambda seed=0: hax.nn.Linear.init(EMBED, MLP, key=jax.random.key(seed)),
    "haliax mlp": haliax_mlp,
    "equinox": equinox,
    "plain": plain,
}


@functools.cache
def model(name):
    """The model that tests share which do not change it."""
    return MODELS[name]()


OPTIMIZERS = {
    "adamw": optax.adamw,
    "schedule": lambda rate: optax.chain(
        optax.clip(1.0), optax.adam(optax.cosine_decay_schedule(rate, 10))
    ),
    "masked": lambda rate: optax.masked(
        optax.adam(rate), lambda tree: jax.tree.map(lambda x: len(x.shape) > 1, tree)
    ),
    "inject": optax.inject_hyperparams(optax.adamw),
    "multi_steps": lambda rate: optax.MultiSteps(optax.adam(rate), 2),
    "adafactor": lambda rate: optax.adafactor(rate, min_dim_size_to_factor=4),
    "sm3": optax.sm3,
    "lion": optax.lion,
    "muon": optax.contrib.muon,
    "lbfgs": optax.lbfgs,
    "schedule_free": optax.contrib.schedule_free_adamw,
    "prodigy": optax.contrib.prodigy,
    "novograd": optax.novograd,
}
