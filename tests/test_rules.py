"""Rules: how they are read, combined and applied to one array, and what is said where they fail."""

import copy
import functools
import itertools
import json
import math
import pathlib
import pickle
import re

import jax
import pytest
from flax import linen
from hypothesis import assume, given
from hypothesis import strategies as st
from jax.sharding import PartitionSpec as P
from penzai import pz

from penzai_shard.errors import MeshError, PlanError, RuleTypeError
from penzai_shard.rules import (
    TRANSFORMER_AXES,
    AxisRules,
    Rule,
    data_parallel,
    fully_sharded,
    tensor_parallel,
)
from tests import models
from tests.refusals import problems_of

MESH = {"data": 4, "model": 2}
PRESETS = {
    "mapping": dict,
    "pairs": lambda pairs: pairs,
    "identity": lambda: None,
    "data_parallel": data_parallel,
    "fully_sharded": fully_sharded,
    "tensor_parallel": lambda mesh, axes: tensor_parallel(mesh, axes or TRANSFORMER_AXES),
}


# Deciding


def tupled(value):
    return tuple(map(tupled, value)) if isinstance(value, list) else value


def stored_answer(parts, names, sizes, mesh, mode):
    made = (AxisRules(PRESETS[name](*map(tupled, arguments))) for name, *arguments in parts)
    try:
        rules = functools.reduce(lambda left, right: left | right, made)
        found = rules.explain(tupled(names), sizes, dict(mesh), on_indivisible=mode)
    except MeshError:
        return "MeshError"
    if found.problems:
        return " ".join(sorted(problem.kind for problem in found.problems))
    return [list(entry) if isinstance(entry, tuple) else entry for entry in found.spec]


def test_decide_answers_stored_cases():
    path = pathlib.Path(__file__).parent / "data" / "rules.json"
    cases = json.loads(path.read_text(encoding="utf-8"))
    assert len(cases) == 500
    assert [case for *case, answer in cases if stored_answer(*case) != answer] == []


NAMES = ["a", "b", "c", "d", "data", "model"]
mesh_axes = st.sampled_from([None, "data", "model", "seq", ("data", "model"), ("seq", "data")])
meshes = st.fixed_dictionaries({axis: st.integers(1, 8) for axis in ("data", "model", "seq")})
pair_lists = st.lists(st.tuples(st.sampled_from(NAMES), mesh_axes), max_size=8)
named_rules = st.one_of(
    pair_lists.map(AxisRules),
    pair_lists.map(lambda pairs: AxisRules(dict(pairs))),
    pair_lists.map(lambda pairs: AxisRules(pairs) | None),
    st.lists(st.sampled_from(NAMES), min_size=1, unique=True).map(
        lambda axes: tensor_parallel(("model", "seq"), axes)
    ),
)
all_rules = st.one_of(named_rules, named_rules.map(lambda rules: rules | fully_sharded(min_size=9)))


@st.composite
def arrays(draw):
    """The names and the sizes of an array; some of its dimensions are positional."""
    names = draw(st.lists(st.sampled_from(NAMES), max_size=4, unique=True))
    names = [name if draw(st.integers(0, 9)) else None for name in names]
    return names, [draw(st.integers(0, 64)) for _ in names]


@given(all_rules, arrays(), meshes, st.sampled_from(["error", "replicate"]))
def test_decided_layout_is_valid(rules, array, mesh, mode):
    names, sizes = array
    found = rules.explain(names, sizes, mesh, on_indivisible=mode)
    used = list(itertools.chain(*found.mesh_axes))
    assert len(set(used)) == len(used)
    for name, size, axes in zip(names, sizes, found.mesh_axes, strict=True):
        assert size % math.prod(mesh[axis] for axis in axes) == 0
        assert name is not None or not axes
    assert mode == "error" or all(problem.kind == "taken" for problem in found.problems)
    assert all(problem.path == "" and problem.fix for problem in found.problems)


@given(all_rules, arrays(), meshes)
def test_mapping_what_a_problem_names_to_none_mends_it(rules, array, mesh):
    names, sizes = array
    found = rules.explain(names, sizes, mesh)
    assume(found.problems)
    text = "".join(problem.fix for problem in found.problems)
    named = [name for name in names if name and f"Map {name!r} to None" in text]
    assert len(named) == len(found.problems)
    mended = AxisRules(dict.fromkeys(named)) | rules
    assert mended.explain(names, sizes, mesh).problems == ()


@given(pair_lists, arrays())
def test_ordered_pairs_answer_as_flax_does_where_both_succeed(pairs, array):
    names, _ = array
    # Flax knows no lengths.
    found = AxisRules(pairs).explain(names, [48] * len(names), {"data": 4, "model": 2, "seq": 3})
    assume(not found.problems)
    wanted = tuple(linen.logical_to_mesh_axes(names, pairs))
    assert found.spec == P(*wanted[: len(found.spec)])
    assert not any(wanted[len(found.spec) :])


@pytest.mark.parametrize(
    ("length", "size", "choices"),
    [(14336, 12, [8, 14, 16]), (32000, 12, [10, 16, 20]), (14, 4, [2, 7]), (7, 2, []), (1, 2, [])],
)
def test_fix_of_an_indivisible_length_names_sizes_that_divide(length, size, choices):
    rules = AxisRules({"mlp": "model"})
    (problem,) = problems_of(PlanError, lambda: rules.spec(("mlp",), (length,), {"model": size}))
    assert (problem.path, problem.kind) == ("", "indivisible")
    assert list(map(int, re.findall(r"\d+", problem.fix))) == choices
    for choice in choices:
        assert rules.spec(("mlp",), (length,), {"model": choice}) == P("model")


@pytest.mark.parametrize(
    ("rules", "names", "sizes", "reason"),
    [
        ({"b": "model", "c": "data"}, "abc", (3, 8, 8), "'b' -> 'model'; 'c' -> 'data'"),
        ({"b": "model"}, "a", (8,), "no rule names its logical axes"),
        ({"b": "model"}, "b", (3,), "'b' (3) replicated: does not divide over mesh axis 'model'"),
        (fully_sharded(min_size=9), "ab", (8, 4), "'a' -> 'data' (largest free)"),
        (fully_sharded(min_size=9), "a", (8,), "under 9 elements, not split over 'data'"),
    ],
)
def test_reason_says_what_the_rules_did(rules, names, sizes, reason):
    found = AxisRules(rules).explain([*names], sizes, MESH, on_indivisible="replicate")
    assert found.reason.startswith(reason)
    assert not found.problems


# Reading and combining


def test_rules_are_read_from_all_forms():
    rules = AxisRules({"a": "data", "b": ("data", "model"), "c": None})
    assert rules == AxisRules([("a", "data"), ["b", ["data", "model"]], ("c", ())])
    assert rules == AxisRules(rules) == AxisRules(iter(rules.rules))
    assert rules.logical_axes == ("a", "b", "c")
    assert AxisRules({}) == AxisRules([]) != AxisRules(None) == AxisRules()


def test_unreadable_rules_are_all_refused_at_once():
    given = [("a", 1), ("b", "data"), "ab", (["c"], "data"), ("d", ("x", "x")), ("e", "x", "y")]
    assert len(problems_of(RuleTypeError, lambda: AxisRules(given))) == 5


def test_unknown_mesh_axes_are_all_reported_with_the_nearest():
    rules = AxisRules({"a": "modle", "b": ("data", "tensor")}) | fully_sharded("dat")
    problems = problems_of(MeshError, lambda: rules.spec(("c",), (4,), MESH))
    fixes = ["Write 'model'.", "Write one of ['data', 'model'], or None.", "Write 'data'."]
    assert [problem.fix for problem in problems] == fixes


def test_left_rules_win_where_both_name_a_logical_axis():
    left, right = AxisRules({"a": "data", "b": None}), {"b": "model", "c": "model"}
    assert left | right == AxisRules({"a": "data", "b": None, "c": "model"})
    # Dictionaries and lists combine with rules, too.
    assert right | left == AxisRules({"b": "model", "c": "model", "a": "data"})
    assert [("d", "data")] | left == AxisRules([("d", "data"), ("a", "data"), ("b", None)])
    assert left | left == left | {} == {} | left == left
    with_identity = AxisRules({"data": None}) | None
    assert with_identity.spec(("data", "model", "x"), (3, 2, 2), MESH) == P(None, "model")


def test_identity_takes_several_mesh_axes_from_a_tuple_of_names():
    assert AxisRules().spec(("x", ("model", "data")), (3, 8), MESH) == P(None, ("model", "data"))
    assert AxisRules().spec((("y", "z"),), (8,), MESH) == P()
    (problem,) = AxisRules().explain((("data", "absent"),), (8,), MESH).problems
    assert problem.kind == "unknown"


@given(all_rules)
def test_rules_survive_json_pickle_and_copy(rules):
    rules = data_parallel("seq", ("batch", 0)) | rules
    again = AxisRules.from_data(json.loads(json.dumps(rules.to_data())))
    assert again == rules == pickle.loads(pickle.dumps(rules)) == copy.deepcopy(rules)
    assert hash(again) == hash(rules)


# Presets


def test_data_parallel_names_no_axis_of_parameters():
    batch, other = (data_parallel(("data", "model"), "n") | {"a": "data"}).rules
    assert batch == Rule("n", ("data", "model"), for_activations=True)
    assert not other.for_activations


@pytest.mark.parametrize(
    ("rules", "names", "sizes", "spec"),
    [
        # The largest free dimension that divides; the first of equal ones.
        (fully_sharded(min_size=16), ("a", "b"), (8, 8), P("data")),
        (fully_sharded(min_size=16), ("a", "b"), (8, 18), P("data")),
        (fully_sharded(min_size=16), (None, "a"), (64, 8), P(None, "data")),
        (fully_sharded(min_size=16) | {"a": None}, ("a", "b"), (64, 8), P(None, "data")),
        (fully_sharded(min_size=16), None, (8, 8), P()),
        (fully_sharded(min_size=16, unnamed="largest") | None, None, (3, 8), P(None, "data")),
        # The first axis of the preset that divides.
        (tensor_parallel(axes=("b", "a")), ("a", "b"), (8, 8), P(None, "model")),
        (tensor_parallel(axes=("b", "a")), ("a", "b"), (8, 3), P("model")),
    ],
)
def test_presets_split_one_dimension(rules, names, sizes, spec):
    assert rules.spec(names, sizes, MESH) == spec


@pytest.mark.parametrize(("kv_heads", "multiplier"), [(4, 1), (2, 4), (1, 4)])
def test_transformer_axes_split_every_matrix_of_penzais_transformers(kv_heads, multiplier):
    build = functools.partial(models.llama, kv_heads=kv_heads, multiplier=multiplier)
    parameters = jax.eval_shape(lambda: pz.unbind_params(build(), freeze=True)[1])
    whole = set()
    for parameter in parameters:
        axes = parameter.value.named_axes
        if len(axes) > 1 and not tensor_parallel().spec((*axes,), (*axes.values(),), MESH):
            whole.add(parameter.label.rpartition("/")[2])
    # One head of keys and values has no axis to split.
    assert whole == ({"key.weights", "value.weights"} if kv_heads == 1 else set())
