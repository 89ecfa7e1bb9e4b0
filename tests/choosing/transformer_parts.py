"""Parts of transformers over flat weights, as many models in PyTorch's layout are written."""

import jax
import jax.numpy as jnp

from tests.choosing.named_models import GROUPS, HEADS, PROJECTION, SEQ, causal, rotary_half

INNER = "heads*projection"
QUERIES, KEYS = "head_groups*query_heads*projection", "head_groups*projection"


def linear_names(path, out, into, has_bias=True):
    """Names of a linear layer, its outputs first."""
    return {f"{path}.weight": (out, into)} | ({f"{path}.bias": (out,)} if has_bias else {})


def norm_names(path, axis="embedding"):
    return {f"{path}.weight": (axis,), f"{path}.bias": (axis,)}


def linear(w, path, x):
    return x @ w[f"{path}.weight"].T + w.get(f"{path}.bias", 0.0)


def norm(w, path, x):
    centred = x - x.mean(-1, keepdims=True)
    scaled = centred * jax.lax.rsqrt(x.var(-1, keepdims=True) + 1e-6)
    return scaled * w[f"{path}.weight"] + w[f"{path}.bias"]


def split_heads(x, heads=HEADS):
    """[batch, seq, heads * projection] as [batch, heads, seq, projection]."""
    return x.reshape(*x.shape[:2], heads, -1).transpose(0, 2, 1, 3)


def merge_heads(x):
    return x.transpose(0, 2, 1, 3).reshape(x.shape[0], x.shape[2], -1)


def attend(q, k, v, is_causal=False):
    scores = q @ k.swapaxes(-1, -2) * PROJECTION**-0.5
    return merge_heads((causal(scores) if is_causal else jax.nn.softmax(scores, -1)) @ v)


def attention_names(path, out="embedding", into="embedding", inner=INNER, has_bias=False):
    names = linear_names(f"{path}.o", out, inner, has_bias)
    for name, read in (("q", out), ("k", into), ("v", into)):
        names |= linear_names(f"{path}.{name}", inner, read, has_bias)
    return names


def attention(w, path, x, context=None, is_causal=False):
    context = x if context is None else context
    given = (("q", x), ("k", context), ("v", context))
    q, k, v = (split_heads(linear(w, f"{path}.{name}", y)) for name, y in given)
    return linear(w, f"{path}.o", attend(q, k, v, is_causal))


def mlp_names(path, embedding="embedding", neurons="neurons", has_bias=False):
    up = linear_names(f"{path}.up", neurons, embedding, has_bias)
    return up | linear_names(f"{path}.down", embedding, neurons, has_bias)


def mlp(w, path, x):
    return linear(w, f"{path}.down", jax.nn.gelu(linear(w, f"{path}.up", x)))


def grouped_names(path, has_bias=False):
    """Names of attention in which keys and values have groups of heads."""
    names = linear_names(f"{path}.o", "embedding", QUERIES, False)
    for name, inner in (("q", QUERIES), ("k", KEYS), ("v", KEYS)):
        names |= linear_names(f"{path}.{name}", inner, "embedding", has_bias)
    return names


def grouped_attention(w, path, x, change=lambda q, k: (q, k), window=SEQ, cap=0.0):
    """Causal, within a window; ``change`` is done to queries and keys, scores may be capped."""
    q, k, v = (linear(w, f"{path}.{name}", x) for name in "qkv")
    q, k = change(q, k)
    q, k, v = (split_heads(y, n) for y, n in ((q, HEADS), (k, GROUPS), (v, GROUPS)))
    k, v = (jnp.repeat(y, HEADS // GROUPS, 1) for y in (rotary_half(k), v))
    scores = rotary_half(q) @ k.swapaxes(-1, -2)
    scores = cap * jnp.tanh(scores / cap) if cap else scores
    places = jnp.arange(SEQ)
    distance = places[:, None] - places
    shares = jax.nn.softmax(jnp.where((distance >= 0) & (distance < window), scores, -1e9), -1)
    return linear(w, f"{path}.o", merge_heads(shares @ v))


def gated_names(path, neurons="neurons"):
    return mlp_names(path, neurons=neurons) | linear_names(
        f"{path}.gate", neurons, "embedding", False
    )


def gated(w, path, x):
    hidden = jax.nn.silu(linear(w, f"{path}.gate", x)) * linear(w, f"{path}.up", x)
    return linear(w, f"{path}.down", hidden)


def sinusoids(places, size):
    angles = places[..., None] * jnp.exp(-jnp.arange(size // 2) * 0.3)
    return jnp.concatenate([jnp.sin(angles), jnp.cos(angles)], -1)
