"""Reading trees of any kind into arrays with logical axis names."""

import collections
import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from penzai import pz
from penzai.deprecated.v1 import pz as pz_v1

from penzai_shard.named_arrays import dimension_names, dimension_sizes
from penzai_shard.named_leaves import leaves_of, map_arrays
from penzai_shard.reduced_statistics import align_names
from penzai_shard.rule_kinds import PositionalDimension


def named(**sizes):
    return pz.nx.ones(sizes)


def facts(tree):
    return [(leaf.path, leaf.names, leaf.shape) for leaf in leaves_of(tree)]


def test_a_named_array_gives_its_names_in_the_order_of_its_data():
    assert facts({"w": named(a=2, b=3)}) == [("w", ("a", "b"), (2, 3))]


def test_positional_dimensions_of_a_named_array_come_first():
    array = pz.nx.NamedArray(collections.OrderedDict(a=2), jnp.ones((5, 2)))
    assert facts(array) == [("", (None, "a"), (5, 2))]


@pytest.mark.parametrize("untagged", ["a", "b", "c"])
def test_a_view_gives_its_dimensions_in_the_order_of_its_data(untagged):
    view = named(a=2, b=3, c=5).untag(untagged)
    names = tuple(None if name == untagged else name for name in "abc")
    assert isinstance(view, pz.nx.NamedArrayView)
    assert facts(view) == [("", names, (2, 3, 5))]


def test_a_view_with_permuted_dimensions_is_read_by_its_data():
    view = pz.nx.NamedArrayView(
        data_shape=(2, 3, 5),
        data_axis_for_logical_axis=(1,),
        data_axis_for_name={"z": 2, "x": 0},
        data_array=jnp.ones((2, 3, 5)),
    )
    assert facts(view) == [("", ("x", None, "z"), (2, 3, 5))]
    assert dimension_sizes(view) == {"x": 2, PositionalDimension(1): 3, "z": 5}


@pytest.mark.parametrize("kind", [pz.Parameter, pz.StateVariable])
def test_the_path_of_a_variable_is_its_label(kind):
    variable = kind(value=named(a=2), label="layer/w")
    assert facts({"deep": [variable]}) == [("layer/w", ("a",), (2,))]
    assert facts({"deep": [variable.freeze()]}) == [("layer/w", ("a",), (2,))]


def test_a_variable_with_several_arrays_tells_them_apart():
    variable = pz.StateVariable(value={"mean": named(a=2), "count": 0}, label="stats")
    assert [path for path, _, _ in facts(variable)] == ["stats/count", "stats/mean"]


def test_mutable_variables_become_their_frozen_values_with_label_and_metadata():
    parameter = pz.Parameter(value=named(a=2), label="w", metadata={"kept": True})
    mapped = map_arrays([parameter], lambda leaf: leaf.shape)[0]
    assert isinstance(mapped, pz.ParameterValue)
    assert mapped.label == "w"
    assert mapped.metadata == {"kept": True}
    assert mapped.value.data_array == (2,)


def test_a_shared_variable_is_visited_once():
    parameter = pz.Parameter(value=named(a=2), label="w")
    visited = []
    mapped = map_arrays([parameter, {"again": parameter}], visited.append)
    assert len(visited) == 1
    assert mapped[0] is mapped[1]["again"]


def test_parameters_of_the_first_api_have_their_own_names_as_paths():
    parameter = pz_v1.nn.Parameter(value=named(a=2), name="layer.w")
    frozen = pz_v1.nn.FrozenParameter(value=named(b=3), name="layer.v")
    assert facts([parameter, frozen]) == [
        ("layer.w", ("a",), (2,)),
        ("layer.v", ("b",), (3,)),
    ]
    assert isinstance(map_arrays(parameter, lambda leaf: 0), pz_v1.nn.Parameter)


def test_uninitialized_parameters_of_the_first_api_are_read_without_being_initialized():
    def never(key):
        assert isinstance(key, jax.core.Tracer | jax.Array)
        return named(a=2, b=3).astype(jnp.bfloat16)

    parameter = pz_v1.nn.UninitializedParameter(never, name="w")
    (leaf,) = leaves_of(parameter)
    assert (leaf.path, leaf.names, leaf.shape) == ("w", ("a", "b"), (2, 3))
    assert leaf.dtype == jnp.bfloat16
    assert isinstance(leaf.array, jax.ShapeDtypeStruct)


def test_structs_are_read_like_arrays():
    tree = jax.eval_shape(lambda: {"w": named(a=2), "b": jnp.ones(3, jnp.int8)})
    assert facts(tree) == [("b", None, (3,)), ("w", ("a",), (2,))]
    assert [leaf.dtype for leaf in leaves_of(tree)] == [jnp.int8, jnp.float32]


def test_missing_data_arrays_leave_the_names():
    array = pz.nx.NamedArray(collections.OrderedDict(a=2, b=3), None)
    (leaf,) = leaves_of(array)
    assert (leaf.names, leaf.shape, leaf.dtype) == (("a", "b"), (2, 3), None)
    view = dataclasses.replace(named(a=2, b=3).untag("a"), data_array=None)
    (leaf,) = leaves_of(view)
    assert (leaf.names, leaf.shape, leaf.dtype) == ((None, "b"), (2, 3), None)


def test_a_named_array_with_anything_else_as_data_is_read_by_its_names():
    marker = object()
    (leaf,) = leaves_of(pz.nx.NamedArray(collections.OrderedDict(a=2), marker))
    assert (leaf.names, leaf.shape, leaf.array) == (("a",), (2,), marker)


def test_a_python_number_where_a_parameter_has_its_array_is_a_scalar_statistic():
    (leaf,) = leaves_of(pz.nx.NamedArray(collections.OrderedDict(a=4), 0.0))
    assert (leaf.names, leaf.shape, leaf.dtype) == ((), (), jnp.float32)


def test_plain_arrays_numbers_and_keys_have_no_names():
    tree = {
        "f": np.float64(1.0),
        "i": 3,
        "k": jax.random.key(0),
        "n": np.ones((2, 3)),
        "s": jax.random.split(jax.random.key(0), 4),
    }
    found = {leaf.path: leaf for leaf in leaves_of(tree)}
    assert all(leaf.names is None for leaf in found.values())
    assert {path: leaf.shape for path, leaf in found.items()} == {
        "f": (),
        "i": (),
        "k": (),
        "n": (2, 3),
        "s": (4,),
    }
    assert found["n"].dtype == jnp.float32
    assert jnp.issubdtype(found["k"].dtype, jax.dtypes.prng_key)


@pytest.mark.parametrize("value", ["text", len, np.array(["a", "b"]), np.array([object()])])
def test_what_is_no_array_has_no_dtype(value):
    (leaf,) = leaves_of({"x": value})
    assert leaf.dtype is None
    assert leaf.names is None


def test_the_structure_that_comes_back_is_that_of_the_frozen_tree():
    model = {"p": pz.Parameter(value=named(a=2), label="p"), "x": (named(b=3), None)}
    mapped = map_arrays(model, lambda leaf: 0)
    frozen = pz.freeze_variables(model)
    assert jax.tree_util.tree_structure(mapped) == jax.tree_util.tree_structure(frozen)


def test_unbound_models_have_nothing_to_lay_out():
    model = pz.nn.Linear.from_config("linear", jax.random.key(0), {"embedding": 2}, {"neurons": 3})
    unbound, variables = pz.unbind_params(model)
    assert leaves_of(unbound) == []
    assert [leaf.path for leaf in leaves_of(variables)] == ["linear.weights"]


def test_names_that_contradict_the_data_are_reported():
    wrong = object.__new__(pz.nx.NamedArray)
    wrong.__dict__.update(named_axes=collections.OrderedDict(a=2, b=3), data_array=jnp.ones((7,)))
    assert dimension_names(wrong) is None
    (leaf,) = leaves_of({"w": wrong})
    assert "(a=2, b=3) do not fit its data of shape (7,)" in leaf.problem


@pytest.mark.parametrize(
    ("sizes", "shape", "path", "names"),
    [
        ({"a": 4, "b": 8}, (), "", ()),
        ({"a": 4, "b": 8}, (1,), "", (None,)),
        ({"a": 4, "b": 8}, (8,), "", ("b",)),
        ({"a": 4, "b": 8}, (4, 1), "", ("a", None)),
        ({"a": 4, "b": 8}, (1, 1), "", (None, None)),
        ({"a": 4, "b": 8, "c": 16}, (4, 16), "", ("a", "c")),
        # Square: which one is left depends on what optax calls the statistic.
        ({"a": 8, "b": 8}, (8,), "0/v_row/w", ("a",)),
        ({"a": 8, "b": 8}, (8,), "0/v_col/w", ("b",)),
        ({"a": 8, "b": 8}, (8,), "0/v_col/v_row", ("b",)),
        ({"a": 8, "b": 8, "c": 16}, (8, 16), "0/v_col/w", ("a", "c")),
        ({"a": 16, "b": 8, "c": 8}, (8, 8), "0/v_row/w", ("b", "c")),
        ({"a": 16, "b": 8, "c": 8}, (16, 8), "0/v_col/w", ("a", "b")),
    ],
)
def test_reduced_statistics_keep_the_names_of_what_is_left(sizes, shape, path, names):
    aligned = align_names(sizes, shape, path)
    assert aligned.names == names
    assert not aligned.problem


def test_a_statistic_that_may_be_of_either_dimension_is_a_problem():
    aligned = align_names({"a": 8, "b": 8}, (8,), "0/other/w")
    assert aligned.names == (None,)
    assert "fits several of its logical axes (a=8, b=8)" in aligned.problem


@pytest.mark.parametrize("place", [0, 1])
def test_one_statistic_per_dimension_is_reported_apart_by_its_place(place):
    part = (jax.tree_util.SequenceKey(place),)
    assert align_names({"a": 8, "b": 8}, (8,), "mu/w/0", part).names == ("ab"[place],)


def test_statistics_inside_frozen_parameters_are_reported_apart_by_where_they_are():
    value = pz.nx.NamedArray(collections.OrderedDict(a=8, b=8), jnp.ones(8))
    parameter = pz.ParameterValue(label="w", value=value, metadata={})
    leaves = leaves_of({"v_row": parameter, "v_col": parameter})
    assert [(leaf.path, leaf.names) for leaf in leaves] == [("w", ("b",)), ("w", ("a",))]
