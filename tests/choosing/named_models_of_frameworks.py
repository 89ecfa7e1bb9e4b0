"""Transformers as the examples of JAX's frameworks write them."""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from flax import linen, nnx

from tests.choosing.named_models import (
    BATCH,
    BATCH_SEQ,
    EMBEDDING,
    HEADS,
    LAYERS,
    NEURONS,
    PROJECTION,
    SEQ,
    TOKENS,
    VOCABULARY,
    NamedModel,
    struct,
    structs_of,
)
from tests.choosing.transformer_parts import sinusoids

_INTO, _OUT = ("embedding", "heads", "projection"), ("heads", "projection", "embedding")


def _scale(path, *names):
    return {f"{path}/{name}": ("embedding",) for name in names}


# Flax's translation example: shared embedding, learned positions, logits by the table.


class _Mlp(linen.Module):
    @linen.compact
    def __call__(self, x):
        h = linen.relu(linen.Dense(NEURONS)(x))
        return linen.Dense(x.shape[-1])(h)


class _EncoderBlock(linen.Module):
    @linen.compact
    def __call__(self, x, mask):
        y = linen.LayerNorm()(x)
        x = x + linen.MultiHeadDotProductAttention(HEADS, use_bias=False)(y, mask=mask)
        return x + _Mlp()(linen.LayerNorm()(x))


class _DecoderBlock(linen.Module):
    @linen.compact
    def __call__(self, x, encoded, mask, cross_mask):
        y = linen.LayerNorm()(x)
        x = x + linen.MultiHeadDotProductAttention(HEADS, use_bias=False)(y, mask=mask)
        y = linen.LayerNorm()(x)
        cross = linen.MultiHeadDotProductAttention(HEADS, use_bias=False)
        x = x + cross(y, encoded, mask=cross_mask)
        return x + _Mlp()(linen.LayerNorm()(x))


class _Translator(linen.Module):
    def setup(self):
        self.shared_embedding = linen.Embed(VOCABULARY, EMBEDDING)
        places = linen.initializers.normal(0.02)
        self.source_positions = self.param("pos_embedding", places, (1, 2 * SEQ, EMBEDDING))
        self.encoder = [_EncoderBlock() for _ in range(LAYERS)]
        self.decoder = [_DecoderBlock() for _ in range(LAYERS)]
        self.norms = [linen.LayerNorm() for _ in range(2)]

    def __call__(self, sources, targets):
        x = self.shared_embedding(sources) * EMBEDDING**0.5 + self.source_positions[:, :SEQ]
        mask = linen.make_attention_mask(sources > 0, sources > 0)
        for block in self.encoder:
            x = block(x, mask)
        x = self.norms[0](x)
        y = self.shared_embedding(jnp.pad(targets, ((0, 0), (1, 0)))[:, :-1])
        y = y + self.source_positions[:, :SEQ]
        mask = linen.combine_masks(
            linen.make_attention_mask(targets > 0, targets > 0), linen.make_causal_mask(targets)
        )
        cross_mask = linen.make_attention_mask(targets > 0, sources > 0)
        for block in self.decoder:
            y = block(y, x, mask, cross_mask)
        return self.shared_embedding.attend(self.norms[1](y)) / EMBEDDING**0.5


def linen_translation() -> NamedModel:
    module = _Translator()
    weights = jax.eval_shape(module.init, jax.random.key(0), TOKENS, TOKENS)
    names: dict[str, Any] = {
        "params/shared_embedding/embedding": ("vocabulary", "embedding"),
        "params/pos_embedding": (None, "positions", "embedding"),
    }
    for part, count in (("encoder", 1), ("decoder", 2)):
        for i in range(LAYERS):
            path = f"params/{part}_{i}"
            for n in range(count):
                attention = f"{path}/MultiHeadDotProductAttention_{n}"
                names |= {f"{attention}/{name}/kernel": _INTO for name in ("query", "key", "value")}
                names[f"{attention}/out/kernel"] = _OUT
            for n in range(count + 1):
                names |= _scale(f"{path}/LayerNorm_{n}", "scale", "bias")
            names[f"{path}/_Mlp_0/Dense_0/kernel"] = ("embedding", "neurons")
            names[f"{path}/_Mlp_0/Dense_0/bias"] = ("neurons",)
            names[f"{path}/_Mlp_0/Dense_1/kernel"] = ("neurons", "embedding")
            names[f"{path}/_Mlp_0/Dense_1/bias"] = ("embedding",)
    for n in range(2):
        names |= _scale(f"params/norms_{n}", "scale", "bias")
    inputs = (("batch", "seq"), ("batch", "target_seq"))
    return NamedModel(module.apply, weights, (TOKENS, TOKENS), inputs, names)


# NNX: blocks made by vmap, run by scan, conditioned.


class _DitBlock(nnx.Module):
    def __init__(self, rngs):
        self.attention = nnx.MultiHeadAttention(HEADS, EMBEDDING, decode=False, rngs=rngs)
        self.fc1 = nnx.Linear(EMBEDDING, NEURONS, rngs=rngs)
        self.fc2 = nnx.Linear(NEURONS, EMBEDDING, rngs=rngs)
        self.ada_ln = nnx.Linear(EMBEDDING, 6 * EMBEDDING, rngs=rngs)

    def __call__(self, x, c):
        changes = jnp.split(self.ada_ln(nnx.silu(c)), 6, axis=-1)
        shift_a, scale_a, gate_a, shift_m, scale_m, gate_m = (y[:, None] for y in changes)
        h = x / jnp.sqrt(jnp.square(x).mean(-1, keepdims=True) + 1e-6)
        x = x + gate_a * self.attention(h * (1 + scale_a) + shift_a)
        h = x / jnp.sqrt(jnp.square(x).mean(-1, keepdims=True) + 1e-6)
        h = h * (1 + scale_m) + shift_m
        return x + gate_m * self.fc2(nnx.gelu(self.fc1(h)))


class _Dit(nnx.Module):
    def __init__(self, rngs):
        @nnx.split_rngs(splits=3)
        @nnx.vmap(in_axes=(0,), out_axes=0)
        def blocks(rngs):
            return _DitBlock(rngs)

        self.patches = nnx.Linear(12, EMBEDDING, rngs=rngs)
        self.time_0 = nnx.Linear(EMBEDDING, EMBEDDING, rngs=rngs)
        self.time_2 = nnx.Linear(EMBEDDING, EMBEDDING, rngs=rngs)
        self.labels = nnx.Embed(11, EMBEDDING, rngs=rngs)
        self.blocks = blocks(rngs)
        self.final_ada_ln = nnx.Linear(EMBEDDING, 2 * EMBEDDING, rngs=rngs)
        self.final = nnx.Linear(EMBEDDING, 12, rngs=rngs)

    def __call__(self, patches, time, label):
        x = self.patches(patches)
        c = self.time_2(nnx.silu(self.time_0(sinusoids(time, EMBEDDING)))) + self.labels(label)

        @nnx.scan(in_axes=(nnx.Carry, 0, None), out_axes=nnx.Carry)
        def run(x, block, c):
            return block(x, c)

        x = run(x, self.blocks, c)
        shift, scale = jnp.split(self.final_ada_ln(nnx.silu(c)), 2, axis=-1)
        return self.final(x * (1 + scale[:, None]) + shift[:, None])


def nnx_diffusion() -> NamedModel:
    """DiT: one class more than labels for none; scales and shifts of the end are another number."""
    module = nnx.eval_shape(lambda: _Dit(nnx.Rngs(0)))
    graph, params, rest = nnx.split(module, nnx.Param, ...)

    def function(weights, *inputs):
        bound = jax.tree.map(lambda each: each, params)
        nnx.replace_by_pure_dict(bound, weights)
        return nnx.merge(graph, bound, rest)(*inputs)

    def layer(path, *axes):
        return {f"{path}/kernel": axes, f"{path}/bias": (*axes[:-2], axes[-1])}

    names = layer("patches", "pixels", "embedding") | {
        "labels/embedding": ("labels", "conditioning")
    }
    names |= layer("time_0", "frequencies", "time_hidden")
    names |= layer("time_2", "time_hidden", "conditioning")
    names |= layer("blocks/ada_ln", "layers", "conditioning", "modulations*embedding")
    names |= layer("blocks/fc1", "layers", "embedding", "neurons")
    names |= layer("blocks/fc2", "layers", "neurons", "embedding")
    for name in ("query", "key", "value"):
        names[f"blocks/attention/{name}/kernel"] = ("layers", *_INTO)
        names[f"blocks/attention/{name}/bias"] = ("layers", "heads", "projection")
    names["blocks/attention/out/kernel"] = ("layers", *_OUT)
    names["blocks/attention/out/bias"] = ("layers", "embedding")
    names |= layer("final_ada_ln", "conditioning", "final_modulations*embedding")
    names |= layer("final", "embedding", "channels")
    inputs = (struct(BATCH, SEQ, 12), struct(BATCH), struct(BATCH, dtype=jnp.int32))
    axes = (("batch", "patches", "pixels"), ("batch",), ("batch",))
    words = {"channels": "outputs"}
    weights = nnx.to_pure_dict(params)
    return NamedModel(function, weights, inputs, axes, names, words, False)


# Equinox: the BERT of its documentation; all three indices are inputs.


class _EquinoxBert(eqx.Module):
    token_embedder: eqx.nn.Embedding
    segment_embedder: eqx.nn.Embedding
    position_embedder: eqx.nn.Embedding
    layernorm: eqx.nn.LayerNorm
    layers: list
    pooler: eqx.nn.Linear
    classifier_head: eqx.nn.Linear

    def __init__(self, key):
        self.token_embedder = eqx.nn.Embedding(VOCABULARY, EMBEDDING, key=key)
        self.segment_embedder = eqx.nn.Embedding(2, EMBEDDING, key=key)
        self.position_embedder = eqx.nn.Embedding(32, EMBEDDING, key=key)
        self.layernorm = eqx.nn.LayerNorm(EMBEDDING)
        self.layers = [
            {
                "attention": eqx.nn.MultiheadAttention(
                    HEADS, EMBEDDING, use_query_bias=True, use_output_bias=True, key=key
                ),
                "attention_norm": eqx.nn.LayerNorm(EMBEDDING),
                "mlp": eqx.nn.Linear(EMBEDDING, NEURONS, key=key),
                "output": eqx.nn.Linear(NEURONS, EMBEDDING, key=key),
                "ff_norm": eqx.nn.LayerNorm(EMBEDDING),
            }
            for _ in range(6)
        ]
        self.pooler = eqx.nn.Linear(EMBEDDING, EMBEDDING, key=key)
        self.classifier_head = eqx.nn.Linear(EMBEDDING, 2, key=key)

    def __call__(self, tokens, places, segments):
        x = jax.vmap(self.token_embedder)(tokens) + jax.vmap(self.segment_embedder)(segments)
        x = jax.vmap(self.layernorm)(x + jax.vmap(self.position_embedder)(places))
        mask = jnp.broadcast_to(tokens != 0, (SEQ, SEQ))
        for layer in self.layers:
            x = jax.vmap(layer["attention_norm"])(layer["attention"](x, x, x, mask=mask) + x)
            h = jax.nn.gelu(jax.vmap(layer["mlp"])(x))
            x = jax.vmap(layer["ff_norm"])(jax.vmap(layer["output"])(h) + x)
        return self.classifier_head(jnp.tanh(self.pooler(x[0])))


def equinox_bert() -> NamedModel:
    module = eqx.filter_eval_shape(_EquinoxBert, jax.random.key(0))
    weights, static = eqx.partition(module, lambda leaf: isinstance(leaf, jax.ShapeDtypeStruct))

    def function(given, *inputs):
        return jax.vmap(eqx.combine(given, static))(*inputs)

    def layer(path, *axes):
        return {f"{path}/weight": axes, f"{path}/bias": axes[:1]}

    names = {
        "token_embedder/weight": ("vocabulary", "embedding"),
        "segment_embedder/weight": ("token_types", "embedding"),
        "position_embedder/weight": ("positions", "embedding"),
    }
    names |= _scale("layernorm", "weight", "bias")
    inner = "heads*projection"
    for i in range(6):
        path = f"layers/{i}"
        names |= layer(f"{path}/attention/query_proj", inner, "embedding")
        names |= layer(f"{path}/attention/output_proj", "embedding", inner)
        names |= {
            f"{path}/attention/{n}_proj/weight": (inner, "embedding") for n in ("key", "value")
        }
        names |= layer(f"{path}/mlp", "neurons", "embedding")
        names |= layer(f"{path}/output", "embedding", "neurons")
        names |= _scale(f"{path}/attention_norm", "weight", "bias")
        names |= _scale(f"{path}/ff_norm", "weight", "bias")
    names |= layer("pooler", "pooled", "embedding") | layer("classifier_head", "classes", "pooled")
    words = {"classes": "outputs"}
    return NamedModel(function, weights, (TOKENS,) * 3, BATCH_SEQ * 3, names, words)


def haiku() -> NamedModel:
    """Haiku's example: modules by path, each with ``w`` and ``b``; heads are split of the last."""
    names: dict[str, dict[str, tuple[str, ...]]] = {
        "transformer/~/embed": {"embeddings": ("vocabulary", "embedding")},
        "transformer": {"positional_embeddings": ("positions", "embedding")},
        "transformer/~/linear": {"w": ("embedding", "vocabulary"), "b": ("vocabulary",)},
    }
    inner = "heads*projection"
    for i in range(LAYERS):
        path = f"transformer/h{i}"
        for name in ("query", "key", "value"):
            names[f"{path}_attn/{name}"] = {"w": ("embedding", inner), "b": (inner,)}
        names[f"{path}_attn/linear"] = {"w": (inner, "embedding"), "b": ("embedding",)}
        names[f"{path}_mlp/linear"] = {"w": ("embedding", "neurons"), "b": ("neurons",)}
        names[f"{path}_mlp/linear_1"] = {"w": ("neurons", "embedding"), "b": ("embedding",)}
        for n in (1, 2):
            norm = {"scale": ("embedding",), "offset": ("embedding",)}
            names[f"{path}_ln_{n}"] = norm

    def dense(w, path, x):
        return jnp.dot(x, w[path]["w"]) + jnp.broadcast_to(
            w[path]["b"], x.shape[:-1] + w[path]["b"].shape
        )

    def normed(w, path, x):
        mean, var = jnp.mean(x, -1, keepdims=True), jnp.var(x, -1, keepdims=True)
        scale = jnp.broadcast_to(w[path]["scale"], x.shape) * jax.lax.rsqrt(var + 1e-5)
        return scale * (x - mean) + jnp.broadcast_to(w[path]["offset"], x.shape)

    def function(w, tokens):
        def one(tokens):
            x = w["transformer/~/embed"]["embeddings"][tokens]
            x = x + w["transformer"]["positional_embeddings"][:SEQ]
            mask = jnp.tril(jnp.ones((1, SEQ, SEQ)))
            for i in range(LAYERS):
                path = f"transformer/h{i}"
                h = normed(w, f"{path}_ln_1", x)
                q, k, v = (
                    dense(w, f"{path}_attn/{name}", h).reshape(SEQ, HEADS, PROJECTION)
                    for name in ("query", "key", "value")
                )
                scores = jnp.einsum("...thd,...Thd->...htT", q, k) * PROJECTION**-0.5
                shares = jax.nn.softmax(jnp.where(mask, scores, -1e30))
                made = jnp.einsum("...htT,...Thd->...thd", shares, v)
                x = x + dense(w, f"{path}_attn/linear", jnp.reshape(made, (SEQ, -1)))
                h = dense(w, f"{path}_mlp/linear", normed(w, f"{path}_ln_2", x))
                x = x + dense(w, f"{path}_mlp/linear_1", jax.nn.gelu(h))
            return dense(w, "transformer/~/linear", x)

        return jax.vmap(one)(tokens)

    weights = {path: structs_of(own) for path, own in names.items()}
    flat = {f"{path}/{name}": axes for path, own in names.items() for name, axes in own.items()}
    return NamedModel(function, weights, (TOKENS,), BATCH_SEQ, flat)


FRAMEWORKS_LEFT_OPEN = {"DiT of Flax NNX, scanned": nnx_diffusion}

FRAMEWORKS = {
    "Flax linen translation, shared table": linen_translation,
    "Equinox BERT, three indices": equinox_bert,
    "Haiku transformer": haiku,
}
