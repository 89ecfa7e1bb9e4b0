"""Training steps that the search had not seen when it was written, each with its own optimizer."""

import functools
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
from flax import nnx

from benchmarks.choosing.model_parts import (
    attended,
    normed,
    plain_problem,
    problem_of_loss,
    struct,
    tokens_struct,
    weights_structs,
)
from penzai_shard import infer_names, name_axes
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


# Those above were judged first, and these once the search had been mended by them.


def scanned_gpt(
    batch: int, seq: int, layers: int = 4, embedding: int = 512, vocabulary: int = 16_384
) -> AskedProblem:
    """Layers in a loop over stacked weights, each computed again in the backward pass."""
    names: dict[str, tuple[str, ...]] = {
        "wte": ("vocabulary", "embedding"),
        "wpe": ("positions", "embedding"),
        **{f"layers.{name}": ("layers", "embedding", "heads", "projection") for name in "qkv"},
        "layers.o": ("layers", "heads", "projection", "embedding"),
        "layers.fc": ("layers", "embedding", "neurons"),
        "layers.proj": ("layers", "neurons", "embedding"),
    }
    lengths = {
        "vocabulary": vocabulary,
        "positions": seq,
        "layers": layers,
        "embedding": embedding,
        "heads": embedding // 64,
        "projection": 64,
        "neurons": 4 * embedding,
    }

    def block(x: Any, w: Any) -> tuple[Any, None]:
        h = normed(x)
        q, k, v = (jnp.einsum("bse,ehd->bshd", h, w[name]) for name in "qkv")
        x = x + jnp.einsum("bshd,hde->bse", attended(q, k, v, True), w["o"])
        return x + jax.nn.gelu(normed(x) @ w["fc"]) @ w["proj"], None

    def apply(w: Any, tokens: Any) -> Any:
        x = w["wte"][tokens] + w["wpe"][jnp.arange(tokens.shape[1])]
        stacked = {
            path.removeprefix("layers."): weight
            for path, weight in w.items()
            if path.startswith("layers.")
        }
        x, _ = jax.lax.scan(jax.checkpoint(block), x, stacked)
        return normed(x) @ w["wte"].T

    model = name_axes(weights_structs(names, lengths), names)
    inputs = {"tokens": tokens_struct(batch, seq)}
    return plain_problem(model, apply, inputs, optimizer=optax.adam(1e-3))


class _VisionBlock(nnx.Module):
    def __init__(self, embedding: int, rngs: Any) -> None:
        self.norm_1 = nnx.LayerNorm(embedding, rngs=rngs)
        self.attention = nnx.MultiHeadAttention(embedding // 64, embedding, decode=False, rngs=rngs)
        self.norm_2 = nnx.LayerNorm(embedding, rngs=rngs)
        self.up = nnx.Linear(embedding, 4 * embedding, rngs=rngs)
        self.down = nnx.Linear(4 * embedding, embedding, rngs=rngs)

    def __call__(self, x: Any) -> Any:
        x = x + self.attention(self.norm_1(x))
        return x + self.down(nnx.gelu(self.up(self.norm_2(x))))


class _Vision(nnx.Module):
    def __init__(self, embedding: int, classes: int, rngs: Any) -> None:
        self.patches = nnx.Linear(768, embedding, rngs=rngs)
        self.blocks = nnx.List([_VisionBlock(embedding, rngs) for _ in range(2)])
        self.head = nnx.Linear(embedding, classes, rngs=rngs)

    def __call__(self, images: Any) -> Any:
        x = self.patches(images)
        for block in self.blocks:
            x = block(x)
        return self.head(x.mean(1))


def nnx_vision(batch: int, embedding: int = 512, patches: int = 196) -> AskedProblem:
    """A vision transformer of Flax NNX without any annotation; its names are inferred."""
    module = nnx.eval_shape(lambda: _Vision(embedding, 21_841, nnx.Rngs(0)))
    graph, params, rest = nnx.split(module, nnx.Param, ...)

    def apply(w: Any, images: Any, labels: Any = None) -> Any:
        del labels
        bound = jax.tree.map(lambda each: each, params)
        nnx.replace_by_pure_dict(bound, w)
        return nnx.merge(graph, bound, rest)(images)

    weights, images = nnx.to_pure_dict(params), struct(batch, patches, 768)
    names = infer_names(apply, weights, images, input_names=[("batch", "seq", "pixels")])
    inputs = {"images": images, "labels": struct(batch, dtype=jnp.int32)}
    return plain_problem(name_axes(weights, names), apply, inputs, optimizer=optax.adafactor(1e-3))


def sorted_experts(batch: int, seq: int, count: int = 16, embedding: int = 512) -> AskedProblem:
    """Two experts for each token beside one for all, tokens sorted by expert and scattered back."""
    names = {
        "emb": ("vocabulary", "embedding"),
        "router": ("embedding", "experts"),
        "gate": ("experts", "embedding", "neurons"),
        "up": ("experts", "embedding", "neurons"),
        "down": ("experts", "neurons", "embedding"),
        "shared_up": ("embedding", "neurons"),
        "shared_down": ("neurons", "embedding"),
        "head": ("embedding", "vocabulary"),
    }
    lengths = {
        "vocabulary": 16_384,
        "embedding": embedding,
        "experts": count,
        "neurons": 2 * embedding,
    }
    capacity = 4 * seq // count

    def sent(x: Any, chosen: Any, share: Any, w: Any) -> Any:
        """What the experts make of one sequence, in capacity places of each."""
        order = jnp.argsort(chosen.ravel(), stable=True)
        expert = chosen.ravel()[order]
        place = jnp.arange(len(order)) - jnp.searchsorted(expert, expert)
        token = order // chosen.shape[1]
        inside = (
            jnp.zeros((count, capacity, x.shape[-1])).at[expert, place].set(x[token], mode="drop")
        )
        wide = jax.nn.silu(jnp.einsum("xce,xen->xcn", inside, w["gate"]))
        made = jnp.einsum(
            "xcn,xne->xce", wide * jnp.einsum("xce,xen->xcn", inside, w["up"]), w["down"]
        )
        back = made.at[expert, place].get(mode="fill", fill_value=0) * share.ravel()[order, None]
        return jnp.zeros_like(x).at[token].add(back)

    def apply(w: Any, tokens: Any) -> Any:
        x = w["emb"][tokens]
        share, chosen = jax.lax.top_k(jax.nn.softmax(normed(x) @ w["router"]), 2)
        routed = jax.vmap(functools.partial(sent, w=w))(normed(x), chosen, share)
        shared = jax.nn.silu(normed(x) @ w["shared_up"]) @ w["shared_down"]
        return normed(x + routed + shared) @ w["head"]

    model = name_axes(weights_structs(names, lengths), names)
    return plain_problem(model, apply, {"tokens": tokens_struct(batch, seq)})


class _MixerBlock(eqx.Module):
    over_patches: eqx.nn.MLP
    over_channels: eqx.nn.MLP
    norm: eqx.nn.LayerNorm

    def __init__(self, embedding: int, patches: int, key: Any) -> None:
        self.over_patches = eqx.nn.MLP(patches, patches, 2 * patches, 1, jax.nn.gelu, key=key)
        self.over_channels = eqx.nn.MLP(
            embedding, embedding, 4 * embedding, 1, jax.nn.gelu, key=key
        )
        self.norm = eqx.nn.LayerNorm(embedding)

    def __call__(self, x: Any) -> Any:
        x = x + jax.vmap(self.over_patches, 1, 1)(jax.vmap(self.norm)(x))
        return x + jax.vmap(self.over_channels)(jax.vmap(self.norm)(x))


class _Mixer(eqx.Module):
    patches: eqx.nn.Linear
    blocks: list[_MixerBlock]
    head: eqx.nn.Linear

    def __init__(self, embedding: int, patches: int, key: Any) -> None:
        self.patches = eqx.nn.Linear(768, embedding, key=key)
        self.blocks = [_MixerBlock(embedding, patches, key) for _ in range(2)]
        self.head = eqx.nn.Linear(embedding, 1000, key=key)

    def __call__(self, image: Any) -> Any:
        x = jax.vmap(self.patches)(image)
        for block in self.blocks:
            x = block(x)
        return self.head(x.mean(0))


def equinox_mixer(batch: int, embedding: int = 1024, patches: int = 196) -> AskedProblem:
    """An MLP-Mixer of Equinox' layers without any annotation; its names are inferred."""
    build = functools.partial(_Mixer, embedding, patches)
    module = eqx.filter_eval_shape(build, jax.random.key(0))
    weights, static = eqx.partition(module, lambda leaf: isinstance(leaf, jax.ShapeDtypeStruct))

    def apply(given: Any, images: Any) -> Any:
        return jax.vmap(eqx.combine(given, static))(images)

    images = struct(batch, patches, 768)
    # What one patch makes of all others has no name of its own, which the report says.
    named = {"blocks/*/over_patches/layers/0/weight": ("patch_neurons", "seq")}
    names = infer_names(
        apply,
        weights,
        images,
        input_names=[("batch", "seq", "pixels")],
        overrides=named,
    )
    inputs = {"images": images, "labels": struct(batch, dtype=jnp.int32)}
    return plain_problem(
        name_axes(module, names),
        lambda m, images, labels: jax.vmap(m)(images),
        inputs,
        False,
        optax.sgd(0.1, momentum=0.9),
    )
