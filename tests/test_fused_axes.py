"""Dimensions that are the product of several logical axes, and what rules do with them."""

import copy
import itertools
import pickle
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given
from hypothesis import strategies as st
from penzai import pz

import penzai_shard as pzs
from penzai_shard.axis_rules import AxisRules
from penzai_shard.errors import PlanError, RuleTypeError
from penzai_shard.fused_axes import FusedAxes
from penzai_shard.rule_presets import fully_sharded, tensor_parallel

QKV = FusedAxes.of({"qkv": 3, "heads": 4, "projection": 2})
HEADS = FusedAxes.of({"heads": 4, "projection": 2})
MESH = {"data": 2, "model": 4}


def _named(name, size=24):
    return {"w": pz.nx.NamedArray.wrap(jnp.zeros((5, size))).tag("embedding", name)}


def _abstract_mesh():
    return jax.sharding.AbstractMesh(tuple(MESH.values()), tuple(MESH))


def _only_leaf(plan):
    (leaf,) = plan.leaves
    return leaf


def test_fused_axes_are_their_text_with_lengths():
    assert QKV == "qkv*heads*projection"
    assert hash(QKV) == hash("qkv*heads*projection")
    assert {QKV: 1}["qkv*heads*projection"] == 1
    assert QKV.names == ("qkv", "heads", "projection")
    assert QKV.sizes == (3, 4, 2)
    assert QKV.size == 24
    assert repr(QKV) == "'qkv*heads*projection'"


@pytest.mark.parametrize(
    "again",
    [copy.copy, copy.deepcopy, *(lambda x, p=p: pickle.loads(pickle.dumps(x, p)) for p in (2, 5))],
)
def test_lengths_survive_copies(again):
    made = again({"w": (QKV, "embedding")})["w"][0]
    assert type(made) is FusedAxes
    assert made == QKV
    assert made.sizes == QKV.sizes


def test_lengths_survive_flattening_and_compiled_functions():
    tree = pzs.name_axes({"w": np.zeros((5, 24))}, {"w": ("embedding", QKV)})
    doubled = jax.tree_util.tree_map(lambda x: 2 * x, tree)
    compiled = jax.jit(lambda t: t)(doubled)
    pickled = pickle.loads(pickle.dumps(compiled))
    for each in (tree, doubled, compiled, pickled):
        (fused,) = [name for name in each["w"].named_shape if name == QKV]
        assert fused.sizes == (3, 4, 2)


def test_lengths_are_immutable():
    with pytest.raises(AttributeError, match="'sizes' cannot be set"):
        QKV.sizes = (1, 2, 12)


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"heads": 4}, "it has fewer than two"),
        ({}, "it has fewer than two"),
        ({"heads": 4, "projection": 0}, "the length of 'projection' is a positive number, not 0"),
        ({"heads": 4, "projection": 2.0}, "the length of 'projection' is a positive number"),
        ({"heads": True, "projection": 2}, "the length of 'heads' is a positive number"),
        ({"heads*projection": 4, "qkv": 3}, "'heads*projection' is not the text of one"),
        ({"": 4, "qkv": 3}, "'' is not the text of one logical axis"),
        ({1: 4, "qkv": 3}, "the name 1 is not the text of one logical axis"),
    ],
)
def test_what_is_not_a_product_is_refused(sizes, message):
    with pytest.raises(RuleTypeError, match=re.escape(message)):
        FusedAxes.of(sizes)


def test_names_and_lengths_that_do_not_pair_are_refused():
    with pytest.raises(RuleTypeError, match="it has 2 names and 3 lengths"):
        FusedAxes("a*b", (1, 2, 3))
    with pytest.raises(RuleTypeError, match="each needs a name of its own"):
        FusedAxes("a*a", (1, 2))


# What rules do with them.


def test_a_rule_for_the_major_axis_splits_it():
    leaf = _only_leaf(pzs.make_plan(_named(HEADS, 8), _abstract_mesh(), {"heads": "model"}))
    assert leaf.shard_shape == (5, 2)
    assert leaf.reason == "'heads' -> 'model', the major part of 'heads*projection'"


def test_a_rule_for_another_axis_leaves_it_whole_and_says_so():
    plan = pzs.make_plan(_named(QKV), _abstract_mesh(), {"heads": "model"})
    leaf = _only_leaf(plan)
    assert leaf.is_replicated
    assert plan.unused_rules == ()
    assert leaf.reason == (
        "'qkv*heads*projection' stays whole: 'heads' is not the major part of "
        "'qkv*heads*projection' (3*4*2), rule 'heads' -> 'model'; to split it anyway, map "
        "'qkv*heads*projection' to 'model'"
    )
    anyway = pzs.make_plan(_named(QKV), _abstract_mesh(), {QKV: "model", "heads": "model"})
    assert _only_leaf(anyway).shard_shape == (5, 6)


def test_a_rule_for_the_whole_name_needs_no_lengths_and_comes_first():
    for name in (QKV, str(QKV)):
        for rules in ({str(QKV): "data", "qkv": "model"}, [("qkv", "model"), (str(QKV), "data")]):
            assert AxisRules(rules).spec((name,), (24,), MESH) == jax.P("data")
    assert AxisRules({"heads": "model", str(HEADS): None}).spec((HEADS,), (8,), MESH) == jax.P()
    earlier = AxisRules({"heads": "model", str(HEADS): "data"})
    assert earlier.spec((HEADS,), (8,), MESH) == jax.P("data")


def test_leading_axes_of_length_one_are_passed_over():
    multi_query = FusedAxes.of({"groups": 1, "heads": 4, "projection": 2})
    rules = AxisRules({"heads": "model"})
    assert rules.spec((multi_query,), (8,), MESH) == jax.P("model")


def test_a_major_axis_that_does_not_divide_is_an_error():
    fused = FusedAxes.of({"heads": 6, "projection": 2})
    with pytest.raises(PlanError) as raised:
        pzs.make_plan(_named(fused, 12), _abstract_mesh(), {"heads": "model"})
    assert (
        "w: logical axis 'heads' (6) of 'heads*projection' (12) does not divide over mesh axis "
        "'model' (4), asked by rule 'heads' -> 'model'. Pad it to 8, or map 'heads*projection' "
        "to None." in str(raised.value)
    )
    relaxed = pzs.make_plan(
        _named(fused, 12), _abstract_mesh(), {"heads": "model"}, on_indivisible="replicate"
    )
    assert _only_leaf(relaxed).reason == (
        "'heads' (6) of 'heads*projection' (12) replicated: does not divide over mesh axis "
        "'model' (4), rule 'heads' -> 'model'"
    )
    as_told = pzs.make_plan(
        _named(fused, 12), _abstract_mesh(), {"heads": "model", "heads*projection": None}
    )
    assert _only_leaf(as_told).is_replicated


def test_a_name_whose_lengths_are_lost_or_outlived_stays_whole():
    rules = AxisRules({"heads": "model"})
    lost = rules.explain((str(HEADS),), (8,), MESH)
    assert lost.spec == jax.P()
    assert not lost.problems
    assert "the lengths of the parts of 'heads*projection' (8) are not known" in lost.reason
    sliced = rules.explain((HEADS,), (4,), MESH)
    assert "'heads*projection' (4*2) is no longer whole in a dimension of 4" in sliced.reason


def test_equal_names_of_other_lengths_are_decided_apart():
    rules, sizes = {"heads": "model"}, (8,)
    other = FusedAxes.of({"heads": 2, "projection": 4})
    for names in itertools.permutations((HEADS, other, str(HEADS))):
        decided = {
            getattr(name, "sizes", None): AxisRules(rules).explain((name,), sizes, MESH)
            for name in names
        }
        assert decided[(4, 2)].spec == jax.P("model")
        assert decided[None].spec == jax.P()
        assert "'heads' (2) of" in decided[(2, 4)].problems[0]


def test_equal_names_of_other_lengths_are_placed_apart():
    first = FusedAxes.of({"heads": 4, "projection": 4})
    other = FusedAxes.of({"qkv": 1, "heads": 16})
    tree = {
        str(i): pz.nx.wrap(jnp.zeros(16)).tag(name)
        for i, name in enumerate((str(first), first, FusedAxes("heads*projection", (8, 2))))
    } | {"other": pz.nx.wrap(jnp.zeros(16)).tag(other)}
    rules = {"heads": ("data", "model")}
    with pytest.raises(PlanError, match=re.escape("'heads' (4) of 'heads*projection' (16)")):
        pzs.name_to_name_sharding(tree, _abstract_mesh(), rules)
    del tree["1"]
    specs = {
        path: sharding.data_array.spec
        for path, sharding in pzs.name_to_name_sharding(tree, _abstract_mesh(), rules).items()
    }
    assert specs == {"0": jax.P(), "2": jax.P(("data", "model")), "other": jax.P(("data", "model"))}


def test_rules_of_the_same_name_split_the_major_axis_alone():
    mesh = {"heads": 4, "projection": 2}
    explained = AxisRules(None).explain((HEADS,), (8,), mesh)
    assert explained.spec == jax.P("heads")
    assert AxisRules(None).explain((QKV,), (24,), mesh).spec == jax.P()
    assert "'heads' is not the major part" in AxisRules(None).explain((QKV,), (24,), mesh).reason


def test_ordered_rules_take_the_first_that_divides_the_axis():
    two = FusedAxes.of({"heads": 2, "projection": 8})
    rules = AxisRules([("heads", "model"), ("heads", "data")])
    assert rules.spec((two,), (16,), MESH) == jax.P("data")


def test_presets_split_fused_dimensions():
    tree = {"q": pz.nx.zeros({"embedding": 16, HEADS: 8}), "c": pz.nx.zeros({"embedding": 16})}
    rules = tensor_parallel(axes=("heads",)) | fully_sharded(min_size=1)
    plan = pzs.make_plan(tree, _abstract_mesh(), rules)
    assert {leaf.path: leaf.spec for leaf in plan.leaves} == {
        "q": jax.P("data", "model"),
        "c": jax.P("data"),
    }
    alone = AxisRules.of(fully_sharded(min_size=1)).spec((HEADS, "embedding"), (8, 4), MESH)
    assert alone == jax.P("data")
    weights = {"q": pz.nx.zeros({HEADS: 8, "embedding": 16}), "up": pz.nx.zeros({"neurons": 4})}
    plan = pzs.Layout.tensor_parallel().plan(weights, _abstract_mesh())
    assert [leaf.spec for leaf in plan.leaves] == [jax.P("model")] * 2


def test_a_rule_nearly_of_a_factor_is_asked_about():
    with pytest.warns(pzs.ShardingWarning, match="Did you mean 'heads'"):
        pzs.make_plan(_named(HEADS, 8), _abstract_mesh(), {"head": "model"})


@given(
    lengths=st.lists(st.integers(1, 6), min_size=2, max_size=4),
    asked=st.integers(0, 3),
    parts=st.integers(2, 6),
)
def test_parts_of_a_split_dimension_are_whole_parts_of_the_axis(lengths, asked, parts):
    """By the numbers: each part holds some of the axis's indices, each with all that it has."""
    names = [f"factor_{i}" for i in range(len(lengths))]
    asked %= len(lengths)
    fused = FusedAxes.of(dict(zip(names, lengths, strict=True)))
    explained = AxisRules({names[asked]: "model"}).explain(
        (fused,), (fused.size,), {"model": parts}, on_indivisible="replicate"
    )
    index = np.indices(lengths)[asked].ravel()
    held = None if fused.size % parts else [set(part) for part in np.split(index, parts)]
    is_right = held is not None and sum(map(len, held)) == lengths[asked]
    assert (explained.spec == jax.P("model")) == is_right


# Names that went through text.


def test_layout_files_name_fused_dimensions(tmp_path):
    layout = pzs.Layout(parameters={QKV: "model", "heads": "model"}, compute={})
    path = tmp_path / "rules.toml"
    path.write_text(layout.to_toml())
    read = pzs.Layout.from_toml(path)
    assert read == layout
    assert read.parameters.spec((QKV,), (24,), MESH) == jax.P("model")


def test_restored_arrays_have_the_lengths_of_their_model(tmp_path):
    mesh = pzs.make_mesh(MESH)
    tree = pzs.name_axes(
        {"w": np.arange(120, dtype="float32").reshape(5, 24)}, {"w": ("embedding", QKV)}
    )
    pzs.save_params(tmp_path / "saved", tree)
    restored = pzs.restore_params(tmp_path / "saved", tree, mesh=mesh, rules={"qkv": None})
    (fused,) = [name for name in restored["w"].named_shape if name == QKV]
    assert fused.sizes == QKV.sizes
    np.testing.assert_array_equal(restored["w"].data_array, tree["w"].data_array)


@pytest.mark.parametrize(("heads", "stored"), [(3, 8), (6, 12)])
def test_a_major_axis_that_does_not_divide_is_stored_as_compilers_split_it(heads, stored):
    fused = FusedAxes.of({"heads": heads, "projection": 2})
    mesh, rules = pzs.make_mesh(MESH), {"heads": "model"}
    values = np.arange(10 * heads, dtype=np.float32).reshape(5, 2 * heads)
    tree = {"w": pz.nx.wrap(values).tag("embedding", fused)}
    plan = pzs.make_plan(tree, mesh, rules, on_indivisible="pad")
    leaf = _only_leaf(plan)
    assert leaf.shape == (5, 2 * heads)
    assert leaf.shard_shape == (5, stored // 4)
    assert leaf.reason == (
        f"'heads' ({heads}) of 'heads*projection' ({2 * heads}) does not divide over mesh axis "
        f"'model' (4): equal parts of {stored // 4} cut through it, rule 'heads' -> 'model'"
    )
    model = pzs.place(tree, plan)
    (name,) = [name for name in model["w"].named_shape if name == fused]
    assert name.sizes == (heads, 2)
    np.testing.assert_array_equal(model["w"].unwrap("embedding", fused), values)
    state = pzs.TrainState.initial_state(model, optax.adam(1e-2), jax.random.key(0))
    declared = pzs.train_state_sharding(state, mesh, rules, on_indivisible="pad")
    shardings = jax.tree.map(lambda array: array.sharding, state)
    assert jax.tree.flatten(shardings) == jax.tree.flatten(declared)
