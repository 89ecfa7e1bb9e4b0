"""Models of pictures, speech and captions: conditioned, convolved, biased along two directions."""

import jax
import jax.numpy as jnp

from tests.choosing.named_models import (
    BATCH,
    EMBEDDING,
    HEADS,
    LAYERS,
    PROJECTION,
    SEQ,
    TOKENS,
    VOCABULARY,
    NamedModel,
    struct,
    structs_of,
)
from tests.choosing.transformer_parts import (
    INNER,
    attend,
    attention,
    attention_names,
    linear,
    linear_names,
    merge_heads,
    mlp,
    mlp_names,
    norm,
    norm_names,
    sinusoids,
    split_heads,
)


def _at(path, names):
    return {f"{path}.{name}": axes for name, axes in names.items()}


def _structs(names, taps, **lengths):
    """Structs of weights some of whose dimensions have no names but lengths."""
    named = {path: axes for path, axes in names.items() if path not in taps}
    return structs_of(named, **lengths) | {path: struct(*shape) for path, shape in taps.items()}


def _plain(x):
    return (x - x.mean(-1, keepdims=True)) * jax.lax.rsqrt(x.var(-1, keepdims=True) + 1e-6)


def one_conditioning(layers: int = 4) -> NamedModel:
    """PixArt: one weight makes scales and shifts for all blocks, each adds a table of its own.

    Captions, of another width, are projected by an MLP and attended to.
    """
    names = linear_names("x_embedder", "embedding", "pixels") | {
        "final.scale_shift_table": ("end_modulations", "embedding"),
        **linear_names("t_embedder.0", "time_hidden", "waves"),
        **linear_names("t_embedder.2", "conditioning", "time_hidden"),
        **linear_names("t_block.1", "modulations*embedding", "conditioning"),
        **linear_names("y_embedder.fc1", "caption_hidden", "caption_width"),
        **linear_names("y_embedder.fc2", "captions", "caption_hidden"),
        **linear_names("final.linear", "made_pixels", "embedding"),
    }
    for i in range(layers):
        path = f"blocks.{i}"
        names |= {f"{path}.scale_shift_table": ("modulations", "embedding")}
        names |= linear_names(f"{path}.attn.qkv", "qkv*heads*projection", "embedding")
        names |= linear_names(f"{path}.attn.proj", "embedding", INNER)
        names |= linear_names(f"{path}.cross_attn.q_linear", INNER, "embedding")
        names |= linear_names(f"{path}.cross_attn.kv_linear", "kv*heads*projection", "captions")
        names |= linear_names(f"{path}.cross_attn.proj", "embedding", INNER)
        names |= mlp_names(f"{path}.mlp", has_bias=True)

    def attended(w, path, x):
        fused = linear(w, f"{path}.qkv", x).reshape(BATCH, -1, 3, HEADS, PROJECTION)
        q, k, v = fused.transpose(2, 0, 3, 1, 4)
        return linear(w, f"{path}.proj", attend(q, k, v))

    def crossed(w, path, x, y):
        q = linear(w, f"{path}.q_linear", x).reshape(BATCH, -1, HEADS, PROJECTION)
        k, v = (
            linear(w, f"{path}.kv_linear", y)
            .reshape(BATCH, -1, 2, HEADS, PROJECTION)
            .swapaxes(1, 2)
            .swapaxes(0, 1)
        )
        shares = jax.nn.softmax(jnp.einsum("bqhd,bkhd->bhqk", q, k) * 0.5, -1)
        made = jnp.einsum("bhqk,bkhd->bqhd", shares, v).reshape(x.shape)
        return linear(w, f"{path}.proj", made)

    def function(w, patches, time, captions):
        x = linear(w, "x_embedder", patches) + sinusoids(jnp.arange(SEQ), EMBEDDING)
        t = jax.nn.silu(linear(w, "t_embedder.0", sinusoids(time, 8)))
        t = linear(w, "t_embedder.2", t)
        given = linear(w, "t_block.1", jax.nn.silu(t)).reshape(BATCH, 6, EMBEDDING)
        y = linear(w, "y_embedder.fc2", jax.nn.gelu(linear(w, "y_embedder.fc1", captions)))
        for i in range(layers):
            path = f"blocks.{i}"
            changes = w[f"{path}.scale_shift_table"][None] + given
            shift_a, scale_a, gate_a, shift_m, scale_m, gate_m = jnp.split(changes, 6, axis=1)
            h = _plain(x) * (1 + scale_a) + shift_a
            x = x + gate_a * attended(w, f"{path}.attn", h)
            x = x + crossed(w, f"{path}.cross_attn", x, y)
            x = x + gate_m * mlp(w, f"{path}.mlp", _plain(x) * (1 + scale_m) + shift_m)
        shift, scale = jnp.split(w["final.scale_shift_table"][None] + given[:, :1], 2, axis=1)
        return linear(w, "final.linear", _plain(x) * (1 + scale) + shift)

    lengths = {"pixels": 12, "made_pixels": 12, "waves": 8, "conditioning": EMBEDDING}
    lengths |= {"time_hidden": EMBEDDING, "caption_width": EMBEDDING, "captions": EMBEDDING}
    lengths |= {"caption_hidden": EMBEDDING, "modulations": 6, "end_modulations": 2, "kv": 2}
    inputs = (struct(BATCH, SEQ, 12), struct(BATCH), struct(BATCH, 6, EMBEDDING))
    axes = (("batch", "seq", "pixels"), ("batch",), ("batch", "words", "caption_width"))
    words = {"made_pixels": "outputs"}
    return NamedModel(function, structs_of(names, **lengths), inputs, axes, names, words)


def class_attention(layers: int = 4) -> NamedModel:
    """CaiT: a class token comes behind the blocks of patches, and alone asks all others there.

    Each branch has a scale per feature.
    """
    names = {"cls_token": (None, None, "embedding"), "pos_embed": (None, "positions", "embedding")}
    names |= linear_names("patch_embed.proj", "embedding", "pixels") | norm_names("norm")
    names |= linear_names("head", "classes", "embedding")
    branches = norm_names("norm1") | norm_names("norm2") | mlp_names("mlp", has_bias=True)
    branches |= {"gamma_1": ("embedding",), "gamma_2": ("embedding",)}
    for i in range(layers):
        names |= _at(f"blocks.{i}", branches | attention_names("attn", has_bias=True))
    for i in range(2):
        names |= _at(f"blocks_token_only.{i}", branches | attention_names("attn", has_bias=True))

    def block(w, path, x):
        h = norm(w, f"{path}.norm1", x)
        x = x + w[f"{path}.gamma_1"] * attention(w, f"{path}.attn", h)
        return x + w[f"{path}.gamma_2"] * mlp(w, f"{path}.mlp", norm(w, f"{path}.norm2", x))

    def only_token(w, path, token, x):
        joined = norm(w, f"{path}.norm1", jnp.concatenate([token, x], 1))
        made = attention(w, f"{path}.attn", joined[:, :1], joined)
        token = token + w[f"{path}.gamma_1"] * made
        made = mlp(w, f"{path}.mlp", norm(w, f"{path}.norm2", token))
        return token + w[f"{path}.gamma_2"] * made

    def function(w, patches):
        x = linear(w, "patch_embed.proj", patches) + w["pos_embed"]
        for i in range(layers):
            x = block(w, f"blocks.{i}", x)
        token = jnp.tile(w["cls_token"], (BATCH, 1, 1))
        for i in range(2):
            token = only_token(w, f"blocks_token_only.{i}", token, x)
        joined = norm(w, "norm", jnp.concatenate([token, x], 1))
        return linear(w, "head", joined[:, 0])

    taps = {"cls_token": (1, 1, EMBEDDING), "pos_embed": (1, SEQ, EMBEDDING)}
    weights = _structs(names, taps, pixels=12, classes=10)
    inputs, axes = (struct(BATCH, SEQ, 12),), (("batch", "seq", "pixels"),)
    return NamedModel(function, weights, inputs, axes, names, {"classes": "outputs"})


def conformer(layers: int = 3) -> NamedModel:
    """Half an MLP before attention and half behind; between them a gated depthwise convolution.

    A strided convolution of spectra begins it, and batch norms have running figures.
    """
    names = {"stem.conv": (None, "mels", "embedding"), "stem.bias": ("embedding",)}
    taps = {"stem.conv": (3, 20, EMBEDDING)}
    names |= linear_names("ctc", "letters", "embedding")
    for i in range(layers):
        path = f"layers.{i}"
        for name in ("ffn1", "ffn2"):
            names |= _at(f"{path}.{name}", norm_names("norm") | mlp_names("mlp", has_bias=True))
        names |= _at(f"{path}.mhsa", norm_names("norm") | attention_names("attn", has_bias=True))
        names |= norm_names(f"{path}.conv.norm") | norm_names(f"{path}.final_norm")
        names |= linear_names(f"{path}.conv.pointwise1", "gate_up*channels", "embedding")
        names |= {f"{path}.conv.depthwise": (None, None, "channels")}
        taps |= {f"{path}.conv.depthwise": (5, 1, EMBEDDING)}
        for name in ("scale", "bias", "mean", "var"):
            names[f"{path}.conv.batch_norm.{name}"] = ("channels",)
        names |= linear_names(f"{path}.conv.pointwise2", "embedding", "channels")

    def convolved(w, path, x):
        gate, up = jnp.split(linear(w, f"{path}.pointwise1", norm(w, f"{path}.norm", x)), 2, -1)
        y = up * jax.nn.sigmoid(gate)
        y = jax.lax.conv_general_dilated(
            y,
            w[f"{path}.depthwise"],
            (1,),
            "SAME",
            dimension_numbers=("NHC", "HIO", "NHC"),
            feature_group_count=EMBEDDING,
        )
        own = {n: w[f"{path}.batch_norm.{n}"] for n in ("scale", "bias", "mean", "var")}
        y = (y - own["mean"]) * jax.lax.rsqrt(own["var"] + 1e-3) * own["scale"] + own["bias"]
        return linear(w, f"{path}.pointwise2", jax.nn.silu(y))

    def function(w, spectra):
        x = jax.lax.conv_general_dilated(
            spectra, w["stem.conv"], (2,), "SAME", dimension_numbers=("NHC", "HIO", "NHC")
        )
        x = jax.nn.relu(x + w["stem.bias"])
        for i in range(layers):
            path = f"layers.{i}"
            h = norm(w, f"{path}.ffn1.norm", x)
            x = x + 0.5 * mlp(w, f"{path}.ffn1.mlp", h)
            h = norm(w, f"{path}.mhsa.norm", x)
            x = x + attention(w, f"{path}.mhsa.attn", h)
            x = x + convolved(w, f"{path}.conv", x)
            x = x + 0.5 * mlp(w, f"{path}.ffn2.mlp", norm(w, f"{path}.ffn2.norm", x))
            x = norm(w, f"{path}.final_norm", x)
        return jax.nn.log_softmax(linear(w, "ctc", x))

    weights = _structs(names, taps, letters=29, channels=EMBEDDING, gate_up=2)
    inputs, axes = (struct(BATCH, 2 * SEQ, 20),), (("batch", "frames", "mels"),)
    words = {"letters": "outputs", "channels": "conv_channels"}
    return NamedModel(function, weights, inputs, axes, names, words)


def distances_in_two_directions(layers: int = 4) -> NamedModel:
    """ViTDet, as in Segment Anything: queries meet tables of rows and of columns between places.

    All layers but the last attend in windows. A table has twice as many rows less one.
    """
    side, window = 4, 2
    names = {"pos_embed": (None, "rows", "columns", "embedding")}
    taps = {"pos_embed": (1, side, side, EMBEDDING)}
    names |= {"patch_embed": (None, None, "colours", "embedding")}
    taps |= {"patch_embed": (4, 4, 3, EMBEDDING)}
    names |= linear_names("neck", "neck", "embedding", False)
    for i in range(layers):
        path = f"blocks.{i}"
        names |= norm_names(f"{path}.norm1") | norm_names(f"{path}.norm2")
        names |= linear_names(f"{path}.attn.qkv", "qkv*heads*projection", "embedding")
        names |= linear_names(f"{path}.attn.proj", "embedding", INNER)
        names |= mlp_names(f"{path}.mlp", has_bias=True)
        size = side if i == layers - 1 else window
        for name in ("h", "w"):
            names[f"{path}.attn.rel_pos_{name}"] = (f"distances_{name}_{size}", "projection")
            taps[f"{path}.attn.rel_pos_{name}"] = (2 * size - 1, PROJECTION)

    def attended(w, path, x):
        count, size = x.shape[:2]
        fused = linear(w, f"{path}.qkv", x).reshape(count, size * size, 3, HEADS, PROJECTION)
        q, k, v = fused.transpose(2, 0, 3, 1, 4).reshape(3, count * HEADS, size * size, PROJECTION)
        scores = q * 0.5 @ k.swapaxes(-1, -2)
        places = jnp.arange(size)[:, None] - jnp.arange(size) + size - 1
        placed = q.reshape(-1, size, size, PROJECTION)
        rows = jnp.einsum("bhwc,hkc->bhwk", placed, w[f"{path}.rel_pos_h"][places])
        columns = jnp.einsum("bhwc,wkc->bhwk", placed, w[f"{path}.rel_pos_w"][places])
        bias = rows[..., :, None] + columns[..., None, :]
        shares = jax.nn.softmax(scores + bias.reshape(scores.shape), -1)
        made = (shares @ v).reshape(count, HEADS, size, size, PROJECTION)
        return linear(w, f"{path}.proj", made.transpose(0, 2, 3, 1, 4).reshape(x.shape))

    def in_windows(w, path, x):
        cut = x.reshape(BATCH, side // window, window, side // window, window, EMBEDDING)
        cut = cut.transpose(0, 1, 3, 2, 4, 5)
        made = attended(w, path, cut.reshape(-1, window, window, EMBEDDING))
        return made.reshape(cut.shape).transpose(0, 1, 3, 2, 4, 5).reshape(x.shape)

    def function(w, pictures):
        numbers = ("NHWC", "HWIO", "NHWC")
        x = jax.lax.conv_general_dilated(
            pictures, w["patch_embed"], (4, 4), "VALID", dimension_numbers=numbers
        )
        x = x + w["pos_embed"]
        for i in range(layers):
            path = f"blocks.{i}"
            h = norm(w, f"{path}.norm1", x)
            x = x + (attended if i == layers - 1 else in_windows)(w, f"{path}.attn", h)
            x = x + mlp(w, f"{path}.mlp", norm(w, f"{path}.norm2", x))
        return linear(w, "neck", x)

    weights = _structs(names, taps, neck=8)
    inputs, axes = (struct(BATCH, 16, 16, 3),), (("batch", "height", "width", "colours"),)
    return NamedModel(function, weights, inputs, axes, names, {"neck": "outputs"}, False)


def captioner(layers: int = 3) -> NamedModel:
    """CoCa: queries pool pictures, for a decoder of texts to attend to and to be compared with.

    Texts go through layers that see no pictures first; pictures have a stream of their own.
    """
    names = linear_names("visual.patches", "a_embedding", "pixels")
    names |= {"visual.positional_embedding": ("a_positions", "a_embedding")}
    inner = {side: f"{side}_heads*{side}_projection" for side in "abp"}
    for i in range(layers):
        block = attention_names("attn", "a_embedding", "a_embedding", inner["a"], True)
        block |= norm_names("ln_1", "a_embedding") | norm_names("ln_2", "a_embedding")
        block |= mlp_names("mlp", "a_embedding", "a_neurons", True)
        names |= _at(f"visual.resblocks.{i}", block)
    names |= {"visual.attn_pool.query": ("queries", "asked")}
    pool = attention_names("attn", "asked", "a_embedding", inner["p"], True)
    pool |= linear_names("attn.o", "pooled", inner["p"])
    names |= _at("visual.attn_pool", pool | norm_names("norm", "pooled"))
    names |= {"text.token_embedding": ("vocabulary", "b_embedding"), "logit_scale": ()}
    names |= {"text.positional_embedding": ("b_positions", "b_embedding")}
    for i in range(layers):
        block = attention_names("attn", "b_embedding", "b_embedding", inner["b"], True)
        block |= norm_names("ln_1", "b_embedding") | norm_names("ln_2", "b_embedding")
        block |= mlp_names("mlp", "b_embedding", "b_neurons", True)
        names |= _at(f"text.resblocks.{i}", block)
        cross = attention_names("attn", "b_embedding", "pooled", inner["b"], True)
        cross |= norm_names("ln_1", "b_embedding") | norm_names("ln_2", "b_embedding")
        names |= _at(f"text.cross.{i}", cross | mlp_names("mlp", "b_embedding", "b_neurons", True))
    names |= {"text.text_projection": ("b_embedding", "joint")}
    names |= {"visual.proj": ("pooled", "joint"), "text.to_logits": ("b_embedding", "vocabulary")}

    def block(w, path, x, context=None, is_causal=False):
        h = norm(w, f"{path}.ln_1", x)
        x = x + attention(w, f"{path}.attn", h, context, is_causal)
        return x + mlp(w, f"{path}.mlp", norm(w, f"{path}.ln_2", x))

    def function(w, patches, tokens):
        x = linear(w, "visual.patches", patches) + w["visual.positional_embedding"]
        for i in range(layers):
            x = block(w, f"visual.resblocks.{i}", x)
        asked = jnp.broadcast_to(w["visual.attn_pool.query"], (BATCH, 4, EMBEDDING))
        pooled = attention(w, "visual.attn_pool.attn", asked, x)
        pooled = norm(w, "visual.attn_pool.norm", pooled)
        y = w["text.token_embedding"][tokens] + w["text.positional_embedding"]
        for i in range(layers):
            y = block(w, f"text.resblocks.{i}", y, is_causal=True)
        text, picture = y[:, -1] @ w["text.text_projection"], pooled[:, 0] @ w["visual.proj"]
        for i in range(layers):
            y = block(w, f"text.cross.{i}", y, pooled[:, 1:])
        text, picture = (z / jnp.linalg.norm(z, axis=-1, keepdims=True) for z in (text, picture))
        return picture @ text.T * jnp.exp(w["logit_scale"]), y @ w["text.to_logits"]

    lengths = {"asked": EMBEDDING, "pooled": EMBEDDING, "joint": EMBEDDING, "pixels": 12}
    for side in "abp":
        lengths |= {f"{side}_heads": HEADS, f"{side}_projection": PROJECTION, "queries": 4}
        lengths |= {f"{side}_embedding": EMBEDDING, f"{side}_neurons": 32, f"{side}_positions": SEQ}
    shaped = {path: axes for path, axes in names.items() if axes}
    weights = structs_of(shaped, **lengths) | {"logit_scale": struct()}
    words = {"joint": "joint_embedding", "p_heads": "heads", "p_projection": "projection"}
    for role in ("embedding", "heads", "projection", "neurons", "positions"):
        words |= {f"a_{role}": f"visual_{role}", f"b_{role}": f"text_{role}"}
    axes = (("batch", "patches", "pixels"), ("batch", "seq"))
    inputs = (struct(BATCH, SEQ, 12), TOKENS)
    return NamedModel(function, weights, inputs, axes, names, words, False)


def long_skips(layers: int = LAYERS) -> NamedModel:
    """U-ViT: time and label are tokens; what a block had is joined to what one behind it gets."""
    names = linear_names("patch_embed", "embedding", "pixels") | norm_names("norm")
    names |= {"pos_embed": (None, "positions", "embedding"), "label_emb": ("labels", "embedding")}
    names |= linear_names("time.0", "time_hidden", "waves")
    names |= linear_names("time.2", "embedding", "time_hidden")
    names |= linear_names("decoder_pred", "made_pixels", "embedding")
    paths = [*(f"in_blocks.{i}" for i in range(layers)), "mid_block"]
    paths += [f"out_blocks.{i}" for i in range(layers)]
    for path in paths:
        block = norm_names("norm1") | norm_names("norm2") | mlp_names("mlp", has_bias=True)
        block |= linear_names("attn.qkv", "qkv*heads*projection", "embedding", False)
        names |= _at(path, block | linear_names("attn.proj", "embedding", INNER))
        if path.startswith("out"):
            names |= linear_names(f"{path}.skip_linear", "embedding", "joined")

    def block(w, path, x, skip=None):
        if skip is not None:
            x = linear(w, f"{path}.skip_linear", jnp.concatenate([x, skip], -1))
        fused = linear(w, f"{path}.attn.qkv", norm(w, f"{path}.norm1", x))
        q, k, v = (split_heads(y) for y in jnp.split(fused, 3, -1))
        shares = jax.nn.softmax(q @ k.swapaxes(-1, -2) * 0.5, -1)
        x = x + linear(w, f"{path}.attn.proj", merge_heads(shares @ v))
        return x + mlp(w, f"{path}.mlp", norm(w, f"{path}.norm2", x))

    def function(w, patches, time, label):
        x = linear(w, "patch_embed", patches)
        t = linear(w, "time.2", jax.nn.silu(linear(w, "time.0", sinusoids(time, EMBEDDING))))
        x = jnp.concatenate([t[:, None], w["label_emb"][label][:, None], x], 1) + w["pos_embed"]
        skips = []
        for i in range(layers):
            x = block(w, f"in_blocks.{i}", x)
            skips.append(x)
        x = block(w, "mid_block", x)
        for i in range(layers):
            x = block(w, f"out_blocks.{i}", x, skips.pop())
        return linear(w, "decoder_pred", norm(w, "norm", x))[:, 2:]

    taps = {"pos_embed": (1, SEQ + 2, EMBEDDING)}
    lengths = {"labels": VOCABULARY, "time_hidden": 64, "waves": EMBEDDING, "joined": 2 * EMBEDDING}
    weights = _structs(names, taps, pixels=12, made_pixels=12, **lengths)
    inputs = (struct(BATCH, SEQ, 12), struct(BATCH), struct(BATCH, dtype=jnp.int32))
    axes = (("batch", "seq", "pixels"), ("batch",), ("batch",))
    words = {"made_pixels": "outputs"}
    return NamedModel(function, weights, inputs, axes, names, words, False)


SENSES = {
    "CaiT, class attention": class_attention,
    "Conformer": conformer,
}

SENSES_LEFT_OPEN = {
    "PixArt, one conditioning": one_conditioning,
    "Segment Anything, two directions": distances_in_two_directions,
    "CoCa": captioner,
    "U-ViT, long skips": long_skips,
}
