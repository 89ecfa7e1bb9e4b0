"""The train step of Penzai's Llama-like model: a preset of ``Layout``, and nothing else."""

from typing import Any

import jax
import jax.numpy as jnp
from penzai import pz
from penzai.models.transformer.variants import llamalike_common

import penzai_shard as pzs
from benchmarks.parallel_training.work import (
    EPSILON,
    OPTIMIZER,
    WAVELENGTH,
    Contender,
    Layout,
    Shape,
)

# What Penzai calls each weight.
NAMES = {
    "attention_norm": "pre_attention_norm/scale",
    "query": "attention/query",
    "key": "attention/key",
    "value": "attention/value",
    "output": "attention/output",
    "mlp_norm": "pre_ffw_norm/scale",
    "gate": "mlp/gating_linear",
    "up": "mlp/value_linear",
    "down": "mlp/out_linear",
    "embedder": "embedder.embeddings",
    "final_norm": "final_norm/scale",
    "head": "lm_head",
}
# All parameters are split, however small, as the others do it.
PRESETS = {
    "dp 8": pzs.Layout.data_parallel(),
    "fsdp 8": pzs.Layout.fully_sharded(min_size=1),
    "4x2": pzs.Layout.two_dimensional(min_size=1),
}


def penzai_name(name: str) -> str:
    """The label of the parameter that holds a weight."""
    *block, last = name.split("/")
    label = "/".join(["lm", *block, NAMES[last]])
    return label if "." in label else f"{label}.weights"


def build_model(shape: Shape) -> Any:
    """The model with the weights that all start from."""
    config = llamalike_common.LlamalikeTransformerConfig(
        num_kv_heads=shape.heads,
        query_head_multiplier=1,
        embedding_dim=shape.embedding,
        projection_dim=shape.projection,
        mlp_hidden_dim=shape.neurons,
        num_decoder_blocks=shape.blocks,
        vocab_size=shape.vocabulary,
        mlp_variant="swiglu",
        tie_embedder_and_logits=False,
        rms_norm_eps=EPSILON,
        rope_wavelength=WAVELENGTH,
    )
    axes = shape.weight_axes()
    values = {
        penzai_name(name): pz.nx.wrap(jnp.asarray(array)).tag(*axes[name])
        for name, array in shape.weights().items()
    }
    key = jax.random.key(0)
    model = llamalike_common.build_llamalike_transformer(config, key, name="lm")
    return pzs.with_params(model, values)


def loss_fn(model: Any, rng: Any, state: Any, tokens: Any) -> Any:
    """Mean cross entropy of the next token."""
    logits = model(tokens[{"seq": pz.slice[:-1]}])
    loss = pzs.cross_entropy(logits, tokens[{"seq": pz.slice[1:]}])
    return loss, state, {"loss": loss}


def build(shape: Shape, layout: Layout) -> Contender:
    """The step with penzai_shard."""
    preset, mesh = PRESETS[layout.name], layout.mesh
    rng, step = jax.random.key(0), None

    def start() -> Any:
        nonlocal step
        state, step = preset.build(
            build_model, shape, mesh=mesh, loss_fn=loss_fn, optimizer=OPTIMIZER, rng=rng
        )
        return state

    tokens = pz.nx.wrap(jnp.asarray(shape.tokens())).tag("batch", "seq")
    tokens = preset.shard_batch(tokens, mesh)
    compiled = start() and step.lower(start(), tokens=tokens).compile()

    def run(state: Any) -> Any:
        state, aux = step(state, tokens=tokens)
        return state, aux["loss"]

    return Contender(compiled, start, run)
