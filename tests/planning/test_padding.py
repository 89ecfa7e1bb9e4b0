"""Plans of lengths that do not divide, stored padded: which dimension, to what, what it costs."""

import json
import math

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import AbstractMesh, PartitionSpec
from penzai import pz

from penzai_shard import (
    AxisRules,
    PaddedArray,
    fully_sharded,
    make_plan,
    name_axes,
    name_to_name_sharding,
    tensor_parallel,
)
from penzai_shard.errors import PlanError
from penzai_shard.fused_axes import FusedAxes

MESH = AbstractMesh((4, 2), ("data", "model"))


def explained(rules, names, sizes):
    return AxisRules.of(rules).explain(names, sizes, MESH, on_indivisible="pad")


def planned(tree, rules, mesh=MESH):
    return make_plan(tree, mesh, rules, on_indivisible="pad")


@pytest.mark.parametrize(
    ("rules", "names", "sizes", "spec", "stored"),
    [
        ({"a": "data"}, ("a", "b"), (10, 3), ("data",), (12, 3)),
        ({"a": "data"}, ("a",), (1,), ("data",), (4,)),
        ({"a": "data"}, ("a",), (4,), ("data",), (4,)),
        ({"a": "data"}, ("a",), (0,), ("data",), (0,)),
        ({"a": ("data", "model")}, ("a",), (9,), (("data", "model"),), (16,)),
        ({"a": "data", "b": "model"}, ("a", "b"), (7, 5), ("data", "model"), (8, 6)),
        # The first rule that divides wins, and without one the first is padded.
        ([("a", "data"), ("a", "model")], ("a",), (6,), ("model",), (6,)),
        ([("a", "data"), ("a", "model")], ("a",), (7,), ("data",), (8,)),
        ([("a", "data"), ("a", None)], ("a",), (7,), (), (7,)),
        # What another dimension has is not free.
        ([("b", "data"), ("a", "data"), ("a", "model")], ("a", "b"), (7, 8), ("model", "data"),
         (8, 8)),
        ({}, ("a", "b"), (7, 8), (), (7, 8)),
        (None, ("data", "b"), (7, 3), ("data",), (8, 3)),
        # Positional dimensions are never padded.
        ({"a": "model"}, (None, "a"), (3, 5), (None, "model"), (3, 6)),
        # The largest free dimension that divides, else the largest free one.
        (fully_sharded(min_size=1), ("a", "b"), (9, 8), (None, "data"), (9, 8)),
        (fully_sharded(min_size=1), ("a", "b"), (9, 7), ("data",), (12, 7)),
        (fully_sharded(min_size=1), (None, "b"), (9, 7), (None, "data"), (9, 8)),
        (fully_sharded(min_size=100), ("a", "b"), (9, 7), (), (9, 7)),
        (tensor_parallel() | fully_sharded(min_size=1), ("neurons", "b"), (9, 7),
         ("model", "data"), (10, 8)),
        # A fused dimension as a whole, since that is how compilers split it.
        ({"heads": "data"}, (FusedAxes.of({"heads": 3, "width": 5}),), (15,), ("data",), (16,)),
    ],
)  # fmt: skip
def test_a_length_that_does_not_divide_is_padded_to_the_next(rules, names, sizes, spec, stored):
    found = explained(rules, names, sizes)
    assert not found.problems
    assert found.spec == PartitionSpec(*spec)
    assert found.stored_sizes == stored


def test_arrays_without_names_are_never_padded():
    rules = fully_sharded(min_size=1, unnamed="largest")
    found = explained(rules, None, (7, 9))
    assert (found.spec, found.stored_sizes) == (PartitionSpec(), (7, 9))


def test_a_mesh_axis_wanted_twice_is_still_an_error():
    found = explained({"a": "data", "b": "data"}, ("a", "b"), (7, 8))
    assert "mesh axis 'data' (4) is asked for twice" in found.problems[0]


def test_the_reason_says_from_what_to_what_over_what():
    assert explained({"vocabulary": "model"}, ("vocabulary",), (257,)).reason == (
        "'vocabulary' (257) padded to 258 over mesh axis 'model' (2), rule 'vocabulary' -> 'model'"
    )
    assert explained(fully_sharded(min_size=1), ("a",), (7,)).reason == (
        "'a' (7) padded to 8 over mesh axis 'data' (4) (largest free)"
    )


TREE = {
    "table": pz.nx.ones({"vocabulary": 257, "embedding": 8}),
    "heads": pz.nx.ones({"heads": 10, "embedding": 8}),
    "norm": pz.nx.ones({"embedding": 8}),
}
RULES = {"vocabulary": ("data", "model"), "heads": "data", "embedding": None}


def test_a_plan_says_what_is_stored_and_what_padding_costs():
    plan = planned(TREE, RULES)
    heads, norm, table = plan.leaves
    assert (table.shape, table.stored_shape, table.shard_shape) == ((257, 8), (264, 8), (33, 8))
    assert table.bytes_per_device == 33 * 8 * 4
    assert table.padding_bytes == 7 * 8 * 4
    assert heads.stored_shape == (12, 8)
    assert norm.padding is None
    assert not table.is_replicated
    assert plan.total_bytes == (257 + 10 + 1) * 8 * 4
    assert plan.padding_bytes == (7 + 2) * 8 * 4
    assert plan.bytes_per_device == (33 + 3 + 1) * 8 * 4
    text = str(plan)
    assert "vocabulary=257(264)/data+model" in text
    assert "padding of 2 arrays adds 288 B in all" in " ".join(text.split())
    data = json.loads(plan.to_json())
    assert data["padding_bytes"] == 288
    assert data["arrays"][2]["stored_shape"] == [264, 8]
    assert data["arrays"][2]["shape"] == [257, 8]
    assert "heads=10(12)/data" in str(plan.tree())
    assert "padding" not in str(planned({"norm": TREE["norm"]}, RULES))


def test_an_array_shorter_than_its_mesh_axis_is_not_counted_as_replicated():
    (leaf,) = planned([pz.nx.ones({"a": 1, "b": 3})], {"a": "data"}).leaves
    assert (leaf.stored_shape, leaf.shard_shape) == ((4, 3), (1, 3))
    assert not leaf.is_replicated


def test_trees_of_a_plan_have_padded_arrays_where_arrays_are_padded():
    plan = planned(TREE, RULES)
    for tree in (
        plan.sharding_tree(),
        name_to_name_sharding(TREE, MESH, RULES, on_indivisible="pad"),
    ):
        assert isinstance(tree["table"], PaddedArray)
        assert tree["table"].stored.spec == PartitionSpec(("data", "model"))
        assert type(tree["norm"]) is pz.nx.NamedArray
    structs = plan.restore_structs()
    assert structs["table"].stored.shape == (264, 8)
    assert structs["table"].named_shape == {"vocabulary": 257, "embedding": 8}
    assert jax.tree.structure(structs) == jax.tree.structure(plan.sharding_tree())


def test_what_is_stored_padded_is_planned_by_its_true_lengths():
    structs = planned(TREE, RULES).restore_structs()
    again = planned(structs, RULES)
    assert [leaf.stored_shape for leaf in again.leaves] == [(12, 8), (8,), (264, 8)]
    other = planned(structs, {"heads": "model"})
    assert [leaf.shape for leaf in other.leaves] == [(10, 8), (8,), (257, 8)]
    assert other.padding_bytes == 0
    assert type(other.sharding_tree()["table"]) is pz.nx.NamedArray
    with pytest.raises(PlanError, match=r"'vocabulary' \(257\) does not divide"):
        make_plan(structs, MESH, {"vocabulary": "model"})


def test_what_cannot_be_padded_is_refused_by_name():
    view = pz.nx.ones({"a": 7, "b": 3}).untag("b")
    with pytest.raises(
        PlanError,
        match=r"0: an array is stored padded only if its positional dimen"
        r"sions come first. Name all .* leave it whole: on_indivisible=\"replicate\"",
    ):
        planned([view], {"a": "data"})
    keys = pz.nx.wrap(jax.random.split(jax.random.key(0), 3), "a")
    with pytest.raises(PlanError, match="0: random keys are not stored padded"):
        planned([keys], {"a": "data"})


def test_the_error_names_padding_as_a_fix():
    with pytest.raises(PlanError, match='Or store it padded: on_indivisible="pad"'):
        make_plan(TREE, MESH, RULES)
    with pytest.raises(PlanError, match='Or store it padded: on_indivisible="pad"'):
        make_plan(TREE, MESH, [("heads", "data"), ("heads", ("data", "model"))])


def test_arrays_named_by_path_are_padded_too():
    weights = name_axes(
        {"w": np.ones((7, 3)), "b": np.ones(7)}, {"w": ("out", None), "b": ("out",)}
    )
    with pytest.raises(PlanError, match="w: an array is stored padded only if"):
        planned(weights, {"out": "data"})
    named = name_axes({"w": np.ones((7, 3))}, {"w": ("out", "in")})
    assert planned(named, {"out": "data"}).leaves[0].stored_shape == (8, 3)


@settings(max_examples=100, deadline=None)
@given(
    sizes=st.lists(st.integers(1, 40), min_size=1, max_size=3),
    mesh=st.lists(st.sampled_from([1, 2, 3, 4, 8]), min_size=2, max_size=2),
    largest=st.booleans(),
)
def test_the_stored_shape_is_the_least_that_divides(sizes, mesh, largest):
    names = ("a", "b", "c")[: len(sizes)]
    rules = fully_sharded(min_size=1) if largest else AxisRules({"a": "data", "c": "model"})
    mesh = AbstractMesh(tuple(mesh), ("data", "model"))
    (leaf,) = planned([pz.nx.ones(dict(zip(names, sizes, strict=True)))], rules, mesh).leaves
    per_dimension = [*leaf.spec, *(None,) * (len(sizes) - len(leaf.spec))]
    for true, stored, part, axes in zip(
        sizes, leaf.stored_shape, leaf.shard_shape, per_dimension, strict=True
    ):
        parts = 1 if axes is None else mesh.shape[axes]
        assert stored == math.ceil(true / parts) * parts
        assert part == stored // parts
    assert leaf.bytes_per_device == math.prod(leaf.shard_shape) * 4
