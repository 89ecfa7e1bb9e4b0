"""Training steps of several families, as ``choose_layout`` is asked about them.

Widths are those of real models, but there are few blocks: compiling takes as long for small arrays.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
from flax import nnx
from penzai import pz
from penzai.models.transformer.variants import llamalike_common

import penzai_shard as pzs

ADAMW = optax.adamw(1e-3)


@dataclasses.dataclass(frozen=True)
class Step:
    """What is asked, in the words of ``choose_layout``.

    Attributes:
        model: The model, abstract.
        loss_fn: Its loss function.
        optimizer: An optimizer of optax.
        batch: The number of examples, or the inputs by name.
        seq: The length of a sequence where ``batch`` is a number.
        plain_arrays: Whether the loss function computes with arrays without names.
        names: What the model calls the axes of roles.
    """

    model: Any
    loss_fn: Callable[..., Any]
    optimizer: Any
    batch: Any
    seq: int | None = None
    plain_arrays: bool = False
    names: Mapping[str, Any] | None = None


# Parts


def struct(*shape: int, dtype: Any = jnp.float32) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)


def token_struct(batch: int, seq: int) -> jax.ShapeDtypeStruct:
    return struct(batch, seq, dtype=jnp.int32)


def read_names(text: str, path: str = "") -> dict[str, tuple[Any, ...]]:
    """The names of each weight below a path; ``-`` stands for a dimension without one.

    >>> read_names("up: embedding neurons, bias: neurons", "mlp.")
    {'mlp.up': ('embedding', 'neurons'), 'mlp.bias': ('neurons',)}
    """
    pairs = (entry.split(":") for entry in text.split(","))
    return {
        f"{path}{name.strip()}": tuple(None if axis == "-" else axis for axis in axes.split())
        for name, axes in pairs
    }


def make_weights(names: Mapping[str, tuple[Any, ...]], **lengths: int) -> Any:
    """Named structs; an axis without a name is of a kernel that is three wide."""
    structs = {
        path: struct(*(lengths[axis] if axis else 3 for axis in axes))
        for path, axes in names.items()
    }
    return pzs.name_axes(structs, names)


def classify(
    weights: Any,
    apply: Callable[..., Any],
    inputs: Mapping[str, Any],
    optimizer: Any,
    **options: Any,
) -> Step:
    """A step in which logits of a function are to predict the last of its inputs."""

    def loss(model: Any, **given: Any) -> Any:
        targets = given[[*inputs][-1]]
        logits = apply(model, **given)
        return optax.softmax_cross_entropy_with_integer_labels(logits, targets).mean()

    return minimise(weights, loss, inputs, optimizer, **options)


def minimise(
    weights: Any,
    loss: Callable[..., Any],
    inputs: Mapping[str, Any],
    optimizer: Any,
    **options: Any,
) -> Step:
    """A step of a function that gives the loss of the weights and inputs."""

    def loss_fn(model: Any, rng: Any, state: Any, **given: Any) -> tuple[Any, Any, Any]:
        del rng
        return loss(model, **given), state, {}

    return Step(weights, loss_fn, optimizer, inputs, **{"plain_arrays": True, **options})


def normalise(x: Any) -> Any:
    return x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-6)


def attend(q: Any, k: Any, v: Any, is_causal: bool) -> Any:
    """Attention of [batch, seq, heads, projection]."""
    scores = jnp.einsum("bshd,bthd->bhst", q, k) / math.sqrt(q.shape[-1])
    if is_causal:
        scores = jnp.where(jnp.tril(jnp.ones(scores.shape[-2:], bool)), scores, -1e9)
    return jnp.einsum("bhst,bthd->bshd", jax.nn.softmax(scores, -1), v)


ATTENTION = ", ".join(f"{x}: embedding heads projection" for x in "qkv")
ATTENTION += ", o: heads projection embedding"
FEED_FORWARD = "up: embedding neurons, down: neurons embedding"


def attention_block(w: Any, path: str, x: Any, context: Any = None, is_causal: bool = True) -> Any:
    """Adds attention to itself, or to a context, with weights below a path."""
    h = normalise(x)
    read = h if context is None else context
    q = jnp.einsum("bse,ehd->bshd", h, w[f"{path}q"])
    k, v = (jnp.einsum("bse,ehd->bshd", read, w[f"{path}{name}"]) for name in "kv")
    return x + jnp.einsum("bshd,hde->bse", attend(q, k, v, is_causal), w[f"{path}o"])


# Penzai's own


def llama(
    batch: int,
    seq: int,
    embedding: int = 1024,
    neurons: int = 4096,
    vocabulary: int = 8192,
    optimizer: Any = ADAMW,
    **changes: Any,
) -> Step:
    """A Llama with queries in groups; ``changes`` are those of its configuration."""
    options: dict[str, Any] = {
        "num_decoder_blocks": 1,
        "num_kv_heads": 8,
        "query_head_multiplier": 2,
        "projection_dim": embedding // 16,
        "mlp_variant": "swiglu",
        "tie_embedder_and_logits": False,
    }
    config = llamalike_common.LlamalikeTransformerConfig(
        embedding_dim=embedding,
        mlp_hidden_dim=neurons,
        vocab_size=vocabulary,
        **options | changes,
    )
    build = llamalike_common.build_llamalike_transformer
    model = pzs.abstract_model(build, config, jax.random.key(0))

    def loss_fn(model: Any, rng: Any, state: Any, tokens: Any) -> tuple[Any, Any, Any]:
        del rng
        return pzs.cross_entropy(model(tokens), tokens), state, {}

    return Step(model, loss_fn, optimizer, batch, seq)


def rolled_llama(*args: Any, **changes: Any) -> Step:
    """A Llama whose blocks are one stack, and run as a loop."""
    step = llama(*args, **changes, use_layer_stack=True)
    return dataclasses.replace(step, model=pzs.roll_layer_stacks().apply(step.model))


def gemma(batch: int, seq: int) -> Step:
    """Gemma: keys and values of one head for all queries, and a table that is the logits' too."""
    return llama(
        batch,
        seq,
        2048,
        8192,
        65_536,
        num_kv_heads=1,
        query_head_multiplier=8,
        projection_dim=256,
        mlp_variant="geglu_approx",
        tie_embedder_and_logits=True,
    )


def mlp(batch: int, embedding: int = 2048, neurons: int = 8192, layers: int = 2) -> Step:
    """Layers that widen and narrow in turn."""

    def build() -> Any:
        key = jax.random.key(0)
        wide, narrow = {"neurons": neurons}, {"embedding": embedding}
        made: list[Any] = []
        for i in range(layers):
            made += [
                pz.nn.Linear.from_config(f"layer_{i}/up", key, narrow, wide),
                pz.nn.Elementwise(jnp.tanh),
                pz.nn.Linear.from_config(f"layer_{i}/down", key, wide, narrow),
            ]
        return pz.nn.Sequential(made)

    def loss_fn(model: Any, rng: Any, state: Any, x: Any) -> tuple[Any, Any, Any]:
        del rng
        return (model(x).untag("batch", "embedding") ** 2).mean().unwrap(), state, {}

    x = jax.eval_shape(lambda: pz.nx.zeros({"batch": batch, "embedding": embedding}))
    return Step(pzs.abstract_model(build), loss_fn, ADAMW, {"x": x})


# Dictionaries of weights


def gpt2(batch: int, seq: int, embedding: int = 1024) -> Step:
    """Queries, keys and values from one weight, by heads first: three times as long as heads."""
    names = read_names(
        "wte: vocabulary embedding, wpe: positions embedding, c_attn: embedding heads,"
        f"c_proj: heads embedding, {FEED_FORWARD}"
    )
    structs = {
        "wte": struct(50_304, embedding),
        "wpe": struct(seq, embedding),
        "c_attn": struct(embedding, 3 * embedding),
        "c_proj": struct(embedding, embedding),
        "up": struct(embedding, 4 * embedding),
        "down": struct(4 * embedding, embedding),
    }

    def apply(w: Any, tokens: Any) -> Any:
        x = w["wte"][tokens] + w["wpe"][jnp.arange(tokens.shape[1])]
        fused = (normalise(x) @ w["c_attn"]).reshape(*tokens.shape, embedding // 64, 3, 64)
        found = attend(*(fused[..., i, :] for i in range(3)), True)
        x = x + found.reshape(x.shape) @ w["c_proj"]
        x = x + jax.nn.gelu(normalise(x) @ w["up"]) @ w["down"]
        return normalise(x) @ w["wte"].T

    inputs = {"tokens": token_struct(batch, seq)}
    return classify(pzs.name_axes(structs, names), apply, inputs, ADAMW)


def encoder_decoder(batch: int, seq: int) -> Step:
    """One block that reads all of a sequence, and one that reads it while writing another."""
    names = read_names("table: vocabulary embedding, head: embedding vocabulary")
    names |= read_names(f"{ATTENTION}, {FEED_FORWARD}", "encoder.")
    names |= read_names(f"{ATTENTION}, {FEED_FORWARD}", "decoder.") | read_names(
        ATTENTION, "cross."
    )
    weights = make_weights(
        names, vocabulary=16_384, embedding=512, heads=8, projection=64, neurons=2048
    )

    def feed_forward(w: Any, part: str, x: Any) -> Any:
        return x + jax.nn.relu(normalise(x) @ w[f"{part}up"]) @ w[f"{part}down"]

    def apply(w: Any, sources: Any, targets: Any) -> Any:
        read = attention_block(w, "encoder.", w["table"][sources], is_causal=False)
        read = feed_forward(w, "encoder.", read)
        x = attention_block(w, "decoder.", w["table"][targets])
        x = attention_block(w, "cross.", x, read, is_causal=False)
        return feed_forward(w, "decoder.", x) @ w["head"]

    inputs = dict.fromkeys(("sources", "targets"), token_struct(batch, seq))
    return classify(weights, apply, inputs, ADAMW)


def experts(batch: int, seq: int) -> Step:
    """Experts of which each computes every token, weighed by a router."""
    names = read_names(
        "table: vocabulary embedding, router: embedding experts, up: experts embedding neurons,"
        "down: experts neurons embedding, head: embedding vocabulary"
    )
    weights = make_weights(names, vocabulary=8192, embedding=1024, experts=8, neurons=2048)

    def apply(w: Any, tokens: Any) -> Any:
        x = w["table"][tokens]
        share = jax.nn.softmax(x @ w["router"])
        hidden = jax.nn.silu(jnp.einsum("bse,xen->bsxn", x, w["up"]))
        return (x + jnp.einsum("bsxn,xne,bsx->bse", hidden, w["down"], share)) @ w["head"]

    inputs = {"tokens": token_struct(batch, seq)}
    return classify(weights, apply, inputs, ADAMW)


def tables(batch: int) -> Step:
    """Few products over tables with many rows, as for what people have clicked on."""
    names = read_names(
        "users: vocabulary embedding, items: vocabulary embedding, up: embedding neurons,"
        "head: neurons classes"
    )
    weights = make_weights(names, vocabulary=1_048_576, embedding=64, neurons=1024, classes=64)

    def apply(w: Any, users: Any, items: Any, chosen: Any) -> Any:
        del chosen
        x = w["users"][users].mean(1) * w["items"][items].mean(1)
        return jax.nn.relu(x @ w["up"]) @ w["head"]

    inputs = dict.fromkeys(("users", "items"), token_struct(batch, 16))
    inputs["chosen"] = struct(batch, dtype=jnp.int32)
    return classify(weights, apply, inputs, ADAMW)


def retrieval(batch: int) -> Step:
    """Two towers over tables: which item of a batch belongs to which user."""
    names = read_names("users: vocabulary embedding, items: vocabulary embedding")
    names |= read_names(FEED_FORWARD, "users.") | read_names(FEED_FORWARD, "items.")
    weights = make_weights(names, vocabulary=524_288, embedding=128, neurons=1024)

    def tower(w: Any, side: str, rows: Any) -> Any:
        x = w[side][rows].mean(1)
        return normalise(x + jax.nn.relu(x @ w[f"{side}.up"]) @ w[f"{side}.down"])

    def loss(w: Any, users: Any, items: Any) -> Any:
        scores = tower(w, "users", users) @ tower(w, "items", items).T
        own = jnp.arange(len(scores))
        return optax.softmax_cross_entropy_with_integer_labels(scores, own).mean()

    inputs = {"users": token_struct(batch, 8), "items": token_struct(batch, 2)}
    return minimise(weights, loss, inputs, optax.adagrad(0.05))


def vision(batch: int, patches: int = 256) -> Step:
    """A vision transformer: patches of images, attention to all, one class for each image."""
    names = read_names(
        f"patch: pixels embedding, positions: positions embedding, {ATTENTION}, {FEED_FORWARD},"
        "up_bias: neurons, down_bias: embedding, classifier: embedding classes"
    )
    lengths = {"embedding": 768, "heads": 12, "projection": 64, "neurons": 3072}
    weights = make_weights(names, pixels=768, positions=patches, classes=1000, **lengths)

    def apply(w: Any, images: Any, labels: Any) -> Any:
        del labels
        x = attention_block(w, "", images @ w["patch"] + w["positions"], is_causal=False)
        wide = jax.nn.gelu(normalise(x) @ w["up"] + w["up_bias"])
        x = x + wide @ w["down"] + w["down_bias"]
        return normalise(x).mean(1) @ w["classifier"]

    inputs = {"images": struct(batch, patches, 768), "labels": struct(batch, dtype=jnp.int32)}
    return classify(weights, apply, inputs, optax.sgd(0.1, momentum=0.9))


def scanned_gpt(batch: int, seq: int, layers: int = 4) -> Step:
    """Layers in a loop over stacked weights, each computed again in the backward pass."""
    stacked = read_names(f"{ATTENTION}, {FEED_FORWARD}")
    names = read_names("wte: vocabulary embedding, wpe: positions embedding")
    names |= {f"layers.{name}": ("layers", *axes) for name, axes in stacked.items()}
    lengths = {"embedding": 512, "heads": 8, "projection": 64, "neurons": 2048}
    weights = make_weights(names, vocabulary=16_384, positions=seq, layers=layers, **lengths)

    def block(x: Any, w: Any) -> tuple[Any, None]:
        x = attention_block(w, "", x)
        return x + jax.nn.gelu(normalise(x) @ w["up"]) @ w["down"], None

    def apply(w: Any, tokens: Any) -> Any:
        x = w["wte"][tokens] + w["wpe"][jnp.arange(tokens.shape[1])]
        x, _ = jax.lax.scan(
            jax.checkpoint(block), x, {name: w[f"layers.{name}"] for name in stacked}
        )
        return normalise(x) @ w["wte"].T

    inputs = {"tokens": token_struct(batch, seq)}
    return classify(weights, apply, inputs, optax.adam(1e-3))


def speech(batch: int, frames: int = 512, seq: int = 128) -> Step:
    """Reads frames of sound in two blocks, and writes tokens by a table that gives the logits too.

    As Radford et al. 2022, "Robust Speech Recognition via Large-Scale Weak Supervision"
    (arXiv:2212.04356) have it, with the widths of the model "small".
    """
    names = read_names("frames: bands embedding, table: vocabulary embedding")
    for part in ("read.0.", "read.1.", "cross."):
        names |= read_names(f"{ATTENTION}, {FEED_FORWARD}, bias: neurons", part)
    names |= read_names(ATTENTION, "write.")
    lengths = {"embedding": 768, "heads": 12, "projection": 64, "neurons": 3072}
    weights = make_weights(names, bands=80, vocabulary=51_864, **lengths)

    def feed_forward(w: Any, part: str, x: Any) -> Any:
        wide = jax.nn.gelu(normalise(x) @ w[f"{part}up"] + w[f"{part}bias"])
        return x + wide @ w[f"{part}down"]

    def apply(w: Any, sound: Any, tokens: Any) -> Any:
        heard = jax.nn.gelu(sound @ w["frames"])
        for part in ("read.0.", "read.1."):
            heard = feed_forward(w, part, attention_block(w, part, heard, is_causal=False))
        x = attention_block(w, "write.", w["table"][tokens])
        x = attention_block(w, "cross.", x, normalise(heard), is_causal=False)
        return normalise(feed_forward(w, "cross.", x)) @ w["table"].T

    inputs = {"sound": struct(batch, frames, 80), "tokens": token_struct(batch, seq)}
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), ADAMW)
    return classify(weights, apply, inputs, optimizer)


def two_of_experts(batch: int, seq: int, count: int = 16, capacity: int = 96) -> Step:
    """Attention, then two experts for each token, which products with one-hot arrays send there.

    As Lepikhin et al. 2020, "GShard" (arXiv:2006.16668) have it; what is over capacity is dropped.
    """
    names = read_names(
        f"table: vocabulary embedding, {ATTENTION}, router: embedding experts,"
        "up: experts embedding neurons, down: experts neurons embedding, head: embedding vocabulary"
    )
    lengths = {"embedding": 1024, "heads": 16, "projection": 64, "neurons": 2048}
    weights = make_weights(names, vocabulary=32_000, experts=count, **lengths)

    def apply(w: Any, tokens: Any) -> Any:
        x = attention_block(w, "", w["table"][tokens])
        h = normalise(x)
        shares, chosen = jax.lax.top_k(jax.nn.softmax(h @ w["router"]), 2)
        # Places in an expert are given to all first choices, and then to second ones.
        is_chosen = jax.nn.one_hot(chosen, count).transpose(0, 2, 1, 3)
        place = jnp.cumsum(is_chosen.reshape(batch, -1, count), 1).reshape(is_chosen.shape) - 1
        sent = is_chosen[..., None] * jax.nn.one_hot(place, capacity)
        combined = jnp.einsum("bksxc,bsk->bsxc", sent, shares)
        inside = jnp.einsum("bsxc,bse->xbce", sent.sum(1), h)
        wide = jax.nn.silu(jnp.einsum("xbce,xen->xbcn", inside, w["up"]))
        made = jnp.einsum("xbcn,xne->xbce", wide, w["down"])
        return normalise(x + jnp.einsum("bsxc,xbce->bse", combined, made)) @ w["head"]

    inputs = {"tokens": token_struct(batch, seq)}
    return classify(weights, apply, inputs, optax.lamb(1e-3))


def convolutions(batch: int, size: int = 64) -> Step:
    """Three convolutions with most of the products, and a dense head with most of the weights.

    As Simonyan and Zisserman 2014 (arXiv:1409.1556) have it, on small images.
    """
    names = read_names(
        "conv.0: - - colors thin, conv.1: - - thin medium, conv.2: - - medium thick,"
        "dense.0: features neurons, bias.0: neurons, dense.1: neurons embedding,"
        "bias.1: embedding, dense.2: embedding classes, bias.2: classes"
    )
    lengths = {"colors": 3, "thin": 64, "medium": 128, "thick": 256, "classes": 1000}
    features = 256 * (size // 8) ** 2
    weights = make_weights(names, features=features, neurons=4096, embedding=4096, **lengths)

    def apply(w: Any, images: Any, labels: Any) -> Any:
        del labels
        x = images
        for i in range(3):
            axes = ("NHWC", "HWIO", "NHWC")
            x = jax.lax.conv_general_dilated(x, w[f"conv.{i}"], (1, 1), "SAME", None, None, axes)
            n, height, width, maps = x.shape
            x = jax.nn.relu(x).reshape(n, height // 2, 2, width // 2, 2, maps).mean((2, 4))
        x = x.reshape(len(x), -1)
        for i in range(2):
            x = jax.nn.relu(x @ w[f"dense.{i}"] + w[f"bias.{i}"])
        return x @ w["dense.2"] + w["bias.2"]

    inputs = {"images": struct(batch, size, size, 3), "labels": struct(batch, dtype=jnp.int32)}
    optimizer = optax.sgd(0.01, momentum=0.9, nesterov=True)
    return classify(weights, apply, inputs, optimizer, names={"vocabulary": "classes"})


# Equinox


class Block(eqx.Module):
    norm: eqx.nn.RMSNorm
    attention: eqx.nn.MultiheadAttention
    mlp: eqx.nn.MLP

    def __init__(self, embedding: int, key: Any) -> None:
        self.norm = eqx.nn.RMSNorm(embedding)
        self.attention = eqx.nn.MultiheadAttention(embedding // 64, embedding, key=key)
        self.mlp = eqx.nn.MLP(embedding, embedding, 4 * embedding, 1, jax.nn.gelu, key=key)

    def __call__(self, x: Any) -> Any:
        h = jax.vmap(self.norm)(x)
        x = x + self.attention(h, h, h, jnp.tril(jnp.ones((len(x), len(x)), bool)))
        return x + jax.vmap(self.mlp)(x)


class Transformer(eqx.Module):
    tokens: eqx.nn.Embedding
    block: Block
    head: eqx.nn.Linear

    def __init__(self, vocabulary: int, embedding: int, key: Any) -> None:
        self.tokens = eqx.nn.Embedding(vocabulary, embedding, key=key)
        self.block = Block(embedding, key)
        self.head = eqx.nn.Linear(embedding, vocabulary, use_bias=False, key=key)

    def __call__(self, tokens: Any) -> Any:
        return jax.vmap(self.head)(self.block(jax.vmap(self.tokens)(tokens)))


EQUINOX_NAMES = read_names(
    "tokens/weight: vocabulary embedding, block/norm/*: embedding,head/weight: vocabulary embedding"
)
EQUINOX_NAMES |= read_names(
    "attention/query_proj/weight: heads embedding, attention/key_proj/weight: heads embedding,"
    "attention/value_proj/weight: heads embedding, attention/output_proj/weight: embedding heads,"
    "mlp/layers/0/weight: neurons embedding, mlp/layers/0/bias: neurons,"
    "mlp/layers/1/weight: embedding neurons, mlp/layers/1/bias: embedding",
    "block/",
)


def equinox_transformer(batch: int, seq: int, vocabulary: int, embedding: int) -> Step:
    """A transformer of Equinox' layers."""
    build = functools.partial(Transformer, vocabulary, embedding)
    module = pzs.name_axes(eqx.filter_eval_shape(build, jax.random.key(0)), EQUINOX_NAMES)
    inputs = {"tokens": token_struct(batch, seq)}
    apply = lambda model, tokens: jax.vmap(model)(tokens)  # noqa: E731
    return classify(module, apply, inputs, ADAMW, plain_arrays=False)


class MixerBlock(eqx.Module):
    over_patches: eqx.nn.MLP
    over_channels: eqx.nn.MLP
    norm: eqx.nn.LayerNorm

    def __init__(self, embedding: int, patches: int, key: Any) -> None:
        self.over_patches = eqx.nn.MLP(patches, patches, 2 * patches, 1, jax.nn.gelu, key=key)
        self.over_channels = eqx.nn.MLP(
            embedding, embedding, 4 * embedding, 1, jax.nn.gelu, key=key
        )
        self.norm = eqx.nn.LayerNorm(embedding)

    def __call__(self, x: Any) -> Any:
        x = x + jax.vmap(self.over_patches, 1, 1)(jax.vmap(self.norm)(x))
        return x + jax.vmap(self.over_channels)(jax.vmap(self.norm)(x))


class Mixer(eqx.Module):
    patches: eqx.nn.Linear
    blocks: list[MixerBlock]
    head: eqx.nn.Linear

    def __init__(self, embedding: int, patches: int, key: Any) -> None:
        self.patches = eqx.nn.Linear(768, embedding, key=key)
        self.blocks = [MixerBlock(embedding, patches, key) for _ in range(2)]
        self.head = eqx.nn.Linear(embedding, 1000, key=key)

    def __call__(self, image: Any) -> Any:
        x = jax.vmap(self.patches)(image)
        for block in self.blocks:
            x = block(x)
        return self.head(x.mean(0))


def equinox_mixer(batch: int, embedding: int = 1024, patches: int = 196) -> Step:
    """An MLP-Mixer of Equinox' layers."""
    names = read_names(
        "patches/weight: embedding pixels, patches/bias: embedding, blocks/*/norm/*: embedding,"
        "head/weight: classes embedding, head/bias: classes"
    )
    for part, wide, narrow in (
        ("over_patches", "patch_neurons", "seq"),
        ("over_channels", "neurons", "embedding"),
    ):
        text = f"0/weight: {wide} {narrow}, 0/bias: {wide}, 1/weight: {narrow} {wide}"
        names |= read_names(f"{text}, 1/bias: {narrow}", f"blocks/*/{part}/layers/")
    build = functools.partial(Mixer, embedding, patches)
    module = pzs.name_axes(eqx.filter_eval_shape(build, jax.random.key(0)), names)
    inputs = {"images": struct(batch, patches, 768), "labels": struct(batch, dtype=jnp.int32)}
    optimizer = optax.sgd(0.1, momentum=0.9)
    apply = lambda model, images, labels: jax.vmap(model)(images)  # noqa: E731
    return classify(module, apply, inputs, optimizer, plain_arrays=False)


# Flax NNX


class VisionBlock(nnx.Module):
    def __init__(self, embedding: int, rngs: Any) -> None:
        self.norm_1 = nnx.LayerNorm(embedding, rngs=rngs)
        self.attention = nnx.MultiHeadAttention(embedding // 64, embedding, decode=False, rngs=rngs)
        self.norm_2 = nnx.LayerNorm(embedding, rngs=rngs)
        self.up = nnx.Linear(embedding, 4 * embedding, rngs=rngs)
        self.down = nnx.Linear(4 * embedding, embedding, rngs=rngs)

    def __call__(self, x: Any) -> Any:
        x = x + self.attention(self.norm_1(x))
        return x + self.down(nnx.gelu(self.up(self.norm_2(x))))


class Vision(nnx.Module):
    def __init__(self, embedding: int, classes: int, rngs: Any) -> None:
        self.patches = nnx.Linear(768, embedding, rngs=rngs)
        self.blocks = nnx.List([VisionBlock(embedding, rngs) for _ in range(2)])
        self.head = nnx.Linear(embedding, classes, rngs=rngs)

    def __call__(self, images: Any) -> Any:
        x = self.patches(images)
        for block in self.blocks:
            x = block(x)
        return self.head(x.mean(1))


def nnx_vision(batch: int, embedding: int = 512, patches: int = 196) -> Step:
    """A vision transformer of Flax NNX."""
    names = read_names(
        "patches/kernel: pixels embedding, patches/bias: embedding,"
        "head/kernel: embedding classes, head/bias: classes"
    )
    names |= read_names(
        "norm_*/*: embedding, up/kernel: embedding neurons, up/bias: neurons,"
        "down/kernel: neurons embedding, down/bias: embedding,"
        "attention/out/kernel: heads projection embedding, attention/out/bias: embedding",
        "blocks/*/",
    )
    for part in ("query", "key", "value"):
        text = "kernel: embedding heads projection, bias: heads projection"
        names |= read_names(text, f"blocks/*/attention/{part}/")
    module = nnx.eval_shape(lambda: Vision(embedding, 21_841, nnx.Rngs(0)))
    inputs = {"images": struct(batch, patches, 768), "labels": struct(batch, dtype=jnp.int32)}
    apply = lambda model, images, labels: model(images)  # noqa: E731
    optimizer = optax.adafactor(1e-3)
    return classify(pzs.name_axes(module, names), apply, inputs, optimizer, plain_arrays=False)
