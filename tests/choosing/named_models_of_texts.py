"""Language models: tokens further ahead, blocks of positions, integers, adapters, bytes, deltas."""

import jax
import jax.numpy as jnp

from tests.choosing.named_models import (
    BATCH,
    BATCH_SEQ,
    EMBEDDING,
    EXPERTS,
    HEADS,
    PROJECTION,
    SEQ,
    TOKENS,
    NamedModel,
    causal,
    layer_norm,
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
    grouped_attention,
    grouped_names,
    linear,
    merge_heads,
    split_heads,
)

_EMBED = {"embed": ("vocabulary", "embedding"), "head": ("vocabulary", "embedding")}


def _at(path, names):
    return {f"{path}.{name}": axes for name, axes in names.items()}


def further_token(layers: int = 3) -> NamedModel:
    """DeepSeek-V3's further token: the stream and the next token are joined, and read by a block.

    Table and head are those of the model.
    """
    norms = {"norm.weight": ("embedding",)}
    block = grouped_names("attention") | gated_names("mlp") | norms
    names = _EMBED | {"norm.weight": ("embedding",)}
    for i in range(layers):
        names |= _at(f"layers.{i}", block)
    names |= _at("mtp", block) | {"mtp.hnorm.weight": ("embedding",)}
    names |= {"mtp.enorm.weight": ("embedding",), "mtp.eh_proj.weight": ("embedding", "joined")}
    names |= {"mtp.shared_head.norm.weight": ("embedding",)}

    def one(w, path, x):
        h = rms_norm(x, w[f"{path}.norm.weight"])
        x = x + grouped_attention(w, f"{path}.attention", h)
        return x + gated(w, f"{path}.mlp", x)

    def function(w, tokens):
        x = w["embed"][tokens]
        for i in range(layers):
            x = one(w, f"layers.{i}", x)
        logits = rms_norm(x, w["norm.weight"]) @ w["head"].T
        known = rms_norm(w["embed"][jnp.roll(tokens, -1, 1)], w["mtp.enorm.weight"])
        joined = jnp.concatenate([known, rms_norm(x, w["mtp.hnorm.weight"])], -1)
        x = one(w, "mtp", linear(w, "mtp.eh_proj", joined))
        return logits, rms_norm(x, w["mtp.shared_head.norm.weight"]) @ w["head"].T

    weights = structs_of(names, joined=2 * EMBEDDING)
    return NamedModel(function, weights, (TOKENS,), BATCH_SEQ, names)


def two_experts_with_room(layers: int = 2) -> NamedModel:
    """GShard's dispatch to the best two, with room for four tokens; a gated expert has all."""
    block = attention_names("attention") | gated_names("shared")
    block |= {"router": ("embedding", "experts"), "shared_gate": ("embedding", None)}
    block |= dict.fromkeys(("wi_0", "wi_1"), ("experts", "embedding", "neurons"))
    block |= {"wo": ("experts", "neurons", "embedding"), "scale": ("embedding",)}
    names = dict(_EMBED)
    for i in range(layers):
        names |= _at(i, block)
    room = 4

    def dispatched(gates):
        first = jax.nn.one_hot(jnp.argmax(gates, -1), EXPERTS)
        second = jax.nn.one_hot(jnp.argmax(gates * (1 - first), -1), EXPERTS)
        place_1 = (jnp.cumsum(first, 1) - first) * first
        place_2 = (jnp.cumsum(second, 1) - second + first.sum(1, keepdims=True)) * second
        combined = 0.0
        for mask, place in ((first, place_1), (second, place_2)):
            mask = mask * (place < room)
            share = (gates * mask).sum(-1)
            slot = jax.nn.one_hot((place * mask).sum(-1).astype(jnp.int32), room)
            combined += share[..., None, None] * mask[..., None] * slot[..., None, :]
        return combined

    def experts(w, path, x):
        gates = jax.nn.softmax(jnp.einsum("gsm,me->gse", x, w[f"{path}.router"]), -1)
        combined = dispatched(gates)
        sent = jnp.einsum("gsec,gsm->egcm", (combined > 0).astype(x.dtype), x)
        hidden = jax.nn.silu(jnp.einsum("egcm,emh->egch", sent, w[f"{path}.wi_0"]))
        hidden = hidden * jnp.einsum("egcm,emh->egch", sent, w[f"{path}.wi_1"])
        made = jnp.einsum("egch,ehm->egcm", hidden, w[f"{path}.wo"])
        return jnp.einsum("gsec,egcm->gsm", combined, made)

    def function(w, tokens):
        x = w["embed"][tokens]
        for i in range(layers):
            x = x + attention(w, f"{i}.attention", x, is_causal=True)
            h = rms_norm(x, w[f"{i}.scale"])
            shared = jax.nn.sigmoid(h @ w[f"{i}.shared_gate"]) * gated(w, f"{i}.shared", h)
            x = x + experts(w, f"{i}", h) + shared
        return x @ w["head"].T

    weights = structs_of({path: axes for path, axes in names.items() if None not in axes})
    weights |= {f"{i}.shared_gate": struct(EMBEDDING, 1) for i in range(layers)}
    return NamedModel(function, weights, (TOKENS,), BATCH_SEQ, names)


def blocks_of_positions(is_gradient: bool = False) -> NamedModel:
    """Blockwise: a loop over blocks of queries, in it one over keys; the MLP by blocks as well.

    As many blocks as a head has features; layers are scanned, all of it rematerialised.
    """
    block = dict.fromkeys(("wq", "wk", "wv"), ("layers", "embedding", "heads", "projection"))
    block |= {"wo": ("layers", "heads", "projection", "embedding"), "norm": ("layers", "embedding")}
    block |= {"w1": ("layers", "embedding", "neurons"), "w2": ("layers", "neurons", "embedding")}
    names = {"wte": ("vocabulary", "embedding"), "ln_f": ("embedding",), **block}
    count = 4

    def chunked(y):
        return y.reshape(BATCH, count, SEQ // count, *y.shape[2:]).swapaxes(0, 1)

    def attended(q, k, v):
        def of_queries(q_block):
            number, q_block = q_block

            def of_keys(carry, k_block):
                made, total, most = carry
                place, k_block, v_block = k_block
                scores = jnp.einsum("bqhd,bkhd->bhqk", q_block, k_block) * PROJECTION**-0.5
                scores = jnp.where(place <= number, scores, -1e9)
                new = jnp.maximum(most, scores.max(-1))
                shares = jnp.exp(scores - new[..., None])
                old = jnp.exp(most - new)
                made = made * old[..., None] + jnp.einsum("bhqk,bkhd->bhqd", shares, v_block)
                return (made, total * old + shares.sum(-1), new), None

            start = jnp.zeros((BATCH, HEADS, SEQ // count))
            empty = jnp.zeros((*start.shape, PROJECTION))
            carry = (empty, start, start - jnp.inf)
            blocks = (jnp.arange(count), chunked(k), chunked(v))
            (made, total, _), _ = jax.lax.scan(jax.checkpoint(of_keys), carry, blocks)
            return made / total[..., None]

        made = jax.lax.map(of_queries, (jnp.arange(count), chunked(q)))
        return made.transpose(1, 0, 3, 2, 4).reshape(BATCH, SEQ, HEADS, PROJECTION)

    def layer(x, w):
        h = rms_norm(x, w["norm"])
        q, k, v = (jnp.einsum("bse,ehd->bshd", h, w[name]) for name in ("wq", "wk", "wv"))
        x = x + jnp.einsum("bshd,hde->bse", attended(q, k, v), w["wo"])
        made = jax.lax.map(lambda y: jax.nn.gelu(y @ w["w1"]) @ w["w2"], chunked(x))
        return x + made.swapaxes(0, 1).reshape(x.shape), None

    def function(w, tokens):
        stacked = {name: w[name] for name in block}
        x, _ = jax.lax.scan(jax.checkpoint(layer), w["wte"][tokens], stacked)
        return rms_norm(x, w["ln_f"]) @ w["wte"].T

    def loss(w, tokens):
        chosen = jax.nn.log_softmax(function(w, tokens))
        return -jnp.take_along_axis(chosen, tokens[..., None], -1).mean()

    called = jax.grad(loss) if is_gradient else function
    return NamedModel(called, structs_of(names), (TOKENS,), BATCH_SEQ, names)


def integers(layers: int = 2) -> NamedModel:
    """Weights and what they are applied to are integers, with a scale per output and per token."""
    names = {"embed.q": ("vocabulary", "embedding"), "embed.scale": ("vocabulary",)}
    names |= {"norm": ("embedding",)}
    kernels = {"qkv": ("embedding", "qkv*heads*projection"), "out": (INNER, "embedding")}
    kernels |= {"up": ("embedding", "neurons"), "down": ("neurons", "embedding")}
    for i in range(layers):
        for name, axes in kernels.items():
            names |= {f"{i}.{name}.q": axes, f"{i}.{name}.scale": axes[1:]}
        names[f"{i}.norm"] = ("embedding",)

    def rounded(x):
        scale = jnp.abs(x).max(-1, keepdims=True) / 127.0
        return jnp.clip(jnp.round(x / scale), -127, 127).astype(jnp.int8), scale

    def dense(w, path, x):
        x, scale = rounded(x)
        made = jax.lax.dot_general(
            x, w[f"{path}.q"], (((2,), (0,)), ((), ())), preferred_element_type=jnp.int32
        )
        return made.astype(jnp.float32) * scale * w[f"{path}.scale"]

    def function(w, tokens):
        x = w["embed.q"][tokens].astype(jnp.float32) * w["embed.scale"][tokens][..., None]
        for i in range(layers):
            fused = dense(w, f"{i}.qkv", rms_norm(x, w[f"{i}.norm"]))
            q, k, v = (split_heads(y) for y in jnp.split(fused, 3, -1))
            made = merge_heads(causal(rotary_half(q) @ rotary_half(k).swapaxes(-1, -2)) @ v)
            x = x + dense(w, f"{i}.out", made)
            x = x + dense(w, f"{i}.down", jax.nn.relu(dense(w, f"{i}.up", x)))
        x, scale = rounded(rms_norm(x, w["norm"]))
        logits = jnp.einsum("bse,ve->bsv", x, w["embed.q"], preferred_element_type=jnp.int32)
        return logits.astype(jnp.float32) * scale * w["embed.scale"]

    weights = {
        path: struct(*each.shape, dtype=jnp.int8) if path.endswith(".q") else each
        for path, each in structs_of(names).items()
    }
    return NamedModel(function, weights, (TOKENS,), BATCH_SEQ, names)


def bert_for_pretraining(layers: int = 4) -> NamedModel:
    """BERT as Hugging Face has it for Flax: a pooler, masked words, and whether a sentence follows.

    The layer behind the pooler and the one before the words are square; words are those of the
    table, with a bias.
    """

    def dense(path, into, made):
        return {f"{path}/kernel": (into, made), f"{path}/bias": (made,)}

    def scale(path):
        return {f"{path}/scale": ("embedding",), f"{path}/bias": ("embedding",)}

    names = {
        "embeddings/word_embeddings": ("vocabulary", "embedding"),
        "embeddings/position_embeddings": ("positions", "embedding"),
        "embeddings/token_type_embeddings": ("token_types", "embedding"),
        **scale("embeddings/LayerNorm"),
        **dense("pooler/dense", "embedding", "pooled"),
        **dense("cls/seq_relationship", "pooled", "follows"),
        **dense("cls/predictions/transform/dense", "embedding", "embedding"),
        **scale("cls/predictions/transform/LayerNorm"),
        "cls/predictions/bias": ("vocabulary",),
    }
    for i in range(layers):
        path = f"encoder/layer/{i}"
        for name in ("query", "key", "value"):
            names |= dense(f"{path}/attention/self/{name}", "embedding", INNER)
        names |= dense(f"{path}/attention/output/dense", INNER, "embedding")
        names |= scale(f"{path}/attention/output/LayerNorm") | scale(f"{path}/output/LayerNorm")
        names |= dense(f"{path}/intermediate/dense", "embedding", "neurons")
        names |= dense(f"{path}/output/dense", "neurons", "embedding")

    def apply(w, path, x):
        return x @ w[f"{path}/kernel"] + w[f"{path}/bias"]

    def normed(w, path, x):
        return layer_norm(x, w[f"{path}/scale"], w[f"{path}/bias"])

    def function(w, tokens, mask, types):
        places = jnp.broadcast_to(jnp.arange(SEQ), tokens.shape)
        x = jnp.take(w["embeddings/word_embeddings"], tokens, axis=0)
        x += jnp.take(w["embeddings/position_embeddings"], places, axis=0)
        x += jnp.take(w["embeddings/token_type_embeddings"], types, axis=0)
        x = normed(w, "embeddings/LayerNorm", x)
        bias = jnp.where(mask[:, None, None] > 0, 0.0, -1e9)
        for i in range(layers):
            path = f"encoder/layer/{i}"
            q, k, v = (
                apply(w, f"{path}/attention/self/{name}", x).reshape(BATCH, SEQ, HEADS, PROJECTION)
                for name in ("query", "key", "value")
            )
            shares = jax.nn.softmax(jnp.einsum("bqhd,bkhd->bhqk", q / 2, k) + bias)
            made = jnp.einsum("bhqk,bkhd->bqhd", shares, v).reshape(x.shape)
            made = apply(w, f"{path}/attention/output/dense", made)
            x = normed(w, f"{path}/attention/output/LayerNorm", x + made)
            hidden = jax.nn.gelu(apply(w, f"{path}/intermediate/dense", x))
            x = normed(w, f"{path}/output/LayerNorm", x + apply(w, f"{path}/output/dense", hidden))
        pooled = jnp.tanh(apply(w, "pooler/dense", x[:, 0]))
        h = jax.nn.gelu(apply(w, "cls/predictions/transform/dense", x))
        h = normed(w, "cls/predictions/transform/LayerNorm", h)
        words = h @ w["embeddings/word_embeddings"].T + w["cls/predictions/bias"]
        return words, apply(w, "cls/seq_relationship", pooled)

    weights = structs_of(names, token_types=2, pooled=EMBEDDING, follows=2)
    axes = (("batch", "seq"),) * 3
    words = {"follows": "outputs"}
    return NamedModel(function, weights, (TOKENS,) * 3, axes, names, words)


def token_by_token(layers: int = 2) -> NamedModel:
    """Functions of one token, of one query and of one head, all mapped; groups have few keys."""
    block = {"wq": ("head_groups", "query_heads", "projection", "embedding")}
    block |= dict.fromkeys(("wk", "wv"), ("head_groups", "projection", "embedding"))
    block |= {"wo": ("head_groups", "query_heads", "embedding", "projection")}
    block |= {"up": ("neurons", "embedding"), "down": ("embedding", "neurons")}
    block |= {"scale": ("embedding",)}
    names = {"embed": ("vocabulary", "embedding"), "unembed": ("vocabulary", "embedding")}
    for i in range(layers):
        names |= _at(i, block)

    def normed(x, scale):
        return x / jnp.sqrt(jnp.dot(x, x) + 1e-6) * scale

    def of_head(wq, wo, keys, values, h):
        def of_query(query, place):
            scores = jnp.where(jnp.arange(SEQ) <= place, keys @ query, -jnp.inf)
            return wo @ (jax.nn.softmax(scores) @ values)

        return jax.vmap(of_query)(jax.vmap(lambda token: wq @ token)(h), jnp.arange(SEQ))

    def of_group(wq, wk, wv, wo, h):
        keys, values = (jax.vmap(lambda token, m=m: m @ token)(h) for m in (wk, wv))
        made = jax.vmap(of_head, in_axes=(0, 0, None, None, None))(wq, wo, keys, values, h)
        return made.sum(0)

    def sequence(w, tokens):
        x = jax.vmap(lambda token: w["embed"][token])(tokens)
        for i in range(layers):
            own = {name: w[f"{i}.{name}"] for name in block}
            h = jax.vmap(lambda token, own=own: normed(token, own["scale"]))(x)
            groups = jax.vmap(of_group, in_axes=(0, 0, 0, 0, None))
            x = x + groups(own["wq"], own["wk"], own["wv"], own["wo"], h).sum(0)
            x = jax.vmap(lambda t, own=own: t + own["down"] @ jax.nn.silu(own["up"] @ t))(x)
        return jax.vmap(lambda token: w["unembed"] @ token)(x)

    def function(w, tokens):
        return jax.vmap(sequence, in_axes=(None, 0))(w, tokens)

    return NamedModel(function, structs_of(names), (TOKENS,), BATCH_SEQ, names)


TEXTS = {
    "DeepSeek-V3, further token": further_token,
    "GShard, with a shared expert": two_experts_with_room,
    "blockwise parallel": blocks_of_positions,
    "blockwise parallel, its gradient program": lambda: blocks_of_positions(True),
    "integers on both sides": integers,
    "BERT for pretraining": bert_for_pretraining,
    "token by token, mapped": token_by_token,
}
