"""Whatever the names, sizes, mesh and rules: a plan is what the documents say, or is refused.

What they say is said here once more, in plain Python that shares no code with the library: rules
are written as terms, and ``wanted_layout`` reads terms.
"""

import collections
import functools
import math
import operator
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
    place,
    tensor_parallel,
)
from penzai_shard.errors import PlanError, ShardingWarning

NAMES = ("a", "b", "c", "data", "model")
# Two of them often, so that rules and arrays meet, and get into each other's way.
some_name = st.sampled_from(NAMES) | st.sampled_from(NAMES[:2])
SHAPES_OF_MESH = (
    {"data": 8},
    {"data": 4, "model": 2},
    {"data": 2, "model": 4},
    {"data": 8, "model": 1},
    {"data": 2, "model": 2, "x": 2},
)
LENGTHS = (1, 2, 3, 4, 6, 8, 8, 16, 16, 24, 0)


@st.composite
def arrays(draw):
    """A named array or view, its dimensions in any order, with its names by dimension."""
    given = draw(st.lists(some_name | st.none(), max_size=4))
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


def terms_over(mesh_shape):
    """Rules as terms: tuples of a word and what it needs, joined later by ``|``."""
    some_axis = st.sampled_from(list(mesh_shape))
    names = st.lists(some_name, unique=True, max_size=4)
    pairs = st.lists(st.tuples(some_name, mesh_axes_of(mesh_shape)), max_size=6)
    mapping = st.dictionaries(some_name, mesh_axes_of(mesh_shape))
    term = st.one_of(
        pairs.map(lambda pairs: ("pairs", tuple(pairs))),
        mapping.map(lambda rules: ("pairs", tuple(rules.items()))),
        st.just(("same names",)),
        st.tuples(st.just("batch"), some_axis, some_name),
        st.tuples(st.just("fully"), some_axis, st.sampled_from((1, 8, 16, 64, 256))),
        st.tuples(st.just("tensor"), some_axis, names.map(tuple)),
    )
    return st.lists(term, min_size=1, max_size=3).map(tuple)


def rules_of(terms):
    """The terms as the library writes them."""
    make = {
        "pairs": lambda pairs: AxisRules(list(pairs)),
        "same names": AxisRules,
        "batch": data_parallel,
        "fully": fully_sharded,
        "tensor": lambda axis, names: tensor_parallel(axis, axes=names),
    }
    return functools.reduce(operator.or_, (make[word](*needs) for word, *needs in terms))


def axes_of(mesh_axes):
    if mesh_axes is None:
        return ()
    return (mesh_axes,) if isinstance(mesh_axes, str) else tuple(mesh_axes)


def candidates_of(terms):
    """For each named logical axis its candidates in order: (mesh axes, whether it yields).

    Of joined rules, those of the first term that names a logical axis count.
    """
    candidates = {}
    for word, *needs in terms:
        if word == "pairs":
            own = [(name, (axes_of(axes), False)) for name, axes in needs[0]]
        elif word == "batch":
            own = [(needs[1], ((needs[0],), False))]
        elif word == "tensor":
            own = [(name, ((needs[0],), True)) for name in needs[1]]
        else:
            own = []
        fresh = {}
        for name, candidate in own:
            if name not in candidates:
                fresh.setdefault(name, []).append(candidate)
        candidates |= fresh
    return candidates


def order_of_names(terms):
    """The candidates of all names in the order in which they were written."""
    order, named = [], set()
    for word, *needs in terms:
        if word == "same names" and ("=", (), False) not in order:
            order.append(("=", (), False))
        own = {
            "pairs": lambda: [(name, axes_of(axes), False) for name, axes in needs[0]],  # noqa: B023
            "batch": lambda: [(needs[1], (needs[0],), False)],  # noqa: B023
            "tensor": lambda: [(name, (needs[0],), True) for name in needs[1]],  # noqa: B023
        }.get(word, list)()
        order += [item for item in own if item[0] not in named]
        named |= {name for name, *_ in own}
    return order


REFUSED = "refused"


def wanted_layout(terms, names, sizes, mesh_shape, relaxed=False):
    """The mesh axes of every dimension, or REFUSED."""
    given, taken = {}, set()

    def fits(name, axes):
        length = sizes[names.index(name)]
        return length % math.prod(mesh_shape[axis] for axis in axes) == 0

    def give(name, axes):
        given[name] = axes
        taken.update(axes)

    candidates = candidates_of(terms)
    for name, axes, _ in order_of_names(terms):
        if name == "=":
            # Each logical axis goes to the mesh axis of its name, if no rule speaks of it.
            for same in names:
                if same in mesh_shape and same not in candidates:
                    if same in taken or not (fits(same, (same,)) or relaxed):
                        return REFUSED
                    give(same, (same,) if fits(same, (same,)) else ())
        elif name in names and name not in given and not taken & set(axes) and fits(name, axes):
            give(name, axes)
    for name in set(candidates) & set(names) - set(given):
        free = [axes for axes, _ in candidates[name] if not taken & set(axes)]
        # Its mesh axes are taken and it yields to those who took them, or one is free but does not
        # divide the length, which may be relaxed.
        yields = not free and all(yields for _, yields in candidates[name])
        if not yields and not (relaxed and free):
            return REFUSED
        given[name] = ()
    for word, *needs in terms:
        if word != "fully":
            continue
        axis, min_size = needs
        free = [n for n in names if n is not None and n not in given and fits(n, (axis,))]
        if math.prod(sizes) >= min_size and axis not in taken and free:
            give(max(free, key=lambda name: sizes[names.index(name)]), (axis,))
    return [given.get(name, ()) if name is not None else () for name in names]


def spec_of(layout):
    entries = [axes[0] if len(axes) == 1 else axes or None for axes in layout]
    while entries and entries[-1] is None:
        entries.pop()
    return P(*entries)


def shard_shape_of(layout, sizes, mesh_shape):
    return tuple(
        size // math.prod(mesh_shape[axis] for axis in axes)
        for size, axes in zip(sizes, layout, strict=True)
    )


@st.composite
def cases(draw):
    mesh_shape = draw(st.sampled_from(SHAPES_OF_MESH))
    drawn = draw(st.lists(arrays(), min_size=1, max_size=3))
    tree = {f"array_{i}": array for i, (array, _) in enumerate(drawn)}
    names = {f"array_{i}": names for i, (_, names) in enumerate(drawn)}
    return mesh_shape, tree, names, draw(terms_over(mesh_shape))


def case_of(mesh_shape, terms, *arrays):
    """A case by hand: of each array its names, None for a positional dimension, and its sizes."""
    tree, names = {}, {}
    for i, (dimensions, sizes) in enumerate(arrays):
        path = f"array_{i}"
        data = np.arange(math.prod(sizes), dtype=np.float32).reshape(sizes)
        axes = zip(dimensions, sizes, strict=True)
        named = collections.OrderedDict((name, size) for name, size in axes if name is not None)
        tree[path], names[path] = pz.nx.NamedArray(named, data), dimensions
    return mesh_shape, tree, names, terms


ALL_TAKEN = case_of(
    {"data": 4, "model": 2},
    (("pairs", (("a", "data"), ("c", "model"), ("b", "data"), ("b", "model"))),),
    (("a", "c", "b"), (4, 2, 8)),
)
ALIKE_BUT_FOR_POSITIONS = case_of(
    {"data": 8}, (("pairs", (("a", "data"),)),), (("a",), (8,)), ((None, "a"), (3, 8))
)


def layouts_of(case, relaxed=False):
    mesh_shape, tree, names, terms = case
    return {
        path: wanted_layout(terms, names[path], array.data_array.shape, mesh_shape, relaxed)
        for path, array in tree.items()
    }


def assert_lies_as_wanted(placed, layouts, tree, mesh_shape):
    for path, layout in layouts.items():
        given, array = tree[path].data_array, placed[path].data_array
        wanted = shard_shape_of(layout, given.shape, mesh_shape)
        assert {shard.data.shape for shard in array.addressable_shards} == {wanted}
        assert len(array.addressable_shards) == math.prod(mesh_shape.values())
        assert tuple(array.sharding.spec) == tuple(spec_of(layout))
        np.testing.assert_array_equal(array, given)


def quietly(function, *args, **options):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ShardingWarning)
        return function(*args, **options)


def assert_refused(function, layouts, *args, **options):
    """Exactly the arrays that have no layout are reported, each with a fix."""
    with pytest.raises(PlanError, match="no valid layout") as caught:
        quietly(function, *args, **options)
    reported = [problem.split(": ")[0] for problem in caught.value.problems]
    refused = [path for path, layout in layouts.items() if layout == REFUSED]
    assert list(dict.fromkeys(reported)) == refused
    for problem in caught.value.problems:
        assert " to None." in problem or ", None) as the last" in problem


@pytest.mark.parametrize("relaxed", [False, True])
@hypothesis.given(cases())
@hypothesis.example(ALL_TAKEN)
def test_a_plan_is_what_the_rules_say_or_refused_with_reasons(relaxed, case):
    mesh_shape, tree, names, terms = case
    mesh, rules = make_mesh(mesh_shape), rules_of(terms)
    layouts = layouts_of(case, relaxed)
    options = {"on_indivisible": "replicate"} if relaxed else {}
    if REFUSED in layouts.values():
        assert_refused(make_plan, layouts, tree, mesh, rules, **options)
        return
    plan = quietly(make_plan, tree, mesh, rules, **options)
    bytes_per_device = replicated_bytes = 0
    for leaf, (path, layout) in zip(plan.leaves, layouts.items(), strict=True):
        sizes = tree[path].data_array.shape
        shard_shape = shard_shape_of(layout, sizes, mesh_shape)
        assert (leaf.path, leaf.names, leaf.shape) == (path, names[path], sizes)
        assert tuple(leaf.spec) == tuple(spec_of(layout))
        assert leaf.shard_shape == shard_shape
        assert leaf.bytes_per_device == 4 * math.prod(shard_shape)
        assert leaf.reason
        bytes_per_device += 4 * math.prod(shard_shape)
        replicated_bytes += 4 * math.prod(shard_shape) if shard_shape == sizes else 0
    assert plan.bytes_per_device == bytes_per_device
    assert plan.replicated_bytes == replicated_bytes
    assert plan.total_bytes == sum(array.data_array.nbytes for array in tree.values())
    assert_lies_as_wanted(jax.device_put(tree, plan.sharding_tree()), layouts, tree, mesh_shape)


@hypothesis.given(cases())
@hypothesis.example(ALIKE_BUT_FOR_POSITIONS)
def test_whatever_places_arrays_places_them_by_the_rules(case):
    mesh_shape, tree, _, terms = case
    mesh, rules = make_mesh(mesh_shape), rules_of(terms)
    layouts = layouts_of(case)
    if REFUSED in layouts.values():
        for function in (name_to_name_sharding, place):
            assert_refused(function, layouts, tree, mesh, rules)
        return
    shardings = quietly(name_to_name_sharding, tree, mesh, rules)
    assert_lies_as_wanted(jax.device_put(tree, shardings), layouts, tree, mesh_shape)
    assert_lies_as_wanted(quietly(place, tree, mesh, rules), layouts, tree, mesh_shape)
    by_spec = {}
    for sharding in jax.tree.leaves(shardings):
        assert by_spec.setdefault(sharding.spec, sharding) is sharding


@hypothesis.given(cases())
def test_joining_rules_in_any_grouping_means_the_same(case):
    mesh_shape, tree, names, terms = case
    one, *others = [rules_of((term,)) for term in terms]
    leftmost = functools.reduce(operator.or_, others, one)
    rightmost = functools.reduce(lambda right, left: left | right, [*reversed(others), one])
    assert leftmost == rightmost
    assert hash(leftmost) == hash(rightmost)
    for path, layout in layouts_of(case).items():
        sizes = tree[path].data_array.shape
        for rules in (leftmost, rightmost):
            explained = rules.explain(names[path], sizes, mesh_shape)
            assert bool(explained.problems) == (layout == REFUSED)
            if layout != REFUSED:
                assert tuple(explained.spec) == tuple(spec_of(layout))


@hypothesis.given(st.data())
def test_the_order_of_a_mapping_says_nothing(data):
    mesh_shape = data.draw(st.sampled_from(SHAPES_OF_MESH))
    array, names = data.draw(arrays())
    sizes = array.data_array.shape
    mapping = data.draw(st.dictionaries(some_name, mesh_axes_of(mesh_shape)))
    shuffled = dict(data.draw(st.permutations(list(mapping.items()))))
    assert AxisRules(mapping) == AxisRules(shuffled)
    assert hash(AxisRules(mapping)) == hash(AxisRules(shuffled))
    wanted = {name: axes_of(mapping.get(name)) for name in names if name is not None}
    used = [axis for axes in wanted.values() for axis in axes]
    fits = all(
        size % math.prod(mesh_shape[axis] for axis in wanted.get(name, ())) == 0
        for name, size in zip(names, sizes, strict=True)
    )
    for rules in (AxisRules(mapping), AxisRules(shuffled)):
        if fits and len(set(used)) == len(used):
            layout = [wanted.get(name, ()) for name in names]
            assert tuple(rules.spec(names, sizes, mesh_shape)) == tuple(spec_of(layout))
        else:
            with pytest.raises(PlanError, match="no valid layout"):
                rules.spec(names, sizes, mesh_shape)
