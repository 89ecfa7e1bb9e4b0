"""Figures of hardware, and what a device can send over each axis of a mesh."""

import itertools
import math
import pickle

import numpy as np
import pytest

from penzai_shard.errors import MeshError
from penzai_shard.inspection.devices.hardware import Hardware
from penzai_shard.inspection.devices.mesh_networks import HostNetwork, MeshNetwork
from penzai_shard.inspection.devices.published_figures import PUBLISHED
from penzai_shard.library_apis.mesh_orders import positions_of_mesh


@pytest.mark.parametrize("kind", PUBLISHED)
def test_every_kind_has_figures_with_their_sources_and_a_memory(kind):
    hardware = Hardware.read(f"{kind}:4")
    figures = PUBLISHED[kind]
    assert hardware.flops * hardware.device_count == pytest.approx(figures.flops * 4)
    assert 10e9 < hardware.memory * hardware.device_count / 4 < 250e9 or kind in (
        "v2",
        "t4",
        "v100",
    )
    assert all(source.startswith(("https://", "Jouppi")) for source in figures.sources)
    assert hardware.sources[:-1] == figures.sources
    assert hardware.memory_bandwidth * hardware.device_count == figures.memory_bandwidth * 4
    assert hardware.overlaps
    assert hardware.bandwidth({"data": hardware.device_count})["data"] > 1e10


@pytest.mark.parametrize(
    ("name", "meaning", "devices"),
    [
        ("v5e:32", "v5e:4x8", 32),
        ("V5E:4x8", "v5e:4x8", 32),
        ("v5e:512", "v5e:16x16*2", 512),
        ("v5p:4x4x4*2", "v5p:4x4x4*2", 128),
        ("v4:4x4x8_twisted", "v4:4x4x8_twisted", 128),
        ("tpu7x:4", "tpu7x:2x2x1", 8),
        ("h100:4", "h100:4", 4),
        ("h100:16", "h100:16", 16),
        ("a100-80gb:4x4", "a100-80gb:4x4", 16),
    ],
)
def test_names_say_chips_topologies_and_hosts(name, meaning, devices):
    hardware = Hardware.read(name)
    assert (hardware.name, hardware.device_count) == (meaning, devices)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("v5e:7", r"'v5e:7': there are no slices of 7 chips of v5e\. Write 'v5e:4' or 'v5e:8'\."),
        ("h100:12", r"not a number of whole hosts of 8\. Write 'h100:8' or 'h100:16'"),
        ("h10O:16", r"'h10O' is not known\. Did you mean 'h100:16'"),
        ("v5litepod-16", r"Write 'v5e:4x4'\. Names are for instance \"v5e:32\""),
        ("v5litepod:16", r"'v5litepod' is not known\. Write 'v5e:16'\."),
        ("dgx:8", r"Figures are known of v2, .*, cpu\. Others .* described: Hardware\('dgx:8'"),
        ("cpu:2x4", r'simulated devices are counted\. Write "cpu:8"\.'),
        ("cpu:0", r'simulated devices are counted\. Write "cpu:8"\.'),
        ("v5e:3x3", r"there is no slice of 3x3 chips of v5e"),
        ("h100:8*2", r"GPUs have no slices\. Write h100:8\."),
        ("h100:2x2x2", r'write "h100:16", or by hosts and devices "h100:2x8"'),
        ("v5e:0", r"no slices of 0 chips of v5e\. Write 'v5e:1'\."),
        ("h100x8", r"'h100x8' is not the name of hardware\. Write 'h100:8'\."),
        ("v5e8", r"'v5e8' is not the name of hardware\. Write 'v5e:8'\."),
        ("V5E : 4x4", r"'V5E : 4x4' is not the name of hardware\. Write 'v5e:4x4'\."),
        ("h100", r"'h100' is not the name of hardware\. Say how many: 'h100:8'\."),
        ("8xH100", r"Write 'h100:8'\. Names are"),
        ("TPU v5e:8", r"Write 'v5e:8'\. Names are"),
        (32, r"32 is not the name of hardware"),
    ],
)
def test_what_is_no_hardware_is_refused_with_what_to_write(name, message):
    with pytest.raises(MeshError, match=message):
        Hardware.read(name)


def test_simulated_devices_share_what_one_machine_has():
    eight, two = Hardware.read("cpu:8"), Hardware.read("cpu:2")
    assert (eight.device_count, eight.memory, eight.overlaps) == (8, None, False)
    for figure in ("flops", "memory_bandwidth"):
        assert getattr(eight, figure) * 8 == getattr(two, figure) * 2
    shared = eight.of_mesh({"data": 4, "model": 2})
    assert (
        shared.carried(["data", "model"])
        == shared.bandwidth["data"]
        == two.bandwidth({"x": 2})["x"] / 4
    )


def test_figures_of_ones_own_count_and_must_be_positive_numbers():
    own = Hardware.read("h100:16").with_figures(flops=5e14, memory=70 * 10**9, between=1e10)
    assert (own.flops, own.memory) == (5e14, 70 * 10**9)
    assert own.bandwidth({"data": 2, "model": 8}) == {"data": 1e10, "model": 450e9}
    assert Hardware.read("v5e:4x4").with_figures(within=1e9).bandwidth({"a": 4, "b": 4}) == {
        "a": 1e9,
        "b": 1e9,
    }
    with pytest.raises(MeshError, match="between: must be a positive number of bytes per second"):
        own.with_figures(between=0)
    with pytest.raises(MeshError, match="flops: must be a positive number, not 'many'"):
        own.with_figures(flops="many")


def test_what_is_not_published_is_asked_for_and_not_guessed():
    slices = Hardware.read("v4:4x4x4*2")
    with pytest.raises(
        MeshError,
        match=r"mesh axis 'data' goes between slices, .* is not published\. Give it, in bytes per "
        r"second: hardware\.with_figures\(between=25e9\)\.",
    ):
        slices.bandwidth({"data": 2, "model": 64})
    given = slices.with_figures(between=25e9).bandwidth({"data": 2, "model": 64})
    assert given == {"data": 25e9, "model": 300e9}
    with pytest.raises(MeshError, match="'data' goes between hosts"):
        Hardware.read("l4:16").bandwidth({"data": 16})


def test_meshes_of_another_size_or_that_cannot_be_laid_are_refused():
    with pytest.raises(MeshError, match="has 16 devices, and topology 'v5e:4x8' has 32"):
        Hardware.read("v5e:32").bandwidth({"data": 4, "model": 4})
    with pytest.raises(MeshError, match="has 4 devices, and the hardware has 8"):
        Hardware.read("h100:8").bandwidth({"data": 4})
    with pytest.raises(MeshError, match=r"cannot lay mesh .* Choose sizes that are products of 4"):
        Hardware.read("v5p:4x4x4").bandwidth({"data": 32, "model": 2})


@pytest.mark.parametrize(
    ("name", "mesh", "expected"),
    [
        # Lines of 8 and of 4 chips; 16 chips are a ring, which sends both ways.
        ("v5e:4x8", {"data": 8, "model": 4}, {"data": 50e9, "model": 50e9}),
        ("v5e:16x16", {"data": 16, "model": 16}, {"data": 100e9, "model": 100e9}),
        # Both axes of the slice together.
        ("v5e:4x8", {"data": 32}, {"data": 100e9}),
        # The halves of a line of 8: four pairs share each link.
        ("v5e:4x8", {"replica": 2, "data": 4, "model": 4}, {"replica": 12.5e9, "data": 50e9}),
        ("v5p:4x4x8", {"data": 32, "model": 4}, {"data": 400e9, "model": 200e9}),
        # Two devices share the links of a chip.
        ("tpu7x:4x4x4", {"data": 64, "model": 2}, {"data": 300e9}),
        # Of 31 parts, one goes to the other slice over 25 Gbit/s.
        ("v5e:16x16*2", {"data": 32, "model": 16}, {"data": 31 * 3.125e9, "model": 100e9}),
        # Of 15 parts, one goes to the other host over 400 Gbit/s, and 14 stay.
        ("h100:16", {"data": 16}, {"data": 450e9 * 15 / 14}),
        ("h100:16", {"data": 4, "model": 4}, {"data": 50e9 * 3, "model": 450e9}),
        # The second four of a host of six are of two hosts.
        ("h100:2x6", {"data": 3, "model": 4}, {"model": 50e9 * 3}),
        ("t4:2", {"data": 1, "model": 2}, {"model": 16e9}),
    ],
)
def test_a_mesh_axis_has_the_links_that_it_goes_over(name, mesh, expected):
    found = Hardware.read(name).bandwidth(mesh)
    assert {axis: found[axis] for axis in expected} == pytest.approx(expected)


def _rate_of_rings(positions, number, shape, wraps):
    """What rings in both directions reach: hops of a line of chips, counted link by link."""
    loads = {}
    rings = np.moveaxis(positions, number, -2).reshape(-1, positions.shape[number], len(shape))
    for ring in rings:
        (which,) = {int(d) for d in np.flatnonzero(np.ptp(ring, axis=0))}
        size = shape[which]
        for sign in (1, -1):
            for start, end in itertools.pairwise([*ring[::sign], ring[::sign][0]]):
                way = int(end[which] - start[which])
                halfway = abs(way) * 2 == size and (way > 0) != (sign > 0)
                if wraps[which] and (abs(way) * 2 > size or halfway):
                    way -= int(math.copysign(size, way))
                step = int(math.copysign(1, way))
                for hop in range(0, way, step):
                    at = list(start)
                    at[which] = (start[which] + hop) % size
                    link = (*map(int, at), which, step)
                    loads[link] = loads.get(link, 0) + 0.5
    return 1 / max(loads.values())


@pytest.mark.parametrize(
    ("name", "mesh"),
    [
        ("v5e:4x8", {"data": 8, "model": 4}),
        ("v5e:4x8", {"replica": 2, "data": 4, "model": 4}),
        ("v5e:8x16", {"replica": 4, "data": 4, "model": 8}),
        ("v5e:16x16", {"replica": 2, "data": 8, "model": 16}),
        ("v5p:4x4x4", {"a": 4, "b": 4, "c": 4}),
    ],
)
def test_rates_along_a_torus_are_those_of_rings_whose_hops_are_counted(name, mesh):
    hardware = Hardware.read(name)
    network = hardware.network
    positions = positions_of_mesh(
        network.device_kind, network.topology.shape, 1, tuple(mesh.values()), (1,) * len(mesh)
    )[..., 1:-1]
    found = hardware.bandwidth(mesh)
    for number, axis in enumerate(mesh):
        rate = _rate_of_rings(positions, number, network.topology.shape, network.topology.wraps)
        assert found[axis] == pytest.approx(rate * network.link), axis


def test_mesh_axes_on_the_same_links_have_together_what_one_has():
    host = HostNetwork(2, 8, 450e9, 50e9).of_mesh({"data": 2, "a": 2, "b": 4})
    assert host.carried(["a", "b"]) == host.carried(["a"]) == 450e9
    assert host.carried(["data", "a"]) == 500e9
    assert MeshNetwork({"a": {"x": 1.0}, "b": {"y": 2.0}, "c": {}}).carried("abc") == 3.0


def test_hardware_that_was_asked_of_meshes_is_pickled():
    hardware = Hardware.read("v5e:8")
    rates = hardware.bandwidth({"data": 2, "model": 4})
    again = pickle.loads(pickle.dumps(hardware))
    assert again == hardware
    assert again.bandwidth({"data": 2, "model": 4}) == rates
