"""Rules: how they are read, combined and applied to one array, and what is said where they fail."""

import copy
import functools
import itertools
import json
import math
import pathlib
import pickle

import jax
import pytest
from flax import linen
from hypothesis import assume, given
from hypothesis import strategies as st
from jax.sharding import PartitionSpec as P
from penzai import pz
from penzai.models.transformer.variants import llamalike_common

from penzai_shard.errors import MeshError, PlanError, RuleTypeError
from penzai_shard.meshes import make_mesh
from penzai_shard.rules import (
    TRANSFORMER_AXES,
    AxisRules,
    Rule,
    data_parallel,
    fully_sharded,
    tensor_parallel,
)

MESH = {"data": 4, "model": 2}
PRESETS = {
    "mapping": dict,
    "pairs": lambda pairs: pairs,
    "identity": lambda: None,
    "data_parallel": data_parallel,
    "fully_sharded": fully_sharded,
    "tensor_parallel": lambda mesh, axes: tensor_parallel(mesh, axes or TRANSFORMER_AXES),
}


def tupled(value):
    return tuple(map(tupled, value)) if isinstance(value, list) else value


def problems_of(error, call):
    with pytest.raises(error) as caught:
        call()
    return caught.value.problems


# Deciding


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
    ("length", "mesh", "rule", "choice"),
    [
        (14336, {"model": 12}, "model", "model=8, 14 or 16"),
        (32000, {"model": 12}, "model", "model=10, 16 or 20"),
        (14, {"model": 4}, "model", "model=2 or 7"),
        (7, {"model": 2}, "model", "model=7"),
        (9, {"model": 5}, ["model"], "model=3 or 9"),
        (12, {"data": 4, "model": 2}, ("data", "model"), "data*model=6 or 12"),
    ],
)
def test_fix_of_an_indivisible_length_names_sizes_that_divide(length, mesh, rule, choice):
    rules = AxisRules({"mlp": rule})
    (problem,) = problems_of(PlanError, lambda: rules.spec(("mlp",), (length,), mesh))
    assert (problem.path, problem.kind) == ("", "indivisible")
    assert problem.fix == f"Map 'mlp' to None, or use a mesh with {choice}."
    for size in choice.partition("=")[2].replace(" or ", ", ").split(", "):
        assert AxisRules({"mlp": "m"}).spec(("mlp",), (length,), {"m": int(size)}) == P("m")


def test_fix_of_a_length_of_one_names_no_mesh():
    (problem,) = AxisRules({"mlp": "model"}).explain(("mlp",), (1,), MESH).problems
    assert problem.fix == "Map 'mlp' to None."


def test_two_dimensions_that_want_one_mesh_axis_are_a_problem_that_replicate_does_not_excuse():
    rules = AxisRules({"a": "data", "b": ("model", "data"), "c": "data"})
    for mode in ("error", "replicate"):
        found = rules.explain(("a", "b", "c"), (4, 8, 4), MESH, on_indivisible=mode)
        assert [problem.kind for problem in found.problems] == ["taken", "taken"]
        assert found.problems[0].fix == "Map 'b' to None or another mesh axis."


def test_problem_of_ordered_rules_names_each_that_was_tried():
    rules = AxisRules([("a", "data"), ("b", "data"), ("b", "model"), ("b", ("data", "model"))])
    (problem,) = rules.explain(("a", "b"), (4, 3), MESH).problems
    assert problem.kind == "indivisible"
    for text in ("'b' -> 'model'", "'model' (2)", "'data' is wanted by both 'a' and 'b'"):
        assert text in problem.what


@pytest.mark.parametrize(
    ("rules", "names", "sizes", "reason"),
    [
        (
            {"mlp": "model", "embed": "data"},
            ("layers", "mlp", "embed"),
            (3, 8, 8),
            "'mlp' -> 'model'; 'embed' -> 'data'",
        ),
        ({"mlp": None}, ("mlp",), (8,), "'mlp' -> None"),
        ({"mlp": "model"}, ("embed", None), (8, 8), "no rule names its logical axes"),
        (fully_sharded(min_size=9), ("a", "b"), (8, 4), "'a' -> 'data' (largest free)"),
        (fully_sharded(min_size=9), ("a",), (8,), "under 9 elements, not split over 'data'"),
        (fully_sharded(min_size=9), ("a",), (9,), "no free dimension divides over 'data' (4)"),
    ],
)
def test_reason_says_what_the_rules_did(rules, names, sizes, reason):
    assert AxisRules(rules).explain(names, sizes, MESH).reason == reason


def test_replicate_is_recorded_in_the_reason():
    rules = AxisRules([("heads", "data"), ("heads", "model"), ("mlp", "model")])
    found = rules.explain(("heads", "mlp"), (3, 2), MESH, on_indivisible="replicate")
    assert (found.spec, found.problems) == (P(None, "model"), ())
    assert found.reason.startswith("'heads' (3) replicated: ")
    assert found.reason.endswith("; 'mlp' -> 'model'")


# Reading and combining


def test_rules_are_read_from_all_forms():
    rules = AxisRules({"a": "data", "b": ("data", "model"), "c": None})
    assert rules == AxisRules([("a", "data"), ["b", ["data", "model"]], ("c", ())])
    assert rules == AxisRules(rules) == AxisRules(iter(rules.rules))
    assert rules.logical_axes == ("a", "b", "c")
    assert AxisRules({}) == AxisRules([]) != AxisRules(None) == AxisRules()


@pytest.mark.parametrize(
    ("given", "count"),
    [
        (3, 1),
        ("data", 1),
        (b"data", 1),
        ({("a", "data"), ("b", "model")}, 1),
        (data_parallel, 1),
        ([("a", 1), ("b", "data"), "ab", (["c"], "data"), ("d", ("x", "x")), ("e", "x", "y")], 5),
        ({None: "data", "a": {"data"}, "b": ("data", 1)}, 3),
    ],
)
def test_unreadable_rules_are_refused_at_once_with_a_fix_that_reads(given, count):
    problems = problems_of(RuleTypeError, lambda: AxisRules(given))
    assert len(problems) == count
    for problem in problems:
        code = problem.fix.removeprefix("Write ").removeprefix("for instance ").removesuffix(".")
        pasted = eval(code)
        assert AxisRules(pasted if isinstance(pasted, dict) else [pasted]).rules


@pytest.mark.parametrize(
    ("names", "sizes"), [(("a",), (4, 4)), (("a", "b", "a"), (4, 4, 4)), ("ab", (4,))]
)
def test_explain_refuses_names_that_do_not_fit_the_sizes(names, sizes):
    problems_of(RuleTypeError, lambda: AxisRules({}).explain(names, sizes, MESH))


def test_unknown_mesh_axes_are_all_reported_with_the_nearest():
    rules = AxisRules({"a": "modle", "b": ("data", "tensor")}) | fully_sharded("dat")
    problems = problems_of(MeshError, lambda: rules.spec(("c",), (4,), MESH))
    fixes = ["Write 'model'.", "Write one of ['data', 'model'], or None.", "Write 'data'."]
    assert [problem.fix for problem in problems] == fixes
    assert AxisRules({"a": "data"}).on(MESH) == (Rule("a", ("data",)),)


def test_left_rules_win_where_both_name_a_logical_axis():
    left, right = AxisRules({"a": "data", "b": None}), {"b": "model", "c": "model"}
    assert left | right == AxisRules({"a": "data", "b": None, "c": "model"})
    assert right | left == AxisRules({"b": "model", "c": "model", "a": "data"})
    assert [("d", "data")] | left == AxisRules([("d", "data"), ("a", "data"), ("b", None)])
    assert left | left == left | {} == {} | left == left
    with_identity = AxisRules({"data": None}) | None
    assert with_identity.spec(("data", "model", "x"), (3, 2, 2), MESH) == P(None, "model")
    assert (None | AxisRules({"data": "model"})).spec(("data",), (4,), MESH) == P("model")


def test_identity_takes_several_mesh_axes_from_a_tuple_of_names():
    assert AxisRules().spec(("x", ("model", "data")), (3, 8), MESH) == P(None, ("model", "data"))
    assert AxisRules().spec((("y", "z"), ("x", 1)), (8, 8), MESH) == P()


def test_identity_refuses_a_tuple_with_a_mesh_axis_that_is_missing():
    name = ("data", "absent")
    (problem,) = AxisRules().explain((name,), (8,), MESH).problems
    assert problem.kind == "unknown"
    rules = eval(problem.fix.removeprefix("Write rules=").removesuffix("."))
    assert rules.spec((name, "data"), (8, 8), MESH) == P(None, "data")


@given(all_rules)
def test_rules_survive_json_pickle_and_copy(rules):
    rules = data_parallel("seq", ("batch", 0)) | rules
    again = AxisRules.from_data(json.loads(json.dumps(rules.to_data())))
    assert again == rules == pickle.loads(pickle.dumps(rules)) == copy.deepcopy(rules)
    assert hash(again) == hash(rules)


def test_rules_are_values():
    given = {"a": "data"}
    rules = AxisRules(given)
    given["a"] = "model"
    assert rules.spec(("a",), (4,), make_mesh(MESH, abstract=True)) == P("data")
    with pytest.raises(AttributeError):
        rules.rules = ()
    assert str(rules | {"b": None} | fully_sharded()) == (
        "AxisRules('a' -> 'data'; 'b' -> None; largest dimension -> 'data')"
    )


# Presets


def test_data_parallel_splits_the_batch_only():
    assert data_parallel().spec(("batch", "seq"), (8, 16), MESH) == P("data")
    assert data_parallel(("data", "model"), "n").spec(("n", "b"), (8, 8), MESH) == P(tuple(MESH))
    batch, other = (data_parallel() | {"a": "data"}).rules
    assert batch.for_activations
    assert not other.for_activations


def test_fully_sharded_splits_the_largest_free_dimension_that_divides():
    rules = fully_sharded(min_size=16)
    assert rules.spec(("a", "b"), (8, 8), MESH) == P("data")
    assert rules.spec(("a", "b"), (8, 18), MESH) == P("data")
    assert rules.spec((None, "a"), (64, 8), MESH) == P(None, "data")
    assert rules.spec(("a",), (12,), MESH) == P()
    kept = {"vocabulary": None}
    for both in (rules | kept, kept | rules):
        assert both.spec(("vocabulary", "a"), (512, 8), MESH) == P(None, "data")


def test_fully_sharded_splits_arrays_without_names_when_asked():
    assert fully_sharded(min_size=8).spec(None, (3, 8), MESH) == P()
    rules = fully_sharded(min_size=8, unnamed="largest") | None
    assert rules.spec(None, (3, 8), MESH) == P(None, "data")


def test_tensor_parallel_splits_the_first_of_its_axes_that_divides():
    assert tensor_parallel(axes=("b", "a")).spec(("a", "b"), (8, 8), MESH) == P(None, "model")
    assert tensor_parallel(axes=("b", "a")).spec(("a", "b"), (8, 3), MESH) == P("model")
    assert tensor_parallel(axes="neurons").logical_axes == ("neurons",)
    (problem,) = tensor_parallel(axes=("a",)).explain(("a",), (3,), MESH).problems
    assert problem.kind == "indivisible"


@pytest.mark.parametrize(
    "call",
    [
        lambda: data_parallel(3),
        lambda: data_parallel("data", ["batch"]),
        lambda: fully_sharded(None),
        lambda: fully_sharded(min_size=-1),
        lambda: fully_sharded(unnamed="all"),
        lambda: tensor_parallel(("model", "model")),
    ],
)
def test_presets_refuse_what_is_no_axis_or_option(call):
    assert problems_of(RuleTypeError, call)[0].fix


@pytest.mark.parametrize(("kv_heads", "multiplier"), [(4, 1), (2, 4), (1, 4)])
def test_transformer_axes_split_every_matrix_of_penzais_transformers(kv_heads, multiplier):
    config = llamalike_common.LlamalikeTransformerConfig(
        num_kv_heads=kv_heads,
        query_head_multiplier=multiplier,
        embedding_dim=8,
        projection_dim=4,
        mlp_hidden_dim=16,
        num_decoder_blocks=1,
        vocab_size=32,
        mlp_variant="swiglu",
        tie_embedder_and_logits=False,
    )
    build = functools.partial(llamalike_common.build_llamalike_transformer, config)
    parameters = jax.eval_shape(
        lambda key: pz.unbind_params(build(key), freeze=True)[1], jax.random.key(0)
    )
    splits = {}
    for parameter in parameters:
        sizes = parameter.value.named_axes
        found = tensor_parallel().explain(tuple(sizes), tuple(sizes.values()), MESH)
        assert found.problems == ()
        splits[parameter.label] = len(sizes), len(found.spec)
    whole = {label.rpartition("/")[2] for label, (rank, n) in splits.items() if rank > 1 and not n}
    # One head of keys and values has no axis to split.
    assert whole == ({"key.weights", "value.weights"} if kv_heads == 1 else set())
    assert len(splits) == 12
