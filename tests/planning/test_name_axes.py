"""Names are given to arrays by patterns of their paths, and taken off again."""

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
from tests.refusals import problem_paths

MESH = pzs.make_mesh({"data": 4, "model": 2})


def arrays(**shapes):
    return {name: np.zeros(shape, "float32") for name, shape in shapes.items()}


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
    again = pzs.without_names(named)
    assert eqx.tree_equal(again, model)
    assert (again.mlp(x) == model.mlp(x)).all()


def test_name_axes_of_an_nnx_module_writes_metadata():
    model, x = nnx_block(), jnp.ones((2, 8))
    named = pzs.name_axes(model, {"first/bias": ("mlp",), "norm/*": ("embed",)})
    assert type(named.norm.mean) is type(model.norm.mean)
    # The kernel had names; arrays of modules that share them are shared again.
    assert named.tied is named.first
    rules = {"embed": "data", "mlp": "model"}
    specs = {leaf.path: leaf.spec for leaf in pzs.make_plan(named, MESH, rules).leaves}
    assert specs["first/kernel"] == P("data", "model")
    assert (specs["first/bias"], specs["norm/mean"]) == (P("model"), P("data"))
    assert (named(x) == model(x)).all()


def test_name_axes_of_a_variable_of_penzai_keeps_it_one():
    parameter = pz.Parameter(value=jnp.ones((4, 2)), label="w")
    named = pzs.name_axes([parameter, parameter], {"w": ("a", None)})
    assert named[0] is named[1]
    assert type(named[0]) is pz.Parameter


def test_name_axes_leaves_named_arrays_as_they_are():
    kept = pz.nx.ones({"embed": 8})
    named = pzs.name_axes({**arrays(w=(8, 4)), "kept": kept}, {"*": None})
    assert named["kept"].named_axes == kept.named_axes
    assert named["kept"].data_array is kept.data_array
    assert dict(named["w"].named_shape) == {}


# Problems


def test_name_axes_finds_all_problems():
    tree = {"layers": [arrays(weight=(4, 3), bias=(4,)), arrays(weight=(4, 4), bias=(4,))]}
    tree |= arrays(embedding=(5, 4), head=(4, 5), norm=(4,))
    patterns = {"layers.*.weight": ("out", "in"), "layers.*.bias": ("out", "in")}
    patterns |= {"embeding": ("vocab", "embed"), "head": ("embed", "vocab"), "he*": ("embed", None)}
    # A wrong number of names, a pattern one letter off, one too many, no pattern.
    paths = ["layers/0/bias", "layers/1/bias", "embedding", "embeding", "head", "norm"]
    found = problem_paths(pzs.SelectionError, pzs.name_axes, tree, patterns)
    assert sorted(found) == sorted(paths)
    # It is why an array fits no pattern.
    assert found[0] == "embeding"


def test_name_axes_warns_of_arrays_that_share_their_memory():
    tree = arrays(embedding=(8, 4), other=(8, 4))
    tree["head"] = tree["embedding"].view()
    with pytest.warns(pzs.ShardingWarning, match="'embedding' and 'head'") as caught:
        pzs.name_axes(tree, {"*": ("vocab", "embed")})
    assert [warning.filename for warning in caught] == [__file__]
