"""Training steps that the search had not seen when it was written, each with its own optimizer."""

from typing import Any

import jax
import jax.numpy as jnp
import optax

from benchmarks.choosing.model_parts import (
    attended,
    normed,
    plain_problem,
    problem_of_loss,
    struct,
    tokens_struct,
    weights_structs,
)
from penzai_shard import name_axes
from penzai_shard.choosing.choices.asked_problem import AskedProblem


def vision(batch: int, embedding: int = 768, patches: int = 256) -> AskedProblem:
    """A vision transformer: patches of images, attention to all, one class for each image."""
    into, out = ("embedding", "heads", "projection"), ("heads", "projection", "embedding")
    names: dict[str, tuple[str, ...]] = {
        "patch": ("pixels", "embedding"),
        "positions": ("positions", "embedding"),
        **dict.fromkeys("qkv", into),
        "o": out,
        "up": ("embedding", "neurons"),
        "up_bias": ("neurons",),
        "down": ("neurons", "embedding"),
        "down_bias": ("embedding",),
        "classifier": ("embedding", "classes"),
    }
    lengths = {
        "pixels": 768,
        "positions": patches,
        "embedding": embedding,
        "heads": embedding // 64,
        "projection": 64,
        "neurons": 4 * embedding,
        "classes": 1000,
    }

    def apply(w: Any, images: Any, labels: Any) -> Any:
        del labels
        x = images @ w["patch"] + w["positions"]
        h = normed(x)
        q, k, v = (jnp.einsum("bse,ehd->bshd", h, w[name]) for name in "qkv")
        x = x + jnp.einsum("bshd,hde->bse", attended(q, k, v, False), w["o"])
        wide = jax.nn.gelu(normed(x) @ w["up"] + w["up_bias"])
        x = x + wide @ w["down"] + w["down_bias"]
        return normed(x).mean(1) @ w["classifier"]

    model = name_axes(weights_structs(names, lengths), names)
    inputs = {"images": struct(batch, patches, 768), "labels": struct(batch, dtype=jnp.int32)}
    return plain_problem(model, apply, inputs, optimizer=optax.sgd(0.1, momentum=0.9))


def routed_experts(
    batch: int, seq: int, count: int = 24, embedding: int = 768, capacity: int = 64
) -> AskedProblem:
    """Many narrow experts; each computes a few tokens of a sequence, which a router sends there."""
    names = {
        "emb": ("vocabulary", "embedding"),
        "router": ("embedding", "experts"),
        "up": ("experts", "embedding", "neurons"),
        "down": ("experts", "neurons", "embedding"),
    }
    lengths = {
        "vocabulary": 12_288,
        "embedding": embedding,
        "experts": count,
        "neurons": embedding // 2,
    }

    def apply(w: Any, tokens: Any) -> Any:
        x = w["emb"][tokens]
        share = jax.nn.softmax(normed(x) @ w["router"])
        chosen = jax.nn.one_hot(share.argmax(-1), count)
        place = (jnp.cumsum(chosen, 1) - 1) * chosen
        sent = jax.nn.one_hot(place.sum(-1), capacity)[..., None, :] * chosen[..., None]
        inside = jnp.einsum("bsxc,bse->xbce", sent, x)
        hidden = jax.nn.gelu(jnp.einsum("xbce,xen->xbcn", inside, w["up"]))
        made = jnp.einsum("xbcn,xne->xbce", hidden, w["down"])
        back = jnp.einsum("xbce,bsxc,bsx->bse", made, sent, share)
        return normed(x + back) @ w["emb"].T

    model = name_axes(weights_structs(names, lengths), names)
    inputs = {"tokens": tokens_struct(batch, seq)}
    return plain_problem(model, apply, inputs, optimizer=optax.lion(1e-4))


def large_vocabulary(batch: int, seq: int, vocabulary: int = 100_003) -> AskedProblem:
    """A small mixer of tokens between a table and logits of a vocabulary that is prime."""
    names = {
        "table": ("vocabulary", "embedding"),
        "mix": ("positions", "seq"),
        "up": ("embedding", "neurons"),
        "down": ("neurons", "embedding"),
        "head": ("embedding", "vocabulary"),
    }
    lengths = {
        "vocabulary": vocabulary,
        "positions": seq,
        "seq": seq,
        "embedding": 256,
        "neurons": 512,
    }

    def apply(w: Any, tokens: Any) -> Any:
        x = w["table"][tokens]
        x = x + jnp.einsum("bse,ts->bte", x, jnp.tril(w["mix"]))
        x = x + jax.nn.silu(normed(x) @ w["up"]) @ w["down"]
        return normed(x) @ w["head"]

    model = name_axes(weights_structs(names, lengths), names)
    inputs = {"tokens": tokens_struct(batch, seq)}
    return plain_problem(model, apply, inputs, optimizer=optax.adafactor(1e-3))


def regression(batch: int, features: int = 262_144, targets: int = 1024) -> AskedProblem:
    """Linear regression from many features; none of its logical axes has a known role."""
    names = {"weight": ("features", "targets"), "bias": ("targets",)}
    lengths = {"features": features, "targets": targets}

    def loss(*, model: Any, x: Any, y: Any) -> Any:
        return ((x @ model["weight"] + model["bias"] - y) ** 2).mean()

    weights = name_axes(weights_structs(names, lengths), names)
    inputs = {"x": struct(batch, features), "y": struct(batch, targets)}
    return problem_of_loss(weights, loss, inputs, optimizer=optax.sgd(0.1))


def retrieval(batch: int, rows: int = 524_288, width: int = 128) -> AskedProblem:
    """Two towers over tables: which item of a batch belongs to which user."""
    names = {
        "users": ("vocabulary", "embedding"),
        "items": ("vocabulary", "embedding"),
        "user_up": ("embedding", "neurons"),
        "user_down": ("neurons", "embedding"),
        "item_up": ("embedding", "neurons"),
        "item_down": ("neurons", "embedding"),
    }
    lengths = {"vocabulary": rows, "embedding": width, "neurons": 8 * width}

    def tower(w: Any, side: str, ids: Any) -> Any:
        x = w[f"{side}s"][ids].mean(1)
        return normed(x + jax.nn.relu(x @ w[f"{side}_up"]) @ w[f"{side}_down"])

    def loss(*, model: Any, users: Any, items: Any) -> Any:
        scores = tower(model, "user", users) @ tower(model, "item", items).T
        own = jnp.arange(len(scores))
        return optax.softmax_cross_entropy_with_integer_labels(scores, own).mean()

    weights = name_axes(weights_structs(names, lengths), names)
    inputs = {"users": tokens_struct(batch, 8), "items": tokens_struct(batch, 2)}
    return problem_of_loss(weights, loss, inputs, optimizer=optax.adagrad(0.05))
