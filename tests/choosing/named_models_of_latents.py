"""DeepSeek's latent attention, as it is written otherwise than in the code of Hugging Face."""

import jax
import jax.numpy as jnp

from tests.choosing.named_models import (
    BATCH,
    BATCH_SEQ,
    EMBEDDING,
    HEADS,
    LAYERS,
    PROJECTION,
    SEQ,
    TOKENS,
    NamedModel,
    causal,
    rms_norm,
    rotary_half,
    rotary_interleaved,
    structs_of,
)
from tests.choosing.transformer_parts import mlp, mlp_names

# Names of DeepSeek-V3's configuration, as all these have them.
_WORDS = {
    "qk_nope_head_dim": "nope_projection",
    "qk_rope_head_dim": "rope_projection",
    "v_head_dim": "value_projection",
}


def _decoder(attention_names, attention, words, **lengths) -> NamedModel:
    names = {"embed": ("vocabulary", "embedding")}
    for i in range(LAYERS):
        names |= {f"{i}.{path}": axes for path, axes in attention_names.items()}
        names |= mlp_names(f"{i}.mlp") | {f"{i}.norm": ("embedding",)}

    def function(w, tokens):
        x = w["embed"][tokens]
        for i in range(LAYERS):
            own = {path: w[f"{i}.{path}"] for path in attention_names}
            x = x + attention(own, rms_norm(x, w[f"{i}.norm"]))
            x = x + mlp(w, f"{i}.mlp", x)
        return x @ w["embed"].T

    return NamedModel(function, structs_of(names, **lengths), (TOKENS,), BATCH_SEQ, names, words)


def weights_of_the_paper(is_added: bool, rope: int) -> NamedModel:
    """Each weight of the paper by itself: parts of queries and keys are rotated, others are not.

    Args:
        is_added: Whether scores of both parts are added; otherwise the parts are concatenated.
        rope: The length of the part that is rotated.
    """
    names = {
        "W_DKV": ("embedding", "kv_lora_rank"),
        "W_UK": ("kv_lora_rank", "heads", "qk_nope_head_dim"),
        "W_UV": ("kv_lora_rank", "heads", "v_head_dim"),
        "W_KR": ("embedding", "qk_rope_head_dim"),
        "W_DQ": ("embedding", "q_lora_rank"),
        "W_UQ": ("q_lora_rank", "heads", "qk_nope_head_dim"),
        "W_QR": ("q_lora_rank", "heads", "qk_rope_head_dim"),
        "W_O": ("heads", "v_head_dim", "embedding"),
    }

    def attention(w, h):
        def heads(latent, name):
            return jnp.einsum("bsr,rhd->bhsd", latent, w[name])

        of_keys, of_queries = h @ w["W_DKV"], h @ w["W_DQ"]
        q, k, v = heads(of_queries, "W_UQ"), heads(of_keys, "W_UK"), heads(of_keys, "W_UV")
        q_turned, k_turned = rotary_half(heads(of_queries, "W_QR")), rotary_half(h @ w["W_KR"])
        if is_added:
            scores = q @ k.swapaxes(-1, -2) + jnp.einsum("bhsd,btd->bhst", q_turned, k_turned)
        else:
            k_turned = jnp.broadcast_to(k_turned[:, None], (BATCH, HEADS, SEQ, rope))
            q, k = (jnp.concatenate(each, -1) for each in ((q, q_turned), (k, k_turned)))
            scores = q @ k.swapaxes(-1, -2)
        return jnp.einsum("bhst,bhtd,hde->bse", causal(scores), v, w["W_O"])

    lengths = {"q_lora_rank": EMBEDDING, "kv_lora_rank": EMBEDDING, "qk_rope_head_dim": rope}
    lengths |= {"qk_nope_head_dim": PROJECTION, "v_head_dim": PROJECTION}
    return _decoder(names, attention, _WORDS, **lengths)


def latents_in_one_weight() -> NamedModel:
    """vLLM: one weight makes both latents and the rotated keys; neighbours are rotated."""
    names = {
        "fused_qkv_a_proj": ("compressed_qkv", "embedding"),
        "q_a_norm": ("q_lora_rank",),
        "kv_a_norm": ("kv_lora_rank",),
        "q_b_proj": ("heads*qk_head_dim", "q_lora_rank"),
        "kv_b_proj": ("heads*kv", "kv_lora_rank"),
        "o_proj": ("embedding", "heads*v_head_dim"),
    }
    q_rank, rope = 8, PROJECTION

    def attention(w, h):
        cuts = [q_rank, q_rank + EMBEDDING]
        of_queries, of_keys, shared = jnp.split(h @ w["fused_qkv_a_proj"].T, cuts, -1)

        def heads(latent, name):
            scaled = rms_norm(latent, w[f"{name}_a_norm"]) @ w[f"{name}_b_proj"].T
            return jnp.split(scaled.reshape(BATCH, SEQ, HEADS, -1).transpose(0, 2, 1, 3), 2, -1)

        (q, q_turned), (k, v) = heads(of_queries, "q"), heads(of_keys, "kv")
        shared = jnp.broadcast_to(rotary_interleaved(shared)[:, None], (BATCH, HEADS, SEQ, rope))
        q = jnp.concatenate([q, rotary_interleaved(q_turned)], -1)
        k = jnp.concatenate([k, shared], -1)
        attended = (causal(q @ k.swapaxes(-1, -2)) @ v).transpose(0, 2, 1, 3)
        return attended.reshape(BATCH, SEQ, -1) @ w["o_proj"].T

    words = {"qk_head_dim": "projection", "kv": "kv_projection", "v_head_dim": "value_projection"}
    lengths = {"compressed_qkv": q_rank + EMBEDDING + rope, "q_lora_rank": q_rank}
    lengths |= {"kv_lora_rank": EMBEDDING, "qk_head_dim": 2 * PROJECTION}
    lengths |= {"kv": 2 * PROJECTION, "v_head_dim": PROJECTION}
    return _decoder(names, attention, words, **lengths)


def scanned() -> NamedModel:
    """Queries fused, keys with values, the rotated part of keys by itself; blocks are stacked."""
    blocks = {
        "W_DKV": ("embedding", "kv_lora_rank"),
        "kv_norm": ("kv_lora_rank",),
        "W_UKV": ("kv_lora_rank", "heads", "kv"),
        "W_KR": ("embedding", "qk_rope_head_dim"),
        "W_DQ": ("embedding", "q_lora_rank"),
        "W_UQ": ("q_lora_rank", "heads", "qk_head_dim"),
        "W_O": ("heads", "v_head_dim", "embedding"),
        "mlp.up.weight": ("neurons", "embedding"),
        "mlp.down.weight": ("embedding", "neurons"),
    }
    names = {f"blocks.{path}": ("layers", *axes) for path, axes in blocks.items()}
    names["embed"] = ("vocabulary", "embedding")

    def block(x, w):
        q = jnp.einsum("bsr,rhd->bhsd", x @ w["W_DQ"], w["W_UQ"])
        q, turned = jnp.split(q, 2, -1)
        q = jnp.concatenate([q, rotary_half(turned)], -1)
        latent = rms_norm(x @ w["W_DKV"], w["kv_norm"])
        k, v = jnp.split(jnp.einsum("bsr,rhd->bhsd", latent, w["W_UKV"]), 2, -1)
        turned = jnp.broadcast_to(rotary_half(x @ w["W_KR"])[:, None], k.shape)
        shares = causal(q @ jnp.concatenate([k, turned], -1).swapaxes(-1, -2))
        x = x + jnp.einsum("bhst,bhtd,hde->bse", shares, v, w["W_O"])
        return x + mlp(w, "mlp", x), None

    def function(w, tokens):
        stacked = {path: w[f"blocks.{path}"] for path in blocks}
        x, _ = jax.lax.scan(jax.checkpoint(block), w["embed"][tokens], stacked)
        return x @ w["embed"].T

    lengths = dict.fromkeys(("q_lora_rank", "kv_lora_rank"), EMBEDDING)
    lengths |= dict.fromkeys(("qk_rope_head_dim", "v_head_dim"), PROJECTION)
    lengths |= dict.fromkeys(("qk_head_dim", "kv"), 2 * PROJECTION)
    words = {"qk_head_dim": "projection", "kv": "kv_projection", **_WORDS}
    del words["qk_nope_head_dim"]
    return NamedModel(function, structs_of(names, **lengths), (TOKENS,), BATCH_SEQ, names, words)


def absorbed() -> NamedModel:
    """For decoding: queries are taken into the latent, which all heads have for key and value."""
    names = {
        "W_DKV": ("embedding", "kv_lora_rank"),
        "W_Q": ("embedding", "heads", "qk_nope_head_dim"),
        "W_UK": ("kv_lora_rank", "heads", "qk_nope_head_dim"),
        "W_UV": ("kv_lora_rank", "heads", "v_head_dim"),
        "W_O": ("heads", "v_head_dim", "embedding"),
    }

    def attention(w, h):
        latent = h @ w["W_DKV"]
        q = jnp.einsum("bse,ehd->bshd", h, w["W_Q"])
        q = jnp.einsum("bshd,rhd->bshr", q, w["W_UK"])
        shares = causal(jnp.einsum("bshr,btr->bhst", q, latent))
        attended = jnp.einsum("bhst,btr->bshr", shares, latent)
        values = jnp.einsum("bshr,rhd->bshd", attended, w["W_UV"])
        return jnp.einsum("bshd,hde->bse", values, w["W_O"])

    # In this program keys and values lack the heads.
    lengths = {"kv_lora_rank": EMBEDDING, "qk_nope_head_dim": PROJECTION, "v_head_dim": PROJECTION}
    return _decoder(names, attention, {"heads": "query_heads"}, **lengths)


def bottleneck() -> NamedModel:
    """Keys and values by way of a bottleneck behind an encoder, which is no latent of a decoder."""
    names = {"embed": ("vocabulary", "embedding"), "squeeze": ("embedding", "bottleneck")}
    into, out = ("bottleneck", "heads", "projection"), ("heads", "projection", "embedding")
    for i in range(LAYERS):
        names |= {f"{i}.q": ("embedding", *into[1:]), f"{i}.k": into, f"{i}.v": into, f"{i}.o": out}
        names |= mlp_names(f"{i}.mlp")

    def function(w, sources, tokens):
        encoded = mlp(w, "0.mlp", w["embed"][sources]) @ w["squeeze"]
        x = w["embed"][tokens]
        for i in range(LAYERS):
            q = jnp.einsum("bse,ehd->bhsd", x, w[f"{i}.q"])
            k, v = (jnp.einsum("bse,ehd->bhsd", encoded, w[f"{i}.{n}"]) for n in "kv")
            shares = jax.nn.softmax(q @ k.swapaxes(-1, -2), -1)
            x = x + jnp.einsum("bhsd,hde->bse", shares @ v, w[f"{i}.o"])
            x = x + mlp(w, f"{i}.mlp", x)
        return x @ w["embed"].T

    weights, inputs = structs_of(names, bottleneck=EMBEDDING), (("batch", "seq"),) * 2
    return NamedModel(function, weights, (TOKENS, TOKENS), inputs, names, {}, False)
