"""Training steps of several families, as ``choose_layout`` is asked about them.

Widths are those of real models, but there are few blocks: compiling takes as long for small arrays.
"""

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import optax
from penzai.models.transformer.variants import llamalike_common

import penzai_shard as pzs

ADAMW = optax.adamw(1e-3)


@dataclasses.dataclass(frozen=True)
class Step:
    """What is asked, in the words of ``choose_layout``.

    Attributes:
        model: The model, abstract.
        loss_fn: Its loss function.
        optimizer: An optimizer of optax.
        batch: The number of examples, or the inputs by name.
        seq: The length of a sequence where ``batch`` is a number.
        plain_arrays: Whether the loss function computes with arrays without names.
        names: What the model calls the axes of roles.
    """

    model: Any
    loss_fn: Callable[..., Any]
    optimizer: Any
    batch: Any
    seq: int | None = None
    plain_arrays: bool = False
    names: Mapping[str, Any] | None = None


# Parts


def struct(*shape: int, dtype: Any = jnp.float32) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)


def token_struct(batch: int, seq: int) -> jax.ShapeDtypeStruct:
    return struct(batch, seq, dtype=jnp.int32)


def make_weights(names: Mapping[str, tuple[Any, ...]], lengths: Mapping[str, int]) -> Any:
    """Named structs; an axis without a name is of a kernel that is three wide."""
    structs = {
        path: struct(*(lengths[axis] if axis else 3 for axis in axes))
        for path, axes in names.items()
    }
    return pzs.name_axes(structs, names)


def classify(
    weights: Any,
    apply: Callable[..., Any],
    inputs: Mapping[str, Any],
    optimizer: Any,
    **options: Any,
) -> Step:
    """A step in which logits of a function are to predict the last of its inputs."""

    def loss(model: Any, **given: Any) -> Any:
        targets = given[[*inputs][-1]]
        logits = apply(model, **given)
        return optax.softmax_cross_entropy_with_integer_labels(logits, targets).mean()

    return minimise(weights, loss, inputs, optimizer, **options)


def minimise(
    weights: Any,
    loss: Callable[..., Any],
    inputs: Mapping[str, Any],
    optimizer: Any,
    **options: Any,
) -> Step:
    """A step of a function that gives the loss of the weights and inputs."""

    def loss_fn(model: Any, rng: Any, state: Any, **given: Any) -> tuple[Any, Any, Any]:
        del rng
        return loss(model, **given), state, {}

    return Step(weights, loss_fn, optimizer, inputs, **{"plain_arrays": True, **options})


def normalise(x: Any) -> Any:
    return x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-6)


def attend(q: Any, k: Any, v: Any, is_causal: bool) -> Any:
    """Attention of [batch, seq, heads, projection]."""
    scores = jnp.einsum("bshd,bthd->bhst", q, k) / math.sqrt(q.shape[-1])
    if is_causal:
        scores = jnp.where(jnp.tril(jnp.ones(scores.shape[-2:], bool)), scores, -1e9)
    return jnp.einsum("bhst,bthd->bshd", jax.nn.softmax(scores, -1), v)


ATTENTION_NAMES = {
    **dict.fromkeys("qkv", ("embedding", "heads", "projection")),
    "o": ("heads", "projection", "embedding"),
}


def attention_block(w: Any, path: str, x: Any, context: Any = None, is_causal: bool = True) -> Any:
    """Adds attention to itself, or to a context, with weights below a path."""
    h = normalise(x)
    read = h if context is None else context
    q = jnp.einsum("bse,ehd->bshd", h, w[f"{path}q"])
    k, v = (jnp.einsum("bse,ehd->bshd", read, w[f"{path}{name}"]) for name in "kv")
    return x + jnp.einsum("bshd,hde->bse", attend(q, k, v, is_causal), w[f"{path}o"])


# Penzai's own


def llama(
    batch: int,
    seq: int,
    embedding: int = 1024,
    neurons: int = 4096,
    vocabulary: int = 8192,
    optimizer: Any = ADAMW,
    **changes: Any,
) -> Step:
    """A Llama with queries in groups; ``changes`` are those of its configuration."""
    options: dict[str, Any] = {
        "num_decoder_blocks": 1,
        "num_kv_heads": 8,
        "query_head_multiplier": 2,
        "projection_dim": embedding // 16,
        "mlp_variant": "swiglu",
        "tie_embedder_and_logits": False,
    }
    config = llamalike_common.LlamalikeTransformerConfig(
        embedding_dim=embedding,
        mlp_hidden_dim=neurons,
        vocab_size=vocabulary,
        **options | changes,
    )
    build = llamalike_common.build_llamalike_transformer
    model = pzs.abstract_model(build, config, jax.random.key(0))

    def loss_fn(model: Any, rng: Any, state: Any, tokens: Any) -> tuple[Any, Any, Any]:
        del rng
        return pzs.cross_entropy(model(tokens), tokens), state, {}

    return Step(model, loss_fn, optimizer, batch, seq)


def rolled_llama(*args: Any, **changes: Any) -> Step:
    """A Llama whose blocks are one stack, and run as a loop."""
    step = llama(*args, **changes, use_layer_stack=True)
    return dataclasses.replace(step, model=pzs.roll_layer_stacks().apply(step.model))


# Dictionaries of weights


def speech(batch: int, frames: int = 512, seq: int = 128) -> Step:
    """Reads frames of sound in two blocks, and writes tokens by a table that gives the logits too.

    As Radford et al. 2022, "Robust Speech Recognition via Large-Scale Weak Supervision"
    (arXiv:2212.04356) have it, with the widths of the model "small".
    """
    names: dict[str, tuple[str, ...]] = {
        "frames": ("bands", "embedding"),
        "table": ("vocabulary", "embedding"),
    }
    for part in ("read.0.", "read.1.", "write.", "cross."):
        names |= {f"{part}{name}": axes for name, axes in ATTENTION_NAMES.items()}
        names[f"{part}up"] = ("embedding", "neurons")
        names[f"{part}bias"] = ("neurons",)
        names[f"{part}down"] = ("neurons", "embedding")
    del names["write.up"], names["write.bias"], names["write.down"]
    lengths = {"bands": 80, "embedding": 768, "vocabulary": 51_864}
    lengths |= {"heads": 12, "projection": 64, "neurons": 3072}

    def feed_forward(w: Any, part: str, x: Any) -> Any:
        wide = jax.nn.gelu(normalise(x) @ w[f"{part}up"] + w[f"{part}bias"])
        return x + wide @ w[f"{part}down"]

    def apply(w: Any, sound: Any, tokens: Any) -> Any:
        heard = jax.nn.gelu(sound @ w["frames"])
        for part in ("read.0.", "read.1."):
            heard = feed_forward(w, part, attention_block(w, part, heard, is_causal=False))
        x = attention_block(w, "write.", w["table"][tokens])
        x = attention_block(w, "cross.", x, normalise(heard), is_causal=False)
        return normalise(feed_forward(w, "cross.", x)) @ w["table"].T

    inputs = {"sound": struct(batch, frames, 80), "tokens": token_struct(batch, seq)}
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), ADAMW)
    return classify(make_weights(names, lengths), apply, inputs, optimizer)


def two_of_experts(batch: int, seq: int, count: int = 16, capacity: int = 96) -> Step:
    """Attention, then two experts for each token, which products with one-hot arrays send there.

    As Lepikhin et al. 2020, "GShard" (arXiv:2006.16668) have it; what is over capacity is dropped.
    """
    names = {
        "table": ("vocabulary", "embedding"),
        **ATTENTION_NAMES,
        "router": ("embedding", "experts"),
        "up": ("experts", "embedding", "neurons"),
        "down": ("experts", "neurons", "embedding"),
        "head": ("embedding", "vocabulary"),
    }
    lengths = {"vocabulary": 32_000, "embedding": 1024, "heads": 16, "projection": 64}
    lengths |= {"experts": count, "neurons": 2048}

    def apply(w: Any, tokens: Any) -> Any:
        x = attention_block(w, "", w["table"][tokens])
        h = normalise(x)
        shares, chosen = jax.lax.top_k(jax.nn.softmax(h @ w["router"]), 2)
        # Places in an expert are given to all first choices, and then to second ones.
        is_chosen = jax.nn.one_hot(chosen, count).transpose(0, 2, 1, 3)
        place = jnp.cumsum(is_chosen.reshape(batch, -1, count), 1).reshape(is_chosen.shape) - 1
        sent = is_chosen[..., None] * jax.nn.one_hot(place, capacity)
        combined = jnp.einsum("bksxc,bsk->bsxc", sent, shares)
        inside = jnp.einsum("bsxc,bse->xbce", sent.sum(1), h)
        wide = jax.nn.silu(jnp.einsum("xbce,xen->xbcn", inside, w["up"]))
        made = jnp.einsum("xbcn,xne->xbce", wide, w["down"])
        return normalise(x + jnp.einsum("bsxc,xbce->bse", combined, made)) @ w["head"]

    inputs = {"tokens": token_struct(batch, seq)}
    return classify(make_weights(names, lengths), apply, inputs, optax.lamb(1e-3))


def convolutions(batch: int, size: int = 64) -> Step:
    """Three convolutions with most of the products, and a dense head with most of the weights.

    As Simonyan and Zisserman 2014 (arXiv:1409.1556) have it, on small images.
    """
    lengths = {"colors": 3, "thin": 64, "medium": 128, "thick": 256}
    lengths |= {"features": 256 * (size // 8) ** 2, "neurons": 4096, "embedding": 4096}
    lengths["classes"] = 1000
    names: dict[str, tuple[Any, ...]] = {
        "conv.0": (None, None, "colors", "thin"),
        "conv.1": (None, None, "thin", "medium"),
        "conv.2": (None, None, "medium", "thick"),
        "dense.0": ("features", "neurons"),
        "bias.0": ("neurons",),
        "dense.1": ("neurons", "embedding"),
        "bias.1": ("embedding",),
        "dense.2": ("embedding", "classes"),
        "bias.2": ("classes",),
    }

    def apply(w: Any, images: Any, labels: Any) -> Any:
        del labels
        x = images
        for i in range(3):
            axes = ("NHWC", "HWIO", "NHWC")
            x = jax.lax.conv_general_dilated(x, w[f"conv.{i}"], (1, 1), "SAME", None, None, axes)
            n, height, width, maps = x.shape
            x = jax.nn.relu(x).reshape(n, height // 2, 2, width // 2, 2, maps).mean((2, 4))
        x = x.reshape(len(x), -1)
        for i in range(2):
            x = jax.nn.relu(x @ w[f"dense.{i}"] + w[f"bias.{i}"])
        return x @ w["dense.2"] + w["bias.2"]

    inputs = {"images": struct(batch, size, size, 3), "labels": struct(batch, dtype=jnp.int32)}
    optimizer = optax.sgd(0.01, momentum=0.9, nesterov=True)
    weights = make_weights(names, lengths)
    return classify(weights, apply, inputs, optimizer, names={"vocabulary": "classes"})
