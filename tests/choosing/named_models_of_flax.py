"""Models of Flax with the names that their authors give."""

from typing import Any

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
    SEQ,
    TOKENS,
    VOCABULARY,
    NamedModel,
    struct,
)

# Flax: the words of its own examples are "embed", "mlp", "heads", "kv", "vocab".

FLAX_WORDS = {
    "embed": "embedding",
    "mlp": "neurons",
    "heads": "heads",
    "kv": "projection",
    "vocab": "vocabulary",
    "layers": "layers",
    "positions": "positions",
}


def _flax_attention(path: str, has_bias: bool = True) -> dict[str, tuple[str, ...]]:
    names: dict[str, tuple[str, ...]] = {f"{path}/out/kernel": ("heads", "kv", "embed")}
    for part in ("query", "key", "value"):
        names[f"{path}/{part}/kernel"] = ("embed", "heads", "kv")
        if has_bias:
            names[f"{path}/{part}/bias"] = ("heads", "kv")
    if has_bias:
        names[f"{path}/out/bias"] = ("embed",)
    return names


def _flax_norm(path: str) -> dict[str, tuple[str, ...]]:
    return {f"{path}/scale": ("embed",), f"{path}/bias": ("embed",)}


def _flax_mlp(up: str, down: str) -> dict[str, tuple[str, ...]]:
    return {
        f"{up}/kernel": ("embed", "mlp"),
        f"{up}/bias": ("mlp",),
        f"{down}/kernel": ("mlp", "embed"),
        f"{down}/bias": ("embed",),
    }


class _NnxBlock(nnx.Module):
    def __init__(self, rngs):
        self.norm = nnx.LayerNorm(EMBEDDING, rngs=rngs)
        self.attention = nnx.MultiHeadAttention(HEADS, EMBEDDING, decode=False, rngs=rngs)
        self.up = nnx.Linear(EMBEDDING, NEURONS, rngs=rngs)
        self.down = nnx.Linear(NEURONS, EMBEDDING, rngs=rngs)

    def __call__(self, x):
        x = x + self.attention(self.norm(x), mask=nnx.make_causal_mask(x[..., 0]))
        return x + self.down(nnx.gelu(self.up(x)))


class _NnxTransformer(nnx.Module):
    def __init__(self, rngs):
        self.embed = nnx.Embed(VOCABULARY, EMBEDDING, rngs=rngs)
        self.blocks = nnx.List([_NnxBlock(rngs) for _ in range(LAYERS)])
        self.head = nnx.Linear(EMBEDDING, VOCABULARY, use_bias=False, rngs=rngs)

    def __call__(self, tokens):
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def nnx_transformer() -> NamedModel:
    module = nnx.eval_shape(lambda: _NnxTransformer(nnx.Rngs(0)))
    graph, params, rest = nnx.split(module, nnx.Param, ...)

    def function(weights, tokens):
        bound = jax.tree.map(lambda each: each, params)
        nnx.replace_by_pure_dict(bound, weights)
        return nnx.merge(graph, bound, rest)(tokens)

    names: dict[str, tuple[str, ...]] = {
        "embed/embedding": ("vocab", "embed"),
        "head/kernel": ("embed", "vocab"),
    }
    for i in range(LAYERS):
        block = f"blocks/{i}"
        names |= _flax_attention(f"{block}/attention") | _flax_norm(f"{block}/norm")
        names |= _flax_mlp(f"{block}/up", f"{block}/down")
    weights = nnx.to_pure_dict(params)
    return NamedModel(function, weights, (TOKENS,), BATCH_SEQ, names, FLAX_WORDS)


def _of_linen(module: Any, *inputs: Any) -> Any:
    return jax.eval_shape(module.init, jax.random.key(0), *inputs)


class _LinenBlock(linen.Module):
    has_bias: bool = True

    @linen.compact
    def __call__(self, x, mask=None):
        h = linen.LayerNorm(name="norm")(x)
        attention = linen.MultiHeadDotProductAttention(
            HEADS, name="attention", use_bias=self.has_bias
        )
        x = x + attention(h, h, mask=mask)
        h = linen.gelu(linen.Dense(NEURONS, name="up")(x))
        return x + linen.Dense(EMBEDDING, name="down")(h)


class _LinenTransformer(linen.Module):
    @linen.compact
    def __call__(self, tokens):
        x = linen.Embed(VOCABULARY, EMBEDDING, name="embed")(tokens)
        for i in range(LAYERS):
            x = _LinenBlock(name=f"block_{i}")(x, linen.make_causal_mask(tokens))
        return linen.Dense(VOCABULARY, use_bias=False, name="head")(x)


def _linen_block_names(path: str, has_bias: bool = True) -> dict[str, tuple[str, ...]]:
    return (
        _flax_attention(f"{path}/attention", has_bias)
        | _flax_norm(f"{path}/norm")
        | _flax_mlp(f"{path}/up", f"{path}/down")
    )


def linen_transformer() -> NamedModel:
    module = _LinenTransformer()
    names: dict[str, tuple[str, ...]] = {
        "params/embed/embedding": ("vocab", "embed"),
        "params/head/kernel": ("embed", "vocab"),
    }
    for i in range(LAYERS):
        names |= _linen_block_names(f"params/block_{i}")
    weights = _of_linen(module, TOKENS)
    return NamedModel(module.apply, weights, (TOKENS,), BATCH_SEQ, names, FLAX_WORDS)


class _LinenScanned(linen.Module):
    @linen.compact
    def __call__(self, tokens):
        x = linen.Embed(VOCABULARY, EMBEDDING, name="embed")(tokens)
        block = linen.scan(
            linen.remat(_ScanStep),
            variable_axes={"params": 0},
            split_rngs={"params": True},
            length=LAYERS,
        )
        x, _ = block(name="blocks")(x, None)
        return linen.Dense(VOCABULARY, use_bias=False, name="head")(x)


class _ScanStep(linen.Module):
    @linen.compact
    def __call__(self, x, _):
        return _LinenBlock(has_bias=False, name="block")(x), None


def linen_scanned() -> NamedModel:
    """Flax's scanned and rematerialised blocks, as MaxText and T5X write them."""
    module = _LinenScanned()
    blocks = _linen_block_names("params/blocks/block", has_bias=False)
    names: dict[str, tuple[str, ...]] = {
        "params/embed/embedding": ("vocab", "embed"),
        "params/head/kernel": ("embed", "vocab"),
        **{path: ("layers", *axes) for path, axes in blocks.items()},
    }
    weights = _of_linen(module, TOKENS)
    return NamedModel(module.apply, weights, (TOKENS,), BATCH_SEQ, names, FLAX_WORDS)


class _Vit(linen.Module):
    layers: int

    @linen.compact
    def __call__(self, images):
        patches = linen.Conv(EMBEDDING, (4, 4), (4, 4), name="patches")(images)
        x = patches.reshape(BATCH, -1, EMBEDDING)
        token = self.param("class_token", linen.initializers.zeros, (1, 1, EMBEDDING))
        x = jnp.concatenate([jnp.tile(token, (BATCH, 1, 1)), x], 1)
        shape = (1, x.shape[1], EMBEDDING)
        x = x + self.param("positions", linen.initializers.zeros, shape)
        for i in range(self.layers):
            x = _LinenBlock(name=f"block_{i}")(x)
        return linen.Dense(EMBEDDING, name="head")(linen.LayerNorm(name="norm")(x)[:, 0])


def vit(layers: int = LAYERS) -> NamedModel:
    """Patches of 4 x 4 pixels, a class token, learned positions; as many classes as features."""
    module = _Vit(layers)
    names: dict[str, tuple[str | None, ...]] = {
        "params/patches/kernel": (None, None, "colours", "embed"),
        "params/patches/bias": ("embed",),
        "params/class_token": (None, None, "embed"),
        "params/positions": (None, "positions", "embed"),
        "params/head/kernel": ("embed", "classes"),
        "params/head/bias": ("classes",),
        **_flax_norm("params/norm"),
    }
    for i in range(layers):
        names |= _linen_block_names(f"params/block_{i}")
    images, axes = struct(BATCH, 16, 16, 3), (("batch", "height", "width", "colours"),)
    weights = _of_linen(module, images)
    words = FLAX_WORDS | {"classes": "outputs"}
    return NamedModel(module.apply, weights, (images,), axes, names, words)


class _Bert(linen.Module):
    layers: int

    @linen.compact
    def __call__(self, tokens, segments):
        x = linen.Embed(VOCABULARY, EMBEDDING, name="words")(tokens)
        x = x + linen.Embed(SEQ, EMBEDDING, name="positions")(jnp.arange(SEQ))
        x = x + linen.Embed(2, EMBEDDING, name="segments")(segments)
        for i in range(self.layers):
            x = _LinenBlock(name=f"block_{i}")(x)
        pooled = linen.tanh(linen.Dense(EMBEDDING, name="pooler")(x[:, 0]))
        return linen.Dense(2, name="classifier")(pooled)


def bert(layers: int = LAYERS) -> NamedModel:
    """Three tables; the pooler is square, and its outputs are an axis of its own."""
    module = _Bert(layers)
    names: dict[str, tuple[str | None, ...]] = {
        "params/words/embedding": ("vocab", "embed"),
        "params/positions/embedding": ("positions", "embed"),
        "params/segments/embedding": ("segments", "embed"),
        "params/pooler/kernel": ("embed", "pooled"),
        "params/pooler/bias": ("pooled",),
        "params/classifier/kernel": ("pooled", "classes"),
        "params/classifier/bias": ("classes",),
    }
    for i in range(layers):
        names |= _linen_block_names(f"params/block_{i}")
    inputs, axes = (TOKENS, TOKENS), (("batch", "seq"), ("batch", "seq"))
    weights = _of_linen(module, *inputs)
    words = FLAX_WORDS | {"segments": "token_types", "classes": "outputs"}
    return NamedModel(module.apply, weights, inputs, axes, names, words)


class _LinenLstm(linen.Module):
    @linen.compact
    def __call__(self, x):
        x = linen.RNN(linen.OptimizedLSTMCell(EMBEDDING), name="rnn")(x)
        return linen.Dense(EMBEDDING, name="head")(x[:, -1])


def linen_lstm() -> NamedModel:
    """Eight square matrices; those of the hidden state have it as what comes in and goes out."""
    module = _LinenLstm()
    names: dict[str, tuple[str, ...]] = {
        "params/head/kernel": ("hidden", "classes"),
        "params/head/bias": ("classes",),
    }
    for gate in "ifgo":
        cell = "params/OptimizedLSTMCell_0"
        names |= {
            f"{cell}/i{gate}/kernel": ("features", "hidden"),
            f"{cell}/h{gate}/kernel": ("hidden", "hidden"),
            f"{cell}/h{gate}/bias": ("hidden",),
        }
    inputs, axes = (struct(BATCH, SEQ, EMBEDDING),), (("batch", "seq", "features"),)
    weights = _of_linen(module, *inputs)
    return NamedModel(module.apply, weights, inputs, axes, names, {}, False)
