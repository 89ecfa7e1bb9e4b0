"""Small models and recipes that several tests of surgery use."""

import jax
import jax.numpy as jnp
from penzai import pz
from penzai.models.transformer.variants import llamalike_common


@pz.pytree_dataclass(has_implicitly_inherited_fields=True)
class Block(pz.nn.Sequential):
    """A block of a small model."""


def linear(name, rng=0, size=4):
    return pz.nn.Linear.from_config(
        name, jax.random.key(rng), {"embedding": size}, {"neurons": 2 * size}
    )


def mlp_block(name, rng=0, size=4):
    key = jax.random.key(rng)
    up = pz.nn.Linear.from_config(f"{name}/up", key, {"embedding": size}, {"neurons": 2 * size})
    down = pz.nn.Linear.from_config(f"{name}/down", key, {"neurons": 2 * size}, {"embedding": size})
    return Block([pz.nn.Residual(pz.nn.Sequential([up, pz.nn.Elementwise(jnp.tanh), down]))])


def mlp(blocks=2, size=4):
    return pz.nn.Sequential([mlp_block(f"block_{i}", i, size) for i in range(blocks)])


def llama(blocks=2, **overrides):
    settings = {
        "num_kv_heads": 2,
        "query_head_multiplier": 2,
        "embedding_dim": 8,
        "projection_dim": 4,
        "mlp_hidden_dim": 16,
        "num_decoder_blocks": blocks,
        "vocab_size": 16,
        "mlp_variant": "swiglu",
        "tie_embedder_and_logits": False,
    }
    config = llamalike_common.LlamalikeTransformerConfig(**(settings | overrides))
    return llamalike_common.build_llamalike_transformer(
        config, init_base_rng=jax.random.key(0), name="t"
    )


def tokens(batch=4, length=5):
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
