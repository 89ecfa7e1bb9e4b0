"""Plans: what is decided for every array, how it is shown, and what is made from it."""

import collections
import gc
import io
import json
import re
import sys
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh, AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from penzai import pz
from penzai.deprecated.v1 import pz as pz_v1
from rich.console import Console

from penzai_shard import (
    AxisRules,
    data_parallel,
    fully_sharded,
    make_mesh,
    make_plan,
    tensor_parallel,
)
from penzai_shard.errors import MeshError, PlanError, RuleTypeError, ShardingWarning
from penzai_shard.meshes import auto_twin, has_explicit_axes

RULES = {"embedding": "data", "neurons": "model"}


@pytest.fixture
def mesh():
    return make_mesh({"data": 4, "model": 2})


def weights():
    return {
        "up": pz.nx.ones({"embedding": 8, "neurons": 16}),
        "down": pz.nx.ones({"neurons": 16, "embedding": 8}),
        "scale": pz.nx.ones({"embedding": 8}),
    }


def mlp():
    def layer(name, given, made):
        return pz.nn.Linear.from_config(name, jax.random.key(0), given, made)

    return pz.nn.Sequential(
        [
            layer("mlp/up", {"embedding": 8}, {"neurons": 16}),
            layer("mlp/down", {"neurons": 16}, {"embedding": 8}),
        ]
    )


def assert_lies_as_planned(tree, plan):
    """Puts real arrays on real devices and compares them with the plan."""
    placed = jax.device_put(pz.freeze_variables(tree), plan.sharding_tree())
    arrays = jax.tree_util.tree_leaves(placed)
    shardings = jax.tree_util.tree_leaves(plan.sharding_tree())
    for array, sharding in zip(arrays, shardings, strict=True):
        if jnp.issubdtype(array.dtype, jax.dtypes.prng_key):
            # JAX writes the sharding of keys with trailing None.
            assert array.sharding.is_equivalent_to(sharding, array.ndim)
        else:
            assert array.sharding == sharding
        for shard in array.addressable_shards:
            assert shard.data.shape == sharding.shard_shape(array.shape)


def assert_same_shardings(one, other):
    """Named arrays of shardings cannot be compared with ==, which compares their data."""
    leaves, treedef = jax.tree_util.tree_flatten(one)
    other_leaves, other_treedef = jax.tree_util.tree_flatten(other)
    assert treedef == other_treedef
    assert leaves == other_leaves


# What is decided


def test_each_array_gets_its_spec_by_name(mesh):
    plan = make_plan(weights(), mesh, RULES)
    assert {leaf.path: leaf.spec for leaf in plan.leaves} == {
        "up": P("data", "model"),
        "down": P("model", "data"),
        "scale": P("data"),
    }
    assert {leaf.path: leaf.shard_shape for leaf in plan.leaves} == {
        "up": (2, 8),
        "down": (8, 2),
        "scale": (2,),
    }
    assert_lies_as_planned(weights(), plan)


def test_a_leaf_says_everything_about_its_array(mesh):
    (leaf,) = make_plan({"up": weights()["up"].astype(jnp.bfloat16)}, mesh, RULES).leaves
    assert leaf.names == ("embedding", "neurons")
    assert leaf.shape == (8, 16)
    assert leaf.dtype == jnp.bfloat16
    assert leaf.sharding == NamedSharding(mesh, P("data", "model"))
    assert leaf.reason == "'embedding' -> 'data'; 'neurons' -> 'model'"
    assert leaf.bytes_per_device == 2 * 8 * 2
    assert leaf.restore_struct() == jax.ShapeDtypeStruct(
        (8, 16), jnp.bfloat16, sharding=leaf.sharding
    )


def test_positional_dimensions_stay_unsharded(mesh):
    array = pz.nx.NamedArray(collections.OrderedDict(embedding=8), jnp.ones((4, 8)))
    (leaf,) = make_plan(array, mesh, RULES).leaves
    assert leaf.spec == P(None, "data")
    assert_lies_as_planned(array, make_plan(array, mesh, RULES))


@pytest.mark.parametrize("untagged", ["embedding", "seq", "neurons"])
def test_a_view_is_laid_out_by_its_data_whatever_its_order(mesh, untagged):
    array = pz.nx.ones({"neurons": 4, "seq": 3, "embedding": 8}).untag(untagged)
    plan = make_plan(array, mesh, RULES)
    full = {"neurons": "model", "seq": None, "embedding": "data", untagged: None}
    entries = [full[name] for name in ("neurons", "seq", "embedding")]
    while entries and entries[-1] is None:
        entries.pop()
    assert plan.leaves[0].spec == P(*entries)
    assert_lies_as_planned(array, plan)


def test_a_view_with_permuted_dimensions_keeps_its_form_when_placed(mesh):
    view = pz.nx.NamedArrayView(
        data_shape=(2, 8, 3),
        data_axis_for_logical_axis=(2,),
        data_axis_for_name={"embedding": 1, "neurons": 0},
        data_array=jnp.arange(48.0).reshape(2, 8, 3),
    )
    plan = make_plan(view, mesh, RULES)
    assert plan.leaves[0].spec == P("model", "data")
    placed = jax.device_put(view, plan.sharding_tree())
    assert placed.data_axis_for_name == view.data_axis_for_name
    assert placed.data_array.sharding.shard_shape((2, 8, 3)) == (1, 2, 3)
    np.testing.assert_array_equal(placed.data_array, view.data_array)


def test_several_mesh_axes_shard_one_dimension(mesh):
    tree = {"w": pz.nx.ones({"neurons": 16})}
    plan = make_plan(tree, mesh, {"neurons": ("model", "data")})
    assert plan.leaves[0].spec == P(("model", "data"))
    assert plan.leaves[0].shard_shape == (2,)
    assert_lies_as_planned(tree, plan)


def test_a_mesh_axis_of_size_one_divides_everything_and_shards_nothing():
    mesh = make_mesh({"data": 8, "model": 1})
    tree = {"w": pz.nx.ones({"neurons": 7})}
    plan = make_plan(tree, mesh, {"neurons": "model"})
    assert plan.leaves[0].spec == P("model")
    assert plan.leaves[0].shard_shape == (7,)
    assert plan.leaves[0].is_replicated
    assert plan.replicated_bytes == plan.bytes_per_device == 28
    assert_lies_as_planned(tree, plan)


def test_nothing_as_rules_maps_names_to_mesh_axes_of_the_same_name(mesh):
    tree = {"w": pz.nx.ones({"model": 4, "other": 3, "data": 4})}
    plan = make_plan(tree, mesh)
    assert plan.leaves[0].spec == P("model", None, "data")


def test_presets_give_the_two_dimensional_layout(mesh):
    plan = make_plan(weights(), mesh, fully_sharded(min_size=64) | tensor_parallel())
    assert {leaf.path: leaf.spec for leaf in plan.leaves} == {
        "up": P("data", "model"),
        "down": P("model", "data"),
        "scale": P(),
    }


def test_arrays_alike_share_one_sharding_object(mesh):
    tree = [weights(), weights()]
    shardings = jax.tree_util.tree_leaves(make_plan(tree, mesh, RULES).sharding_tree())
    assert len({id(sharding) for sharding in shardings}) == 3
    again = jax.tree_util.tree_leaves(make_plan(tree, mesh, RULES).sharding_tree())
    assert all(one is other for one, other in zip(shardings, again, strict=True))


def test_an_empty_tree_has_an_empty_plan(mesh):
    plan = make_plan({"nothing": None, "here": []}, mesh, {})
    assert plan.leaves == ()
    assert plan.sharding_tree() == {"nothing": None, "here": []}
    assert plan.bytes_per_device == plan.total_bytes == 0
    assert "0 arrays" in plan.table().plain_text()


# Kinds of trees


def test_a_bound_model_is_planned_by_the_names_of_its_parameters(mesh):
    model = mlp()
    plan = make_plan(model, mesh, RULES)
    assert {leaf.path: leaf.spec for leaf in plan.leaves} == {
        "mlp/up.weights": P("data", "model"),
        "mlp/down.weights": P("model", "data"),
    }
    assert_lies_as_planned(model, plan)


def test_the_sharding_tree_has_the_structure_of_the_frozen_model(mesh):
    model = mlp()
    tree = make_plan(model, mesh, RULES).sharding_tree()
    assert jax.tree_util.tree_structure(tree) == jax.tree_util.tree_structure(
        pz.freeze_variables(model)
    )
    values = pz.select(tree).at_instances_of(pz.ParameterValue).get_sequence()
    assert [value.label for value in values] == ["mlp/up.weights", "mlp/down.weights"]
    assert all(isinstance(value.value.data_array, NamedSharding) for value in values)


def test_state_variables_are_planned_like_parameters(mesh):
    tree = [
        pz.StateVariable(value=pz.nx.ones({"embedding": 8}), label="mean"),
        pz.StateVariableValue(value=pz.nx.ones({"neurons": 8}), label="seen", metadata={}),
    ]
    plan = make_plan(tree, mesh, RULES)
    assert [(leaf.path, leaf.spec) for leaf in plan.leaves] == [
        ("mean", P("data")),
        ("seen", P("model")),
    ]
    assert_lies_as_planned(tree, plan)


def test_a_shared_parameter_is_counted_once_and_laid_out_everywhere(mesh):
    shared = pz.Parameter(value=pz.nx.ones({"embedding": 8}), label="table")
    plan = make_plan({"in": shared, "out": shared}, mesh, RULES)
    assert len(plan.leaves) == 1
    assert plan.bytes_per_device == 8
    assert plan.total_bytes == 32
    tree = plan.sharding_tree()
    assert_same_shardings(tree["in"], tree["out"])
    assert len(jax.tree_util.tree_leaves(tree)) == 2


def test_initialized_parameters_of_the_first_api_are_planned(mesh):
    tree = pz_v1.nn.Parameter(value=weights()["up"], name="up")
    plan = make_plan(tree, mesh, RULES)
    assert (plan.leaves[0].path, plan.leaves[0].spec) == ("up", P("data", "model"))
    placed = jax.device_put(tree, plan.sharding_tree())
    assert placed.value.data_array.sharding == plan.leaves[0].sharding


def test_uninitialized_definitions_of_the_first_api_are_planned_as_their_parameters(mesh):
    definition = pz_v1.nn.add_parameter_prefix(
        "mlp", pz_v1.nn.Affine.from_config({"embedding": 8}, {"neurons": 16})
    )
    plan = make_plan(definition, mesh, RULES)
    assert {leaf.path: leaf.spec for leaf in plan.leaves} == {
        "mlp.Linear.weights": P("data", "model"),
        "mlp.AddBias.bias": P("model"),
    }
    initialized = pz_v1.nn.initialize_parameters(definition, jax.random.key(0))
    placed = jax.device_put(initialized, plan.sharding_tree())
    assert {x.sharding for x in jax.tree_util.tree_leaves(placed)} == {
        leaf.sharding for leaf in plan.leaves
    }


def test_abstract_arrays_get_the_plan_of_concrete_ones(mesh):
    concrete = make_plan(weights(), mesh, RULES)
    abstract = make_plan(jax.eval_shape(weights), mesh, RULES)
    assert abstract.leaves == concrete.leaves
    assert_same_shardings(abstract.sharding_tree(), concrete.sharding_tree())


def test_missing_data_arrays_get_their_layout_by_name(mesh):
    tree = {"w": pz.nx.NamedArray(collections.OrderedDict(embedding=8, neurons=4), None)}
    plan = make_plan(tree, mesh, RULES)
    assert plan.leaves[0].spec == P("data", "model")
    assert plan.leaves[0].dtype is None
    assert plan.sharding_tree()["w"].data_array == plan.leaves[0].sharding
    with pytest.raises(PlanError, match=r"w: its data array is missing, so its dtype is not known"):
        plan.restore_structs()


def test_the_plan_of_a_sharding_tree_is_the_plan(mesh):
    plan = make_plan(weights(), mesh, RULES)
    again = make_plan(plan.sharding_tree(), mesh, RULES)
    assert_same_shardings(again.sharding_tree(), plan.sharding_tree())


def test_tracers_are_planned_inside_jit(mesh):
    @jax.jit
    def constrained(tree):
        return jax.lax.with_sharding_constraint(tree, make_plan(tree, mesh, RULES).sharding_tree())

    made = constrained(weights())
    assert made["up"].data_array.sharding.spec == P("data", "model")


# Arrays without names


def test_unnamed_arrays_are_refused_with_a_fix(mesh):
    with pytest.raises(PlanError, match="no valid layout") as caught:
        make_plan({"a": jnp.ones((2, 3)), "layers": [np.ones(4)]}, mesh, {})
    assert caught.value.problems == (
        "a: this array of shape (2, 3) has no logical axis names. Name it with "
        'pz.nx.wrap(array).tag(...) or name_axes(tree, {...}), or pass on_unnamed="replicate".',
        "layers/0: this array of shape (4,) has no logical axis names. Name it with "
        'pz.nx.wrap(array).tag(...) or name_axes(tree, {...}), or pass on_unnamed="replicate".',
    )


def test_unnamed_arrays_are_replicated_on_request(mesh):
    tree = {"a": jnp.ones((2, 3)), "keys": jax.random.split(jax.random.key(0), 3)}
    plan = make_plan(tree, mesh, {}, on_unnamed="replicate")
    assert [leaf.spec for leaf in plan.leaves] == [P(), P()]
    assert {leaf.reason for leaf in plan.leaves} == {"no names: replicated"}
    assert_lies_as_planned(tree, plan)


def test_unnamed_arrays_are_left_to_jax_on_request(mesh):
    tree = {"a": jnp.ones((2, 3)), "step": 0, "w": weights()["up"]}
    plan = make_plan(tree, mesh, RULES, on_unnamed="infer")
    assert [leaf.spec for leaf in plan.leaves] == [None, None, P("data", "model")]
    shardings = plan.sharding_tree()
    assert shardings["a"] is None
    assert shardings["step"] is None
    made = jax.jit(lambda tree: tree, out_shardings=shardings)(tree)
    assert made["w"].data_array.sharding == plan.leaves[2].sharding
    structs = plan.restore_structs()
    assert structs["a"].sharding is None
    assert "2, 3 (left to JAX)" in plan.table().plain_text()


def test_scalars_and_keys_are_replicated_over_the_mesh(mesh):
    tree = {"key": jax.random.key(0), "lr": 0.1, "step": jnp.int32(3)}
    plan = make_plan(tree, mesh, {})
    assert {leaf.reason for leaf in plan.leaves} == {"scalar: replicated"}
    placed = jax.device_put(tree, plan.sharding_tree())
    assert all(len(x.sharding.device_set) == 8 for x in jax.tree_util.tree_leaves(placed))


@pytest.mark.parametrize("value", ["text", np.array(["a", "b"]), object()])
@pytest.mark.parametrize("on_unnamed", ["error", "replicate"])
def test_what_is_no_array_is_refused_by_its_kind(mesh, value, on_unnamed):
    with pytest.raises(PlanError, match=f"x: a {type(value).__name__} is not an array"):
        make_plan({"x": value}, mesh, {}, on_unnamed=on_unnamed)


# Errors


def test_an_indivisible_length_has_the_promised_text():
    mesh = make_mesh({"data": 2, "model": 4})
    tree = {"decoder/block_3/mlp.up": pz.nx.ones({"embedding": 8, "neurons": 10})}
    with pytest.raises(PlanError, match="no valid layout for some arrays:") as caught:
        make_plan(tree, mesh, {"neurons": "model"})
    assert caught.value.problems == (
        "decoder/block_3/mlp.up: logical axis 'neurons' (10) does not divide over mesh axis "
        "'model' (4), asked by rule 'neurons' -> 'model'. Pad it to 12, or map 'neurons' to None. "
        'Or store it padded: on_indivisible="pad".',
    )


def test_every_offender_is_reported_in_one_error(mesh):
    tree = {
        "bad": pz.nx.ones({"embedding": 6, "neurons": 3}),
        "fine": pz.nx.ones({"embedding": 8}),
        "param": pz.Parameter(value=pz.nx.ones({"embedding": 4, "seq": 4}), label="twice"),
        "plain": jnp.ones(2),
        "text": "text",
    }
    with pytest.raises(PlanError, match="no valid layout") as caught:
        make_plan(tree, mesh, RULES | {"seq": "data"})
    problems = caught.value.problems
    assert [problem.split(":")[0] for problem in problems] == [
        "bad",
        "bad",
        "twice",
        "plain",
        "text",
    ]
    assert "mesh axis 'data' (4) is asked for twice" in problems[2]


def test_an_offender_at_the_root_has_a_readable_place(mesh):
    with pytest.raises(PlanError, match="the array: logical axis 'embedding'"):
        make_plan(pz.nx.ones({"embedding": 6}), mesh, RULES)


def test_names_that_contradict_the_data_are_refused(mesh):
    wrong = object.__new__(pz.nx.NamedArray)
    wrong.__dict__.update(
        named_axes=collections.OrderedDict(embedding=8, neurons=2), data_array=jnp.ones((7,))
    )
    with pytest.raises(
        PlanError, match=re.escape("w: its logical axes (embedding=8, neurons=2) do not fit")
    ):
        make_plan({"w": wrong}, mesh, RULES)


def test_an_unknown_mesh_axis_is_reported_with_the_nearest(mesh):
    with pytest.raises(MeshError, match=r"no mesh axis 'modle'\. Did you mean 'model'\?"):
        make_plan(weights(), mesh, {"neurons": "modle"})


def test_an_unknown_mesh_axis_is_an_error_for_an_empty_tree_too(mesh):
    with pytest.raises(MeshError, match="no mesh axis 'x'"):
        make_plan({}, mesh, {"neurons": "x"})


@pytest.mark.parametrize("rules", [3, "data", {"a": 1}, [("a",)]])
def test_rules_of_a_wrong_type_are_refused(mesh, rules):
    with pytest.raises(RuleTypeError, match=r"pair|mesh axis is a name|rules must be"):
        make_plan(weights(), mesh, rules)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"on_unnamed": "ignore"}, "on_unnamed must be 'error', 'replicate' or 'infer'"),
        ({"on_indivisible": "ignore"}, "on_indivisible must be 'error', 'replicate' or 'pad'"),
    ],
)
def test_options_of_a_wrong_kind_are_refused(mesh, options, message):
    with pytest.raises(RuleTypeError, match=message):
        make_plan(weights(), mesh, {}, **options)


@pytest.mark.parametrize("no_mesh", [None, {"data": 4}, 8])
def test_what_is_no_mesh_is_refused(no_mesh):
    with pytest.raises(RuleTypeError, match=r"a mesh is needed, .*make_mesh"):
        make_plan(weights(), no_mesh, {})


def test_replication_on_request_is_recorded_in_the_reason(mesh):
    tree = {"w": pz.nx.ones({"embedding": 6, "neurons": 4})}
    plan = make_plan(tree, mesh, RULES, on_indivisible="replicate")
    assert plan.leaves[0].spec == P(None, "model")
    assert (
        "'embedding' (6) replicated: does not divide over mesh axis 'data' (4), "
        "rule 'embedding' -> 'data'"
    ) in plan.leaves[0].reason
    assert_lies_as_planned(tree, plan)


# Rules that match nothing


def test_rules_that_match_nothing_are_listed(mesh):
    plan = make_plan(weights(), mesh, RULES | {"batch": "data", "vocabulary": None})
    assert [str(rule) for rule in plan.unused_rules] == [
        "'batch' -> 'data'",
        "'vocabulary' -> None",
    ]
    assert plan.table().text_summary() == (
        "UNKNOWN NAMES, misspelt? 'vocabulary' -> None "
        "(the logical axes are 'embedding', 'neurons')",
        "for other arrays, such as activations: 'batch' -> 'data'",
    )


@pytest.mark.parametrize(
    "rules", [{"batch": "data", "seq": "model"}, data_parallel(batch_axis="examples")], ids=str
)
def test_rules_for_activations_do_not_stand_out_in_a_plan_of_parameters(mesh, rules):
    plan = make_plan(weights(), mesh, AxisRules(RULES) | rules | tensor_parallel())
    (remark,) = plan.table().text_summary()
    assert remark.startswith("for other arrays, such as activations: ")
    assert "'vocabulary' -> 'model'" in remark
    assert data_parallel(batch_axis="examples") == AxisRules({"examples": "data"})


def test_a_rule_one_letter_off_warns_with_the_name_and_the_place_of_the_call(mesh):
    with pytest.warns(ShardingWarning, match="Did you mean 'neurons'") as caught:
        make_plan(weights(), mesh, {"neuron": "model"})
    assert caught[0].filename == __file__


def test_a_near_name_that_has_its_own_rule_does_not_warn(mesh):
    make_plan(weights(), mesh, {"neurons": "model", "neuron": "model"})


# Meshes


@pytest.mark.parametrize("abstract", [False, True])
def test_explicit_meshes_are_laid_out_on_their_auto_twin(abstract):
    axis_types = (AxisType.Explicit,) * 2
    if abstract:
        explicit = AbstractMesh((4, 2), ("data", "model"), axis_types=axis_types)
    else:
        explicit = jax.make_mesh((4, 2), ("data", "model"), axis_types=axis_types)
    plan = make_plan(weights(), explicit, RULES)
    assert plan.mesh == auto_twin(explicit)
    for sharding in jax.tree_util.tree_leaves(plan.sharding_tree()):
        assert not has_explicit_axes(sharding.mesh)
    if not abstract:
        assert_lies_as_planned(weights(), plan)


def test_arrays_on_an_explicit_mesh_move_to_the_twin():
    explicit = jax.make_mesh((4, 2), ("data", "model"), axis_types=(AxisType.Explicit,) * 2)
    spec = P("data", "model")
    tree = {"up": weights()["up"]}
    tree = jax.device_put(tree, NamedSharding(explicit, spec))
    plan = make_plan(tree, explicit, RULES)
    assert_lies_as_planned(tree, plan)
    placed = jax.device_put(tree, plan.sharding_tree())
    assert (placed["up"] + placed["up"]).data_array.sharding.spec == spec


def test_an_abstract_mesh_prices_hardware_that_is_not_there():
    mesh = AbstractMesh((64, 8), ("data", "model"))
    tree = {
        "w": pz.nx.NamedArray(
            collections.OrderedDict(embedding=8192, neurons=32768),
            jax.ShapeDtypeStruct((8192, 32768), jnp.bfloat16),
        )
    }
    plan = make_plan(tree, mesh, RULES)
    assert plan.leaves[0].shard_shape == (128, 4096)
    assert plan.bytes_per_device == 128 * 4096 * 2
    assert plan.total_bytes == 8192 * 32768 * 2


# Bytes


def test_bytes_are_those_that_devices_hold(mesh):
    tree = {
        "key": jax.random.key(0),
        "sharded": pz.nx.ones({"embedding": 8, "neurons": 16}),
        "small": pz.nx.ones({"seq": 5}).astype(jnp.bfloat16),
        "step": jnp.int32(0),
    }
    plan = make_plan(tree, mesh, RULES)
    placed = jax.device_put(tree, plan.sharding_tree())
    held = collections.Counter()
    for array in jax.tree_util.tree_leaves(placed):
        data = jax.random.key_data(array) if array.dtype == tree["key"].dtype else array
        for shard in data.addressable_shards:
            held[shard.device] += shard.data.nbytes
    assert set(held.values()) == {plan.bytes_per_device}
    assert plan.bytes_per_device == 8 + 64 + 10 + 4
    assert plan.replicated_bytes == 8 + 10 + 4
    assert plan.total_bytes == 8 + 512 + 10 + 4


# What is made from a plan


def test_the_sharding_tree_serves_jit_as_in_and_out_shardings(mesh):
    model = mlp()
    shardings = make_plan(model, mesh, RULES).sharding_tree()
    frozen = pz.freeze_variables(model)
    made = jax.jit(lambda m: m, in_shardings=(shardings,), out_shardings=shardings)(frozen)
    for array, sharding in zip(
        jax.tree_util.tree_leaves(made), jax.tree_util.tree_leaves(shardings), strict=True
    ):
        assert array.sharding == sharding
    # A state that went through jit equals the one that went in: the spec is canonical.
    assert_same_shardings(make_plan(made, mesh, RULES).sharding_tree(), shardings)


def test_restore_structs_carry_shape_dtype_and_sharding(mesh):
    model = mlp()
    plan = make_plan(model, mesh, RULES)
    structs = plan.restore_structs()
    assert jax.tree_util.tree_structure(structs) == jax.tree_util.tree_structure(
        plan.sharding_tree()
    )
    arrays = jax.tree_util.tree_leaves(pz.freeze_variables(model))
    for struct, array, leaf in zip(
        jax.tree_util.tree_leaves(structs), arrays, plan.leaves, strict=True
    ):
        assert isinstance(struct, jax.ShapeDtypeStruct)
        assert (struct.shape, struct.dtype) == (array.shape, array.dtype)
        assert struct.sharding is leaf.sharding


def test_the_plan_of_restore_structs_is_the_plan(mesh):
    plan = make_plan(weights(), mesh, RULES)
    assert make_plan(plan.restore_structs(), mesh, RULES).leaves == plan.leaves


def test_a_plan_holds_no_arrays(mesh):
    array = jnp.ones((8, 16))
    model = {
        "named": pz.nx.wrap(array).tag("embedding", "neurons"),
        "param": pz.Parameter(value=pz.nx.wrap(array).tag("embedding", "neurons"), label="p"),
        "frozen": pz.ParameterValue(
            value=pz.nx.wrap(array).tag("embedding", "neurons"), label="q", metadata={}
        ),
    }
    held = [weakref.ref(array), weakref.ref(model["param"])]
    plan = make_plan(model, mesh, RULES)
    plan.sharding_tree()
    str(plan.table())
    del array, model
    gc.collect()
    assert [reference() for reference in held] == [None, None]
    assert len(plan.leaves) == 3


# Telling it


def test_json_comes_back_with_the_whole_plan(mesh):
    tree = {
        "infer": jnp.ones((2, 2)),
        "missing": pz.nx.NamedArray(collections.OrderedDict(embedding=8), None),
        "view": pz.nx.ones({"neurons": 4, "seq": 3}).untag("seq"),
        "w": pz.nx.ones({"neurons": 16, "x": 1}),
    }
    rules = AxisRules({"embedding": "data", "neurons": ("model", "data"), "batch": "data"})
    rules = {"neurons": "model"} | rules
    plan = make_plan(tree, mesh, rules, on_unnamed="infer")
    read = json.loads(plan.to_json())
    assert read["mesh"] == {"data": 4, "model": 2}
    assert read["unused_rules"] == ["'batch' -> 'data'"]
    assert read["total_bytes"] == plan.total_bytes
    assert read["bytes_per_device"] == plan.bytes_per_device
    assert read["replicated_bytes"] == plan.replicated_bytes
    for entry, leaf in zip(read["arrays"], plan.leaves, strict=True):
        assert entry["path"] == leaf.path
        assert entry["names"] == (None if leaf.names is None else list(leaf.names))
        assert entry["shape"] == list(leaf.shape)
        assert entry["dtype"] == (None if leaf.dtype is None else str(leaf.dtype))
        assert entry["spec"] == (None if leaf.spec is None else list(leaf.spec))
        assert entry["shard_shape"] == list(leaf.shard_shape)
        assert entry["reason"] == leaf.reason
        assert entry["bytes_per_device"] == leaf.bytes_per_device


def test_json_writes_several_mesh_axes_as_a_list(mesh):
    plan = make_plan(
        {"k": jax.random.key(0), "w": pz.nx.ones({("a", 1): 8})},
        mesh,
        {("a", 1): ("data", "model")},
    )
    read = json.loads(plan.to_json())["arrays"]
    assert read[1]["spec"] == [["data", "model"]]
    assert read[1]["names"] == ["('a', 1)"]


def test_the_table_is_plain_text(mesh, monkeypatch):
    monkeypatch.setenv("COLUMNS", "120")
    text = str(make_plan(weights(), mesh, RULES).table())
    lines = text.splitlines()
    assert lines[0] == (
        "3 arrays, 1.0 KiB; on mesh (data=4, model=2) each device holds 136 B, "
        "of which replicated 0 B"
    )
    assert lines[1].startswith("array  count  logical axes/mesh axes")
    assert "\x1b" not in text
    down = next(line for line in lines if line.startswith("down"))
    assert "neurons=16/model, embedding=8/data" in down
    assert "64 B" in down
    assert repr(make_plan(weights(), mesh, RULES)) == text


def test_arrays_alike_fold_into_one_row(mesh):
    tree = {"layers": [weights() for _ in range(3)]}
    plan = make_plan(tree, mesh, RULES)
    folded, whole = plan.table(), plan.table(collapse=False)
    assert len(folded.rows) == 3
    assert len(whole.rows) == 9
    assert [row[:2] for row in folded.rows] == [
        ("layers/*/down", "3"),
        ("layers/*/scale", "3"),
        ("layers/*/up", "3"),
    ]
    assert "192 B" in folded.rows[0]


def test_a_single_array_keeps_its_number_in_a_folded_table(mesh):
    assert make_plan({"w1": weights()["up"]}, mesh, RULES).table().rows[0][0] == "w1"


def test_a_plan_is_plain_text_in_a_terminal_too_so_that_a_file_gets_no_colours(mesh, monkeypatch):
    plan = make_plan(weights(), mesh, RULES)
    plain = plan.table().plain_text()
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("FORCE_COLOR", "1")
    assert str(plan) == repr(plan) == str(plan.table()) == repr(plan.table()) == plain
    assert "\x1b" not in plain


def test_rich_prints_a_plan_with_colours(mesh):
    written = io.StringIO()
    Console(file=written, force_terminal=True, width=200).print(make_plan(weights(), mesh, RULES))
    assert "\x1b[1m" in written.getvalue()
    plain = re.sub(r"\x1b\[[0-9;]*m", "", written.getvalue())
    assert "neurons=16/model, embedding=8/data" in plain
    assert "each device holds 136 B" in plain


def test_rich_prints_names_in_brackets_as_they_are(mesh):
    console = Console(record=True, width=200, file=io.StringIO())
    console.print(make_plan({"[bold]w": weights()["up"]}, mesh, RULES).table())
    text = console.export_text()
    assert "[bold]w" in text
    assert "embedding=8/data, neurons=16/model" in text


def test_arrays_without_names_under_a_rule_for_the_largest_dimension_are_told_of_its_option():
    tree, mesh = {"w": jnp.ones((8, 8))}, make_mesh({"data": 8})
    with pytest.raises(PlanError, match=r'split it too, fully_sharded\(unnamed="largest"\), or '):
        make_plan(tree, mesh, fully_sharded(min_size=1))
    with pytest.raises(PlanError, match=r"no logical axis names. Name it .*, or pass on_unnamed="):
        make_plan(tree, mesh, {"batch": "data"})
    plan = make_plan(tree, mesh, fully_sharded(min_size=1, unnamed="largest"))
    assert plan.leaves[0].spec == P("data")
