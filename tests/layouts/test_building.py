"""`Layout.build`: a state and a step in one line, every array where it stays."""

import re

import jax
import numpy as np
import optax
import pytest
from penzai import pz

import penzai_shard
from penzai_shard import Layout, make_mesh, make_plan, strip
from penzai_shard.errors import MeshError, RuleTypeError
from penzai_shard.layers import Checkpointed, GatherParameters, ShardMapped
from tests.layouts.preset_runs import PRESETS, TOKENS, build_model, loss_fn, run
from tests.model_families import drawn_transformer


@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_trains_as_one_device_does(name):
    np.testing.assert_allclose(run(name).losses, run("one device").losses, rtol=2e-5)
    assert strip(run(name).state.model).body is not None


def build(layout=None, initializer=build_model, **arguments):
    given = {
        "mesh": make_mesh({"data": 4, "model": 2}),
        "loss_fn": loss_fn,
        "optimizer": optax.adam(1e-3),
        "rng": jax.random.key(0),
    }
    layout = layout or Layout.fully_sharded()
    return layout.build(initializer, jax.random.key(0), **(given | arguments))


@pytest.mark.parametrize(
    ("by_hand", "options"),
    [(False, {"manual_axes": ("data",)}), (True, {})],
    ids=["step", "blocks"],
)
def test_what_runs_per_device_equals_what_the_compiler_lays_out(by_hand, options):
    layout = Layout.two_dimensional(min_size=64, manual=by_hand)
    state, step = build(layout, optimizer=optax.adamw(1e-2), rng=jax.random.key(1), **options)
    regions = pz.select(state.model).at_instances_of(ShardMapped)
    assert regions.count() == by_hand  # Of one block.
    losses = []
    for _ in range(2):
        state, aux = step(
            state, tokens=layout.shard_batch(TOKENS, make_mesh({"data": 4, "model": 2}))
        )
        losses.append(float(aux["loss"]))
    np.testing.assert_allclose(losses, run("two_dimensional").losses[:2], rtol=2e-5)


def test_unknown_options_are_refused_with_what_to_write():
    message = re.escape(
        "Layout.build got unknown options:\n"
        "  acumulate_steps: neither a train step nor its state has this option. Did you mean "
        "'accumulate_steps'?\n"
        "  seed: neither a train step nor its state has this option. If the initializer takes it: "
        "functools.partial(initializer, seed=...). The options are "
    )
    with pytest.raises(RuleTypeError, match=message):
        build(acumulate_steps=2, seed=1)


def test_what_the_layout_decides_itself_is_no_option():
    with pytest.raises(RuleTypeError) as raised:
        build(train_state_shardings=None, optimizer_rules={}, rules={})
    assert list(raised.value.problems) == [
        "optimizer_rules: the layout says this itself. Leave it out, and give the layout other "
        "ones: dataclasses.replace(layout, optimizer=rules).",
        "rules: the layout says this itself. Leave it out; rules of your own make a layout: "
        "Layout(parameters=rules, compute=rules).",
        "train_state_shardings: the layout says this itself. Leave it out.",
    ]


def test_options_that_a_preset_does_not_have_are_refused_with_those_that_it_has():
    message = (
        "model='model': this preset has no such option. Those of every preset are vocabulary, "
        "experts, names, blocks, rematerialise, manual."
    )
    with pytest.raises(RuleTypeError, match=re.escape(message)):
        Layout.fully_sharded(model="model")


def test_model_and_mesh_in_each_others_place_are_refused():
    with pytest.raises(RuleTypeError, match="a mesh is needed, not TransformerLM"):
        Layout.fully_sharded().plan(make_mesh({"data": 8}), drawn_transformer("llama"))


@pytest.mark.parametrize("preset", ["tensor_parallel", "sequence_parallel", "two_dimensional"])
def test_one_mesh_axis_for_the_batch_and_the_neurons_is_refused(preset):
    message = (
        "model='model': the batch is split over this mesh axis already. Give another one, such as "
        "model='model', or data='data'."
    )
    with pytest.raises(RuleTypeError, match=re.escape(message)):
        getattr(Layout, preset)(data="model")


def test_a_mesh_without_the_layouts_mesh_axis_is_refused():
    with pytest.raises(MeshError, match=r"mesh \(data=8\) has no mesh axis 'model'"):
        build(Layout.tensor_parallel(), mesh=make_mesh({"data": 8}))


def test_a_model_in_place_of_its_initializer_is_refused():
    with pytest.raises(RuleTypeError, match="needs the function that does, not a TransformerLM"):
        Layout.fully_sharded().build(
            drawn_transformer("llama"),
            mesh=make_mesh({"data": 8}),
            loss_fn=loss_fn,
            optimizer=optax.adam(1e-3),
            rng=jax.random.key(0),
        )


def test_a_layout_in_place_of_rules_is_refused():
    message = r"give the plan layout\.plan\(model, mesh\) in place of mesh and rules"
    with pytest.raises(RuleTypeError, match=message):
        make_plan({}, make_mesh({"data": 8}), Layout.fully_sharded())


def test_options_reach_state_and_step():
    tied = lambda parameter: "embedder" not in parameter.label  # noqa: E731
    state, step = build(
        initializer=lambda key: drawn_transformer("llama", num_decoder_blocks=1, vocab_size=88),
        accumulate_steps=2,
        trainable=tied,
        donate_params_and_state=False,
    )
    tokens = Layout.fully_sharded().shard_batch(TOKENS, make_mesh({"data": 4, "model": 2}))
    assert not any("embedder" in name for name in state.variables.trainable_names)
    after, aux = step(state, tokens=tokens)
    assert not any(leaf.is_deleted() for leaf in jax.tree.leaves(state.params))
    assert int(after.step) == 1
    assert np.isfinite(float(aux["loss"]))


def test_a_batch_without_a_batch_axis_is_refused():
    tokens = pz.nx.ones({"examples": 8, "seq": 2})
    with pytest.raises(
        RuleTypeError,
        match=r"no array of this batch has logical axis 'batch'; it has 'examples', 'seq'\. Name "
        r"it so, pz\.nx\.wrap\(x, 'batch', \.\.\.\), or, if its arrays stay plain, say "
        r"first_axis='batch'; or tell the layout what it is called: "
        r'names=\{"batch": "\.\.\."\}',
    ):
        Layout.fully_sharded().shard_batch({"tokens": tokens}, make_mesh({"data": 8}))


def test_a_batch_is_split_along_what_the_layout_calls_it():
    layout = Layout.sequence_parallel(names={"batch": "examples"})
    mesh = make_mesh({"data": 4, "model": 2})
    placed = layout.shard_batch(pz.nx.ones({"examples": 8, "seq": 33}), mesh)
    assert placed.data_array.sharding.shard_shape((8, 33)) == (2, 33)


def test_a_layout_shows_what_is_not_as_by_default_and_evaluates_back():
    layout = Layout.two_dimensional(reshard_after_forward=True, names={"neurons": "mlp"})
    names = {name: getattr(penzai_shard, name) for name in penzai_shard.__all__}
    assert eval(repr(layout), names) == layout
    assert "optimizer" not in repr(layout)
    assert "gathered again" in layout.notebook_table().html()


@pytest.mark.parametrize(
    "layout",
    [
        Layout.fully_sharded(min_size=64, rematerialise="dots"),
        Layout.tensor_parallel(rematerialise="dots"),
    ],
)
def test_blocks_are_rematerialised_around_what_is_gathered(layout):
    mesh = make_mesh({"data": 4, "model": 2})
    model = drawn_transformer("llama")
    edited = layout.recipe(model, mesh).apply(model)
    remat = pz.select(edited).at_instances_of(Checkpointed).get_sequence()
    assert [each.policy for each in remat] == ["dots", "dots"]
    gathers = layout.parameters != Layout.tensor_parallel().parameters
    assert all(isinstance(each.body, GatherParameters) is gathers for each in remat)
    assert strip(edited) == model


def test_a_rematerialisation_policy_that_does_not_exist_is_refused():
    with pytest.raises(RuleTypeError, match=r"there is no checkpoint policy 'dotz'"):
        Layout.fully_sharded(rematerialise="dotz")


@pytest.mark.parametrize(
    "layout",
    [
        lambda: Layout.sequence_parallel(manual=True),
        lambda: Layout.fully_sharded(manual=True, reshard_after_forward=True),
    ],
)
def test_blocks_that_gather_by_hand_go_with_no_other_way_of_gathering(layout):
    with pytest.raises(RuleTypeError, match="manual=True goes with neither sequence parallelism"):
        layout()
