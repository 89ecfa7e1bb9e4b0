"""Every function that plans takes the same arguments, and answers alike."""

import functools
import inspect
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh, AxisType
from jax.sharding import PartitionSpec as P
from penzai import pz
from penzai.deprecated.v1 import pz as pz_v1

import penzai_shard as pzs
from penzai_shard.errors import MeshError, PlanError, RuleTypeError, ShardingWarning


@pytest.fixture
def mesh():
    return pzs.make_mesh({"data": 4, "model": 2})


def tree():
    return {"w": pz.nx.ones({"a": 8, "b": 4})}


def tree_with_mask():
    return {**tree(), "mask": np.ones((3, 3))}


def specs(result):
    """The spec of every array in whatever an entry point returns."""
    if isinstance(result, pzs.ShardingPlan):
        result = result.sharding_tree()
    leaves = jax.tree.leaves(pz.freeze_variables(result), is_leaf=lambda x: x is None)
    return [leaf if leaf is None else getattr(leaf, "sharding", leaf).spec for leaf in leaves]


PLANNING = {
    "make_plan": pzs.make_plan,
    "name_to_name_sharding": pzs.name_to_name_sharding,
}
PLACING = {
    "place": pzs.place,
    "name_to_name_device_put": pzs.name_to_name_device_put,
    "shard_batch": pzs.shard_batch,
    "sharded_init": lambda built, mesh, rules=None, **arguments: pzs.sharded_init(
        lambda: jax.tree.map(jnp.asarray, built), mesh=mesh, rules=rules, **arguments
    ),
}
ALL = PLANNING | PLACING
every = pytest.mark.parametrize("name", ALL)
every_placing = pytest.mark.parametrize("name", PLACING)


@every
def test_rules_have_two_names(name, mesh):
    expected = [P("data", "model")]
    rules = {"a": "data", "b": "model"}
    assert specs(ALL[name](tree(), mesh, rules)) == expected
    assert specs(ALL[name](tree(), mesh, rules=rules)) == expected
    assert specs(ALL[name](tree(), mesh, axis_name_to_mesh_name=rules)) == expected


@every
def test_both_names_at_once_are_refused(name, mesh):
    match = rf"^{name}: rules and axis_name_to_mesh_name are two names of one argument"
    with pytest.raises(RuleTypeError, match=match):
        ALL[name](tree(), mesh, rules={}, axis_name_to_mesh_name={})


@every
def test_lengths_that_do_not_divide_are_replicated_on_request(name, mesh):
    odd = {"w": pz.nx.ones({"a": 6, "b": 4})}
    rules = {"a": "data", "b": "model"}
    with pytest.raises(PlanError, match=r"w: logical axis 'a' \(6\) does not divide"):
        ALL[name](odd, mesh, rules)
    assert specs(ALL[name](odd, mesh, rules, on_indivisible="replicate")) == [P(None, "model")]


@every
def test_a_mask_without_names_is_refused_or_replicated(name, mesh):
    with pytest.raises(PlanError, match=r'mask: .* or pass on_unnamed="replicate"'):
        ALL[name](tree_with_mask(), mesh, {"a": "data"})
    given = ALL[name](tree_with_mask(), mesh, {"a": "data"}, on_unnamed="replicate")
    assert specs(given) == [P(), P("data")]


@every
def test_scalars_are_always_replicated(name, mesh):
    assert specs(ALL[name]({"scale": np.float32(2)} | tree(), mesh, {"a": "data"})) == [
        P(),
        P("data"),
    ]


@every
@pytest.mark.parametrize(
    ("option", "values"),
    [("on_indivisible", "'error' or 'replicate'"), ("on_unnamed", "'error', 'replicate' or 'inf")],
)
@pytest.mark.parametrize("value", ["replicated", True, ["error"], "Error", None])
def test_other_values_are_refused_with_the_valid_ones(name, option, values, value, mesh):
    match = rf"{option} must be {values}.*, not " + re.escape(repr(value))
    with pytest.raises(RuleTypeError, match=match):
        ALL[name](tree(), mesh, {}, **{option: value})


@every
def test_rules_left_out_are_not_silent(name, mesh):
    match = (
        rf"^{name} was given no rules, and none of the logical axes \('a', 'b'\) has the name of a "
        r"mesh axis \(data=4, model=2\).*rules={'a': 'data'}.*rules={}\."
    )
    with pytest.warns(ShardingWarning, match=match) as caught:
        given = ALL[name](tree(), mesh)
    assert caught[0].filename == __file__
    assert specs(given) == [P()]


@every
def test_rules_left_out_mean_the_mesh_axes_of_the_same_name(name, mesh):
    assert specs(ALL[name]({"w": pz.nx.ones({"model": 8, "b": 4})}, mesh)) == [P("model")]
    assert specs(ALL[name](tree(), mesh, {})) == [P()]
    one_device = pzs.make_mesh({"data": 1}, jax.devices()[:1])
    ALL[name](tree(), one_device)


@every
def test_a_slip_of_the_pen_warns_with_the_name_that_is_there(name, mesh):
    batch = {"x": pz.nx.ones({"batch": 8})}
    with pytest.warns(ShardingWarning, match="Did you mean 'batch'") as caught:
        ALL[name](batch, mesh, {"bacth": "data"})
    assert caught[0].filename == __file__


@pytest.mark.parametrize("name", PLANNING)
def test_a_function_that_makes_plans_takes_none(name, mesh):
    plan = pzs.make_plan(tree(), mesh, {"a": "data"})
    with pytest.raises(RuleTypeError, match=r"needs a mesh for it, not a plan.*place\(tree, plan"):
        ALL[name](tree(), plan)


@every_placing
def test_a_mesh_without_devices_is_refused(name):
    with pytest.raises(MeshError, match=rf"^{name} cannot put arrays .* it has no devices"):
        PLACING[name](tree(), AbstractMesh((4, 2), ("data", "model")), {})


@pytest.mark.parametrize(
    "call",
    [
        lambda plan, **more: pzs.place(tree(), plan, **more),
        lambda plan, **more: pzs.shard_batch(tree(), plan=plan, **more),
        lambda plan, **more: pzs.sharded_init(tree, plan=plan, **more),
    ],
    ids=["place", "shard_batch", "sharded_init"],
)
def test_a_plan_stands_for_mesh_rules_and_options(call, mesh):
    plan = pzs.make_plan(tree(), mesh, {"a": "data"})
    assert specs(call(plan)) == [P("data")]
    for more in ({"rules": {}}, {"on_unnamed": "replicate"}, {"axis_name_to_mesh_name": {}}):
        with pytest.raises(RuleTypeError, match="a plan is given, and rules or options too"):
            call(plan, **more)


def test_a_plan_beside_its_own_mesh_is_taken_and_beside_another_refused(mesh):
    plan = pzs.make_plan(tree(), mesh, {"a": "data"})
    explicit = jax.make_mesh((4, 2), ("data", "model"), axis_types=(AxisType.Explicit,) * 2)
    for same in (mesh, explicit):
        assert specs(pzs.sharded_init(tree, mesh=same, plan=plan)) == [P("data")]
    other = pzs.make_mesh({"data": 2, "model": 4})
    with pytest.raises(MeshError, match=r"made for another mesh \(data=4, model=2\)"):
        pzs.sharded_init(tree, mesh=other, plan=plan)
    with pytest.raises(RuleTypeError, match="plan must be a ShardingPlan, not dict"):
        pzs.sharded_init(tree, mesh=mesh, plan={"w": P("data")})


# What is passed on by sharded_init


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("rules", {"a": "data"}),
        ("axis_name_to_mesh_name", {"a": "data"}),
        ("on_indivisible", "replicate"),
        ("on_unnamed", "replicate"),
    ],
)
def test_a_keyword_that_the_builder_has_too_is_not_passed_on_in_silence(name, value, mesh):
    namespace = {"tree": tree}
    exec(f"def build(size=8, *, {name}=None): return tree()", namespace)
    build = namespace["build"]
    match = rf"{name}=: is taken by sharded_init and not passed on to build.*partial\(build, {name}"
    with pytest.raises(RuleTypeError, match=match):
        pzs.sharded_init(build, mesh=mesh, **{name: value})
    bound = functools.partial(build, **{name: 1})
    assert bound.func is build
    more = {"rules": {"a": "data"}} | {name: value}
    if name == "axis_name_to_mesh_name":
        del more["rules"]
    assert specs(pzs.sharded_init(bound, mesh=mesh, **more)) == [P("data")]


def test_a_builder_may_take_the_mesh_by_position(mesh):
    def build(mesh):
        return {"w": pz.nx.ones({"a": mesh.shape["data"]})}

    assert specs(pzs.sharded_init(build, mesh, mesh=mesh, rules={"a": "data"})) == [P("data")]


def test_a_model_instead_of_its_builder_is_refused(mesh):
    match = r"needs the function that does, not a dict.*place\(model, mesh, rules\)"
    with pytest.raises(RuleTypeError, match=match):
        pzs.sharded_init(tree(), mesh=mesh)


def test_no_mesh_and_no_plan_is_refused():
    with pytest.raises(RuleTypeError, match=r"sharded_init: a mesh is needed.*or a plan: plan="):
        pzs.sharded_init(tree)


def test_the_fixed_parameters_stay():
    fixed = {
        pzs.make_plan: ["tree", "mesh", "rules"],
        pzs.name_to_name_device_put: ["tree", "mesh", "axis_name_to_mesh_name"],
        pzs.place: ["tree", "plan_or_mesh", "rules"],
        pzs.initialize_parameters_sharded: ["model_def", "rng", "mesh", "axis_name_to_mesh_name"],
        pzs.shard_batch: ["batch", "mesh", "rules"],
    }
    for function, names in fixed.items():
        parameters = inspect.signature(function).parameters.values()
        assert [p.name for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD] == names


def test_parameters_of_the_first_api_follow_a_plan_of_their_model(mesh):
    model = pz_v1.nn.add_parameter_prefix(
        "up", pz_v1.nn.Linear.from_config({"features": 8}, {"features_out": 6})
    )
    plan = pzs.make_plan(model, mesh, {"features": "data"})
    key = jax.random.key(0)
    built = pzs.initialize_parameters_sharded(model, key, plan=plan)
    assert built.weights.value.data_array.sharding.spec == P("data")
    by_rules = pzs.initialize_parameters_sharded(model, key, mesh, rules={"features": "data"})
    np.testing.assert_array_equal(built.weights.value.data_array, by_rules.weights.value.data_array)
