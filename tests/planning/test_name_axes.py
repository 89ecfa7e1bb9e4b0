"""Names are given to arrays by patterns of their paths, and taken off again."""

import ast
import re

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import PartitionSpec as P
from penzai import pz

import penzai_shard as pzs
from tests.models import equinox, nnx_block

MESH = pzs.make_mesh({"data": 4, "model": 2})
NNX_PATTERNS = {"first/bias": ("mlp",), "norm/*": ("embed",)}


def arrays(**shapes):
    return {name: np.zeros(shape, "float32") for name, shape in shapes.items()}


def problems_of(call, error=pzs.SelectionError):
    with pytest.raises(error) as caught:
        call()
    return {problem.path: problem.fix for problem in caught.value.problems}


def pasted(fix):
    """The entry of the patterns that a fix says to write."""
    return ast.literal_eval("{" + re.search(r"'.*\)", fix)[0] + "}")


# Giving and taking


@st.composite
def named_trees(draw):
    """A tree, and a name or None for each dimension of each of its arrays, by path."""
    tree, patterns = {"rate": 0.5, "act": jax.nn.relu, "list": []}, {}
    for i in range(draw(st.integers(1, 4))):
        names = draw(st.lists(st.sampled_from([None, "a", "b", "c"]), max_size=4))
        names = [name if name not in names[:j] else None for j, name in enumerate(names)]
        tree["list"].append(np.zeros([2 + j for j in range(len(names))], "float32"))
        patterns[f"list/{i}"] = tuple(names)
    return tree, patterns


@given(named_trees())
def test_without_names_is_the_inverse_of_name_axes(drawn):
    tree, patterns = drawn
    named = pzs.name_axes(tree, patterns)
    found = pzs.make_plan(named, MESH, {}).leaves
    assert {leaf.path: leaf.names for leaf in found} == {**patterns, "rate": None}
    again = pzs.without_names(named)
    assert jax.tree.structure(again) == jax.tree.structure(tree)
    assert all(a is b for a, b in zip(jax.tree.leaves(again), jax.tree.leaves(tree), strict=True))


def test_name_axes_of_an_equinox_module():
    model, x = equinox(), jnp.ones(8)
    named = pzs.name_axes(model, {"**/weight": ("out", "in"), "**/bias": ("out",)})
    assert dict(named.mlp.layers[0].weight.named_shape) == {"out": 16, "in": 8}
    assert pzs.make_plan(named, MESH, {"out": "data"}).leaves[0].spec == P("data")
    again = pzs.without_names(named)
    assert eqx.tree_equal(again, model)
    assert (again.mlp(x) == model.mlp(x)).all()


def test_name_axes_of_an_nnx_module_writes_metadata():
    model, x = nnx_block(), jnp.ones((2, 8))
    named = pzs.name_axes(model, NNX_PATTERNS)
    assert type(named) is type(model)
    assert type(named.norm.mean) is type(model.norm.mean)
    # The kernel had names; arrays of modules that share them are shared again.
    assert named.tied is named.first
    rules = {"embed": "data", "mlp": "model"}
    specs = {leaf.path: leaf.spec for leaf in pzs.make_plan(named, MESH, rules).leaves}
    assert specs["first/kernel"] == P("data", "model")
    assert (specs["first/bias"], specs["norm/mean"]) == (P("model"), P("data"))
    assert (named(x) == model(x)).all()
    assert pzs.without_names({"model": named, "w": 1})["model"] is named


def test_name_axes_of_a_variable_of_penzai_keeps_it_one():
    parameter = pz.Parameter(value=jnp.ones((4, 2)), label="w")
    named = pzs.name_axes([parameter, parameter], {"w": ("a", None)})
    assert named[0] is named[1]
    assert type(named[0]) is pz.Parameter
    assert type(named[0].value) is pz.nx.NamedArrayView


@pytest.mark.parametrize(
    ("spec", "shape"),
    [
        (P("data", "model"), (8, 4)),
        (P(("data", "model"), None), (8, 4)),
        (P("data"), (8, 4)),
        (P(None, "model"), (3, 4)),
        (P(None, ("model", "data"), None), (3, 8, 5)),
        (P(), (3,)),
    ],
)
def test_name_axes_with_a_spec_plans_that_spec(spec, shape):
    named = pzs.name_axes(arrays(w=shape), {"w": spec})
    (found,) = jax.tree.leaves(pzs.name_to_name_sharding(named, MESH))
    assert found.is_equivalent_to(jax.sharding.NamedSharding(MESH, spec), len(shape))


def test_name_axes_leaves_names_numbers_and_unnamed_arrays():
    kept = pz.nx.ones({"embed": 8})
    tree = {**arrays(w=(8, 4), scale=()), "kept": kept, "rate": 0.5, "act": jax.nn.relu}
    named = pzs.name_axes(tree, {"*": None})
    assert all(named[key] is tree[key] for key in ("rate", "act"))
    assert dict(named["kept"].named_shape) == {"embed": 8}
    assert named["kept"].data_array is kept.data_array
    assert dict(named["w"].named_shape) == {}
    assert pzs.make_plan(named, MESH, {}).bytes_per_device == 4 * (8 * 4 + 1 + 8 + 1)


# Problems


def test_name_axes_finds_all_problems_and_each_fix_works():
    tree = {"layers": [arrays(weight=(4, 3), bias=(4,)), arrays(weight=(4, 4), bias=(4,))]}
    tree |= arrays(embedding=(5, 4), head=(4, 5), norm=(4,))
    patterns = {
        "layers.*.weight": ("out", "in"),
        "layers.*.bias": ("out", "in"),
        "embeding": ("vocab", "embed"),
        "head": ("embed", "vocab"),
        "he*": ("embed", None),
    }
    fixes = problems_of(lambda: pzs.name_axes(tree, patterns))
    biases = {"layers/0/bias", "layers/1/bias"}
    assert fixes.keys() == {*biases, "embedding", "embeding", "head", "norm"}
    # A pattern one letter off, one too many, a wrong number of names, no pattern.
    near = ast.literal_eval(re.search(r"'.*'", fixes["embeding"])[0])
    patterns[near] = patterns.pop("embeding")
    del patterns[ast.literal_eval(re.search(r"out ('.*?'),", fixes["head"])[1])]
    del patterns["layers.*.bias"]
    for path in (*biases, "norm"):
        patterns |= pasted(fixes[path])
    named = pzs.name_axes(tree, patterns)
    assert dict(named["embedding"].named_shape) == {"vocab": 5, "embed": 4}
    assert dict(named["layers"][1]["bias"].named_shape) == {"out": 4}


def test_name_axes_refuses_what_are_no_names():
    patterns = {"a": "out", "b": ("x", "x"), "c": (1,), "d": P(P.UNCONSTRAINED), 5: ("x",)}
    tree = arrays(a=(2,), b=(2, 2), c=(2,), d=(2,))
    fixes = problems_of(lambda: pzs.name_axes(tree, patterns), pzs.RuleTypeError)
    assert fixes.keys() == {"a", "b", "c", "d", "5"}
    assert fixes["a"] == "Write ('out',)."
    assert problems_of(lambda: pzs.name_axes(tree, [("a", ("x",))]), pzs.RuleTypeError).keys() == {
        ""
    }


def test_name_axes_warns_of_arrays_that_share_their_memory():
    tree = arrays(embedding=(8, 4), other=(8, 4))
    tree["head"] = tree["embedding"].view()
    with pytest.warns(pzs.ShardingWarning, match="'embedding' and 'head'") as caught:
        pzs.name_axes(tree, {"*": ("vocab", "embed")})
    assert [warning.filename for warning in caught] == [__file__]
