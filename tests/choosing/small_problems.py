"""Small training problems that layouts are looked for."""

import jax
import jax.numpy as jnp
import optax
from penzai.models.transformer.variants import llamalike_common

from penzai_shard import abstract_model, cross_entropy
from penzai_shard.choosing.training_problem import TrainingProblem
from penzai_shard.named_arrays import named_array


def next_token_loss(*, model, rng, state, tokens):
    del rng
    return cross_entropy(model(tokens), tokens), state, {}


def tokens_like(batch, seq):
    return named_array(jax.ShapeDtypeStruct((batch, seq), jnp.int32), ("batch", "seq"))


def problem_of(model, loss_fn=next_token_loss, batch=16, seq=32):
    return TrainingProblem(model, loss_fn, optax.adam(1e-3), {"tokens": tokens_like(batch, seq)})


def llama(blocks=5, *, stack=False, mlp="swiglu", **sizes):
    """An abstract Llama of a few thousand parameters in each block."""
    config = llamalike_common.LlamalikeTransformerConfig(
        **{
            "num_kv_heads": 2,
            "query_head_multiplier": 2,
            "embedding_dim": 32,
            "projection_dim": 8,
            "mlp_hidden_dim": 64,
            "vocab_size": 128,
        }
        | sizes,
        num_decoder_blocks=blocks,
        mlp_variant=mlp,
        tie_embedder_and_logits=False,
        rope_wavelength=10_000,
        rms_norm_eps=1e-5,
        use_layer_stack=stack,
    )
    return abstract_model(
        llamalike_common.build_llamalike_transformer, config, init_base_rng=jax.random.key(0)
    )
