"""The train step of Penzai's Llama-like model, laid out by name with penzai_shard."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from penzai import pz
from penzai.models.transformer.variants import llamalike_common

import penzai_shard as pzs
from benchmarks.contenders import Contender
from benchmarks.parallel_training.work import (
    EPSILON,
    WAVELENGTH,
    Layout,
    Shape,
    optimizer,
)

PENZAI_NAMES = {
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
"""What Penzai calls each weight."""


def penzai_name(name: str) -> str:
    """The label of the parameter that holds a weight."""
    *block, last = name.split("/")
    label = "/".join(["lm", *block, PENZAI_NAMES[last]])
    return label if "." in label else f"{label}.weights"


def bare_model(shape: Shape) -> Any:
    """The model without values."""
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
    return llamalike_common.build_llamalike_transformer(config, jax.random.key(0), name="lm")


def model_with_weights(shape: Shape) -> Any:
    """The model with the weights that all start from."""
    axes = shape.weight_axes()
    values = {
        penzai_name(name): pz.nx.wrap(jnp.asarray(array)).tag(*axes[name])
        for name, array in shape.weights().items()
    }
    return pzs.with_params(bare_model(shape), values)


def loss_fn(model: Any, rng: Any, state: Any, tokens: Any) -> Any:
    """Mean cross entropy of the next token."""
    del rng
    logits = model(tokens[{"seq": pz.slice[:-1]}])
    loss = pzs.cross_entropy(logits, tokens[{"seq": pz.slice[1:]}])
    return loss, state, {"loss": loss}


# All parameters are split, however small, as the others do it.
PRESETS = {
    "data parallel": pzs.Layout.data_parallel(),
    "fully sharded": pzs.Layout.fully_sharded(min_size=1),
    "4x2": pzs.Layout.two_dimensional(min_size=1, vocabulary="model"),
}


def by_preset(shape: Shape, layout: Layout) -> pzs.Recipe:
    """The edits of a preset of ``Layout``."""
    return PRESETS[layout.name].recipe(bare_model(shape), layout.mesh)


def by_manual_fsdp(shape: Shape, layout: Layout) -> pzs.Recipe:
    """The same preset, each block per device along the mesh axis of the data."""
    # A region takes parameters as they are stored.
    stored = pzs.AxisRules(layout.parameters)
    preset = dataclasses.replace(PRESETS[layout.name], manual=True, parameters=stored)
    return preset.recipe(bare_model(shape), layout.mesh)


def without_edits(shape: Shape, layout: Layout) -> pzs.Recipe:
    """No edit: parameters and batch are laid out, and the compiler decides on all else."""
    del shape, layout
    return pzs.Recipe()


def build(shape: Shape, layout: Layout, edits: Any = by_preset) -> Contender:
    """The step with penzai_shard."""
    mesh, rules = layout.mesh, dict(layout.parameters)
    recipe = edits(shape, layout)

    def start() -> pzs.TrainState:
        model = recipe.apply(model_with_weights(shape))
        state = pzs.TrainState.initial_state(model, optimizer(), jax.random.key(0))
        return jax.device_put(state, pzs.train_state_sharding(state, mesh, rules))

    state = start()
    shardings = pzs.train_state_sharding(state, mesh, rules)
    tokens = pz.nx.wrap(jnp.asarray(shape.tokens())).tag("batch", "seq")
    tokens = pzs.shard_batch(tokens, mesh, {"batch": "data"})
    step = pzs.build_train_step_fn(
        loss_fn, train_state_shardings=shardings, donate_params_and_state=True
    )
    compiled = step.lower(state, tokens=tokens).compile()

    def run(state: Any) -> Any:
        state, aux = step(state, tokens=tokens)
        return state, aux["loss"]

    count = sum(p.value.data_array.size for p in pz.unbind_params(bare_model(shape))[1])
    return Contender(count, compiled, start, run)
