"""Training steps of several families, each of one block: what is asked of ``choose_layout``.

Sizes are those of real models, but that there are few layers: compiling takes as long for small
arrays.
"""

import functools
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
from penzai import pz
from penzai.models.transformer.variants import llamalike_common

from benchmarks.choosing.model_parts import (
    ADAMW,
    attended,
    normed,
    plain_problem,
    struct,
    tokens_struct,
    weights_structs,
)
from penzai_shard import abstract_model, cross_entropy, infer_names, name_axes
from penzai_shard.choosing.choices.asked_problem import AskedProblem, read_problem
from penzai_shard.named_arrays import named_array

# Penzai's own


def _token_loss(*, model: Any, rng: Any, state: Any, tokens: Any) -> tuple[Any, Any, Any]:
    del rng
    return cross_entropy(model(tokens), tokens), state, {}


def llama(
    batch: int,
    seq: int,
    embedding: int = 1024,
    neurons: int = 4096,
    vocabulary: int = 8192,
    optimizer: optax.GradientTransformation = ADAMW,
    **changes: Any,
) -> AskedProblem:
    """A Llama with queries in groups; ``changes`` are those of its configuration."""
    options: dict[str, Any] = {
        "num_decoder_blocks": 1,
        "num_kv_heads": 8,
        "query_head_multiplier": 2,
        "projection_dim": embedding // 16,
        "mlp_variant": "swiglu",
        "tie_embedder_and_logits": False,
        "rope_wavelength": 10_000,
        "rms_norm_eps": 1e-5,
    }
    config = llamalike_common.LlamalikeTransformerConfig(
        embedding_dim=embedding,
        mlp_hidden_dim=neurons,
        vocab_size=vocabulary,
        **options | changes,
    )
    model = abstract_model(
        llamalike_common.build_llamalike_transformer, config, init_base_rng=jax.random.key(0)
    )
    return read_problem(model, _token_loss, optimizer, batch, seq, False)


def gemma(batch: int, seq: int, vocabulary: int = 65_536) -> AskedProblem:
    """Gemma: keys and values of one head for all queries, and a table that is the logits' too."""
    return llama(
        batch,
        seq,
        2048,
        8192,
        vocabulary,
        num_kv_heads=1,
        query_head_multiplier=8,
        projection_dim=256,
        mlp_variant="geglu_approx",
        tie_embedder_and_logits=True,
    )


def _square_loss(*, model: Any, rng: Any, state: Any, x: Any) -> tuple[Any, Any, Any]:
    del rng
    return (model(x).untag("batch", "embedding") ** 2).mean().unwrap(), state, {}


def mlp(
    batch: int,
    embedding: int = 2048,
    neurons: int = 8192,
    layers: int = 2,
    optimizer: optax.GradientTransformation = ADAMW,
) -> AskedProblem:
    """Layers that widen and narrow in turn."""

    def build() -> Any:
        key = jax.random.key(0)
        wide, narrow = {"neurons": neurons}, {"embedding": embedding}
        made: list[Any] = []
        for i in range(layers):
            made += [
                pz.nn.Linear.from_config(f"layer_{i}/up", key, narrow, wide),
                pz.nn.Elementwise(jnp.tanh),
                pz.nn.Linear.from_config(f"layer_{i}/down", key, wide, narrow),
            ]
        return pz.nn.Sequential(made)

    x = named_array(struct(batch, embedding), ("batch", "embedding"))
    return read_problem(abstract_model(build), _square_loss, optimizer, {"x": x}, None, False)


# Raw dictionaries of weights


def gpt2(batch: int, seq: int, embedding: int = 1024, vocabulary: int = 50_304) -> AskedProblem:
    """Queries, keys and values from one weight, by heads first; its names are inferred."""
    heads, part = embedding // 64, 64
    lengths = {
        "vocabulary": vocabulary,
        "positions": seq,
        "embedding": embedding,
        "fused": 3 * embedding,
        "neurons": 4 * embedding,
    }
    weights = weights_structs(
        {
            "wte": ("vocabulary", "embedding"),
            "wpe": ("positions", "embedding"),
            "attn.c_attn": ("embedding", "fused"),
            "attn.c_proj": ("embedding", "embedding"),
            "mlp.c_fc": ("embedding", "neurons"),
            "mlp.c_proj": ("neurons", "embedding"),
        },
        lengths,
    )

    def apply(w: Any, tokens: Any) -> Any:
        x = w["wte"][tokens] + w["wpe"][jnp.arange(tokens.shape[1])]
        h = (normed(x) @ w["attn.c_attn"]).reshape(*tokens.shape, heads, 3, part)
        found = attended(*(h[..., i, :] for i in range(3)), True)
        x = x + found.reshape(x.shape) @ w["attn.c_proj"]
        x = x + jax.nn.gelu(normed(x) @ w["mlp.c_fc"]) @ w["mlp.c_proj"]
        return normed(x) @ w["wte"].T

    names = infer_names(apply, weights, tokens_struct(batch, seq), input_names=[("batch", "seq")])
    return plain_problem(name_axes(weights, names), apply, {"tokens": tokens_struct(batch, seq)})


def experts(batch: int, seq: int, count: int = 8, embedding: int = 1024) -> AskedProblem:
    """Experts of which each computes every token, weighed by a router."""
    names = {
        "emb": ("vocabulary", "embedding"),
        "router": ("embedding", "experts"),
        "up": ("experts", "embedding", "neurons"),
        "down": ("experts", "neurons", "embedding"),
        "head": ("embedding", "vocabulary"),
    }
    lengths = {
        "vocabulary": 8192,
        "embedding": embedding,
        "experts": count,
        "neurons": 2 * embedding,
    }

    def apply(w: Any, tokens: Any) -> Any:
        x = w["emb"][tokens]
        share = jax.nn.softmax(x @ w["router"])
        hidden = jax.nn.silu(jnp.einsum("bse,xen->bsxn", x, w["up"]))
        return (x + jnp.einsum("bsxn,xne,bsx->bse", hidden, w["down"], share)) @ w["head"]

    model = name_axes(weights_structs(names, lengths), names)
    return plain_problem(model, apply, {"tokens": tokens_struct(batch, seq)})


def encoder_decoder(batch: int, seq: int, embedding: int = 512) -> AskedProblem:
    """One block that reads all of a sequence, and one that reads it while writing another."""
    into, out = ("embedding", "heads", "projection"), ("heads", "projection", "embedding")
    names: dict[str, tuple[str, ...]] = {"embed": ("vocabulary", "embedding")}
    for kind in ("encoder", "decoder", "cross"):
        names |= {f"{kind}.{name}": into for name in "qkv"} | {f"{kind}.o": out}
    for part in ("encoder", "decoder"):
        names |= {f"{part}.up": ("embedding", "neurons"), f"{part}.down": ("neurons", "embedding")}
    names["head"] = ("embedding", "vocabulary")
    lengths = {
        "vocabulary": 16_384,
        "embedding": embedding,
        "heads": embedding // 64,
        "projection": 64,
        "neurons": 4 * embedding,
    }

    def attend(w: Any, kind: str, x: Any, context: Any, is_causal: bool = False) -> Any:
        q = jnp.einsum("bse,ehd->bshd", normed(x), w[f"{kind}.q"])
        k, v = (jnp.einsum("bse,ehd->bshd", context, w[f"{kind}.{name}"]) for name in "kv")
        return x + jnp.einsum("bshd,hde->bse", attended(q, k, v, is_causal), w[f"{kind}.o"])

    def wide(w: Any, part: str, x: Any) -> Any:
        return x + jax.nn.relu(normed(x) @ w[f"{part}.up"]) @ w[f"{part}.down"]

    def apply(w: Any, sources: Any, targets: Any) -> Any:
        read, x = w["embed"][sources], w["embed"][targets]
        read = wide(w, "encoder", attend(w, "encoder", read, read))
        x = attend(w, "cross", attend(w, "decoder", x, x, True), read)
        return wide(w, "decoder", x) @ w["head"]

    model = name_axes(weights_structs(names, lengths), names)
    tokens = tokens_struct(batch, seq)
    return plain_problem(model, apply, {"sources": tokens, "targets": tokens})


# Equinox


class _Block(eqx.Module):
    norm: eqx.nn.RMSNorm
    attention: eqx.nn.MultiheadAttention
    mlp: eqx.nn.MLP

    def __init__(self, embedding: int, key: Any) -> None:
        self.norm = eqx.nn.RMSNorm(embedding)
        self.attention = eqx.nn.MultiheadAttention(embedding // 64, embedding, key=key)
        self.mlp = eqx.nn.MLP(embedding, embedding, 4 * embedding, 1, jax.nn.gelu, key=key)

    def __call__(self, x: Any) -> Any:
        h = jax.vmap(self.norm)(x)
        x = x + self.attention(h, h, h, jnp.tril(jnp.ones((len(x), len(x)), bool)))
        return x + jax.vmap(self.mlp)(x)


class _Transformer(eqx.Module):
    tokens: eqx.nn.Embedding
    block: _Block
    head: eqx.nn.Linear

    def __init__(self, vocabulary: int, embedding: int, key: Any) -> None:
        self.tokens = eqx.nn.Embedding(vocabulary, embedding, key=key)
        self.block = _Block(embedding, key)
        self.head = eqx.nn.Linear(embedding, vocabulary, use_bias=False, key=key)

    def __call__(self, tokens: Any) -> Any:
        return jax.vmap(self.head)(self.block(jax.vmap(self.tokens)(tokens)))


def equinox_transformer(batch: int, seq: int, vocabulary: int, embedding: int) -> AskedProblem:
    """A transformer of Equinox' layers without any annotation; its names are inferred."""
    build = functools.partial(_Transformer, vocabulary, embedding)
    module = eqx.filter_eval_shape(build, jax.random.key(0))
    weights, static = eqx.partition(module, lambda leaf: isinstance(leaf, jax.ShapeDtypeStruct))

    def apply(given: Any, tokens: Any) -> Any:
        return jax.vmap(eqx.combine(given, static))(tokens)

    names = infer_names(apply, weights, tokens_struct(batch, seq), input_names=[("batch", "seq")])
    tokens = {"tokens": tokens_struct(batch, seq)}
    return plain_problem(
        name_axes(module, names), lambda m, tokens: jax.vmap(m)(tokens), tokens, False
    )


def tables(batch: int, rows: int = 1_048_576, width: int = 64) -> AskedProblem:
    """Few products over tables with many rows, as for what people have clicked on."""
    names = {
        "users": ("vocabulary", "embedding"),
        "items": ("vocabulary", "embedding"),
        "up": ("embedding", "neurons"),
        "head": ("neurons", "classes"),
    }
    lengths = {"vocabulary": rows, "embedding": width, "neurons": 1024, "classes": 64}

    def apply(w: Any, users: Any, items: Any, chosen: Any) -> Any:
        del chosen
        x = w["users"][users].mean(1) * w["items"][items].mean(1)
        return jax.nn.relu(x @ w["up"]) @ w["head"]

    looked_up, chosen = tokens_struct(batch, 16), struct(batch, dtype=jnp.int32)
    model = name_axes(weights_structs(names, lengths), names)
    return plain_problem(model, apply, {"users": looked_up, "items": looked_up, "chosen": chosen})
