"""Every preset where no length divides: the same as on one device, and zeros in the padding."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from jax.sharding import PartitionSpec
from penzai import pz
from penzai.models.transformer.model_parts import TransformerFeedForward

from penzai_shard import (
    ConstrainActivations,
    ConstrainShardingByName,
    GatherParameters,
    Jitted,
    Layout,
    StatefulTrainer,
    abstract_model,
    build_eval_step_fn,
    cross_entropy,
    lint,
    make_mesh,
    place,
    sharded_init,
)
from penzai_shard.errors import PlanError, RuleTypeError
from penzai_shard.layouts import building
from tests.layouts.preset_runs import compilations, mesh_of
from tests.model_families import transformer
from tests.training.test_padded_states import assert_padding_is_zero, assert_same, padded_nodes

VOCABULARY, EMBEDDING = 23, 9
TOKENS = pz.nx.wrap(jnp.arange(8 * 6).reshape(8, 6) % VOCABULARY, "batch", "seq")


def build_mixture(key):
    """Tokens looked up, a mixture of three experts, and logits."""
    linear = pz.nn.Linear.from_config
    outside, inside = {"embedding": EMBEDDING}, {"experts": 3, "neurons": 11}
    experts = pz.nn.BranchAndMultiplyTogether(
        [
            pz.nn.Sequential([linear("up", key, outside, inside), pz.nn.Elementwise(jax.nn.silu)]),
            pz.nn.Sequential(
                [linear("router", key, outside, {"experts": 3}), pz.nn.Softmax("experts")]
            ),
        ]
    )
    table = pz.nn.EmbeddingTable.from_config(
        "table", key, vocab_size=VOCABULARY, embedding_axes=outside
    )
    return pz.nn.Sequential(
        [
            pz.nn.EmbeddingLookup(table),
            pz.nn.Residual(TransformerFeedForward([experts, linear("down", key, inside, outside)])),
            linear("head", key, outside, {"vocabulary": VOCABULARY}),
        ]
    )


build_attention = functools.partial(
    transformer,
    "llama",
    num_decoder_blocks=1,
    embedding_dim=EMBEDDING,
    mlp_hidden_dim=11,
    vocab_size=VOCABULARY,
    num_kv_heads=3,
    query_head_multiplier=1,
)

ONE = {"data": 1}
NO_HEADS = {"heads": None}
LAYOUTS = {
    "data_parallel": (
        build_mixture,
        Layout.data_parallel(vocabulary="model"),
        {"data": 2, "model": 4},
    ),
    "zero1": (build_mixture, Layout.zero1(min_size=8), {"data": 8}),
    "fully_sharded": (
        build_mixture,
        Layout.fully_sharded(min_size=8, reshard_after_forward=True),
        {"data": 8},
    ),
    "tensor_parallel": (
        build_mixture,
        Layout.tensor_parallel(experts="expert", vocabulary="model", names=NO_HEADS),
        {"data": 2, "model": 2, "expert": 2},
    ),
    "sequence_parallel": (
        build_mixture,
        Layout.sequence_parallel(vocabulary="model", names=NO_HEADS, rematerialise="nothing"),
        {"data": 2, "model": 4},
    ),
    "two_dimensional": (
        build_attention,
        Layout.two_dimensional(min_size=8, vocabulary="model"),
        {"data": 2, "model": 4},
    ),
    "hybrid": (build_mixture, Layout.hybrid(min_size=8), {"replica": 2, "data": 4}),
}


def loss_fn(model, rng, state, tokens):
    logits = model(tokens[{"seq": pz.slice[:-1]}])
    loss = cross_entropy(logits, tokens[{"seq": pz.slice[1:]}])
    return loss, state, {"loss": loss}


class Run:
    """Three steps; the third tells whether anything was compiled again."""

    def __init__(self, build, layout, shape):
        self.layout, self.mesh = layout, mesh_of(shape)
        self.state, self.step = layout.build(
            build,
            jax.random.key(0),
            mesh=self.mesh,
            loss_fn=loss_fn,
            optimizer=optax.adamw(1e-2),
            rng=jax.random.key(1),
            on_indivisible="pad",
        )
        tokens = layout.shard_batch(TOKENS, self.mesh)
        self.losses = []
        for _ in range(3):
            with compilations() as counted:
                self.state, aux = self.step(self.state, tokens=tokens)
            self.losses.append(float(aux["loss"]))
        self.compiled_again = len(counted)


@functools.cache
def run(name):
    return Run(*LAYOUTS[name])


@functools.cache
def on_one_device(build):
    return Run(build, Layout.data_parallel(), ONE)


@pytest.mark.parametrize("name", list(LAYOUTS))
def test_a_preset_trains_as_one_device_does(name):
    found, expected = run(name), on_one_device(LAYOUTS[name][0])
    assert not padded_nodes(expected.state)
    np.testing.assert_allclose(found.losses, expected.losses, rtol=1e-5)
    assert_same(
        (found.state.params, found.state.opt_state),
        (expected.state.params, expected.state.opt_state),
    )
    assert_padding_is_zero((found.state.params, found.state.opt_state))
    assert not found.compiled_again


def test_nothing_that_is_split_is_gathered_whole():
    found = run("two_dimensional")
    tokens = found.layout.shard_batch(TOKENS, found.mesh)
    program = found.step.lower(found.state, tokens=tokens).compile().as_text()
    shapes = {tuple(map(int, each.split(","))) for each in re.findall(r"f32\[([\d,]+)\]", program)}
    # Logits and the tables: a device has its part of the vocabulary, six words.
    assert any(6 in shape for shape in shapes)
    assert not [shape for shape in shapes if {VOCABULARY, VOCABULARY + 1} & set(shape)]


def test_models_compute_outside_of_steps_too():
    found, expected = run("tensor_parallel"), on_one_device(build_mixture)
    logits = found.state.model(TOKENS)
    assert_same(logits, expected.state.model(TOKENS))
    evaluate = build_eval_step_fn(loss_fn)
    losses = [evaluate(each.state, tokens=TOKENS)[0] for each in (found, expected)]
    np.testing.assert_allclose(*losses, rtol=1e-5)


def test_plans_and_lint_know_what_is_padded():
    found = run("two_dimensional")
    plan = str(found.layout.plan(found.state, found.mesh, on_indivisible="pad"))
    assert "vocabulary=23(24)/model" in plan
    assert "'heads' (3) padded to 4 over mesh axis 'model' (4), rule 'heads' -> 'model'" in plan
    mixture = run("tensor_parallel")
    bare = abstract_model(build_mixture, jax.random.key(0))
    options = {"batch": TOKENS, "on_indivisible": "pad"}
    assert lint(bare, mixture.mesh, mixture.layout, **options).ok


def test_a_batch_that_does_not_divide_is_refused_by_the_step():
    found = run("two_dimensional")
    with pytest.raises(PlanError) as caught:
        found.step(found.state, tokens=TOKENS[{"batch": pz.slice[:7]}])
    assert str(caught.value) == (
        "parameters are stored padded, and batches are not, since padding would count as "
        "examples:\n  input tokens: logical axis 'batch' (7) does not divide over mesh axis 'data' "
        "(2), asked by rule 'batch' -> 'data'. Leave examples out, or add some that the loss does "
        "not count, as cross_entropy(logits, targets, mask=...) does."
    )


def test_blocks_that_run_per_device_refuse_padding():
    layout = Layout.fully_sharded(min_size=8, manual=True)
    with pytest.raises(RuleTypeError) as caught:
        Run(build_attention, layout, {"data": 8})
    assert str(caught.value) == (
        'manual=True does not go with on_indivisible="pad": what jax.shard_map gives each device '
        "are equal parts, so blocks that run per device have no true lengths to compute with. "
        "Leave manual=True out, and the compiler gathers and scatters; or choose lengths that "
        "divide."
    )


@pytest.mark.parametrize(
    ("groups", "queries", "split"),
    [(3, 2, "head_groups"), (1, 3, "query_heads"), (3, 8, "query_heads")],
)
def test_of_the_axes_of_heads_the_one_that_grows_least_is_padded(groups, queries, split):
    model = abstract_model(
        functools.partial(build_attention, num_kv_heads=groups, query_head_multiplier=queries),
        jax.random.key(0),
    )
    mesh = jax.sharding.AbstractMesh((2, 4), ("data", "model"))
    layout = Layout.tensor_parallel().for_model(model, mesh, on_indivisible="pad")
    rules = {rule.logical_axis: rule.mesh_axes for rule in layout.parameters.name_rules}
    assert rules[split] == ("model",)
    assert [name for name in ("head_groups", "query_heads") if rules.get(name)] == [split]


def test_constraints_split_unevenly_in_programs_and_leave_whole_outside_of_them():
    mesh = make_mesh({"data": 4, "model": 2})
    pin = ConstrainShardingByName(mesh, {"a": "data", "b": "model"}, on_indivisible="pad")
    x = pz.nx.wrap(jnp.arange(30.0).reshape(5, 6), "a", "b")
    assert pin(x).data_array.sharding.spec == PartitionSpec(None, "model")
    program = jax.jit(lambda x: pin(x * 2.0) * 3.0).lower(x).compile().as_text()
    assert "f32[2,3]" in program  # Two of five rows, with three of six columns.
    np.testing.assert_array_equal(jax.jit(pin)(x).data_array, x.data_array)
    slope = jax.grad(lambda x: (pin(x) * pin(x)).untag("a", "b").sum().unwrap())(x)
    np.testing.assert_array_equal(slope.data_array, 2 * x.data_array)
    with pytest.raises(PlanError, match=r"logical axis 'a' \(5\) does not divide"):
        ConstrainShardingByName(mesh, {"a": "data"})(x)


def test_layers_that_pin_check_the_option():
    mesh = make_mesh({"data": 8})
    for layer in (ConstrainActivations, functools.partial(GatherParameters, rules={})):
        with pytest.raises(RuleTypeError, match="on_indivisible must be 'error', 'replicate' or"):
            layer(pz.nn.Identity(), mesh, on_indivisible="padded")


def test_a_layer_that_gathers_takes_padded_parameters():
    mesh = make_mesh({"data": 4, "model": 2})
    linear = pz.nn.Linear.from_config("l", jax.random.key(0), {"a": 5}, {"b": 7})
    x = pz.nx.ones({"a": 5})
    stored = {"a": "data", "b": "model"}
    layer = GatherParameters(
        place(linear, mesh, stored, on_indivisible="pad"),
        mesh,
        {"b": "model"},
        stored=stored,
        on_indivisible="pad",
    )
    assert_same(layer(x), linear(x))
    assert_same(Jitted(layer)(x), linear(x))


def test_models_of_other_libraries_are_made_in_parts_before_they_are_padded(monkeypatch):
    made = []

    def watched(*args, **options):
        made.append(sharded_init(*args, **options))
        return made[-1]

    monkeypatch.setattr(building, "sharded_init", watched)
    split = nn.with_partitioning(nn.initializers.lecun_normal(), ("in", "out"))
    state, _ = Layout(parameters={"in": "data", "out": "model"}, compute={}, blocks=()).build(
        lambda: nn.Dense(7, use_bias=False, kernel_init=split).init(
            jax.random.key(0), jnp.ones((2, 8))
        ),
        mesh=make_mesh({"data": 4, "model": 2}),
        loss_fn=loss_fn,
        optimizer=optax.adam(1e-2),
        rng=jax.random.key(1),
        on_indivisible="pad",
    )
    (before,) = jax.tree.leaves(made)
    assert before.sharding.spec == PartitionSpec(("data", "model"))
    (after,) = padded_nodes(state.params)
    assert after.stored.shape == (8, 8)
    np.testing.assert_array_equal(after.data_array, before)


def test_states_of_other_libraries_are_padded():
    split = nn.with_partitioning(nn.initializers.lecun_normal(), ("in", "out"))
    dense = nn.Dense(7, kernel_init=split)
    x = jnp.ones((8, 5))

    def loss_fn(model, rng, state, x):
        return jnp.mean(dense.apply(model, x) ** 2), state, {}

    layout = Layout(parameters={"in": "data", "out": "model"}, compute={"batch": "data"}, blocks=())
    mesh, states = make_mesh({"data": 4, "model": 2}), []
    for options in ({"on_indivisible": "pad"}, {"on_indivisible": "replicate"}):
        state, step = layout.build(
            lambda: dense.init(jax.random.key(0), x),
            mesh=mesh,
            loss_fn=loss_fn,
            optimizer=optax.adam(1e-2),
            rng=jax.random.key(1),
            on_unnamed="replicate",
            **options,
        )
        states.append(step(state, x=x)[0])
    model = dense.init(jax.random.key(0), x)
    with pytest.raises(
        PlanError, match=r"place\(TrainState\.initial_state\(model, optimizer, key\), "
    ):
        place(model, mesh, layout.parameters, on_indivisible="pad")
    trainer = StatefulTrainer.build(
        jax.random.key(1),
        model,
        optax.adam(1e-2),
        loss_fn,
        mesh=mesh,
        rules=layout.parameters,
        on_indivisible="pad",
        on_unnamed="replicate",
        first_axis="batch",
    )
    trainer.step(x=x)
    *padded, expected = ((state.params, state.opt_state) for state in (trainer.state, *states))
    for found in padded:
        assert_same(found, expected)
        assert len(padded_nodes(found)) == 3
        assert_padding_is_zero(found)
