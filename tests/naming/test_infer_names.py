"""Logical axes get names by what a program does with them; what it does not decide has none."""

import ast

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from penzai import pz

import penzai_shard as pzs
from tests.naming import models
from tests.naming.models import MODELS, TOKENS, WRONG_NAMES, V
from tests.naming.oracle import compare_ties, find_wrong_names
from tests.refusals import problems_of

LOW = "#.low E low; #.high low other; #.odd other E; unused E; temperature -"


def logits(w, tokens):
    x = w["embed"][tokens]
    for own in models.blocks_of(w):
        x = models.mlp(own, x + models.attention(own, x))
        x = x + jnp.tanh(jnp.sin(x @ own.low) @ own.high) @ own.odd
    return x @ w["head"] * w["temperature"]


MODEL = models.make(f"embed V E; head E V; {models.QKVO}{models.MLP}; {LOW}", logits, taps=1)


def infer(function=logits, weights=MODEL.weights, *inputs, **options):
    return pzs.infer_names(function, weights, *(inputs or [TOKENS]), **options)


@pytest.fixture(scope="module")
def inferred():
    return infer()


# The corpus


@pytest.mark.parametrize("title", MODELS)
def test_infer_names_of_a_model_as_its_author(title):
    build, count = MODELS[title]
    model = build()
    found = infer(model.function, model.weights, *model.inputs, input_names=model.input_names)
    wrong, _ = compare_ties(found, model.names)
    assert wrong == []
    assert find_wrong_names(found, model.names) == WRONG_NAMES.get(title, set())
    assert sum(found[path] == axes for path, axes in model.names.items()) == count


@pytest.mark.parametrize(
    "find",
    [
        lambda tokens: jnp.cumsum(tokens != 0, 1),
        lambda tokens: jnp.argmax(tokens, 1, keepdims=True),
        lambda tokens: jnp.digitize(tokens, jnp.arange(4)),
    ],
    ids=["counted", "argmax", "digitize"],
)
def test_infer_names_leaves_a_table_open_whose_rows_are_computed_of_tokens(find):
    def add_rows(w, x, tokens):
        return x + w["table"][find(tokens)]

    model = models.trick("table rows E", add_rows, rows=V)
    found = infer(model.function, model.weights, *model.inputs)
    assert found["table"] == (None, "embedding")


# Results


def test_infer_names_has_a_reason_for_every_name(inferred):
    assert all(all(inferred.reasons(path)) for path in inferred)
    assert inferred.reasons("unused") == ("not used by the program",)
    assert inferred.reasons("temperature") == ("its length is 1",)


def test_undecided_is_what_an_override_can_name(inferred):
    low = [(f"{i}.{path}", dim) for i in range(2) for path, dim in (("high", 0), ("high", 1))]
    assert {*low, ("unused", 0)} <= {*inferred.undecided}
    assert ("temperature", 0) not in inferred.undecided


def test_overrides_once_pasted_decide_all(inferred):
    pasted = ast.literal_eval(inferred.overrides().removeprefix("overrides="))
    # Axes of equal blocks are one line and get one name.
    assert pasted == {"*.high": ("axis_1", "axis_2"), "unused": ("axis_3",)}
    decided = infer(overrides=pasted)
    assert decided.undecided == ()
    assert decided["1.low"] == ("embedding", "axis_1")
    assert decided.overrides() == "overrides={}"


def test_overrides_of_a_chain_of_squares_name_each_axis_by_itself():
    model = models.equinox_mlp()
    args = (model.function, model.weights, *model.inputs)
    found = infer(*args, input_names=model.input_names)
    pasted = ast.literal_eval(found.overrides().removeprefix("overrides="))
    decided = infer(*args, input_names=model.input_names, overrides=pasted)
    assert decided.undecided == ()
    assert compare_ties(decided, model.names) == ([], [])


def test_infer_names_calls_one_of_two_dimensions_that_are_one_axis():
    def function(w, x):
        return x @ w["a"] + x @ w["a"].T

    weights, names = {"a": jnp.ones((4, 4))}, [("batch", "features")]
    found = infer(function, weights, jnp.ones((2, 4)), input_names=names)
    assert found["a"] == ("features", None)
    assert found.undecided == ()


def test_infer_names_leaves_the_name_of_two_axes_of_an_array_to_the_commoner():
    found = infer(overrides={"*.high": ("embedding", None)})
    assert found["0.low"] == ("embedding", None)
    assert "'embedding'" in found.reasons("0.low")[1]
    assert ("0.low", 1) in found.undecided


def test_infer_names_reports_what_is_open_first_and_what_to_write(inferred):
    report = inferred.report()
    is_open = ["?" in row[1] for row in report.rows]
    assert is_open == sorted(is_open, reverse=True)
    assert is_open[0]
    assert not report
    text = str(inferred)
    assert inferred.overrides() in text
    assert "{0-1}.q" in text
    assert "heads*projection=4*4" in text
    assert inferred.to_data()["names"]["0.up"] == ("embedding", "neurons")


# Overrides


def test_infer_names_gives_the_name_of_an_override_to_the_whole_axis():
    overrides = {"*.up": ("width", "hidden"), "*.q": (None, "people*depth"), "unused": ("extra",)}
    found = infer(overrides=overrides)
    assert found["embed"] == ("vocabulary", "width")
    assert found["1.down"] == ("hidden", "width")
    assert found["unused"] == ("extra",)
    assert found.reasons("embed")[1] == "an override says so"
    # Also to the parts of a product.
    assert found["0.k"] == ("width", "people*depth")
    assert found["0.o"][0] == "people*projection"


# Arguments

# Of one axis, which is the width of both.
TWO_NAMES = {"embed": ("v", "a"), "head": ("b", None)}
LINEAR = eqx.nn.Linear(2, 2, key=jax.random.key(0))


@pytest.mark.parametrize(
    ("error", "options", "path", "fix"),
    [
        (pzs.SelectionError, {"overrides": {"haed": ("a", "b")}}, "haed", "'head'"),
        (pzs.SelectionError, {"overrides": {"embed": ("a",)}}, "embed", "'embed': ('a', None)"),
        (pzs.RuleTypeError, {"overrides": {"embed": "ab"}}, "embed", "('ab',)"),
        (pzs.RuleTypeError, {"overrides": TWO_NAMES}, "head", "one name"),
        (pzs.RuleTypeError, {"overrides": {"0.q": (None, "inner")}}, "0.q", "'axis_1*axis_2'"),
        (pzs.RuleTypeError, {"input_names": [("batch",)]}, "inputs[0]", ""),
        (pzs.RuleTypeError, {"input_names": [("batch", "seq")] * 2}, "input_names", ""),
        (pzs.RuleTypeError, {"input_names": "batch"}, "input_names", ""),
        (pzs.RuleTypeError, {"function": eqx.nn.Linear}, "function", ""),
        (pzs.RuleTypeError, {"function": LINEAR}, "function", ""),
        (pzs.RuleTypeError, {"function": {}}, "function", ""),
    ],
)
def test_infer_names_refuses_what_does_not_fit(error, options, path, fix):
    (problem,) = problems_of(error, infer, **options)
    assert problem.path == path
    assert fix in problem.fix


def test_infer_names_does_not_take_floats_for_tokens():
    weights, x = {"w": jnp.ones((4, 4))}, jnp.ones((2, 4))
    (problem,) = problems_of(pzs.RuleTypeError, infer, lambda w, x: x @ w["w"], weights, x)
    given = ast.literal_eval(problem.fix.partition("=")[2].removesuffix("."))
    found = infer(lambda w, x: x @ w["w"], weights, x, input_names=given)
    assert found["w"] == (None, None)


def test_infer_names_keeps_the_names_that_arrays_have():
    weights = {"up": pz.nx.wrap(jnp.ones((6, 8)), "features", "hidden"), "down": jnp.ones((8, 6))}

    def apply(w, x):
        return jax.nn.relu(x @ w["up"].unwrap("features", "hidden")) @ w["down"]

    found = infer(apply, weights, jnp.ones((3, 6)), input_names=[("batch", None)])
    assert found["up"] == ("features", "hidden")
    assert found["down"] == ("hidden", None)
    named = pzs.name_axes(weights, found)
    assert dict(named["up"].named_shape) == {"features": 6, "hidden": 8}
    assert dict(named["down"].named_shape) == {"hidden": 8}


# What follows


@pytest.mark.parametrize(
    "title", ["GPT-2", "Equinox transformer", "NNX transformer", "linen transformer, scanned"]
)
def test_infer_names_gives_what_name_axes_and_plans_take(title):
    model = MODELS[title][0]()
    found = infer(model.function, model.weights, *model.inputs, input_names=model.input_names)
    names = {name for axes in found.values() for name in axes}
    inner = {"neurons", "heads", "heads*projection"} & names
    rules = pzs.tensor_parallel(axes=sorted(inner))
    mesh = pzs.make_mesh({"data": 2, "model": 2}, abstract=True)
    plan = pzs.make_plan(pzs.name_axes(model.weights, found), mesh, rules)
    split = {leaf.path for leaf in plan.leaves if "model" in (leaf.spec or ())}
    assert split == {path for path in found if inner.intersection(found[path])}
    assert len(split) > 5


def test_infer_names_of_weights_of_torch():
    torch = pytest.importorskip("torch")
    weights = {"up": torch.ones(8, 6), "down": torch.ones(6, 8)}

    def function(w, x):
        return x + jax.nn.relu(x @ w["up"].T) @ w["down"].T

    found = infer(function, weights, np.ones((3, 6), "float32"), input_names=[("batch", None)])
    assert pzs.name_axes(weights, found)["up"].named_shape == dict(
        zip(found["up"], (8, 6), strict=True)
    )
