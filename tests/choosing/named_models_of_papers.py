"""Models with what papers have added: fused unequal parts, dispatched experts, latent attention."""

import jax
import jax.numpy as jnp

from tests.choosing.named_models import (
    BATCH,
    BATCH_SEQ,
    EMBEDDING,
    EXPERTS,
    GROUPS,
    HEADS,
    LAYERS,
    PROJECTION,
    SEQ,
    TOKENS,
    NamedModel,
    causal,
    rms_norm,
    rotary_half,
    structs_of,
)


def fused_unequally() -> NamedModel:
    """Phi-3: queries, keys and values of unlike lengths in one weight, gates and values in one.

    That of all three is no product of logical axes: ``op_size`` in the code of Hugging Face,
    ``num_heads * head_dim + 2 * (num_key_value_heads * head_dim)``.
    """
    names: dict[str, tuple[str, ...]] = {
        "embed": ("vocabulary", "embedding"),
        "norm": ("embedding",),
        "head": ("vocabulary", "embedding"),
    }
    for i in range(LAYERS):
        names |= {
            f"layers.{i}.norm": ("embedding",),
            f"layers.{i}.qkv_proj": ("op_size", "embedding"),
            f"layers.{i}.o_proj": ("embedding", "head_groups*query_heads*projection"),
            f"layers.{i}.gate_up_proj": ("gate_up*neurons", "embedding"),
            f"layers.{i}.down_proj": ("embedding", "neurons"),
        }

    def function(weights, tokens):
        x = weights["embed"][tokens]
        for i in range(LAYERS):
            w = {n: weights[f"layers.{i}.{n}"] for n in _PHI3_BLOCK}
            cuts = [HEADS * PROJECTION, (HEADS + GROUPS) * PROJECTION]
            q, k, v = jnp.split(rms_norm(x, w["norm"]) @ w["qkv_proj"].T, cuts, -1)
            q = q.reshape(BATCH, SEQ, GROUPS, HEADS // GROUPS, PROJECTION)
            k, v = (y.reshape(BATCH, SEQ, GROUPS, PROJECTION) for y in (k, v))
            q = rotary_half(q.transpose(0, 2, 3, 1, 4))
            k = rotary_half(k.transpose(0, 2, 1, 3))
            shares = causal(jnp.einsum("bgqsd,bgtd->bgqst", q, k))
            attended = jnp.einsum("bgqst,btgd->bsgqd", shares, v).reshape(x.shape)
            x = x + attended @ w["o_proj"].T
            gate, up = jnp.split(x @ w["gate_up_proj"].T, 2, -1)
            x = x + (jax.nn.silu(gate) * up) @ w["down_proj"].T
        return rms_norm(x, weights["norm"]) @ weights["head"].T

    op_size = (HEADS + 2 * GROUPS) * PROJECTION
    weights = structs_of(names, gate_up=2, op_size=op_size)
    words = {"op_size": "qkv_projection"}
    return NamedModel(function, weights, (TOKENS,), BATCH_SEQ, names, words)


_PHI3_BLOCK = ("norm", "qkv_proj", "o_proj", "gate_up_proj", "down_proj")


def dispatched_experts() -> NamedModel:
    """Switch: each token is sent to one expert, with room for as many tokens as experts."""
    names: dict[str, tuple[str, ...]] = {"embed": ("vocabulary", "embedding")}
    for i in range(LAYERS):
        names |= {
            f"{i}.router": ("embedding", "experts"),
            f"{i}.wi": ("experts", "embedding", "neurons"),
            f"{i}.wo": ("experts", "neurons", "embedding"),
        }
    names["head"] = ("embedding", "vocabulary")
    capacity = EXPERTS

    def function(weights, tokens):
        x = weights["embed"][tokens]
        for i in range(LAYERS):
            chances = jax.nn.softmax(x @ weights[f"{i}.router"])
            chosen = jax.nn.one_hot(jnp.argmax(chances, -1), EXPERTS)
            place = (jnp.cumsum(chosen, 1) * chosen - 1).astype(int)
            dispatch = chosen[..., None] * jax.nn.one_hot(place, capacity)
            sent = jnp.einsum("bsxc,bse->xbce", dispatch, x)
            hidden = jax.nn.relu(jnp.einsum("xbce,xen->xbcn", sent, weights[f"{i}.wi"]))
            made = jnp.einsum("xbcn,xne->xbce", hidden, weights[f"{i}.wo"])
            combine = dispatch * chances[..., None]
            x = x + jnp.einsum("bsxc,xbce->bse", combine, made)
        return x @ weights["head"]

    return NamedModel(function, structs_of(names), (TOKENS,), BATCH_SEQ, names)


def latent_attention() -> NamedModel:
    """DeepSeek's: queries, keys and values by way of latents; keys partly shared and rotated.

    Names are those of DeepSeek-V3's configuration; of what has two lengths added there, those of
    what it is in the code: ``compressed_kv`` is ``kv_lora_rank + qk_rope_head_dim`` long, ``kv``
    for each head ``qk_nope_head_dim + v_head_dim``.
    """
    nope = rope = value = PROJECTION
    names: dict[str, tuple[str, ...]] = {
        "embed": ("vocabulary", "embedding"),
        "norm": ("embedding",),
        "head": ("embedding", "vocabulary"),
    }
    for i in range(LAYERS):
        names |= {
            f"{i}.norm": ("embedding",),
            f"{i}.q_down": ("embedding", "q_lora_rank"),
            f"{i}.q_norm": ("q_lora_rank",),
            f"{i}.q_up": ("q_lora_rank", "heads", "qk_head_dim"),
            f"{i}.kv_down": ("embedding", "compressed_kv"),
            f"{i}.kv_norm": ("kv_lora_rank",),
            f"{i}.kv_up": ("kv_lora_rank", "heads", "kv"),
            f"{i}.o": ("heads", "v_head_dim", "embedding"),
            f"{i}.up": ("embedding", "neurons"),
            f"{i}.down": ("neurons", "embedding"),
        }

    def function(weights, tokens):
        x = weights["embed"][tokens]
        for i in range(LAYERS):
            w = {name.partition(".")[2]: weights[name] for name in names if name[:2] == f"{i}."}
            h = rms_norm(x, w["norm"])
            q = jnp.einsum("bsr,rhd->bhsd", rms_norm(h @ w["q_down"], w["q_norm"]), w["q_up"])
            q = jnp.concatenate([q[..., :nope], rotary_half(q[..., nope:])], -1)
            both = h @ w["kv_down"]
            latent, shared = both[..., :-rope], rotary_half(both[..., -rope:])
            kv = jnp.einsum("bsr,rhd->bhsd", rms_norm(latent, w["kv_norm"]), w["kv_up"])
            shared = jnp.broadcast_to(shared[:, None], (BATCH, HEADS, SEQ, rope))
            k, v = jnp.concatenate([kv[..., :nope], shared], -1), kv[..., nope:]
            attended = causal(q @ k.swapaxes(-1, -2)) @ v
            x = x + jnp.einsum("bhsd,hde->bse", attended, w["o"])
            x = x + jax.nn.gelu(x @ w["up"]) @ w["down"]
        return rms_norm(x, weights["norm"]) @ weights["head"]

    lengths = {
        "q_lora_rank": EMBEDDING,
        "kv_lora_rank": EMBEDDING,
        "compressed_kv": EMBEDDING + rope,
        "qk_head_dim": nope + rope,
        "kv": nope + value,
        "v_head_dim": value,
    }
    weights = structs_of(names, **lengths)
    words = {"qk_head_dim": "projection", "kv": "kv_projection", "v_head_dim": "value_projection"}
    return NamedModel(function, weights, (TOKENS,), BATCH_SEQ, names, words)


def heads_first() -> NamedModel:
    """GPT-NeoX as Hugging Face stores it: for each head queries, keys and values in a row."""
    fused = "heads*qkv*projection"
    names: dict[str, tuple[str, ...]] = {
        "embed_in": ("vocabulary", "embedding"),
        "embed_out": ("vocabulary", "embedding"),
    }
    for i in range(LAYERS):
        names |= {
            f"layers.{i}.norm": ("embedding",),
            f"layers.{i}.query_key_value.weight": (fused, "embedding"),
            f"layers.{i}.query_key_value.bias": (fused,),
            f"layers.{i}.dense.weight": ("embedding", "heads*projection"),
            f"layers.{i}.dense_h_to_4h": ("neurons", "embedding"),
            f"layers.{i}.dense_4h_to_h": ("embedding", "neurons"),
        }

    def function(weights, tokens):
        x = weights["embed_in"][tokens]
        for i in range(LAYERS):
            w = {path.split(".", 2)[2]: weights[path] for path in names if f".{i}." in path}
            h = rms_norm(x, w["norm"])
            fused = h @ w["query_key_value.weight"].T + w["query_key_value.bias"]
            fused = fused.reshape(BATCH, SEQ, HEADS, 3 * PROJECTION).transpose(0, 2, 1, 3)
            q, k, v = jnp.split(fused, 3, -1)
            q, k = (jnp.concatenate([rotary_half(y[..., :2]), y[..., 2:]], -1) for y in (q, k))
            attended = (causal(q @ k.swapaxes(-1, -2)) @ v).transpose(0, 2, 1, 3)
            attended = attended.reshape(BATCH, SEQ, HEADS * PROJECTION) @ w["dense.weight"].T
            hidden = jax.nn.gelu(h @ w["dense_h_to_4h"].T)
            x = x + attended + hidden @ w["dense_4h_to_h"].T
        return x @ weights["embed_out"].T

    return NamedModel(function, structs_of(names), (TOKENS,), BATCH_SEQ, names)


def groups_with_their_keys() -> NamedModel:
    """Falcon: for each group of heads its queries, its key and its value in a row.

    The code of Hugging Face views these as ``num_heads // num_kv_heads + 2`` rows of ``head_dim``,
    and calls what it views ``qkv``.
    """
    rows = HEADS // GROUPS + 2
    names: dict[str, tuple[str, ...]] = {
        "word_embeddings": ("vocabulary", "embedding"),
    }
    for i in range(LAYERS):
        names |= {
            f"h.{i}.norm": ("embedding",),
            f"h.{i}.query_key_value": ("head_groups*qkv*projection", "embedding"),
            f"h.{i}.dense": ("embedding", "head_groups*query_heads*projection"),
            f"h.{i}.up": ("neurons", "embedding"),
            f"h.{i}.down": ("embedding", "neurons"),
        }

    def function(weights, tokens):
        x = weights["word_embeddings"][tokens]
        for i in range(LAYERS):
            w = {path.split(".")[2]: weights[path] for path in names if f".{i}." in path}
            h = rms_norm(x, w["norm"])
            fused = (h @ w["query_key_value"].T).reshape(BATCH, SEQ, GROUPS, rows, PROJECTION)
            q, k, v = fused[..., :-2, :], fused[..., -2, :], fused[..., -1, :]
            shares = causal(jnp.einsum("bsgqd,btgd->bgqst", q, k))
            attended = jnp.einsum("bgqst,btgd->bsgqd", shares, v).reshape(x.shape)
            x = x + attended @ w["dense"].T + jax.nn.gelu(h @ w["up"].T) @ w["down"].T
        return x @ weights["word_embeddings"].T

    return NamedModel(function, structs_of(names, qkv=rows), (TOKENS,), BATCH_SEQ, names)


def gemma() -> NamedModel:
    """Gemma of Google's repository for Flax: keys beside values, gates beside what they gate."""
    names: dict[str, tuple[str, ...]] = {"embedder": ("vocabulary", "embedding")}
    for i in range(LAYERS):
        names |= {
            f"layer_{i}/pre_attention_norm": ("embedding",),
            f"layer_{i}/q_einsum": ("head_groups*query_heads", "embedding", "projection"),
            f"layer_{i}/kv_einsum": ("kv", "head_groups", "embedding", "projection"),
            f"layer_{i}/attn_vec_einsum": ("head_groups*query_heads", "projection", "embedding"),
            f"layer_{i}/pre_ffw_norm": ("embedding",),
            f"layer_{i}/gating_einsum": ("gate_up", "embedding", "neurons"),
            f"layer_{i}/linear": ("neurons", "embedding"),
        }

    def function(weights, tokens):
        x = weights["embedder"][tokens] * EMBEDDING**0.5
        for i in range(LAYERS):
            w = {path.split("/")[1]: weights[path] for path in names if f"_{i}/" in path}
            h = rms_norm(x, 1 + w["pre_attention_norm"])
            q = jnp.einsum("BTD,NDH->BNTH", h, w["q_einsum"])
            k, v = jnp.einsum("BSD,CKDH->CBKSH", h, w["kv_einsum"])
            q = rotary_half(q) * PROJECTION**-0.5
            q = q.reshape(BATCH, GROUPS, HEADS // GROUPS, SEQ, PROJECTION)
            shares = causal(jnp.einsum("BKGTH,BKSH->BKGTS", q, rotary_half(k)))
            encoded = jnp.einsum("BKGTS,BKSH->BTKGH", shares, v)
            encoded = encoded.reshape(BATCH, SEQ, HEADS, PROJECTION)
            x = x + jnp.einsum("BTNH,NHD->BTD", encoded, w["attn_vec_einsum"])
            h = rms_norm(x, 1 + w["pre_ffw_norm"])
            gate = jax.nn.gelu(h @ w["gating_einsum"][0])
            x = x + (gate * (h @ w["gating_einsum"][1])) @ w["linear"]
        return x @ weights["embedder"].T

    weights = structs_of(names, kv=2, gate_up=2)
    return NamedModel(function, weights, (TOKENS,), BATCH_SEQ, names)
