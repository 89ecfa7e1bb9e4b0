"""Sequences without softmax between them, or with another: states, retention, long convolutions."""

import jax
import jax.numpy as jnp

from tests.choosing.named_models import (
    BATCH,
    BATCH_SEQ,
    EMBEDDING,
    HEADS,
    LAYERS,
    NEURONS,
    PROJECTION,
    SEQ,
    TOKENS,
    NamedModel,
    rms_norm,
    rotary_interleaved,
    struct,
    structs_of,
)
from tests.choosing.transformer_parts import INNER


def _stack(block_names, block, shapes=None, **lengths) -> NamedModel:
    """Blocks on a residual stream, between a table of tokens and logits."""
    names = {"embed": ("vocabulary", "embedding"), "head": ("embedding", "vocabulary")}
    for i in range(LAYERS):
        names |= {f"layers.{i}.{path}": axes for path, axes in block_names.items()}

    def function(w, tokens):
        x = w["embed"][tokens]
        for i in range(LAYERS):
            x = x + block({path: w[f"layers.{i}.{path}"] for path in block_names}, x)
        return x @ w["head"]

    plain = {path: axes for path, axes in names.items() if None not in axes}
    weights = structs_of(plain, **lengths)
    for i in range(LAYERS):
        weights |= {f"layers.{i}.{path}": struct(*shape) for path, shape in (shapes or {}).items()}
    return NamedModel(function, weights, (TOKENS,), BATCH_SEQ, names, {}, False)


def retention() -> NamedModel:
    """RetNet: scores decay with distance and are normed, not softened; a gate per inner feature.

    Softmax is not there, so that nothing says what is contracted but its form.
    """
    names = {
        "q_proj": ("embedding", INNER),
        "k_proj": ("embedding", INNER),
        "v_proj": ("embedding", "heads*value_projection"),
        "g_proj": ("embedding", "heads*value_projection"),
        "out_proj": ("heads*value_projection", "embedding"),
    }
    size = 2 * PROJECTION

    def block(w, x):
        def split(y):
            return y.reshape(BATCH, SEQ, HEADS, -1).transpose(0, 2, 1, 3)

        q, k = (rotary_interleaved(split(x @ w[name])) for name in ("q_proj", "k_proj"))
        v = split(x @ w["v_proj"])
        decay = jnp.log(1 - 2.0 ** (-5 - jnp.arange(HEADS)))
        distance = jnp.arange(SEQ)[:, None] - jnp.arange(SEQ)
        mask = jnp.where(distance >= 0, jnp.exp(distance * decay[:, None, None]), 0)
        kept = (q @ k.swapaxes(-1, -2)) * PROJECTION**-0.5 * mask
        kept = kept / jnp.maximum(jnp.abs(kept.sum(-1, keepdims=True)), 1)
        made = kept @ v
        made = made * jax.lax.rsqrt(jnp.mean(made**2, -1, keepdims=True) + 1e-6)
        made = made.transpose(0, 2, 1, 3).reshape(BATCH, SEQ, HEADS * size)
        return (jax.nn.silu(x @ w["g_proj"]) * made) @ w["out_proj"]

    return _stack(names, block, value_projection=size)


def linear_attention() -> NamedModel:
    """Keys and values are multiplied first, behind a feature map of both."""
    names = dict.fromkeys("qk", ("embedding", "heads", "features"))
    names |= {"v": ("embedding", "heads", "projection"), "o": ("heads", "projection", "embedding")}
    names |= {"up": ("embedding", "neurons"), "down": ("neurons", "embedding")}

    def block(w, x):
        q, k = (jax.nn.elu(jnp.einsum("bse,ehf->bshf", x, w[name])) + 1 for name in "qk")
        v = jnp.einsum("bse,ehd->bshd", x, w["v"])
        kv = jnp.einsum("bshf,bshd->bhfd", k, v)
        norm = jnp.einsum("bshf,bhf->bsh", q, k.sum(1))
        made = jnp.einsum("bshf,bhfd->bshd", q, kv) / norm[..., None]
        x = x + jnp.einsum("bshd,hde->bse", made, w["o"])
        return jax.nn.gelu(x @ w["up"]) @ w["down"]

    return _stack(names, block, features=PROJECTION)


def state_spaces_in_chunks() -> NamedModel:
    """Mamba 2: one weight makes gates, inputs, two selections and steps; scanned by chunks."""
    state, inner = PROJECTION, 2 * EMBEDDING
    channels = inner + 2 * state
    names = {
        "norm": ("embedding",),
        "in_proj": ("in_proj_size", "embedding"),
        "conv1d.weight": ("conv_channels", None, None),
        "conv1d.bias": ("conv_channels",),
        "dt_bias": ("ssm_heads",),
        "A_log": ("ssm_heads",),
        "D": ("ssm_heads",),
        "gated_norm": ("inner",),
        "out_proj": ("embedding", "inner"),
    }
    heads = inner // 8

    def decays(a):
        total = jnp.cumsum(a, -1)
        distance = total[..., :, None] - total[..., None, :]
        return jnp.exp(jnp.where(jnp.tril(jnp.ones((a.shape[-1],) * 2, bool)), distance, -jnp.inf))

    def block(w, x):
        made = rms_norm(x, w["norm"]) @ w["in_proj"].T
        z, xbc, dt = jnp.split(made, [inner, inner + channels], -1)
        xbc = jax.lax.conv_general_dilated(
            xbc,
            w["conv1d.weight"],
            (1,),
            [(3, 0)],
            dimension_numbers=("NWC", "OIW", "NWC"),
            feature_group_count=channels,
        )
        xbc = jax.nn.silu(xbc + w["conv1d.bias"])
        u, b, c = jnp.split(xbc, [inner, inner + state], -1)
        dt = jax.nn.softplus(dt + w["dt_bias"])
        u = u.reshape(BATCH, SEQ, heads, 8)
        a = (dt * -jnp.exp(w["A_log"])).reshape(BATCH, 2, SEQ // 2, heads).transpose(0, 3, 1, 2)
        xs = (u * dt[..., None]).reshape(BATCH, 2, SEQ // 2, heads, 8)
        bs, cs = (y.reshape(BATCH, 2, SEQ // 2, state) for y in (b, c))
        diagonal = jnp.einsum("bcln,bcsn,bhcls,bcshp->bclhp", cs, bs, decays(a), xs)
        total = jnp.cumsum(a, -1)
        states = jnp.einsum("bcln,bhcl,bclhp->bchpn", bs, jnp.exp(total[..., -1:] - total), xs)

        def step(carry, now):
            state, decay = now
            return carry * decay[..., None, None] + state, carry

        ends = jnp.exp(total[..., -1]).transpose(2, 0, 1)
        _, before = jax.lax.scan(step, jnp.zeros_like(states[:, 0]), (states.swapaxes(0, 1), ends))
        far = jnp.einsum("bcln,cbhpn,bhcl->bclhp", cs, before, jnp.exp(total))
        y = (diagonal + far).reshape(BATCH, SEQ, heads, 8) + u * w["D"][:, None]
        y = rms_norm(y.reshape(BATCH, SEQ, inner) * jax.nn.silu(z), w["gated_norm"])
        return y @ w["out_proj"].T

    lengths = {"inner": inner, "ssm_heads": heads, "conv_channels": channels}
    lengths |= {"in_proj_size": inner + channels + heads}
    return _stack(names, block, {"conv1d.weight": (channels, 1, 4)}, **lengths)


def complex_states() -> NamedModel:
    """S5: a complex diagonal state, scanned in parallel, as many as features; a gate of these."""
    names = {
        "Lambda_re": ("state",),
        "Lambda_im": ("state",),
        "B": ("state", "embedding", None),
        "C": ("embedding", "state", None),
        "D": ("embedding",),
        "log_step": ("state",),
        "gate": ("embedding", "embedding"),
    }

    def joined(first, second):
        return second[0] * first[0], second[0] * first[1] + second[1]

    def block(w, x):
        decay = jnp.clip(w["Lambda_re"], None, -1e-4) + 1j * w["Lambda_im"]
        step = jnp.exp(w["log_step"])
        b, c = (w[name][..., 0] + 1j * w[name][..., 1] for name in "BC")
        turned = jnp.exp(decay * step)
        b = ((turned - 1) / decay)[:, None] * b

        def one(u):
            driven = jax.vmap(lambda now: b @ now)(u)
            _, states = jax.lax.associative_scan(
                joined, (jnp.broadcast_to(turned, (SEQ, EMBEDDING)), driven)
            )
            return jax.vmap(lambda state: 2 * (c @ state).real)(states) + u * w["D"]

        y = jax.nn.gelu(jax.vmap(one)(x))
        return y * jax.nn.sigmoid(y @ w["gate"])

    shapes = {"B": (EMBEDDING, EMBEDDING, 2), "C": (EMBEDDING, EMBEDDING, 2)}
    return _stack(names, block, shapes, state=EMBEDDING)


def long_convolutions() -> NamedModel:
    """Hyena: filters as long as the sequence, made by an MLP of places, applied by FFT."""
    names = {
        "in_proj": ("embedding", "three*inner"),
        "short_filter": ("three*inner", None),
        "filter.0": ("features", "order"),
        "filter.2": ("order", "inner"),
        "filter.freq": ("order",),
        "bias": ("inner",),
        "out_proj": ("inner", "embedding"),
    }

    def block(w, x):
        u = x @ w["in_proj"]
        padded = jnp.pad(u, ((0, 0), (2, 0), (0, 0)))
        u = sum(padded[:, n : n + SEQ] * w["short_filter"][:, n] for n in range(3))
        gate, other, v = jnp.split(u, 3, axis=-1)
        times = jnp.linspace(0, 1, SEQ)[:, None]
        places = jnp.concatenate([times, jnp.sin(times), jnp.cos(times), times**2], -1)
        h = jnp.sin(w["filter.freq"] * (places @ w["filter.0"])) @ w["filter.2"]
        h = h * jnp.exp(-times)
        v = v * other
        spectrum = jnp.fft.rfft(v, 2 * SEQ, axis=1) * jnp.fft.rfft(h, 2 * SEQ, axis=0)
        made = jnp.fft.irfft(spectrum, 2 * SEQ, axis=1)[:, :SEQ] + v * w["bias"]
        return (made * gate) @ w["out_proj"]

    lengths = {"three": 3, "inner": EMBEDDING, "features": 4, "order": EMBEDDING}
    return _stack(names, block, {"short_filter": (3 * EMBEDDING, 3)}, **lengths)


def gated_recurrent_units() -> NamedModel:
    """A GRU reads, another writes and asks by addition what to look at: all as wide."""
    names = {
        "source_embed": ("source_vocabulary", "source_features"),
        "target_embed": ("target_vocabulary", "target_features"),
        "encoder.w_i": ("source_features", "gates*encoder_hidden"),
        "encoder.w_h": ("encoder_hidden", "gates*encoder_hidden"),
        "encoder.b": ("gates*encoder_hidden",),
        "decoder.w_i": ("target_and_context", "gates*decoder_hidden"),
        "decoder.w_h": ("decoder_hidden", "gates*decoder_hidden"),
        "decoder.b": ("gates*decoder_hidden",),
        "attention.w_q": ("decoder_hidden", "asked"),
        "attention.w_k": ("encoder_hidden", "asked"),
        "attention.v": ("asked",),
        "start": ("encoder_hidden", "decoder_hidden"),
        "out": ("decoder_hidden", "target_vocabulary"),
    }

    def cell(w, path, h, x):
        i_r, i_z, i_n = jnp.split(x @ w[f"{path}.w_i"] + w[f"{path}.b"], 3, axis=-1)
        h_r, h_z, h_n = jnp.split(h @ w[f"{path}.w_h"], 3, axis=-1)
        r, z = jax.nn.sigmoid(i_r + h_r), jax.nn.sigmoid(i_z + h_z)
        return (1 - z) * jnp.tanh(i_n + r * h_n) + z * h

    def function(w, sources, targets):
        def read(h, x):
            h = cell(w, "encoder", h, x)
            return h, h

        start = jnp.zeros((BATCH, EMBEDDING))
        last, seen = jax.lax.scan(read, start, w["source_embed"][sources].swapaxes(0, 1))
        keys = seen @ w["attention.w_k"]

        def write(h, x):
            scores = jnp.tanh(h @ w["attention.w_q"] + keys) @ w["attention.v"]
            context = jnp.einsum("sb,sbh->bh", jax.nn.softmax(scores, axis=0), seen)
            h = cell(w, "decoder", h, jnp.concatenate([x, context], axis=-1))
            return h, h @ w["out"]

        first = jnp.tanh(last @ w["start"])
        _, logits = jax.lax.scan(write, first, w["target_embed"][targets].swapaxes(0, 1))
        return logits.swapaxes(0, 1)

    features = ("source_features", "target_features", "encoder_hidden", "decoder_hidden", "asked")
    lengths = dict.fromkeys(features, EMBEDDING) | {"gates": 3, "target_and_context": 2 * EMBEDDING}
    lengths |= {"source_vocabulary": NEURONS, "target_vocabulary": NEURONS}
    weights = structs_of(names, **lengths)
    axes = (("batch", "seq"), ("batch", "target_seq"))
    words = {"target_vocabulary": "vocabulary"}
    return NamedModel(function, weights, (TOKENS, TOKENS), axes, names, words, False)


def matrix_memories() -> NamedModel:
    """xLSTM's mLSTM: a matrix for each head, with gates by exponentials and a running maximum."""
    names = dict.fromkeys("qkv", ("embedding", "heads", "projection"))
    names |= {"input_gate": ("embedding", "heads"), "forget_gate": ("embedding", "heads")}
    names |= {"o": ("heads", "projection", "embedding"), "norm": ("heads", "projection")}

    def block(w, x):
        q, k, v = (jnp.einsum("bse,ehd->sbhd", x, w[name]) for name in "qkv")
        i, f = (jnp.einsum("bse,eh->sbh", x, w[f"{name}_gate"]) for name in ("input", "forget"))

        def step(carry, now):
            memory, total, most = carry
            q, k, v, i, f = now
            new = jnp.maximum(f + most, i)
            kept, added = jnp.exp(f + most - new), jnp.exp(i - new)
            memory = kept[..., None, None] * memory
            memory += added[..., None, None] * (v[..., :, None] * k[..., None, :])
            total = kept[..., None] * total + added[..., None] * k
            h = jnp.einsum("bhvk,bhk->bhv", memory, q)
            h = h / jnp.maximum(jnp.abs(jnp.sum(total * q, -1, keepdims=True)), 1)
            return (memory, total, new), h

        shape = (BATCH, HEADS, PROJECTION)
        start = (jnp.zeros((*shape, PROJECTION)), jnp.zeros(shape), jnp.zeros(shape[:2]))
        _, made = jax.lax.scan(step, start, (q, k, v, i, jax.nn.log_sigmoid(f)))
        made = made * jax.lax.rsqrt(jnp.square(made).mean(-1, keepdims=True) + 1e-6) * w["norm"]
        return jnp.einsum("sbhd,hde->bse", made, w["o"])

    return _stack(names, block)


SEQUENCES = {
    "RetNet": retention,
    "linear attention": linear_attention,
    "Mamba 2, in chunks": state_spaces_in_chunks,
    "S5, complex states": complex_states,
    "Hyena, long convolutions": long_convolutions,
    "GRUs with additive attention": gated_recurrent_units,
    "mLSTM, matrix memories": matrix_memories,
}
