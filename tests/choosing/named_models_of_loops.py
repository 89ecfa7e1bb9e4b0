"""Transformers that do in a loop what others do side by side, or that ask tables beside keys."""

import jax
import jax.numpy as jnp

from tests.choosing.named_models import (
    BATCH,
    BATCH_SEQ,
    EXPERTS,
    HEADS,
    NEURONS,
    PROJECTION,
    SEQ,
    TOKENS,
    NamedModel,
    causal,
    rms_norm,
    structs_of,
)
from tests.choosing.transformer_parts import INNER

_ATTENTION = dict.fromkeys("qkv", ("embedding", INNER)) | {"o": (INNER, "embedding")}
_MLP = {"up": ("embedding", "neurons"), "down": ("neurons", "embedding")}
_NORMS = {"norm1": ("embedding",), "norm2": ("embedding",)}


def _decoder(block_names, block, **lengths) -> NamedModel:
    """Two blocks between a table of tokens and logits of the same table."""
    names = {"embed": ("vocabulary", "embedding")}
    for i in range(2):
        names |= {f"{i}.{path}": axes for path, axes in block_names.items()}

    def function(w, tokens):
        x = w["embed"][tokens]
        for i in range(2):
            x = block({path: w[f"{i}.{path}"] for path in block_names}, x)
        return x @ w["embed"].T

    return NamedModel(function, structs_of(names, **lengths), (TOKENS,), BATCH_SEQ, names)


def _heads(w, x):
    return ((x @ w[name]).reshape(BATCH, SEQ, HEADS, PROJECTION) for name in "qkv")


def _attended(w, x):
    q, k, v = _heads(w, rms_norm(x, w["norm1"]))
    shares = causal(jnp.einsum("bshd,bthd->bhst", q, k))
    return x + jnp.einsum("bhst,bthd->bshd", shares, v).reshape(BATCH, SEQ, -1) @ w["o"]


def _fed(w, x):
    return x + jax.nn.gelu(rms_norm(x, w["norm2"]) @ w["up"]) @ w["down"]


def experts_in_a_loop() -> NamedModel:
    """Each token is sent to one expert; a loop goes through all of them and masks the others."""
    names = {"router": ("embedding", "experts")}
    names |= {path: ("experts", *axes) for path, axes in _MLP.items()}

    def block(w, x):
        x = _attended(w, x)
        h = rms_norm(x, w["norm2"])
        shares = jax.nn.softmax(h @ w["router"])
        chosen = jnp.argmax(shares, -1)

        def expert(number, total):
            made = jax.nn.gelu(h @ w["up"][number]) @ w["down"][number]
            share = jax.lax.dynamic_index_in_dim(shares, number, 2)
            return total + jnp.where((chosen == number)[..., None], made * share, 0)

        return x + jax.lax.fori_loop(0, EXPERTS, expert, jnp.zeros_like(x))

    return _decoder(_ATTENTION | _NORMS | names, block)


def norms_of_stacked_heads() -> NamedModel:
    """Queries and keys are normed by head, with scales that are stacked as all weights are."""
    block = _ATTENTION | _MLP | _NORMS | {"q_norm": ("projection",), "k_norm": ("projection",)}
    names = {"embed": ("vocabulary", "embedding")}
    names |= {path: ("layers", *axes) for path, axes in block.items()}

    def step(x, w):
        q, k, v = _heads(w, rms_norm(x, w["norm1"]))
        q, k = rms_norm(q, w["q_norm"]), rms_norm(k, w["k_norm"])
        shares = causal(jnp.einsum("bshd,bthd->bhst", q, k))
        x = x + jnp.einsum("bhst,bthd->bshd", shares, v).reshape(BATCH, SEQ, -1) @ w["o"]
        return _fed(w, x), None

    def function(w, tokens):
        stacked = {path: w[path] for path in block}
        return jax.lax.scan(step, w["embed"][tokens], stacked)[0] @ w["embed"].T

    return NamedModel(function, structs_of(names, layers=3), (TOKENS,), BATCH_SEQ, names)


def neurons_in_chunks() -> NamedModel:
    """Neurons are stored by chunks, as many as heads, whose results a loop adds up."""
    names = {path: ("chunks", *axes) for path, axes in _MLP.items()}

    def block(w, x):
        x = _attended(w, x)
        h = rms_norm(x, w["norm2"])

        def chunk(total, part):
            return total + jax.nn.gelu(h @ part[0]) @ part[1], None

        return x + jax.lax.scan(chunk, jnp.zeros_like(x), (w["up"], w["down"]))[0]

    lengths = {"chunks": HEADS, "neurons": NEURONS // HEADS}
    return _decoder(_ATTENTION | _NORMS | names, block, **lengths)


def heads_in_a_loop() -> NamedModel:
    """Each head has weights of its own, by which a loop goes; their results are added."""
    names = dict.fromkeys("qkv", ("heads", "embedding", "projection"))
    names |= {"o": ("heads", "projection", "embedding")}

    def block(w, x):
        h = rms_norm(x, w["norm1"])

        def head(total, own):
            q, k, v, o = own
            return total + causal((h @ q) @ (h @ k).swapaxes(1, 2)) @ (h @ v) @ o, None

        return _fed(w, jax.lax.scan(head, x, tuple(w[name] for name in "qkvo"))[0])

    return _decoder(names | _MLP | _NORMS, block)


def keys_of_distances() -> NamedModel:
    """Shaw's relative positions: keys and values of clipped distances, which all heads have."""
    names = dict.fromkeys(("far_keys", "far_values"), ("distances", "projection"))

    def block(w, x):
        q, k, v = _heads(w, rms_norm(x, w["norm1"]))
        rows = jnp.clip(jnp.arange(SEQ) - jnp.arange(SEQ)[:, None], -2, 2) + 2
        scores = jnp.einsum("bshd,bthd->bhst", q, k)
        shares = causal(scores + jnp.einsum("bshd,std->bhst", q, w["far_keys"][rows]))
        made = jnp.einsum("bhst,bthd->bshd", shares, v)
        made += jnp.einsum("bhst,std->bshd", shares, w["far_values"][rows])
        return _fed(w, x + made.reshape(BATCH, SEQ, -1) @ w["o"])

    return _decoder(_ATTENTION | _MLP | _NORMS | names, block, distances=5)


LOOPS = {
    "experts in a loop": experts_in_a_loop,
    "norms of stacked heads": norms_of_stacked_heads,
}

LOOPS_LEFT_OPEN = {
    "neurons in chunks": neurons_in_chunks,
    "heads in a loop": heads_in_a_loop,
    "keys of distances (Shaw)": keys_of_distances,
}
