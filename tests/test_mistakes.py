"""Mistakes that new users make: each is refused with a fix, and the call with that fix works.

The calls are texts, so that the code of a printed fix can be pasted: it replaces FIX.
"""

import functools
import re

import jax
import numpy as np
import optax
import pytest
from flax import linen, nnx
from jax.sharding import AbstractMesh, NamedSharding, PartitionSpec
from penzai import pz
from penzai.deprecated.v1 import pz as pz_v1
from penzai.models import simple_mlp

import penzai_shard as pzs
from penzai_shard import MeshError, PlanError, RuleTypeError, SelectionError, ShardingError
from tests.models import MODELS

CODE = re.compile(
    r"(?:Write(?: for instance| one of)?|Add|Set|Use the sizes|[A-Z][\w ,]*:) "
    r"(.+?)(?:(?:, or|;) .*)?\."
)


class Reader:
    library = "library_that_nobody_has"

    def reads(self, kind):
        return False

    def open(self, node):
        raise NotImplementedError

    def close(self, template, data):
        raise NotImplementedError


def build_mlp(init_base_rng=None):
    return simple_mlp.MLP.from_config(init_base_rng, name="mlp", feature_sizes=[8, 8])


def build(*arguments):
    return tree


tree = {"down": pz.nx.ones({"mlp": 16, "embed": 8}), "up": pz.nx.ones({"embed": 8, "mlp": 16})}
mesh, rules = pzs.make_mesh({"data": 4, "model": 2}), {"embed": "data", "mlp": "model"}
enable_x64 = functools.partial(jax.config.update, "jax_enable_x64")
abstract_mesh = AbstractMesh((4, 2), ("data", "model"))
model, plan = build_mlp(jax.random.key(0)), pzs.make_plan(tree, mesh, rules)
first, second = {"embed": "data"}, {"mlp": "model"}
module, x = linen.Dense(4), np.ones((8, 8), np.float32)
first_api, definition, key = pz_v1, MODELS["uninitialized v1 mlp"](), jax.random.key(0)
sgd = optax.sgd(1.0)
graphdef, state = nnx.split(nnx.Linear(2, 2, rngs=nnx.Rngs(0)))
sharding = NamedSharding(mesh, PartitionSpec())
deleted = jax.numpy.arange(8)
deleted.delete()
weights = {"layers.0.weight": x, "layers.0.bias": x[0]}
names = {"layers.*.weight": ("out", "in"), "layers.*.bias": ("out",)}
NAMES = globals() | {name: getattr(pzs, name) for name in pzs.__all__}

# Name, error, path of one offender; the call with the mistake; the call with the fix.
# fmt: off
MISTAKES = [
    # Meshes
    ("axis_of_size_zero", MeshError, "",
     "make_mesh({'data': 0}, abstract=True)", "make_mesh(FIX, abstract=True)"),
    ("axis_size_as_text", MeshError, "",
     "make_mesh({'data': '4'}, abstract=True)", "make_mesh(FIX, abstract=True)"),
    ("axis_name_as_number", MeshError, "",
     "make_mesh({0: 8}, abstract=True)", "make_mesh(FIX, abstract=True)"),
    ("mesh_of_no_axis", MeshError, "", "make_mesh({})", "FIX"),
    ("mesh_from_number", MeshError, "", "make_mesh(8)", "FIX"),
    ("mesh_from_pairs", MeshError, "", "make_mesh([('data', 8)])", "FIX"),
    ("mesh_of_some_devices", MeshError, "", "make_mesh({'data': 3})", "make_mesh(FIX)"),
    ("mesh_of_absent_devices", MeshError, "",
     "make_mesh({'data': 16, 'model': 16})", "make_mesh(FIX)"),
    ("abstract_mesh_with_devices", MeshError, "",
     "make_mesh({'data': 8}, jax.devices(), abstract=True)",
     "make_mesh({'data': 8}, abstract=True)"),
    # Rules
    ("rules_as_text", RuleTypeError, "",
     "make_plan(tree, mesh, 'data')", "make_plan(tree, mesh, FIX)"),
    ("rules_as_set", RuleTypeError, "",
     "make_plan(tree, mesh, {'embed', 'data'})", "make_plan(tree, mesh, FIX)"),
    ("rule_of_three", RuleTypeError, "",
     "AxisRules([('embed', 'data', 'model')])", "AxisRules([FIX])"),
    ("mesh_axis_as_number", RuleTypeError, "", "AxisRules({'embed': 0})", "AxisRules([FIX])"),
    ("mesh_axis_twice_in_a_rule", RuleTypeError, "",
     "AxisRules({'embed': ('data', 'data')})", "AxisRules([FIX])"),
    ("logical_axis_as_list", RuleTypeError, "",
     "AxisRules([(['embed'], 'data')])", "AxisRules([FIX])"),
    ("mesh_axis_one_letter_off", MeshError, "",
     "make_plan(tree, mesh, {'embed': 'dta'})", "make_plan(tree, mesh, {'embed': FIX})"),
    ("mesh_axis_that_is_not_there", MeshError, "",
     "make_plan(tree, mesh, {'embed': 'tensor'})", "make_plan(tree, mesh, {'embed': FIX[0]})"),
    ("rule_turned_round", MeshError, "",
     "make_plan(tree, mesh, {'model': 'mlp'})", "make_plan(tree, mesh, {'mlp': 'model'})"),
    ("preset_not_called", RuleTypeError, "rules",
     "make_plan(tree, mesh, data_parallel)", "make_plan(tree, mesh, FIX)"),
    ("preset_with_another_option", RuleTypeError, "", "fully_sharded(unnamed='all')", "FIX"),
    ("preset_without_mesh_axis", RuleTypeError, "", "fully_sharded(None)", "FIX"),
    ("preset_with_negative_size", RuleTypeError, "", "fully_sharded(min_size=-1)", "FIX"),
    ("more_sizes_than_names", RuleTypeError, "",
     "AxisRules(rules).spec(('embed',), (8, 16), mesh)",
     "AxisRules(rules).spec(('embed', None), (8, 16), mesh)"),
    # Layouts
    ("length_that_does_not_divide", PlanError, "up",
     "make_plan({'up': pz.nx.ones({'embed': 6})}, mesh, rules)",
     "make_plan({'up': pz.nx.ones({'embed': 6})}, mesh, rules | {'embed': None})"),
    ("mesh_axis_for_two_logical_axes", PlanError, "down",
     "make_plan(tree, mesh, {'embed': 'data', 'mlp': 'data'})",
     "make_plan(tree, mesh, {'embed': 'data', 'mlp': None})"),
    ("array_without_names", PlanError, "mask",
     "make_plan({'mask': x}, mesh, {})",
     "[make_plan(FIX, mesh, {}) for tree in [{'mask': x}]]"),
    # Arguments
    ("rules_under_both_names", RuleTypeError, "rules",
     "make_plan(tree, mesh, first, axis_name_to_mesh_name=second)", "make_plan(tree, mesh, FIX)"),
    ("mesh_and_rules_swapped", RuleTypeError, "rules",
     "make_plan(tree, rules, mesh)", "make_plan(tree, FIX)"),
    ("tree_and_mesh_swapped", RuleTypeError, "mesh",
     "make_plan(mesh, tree, rules)", "make_plan(tree, FIX, rules=rules)"),
    ("sizes_as_mesh", RuleTypeError, "mesh",
     "make_plan(tree, {'data': 8}, rules)", "make_plan(tree, FIX, rules=rules)"),
    ("no_mesh", RuleTypeError, "mesh", "place(tree)", "place(tree, FIX, rules=rules)"),
    ("indivisible_as_truth", RuleTypeError, "",
     "make_plan(tree, mesh, rules, on_indivisible=True)",
     "[make_plan(tree, mesh, rules, on_indivisible=word) for word in (FIX)]"),
    # Plans
    ("plan_as_rules_of_a_plan", RuleTypeError, "rules",
     "make_plan(tree, mesh, plan)", "make_plan(tree, mesh, FIX)"),
    ("plan_as_rules", RuleTypeError, "rules",
     "place(tree, mesh, plan)", "place(tree, mesh=mesh, FIX)"),
    ("rules_as_plan", RuleTypeError, "plan", "place(tree, plan=rules)", "place(tree, FIX)"),
    ("plan_with_rules", RuleTypeError, "plan", "place(tree, plan, rules)", "place(tree, plan)"),
    ("plan_for_another_mesh", MeshError, "",
     "place(tree, mesh=make_mesh({'data': 8}), plan=plan)", "place(tree, FIX)"),
    ("plan_of_a_larger_tree", PlanError, "down",
     "place({'up': tree['up']}, plan)",
     "[place(tree, FIX) for tree in [{'up': tree['up']}]]"),
    # Trees
    ("function_as_tree", RuleTypeError, "",
     "make_plan(build, mesh, rules)", "make_plan(FIX, mesh, rules)"),
    ("class_as_tree", RuleTypeError, "", "make_plan(nnx.Linear, mesh, rules)",
     "make_plan(nnx.Linear(8, 8, rngs=nnx.Rngs(0)), mesh, {}, on_unnamed='replicate')"),
    ("linen_module_as_tree", RuleTypeError, "",
     "make_plan(module, mesh, {})", "make_plan(FIX, mesh, {}, on_unnamed='replicate')"),
    ("graph_definition_as_tree", RuleTypeError, "", "make_plan(graphdef, mesh, {})",
     "make_plan(nnx.merge(graphdef, state), mesh, {}, on_unnamed='replicate')"),
    ("sharding_in_a_tree", PlanError, "w",
     "make_plan({'w': sharding}, mesh, {})",
     "make_plan({'w': jax.ShapeDtypeStruct((), 'float32')}, mesh, {})"),
    ("model_without_key", PlanError, "mlp/Affine_0/Linear.weights",
     "make_plan(build_mlp(), mesh, {})", "make_plan(build_mlp(FIX), mesh, {})"),
    # Placing
    ("batch_without_names", PlanError, "x",
     "shard_batch({'x': x}, mesh, {'batch': 'data'})",
     "shard_batch({'x': x}, mesh, {'batch': 'data'}, FIX)"),
    ("mesh_without_devices", MeshError, "",
     "place(tree, abstract_mesh, rules)", "place(tree, FIX, rules)"),
    ("shapes_to_place", ShardingError, "up", "place(abstract_model(build), mesh, rules)", "FIX"),
    ("deleted_array", ShardingError, "ids",
     "place({'ids': deleted}, mesh, {}, on_unnamed='replicate')",
     "place({'ids': np.arange(8)}, mesh, {}, on_unnamed='replicate')"),
    ("too_wide_integers", ShardingError, "ids",
     "place({'ids': np.array(2**40)}, mesh, {})",
     "[FIX, place({'ids': np.array(2**40)}, mesh, {}), enable_x64(False)]"),
    ("function_for_an_abstract_mesh", MeshError, "",
     "named_jit(build, abstract_mesh, rules)", "named_jit(build, FIX, rules)"),
    # Initialising
    ("model_as_initializer", RuleTypeError, "",
     "sharded_init(model, mesh=mesh, rules={})", "place(model, mesh, {})"),
    ("model_without_key_as_initializer", RuleTypeError, "",
     "sharded_init(build_mlp(), mesh=mesh, rules={})",
     "sharded_init(build_mlp, key, mesh=mesh, rules={})"),
    ("definition_of_penzais_first_api_as_initializer", RuleTypeError, "",
     "sharded_init(definition, mesh=mesh, rules={})",
     "(lambda pz, model: sharded_init(FIX, mesh=mesh, rules={}))(first_api, definition)"),
    ("model_as_function_of_abstract_model", RuleTypeError, "", "abstract_model(model)", "FIX"),
    ("initializer_without_key", ShardingError, "mlp/Affine_0/Linear.weights",
     "sharded_init(build_mlp, mesh=mesh, rules={})",
     "sharded_init(build_mlp, FIX, mesh=mesh, rules={})"),
    ("initializer_of_a_layout_without_key", ShardingError, "mlp/Affine_0/Linear.weights",
     "Layout.zero1().build(build_mlp, mesh=mesh, loss_fn=build, optimizer=sgd, rng=key)",
     "Layout.zero1().build(build_mlp, FIX, mesh=mesh, loss_fn=build, optimizer=sgd, rng=key)"),
    ("mesh_by_position", RuleTypeError, "",
     "sharded_init(build, mesh, rules)", "sharded_init(build, FIX, rules=rules)"),
    ("option_one_letter_off", RuleTypeError, "rule",
     "sharded_init(build, mesh=mesh, rule=rules)", "sharded_init(build, mesh=mesh, FIXrules)"),
    ("initializer_on_abstract_mesh", MeshError, "",
     "sharded_init(build, mesh=abstract_mesh, rules=rules)",
     "sharded_init(build, mesh=FIX, rules=rules)"),
    # Names
    ("text_for_names", RuleTypeError, "layers.0.bias",
     "name_axes(weights, names | {'layers.0.bias': 'out'})",
     "name_axes({'layers.0.bias': x[0]}, {'layers.0.bias': FIX})"),
    ("name_twice", RuleTypeError, "w",
     "name_axes({'w': x}, {'w': ('out', 'out')})", "name_axes({'w': x}, {'w': ('out', None)})"),
    ("fewer_names_than_dimensions", SelectionError, "w",
     "name_axes({'w': x}, {'w': ('out',)})", "name_axes({'w': x}, {FIX})"),
    ("pattern_that_fits_nothing", SelectionError, "layer.*.bias",
     "name_axes({'layers.0.bias': x[0]}, {'layer.*.bias': ('out',)})",
     "name_axes({'layers.0.bias': x[0]}, {FIX: ('out',)})"),
    ("array_that_no_pattern_fits", SelectionError, "head",
     "name_axes(weights | {'head': x[:4].T}, names)",
     "name_axes(weights | {'head': x[:4].T}, names | {FIX})"),
    ("two_patterns_for_an_array", SelectionError, "layers.0.bias",
     "name_axes(weights, names | {'**.bias': ('bias',)})", "name_axes(weights, names)"),
    ("function_to_name", RuleTypeError, "", "name_axes(build, names)", "name_axes(FIX, {})"),
    # Readers
    ("reader_as_class", RuleTypeError, "", "register_reader(Reader)", "register_reader(Reader())"),
]

# Name, the call with what looks like a mistake, the call that was probably wanted.
DOUBTS = [
    ("logical_axis_one_letter_off",
     "make_plan(tree, mesh, {'embd': 'data'})", "make_plan(tree, mesh, {'embed': 'data'})"),
    ("logical_axis_one_letter_off_in_fast_trees",
     "name_to_name_sharding(tree, mesh, {'mlps': 'model'})",
     "name_to_name_sharding(tree, mesh, {'mlp': 'model'})"),
    ("no_rules", "place(tree, mesh)", "place(tree, mesh, rules={'mlp': 'data'})"),
    ("no_rules_for_copies",
     "sharded_init(build, mesh=mesh)", "sharded_init(build, mesh=mesh, rules={})"),
]
# fmt: on


@pytest.mark.parametrize(("name", "error", "path", "wrong", "fixed"), MISTAKES)
def test_mistake_is_refused_with_a_fix_that_works(name, error, path, wrong, fixed):
    with pytest.raises(error) as caught:
        eval(wrong, NAMES)
    assert type(caught.value) is error
    fix = next(problem.fix for problem in caught.value.problems if problem.path == path)
    assert fix.endswith(".")
    if "FIX" in fixed:
        fixed = fixed.replace("FIX", CODE.fullmatch(fix)[1])
    eval(fixed, NAMES)


@pytest.mark.parametrize(("name", "doubtful", "wanted"), DOUBTS)
def test_doubtful_call_warns_at_the_callers_line(name, doubtful, wanted):
    with pytest.warns(pzs.ShardingWarning) as caught:
        eval(doubtful, NAMES)
    assert [warning.filename for warning in caught] == ["<string>"]
    # Warnings are errors.
    eval(wanted, NAMES)
