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
    struct,
    structs_of,
)


def fused_unequally() -> NamedModel:
    """Phi-3: queries, keys and values of unlike lengths in one weight, gates and values in one."""
    names: dict[str, tuple[str | None, ...]] = {
        "embed": ("vocabulary", "embedding"),
        "norm": ("embedding",),
        "head": ("vocabulary", "embedding"),
    }
    for i in range(LAYERS):
        names |= {
            f"layers.{i}.norm": ("embedding",),
            f"layers.{i}.qkv_proj": (None, "embedding"),
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

    # That of queries, keys and values is no product of logical axes, so that it has no name.
    fused = struct((HEADS + 2 * GROUPS) * PROJECTION, EMBEDDING)
    named = {path: axes for path, axes in names.items() if None not in axes}
    weights = dict.fromkeys(names, fused) | structs_of(named, gate_up=2)
    return NamedModel(function, weights, (TOKENS,), BATCH_SEQ, names)


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
    """DeepSeek's: queries, keys and values by way of latents; keys partly shared and rotated."""
    nope = rope = value = PROJECTION
    names: dict[str, tuple[str, ...]] = {
        "embed": ("vocabulary", "embedding"),
        "norm": ("embedding",),
        "head": ("embedding", "vocabulary"),
    }
    for i in range(LAYERS):
        names |= {
            f"{i}.norm": ("embedding",),
            f"{i}.q_down": ("embedding", "query_latent"),
            f"{i}.q_norm": ("query_latent",),
            f"{i}.q_up": ("query_latent", "heads", "query"),
            f"{i}.kv_down": ("embedding", "latent_and_rope"),
            f"{i}.kv_norm": ("latent",),
            f"{i}.kv_up": ("latent", "heads", "key_and_value"),
            f"{i}.o": ("heads", "value", "embedding"),
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
        "query_latent": EMBEDDING,
        "latent": EMBEDDING,
        "latent_and_rope": EMBEDDING + rope,
        "query": nope + rope,
        "key_and_value": nope + value,
        "value": value,
    }
    return NamedModel(function, structs_of(names, **lengths), (TOKENS,), BATCH_SEQ, names)
