"""Models of other people's libraries with the names that their authors give."""

import functools
import warnings
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from flax import linen, nnx
from penzai import pz

import penzai_shard as pzs
from penzai_shard.tree_paths import path_text
from tests import model_families
from tests.choosing.named_models import (
    BATCH,
    BATCH_SEQ,
    EMBEDDING,
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
    return NamedModel(function, weights, (TOKENS,), BATCH_SEQ, names)


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


# Flax: the words of its own examples are "embed", "mlp", "heads", "kv", "vocab".

FLAX_WORDS = {
    "embed": "embedding",
    "mlp": "neurons",
    "heads": "heads",
    "kv": "projection",
    "vocab": "vocabulary",
    "layers": "layers",
    "positions": "positions",
}


def _flax_attention(path: str, has_bias: bool = True) -> dict[str, tuple[str, ...]]:
    names: dict[str, tuple[str, ...]] = {f"{path}/out/kernel": ("heads", "kv", "embed")}
    for part in ("query", "key", "value"):
        names[f"{path}/{part}/kernel"] = ("embed", "heads", "kv")
        if has_bias:
            names[f"{path}/{part}/bias"] = ("heads", "kv")
    if has_bias:
        names[f"{path}/out/bias"] = ("embed",)
    return names


def _flax_norm(path: str) -> dict[str, tuple[str, ...]]:
    return {f"{path}/scale": ("embed",), f"{path}/bias": ("embed",)}


def _flax_mlp(up: str, down: str) -> dict[str, tuple[str, ...]]:
    return {
        f"{up}/kernel": ("embed", "mlp"),
        f"{up}/bias": ("mlp",),
        f"{down}/kernel": ("mlp", "embed"),
        f"{down}/bias": ("embed",),
    }


class _NnxBlock(nnx.Module):
    def __init__(self, rngs):
        self.norm = nnx.LayerNorm(EMBEDDING, rngs=rngs)
        self.attention = nnx.MultiHeadAttention(HEADS, EMBEDDING, decode=False, rngs=rngs)
        self.up = nnx.Linear(EMBEDDING, NEURONS, rngs=rngs)
        self.down = nnx.Linear(NEURONS, EMBEDDING, rngs=rngs)

    def __call__(self, x):
        x = x + self.attention(self.norm(x), mask=nnx.make_causal_mask(x[..., 0]))
        return x + self.down(nnx.gelu(self.up(x)))


class _NnxTransformer(nnx.Module):
    def __init__(self, rngs):
        self.embed = nnx.Embed(VOCABULARY, EMBEDDING, rngs=rngs)
        self.blocks = nnx.List([_NnxBlock(rngs) for _ in range(LAYERS)])
        self.head = nnx.Linear(EMBEDDING, VOCABULARY, use_bias=False, rngs=rngs)

    def __call__(self, tokens):
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def nnx_transformer() -> NamedModel:
    module = nnx.eval_shape(lambda: _NnxTransformer(nnx.Rngs(0)))
    graph, params, rest = nnx.split(module, nnx.Param, ...)

    def function(weights, tokens):
        bound = jax.tree.map(lambda each: each, params)
        nnx.replace_by_pure_dict(bound, weights)
        return nnx.merge(graph, bound, rest)(tokens)

    names: dict[str, tuple[str, ...]] = {
        "embed/embedding": ("vocab", "embed"),
        "head/kernel": ("embed", "vocab"),
    }
    for i in range(LAYERS):
        block = f"blocks/{i}"
        names |= _flax_attention(f"{block}/attention") | _flax_norm(f"{block}/norm")
        names |= _flax_mlp(f"{block}/up", f"{block}/down")
    weights = nnx.to_pure_dict(params)
    return NamedModel(function, weights, (TOKENS,), BATCH_SEQ, names, FLAX_WORDS)


def _of_linen(module: Any, *inputs: Any) -> Any:
    return jax.eval_shape(module.init, jax.random.key(0), *inputs)


class _LinenBlock(linen.Module):
    has_bias: bool = True

    @linen.compact
    def __call__(self, x, mask=None):
        h = linen.LayerNorm(name="norm")(x)
        attention = linen.MultiHeadDotProductAttention(
            HEADS, name="attention", use_bias=self.has_bias
        )
        x = x + attention(h, h, mask=mask)
        h = linen.gelu(linen.Dense(NEURONS, name="up")(x))
        return x + linen.Dense(EMBEDDING, name="down")(h)


class _LinenTransformer(linen.Module):
    @linen.compact
    def __call__(self, tokens):
        x = linen.Embed(VOCABULARY, EMBEDDING, name="embed")(tokens)
        for i in range(LAYERS):
            x = _LinenBlock(name=f"block_{i}")(x, linen.make_causal_mask(tokens))
        return linen.Dense(VOCABULARY, use_bias=False, name="head")(x)


def _linen_block_names(path: str, has_bias: bool = True) -> dict[str, tuple[str, ...]]:
    return (
        _flax_attention(f"{path}/attention", has_bias)
        | _flax_norm(f"{path}/norm")
        | _flax_mlp(f"{path}/up", f"{path}/down")
    )


def linen_transformer() -> NamedModel:
    module = _LinenTransformer()
    names: dict[str, tuple[str, ...]] = {
        "params/embed/embedding": ("vocab", "embed"),
        "params/head/kernel": ("embed", "vocab"),
    }
    for i in range(LAYERS):
        names |= _linen_block_names(f"params/block_{i}")
    weights = _of_linen(module, TOKENS)
    return NamedModel(module.apply, weights, (TOKENS,), BATCH_SEQ, names, FLAX_WORDS)


class _LinenScanned(linen.Module):
    @linen.compact
    def __call__(self, tokens):
        x = linen.Embed(VOCABULARY, EMBEDDING, name="embed")(tokens)
        block = linen.scan(
            linen.remat(_ScanStep),
            variable_axes={"params": 0},
            split_rngs={"params": True},
            length=LAYERS,
        )
        x, _ = block(name="blocks")(x, None)
        return linen.Dense(VOCABULARY, use_bias=False, name="head")(x)


class _ScanStep(linen.Module):
    @linen.compact
    def __call__(self, x, _):
        return _LinenBlock(has_bias=False, name="block")(x), None


def linen_scanned() -> NamedModel:
    """Flax's scanned and rematerialised blocks, as MaxText and T5X write them."""
    module = _LinenScanned()
    blocks = _linen_block_names("params/blocks/block", has_bias=False)
    names: dict[str, tuple[str, ...]] = {
        "params/embed/embedding": ("vocab", "embed"),
        "params/head/kernel": ("embed", "vocab"),
        **{path: ("layers", *axes) for path, axes in blocks.items()},
    }
    weights = _of_linen(module, TOKENS)
    return NamedModel(module.apply, weights, (TOKENS,), BATCH_SEQ, names, FLAX_WORDS)


class _Vit(linen.Module):
    @linen.compact
    def __call__(self, images):
        patches = linen.Conv(EMBEDDING, (4, 4), (4, 4), name="patches")(images)
        x = patches.reshape(BATCH, -1, EMBEDDING)
        token = self.param("class_token", linen.initializers.zeros, (1, 1, EMBEDDING))
        x = jnp.concatenate([jnp.tile(token, (BATCH, 1, 1)), x], 1)
        shape = (1, x.shape[1], EMBEDDING)
        x = x + self.param("positions", linen.initializers.zeros, shape)
        for i in range(LAYERS):
            x = _LinenBlock(name=f"block_{i}")(x)
        return linen.Dense(EMBEDDING, name="head")(linen.LayerNorm(name="norm")(x)[:, 0])


def vit() -> NamedModel:
    """Patches of 4 x 4 pixels, a class token, learned positions; as many classes as features."""
    module = _Vit()
    names: dict[str, tuple[str, ...]] = {
        "params/patches/kernel": ("rows", "columns", "colours", "embed"),
        "params/patches/bias": ("embed",),
        "params/class_token": ("one", "one", "embed"),
        "params/positions": ("one", "positions", "embed"),
        "params/head/kernel": ("embed", "classes"),
        "params/head/bias": ("classes",),
        **_flax_norm("params/norm"),
    }
    for i in range(LAYERS):
        names |= _linen_block_names(f"params/block_{i}")
    images, axes = struct(BATCH, 16, 16, 3), (("batch", "height", "width", "colours"),)
    weights = _of_linen(module, images)
    return NamedModel(module.apply, weights, (images,), axes, names, FLAX_WORDS)


class _Bert(linen.Module):
    @linen.compact
    def __call__(self, tokens, segments):
        x = linen.Embed(VOCABULARY, EMBEDDING, name="words")(tokens)
        x = x + linen.Embed(SEQ, EMBEDDING, name="positions")(jnp.arange(SEQ))
        x = x + linen.Embed(2, EMBEDDING, name="segments")(segments)
        for i in range(LAYERS):
            x = _LinenBlock(name=f"block_{i}")(x)
        pooled = linen.tanh(linen.Dense(EMBEDDING, name="pooler")(x[:, 0]))
        return linen.Dense(2, name="classifier")(pooled)


def bert() -> NamedModel:
    """Three tables; the pooler is square, and its outputs are an axis of its own."""
    module = _Bert()
    names: dict[str, tuple[str, ...]] = {
        "params/words/embedding": ("vocab", "embed"),
        "params/positions/embedding": ("positions", "embed"),
        "params/segments/embedding": ("segments", "embed"),
        "params/pooler/kernel": ("embed", "pooled"),
        "params/pooler/bias": ("pooled",),
        "params/classifier/kernel": ("pooled", "classes"),
        "params/classifier/bias": ("classes",),
    }
    for i in range(LAYERS):
        names |= _linen_block_names(f"params/block_{i}")
    inputs, axes = (TOKENS, TOKENS), (("batch", "seq"), ("batch", "seq"))
    weights = _of_linen(module, *inputs)
    return NamedModel(module.apply, weights, inputs, axes, names, FLAX_WORDS)


class _LinenLstm(linen.Module):
    @linen.compact
    def __call__(self, x):
        x = linen.RNN(linen.OptimizedLSTMCell(EMBEDDING), name="rnn")(x)
        return linen.Dense(EMBEDDING, name="head")(x[:, -1])


def linen_lstm() -> NamedModel:
    """Eight square matrices; those of the hidden state have it as what comes in and goes out."""
    module = _LinenLstm()
    names: dict[str, tuple[str, ...]] = {
        "params/head/kernel": ("hidden", "classes"),
        "params/head/bias": ("classes",),
    }
    for gate in "ifgo":
        cell = "params/OptimizedLSTMCell_0"
        names |= {
            f"{cell}/i{gate}/kernel": ("features", "hidden"),
            f"{cell}/h{gate}/kernel": ("hidden", "hidden"),
            f"{cell}/h{gate}/bias": ("hidden",),
        }
    inputs, axes = (struct(BATCH, SEQ, EMBEDDING),), (("batch", "seq", "features"),)
    weights = _of_linen(module, *inputs)
    return NamedModel(module.apply, weights, inputs, axes, names, {}, False)


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

    model = eqx.filter_eval_shape(build, jax.random.key(0))
    flat, structure = jax.tree_util.tree_flatten_with_path(model)
    arrays = jax.tree.leaves(model, is_leaf=lambda node: isinstance(node, hax.NamedArray))
    named = [node for node in arrays if isinstance(node, hax.NamedArray)]
    weights = {path_text(path): leaf for path, leaf in flat if _is_struct(leaf)}
    order = [path_text(path) for path, leaf in flat if _is_struct(leaf)]
    others = [None if _is_struct(leaf) else leaf for _, leaf in flat]

    def function(weights, tokens):
        given = iter(order)
        bound = [weights[next(given)] if leaf is None else leaf for leaf in others]
        called = jax.tree_util.tree_unflatten(structure, bound)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)
            return called(hax.named(tokens, (batch, position))).array

    names = {
        path: tuple(axis.name for axis in node.axes)
        for path, node in zip(order, named, strict=True)
    }
    words = {
        "embed": "embedding",
        "mlp": "neurons",
        "head_size": "projection",
        "heads": "heads",
        "vocab": "vocabulary",
    }
    return NamedModel(function, weights, (TOKENS,), BATCH_SEQ, names, words)
