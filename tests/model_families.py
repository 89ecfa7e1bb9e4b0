"""Tiny models of the families that Penzai has."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from penzai import pz
from penzai.models.transformer.variants import gpt_neox, llamalike_common

LOCAL = llamalike_common.AttentionTypeSlidingWindowCausal(2)
GLOBAL = llamalike_common.AttentionTypeGlobalCausal()
_GEMMA = {"mlp_variant": "geglu_approx", "tie_embedder_and_logits": True}
_GEMMA_2 = {
    **_GEMMA,
    "use_post_attn_norm": True,
    "use_post_ffw_norm": True,
    "attn_logits_soft_cap": 50.0,
    "final_logit_softcap": 30.0,
    "attention_type": (LOCAL, GLOBAL),
}

LLAMALIKE = {
    "llama": {},
    "mistral": {"attention_type": LOCAL},
    "gemma": _GEMMA,
    "gemma_2": _GEMMA_2,
    "gemma_3": {
        **_GEMMA_2,
        "attn_logits_soft_cap": None,
        "query_scaling_factor": 0.3,
        "num_kv_heads": 1,
        "query_head_multiplier": 4,
    },
}
TRANSFORMERS = (*LLAMALIKE, "gpt_neox")


def transformer(family, key, name="transformer", **options):
    """A transformer of two blocks; a key of None leaves the places of its parameters empty."""
    settings = {
        "embedding_dim": 8,
        "projection_dim": 4,
        "mlp_hidden_dim": 16,
        "num_decoder_blocks": 2,
        "vocab_size": 16,
    }
    if family == "gpt_neox":
        settings |= {
            "num_attention_heads": 2,
            "activation_fn": "gelu_exact",
            "rope_subset_size": 2,
            "rope_wavelength": 10_000,
            "layernorm_epsilon": 1e-5,
            "parameter_dtype": jnp.float32,
            "activation_dtype": jnp.float32,
        }
        config = gpt_neox.GPTNeoXTransformerConfig(**(settings | options))
        return gpt_neox.build_gpt_neox_transformer(config, init_base_rng=key, name=name)
    settings |= {
        "num_kv_heads": 2,
        "query_head_multiplier": 2,
        "mlp_variant": "swiglu",
        "tie_embedder_and_logits": False,
    }
    config = llamalike_common.LlamalikeTransformerConfig(**(settings | LLAMALIKE[family] | options))
    return llamalike_common.build_llamalike_transformer(config, init_base_rng=key, name=name)


@functools.cache
def drawn_transformer(family, **options):
    """A transformer whose parameters are drawn by numpy."""
    return drawn(functools.partial(transformer, family, name="t", **options))


def drawn(build):
    """A model whose parameters are drawn by numpy, much faster than by the model itself.

    Args:
        build: Builds it from a key; without one, it leaves the places of its parameters empty.
    """
    like = jax.eval_shape(lambda: pz.freeze_params(build(jax.random.key(0))))
    return with_drawn_values(build(None), pz.unbind_variables(like)[0])


def with_drawn_values(model, like=None):
    """The model with parameters drawn by numpy, of the shapes in a frozen model like it."""
    draw = np.random.default_rng(0)
    nodes = jax.tree.leaves(
        pz.freeze_params(model) if like is None else like,
        is_leaf=lambda node: isinstance(node, pz.ParameterValue),
    )
    unique = {node.label: node for node in nodes if isinstance(node, pz.ParameterValue)}

    def drawn(array):
        return jnp.asarray(draw.normal(size=array.shape) * 0.4, array.dtype)

    values = [jax.tree.map(drawn, value) for value in unique.values()]
    return pz.bind_variables(pz.unbind_params(model)[0], values, unfreeze_as_copy=True)
