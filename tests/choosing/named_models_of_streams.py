"""Transformers with several residual streams, tables or stages, each with lengths of its own."""

import jax
import jax.numpy as jnp
import numpy as np

from tests.choosing.named_models import (
    BATCH,
    BATCH_SEQ,
    EMBEDDING,
    HEADS,
    LAYERS,
    LENGTHS,
    SEQ,
    TOKENS,
    VOCABULARY,
    NamedModel,
    rms_norm,
    struct,
    structs_of,
)
from tests.choosing.transformer_parts import (
    attend,
    attention,
    attention_names,
    linear,
    linear_names,
    mlp,
    mlp_names,
    norm,
    norm_names,
    sinusoids,
    split_heads,
)

_ROLES = ("embedding", "heads", "projection", "neurons", "positions")


def _lengths(*streams):
    return {f"{stream}_{role}": LENGTHS[role] for stream in streams for role in _ROLES}


def _words(streams):
    """What the library calls the axes of streams, by the words in paths."""
    return {f"{own}_{role}": f"{word}_{role}" for own, word in streams.items() for role in _ROLES}


def _of(stream, names):
    """Names of a stream's own axes; those that have a stream already keep it."""

    def called(axis):
        return "*".join(f"{stream}_{n}" if n in _ROLES else n for n in axis.split("*"))

    return {path: tuple(axis and called(axis) for axis in axes) for path, axes in names.items()}


def clip() -> NamedModel:
    """CLIP with its attention: two towers of equal lengths, compared in a joint embedding."""
    block = linear_names("in_proj", "qkv*heads*projection", "embedding")
    block |= linear_names("out", "embedding", "heads*projection") | norm_names("ln_1")
    block |= mlp_names("mlp", has_bias=True) | norm_names("ln_2")
    names = {
        "visual.conv1": ("image_embedding", "colours", None, None),
        "visual.class_embedding": ("image_embedding",),
        "visual.positional_embedding": ("image_positions", "image_embedding"),
        "visual.proj": ("image_embedding", "joint"),
        "text.token_embedding": ("vocabulary", "text_embedding"),
        "text.positional_embedding": ("text_positions", "text_embedding"),
        "text_projection": ("text_embedding", "joint"),
        "logit_scale": (),
    }
    for path, stream in (("visual", "image"), ("text", "text")):
        for i in range(LAYERS):
            names |= _of(stream, {f"{path}.{i}.{name}": axes for name, axes in block.items()})

    def blocks(w, path, x, is_causal):
        for i in range(LAYERS):
            own = {name: w[f"{path}.{i}.{name}"] for name in block}
            fused = linear(own, "in_proj", norm(own, "ln_1", x))
            q, k, v = map(split_heads, jnp.split(fused, 3, -1))
            x = x + linear(own, "out", attend(q, k, v, is_causal))
            x = x + mlp(own, "mlp", norm(own, "ln_2", x))
        return x

    def function(w, pictures, tokens):
        numbers = ("NCHW", "OIHW", "NCHW")
        x = jax.lax.conv_general_dilated(
            pictures, w["visual.conv1"], (4, 4), "VALID", dimension_numbers=numbers
        )
        x = x.reshape(BATCH, EMBEDDING, -1).swapaxes(1, 2)
        first = jnp.broadcast_to(w["visual.class_embedding"], (BATCH, 1, EMBEDDING))
        x = jnp.concatenate([first, x], 1) + w["visual.positional_embedding"]
        x = blocks(w, "visual", x, False)[:, 0] @ w["visual.proj"]
        y = w["text.token_embedding"][tokens] + w["text.positional_embedding"][:SEQ]
        y = blocks(w, "text", y, True)[jnp.arange(BATCH), tokens.argmax(-1)]
        y = y @ w["text_projection"]
        x, y = (z / jnp.linalg.norm(z, axis=-1, keepdims=True) for z in (x, y))
        return jnp.exp(w["logit_scale"]) * x @ y.T

    lengths = _lengths("image", "text") | {"image_positions": 17, "joint": EMBEDDING}
    conv = names.pop("visual.conv1")
    weights = structs_of(names, **lengths) | {"visual.conv1": struct(EMBEDDING, 3, 4, 4)}
    names["visual.conv1"] = conv
    inputs = (struct(BATCH, 3, 16, 16), TOKENS)
    axes = (("batch", "colours", "height", "width"), ("batch", "seq"))
    words = _words({"image": "visual", "text": "text"}) | {"joint": "joint_embedding"}
    return NamedModel(function, weights, inputs, axes, names, words)


def whisper() -> NamedModel:
    """Whisper: its configuration has ``n_audio_state`` and ``n_text_state``, heads for each.

    What is between its two convolutions is an axis of its own.
    """
    names = {
        "encoder.conv1": ("channels", "mels", None),
        "encoder.conv2": ("audio_embedding", "channels", None),
        "decoder.token_embedding": ("vocabulary", "text_embedding"),
        "decoder.positional_embedding": ("text_positions", "text_embedding"),
    }
    crossed = {("k", 1): "audio_embedding", ("v", 1): "audio_embedding"}
    for path, stream in (("encoder", "audio"), ("decoder", "text")):
        for i in range(3):
            own = attention_names(f"{path}.{i}.attn", has_bias=True) | norm_names(f"{path}.{i}.ln")
            names |= _of(stream, own | mlp_names(f"{path}.{i}.mlp", has_bias=True))
    for i in range(3):
        names |= _of("text", attention_names(f"decoder.{i}.cross_attn"))
        for (part, number), axis in crossed.items():
            weight = f"decoder.{i}.cross_attn.{part}.weight"
            names[weight] = (*names[weight][:number], axis)

    def conv(w, path, x, stride):
        numbers = ("NCW", "OIW", "NCW")
        return jax.nn.gelu(
            jax.lax.conv_general_dilated(x, w[path], (stride,), [(1, 1)], dimension_numbers=numbers)
        )

    def function(w, frames, tokens):
        x = conv(w, "encoder.conv2", conv(w, "encoder.conv1", frames, 1), 2).swapaxes(1, 2)
        x = x + sinusoids(jnp.arange(x.shape[1]), EMBEDDING)
        y = w["decoder.token_embedding"][tokens] + w["decoder.positional_embedding"][:SEQ]
        for i in range(3):
            x = x + attention(w, f"encoder.{i}.attn", norm(w, f"encoder.{i}.ln", x))
            x = x + mlp(w, f"encoder.{i}.mlp", x)
        for i in range(3):
            h = norm(w, f"decoder.{i}.ln", y)
            y = y + attention(w, f"decoder.{i}.attn", h, is_causal=True)
            y = y + attention(w, f"decoder.{i}.cross_attn", y, x)
            y = y + mlp(w, f"decoder.{i}.mlp", y)
        return y @ w["decoder.token_embedding"].T

    convs = {
        "encoder.conv1": struct(EMBEDDING, 6, 3),
        "encoder.conv2": struct(EMBEDDING, EMBEDDING, 3),
    }
    others = {path: axes for path, axes in names.items() if path not in convs}
    weights = convs | structs_of(others, **_lengths("audio", "text"))
    inputs = (struct(BATCH, 6, 16), TOKENS)
    axes = (("batch", "mels", "frames"), ("batch", "seq"))
    words = _words({"audio": "encoder", "text": "decoder"})
    return NamedModel(function, weights, inputs, axes, names, words)


def translation() -> NamedModel:
    """Two vocabularies of one length, and two streams; keys and values of the encoder are fused."""
    names = {
        "source_embed": ("source_vocabulary", "encoder_embedding"),
        "target_embed": ("vocabulary", "decoder_embedding"),
        "generator": ("decoder_embedding", "vocabulary"),
    }
    for part in ("encoder", "decoder"):
        for i in range(4):
            own = attention_names(f"{part}.{i}.self") | mlp_names(f"{part}.{i}.mlp")
            names |= _of(part, own)
    for i in range(4):
        crossed = linear_names(f"decoder.{i}.q", "heads*projection", "embedding", False)
        crossed |= linear_names(f"decoder.{i}.o", "embedding", "heads*projection", False)
        names |= _of("decoder", crossed)
        fused = ("kv*decoder_heads*decoder_projection", "encoder_embedding")
        names[f"decoder.{i}.kv.weight"] = fused

    def function(w, sources, targets):
        x, y = w["source_embed"][sources], w["target_embed"][targets]
        for i in range(4):
            x = x + attention(w, f"encoder.{i}.self", x)
            x = x + mlp(w, f"encoder.{i}.mlp", x)
        for i in range(4):
            y = y + attention(w, f"decoder.{i}.self", y, is_causal=True)
            k, v = map(split_heads, jnp.split(linear(w, f"decoder.{i}.kv", x), 2, -1))
            q = split_heads(linear(w, f"decoder.{i}.q", y))
            y = y + linear(w, f"decoder.{i}.o", attend(q, k, v))
            y = y + mlp(w, f"decoder.{i}.mlp", y)
        return y @ w["generator"]

    weights = structs_of(
        names, **_lengths("encoder", "decoder"), source_vocabulary=VOCABULARY, kv=2
    )
    axes = (("batch", "seq"), ("batch", "target_seq"))
    return NamedModel(function, weights, (TOKENS, TOKENS), axes, names)


def factorised() -> NamedModel:
    """ALBERT: all layers are one, and the table of tokens is a product of low rank."""
    names = {
        "word_embeddings": ("vocabulary", "rank"),
        "position_embeddings": ("positions", "rank"),
        "head": ("rank", "embedding"),
    }
    names |= linear_names("mapping_in", "embedding", "rank")
    names |= attention_names("attention", has_bias=True) | mlp_names("mlp", has_bias=True)
    names |= norm_names("norm")

    def function(w, tokens):
        x = w["word_embeddings"][tokens] + w["position_embeddings"][jnp.arange(SEQ)]
        x = linear(w, "mapping_in", x)
        for _ in range(3):
            x = norm(w, "norm", x + attention(w, "attention", x))
            x = x + mlp(w, "mlp", x)
        return jax.nn.gelu(x @ w["head"].T) @ w["word_embeddings"].T

    return NamedModel(function, structs_of(names, rank=8), (TOKENS,), BATCH_SEQ, names)


def diffusion() -> NamedModel:
    """DiT: scales, shifts and gates of each block from what time and label condition.

    What is computed of time is an axis of its own each time, and so are the labels.
    """
    block = linear_names("adaLN_modulation", "modulations*embedding", "conditioning")
    block |= attention_names("attn", has_bias=True) | mlp_names("mlp", has_bias=True)
    names = {
        "patches": ("pixels", "embedding"),
        "time": ("frequencies", "conditioning"),
        "labels": ("labels", "conditioning"),
        "final": ("embedding", "channels"),
    }
    for i in range(8):
        names |= {f"blocks.{i}.{path}": axes for path, axes in block.items()}

    def scaled(x, shift, scale):
        return rms_norm(x, 1.0) * (1 + scale[:, None]) + shift[:, None]

    def function(w, patches, time, label):
        x = patches @ w["patches"]
        condition = jax.nn.silu(sinusoids(time, 8) @ w["time"] + w["labels"][label])
        for i in range(8):
            own = {path: w[f"blocks.{i}.{path}"] for path in block}
            changes = jnp.split(linear(own, "adaLN_modulation", condition), 6, 1)
            h = scaled(x, changes[0], changes[1])
            x = x + changes[2][:, None] * attention(own, "attn", h)
            h = scaled(x, changes[3], changes[4])
            x = x + changes[5][:, None] * mlp(own, "mlp", h)
        return x @ w["final"]

    lengths = {"modulations": 6, "conditioning": EMBEDDING, "pixels": 12, "frequencies": 8}
    weights = structs_of(names, **lengths, labels=11, channels=24)
    inputs = (struct(BATCH, 16, 12), struct(BATCH), struct(BATCH, dtype=jnp.int32))
    axes = (("batch", "patches", "pixels"), ("batch",), ("batch",))
    return NamedModel(function, weights, inputs, axes, names, {"channels": "outputs"})


def perceiver() -> NamedModel:
    """Latents ask the inputs, then one another; queries ask the latents: a stream of their own."""
    names = {"inputs": ("pixels", "features"), "latents": ("latents", "latent_embedding")}
    names |= {"queries": ("queries", "output_embedding"), "head": ("output_embedding", "classes")}
    for path in ("self.cross", "self.0", "self.1", "decoder.cross"):
        stream = "latent" if path.startswith("self") else "output"
        read = {"self.cross": "features", "decoder.cross": "latent_embedding"}
        own = attention_names(path, into=read.get(path, "embedding")) | mlp_names(f"{path}.mlp")
        names |= {
            weight: axes if "latent_embedding" in axes else _of(stream, {weight: axes})[weight]
            for weight, axes in own.items()
        }
    for name in ("k", "v"):
        inner = "output_heads*output_projection"
        names[f"decoder.cross.{name}.weight"] = (inner, "latent_embedding")

    def function(w, pixels):
        x = jnp.broadcast_to(w["latents"], (BATCH, *w["latents"].shape))
        y = jnp.broadcast_to(w["queries"], (BATCH, *w["queries"].shape))
        for path, context in (
            ("self.cross", pixels @ w["inputs"]),
            ("self.0", None),
            ("self.1", None),
        ):
            x = x + attention(w, path, x, context)
            x = x + mlp(w, f"{path}.mlp", x)
        y = y + attention(w, "decoder.cross", y, x)
        y = y + mlp(w, "decoder.cross.mlp", y)
        return y @ w["head"]

    lengths = dict.fromkeys(("pixels", "features", "classes"), EMBEDDING)
    lengths |= dict.fromkeys(("latents", "queries"), SEQ)
    weights = structs_of(names, **lengths, **_lengths("latent", "output"))
    inputs, axes = (struct(BATCH, SEQ, EMBEDDING),), (("batch", "seq", "pixels"),)
    words = _words({"latent": "self", "output": "decoder"}) | {"classes": "outputs"}
    return NamedModel(function, weights, inputs, axes, names, words, False)


def windows_in_stages() -> NamedModel:
    """Swin: windows that are shifted, a bias of each place in them, and wider stages."""
    block = {"qkv": ("embedding", "qkv*heads*projection"), "o": ("heads*projection", "embedding")}
    block |= {"up": ("embedding", "neurons"), "down": ("neurons", "embedding")}
    block |= {"table": ("offsets", "heads"), "norm": ("embedding",)}
    names = {"patches": ("pixels", "first_embedding"), "head": ("second_embedding", "classes")}
    names["merge"] = ("four*first_embedding", "second_embedding")
    for i, stream in enumerate(("first", "second")):
        names |= _of(stream, {f"stages.{i}.{path}": axes for path, axes in block.items()})
    rows, columns = np.divmod(np.arange(4), 2)
    places = (rows[:, None] - rows + 1) * 3 + columns[:, None] - columns + 1

    def attended(w, x, heads):
        batch, height, width, size = x.shape
        shape = (batch, height // 2, 2, width // 2, 2, size)
        x = rms_norm(jnp.roll(x, (-1, -1), (1, 2)), w["norm"]).reshape(shape)
        x = x.transpose(0, 1, 3, 2, 4, 5).reshape(-1, 4, size) @ w["qkv"]
        q, k, v = x.reshape(-1, 4, 3, heads, size // heads).transpose(2, 0, 3, 1, 4)
        scores = q @ k.swapaxes(-1, -2) + w["table"][places].transpose(2, 0, 1)
        x = (jax.nn.softmax(scores, -1) @ v).swapaxes(1, 2).reshape(-1, 4, size) @ w["o"]
        x = x.reshape(batch, height // 2, width // 2, 2, 2, size).transpose(0, 1, 3, 2, 4, 5)
        return jnp.roll(x.reshape(batch, height, width, size), (1, 1), (1, 2))

    def function(w, pictures):
        x = pictures @ w["patches"]
        for i, heads in enumerate((HEADS, 2 * HEADS)):
            own = {path: w[f"stages.{i}.{path}"] for path in block}
            x = x + attended(own, x, heads)
            x = x + jax.nn.gelu(x @ own["up"]) @ own["down"]
            if i == 0:
                parts = [x[:, a::2, b::2] for a in range(2) for b in range(2)]
                x = jnp.concatenate(parts, -1) @ w["merge"]
        return x.mean((1, 2)) @ w["head"]

    lengths = _lengths("first", "second") | {"second_embedding": 32, "second_heads": 2 * HEADS}
    lengths |= {"four": 4, "offsets": 9, "pixels": 48, "classes": EMBEDDING}
    inputs, axes = (struct(BATCH, 4, 4, 48),), (("batch", "height", "width", "pixels"),)
    words = _words({"first": "stages_0", "second": "stages_1"}) | {"classes": "outputs"}
    return NamedModel(function, structs_of(names, **lengths), inputs, axes, names, words, False)


STREAMS = {
    "CLIP with attention": clip,
    "Whisper": whisper,
    "translation, two vocabularies": translation,
    "ALBERT, table of low rank": factorised,
    "DiT, conditioned": diffusion,
}
