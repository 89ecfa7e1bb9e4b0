"""Models without attention: squares, convolutions, tables, towers."""

import jax
import jax.numpy as jnp

from tests.choosing.named_models import (
    BATCH,
    EMBEDDING,
    LAYERS,
    NEURONS,
    SEQ,
    TOKENS,
    VOCABULARY,
    NamedModel,
    struct,
    structs_of,
)


def square_mlp() -> NamedModel:
    """Layers that are square: each hidden axis is one of its own."""
    axes = ["features_in", *(f"hidden_{i}" for i in range(3)), "features_out"]
    names: dict[str, tuple[str, ...]] = {}
    for i in range(4):
        names |= {f"layers/{i}/weight": (axes[i], axes[i + 1]), f"layers/{i}/bias": (axes[i + 1],)}

    def function(weights, x):
        for i in range(4):
            x = jax.nn.relu(x @ weights["layers"][i]["weight"] + weights["layers"][i]["bias"])
        return x

    width = EMBEDDING
    weights = {
        "layers": [{"weight": struct(width, width), "bias": struct(width)} for _ in range(4)]
    }
    inputs = (("batch", "features_in"),)
    return NamedModel(function, weights, (struct(BATCH, width),), inputs, names, {}, False)


def conv_net() -> NamedModel:
    """Residual blocks of convolutions; as many rows as columns as output channels of the stem."""
    names: dict[str, tuple[str | None, ...]] = {
        "stem": (None, None, "colours", "channels"),
        "classes": ("height*width*channels", "classes"),
    }
    for i in range(2):
        names[f"up.{i}"] = (None, None, "channels", "inner")
        names[f"down.{i}"] = (None, None, "inner", "channels")

    def conv(x, kernel):
        numbers = ("NHWC", "HWIO", "NHWC")
        return jax.lax.conv_general_dilated(x, kernel, (1, 1), "SAME", dimension_numbers=numbers)

    def function(weights, images):
        x = conv(images, weights["stem"])
        for i in range(2):
            x = x + conv(jax.nn.relu(conv(x, weights[f"up.{i}"])), weights[f"down.{i}"])
        x = jax.lax.reduce_window(x, 0.0, jax.lax.add, (1, 2, 2, 1), (1, 2, 2, 1), "VALID")
        return x.reshape(BATCH, -1) @ weights["classes"]

    taps = {"stem": 3, "up.0": 3, "up.1": 3, "down.0": 1, "down.1": 1}
    lengths = {"colours": 3, "channels": 8, "inner": 8}
    weights = {
        path: struct(*(lengths[name] if name else taps[path] for name in names[path]))
        for path in taps
    } | {"classes": struct(4 * 4 * 8, 8)}
    images, axes = struct(BATCH, 8, 8, 3), (("batch", "height", "width", "colours"),)
    return NamedModel(function, weights, (images,), axes, names, {}, False)


def embedding_tables() -> NamedModel:
    """DLRM: a table for each feature, all of one width, their products, and two small MLPs."""
    names: dict[str, tuple[str, ...]] = {
        **{f"tables.{i}": (f"rows_{i}", "embedding") for i in range(3)},
        "bottom": ("dense", "embedding"),
        "top": ("pairs", "hidden"),
        "out": ("hidden", "one"),
    }

    def function(weights, dense, sparse):
        vectors = [jax.nn.relu(dense @ weights["bottom"])]
        vectors += [weights[f"tables.{i}"][sparse[:, i]] for i in range(3)]
        stacked = jnp.stack(vectors, 1)
        products = jnp.einsum("bie,bje->bij", stacked, stacked)
        rows, columns = jnp.triu_indices(4, 1)
        return jax.nn.relu(products[:, rows, columns] @ weights["top"]) @ weights["out"]

    lengths = {"rows_0": 32, "rows_1": 32, "rows_2": 16, "dense": 16}
    weights = structs_of(names, **lengths, pairs=6, hidden=16, one=1)
    inputs = (struct(BATCH, 16), struct(BATCH, 3, dtype=jnp.int32))
    axes = (("batch", "dense"), ("batch", "features"))
    return NamedModel(function, weights, inputs, axes, names, {}, False)


def mixer() -> NamedModel:
    """MLP-Mixer: one MLP over the positions, one over the channels, both of equal lengths."""
    names: dict[str, tuple[str, ...]] = {
        "stem": ("pixels", "embedding"),
        "head": ("embedding", "classes"),
    }
    for i in range(LAYERS):
        names |= {
            f"{i}.tokens.up": ("seq", "token_neurons"),
            f"{i}.tokens.down": ("token_neurons", "seq"),
            f"{i}.channels.up": ("embedding", "neurons"),
            f"{i}.channels.down": ("neurons", "embedding"),
        }

    def function(weights, patches):
        x = patches @ weights["stem"]
        for i in range(LAYERS):
            mixed = jax.nn.gelu(x.swapaxes(1, 2) @ weights[f"{i}.tokens.up"])
            x = x + (mixed @ weights[f"{i}.tokens.down"]).swapaxes(1, 2)
            x = x + jax.nn.gelu(x @ weights[f"{i}.channels.up"]) @ weights[f"{i}.channels.down"]
        return x.mean(1) @ weights["head"]

    lengths = {"seq": EMBEDDING, "pixels": EMBEDDING, "classes": EMBEDDING}
    weights = structs_of(names, **lengths, token_neurons=NEURONS)
    axes = (("batch", "seq", "pixels"),)
    inputs = (struct(BATCH, EMBEDDING, EMBEDDING),)
    return NamedModel(function, weights, inputs, axes, names, {}, False)


def two_towers() -> NamedModel:
    """CLIP: images and texts, equally wide, meet in one space that is as wide as both."""
    names: dict[str, tuple[str, ...]] = {
        "image.stem": ("pixels", "image_width"),
        "text.embed": ("vocabulary", "text_width"),
    }
    for tower in ("image", "text"):
        for i in range(LAYERS):
            names |= {
                f"{tower}.{i}.up": (f"{tower}_width", f"{tower}_neurons"),
                f"{tower}.{i}.down": (f"{tower}_neurons", f"{tower}_width"),
            }
        names[f"{tower}.projection"] = (f"{tower}_width", "shared")

    def tower(weights, name, x):
        for i in range(LAYERS):
            x = x + jax.nn.gelu(x @ weights[f"{name}.{i}.up"]) @ weights[f"{name}.{i}.down"]
        return x.mean(1) @ weights[f"{name}.projection"]

    def function(weights, patches, tokens):
        images = tower(weights, "image", patches @ weights["image.stem"])
        return images @ tower(weights, "text", weights["text.embed"][tokens]).T

    widths = dict.fromkeys(("image_width", "text_width", "shared", "pixels"), EMBEDDING)
    weights = structs_of(names, **widths, image_neurons=NEURONS, text_neurons=NEURONS)
    inputs = (struct(BATCH, SEQ, EMBEDDING), TOKENS)
    axes = (("batch", "patches", "pixels"), ("batch", "seq"))
    words = {f"{tower}_width": f"{tower}_embedding" for tower in ("image", "text")}
    return NamedModel(function, weights, inputs, axes, names, words, False)


def autoencoder() -> NamedModel:
    """An autoencoder of symmetric lengths: the code is as long as the features."""
    names: dict[str, tuple[str, ...]] = {
        "encoder.0": ("features", "encoder_hidden"),
        "encoder.1": ("encoder_hidden", "code"),
        "decoder.0": ("code", "decoder_hidden"),
        "decoder.1": ("decoder_hidden", "features"),
    }

    def function(weights, x):
        code = jax.nn.relu(x @ weights["encoder.0"]) @ weights["encoder.1"]
        made = jax.nn.relu(code @ weights["decoder.0"]) @ weights["decoder.1"]
        return ((made - x) ** 2).mean()

    lengths = dict.fromkeys(("features", "encoder_hidden", "code", "decoder_hidden"), VOCABULARY)
    weights = structs_of(names, **lengths)
    inputs = (struct(BATCH, VOCABULARY),)
    return NamedModel(function, weights, inputs, (("batch", "features"),), names, {}, False)
