"""One Llama, its weights as torch stores them, computed as different people write it.

Whatever the program looks like, the names of the weights are the same.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp

from tests.choosing import named_models
from tests.choosing.named_models import (
    BATCH,
    EMBEDDING,
    GROUPS,
    HEADS,
    LAYERS,
    PROJECTION,
    SEQ,
    VOCABULARY,
    NamedModel,
    causal,
    rms_norm,
    rotary_half,
)

# Queries are [batch, seq, heads, projection]; keys and values have groups in place of heads.


def _repeated(k, v):
    return (jnp.repeat(y, HEADS // GROUPS, axis=2) for y in (k, v))


def _grouped(q, k, v):
    q = q.reshape(BATCH, SEQ, GROUPS, HEADS // GROUPS, PROJECTION)
    shares = causal(jnp.einsum("bsgqd,btgd->bgqst", q, k))
    return jnp.einsum("bgqst,btgd->bsgqd", shares, v)


def _of_jax(q, k, v):
    return jax.nn.dot_product_attention(q, k, v, is_causal=True, implementation="xla")


def _online(q, k, v):
    """Block by block with a running maximum, as FlashAttention does."""
    blocks = [y.reshape(BATCH, 2, SEQ // 2, HEADS, PROJECTION) for y in _repeated(k, v)]

    def step(carry, block):
        most, total, sums = carry
        scores = jnp.einsum("bqhd,bkhd->bhqk", q, block[0])
        higher = jnp.maximum(most, scores.max(-1))
        shares, decay = jnp.exp(scores - higher[..., None]), jnp.exp(most - higher)
        sums = sums * decay[..., None] + jnp.einsum("bhqk,bkhd->bhqd", shares, block[1])
        return (higher, total * decay + shares.sum(-1), sums), None

    rows = (BATCH, HEADS, SEQ)
    start = (jnp.full(rows, -1e9), jnp.zeros(rows), jnp.zeros((*rows, PROJECTION)))
    (_, total, sums), _ = jax.lax.scan(step, start, tuple(y.swapaxes(0, 1) for y in blocks))
    return (sums / total[..., None]).swapaxes(1, 2)


def _cached(q, k, v):
    """Keys and values are written into a longer cache."""
    cache = jnp.zeros((BATCH, 2 * SEQ, GROUPS, PROJECTION))
    k, v = (jax.lax.dynamic_update_slice(cache, y, (0, 0, 0, 0)) for y in (k, v))
    k, v = _repeated(k, v)
    scores = jnp.einsum("bqhd,bkhd->bhqk", q, k)
    is_before = jnp.arange(2 * SEQ)[None] <= jnp.arange(SEQ)[:, None]
    shares = jax.nn.softmax(jnp.where(is_before, scores, -1e9), -1)
    return jnp.einsum("bhqk,bkhd->bqhd", shares, v)


def _mapped(q, k, v):
    def of_head(q, k, v):
        return causal(q @ k.T) @ v

    return jax.vmap(jax.vmap(of_head, 1, 1))(q, *_repeated(k, v))


def _local(q, k, v):
    """Each position looks at those of its window."""
    q, k, v = (
        y.reshape(BATCH, 2, SEQ // 2, HEADS, PROJECTION).astype(jnp.bfloat16)
        for y in (q, *_repeated(k, v))
    )
    shares = causal(30 * jnp.tanh(jnp.einsum("bcqhd,bckhd->bchqk", q, k) / 30))
    return jnp.einsum("bchqk,bckhd->bcqhd", shares, v).astype(jnp.float32)


def _logits(weights, tokens, look_up, attend, block):
    x = look_up(weights["model.embed_tokens.weight"], tokens)
    for i in range(LAYERS):

        def linear(name, y, i=i):
            return y @ weights[f"model.layers.{i}.{name}.weight"].T

        def norm(name, y, i=i):
            return rms_norm(y, weights[f"model.layers.{i}.{name}.weight"])

        def attention(y, linear=linear):
            q, k, v = (
                linear(f"self_attn.{name}_proj", y).reshape(BATCH, SEQ, -1, PROJECTION)
                for name in "qkv"
            )
            q, k = (rotary_half(each.swapaxes(1, 2)).swapaxes(1, 2) for each in (q, k))
            return linear("self_attn.o_proj", attend(q, k, v).reshape(y.shape))

        def mlp(y, linear=linear):
            hidden = jax.nn.silu(linear("mlp.gate_proj", y)) * linear("mlp.up_proj", y)
            return linear("mlp.down_proj", hidden)

        first = functools.partial(norm, "input_layernorm")
        second = functools.partial(norm, "post_attention_layernorm")
        if block == "parallel":
            x = x + attention(first(x)) + mlp(second(x))
        elif block == "norms after":
            x = first(x + attention(x))
            x = second(x + mlp(x))
        elif block == "tokens in a row":
            x = x + attention(first(x))
            x = x + mlp(second(x).reshape(BATCH * SEQ, EMBEDDING)).reshape(x.shape)
        else:
            x = x + 0.5 * attention(first(x))
            x = x + 0.5 * jax.checkpoint(mlp)(second(x))
    return rms_norm(x, weights["model.norm.weight"]) @ weights["lm_head.weight"].T


def _of_next_tokens(logits, tokens):
    chances = jax.nn.log_softmax(logits[:, :-1])
    return -jnp.take_along_axis(chances, tokens[:, 1:, None], -1).mean()


def _of_rows(logits, tokens):
    chances = jax.nn.log_softmax(logits.reshape(BATCH * SEQ, VOCABULARY))
    return -chances[jnp.arange(BATCH * SEQ), tokens.reshape(-1)].mean()


def _variant(look_up, attend, block, end=lambda logits, _: logits, gradient=False) -> NamedModel:
    def function(weights, tokens):
        return end(_logits(weights, tokens, look_up, attend, block), tokens)

    called = jax.grad(function) if gradient else function
    return dataclasses.replace(named_models.torch_llama(), function=called)


def _taken(table, tokens):
    return jnp.take(table, tokens, axis=0)


def _clipped(table, tokens):
    return table.at[tokens].get(mode="clip")


def _one_hot(table, tokens):
    return jax.nn.one_hot(tokens, VOCABULARY) @ table


def _one_by_one(table, tokens):
    return jax.vmap(jax.vmap(lambda token: table[token]))(tokens)


VARIANTS = {
    "Llama, gradient of JAX's attention": lambda: _variant(
        _taken, _of_jax, "parallel", _of_next_tokens, True
    ),
    "Llama, gradient of grouped attention": lambda: _variant(
        _one_hot, _grouped, "norms after", _of_rows, True
    ),
    "Llama, online softmax": lambda: _variant(
        _one_hot, _online, "norms after", lambda logits, _: 30 * jnp.tanh(logits / 30)
    ),
    "Llama, cache of keys": lambda: _variant(
        _clipped, _cached, "tokens in a row", lambda logits, _: {"last": logits[:, -1]}
    ),
    "Llama, mapped over heads": lambda: _variant(_one_by_one, _mapped, "rematerialised", _of_rows),
    "Llama, local windows": lambda: _variant(
        _taken, _local, "rematerialised", _of_next_tokens, True
    ),
}
