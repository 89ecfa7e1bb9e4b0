"""Whatever the names, sizes, mesh and rules: a plan is refused with reasons, or it is valid."""

import collections
import math
import warnings

import hypothesis
import hypothesis.strategies as st
import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from penzai import pz

from penzai_shard import (
    AxisRules,
    data_parallel,
    fully_sharded,
    make_mesh,
    make_plan,
    name_to_name_sharding,
    tensor_parallel,
)
from penzai_shard.errors import PlanError, ShardingWarning

NAMES = ("a", "b", "c", "data", "model")
SHAPES_OF_MESH = (
    {"data": 8},
    {"data": 4, "model": 2},
    {"data": 2, "model": 4},
    {"data": 8, "model": 1},
    {"data": 2, "model": 2, "x": 2},
)
LENGTHS = (1, 2, 3, 4, 6, 8, 8, 16, 16, 24, 0)

modest = hypothesis.settings(
    max_examples=80,
    deadline=None,
    derandomize=True,
    suppress_health_check=[hypothesis.HealthCheck.too_slow],
)


@st.composite
def arrays(draw):
    """A named array or view, its dimensions in any order, with its names by dimension."""
    given = draw(st.lists(st.sampled_from((*NAMES, None, None)), max_size=4))
    # A name occurs once in an array; a nameless dimension as often as it likes.
    names = [n for i, n in enumerate(given) if n is None or n not in given[:i]]
    sizes = [draw(st.sampled_from(LENGTHS)) for _ in names]
    data = np.arange(math.prod(sizes), dtype=np.float32).reshape(sizes)
    positional = [i for i, name in enumerate(names) if name is None]
    named = {name: i for i, name in enumerate(names) if name is not None}
    if positional == list(range(len(positional))) and draw(st.booleans()):
        array = pz.nx.NamedArray(
            collections.OrderedDict((name, sizes[i]) for name, i in named.items()), data
        )
    else:
        array = pz.nx.NamedArrayView(
            data_shape=tuple(sizes),
            data_axis_for_logical_axis=tuple(draw(st.permutations(positional))),
            data_axis_for_name=dict(draw(st.permutations(list(named.items())))),
            data_array=data,
        )
    array.check_valid()
    return array, tuple(names)


def mesh_axes_of(mesh_shape):
    one = st.sampled_from(list(mesh_shape))
    several = st.lists(one, min_size=1, max_size=3, unique=True).map(tuple)
    return st.none() | one | several


def pairs_over(mesh_shape):
    return st.lists(st.tuples(st.sampled_from(NAMES), mesh_axes_of(mesh_shape)), max_size=6)


def rules_over(mesh_shape):
    some_axis = st.sampled_from(list(mesh_shape))
    names = st.lists(st.sampled_from(NAMES), unique=True, max_size=4)
    written = pairs_over(mesh_shape).map(AxisRules)
    mapping = st.dictionaries(st.sampled_from(NAMES), mesh_axes_of(mesh_shape)).map(AxisRules)
    preset = st.one_of(
        st.just(AxisRules()),
        st.builds(data_parallel, some_axis, st.sampled_from(NAMES)),
        st.builds(fully_sharded, some_axis, st.sampled_from((1, 32, 256))),
        st.builds(tensor_parallel, some_axis, names),
    )
    kinds = st.one_of(written, mapping, preset)
    return kinds | st.builds(lambda one, other: one | other, kinds, kinds)


@st.composite
def cases(draw):
    mesh_shape = draw(st.sampled_from(SHAPES_OF_MESH))
    drawn = draw(st.lists(arrays(), min_size=1, max_size=3))
    tree = {f"array_{i}": array for i, (array, _) in enumerate(drawn)}
    names = {f"array_{i}": names for i, (_, names) in enumerate(drawn)}
    return mesh_shape, tree, names, draw(rules_over(mesh_shape))


def planned(tree, mesh, rules, **options):
    """The plan, or the problems why there is none."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ShardingWarning)
        try:
            return make_plan(tree, mesh, rules, **options), ()
        except PlanError as error:
            return None, error.problems


def assert_valid(plan, tree, names, mesh):
    shardings = plan.sharding_tree()
    placed = jax.device_put(tree, shardings)
    of_spec = {}
    for leaf in plan.leaves:
        array = placed[leaf.path].data_array
        assert leaf.names == names[leaf.path]
        assert leaf.shape == array.shape
        assert leaf.sharding is shardings[leaf.path].data_array
        assert array.sharding == leaf.sharding
        assert {shard.data.shape for shard in array.addressable_shards} == {leaf.shard_shape}
        assert {shard.data.nbytes for shard in array.addressable_shards} == {leaf.bytes_per_device}
        np.testing.assert_array_equal(array, tree[leaf.path].data_array)
        entries = tuple(leaf.spec)
        assert not entries or entries[-1] is not None
        assert () not in entries
        used = [axis for e in entries if e for axis in ((e,) if isinstance(e, str) else e)]
        assert len(set(used)) == len(used)
        assert set(used) <= set(mesh.axis_names)
        for name, entry in zip(leaf.names, entries, strict=False):
            assert name is not None or entry is None
        assert leaf.reason
        assert of_spec.setdefault(leaf.spec, leaf.sharding) is leaf.sharding
    assert plan.bytes_per_device == sum(leaf.bytes_per_device for leaf in plan.leaves)
    assert plan.replicated_bytes <= plan.bytes_per_device <= plan.total_bytes
    assert plan.total_bytes == sum(array.data_array.nbytes for array in tree.values())


@modest
@hypothesis.given(cases())
def test_a_plan_is_refused_with_reasons_or_valid(case):
    mesh_shape, tree, names, rules = case
    mesh = make_mesh(mesh_shape)
    plan, problems = planned(tree, mesh, rules)
    if plan is not None:
        assert_valid(plan, tree, names, mesh)
        return
    # Told of are exactly the arrays that have no layout when they are alone.
    assert problems
    told = [problem.split(": ")[0] for problem in problems]
    alone = [path for path in tree if planned({path: tree[path]}, mesh, rules)[0] is None]
    assert list(dict.fromkeys(told)) == alone
    for problem in problems:
        assert " to None." in problem or ", None) as the last" in problem


@modest
@hypothesis.given(cases())
def test_the_quick_sharding_tree_is_that_of_the_plan(case):
    mesh_shape, tree, _, rules = case
    mesh = make_mesh(mesh_shape)
    plan, problems = planned(tree, mesh, rules)
    if plan is None:
        with pytest.raises(PlanError, match="no valid layout") as caught:
            name_to_name_sharding(tree, mesh, rules)
        assert caught.value.problems == problems
        return
    quick = name_to_name_sharding(tree, mesh, rules)
    expected = plan.sharding_tree()
    assert jax.tree_util.tree_structure(quick) == jax.tree_util.tree_structure(expected)
    for one, other in zip(
        jax.tree_util.tree_leaves(quick), jax.tree_util.tree_leaves(expected), strict=True
    ):
        assert one is other


@modest
@hypothesis.given(cases())
def test_lengths_are_no_obstacle_when_they_may_be_replicated(case):
    mesh_shape, tree, names, rules = case
    mesh = make_mesh(mesh_shape)
    strict, _ = planned(tree, mesh, rules)
    relaxed, problems = planned(tree, mesh, rules, on_indivisible="replicate")
    assert not any("Pad it" in problem for problem in problems)
    if relaxed is not None:
        assert_valid(relaxed, tree, names, mesh)
        if strict is None:
            assert any("replicated: " in leaf.reason for leaf in relaxed.leaves)
    if strict is not None:
        assert [leaf.spec for leaf in strict.leaves] == [leaf.spec for leaf in relaxed.leaves]


def greedy_spec(pairs, names, sizes, mesh_shape):
    """What ordered pairs mean, said once more: None where some dimension gets no rule."""
    given, taken = {}, set()
    for name, axes in pairs:
        axes = () if axes is None else (axes,) if isinstance(axes, str) else axes
        if name not in names or name in given or taken.intersection(axes):
            continue
        if sizes[names.index(name)] % math.prod(mesh_shape[axis] for axis in axes) == 0:
            given[name] = axes
            taken.update(axes)
    if any(name in names and name not in given for name, _ in pairs):
        return None
    entries = [given.get(name, ()) if name is not None else () for name in names]
    entries = [None if not axes else axes[0] if len(axes) == 1 else axes for axes in entries]
    while entries and entries[-1] is None:
        entries.pop()
    return P(*entries)


@modest
@hypothesis.given(st.data())
def test_of_ordered_pairs_the_first_that_is_free_and_divides_wins(data):
    mesh_shape = data.draw(st.sampled_from(SHAPES_OF_MESH))
    array, names = data.draw(arrays())
    pairs = data.draw(pairs_over(mesh_shape))
    sizes = array.data_array.shape
    expected = greedy_spec(pairs, names, sizes, mesh_shape)
    if expected is None:
        with pytest.raises(PlanError, match="no valid layout"):
            AxisRules(pairs).spec(names, sizes, mesh_shape)
    else:
        assert AxisRules(pairs).spec(names, sizes, mesh_shape) == expected


@modest
@hypothesis.given(st.data())
def test_combining_is_associative_and_left_wins(data):
    mesh_shape = data.draw(st.sampled_from(SHAPES_OF_MESH))
    one, two, three = (data.draw(rules_over(mesh_shape)) for _ in range(3))
    assert (one | two) | three == one | (two | three)
    assert hash((one | two) | three) == hash(one | (two | three))
    of_one = [rule for rule in one.rules if getattr(rule, "logical_axis", None) is not None]
    for name in one.logical_axes:
        assert [r for r in (one | two).rules if getattr(r, "logical_axis", None) == name] == [
            r for r in of_one if r.logical_axis == name
        ]


@modest
@hypothesis.given(st.data())
def test_equal_rules_decide_alike(data):
    mesh_shape = data.draw(st.sampled_from(SHAPES_OF_MESH))
    _, names = array = data.draw(arrays())
    sizes = array[0].data_array.shape
    rules = data.draw(rules_over(mesh_shape))
    shuffled = AxisRules.from_rules(data.draw(st.permutations(rules.rules)))
    if shuffled == rules:
        one, other = (r.explain(names, sizes, mesh_shape) for r in (rules, shuffled))
        assert bool(one.problems) == bool(other.problems)
        if not one.problems:
            assert one.spec == other.spec
