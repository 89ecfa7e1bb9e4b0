"""Tiny models of the families that Penzai has, with parameters drawn by numpy."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from penzai import pz
from penzai.models.transformer.variants import gpt_neox, llamalike_common

from tests.surgery.small_models import mlp

_SLIDING = llamalike_common.AttentionTypeSlidingWindowCausal(2)
_GLOBAL = llamalike_common.AttentionTypeGlobalCausal()
_GEMMA = {"mlp_variant": "geglu_approx", "tie_embedder_and_logits": True}
_GEMMA_2 = {
    **_GEMMA,
    "use_post_attn_norm": True,
    "use_post_ffw_norm": True,
    "attn_logits_soft_cap": 50.0,
    "final_logit_softcap": 30.0,
}

LLAMALIKE = {
    "llama": {},
    "mistral": {"attention_type": _SLIDING},
    "gemma": _GEMMA,
    "gemma_2": {**_GEMMA_2, "attention_type": (_SLIDING, _GLOBAL)},
    "gemma_3": {
        **_GEMMA_2,
        "attn_logits_soft_cap": None,
        "attention_type": (_SLIDING, _GLOBAL),
        "query_scaling_factor": 0.3,
        "num_kv_heads": 1,
        "query_head_multiplier": 4,
    },
}
FAMILIES = (*LLAMALIKE, "gpt_neox", "mlp")


@functools.cache
def family(name, dtype="float32", seed=0, layer_stack=False):
    """A model of two blocks."""
    if name == "mlp":
        return _with_drawn_values(mlp(2), dtype, seed)
    if name == "gpt_neox":
        config = gpt_neox.GPTNeoXTransformerConfig(
            num_attention_heads=2,
            embedding_dim=8,
            projection_dim=4,
            mlp_hidden_dim=16,
            num_decoder_blocks=2,
            vocab_size=16,
            activation_fn="gelu_exact",
            rope_subset_size=2,
            rope_wavelength=10_000,
            layernorm_epsilon=1e-5,
            parameter_dtype=dtype,
            activation_dtype=dtype,
            use_layer_stack=layer_stack,
        )
        build = gpt_neox.build_gpt_neox_transformer
    else:
        settings = {
            "num_kv_heads": 2,
            "query_head_multiplier": 2,
            "embedding_dim": 8,
            "projection_dim": 4,
            "mlp_hidden_dim": 16,
            "num_decoder_blocks": 2,
            "vocab_size": 16,
            "mlp_variant": "swiglu",
            "tie_embedder_and_logits": False,
            "parameter_dtype": dtype,
            "activation_dtype": dtype,
            "use_layer_stack": layer_stack,
        }
        config = llamalike_common.LlamalikeTransformerConfig(**(settings | LLAMALIKE[name]))
        build = llamalike_common.build_llamalike_transformer
    with_shapes = jax.eval_shape(
        lambda: pz.freeze_params(build(config, init_base_rng=jax.random.key(0), name="t"))
    )
    empty = build(config, init_base_rng=None, name="t")
    return _with_drawn_values(empty, dtype, seed, like=pz.unbind_variables(with_shapes)[0])


def _with_drawn_values(model, dtype, seed, like=None):
    draw = np.random.default_rng(seed)
    if like is None:
        like = pz.freeze_params(model)
    frozen = [
        value
        for value in jax.tree.leaves(like, is_leaf=lambda x: isinstance(x, pz.ParameterValue))
        if isinstance(value, pz.ParameterValue)
    ]
    unique = {value.label: value for value in frozen}

    def drawn(shape):
        return jnp.asarray(draw.normal(size=shape.shape) * 0.4, jnp.dtype(dtype))

    values = [jax.tree.map(drawn, value) for value in unique.values()]
    return pz.bind_variables(pz.unbind_params(model)[0], values, unfreeze_as_copy=True)
