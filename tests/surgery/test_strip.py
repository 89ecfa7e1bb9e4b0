"""Taking off what was put in."""

import copy
import itertools
import pickle

import jax
import jax.numpy as jnp
import optax
import pytest
import treescope
from hypothesis import given, settings
from hypothesis import strategies as st
from penzai import pz
from penzai.toolshed import save_intermediates

from penzai_shard import (
    TrainState,
    make_mesh,
    name_to_name_device_put,
    param_dict,
    with_params,
)
from penzai_shard.errors import RuleTypeError
from penzai_shard.layers import Checkpointed, ConstrainShardingByName, Jitted, Scoped
from penzai_shard.surgery import (
    ROOT,
    InsertedSequence,
    Recipe,
    constrain_blocks,
    insert_after,
    insert_before,
    jit_root,
    manual_fsdp,
    mixed_precision,
    rematerialise_blocks,
    replace,
    roll_layer_stacks,
    scope_layers,
    strip,
    wrap,
)
from tests.surgery.small_models import Block, features, linear, llama, mlp, parameter_names, scaled

MESH = make_mesh({"data": 4, "model": 2})
RULES = {"batch": "data", "embedding": "model"}
CONSTRAINT = ConstrainShardingByName(MESH, RULES)

EDITS = [
    wrap(pz.nn.Linear, Checkpointed),
    wrap(pz.nn.Elementwise, Jitted, nested=True),
    wrap(pz.nn.Residual, Scoped),
    wrap("sublayers/*", Checkpointed, expect=None),
    wrap(pz.nn.Layer, Scoped, nested=True),
    insert_after(pz.nn.Linear, CONSTRAINT),
    insert_before(pz.nn.Linear, CONSTRAINT, within=pz.nn.Residual),
    insert_after(pz.nn.Residual, CONSTRAINT),
    insert_after(ROOT, CONSTRAINT),
    insert_before(ROOT, CONSTRAINT),
    insert_after("**/delta", CONSTRAINT),
    wrap(ROOT, Jitted),
    *constrain_blocks(pz.nn.Sequential, MESH, RULES),
    *scope_layers(),
    *mixed_precision(),
    *manual_fsdp(pz.nn.Linear, MESH, RULES),
    insert_after(pz.nn.Elementwise, pz.nn.ConstantRescale(by=2.0)),
    wrap(pz.nn.Linear, pz.nn.Residual),
    wrap(pz.nn.Elementwise, scaled),
]


@st.composite
def models(draw, depth=3):
    names = itertools.count()

    def build(depth):
        kinds = ["linear", "elementwise"]
        if depth:
            kinds += ["residual", "sequential", "group", "block", "branches"]
        match draw(st.sampled_from(kinds)):
            case "linear":
                return LINEARS[next(names) % len(LINEARS)]
            case "elementwise":
                return pz.nn.Elementwise(jnp.tanh)
            case "residual":
                return pz.nn.Residual(build(depth - 1))
            case "block":
                return Block(several(depth - 1))
            case "group":
                return pz.nn.NamedGroup("group", tuple(several(depth - 1)))
            case "branches":
                return pz.nn.BranchAndAddTogether(several(depth - 1))
        return pz.nn.Sequential(several(depth - 1))

    def several(depth):
        return [build(depth) for _ in range(draw(st.integers(1, 3)))]

    return pz.nn.Sequential(several(depth))


LINEARS = [linear(f"linear_{i}", i) for i in range(6)]


def fitting(recipe, model):
    """The edits of a recipe that find something in what those before left."""
    kept = []
    for edit in recipe:
        outcome = edit.run(model)
        if not outcome.problem:
            kept.append(edit)
            model = outcome.model
    return Recipe(*kept), model


@settings(max_examples=120)
@given(models(), st.lists(st.sampled_from(EDITS), min_size=1, max_size=6))
def test_apply_and_strip_is_the_identity(model, edits):
    recipe, expected = fitting(Recipe(*edits), model)
    edited = recipe.apply(model)
    assert edited == expected
    assert parameter_names(edited) == parameter_names(model)
    stripped = strip(edited)
    assert stripped == model
    assert jax.tree.structure(stripped) == jax.tree.structure(model)
    assert all(
        one is other
        for one, other in zip(jax.tree.leaves(stripped), jax.tree.leaves(model), strict=True)
    )


@settings(max_examples=40)
@given(models(), st.lists(st.sampled_from(EDITS[:16]), min_size=1, max_size=5))
def test_library_layers_come_off_a_model_that_was_rebuilt(model, edits):
    _, edited = fitting(Recipe(*edits), model)
    rebuilt = jax.tree.map(lambda leaf: leaf, edited)
    assert strip(rebuilt) == model


@settings(max_examples=40)
@given(models(), st.lists(st.sampled_from(EDITS[:16]), min_size=1, max_size=5))
def test_json_and_repr_make_the_same_edits(model, edits):
    recipe, edited = fitting(Recipe(*edits), model)
    assert Recipe.from_json(recipe.to_json(), allow=("tests",)).apply(model) == edited


def test_the_order_of_edits_does_not_matter():
    model = llama(1)
    edits = [wrap(pz.nn.Linear, Checkpointed), wrap(ROOT, Jitted), *scope_layers()]
    edits.append(insert_after(pz.nn.Attention, CONSTRAINT))
    for order in itertools.permutations(edits):
        assert strip(Recipe(*order).apply(model)) == model


def test_nothing_to_take_off_gives_the_model_itself():
    model = llama(1)
    assert strip(model) is model


def test_parts_without_edits_are_the_same_objects():
    model = mlp(3)
    stripped = strip(Recipe(wrap("sublayers/1", Checkpointed)).apply(model))
    assert all(one is other for one, other in zip(stripped.sublayers, model.sublayers, strict=True))


def test_named_layers_alone_come_off():
    model = mlp(2)
    edited = (rematerialise_blocks(Block) + jit_root()).apply(model)
    assert strip(edited, layers=Jitted) == rematerialise_blocks(Block).apply(model)
    assert strip(edited, layers=(Jitted, Checkpointed)) == model
    assert strip(edited, layers=[Scoped]) is edited


def test_a_constraint_between_wrappers_comes_off():
    model = mlp(1)
    recipe = constrain_blocks(Block, MESH, RULES) + Recipe(wrap(ConstrainShardingByName, Scoped))
    assert strip(recipe.apply(model)) == model


def test_a_sequence_of_the_user_stays():
    model = pz.nn.Residual(pz.nn.Sequential([linear("w")]))
    edited = Recipe(insert_after(pz.nn.Linear, CONSTRAINT)).apply(model)
    assert strip(edited) == model


def test_a_sequence_of_inserts_vanishes_only_when_all_are_off():
    model = pz.nn.Residual(linear("w"))
    edited = Recipe(
        insert_after(pz.nn.Linear, CONSTRAINT), insert_before(pz.nn.Linear, pz.nn.Identity())
    ).apply(model)
    without = strip(edited, layers=ConstrainShardingByName)
    assert isinstance(without.delta, InsertedSequence)
    assert len(without.delta.sublayers) == 2
    assert strip(without) == model


def test_a_constraint_that_fills_a_place_leaves_a_layer_that_does_nothing():
    assert strip(pz.nn.Residual(CONSTRAINT)) == pz.nn.Residual(pz.nn.Identity())
    assert strip(CONSTRAINT) == pz.nn.Identity()


def test_a_rolled_stack_becomes_penzais_again():
    model = llama(3, use_layer_stack=True)
    edited = (roll_layer_stacks() + rematerialise_blocks(pz.nn.Attention)).apply(model)
    assert strip(edited) == model
    assert parameter_names(edited) == parameter_names(model)


def test_parameters_keep_the_values_that_training_gave_them():
    model = mlp(1)
    edited = (jit_root() + rematerialise_blocks(Block)).apply(model)
    for parameter in pz.unbind_params(edited)[1]:
        parameter.value = parameter.value + 1
    stripped = strip(edited)
    assert stripped == model
    x = features()
    assert jnp.allclose(
        stripped(x).unwrap("batch", "embedding"),
        edited(x).unwrap("batch", "embedding"),
        rtol=1e-5,
    )


def test_functional_training_leaves_the_structure_of_the_original():
    model = mlp(1)
    edited = (constrain_blocks(Block, MESH, RULES) + jit_root()).apply(model)
    slots, values = pz.unbind_params(edited, freeze=True)
    trained = pz.bind_variables(slots, jax.tree.map(lambda x: x + 1, values))
    assert jax.tree.structure(strip(trained)) == jax.tree.structure(
        pz.bind_variables(*pz.unbind_params(model, freeze=True))
    )


def test_layers_of_others_come_off_where_a_recipe_inserted_them():
    model = mlp(1)
    tap = save_intermediates.SaveIntermediate()
    edited = Recipe(insert_after(pz.nn.Linear, tap)).apply(model)
    edited(features())
    assert strip(edited) == model
    assert strip(copy.copy(edited)) == model


def test_layers_of_others_stay_where_the_user_had_them():
    tap = save_intermediates.SaveIntermediate()
    model = pz.nn.Sequential([tap, linear("w")])
    edited = Recipe(insert_after(pz.nn.Linear, tap)).apply(model)
    assert strip(edited) == model


def test_the_layer_that_was_given_is_not_marked():
    layer = pz.nn.Identity()
    Recipe(insert_after(Block, layer)).apply(mlp(1))
    assert strip(pz.nn.Sequential([layer])) == pz.nn.Sequential([layer])


def test_layers_of_others_come_off_by_name_too():
    model = mlp(1)
    edited = Recipe(insert_after(Block, pz.nn.Identity())).apply(model)
    rebuilt = jax.tree.map(lambda leaf: leaf, edited)
    assert strip(rebuilt) == model
    assert strip(rebuilt, layers=pz.nn.Identity) == model
    assert strip(rebuilt, layers=Checkpointed) == rebuilt


def test_what_was_replaced_stays():
    model = mlp(1)
    edited = Recipe(replace(pz.nn.Elementwise, lambda layer: pz.nn.Identity())).apply(model)
    assert strip(edited) == edited


def test_layers_are_types():
    with pytest.raises(RuleTypeError, match=r"takes layer types, not Identity\(\). Write Identity"):
        strip(mlp(1), layers=pz.nn.Identity())
    with pytest.raises(RuleTypeError, match="takes layer types, not 'Jitted'"):
        strip(mlp(1), layers="Jitted")


@pytest.mark.parametrize(
    "rebuild",
    [
        lambda model: jax.tree.map(lambda leaf: leaf, model),
        lambda model: pz.bind_variables(*pz.unbind_variables(model)),
        lambda model: pz.select(model).at_instances_of(Block).apply(Checkpointed),
        lambda model: with_params(model, param_dict(model)),
        lambda model: name_to_name_device_put(model, MESH, {}),
        lambda model: TrainState.initial_state(model, optax.sgd(0.1), jax.random.key(0)).model,
    ],
    ids=["tree map", "bind", "selector", "with_params", "placed", "train state"],
)
def test_layers_of_somebody_else_s_come_off_a_model_that_was_rebuilt(rebuild):
    model = mlp(2)
    recipe = Recipe(
        insert_after(pz.nn.Linear, pz.nn.Identity()),
        insert_before(Block, lambda layer: pz.nn.ConstantRescale(by=1.0)),
        wrap(Block, lambda layer: pz.nn.Sequential([layer, pz.nn.Identity()])),
        insert_after("**/delta", pz.nn.Identity()),
    )
    edited = recipe.apply(model)
    assert pz.select(edited).at_instances_of(pz.nn.Identity).count() > 4
    unbound = pz.unbind_variables(strip(rebuild(edited)))[0]
    assert unbound == pz.unbind_variables(model)[0]
    assert jax.tree.structure(unbound) == jax.tree.structure(pz.unbind_variables(model)[0])


def test_an_inserted_layer_is_what_was_given_to_all_who_look():
    layer = pz.nn.ConstantRescale(by=2.0)
    inserted = Recipe(insert_after(pz.nn.Linear, layer)).apply(mlp(1))
    (found,) = pz.select(inserted).at_instances_of(pz.nn.ConstantRescale).get_sequence()[:1]
    assert found == layer
    assert layer == found
    assert hash(found) == hash(layer)
    assert repr(found) == repr(layer)
    assert treescope.render_to_text(found) == treescope.render_to_text(layer)
    assert found(3.0) == layer(3.0)


def test_an_inserted_layer_that_was_pickled_comes_off():
    model = pz.nn.Sequential([pz.nn.Identity()])
    edited = Recipe(insert_after(pz.nn.Identity, pz.nn.ConstantRescale(by=2.0))).apply(model)
    assert strip(pickle.loads(pickle.dumps(edited))) == model
