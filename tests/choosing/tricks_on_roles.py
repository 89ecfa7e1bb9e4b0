"""Small transformers in which something plays the part of something else, and is as long."""

import dataclasses

import jax
import jax.numpy as jnp

from tests.choosing.named_models import (
    BATCH_SEQ,
    EMBEDDING,
    HEADS,
    LENGTHS,
    NEURONS,
    SEQ,
    TOKENS,
    VOCABULARY,
    NamedModel,
    causal,
    struct,
    structs_of,
)

_INTO, _OUT = ("embedding", "heads", "projection"), ("heads", "projection", "embedding")
_ATTENTION = {"q": _INTO, "k": _INTO, "v": _INTO, "o": _OUT}
_BLOCK = {**_ATTENTION, "up": ("embedding", "neurons"), "down": ("neurons", "embedding")}


def _attend(w, x, context=None, prefix=None, mix=None):
    context = x if context is None else context
    q = jnp.einsum("bse,ehd->bshd", x, w["q"])
    k, v = (jnp.einsum("bse,ehd->bshd", context, w[name]) for name in "kv")
    if prefix is not None:
        k, v = (
            jnp.concatenate([jnp.broadcast_to(p, (x.shape[0], *p.shape)), y], 1)
            for p, y in zip(prefix, (k, v), strict=True)
        )
    scores = jnp.einsum("bshd,bthd->bhst", q, k)
    scores = scores if mix is None else jnp.einsum("bhst,hg->bgst", scores, mix)
    shares = causal(scores) if scores.shape[-1] == scores.shape[-2] else jax.nn.softmax(scores)
    return jnp.einsum("bhst,bthd,hde->bse", shares, v, w["o"])


def _block(w, x, **options):
    x = x + _attend(w, x, **options)
    return x + jax.nn.gelu(x @ w["up"]) @ w["down"]


def _model(function, names, **lengths):
    weights = structs_of(names, **lengths)
    return NamedModel(function, weights, (TOKENS,), BATCH_SEQ, names, {}, False)


def bins_as_many_as_the_vocabulary():
    """Logits of the next token, and of a reward's bins, for each token."""
    names = {
        "a": ("vocabulary", "embedding"),
        **_BLOCK,
        "b": ("embedding", "vocabulary"),
        "c": ("embedding", "bins"),
    }

    def function(w, tokens):
        x = _block(w, w["a"][tokens])
        return x @ w["c"], x @ w["b"]

    return _model(function, names, bins=VOCABULARY)


def positions_as_many_as_the_vocabulary():
    names = {
        "a": ("positions", "embedding"),
        "b": ("vocabulary", "embedding"),
        **_BLOCK,
        "c": ("embedding", "vocabulary"),
    }

    def function(w, tokens):
        return _block(w, w["b"][tokens] + w["a"][jnp.arange(SEQ)]) @ w["c"]

    return _model(function, names, positions=VOCABULARY)


def hashed_tokens():
    """A second table by a hash of the tokens, with as many buckets as there are tokens."""
    names = {
        "a": ("buckets", "embedding"),
        "b": ("vocabulary", "embedding"),
        **_BLOCK,
        "c": ("embedding", "vocabulary"),
    }

    def function(w, tokens):
        return _block(w, w["b"][tokens] + w["a"][(tokens * 7 + 3) % VOCABULARY]) @ w["c"]

    return _model(function, names, buckets=VOCABULARY)


def learned_latents():
    """Perceiver: as many latents as heads ask, and the tokens answer."""
    names = {"a": ("vocabulary", "embedding"), "b": ("latents", "embedding"), **_BLOCK}

    def function(w, tokens):
        x = w["a"][tokens]
        latents = jnp.broadcast_to(w["b"], (x.shape[0], *w["b"].shape))
        latents = latents + _attend(w, latents, context=x)
        return latents + jax.nn.gelu(latents @ w["up"]) @ w["down"]

    return _model(function, names, latents=HEADS)


def learned_prefix():
    """As many learned keys and values as heads before those of the tokens."""
    names = {
        "a": ("vocabulary", "embedding"),
        "b": ("prefix", "heads", "projection"),
        "c": ("prefix", "heads", "projection"),
        **_BLOCK,
    }

    def function(w, tokens):
        return _block(w, w["a"][tokens], prefix=(w["b"], w["c"]))

    return _model(function, names, prefix=HEADS)


def talking_heads():
    """Scores of heads are mixed to scores of as many others, which the values have."""
    names = {
        "a": ("vocabulary", "embedding"),
        **_BLOCK,
        "q": ("embedding", "score_heads", "projection"),
        "k": ("embedding", "score_heads", "projection"),
        "b": ("score_heads", "heads"),
    }

    def function(w, tokens):
        return _block(w, w["a"][tokens], mix=w["b"])

    return _model(function, names, score_heads=HEADS)


def stages_of_equal_width():
    """Two stages with a projection between them: two streams, of equal lengths alone."""
    stages = [
        {
            f"stages.{i}.{path}": tuple(f"{name}_{i}" for name in axes)
            for path, axes in _BLOCK.items()
        }
        for i in range(2)
    ]
    names = {
        "a": ("vocabulary", "embedding_0"),
        **stages[0],
        "between": ("embedding_0", "embedding_1"),
        **stages[1],
    }

    def function(w, tokens):
        x = _block({path: w[f"stages.0.{path}"] for path in _BLOCK}, w["a"][tokens])
        x = x @ w["between"]
        return _block({path: w[f"stages.1.{path}"] for path in _BLOCK}, x)

    roles = ("embedding", "heads", "projection", "neurons")
    lengths = {f"{role}_{i}": LENGTHS[role] for role in roles for i in range(2)}
    words = {f"{role}_{i}": f"stages_{i}_{role}" for role in roles for i in range(2)}
    return dataclasses.replace(_model(function, names, **lengths), words=words)


def gates_as_many_as_neurons():
    """A product that is only weighed by: what it makes is contracted with nothing."""
    names = {"a": ("vocabulary", "embedding"), **_BLOCK, "b": ("embedding", "gates")}

    def function(w, tokens):
        x = _block(w, w["a"][tokens])
        return jax.nn.sigmoid(x @ w["b"]).mean(-1)

    return _model(function, names, gates=NEURONS)


def neurons_of_a_convolution():
    """Positions are mixed by a depthwise convolution with as many taps as heads."""
    names = {"a": ("vocabulary", "embedding"), "b": (None, None, "embedding"), **_BLOCK}

    def function(w, tokens):
        x = w["a"][tokens]
        x = x + jax.lax.conv_general_dilated(
            x,
            w["b"],
            (1,),
            [(HEADS - 1, 0)],
            dimension_numbers=("NWC", "WIO", "NWC"),
            feature_group_count=EMBEDDING,
        )
        return _block(w, x)

    weights = structs_of({path: axes for path, axes in names.items() if path != "b"})
    weights["b"] = struct(HEADS, 1, EMBEDDING)
    return NamedModel(function, weights, (TOKENS,), BATCH_SEQ, names, {}, False)


TRICKS_ON_ROLES = (
    bins_as_many_as_the_vocabulary,
    positions_as_many_as_the_vocabulary,
    hashed_tokens,
    learned_latents,
    learned_prefix,
    talking_heads,
    stages_of_equal_width,
    gates_as_many_as_neurons,
    neurons_of_a_convolution,
)
