"""Transformers of Penzai of any size, their loss and their batches."""

import collections
import math
import re

import jax
import jax.numpy as jnp
import optax
from penzai import pz
from penzai.models.transformer.variants import llamalike_common

import penzai_shard as pzs


def build_llama(
    embedding=16, heads=4, projection=4, neurons=32, blocks=1, vocabulary=32, **options
):
    """A Llama without grouped heads, with these sizes."""
    config = llamalike_common.LlamalikeTransformerConfig(
        num_kv_heads=heads,
        query_head_multiplier=options.pop("multiplier", 1),
        embedding_dim=embedding,
        projection_dim=projection,
        mlp_hidden_dim=neurons,
        num_decoder_blocks=blocks,
        vocab_size=vocabulary,
        mlp_variant="swiglu",
        tie_embedder_and_logits=options.pop("tied", False),
        use_layer_stack=options.pop("stacked", False),
        **options,
    )
    return llamalike_common.build_llamalike_transformer(config, jax.random.key(0))


def make_builder(**options):
    """A function that builds the same with values that are made fast."""
    shapes = pzs.abstract_model(build_llama, **options)

    def fill(struct):
        values = jnp.sin(jnp.arange(math.prod(struct.shape), dtype=struct.dtype))
        return values.reshape(struct.shape) / 4

    def make(leaf):
        is_parameter = isinstance(leaf, pz.ParameterValue)
        return jax.tree.map(fill, leaf).unfreeze_as_copy() if is_parameter else leaf

    return lambda: jax.tree.map(make, shapes, is_leaf=lambda x: isinstance(x, pz.ParameterValue))


def loss_fn(model, rng, state, tokens):
    """The loss of plain tokens, on plain logits."""
    logits = model(pz.nx.wrap(tokens[:, :-1], "batch", "seq"))
    logits = logits.unwrap("batch", "seq", "vocabulary")
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:])
    return losses.mean(), state, {}


def make_tokens(batch=8, seq=8, vocabulary=32):
    return jnp.arange(batch * (seq + 1)).reshape(batch, seq + 1) * 7 % vocabulary


Run = collections.namedtuple("Run", "layout mesh first step state losses lowered compiled")


def build(layout, sizes, build_model, loss_fn=loss_fn, **options):
    """A state, its step and the mesh."""
    mesh = pzs.make_mesh(sizes, jax.devices()[: math.prod(sizes.values())])
    options = {"optimizer": optax.adamw(1e-2), "rng": jax.random.key(1), **options}
    options |= {"loss_fn": loss_fn, "step_metrics": ["loss"]}
    return *layout.build(build_model, mesh=mesh, **options), mesh


def train(layout, sizes, build_model, batch, **options):
    """Three steps."""
    first, step, mesh = build(layout, sizes, build_model, **options)
    batch = layout.shard_batch(batch, mesh, first_axis="batch")
    lowered = step.lower(first, **batch)
    compiled, state, losses = lowered.compile(), first, []
    for _ in range(3):
        state, aux = step(state, **batch)
        losses.append(float(aux["loss"]))
    return Run(layout, mesh, first, step, state, losses, lowered, compiled)


def count_collectives(compiled):
    """The collectives of a compiled step by kind."""
    kinds = "all-reduce|all-gather|reduce-scatter|all-to-all|collective-permute"
    return collections.Counter(re.findall(rf" ({kinds})\(", compiled.as_text()))
