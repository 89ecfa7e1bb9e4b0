"""Transformers as large trainers in JAX write them: MaxText, T5X, Levanter."""

import warnings

import equinox as eqx
import jax
import jax.numpy as jnp
from flax import linen

from tests.choosing.named_models import (
    BATCH,
    BATCH_SEQ,
    EMBEDDING,
    GROUPS,
    HEADS,
    LAYERS,
    NEURONS,
    PROJECTION,
    SEQ,
    TOKENS,
    VOCABULARY,
    NamedModel,
    rotary_half,
    structs_of,
)

# T5X and MaxText: dense layers of several dimensions, layers scanned along the second dimension.


class _Decoder(linen.Module):
    @linen.compact
    def __call__(self, x, _):
        def dense(name, *features):
            return linen.DenseGeneral(features, use_bias=False, name=name)

        h = linen.RMSNorm(name="pre_self_attention_norm")(x)
        q, k = dense("query", HEADS, PROJECTION)(h), dense("key", GROUPS, PROJECTION)(h)
        v = dense("value", GROUPS, PROJECTION)(h)
        q, k = (rotary_half(y.swapaxes(1, 2)).swapaxes(1, 2) for y in (q, k))
        made = jax.nn.dot_product_attention(q, k, v, is_causal=True, implementation="xla")
        out = linen.DenseGeneral(EMBEDDING, axis=(-2, -1), use_bias=False, name="out")
        x = x + out(made)
        h = linen.RMSNorm(name="pre_mlp_norm")(x)
        h = linen.silu(dense("wi_0", NEURONS)(h)) * dense("wi_1", NEURONS)(h)
        return x + dense("wo", EMBEDDING)(h), None


class _MaxText(linen.Module):
    @linen.compact
    def __call__(self, tokens):
        embed = linen.Embed(VOCABULARY, EMBEDDING, name="token_embedder")
        block = linen.remat(_Decoder, prevent_cse=False)
        stack = linen.scan(
            block, variable_axes={"params": 1}, split_rngs={"params": True}, length=HEADS
        )
        x, _ = stack(name="layers")(embed(tokens), None)
        x = linen.RMSNorm(name="decoder_norm")(x)
        return linen.DenseGeneral(VOCABULARY, use_bias=False, name="logits_dense")(x)


def maxtext() -> NamedModel:
    """As many layers as heads, stacked along the second dimension of all weights."""
    module = _MaxText()
    weights = jax.eval_shape(module.init, jax.random.key(0), TOKENS)
    queries = ("head_groups*query_heads", "projection")
    names = {
        "params/token_embedder/embedding": ("vocabulary", "embedding"),
        "params/decoder_norm/scale": ("embedding",),
        "params/logits_dense/kernel": ("embedding", "vocabulary"),
    }
    block = {
        "query": ("embedding", "layers", *queries),
        "key": ("embedding", "layers", "head_groups", "projection"),
        "value": ("embedding", "layers", "head_groups", "projection"),
        "out": (queries[0], "layers", "projection", "embedding"),
        "wi_0": ("embedding", "layers", "neurons"),
        "wi_1": ("embedding", "layers", "neurons"),
        "wo": ("neurons", "layers", "embedding"),
    }
    names |= {f"params/layers/{name}/kernel": axes for name, axes in block.items()}
    for name in ("pre_self_attention_norm", "pre_mlp_norm"):
        names[f"params/layers/{name}/scale"] = ("embedding", "layers")
    return NamedModel(module.apply, weights, (TOKENS,), BATCH_SEQ, names)


def t5x() -> NamedModel:
    """Positions by buckets that are written as rows with a one; heads before buckets."""
    names = {
        "decoder/relpos_bias/rel_embedding": ("heads", "buckets"),
        "token_embedder/embedding": ("vocabulary", "embedding"),
        "decoder/decoder_norm/scale": ("embedding",),
        "decoder/logits_dense/kernel": ("embedding", "vocabulary"),
    }
    for i in range(LAYERS):
        path = f"decoder/layers_{i}"
        for name in ("query", "key", "value"):
            names[f"{path}/self_attention/{name}/kernel"] = ("embedding", "heads*projection")
        names |= {
            f"{path}/self_attention/out/kernel": ("heads*projection", "embedding"),
            f"{path}/pre_self_attention_layer_norm/scale": ("embedding",),
            f"{path}/pre_mlp_layer_norm/scale": ("embedding",),
            f"{path}/mlp/wi/kernel": ("embedding", "neurons"),
            f"{path}/mlp/wo/kernel": ("neurons", "embedding"),
        }

    def normed(w, path, x):
        return x * jax.lax.rsqrt(jnp.mean(jax.lax.square(x), -1, keepdims=True)) * w[path]

    def dense(w, path, x):
        contracted = ((x.ndim - 1,), (0,))
        return jax.lax.dot_general(x, w[f"{path}/kernel"], (contracted, ((), ())))

    def function(w, tokens):
        rows = jax.nn.one_hot(tokens, VOCABULARY)
        x = jnp.dot(rows, w["token_embedder/embedding"])
        distance = jnp.arange(SEQ)[None] - jnp.arange(SEQ)[:, None]
        buckets = jnp.clip(-distance, 0, SEQ - 1)
        hot = jax.lax.broadcasted_iota(jnp.int32, (SEQ, 1, 1), 0) == buckets[None]
        table = w["decoder/relpos_bias/rel_embedding"]
        bias = jax.lax.dot_general(table, hot.astype(table.dtype), (((1,), (0,)), ((), ())))
        mask = jnp.where(distance <= 0, 0.0, -1e10)
        for i in range(LAYERS):
            path = f"decoder/layers_{i}"
            h = normed(w, f"{path}/pre_self_attention_layer_norm/scale", x)
            q, k, v = (
                dense(w, f"{path}/self_attention/{name}", h).reshape(BATCH, SEQ, HEADS, PROJECTION)
                for name in ("query", "key", "value")
            )
            scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) + bias[None] + mask
            made = jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores).astype(x.dtype), v)
            x = x + dense(w, f"{path}/self_attention/out", made.reshape(BATCH, SEQ, -1))
            h = jax.nn.relu(
                dense(w, f"{path}/mlp/wi", normed(w, f"{path}/pre_mlp_layer_norm/scale", x))
            )
            x = x + dense(w, f"{path}/mlp/wo", h)
        return dense(w, "decoder/logits_dense", normed(w, "decoder/decoder_norm/scale", x))

    return NamedModel(function, structs_of(names, buckets=SEQ), (TOKENS,), BATCH_SEQ, names)


def levanter() -> NamedModel:
    """GPT-2 as Levanter writes it with Haliax: blocks are folded, queries unbound from keys."""
    from tests.choosing.named_models_of_libraries import of_haliax
    from tests.readers.haliax_model import hax, hnn

    layers, embed, mlp = hax.make_axes(layers=3, embed=EMBEDDING, mlp=NEURONS)
    heads, head_size, vocab = hax.make_axes(heads=HEADS, head_size=PROJECTION, vocab=VOCABULARY)
    batch, position, qkv = hax.make_axes(batch=BATCH, position=SEQ, qkv=3)

    class Block(eqx.Module):
        ln_1: hnn.LayerNorm
        c_attn: hnn.Linear
        c_proj: hnn.Linear
        ln_2: hnn.LayerNorm
        c_fc: hnn.Linear
        c_out: hnn.Linear

        @staticmethod
        def init(*, key):
            return Block(
                hnn.LayerNorm.init(embed),
                hnn.Linear.init(embed, (qkv, heads, head_size), key=key),
                hnn.Linear.init((heads, head_size), embed, key=key),
                hnn.LayerNorm.init(embed),
                hnn.Linear.init(embed, mlp, key=key),
                hnn.Linear.init(mlp, embed, key=key),
            )

        def __call__(self, x):
            q, k, v = self.c_attn(self.ln_1(x)).unbind("qkv")
            k, v = (y.rename({"position": "key_position"}) for y in (k, v))
            scores = hax.dot(q / PROJECTION**0.5, k, axis="head_size")
            shares = hnn.softmax(scores, axis="key_position")
            x = x + self.c_proj(hax.dot(shares, v, axis="key_position"))
            return x + self.c_out(hnn.gelu(self.c_fc(self.ln_2(x))))

    class Transformer(eqx.Module):
        wte: hnn.Embedding
        wpe: hnn.Embedding
        blocks: hnn.Stacked
        ln_f: hnn.LayerNorm

        def __call__(self, tokens):
            x = self.wte.embed(tokens) + self.wpe.embed(hax.arange(position))
            x = self.ln_f(self.blocks.fold(x))
            return hax.dot(x, self.wte.weight, axis="embed")

    def build(key):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)
            return Transformer(
                hnn.Embedding.init(vocab, embed, key=key),
                hnn.Embedding.init(hax.Axis("positions", 2 * SEQ), embed, key=key),
                hnn.Stacked.init(layers, Block)(key=jax.random.split(key, 3)),
                hnn.LayerNorm.init(embed),
            )

    words = {
        "embed": "embedding",
        "mlp": "neurons",
        "head_size": "projection",
        "vocab": "vocabulary",
    }
    return of_haliax(build, (batch, position), words)


TRAINERS = {
    "MaxText, stacked along the second": maxtext,
    "T5X, buckets as rows with a one": t5x,
    "Levanter GPT-2, folded": levanter,
}
