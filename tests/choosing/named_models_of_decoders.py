"""Decoders that differ in how they attend, rotate, normalise and fuse."""

import functools

import jax
import jax.numpy as jnp

from tests.choosing.named_models import (
    BATCH,
    BATCH_SEQ,
    EMBEDDING,
    GROUPS,
    HEADS,
    LAYERS,
    NEURONS,
    PROJECTION,
    SEQ,
    TOKENS,
    NamedModel,
    causal,
    rms_norm,
    rotary_half,
    rotary_interleaved,
    struct,
    structs_of,
)
from tests.choosing.transformer_parts import (
    INNER,
    KEYS,
    QUERIES,
    attend,
    attention_names,
    gated,
    gated_names,
    grouped_attention,
    grouped_names,
    linear,
    linear_names,
    merge_heads,
    mlp,
    mlp_names,
    norm,
    norm_names,
    split_heads,
)


def parallel_blocks(rotary=rotary_interleaved) -> NamedModel:
    """GPT-J and Phi-2: attention beside the MLP, a part of each head rotated, biases, a bias of the
    logits."""
    names = {"embed": ("vocabulary", "embedding")} | norm_names("norm")
    names |= linear_names("lm_head", "vocabulary", "embedding")
    for i in range(LAYERS):
        names |= norm_names(f"{i}.norm") | mlp_names(f"{i}.mlp", has_bias=True)
        names |= attention_names(f"{i}.attention", has_bias=True)

    def turned(x):
        return jnp.concatenate([rotary(x[..., :2]), x[..., 2:]], -1)

    def function(w, tokens):
        x = w["embed"][tokens]
        for i in range(LAYERS):
            h = norm(w, f"{i}.norm", x)
            q, k, v = (split_heads(linear(w, f"{i}.attention.{n}", h)) for n in "qkv")
            attended = linear(w, f"{i}.attention.o", attend(turned(q), turned(k), v, True))
            x = x + attended + mlp(w, f"{i}.mlp", h)
        return linear(w, "lm_head", norm(w, "norm", x))

    return NamedModel(function, structs_of(names), (TOKENS,), BATCH_SEQ, names)


def normed_queries(of_all_heads: bool) -> NamedModel:
    """OLMo 2 norms the queries of all heads together; Gemma 3 those of each head.

    Gemma 3 attends within a window in every other layer; Grok-1 caps the scores; Qwen 2 has biases
    of queries, keys and values. Here the first has these too.
    """
    scales = (QUERIES, KEYS) if of_all_heads else ("projection", "projection")
    names = {"embed": ("vocabulary", "embedding"), "norm": ("embedding",)}
    for i in range(LAYERS):
        names |= grouped_names(f"{i}.attention", of_all_heads) | gated_names(f"{i}.mlp")
        names |= {f"{i}.q_norm": (scales[0],), f"{i}.k_norm": (scales[1],)}
        names |= {f"{i}.{norm}": ("embedding",) for norm in ("before", "behind", "last")}

    def normed(w, path, x, heads):
        if of_all_heads:
            return rms_norm(x, w[path])
        return rms_norm(x.reshape(BATCH, SEQ, heads, PROJECTION), w[path]).reshape(x.shape)

    def function(w, tokens):
        x = w["embed"][tokens] * EMBEDDING**0.5
        for i in range(LAYERS):

            def change(q, k, i=i):
                q = normed(w, f"{i}.q_norm", q, HEADS)
                return q, normed(w, f"{i}.k_norm", k, GROUPS)

            h = rms_norm(x, w[f"{i}.before"])
            window, cap = (SEQ, 0.0) if i else (3, 30.0)
            attended = grouped_attention(w, f"{i}.attention", h, change, window, cap)
            x = x + rms_norm(attended, w[f"{i}.behind"])
            x = x + rms_norm(gated(w, f"{i}.mlp", x), w[f"{i}.last"])
        return rms_norm(x, w["norm"]) @ w["embed"].T

    return NamedModel(function, structs_of(names), (TOKENS,), BATCH_SEQ, names)


def fused_with_the_mlp() -> NamedModel:
    """PaLM as it is rewritten: queries, one key, one value, neurons and gates from one weight.

    What that makes is five lengths added: an axis of its own.
    """
    names = {"embed": ("vocabulary", "embedding")}
    for i in range(LAYERS):
        names |= {
            f"{i}.norm": ("embedding",),
            f"{i}.fused_attn_ff_proj": ("embedding", "fused_dims"),
            f"{i}.attn_out": ("query_heads*projection", "embedding"),
            f"{i}.ff_out": ("neurons", "embedding"),
        }
    cuts = [EMBEDDING, EMBEDDING + PROJECTION, EMBEDDING + 2 * PROJECTION]
    cuts.append(cuts[-1] + NEURONS)

    def function(w, tokens):
        x = w["embed"][tokens]
        for i in range(LAYERS):
            h = rms_norm(x, w[f"{i}.norm"]) @ w[f"{i}.fused_attn_ff_proj"]
            q, k, v, up, gate = jnp.split(h, cuts, -1)
            q, k = rotary_half(split_heads(q)), rotary_half(k)
            shares = causal(jnp.einsum("bhsd,btd->bhst", q, k))
            attended = merge_heads(jnp.einsum("bhst,btd->bhsd", shares, v))
            x = x + attended @ w[f"{i}.attn_out"] + (jax.nn.silu(gate) * up) @ w[f"{i}.ff_out"]
        return x @ w["embed"].T

    lengths = {"query_heads": HEADS, "fused_dims": cuts[-1] + NEURONS}
    words = {"fused_dims": "qkv_neurons"}
    return NamedModel(function, structs_of(names, **lengths), (TOKENS,), BATCH_SEQ, names, words)


def biased_by_distance() -> NamedModel:
    """BLOOM: queries, keys and values of each head in a row, heads joined with the batch, ALiBi."""
    names = {"embed": ("vocabulary", "embedding")} | norm_names("embed_norm")
    for i in range(LAYERS):
        names |= linear_names(f"{i}.query_key_value", "heads*qkv*projection", "embedding")
        names |= linear_names(f"{i}.dense", "embedding", INNER) | norm_names(f"{i}.norm")
        names |= mlp_names(f"{i}.mlp", has_bias=True)
    slopes = 2.0 ** -jnp.arange(1, HEADS + 1)
    bias = jnp.tile(slopes[:, None, None] * jnp.arange(SEQ), (BATCH, 1, 1))

    def function(w, tokens):
        x = norm(w, "embed_norm", w["embed"][tokens])
        for i in range(LAYERS):
            fused = linear(w, f"{i}.query_key_value", norm(w, f"{i}.norm", x))
            fused = fused.reshape(BATCH, SEQ, HEADS, 3, PROJECTION).transpose(0, 2, 3, 1, 4)
            q, k, v = (fused[:, :, n].reshape(BATCH * HEADS, SEQ, PROJECTION) for n in range(3))
            shares = causal(q @ k.swapaxes(-1, -2) + bias)
            attended = merge_heads((shares @ v).reshape(BATCH, HEADS, SEQ, PROJECTION))
            x = x + linear(w, f"{i}.dense", attended)
            x = x + mlp(w, f"{i}.mlp", x)
        return x @ w["embed"].T

    return NamedModel(function, structs_of(names), (TOKENS,), BATCH_SEQ, names)


def adapters_beside() -> NamedModel:
    """LoRA as products beside those that they adapt, of attention and of the MLP."""
    names = {"embed": ("vocabulary", "embedding")}
    for i in range(LAYERS):
        base = attention_names(f"{i}.attention") | mlp_names(f"{i}.mlp")
        names |= base
        for path, (out, into) in base.items():
            stem = path.removesuffix(".weight")
            names |= {f"{stem}.lora_A": ("rank", into), f"{stem}.lora_B": (out, "rank")}

    def function(w, tokens):
        def adapted(path, x):
            return linear(w, path, x) + 2.0 * (x @ w[f"{path}.lora_A"].T) @ w[f"{path}.lora_B"].T

        x = w["embed"][tokens]
        for i in range(LAYERS):
            q, k, v = (split_heads(adapted(f"{i}.attention.{n}", x)) for n in "qkv")
            x = x + adapted(f"{i}.attention.o", attend(rotary_half(q), rotary_half(k), v, True))
            x = x + adapted(f"{i}.mlp.down", jax.nn.gelu(adapted(f"{i}.mlp.up", x)))
        return x @ w["embed"].T

    return NamedModel(function, structs_of(names, rank=2), (TOKENS,), BATCH_SEQ, names)


def sampling() -> NamedModel:
    """The best few logits are sampled from, and that token looked up: they are no experts."""
    names = {"embed": ("vocabulary", "embedding"), "head": ("embedding", "vocabulary")}
    names |= attention_names("attention") | gated_names("mlp")

    def last_logits(w, tokens):
        x = w["embed"][tokens]
        q, k, v = (split_heads(linear(w, f"attention.{n}", x)) for n in "qkv")
        x = x + linear(w, "attention.o", attend(q, k, v, True))
        return (x + gated(w, "mlp", x))[:, -1] @ w["head"]

    def function(w, tokens):
        _, best = jax.lax.top_k(last_logits(w, tokens), HEADS)
        longer = jnp.concatenate([tokens[:, 1:], best[:, :1]], 1)
        return jax.lax.top_k(last_logits(w, longer), HEADS)

    return NamedModel(function, structs_of(names), (TOKENS,), BATCH_SEQ, names)


def decoding() -> NamedModel:
    """One token against caches of keys and values, which are inputs."""
    names = {"embed": ("vocabulary", "embedding"), "norm": ("embedding",)}
    for i in range(LAYERS):
        names |= grouped_names(f"{i}.attention") | gated_names(f"{i}.mlp")
    cached = struct(BATCH, 2 * SEQ, GROUPS, PROJECTION)

    def function(w, token, caches, place):
        x = w["embed"][token]
        for i, cache in enumerate(caches):
            q, k, v = (linear(w, f"{i}.attention.{n}", x) for n in "qkv")
            q = q.reshape(BATCH, GROUPS, HEADS // GROUPS, PROJECTION)
            k, v = (
                jax.lax.dynamic_update_slice(
                    old, new.reshape(BATCH, 1, GROUPS, PROJECTION), (0, place, 0, 0)
                )
                for old, new in zip(cache, (k, v), strict=True)
            )
            scores = jnp.einsum("bgqd,btgd->bgqt", q, k)
            shares = jax.nn.softmax(jnp.where(jnp.arange(2 * SEQ) <= place, scores, -1e9), -1)
            attended = jnp.einsum("bgqt,btgd->bgqd", shares, v).reshape(BATCH, -1)
            x = x + linear(w, f"{i}.attention.o", attended)
            x = x + gated(w, f"{i}.mlp", x)
        return rms_norm(x, w["norm"]) @ w["embed"].T

    inputs = (struct(BATCH, dtype=jnp.int32), [(cached, cached)] * LAYERS, struct(dtype=jnp.int32))
    axes = (("batch",), ("batch", None, None, None), ())
    return NamedModel(function, structs_of(names), inputs, axes, names)


def all_equal(gradients: bool = False) -> NamedModel:
    """Batch, positions, layers, heads and projection are 4, all widths 16; blocks are scanned."""
    into, out = ("embedding", "heads", "projection"), ("heads", "projection", "embedding")
    blocks = {"q": into, "k": into, "v": into, "o": out, "scale": ("embedding",)}
    blocks |= {"up": ("embedding", "neurons"), "down": ("neurons", "embedding")}
    blocks |= {"q_bias": ("heads", "projection"), "bias": ("neurons",)}
    names = {f"blocks.{path}": ("layers", *axes) for path, axes in blocks.items()}
    names |= {"embed": ("vocabulary", "embedding"), "head": ("embedding", "vocabulary")}
    names |= {"places": ("positions", "embedding")}

    def block(x, w):
        h = rms_norm(x, w["scale"])
        q, k, v = (jnp.einsum("bse,ehd->bshd", h, w[name]) for name in "qkv")
        shares = causal(jnp.einsum("bshd,bthd->bhst", q + w["q_bias"], k))
        x = x + jnp.einsum("bhst,bthd,hde->bse", shares, v, w["o"])
        return x + jax.nn.gelu(x @ w["up"] + w["bias"]) @ w["down"], None

    def function(w, tokens):
        stacked = {path: w[f"blocks.{path}"] for path in blocks}
        x, _ = jax.lax.scan(block, w["embed"][tokens] + w["places"], stacked)
        return x @ w["head"]

    def loss(w, tokens):
        chances = jax.nn.log_softmax(function(w, tokens))
        return -jnp.take_along_axis(chances, tokens[..., None], -1).mean()

    short = dict.fromkeys(("layers", "positions"), HEADS)
    weights = structs_of(names, **short, neurons=EMBEDDING, vocabulary=EMBEDDING)
    called = jax.grad(loss) if gradients else function
    inputs = (struct(HEADS, HEADS, dtype=jnp.int32),)
    return NamedModel(called, weights, inputs, BATCH_SEQ, names)


def with_sinks() -> NamedModel:
    """GPT-OSS: a logit of each head takes a share that goes nowhere; attention is gated."""
    names = {"embed": ("vocabulary", "embedding")}
    for i in range(LAYERS):
        names |= attention_names(f"{i}.attention") | mlp_names(f"{i}.mlp")
        names |= linear_names(f"{i}.gate", INNER, "embedding") | {f"{i}.sinks": ("heads",)}

    def function(w, tokens):
        x = w["embed"][tokens]
        for i in range(LAYERS):
            q, k, v = (split_heads(linear(w, f"{i}.attention.{n}", x)) for n in "qkv")
            scores = rotary_half(q) @ rotary_half(k).swapaxes(-1, -2)
            scores = jnp.where(jnp.tril(jnp.ones((SEQ, SEQ), bool)), scores, -1e9)
            sinks = jnp.broadcast_to(w[f"{i}.sinks"][:, None, None], (BATCH, HEADS, SEQ, 1))
            shares = jax.nn.softmax(jnp.concatenate([scores, sinks], -1), -1)[..., :-1]
            gates = jax.nn.sigmoid(linear(w, f"{i}.gate", x))
            x = x + linear(w, f"{i}.attention.o", merge_heads(shares @ v) * gates)
            x = x + mlp(w, f"{i}.mlp", x)
        return x @ w["embed"].T

    return NamedModel(function, structs_of(names), (TOKENS,), BATCH_SEQ, names)


def difference_of_softmaxes() -> NamedModel:
    """Differential transformer: two attentions for each head, which values have once."""
    names = {"embed": ("vocabulary", "embedding")}
    for i in range(LAYERS):
        names |= mlp_names(f"{i}.mlp") | {f"{i}.share": ("heads",)}
        names |= {f"{i}.{name}": ("embedding", "heads", "two", "projection") for name in "qk"}
        names |= {
            f"{i}.v": ("embedding", "heads", "value"),
            f"{i}.o": ("heads", "value", "embedding"),
        }

    def function(w, tokens):
        x = w["embed"][tokens]
        for i in range(LAYERS):
            q, k = (jnp.einsum("bse,ehcd->bshcd", x, w[f"{i}.{n}"]) for n in "qk")
            shares = causal(jnp.einsum("bshcd,bthcd->bchst", q, k))
            shares = shares[:, 0] - w[f"{i}.share"][:, None, None] * shares[:, 1]
            v = jnp.einsum("bse,ehd->bshd", x, w[f"{i}.v"])
            x = x + jnp.einsum("bhst,bthd,hde->bse", shares, v, w[f"{i}.o"])
            x = x + mlp(w, f"{i}.mlp", x)
        return x @ w["embed"].T

    weights, words = structs_of(names, two=2, value=2 * PROJECTION), {"value": "value_projection"}
    return NamedModel(function, weights, (TOKENS,), BATCH_SEQ, names, words, False)


DECODERS = {
    "GPT-J, parallel blocks": parallel_blocks,
    "Phi-2, parallel blocks": functools.partial(parallel_blocks, rotary_half),
    "OLMo 2, queries normed together": lambda: normed_queries(True),
    "Gemma 3, queries normed by head": lambda: normed_queries(False),
    "PaLM, fused with the MLP": fused_with_the_mlp,
    "BLOOM, biased by distance": biased_by_distance,
    "LoRA beside what it adapts": adapters_beside,
    "GPT-OSS, with sinks": with_sinks,
    "sampling from the best": sampling,
    "decoding with caches": decoding,
    "all lengths equal": all_equal,
    "all lengths equal, its gradient": lambda: all_equal(True),
}
