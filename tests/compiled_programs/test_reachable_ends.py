"""Ends that are reached are those of a plain walk, and no place is looked at twice."""

import collections

from hypothesis import given
from hypothesis import strategies as st

from penzai_shard.compiled_programs.reachable_ends import ReachableEnds

NODES = st.integers(0, 11)
GRAPHS = st.dictionaries(NODES, st.lists(NODES, max_size=4), max_size=12)


def walked(graph, start):
    seen, left = {start}, [start]
    while left:
        for other in graph.get(left.pop(), ()):
            if other not in seen:
                seen.add(other)
                left.append(other)
    return seen


@given(GRAPHS, st.sets(NODES), st.lists(st.lists(NODES, max_size=3), max_size=5))
def test_ends_are_those_of_a_walk_and_each_place_is_looked_at_once(graph, numbered, asked):
    looked_at = collections.Counter()

    def following(place):
        looked_at[place] += 1
        return graph.get(place, ())

    ends = ReachableEnds(following, lambda place: 100 - place if place in numbered else None)
    for places in asked:
        reached = set().union(*(walked(graph, place) for place in places))
        assert ends.of(*places) == tuple(sorted(100 - one for one in reached & numbered))
    assert set(looked_at.values()) <= {1}


def test_a_long_way_is_not_too_deep():
    last = 50_000
    ends = ReachableEnds(
        lambda place: [place + 1] if place < last else [],
        lambda place: 7 if place == last else None,
    )
    assert ends.of(0) == (7,)
