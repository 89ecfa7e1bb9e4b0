"""Models of pictures and of scenes: encoders, autoencoders, nets of convolutions."""

import jax
import jax.numpy as jnp
from flax import linen as nn

from tests.choosing.named_models import (
    BATCH,
    EMBEDDING,
    HEADS,
    NEURONS,
    PROJECTION,
    SEQ,
    NamedModel,
    struct,
    structs_of,
)
from tests.choosing.transformer_parts import (
    INNER,
    attend,
    linear,
    linear_names,
    norm,
    norm_names,
    split_heads,
)

_AXES = (("batch", "colours", "height", "width"),)


def conv(x, kernel, stride=1, padding="SAME", groups=1):
    """A convolution as PyTorch stores it: channels before rows and columns."""
    return jax.lax.conv_general_dilated(
        x,
        kernel,
        (stride, stride),
        padding,
        dimension_numbers=("NCHW", "OIHW", "NCHW"),
        feature_group_count=groups,
    )


def _structs(names, taps, **lengths):
    """Structs of weights some of whose dimensions have no names but lengths."""
    plain = {path: axes for path, axes in names.items() if path not in taps}
    return structs_of(plain, **lengths) | {path: struct(*shape) for path, shape in taps.items()}


def dinov2(layers: int = 4) -> NamedModel:
    """A class token, registers and patches; each branch is scaled; classes see token and mean."""
    block = norm_names("norm1") | norm_names("norm2")
    for name in ("query", "key", "value"):
        block |= linear_names(f"attention.attention.{name}", INNER, "embedding")
    block |= linear_names("attention.output.dense", "embedding", INNER)
    block |= linear_names("mlp.fc1", "neurons", "embedding")
    block |= linear_names("mlp.fc2", "embedding", "neurons")
    block |= {f"layer_scale{n}.lambda1": ("embedding",) for n in (1, 2)}
    names = {
        "embeddings.cls_token": (None, None, "embedding"),
        "embeddings.register_tokens": (None, "registers", "embedding"),
        "embeddings.position_embeddings": (None, "positions", "embedding"),
        "embeddings.patch_embeddings.projection.weight": ("embedding", "colours", None, None),
        "embeddings.patch_embeddings.projection.bias": ("embedding",),
    }
    for i in range(layers):
        names |= {f"encoder.layer.{i}.{path}": axes for path, axes in block.items()}
    names |= norm_names("layernorm") | linear_names("classifier", "classes", "token_and_mean")

    def function(w, pictures):
        x = conv(pictures, w["embeddings.patch_embeddings.projection.weight"], 4, "VALID")
        x = x + w["embeddings.patch_embeddings.projection.bias"][:, None, None]
        x = x.reshape(BATCH, EMBEDDING, -1).transpose(0, 2, 1)
        first = jnp.tile(w["embeddings.cls_token"], (BATCH, 1, 1))
        x = jnp.concatenate((first, x), axis=1) + w["embeddings.position_embeddings"]
        registers = jnp.broadcast_to(w["embeddings.register_tokens"], (BATCH, 4, EMBEDDING))
        x = jnp.concatenate((x[:, :1], registers, x[:, 1:]), axis=1)
        for i in range(layers):
            path = f"encoder.layer.{i}"
            h = norm(w, f"{path}.norm1", x)
            q, k, v = (
                split_heads(linear(w, f"{path}.attention.attention.{name}", h))
                for name in ("query", "key", "value")
            )
            made = linear(w, f"{path}.attention.output.dense", attend(q, k, v))
            x = made * w[f"{path}.layer_scale1.lambda1"] + x
            h = jax.nn.gelu(linear(w, f"{path}.mlp.fc1", norm(w, f"{path}.norm2", x)))
            x = linear(w, f"{path}.mlp.fc2", h) * w[f"{path}.layer_scale2.lambda1"] + x
        x = norm(w, "layernorm", x)
        seen = jnp.concatenate((x[:, 0], x[:, 5:].mean(axis=1)), axis=1)
        return linear(w, "classifier", seen)

    taps = {
        "embeddings.cls_token": (1, 1, EMBEDDING),
        "embeddings.register_tokens": (1, 4, EMBEDDING),
        "embeddings.position_embeddings": (1, 17, EMBEDDING),
        "embeddings.patch_embeddings.projection.weight": (EMBEDDING, 3, 4, 4),
    }
    weights = _structs(names, taps, classes=10, token_and_mean=2 * EMBEDDING)
    words = {"classes": "outputs"}
    return NamedModel(function, weights, (struct(BATCH, 3, 16, 16),), _AXES, names, words)


def masked_autoencoder(layers: int = 4) -> NamedModel:
    """MAE: what is not masked is encoded; a decoder, as wide, gets tokens in place of the rest."""
    block = norm_names("norm1") | norm_names("norm2")
    block |= linear_names("attn.qkv", "qkv*heads*projection", "embedding")
    block |= linear_names("attn.proj", "embedding", INNER)
    block |= linear_names("mlp.fc1", "neurons", "embedding")
    block |= linear_names("mlp.fc2", "embedding", "neurons")
    names = {
        "cls_token": (None, None, "a_embedding"),
        "pos_embed": (None, "a_positions", "a_embedding"),
    }
    names |= linear_names("patch_embed.proj", "a_embedding", "pixels")
    names |= linear_names("decoder_embed", "b_embedding", "a_embedding")
    names |= {"mask_token": (None, None, "b_embedding")}
    names |= {"decoder_pos_embed": (None, "b_positions", "b_embedding")}
    for stream, path in (("a", "blocks"), ("b", "decoder_blocks")):
        for i in range(layers):
            for name, axes in block.items():
                names[f"{path}.{i}.{name}"] = tuple(_of(stream, axis) for axis in axes)
    names |= norm_names("norm", "a_embedding") | norm_names("decoder_norm", "b_embedding")
    names |= linear_names("decoder_pred", "made_pixels", "b_embedding")

    def blocks(w, path, x):
        for i in range(layers):
            own = f"{path}.{i}"
            fused = linear(w, f"{own}.attn.qkv", norm(w, f"{own}.norm1", x))
            fused = fused.reshape(BATCH, x.shape[1], 3, HEADS, PROJECTION)
            q, k, v = fused.transpose(2, 0, 3, 1, 4)
            x = x + linear(w, f"{own}.attn.proj", attend(q, k, v))
            h = jax.nn.gelu(linear(w, f"{own}.mlp.fc1", norm(w, f"{own}.norm2", x)))
            x = x + linear(w, f"{own}.mlp.fc2", h)
        return x

    def function(w, patches, noise):
        x = linear(w, "patch_embed.proj", patches) + w["pos_embed"][:, 1:]
        shuffled = jnp.argsort(noise, axis=1)
        back = jnp.argsort(shuffled, axis=1)
        x = jnp.take_along_axis(x, shuffled[:, : SEQ // 2, None], axis=1)
        first = jnp.broadcast_to(w["cls_token"] + w["pos_embed"][:, :1], (BATCH, 1, EMBEDDING))
        x = norm(w, "norm", blocks(w, "blocks", jnp.concatenate([first, x], 1)))
        x = linear(w, "decoder_embed", x)
        rest = jnp.tile(w["mask_token"], (BATCH, SEQ // 2, 1))
        seen = jnp.concatenate([x[:, 1:], rest], axis=1)
        seen = jnp.take_along_axis(seen, back[..., None], axis=1)
        x = jnp.concatenate([x[:, :1], seen], axis=1) + w["decoder_pos_embed"]
        x = norm(w, "decoder_norm", blocks(w, "decoder_blocks", x))
        return linear(w, "decoder_pred", x)[:, 1:]

    taps = {
        "cls_token": (1, 1, EMBEDDING),
        "mask_token": (1, 1, EMBEDDING),
        "pos_embed": (1, SEQ + 1, EMBEDDING),
        "decoder_pos_embed": (1, SEQ + 1, EMBEDDING),
    }
    lengths = {"heads": HEADS, "projection": PROJECTION, "embedding": EMBEDDING, "neurons": NEURONS}
    lengths = {f"{stream}_{role}": n for stream in "ab" for role, n in lengths.items()}
    weights = _structs(names, taps, **lengths, pixels=EMBEDDING, made_pixels=EMBEDDING)
    inputs = (struct(BATCH, SEQ, EMBEDDING), struct(BATCH, SEQ))
    axes = (("batch", "seq", "pixels"), ("batch", "seq"))
    words = {"made_pixels": "outputs"}
    roles = ("embedding", "heads", "projection", "neurons", "positions")
    words |= {f"a_{role}": f"blocks_{role}" for role in roles}
    words |= {f"b_{role}": f"decoder_blocks_{role}" for role in roles}
    return NamedModel(function, weights, inputs, axes, names, words)


def _of(stream, axis):
    return "*".join(n if n == "qkv" else f"{stream}_{n}" for n in axis.split("*"))


def latent_diffusion(layers: int = 3) -> NamedModel:
    """A transformer of Stable Diffusion: texts of another width are attended to; gated by GELU."""
    names = norm_names("norm") | linear_names("proj_in", "embedding", "channels")
    for i in range(layers):
        path = f"transformer_blocks.{i}"
        for number, context in ((1, "embedding"), (2, "texts")):
            names[f"{path}.attn{number}.to_q.weight"] = (INNER, "embedding")
            names[f"{path}.attn{number}.to_k.weight"] = (INNER, context)
            names[f"{path}.attn{number}.to_v.weight"] = (INNER, context)
            names |= linear_names(f"{path}.attn{number}.to_out.0", "embedding", INNER)
        names |= linear_names(f"{path}.ff.net.0.proj", "gate_up*neurons", "embedding")
        names |= linear_names(f"{path}.ff.net.2", "embedding", "neurons")
        for number in (1, 2, 3):
            names |= norm_names(f"{path}.norm{number}")
    names |= linear_names("proj_out", "channels", "embedding")
    names |= norm_names("norm", "channels")

    def attended(w, path, x, context):
        def split(y):
            y = y.reshape(BATCH, -1, HEADS, PROJECTION).swapaxes(1, 2)
            return y.reshape(BATCH * HEADS, -1, PROJECTION)

        q, k, v = (
            split(linear(w, f"{path}.to_{name}", y))
            for name, y in (("q", x), ("k", context), ("v", context))
        )
        shares = jax.nn.softmax(jnp.einsum("bid,bjd->bij", q, k) * PROJECTION**-0.5, axis=-1)
        made = jnp.einsum("bij,bjd->bid", shares, v)
        made = made.reshape(BATCH, HEADS, -1, PROJECTION).swapaxes(1, 2)
        return linear(w, f"{path}.to_out.0", made.reshape(BATCH, -1, HEADS * PROJECTION))

    def function(w, pictures, texts):
        grouped = pictures.reshape(BATCH, 4, -1)
        grouped = (grouped - grouped.mean(-1, keepdims=True)) / grouped.std(-1, keepdims=True)
        x = grouped.reshape(pictures.shape)
        x = x * w["norm.weight"][:, None, None] + w["norm.bias"][:, None, None]
        x = x.transpose(0, 2, 3, 1).reshape(BATCH, -1, EMBEDDING)
        x = linear(w, "proj_in", x)
        for i in range(layers):
            path = f"transformer_blocks.{i}"
            h = norm(w, f"{path}.norm1", x)
            x = attended(w, f"{path}.attn1", h, h) + x
            x = attended(w, f"{path}.attn2", norm(w, f"{path}.norm2", x), texts) + x
            h = linear(w, f"{path}.ff.net.0.proj", norm(w, f"{path}.norm3", x))
            h, gate = jnp.split(h, 2, axis=-1)
            x = linear(w, f"{path}.ff.net.2", h * jax.nn.gelu(gate)) + x
        x = linear(w, "proj_out", x).reshape(BATCH, 4, 4, EMBEDDING).transpose(0, 3, 1, 2)
        return x + pictures

    weights = structs_of(names, channels=EMBEDDING, texts=EMBEDDING, gate_up=2)
    inputs = (struct(BATCH, EMBEDDING, 4, 4), struct(BATCH, EMBEDDING, EMBEDDING))
    axes = (("batch", "channels", "height", "width"), ("batch", "tokens", "texts"))
    return NamedModel(function, weights, inputs, axes, names)


class _EncoderBlock(nn.Module):
    @nn.compact
    def __call__(self, x):
        y = nn.LayerNorm()(x)
        y = nn.MultiHeadDotProductAttention(num_heads=HEADS, deterministic=True)(y, y)
        x = x + y
        y = nn.LayerNorm()(x)
        y = nn.Dense(NEURONS, name="up")(y)
        return x + nn.Dense(EMBEDDING, name="down")(nn.gelu(y))


class _PooledByAttention(nn.Module):
    layers: int

    @nn.compact
    def __call__(self, pictures):
        x = nn.Conv(EMBEDDING, (4, 4), (4, 4), "VALID", name="embedding")(pictures)
        batch, height, width, channels = x.shape
        x = x.reshape(batch, height * width, channels)
        x = x + self.param("pos_embedding", nn.initializers.normal(), (1, 16, EMBEDDING))
        for i in range(self.layers):
            x = _EncoderBlock(name=f"encoderblock_{i}")(x)
        x = nn.LayerNorm(name="encoder_norm")(x)
        probe = self.param("probe", nn.initializers.normal(), (1, 1, EMBEDDING))
        probe = jnp.tile(probe, [batch, 1, 1])
        x = nn.MultiHeadDotProductAttention(num_heads=HEADS, name="pooled")(probe, x)
        y = nn.LayerNorm(name="pool_norm")(x)
        y = nn.gelu(nn.Dense(NEURONS, name="pool_up")(y))
        x = x + nn.Dense(EMBEDDING, name="pool_down")(y)
        return nn.Dense(EMBEDDING, name="head")(x[:, 0])


def pooled_by_attention(layers: int = 3) -> NamedModel:
    """SigLIP's tower in Big Vision: a probe asks all patches; what it gets is a stream by itself.

    Its configuration has one number of heads and one of neurons for both. Nothing ties what the
    probe has, nor what attention makes of it, to the embedding.
    """
    module = _PooledByAttention(layers)
    pictures = struct(BATCH, 16, 16, 3)
    weights = jax.eval_shape(module.init, jax.random.key(0), pictures)
    inner, out = ("heads", "projection"), "embedding"

    def attention_names(path, asked, made):
        names = {f"{path}/out/kernel": (*inner, made), f"{path}/out/bias": (made,)}
        for name, read in (("query", asked), ("key", out), ("value", out)):
            names |= {f"{path}/{name}/kernel": (read, *inner), f"{path}/{name}/bias": inner}
        return names

    def layer_names(path, into, made):
        return {f"params/{path}/kernel": (into, made), f"params/{path}/bias": (made,)}

    def scale_names(path, axis):
        return {f"params/{path}/{name}": (axis,) for name in ("scale", "bias")}

    names = {
        "params/embedding/kernel": (None, None, "colours", out),
        "params/embedding/bias": (out,),
        "params/pos_embedding": (None, "positions", out),
        "params/probe": (None, None, "pool_asked"),
    }
    for i in range(layers):
        path = f"encoderblock_{i}"
        names |= scale_names(f"{path}/LayerNorm_0", out) | scale_names(f"{path}/LayerNorm_1", out)
        names |= attention_names(f"params/{path}/MultiHeadDotProductAttention_0", out, out)
        names |= layer_names(f"{path}/up", out, "neurons")
        names |= layer_names(f"{path}/down", "neurons", out)
    names |= scale_names("encoder_norm", out) | scale_names("pool_norm", "pool_embedding")
    names |= attention_names("params/pooled", "pool_asked", "pool_embedding")
    names |= layer_names("pool_up", "pool_embedding", "neurons")
    names |= layer_names("pool_down", "neurons", "pool_embedding")
    names |= layer_names("head", "pool_embedding", "outputs")
    axes = (("batch", "height", "width", "colours"),)
    return NamedModel(module.apply, weights, (pictures,), axes, names, {}, False)


def convnext() -> NamedModel:
    """Two stages as wide, between them a norm and a convolution; depthwise, then pointwise."""
    names, taps = {}, {}

    def add(path, axes, shape):
        names[path] = axes
        if None in axes:
            taps[path] = shape

    add(
        "embeddings.patch_embeddings.weight",
        ("width_0", "colours", None, None),
        (EMBEDDING, 3, 4, 4),
    )
    names["embeddings.patch_embeddings.bias"] = ("width_0",)
    names |= norm_names("embeddings.layernorm", "width_0")
    names |= norm_names("encoder.stages.1.downsampling_layer.0", "width_0")
    path = "encoder.stages.1.downsampling_layer.1.weight"
    add(path, ("width_1", "width_0", None, None), (EMBEDDING, EMBEDDING, 2, 2))
    names["encoder.stages.1.downsampling_layer.1.bias"] = ("width_1",)
    for stage in range(2):
        width, neurons = f"width_{stage}", f"neurons_{stage}"
        for i in range(3):
            path = f"encoder.stages.{stage}.layers.{i}"
            add(f"{path}.dwconv.weight", (width, None, None, None), (EMBEDDING, 1, 7, 7))
            names[f"{path}.dwconv.bias"] = (width,)
            names |= norm_names(f"{path}.layernorm", width)
            names |= linear_names(f"{path}.pwconv1", neurons, width)
            names |= linear_names(f"{path}.pwconv2", width, neurons)
            names[f"{path}.layer_scale_parameter"] = (width,)
    names |= norm_names("layernorm", "width_1") | linear_names("classifier", "classes", "width_1")

    def function(w, pictures):
        x = conv(pictures, w["embeddings.patch_embeddings.weight"], 4, "VALID")
        x = (x + w["embeddings.patch_embeddings.bias"][:, None, None]).transpose(0, 2, 3, 1)
        x = norm(w, "embeddings.layernorm", x).transpose(0, 3, 1, 2)
        for stage in range(2):
            if stage == 1:
                path = "encoder.stages.1.downsampling_layer"
                x = norm(w, f"{path}.0", x.transpose(0, 2, 3, 1)).transpose(0, 3, 1, 2)
                x = conv(x, w[f"{path}.1.weight"], 2, "VALID")
                x = x + w[f"{path}.1.bias"][:, None, None]
            for i in range(3):
                path = f"encoder.stages.{stage}.layers.{i}"
                y = conv(x, w[f"{path}.dwconv.weight"], groups=EMBEDDING)
                y = (y + w[f"{path}.dwconv.bias"][:, None, None]).transpose(0, 2, 3, 1)
                y = linear(w, f"{path}.pwconv1", norm(w, f"{path}.layernorm", y))
                y = linear(w, f"{path}.pwconv2", jax.nn.gelu(y))
                y = y * w[f"{path}.layer_scale_parameter"]
                x = x + y.transpose(0, 3, 1, 2)
        return linear(w, "classifier", norm(w, "layernorm", x.mean((2, 3))))

    lengths = dict.fromkeys(("width_0", "width_1"), EMBEDDING)
    lengths |= dict.fromkeys(("neurons_0", "neurons_1"), 4 * EMBEDDING)
    weights = _structs(names, taps, **lengths, classes=10)
    words = {"classes": "outputs"}
    for stage in range(2):
        words[f"width_{stage}"] = f"stages_{stage}_embedding"
        words[f"neurons_{stage}"] = f"stages_{stage}_neurons"
    inputs = (struct(BATCH, 3, 16, 16),)
    return NamedModel(function, weights, inputs, _AXES, names, words, False)


def resnet() -> NamedModel:
    """Bottlenecks in two stages, as torchvision names them, with batch norms of running figures."""
    names, taps = {}, {}

    def add_conv(path, out, into, size):
        names[f"{path}.weight"] = (out, into, None, None)
        taps[f"{path}.weight"] = (_RESNET.get(out, 8), _RESNET.get(into, 8), size, size)

    def add_norm(path, axis):
        for name in ("weight", "bias", "running_mean", "running_var"):
            names[f"{path}.{name}"] = (axis,)
            taps[f"{path}.{name}"] = (_RESNET.get(axis, 8),)

    add_conv("conv1", "stem", "colours", 7)
    add_norm("bn1", "stem")
    for stage, before in ((1, "stem"), (2, "width_1")):
        for i in range(2):
            path, width = f"layer{stage}.{i}", f"width_{stage}"
            inner = [f"{path}.inner_{n}" for n in range(2)]
            chain = [width if i else before, *inner, width]
            for n, size in enumerate((1, 3, 1)):
                add_conv(f"{path}.conv{n + 1}", chain[n + 1], chain[n], size)
                add_norm(f"{path}.bn{n + 1}", chain[n + 1])
            if i == 0:
                add_conv(f"{path}.downsample.0", width, before, 1)
                add_norm(f"{path}.downsample.1", width)
    names |= linear_names("fc", "classes", "width_2")

    def bn(w, path, x):
        scale, bias, mean, var = (
            w[f"{path}.{name}"][:, None, None]
            for name in ("weight", "bias", "running_mean", "running_var")
        )
        return (x - mean) * jax.lax.rsqrt(var + 1e-5) * scale + bias

    def function(w, pictures):
        x = jax.nn.relu(bn(w, "bn1", conv(pictures, w["conv1.weight"], 2)))
        x = jax.lax.reduce_window(x, -jnp.inf, jax.lax.max, (1, 1, 3, 3), (1, 1, 2, 2), "SAME")
        for stage in (1, 2):
            for i in range(2):
                path, y = f"layer{stage}.{i}", x
                stride = 2 if stage == 2 and i == 0 else 1
                for n in range(3):
                    y = conv(y, w[f"{path}.conv{n + 1}.weight"], stride if n == 1 else 1)
                    y = bn(w, f"{path}.bn{n + 1}", y)
                    y = jax.nn.relu(y) if n < 2 else y
                if i == 0:
                    x = conv(x, w[f"{path}.downsample.0.weight"], stride)
                    x = bn(w, f"{path}.downsample.1", x)
                x = jax.nn.relu(y + x)
        return linear(w, "fc", x.mean((2, 3)))

    weights = _structs(names, taps, classes=10, width_2=_RESNET["width_2"])
    words = {"classes": "outputs"} | {f"width_{n}": f"layer{n}_embedding" for n in (1, 2)}
    inputs = (struct(BATCH, 3, 32, 32),)
    return NamedModel(function, weights, inputs, _AXES, names, words, False)


_RESNET = {"colours": 3, "stem": 16, "width_1": 16, "width_2": 16}

PICTURES = {
    "DINOv2, with registers": dinov2,
    "MAE, two streams": masked_autoencoder,
    "latent diffusion, texts attended to": latent_diffusion,
}

PICTURES_LEFT_OPEN = {
    "SigLIP tower, pooled by attention": pooled_by_attention,
    "ConvNeXt": convnext,
    "ResNet": resnet,
}
