"""Models without attention: squares, convolutions, tables, towers, recurrences."""

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
    rms_norm,
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
    return NamedModel(function, weights, inputs, axes, names, {"classes": "outputs"}, False)


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
    words |= {"shared": "joint_embedding"}
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


def _no_attention(block_names, block, **lengths) -> NamedModel:
    """A residual stream of blocks, each of which takes its weights and the activations."""
    names = {"embed": ("vocabulary", "embedding"), "norm": ("embedding",)}
    for i in range(LAYERS):
        names |= {f"{i}.{path}": axes for path, axes in block_names.items()}

    def function(weights, tokens):
        x = weights["embed"][tokens]
        for i in range(LAYERS):
            own = {path: weights[f"{i}.{path}"] for path in block_names}
            x = block(own, x)
        return rms_norm(x, weights["norm"]) @ weights["embed"].T

    weights = structs_of(names, **lengths)
    return NamedModel(function, weights, (TOKENS,), (("batch", "seq"),), names, {}, False)


def linear_recurrence() -> NamedModel:
    """RWKV: what positions hand on in a loop is not the neurons of the MLP, which are as many."""
    names = {
        **dict.fromkeys(("scale", "mix_key", "mix_value", "mix"), ("embedding",)),
        **dict.fromkeys(("decay", "first"), ("attention",)),
        **dict.fromkeys(("key", "value", "receptance"), ("attention", "embedding")),
        "output": ("embedding", "attention"),
        "up": ("neurons", "embedding"),
        "down": ("embedding", "neurons"),
    }

    def mixed(x, share):
        before = jnp.concatenate([jnp.zeros_like(x[:, :1]), x[:, :-1]], 1)
        return x * share + before * (1 - share)

    def block(w, x):
        h = rms_norm(x, w["scale"])
        keys, values = (mixed(h, w[f"mix_{name}"]) @ w[name].T for name in ("key", "value"))
        decay = jnp.exp(-jnp.exp(w["decay"]))

        def step(state, now):
            key, value = now
            weight = jnp.exp(w["first"] + key)
            made = (state[0] + weight * value) / (state[1] + weight)
            total = (state[0] * decay + jnp.exp(key) * value, state[1] * decay + jnp.exp(key))
            return total, made

        start = (jnp.zeros((BATCH, NEURONS)), jnp.zeros((BATCH, NEURONS)))
        _, made = jax.lax.scan(step, start, (keys.swapaxes(0, 1), values.swapaxes(0, 1)))
        x = x + (jax.nn.sigmoid(h @ w["receptance"].T) * made.swapaxes(0, 1)) @ w["output"].T
        return x + jnp.square(jax.nn.relu(mixed(x, w["mix"]) @ w["up"].T)) @ w["down"].T

    return _no_attention(names, block, attention=NEURONS)


def state_space() -> NamedModel:
    """Mamba: a state for each inner channel, and weights of unlike widths that select from it."""
    rank = state = taps = 4
    names = {
        "norm": ("embedding",),
        "in_proj": ("gate_x*inner", "embedding"),
        "conv": ("inner",),
        "x_proj": ("dt_b_c", "inner"),
        "dt_proj": ("inner", "dt_rank"),
        "A_log": ("inner", "state"),
        "D": ("inner",),
        "out_proj": ("embedding", "inner"),
    }

    def block(w, x):
        inner, gate = jnp.split(rms_norm(x, w["norm"]) @ w["in_proj"].T, 2, -1)
        kernel = jnp.broadcast_to(w["conv"][:, None, None], (NEURONS, 1, taps))
        inner = jax.lax.conv_general_dilated(
            inner,
            kernel,
            (1,),
            [(taps - 1, 0)],
            dimension_numbers=("NWC", "OIW", "NWC"),
            feature_group_count=NEURONS,
        )
        delta, b, c = jnp.split(inner @ w["x_proj"].T, [rank, rank + state], -1)
        delta = jax.nn.softplus(delta @ w["dt_proj"].T)

        def step(carry, now):
            u, delta, b, c = now
            kept = carry * jnp.exp(delta[..., None] * -jnp.exp(w["A_log"]))
            carry = kept + (delta * u)[..., None] * b[:, None]
            return carry, (carry * c[:, None]).sum(-1)

        over_time = tuple(y.swapaxes(0, 1) for y in (inner, delta, b, c))
        _, made = jax.lax.scan(step, jnp.zeros((BATCH, NEURONS, state)), over_time)
        made = made.swapaxes(0, 1) + inner * w["D"]
        return x + (made * jax.nn.silu(gate)) @ w["out_proj"].T

    lengths = {"inner": NEURONS, "gate_x": 2, "dt_b_c": rank + 2 * state}
    return _no_attention(names, block, **lengths, dt_rank=rank, state=state)


def gated_recurrence() -> NamedModel:
    """RecurrentGemma: positions are scanned by halves, for as many features as neurons."""
    names = {
        "x": ("embedding", "lru_width"),
        "y": ("embedding", "lru_width"),
        "decay": ("lru_width",),
        "out": ("lru_width", "embedding"),
        "up": ("embedding", "neurons"),
        "down": ("neurons", "embedding"),
    }

    def joined(first, second):
        return first[0] * second[0], first[1] * second[0] + second[1]

    def block(w, x):
        u = x @ w["x"]
        kept = jnp.exp(-jax.nn.softplus(w["decay"]) * jax.nn.sigmoid(u))
        _, state = jax.lax.associative_scan(joined, (kept, u * jnp.sqrt(1 - kept**2)), axis=1)
        x = x + (state * jax.nn.gelu(x @ w["y"])) @ w["out"]
        return x + jax.nn.gelu(x @ w["up"]) @ w["down"]

    return _no_attention(names, block, lru_width=NEURONS)
