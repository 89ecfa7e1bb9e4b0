"""Transformers of pictures and films with the paths of published checkpoints."""

import jax
import jax.numpy as jnp
import numpy as np

from tests.choosing.named_models import (
    BATCH,
    EMBEDDING,
    HEADS,
    NEURONS,
    PROJECTION,
    SEQ,
    NamedModel,
    rms_norm,
    struct,
    structs_of,
)
from tests.choosing.named_models_of_families import (
    biased_attention,
    biased_attention_names,
    fed,
    fed_names,
)
from tests.choosing.transformer_parts import (
    INNER,
    attend,
    linear,
    linear_names,
    merge_heads,
    norm,
    norm_names,
    sinusoids,
    split_heads,
)


def timesformer() -> NamedModel:
    """Attention over frames at each place, then over places of each frame, as many as frames."""
    names = {"embed.weight": ("embedding", "pixels"), "position": ("places", "embedding")}
    names |= {"time": ("frames", "embedding")}
    block = {}
    for kind in ("temporal_attention", "attention"):
        block |= linear_names(f"{kind}.qkv", "qkv*heads*projection", "embedding")
        block |= linear_names(f"{kind}.dense", "embedding", INNER)
    block |= norm_names("temporal_layernorm") | norm_names("layernorm_before")
    block |= linear_names("temporal_dense", "embedding", "embedding")
    block |= norm_names("layernorm_after") | fed_names("mlp")
    for i in range(3):
        names |= {f"layer.{i}.{path}": axes for path, axes in block.items()}
    names |= norm_names("layernorm") | linear_names("classifier", "classes", "embedding")

    def attended(w, path, x):
        fused = linear(w, f"{path}.qkv", x).reshape(*x.shape[:2], 3, HEADS, PROJECTION)
        q, k, v = fused.transpose(2, 0, 3, 1, 4)
        return linear(w, f"{path}.dense", attend(q, k, v))

    def function(w, video):
        x = linear(w, "embed", video) + w["position"][None, None] + w["time"][None, :, None]
        rows = (BATCH * SEQ, SEQ, EMBEDDING)
        for i in range(3):
            path = f"layer.{i}"
            h = x.swapaxes(1, 2).reshape(rows)
            made = attended(
                w, f"{path}.temporal_attention", norm(w, f"{path}.temporal_layernorm", h)
            )
            made = linear(w, f"{path}.temporal_dense", made).reshape(x.shape).swapaxes(1, 2)
            x = x + made
            h = norm(w, f"{path}.layernorm_before", x.reshape(rows))
            x = x + attended(w, f"{path}.attention", h).reshape(x.shape)
            x = x + fed(w, f"{path}.mlp", norm(w, f"{path}.layernorm_after", x))
        return linear(w, "classifier", norm(w, "layernorm", x).mean((1, 2)))

    # The temporal dense layer reads what attention has made, and makes the embedding of it.
    for i in range(3):
        names[f"layer.{i}.temporal_dense.weight"] = ("embedding", "temporal")
        names[f"layer.{i}.temporal_attention.dense.weight"] = ("temporal", INNER)
        names[f"layer.{i}.temporal_attention.dense.bias"] = ("temporal",)
    lengths = {"pixels": 48, "places": SEQ, "frames": SEQ, "classes": 5, "temporal": EMBEDDING}
    weights = structs_of(names, **lengths)
    inputs = (struct(BATCH, SEQ, SEQ, 48),)
    axes = (("batch", "frames", "places", "pixels"),)
    return NamedModel(function, weights, inputs, axes, names, {"classes": "outputs"}, False)


def detr() -> NamedModel:
    """Places are added to queries and keys alone; as many learned queries are decoded."""
    names = linear_names("input_projection", "embedding", "channels")
    names |= {"query_position_embeddings.weight": ("queries", "embedding")}
    for part, kinds in (("encoder", ("self_attn",)), ("decoder", ("self_attn", "encoder_attn"))):
        for i in range(4):
            path = f"{part}.layers.{i}"
            for kind in kinds:
                names |= biased_attention_names(f"{path}.{kind}")
                names |= norm_names(f"{path}.{kind}_layer_norm")
            names |= fed_names(path) | norm_names(f"{path}.final_layer_norm")
    names |= norm_names("decoder.layernorm")
    names |= linear_names("class_labels_classifier", "classes", "embedding")
    for n, (into, out) in enumerate((("embedding", "box_0"), ("box_0", "box_1"), ("box_1", "box"))):
        names |= linear_names(f"bbox_predictor.layers.{n}", out, into)

    def function(w, features):
        x = linear(w, "input_projection", features.reshape(BATCH, SEQ, EMBEDDING))
        waves = sinusoids(jnp.arange(SEQ), EMBEDDING)
        for i in range(4):
            path = f"encoder.layers.{i}"
            made = biased_attention(w, f"{path}.self_attn", x, places=waves)
            x = norm(w, f"{path}.self_attn_layer_norm", x + made)
            x = norm(w, f"{path}.final_layer_norm", x + fed(w, path, x))
        asked = jnp.tile(w["query_position_embeddings.weight"], (BATCH, 1, 1))
        y = jnp.zeros_like(asked)
        for i in range(4):
            path = f"decoder.layers.{i}"
            made = biased_attention(w, f"{path}.self_attn", y, places=asked)
            y = norm(w, f"{path}.self_attn_layer_norm", y + made)
            own = f"{path}.encoder_attn"
            q, k = linear(w, f"{own}.q_proj", y + asked), linear(w, f"{own}.k_proj", x + waves)
            made = attend(*map(split_heads, (q, k, linear(w, f"{own}.v_proj", x))))
            y = norm(w, f"{own}_layer_norm", y + linear(w, f"{own}.out_proj", made))
            y = norm(w, f"{path}.final_layer_norm", y + fed(w, path, y))
        y = norm(w, "decoder.layernorm", y)
        box = y
        for n in range(3):
            box = linear(w, f"bbox_predictor.layers.{n}", jax.nn.relu(box) if n else box)
        return linear(w, "class_labels_classifier", y), jax.nn.sigmoid(box)

    # Two streams, the widths of which no program ties; their words are those of the paths.
    streams = {}
    for path, axes in names.items():
        part = "encoder" if path.startswith(("encoder", "input")) else "decoder"
        own = tuple(_of_stream(part, axis) for axis in axes)
        if "encoder_attn.k_proj.weight" in path or "encoder_attn.v_proj.weight" in path:
            own = (own[0], "encoder_embedding")
        streams[path] = own
    lengths = {"embedding": 16, "heads": HEADS, "projection": PROJECTION, "neurons": NEURONS}
    lengths = {
        f"{part}_{n}": size for part in ("encoder", "decoder") for n, size in lengths.items()
    }
    lengths |= dict.fromkeys(("channels", "box_0", "box_1"), EMBEDDING)
    weights = structs_of(streams, **lengths, queries=SEQ, classes=7, box=4)
    inputs = (struct(BATCH, 2, SEQ // 2, EMBEDDING),)
    axes = (("batch", "height", "width", "channels"),)
    words = {"classes": "outputs", "queries": "decoder_positions"}
    return NamedModel(function, weights, inputs, axes, streams, words)


def _of_stream(stream, axis):
    roles = ("embedding", "heads", "projection", "neurons")
    return "*".join(f"{stream}_{n}" if n in roles else n for n in axis.split("*"))


def flux() -> NamedModel:
    """Texts and pictures have weights of their own and attend together; then they have the same."""
    names = linear_names("img_in", "embedding", "channels")
    names |= linear_names("txt_in", "embedding", "texts")
    names |= linear_names("vector_in", "conditioning", "pooled")
    for i in range(3):
        for kind in ("img", "txt"):
            path = f"double_blocks.{i}.{kind}"
            names |= linear_names(f"{path}_mod.lin", "modulations*embedding", "conditioning")
            names |= linear_names(f"{path}_attn.qkv", "qkv*heads*projection", "embedding")
            names |= {f"{path}_attn.norm.query_norm.scale": ("projection",)}
            names |= {f"{path}_attn.norm.key_norm.scale": ("projection",)}
            names |= linear_names(f"{path}_attn.proj", "embedding", INNER)
            names |= linear_names(f"{path}_mlp.0", "neurons", "embedding")
            names |= linear_names(f"{path}_mlp.2", "embedding", "neurons")
    for i in range(2):
        path = f"single_blocks.{i}"
        names |= linear_names(f"{path}.modulation.lin", "three*embedding", "conditioning")
        names |= linear_names(f"{path}.linear1", "qkv_and_neurons", "embedding")
        names |= linear_names(f"{path}.linear2", "embedding", "inner_and_neurons")
    names |= linear_names("final_layer.linear", "patches", "embedding")

    def plain(x):
        centred = x - x.mean(-1, keepdims=True)
        return centred * jax.lax.rsqrt(jnp.square(centred).mean(-1, keepdims=True) + 1e-6)

    def changes(w, path, c, count):
        made = linear(w, path, jax.nn.silu(c))[:, None]
        return jnp.split(made, count, axis=-1)

    def qkv_of(w, path, x):
        fused = linear(w, f"{path}_attn.qkv", x).reshape(BATCH, -1, 3, HEADS, PROJECTION)
        q, k, v = fused.transpose(2, 0, 3, 1, 4)
        q = rms_norm(q, w[f"{path}_attn.norm.query_norm.scale"])
        return q, rms_norm(k, w[f"{path}_attn.norm.key_norm.scale"]), v

    def function(w, pictures, texts, pooled):
        img, txt = linear(w, "img_in", pictures), linear(w, "txt_in", texts)
        c = linear(w, "vector_in", pooled)
        for i in range(3):
            own = f"double_blocks.{i}"
            parts = {}
            for kind, x in (("txt", txt), ("img", img)):
                mod = changes(w, f"{own}.{kind}_mod.lin", c, 6)
                parts[kind] = mod, qkv_of(w, f"{own}.{kind}", (1 + mod[1]) * plain(x) + mod[0])
            q, k, v = (
                jnp.concatenate([first, second], axis=2)
                for first, second in zip(parts["txt"][1], parts["img"][1], strict=True)
            )
            made = attend(q, k, v)
            for kind, x, part in (("img", img, made[:, SEQ:]), ("txt", txt, made[:, :SEQ])):
                mod = parts[kind][0]
                x = x + mod[2] * linear(w, f"{own}.{kind}_attn.proj", part)
                h = linear(w, f"{own}.{kind}_mlp.0", (1 + mod[4]) * plain(x) + mod[3])
                x = x + mod[5] * linear(w, f"{own}.{kind}_mlp.2", jax.nn.gelu(h))
                img, txt = (x, txt) if kind == "img" else (img, x)
        x = jnp.concatenate([txt, img], axis=1)
        for i in range(2):
            path = f"single_blocks.{i}"
            shift, scale, gate = changes(w, f"{path}.modulation.lin", c, 3)
            fused = linear(w, f"{path}.linear1", (1 + scale) * plain(x) + shift)
            qkv, hidden = jnp.split(fused, [3 * EMBEDDING], axis=-1)
            q, k, v = qkv.reshape(BATCH, -1, 3, HEADS, PROJECTION).transpose(2, 0, 3, 1, 4)
            joined = jnp.concatenate([attend(q, k, v), jax.nn.gelu(hidden)], axis=-1)
            x = x + gate * linear(w, f"{path}.linear2", joined)
        return linear(w, "final_layer.linear", x[:, SEQ:])

    lengths = {"channels": 16, "texts": 16, "pooled": 16, "conditioning": 16, "modulations": 6}
    lengths |= {"three": 3, "qkv_and_neurons": 3 * 16 + 32, "inner_and_neurons": 16 + 32}
    weights = structs_of(names, **lengths, patches=12)
    inputs = (struct(BATCH, SEQ, 16), struct(BATCH, SEQ, 16), struct(BATCH, 16))
    axes = (("batch", "seq", "channels"), ("batch", "tokens", "texts"), ("batch", "pooled"))
    words = {"qkv_and_neurons": "qkv_neurons", "patches": "outputs"}
    return NamedModel(function, weights, inputs, axes, names, words, False)


def swin() -> NamedModel:
    """A stage of Swin: a bias of each pair of places in a window, by a table and its index."""
    block = {"relative_position_bias_table": ("offsets", "heads")}
    block |= linear_names("qkv", "qkv*heads*projection", "embedding") | fed_names("mlp")
    block |= linear_names("proj", "embedding", INNER) | norm_names("norm1") | norm_names("norm2")
    names = linear_names("patch_embed.proj", "embedding", "pixels")
    names |= {f"layers.0.blocks.{i}.{path}": a for i in range(3) for path, a in block.items()}
    names |= norm_names("norm") | linear_names("head", "classes", "embedding")
    rows, columns = np.divmod(np.arange(4), 2)
    index = (rows[:, None] - rows + 1) * 3 + columns[:, None] - columns + 1

    def function(w, patches):
        x = linear(w, "patch_embed.proj", patches)
        for i in range(3):
            path = f"layers.0.blocks.{i}"
            h = norm(w, f"{path}.norm1", x).reshape(BATCH, 2, 2, 2, 2, EMBEDDING)
            h = h.transpose(0, 1, 3, 2, 4, 5).reshape(-1, 4, EMBEDDING)
            fused = linear(w, f"{path}.qkv", h).reshape(-1, 4, 3, HEADS, PROJECTION)
            q, k, v = fused.transpose(2, 0, 3, 1, 4)
            bias = w[f"{path}.relative_position_bias_table"][index.reshape(-1)]
            bias = bias.reshape(4, 4, HEADS).transpose(2, 0, 1)
            shares = jax.nn.softmax(q @ k.swapaxes(-1, -2) * 0.5 + bias, -1)
            made = linear(w, f"{path}.proj", merge_heads(shares @ v))
            made = made.reshape(BATCH, 2, 2, 2, 2, EMBEDDING).transpose(0, 1, 3, 2, 4, 5)
            x = x + made.reshape(x.shape)
            x = x + fed(w, f"{path}.mlp", norm(w, f"{path}.norm2", x))
        return linear(w, "head", norm(w, "norm", x).mean((1, 2)))

    weights = structs_of(names, pixels=EMBEDDING, offsets=9, classes=10)
    inputs, axes = (struct(BATCH, 4, 4, EMBEDDING),), (("batch", "height", "width", "pixels"),)
    return NamedModel(function, weights, inputs, axes, names, {"classes": "outputs"}, False)


FILMS = {"DETR": detr}

FILMS_LEFT_OPEN = {
    "TimeSformer": timesformer,
    "Flux, two streams that join": flux,
    "Swin, one stage": swin,
}
