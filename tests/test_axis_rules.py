"""Rules: how they are read, combined, and applied to one array."""

import copy
import pickle
import re

import jax
import pytest
from jax.sharding import AbstractMesh, AxisType
from jax.sharding import PartitionSpec as P

from penzai_shard import AxisRules, data_parallel, fully_sharded, make_mesh, tensor_parallel
from penzai_shard.errors import MeshError, PlanError, RuleTypeError
from penzai_shard.rule_kinds import LargestDimensionRule, NameRule

MESH = {"data": 4, "model": 2}


def test_rules_read_a_mapping_pairs_rules_and_nothing():
    mapping = AxisRules({"a": "data", "b": ("data", "model"), "c": None})
    assert mapping == AxisRules([("a", "data"), ("b", ("data", "model")), ("c", None)])
    assert AxisRules(mapping) == mapping
    assert AxisRules.of(mapping) is mapping
    assert AxisRules.of(None) == AxisRules() == AxisRules(None)
    assert AxisRules({"b": ["data", "model"]}) == AxisRules({"b": ("data", "model")})
    assert AxisRules({"c": ()}) == AxisRules({"c": None})


def test_rules_without_any_leave_everything_whole():
    assert AxisRules({}).spec(("data", "b"), (8, 8), MESH) == P()


def test_nothing_maps_each_logical_axis_to_the_mesh_axis_of_its_name():
    assert AxisRules().spec(("model", "x", "data"), (2, 3, 4), MESH) == P("model", None, "data")


def test_specs_have_no_trailing_none():
    assert tuple(AxisRules({"a": "data"}).spec(("a", "b", "c"), (4, 4, 4), MESH)) == ("data",)
    assert tuple(AxisRules({"b": None}).spec(("a", "b"), (4, 4), MESH)) == ()


def test_one_mesh_axis_in_a_tuple_is_written_as_that_axis():
    assert tuple(AxisRules({"a": ("data",)}).spec(("a",), (4,), MESH)) == ("data",)


def test_positional_dimensions_stay_unsharded():
    rules = AxisRules({"a": "data"})
    assert rules.spec((None, "a"), (4, 4), MESH) == P(None, "data")
    assert rules.spec((None, None), (4, 4), MESH) == P()


def test_tuples_shard_one_dimension_over_several_mesh_axes():
    rules = AxisRules({"a": ("model", "data")})
    assert rules.spec(("a",), (16,), MESH) == P(("model", "data"))
    with pytest.raises(
        PlanError, match=r"'a' \(12\) does not divide over mesh axes \('model', 'data'\) \(8\)"
    ):
        rules.spec(("a",), (12,), MESH)


def test_logical_axes_may_be_any_hashable_name():
    rules = AxisRules({("layer", 1): "data", 7.5: "model"})
    assert rules.spec((7.5, ("layer", 1)), (2, 4), MESH) == P("model", "data")


def test_a_mesh_axis_of_size_one_always_divides():
    assert AxisRules({"a": "x"}).spec(("a",), (7,), {"x": 1}) == P("x")


def test_an_empty_dimension_divides():
    assert AxisRules({"a": "data"}).spec(("a",), (0,), MESH) == P("data")


def test_of_repeated_names_the_first_that_is_free_and_divides_wins():
    rules = AxisRules([("a", "data"), ("b", "data"), ("b", "model"), ("b", None)])
    assert rules.spec(("b",), (8,), MESH) == P("data")
    assert rules.spec(("a", "b"), (8, 8), MESH) == P("data", "model")
    assert rules.spec(("b",), (6,), MESH) == P("model")
    assert rules.spec(("b",), (7,), MESH) == P()


def test_repeated_names_that_all_fail_tell_of_each_rule():
    rules = AxisRules([("a", "data"), ("b", "data"), ("b", "model")])
    with pytest.raises(PlanError, match=r"'b' \(3\) fits none of its rules") as caught:
        rules.spec(("a", "b"), (4, 3), MESH)
    message = str(caught.value)
    assert "rule 'b' -> 'data': 'data' is taken by logical axis 'a'" in message
    assert "rule 'b' -> 'model': does not divide over mesh axis 'model' (2)" in message
    assert "Add ('b', None)" in message


def test_an_indivisible_length_has_the_promised_text():
    with pytest.raises(PlanError, match="no valid layout for") as caught:
        AxisRules({"neurons": "model"}).spec(("neurons",), (10,), {"model": 4})
    assert caught.value.problems == (
        "logical axis 'neurons' (10) does not divide over mesh axis 'model' (4), "
        "asked by rule 'neurons' -> 'model'. Pad it to 12, or map 'neurons' to None. "
        'Or store it padded: on_indivisible="pad".',
    )


def test_a_length_below_the_mesh_axis_is_padded_to_it():
    with pytest.raises(PlanError, match="Pad it to 4, or"):
        AxisRules({"a": "data"}).spec(("a",), (1,), MESH)


def test_one_mesh_axis_asked_for_twice_names_both_askers():
    with pytest.raises(PlanError, match="asked for twice") as caught:
        AxisRules({"a": "data", "b": ("model", "data")}).spec(("a", "b"), (4, 8), MESH)
    (problem,) = caught.value.problems
    assert problem == (
        "mesh axis 'data' (4) is asked for twice: by logical axis 'a' (4), rule 'a' -> 'data', "
        "and by logical axis 'b' (8), rule 'b' -> ('model', 'data'). "
        "Map one of them to another mesh axis, or map 'b' to None."
    )


def test_the_identity_does_not_drop_silently_what_another_rule_has_taken():
    for rules in (AxisRules({"x": "data"}) | None, None | AxisRules({"x": "data"})):
        with pytest.raises(PlanError, match=r"mesh axis 'data' .* asked for twice"):
            rules.spec(("x", "data"), (4, 4), MESH)


def test_the_identity_beside_other_rules_yields_to_a_name_that_they_rule():
    assert (AxisRules({"data": None}) | None).spec(("data", "model"), (3, 2), MESH) == P(
        None, "model"
    )
    assert (None | AxisRules({"data": "model"})).spec(("data",), (4,), MESH) == P("model")


def test_all_problems_of_an_array_are_reported_at_once():
    with pytest.raises(PlanError, match="no valid layout") as caught:
        AxisRules({"a": "data", "b": "model", "c": "model"}).spec(("a", "b", "c"), (3, 2, 2), MESH)
    assert len(caught.value.problems) == 2


def test_replication_on_request_is_recorded_in_the_reason():
    rules = AxisRules({"a": "data", "b": "model"})
    explained = rules.explain(("a", "b"), (3, 2), MESH, on_indivisible="replicate")
    assert explained.spec == P(None, "model")
    assert explained.problems == ()
    assert "'a' (3) replicated: does not divide over mesh axis 'data' (4)" in explained.reason
    assert rules.spec(("a", "b"), (3, 2), MESH, on_indivisible="replicate") == P(None, "model")


def test_replication_on_request_covers_names_with_several_rules():
    rules = AxisRules([("a", "data"), ("a", "model")])
    explained = rules.explain(("a",), (3,), MESH, on_indivisible="replicate")
    assert explained.spec == P()
    assert "replicated" in explained.reason


def test_replication_on_request_does_not_excuse_a_mesh_axis_asked_for_twice():
    with pytest.raises(PlanError, match="asked for twice"):
        AxisRules({"a": "data", "b": "data"}).spec(
            ("a", "b"), (4, 4), MESH, on_indivisible="replicate"
        )


def test_unknown_mesh_axes_are_all_reported_with_near_names():
    rules = AxisRules({"neurons": "modle", "heads": ("data", "tensor"), "ok": "data"})
    with pytest.raises(MeshError, match="the rules do not fit the mesh") as caught:
        rules.spec(("ok",), (4,), MESH)
    assert caught.value.problems == (
        "rule 'neurons' -> 'modle': the mesh (data=4, model=2) has no mesh axis 'modle'. "
        "Did you mean 'model'?",
        "rule 'heads' -> ('data', 'tensor'): the mesh (data=4, model=2) has no mesh axis "
        "'tensor'. Use one of ['data', 'model'], or None.",
    )


@pytest.mark.parametrize(
    ("rules", "message"),
    [
        (3, "rules must be AxisRules, a mapping, .* not int"),
        ("data", "rules must be AxisRules, a mapping, .* not str"),
        (b"data", "not bytes"),
        ({("a", "data"), ("b", "model")}, "not set"),
        ({"a": 1}, "rule 'a' -> 1: a mesh axis is a name, .* not int"),
        ({"a": ("data", 1)}, "rule 'a' -> .*is a name, a tuple of names or None"),
        ({None: "data"}, "the logical axis must be a hashable name"),
        ([(["a"], "data")], "the logical axis must be a hashable name"),
        (["ab"], r"'ab' is not a \(logical, mesh\) pair"),
        ([("a", "data", "model")], "is not a .* pair"),
        ([("a",)], "is not a .* pair"),
        ({"a": ("data", "data")}, "names a mesh axis twice. Write 'a': 'data'"),
    ],
)
def test_rules_of_a_wrong_form_are_refused(rules, message):
    with pytest.raises(RuleTypeError, match=message):
        AxisRules(rules)


def test_all_unreadable_rules_are_reported_at_once():
    with pytest.raises(RuleTypeError, match="cannot be read") as caught:
        AxisRules([("a", 1), ("b", "data"), "c", ("d", ("x", "x"))])
    assert len(caught.value.problems) == 3


def test_names_and_sizes_must_agree_in_number():
    with pytest.raises(RuleTypeError, match=r"2 logical axis names .* for 1 sizes"):
        AxisRules({}).spec(("a", "b"), (4,), MESH)


@pytest.mark.parametrize("rules", [AxisRules({"a": None}), AxisRules({"a": "data"}), AxisRules()])
def test_a_logical_axis_may_occur_only_once_in_an_array(rules):
    with pytest.raises(RuleTypeError, match=r"'data' twice|'a' twice"):
        rules.spec(("data", "a", "data", "a"), (4, 4, 4, 4), MESH)


def test_an_unknown_relaxation_is_refused():
    with pytest.raises(RuleTypeError, match="on_indivisible must be"):
        AxisRules({}).spec((), (), MESH, on_indivisible="drop")


def test_left_wins_where_both_name_a_logical_axis():
    left, right = AxisRules({"a": "data", "b": None}), AxisRules({"b": "model", "c": "model"})
    assert left | right == AxisRules({"a": "data", "b": None, "c": "model"})
    assert right | left == AxisRules({"b": "model", "c": "model", "a": "data"})


def test_anything_that_rules_are_read_from_can_be_combined():
    rules = AxisRules({"a": "data"})
    assert {"a": "model"} | rules == AxisRules({"a": "model"})
    assert [("b", "model")] | rules == AxisRules({"a": "data", "b": "model"})
    assert rules | [("b", "model")] == AxisRules({"a": "data", "b": "model"})
    assert (rules | None) == (None | rules)
    with pytest.raises(RuleTypeError, match="not int"):
        rules | 3


def test_combining_with_itself_or_nothing_changes_nothing():
    for rules in (AxisRules(), AxisRules({"a": "data"}), fully_sharded(), tensor_parallel()):
        assert rules | rules == rules
        assert rules | {} == rules
        assert {} | rules == rules


def test_combining_keeps_the_fallbacks_of_each_side():
    rules = AxisRules([("a", "data"), ("a", "model")]) | {"b": "data"}
    assert rules.rules == (
        NameRule("a", ("data",)),
        NameRule("a", ("model",)),
        NameRule("b", ("data",)),
    )


def test_rules_are_equal_whatever_the_order_of_a_mapping():
    one, other = AxisRules({"a": "data", "b": "model"}), AxisRules({"b": "model", "a": "data"})
    assert one == other
    assert hash(one) == hash(other)
    assert len({one, other}) == 1


def test_the_order_of_fallbacks_counts():
    assert AxisRules([("a", "data"), ("a", "model")]) != AxisRules([("a", "model"), ("a", "data")])


def test_rules_differ_from_what_they_are_read_from():
    assert AxisRules({"a": "data"}) != {"a": "data"}


def test_rules_are_immutable():
    rules = AxisRules({"a": "data"})
    with pytest.raises(AttributeError, match="immutable"):
        rules.rules = ()
    with pytest.raises(AttributeError, match="immutable"):
        rules.new = 1
    with pytest.raises(AttributeError, match="immutable"):
        del rules.rules


def test_rules_do_not_follow_changes_of_what_they_were_read_from():
    given = {"a": "data"}
    rules = AxisRules(given)
    given["a"] = "model"
    assert rules.spec(("a",), (4,), MESH) == P("data")


@pytest.mark.parametrize(
    "rules",
    [
        AxisRules(),
        AxisRules({}),
        AxisRules({"a": "data", "b": ("data", "model"), "c": None}),
        AxisRules([("a", "data"), ("a", None)]),
        fully_sharded() | tensor_parallel(),
    ],
)
def test_rules_survive_pickling_and_copying(rules):
    assert pickle.loads(pickle.dumps(rules)) == rules
    assert copy.deepcopy(rules) == rules
    assert copy.copy(rules) == rules
    assert hash(pickle.loads(pickle.dumps(rules))) == hash(rules)


@pytest.mark.parametrize(
    "rules",
    [
        AxisRules(),
        AxisRules({}),
        AxisRules({"a": "data", "b": ("data", "model"), "c": None}),
        AxisRules([("a", "data"), ("a", None)]),
    ],
)
def test_the_repr_of_rules_makes_them_again(rules):
    assert eval(repr(rules)) == rules


def test_the_repr_of_rules_says_that_a_preset_means_activations():
    rules = data_parallel(batch_axis="examples") | {"neurons": "model"}
    again = eval(repr(rules))
    assert again == rules
    assert [rule.is_for_activations for rule in again.rules] == [True, False]
    assert repr(data_parallel()) == "AxisRules({'batch': 'data'})"


def test_rules_serve_as_a_static_argument_of_jit():
    traced = []

    def double(x, rules):
        traced.append(rules)
        return 2 * x

    jitted = jax.jit(double, static_argnums=1)
    jitted(1.0, AxisRules({"a": "data", "b": None}))
    jitted(1.0, AxisRules({"b": None, "a": "data"}))
    assert len(traced) == 1


@pytest.mark.parametrize(
    "mesh",
    [
        make_mesh({"data": 4, "model": 2}),
        AbstractMesh((4, 2), ("data", "model")),
        AbstractMesh((4, 2), ("data", "model"), axis_types=(AxisType.Explicit,) * 2),
        MESH,
    ],
)
def test_any_kind_of_mesh_gives_the_same_spec(mesh):
    assert AxisRules({"b": "model"}).spec(("a", "b"), (3, 4), mesh) == P(None, "model")


def test_the_explanation_names_a_rule_for_every_decision():
    rules = AxisRules({"a": "data", "c": None}) | fully_sharded("model", min_size=1)
    explained = rules.explain((None, "a", "b", "c"), (2, 4, 6, 8), MESH)
    assert explained.spec == P(None, "data", "model")
    positional, a, b, c = explained.dimensions
    assert positional.rule is None
    assert positional.reason == "positional, stays unsharded"
    assert a.rule == NameRule("a", ("data",))
    assert a.mesh_axes == ("data",)
    assert b.rule == LargestDimensionRule(("model",), 1)
    assert b.mesh_axes == ("model",)
    assert c.rule == NameRule("c", ())
    assert c.mesh_axes == ()
    text = str(explained)
    assert re.search(f"'b' +6 +model +{re.escape(b.reason)}", text)
    assert explained._repr_html_().count("<tr>") == 5
    assert "largest" in b.reason


def test_the_explanation_tells_problems_instead_of_raising():
    explained = AxisRules({"a": "data"}).explain(("a",), (3,), MESH)
    assert len(explained.problems) == 1
    assert "problem: logical axis 'a' (3)" in str(explained)
