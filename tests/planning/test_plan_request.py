"""Every function that plans takes the same arguments, and answers alike."""

import functools
import inspect
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
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


def state_sharding(built, mesh, rules=None, **arguments):
    def initial():
        return pzs.TrainState.initial_state(built, optax.sgd(0.1), jax.random.key(0))

    state = jax.eval_shape(initial)
    shardings = pzs.train_state_sharding(state, mesh, rules, **arguments).params
    return {name: shardings[name] for name in sorted(shardings)}


PLANNING = {
    "make_plan": pzs.make_plan,
    "name_to_name_sharding": pzs.name_to_name_sharding,
    "restore_structs": pzs.restore_structs,
    "train_state_sharding": state_sharding,
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
    [
        ("on_indivisible", "'error', 'replicate' or 'pad'"),
        ("on_unnamed", "'error', 'replicate' or 'inf"),
    ],
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
def test_a_typo_warns_with_the_name_that_is_there(name, mesh):
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


def test_a_keyword_one_letter_off_is_refused_with_the_right_one(mesh):
    def build(size=8):
        return tree()

    for wrong, right in (("rule", "rules"), ("on_unamed", "on_unnamed"), ("plans", "plan")):
        match = (
            rf"{wrong}=: is passed on to .*build, which does not take it\. Did you mean {right}=\?"
        )
        with pytest.raises(RuleTypeError, match=match):
            pzs.sharded_init(build, mesh=mesh, **{wrong: {}})

    def build_with_any(**options):
        return tree()

    with pytest.warns(ShardingWarning, match=r"rule=: is passed on .* Did you mean rules="):
        pzs.sharded_init(build_with_any, mesh=mesh, rules={}, rule={})
    with pytest.raises(TypeError, match="unexpected keyword argument 'sise'"):
        pzs.sharded_init(build, mesh=mesh, rules={}, sise=3)


def test_a_builder_whose_own_parameter_is_near_one_of_ours_gets_it(mesh):
    def build(rule, plan_name):
        assert (rule, plan_name) == (1, "x")
        return tree()

    pzs.sharded_init(build, mesh=mesh, rules={}, rule=1, plan_name="x")


@pytest.mark.parametrize("name", ["key", "rng", "init_base_rng"])
@pytest.mark.parametrize("value", [0, np.int32(3)])
def test_a_number_is_not_a_random_key(name, value, mesh):
    namespace = {"jax": jax, "pz": pz}
    exec(
        f"def build({name}):\n    return pz.nx.wrap(jax.random.normal({name}, (8,))).tag('a')",
        namespace,
    )
    build = namespace["build"]
    match = rf"{name}={value}: a number is not a random key. Write {name}=jax.random.key\({value}\)"
    for call in (
        lambda *args, **kwargs: pzs.sharded_init(build, *args, mesh=mesh, rules={}, **kwargs),
        lambda *args, **kwargs: pzs.abstract_model(build, *args, **kwargs),
    ):
        with pytest.raises(RuleTypeError, match=match):
            call(**{name: value})
        with pytest.raises(RuleTypeError, match=match):
            call(value)
        call(jax.random.key(0))


def test_a_builder_may_take_a_number_and_call_it_key(mesh):
    def build(key):
        return pz.nx.wrap(jax.random.normal(jax.random.key(key), (8,))).tag("a")

    pzs.sharded_init(build, 3, mesh=mesh, rules={"a": "data"})

    def broken(key):
        raise TypeError("of its own")

    with pytest.raises(TypeError, match="of its own"):
        pzs.abstract_model(broken, jax.random.key(0))


def test_a_number_as_key_of_the_first_api_is_refused(mesh):
    definition = pz_v1.nn.Linear.from_config({"features": 8}, {"features_out": 6})
    with pytest.raises(RuleTypeError, match=r"rng is a random key, not 0. Write jax"):
        pzs.initialize_parameters_sharded(definition, 0, mesh, {})


def test_an_initialiser_that_leaves_its_places_empty_is_refused(mesh):
    def build():
        return pz.nn.Linear.from_config("up", None, {"a": 8}, {"b": 4})

    match = r"up\.weights: its place is empty. Give the initialiser a key"
    for call in (
        lambda: pzs.sharded_init(build, mesh=mesh, rules={"a": "data"}),
        lambda: pzs.abstract_model(build),
    ):
        with pytest.raises(pzs.ShardingError, match=match):
            call()


def test_a_model_instead_of_its_builder_is_refused_by_abstract_model():
    with pytest.raises(RuleTypeError, match=r"abstract_model calls the function.*not|is a dict"):
        pzs.abstract_model(tree())


def test_a_batch_on_another_mesh_is_brought_to_the_one_asked_for(mesh):
    for other in (
        pzs.make_mesh({"x": 4}, jax.devices()[4:]),
        pzs.make_mesh({"data": 8}),
        jax.make_mesh((8,), ("x",), axis_types=(AxisType.Explicit,)),
    ):
        rules = {"batch": next(iter(other.shape))}
        x = pz.nx.wrap(np.arange(32.0).reshape(8, 4)).tag("batch", "features")
        there = pzs.shard_batch({"x": x}, other, rules)
        here = pzs.shard_batch(there, mesh, {"batch": "data"})["x"].data_array
        assert {shard.data.shape for shard in here.addressable_shards} == {(2, 4)}
        assert here.sharding.device_set == set(mesh.devices.flat)
        np.testing.assert_array_equal(here, np.arange(32.0).reshape(8, 4))
