"""Mistakes that new users make, each with its whole message, and with the proposed fix at work.

Every function below returns two calls: one with the mistake, and the same with what its message
proposes. The message is compared word for word.
"""

import dataclasses
import json
import re
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AbstractMesh
from penzai import pz
from penzai.models import simple_mlp

import penzai_shard as pzs
from penzai_shard import errors

RULES = {"batch": "data", "features_out": "model"}


@dataclasses.dataclass(frozen=True)
class Mistake:
    """A mistake: its two calls by way of a function of a directory, and the message."""

    calls: Callable[[Path], tuple[Callable[[], Any], Callable[[], Any]]]
    kind: type[Exception]
    message: str


MISTAKES: dict[str, Mistake] = {}


def answered(kind, *lines):
    """Registers a mistake and the answer that it gets."""

    def register(calls):
        MISTAKES[calls.__name__] = Mistake(calls, kind, "\n".join(lines))
        return calls

    return register


def mesh():
    return pzs.make_mesh({"data": 4, "model": 2})


def build(init_base_rng=None, sizes=(8, 16, 4)):
    return simple_mlp.MLP.from_config(name="mlp", init_base_rng=init_base_rng, feature_sizes=sizes)


def model(sizes=(8, 16, 4)):
    return build(jax.random.key(0), sizes)


def abstract():
    return pzs.abstract_model(build, init_base_rng=jax.random.key(0))


def features(batch=8):
    return pz.nx.wrap(jnp.ones((batch, 8)), "batch", "features")


def loss_fn(model, rng, state, x):
    out = model(x).unwrap("batch", "features")
    loss = jnp.mean(out**2)
    return loss, state, {"loss": loss}


def train_state(optimizer=None):
    return pzs.TrainState.initial_state(model(), optimizer or optax.adam(1e-3), jax.random.key(0))


def one_step(loss=loss_fn, state=None, x=None, **options):
    step = pzs.build_train_step_fn(loss, **options)
    return step(train_state() if state is None else state, x=features() if x is None else x)


# Meshes and rules


@answered(
    errors.MeshError,
    "cannot make a mesh data=3: it needs 3 devices, and there are 8.",
    "  Use fewer devices: make_mesh({'data': 3}, jax.devices()[:3]).",
    "  Or choose sizes whose product is 8.",
)
def a_mesh_of_a_wrong_number_of_devices(directory):
    return lambda: pzs.make_mesh({"data": 3}), lambda: pzs.make_mesh({"data": 8})


@answered(
    errors.MeshError,
    "a mesh is made from the sizes of its mesh axes by name, not from 8. Write for instance "
    'make_mesh({"data": 4, "model": 2}).',
)
def a_mesh_from_a_number(directory):
    return lambda: pzs.make_mesh(8), lambda: pzs.make_mesh({"data": 4, "model": 2})


@answered(
    errors.MeshError,
    "the rules do not fit the mesh:",
    "  rule 'features_out' -> 'modle': the mesh (data=4, model=2) has no mesh axis 'modle'. "
    "Did you mean 'model'?",
)
def a_mesh_axis_that_does_not_exist(directory):
    return (
        lambda: pzs.make_plan(abstract(), mesh(), {"features_out": "modle"}),
        lambda: pzs.make_plan(abstract(), mesh(), {"features_out": "model"}),
    )


@answered(
    errors.PlanError,
    "no valid layout for some arrays:",
    "  up: logical axis 'neurons' (10) does not divide over mesh axis 'data' (4), asked by "
    "rule 'neurons' -> 'data'. Pad it to 12, or map 'neurons' to None. "
    'Or store it padded: on_indivisible="pad".',
)
def a_length_that_does_not_divide(directory):
    wide = {"up": jax.eval_shape(lambda: pz.nx.ones({"embedding": 8, "neurons": 10}))}
    return (
        lambda: pzs.make_plan(wide, mesh(), {"neurons": "data"}),
        lambda: pzs.make_plan(wide, mesh(), {"neurons": None}),
    )


@answered(
    errors.PlanError,
    "no valid layout for some arrays:",
    "  mlp/Affine_0/Linear.weights: mesh axis 'data' (4) is asked for twice: by logical axis "
    "'features' (8), rule 'features' -> 'data', and by logical axis 'features_out' (16), "
    "rule 'features_out' -> 'data'. Map one of them to another mesh axis, or map "
    "'features_out' to None.",
    "  mlp/Affine_1/Linear.weights: mesh axis 'data' (4) is asked for twice: by logical axis "
    "'features' (16), rule 'features' -> 'data', and by logical axis 'features_out' (16), "
    "rule 'features_out' -> 'data'. Map one of them to another mesh axis, or map "
    "'features_out' to None.",
)
def one_mesh_axis_for_two_logical_axes_of_an_array(directory):
    rules = {"features": "data", "features_out": "data"}
    return (
        lambda: pzs.name_to_name_device_put(model((8, 16, 16)), mesh(), rules),
        lambda: pzs.name_to_name_device_put(
            model((8, 16, 16)), mesh(), {"features": None, "features_out": "data"}
        ),
    )


@answered(
    errors.PlanError,
    "no valid layout for some arrays:",
    "  mask: this array of shape (8, 8) has no logical axis names. Name it with "
    'pz.nx.wrap(array).tag(...) or name_axes(tree, {...}), or pass on_unnamed="replicate".',
)
def an_array_without_names(directory):
    tree = {"mask": jnp.ones((8, 8)), "w": pz.nx.ones({"a": 8})}
    return (
        lambda: pzs.place(tree, mesh(), {"a": "data"}),
        lambda: pzs.place(tree, mesh(), {"a": "data"}, on_unnamed="replicate"),
    )


@answered(
    errors.ShardingWarning,
    "rule 'feature_out' -> 'model' matches no logical axis of this tree, which has "
    "'features_out'. Did you mean 'features_out'?",
)
def a_logical_axis_misspelt_in_the_rules(directory):
    return (
        lambda: pzs.make_plan(abstract(), mesh(), {"feature_out": "model"}),
        lambda: pzs.make_plan(abstract(), mesh(), {"features_out": "model"}),
    )


@answered(
    errors.RuleTypeError,
    "make_plan: rules and axis_name_to_mesh_name are two names of one argument, and both are "
    "given. Give one of them; two sets of rules are combined as AxisRules(first) | second.",
)
def both_keywords_for_rules(directory):
    return (
        lambda: pzs.make_plan(abstract(), mesh(), rules=RULES, axis_name_to_mesh_name=RULES),
        lambda: pzs.make_plan(abstract(), mesh(), rules=RULES),
    )


@answered(
    errors.RuleTypeError,
    "on_unnamed must be 'error', 'replicate' or 'infer', not 'ignore'.",
)
def a_mode_for_unnamed_arrays_that_does_not_exist(directory):
    return (
        lambda: pzs.make_plan(abstract(), mesh(), RULES, on_unnamed="ignore"),
        lambda: pzs.make_plan(abstract(), mesh(), RULES, on_unnamed="replicate"),
    )


@answered(
    errors.RuleTypeError,
    "on_indivisible must be 'error', 'replicate' or 'pad', not True.",
)
def a_mode_for_indivisible_lengths_that_does_not_exist(directory):
    return (
        lambda: pzs.sharded_init(
            build, jax.random.key(0), mesh=mesh(), rules=RULES, on_indivisible=True
        ),
        lambda: pzs.sharded_init(
            build, jax.random.key(0), mesh=mesh(), rules=RULES, on_indivisible="replicate"
        ),
    )


@answered(
    errors.RuleTypeError,
    "fully_sharded: min_size is a number of elements, for instance min_size=1024, not '1k'.",
)
def a_size_in_words(directory):
    return lambda: pzs.fully_sharded(min_size="1k"), lambda: pzs.fully_sharded(min_size=1024)


@answered(
    errors.RuleTypeError,
    "rules must be AxisRules, a mapping, a sequence of (logical, mesh) pairs or None, not "
    "str: 'data'. For instance {'embedding': 'data'}.",
)
def rules_that_are_a_text(directory):
    return (
        lambda: pzs.make_plan(abstract(), mesh(), "data"),
        lambda: pzs.make_plan(abstract(), mesh(), {"features": "data"}),
    )


@answered(
    errors.RuleTypeError,
    "the rules are the function data_parallel, which was not called. Write data_parallel().",
)
def a_preset_that_was_not_called(directory):
    return (
        lambda: pzs.shard_batch(features(), mesh(), pzs.data_parallel),
        lambda: pzs.shard_batch(features(), mesh(), pzs.data_parallel()),
    )


@answered(
    errors.RuleTypeError,
    "rules are combined with |, not with +: data_parallel() | tensor_parallel(). Where both name "
    "a logical axis, the left ones count.",
)
def a_sum_of_presets(directory):
    return (
        lambda: pzs.data_parallel() + pzs.tensor_parallel(),
        lambda: pzs.data_parallel() | pzs.tensor_parallel(),
    )


@answered(
    errors.MeshError,
    "the rules do not fit the mesh:",
    "  rule 'model' -> 'features_out': the mesh (data=4, model=2) has no mesh axis "
    "'features_out'. It looks reversed: logical axis first, {'features_out': 'model'}.",
)
def a_rule_turned_round(directory):
    return (
        lambda: pzs.make_plan(abstract(), mesh(), {"model": "features_out"}),
        lambda: pzs.make_plan(abstract(), mesh(), {"features_out": "model"}),
    )


@answered(
    errors.RuleTypeError,
    "make_plan: mesh and rules are mixed up: swapped. The mesh comes first, or name them: "
    "mesh=mesh, rules=rules.",
)
def mesh_and_rules_swapped(directory):
    return (
        lambda: pzs.make_plan(abstract(), RULES, mesh()),
        lambda: pzs.make_plan(abstract(), rules=RULES, mesh=mesh()),
    )


@answered(
    errors.RuleTypeError,
    "place: a plan is given as the rules, and stands for mesh and rules both. Give the plan "
    "alone, as plan: place(tree, plan), or plan=plan.",
)
def a_plan_where_the_rules_belong(directory):
    plan = pzs.make_plan(abstract(), mesh(), RULES)
    return lambda: pzs.place(model(), mesh(), plan), lambda: pzs.place(model(), plan)


@answered(
    errors.RuleTypeError,
    "make_plan takes a model or another tree of arrays, not the function build. Give what it "
    "builds: abstract_model(build, ...), without memory, to plan or to restore; "
    "sharded_init(build, ..., mesh=mesh, rules=rules) to have it on a mesh.",
)
def the_function_that_builds_a_model(directory):
    return (
        lambda: pzs.make_plan(build, mesh(), RULES),
        lambda: pzs.make_plan(pzs.abstract_model(build, jax.random.key(0)), mesh(), RULES),
    )


@answered(
    errors.ShardingWarning,
    "name_to_name_device_put was given no rules, and none of the logical axes ('features', "
    "'features_out') has the name of a mesh axis (data=4, model=2), so every device gets a "
    "whole copy. Say what is split over what, for instance rules={'features': 'data'}, or "
    "that copies are wanted: rules={}.",
)
def no_rules_and_a_mesh_with_other_names(directory):
    return (
        lambda: pzs.name_to_name_device_put(model(), mesh()),
        lambda: pzs.name_to_name_device_put(model(), mesh(), {"features_out": "model"}),
    )


# Placing and initialising


@answered(
    errors.RuleTypeError,
    "sharded_init builds a model and needs the function that does, not a MLP. Give the "
    "function and its arguments: sharded_init(build_model, seed=0, mesh=mesh, rules=rules). "
    "A model that exists already is placed with place(model, mesh, rules).",
)
def an_initialized_model_where_its_initializer_belongs(directory):
    return (
        lambda: pzs.sharded_init(model(), mesh=mesh(), rules=RULES),
        lambda: pzs.sharded_init(build, jax.random.key(0), mesh=mesh(), rules=RULES),
    )


@answered(
    errors.RuleTypeError,
    "abstract_model calls the function that builds a model, and this is a MLP. Give the function "
    "and its arguments: abstract_model(build_model, seed=0). A model that exists already needs "
    "none: make_plan and restore_params take it as it is.",
)
def an_abstract_model_of_a_model(directory):
    return (
        lambda: pzs.abstract_model(model()),
        lambda: pzs.make_plan(model(), mesh(), RULES),
    )


@answered(
    errors.RuleTypeError,
    "sharded_init passes what is given by position on to the function that builds the model. "
    "Name the mesh, the rules or the plan: sharded_init(build_model, ..., mesh=mesh, rules=rules).",
)
def mesh_and_rules_of_an_initialisation_by_position(directory):
    return (
        lambda: pzs.sharded_init(model, mesh(), RULES),
        lambda: pzs.sharded_init(model, mesh=mesh(), rules=RULES),
    )


@answered(
    errors.RuleTypeError,
    "seeded cannot be called with these arguments:",
    "  seed='0': is a text. Write seed=0.",
)
def a_seed_that_is_a_text(directory):
    def seeded(seed):
        return build(jax.random.key(seed))

    seeded.__qualname__ = "seeded"
    return (
        lambda: pzs.sharded_init(seeded, "0", mesh=mesh(), rules=RULES),
        lambda: pzs.sharded_init(seeded, 0, mesh=mesh(), rules=RULES),
    )


@answered(
    errors.PlanError,
    "no valid layout for some arrays of this batch; say what the first dimension of plain ones is, "
    'first_axis="batch", or:',
    "  the array: this array of shape (8, 3) has no logical axis names. Name it with "
    'pz.nx.wrap(array).tag(...), or pass on_unnamed="replicate".',
)
def a_batch_without_names(directory):
    x = np.ones((8, 3))
    return (
        lambda: pzs.shard_batch(x, mesh(), RULES),
        lambda: pzs.shard_batch(pz.nx.wrap(x).tag("batch", "features"), mesh(), RULES),
    )


@answered(
    errors.ShardingError,
    "the initialiser left parameters without a value, so nothing is known of them:",
    "  mlp/Affine_0/Linear.weights: its place is empty. Give the initialiser a key, for "
    "instance init_base_rng=jax.random.key(0).",
    "  mlp/Affine_1/Linear.weights: its place is empty. Give the initialiser a key, for "
    "instance init_base_rng=jax.random.key(0).",
    "  mlp/Affine_0/AddBias.bias: its place is empty. Give the initialiser a key, for "
    "instance init_base_rng=jax.random.key(0).",
    "  mlp/Affine_1/AddBias.bias: its place is empty. Give the initialiser a key, for "
    "instance init_base_rng=jax.random.key(0).",
)
def an_initializer_without_a_key(directory):
    return (
        lambda: pzs.sharded_init(build, mesh=mesh(), rules=RULES),
        lambda: pzs.sharded_init(build, init_base_rng=jax.random.key(0), mesh=mesh(), rules=RULES),
    )


@answered(
    errors.MeshError,
    "place cannot put arrays on this AbstractMesh: it has no devices. Plan with make_plan on "
    "it, or use make_mesh({...}) to place.",
)
def arrays_on_a_mesh_without_devices(directory):
    return (
        lambda: pzs.place(model(), AbstractMesh((4, 2), ("data", "model")), RULES),
        lambda: pzs.place(model(), pzs.make_mesh({"data": 4, "model": 2}), RULES),
    )


@answered(
    errors.RuleTypeError,
    "Jitted(MLP) was called as an abstract model, whose parameters have no values. Build it "
    "with sharded_init, fill it with restore_params or with_params, or trace it: "
    "jax.eval_shape(model, x).",
    "  mlp/Affine_0/Linear.weights: has a shape and no value.",
    "  mlp/Affine_1/Linear.weights: has a shape and no value.",
    "  mlp/Affine_0/AddBias.bias: has a shape and no value.",
    "  mlp/Affine_1/AddBias.bias: has a shape and no value.",
)
def a_call_of_an_abstract_model(directory):
    return (
        lambda: pzs.Jitted(abstract())(features()),
        lambda: pzs.Jitted(model())(features()),
    )


@answered(
    errors.PlanError,
    "place: the plan was made for another tree. Plan this one: make_plan(tree, ...)",
    "  mlp/Affine_0/Linear.weights: is [features=8, features_out=16] in the plan and "
    "[features=8, features_out=32] in the tree.",
    "  mlp/Affine_0/AddBias.bias: is [features=16] in the plan and [features=32] in the tree.",
    "  mlp/Affine_1/Linear.weights: is [features=16, features_out=4] in the plan and "
    "[features=32, features_out=4] in the tree.",
)
def a_plan_for_another_model(directory):
    plan = pzs.make_plan(abstract(), mesh(), RULES)
    return lambda: pzs.place(model((8, 32, 4)), plan), lambda: pzs.place(model(), plan)


@answered(
    errors.SelectionError,
    "cannot name the arrays of this tree:",
    "  layers.0.weight: no pattern matches this array of shape (8, 4). Add "
    "'layers.0.weight': ('axis_0', 'axis_1').",
    "  pattern 'layer.*.weight' matches no array. The nearest path is 'layers.0.weight'.",
)
def names_for_a_path_that_does_not_exist(directory):
    state_dict = {"layers.0.weight": np.ones((8, 4))}
    return (
        lambda: pzs.name_axes(state_dict, {"layer.*.weight": ("out", "in")}),
        lambda: pzs.name_axes(state_dict, {"layers.*.weight": ("out", "in")}),
    )


@answered(
    errors.SelectionError,
    "cannot name the arrays of this tree:",
    "  layers.0.weight: pattern 'layers.*.weight' gives 1 logical axes ('out',) to an array "
    "of rank 2, shape (8, 4). Give 2, None for a positional dimension.",
)
def names_for_another_number_of_dimensions(directory):
    state_dict = {"layers.0.weight": np.ones((8, 4))}
    return (
        lambda: pzs.name_axes(state_dict, {"layers.*.weight": ("out",)}),
        lambda: pzs.name_axes(state_dict, {"layers.*.weight": ("out", "in")}),
    )


@answered(
    errors.PlanError,
    "no valid layout for some arrays:",
    "  the array: logical axis 'batch' (6) does not divide over mesh axis 'data' (4), asked "
    "by rule 'batch' -> 'data'. Pad it to 8, or map 'batch' to None.",
)
def a_batch_that_does_not_divide(directory):
    return (
        lambda: pzs.shard_batch(features(6), mesh(), RULES),
        lambda: pzs.shard_batch(features(8), mesh(), RULES),
    )


# Layers and surgery


@answered(
    errors.ShardingWarning,
    "rule 'bacth' -> 'data' matches no logical axis of this tree, which has 'batch'. Did you "
    "mean 'batch'?",
)
def a_constraint_that_names_nothing_of_what_flows_through_it(directory):
    return (
        lambda: pzs.ConstrainShardingByName(mesh(), {"bacth": "data"})(features()),
        lambda: pzs.ConstrainShardingByName(mesh(), {"batch": "data"})(features()),
    )


@answered(
    errors.RuleTypeError,
    "there is no checkpoint policy 'dotz'. The named ones are 'nothing', 'dots', "
    "'dots_without_batch', 'everything', 'all_but_gathered', 'offload_dots'; any other is given "
    "as a callable, such as those in jax.checkpoint_policies.",
)
def a_rematerialisation_policy_that_does_not_exist(directory):
    return (
        lambda: pzs.Checkpointed(pz.nn.Identity(), "dotz"),
        lambda: pzs.Checkpointed(pz.nn.Identity(), "dots"),
    )


@answered(
    errors.ShardingError,
    "the layer does not treat the elements that are on different devices independently "
    "(split: 'batch' (8) over mesh axis 'data' (4)):",
    "  'rev' of Backwards (test_mistakes_of_new_users.py:LINE): it reverses logical axis "
    "'batch', which is split over mesh axis 'data'. Needed for output. Do it outside of the "
    "layer, or map the logical axis to None in activation_rules; if the elements are "
    "independent after all, say assume_independent=('rev',).",
)
def a_region_that_reverses_the_axis_it_is_split_along(directory):
    @pz.pytree_dataclass
    class Backwards(pz.nn.Layer):
        def __call__(self, x, /, **_):
            return pz.nx.nmap(lambda row: row[::-1])(x.untag("batch")).tag("batch")

    def region(rules):
        return pzs.ShardMapped(Backwards(), mesh(), {}, rules)

    return (
        lambda: region({"batch": "data"})(features()),
        lambda: region({"features": "model"})(features()),
    )


@answered(
    errors.RuleTypeError,
    "wrap: ConstrainShardingByName is not a wrapper: it holds no layer. Put an instance of "
    "it before or after the layers, with insert_before or insert_after.",
)
def a_constraint_as_a_wrapper(directory):
    constraint = pzs.ConstrainShardingByName(mesh(), {"batch": "data"})
    return (
        lambda: pzs.Recipe(pzs.wrap(pz.nn.Linear, pzs.ConstrainShardingByName)).apply(model()),
        lambda: pzs.Recipe(pzs.insert_after(pz.nn.Linear, constraint)).apply(model()),
    )


@answered(
    errors.SelectionError,
    "this recipe does not fit the MLP:",
    "  edit 1, wrap('pz.nn:Attention', Checkpointed): nothing matches. The model has: Affine "
    "(2), Linear (2), RenameAxes (2), AddBias (2), MLP (1). Give expect=0 if that is meant, "
    "or leave the edit out.",
)
def an_edit_of_a_layer_that_is_not_there(directory):
    return (
        lambda: pzs.Recipe(pzs.wrap(pz.nn.Attention, pzs.Checkpointed)).apply(model()),
        lambda: pzs.Recipe(pzs.wrap(pz.nn.Attention, pzs.Checkpointed, expect=0)).apply(model()),
    )


@answered(
    errors.SelectionError,
    "this recipe does not fit the MLP:",
    "  edit 1, wrap('pz.nn:Linear', Checkpointed, expect=3): 2 places match, and 3 are "
    "expected: sublayers/0/sublayers/0, sublayers/2/sublayers/0. Give expect=2, or narrow "
    "the edit with within= or outside=.",
)
def an_edit_of_another_number_of_places(directory):
    return (
        lambda: pzs.Recipe(pzs.wrap(pz.nn.Linear, pzs.Checkpointed, expect=3)).apply(model()),
        lambda: pzs.Recipe(pzs.wrap(pz.nn.Linear, pzs.Checkpointed, expect=2)).apply(model()),
    )


@answered(
    errors.RuleTypeError,
    "this recipe cannot be applied to the MLP:",
    "  edit 1, wrap('pz.nn:Linear', 'builtins:repr'), at sublayers/0/sublayers/0: the "
    'function returned "Linear(weigh...tures_out\',))" of type str where a layer belongs. '
    "Return the layer from it.",
    "  edit 1, wrap('pz.nn:Linear', 'builtins:repr'), at sublayers/2/sublayers/0: the "
    'function returned "Linear(weigh...tures_out\',))" of type str where a layer belongs. '
    "Return the layer from it.",
)
def a_wrapper_that_returns_a_text(directory):
    return (
        lambda: pzs.Recipe(pzs.wrap(pz.nn.Linear, repr)).apply(model()),
        lambda: pzs.Recipe(pzs.wrap(pz.nn.Linear, pzs.Checkpointed)).apply(model()),
    )


@answered(
    errors.RuleTypeError,
    "insert_after: Identity is a class. Give an instance, such as Identity(...), or a "
    "function of the layer at the place.",
)
def an_inserted_class(directory):
    return (
        lambda: pzs.insert_after(pz.nn.Linear, pz.nn.Identity),
        lambda: pzs.insert_after(pz.nn.Linear, pz.nn.Identity()),
    )


@answered(
    errors.RuleTypeError,
    "a recipe is made of edits:",
    "  argument 1 is a list of edits. Unpack it: Recipe(*edits).",
)
def a_recipe_of_a_list(directory):
    edits = [pzs.wrap(pz.nn.Linear, pzs.Checkpointed)]
    return lambda: pzs.Recipe(edits), lambda: pzs.Recipe(*edits)


@answered(
    AttributeError,
    "an edit alone has no apply. Put it in a recipe: Recipe(wrap('pz.nn:Linear', "
    "Checkpointed)).apply(...).",
)
def an_edit_without_a_recipe(directory):
    edit = pzs.wrap(pz.nn.Linear, pzs.Checkpointed)
    return lambda: edit.apply(model()), lambda: pzs.Recipe(edit).apply(model())


@answered(
    errors.SelectionError,
    "this recipe does not fit the MLP:",
    "  edit 1, wrap('AddBias', Checkpointed): nothing matches. In the model nothing is called "
    "'AddBias', nearest is 'add_bias'. Write '**/add_bias', which matches 2. Nearest paths: "
    "sublayers/0/sublayers/2 (AddBias), sublayers/2/sublayers/2 (AddBias), sublayers/1 "
    "(Elementwise). Give expect=0 if that is meant, or leave the edit out.",
)
def the_name_of_a_layer_type_as_a_place(directory):
    return (
        lambda: pzs.Recipe(pzs.wrap("AddBias", pzs.Checkpointed)).apply(model()),
        lambda: pzs.Recipe(pzs.wrap("**/add_bias", pzs.Checkpointed)).apply(model()),
    )


@answered(
    errors.MeshError,
    "the rules do not fit the mesh:",
    "  rule 'features' -> 'dat': the mesh (data=4, model=2) has no mesh axis 'dat'. Did you "
    "mean 'data'?",
)
def a_recipe_for_a_mesh_axis_that_does_not_exist(directory):
    return (
        lambda: pzs.manual_fsdp(pz.nn.Linear, mesh(), {"features": "dat"}),
        lambda: pzs.manual_fsdp(pz.nn.Linear, mesh(), {"features": "data"}),
    )


@answered(
    errors.RuleTypeError,
    "compute_dtype must be a floating-point dtype, not 'bf16'. Did you mean 'bfloat16'?",
)
def a_dtype_by_a_short_name(directory):
    return lambda: pzs.mixed_precision("bf16"), lambda: pzs.mixed_precision("bfloat16")


@answered(
    errors.RuleTypeError,
    "this is not a recipe: Expecting ',' delimiter: line 15 column 1 (char 213). Give the "
    "text of to_json().",
)
def a_recipe_from_a_broken_text(directory):
    text = pzs.jit_root().to_json()
    return lambda: pzs.Recipe.from_json(text[:-1]), lambda: pzs.Recipe.from_json(text)


@answered(
    errors.RuleTypeError,
    "this recipe cannot be read. If you trust all that it names: Recipe.from_json(text, "
    "allow=('optax',)):",
    "  edit 1: 'optax._src.alias:adam' needs the module 'optax._src.alias', which is not one "
    "of those that a recipe may use unasked. If you trust it, give allow=('optax',).",
)
def a_recipe_that_imports_another_package(directory):
    recipe = pzs.Recipe(pzs.wrap(pz.nn.Linear, optax.adam))
    return (
        lambda: pzs.Recipe.from_json(recipe.to_json()),
        lambda: pzs.Recipe.from_json(recipe.to_json(), allow=("optax",)),
    )


@answered(
    errors.RuleTypeError,
    "strip takes layer types, not 'Jitted'. Write the class Jitted, or leave layers out to "
    "take off everything.",
)
def the_name_of_a_layer_type_to_strip(directory):
    wrapped = pzs.Jitted(model())
    return (
        lambda: pzs.strip(wrapped, layers="Jitted"),
        lambda: pzs.strip(wrapped, layers=pzs.Jitted),
    )


# Training


@answered(
    errors.RuleTypeError,
    "the optimizer is the function adamw, which was not called. Write optax.adamw(1e-3).",
)
def an_optimizer_that_was_not_called(directory):
    return lambda: train_state(optax.adamw), lambda: train_state(optax.adamw(1e-3))


@answered(
    errors.RuleTypeError,
    "the optimizer is the text 'adam'. Pass the optimizer itself, for instance optax.adam(1e-3).",
)
def an_optimizer_by_name(directory):
    return lambda: train_state("adam"), lambda: train_state(optax.adam(1e-3))


@answered(
    errors.RuleTypeError,
    "the optimizer was given in the place of the model, and the MLP in that of the optimizer. "
    "The model comes first: TrainState.initial_state(model, optimizer, root_rng).",
)
def a_model_and_an_optimizer_swapped(directory):
    root_rng = jax.random.key(0)
    return (
        lambda: pzs.TrainState.initial_state(optax.sgd(0.1), model(), root_rng),
        lambda: pzs.TrainState.initial_state(model(), optax.sgd(0.1), root_rng),
    )


@answered(
    errors.RuleTypeError,
    "the optimizer is a MLP, without init and update. Pass one of optax, for instance "
    "optax.adam(1e-3).",
)
def a_model_as_the_optimizer(directory):
    return lambda: train_state(model()), lambda: train_state(optax.adam(1e-3))


@answered(
    errors.RuleTypeError,
    "build_train_step_fn takes the loss function, and all else by keyword. The optimizer is "
    "part of the state: TrainState.initial_state(model, optimizer, root_rng).",
)
def an_optimizer_for_the_step(directory):
    return (
        lambda: pzs.build_train_step_fn(loss_fn, optax.adam(1e-3)),
        lambda: pzs.build_train_step_fn(loss_fn),
    )


@answered(
    errors.RuleTypeError,
    "root_rng must be a random key, not 0. Write jax.random.key(0).",
)
def an_integer_where_a_key_belongs(directory):
    return (
        lambda: pzs.TrainState.initial_state(model(), optax.sgd(0.1), 0),
        lambda: pzs.TrainState.initial_state(model(), optax.sgd(0.1), jax.random.key(0)),
    )


@answered(
    errors.RuleTypeError,
    "a step takes its inputs by keyword, and got 1 by position. Write step(state, x=x, y=y).",
)
def a_batch_without_a_name(directory):
    step = pzs.build_train_step_fn(loss_fn)
    return lambda: step(train_state(), features()), lambda: step(train_state(), x=features())


@answered(
    errors.ShardingError,
    "the loss function returned something that is not an array:",
    "  aux/note: is the str 'fine', not an array. Leave it out of the auxiliary outputs; of "
    "a variable return its .value.",
)
def a_text_among_the_outputs_of_a_loss(directory):
    def talkative(model, rng, state, x):
        loss, state, aux = loss_fn(model, rng, state, x)
        return loss, state, {**aux, "note": "fine"}

    return lambda: one_step(talkative), lambda: one_step(loss_fn)


@answered(
    errors.ShardingError,
    "the loss function returned one array of shape (); it must be loss_fn(model, rng, state, "
    "**inputs) -> (loss, new_state, aux). Return (loss, state, {}) if there is nothing else "
    "to report.",
)
def a_loss_alone(directory):
    def alone(model, rng, state, x):
        return loss_fn(model, rng, state, x)[0]

    return lambda: one_step(alone), lambda: one_step(loss_fn)


@answered(
    errors.ShardingError,
    "the loss is of shape (8, 4) and dtype float32; it must be a floating scalar. Return its "
    "mean: jnp.mean(loss).",
)
def a_loss_per_example(directory):
    def per_example(model, rng, state, x):
        return model(x).unwrap("batch", "features"), state, {}

    return lambda: one_step(per_example), lambda: one_step(loss_fn)


@answered(
    errors.RuleTypeError,
    "train_state_shardings must be a train state of shardings, or one sharding for "
    "everything, not 'data'. Make them: train_state_sharding(state, mesh, rules).",
)
def the_name_of_a_mesh_axis_as_a_state_sharding(directory):
    state = pzs.place(train_state(), mesh(), RULES)
    shardings = pzs.train_state_sharding(state, mesh(), RULES)
    return (
        lambda: one_step(state=state, train_state_shardings="data"),
        lambda: one_step(state=state, train_state_shardings=shardings),
    )


@answered(
    errors.ShardingError,
    "this train state was donated to the step from 0 to 1, which reused its memory. Keep the "
    "state that the step returned: state, aux = step(state, ...). To go on from this one "
    "too, copy it before the step, jax.tree.map(jnp.copy, state), or build the step with "
    "donate_params_and_state=False.",
)
def a_second_step_of_a_donated_state(directory):
    state = train_state()
    step = pzs.build_train_step_fn(loss_fn, donate_params_and_state=True)
    new, _ = step(state, x=features())
    return lambda: step(state, x=features()), lambda: step(new, x=features())


@answered(
    errors.ShardingError,
    "the auxiliary outputs of 4 microbatches cannot be put together:",
    "  examples: of int32, which is not averaged by itself. Say how its 4 values become one: "
    "aux_reduction={'examples': 'sum'}, or another of 'mean', 'sum', 'max', 'min', 'last'.",
)
def a_count_that_is_accumulated_without_saying_how(directory):
    def counting(model, rng, state, x):
        loss, state, aux = loss_fn(model, rng, state, x)
        return loss, state, {**aux, "examples": jnp.int32(x.named_shape["batch"])}

    return (
        lambda: one_step(counting, accumulate_steps=4),
        lambda: one_step(counting, accumulate_steps=4, aux_reduction={"examples": "sum"}),
    )


@answered(
    errors.ShardingError,
    "this train state is abstract. Fill it before training, for instance with "
    "restore_train_state(path, state, mesh, rules).",
)
def a_step_on_an_abstract_state(directory):
    state = pzs.TrainState.initial_state(abstract(), optax.sgd(0.1), jax.random.key(0))
    pzs.save_train_state(directory / "state", train_state(optax.sgd(0.1)))
    return (
        lambda: one_step(state=state),
        lambda: one_step(
            state=pzs.restore_train_state(directory / "state", state, mesh(), RULES),
            x=pzs.shard_batch(features(), mesh(), RULES),
        ),
    )


# Checkpoints


@answered(
    errors.CheckpointNotFoundError,
    "there is no checkpoint at TMP/weigths: the path does not exist. Did you mean TMP/weights?",
)
def a_checkpoint_that_does_not_exist(directory):
    pzs.save_params(directory / "weights", model())
    return (
        lambda: pzs.restore_params(directory / "weigths", abstract(), mesh(), RULES),
        lambda: pzs.restore_params(directory / "weights", abstract(), mesh(), RULES),
    )


@answered(
    errors.CheckpointExistsError,
    "cannot save to TMP/weights: it exists. Pass overwrite=True to replace it, or choose "
    "another path.",
)
def a_save_over_an_older_one(directory):
    pzs.save_params(directory / "weights", model())
    return (
        lambda: pzs.save_params(directory / "weights", model()),
        lambda: pzs.save_params(directory / "weights", model(), overwrite=True),
    )


@answered(
    errors.CheckpointWriteError,
    "cannot save to TMP/notes/weights: TMP/notes is a file. Choose another path.",
)
def a_save_below_a_file(directory):
    (directory / "notes").write_text("seed 0 is best")
    return (
        lambda: pzs.save_params(directory / "notes" / "weights", model()),
        lambda: pzs.save_params(directory / "weights", model()),
    )


@answered(
    errors.CheckpointNotFoundError,
    "there is no checkpoint at TMP/llama: it has weights as safetensors. Load them with "
    "load_safetensors(path, mesh, rules).",
)
def a_directory_of_hugging_face(directory):
    theirs = directory / "llama"
    theirs.mkdir()
    (theirs / "config.json").write_text(json.dumps({"model_type": "llama"}))
    (theirs / "model.safetensors").write_bytes(b"")
    pzs.save_params(directory / "weights", model())
    return (
        lambda: pzs.restore_params(theirs, abstract(), mesh(), RULES),
        lambda: pzs.restore_params(directory / "weights", abstract(), mesh(), RULES),
    )


AFFINE_AXES = {
    "Affine_0/AddBias.bias": "features=16",
    "Affine_0/Linear.weights": "features=8, features_out=16",
    "Affine_1/AddBias.bias": "features=4",
    "Affine_1/Linear.weights": "features=16, features_out=4",
}


@answered(
    errors.CheckpointMismatchError,
    "the checkpoint at TMP/weights does not fit the model:",
    "  Arrays of the same axes and sizes have other names: pass names={'mlp/**': 'mlq/**'}.",
    *(
        f"  mlq/{name}: the model wants ({axes}) float32, and the checkpoint has no such array. "
        f"If it is 'mlp/{name}' there, pass names={{'mlp/{name}': 'mlq/{name}'}}. To leave the "
        "model's own value there, pass others='keep'."
        for name, axes in AFFINE_AXES.items()
    ),
    *(
        f"  mlp/{name}: the checkpoint has ({axes}) float32, and the model has no such array. "
        f"Did you mean 'mlq/{name}'? Pass on_extra='ignore' to leave it there."
        for name, axes in AFFINE_AXES.items()
    ),
)
def a_checkpoint_of_a_model_of_another_name(directory):
    pzs.save_params(directory / "weights", model())

    def of_name(name):
        return pzs.abstract_model(
            simple_mlp.MLP.from_config,
            name=name,
            init_base_rng=jax.random.key(0),
            feature_sizes=(8, 16, 4),
        )

    return (
        lambda: pzs.restore_params(directory / "weights", of_name("mlq"), mesh(), RULES),
        lambda: pzs.restore_params(
            directory / "weights", of_name("mlq"), mesh(), RULES, names={"mlp/**": "mlq/**"}
        ),
    )


@answered(
    errors.CheckpointMismatchError,
    "the checkpoint at TMP/weights does not fit the model:",
    "  mlp/Affine_0/AddBias.bias: the checkpoint has (features=16), and the model wants "
    "(features=32): the sizes differ. Build the model with the same sizes.",
    "  mlp/Affine_0/Linear.weights: the checkpoint has (features=8, features_out=16), and "
    "the model wants (features=8, features_out=32): the sizes differ. Build the model with "
    "the same sizes.",
    "  mlp/Affine_1/Linear.weights: the checkpoint has (features=16, features_out=4), and "
    "the model wants (features=32, features_out=4): the sizes differ. Build the model with "
    "the same sizes.",
)
def a_checkpoint_of_other_sizes(directory):
    pzs.save_params(directory / "weights", model())
    return (
        lambda: pzs.restore_params(directory / "weights", model((8, 32, 4)), mesh(), RULES),
        lambda: pzs.restore_params(directory / "weights", model((8, 16, 4)), mesh(), RULES),
    )


@answered(
    errors.CheckpointMismatchError,
    "the checkpoint at TMP/weights holds parameters alone, as save_params writes them, and "
    "not a train state. Restore them and begin a new state with them: restore_params(path, "
    "model, mesh, rules).",
)
def a_train_state_from_a_checkpoint_of_parameters(directory):
    pzs.save_params(directory / "weights", model())
    return (
        lambda: pzs.restore_train_state(directory / "weights", train_state(), mesh(), RULES),
        lambda: pzs.restore_params(directory / "weights", abstract(), mesh(), RULES),
    )


@answered(
    errors.CheckpointMismatchError,
    "cannot put these values into the model:",
    "  mlp/Affine_0/Linear.weights: the model wants (features=8, features_out=16) float32, "
    "and the values given have no such array. To keep the model's own, give "
    "param_dict(model)['mlp/Affine_0/Linear.weights'].",
)
def parameters_that_lack_one(directory):
    parameters = pzs.param_dict(model())
    lacking = {k: v for k, v in parameters.items() if k != "mlp/Affine_0/Linear.weights"}
    return (
        lambda: pzs.with_params(model(), lacking),
        lambda: pzs.with_params(model(), parameters),
    )


# Looking at layouts


def called():
    return pzs.place(model(), mesh(), RULES), pzs.shard_batch(features(), mesh(), RULES)


@answered(
    errors.RuleTypeError,
    "the arguments are mixed up: the mesh comes second. Write lint(model, mesh, rules).",
)
def model_and_mesh_swapped_in_lint(directory):
    return (
        lambda: pzs.lint(mesh(), abstract(), RULES),
        lambda: pzs.lint(abstract(), mesh(), RULES),
    )


@answered(
    errors.RuleTypeError,
    "the arguments are mixed up: the mesh comes second. Write report(model, mesh, rules, step, "
    "...).",
)
def rules_and_mesh_swapped_in_report(directory):
    path = directory / "page.html"
    return (
        lambda: pzs.report(abstract(), RULES, mesh(), path=path),
        lambda: pzs.report(abstract(), mesh(), RULES, path=path),
    )


@answered(
    errors.RuleTypeError,
    "the file is given in the place of the step. Name it: path='TMP/page.html'.",
)
def a_report_with_its_path_by_position(directory):
    path = directory / "page.html"
    return (
        lambda: pzs.report(abstract(), mesh(), RULES, path),
        lambda: pzs.report(abstract(), mesh(), RULES, path=path),
    )


@answered(
    errors.RuleTypeError,
    "report takes a model or another tree of arrays, not the function build. Give what it builds: "
    "abstract_model(build, ...), without memory, to plan or to restore; sharded_init(build, ..., "
    "mesh=mesh, rules=rules) to have it on a mesh.",
)
def a_report_of_a_function_that_builds_a_model(directory):
    path = directory / "page.html"
    return (
        lambda: pzs.report(build, mesh(), RULES, path=path),
        lambda: pzs.report(abstract(), mesh(), RULES, path=path),
    )


@answered(
    errors.RuleTypeError,
    "a step is something to call, not a NamedArray. Give a function under jax.jit and its "
    "arguments, a train step and its state, or a layer and its input: step, state, x=x, not what "
    "the step gives, step(state, x=x).",
)
def why_of_what_a_step_gives(directory):
    layer, x = called()
    return lambda: pzs.why(x), lambda: pzs.why(layer, x)


@answered(
    errors.SelectionError,
    "at='blocks/3/Linear': the step has no layer, parameter or result of this name. Did you mean "
    "'**/Linear', which is mlp/Affine_{0-1}/Linear? Without at= the table names all that there "
    "are; patterns such as '**/mlp' stand for several.",
)
def why_of_a_layer_that_does_not_exist(directory):
    return (
        lambda: pzs.why(*called(), at="blocks/3/Linear"),
        lambda: pzs.why(*called(), at="**/Linear"),
    )


@answered(
    errors.RuleTypeError,
    "at= is what the table calls a layer, a parameter or a result, or a pattern as '**/mlp', not "
    "the class Linear. Leave it out to see all names.",
)
def why_at_a_type_of_layer(directory):
    return lambda: pzs.why(*called(), at=pz.nn.Linear), lambda: pzs.why(*called())


@answered(
    errors.RuleTypeError,
    "the sharding comes after the shape: show_sharding((shape, sharding)), not "
    "show_sharding((sharding, shape)).",
)
def a_drawing_with_the_sharding_first(directory):
    sharding = jax.NamedSharding(mesh(), jax.P("data", "model"))
    return (
        lambda: pzs.show_sharding((sharding, (8, 8))),
        lambda: pzs.show_sharding(((8, 8), sharding)),
    )


# Choosing layouts


@answered(
    errors.RuleTypeError,
    "the names of inputs do not fit them:",
    "  input 0: is of float32, shape (8, 16), and by default inputs are tokens, batch x seq. Say "
    "what its dimensions are, None for one without a name: input_names=[('batch', None)].",
)
def features_taken_for_tokens(directory):
    weights, x = jnp.ones((16, 4)), jnp.ones((8, 16))
    return (
        lambda: pzs.infer_names(lambda weights, x: x @ weights, weights, x),
        lambda: pzs.infer_names(
            lambda weights, x: x @ weights, weights, x, input_names=[("batch", None)]
        ),
    )


@answered(
    errors.RuleTypeError,
    "make_plan takes a model or another tree of arrays. This InferredNames says what arrays are "
    "called, and is none itself. Give the arrays with these names: name_axes(params, names).",
)
def inferred_names_in_the_place_of_the_arrays(directory):
    weights, x = {"w": jnp.ones((16, 4))}, jnp.ones((8, 16))
    names = pzs.infer_names(
        lambda weights, x: x @ weights["w"],
        weights,
        x,
        input_names=[("batch", None)],
        overrides={"w": ("in", "out")},
    )
    return (
        lambda: pzs.make_plan(names, mesh(), {"in": "data"}),
        lambda: pzs.make_plan(pzs.name_axes(weights, names), mesh(), {"in": "data"}),
    )


def choose(loss_fn=loss_fn, **asked):
    batch = {"x": features(64)}
    asked = {"batch": batch, "propagated": 0, "compiled": 0, "progress": False, **asked}
    return pzs.choose_layout(abstract(), loss_fn, optax.sgd(0.1), **asked)


def plain_loss(model, rng, state, x):
    return loss_fn(model, rng, state, pz.nx.wrap(x, "batch", "features"))


@answered(
    errors.RuleTypeError,
    'devices must be a name such as "v5e:32", a mesh, or a number with hardware="v5e", not '
    "{'data': 4, 'model': 2}. Write devices=penzai_shard.make_mesh({'data': 4, 'model': 2}, "
    'abstract=True), hardware="v5e".',
)
def the_sizes_of_a_mesh_as_devices(directory):
    sizes = {"data": 4, "model": 2}
    return (
        lambda: choose(devices=sizes),
        lambda: choose(devices=pzs.make_mesh(sizes, abstract=True), hardware="v5e"),
    )


@answered(
    errors.PlanError,
    "there is no sane layout for batch 64 x features 8 on 8 devices (v5e:2x4). Leave out "
    "keep={'batch': ('data', 'model')} or keep={'features': 'model'}.",
)
def two_logical_axes_kept_over_mesh_axes_that_no_mesh_has_both(directory):
    kept = {"batch": ("data", "model"), "features_out": None, "features": "model"}
    return (
        lambda: choose(devices="v5e:8", keep=kept),
        lambda: choose(devices="v5e:8", keep={"batch": ("data", "model"), "features_out": None}),
    )


@answered(
    AttributeError,
    "Layout has no 'fsdp'. Write Layout.fully_sharded(). There are data_parallel, zero1, "
    "fully_sharded, tensor_parallel, sequence_parallel, two_dimensional, hybrid, and "
    "Layout(parameters=rules, compute=rules) for any other.",
)
def a_preset_by_the_name_of_others(directory):
    return lambda: pzs.Layout.fsdp(), lambda: pzs.Layout.fully_sharded()


@answered(
    errors.MeshError,
    "devices: there are 8 devices, and how fast they are is not known. Say what they are, "
    'hardware="v5e", or describe others: hardware=Hardware(...). Simulated devices as they are: '
    'hardware="cpu", memory="2GiB".',
)
def a_number_of_devices_of_no_kind(directory):
    return (
        lambda: choose(devices=8),
        lambda: choose(devices=8, hardware="cpu", memory="2GiB"),
    )


@answered(
    errors.RuleTypeError,
    "choose_layout cannot read what it was given:",
    "  batch: 'x' is a list of numbers, and must be an array or a struct. Put numpy.array(...) "
    "around it.",
)
def a_batch_of_lists(directory):
    x = [[0.0] * 8] * 64
    return (
        lambda: choose(devices="v5e:8", batch={"x": x}),
        lambda: choose(devices="v5e:8", batch={"x": np.array(x)}, loss_fn=plain_loss),
    )


@answered(
    errors.RuleTypeError,
    "choose_layout cannot read what it was given:",
    "  rematerialise: there is no checkpoint policy 'full'. The named ones are 'nothing', 'dots', "
    "'dots_without_batch', 'everything', 'all_but_gathered', 'offload_dots'; any other is given as "
    "a callable, such as those in jax.checkpoint_policies.",
)
def a_policy_that_does_not_exist_in_the_place_of_several(directory):
    return (
        lambda: choose(devices="v5e:8", rematerialise="full"),
        lambda: choose(devices="v5e:8", rematerialise=[None, "nothing"]),
    )


@answered(
    errors.ShardingError,
    "the loss function returned 2 values; it must be loss_fn(model, rng, state, **inputs) -> "
    "(loss, new_state, aux). Return (loss, state, {}) if there is nothing else to report.",
)
def a_loss_that_gives_no_state(directory):
    def without_state(model, rng, state, x):
        loss, _, aux = loss_fn(model, rng, state, x)
        return loss, aux

    return (
        lambda: choose(devices="v5e:8", loss_fn=without_state),
        lambda: choose(devices="v5e:8", loss_fn=loss_fn),
    )


@answered(
    errors.RuleTypeError,
    "the mesh is the method mesh, which was not called. Write .mesh().",
)
def the_mesh_of_a_choice_that_was_not_called(directory):
    best = choose(devices="v5e:8", microbatches=[1]).best
    return (
        lambda: best.layout.plan(abstract(), best.mesh),
        lambda: best.layout.plan(abstract(), best.mesh()),
    )


@answered(
    AttributeError,
    "these are several choices, and layout is that of one. Write choices.best.layout, or "
    "choices[1].layout for the second best.",
)
def the_layout_of_several_choices(directory):
    choices = choose(devices="v5e:8", microbatches=[1])
    return lambda: choices.layout, lambda: (choices.best.layout, choices[1].layout)


@answered(
    AttributeError,
    "these are several choices, and save is that of one. Write choices.best.save(...), or "
    "choices[1].save(...) for the second best.",
)
def several_choices_saved_as_one(directory):
    choices = choose(devices="v5e:8", microbatches=[1])
    path = directory / "rules.toml"
    return lambda: choices.save(path), lambda: choices.best.save(path)


@answered(
    errors.RuleTypeError,
    "TMP is a folder, and the table of rules is one file. Give path='TMP/rules.toml'.",
)
def a_choice_saved_to_a_folder(directory):
    best = choose(devices="v5e:8", microbatches=[1]).best
    return lambda: best.save(directory), lambda: best.save(path=f"{directory}/rules.toml")


@pytest.mark.parametrize("name", MISTAKES)
def test_the_message_says_what_is_wrong_and_its_fix_works(name, tmp_path):
    mistake = MISTAKES[name]
    wrong, right = mistake.calls(tmp_path)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(mistake.kind) as caught:
            wrong()
        right()
    said = str(caught.value).replace(str(tmp_path), "TMP")
    assert re.sub(r"\.py:\d+\)", ".py:LINE)", said) == mistake.message


def test_there_are_forty_mistakes_and_more():
    assert len(MISTAKES) >= 40
