"""Devices that need not be there: names, numbers, links, and the least time over them."""

import pytest

import penzai_shard as pzs
from penzai_shard.inspection.topologies import least_time, mesh_bandwidths
from tests.refusals import problems_of

H100S = 'device_description_str: "NVIDIA H100 80GB HBM3" gpu_device_info { device_memory_size: 80 }'


def test_topology_counts_devices():
    counts = {"v5e:16x16": 256, "v5p:8x8x16": 1024, "cpu:9": 9}
    assert {name: pzs.Topology(name).device_count for name in counts} == counts
    # JAX takes three quarters of a GPU.
    assert pzs.Topology("gpu:8", H100S).memory_limit == 60


@pytest.mark.parametrize(
    ("name", "fix"),
    [
        ("v5litepod-16", "v5e:16x16"),
        ("v5:8", "v5e:16x16"),
        ("v5e:16x4", "'v5e:8x8'"),
        ("v5p:8x4x4", "'v5p:4x4x8'"),
        ("cpu:0", "cpu:512"),
        ("gpu:2x8x2", "gpu:4x8"),
        ("v5e:16x16*4", "v5e:16x16"),
        ("gpu:8", "target_config="),
    ],
)
def test_topology_refuses_what_there_is_not(name, fix):
    problems = problems_of(pzs.MeshError, pzs.Topology, name)
    assert fix in problems[0].fix


@pytest.mark.parametrize(
    ("name", "sizes", "fix"),
    [
        ("v5e:2x4", (8, 2), "'v5e:4x4'"),
        ("cpu:8", (16, 1), "'cpu:16'"),
        ("gpu:2x8", (4, 2), "'gpu:8'"),
    ],
)
def test_topology_refuses_a_mesh_that_it_does_not_carry(name, sizes, fix):
    topology, mesh_sizes = pzs.Topology(name, "any"), dict(zip("ab", sizes, strict=True))
    assert fix in problems_of(pzs.MeshError, topology.check_mesh, mesh_sizes)[0].fix


# In GB per second, from the drawings of the vendors: a ring of v5e has two links of 50, a line one;
# a torus of v5p two of 100 along each side.
@pytest.mark.parametrize(
    ("name", "sizes", "rates"),
    [
        ("v5e:16x16", (16, 16), (100, 100)),
        ("v5e:8x16", (16, 8), (100, 50)),
        ("v5e:16x16", (4, 64), (200, 200)),
        ("v5p:4x4x8", (8, 16), (200, 400)),
        ("v5p:2x2x4", (4, 4), (100, 200)),
    ],
)
def test_mesh_bandwidths(name, sizes, rates):
    found = mesh_bandwidths(pzs.Topology(name), dict(zip("ab", sizes, strict=True)))
    assert tuple(found.values()) == pytest.approx([rate * 1e9 for rate in rates])


def test_least_time_is_that_of_the_busiest_links():
    """A divides its 8 over both, and needs 4 seconds; together with B's 7 there are 3 a second."""
    sent, rates = {("a", "b"): 8.0, ("b",): 7.0}, {"a": 1.0, "b": 2.0}
    assert least_time(sent, rates) == 15 / 3
    assert least_time(sent | {("a",): 6.0}, rates) == 21 / 3
    assert least_time({("a",): 6.0, ("b",): 1.0}, rates) == 6
