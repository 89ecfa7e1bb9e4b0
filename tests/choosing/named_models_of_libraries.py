"""Models of other people's libraries with the names that their authors give."""

import functools
import warnings
from collections.abc import Mapping
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from penzai import pz

import penzai_shard as pzs
from penzai_shard.tree_paths import path_text
from tests import model_families
from tests.choosing.named_models import (
    BATCH,
    BATCH_SEQ,
    EMBEDDING,
    GROUPS,
    HEADS,
    LAYERS,
    NEURONS,
    PROJECTION,
    SEQ,
    TOKENS,
    VOCABULARY,
    NamedModel,
    struct,
)


def _is_struct(leaf: Any) -> bool:
    return isinstance(leaf, jax.ShapeDtypeStruct)


# Penzai: names are those of its own named arrays.

_PENZAI_SIZES = {
    "embedding_dim": EMBEDDING,
    "projection_dim": PROJECTION,
    "mlp_hidden_dim": NEURONS,
    "vocab_size": VOCABULARY,
    "num_decoder_blocks": LAYERS,
}


def penzai(family: str, rolled: bool = False, **options: Any) -> NamedModel:
    sizes = dict(_PENZAI_SIZES) | options
    build = functools.partial(model_families.transformer, family, name="t", **sizes)
    model = pzs.abstract_model(build, jax.random.key(0))
    if rolled:
        model = pzs.roll_layer_stacks().apply(model)
    leaves, structure = jax.tree_util.tree_flatten(model)
    is_weight = list(map(_is_struct, leaves))
    values = pz.select(model).at_instances_of(pz.ParameterValue).get_sequence()
    labels = [value.label for value in values]
    unique = {value.label: value.value for value in values}

    def function(weights, tokens):
        order = iter(labels)
        bound = [
            weights[next(order)] if is_one else leaf
            for leaf, is_one in zip(leaves, is_weight, strict=True)
        ]
        called = jax.tree_util.tree_unflatten(structure, bound)
        return called(pz.nx.wrap(tokens).tag("batch", "seq")).unwrap("batch", "seq", "vocabulary")

    weights = {label: value.data_array for label, value in unique.items()}
    names = {label: tuple(value.named_axes) for label, value in unique.items()}
    words = {name: name for axes in names.values() for name in axes} | {"blocks": "layers"}
    return NamedModel(function, weights, (TOKENS,), BATCH_SEQ, names, words)


# Equinox.


class _EquinoxBlock(eqx.Module):
    norm: eqx.nn.LayerNorm
    attention: eqx.nn.MultiheadAttention
    mlp: eqx.nn.MLP

    def __init__(self, key):
        self.norm = eqx.nn.LayerNorm(EMBEDDING)
        self.attention = eqx.nn.MultiheadAttention(HEADS, EMBEDDING, key=key)
        self.mlp = eqx.nn.MLP(EMBEDDING, EMBEDDING, NEURONS, 1, jax.nn.gelu, key=key)

    def __call__(self, x):
        h = jax.vmap(self.norm)(x)
        x = x + self.attention(h, h, h, jnp.tril(jnp.ones((SEQ, SEQ), bool)))
        return x + jax.vmap(self.mlp)(x)


class _EquinoxTransformer(eqx.Module):
    tokens: eqx.nn.Embedding
    positions: eqx.nn.Embedding
    blocks: list[_EquinoxBlock]
    head: eqx.nn.Linear

    def __init__(self, key):
        self.tokens = eqx.nn.Embedding(VOCABULARY, EMBEDDING, key=key)
        self.positions = eqx.nn.Embedding(2 * SEQ, EMBEDDING, key=key)
        self.blocks = [_EquinoxBlock(key) for _ in range(LAYERS)]
        self.head = eqx.nn.Linear(EMBEDDING, VOCABULARY, use_bias=False, key=key)

    def __call__(self, tokens):
        x = jax.vmap(self.tokens)(tokens) + jax.vmap(self.positions)(jnp.arange(SEQ))
        for block in self.blocks:
            x = block(x)
        return jax.vmap(self.head)(x)


def _of_equinox(build: Any) -> tuple[Any, Any]:
    """The function of a batch and the structs of the weights."""
    module = eqx.filter_eval_shape(build, jax.random.key(0))
    weights, static = eqx.partition(module, _is_struct)
    return (lambda given, *inputs: jax.vmap(eqx.combine(given, static))(*inputs)), weights


def equinox_transformer() -> NamedModel:
    function, weights = _of_equinox(_EquinoxTransformer)
    names: dict[str, tuple[str, ...]] = {
        "tokens/weight": ("vocabulary", "embedding"),
        "positions/weight": ("positions", "embedding"),
        "head/weight": ("vocabulary", "embedding"),
    }
    for i in range(LAYERS):
        block = f"blocks/{i}/"
        names |= {
            f"{block}norm/weight": ("embedding",),
            f"{block}norm/bias": ("embedding",),
            f"{block}attention/output_proj/weight": ("embedding", "heads*projection"),
            f"{block}mlp/layers/0/weight": ("neurons", "embedding"),
            f"{block}mlp/layers/0/bias": ("neurons",),
            f"{block}mlp/layers/1/weight": ("embedding", "neurons"),
            f"{block}mlp/layers/1/bias": ("embedding",),
        }
        for part in ("query", "key", "value"):
            names[f"{block}attention/{part}_proj/weight"] = ("heads*projection", "embedding")
    return NamedModel(function, weights, (TOKENS,), BATCH_SEQ, names)


class _EquinoxScannedBlock(eqx.Module):
    norm: eqx.nn.RMSNorm
    query: eqx.nn.Linear
    key_value: eqx.nn.Linear
    output: eqx.nn.Linear
    mlp: eqx.nn.MLP

    def __init__(self, key):
        self.norm = eqx.nn.RMSNorm(EMBEDDING)
        self.query = eqx.nn.Linear(EMBEDDING, HEADS * PROJECTION, key=key)
        self.key_value = eqx.nn.Linear(EMBEDDING, 2 * GROUPS * PROJECTION, key=key)
        self.output = eqx.nn.Linear(HEADS * PROJECTION, EMBEDDING, key=key)
        self.mlp = eqx.nn.MLP(EMBEDDING, EMBEDDING, NEURONS, 1, jax.nn.gelu, key=key)

    def __call__(self, x):
        h = jax.vmap(self.norm)(x)
        q = jax.vmap(self.query)(h).reshape(-1, GROUPS, HEADS // GROUPS, PROJECTION)
        both = jnp.split(jax.vmap(self.key_value)(h), 2, -1)
        k, v = (y.reshape(-1, GROUPS, PROJECTION) for y in both)
        shares = jax.nn.softmax(jnp.einsum("sgqd,tgd->gqst", q, k), -1)
        attended = jnp.einsum("gqst,tgd->sgqd", shares, v).reshape(len(x), -1)
        x = x + jax.vmap(self.output)(attended)
        return x + jax.vmap(self.mlp)(x)


class _EquinoxVit(eqx.Module):
    patches: eqx.nn.Linear
    class_token: jax.Array
    positions: jax.Array
    blocks: _EquinoxScannedBlock
    head: eqx.nn.Linear

    def __init__(self, key):
        self.patches = eqx.nn.Linear(48, EMBEDDING, key=key)
        self.class_token = jnp.zeros((1, EMBEDDING))
        self.positions = jnp.zeros((17, EMBEDDING))
        self.blocks = eqx.filter_vmap(_EquinoxScannedBlock)(jax.random.split(key, HEADS))
        self.head = eqx.nn.Linear(EMBEDDING, 10, key=key)

    def __call__(self, image):
        x = image.reshape(4, 4, 4, 4, 3).transpose(0, 2, 1, 3, 4).reshape(16, 48)
        x = jnp.concatenate([self.class_token, jax.vmap(self.patches)(x)]) + self.positions
        weights, static = eqx.partition(self.blocks, eqx.is_array)
        x, _ = jax.lax.scan(lambda x, each: (eqx.combine(each, static)(x), None), x, weights)
        return self.head(x[0])


def equinox_vit() -> NamedModel:
    """Patches by a reshape, keys beside values, as many blocks as heads, stacked and scanned.

    The elements of a patch are three axes of the image in part: one without a name.
    """
    function, weights = _of_equinox(_EquinoxVit)
    names: dict[str, tuple[str | None, ...]] = {
        "patches/weight": ("embedding", None),
        "patches/bias": ("embedding",),
        "class_token": (None, "embedding"),
        "positions": ("positions", "embedding"),
        "head/weight": ("classes", "embedding"),
        "head/bias": ("classes",),
    }
    queries = "head_groups*query_heads*projection"
    block = {"norm/weight": ("embedding",), "norm/bias": ("embedding",)}
    for path, out, into in (
        ("query", queries, "embedding"),
        ("key_value", "kv*head_groups*projection", "embedding"),
        ("output", "embedding", queries),
        ("mlp/layers/0", "neurons", "embedding"),
        ("mlp/layers/1", "embedding", "neurons"),
    ):
        block |= {f"{path}/weight": (out, into), f"{path}/bias": (out,)}
    names |= {f"blocks/{path}": ("layers", *axes) for path, axes in block.items()}
    images, axes = struct(BATCH, 16, 16, 3), (("batch", "height", "width", "colours"),)
    return NamedModel(function, weights, (images,), axes, names, {"classes": "outputs"})


def equinox_lstm() -> NamedModel:
    """An LSTM over a sequence; its four gates are one weight."""

    class Classifier(eqx.Module):
        cell: eqx.nn.LSTMCell
        head: eqx.nn.Linear

        def __init__(self, key):
            self.cell = eqx.nn.LSTMCell(EMBEDDING, EMBEDDING, key=key)
            self.head = eqx.nn.Linear(EMBEDDING, EMBEDDING, key=key)

        def __call__(self, x):
            start = (jnp.zeros(EMBEDDING), jnp.zeros(EMBEDDING))
            (hidden, _), _ = jax.lax.scan(lambda c, y: (self.cell(y, c), None), start, x)
            return self.head(hidden)

    function, weights = _of_equinox(Classifier)
    names: dict[str, tuple[str, ...]] = {
        "cell/weight_ih": ("gates*hidden", "features"),
        "cell/weight_hh": ("gates*hidden", "hidden"),
        "cell/bias": ("gates*hidden",),
        "head/weight": ("classes", "hidden"),
        "head/bias": ("classes",),
    }
    inputs, axes = (struct(BATCH, SEQ, EMBEDDING),), (("batch", "seq", "features"),)
    return NamedModel(function, weights, inputs, axes, names, {}, False)


def equinox_mlp() -> NamedModel:
    """An MLP whose hidden layers are square."""
    function, weights = _of_equinox(lambda key: eqx.nn.MLP(8, 4, EMBEDDING, 3, key=key))
    axes = ["features", "hidden_0", "hidden_1", "hidden_2", "classes"]
    names: dict[str, tuple[str, ...]] = {}
    for i in range(4):
        names[f"layers/{i}/weight"] = (axes[i + 1], axes[i])
        names[f"layers/{i}/bias"] = (axes[i + 1],)
    inputs, axes_of_inputs = (struct(BATCH, 8),), (("batch", "features"),)
    return NamedModel(function, weights, inputs, axes_of_inputs, names, {}, False)


# Haliax: names are those of its own arrays.


def haliax_transformer() -> NamedModel:
    from tests.readers.haliax_model import hax, hnn, skip_without_dot_products

    with warnings.catch_warnings():
        # Haliax calls what JAX has deprecated.
        warnings.simplefilter("ignore", DeprecationWarning)
        skip_without_dot_products()
    embed, mlp, vocab = hax.make_axes(embed=EMBEDDING, mlp=NEURONS, vocab=VOCABULARY)
    heads, head_size = hax.make_axes(heads=HEADS, head_size=PROJECTION)
    batch, position = hax.make_axes(batch=BATCH, position=SEQ)
    key_position = position.alias("key_position")

    class Block(eqx.Module):
        q: hnn.Linear
        k: hnn.Linear
        v: hnn.Linear
        o: hnn.Linear
        up: hnn.Linear
        down: hnn.Linear
        norm: hnn.LayerNorm

        @staticmethod
        def init(key):
            inner = (heads, head_size)
            into = [hnn.Linear.init(embed, inner, key=key, use_bias=False) for _ in range(3)]
            return Block(
                *into,
                hnn.Linear.init(inner, embed, key=key, use_bias=False),
                hnn.Linear.init(embed, mlp, key=key),
                hnn.Linear.init(mlp, embed, key=key),
                hnn.LayerNorm.init(embed),
            )

        def __call__(self, x):
            h = self.norm(x)
            q, k, v = self.q(h), self.k(h), self.v(h)
            k, v = (y.rename({"position": "key_position"}) for y in (k, v))
            scores = hax.dot(q, k, axis=head_size)
            shares = hnn.softmax(scores, axis=key_position)
            x = x + self.o(hax.dot(shares, v, axis=key_position))
            return x + self.down(hnn.gelu(self.up(x)))

    class Transformer(eqx.Module):
        embeddings: hnn.Embedding
        blocks: list[Block]
        head: hnn.Linear

        def __call__(self, tokens):
            x = self.embeddings(tokens)
            for block in self.blocks:
                x = block(x)
            return self.head(x)

    def build(key):
        return Transformer(
            hnn.Embedding.init(vocab, embed, key=key),
            [Block.init(key) for _ in range(LAYERS)],
            hnn.Linear.init(embed, vocab, key=key, use_bias=False),
        )

    words = {
        "embed": "embedding",
        "mlp": "neurons",
        "head_size": "projection",
        "heads": "heads",
        "vocab": "vocabulary",
    }
    return of_haliax(build, (batch, position), words)


def of_haliax(build: Any, tokens: Any, words: Mapping[str, str]) -> NamedModel:
    """A model of tokens, whose axes Haliax names; its weights by path, without these names."""
    from tests.readers.haliax_model import hax

    model = eqx.filter_eval_shape(build, jax.random.key(0))
    flat, structure = jax.tree_util.tree_flatten_with_path(model)
    arrays = jax.tree.leaves(model, is_leaf=lambda node: isinstance(node, hax.NamedArray))
    named = [node for node in arrays if isinstance(node, hax.NamedArray)]
    weights = {path_text(path): leaf for path, leaf in flat if _is_struct(leaf)}
    order = [path_text(path) for path, leaf in flat if _is_struct(leaf)]
    others = [None if _is_struct(leaf) else leaf for _, leaf in flat]

    def function(weights, given_tokens):
        given = iter(order)
        bound = [weights[next(given)] if leaf is None else leaf for leaf in others]
        called = jax.tree_util.tree_unflatten(structure, bound)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)
            return called(hax.named(given_tokens, tokens)).array

    names = {
        path: tuple(axis.name for axis in node.axes)
        for path, node in zip(order, named, strict=True)
    }
    return NamedModel(function, weights, (TOKENS,), BATCH_SEQ, names, words)
