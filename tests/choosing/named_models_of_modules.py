"""Modules of Equinox, NNX and linen that are mapped over: layers, experts and adapters."""

import equinox as eqx
import jax
import jax.numpy as jnp
from flax import linen, nnx

from tests.choosing.named_models import (
    BATCH_SEQ,
    EMBEDDING,
    EXPERTS,
    GROUPS,
    HEADS,
    NEURONS,
    PROJECTION,
    SEQ,
    TOKENS,
    VOCABULARY,
    NamedModel,
    struct,
)
from tests.choosing.transformer_parts import INNER

_LAYERS = 3


class _RotaryBlock(eqx.Module):
    norm_1: eqx.nn.RMSNorm
    norm_2: eqx.nn.RMSNorm
    attention: eqx.nn.MultiheadAttention
    rotary: eqx.nn.RotaryPositionalEmbedding
    gate: eqx.nn.Linear
    up: eqx.nn.Linear
    down: eqx.nn.Linear
    dropout: eqx.nn.Dropout

    def __init__(self, key):
        keys = jax.random.split(key, 4)
        self.norm_1, self.norm_2 = eqx.nn.RMSNorm(EMBEDDING), eqx.nn.RMSNorm(EMBEDDING)
        self.attention = eqx.nn.MultiheadAttention(HEADS, EMBEDDING, key=keys[0])
        self.rotary = eqx.nn.RotaryPositionalEmbedding(PROJECTION)
        self.gate = eqx.nn.Linear(EMBEDDING, NEURONS, use_bias=False, key=keys[1])
        self.up = eqx.nn.Linear(EMBEDDING, NEURONS, use_bias=False, key=keys[2])
        self.down = eqx.nn.Linear(NEURONS, EMBEDDING, use_bias=False, key=keys[3])
        self.dropout = eqx.nn.Dropout(0.1)

    def __call__(self, x, key):
        def turned(q, k, v):
            rotary = jax.vmap(self.rotary, in_axes=1, out_axes=1)
            return rotary(q), rotary(k), v

        h = jax.vmap(self.norm_1)(x)
        mask = jnp.tril(jnp.ones((SEQ, SEQ), bool))
        made = self.attention(h, h, h, mask, process_heads=turned)
        x = x + self.dropout(made, key=key)

        def fed(token):
            token = self.norm_2(token)
            return self.down(jax.nn.silu(self.gate(token)) * self.up(token))

        return x + jax.vmap(fed)(x)


class _RotaryDecoder(eqx.Module):
    embed: eqx.nn.Embedding
    blocks: _RotaryBlock
    norm: eqx.nn.RMSNorm

    def __init__(self, key):
        self.embed = eqx.nn.Embedding(VOCABULARY, EMBEDDING, key=key)
        self.blocks = eqx.filter_vmap(_RotaryBlock)(jax.random.split(key, _LAYERS))
        self.norm = eqx.nn.RMSNorm(EMBEDDING)

    def __call__(self, tokens, key):
        arrays, static = eqx.partition(self.blocks, eqx.is_array)

        @eqx.filter_checkpoint
        def step(carry, arrays):
            x, key = carry
            key, own = jax.random.split(key)
            return (eqx.combine(arrays, static)(x, own), key), None

        x = jax.vmap(self.embed)(tokens)
        (x, _), _ = jax.lax.scan(step, (x, key), arrays)
        return jax.vmap(lambda token: self.embed.weight @ self.norm(token))(x)


def equinox_rotary() -> NamedModel:
    """Layers made by ``filter_vmap``, scanned and checkpointed; heads are rotated; dropout."""
    module = eqx.filter_eval_shape(_RotaryDecoder, jax.random.key(0))
    weights, static = eqx.partition(module, lambda leaf: isinstance(leaf, jax.ShapeDtypeStruct))

    def function(weights, tokens):
        model = eqx.combine(weights, static)
        keys = jax.random.split(jax.random.key(0), len(tokens))
        logits = jax.vmap(model)(tokens, keys)
        chosen = jnp.take_along_axis(jax.nn.log_softmax(logits), tokens[..., None], -1)
        return -chosen.mean()

    block = {"norm_1/weight": ("embedding",), "norm_2/weight": ("embedding",)}
    block |= {f"norm_{n}/bias": ("embedding",) for n in (1, 2)}
    block |= {
        f"attention/{name}_proj/weight": (INNER, "embedding") for name in ("query", "key", "value")
    }
    block |= {"attention/output_proj/weight": ("embedding", INNER)}
    block |= dict.fromkeys(("gate/weight", "up/weight"), ("neurons", "embedding"))
    block |= {"down/weight": ("embedding", "neurons")}
    names = {f"blocks/{path}": ("layers", *axes) for path, axes in block.items()}
    names |= {"embed/weight": ("vocabulary", "embedding")}
    names |= {"norm/weight": ("embedding",), "norm/bias": ("embedding",)}
    called = eqx.filter_grad(function)
    return NamedModel(called, weights, (TOKENS,), BATCH_SEQ, names)


class _Adapted(nnx.Module):
    def __init__(self, rngs):
        def general(into, made, axis=-1):
            return nnx.LinearGeneral(into, made, axis=axis, use_bias=False, rngs=rngs)

        self.norm = nnx.RMSNorm(EMBEDDING, rngs=rngs)
        self.query = general(EMBEDDING, (GROUPS, HEADS // GROUPS, PROJECTION))
        self.key_value = general(EMBEDDING, (2, GROUPS, PROJECTION))
        self.out = general((GROUPS, HEADS // GROUPS, PROJECTION), EMBEDDING, (-3, -2, -1))
        self.fc = nnx.Linear(EMBEDDING, NEURONS, rngs=rngs)
        self.proj = nnx.Linear(NEURONS, EMBEDDING, rngs=rngs)
        self.adapter = nnx.LoRA(EMBEDDING, 2, NEURONS, rngs=rngs)

    def __call__(self, x):
        h = self.norm(x)
        q = self.query(h)
        k, v = jnp.unstack(self.key_value(h), axis=2)
        scores = jnp.einsum("bsgqd,btgd->bgqst", q, k) * PROJECTION**-0.5
        scores = jnp.where(jnp.tril(jnp.ones((SEQ, SEQ), bool)), scores, -1e9)
        made = jnp.einsum("bgqst,btgd->bsgqd", jax.nn.softmax(scores), v)
        x = x + self.out(made)
        return x + self.proj(nnx.gelu(self.fc(x) + self.adapter(x)))


class _AdaptedDecoder(nnx.Module):
    def __init__(self, rngs):
        @nnx.split_rngs(splits=_LAYERS)
        @nnx.vmap(in_axes=(0,), out_axes=0)
        def blocks(rngs):
            return _Adapted(rngs)

        self.embed = nnx.Embed(VOCABULARY, EMBEDDING, rngs=rngs)
        self.blocks = blocks(rngs)
        self.norm = nnx.RMSNorm(EMBEDDING, rngs=rngs)

    def __call__(self, tokens):
        @nnx.scan(in_axes=(0, nnx.Carry), out_axes=nnx.Carry)
        @nnx.remat
        def forward(block, x):
            return block(x)

        x = forward(self.blocks, self.embed(tokens))
        return self.embed.attend(self.norm(x))


def nnx_adapted() -> NamedModel:
    """General linear layers of groups and heads, keys beside values; NNX's LoRA beside the MLP."""
    module = nnx.eval_shape(lambda: _AdaptedDecoder(nnx.Rngs(0)))
    graph, params, rest = nnx.split(module, nnx.Any(nnx.Param, nnx.LoRAParam), ...)

    def function(weights, tokens):
        bound = jax.tree.map(lambda each: each, params)
        nnx.replace_by_pure_dict(bound, weights)
        return nnx.merge(graph, bound, rest)(tokens)

    groups = ("head_groups", "query_heads", "projection")
    block = {
        "norm/scale": ("embedding",),
        "query/kernel": ("embedding", *groups),
        "key_value/kernel": ("embedding", "kv", "head_groups", "projection"),
        "out/kernel": (*groups, "embedding"),
        "fc/kernel": ("embedding", "neurons"),
        "fc/bias": ("neurons",),
        "proj/kernel": ("neurons", "embedding"),
        "proj/bias": ("embedding",),
        "adapter/lora_a": ("embedding", "rank"),
        "adapter/lora_b": ("rank", "neurons"),
    }
    names = {f"blocks/{path}": ("layers", *axes) for path, axes in block.items()}
    names |= {"embed/embedding": ("vocabulary", "embedding"), "norm/scale": ("embedding",)}
    weights = nnx.to_pure_dict(params)
    return NamedModel(function, weights, (TOKENS,), BATCH_SEQ, names)


class _Mlp(linen.Module):
    @linen.compact
    def __call__(self, x):
        hidden = linen.gelu(linen.Dense(NEURONS)(x))
        return linen.Dense(EMBEDDING)(hidden)


class _MappedExperts(linen.Module):
    @linen.compact
    def __call__(self, x):
        tokens = x.reshape(-1, EMBEDDING)
        gates = linen.softmax(linen.Dense(EXPERTS, use_bias=False, name="router")(tokens))
        gate, chosen = jax.lax.top_k(gates, 1)
        sent = jax.nn.one_hot(chosen[:, 0], EXPERTS)
        place = (jnp.cumsum(sent, 0) - 1.0) * sent
        slots = jax.nn.one_hot(place.sum(-1).astype(jnp.int32), 8)[:, None] * sent[..., None]
        experts = linen.vmap(
            _Mlp, in_axes=0, out_axes=0, variable_axes={"params": 0}, split_rngs={"params": True}
        )
        made = experts(name="experts")(jnp.einsum("tec,td->ecd", slots, tokens))
        return (jnp.einsum("tec,ecd->td", slots, made) * gate).reshape(x.shape)


class _MoeBlock(linen.Module):
    has_experts: bool

    @linen.compact
    def __call__(self, x):
        h = linen.LayerNorm()(x)
        x = x + linen.MultiHeadDotProductAttention(HEADS, name="attention")(h)
        fed = _MappedExperts(name="moe") if self.has_experts else _Mlp(name="mlp")
        return x + fed(linen.LayerNorm()(x))


class _VisionMoe(linen.Module):
    layers: int

    @linen.compact
    def __call__(self, pictures):
        x = linen.Conv(EMBEDDING, (4, 4), (4, 4), "VALID", name="embedding")(pictures)
        x = x.reshape(len(x), -1, EMBEDDING)
        places = linen.initializers.normal(0.02)
        x = x + self.param("posembed_input", places, (1, x.shape[1], EMBEDDING))
        for i in range(self.layers):
            x = _MoeBlock(i % 2 == 1, name=f"encoderblock_{i}")(x)
        x = linen.LayerNorm(name="encoder_norm")(x).mean(1)
        return linen.Dense(10, name="head")(x)


def linen_vision_experts(layers: int = 4) -> NamedModel:
    """V-MoE: experts are an MLP that linen maps over, in every other block; tokens have places."""
    module = _VisionMoe(layers)
    pictures = struct(2, 16, 16, 3)
    weights = jax.eval_shape(module.init, jax.random.key(0), pictures)

    def dense(path, into, made, *before):
        return {f"{path}/kernel": (*before, *into, *made), f"{path}/bias": (*before, *made)}

    def scale(path):
        return {f"{path}/scale": ("embedding",), f"{path}/bias": ("embedding",)}

    one, inner = ("embedding",), ("heads", "projection")
    names = {
        "embedding/kernel": (None, None, "colours", "embedding"),
        "embedding/bias": one,
        "posembed_input": (None, "positions", "embedding"),
        **scale("encoder_norm"),
        **dense("head", one, ("classes",)),
    }
    for i in range(layers):
        path = f"encoderblock_{i}"
        names |= scale(f"{path}/LayerNorm_0") | scale(f"{path}/LayerNorm_1")
        for name in ("query", "key", "value"):
            names |= dense(f"{path}/attention/{name}", one, inner)
        names |= dense(f"{path}/attention/out", inner, one)
        before, fed = (("experts",), "moe/experts") if i % 2 else ((), "mlp")
        names |= dense(f"{path}/{fed}/Dense_0", one, ("neurons",), *before)
        names |= dense(f"{path}/{fed}/Dense_1", ("neurons",), one, *before)
        if i % 2:
            names[f"{path}/moe/router/kernel"] = ("embedding", "experts")
    names = {f"params/{path}": axes for path, axes in names.items()}
    axes = (("batch", "height", "width", "colours"),)
    words = {"classes": "outputs"}
    return NamedModel(module.apply, weights, (pictures,), axes, names, words)


MODULES = {
    "Equinox, layers made by vmap, its gradient program": equinox_rotary,
    "Flax NNX, general layers with LoRA": nnx_adapted,
    "V-MoE, experts that linen maps over": linen_vision_experts,
}
