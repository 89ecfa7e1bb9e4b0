"""What people add to language models: tables for each layer, skips, adapters, distances, deltas."""

import jax
import jax.numpy as jnp

from tests.choosing.named_models import (
    BATCH,
    BATCH_SEQ,
    EMBEDDING,
    GROUPS,
    HEADS,
    NEURONS,
    PROJECTION,
    SEQ,
    TOKENS,
    VOCABULARY,
    NamedModel,
    causal,
    rms_norm,
    rotary_half,
    struct,
    structs_of,
)
from tests.choosing.transformer_parts import (
    INNER,
    attention,
    attention_names,
    gated,
    gated_names,
    linear,
    linear_names,
    merge_heads,
    mlp,
    mlp_names,
    norm,
    norm_names,
    split_heads,
)


def _at(path, names):
    return {f"{path}.{name}": axes for name, axes in names.items()}


def tables_for_each_layer(is_gradient: bool = False) -> NamedModel:
    """Gemma 3n: one table has rows for all layers, each of which a gate of the stream lets in.

    Pairs of layers are scanned, the first of which looks back a few places. One head of keys.
    """
    block = {
        "pre_norm": ("embedding",),
        "post_norm": ("embedding",),
        "q_einsum": ("query_heads", "embedding", "projection"),
        "kv_einsum": ("kv", "embedding", "projection"),
        "attn_vec_einsum": ("query_heads", "projection", "embedding"),
        "query_norm": ("projection",),
        "key_norm": ("projection",),
        "gating_einsum": ("gate_up", "neurons", "embedding"),
        "linear": ("neurons", "embedding"),
        "per_layer_gate": ("embedding", "per_layer"),
        "per_layer_projection": ("per_layer", "embedding"),
    }
    names = {"embedder.input": ("vocabulary", "embedding"), "final_norm": ("embedding",)}
    names |= {"embedder.per_layer": ("vocabulary", "layers", "kinds", "per_layer")}
    names |= {"embedder.model_projection": ("embedding", "layers", "kinds", "per_layer")}
    for kind in ("local", "global"):
        names |= {f"{kind}.{name}": ("layers", *axes) for name, axes in block.items()}

    def scaled(x, scale):
        return x * jax.lax.rsqrt(jnp.square(x).mean(-1, keepdims=True) + 1e-6) * (1 + scale)

    def one(w, x, own, window):
        h = scaled(x, w["pre_norm"])
        q = scaled(jnp.einsum("BTD,NDH->BTNH", h, w["q_einsum"]), w["query_norm"])
        k, v = jnp.einsum("BSD,CDH->CBSH", h, w["kv_einsum"])
        q = rotary_half(q.swapaxes(1, 2)).swapaxes(1, 2)
        k = rotary_half(scaled(k, w["key_norm"]))
        scores = jnp.einsum("BTNH,BSH->BTNS", q, k)
        distance = jnp.arange(SEQ)[:, None] - jnp.arange(SEQ)
        seen = ((distance >= 0) & (distance < window))[:, None]
        shares = jax.nn.softmax(jnp.where(seen, scores, -2.3e38), -1)
        made = jnp.einsum("BTNS,BSH->BTNH", shares, v)
        x = x + jnp.einsum("BTNH,NHD->BTD", made, w["attn_vec_einsum"])
        gate, up = jnp.einsum("BTF,NHF->NBTH", scaled(x, w["post_norm"]), w["gating_einsum"])
        x = x + (jax.nn.gelu(gate) * up) @ w["linear"]
        return x + (jax.nn.gelu(x @ w["per_layer_gate"]) * own) @ w["per_layer_projection"]

    def function(w, tokens):
        x = w["embedder.input"][tokens] * EMBEDDING**0.5
        own = w["embedder.per_layer"][tokens]
        own = own + jnp.einsum("btd,dlkp->btlkp", x, w["embedder.model_projection"])

        def pair(x, given):
            local, other, own = given
            x = one(local, x, own[:, :, 0], 3)
            return one(other, x, own[:, :, 1], SEQ), None

        local, other = (
            {name: w[f"{kind}.{name}"] for name in block} for kind in ("local", "global")
        )
        x, _ = jax.lax.scan(jax.checkpoint(pair), x, (local, other, own.transpose(2, 0, 1, 3, 4)))
        return scaled(x, w["final_norm"]) @ w["embedder.input"].T

    def loss(w, tokens):
        return jax.nn.logsumexp(function(w, tokens), axis=-1).mean()

    weights = structs_of(names, query_heads=HEADS, kv=2, gate_up=2, kinds=2, per_layer=4, layers=3)
    called = jax.grad(loss) if is_gradient else function
    return NamedModel(called, weights, (TOKENS,), BATCH_SEQ, names)


def speedrun(layers: int = 6) -> NamedModel:
    """Modded nanoGPT: rows of further tables are added to values, and what layers had is skipped.

    Queries, keys and values from a weight of three; no scales of norms; logits are capped. A scalar
    weighs each skip, and two each layer's inputs and values.
    """
    names = {"embed": ("vocabulary", "embedding"), "lm_head": ("vocabulary", "embedding")}
    names |= {f"value_embeds.{n}": ("vocabulary", INNER) for n in range(3)}
    names |= {"skip_weights": (None,)}
    for i in range(layers):
        path = f"blocks.{i}"
        names |= {f"{path}.attn.qkv_w": ("qkv", INNER, "embedding"), f"{path}.lambdas": (None,)}
        names |= {f"{path}.attn.c_proj": ("embedding", INNER), f"{path}.attn.lambdas": (None,)}
        names |= {f"{path}.mlp.c_fc": ("neurons", "embedding")}
        names |= {f"{path}.mlp.c_proj": ("embedding", "neurons")}

    def normed(x):
        return x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-6)

    def rotary(x):
        angles = jnp.outer(jnp.arange(SEQ), jnp.array([1.0, 0.0]))[:, None]
        x1, x2 = jnp.split(x, 2, -1)
        cos, sin = jnp.cos(angles), jnp.sin(angles)
        return jnp.concatenate([x1 * cos + x2 * sin, x2 * cos - x1 * sin], -1)

    def attended(w, path, x, value):
        made = x @ w[f"{path}.qkv_w"].reshape(-1, EMBEDDING).T
        q, k, v = jnp.split(made.reshape(BATCH, SEQ, 3 * HEADS, PROJECTION), 3, axis=2)
        q, k = rotary(normed(q)), rotary(normed(k))
        mix = w[f"{path}.lambdas"]
        v = mix[0] * v if value is None else mix[0] * v + mix[1] * value.reshape(v.shape)
        q, k, v = (y.swapaxes(1, 2) for y in (q, k, v))
        return merge_heads(causal(q @ k.swapaxes(-1, -2) * 0.12) @ v) @ w[f"{path}.c_proj"].T

    def function(w, tokens):
        x = first = normed(w["embed"][tokens])
        values = [w[f"value_embeds.{n}"][tokens] for n in range(3)]
        values = [*values, *[None] * (layers - 6), *values]
        skips = []
        for i in range(layers):
            if i >= layers // 2:
                x = x + w["skip_weights"][i - layers // 2] * skips.pop()
            mix = w[f"blocks.{i}.lambdas"]
            x = mix[0] * x + mix[1] * first
            x = x + attended(w, f"blocks.{i}.attn", normed(x), values[i])
            hidden = jnp.square(jax.nn.relu(normed(x) @ w[f"blocks.{i}.mlp.c_fc"].T))
            x = x + hidden @ w[f"blocks.{i}.mlp.c_proj"].T
            if i < layers // 2:
                skips.append(x)
        return 30 * jax.nn.sigmoid(normed(x) @ w["lm_head"].T / 7.5)

    shaped = {path: axes for path, axes in names.items() if None not in axes}
    weights = structs_of(shaped) | {"skip_weights": struct(layers // 2)}
    for i in range(layers):
        weights |= {f"blocks.{i}.lambdas": struct(2), f"blocks.{i}.attn.lambdas": struct(2)}
    return NamedModel(function, weights, (TOKENS,), BATCH_SEQ, names)


def tuned(layers: int = 4) -> NamedModel:
    """Around a frozen model: keys and values before all others, scales and bottlenecks."""
    base = attention_names("attention", has_bias=True) | mlp_names("mlp", has_bias=True)
    base |= norm_names("ln_1") | norm_names("ln_2")
    names = {"base.wte": ("vocabulary", "embedding"), "base.wpe": ("positions", "embedding")}
    names |= norm_names("base.ln_f")
    for i in range(layers):
        names |= _at(f"base.h.{i}", base)
        names |= {f"prefix.{i}.{name}": ("heads", "prefix", "projection") for name in "kv"}
        names |= {f"ia3.{i}.{name}": (INNER,) for name in "kv"} | {f"ia3.{i}.ff": ("neurons",)}
        names |= linear_names(f"adapters.{i}.down", "bottleneck", "embedding")
        names |= linear_names(f"adapters.{i}.up", "embedding", "bottleneck")

    def attended(w, i, x):
        path = f"base.h.{i}.attention"
        q, k, v = (linear(w, f"{path}.{name}", x) for name in "qkv")
        q, k, v = (split_heads(y) for y in (q, k * w[f"ia3.{i}.k"], v * w[f"ia3.{i}.v"]))
        k, v = (
            jnp.concatenate([jnp.broadcast_to(w[f"prefix.{i}.{n}"], (BATCH, HEADS, 4, 4)), y], 2)
            for n, y in (("k", k), ("v", v))
        )
        mask = jnp.arange(SEQ + 4) - 4 <= jnp.arange(SEQ)[:, None]
        scores = jnp.where(mask, q @ k.swapaxes(-1, -2) * 0.5, -1e9)
        return linear(w, f"{path}.o", merge_heads(jax.nn.softmax(scores, -1) @ v))

    def function(w, tokens):
        x = w["base.wte"][tokens] + w["base.wpe"][:SEQ]
        for i in range(layers):
            path = f"base.h.{i}"
            x = x + attended(w, i, norm(w, f"{path}.ln_1", x))
            hidden = jax.nn.gelu(linear(w, f"{path}.mlp.up", norm(w, f"{path}.ln_2", x)))
            made = linear(w, f"{path}.mlp.down", hidden * w[f"ia3.{i}.ff"])
            low = jax.nn.relu(linear(w, f"adapters.{i}.down", made))
            x = x + made + linear(w, f"adapters.{i}.up", low)
        return norm(w, "base.ln_f", x) @ w["base.wte"].T

    weights = structs_of(names, prefix=4, bottleneck=PROJECTION)
    return NamedModel(function, weights, (TOKENS,), BATCH_SEQ, names)


def skewed(layers: int = 4) -> NamedModel:
    """Music Transformer: scores of distances are skewed into place, by padding and a reshape."""
    block = attention_names("attention") | mlp_names("mlp") | norm_names("norm")
    block |= {"attention.distances": ("heads", "distances", "projection")}
    names = {"embed": ("vocabulary", "embedding"), "head": ("vocabulary", "embedding")}
    for i in range(layers):
        names |= _at(i, block)

    def attended(w, path, x):
        q, k, v = (split_heads(linear(w, f"{path}.{name}", x)) for name in "qkv")
        far = jnp.einsum("bhld,hmd->bhlm", q, w[f"{path}.distances"])
        padded = jnp.pad(far, ((0, 0), (0, 0), (0, 0), (1, 0)))
        placed = padded.reshape(BATCH, HEADS, SEQ + 1, SEQ)[:, :, 1:]
        made = causal((q @ k.swapaxes(-1, -2) + placed) * 0.5) @ v
        return linear(w, f"{path}.o", merge_heads(made))

    def function(w, tokens):
        x = w["embed"][tokens]
        for i in range(layers):
            x = x + attended(w, f"{i}.attention", norm(w, f"{i}.norm", x))
            x = x + mlp(w, f"{i}.mlp", x)
        return x @ w["head"].T

    weights = structs_of(names, distances=SEQ)
    return NamedModel(function, weights, (TOKENS,), BATCH_SEQ, names)


def patches_of_bytes(layers: int = 2) -> NamedModel:
    """MegaByte: a model of patches, as wide as their bytes together; in it one of bytes.

    Both have as many heads. What the first makes is cut into bytes again, and joins the second.
    """
    patch, wide = 2, "patch*byte_width"
    names = {"global.embed": ("vocabulary", "byte_width"), "local.embed": ("vocabulary", "local")}
    names |= {"global.pos": ("patches", wide), "to_local": ("local", "byte_width")}
    for i in range(layers):
        for part, width in (("global", wide), ("local", "local")):
            inner = f"{part}_heads*{part}_projection"
            block = attention_names("attention", width, width, inner)
            names |= _at(f"{part}.{i}", block | mlp_names("mlp", width, f"{part}_neurons"))
    names |= {"local.head": ("vocabulary", "local")}

    def blocks(w, part, x):
        for i in range(layers):
            x = x + attention(w, f"{part}.{i}.attention", x, is_causal=True)
            x = x + mlp(w, f"{part}.{i}.mlp", x)
        return x

    def function(w, tokens):
        before = jnp.pad(tokens, ((0, 0), (patch, 0)))[:, :SEQ]
        x = w["global.embed"][before].reshape(BATCH, SEQ // patch, -1) + w["global.pos"]
        x = blocks(w, "global", x).reshape(BATCH * SEQ // patch, patch, -1)
        inner = jnp.pad(tokens.reshape(-1, patch), ((0, 0), (1, 0)))[:, :patch]
        x = blocks(w, "local", x @ w["to_local"].T + w["local.embed"][inner])
        return (x @ w["local.head"].T).reshape(BATCH, SEQ, VOCABULARY)

    lengths = {"patch": patch, "byte_width": 8, "local": EMBEDDING, "patches": SEQ // patch}
    for part in ("global", "local"):
        lengths |= {f"{part}_heads": 4, f"{part}_projection": 4, f"{part}_neurons": NEURONS}
    weights = structs_of(names, **lengths)
    words = {"local": "embedding"}
    words |= {f"local_{role}": role for role in ("heads", "projection", "neurons")}
    return NamedModel(function, weights, (TOKENS,), BATCH_SEQ, names, words, False)


def deltas() -> NamedModel:
    """Qwen3-Next: three layers of gated deltas, then one of attention with gated results.

    Deltas change a matrix for each head, one place after the other; queries, keys and values go
    through a short depthwise convolution.
    """
    delta = {
        "in_proj_qkv": ("delta_qkv", "embedding"),
        "in_proj_z": ("delta_heads*delta_values", "embedding"),
        "in_proj_ba": ("beta_alpha*delta_heads", "embedding"),
        "conv": ("delta_qkv", None, None),
        "A_log": ("delta_heads",),
        "dt_bias": ("delta_heads",),
        "norm": ("delta_values",),
        "out_proj": ("embedding", "delta_heads*delta_values"),
    }
    full = {"q_gate": ("head_groups*query_heads*queries_gates*projection", "embedding")}
    full |= dict.fromkeys(("k", "v"), ("head_groups*projection", "embedding"))
    full |= {"o": ("embedding", "head_groups*query_heads*projection")}
    full |= {"q_norm": ("projection",), "k_norm": ("projection",)}
    names = {"embed": ("vocabulary", "embedding"), "head": ("vocabulary", "embedding")}
    for i in range(4):
        mixer = full if i == 3 else delta
        names |= _at(f"layers.{i}", mixer | gated_names("mlp")) | {f"{i}.norm": ("embedding",)}

    def scaled(x, scale):
        return x * jax.lax.rsqrt(jnp.square(x).mean(-1, keepdims=True) + 1e-6) * (1 + scale)

    def by_deltas(w, x):
        mixed = jnp.pad(x @ w["in_proj_qkv"].T, ((0, 0), (3, 0), (0, 0)))
        mixed = jax.lax.conv_general_dilated(
            mixed.swapaxes(1, 2),
            w["conv"],
            (1,),
            "VALID",
            dimension_numbers=("NCH", "OIH", "NCH"),
            feature_group_count=mixed.shape[-1],
        )
        mixed = jax.nn.silu(mixed).swapaxes(1, 2).reshape(BATCH, SEQ, 3, HEADS, PROJECTION)
        q, k, v = jnp.moveaxis(mixed, 2, 0)
        q, k = (y / jnp.sqrt(jnp.square(y).sum(-1, keepdims=True) + 1e-6) for y in (q, k))
        b, a = jnp.split(x @ w["in_proj_ba"].T, 2, -1)
        decay = jnp.exp(-jnp.exp(w["A_log"]) * jax.nn.softplus(a + w["dt_bias"]))

        def step(state, given):
            q, k, v, beta, decay = given
            state = state * decay[..., None, None]
            change = (v - jnp.einsum("bhkv,bhk->bhv", state, k)) * beta[..., None]
            state = state + k[..., None] * change[..., None, :]
            return state, jnp.einsum("bhkv,bhk->bhv", state, q)

        given = (jnp.moveaxis(y, 1, 0) for y in (q, k, v, jax.nn.sigmoid(b), decay))
        start = jnp.zeros((BATCH, HEADS, PROJECTION, PROJECTION))
        made = jnp.moveaxis(jax.lax.scan(step, start, tuple(given))[1], 0, 1)
        z = (x @ w["in_proj_z"].T).reshape(made.shape)
        made = rms_norm(made, w["norm"]) * jax.nn.silu(z)
        return made.reshape(BATCH, SEQ, -1) @ w["out_proj"].T

    def by_attention(w, x):
        both = (x @ w["q_gate"].T).reshape(BATCH, SEQ, HEADS, 2 * PROJECTION)
        q, gate = jnp.split(both, 2, -1)
        k, v = ((x @ w[n].T).reshape(BATCH, SEQ, GROUPS, PROJECTION) for n in "kv")
        q, k = scaled(q, w["q_norm"]).swapaxes(1, 2), scaled(k, w["k_norm"]).swapaxes(1, 2)
        k, v = (jnp.repeat(y, HEADS // GROUPS, 1) for y in (rotary_half(k), v.swapaxes(1, 2)))
        made = (causal(rotary_half(q) @ k.swapaxes(-1, -2)) @ v).swapaxes(1, 2)
        return (made * jax.nn.sigmoid(gate)).reshape(BATCH, SEQ, -1) @ w["o"].T

    def function(w, tokens):
        x = w["embed"][tokens]
        for i in range(4):
            own = {n.removeprefix(f"layers.{i}."): y for n, y in w.items() if f"layers.{i}." in n}
            h = rms_norm(x, w[f"{i}.norm"])
            x = x + (by_attention(own, h) if i == 3 else by_deltas(own, h))
            x = x + gated(own, "mlp", x)
        return x @ w["head"].T

    lengths = {"delta_heads": HEADS, "delta_values": PROJECTION, "delta_qkv": 3 * EMBEDDING}
    shaped = {path: axes for path, axes in names.items() if None not in axes}
    weights = structs_of(shaped, **lengths, beta_alpha=2, queries_gates=2)
    weights |= {f"layers.{i}.conv": struct(3 * EMBEDDING, 1, 4) for i in range(3)}
    return NamedModel(function, weights, (TOKENS,), BATCH_SEQ, names, {}, False)


ADDITIONS = {"modded nanoGPT": speedrun}

ADDITIONS_LEFT_OPEN = {
    "Gemma 3n, tables for each layer": tables_for_each_layer,
    "Gemma 3n, its gradient program": lambda: tables_for_each_layer(True),
    "prefixes, scales and bottlenecks": tuned,
    "Music Transformer, skewed": skewed,
    "MegaByte": patches_of_bytes,
    "Qwen3-Next, deltas": deltas,
}
