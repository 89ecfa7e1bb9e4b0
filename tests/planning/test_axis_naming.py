"""Names for arrays that carry none, by path pattern."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from penzai import pz

from penzai_shard import FusedAxes, make_mesh, make_plan, name_axes, without_names
from penzai_shard.errors import PlanError, RuleTypeError, SelectionError
from penzai_shard.planning import NamesByPath


def torch_style():
    return {
        "layers.0.weight": np.ones((4, 3), np.float32),
        "layers.0.bias": np.ones(4, np.float32),
        "layers.1.weight": np.ones((8, 4), np.float32),
        "layers.1.bias": np.ones(8, np.float32),
    }


NAMES = {"layers.*.weight": ("out", "in"), "layers.*.bias": ("out",)}


def test_a_torch_style_dictionary_is_named_by_pattern():
    given = torch_style()
    named = name_axes(given, NAMES)
    assert set(named) == set(given)
    assert dict(named["layers.1.weight"].named_shape) == {"out": 8, "in": 4}
    assert all(named[key].data_array is given[key] for key in given)


def test_nested_trees_are_named_by_the_same_patterns():
    nested = {"layers": [{"weight": jnp.ones((4, 3)), "bias": jnp.ones(4)} for _ in range(2)]}
    named = name_axes(nested, NAMES)
    assert dict(named["layers"][1]["weight"].named_shape) == {"out": 4, "in": 3}


def test_named_weights_get_a_plan():
    mesh = make_mesh({"data": 4, "model": 2})
    plan = make_plan(name_axes(torch_style(), NAMES), mesh, {"out": "model"})
    assert {leaf.spec for leaf in plan.leaves} == {P("model")}


def test_structs_and_numbers_are_named_too():
    tree = {"w": jax.ShapeDtypeStruct((4, 3), jnp.int8), "step": 3}
    named = name_axes(tree, {"w": ("out", "in"), "step": ()})
    assert named["w"].data_array == jax.ShapeDtypeStruct((4, 3), jnp.int8)
    assert dict(named["step"].named_shape) == {}


def test_leading_nameless_dimensions_stay_positional():
    named = name_axes({"w": np.ones((2, 4, 3))}, {"w": (None, "out", "in")})["w"]
    assert isinstance(named, pz.nx.NamedArray)
    assert named.positional_shape == (2,)
    assert dict(named.named_shape) == {"out": 4, "in": 3}


@pytest.mark.parametrize(
    ("names", "positional"),
    [(("a", None, "b"), (3,)), (("a", "b", None), (4,)), ((None, "a", None), (2, 4))],
)
def test_nameless_dimensions_anywhere_stay_positional_in_their_order(names, positional):
    array = np.arange(24.0, dtype=np.float32).reshape(2, 3, 4)
    view = name_axes({"w": array}, {"w": names})["w"]
    view.check_valid()
    assert view.positional_shape == positional
    assert dict(view.named_shape) == {
        name: size for name, size in zip(names, array.shape, strict=True) if name is not None
    }
    mesh = make_mesh({"data": 4, "model": 2})
    (leaf,) = make_plan({"w": view}, mesh, {}).leaves
    assert leaf.names == names
    assert leaf.shape == array.shape


def test_wholly_nameless_dimensions_are_allowed():
    named = name_axes({"w": np.ones((2, 3))}, {"w": (None, None)})["w"]
    assert named.positional_shape == (2, 3)


def test_named_arrays_variables_and_other_leaves_stay_as_they_are():
    array = pz.nx.ones({"a": 2})
    parameter = pz.Parameter(value=array, label="p")
    tree = {"named": array, "p": parameter, "text": "text", "none": None, "w": np.ones(2)}
    named = name_axes(tree, {"w": ("b",)})
    assert named["named"] is array
    assert named["p"] is parameter
    assert named["text"] == "text"
    assert named["none"] is None


def test_every_offender_is_reported_in_one_error():
    tree = torch_style() | {"head": np.ones((8, 2)), "deep": [np.ones(3)]}
    with pytest.raises(SelectionError, match="cannot name the arrays of this tree:") as caught:
        name_axes(
            tree,
            {
                "layers.*.weight": ("out",),
                "layers.*.bias": ("out",),
                "**.bias": ("other",),
                "haed": ("embedding", "out"),
            },
        )
    assert caught.value.problems == (
        "deep/0: no pattern matches this array of shape (3,). Add 'deep/0': ('axis_0',).",
        "head: no pattern matches this array of shape (8, 2). Add 'head': ('axis_0', 'axis_1').",
        "layers.0.bias: matched by 'layers.*.bias' and '**.bias'. "
        "Make the patterns exclude each other.",
        "layers.0.weight: pattern 'layers.*.weight' gives 1 logical axes ('out',) to an array of "
        "rank 2, shape (4, 3). Give 2, None for a positional dimension.",
        "layers.1.bias: matched by 'layers.*.bias' and '**.bias'. "
        "Make the patterns exclude each other.",
        "layers.1.weight: pattern 'layers.*.weight' gives 1 logical axes ('out',) to an array of "
        "rank 2, shape (8, 4). Give 2, None for a positional dimension.",
        "pattern 'haed' matches no array. There are 'deep/0', 'head', 'layers.0.bias', ....",
    )


def test_a_pattern_that_matches_nothing_names_the_nearest_path():
    with pytest.raises(
        SelectionError, match=r"'lyers\.0\.bias' matches no array. The nearest path is 'layers\.0"
    ):
        name_axes(torch_style(), NAMES | {"lyers.0.bias": ("out",)})


def test_a_pattern_for_a_tree_without_arrays_matches_nothing():
    with pytest.raises(SelectionError, match="There are no arrays without names"):
        name_axes({}, {"w": ("a",)})


def test_patterns_must_be_a_mapping():
    with pytest.raises(RuleTypeError, match=r"Write for instance \{'layers\.\*\.weight': \('out'"):
        name_axes({"w": np.ones(2)}, [("w", ("a",))])


def test_all_unreadable_names_are_reported_at_once():
    with pytest.raises(RuleTypeError, match="these names cannot be read:") as caught:
        name_axes(
            {"w": np.ones(2)},
            {"a": "out", "b": ("x", "x"), "c": (0, "x"), "d": (["x"],), "w": ("ok",)},
        )
    message = caught.value.problems
    assert len(message) == 4
    assert "pattern 'a': names must be a tuple, not 'out'. Write ('out',)." in message
    twice = "('x', 'x') uses a logical axis twice. Write None for one without a name."
    assert f"pattern 'b': {twice}" in message
    assert "integers cannot name an axis" in message[2]
    assert "names must be hashable" in message[3]


def test_the_path_of_a_file_is_refused_with_how_to_load_it():
    with pytest.raises(
        RuleTypeError,
        match=r"name_axes takes a model or another tree of arrays, not a path, 'model\.pt'\. Load "
        r"what is there: torch\.load\('model\.pt', map_location='cpu', weights_only=True\), or "
        r"safetensors\.numpy\.load_file\('model\.pt'\)\.",
    ):
        name_axes("model.pt", NAMES)


class FoundNames(NamesByPath):
    """Names as inference finds them."""

    def __init__(self, names):
        self.names = names

    def __getitem__(self, path):
        return self.names[path]

    def __iter__(self):
        return iter(self.names)

    def __len__(self):
        return len(self.names)


def test_found_names_are_given_in_the_order_of_the_data():
    array = np.arange(120, dtype=np.float32).reshape(4, 5, 6)
    tree = {"layers.0": [array], "w[1]*": array, "scale": 2.0}
    fused = FusedAxes.of({"heads": 2, "projection": 3})
    found = FoundNames({"layers.0/0": ("a", None, fused), "w[1]*": (None, "b", None), "scale": ()})
    named = name_axes(tree, found)
    first, second = named["layers.0"][0], named["w[1]*"]
    assert dict(first.named_shape) == {"a": 4, fused: 6}
    assert first.positional_shape == (5,)
    assert [name.sizes for name in first.named_shape if name == fused] == [(2, 3)]
    np.testing.assert_array_equal(first.tag("rest").unwrap("a", "rest", fused), array)
    np.testing.assert_array_equal(second.tag("x", "y").unwrap("x", "b", "y"), array)
    assert named["scale"] == 2.0
    assert without_names(named)["layers.0"][0] is array


def test_arrays_of_which_no_name_was_found_stay_as_they_are_and_plans_report_them():
    tree = {"undecided": np.ones((2, 3)), "too": np.ones(4), "w": np.ones(4)}
    found = FoundNames({"undecided": (None, None), "too": None, "w": ("a",)})
    named = name_axes(tree, found)
    assert named["undecided"] is tree["undecided"]
    assert named["too"] is tree["too"]
    with pytest.raises(PlanError) as caught:
        make_plan(named, make_mesh({"data": 8}), {})
    assert [line.split(":")[0] for line in caught.value.problems] == ["too", "undecided"]


def test_found_names_leave_arrays_with_names_alone():
    array = pz.nx.ones({"a": 2})
    parameter = pz.Parameter(value=array, label="p")
    tree = {"w": array, "b": np.ones(2), "of_penzai": parameter}
    named = name_axes(tree, FoundNames({"w": ("z",), "b": ("a",), "p": ("z",)}))
    assert named["w"] is array
    assert named["of_penzai"] is parameter


def test_names_found_for_another_tree_are_refused():
    fused = FusedAxes.of({"heads": 2, "projection": 3})
    tree = {"new": np.ones(2), "rank": np.ones((2, 2)), "fused": np.ones(8), "step": 3}
    found = FoundNames({"rank": ("a",), "fused": (fused,), "old": ("a",)})
    with pytest.raises(SelectionError) as caught:
        name_axes(tree, found)
    again = "The names were found for another tree. Find those of this one: infer_names(...)."
    assert caught.value.problems == (
        "fused: it was found to have 'heads*projection' (2*3) to a dimension of 8, shape (8,). "
        f"Give the lengths that it is fused of. {again}",
        f"new: this array of shape (2,) is not among those that have names. {again}",
        "rank: it was found to have 1 logical axes ('a',) to an array of rank 2, shape (2, 2). "
        f"Give 2, None for a positional dimension. {again}",
        f"old: is not in this tree. {again}",
    )


def test_lengths_that_a_pattern_gives_wrongly_are_refused():
    fused = FusedAxes.of({"heads": 2, "projection": 3})
    with pytest.raises(SelectionError, match=r"gives 'heads\*projection' \(2\*3\) to a dimension"):
        name_axes({"a": np.ones(6), "b": np.ones(8)}, {"*": (fused,)})
