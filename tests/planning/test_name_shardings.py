"""Sharding trees by name in one call: the plan of make_plan, made fast."""

import collections
import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from penzai import pz

from penzai_shard import make_mesh, make_plan, name_to_name_sharding
from penzai_shard.errors import MeshError, PlanError, RuleTypeError
from penzai_shard.meshes import has_explicit_axes

RULES = {"embedding": "data", "neurons": "model"}


@pytest.fixture
def mesh():
    return make_mesh({"data": 4, "model": 2})


def up(**more):
    return pz.nx.ones({"embedding": 8, "neurons": 16} | more)


def value(label, array):
    return pz.ParameterValue(label=label, value=array, metadata={})


def trees():
    Pair = collections.namedtuple("Pair", ["left", "right"])
    return {
        "flat": {"b": up(), "a": pz.nx.ones({"neurons": 4})},
        "nested": {"layers": [(up(), None), {"w": up(seq=3)}]},
        "one array": up(),
        "values": [value("a", up()), pz.StateVariableValue(label="s", value=up(), metadata={})],
        "several in one value": [pz.StateVariableValue(label="s", value={"m": up()}, metadata={})],
        "variables": [pz.Parameter(value=up(), label="p")],
        "shared variable": [pz.Parameter(value=up(), label="p")] * 2,
        "view": {"v": up(seq=3).untag("embedding")},
        "other containers": Pair(up(), collections.OrderedDict(w=up())),
        "structs": jax.eval_shape(lambda: {"w": up()}),
        "positional": pz.nx.NamedArray(collections.OrderedDict(embedding=8), jnp.ones((4, 8))),
        "missing data": {"w": pz.nx.NamedArray(collections.OrderedDict(embedding=8), None)},
        "factored": {"w": pz.nx.NamedArray(up().named_axes, jnp.ones(16))},
        "scalars": {"step": 3, "key": jax.random.key(0), "w": up()},
        "model": pz.nn.Linear.from_config(
            "linear", jax.random.key(0), {"embedding": 8}, {"neurons": 4}
        ),
        "empty": {},
    }


def assert_same(one, other):
    leaves, treedef = jax.tree_util.tree_flatten(one)
    other_leaves, other_treedef = jax.tree_util.tree_flatten(other)
    assert treedef == other_treedef
    assert leaves == other_leaves


@pytest.mark.parametrize("kind", list(trees()))
def test_the_sharding_tree_is_that_of_the_plan(mesh, kind):
    tree = trees()[kind]
    quick = name_to_name_sharding(tree, mesh, RULES)
    assert_same(quick, make_plan(tree, mesh, RULES).sharding_tree())
    assert jax.tree_util.tree_structure(quick) == jax.tree_util.tree_structure(
        jax.tree_util.tree_map(lambda x: 0, make_plan(tree, mesh, RULES).sharding_tree())
    )


@pytest.mark.parametrize("kind", [kind for kind in trees() if kind != "missing data"])
def test_structs_are_those_of_the_plan(mesh, kind):
    tree = trees()[kind]
    structs = name_to_name_sharding(tree, mesh, RULES, as_shape_dtype_struct=True)
    assert_same(structs, make_plan(tree, mesh, RULES).restore_structs())
    assert all(isinstance(x, jax.ShapeDtypeStruct) for x in jax.tree_util.tree_leaves(structs))


def test_the_signature_begins_with_that_of_penzai():
    parameters = inspect.signature(name_to_name_sharding).parameters.values()
    assert [p.name for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD] == [
        "tree",
        "mesh",
        "axis_name_to_mesh_name",
        "ignore_unnamed_arrays",
        "as_shape_dtype_struct",
    ]


def test_positional_dimensions_stay_unsharded_and_specs_end_with_a_name(mesh):
    sharding = name_to_name_sharding(trees()["positional"], mesh, RULES).data_array
    assert tuple(sharding.spec) == (None, "data")
    sharding = name_to_name_sharding({"w": up()}, mesh, {"embedding": "data"})["w"].data_array
    assert tuple(sharding.spec) == ("data",)


def test_names_and_sizes_in_another_order_are_told_apart(mesh):
    tree = {
        "a": pz.nx.ones({"embedding": 8, "neurons": 16}),
        "b": pz.nx.ones({"neurons": 8, "embedding": 16}),
        "c": pz.nx.ones({"embedding": 16, "neurons": 8}),
        "d": pz.nx.NamedArray(
            collections.OrderedDict(embedding=8, neurons=16), jnp.ones((2, 8, 16))
        ),
    }
    shardings = name_to_name_sharding(tree, mesh, RULES)
    assert [shardings[key].data_array.spec for key in "abcd"] == [
        P("data", "model"),
        P("model", "data"),
        P("data", "model"),
        P(None, "data", "model"),
    ]
    assert list(shardings["c"].named_axes.values()) == [16, 8]


def test_arrays_alike_share_one_sharding_object(mesh):
    tree = {str(i): up() for i in range(50)}
    shardings = jax.tree_util.tree_leaves(name_to_name_sharding(tree, mesh, RULES))
    assert len({id(sharding) for sharding in shardings}) == 1
    planned = jax.tree_util.tree_leaves(make_plan(tree, mesh, RULES).sharding_tree())
    assert planned[0] is shardings[0]


def test_changing_the_given_tree_later_does_not_change_the_shardings(mesh):
    tree = {"layers": [up()]}
    shardings = name_to_name_sharding(tree, mesh, RULES)
    tree["layers"].append(up())
    assert len(jax.tree_util.tree_leaves(shardings)) == 1


def test_the_sharding_tree_serves_device_put_and_jit(mesh):
    tree = trees()["nested"]
    shardings = name_to_name_sharding(tree, mesh, RULES)
    placed = jax.device_put(tree, shardings)
    made = jax.jit(lambda t: t, in_shardings=(shardings,), out_shardings=shardings)(placed)
    for array, sharding in zip(
        jax.tree_util.tree_leaves(made), jax.tree_util.tree_leaves(shardings), strict=True
    ):
        assert array.sharding == sharding


def test_values_are_unchanged_by_placing(mesh):
    array = pz.nx.wrap(jnp.arange(128.0).reshape(8, 16)).tag("embedding", "neurons")
    placed = jax.device_put({"w": array}, name_to_name_sharding({"w": array}, mesh, RULES))
    np.testing.assert_array_equal(placed["w"].data_array, array.data_array)


def test_explicit_meshes_give_shardings_on_the_auto_twin():
    mesh = jax.make_mesh((4, 2), ("data", "model"), axis_types=(AxisType.Explicit,) * 2)
    sharding = name_to_name_sharding({"w": up()}, mesh, RULES)["w"].data_array
    assert isinstance(sharding, NamedSharding)
    assert not has_explicit_axes(sharding.mesh)


def test_nothing_as_rules_maps_names_to_mesh_axes_of_the_same_name(mesh):
    tree = {"w": pz.nx.ones({"x": 3, "data": 4})}
    assert name_to_name_sharding(tree, mesh)["w"].data_array.spec == P(None, "data")


def test_unnamed_arrays_are_refused_or_left_to_jax(mesh):
    tree = {"a": jnp.ones(3), "w": up()}
    with pytest.raises(PlanError, match=r"a: this array of shape \(3,\) has no logical axis names"):
        name_to_name_sharding(tree, mesh, RULES)
    shardings = name_to_name_sharding(tree, mesh, RULES, ignore_unnamed_arrays=True)
    assert shardings["a"] is None
    assert shardings["w"].data_array.spec == P("data", "model")


def test_all_offenders_are_told_as_by_the_plan(mesh):
    tree = {"a": pz.nx.ones({"embedding": 6}), "b": pz.nx.ones({"neurons": 3}), "c": up()}
    with pytest.raises(PlanError, match="no valid layout") as caught:
        name_to_name_sharding(tree, mesh, RULES)
    with pytest.raises(PlanError, match="no valid layout") as planned:
        make_plan(tree, mesh, RULES)
    assert caught.value.problems == planned.value.problems
    assert len(caught.value.problems) == 2


def test_unknown_mesh_axes_and_unreadable_rules_are_refused(mesh):
    with pytest.raises(MeshError, match="Did you mean 'model'"):
        name_to_name_sharding({"w": up()}, mesh, {"neurons": "modl"})
    with pytest.raises(RuleTypeError, match="rules must be"):
        name_to_name_sharding({"w": up()}, mesh, 3)
    with pytest.raises(RuleTypeError, match="a mesh is needed"):
        name_to_name_sharding({"w": up()}, None, RULES)


def test_a_value_that_no_array_holds_is_refused(mesh):
    with pytest.raises(PlanError, match="text: a str is not an array"):
        name_to_name_sharding({"text": "text"}, mesh, RULES)
