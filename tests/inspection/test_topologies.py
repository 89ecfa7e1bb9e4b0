"""Devices that need not be there: names, numbers, links, and the least time over them."""

import pytest

import penzai_shard as pzs
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
