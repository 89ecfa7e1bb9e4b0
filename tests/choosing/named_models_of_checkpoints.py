"""Transformers with the weights, and the paths, of published checkpoints."""

import jax
import jax.numpy as jnp
import numpy as np

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
    struct,
    structs_of,
)
from tests.choosing.transformer_parts import (
    INNER,
    gated,
    gated_names,
    grouped_attention,
    grouped_names,
    linear,
    linear_names,
    merge_heads,
    norm,
    norm_names,
    split_heads,
)

BUCKETS = 8


def _t5_buckets(queries, keys, is_bidirectional):
    """The bucket of each pair of places: near ones have their own, far ones share by logarithm."""
    distance = jnp.arange(keys)[None] - jnp.arange(queries)[:, None]
    buckets, offset = BUCKETS, 0
    if is_bidirectional:
        buckets //= 2
        offset = (distance > 0).astype(jnp.int32) * buckets
        distance = jnp.abs(distance)
    else:
        distance = -jnp.minimum(distance, 0)
    exact = buckets // 2
    far = exact + (jnp.log(jnp.maximum(distance, 1) / exact) * (buckets - exact)).astype(jnp.int32)
    far = jnp.minimum(far, buckets - 1)
    return offset + jnp.where(distance < exact, distance, far)


def t5() -> NamedModel:
    """T5 1.1: encoder and decoder share a table of tokens and have a table of buckets each."""

    def attention_names(path):
        names = {f"{path}.{name}.weight": (INNER, "embedding") for name in "qkv"}
        return names | {f"{path}.o.weight": ("embedding", INNER)}

    names = {"shared.weight": ("vocabulary", "embedding")}
    for part, kinds in (
        ("encoder", ("SelfAttention", "DenseReluDense")),
        ("decoder", ("SelfAttention", "EncDecAttention", "DenseReluDense")),
    ):
        table = f"{part}.block.0.layer.0.SelfAttention.relative_attention_bias.weight"
        names[table] = ("buckets", "heads")
        for i in range(LAYERS):
            for number, kind in enumerate(kinds):
                layer = f"{part}.block.{i}.layer.{number}"
                names[f"{layer}.layer_norm.weight"] = ("embedding",)
                if kind == "DenseReluDense":
                    names[f"{layer}.{kind}.wi_0.weight"] = ("neurons", "embedding")
                    names[f"{layer}.{kind}.wi_1.weight"] = ("neurons", "embedding")
                    names[f"{layer}.{kind}.wo.weight"] = ("embedding", "neurons")
                else:
                    names |= attention_names(f"{layer}.{kind}")
        names[f"{part}.final_layer_norm.weight"] = ("embedding",)
    names["lm_head.weight"] = ("vocabulary", "embedding")

    def attended(w, path, x, context, bias, is_causal=False):
        q, k, v = (
            (y @ w[f"{path}.{name}.weight"].T)
            .reshape(BATCH, -1, HEADS, PROJECTION)
            .transpose(0, 2, 1, 3)
            for name, y in zip("qkv", (x, context, context), strict=True)
        )
        scores = q @ k.transpose(0, 1, 3, 2)
        if is_causal:
            bias = bias + jnp.where(jnp.tril(jnp.ones((SEQ, SEQ))) > 0, 0.0, -1e9)[None, None]
        shares = jax.nn.softmax(scores + bias, axis=-1)
        made = (shares @ v).transpose(0, 2, 1, 3).reshape(BATCH, -1, HEADS * PROJECTION)
        return made @ w[f"{path}.o.weight"].T

    def fed(w, path, x):
        h = rms_norm(x, w[f"{path}.layer_norm.weight"])
        path = f"{path}.DenseReluDense"
        h = jax.nn.gelu(h @ w[f"{path}.wi_0.weight"].T) * (h @ w[f"{path}.wi_1.weight"].T)
        return x + h @ w[f"{path}.wo.weight"].T

    def stack(w, part, x, context=None):
        table = w[f"{part}.block.0.layer.0.SelfAttention.relative_attention_bias.weight"]
        bias = table[_t5_buckets(SEQ, SEQ, context is None)].transpose(2, 0, 1)[None]
        for i in range(LAYERS):
            block = f"{part}.block.{i}.layer"
            h = rms_norm(x, w[f"{block}.0.layer_norm.weight"])
            x = x + attended(w, f"{block}.0.SelfAttention", h, h, bias, context is not None)
            if context is not None:
                h = rms_norm(x, w[f"{block}.1.layer_norm.weight"])
                x = x + attended(w, f"{block}.1.EncDecAttention", h, context, 0.0)
            x = fed(w, f"{block}.{1 if context is None else 2}", x)
        return rms_norm(x, w[f"{part}.final_layer_norm.weight"])

    def function(w, sources, targets):
        encoded = stack(w, "encoder", w["shared.weight"][sources])
        x = stack(w, "decoder", w["shared.weight"][targets], encoded)
        return x @ w["lm_head.weight"].T

    inputs = (("batch", "seq"), ("batch", "target_seq"))
    weights = structs_of(names, buckets=BUCKETS)
    return NamedModel(function, weights, (TOKENS, TOKENS), inputs, names)


def roberta(layers: int = 3) -> NamedModel:
    """Positions are counted along tokens that are no padding; norms behind; a head that is tied.

    The head's own dense layer is from the embedding to the embedding; a program says so of both.
    """
    block = {}
    for name in ("query", "key", "value"):
        block |= linear_names(f"attention.self.{name}", INNER, "embedding")
    block |= linear_names("attention.output.dense", "embedding", INNER)
    block |= norm_names("attention.output.LayerNorm") | norm_names("output.LayerNorm")
    block |= linear_names("intermediate.dense", "neurons", "embedding")
    block |= linear_names("output.dense", "embedding", "neurons")
    names = {
        "roberta.embeddings.word_embeddings.weight": ("vocabulary", "embedding"),
        "roberta.embeddings.position_embeddings.weight": ("positions", "embedding"),
        "roberta.embeddings.token_type_embeddings.weight": (None, "embedding"),
    }
    names |= norm_names("roberta.embeddings.LayerNorm")
    for i in range(layers):
        names |= {f"roberta.encoder.layer.{i}.{path}": axes for path, axes in block.items()}
    names |= linear_names("lm_head.dense", "embedding", "embedding")
    names |= norm_names("lm_head.layer_norm") | {"lm_head.bias": ("vocabulary",)}

    def function(w, tokens):
        table = w["roberta.embeddings.word_embeddings.weight"]
        is_token = (tokens != 1).astype(jnp.int32)
        places = jnp.cumsum(is_token, axis=1) * is_token + 1
        x = table[tokens] + w["roberta.embeddings.position_embeddings.weight"][places]
        x = x + w["roberta.embeddings.token_type_embeddings.weight"][jnp.zeros_like(tokens)]
        x = norm(w, "roberta.embeddings.LayerNorm", x)
        mask = jnp.where(is_token[:, None, None] > 0, 0.0, -1e9)
        for i in range(layers):
            path = f"roberta.encoder.layer.{i}"
            q, k, v = (
                linear(w, f"{path}.attention.self.{name}", x)
                .reshape(BATCH, SEQ, HEADS, PROJECTION)
                .transpose(0, 2, 1, 3)
                for name in ("query", "key", "value")
            )
            scores = q @ k.swapaxes(-1, -2) / np.sqrt(PROJECTION) + mask
            made = jax.nn.softmax(scores, -1) @ v
            made = made.transpose(0, 2, 1, 3).reshape(BATCH, SEQ, -1)
            made = linear(w, f"{path}.attention.output.dense", made)
            x = norm(w, f"{path}.attention.output.LayerNorm", made + x)
            made = jax.nn.gelu(linear(w, f"{path}.intermediate.dense", x), approximate=False)
            made = linear(w, f"{path}.output.dense", made)
            x = norm(w, f"{path}.output.LayerNorm", made + x)
        x = norm(w, "lm_head.layer_norm", jax.nn.gelu(linear(w, "lm_head.dense", x)))
        return x @ table.T + w["lm_head.bias"]

    lengths = structs_of({path: axes for path, axes in names.items() if None not in axes})
    types = {"roberta.embeddings.token_type_embeddings.weight": struct(1, EMBEDDING)}
    return NamedModel(function, lengths | types, (TOKENS,), BATCH_SEQ, names)


def deberta(layers: int = 3) -> NamedModel:
    """DeBERTa 2: keys and queries of relative places too, made by the weights of the content's."""
    block = {}
    for name in ("query_proj", "key_proj", "value_proj"):
        block |= linear_names(f"attention.self.{name}", INNER, "embedding")
    block |= linear_names("attention.output.dense", "embedding", INNER)
    block |= norm_names("attention.output.LayerNorm") | norm_names("output.LayerNorm")
    block |= linear_names("intermediate.dense", "neurons", "embedding")
    block |= linear_names("output.dense", "embedding", "neurons")
    names = {"embeddings.word_embeddings.weight": ("vocabulary", "embedding")}
    names |= norm_names("embeddings.LayerNorm")
    for i in range(layers):
        names |= {f"encoder.layer.{i}.{path}": axes for path, axes in block.items()}
    names |= {"encoder.rel_embeddings.weight": ("distances", "embedding")}
    names |= norm_names("encoder.LayerNorm")

    def function(w, tokens):
        x = norm(w, "embeddings.LayerNorm", w["embeddings.word_embeddings.weight"][tokens])
        relative = norm(w, "encoder.LayerNorm", w["encoder.rel_embeddings.weight"])
        distance = jnp.arange(SEQ)[:, None] - jnp.arange(SEQ)[None]
        to_place = jnp.clip(distance + SEQ, 0, 2 * SEQ - 1)
        from_place = jnp.clip(-distance + SEQ, 0, 2 * SEQ - 1)
        shape = (BATCH, HEADS, SEQ, SEQ)
        for i in range(layers):
            own = f"encoder.layer.{i}"
            at = f"{own}.attention.self"
            q, k, v = (split_heads(linear(w, f"{at}.{n}_proj", x)) for n in _DEBERTA)
            places_q, places_k = (
                linear(w, f"{at}.{n}_proj", relative)
                .reshape(2 * SEQ, HEADS, PROJECTION)
                .transpose(1, 0, 2)
                for n in _DEBERTA[:2]
            )
            scores = q @ k.swapaxes(-1, -2)
            content = jnp.einsum("bhqd,hpd->bhqp", q, places_k)
            scores += jnp.take_along_axis(content, jnp.broadcast_to(to_place, shape), -1)
            content = jnp.einsum("bhkd,hpd->bhkp", k, places_q)
            content = jnp.take_along_axis(content, jnp.broadcast_to(from_place, shape), -1)
            scores += content.swapaxes(-1, -2)
            shares = jax.nn.softmax(scores / np.sqrt(3 * PROJECTION), -1)
            made = linear(w, f"{own}.attention.output.dense", merge_heads(shares @ v))
            x = norm(w, f"{own}.attention.output.LayerNorm", x + made)
            made = jax.nn.gelu(linear(w, f"{own}.intermediate.dense", x))
            x = norm(w, f"{own}.output.LayerNorm", x + linear(w, f"{own}.output.dense", made))
        return x

    return NamedModel(function, structs_of(names, distances=2 * SEQ), (TOKENS,), BATCH_SEQ, names)


_DEBERTA = ("query", "key", "value")


def falcon_with_one_key() -> NamedModel:
    """Falcon 7B: queries of all heads, one key and one value from one weight; parallel blocks."""
    names = {"transformer.word_embeddings.weight": ("vocabulary", "embedding")}
    for i in range(LAYERS):
        path = f"transformer.h.{i}"
        names |= norm_names(f"{path}.input_layernorm") | {
            f"{path}.self_attention.query_key_value.weight": ("qkv*projection", "embedding"),
            f"{path}.self_attention.dense.weight": ("embedding", INNER),
            f"{path}.mlp.dense_h_to_4h.weight": ("neurons", "embedding"),
            f"{path}.mlp.dense_4h_to_h.weight": ("embedding", "neurons"),
        }
    names |= norm_names("transformer.ln_f") | {"lm_head.weight": ("vocabulary", "embedding")}

    def function(w, tokens):
        x = w["transformer.word_embeddings.weight"][tokens]
        for i in range(LAYERS):
            path = f"transformer.h.{i}"
            h = norm(w, f"{path}.input_layernorm", x)
            fused = linear(w, f"{path}.self_attention.query_key_value", h)
            fused = fused.reshape(BATCH, SEQ, HEADS + 2, PROJECTION)
            q, k, v = fused[..., :-2, :], fused[..., -2:-1, :], fused[..., -1:, :]
            q = rotary_half(q.transpose(0, 2, 1, 3).reshape(-1, SEQ, PROJECTION))
            k = rotary_half(k.transpose(0, 2, 1, 3).reshape(-1, SEQ, PROJECTION))
            q = q.reshape(BATCH, HEADS, SEQ, PROJECTION)
            k, v = k.reshape(BATCH, 1, SEQ, PROJECTION), v.transpose(0, 2, 1, 3)
            made = merge_heads(causal(q @ k.swapaxes(-1, -2)) @ v)
            hidden = jax.nn.gelu(linear(w, f"{path}.mlp.dense_h_to_4h", h))
            x = x + linear(w, f"{path}.self_attention.dense", made)
            x = x + linear(w, f"{path}.mlp.dense_4h_to_h", hidden)
        return linear(w, "lm_head", norm(w, "transformer.ln_f", x))

    weights = structs_of(names, qkv=HEADS + 2)
    return NamedModel(function, weights, (TOKENS,), BATCH_SEQ, names, {"heads": "query_heads"})


def mpt() -> NamedModel:
    """Queries, keys and values from one weight and clipped, biased by distance, without biases."""
    names = {"transformer.wte.weight": ("vocabulary", "embedding")}
    for i in range(LAYERS):
        path = f"transformer.blocks.{i}"
        names |= {
            f"{path}.norm_1.weight": ("embedding",),
            f"{path}.attn.Wqkv.weight": ("qkv*heads*projection", "embedding"),
            f"{path}.attn.out_proj.weight": ("embedding", INNER),
            f"{path}.norm_2.weight": ("embedding",),
            f"{path}.ffn.up_proj.weight": ("neurons", "embedding"),
            f"{path}.ffn.down_proj.weight": ("embedding", "neurons"),
        }
    names["transformer.norm_f.weight"] = ("embedding",)

    def normed(w, path, x):
        centred = x.astype(jnp.float32) - x.mean(-1, keepdims=True)
        made = centred / jnp.sqrt(jnp.mean(jnp.square(centred), -1, keepdims=True) + 1e-5)
        return (made * w[f"{path}.weight"]).astype(x.dtype)

    def function(w, tokens):
        x = w["transformer.wte.weight"][tokens]
        slopes = 2.0 ** -jnp.arange(1, HEADS + 1)
        bias = slopes[:, None, None] * (jnp.arange(1 - SEQ, 1)[None, None])
        for i in range(LAYERS):
            path = f"transformer.blocks.{i}"
            fused = linear(w, f"{path}.attn.Wqkv", normed(w, f"{path}.norm_1", x))
            q, k, v = jnp.split(jnp.clip(fused, -8.0, 8.0), 3, axis=2)
            q, k, v = (y.reshape(BATCH, SEQ, HEADS, PROJECTION).swapaxes(1, 2) for y in (q, k, v))
            scores = jnp.matmul(q, jnp.moveaxis(k, -1, -2)) / PROJECTION**0.5 + bias
            made = jnp.matmul(causal(scores), v).swapaxes(1, 2).reshape(BATCH, SEQ, -1)
            x = x + linear(w, f"{path}.attn.out_proj", made)
            h = linear(w, f"{path}.ffn.up_proj", normed(w, f"{path}.norm_2", x))
            x = x + linear(w, f"{path}.ffn.down_proj", jax.nn.gelu(h, approximate=False))
        return normed(w, "transformer.norm_f", x) @ w["transformer.wte.weight"].T

    return NamedModel(function, structs_of(names), (TOKENS,), BATCH_SEQ, names)


def starcoder() -> NamedModel:
    """GPT-BigCode: one key and one value behind the queries; heads in a row with the positions."""
    names = {
        "transformer.wte.weight": ("vocabulary", "embedding"),
        "transformer.wpe.weight": ("positions", "embedding"),
    }
    for i in range(LAYERS):
        path = f"transformer.h.{i}"
        names |= norm_names(f"{path}.ln_1") | norm_names(f"{path}.ln_2")
        names |= linear_names(f"{path}.attn.c_attn", "op_size", "embedding")
        names |= linear_names(f"{path}.attn.c_proj", "embedding", INNER)
        names |= linear_names(f"{path}.mlp.c_fc", "neurons", "embedding")
        names |= linear_names(f"{path}.mlp.c_proj", "embedding", "neurons")
    names |= norm_names("transformer.ln_f")

    def function(w, tokens):
        x = w["transformer.wte.weight"][tokens] + w["transformer.wpe.weight"][jnp.arange(SEQ)]
        mask = jnp.tril(jnp.ones((SEQ, SEQ), bool))[None, :, None]
        for i in range(LAYERS):
            path = f"transformer.h.{i}"
            fused = linear(w, f"{path}.attn.c_attn", norm(w, f"{path}.ln_1", x))
            q, kv = jnp.split(fused, [HEADS * PROJECTION], axis=2)
            k, v = jnp.split(kv, 2, axis=-1)
            q = q.reshape(BATCH, SEQ * HEADS, PROJECTION)
            scores = (q @ k.swapaxes(-1, -2)).reshape(BATCH, SEQ, HEADS, SEQ) * PROJECTION**-0.5
            shares = jax.nn.softmax(jnp.where(mask, scores, -1e9), axis=-1)
            made = shares.reshape(BATCH, SEQ * HEADS, SEQ) @ v
            made = made.reshape(BATCH, SEQ, HEADS * PROJECTION)
            x = x + linear(w, f"{path}.attn.c_proj", made)
            h = jax.nn.gelu(linear(w, f"{path}.mlp.c_fc", norm(w, f"{path}.ln_2", x)))
            x = x + linear(w, f"{path}.mlp.c_proj", h)
        return norm(w, "transformer.ln_f", x) @ w["transformer.wte.weight"].T

    weights = structs_of(names, op_size=(HEADS + 2) * PROJECTION)
    words = {"op_size": "qkv_projection", "heads": "query_heads"}
    return NamedModel(function, weights, (TOKENS,), BATCH_SEQ, names, words)


def qwen_experts() -> NamedModel:
    """Qwen 3 with experts: queries and keys normed by head; gates in a row with what they gate."""
    names = {"model.embed_tokens.weight": ("vocabulary", "embedding")}
    for i in range(LAYERS):
        path = f"model.layers.{i}"
        names |= {f"{path}.input_layernorm.weight": ("embedding",)}
        names |= grouped_names(f"{path}.self_attn")
        names |= {f"{path}.self_attn.{name}_norm.weight": ("projection",) for name in "qk"}
        names |= {
            f"{path}.post_attention_layernorm.weight": ("embedding",),
            f"{path}.mlp.gate.weight": ("experts", "embedding"),
            f"{path}.mlp.experts.gate_up_proj": ("experts", "gate_up*neurons", "embedding"),
            f"{path}.mlp.experts.down_proj": ("experts", "embedding", "neurons"),
        }
    names |= {"model.norm.weight": ("embedding",), "lm_head.weight": ("vocabulary", "embedding")}

    def of_expert(gate_up, down, x, share):
        gate, up = jnp.split(x @ gate_up.T, 2, axis=-1)
        return (jax.nn.silu(gate) * up) @ down.T * share[:, None]

    def function(w, tokens):
        x = w["model.embed_tokens.weight"][tokens]
        for i in range(LAYERS):
            path = f"model.layers.{i}"
            h = rms_norm(x, w[f"{path}.input_layernorm.weight"])

            def normed(q, k, path=path):
                return (
                    rms_norm(
                        y.reshape(BATCH, SEQ, -1, PROJECTION),
                        w[f"{path}.self_attn.{name}_norm.weight"],
                    ).reshape(y.shape)
                    for name, y in (("q", q), ("k", k))
                )

            x = x + grouped_attention(w, f"{path}.self_attn", h, normed)
            h = rms_norm(x, w[f"{path}.post_attention_layernorm.weight"]).reshape(-1, EMBEDDING)
            chances = jax.nn.softmax(h @ w[f"{path}.mlp.gate.weight"].T, axis=-1)
            best, chosen = jax.lax.top_k(chances, 2)
            best = best / best.sum(-1, keepdims=True)
            shares = jnp.zeros_like(chances)
            shares = shares.at[jnp.arange(BATCH * SEQ)[:, None], chosen].set(best)
            made = jax.vmap(of_expert, in_axes=(0, 0, None, 1))(
                w[f"{path}.mlp.experts.gate_up_proj"],
                w[f"{path}.mlp.experts.down_proj"],
                h,
                shares,
            )
            x = x + made.sum(0).reshape(x.shape)
        return rms_norm(x, w["model.norm.weight"]) @ w["lm_head.weight"].T

    weights = structs_of(names, gate_up=2)
    return NamedModel(function, weights, (TOKENS,), BATCH_SEQ, names)


def llava(layers: int = 8) -> NamedModel:
    """Features of images go through an MLP of two layers, in front of the tokens."""
    names = {"language_model.model.embed_tokens.weight": ("vocabulary", "embedding")}
    for i in range(layers):
        path = f"language_model.model.layers.{i}"
        names |= {f"{path}.input_layernorm.weight": ("embedding",)}
        names |= grouped_names(f"{path}.self_attn") | gated_names(f"{path}.mlp")
        names |= {f"{path}.post_attention_layernorm.weight": ("embedding",)}
    names |= {"language_model.model.norm.weight": ("embedding",)}
    names |= {"language_model.lm_head.weight": ("vocabulary", "embedding")}
    names |= linear_names("multi_modal_projector.linear_1", "projector", "vision")
    names |= linear_names("multi_modal_projector.linear_2", "embedding", "projector")

    def attended(w, path, x):
        shape = (BATCH, 2 * SEQ, -1, PROJECTION)
        q, k, v = (linear(w, f"{path}.{name}", x).reshape(shape) for name in "qkv")
        q, k = (rotary_half(y.transpose(0, 2, 1, 3)).transpose(0, 2, 1, 3) for y in (q, k))
        made = jax.nn.dot_product_attention(q, k, v, is_causal=True, implementation="xla")
        return linear(w, f"{path}.o", made.reshape(x.shape))

    def function(w, tokens, features):
        seen = jax.nn.gelu(linear(w, "multi_modal_projector.linear_1", features))
        seen = linear(w, "multi_modal_projector.linear_2", seen)
        x = w["language_model.model.embed_tokens.weight"][tokens]
        x = jnp.concatenate([seen, x], axis=1)
        for i in range(layers):
            path = f"language_model.model.layers.{i}"
            h = rms_norm(x, w[f"{path}.input_layernorm.weight"])
            x = x + attended(w, f"{path}.self_attn", h)
            h = rms_norm(x, w[f"{path}.post_attention_layernorm.weight"])
            x = x + gated(w, f"{path}.mlp", h)
        x = rms_norm(x, w["language_model.model.norm.weight"])[:, SEQ:]
        return linear(w, "language_model.lm_head", x)

    weights = structs_of(names, projector=EMBEDDING, vision=EMBEDDING)
    inputs = (TOKENS, struct(BATCH, SEQ, EMBEDDING))
    axes = (("batch", "seq"), ("batch", "patches", "vision"))
    return NamedModel(function, weights, inputs, axes, names)


CHECKPOINTS = {
    "T5 1.1, tables of buckets": t5,
    "RoBERTa, places counted along tokens": roberta,
    "DeBERTa, disentangled": deberta,
    "Falcon 7B, one key": falcon_with_one_key,
    "MPT, clipped": mpt,
    "StarCoder, heads beside positions": starcoder,
    "Qwen 3, experts": qwen_experts,
    "LLaVA": llava,
}
