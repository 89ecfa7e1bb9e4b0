"""Transformers whose blocks, streams or weights are arranged otherwise than one after the other."""

import jax
import jax.numpy as jnp

from tests.choosing.named_models import (
    BATCH,
    BATCH_SEQ,
    EMBEDDING,
    EXPERTS,
    HEADS,
    NEURONS,
    SEQ,
    TOKENS,
    NamedModel,
    causal,
    rms_norm,
    struct,
    structs_of,
)
from tests.choosing.transformer_parts import (
    INNER,
    attend,
    attention,
    attention_names,
    gated,
    gated_names,
    linear,
    merge_heads,
    mlp,
    mlp_names,
    norm,
    norm_names,
    split_heads,
)

_BLOCK = dict.fromkeys(("wq", "wk", "wv"), (INNER, "embedding")) | {
    "wo": ("embedding", INNER),
    "up": ("neurons", "embedding"),
    "down": ("embedding", "neurons"),
    "scale": ("embedding",),
}


def _block(w, x):
    h = rms_norm(x, w["scale"])
    q, k, v = (split_heads(h @ w[name].T) for name in ("wq", "wk", "wv"))
    x = x + attend(q, k, v, is_causal=True) @ w["wo"].T
    return x + jax.nn.gelu(x @ w["up"].T) @ w["down"].T


def ensemble() -> NamedModel:
    """As many models as heads, each with weights of its own, mapped over; logits are averaged."""
    names = {"embed": ("vocabulary", "embedding"), "head": ("embedding", "vocabulary")}
    names |= {f"{i}.{path}": axes for i in range(2) for path, axes in _BLOCK.items()}
    names = {path: ("members", *axes) for path, axes in names.items()}

    def one(w, tokens):
        x = w["embed"][tokens]
        for i in range(2):
            x = _block({path: w[f"{i}.{path}"] for path in _BLOCK}, x)
        return x @ w["head"]

    def function(w, tokens):
        return jax.nn.log_softmax(jax.vmap(one, (0, None))(w, tokens)).mean(0)

    weights = structs_of(names, members=HEADS)
    return NamedModel(function, weights, (TOKENS,), BATCH_SEQ, names, {}, False)


def stages_of_layers() -> NamedModel:
    """A pipeline: stages run side by side on what came before, layers in each by scan."""
    names = {"embed": ("vocabulary", "embedding"), "head": ("embedding", "vocabulary")}
    names |= {f"stages.{path}": ("stages", "layers", *axes) for path, axes in _BLOCK.items()}

    def stage(w, x):
        return jax.lax.scan(lambda x, layer: (_block(layer, x), None), x, w)[0]

    def function(w, tokens):
        own = {path: w[f"stages.{path}"] for path in _BLOCK}
        x = w["embed"][tokens]
        state = jnp.zeros((4, *x.shape))
        for _ in range(4):
            state = jnp.concatenate([x[None], state[:-1]])
            state = jax.vmap(stage)(own, state)
        return state[-1] @ w["head"]

    weights = structs_of(names, stages=4, layers=3)
    return NamedModel(function, weights, (TOKENS,), BATCH_SEQ, names, {}, False)


def mixture_of_adapters() -> NamedModel:
    """A router weighs adapters of low rank, as many as the rank is long, beside the weight."""
    names = {"embed": ("vocabulary", "embedding"), "head": ("embedding", "vocabulary")}
    for i in range(2):
        names |= attention_names(f"{i}.attention") | gated_names(f"{i}.mlp")
        names |= {
            f"{i}.router": ("experts", "embedding"),
            f"{i}.lora_A": ("experts", "rank", "embedding"),
            f"{i}.lora_B": ("experts", "embedding", "rank"),
        }

    def function(w, tokens):
        x = w["embed"][tokens]
        for i in range(2):
            x = x + attention(w, f"{i}.attention", x, is_causal=True)
            shares = jax.nn.softmax(x @ w[f"{i}.router"].T)
            low = jnp.einsum("bse,xre->bsxr", x, w[f"{i}.lora_A"])
            added = jnp.einsum("bsxr,xer,bsx->bse", low, w[f"{i}.lora_B"], shares)
            x = x + gated(w, f"{i}.mlp", x) + added
        return x @ w["head"]

    weights = structs_of(names, rank=EXPERTS)
    return NamedModel(function, weights, (TOKENS,), BATCH_SEQ, names)


def interpolated() -> NamedModel:
    """nGPT: what is added is interpolated on a sphere; values of the first layer come again."""
    names = {"wte": ("vocabulary", "embedding"), "head": ("vocabulary", "embedding")}
    for i in range(3):
        names |= attention_names(f"h.{i}.attn") | gated_names(f"h.{i}.mlp")
        names |= {f"h.{i}.attn_alpha": ("embedding",), f"h.{i}.mlp_alpha": ("embedding",)}
        names |= {f"h.{i}.sqk": (INNER,), f"h.{i}.suv": ("neurons",), f"h.{i}.v_mix": ()}
    names |= {"sz": ("vocabulary",)}

    def unit(x):
        return x / jnp.linalg.norm(x, axis=-1, keepdims=True)

    def function(w, tokens):
        x, first = w["wte"][tokens], None
        for i in range(3):
            path = f"h.{i}"
            q, k, v = (linear(w, f"{path}.attn.{name}", x) for name in "qkv")
            q, k = (split_heads(w[f"{path}.sqk"] * y).astype(jnp.float32) for y in (q, k))
            v = split_heads(v)
            first = v if first is None else first
            mix = jax.nn.sigmoid(w[f"{path}.v_mix"])
            v = (1 - mix) * v + mix * first
            made = merge_heads(causal(unit(q) @ unit(k).swapaxes(-1, -2) * 2.0) @ v)
            made = unit(linear(w, f"{path}.attn.o", made))
            x = unit(x + jnp.abs(w[f"{path}.attn_alpha"]) * (made - x))
            h = jax.nn.silu(linear(w, f"{path}.mlp.gate", x)) * w[f"{path}.suv"]
            h = h * linear(w, f"{path}.mlp.up", x)
            made = unit(linear(w, f"{path}.mlp.down", h))
            x = unit(x + jnp.abs(w[f"{path}.mlp_alpha"]) * (made - x))
        return x @ w["head"].T * w["sz"]

    return NamedModel(function, structs_of(names), (TOKENS,), BATCH_SEQ, names)


def reversible() -> NamedModel:
    """Reformer's blocks: one half is read to change the other; both halves begin as the tokens."""
    names = {"embed": ("vocabulary", "embedding"), "head": ("embedding", "vocabulary")}
    for i in range(3):
        names |= attention_names(f"{i}.f.fn") | mlp_names(f"{i}.g.fn", has_bias=True)
        names |= norm_names(f"{i}.f.norm") | norm_names(f"{i}.g.norm")

    def function(w, tokens):
        x = w["embed"][tokens]
        x = jnp.concatenate([x, x], -1)
        first, second = jnp.split(x, 2, -1)
        for i in range(3):
            first = first + attention(w, f"{i}.f.fn", norm(w, f"{i}.f.norm", second), None, True)
            second = second + mlp(w, f"{i}.g.fn", norm(w, f"{i}.g.norm", first))
        return jnp.stack([first, second]).sum(0) @ w["head"]

    return NamedModel(function, structs_of(names), (TOKENS,), BATCH_SEQ, names)


def layers_of_unlike_lengths() -> NamedModel:
    """OpenELM: each layer has its own number of heads, and its own of neurons."""
    names = {"embed": ("vocabulary", "embedding")}
    counts = ((2, 16), (4, 32), (8, 64))
    for i in range(3):
        names |= attention_names(f"{i}.attention") | gated_names(f"{i}.mlp")
        names |= {f"{i}.norm": ("embedding",)}

    def function(w, tokens):
        x = w["embed"][tokens]
        for i, (heads, _) in enumerate(counts):
            h = rms_norm(x, w[f"{i}.norm"])
            q, k, v = (split_heads(linear(w, f"{i}.attention.{n}", h), heads) for n in "qkv")
            x = x + linear(w, f"{i}.attention.o", attend(q, k, v, is_causal=True))
            x = x + gated(w, f"{i}.mlp", x)
        return x @ w["embed"].T

    weights = structs_of({"embed": names["embed"]})
    for i, (heads, neurons) in enumerate(counts):
        own = {path: axes for path, axes in names.items() if path.startswith(f"{i}.")}
        weights |= structs_of(own, heads=heads, neurons=neurons)
    return NamedModel(function, weights, (TOKENS,), BATCH_SEQ, names)


def gated_positions() -> NamedModel:
    """gMLP: half of the neurons is projected along positions, to gate the other half."""
    names = {"embed": ("vocabulary", "embedding"), "head": ("embedding", "vocabulary")}
    for i in range(3):
        names |= {
            f"{i}.in": ("embedding", "two*half"),
            f"{i}.spatial.w": ("seq", "seq_out"),
            f"{i}.spatial.b": ("seq_out",),
            f"{i}.norm": ("half",),
            f"{i}.out": ("half", "embedding"),
        }

    def function(w, tokens):
        x = w["embed"][tokens]
        for i in range(3):
            u, v = jnp.split(jax.nn.gelu(x @ w[f"{i}.in"]), 2, axis=-1)
            v = rms_norm(v, w[f"{i}.norm"])
            v = jnp.einsum("bne,nm->bme", v, w[f"{i}.spatial.w"])
            x = x + (u * (v + w[f"{i}.spatial.b"][:, None])) @ w[f"{i}.out"]
        return x @ w["head"]

    # What comes out is as many places as went in, and is multiplied with these.
    names = {
        path: tuple("seq" if axis == "seq_out" else axis for axis in axes)
        for path, axes in names.items()
    }
    weights = structs_of(names, two=2, half=NEURONS // 2)
    words = {"half": "neurons", "two": "gate_up"}
    return NamedModel(function, weights, (TOKENS,), BATCH_SEQ, names, words, False)


def fourier_mixing() -> NamedModel:
    """FNet: frequencies of positions and of features are added to what they are of."""
    names = {"embed": ("vocabulary", "embedding"), "position": ("positions", "embedding")}
    for i in range(6):
        names |= mlp_names(f"{i}.mlp", has_bias=True)
        names |= norm_names(f"{i}.norm_1") | norm_names(f"{i}.norm_2")
    names |= {"pooler": ("embedding", "pooled"), "classes": ("pooled", "classes")}

    def function(w, tokens):
        x = w["embed"][tokens] + w["position"][jnp.arange(SEQ)]
        for i in range(6):
            mixed = jnp.fft.fft2(x.astype(jnp.complex64), axes=(1, 2)).real
            x = norm(w, f"{i}.norm_1", x + mixed)
            x = norm(w, f"{i}.norm_2", x + mlp(w, f"{i}.mlp", x))
        return jnp.tanh(x[:, 0] @ w["pooler"]) @ w["classes"]

    weights = structs_of(names, pooled=EMBEDDING, classes=3)
    return NamedModel(function, weights, (TOKENS,), BATCH_SEQ, names, {"classes": "outputs"})


def several_residuals() -> NamedModel:
    """Hyper-connections: as many streams as heads, mixed by small weights of each block."""
    names = {"embed": ("vocabulary", "embedding"), "head": ("embedding", "vocabulary")}
    for i in range(3):
        names |= attention_names(f"{i}.attention") | mlp_names(f"{i}.mlp")
        for kind in ("attention", "mlp"):
            names |= {
                f"{i}.{kind}.read": ("streams",),
                f"{i}.{kind}.write": ("streams",),
                f"{i}.{kind}.mix": ("streams", "streams"),
            }

    def function(w, tokens):
        x = jnp.repeat(w["embed"][tokens][:, :, None], HEADS, 2)
        for i in range(3):
            for kind, run in (("attention", attention), ("mlp", mlp)):
                path = f"{i}.{kind}"
                made = run(w, path, jnp.einsum("bsne,n->bse", x, w[f"{path}.read"]))
                x = jnp.einsum("bsne,nm->bsme", x, w[f"{path}.mix"])
                x = x + made[:, :, None] * w[f"{path}.write"][:, None]
        return x.sum(2) @ w["head"]

    weights = structs_of(names, streams=HEADS)
    return NamedModel(function, weights, (TOKENS,), BATCH_SEQ, names, {}, False)


def variates_as_tokens() -> NamedModel:
    """iTransformer: a token is a whole series, so that positions are what is embedded."""
    names = {"embed.w": ("time", "embedding"), "embed.b": ("embedding",)}
    for i in range(3):
        names |= attention_names(f"{i}.attention", has_bias=True) | norm_names(f"{i}.norm_1")
        names |= mlp_names(f"{i}.mlp", has_bias=True) | norm_names(f"{i}.norm_2")
    names |= {"project.w": ("embedding", "horizon"), "project.b": ("horizon",)}

    def function(w, series):
        mean = series.mean(1, keepdims=True)
        x = (series - mean).swapaxes(1, 2) @ w["embed.w"] + w["embed.b"]
        for i in range(3):
            x = norm(w, f"{i}.norm_1", x + attention(w, f"{i}.attention", x))
            x = norm(w, f"{i}.norm_2", x + mlp(w, f"{i}.mlp", x))
        made = (x @ w["project.w"] + w["project.b"]).swapaxes(1, 2)
        return made + mean

    weights = structs_of(names, time=EMBEDDING, horizon=EMBEDDING)
    inputs, axes = (struct(BATCH, EMBEDDING, EMBEDDING),), (("batch", "time", "variates"),)
    return NamedModel(function, weights, inputs, axes, names, {"horizon": "outputs"})


def sparse_dictionary() -> NamedModel:
    """A sparse autoencoder of a residual stream: the largest features alone are decoded."""
    names = {
        "W_enc": ("activations", "features"),
        "b_enc": ("features",),
        "W_dec": ("features", "activations"),
        "b_dec": ("activations",),
    }

    def function(w, x):
        made = jax.nn.relu((x - w["b_dec"]) @ w["W_enc"] + w["b_enc"])
        best, chosen = jax.lax.top_k(made, 4)
        kept = jnp.zeros_like(made).at[jnp.arange(len(x))[:, None], chosen].set(best)
        return kept @ w["W_dec"] + w["b_dec"]

    weights = structs_of(names, activations=EMBEDDING, features=NEURONS)
    inputs, axes = (struct(EMBEDDING, EMBEDDING),), (("batch", "activations"),)
    return NamedModel(function, weights, inputs, axes, names, {}, False)


ARRANGEMENTS = {
    "nGPT, interpolated": interpolated,
    "reversible blocks": reversible,
    "OpenELM, layers of unlike lengths": layers_of_unlike_lengths,
    "FNet": fourier_mixing,
    "iTransformer, series as tokens": variates_as_tokens,
}

ARRANGEMENTS_LEFT_OPEN = {
    "mixture of adapters": mixture_of_adapters,
    "ensemble, mapped over": ensemble,
    "pipeline of stages": stages_of_layers,
    "gMLP": gated_positions,
    "hyper-connections": several_residuals,
    "sparse autoencoder": sparse_dictionary,
}
