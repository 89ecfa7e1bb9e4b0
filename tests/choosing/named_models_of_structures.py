"""Scenes, graphs, proteins, games, generators: what is neither text nor an encoder of pictures."""

import jax
import jax.numpy as jnp

from tests.choosing.named_models import (
    BATCH,
    EMBEDDING,
    HEADS,
    LAYERS,
    NEURONS,
    PROJECTION,
    SEQ,
    VOCABULARY,
    NamedModel,
    rms_norm,
    struct,
    structs_of,
)
from tests.choosing.transformer_parts import INNER, attend, mlp, mlp_names


def _conv(x, kernel, stride=1):
    numbers = ("NHWC", "HWIO", "NHWC")
    return jax.lax.conv_general_dilated(
        x, kernel, (stride, stride), "SAME", dimension_numbers=numbers
    )


def radiance_field() -> NamedModel:
    """NeRF: eight square layers, what goes into the first also into the fifth; colours by view."""
    names = {}
    axes = ["encoded", *(f"hidden_{i}" for i in range(8))]
    for i in range(8):
        read = "encoded_and_hidden" if i == 4 else axes[i]
        names |= {f"{i}.w": (read, axes[i + 1]), f"{i}.b": (axes[i + 1],)}
    names |= {"sigma": ("hidden_7", None), "bottleneck": ("hidden_7", "bottleneck")}
    names |= {"view": ("bottleneck_and_view", "half"), "rgb": ("half", "rgb")}

    def encoded(x, count):
        scaled = (x[..., None, :] * 2.0 ** jnp.arange(count)[:, None]).reshape(*x.shape[:-1], -1)
        return jnp.concatenate([x, jnp.sin(scaled), jnp.cos(scaled)], -1)

    def function(w, places, views):
        first = h = encoded(places, 4)
        for i in range(8):
            h = jnp.concatenate([first, h], -1) if i == 4 else h
            h = jax.nn.relu(h @ w[f"{i}.w"] + w[f"{i}.b"])
        sigma = jax.nn.relu(h @ w["sigma"])
        h = jnp.concatenate([h @ w["bottleneck"], encoded(views, 2)], -1)
        return sigma, jax.nn.sigmoid(jax.nn.relu(h @ w["view"]) @ w["rgb"])

    size = 27
    lengths = dict.fromkeys((*axes, "bottleneck"), size) | {"encoded_and_hidden": 2 * size}
    lengths |= {"bottleneck_and_view": size + 15, "half": 8, "rgb": 3}
    plain = {path: axes for path, axes in names.items() if path != "sigma"}
    weights = structs_of(plain, **lengths) | {"sigma": struct(size, 1)}
    inputs, of_inputs = (struct(4, 8, 3), struct(4, 8, 3)), (("rays", "samples", None),) * 2
    return NamedModel(function, weights, inputs, of_inputs, names, {}, False)


def graph_attention() -> NamedModel:
    """GAT: edges give scores by addition, a softmax over those that come in, and a sum of them."""
    names = {}
    for i, read in enumerate(("features", "joined_0")):
        names |= {
            f"{i}.w": (read, f"heads_{i}", f"hidden_{i}"),
            f"{i}.a_from": (f"heads_{i}", f"hidden_{i}"),
            f"{i}.a_to": (f"heads_{i}", f"hidden_{i}"),
        }
    names["classes"] = ("joined_1", "classes")
    nodes = EMBEDDING

    def function(w, x, senders, receivers):
        for i in range(2):
            h = jnp.einsum("nf,fhd->nhd", x, w[f"{i}.w"])
            left, right = (h * w[f"{i}.a_from"]).sum(-1), (h * w[f"{i}.a_to"]).sum(-1)
            scores = jax.nn.leaky_relu(left[senders] + right[receivers])
            most = jax.ops.segment_max(scores, receivers, nodes)
            scores = jnp.exp(scores - most[receivers])
            total = jax.ops.segment_sum(scores, receivers, nodes)
            shares = scores / total[receivers]
            x = jax.ops.segment_sum(h[senders] * shares[..., None], receivers, nodes)
            x = jax.nn.elu(x.reshape(nodes, -1))
        return x @ w["classes"]

    lengths = {f"heads_{i}": HEADS for i in range(2)} | {f"hidden_{i}": 4 for i in range(2)}
    lengths |= dict.fromkeys(("features", "joined_0", "joined_1"), EMBEDDING)
    weights = structs_of(names, **lengths, classes=HEADS)
    # What is joined is heads by hidden of the layer before.
    names |= {
        "1.w": ("heads_0*hidden_0", *names["1.w"][1:]),
        "classes": ("heads_1*hidden_1", "classes"),
    }
    edge = struct(EMBEDDING, dtype=jnp.int32)
    axes = (("nodes", "features"), ("edges",), ("edges",))
    return NamedModel(
        function, weights, (struct(nodes, EMBEDDING), edge, edge), axes, names, {}, False
    )


def message_passing() -> NamedModel:
    """Nodes and edges have features of equal lengths, which MLPs of both change in turn."""
    names = {"nodes": ("node_inputs", "node_width"), "edges": ("edge_inputs", "edge_width")}
    for i in range(LAYERS):
        names |= {
            f"{i}.edge.up": ("edge_and_nodes", f"edge_hidden_{i}"),
            f"{i}.edge.down": (f"edge_hidden_{i}", "edge_width"),
            f"{i}.node.up": ("node_and_edge", f"node_hidden_{i}"),
            f"{i}.node.down": (f"node_hidden_{i}", "node_width"),
        }
    names["out"] = ("node_width", "targets")

    def function(w, nodes, edges, senders, receivers):
        n, e = nodes @ w["nodes"], edges @ w["edges"]
        for i in range(LAYERS):
            h = jnp.concatenate([e, n[senders], n[receivers]], -1)
            e = e + jax.nn.relu(h @ w[f"{i}.edge.up"]) @ w[f"{i}.edge.down"]
            h = jnp.concatenate([n, jax.ops.segment_sum(e, receivers, len(nodes))], -1)
            n = n + jax.nn.relu(h @ w[f"{i}.node.up"]) @ w[f"{i}.node.down"]
        return n.mean(0) @ w["out"]

    widths = ("node_inputs", "edge_inputs", "node_width", "edge_width")
    hidden = [f"{kind}_hidden_{i}" for kind in ("node", "edge") for i in range(LAYERS)]
    lengths = dict.fromkeys((*widths, *hidden), EMBEDDING)
    lengths |= {"edge_and_nodes": 3 * EMBEDDING, "node_and_edge": 2 * EMBEDDING, "targets": 4}
    edge = struct(EMBEDDING, dtype=jnp.int32)
    inputs = (struct(EMBEDDING, EMBEDDING), struct(EMBEDDING, EMBEDDING), edge, edge)
    axes = (("nodes", "node_inputs"), ("edges", "edge_inputs"), ("edges",), ("edges",))
    return NamedModel(function, structs_of(names, **lengths), inputs, axes, names, {}, False)


def pairs_of_residues() -> NamedModel:
    """Evoformer: alignments attend with a bias of pairs; pairs are changed by products of both."""
    names = {"msa": ("aminos", "msa_width"), "pair": ("aminos", "pair_width")}
    for i in range(LAYERS):
        path = f"blocks.{i}.msa"
        names |= {f"{path}.{name}": ("msa_width", "heads", "projection") for name in "qkv"}
        names |= {
            f"{path}.gate": ("msa_width", "heads", "projection"),
            f"{path}.o": ("heads", "projection", "msa_width"),
            f"{path}.bias": ("pair_width", "heads"),
            f"{path}.up": ("msa_width", f"msa_neurons_{i}"),
            f"{path}.down": (f"msa_neurons_{i}", "msa_width"),
            f"{path}.left": ("msa_width", "outer_left"),
            f"{path}.right": ("msa_width", "outer_right"),
            f"{path}.outer": ("outer_left", "outer_right", "pair_width"),
        }
        path = f"blocks.{i}.pair"
        names |= {
            f"{path}.a": ("pair_width", f"triangle_{i}"),
            f"{path}.b": ("pair_width", f"triangle_{i}"),
            f"{path}.triangle": (f"triangle_{i}", "pair_width"),
            f"{path}.up": ("pair_width", f"pair_neurons_{i}"),
            f"{path}.down": (f"pair_neurons_{i}", "pair_width"),
        }

    def function(w, alignments):
        m = alignments @ w["msa"]
        z = (alignments[:, 0, :, None] + alignments[:, 0, None]) @ w["pair"]
        for i in range(LAYERS):
            own = {name: w[f"blocks.{i}.msa.{name}"] for name in _EVOFORMER}
            h = rms_norm(m, 1.0)
            q, k, v, gate = (jnp.einsum("bsrc,chd->bsrhd", h, own[n]) for n in (*"qkv", "gate"))
            bias = jnp.einsum("bijc,ch->bhij", z, own["bias"])
            shares = jax.nn.softmax(jnp.einsum("bsihd,bsjhd->bshij", q, k) + bias[:, None], -1)
            made = jnp.einsum("bshij,bsjhd->bsihd", shares, v) * jax.nn.sigmoid(gate)
            m = m + jnp.einsum("bsihd,hdc->bsic", made, own["o"])
            m = m + jax.nn.relu(m @ own["up"]) @ own["down"]
            left, right = rms_norm(m, 1.0) @ own["left"], rms_norm(m, 1.0) @ own["right"]
            z = z + jnp.einsum("bsic,bsjd,cde->bije", left, right, own["outer"]) / SEQ
            own = {
                name: w[f"blocks.{i}.pair.{name}"] for name in ("a", "b", "triangle", "up", "down")
            }
            h = rms_norm(z, 1.0)
            made = jnp.einsum("bikc,bjkc->bijc", h @ own["a"], h @ own["b"])
            z = z + rms_norm(made, 1.0) @ own["triangle"]
            z = z + jax.nn.relu(z @ own["up"]) @ own["down"]
        return z

    names_of_neurons = [f"{kind}_neurons_{i}" for kind in ("msa", "pair") for i in range(LAYERS)]
    lengths = dict.fromkeys(("msa_width", "pair_width", "aminos"), EMBEDDING)
    lengths |= dict.fromkeys(names_of_neurons, NEURONS)
    lengths |= {f"triangle_{i}": EMBEDDING for i in range(LAYERS)} | {
        "outer_left": 4,
        "outer_right": 4,
    }
    weights = structs_of(names, **lengths)
    merged = {
        f"{kind}_neurons_{i}": f"{kind}_neurons" for kind in ("msa", "pair") for i in range(LAYERS)
    }
    names = {path: tuple(merged.get(axis, axis) for axis in axes) for path, axes in names.items()}
    words = {"msa_width": "msa_embedding", "pair_width": "pair_embedding"}
    words |= {"heads": "msa_heads", "projection": "msa_projection"}
    inputs, axes = (struct(BATCH, 4, SEQ, EMBEDDING),), (("batch", "rows", "residues", "aminos"),)
    return NamedModel(function, weights, inputs, axes, names, words, False)


_EVOFORMER = (*"qkvo", "gate", "bias", "up", "down", "left", "right", "outer")


def noise_removed() -> NamedModel:
    """DDPM's U-Net: two levels of one width, skips joined, time added, attention in the middle."""
    names = {"time.0": ("waves", "time_hidden"), "time.1": ("time_hidden", "time_width")}
    taps = {}

    def add_conv(path, into, out, size=3):
        names[path] = (None, None, into, out)
        taps[path] = (size, size, lengths[into], lengths[out])

    lengths = dict.fromkeys(("waves", "time_hidden", "time_width"), EMBEDDING) | {"colours": 3}
    for path, into, out in _UNET:
        lengths |= {out: EMBEDDING, f"{path}.inner": EMBEDDING}
        lengths[into] = {"joined_1": 2 * EMBEDDING, "joined_0": 2 * EMBEDDING}.get(into, EMBEDDING)
        add_conv(f"{path}.conv1", into, f"{path}.inner")
        add_conv(f"{path}.conv2", f"{path}.inner", out)
        add_conv(f"{path}.skip", into, out, 1)
        names[f"{path}.time"] = ("time_width", f"{path}.inner")
    lengths |= {"stem": EMBEDDING, "colours": 3, "made": 3}
    add_conv("stem", "colours", "stem")
    add_conv("end", "up_0", "made")
    names |= {f"attn.{name}": ("middle", "attended") for name in "qkv"}
    names["attn.o"] = ("attended", "middle")

    def res(w, path, x, t):
        h = _conv(jax.nn.silu(x), w[f"{path}.conv1"])
        h = h + (jax.nn.silu(t) @ w[f"{path}.time"])[:, None, None]
        return _conv(jax.nn.silu(h), w[f"{path}.conv2"]) + _conv(x, w[f"{path}.skip"])

    def function(w, pictures, time):
        angles = time[:, None] * jnp.exp(-jnp.arange(8) * 0.5)
        t = jnp.concatenate([jnp.sin(angles), jnp.cos(angles)], -1)
        t = jax.nn.silu(t @ w["time.0"]) @ w["time.1"]
        x = _conv(pictures, w["stem"])
        high = res(w, "down_0", x, t)
        low = res(w, "down_1", jax.image.resize(high, (BATCH, 4, 4, EMBEDDING), "nearest"), t)
        x = res(w, "middle", low, t)
        flat = x.reshape(BATCH, 16, EMBEDDING)
        q, k, v = (flat @ w[f"attn.{name}"] for name in "qkv")
        shares = jax.nn.softmax(q @ k.swapaxes(-1, -2) / 4, -1)
        x = x + ((shares @ v) @ w["attn.o"]).reshape(x.shape)
        x = res(w, "up_1", jnp.concatenate([x, low], -1), t)
        x = jax.image.resize(x, (BATCH, 8, 8, EMBEDDING), "nearest")
        x = res(w, "up_0", jnp.concatenate([x, high], -1), t)
        return _conv(jax.nn.silu(x), w["end"])

    plain = {path: axes for path, axes in names.items() if path not in taps}
    weights = structs_of(plain, **lengths, attended=EMBEDDING)
    weights |= {path: struct(*shape) for path, shape in taps.items()}
    inputs = (struct(BATCH, 8, 8, 3), struct(BATCH))
    axes = (("batch", "height", "width", "colours"), ("batch",))
    # What attention adds to what it reads is the embedding to the library.
    words = {"attended": "projection", "middle": "embedding"}
    return NamedModel(function, weights, inputs, axes, names, words, False)


_UNET = (
    ("down_0", "stem", "down_0"),
    ("down_1", "down_0", "down_1"),
    ("middle", "down_1", "middle"),
    ("up_1", "joined_1", "up_1"),
    ("up_0", "joined_0", "up_0"),
)


def variational_autoencoder() -> NamedModel:
    """Mean and logarithm of the variance from a hidden layer; a sampled code; all square."""
    names = {
        "encoder.w": ("pixels", "encoder_hidden"),
        "encoder.b": ("encoder_hidden",),
        "mean.w": ("encoder_hidden", "code"),
        "mean.b": ("code",),
        "logvar.w": ("encoder_hidden", "code"),
        "logvar.b": ("code",),
        "decoder.w": ("code", "decoder_hidden"),
        "decoder.b": ("decoder_hidden",),
        "out.w": ("decoder_hidden", "pixels"),
        "out.b": ("pixels",),
    }

    def function(w, x, seed):
        def dense(path, y):
            return y @ w[f"{path}.w"] + w[f"{path}.b"]

        h = jax.nn.relu(dense("encoder", x))
        mean, logvar = dense("mean", h), dense("logvar", h)
        noise = jax.random.normal(jax.random.key(seed), mean.shape)
        made = dense("out", jax.nn.relu(dense("decoder", mean + jnp.exp(logvar / 2) * noise)))
        apart = -0.5 * jnp.sum(1 + logvar - mean**2 - jnp.exp(logvar))
        errors = jax.nn.softplus(made) - x * made
        return errors.sum() + apart

    lengths = dict.fromkeys(("pixels", "encoder_hidden", "decoder_hidden", "code"), EMBEDDING)
    inputs = (struct(EMBEDDING, EMBEDDING), struct(dtype=jnp.uint32))
    axes = (("batch", "pixels"), ())
    return NamedModel(function, structs_of(names, **lengths), inputs, axes, names, {}, False)


def generator_and_critic() -> NamedModel:
    """DCGAN: transposed convolutions make what strided ones judge, of equal channels."""
    taps, names = {}, {"project": ("noise", "rows*columns*made_0")}
    for path, into, out in (
        ("up_0", "made_0", "made_1"),
        ("up_1", "made_1", "colours"),
        ("down_0", "colours", "seen_0"),
        ("down_1", "seen_0", "seen_1"),
    ):
        names[path] = (None, None, into, out)
        taps[path] = (4, 4, *(3 if axis == "colours" else 8 for axis in (into, out)))
        names |= {f"{path}.{name}": (out,) for name in ("scale", "bias")}
    names["judge"] = ("rows_out*columns_out*seen_1", None)

    def normed(w, path, x):
        x = (x - x.mean((0, 1, 2))) * jax.lax.rsqrt(x.var((0, 1, 2)) + 1e-5)
        return x * w[f"{path}.scale"] + w[f"{path}.bias"]

    def function(w, noise, pictures):
        x = (noise @ w["project"]).reshape(-1, 2, 2, 8)
        for path in ("up_0", "up_1"):
            x = jax.lax.conv_transpose(x, w[path], (2, 2), "SAME")
            x = jax.nn.relu(normed(w, path, x))
        x = jnp.concatenate([jnp.tanh(x), pictures])
        for path in ("down_0", "down_1"):
            x = jax.nn.leaky_relu(normed(w, path, _conv(x, w[path], 2)))
        return x.reshape(len(x), -1) @ w["judge"]

    lengths = {"noise": 32, "rows": 2, "columns": 2, "made_0": 8, "made_1": 8, "colours": 3}
    lengths |= {"seen_0": 8, "seen_1": 8}
    plain = {p: axes for p, axes in names.items() if p not in taps and p != "judge"}
    weights = structs_of(plain, **lengths) | {path: struct(*shape) for path, shape in taps.items()}
    weights["judge"] = struct(32, 1)
    inputs = (struct(BATCH, 32), struct(BATCH, 8, 8, 3))
    axes = (("batch", "noise"), ("batch", "height", "width", "colours"))
    return NamedModel(function, weights, inputs, axes, names, {}, False)


def users_and_items() -> NamedModel:
    """Collaborative filtering: two tables of each, factors multiplied, and an MLP of both."""
    names = {
        "user_factors": ("users", "factors"),
        "item_factors": ("items", "factors"),
        "user_embedding": ("users_", "user_width"),
        "item_embedding": ("items_", "item_width"),
        "mlp.0": ("both", "hidden_0"),
        "mlp.1": ("hidden_0", "hidden_1"),
        "out": ("factors_and_hidden", None),
    }

    def function(w, users, items):
        factors = w["user_factors"][users] * w["item_factors"][items]
        h = jnp.concatenate([w["user_embedding"][users], w["item_embedding"][items]], -1)
        h = jax.nn.relu(jax.nn.relu(h @ w["mlp.0"]) @ w["mlp.1"])
        return (jnp.concatenate([factors, h], -1) @ w["out"])[:, 0]

    rows = dict.fromkeys(("users", "items", "users_", "items_"), VOCABULARY)
    widths = dict.fromkeys(("factors", "user_width", "item_width", "hidden_1"), EMBEDDING)
    plain = {path: axes for path, axes in names.items() if path != "out"}
    weights = structs_of(plain, **rows, **widths, both=2 * EMBEDDING, hidden_0=2 * EMBEDDING)
    weights["out"] = struct(2 * EMBEDDING, 1)
    index = struct(BATCH, dtype=jnp.int32)
    return NamedModel(function, weights, (index, index), (("batch",),) * 2, names, {}, False)


def actor_and_critic() -> NamedModel:
    """PPO for Atari: convolutions, one hidden layer, as many actions as channels, and a value."""
    names = {"dense": ("rows*columns*channels_1", "hidden"), "dense.b": ("hidden",)}
    names |= {"actor": ("hidden", "actions"), "actor.b": ("actions",), "critic": ("hidden", None)}
    names |= {"conv_0": (None, None, "frames", "channels_0")}
    names |= {"conv_1": (None, None, "channels_0", "channels_1")}

    def function(w, frames):
        x = jax.nn.relu(_conv(frames / 255, w["conv_0"], 4))
        x = jax.nn.relu(_conv(x, w["conv_1"], 2)).reshape(BATCH, -1)
        x = jax.nn.relu(x @ w["dense"] + w["dense.b"])
        return jax.nn.log_softmax(x @ w["actor"] + w["actor.b"]), (x @ w["critic"])[:, 0]

    weights = structs_of(
        {"dense.b": ("hidden",), "actor": ("hidden", "actions")}, hidden=32, actions=8
    )
    weights |= {"actor.b": struct(8), "dense": struct(32, 32), "critic": struct(32, 1)}
    weights |= {"conv_0": struct(8, 8, 4, 8), "conv_1": struct(4, 4, 8, 8)}
    inputs, axes = (struct(BATCH, 16, 16, 4),), (("batch", "height", "width", "frames"),)
    return NamedModel(function, weights, inputs, axes, names, {}, False)


def resampler(layers: int = 3) -> NamedModel:
    """Flamingo's: latents ask features and themselves together; both are as wide, as many as heads.

    Features are inputs and are normed, so that they are read as the latents are.
    """
    names = {"latents": ("latents", "embedding")}
    for i in range(layers):
        path = f"layers.{i}"
        names |= {f"{path}.to_q": ("embedding", INNER), f"{path}.to_out": (INNER, "embedding")}
        names |= {f"{path}.to_kv": ("embedding", "kv*heads*projection")}
        names |= {f"{path}.norm_media": ("embedding",), f"{path}.norm_latents": ("embedding",)}
        names |= mlp_names(f"{path}.ff") | {f"{path}.norm_ff": ("embedding",)}
    names |= {"norm": ("embedding",)}

    def function(w, features):
        x = jnp.broadcast_to(w["latents"], (BATCH, *w["latents"].shape))
        for i in range(layers):
            path = f"layers.{i}"
            media = rms_norm(features, w[f"{path}.norm_media"])
            h = rms_norm(x, w[f"{path}.norm_latents"])
            q = h @ w[f"{path}.to_q"]
            k, v = jnp.split(jnp.concatenate([media, h], 1) @ w[f"{path}.to_kv"], 2, -1)
            q, k, v = (
                y.reshape(BATCH, -1, HEADS, PROJECTION).transpose(0, 2, 1, 3) for y in (q, k, v)
            )
            x = x + attend(q, k, v) @ w[f"{path}.to_out"]
            x = x + mlp(w, f"{path}.ff", rms_norm(x, w[f"{path}.norm_ff"]))
        return rms_norm(x, w["norm"])

    weights = structs_of(names, latents=HEADS, kv=2)
    inputs = (struct(BATCH, SEQ, EMBEDDING),)
    return NamedModel(function, weights, inputs, (("batch", "patches", None),), names, {}, False)


STRUCTURES = {
    "NeRF": radiance_field,
    "graph attention": graph_attention,
    "message passing": message_passing,
    "Evoformer": pairs_of_residues,
    "U-Net, conditioned": noise_removed,
    "variational autoencoder": variational_autoencoder,
    "generator and critic": generator_and_critic,
    "collaborative filtering": users_and_items,
    "actor and critic": actor_and_critic,
    "Perceiver resampler": resampler,
}
