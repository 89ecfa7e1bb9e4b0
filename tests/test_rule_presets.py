"""The presets, alone and combined."""

import json
import math

import hypothesis
import jax
import pytest
from hypothesis import strategies as st
from jax.sharding import PartitionSpec as P

from penzai_shard import (
    AxisRules,
    Layout,
    Recipe,
    constrain_blocks,
    data_parallel,
    fully_sharded,
    make_mesh,
    tensor_parallel,
)
from penzai_shard.errors import MeshError, PlanError, RuleTypeError
from penzai_shard.rule_presets import TRANSFORMER_MODEL_AXES

MESH = {"data": 4, "model": 2}


def test_data_parallel_splits_the_batch_only():
    rules = data_parallel()
    assert rules.spec(("batch", "seq", "embedding"), (8, 16, 32), MESH) == P("data")
    assert rules.spec(("embedding", "neurons"), (32, 64), MESH) == P()
    assert data_parallel("model", "examples") == AxisRules({"examples": "model"})


def test_data_parallel_takes_several_mesh_axes():
    rules = data_parallel(("data", "model"))
    assert rules.spec(("batch",), (8,), MESH) == P(("data", "model"))


def test_fully_sharded_splits_the_largest_dimension_that_divides():
    rules = fully_sharded(min_size=1)
    assert rules.spec(("a", "b"), (8, 16), MESH) == P(None, "data")
    assert rules.spec(("a", "b"), (8, 18), MESH) == P("data")
    assert rules.spec(("a", "b"), (6, 18), MESH) == P()


def test_fully_sharded_takes_the_first_of_equally_large_dimensions():
    assert fully_sharded(min_size=1).spec(("a", "b"), (8, 8), MESH) == P("data")


def test_fully_sharded_leaves_small_arrays_whole():
    assert fully_sharded().spec(("a",), (2**18 - 4,), MESH) == P()
    assert fully_sharded().spec(("a",), (2**18,), MESH) == P("data")
    explained = fully_sharded().explain(("a",), (8,), MESH)
    assert "262144 elements" in explained.reason


def test_a_reason_says_what_the_rule_for_large_arrays_left_beside_that_of_names():
    def reason(rules, sizes=(8, 8)):
        return rules.explain(("a", "heads"), sizes, MESH).reason

    rules = tensor_parallel() | fully_sharded(min_size=100)
    assert reason(rules) == "'heads' -> 'model'; under 100 elements, not split over 'data'"
    assert reason(rules, (16, 8)) == "'a' -> 'data' (largest free); 'heads' -> 'model'"
    both = tensor_parallel() | fully_sharded(("data", "model"), min_size=1)
    assert reason(both) == "'heads' -> 'model'; 'model' taken, not split over ('data', 'model')"
    one = tensor_parallel() | fully_sharded("model", min_size=1000)
    assert reason(one) == "'heads' -> 'model'"


def test_fully_sharded_never_splits_positional_dimensions():
    assert fully_sharded(min_size=1).spec((None, "a"), (64, 8), MESH) == P(None, "data")
    assert fully_sharded(min_size=1).spec((None,), (64,), MESH) == P()


def test_fully_sharded_over_several_mesh_axes():
    rules = fully_sharded(("data", "model"), min_size=1)
    assert rules.spec(("a", "b"), (12, 8), MESH) == P(None, ("data", "model"))


def test_tensor_parallel_splits_one_dimension_of_each_array():
    rules = tensor_parallel()
    assert rules.spec(("embedding", "neurons"), (8, 16), MESH) == P(None, "model")
    assert rules.spec(("head_groups", "query_heads", "projection"), (2, 4, 8), MESH) == P("model")
    assert rules.spec(("vocabulary", "embedding"), (64, 8), MESH) == P("model")
    assert rules.spec(("embedding",), (8,), MESH) == P()


def test_tensor_parallel_says_that_the_second_head_axis_steps_aside():
    explained = tensor_parallel().explain(("head_groups", "query_heads"), (2, 4), MESH)
    assert explained.dimensions[1].mesh_axes == ()
    assert "'model' is taken by logical axis 'head_groups'" in explained.reason


def test_tensor_parallel_prefers_its_axes_in_their_order():
    assert tensor_parallel(axes=("b", "a")).spec(("a", "b"), (8, 8), MESH) == P(None, "model")
    assert tensor_parallel(axes=("a", "b")).spec(("a", "b"), (8, 8), MESH) == P("model")


def test_tensor_parallel_falls_to_the_next_axis_where_the_first_does_not_divide():
    explained = tensor_parallel(axes=("a", "b")).explain(("a", "b"), (3, 8), MESH)
    assert explained.spec == P(None, "model")
    assert explained.dimensions[0].mesh_axes == ()
    with pytest.raises(PlanError, match=r"'a' \(3\) does not divide"):
        tensor_parallel(axes=("a", "b")).spec(("a",), (3,), MESH)


def test_orders_that_decide_otherwise_are_not_equal():
    assert tensor_parallel(axes=("a", "b")) != tensor_parallel(axes=("b", "a"))
    one, two = fully_sharded("data", 1), fully_sharded("model", 1)
    assert one | two != two | one


@pytest.mark.parametrize("tensor_first", [True, False])
def test_the_two_presets_combine_to_the_usual_two_dimensional_layout(tensor_first):
    full, tensor = fully_sharded(min_size=1), tensor_parallel()
    rules = tensor | full if tensor_first else full | tensor
    layouts = {
        ("embedding", "neurons"): P("data", "model"),
        ("neurons", "embedding"): P("model", "data"),
        ("vocabulary", "embedding"): P("model", "data"),
        ("embedding", "head_groups", "query_heads", "projection"): P("data", "model"),
        ("embedding",): P("data"),
    }
    sizes = {"embedding": 64, "neurons": 256, "vocabulary": 512, "projection": 8}
    for names, spec in layouts.items():
        lengths = [sizes.get(name, 2) for name in names]
        assert rules.spec(names, lengths, MESH) == spec, names


def test_a_name_kept_whole_is_not_free_for_the_largest_dimension():
    for rules in (
        AxisRules({"vocabulary": None}) | fully_sharded(min_size=1),
        fully_sharded(min_size=1) | {"vocabulary": None},
    ):
        assert rules.spec(("vocabulary", "embedding"), (512, 8), MESH) == P(None, "data")


def test_three_presets_serve_parameters_and_batch():
    rules = data_parallel() | fully_sharded(min_size=1) | tensor_parallel()
    assert rules.spec(("batch", "seq", "neurons"), (8, 16, 32), MESH) == P("data", None, "model")
    assert rules.spec(("embedding", "neurons"), (64, 64), MESH) == P("data", "model")


def test_presets_name_their_mesh_axis_in_errors():
    with pytest.raises(
        MeshError, match=r"largest dimension -> 'dta' .*no mesh axis 'dta'.*mean 'data'"
    ):
        fully_sharded("dta").check_mesh(MESH)


@pytest.mark.parametrize(
    "make",
    [
        lambda: data_parallel(3),
        lambda: fully_sharded(3),
        lambda: fully_sharded(("data", "data")),
        lambda: tensor_parallel(3),
        lambda: data_parallel("data", ["batch"]),
    ],
)
def test_presets_refuse_what_is_no_mesh_axis_or_name(make):
    with pytest.raises(RuleTypeError, match="rule"):
        make()


def test_a_lone_name_is_not_read_letter_by_letter():
    with pytest.raises(RuleTypeError, match=r"Write \('neurons',\)"):
        tensor_parallel(axes="neurons")


def test_the_default_axes_are_those_of_the_transformers():
    assert tensor_parallel().logical_axes == TRANSFORMER_MODEL_AXES


@pytest.mark.parametrize("min_size", ["1k", 1.5, -1, None, True, [1024]])
def test_a_size_that_is_not_a_number_of_elements_is_refused(min_size):
    with pytest.raises(RuleTypeError, match=r"fully_sharded: min_size is a number of elements"):
        fully_sharded(min_size=min_size)


@pytest.mark.parametrize("mesh_axis", [None, ()])
def test_sharding_fully_over_no_mesh_axis_is_refused(mesh_axis):
    with pytest.raises(RuleTypeError, match=r"fully_sharded: a mesh axis to split over is needed"):
        fully_sharded(mesh_axis)


def test_axes_that_are_not_a_sequence_are_refused():
    with pytest.raises(RuleTypeError, match=r"need a sequence of logical axes, not 3"):
        tensor_parallel(axes=3)


UNNAMED = fully_sharded(min_size=8, unnamed="largest")


def test_arrays_without_names_are_split_only_when_that_is_asked_for():
    assert UNNAMED.spec(None, (3, 8, 16), MESH) == P(None, None, "data")
    assert fully_sharded(min_size=8).spec(None, (3, 8, 16), MESH) == P()
    assert (AxisRules() | data_parallel()).spec(None, (8, 16), MESH) == P()


def test_of_an_array_without_names_the_largest_dimension_that_divides_is_split():
    assert UNNAMED.spec(None, (8, 18), MESH) == P("data")
    assert UNNAMED.spec(None, (16, 16), MESH) == P("data")
    assert UNNAMED.spec(None, (6, 18), MESH) == P()
    assert UNNAMED.spec(None, (7,), MESH) == UNNAMED.spec(None, (4,), MESH) == P()
    assert fully_sharded(min_size=0, unnamed="largest").spec(None, (0, 8), MESH) == P()


def test_the_reason_says_what_was_split_of_an_array_without_names_and_what_was_not():
    def reason(sizes):
        return UNNAMED.explain(None, sizes, MESH).reason

    assert reason((8, 16)) == "dimension 1 (16) -> 'data' (largest free)"
    assert "no name    " in str(UNNAMED.explain(None, (8, 16), MESH))
    named = tensor_parallel().explain(None, (8, 16), MESH)
    assert named.reason == "no rule is for arrays without names"
    assert reason((4,)) == "under 8 elements, not split over 'data'"
    assert reason((6, 18)) == "no free dimension divides over mesh axis 'data' (4)"


def test_two_rules_split_two_dimensions_of_an_array_without_names():
    rules = UNNAMED | fully_sharded("model", min_size=8, unnamed="largest")
    assert rules.spec(None, (8, 16), MESH) == P("model", "data")
    both = fully_sharded(("data", "model"), min_size=8, unnamed="largest")
    assert both.spec(None, (12, 8), MESH) == P(None, ("data", "model"))


def test_positional_dimensions_of_named_arrays_stay_whole_beside_the_rule_for_arrays_without():
    assert UNNAMED.spec((None, "a"), (64, 8), MESH) == P(None, "data")
    assert UNNAMED.spec((None, None), (64, 8), MESH) == P()


def test_rules_of_names_say_nothing_of_arrays_without():
    rules = UNNAMED | tensor_parallel()
    assert rules.spec(None, (8, 16), MESH) == P(None, "data")
    assert rules.spec(("a", "neurons"), (8, 16), MESH) == P("data", "model")
    assert rules.splits_unnamed
    assert not tensor_parallel().splits_unnamed


def test_the_rule_for_arrays_without_names_is_written_as_it_is_made():
    assert repr(UNNAMED) == "fully_sharded('data', min_size=8, unnamed='largest')"
    assert eval(repr(UNNAMED)) == UNNAMED != fully_sharded(min_size=8)
    assert str(UNNAMED.rules[0]) == (
        "largest dimension -> 'data' (from 8 elements, also of arrays without names)"
    )
    assert "of at least 8 elements, with names or without" in str(UNNAMED.notebook_table())
    recipe = constrain_blocks("**/block", make_mesh({"data": 4}, jax.devices()[:4]), UNNAMED)
    again = Recipe.from_json(recipe.to_json())
    assert again == recipe
    assert "unnamed='largest'" in repr(again)


def test_a_rule_in_json_that_says_something_else_of_arrays_without_names_is_refused():
    recipe = constrain_blocks("**/block", make_mesh({"data": 4}, jax.devices()[:4]), UNNAMED)
    text = recipe.to_json().replace('"splits_unnamed": true', '"splits_unnamed": "largest"')
    with pytest.raises(RuleTypeError, match="is not a rule"):
        Recipe.from_json(text)


def test_rules_in_json_of_before_are_for_arrays_with_names():
    rules = fully_sharded(min_size=8)
    recipe = constrain_blocks("**/block", make_mesh({"data": 4}, jax.devices()[:4]), rules)
    data = json.loads(recipe.to_json())
    (rule,) = _parts_with(data, "splits_unnamed")
    del rule["splits_unnamed"]
    assert Recipe.from_json(json.dumps(data)) == recipe


def _parts_with(data, key):
    if isinstance(data, list):
        return [found for part in data for found in _parts_with(part, key)]
    if not isinstance(data, dict):
        return []
    return [data] if key in data else _parts_with(list(data.values()), key)


@pytest.mark.parametrize("unnamed", ["largets", "first", True, 0, ["largest"]])
def test_a_mistaken_value_of_unnamed_is_refused_with_the_options(unnamed):
    with pytest.raises(
        RuleTypeError,
        match=r"fully_sharded: unnamed says .* unnamed='largest', .* or None, nothing",
    ):
        fully_sharded(unnamed=unnamed)


def test_a_value_of_another_option_is_refused_with_that_option():
    with pytest.raises(RuleTypeError, match=r"is asked for by on_unnamed='replicate'\."):
        Layout.fully_sharded(unnamed="replicate")


@hypothesis.given(
    sizes=st.lists(st.integers(0, 24), min_size=1, max_size=4),
    min_size=st.integers(0, 64),
    mesh_axes=st.sampled_from([("data",), ("model",), ("data", "model")]),
)
def test_of_an_array_without_names_at_most_one_dimension_is_split_and_never_a_smaller_one(
    sizes, min_size, mesh_axes
):
    parts = math.prod(MESH[name] for name in mesh_axes)
    spec = fully_sharded(mesh_axes, min_size, "largest").spec(None, sizes, MESH)
    fitting = [size for size in sizes if size % parts == 0]
    if not fitting or math.prod(sizes) < max(min_size, 1):
        assert spec == P()
        return
    position = sizes.index(max(fitting))
    entry = mesh_axes[0] if len(mesh_axes) == 1 else mesh_axes
    assert spec == P(*(None,) * position, entry)
