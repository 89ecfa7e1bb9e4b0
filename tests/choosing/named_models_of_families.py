"""More transformers with the weights, and the paths, of published checkpoints."""

import jax
import jax.numpy as jnp
import numpy as np

from tests.choosing.named_models import (
    BATCH,
    BATCH_SEQ,
    EMBEDDING,
    EXPERTS,
    GROUPS,
    HEADS,
    NEURONS,
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
from tests.choosing.transformer_parts import (
    INNER,
    attend,
    linear,
    linear_names,
    merge_heads,
    norm,
    norm_names,
    split_heads,
)


def biased_attention_names(path, out="out_proj", has_bias=True):
    names = linear_names(f"{path}.{out}", "embedding", INNER, has_bias)
    for name in "qkv":
        names |= linear_names(f"{path}.{name}_proj", INNER, "embedding", has_bias)
    return names


def biased_attention(w, path, x, context=None, is_causal=False, out="out_proj", places=0.0):
    context = x if context is None else context
    q, k = linear(w, f"{path}.q_proj", x + places), linear(w, f"{path}.k_proj", context + places)
    v = linear(w, f"{path}.v_proj", context)
    return linear(w, f"{path}.{out}", attend(*map(split_heads, (q, k, v)), is_causal))


def fed(w, path, x):
    return linear(w, f"{path}.fc2", jax.nn.relu(linear(w, f"{path}.fc1", x)))


def fed_names(path):
    names = linear_names(f"{path}.fc1", "neurons", "embedding")
    return names | linear_names(f"{path}.fc2", "embedding", "neurons")


def opt() -> NamedModel:
    """OPT-350m: tokens are narrower than the embedding, projected in and out; places are offset."""
    names = {
        "decoder.embed_tokens.weight": ("vocabulary", "rank"),
        "decoder.embed_positions.weight": ("positions", "embedding"),
        "decoder.project_in.weight": ("embedding", "rank"),
        "decoder.project_out.weight": ("rank", "embedding"),
    }
    for i in range(3):
        path = f"decoder.layers.{i}"
        names |= biased_attention_names(f"{path}.self_attn") | fed_names(path)
        names |= norm_names(f"{path}.self_attn_layer_norm") | norm_names(f"{path}.final_layer_norm")

    def function(w, tokens):
        mask = (tokens != 1).astype(jnp.int32)
        places = jnp.cumsum(mask, axis=1) * mask - 1
        x = w["decoder.embed_tokens.weight"][tokens] @ w["decoder.project_in.weight"].T
        x = x + w["decoder.embed_positions.weight"][places + 2]
        for i in range(3):
            path = f"decoder.layers.{i}"
            made = biased_attention(w, f"{path}.self_attn", x, is_causal=True)
            x = norm(w, f"{path}.self_attn_layer_norm", x + made)
            x = norm(w, f"{path}.final_layer_norm", x + fed(w, path, x))
        return (x @ w["decoder.project_out.weight"].T) @ w["decoder.embed_tokens.weight"].T

    return NamedModel(function, structs_of(names, rank=8), (TOKENS,), BATCH_SEQ, names)


def bart() -> NamedModel:
    """BART: learned places behind an offset of two, norms behind, a bias of the logits."""
    names = {
        "shared.weight": ("vocabulary", "embedding"),
        "final_logits_bias": (None, "vocabulary"),
    }
    for part, kinds in (("encoder", ("self_attn",)), ("decoder", ("self_attn", "encoder_attn"))):
        names |= {f"{part}.embed_positions.weight": ("positions", "embedding")}
        names |= norm_names(f"{part}.layernorm_embedding")
        for i in range(2):
            path = f"{part}.layers.{i}"
            for kind in kinds:
                names |= biased_attention_names(f"{path}.{kind}")
                names |= norm_names(f"{path}.{kind}_layer_norm")
            names |= fed_names(path) | norm_names(f"{path}.final_layer_norm")

    def stack(w, part, tokens, context=None):
        x = w["shared.weight"][tokens] * EMBEDDING**0.5
        x = x + w[f"{part}.embed_positions.weight"][jnp.arange(SEQ) + 2]
        x = norm(w, f"{part}.layernorm_embedding", x)
        for i in range(2):
            path = f"{part}.layers.{i}"
            made = biased_attention(w, f"{path}.self_attn", x, is_causal=context is not None)
            x = norm(w, f"{path}.self_attn_layer_norm", x + made)
            if context is not None:
                made = biased_attention(w, f"{path}.encoder_attn", x, context)
                x = norm(w, f"{path}.encoder_attn_layer_norm", x + made)
            x = norm(w, f"{path}.final_layer_norm", x + fed(w, path, x))
        return x

    def function(w, sources, targets):
        x = stack(w, "decoder", targets, stack(w, "encoder", sources))
        return x @ w["shared.weight"].T + w["final_logits_bias"]

    plain = {path: axes for path, axes in names.items() if None not in axes}
    weights = structs_of(plain) | {"final_logits_bias": struct(1, NEURONS)}
    axes = (("batch", "seq"), ("batch", "target_seq"))
    return NamedModel(function, weights, (TOKENS, TOKENS), axes, names)


def codegen() -> NamedModel:
    """CodeGen: queries, values and keys in this order, in as many parts as the TPUs it came from.

    Each part has the queries of some heads, then their values, then their keys.
    """
    fused = "parts*qkv*part_heads*projection"
    names = {"wte.weight": ("vocabulary", "embedding")}
    for i in range(2):
        names |= norm_names(f"h.{i}.ln_1")
        names |= {
            f"h.{i}.attn.qkv_proj.weight": (fused, "embedding"),
            f"h.{i}.attn.out_proj.weight": ("embedding", "parts*part_heads*projection"),
        }
        names |= linear_names(f"h.{i}.mlp.fc_in", "neurons", "embedding")
        names |= linear_names(f"h.{i}.mlp.fc_out", "embedding", "neurons")
    names |= norm_names("ln_f") | linear_names("lm_head", "vocabulary", "embedding")

    def function(w, tokens):
        x = w["wte.weight"][tokens]
        for i in range(2):
            h = norm(w, f"h.{i}.ln_1", x)
            made = (h @ w[f"h.{i}.attn.qkv_proj.weight"].T).reshape(BATCH, SEQ, 2, -1)
            q, v, k = (
                y.reshape(BATCH, SEQ, HEADS, PROJECTION).transpose(0, 2, 1, 3)
                for y in jnp.split(made, 3, axis=-1)
            )
            made = merge_heads(causal(rotary_half(q) @ rotary_half(k).swapaxes(-1, -2)) @ v)
            hidden = jax.nn.gelu(linear(w, f"h.{i}.mlp.fc_in", h))
            made = made @ w[f"h.{i}.attn.out_proj.weight"].T
            x = x + made + linear(w, f"h.{i}.mlp.fc_out", hidden)
        return linear(w, "lm_head", norm(w, "ln_f", x))

    weights = structs_of(names, parts=2, part_heads=HEADS // 2)
    return NamedModel(function, weights, (TOKENS,), BATCH_SEQ, names, {}, False)


def dbrx() -> NamedModel:
    """DBRX: queries, keys and values clipped; experts in a row with their neurons."""
    names = {"wte.weight": ("vocabulary", "embedding")}
    for i in range(2):
        path = f"blocks.{i}"
        names |= {
            f"{path}.norm_attn_norm.norm_1.weight": ("embedding",),
            f"{path}.norm_attn_norm.attn.Wqkv.weight": ("op_size", "embedding"),
            f"{path}.norm_attn_norm.attn.out_proj.weight": (
                "embedding",
                "head_groups*query_heads*projection",
            ),
            f"{path}.norm_attn_norm.norm_2.weight": ("embedding",),
            f"{path}.ffn.router.layer.weight": ("experts", "embedding"),
            f"{path}.ffn.experts.mlp.w1": ("experts*neurons", "embedding"),
            f"{path}.ffn.experts.mlp.v1": ("experts*neurons", "embedding"),
            f"{path}.ffn.experts.mlp.w2": ("experts*neurons", "embedding"),
        }
    names |= {"norm_f.weight": ("embedding",), "lm_head.weight": ("vocabulary", "embedding")}

    def function(w, tokens):
        x = w["wte.weight"][tokens]
        sizes = [HEADS * PROJECTION, (HEADS + GROUPS) * PROJECTION]
        for i in range(2):
            path = f"blocks.{i}.norm_attn_norm"
            h = rms_norm(x, w[f"{path}.norm_1.weight"])
            fused = jnp.clip(linear(w, f"{path}.attn.Wqkv", h), -8, 8)
            q, k, v = jnp.split(fused, sizes, axis=-1)
            q, k, v = (split_heads(y, n) for y, n in ((q, HEADS), (k, GROUPS), (v, GROUPS)))
            k, v = (jnp.repeat(y, HEADS // GROUPS, axis=1) for y in (rotary_half(k), v))
            made = merge_heads(causal(rotary_half(q) @ k.swapaxes(-1, -2)) @ v)
            x = x + linear(w, f"{path}.attn.out_proj", made)
            h = rms_norm(x, w[f"{path}.norm_2.weight"]).reshape(-1, EMBEDDING)
            path = f"blocks.{i}.ffn"
            chances = jax.nn.softmax(linear(w, f"{path}.router.layer", h))
            best, chosen = jax.lax.top_k(chances, 2)
            mask = jax.nn.one_hot(chosen, EXPERTS) * best[..., None]
            out = jnp.zeros_like(h)
            w1, v1, w2 = (
                w[f"{path}.experts.mlp.{n}"].reshape(EXPERTS, NEURONS, EMBEDDING)
                for n in ("w1", "v1", "w2")
            )
            for expert in range(EXPERTS):
                hidden = jax.nn.silu(h @ w1[expert].T) * (h @ v1[expert].T)
                out = out + (hidden @ w2[expert]) * mask[:, :, expert].sum(1)[:, None]
            x = x + out.reshape(x.shape)
        return linear(w, "lm_head", rms_norm(x, w["norm_f.weight"]))

    weights = structs_of(names, op_size=(HEADS + 2 * GROUPS) * PROJECTION)
    words = {"op_size": "qkv_projection"}
    return NamedModel(function, weights, (TOKENS,), BATCH_SEQ, names, words)


def graphormer() -> NamedModel:
    """Atoms and degrees are looked up by inputs, and so is a bias by distance in the graph."""
    names = {
        "atom_encoder.weight": ("atoms", "embedding"),
        "in_degree_encoder.weight": ("in_degrees", "embedding"),
        "out_degree_encoder.weight": ("out_degrees", "embedding"),
        "graph_token.weight": (None, "embedding"),
        "spatial_pos_encoder.weight": ("distances", "heads"),
    }
    for i in range(5):
        path = f"layers.{i}"
        names |= biased_attention_names(f"{path}.self_attn") | fed_names(path)
        names |= norm_names(f"{path}.self_attn_layer_norm") | norm_names(f"{path}.final_layer_norm")
    names |= norm_names("layer_norm") | linear_names("lm_output", "targets", "embedding")

    def function(w, atoms, into, out, distances):
        x = w["atom_encoder.weight"][atoms]
        x = x + w["in_degree_encoder.weight"][into] + w["out_degree_encoder.weight"][out]
        token = jnp.broadcast_to(w["graph_token.weight"], (BATCH, 1, EMBEDDING))
        x = jnp.concatenate([token, x], axis=1)
        bias = w["spatial_pos_encoder.weight"][distances].transpose(0, 3, 1, 2)
        bias = jnp.pad(bias, ((0, 0), (0, 0), (1, 0), (1, 0)))
        for i in range(5):
            path = f"layers.{i}"
            h = norm(w, f"{path}.self_attn_layer_norm", x)
            q, k, v = (split_heads(linear(w, f"{path}.self_attn.{n}_proj", h)) for n in "qkv")
            shares = jax.nn.softmax(q @ k.swapaxes(-1, -2) / np.sqrt(PROJECTION) + bias, -1)
            x = x + linear(w, f"{path}.self_attn.out_proj", merge_heads(shares @ v))
            x = x + fed(w, path, norm(w, f"{path}.final_layer_norm", x))
        return linear(w, "lm_output", norm(w, "layer_norm", x)[:, 0])

    others = {path: axes for path, axes in names.items() if None not in axes}
    lengths = {"atoms": 32, "in_degrees": 8, "out_degrees": 8, "distances": 16, "targets": 3}
    weights = structs_of(others, **lengths) | {"graph_token.weight": struct(1, EMBEDDING)}
    nodes, pairs = ("batch", "nodes"), ("batch", "nodes", "other_nodes")
    distances = struct(BATCH, SEQ, SEQ, dtype=jnp.int32)
    axes = (nodes, nodes, nodes, pairs)
    words = {"targets": "outputs"}
    return NamedModel(function, weights, (TOKENS, TOKENS, TOKENS, distances), axes, names, words)


def esm() -> NamedModel:
    """ESM-2: contacts of residues by a regression on the attentions of all layers and heads."""
    names = {"embed_tokens.weight": ("vocabulary", "embedding")}
    for i in range(3):
        path = f"layers.{i}"
        names |= biased_attention_names(f"{path}.self_attn") | fed_names(path)
        names |= norm_names(f"{path}.self_attn_layer_norm") | norm_names(f"{path}.final_layer_norm")
    names |= {"contact_head.regression.weight": (None, "layers*heads")}
    names |= norm_names("emb_layer_norm_after") | linear_names("lm_head.dense", "head", "embedding")
    names |= norm_names("lm_head.layer_norm", "head")
    names |= {"lm_head.weight": ("vocabulary", "head"), "lm_head.bias": ("vocabulary",)}

    def function(w, tokens):
        x, seen = w["embed_tokens.weight"][tokens], []
        for i in range(3):
            path = f"layers.{i}"
            h = norm(w, f"{path}.self_attn_layer_norm", x)
            q, k, v = (split_heads(linear(w, f"{path}.self_attn.{n}_proj", h)) for n in "qkv")
            shares = jax.nn.softmax(rotary_half(q * 0.5) @ rotary_half(k).swapaxes(-1, -2), -1)
            seen.append(shares)
            x = x + linear(w, f"{path}.self_attn.out_proj", merge_heads(shares @ v))
            x = x + fed(w, path, norm(w, f"{path}.final_layer_norm", x))
        x = norm(w, "emb_layer_norm_after", x)
        maps = jnp.stack(seen, 1).reshape(BATCH, 3 * HEADS, SEQ, SEQ)
        maps = (maps + maps.swapaxes(-1, -2)).transpose(0, 2, 3, 1)
        contacts = maps @ w["contact_head.regression.weight"].T
        h = norm(w, "lm_head.layer_norm", jax.nn.gelu(linear(w, "lm_head.dense", x)))
        return h @ w["lm_head.weight"].T + w["lm_head.bias"], jax.nn.sigmoid(contacts[..., 0])

    others = {path: axes for path, axes in names.items() if None not in axes}
    weights = structs_of(others, head=EMBEDDING)
    weights |= {"contact_head.regression.weight": struct(1, 3 * HEADS)}
    return NamedModel(function, weights, (TOKENS,), BATCH_SEQ, names, {}, False)


FAMILIES = {
    "OPT, narrow tokens": opt,
    "BART": bart,
    "DBRX, experts in a row": dbrx,
    "Graphormer": graphormer,
}

FAMILIES_LEFT_OPEN = {
    "CodeGen, in parts": codegen,
    "ESM-2, contacts": esm,
}
