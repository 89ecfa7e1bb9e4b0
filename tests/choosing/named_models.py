"""Models whose weights carry no names, each with the names that its author would write.

Lengths are chosen so that unlike axes are often equally long: heads and projection, neurons and
vocabulary, layers and batch. Who takes equal lengths for equal axes is wrong in every one of them.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

BATCH, SEQ = 2, 8
LAYERS = 2
HEADS, PROJECTION, GROUPS = 4, 4, 2
EMBEDDING = HEADS * PROJECTION
NEURONS = VOCABULARY = 32
EXPERTS = 4


@dataclasses.dataclass(frozen=True)
class NamedModel:
    """A function, the structs of its weights and inputs, and what their dimensions are called.

    Attributes:
        function: Takes weights and inputs.
        weights: A tree of structs.
        inputs: Structs.
        input_names: The logical axes of each input.
        names: For the path of each weight its author's names, ``a*b`` for a fused dimension, None
            for what is not named: the taps of a convolution, and what has length 1.
        words: What the library calls an axis that the author calls otherwise, one to one.
        is_transformer: Whether nearly all of its names must be found.
    """

    function: Callable[..., Any]
    weights: Any
    inputs: tuple[Any, ...]
    input_names: tuple[tuple[str, ...], ...]
    names: Mapping[str, tuple[str | None, ...]]
    words: Mapping[str, str] = dataclasses.field(default_factory=dict)
    is_transformer: bool = True


def struct(*shape: int, dtype: Any = jnp.float32) -> jax.ShapeDtypeStruct:
    """A struct of floating-point numbers."""
    return jax.ShapeDtypeStruct(shape, dtype)


TOKENS = struct(BATCH, SEQ, dtype=jnp.int32)
BATCH_SEQ = (("batch", "seq"),)

LENGTHS = {
    "batch": BATCH,
    "seq": SEQ,
    "layers": LAYERS,
    "heads": HEADS,
    "head_groups": GROUPS,
    "query_heads": HEADS // GROUPS,
    "projection": PROJECTION,
    "embedding": EMBEDDING,
    "neurons": NEURONS,
    "vocabulary": VOCABULARY,
    "positions": 2 * SEQ,
    "experts": EXPERTS,
    "qkv": 3,
}


def structs_of(names: Mapping[str, tuple[str, ...]], **lengths: int) -> dict[str, Any]:
    """A struct for each path, its lengths from the names."""
    known = LENGTHS | lengths

    def length(name: str) -> int:
        product = 1
        for factor in name.split("*"):
            product *= known[factor]
        return product

    return {path: struct(*map(length, axes)) for path, axes in names.items()}


def rms_norm(x, scale):
    return x * jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + 1e-6) * scale


def layer_norm(x, scale, bias):
    centred = x - x.mean(-1, keepdims=True)
    return centred * jax.lax.rsqrt(x.var(-1, keepdims=True) + 1e-6) * scale + bias


def causal(scores):
    """Attention weights that do not look ahead; the last two dimensions are positions."""
    length = scores.shape[-1]
    mask = jnp.tril(jnp.ones((length, length), bool))
    return jax.nn.softmax(jnp.where(mask, scores, -1e9), axis=-1)


def rotary_half(x):
    """Rotary positions, halves rotated as in Llama; ``x`` is [..., seq, projection]."""
    length, size = x.shape[-2:]
    angles = jnp.outer(jnp.arange(length), 1e4 ** (-jnp.arange(0, size, 2) / size))
    angles = jnp.concatenate([angles, angles], -1)
    first, second = x[..., : size // 2], x[..., size // 2 :]
    return x * jnp.cos(angles) + jnp.concatenate([-second, first], -1) * jnp.sin(angles)


def rotary_interleaved(x):
    """Rotary positions, neighbours rotated as in GPT-J; ``x`` is [..., seq, projection]."""
    length, size = x.shape[-2:]
    angles = jnp.outer(jnp.arange(length), 1e4 ** (-jnp.arange(0, size, 2) / size))
    even, odd = x[..., ::2], x[..., 1::2]
    cos, sin = jnp.cos(angles), jnp.sin(angles)
    return jnp.stack([even * cos - odd * sin, odd * cos + even * sin], -1).reshape(x.shape)


def rotary_complex(x):
    """Rotary positions by complex numbers, as in Meta's own Llama."""
    length, size = x.shape[-2:]
    angles = jnp.outer(jnp.arange(length), 1e4 ** (-jnp.arange(0, size, 2) / size))
    pairs = x.reshape(*x.shape[:-1], size // 2, 2)
    turned = jax.lax.complex(pairs[..., 0], pairs[..., 1]) * jnp.exp(1j * angles)
    return jnp.stack([turned.real, turned.imag], -1).reshape(x.shape)


# Llama as a state dictionary of torch: [out, in], heads and projection in one dimension.

_EMBED = "model.embed_tokens.weight"


def _torch_llama_names(layers: int) -> dict[str, tuple[str, ...]]:
    queries, keys = "head_groups*query_heads*projection", "head_groups*projection"
    names: dict[str, tuple[str, ...]] = {
        _EMBED: ("vocabulary", "embedding"),
        "model.norm.weight": ("embedding",),
        "lm_head.weight": ("vocabulary", "embedding"),
    }
    for i in range(layers):
        block = f"model.layers.{i}."
        names |= {
            f"{block}input_layernorm.weight": ("embedding",),
            f"{block}self_attn.q_proj.weight": (queries, "embedding"),
            f"{block}self_attn.k_proj.weight": (keys, "embedding"),
            f"{block}self_attn.v_proj.weight": (keys, "embedding"),
            f"{block}self_attn.o_proj.weight": ("embedding", queries),
            f"{block}post_attention_layernorm.weight": ("embedding",),
            f"{block}mlp.gate_proj.weight": ("neurons", "embedding"),
            f"{block}mlp.up_proj.weight": ("neurons", "embedding"),
            f"{block}mlp.down_proj.weight": ("embedding", "neurons"),
        }
    return names


def _torch_llama_block(weights, i, x, rotary=rotary_half):
    def linear(name, y):
        return y @ weights[f"model.layers.{i}.{name}.weight"].T

    def split(y, heads):
        return y.reshape(BATCH, SEQ, heads, PROJECTION).transpose(0, 2, 1, 3)

    h = rms_norm(x, weights[f"model.layers.{i}.input_layernorm.weight"])
    q = rotary(split(linear("self_attn.q_proj", h), HEADS))
    k = rotary(split(linear("self_attn.k_proj", h), GROUPS))
    v = split(linear("self_attn.v_proj", h), GROUPS)
    shape = (BATCH, GROUPS, HEADS // GROUPS, SEQ, PROJECTION)
    k, v = (jnp.broadcast_to(y[:, :, None], shape).reshape(q.shape) for y in (k, v))
    attended = causal(q @ k.swapaxes(-1, -2)) @ v
    x = x + linear("self_attn.o_proj", attended.transpose(0, 2, 1, 3).reshape(x.shape))
    h = rms_norm(x, weights[f"model.layers.{i}.post_attention_layernorm.weight"])
    gated = jax.nn.silu(linear("mlp.gate_proj", h)) * linear("mlp.up_proj", h)
    return x + linear("mlp.down_proj", gated)


def _torch_llama_logits(weights, tokens, rotary=rotary_half):
    x = weights[_EMBED][tokens]
    for i in range(LAYERS):
        x = _torch_llama_block(weights, i, x, rotary)
    return rms_norm(x, weights["model.norm.weight"]) @ weights["lm_head.weight"].T


def torch_llama(rotary: Any = rotary_half) -> NamedModel:
    names = _torch_llama_names(LAYERS)
    function = functools.partial(_torch_llama_logits, rotary=rotary)
    return NamedModel(function, structs_of(names), (TOKENS,), BATCH_SEQ, names)


def torch_llama_gradients() -> NamedModel:
    """The gradient program: the names of the weights from it alone."""

    def loss(weights, tokens):
        logits = jax.nn.log_softmax(_torch_llama_logits(weights, tokens))
        return -jnp.take_along_axis(logits, tokens[..., None], -1).mean()

    return dataclasses.replace(torch_llama(), function=jax.value_and_grad(loss))


def lora() -> NamedModel:
    """Llama with adapters on queries and values; rank is an axis of its own."""
    names = _torch_llama_names(LAYERS)
    adapted = ("self_attn.q_proj", "self_attn.v_proj")
    base = structs_of(names)
    for i in range(LAYERS):
        for name in adapted:
            path = f"model.layers.{i}.{name}"
            out, into = names[f"{path}.weight"]
            names |= {
                f"{path}.lora_A.weight": ("rank", into),
                f"{path}.lora_B.weight": (out, "rank"),
            }

    def function(weights, tokens):
        merged = {path: weights[path] for path in base}
        for path in base:
            stem = path.removesuffix(".weight")
            if f"{stem}.lora_A.weight" in weights:
                merged[path] += 2.0 * (
                    weights[f"{stem}.lora_B.weight"] @ weights[f"{stem}.lora_A.weight"]
                )
        return _torch_llama_logits(merged, tokens)

    return NamedModel(function, structs_of(names, rank=PROJECTION), (TOKENS,), BATCH_SEQ, names)


def gpt2(split: Any = None) -> NamedModel:
    """Queries, keys and values from one weight; learned positions; the vocabulary is tied."""
    fused = "qkv*heads*projection"
    names: dict[str, tuple[str, ...]] = {
        "wte": ("vocabulary", "embedding"),
        "wpe": ("positions", "embedding"),
        "ln_f.g": ("embedding",),
        "ln_f.b": ("embedding",),
    }
    for i in range(LAYERS):
        block = f"h.{i}."
        names |= {
            f"{block}ln_1.g": ("embedding",),
            f"{block}ln_1.b": ("embedding",),
            f"{block}attn.c_attn.w": ("embedding", fused),
            f"{block}attn.c_attn.b": (fused,),
            f"{block}attn.c_proj.w": ("heads*projection", "embedding"),
            f"{block}attn.c_proj.b": ("embedding",),
            f"{block}ln_2.g": ("embedding",),
            f"{block}ln_2.b": ("embedding",),
            f"{block}mlp.c_fc.w": ("embedding", "neurons"),
            f"{block}mlp.c_fc.b": ("neurons",),
            f"{block}mlp.c_proj.w": ("neurons", "embedding"),
            f"{block}mlp.c_proj.b": ("embedding",),
        }

    def function(weights, tokens):
        x = weights["wte"][tokens] + weights["wpe"][jnp.arange(SEQ)]
        for i in range(LAYERS):
            w = {name: weights[f"h.{i}.{name}"] for name in _GPT2_BLOCK}
            h = layer_norm(x, w["ln_1.g"], w["ln_1.b"]) @ w["attn.c_attn.w"] + w["attn.c_attn.b"]
            parts = jnp.split(h, 3, -1)
            q, k, v = (
                y.reshape(BATCH, SEQ, HEADS, PROJECTION).transpose(0, 2, 1, 3) for y in parts
            )
            attended = causal(q @ k.swapaxes(-1, -2) / 2) @ v
            attended = attended.transpose(0, 2, 1, 3).reshape(x.shape)
            x = x + attended @ w["attn.c_proj.w"] + w["attn.c_proj.b"]
            h = layer_norm(x, w["ln_2.g"], w["ln_2.b"]) @ w["mlp.c_fc.w"] + w["mlp.c_fc.b"]
            x = x + jax.nn.gelu(h) @ w["mlp.c_proj.w"] + w["mlp.c_proj.b"]
        return layer_norm(x, weights["ln_f.g"], weights["ln_f.b"]) @ weights["wte"].T

    return NamedModel(function, structs_of(names), (TOKENS,), BATCH_SEQ, names)


_GPT2_BLOCK = (
    *(f"{norm}.{part}" for norm in ("ln_1", "ln_2") for part in "gb"),
    *(f"{layer}.{part}" for layer in ("attn.c_attn", "attn.c_proj") for part in "wb"),
    *(f"{layer}.{part}" for layer in ("mlp.c_fc", "mlp.c_proj") for part in "wb"),
)


def scanned(gradients: bool = False) -> NamedModel:
    """Blocks stacked along their first dimension, scanned and rematerialised."""
    projection = ("layers", "embedding", "heads", "projection")
    names: dict[str, tuple[str, ...]] = {
        "emb": ("vocabulary", "embedding"),
        "scale": ("layers", "embedding"),
        "q": projection,
        "k": projection,
        "v": projection,
        "o": ("layers", "heads", "projection", "embedding"),
        "up": ("layers", "embedding", "neurons"),
        "down": ("layers", "neurons", "embedding"),
        "head": ("embedding", "vocabulary"),
    }

    def block(x, w):
        h = rms_norm(x, w["scale"])
        q, k, v = (jnp.einsum("bse,ehd->bshd", h, w[name]) for name in "qkv")
        attended = causal(jnp.einsum("bshd,bthd->bhst", q, k))
        x = x + jnp.einsum("bhst,bthd,hde->bse", attended, v, w["o"])
        return x + jax.nn.gelu(x @ w["up"]) @ w["down"], None

    def function(weights, tokens):
        stacked = {name: w for name, w in weights.items() if name not in ("emb", "head")}
        x, _ = jax.lax.scan(jax.checkpoint(block), weights["emb"][tokens], stacked)
        return x @ weights["head"]

    def loss(weights, tokens):
        return jax.nn.logsumexp(function(weights, tokens), axis=-1).mean()

    called = jax.grad(loss) if gradients else function
    return NamedModel(called, structs_of(names), (TOKENS,), BATCH_SEQ, names)


def experts() -> NamedModel:
    """Two of four experts for each token, every expert computing every token."""
    names = {
        "emb": ("vocabulary", "embedding"),
        "router": ("embedding", "experts"),
        "up": ("experts", "embedding", "neurons"),
        "down": ("experts", "neurons", "embedding"),
        "head": ("embedding", "vocabulary"),
    }

    def function(weights, tokens):
        x = weights["emb"][tokens]
        gates, chosen = jax.lax.top_k(jax.nn.softmax(x @ weights["router"]), 2)
        share = (jax.nn.one_hot(chosen, EXPERTS) * gates[..., None]).sum(-2)
        hidden = jax.nn.silu(jnp.einsum("bse,xen->bsxn", x, weights["up"]))
        x = x + jnp.einsum("bsxn,xne,bsx->bse", hidden, weights["down"], share)
        return x @ weights["head"]

    return NamedModel(function, structs_of(names), (TOKENS,), BATCH_SEQ, names)


def relative_bias(layers: int = LAYERS) -> NamedModel:
    """T5's bias by relative position: a table of buckets by heads, shared by the layers."""
    names: dict[str, tuple[str, ...]] = {
        "shared": ("vocabulary", "embedding"),
        "relative_attention_bias": ("buckets", "heads"),
        "final_norm": ("embedding",),
    }
    inner = "heads*projection"
    for i in range(layers):
        names |= {
            f"block.{i}.norm": ("embedding",),
            f"block.{i}.q": ("embedding", inner),
            f"block.{i}.k": ("embedding", inner),
            f"block.{i}.v": ("embedding", inner),
            f"block.{i}.o": (inner, "embedding"),
            f"block.{i}.wi": ("embedding", "neurons"),
            f"block.{i}.wo": ("neurons", "embedding"),
        }

    def function(weights, tokens):
        x = weights["shared"][tokens]
        distance = jnp.arange(SEQ)[:, None] - jnp.arange(SEQ)[None]
        buckets = jnp.clip(distance, 0, 2 * SEQ - 1)
        bias = weights["relative_attention_bias"][buckets].transpose(2, 0, 1)
        for i in range(layers):
            w = {name: weights[f"block.{i}.{name}"] for name in ("norm", *"qkvo", "wi", "wo")}
            h = rms_norm(x, w["norm"])
            q, k, v = ((h @ w[n]).reshape(BATCH, SEQ, HEADS, PROJECTION) for n in "qkv")
            attended = jax.nn.softmax(jnp.einsum("bqhd,bkhd->bhqk", q, k) + bias, -1)
            attended = jnp.einsum("bhqk,bkhd->bqhd", attended, v)
            x = x + attended.reshape(BATCH, SEQ, HEADS * PROJECTION) @ w["o"]
            x = x + jax.nn.relu(x @ w["wi"]) @ w["wo"]
        return rms_norm(x, weights["final_norm"]) @ weights["shared"].T

    return NamedModel(function, structs_of(names, buckets=2 * SEQ), (TOKENS,), BATCH_SEQ, names)


def encoder_decoder() -> NamedModel:
    """Cross attention: queries of one sequence, keys and values of another of the same length."""
    names: dict[str, tuple[str, ...]] = {"embed": ("vocabulary", "embedding")}
    into, out = ("embedding", "heads", "projection"), ("heads", "projection", "embedding")
    for part, kinds in (("encoder", ("self",)), ("decoder", ("self", "cross"))):
        for i in range(LAYERS):
            for kind in kinds:
                names |= {f"{part}.{i}.{kind}.{name}": into for name in "qkv"}
                names[f"{part}.{i}.{kind}.o"] = out
            names[f"{part}.{i}.up"] = ("embedding", "neurons")
            names[f"{part}.{i}.down"] = ("neurons", "embedding")
    names["head"] = ("embedding", "vocabulary")

    def attend(w, x, context, is_causal):
        q = jnp.einsum("bse,ehd->bshd", x, w("q"))
        k, v = (jnp.einsum("bse,ehd->bshd", context, w(name)) for name in "kv")
        scores = jnp.einsum("bshd,bthd->bhst", q, k)
        shares = causal(scores) if is_causal else jax.nn.softmax(scores, -1)
        return jnp.einsum("bhst,bthd,hde->bse", shares, v, w("o"))

    def block(weights, path, x, context):
        def w(kind):
            return lambda name: weights[f"{path}.{kind}.{name}"]

        x = x + attend(w("self"), x, x, context is not None)
        if context is not None:
            x = x + attend(w("cross"), x, context, False)
        return x + jax.nn.relu(x @ weights[f"{path}.up"]) @ weights[f"{path}.down"]

    def function(weights, sources, targets):
        encoded, x = weights["embed"][sources], weights["embed"][targets]
        for i in range(LAYERS):
            encoded = block(weights, f"encoder.{i}", encoded, None)
        for i in range(LAYERS):
            x = block(weights, f"decoder.{i}", x, encoded)
        return x @ weights["head"]

    inputs = (("batch", "seq"), ("batch", "target_seq"))
    return NamedModel(function, structs_of(names), (TOKENS, TOKENS), inputs, names)
