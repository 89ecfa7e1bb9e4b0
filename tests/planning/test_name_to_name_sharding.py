"""Trees of shardings by axis name: those of the plan, those of Penzai, shared, and cheap."""

import collections
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from penzai import pz
from penzai.toolshed import sharding_util

import penzai_shard as pzs

MESH = pzs.make_mesh({"data": 4, "model": 2})
RULES = {"a": "data", "b": "model"}


def struct(shape):
    return jax.ShapeDtypeStruct(shape, "float32")


def named(axes, front=(), make=struct):
    return pz.nx.NamedArray(collections.OrderedDict(axes), make((*front, *axes.values())))


# Drawn trees

sizes = st.sampled_from([3, 4, 8, 8, 16])
axes = st.dictionaries(st.sampled_from(["a", "b", "c", "data"]), sizes, max_size=3)
fronts, makers = st.sampled_from([(), (), (5,), (8, 2)]), st.sampled_from([struct, np.zeros])
arrays = st.builds(named, axes, fronts, makers)
# A dimension with a name, then one without.
views = st.builds(
    lambda name, size: pz.nx.NamedArrayView((size, 2), (1,), {name: 0}, np.zeros((size, 2))),
    st.sampled_from(["a", "b", "c"]),
    sizes,
)
kinds = st.sampled_from([pz.ParameterValue, pz.StateVariableValue])
frozen = st.builds(lambda kind, v, i: kind(label=str(i), value=v), kinds, arrays, st.uuids())
all_rules = st.sampled_from(
    [RULES, [("c", "data"), ("a", "data"), ("a", "model")], pzs.fully_sharded(min_size=9), {}]
)


def trees(leaves):
    def grow(inner):
        lists = st.lists(inner, max_size=4)
        return lists | lists.map(tuple) | st.dictionaries(st.sampled_from("uvw"), inner, max_size=3)

    return st.recursive(leaves, grow, max_leaves=8)


def outcome(make):
    try:
        made = make()
    except pzs.PlanError as error:
        return error.problems
    # By identity: equal layouts are one object.
    return jax.tree.structure(made), [id(sharding) for sharding in jax.tree.leaves(made)]


modes = st.sampled_from(["error", "replicate"])


@pytest.mark.filterwarnings("ignore::penzai_shard.ShardingWarning")
@settings(max_examples=300)
@given(trees(st.none() | arrays | views | frozen), all_rules, modes)
def test_name_to_name_sharding_equals_the_tree_of_the_plan(tree, rules, mode):
    options = {"rules": rules, "on_indivisible": mode}
    planned = outcome(lambda: pzs.make_plan(tree, MESH, **options).sharding_tree())
    assert outcome(lambda: pzs.name_to_name_sharding(tree, MESH, **options)) == planned


whole_axes = st.dictionaries(st.sampled_from(["a", "b", "c"]), sizes, min_size=1, max_size=3)


@pytest.mark.filterwarnings("ignore::penzai_shard.ShardingWarning")
@given(trees(st.builds(named, whole_axes) | views), st.permutations(["data", "model", None]))
def test_name_to_name_sharding_equals_penzais_where_lengths_divide(tree, mesh_axes):
    mapping = dict(zip("abc", mesh_axes, strict=True))
    theirs = sharding_util.name_to_name_sharding(tree, MESH, mapping)
    found = pzs.name_to_name_sharding(tree, MESH, mapping, on_indivisible="replicate")
    assert jax.tree.structure(found) == jax.tree.structure(theirs)
    for array, *both in zip(*map(jax.tree.leaves, (tree, found, theirs)), strict=True):
        by_axis = zip(array.shape, both[1].spec, strict=True)
        if all(size % MESH.shape[axis] == 0 for size, axis in by_axis if axis):
            assert both[0].is_equivalent_to(both[1], array.ndim)


# Options and cost


def test_name_to_name_sharding_of_positional_dimensions_in_front():
    # Penzai's own function reads the names from the first dimension on.
    array = named({"a": 8}, front=(3, 2), make=np.zeros)
    placed = jax.device_put(array, pzs.name_to_name_sharding(array, MESH, RULES))
    assert placed.data_array.sharding.shard_shape((3, 2, 8)) == (3, 2, 2)


def test_name_to_name_sharding_ignores_unnamed_arrays():
    tree = {"w": named({"a": 8, "c": 3}), "bias": np.zeros(3, "int32")}
    found = pzs.name_to_name_sharding(tree, MESH, RULES, ignore_unnamed_arrays=True)
    assert (found["w"].data_array.spec, found["bias"]) == (P("data"), None)
    structs = pzs.name_to_name_sharding(tree, MESH, RULES, True, as_shape_dtype_struct=True)
    sharding = NamedSharding(MESH, P("data"))
    assert structs["w"].data_array == jax.ShapeDtypeStruct((8, 3), "float32", sharding=sharding)
    assert structs["bias"] == jax.ShapeDtypeStruct((3,), "int32")


@pytest.mark.parametrize(
    ("wrap", "calls"),
    [
        (lambda arrays: arrays, 0),
        (lambda arrays: {key: {"w": array} for key, array in arrays.items()}, 1),
        (lambda arrays: [*arrays.values()], 2),
        (lambda arrays: {k: pz.ParameterValue(value=v, label=k) for k, v in arrays.items()}, 2),
    ],
)
def test_name_to_name_sharding_makes_few_calls_for_a_further_array(wrap, calls):
    def count(blocks):
        tree, modules = wrap(dict.fromkeys(map(str, range(blocks)), array)), []
        sys.setprofile(
            lambda frame, event, _: event == "call" and modules.append(frame.f_globals["__name__"])
        )
        try:
            pzs.name_to_name_sharding(tree, MESH, RULES)
        finally:
            sys.setprofile(None)
        return sum(module.startswith("penzai_shard") for module in modules)

    array = named({"a": 8, "c": 3}, make=jnp.ones)
    count(1)
    assert count(60) - count(10) == 50 * calls
