"""Mesh axes of a dimension go to its factors as Shardy splits them: the slowest first."""

import pytest

from penzai_shard.library_apis.shardy_records import ShardyValue
from penzai_shard.sharding_propagation.factors import factor_axes
from penzai_shard.sharding_propagation.mesh_axis_parts import is_covered, overlap

MESH = {"data": 4, "model": 2}


@pytest.mark.parametrize(
    ("mesh_axes", "sizes", "expected"),
    [
        (["data"], [16], [(0, "data")]),
        (["data", "model"], [16], [(0, "data"), (0, "model")]),
        (["data"], [3], [(0, "data")]),
        (["data"], [4, 4], [(0, "data")]),
        (["data", "model"], [4, 4], [(0, "data"), (1, "model")]),
        (["data"], [2, 8], [(0, "data:(1)2"), (1, "data:(2)2")]),
        (["model", "data"], [4, 4], [(0, "model"), (0, "data:(1)2"), (1, "data:(2)2")]),
        (["data"], [3, 4], [(None, "data")]),
        (["model", "data"], [2, 3], [(0, "model"), (None, "data")]),
        (["data"], [2, 3], [(0, "data:(1)2"), (None, "data:(2)2")]),
        (["data"], [1, 4], [(1, "data")]),
    ],
)
def test_the_slowest_factor_gets_the_first_mesh_axes(mesh_axes, sizes, expected):
    length = 1
    for size in sizes:
        length *= size
    value = ShardyValue((length,), "f32", (tuple(mesh_axes),), (True,), {})
    found = factor_axes(value, [tuple(range(len(sizes)))], sizes, MESH)
    assert [(each.factor, each.mesh_axis) for each in found] == expected


def test_mesh_axes_overlap_where_they_number_the_same_devices():
    assert overlap("data", "data")
    assert not overlap("data", "model")
    assert not overlap("data:(1)2", "data:(2)2")
    assert overlap("data:(1)4", "data:(2)2")
    assert overlap("data:(2)2", "data")


def test_mesh_axes_are_covered_by_parts_that_follow_each_other():
    assert is_covered("data", ["data"], MESH)
    assert is_covered("data", ["data:(2)2", "data:(1)2"], MESH)
    assert is_covered("data:(2)2", ["data"], MESH)
    assert not is_covered("data", ["data:(2)2"], MESH)
    assert not is_covered("data", ["data:(1)2", "model"], MESH)
    assert is_covered("one", [], {"one": 1})
