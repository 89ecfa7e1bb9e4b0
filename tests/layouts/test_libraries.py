"""Models of other libraries in layouts: a small transformer of each, by its own constraints."""

import dataclasses
import functools
import re

import equinox as eqx
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import penzai_shard as pzs
from penzai_shard.layouts.layout import Layout
from tests.layouts.transformers import count_collectives, make_tokens, train
from tests.models import MODELS, hax
from tests.training.losses import LOSSES

# What all call their axes.
NAMES = {"neurons": "mlp", "vocabulary": "vocab"}


def find_loss(logits, tokens):
    return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()


def pin(x, *names):
    return nn.with_logical_constraint(x, names)


# Flax linen


class LinenTransformer(nn.Module):
    @nn.compact
    def __call__(self, tokens):
        def init(*names):
            return nn.with_logical_partitioning(nn.initializers.normal(0.1), names)

        heads = {
            "kernel_init": init("embed", "heads", "kv"),
            "out_kernel_init": init("heads", "kv", "embed"),
        }
        x = pin(nn.Embed(32, 16, embedding_init=init("vocab", "embed"))(tokens), "batch")
        attended = nn.MultiHeadDotProductAttention(4, use_bias=False, **heads)(nn.LayerNorm()(x))
        x = pin(x + attended, "batch")
        hidden = nn.relu(nn.Dense(32, kernel_init=init("embed", "mlp"))(x))
        hidden = pin(hidden, "batch", None, "mlp")
        x = pin(x + nn.Dense(16, kernel_init=init("mlp", "embed"))(hidden), "batch")
        logits = nn.Dense(32, kernel_init=init("embed", "vocab"), use_bias=False)(x)
        return pin(logits, "batch", None, "vocab")


def build_linen():
    return LinenTransformer().init(jax.random.key(0), jnp.zeros((2, 8), int))


def linen_loss(model, rng, state, tokens):
    return find_loss(LinenTransformer().apply(model, tokens[:, :-1]), tokens), state, {}


# Flax NNX


class NnxTransformer(nnx.Module):
    def __init__(self, rngs):
        def linear(inputs, outputs, *names, **options):
            init = nnx.with_partitioning(nnx.initializers.normal(0.1), names)
            options |= {"kernel_init": init, "use_bias": False, "rngs": rngs}
            return nnx.LinearGeneral(inputs, outputs, **options)

        init = nnx.with_partitioning(nnx.initializers.normal(0.1), ("vocab", "embed"))
        self.embed = nnx.Embed(32, 16, embedding_init=init, rngs=rngs)
        self.query = linear(16, (4, 4), "embed", "heads", "kv")
        self.out = linear((4, 4), 16, "heads", "kv", "embed", axis=(-2, -1))
        self.up = linear(16, 32, "embed", "mlp")
        self.down = linear(32, 16, "mlp", "embed")
        self.head = linear(16, 32, "embed", "vocab")

    def __call__(self, tokens):
        x = pin(self.embed(tokens), "batch")
        query = pin(self.query(x), "batch", None, "heads")
        weights = jax.nn.softmax(query @ jnp.swapaxes(query, -1, -2), -1)
        x = pin(x + self.out(weights @ query), "batch")
        x = pin(x + self.down(pin(jax.nn.relu(self.up(x)), "batch", None, "mlp")), "batch")
        return pin(self.head(x), "batch", None, "vocab")


def build_nnx():
    return NnxTransformer(nnx.Rngs(0))


def nnx_loss(model, rng, state, tokens):
    return find_loss(model(tokens[:, :-1]), tokens), state, {}


# Haliax, whose linear layers pin what they give

EMBED, MLP, VOCAB, HEADS, HEAD = hax.make_axes(embed=16, mlp=32, vocab=32, heads=4, head_size=4)


class HaliaxTransformer(eqx.Module):
    embed: hax.nn.Embedding
    layers: dict


def build_haliax():
    keys = jax.random.split(jax.random.key(0), 6)
    axes = {
        "query": (EMBED, (HEADS, HEAD)),
        "out": ((HEADS, HEAD), EMBED),
        "up": (EMBED, MLP),
        "down": (MLP, EMBED),
        "head": (EMBED, VOCAB),
    }
    layers = {
        name: hax.nn.Linear.init(*own, key=key, use_bias=False)
        for (name, own), key in zip(axes.items(), keys[1:], strict=True)
    }
    return HaliaxTransformer(hax.nn.Embedding.init(VOCAB, EMBED, key=keys[0]), layers)


def haliax_loss(model, rng, state, tokens):
    layers = model.layers
    x = model.embed(hax.named(tokens[:, :-1], ("batch", "seq")))
    query = layers["query"](x)
    key = query.rename({"seq": "key_seq"})
    weights = hax.nn.softmax(hax.dot(query, key, axis=HEAD), "key_seq")
    x = x + layers["out"](hax.dot(weights, key, axis="key_seq"))
    x = x + layers["down"](hax.nn.relu(layers["up"](x)))
    logits = layers["head"](x).rearrange(("batch", "seq", VOCAB))
    return find_loss(logits.array, tokens), state, {}


TRANSFORMERS = {
    "linen": (build_linen, linen_loss),
    "nnx": (build_nnx, nnx_loss),
    "haliax": (build_haliax, haliax_loss),
}
LAYOUTS = {
    "one device": (Layout.data_parallel(), {"data": 1}),
    "two_dimensional": (
        Layout.two_dimensional(min_size=64, names=NAMES, blocks=()),
        {"data": 4, "model": 2},
    ),
    "fully_sharded": (Layout.fully_sharded(min_size=1, unnamed="largest"), {"data": 8}),
    "hybrid": (Layout.hybrid(min_size=1, unnamed="largest"), {"replica": 2, "data": 4}),
}


def run_layout(name, build, loss_fn, **batch):
    found = train(*LAYOUTS[name], build, batch, loss_fn=loss_fn, on_unnamed="replicate")
    return found.losses, found.state, found.compiled


@functools.cache
def run(library, name):
    return run_layout(name, *TRANSFORMERS[library], tokens=make_tokens())


@pytest.mark.filterwarnings("ignore:jax:DeprecationWarning:haliax")
@pytest.mark.parametrize("library", TRANSFORMERS)
def test_library_trains_as_on_one_device(library):
    losses, state, compiled = run(library, "two_dimensional")
    one, _, one_compiled = run(library, "one device")
    np.testing.assert_allclose(losses, one, rtol=1e-5)
    split = {str(array.sharding.spec) for array in state.trained_arrays.values()}
    assert len(split) > 1
    # Each device computes its part, as the constraints of the model itself say.
    flops = compiled.cost_analysis()["flops"] / one_compiled.cost_analysis()["flops"]
    assert flops <= 1.35 / 8


def count_elements(compiled, kinds):
    """All elements of matrices that the collectives of some kinds give."""
    types = re.findall(rf"= (.*?) (?:{kinds})\(", compiled.as_text())
    matrices = re.findall(r"\b\w+\[(\d+),(\d+)\]", " ".join(types))
    return sum(int(rows) * int(columns) for rows, columns in matrices)


def build_nnx_mlp():
    up, down = (nnx.Linear(8, 8, use_bias=False, rngs=nnx.Rngs(seed)) for seed in range(2))
    return nnx.Sequential(up, nnx.relu, down)


@pytest.mark.parametrize("name", ["fully_sharded", "hybrid"])
@pytest.mark.parametrize("library", ["equinox", "nnx", "plain"])
def test_what_has_no_known_blocks_moves_parameters_and_gradients_only(library, name):
    loss_fn, x = LOSSES[library]
    build = build_nnx_mlp if library == "nnx" else MODELS[library]
    losses, state, compiled = run_layout(name, build, loss_fn, x=x)
    one, _, _ = run_layout("one device", build, loss_fn, x=x)
    np.testing.assert_allclose(losses, one, rtol=1e-5)
    matrices = [x for x in state.trained_arrays.values() if x.ndim == 2]
    split = sum(x.size for x in matrices if not x.sharding.is_fully_replicated)
    assert count_elements(compiled, "all-gather") == split > 0
    # Gradients are reduced once, within data and over replicas of a part.
    reduced = count_elements(compiled, "all-reduce|reduce-scatter|all-to-all|collective-permute")
    assert reduced <= {"fully_sharded": 1, "hybrid": 1.25}[name] * sum(x.size for x in matrices)


@pytest.mark.filterwarnings("ignore:jax:DeprecationWarning:haliax")
@pytest.mark.parametrize("library", ["linen", "haliax"])
def test_models_that_pin_their_own_activations_are_left_to_the_compiler(library):
    layout, mesh = Layout.fully_sharded(min_size=1), pzs.make_mesh({"data": 8})
    with pytest.warns(pzs.ShardingWarning, match="blocks=()"):
        assert not layout.recipe(TRANSFORMERS[library][0](), mesh).edits
    assert layout.gathering(TRANSFORMERS[library][0](), mesh) is None


def test_computing_is_for_evaluations():
    _, state, _ = run("linen", "two_dimensional")
    layout, sizes = LAYOUTS["two_dimensional"]
    mesh = pzs.make_mesh(sizes)
    batch = layout.shard_batch({"tokens": make_tokens()}, mesh, first_axis="batch")
    losses = linen_loss, layout.computing(linen_loss, mesh)
    plain, pinned = (
        pzs.build_eval_step_fn(loss_fn).lower(state, **batch).as_text() for loss_fn in losses
    )
    assert plain.count("sharding_constraint") < pinned.count("sharding_constraint")


@pytest.mark.parametrize("name", ["rows", "act_hidden"])
def test_a_rule_that_is_nearly_what_a_constraint_asks_for_warns(name):
    def loss_fn(model, rng, state, x):
        return pin(x @ model["w"], name, "embed").sum(), state, {}

    # Of these embed is one of parameters, and zebra is nothing's name.
    rules = {name.replace("d", "", 1).replace("w", ""): "data", "embed": None, "zebra": "model"}
    layout = Layout(parameters={"embed": "data"}, compute=rules, blocks=())
    mesh, x = pzs.make_mesh({"data": 4, "model": 2}), jnp.ones((8, 8))
    with pytest.warns(pzs.ShardingWarning) as caught:
        jax.eval_shape(layout.computing(loss_fn, mesh), {"w": x}, None, None, x=x)
    (message,) = (str(one.message) for one in caught)
    assert f"Did you mean {name!r}" in message
    right = dataclasses.replace(layout, compute={name: "data", "zebra": "model"})
    jax.eval_shape(right.computing(loss_fn, mesh), {"w": x}, None, None, x=x)


@pytest.mark.parametrize("misspelt", ["bacth", "hiden"])
def test_a_rule_that_is_nearly_one_of_batch_and_parameters_warns(misspelt):
    layout = Layout(parameters={"hidden": "data"}, compute={misspelt: "model"}, blocks=())
    mesh = pzs.make_mesh({"data": 4, "model": 2})
    with pytest.warns(pzs.ShardingWarning, match="Did you mean '(batch|hidden)'"):
        layout.computing(lambda: None, mesh)()


def test_gathering_is_for_evaluations():
    loss_fn, x = LOSSES["plain"]
    layout, sizes = LAYOUTS["fully_sharded"]
    mesh = pzs.make_mesh(sizes)
    _, state, _ = run_layout("fully_sharded", MODELS["plain"], loss_fn, x=x)
    batch = layout.shard_batch({"x": x}, mesh, first_axis="batch")
    gather = layout.gathering(MODELS["plain"](), mesh)
    evaluate = pzs.build_eval_step_fn(loss_fn, gather=gather)
    plain = pzs.build_eval_step_fn(loss_fn)(state, **batch)[0]
    np.testing.assert_allclose(evaluate(state, **batch)[0], plain, rtol=1e-5)
    kinds = count_collectives(evaluate.lower(state, **batch).compile())
    assert {*kinds} == {"all-gather", "all-reduce"}


def test_nnx_with_statistics_and_dropout_is_compiled_once(caplog):
    # JAX looks a program up once more where a random key lies as P() and P(None) by turns, and
    # counts that in _cache_size.
    (loss_fn, x), mesh = LOSSES["nnx"], pzs.make_mesh({"data": 8})
    layout = Layout.data_parallel(blocks=())
    options = {"loss_fn": loss_fn, "optimizer": optax.sgd(0.1), "on_unnamed": "replicate"}
    state, step = layout.build(MODELS["nnx"], mesh=mesh, rng=jax.random.key(0), **options)
    batch = layout.shard_batch({"x": x}, mesh, first_axis="batch")
    with jax.log_compiles():
        for _ in range(3):
            state, _ = step(state, **batch)
    messages = [record.getMessage() for record in caplog.records]
    assert sum(text.startswith("Compiling jit(run_step)") for text in messages) == 1
