"""Transformers that are written, or built, unlike all others."""

import jax
import jax.numpy as jnp

from tests.choosing.named_models import (
    BATCH,
    BATCH_SEQ,
    EMBEDDING,
    EXPERTS,
    HEADS,
    LAYERS,
    PROJECTION,
    SEQ,
    TOKENS,
    NamedModel,
    causal,
    layer_norm,
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
    linear_names,
    mlp,
    mlp_names,
    norm,
    norm_names,
    split_heads,
)


def heads_by_themselves() -> NamedModel:
    """Karpathy's lecture: each head has weights of its own, and their results are joined.

    Joined are as many projections as there are heads: a product of both.
    """
    names = {
        "token_embedding_table": ("vocabulary", "embedding"),
        "position_embedding_table": ("positions", "embedding"),
    }
    for i in range(LAYERS):
        for head in range(HEADS):
            for name in ("key", "query", "value"):
                names[f"blocks.{i}.sa.heads.{head}.{name}"] = ("embedding", "projection")
        names |= {
            f"blocks.{i}.sa.proj.w": (INNER, "embedding"),
            f"blocks.{i}.sa.proj.b": ("embedding",),
            f"blocks.{i}.ffwd.net.0.w": ("embedding", "neurons"),
            f"blocks.{i}.ffwd.net.0.b": ("neurons",),
            f"blocks.{i}.ffwd.net.2.w": ("neurons", "embedding"),
            f"blocks.{i}.ffwd.net.2.b": ("embedding",),
        }
        for n in (1, 2):
            names |= {f"blocks.{i}.ln{n}.g": ("embedding",), f"blocks.{i}.ln{n}.b": ("embedding",)}
    names |= {"ln_f.g": ("embedding",), "ln_f.b": ("embedding",)}
    names |= {"lm_head.w": ("embedding", "vocabulary"), "lm_head.b": ("vocabulary",)}

    def head(w, path, x):
        k, q, v = (x @ w[f"{path}.{name}"] for name in ("key", "query", "value"))
        wei = q @ k.transpose(0, 2, 1) * k.shape[-1] ** -0.5
        wei = jnp.where(jnp.tril(jnp.ones((SEQ, SEQ))) == 0, -jnp.inf, wei)
        return jax.nn.softmax(wei, axis=-1) @ v

    def function(w, idx):
        x = w["token_embedding_table"][idx] + w["position_embedding_table"][jnp.arange(SEQ)]
        for i in range(LAYERS):
            block = f"blocks.{i}"
            h = layer_norm(x, w[f"{block}.ln1.g"], w[f"{block}.ln1.b"])
            out = jnp.concatenate([head(w, f"{block}.sa.heads.{n}", h) for n in range(HEADS)], -1)
            x = x + out @ w[f"{block}.sa.proj.w"] + w[f"{block}.sa.proj.b"]
            h = layer_norm(x, w[f"{block}.ln2.g"], w[f"{block}.ln2.b"])
            h = jax.nn.relu(h @ w[f"{block}.ffwd.net.0.w"] + w[f"{block}.ffwd.net.0.b"])
            x = x + h @ w[f"{block}.ffwd.net.2.w"] + w[f"{block}.ffwd.net.2.b"]
        x = layer_norm(x, w["ln_f.g"], w["ln_f.b"])
        return x @ w["lm_head.w"] + w["lm_head.b"]

    return NamedModel(function, structs_of(names), (TOKENS,), BATCH_SEQ, names)


def square_everywhere() -> NamedModel:
    """16 of everything: batch, positions, embedding, neurons, vocabulary, and places to learn."""
    size = EMBEDDING
    names = {"wte": ("vocabulary", "embedding"), "wpe": ("positions", "embedding")}
    for i in range(3):
        names |= {f"h.{i}.{name}": (INNER, "embedding") for name in ("wq", "wk", "wv")}
        names |= {f"h.{i}.wo": ("embedding", INNER)}
        names |= {f"h.{i}.w1": ("neurons", "embedding"), f"h.{i}.w2": ("embedding", "neurons")}
        names |= {f"h.{i}.g1": ("embedding",), f"h.{i}.g2": ("embedding",)}
        names |= {f"h.{i}.b1": ("neurons",), f"h.{i}.b2": ("embedding",)}
    names |= {"head": ("vocabulary", "embedding")}

    def function(w, tokens):
        x = w["wte"][tokens] + w["wpe"]
        for i in range(3):
            own = {path.rpartition(".")[2]: w[path] for path in names if f".{i}." in path}
            h = rms_norm(x, own["g1"])
            q, k, v = (
                (h @ own[name].T).reshape(size, size, HEADS, PROJECTION).transpose(0, 2, 1, 3)
                for name in ("wq", "wk", "wv")
            )
            made = causal(q @ k.transpose(0, 1, 3, 2)) @ v
            x = x + made.transpose(0, 2, 1, 3).reshape(size, size, size) @ own["wo"].T
            h = jax.nn.gelu(rms_norm(x, own["g2"]) @ own["w1"].T + own["b1"])
            x = x + h @ own["w2"].T + own["b2"]
        return x @ w["head"].T

    weights = structs_of(names, vocabulary=size, positions=size, neurons=size)
    tokens = struct(size, size, dtype=jnp.int32)
    return NamedModel(function, weights, (tokens,), BATCH_SEQ, names)


def universal() -> NamedModel:
    """Universal transformer: one block, run until all places have halted."""
    names = {"embed": ("vocabulary", "embedding"), "halt": ("embedding", None)}
    names |= attention_names("attention", has_bias=True) | mlp_names("transition", has_bias=True)
    names |= norm_names("norm_1") | norm_names("norm_2")
    names |= {"times": ("steps", "embedding"), "head": ("embedding", "vocabulary")}

    def function(w, tokens):
        def is_going_on(carry):
            return jnp.any(carry[1] < 0.99) & (carry[3] < 6)

        def step(carry):
            x, halted, made, number = carry
            chance = jax.nn.sigmoid(x @ w["halt"])[..., 0] * (1 - halted)
            x = x + w["times"][number]
            x = x + attention(w, "attention", norm(w, "norm_1", x), is_causal=True)
            x = x + mlp(w, "transition", norm(w, "norm_2", x))
            return x, halted + chance, made + chance[..., None] * x, number + 1

        x = w["embed"][tokens]
        start = (x, jnp.zeros((BATCH, SEQ)), jnp.zeros_like(x), 0)
        return jax.lax.while_loop(is_going_on, step, start)[2] @ w["head"]

    others = {path: axes for path, axes in names.items() if path != "halt"}
    weights = structs_of(others, steps=6) | {"halt": struct(EMBEDDING, 1)}
    return NamedModel(function, weights, (TOKENS,), BATCH_SEQ, names)


def linformer(layers: int = 3) -> NamedModel:
    """Keys and values are projected along positions, to as many as a head has features."""
    names = {"embed": ("vocabulary", "embedding"), "E": ("seq", "k"), "F": ("seq", "k")}
    for i in range(layers):
        names |= attention_names(f"{i}.attention") | mlp_names(f"{i}.mlp", has_bias=True)
        names |= norm_names(f"{i}.norm_1") | norm_names(f"{i}.norm_2")
    names |= {"head": ("embedding", "vocabulary")}

    def function(w, tokens):
        x = w["embed"][tokens]
        for i in range(layers):
            h = norm(w, f"{i}.norm_1", x)
            q, k, v = (split_heads(linear(w, f"{i}.attention.{name}", h)) for name in "qkv")
            k = jnp.einsum("bhsd,sk->bhkd", k, w["E"])
            v = jnp.einsum("bhsd,sk->bhkd", v, w["F"])
            x = x + linear(w, f"{i}.attention.o", attend(q, k, v))
            x = x + mlp(w, f"{i}.mlp", norm(w, f"{i}.norm_2", x))
        return x @ w["head"]

    weights = structs_of(names, k=PROJECTION)
    return NamedModel(function, weights, (TOKENS,), BATCH_SEQ, names)


def soft_experts() -> NamedModel:
    """Soft MoE: slots of experts are mixed of all tokens, and tokens of all slots."""
    names = {"embed": ("pixels", "embedding"), "head": ("embedding", "classes")}
    for i in range(3):
        names |= attention_names(f"{i}.attention") | norm_names(f"{i}.norm_1")
        names |= norm_names(f"{i}.norm_2") | {
            f"{i}.moe.phi": ("embedding", "experts", "slots"),
            f"{i}.moe.up": ("experts", "embedding", "neurons"),
            f"{i}.moe.down": ("experts", "neurons", "embedding"),
        }

    def function(w, patches):
        x = patches @ w["embed"]
        for i in range(3):
            x = x + attention(w, f"{i}.attention", norm(w, f"{i}.norm_1", x))
            h = norm(w, f"{i}.norm_2", x)
            logits = jnp.einsum("bmd,dnp->bmnp", h, w[f"{i}.moe.phi"])
            dispatch = jax.nn.softmax(logits, axis=1)
            combine = jax.nn.softmax(logits.reshape(BATCH, SEQ, -1), axis=-1)
            combine = combine.reshape(logits.shape)
            slots = jnp.einsum("bmd,bmnp->bnpd", h, dispatch)
            made = jax.nn.gelu(jnp.einsum("bnpd,ndf->bnpf", slots, w[f"{i}.moe.up"]))
            made = jnp.einsum("bnpf,nfd->bnpd", made, w[f"{i}.moe.down"])
            x = x + jnp.einsum("bnpd,bmnp->bmd", made, combine)
        return x.mean(1) @ w["head"]

    weights = structs_of(names, pixels=EMBEDDING, classes=10, slots=2)
    axes = (("batch", "seq", "pixels"),)
    words = {"classes": "outputs"}
    inputs = (struct(BATCH, SEQ, EMBEDDING),)
    return NamedModel(function, weights, inputs, axes, names, words, False)


def mixture_of_depths() -> NamedModel:
    """A router chooses half of the tokens, and the others go past the block."""
    names = {"embed": ("vocabulary", "embedding"), "head": ("embedding", "vocabulary")}
    for i in range(3):
        names[f"{i}.router"] = ("embedding",)
        names |= attention_names(f"{i}.attention") | gated_names(f"{i}.mlp")
        names |= {f"{i}.norm_1": ("embedding",), f"{i}.norm_2": ("embedding",)}

    def function(w, tokens):
        x = w["embed"][tokens]
        rows = jnp.arange(BATCH)[:, None]
        for i in range(3):
            weight, chosen = jax.lax.top_k(x @ w[f"{i}.router"], SEQ // 2)
            chosen = jnp.sort(chosen, axis=-1)
            y = jnp.take_along_axis(x, chosen[..., None], axis=1)
            h = rms_norm(y, w[f"{i}.norm_1"])
            y = y + attention(w, f"{i}.attention", h, is_causal=True)
            y = y + gated(w, f"{i}.mlp", rms_norm(y, w[f"{i}.norm_2"]))
            x = x.at[rows, chosen].add(jax.nn.sigmoid(weight)[..., None] * y)
        return x @ w["head"]

    return NamedModel(function, structs_of(names), (TOKENS,), BATCH_SEQ, names)


def decision_transformer(layers: int = 4) -> NamedModel:
    """Returns, states and actions in turn; each has a table of time steps added, by their number.

    Time steps are inputs: a table by these is no vocabulary.
    """
    names = {"embed_timestep.weight": ("timesteps", "embedding")}
    names |= linear_names("embed_return", "embedding", "one")
    names |= linear_names("embed_state", "embedding", "states")
    names |= linear_names("embed_action", "embedding", "actions") | norm_names("embed_ln")
    for i in range(layers):
        names |= linear_names(f"h.{i}.attn.c_attn", "qkv*heads*projection", "embedding")
        names |= linear_names(f"h.{i}.attn.c_proj", "embedding", INNER)
        names |= norm_names(f"h.{i}.ln_1") | norm_names(f"h.{i}.ln_2")
        names |= mlp_names(f"h.{i}.mlp", has_bias=True)
    names |= linear_names("predict_action", "made_actions", "embedding")

    def function(w, returns, states, actions, timesteps):
        times = w["embed_timestep.weight"][timesteps]
        given = (("return", returns), ("state", states), ("action", actions))
        parts = [linear(w, f"embed_{name}", y) + times for name, y in given]
        x = jnp.stack(parts, axis=1).transpose(0, 2, 1, 3).reshape(BATCH, 3 * SEQ, EMBEDDING)
        x = norm(w, "embed_ln", x)
        for i in range(layers):
            fused = linear(w, f"h.{i}.attn.c_attn", norm(w, f"h.{i}.ln_1", x))
            q, k, v = map(split_heads, jnp.split(fused, 3, axis=-1))
            x = x + linear(w, f"h.{i}.attn.c_proj", attend(q, k, v, is_causal=True))
            x = x + mlp(w, f"h.{i}.mlp", norm(w, f"h.{i}.ln_2", x))
        x = x.reshape(BATCH, SEQ, 3, EMBEDDING).transpose(0, 2, 1, 3)
        return jnp.tanh(linear(w, "predict_action", x[:, 1]))

    lengths = {"timesteps": 32, "states": 16, "actions": 4, "made_actions": 4, "one": 1}
    weights = structs_of(names, **lengths)
    names["embed_return.weight"] = ("embedding", None)
    inputs = (
        struct(BATCH, SEQ, 1),
        struct(BATCH, SEQ, 16),
        struct(BATCH, SEQ, 4),
        struct(BATCH, SEQ, dtype=jnp.int32),
    )
    seq = ("batch", "seq")
    axes = ((*seq, None), (*seq, "states"), (*seq, "actions"), seq)
    return NamedModel(function, weights, inputs, axes, names, {"made_actions": "outputs"})


def many_heads(layers: int = 4) -> NamedModel:
    """Medusa: further heads for the tokens after the next, each behind a layer of its own."""
    names = {"embed": ("vocabulary", "embedding"), "norm": ("embedding",)}
    for i in range(layers):
        names |= attention_names(f"layers.{i}.attention") | gated_names(f"layers.{i}.mlp")
        names |= {f"layers.{i}.norm_{n}": ("embedding",) for n in (1, 2)}
    names |= {"lm_head.weight": ("vocabulary", "embedding")}
    for n in range(2):
        names |= linear_names(f"medusa_head.{n}.0.linear", "embedding", "embedding")
        names[f"medusa_head.{n}.1.weight"] = ("vocabulary", "embedding")

    def function(w, tokens):
        x = w["embed"][tokens]
        for i in range(layers):
            h = rms_norm(x, w[f"layers.{i}.norm_1"])
            x = x + attention(w, f"layers.{i}.attention", h, is_causal=True)
            x = x + gated(w, f"layers.{i}.mlp", rms_norm(x, w[f"layers.{i}.norm_2"]))
        x = rms_norm(x, w["norm"])
        further = [
            (x + jax.nn.silu(linear(w, f"medusa_head.{n}.0.linear", x)))
            @ w[f"medusa_head.{n}.1.weight"].T
            for n in range(2)
        ]
        return x @ w["lm_head.weight"].T, jnp.stack(further)

    return NamedModel(function, structs_of(names), (TOKENS,), BATCH_SEQ, names)


def magnitudes_apart() -> NamedModel:
    """DoRA: what adapters add is normed along the inputs, and has magnitudes of its own."""
    names = {"embed": ("vocabulary", "embedding"), "head": ("vocabulary", "embedding")}
    for i in range(LAYERS):
        names |= attention_names(f"{i}.attention") | mlp_names(f"{i}.mlp")
        for path in (f"{i}.attention.q", f"{i}.attention.v", f"{i}.mlp.up"):
            out, into = names[f"{path}.weight"]
            names |= {f"{path}.lora_A": ("rank", into), f"{path}.lora_B": (out, "rank")}
            names |= {f"{path}.magnitude": (out,)}

    def function(w, tokens):
        merged = dict(w)
        for path in w:
            if path.endswith(".magnitude"):
                stem = path.removesuffix(".magnitude")
                changed = w[f"{stem}.weight"] + w[f"{stem}.lora_B"] @ w[f"{stem}.lora_A"] * 2.0
                length = jnp.linalg.norm(changed, axis=1)
                merged[f"{stem}.weight"] = (w[path] / length)[:, None] * changed
        x = w["embed"][tokens]
        for i in range(LAYERS):
            x = x + attention(merged, f"{i}.attention", x, is_causal=True)
            x = x + mlp(merged, f"{i}.mlp", x)
        return x @ w["head"].T

    weights = structs_of(names, rank=PROJECTION)
    return NamedModel(function, weights, (TOKENS,), BATCH_SEQ, names)


def chosen_tokens() -> NamedModel:
    """Expert choice: each expert takes the tokens that it wants most, as many as experts."""
    names = {"embed": ("vocabulary", "embedding"), "head": ("embedding", "vocabulary")}
    for i in range(LAYERS):
        names |= attention_names(f"{i}.attention") | {
            f"{i}.gate": ("embedding", "experts"),
            f"{i}.w1": ("experts", "embedding", "neurons"),
            f"{i}.w2": ("experts", "neurons", "embedding"),
        }

    def function(w, tokens):
        x = w["embed"][tokens]
        for i in range(LAYERS):
            x = x + attention(w, f"{i}.attention", x, is_causal=True)
            flat = x.reshape(-1, EMBEDDING)
            scores = jax.nn.softmax(flat @ w[f"{i}.gate"], axis=-1)
            gates, chosen = jax.lax.top_k(scores.T, EXPERTS)
            taken = flat[chosen]
            hidden = jax.nn.gelu(jnp.einsum("ecd,edf->ecf", taken, w[f"{i}.w1"]))
            made = jnp.einsum("ecf,efd->ecd", hidden, w[f"{i}.w2"]) * gates[..., None]
            back = jnp.zeros_like(flat).at[chosen.reshape(-1)].add(made.reshape(-1, EMBEDDING))
            x = x + back.reshape(x.shape)
        return x @ w["head"]

    return NamedModel(function, structs_of(names), (TOKENS,), BATCH_SEQ, names)


def relative_to_places() -> NamedModel:
    """Transformer-XL: keys of distances by a weight of their own, biases in place of queries.

    That weight reads waves, which are as many as the embedding and are tied to nothing.
    """
    names = {"word_emb": ("vocabulary", "embedding")}
    names |= {"r_w_bias": ("heads", "projection"), "r_r_bias": ("heads", "projection")}
    for i in range(3):
        names |= {
            f"{i}.qkv_net": ("qkv*heads*projection", "embedding"),
            f"{i}.r_net": (INNER, "embedding"),
            f"{i}.o_net": ("embedding", INNER),
        }
        names |= norm_names(f"{i}.layer_norm") | mlp_names(f"{i}.pos_ff", has_bias=True)
        names |= norm_names(f"{i}.pos_ff.layer_norm")
    names |= {"crit.bias": ("vocabulary",)}

    def shifted(scores):
        padded = jnp.pad(scores, ((0, 0), (0, 0), (0, 0), (1, 0)))
        padded = padded.reshape(*scores.shape[:2], scores.shape[3] + 1, scores.shape[2])
        return padded[:, :, 1:].reshape(scores.shape)

    def function(w, tokens):
        x = w["word_emb"][tokens] * EMBEDDING**0.5
        angles = jnp.outer(jnp.arange(SEQ - 1, -1, -1.0), 1e4 ** -(jnp.arange(0, 16, 2) / 16))
        places = jnp.concatenate([jnp.sin(angles), jnp.cos(angles)], -1)
        for i in range(3):
            q, k, v = (
                y.reshape(BATCH, SEQ, HEADS, PROJECTION)
                for y in jnp.split(x @ w[f"{i}.qkv_net"].T, 3, axis=-1)
            )
            r = (places @ w[f"{i}.r_net"].T).reshape(SEQ, HEADS, PROJECTION)
            content = jnp.einsum("bind,bjnd->bnij", q + w["r_w_bias"], k)
            distance = shifted(jnp.einsum("bind,jnd->bnij", q + w["r_r_bias"], r))
            shares = causal((content + distance) * PROJECTION**-0.5)
            made = jnp.einsum("bnij,bjnd->bind", shares, v).reshape(BATCH, SEQ, -1)
            x = norm(w, f"{i}.layer_norm", x + made @ w[f"{i}.o_net"].T)
            x = norm(w, f"{i}.pos_ff.layer_norm", x + mlp(w, f"{i}.pos_ff", x))
        return x @ w["word_emb"].T + w["crit.bias"]

    return NamedModel(function, structs_of(names), (TOKENS,), BATCH_SEQ, names)


# Of these something is left open in every block: slots, and what waves are read along.
IDEAS_LEFT_OPEN = {
    "Soft MoE": soft_experts,
    "Transformer-XL": relative_to_places,
}

IDEAS = {
    "heads by themselves (nanoGPT's lecture)": heads_by_themselves,
    "square everywhere": square_everywhere,
    "universal transformer, halting": universal,
    "Linformer": linformer,
    "mixture of depths": mixture_of_depths,
    "decision transformer": decision_transformer,
    "Medusa, many heads": many_heads,
    "DoRA": magnitudes_apart,
    "expert choice": chosen_tokens,
}
