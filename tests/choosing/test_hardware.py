"""Devices by name, what they send over a mesh, and the least time of a step on them."""

import dataclasses
import itertools

import jax
import numpy as np
import pytest
from jax.experimental import mesh_utils

import penzai_shard as pzs
from penzai_shard.choosing.cost import StepCost
from penzai_shard.choosing.hardware import Hardware, least_time, read_devices, step_time
from penzai_shard.errors import Problems
from penzai_shard.inspection.topologies import FIGURES, SLICES, find_figures
from tests.refusals import problem_paths, problems_of

GB = 1e9


@pytest.mark.parametrize(
    ("name", "full_name", "count", "hosts", "flops"),
    [
        ("v5e:32", "v5e:4x8", 32, 1, 197e12),
        ("v5p:4x4x8", "v5p:4x4x8", 128, 1, 459e12),
        ("h100:16", "h100:2x8", 16, 2, 989.5e12),
        ("h100:4", "h100:1x4", 4, 1, 989.5e12),
        ("a100-80gb:2x6", "a100-80gb:2x6", 12, 2, 312e12),
        ("cpu:8", "cpu:8", 8, 1, 15e9),
    ],
)
def test_hardware_read(name, full_name, count, hosts, flops):
    found = Hardware.read(name)
    described = found.name, found.device_count, found.hosts, found.flops
    assert described == (full_name, count, hosts, flops)
    assert Hardware.read(full_name) == found


@pytest.mark.parametrize("figures", FIGURES, ids=lambda figures: figures.kind)
def test_hardware_has_what_is_published(figures):
    found = Hardware.read(f"{figures.kind}:32")
    published = figures.flops, int(figures.memory), figures.memory_bandwidth, figures.link
    assert (found.flops, found.memory, found.memory_bandwidth, found.link) == published
    # Devices of a kind are TPUs with slices, or GPUs with hosts, which send over some link.
    assert (found.topology.platform == "tpu") == (figures.slices is not None) != (found.hosts == 4)
    assert min(found.bandwidths({"data": 4, "model": 8}).values()) > 0
    if figures.slices:
        assert pzs.Topology(found.name).memory_limit == found.memory
        assert find_figures(figures.device_kind.rstrip("$")) == figures


@pytest.mark.parametrize(
    ("name", "fix"),
    [
        ("v5ee:8", "'v5e:8'"),
        ("v5e:7", "'v5e:8'"),
        ("v5p:100", "'v5p:128'"),
        ("v5e", "'v5e:8'"),
        ("8", "'v5e:32'"),
        ("h100:12", "'h100:16'"),
        ("h100:x8", "'h100:8'"),
        ("v5e:16x4", "'v5e:8x8'"),
        ("cpu:2x4", "'cpu:512'"),
        (8, "'v5e:32'"),
    ],
)
def test_hardware_read_refuses_what_there_is_not(name, fix):
    (problem,) = problems_of(pzs.MeshError, Hardware.read, name)
    assert fix in problem.fix


# Meshes


@dataclasses.dataclass(frozen=True)
class Chip:
    """What JAX looks at to lay a mesh."""

    id: int
    coords: tuple
    device_kind: str
    platform: str = "tpu"
    core_on_chip: int = 0
    slice_index: int = 0
    process_index: int = 0


def jax_lays(kind, shape, sizes):
    """Whether ``jax.make_mesh`` would, with chips that need not be there."""
    (device_kind,) = [each.device_kind.rstrip("$") for each in FIGURES if each.kind == kind]
    padded = (*shape, 1)[:3]
    places = sorted(itertools.product(*map(range, padded)), key=lambda place: place[::-1])
    chips = [Chip(i, place, device_kind) for i, place in enumerate(places)]
    try:
        # As jax.make_mesh has it, v5e may split an axis of its grid.
        mesh_utils.create_device_mesh(sizes, chips, allow_split_physical_axes=kind == "v5e")
    except NotImplementedError:
        return False
    return True


@pytest.mark.parametrize("devices", [8, 32, 64, 256])
@pytest.mark.parametrize("kind", SLICES)
def test_hardware_has_the_meshes_that_jax_lays(kind, devices):
    hardware = Hardware.read(f"{kind}:{devices}")
    for model in (2**n for n in range(devices.bit_length())):
        sizes = {"data": devices // model, "model": model}
        lays = jax_lays(kind, hardware.topology.shape, tuple(sizes.values()))
        assert hardware.has_mesh(sizes) == lays, sizes


@pytest.mark.parametrize(
    ("name", "mesh_sizes", "rates"),
    [
        # Eight of a ring of 16 are a line. The others are a ring, and two columns, eight apart.
        ("v5e:256", {"data": 32, "model": 8}, [112.5, 50]),
        ("v5e:256", {"data": 4, "model": 64}, [25, 150]),
        ("v5e:32", {"data": 16, "model": 2}, [75, 50]),
        ("v5e:256", {"data": 16, "model": 16}, [100, 100]),
        ("v5e:32", {"data": 32}, [100]),
        # In GB per second, from the drawings of the vendor: a torus has two links of 100 along each
        # side, a line one.
        ("v5p:64", {"data": 4, "model": 16}, [200, 400]),
        ("v5p:2x2x4", {"data": 4, "model": 4}, [100, 200]),
        ("h100:16", {"data": 2, "model": 8}, [50, 450]),
        # Each sends what it has to the other host, which is a seventh of what all get.
        ("h100:16", {"data": 8, "model": 2}, [350, 450]),
        ("h100:16", {"replica": 2, "data": 8}, [50, 450]),
        ("h100:16", {"data": 16}, [450]),
        ("cpu:8", {"data": 4, "model": 2}, [1.25, 1.25]),
    ],
)
def test_hardware_bandwidths(name, mesh_sizes, rates):
    found = Hardware.read(name).bandwidths(mesh_sizes)
    assert list(found) == list(mesh_sizes)
    np.testing.assert_allclose(list(found.values()), np.multiply(rates, GB))


def test_least_time_is_that_of_the_busiest_links():
    """A divides its 8 over both, and needs 4 seconds; together with B's 7 there are 3 a second."""
    sent, rates = {("a", "b"): 8.0, ("b",): 7.0}, {"a": 1.0, "b": 2.0}
    assert least_time(sent, rates) == 15 / 3
    assert least_time(sent | {("a",): 6.0}, rates) == 21 / 3
    assert least_time({("a",): 6.0, ("b",): 1.0}, rates) == 6


def test_hardware_bandwidths_refuse_a_mesh_of_other_devices():
    with pytest.raises(pzs.MeshError):
        Hardware.read("h100:8").bandwidths({"data": 16})


# What choose_layout is given


def read(devices, hardware=None, memory=None):
    problems = Problems("these devices cannot be read:")
    found = read_devices(devices, hardware, memory, problems)
    problems.raise_if_any(pzs.RuleTypeError)
    return found


def test_read_devices_of_every_form():
    mesh = pzs.make_mesh({"data": 8, "model": 4}, abstract=True)
    named = read("v5e:32")
    assert (named.memory, named.mesh_sizes) == (int(15.75 * 2**30), None)
    assert read(32, "v5e") == read(32, "v5e:4x8") == named
    kept = read(mesh, "v5e", "14GiB")
    assert (kept.memory, kept.mesh_sizes) == (14 * 2**30, {"data": 8, "model": 4})


def test_read_devices_asks_devices_that_are_there_what_they_are():
    on = read(jax.devices(), memory="2 GB")
    assert (on.hardware, on.memory) == (Hardware.read("cpu:8"), 2 * 10**9)
    mesh = pzs.make_mesh({"data": 8})
    assert read(mesh, memory=4096.0).hardware == on.hardware


@pytest.mark.parametrize(
    ("given", "error", "paths"),
    [
        ((8,), pzs.RuleTypeError, ["devices"]),
        (({"data": 8}, "v5e"), pzs.RuleTypeError, ["devices"]),
        ((True, "v5e"), pzs.RuleTypeError, ["devices"]),
        ((8.5, "v5e", "a lot"), pzs.RuleTypeError, ["devices", "memory"]),
        (("v5e:8", None, 16), pzs.RuleTypeError, ["memory"]),
        (("v5e:8", "v5e"), pzs.RuleTypeError, ["hardware"]),
        ((8, None, float("inf")), pzs.RuleTypeError, ["devices", "memory"]),
        ((8, 8), pzs.MeshError, ["8"]),
        ((16, "v5e:8"), pzs.MeshError, ["hardware"]),
        (("cpu:8",), pzs.MeshError, ["memory"]),
    ],
)
def test_read_devices_refuses_what_it_cannot_read(given, error, paths):
    assert problem_paths(error, read, *given) == paths


# Times


def test_step_time_is_the_longest_of_three():
    hardware = Hardware.read("v5e:32")
    sent = {("gradient", ("data",)): 25 * GB, ("activation", ("model",)): 5 * GB}
    cost = StepCost(98.5e12, sent, {"optimizer": 81.9 * GB, "parameters": 1e15})
    time = step_time(cost, {"data": 8, "model": 4}, hardware)
    assert (time.compute, time.send, time.update) == (0.5, 0.5, 0.2)
    assert time.by_mesh_axis == {"data": 0.5, "model": 0.1}
    assert (time.bound, time.total) == (0.5, 1.2)


def test_step_time_of_simulated_devices_is_the_sum():
    cost = StepCost(15e9, {("gradient", ("data",)): 1.25 * GB}, {"optimizer": 0.875e9 / 2})
    time = step_time(cost, {"data": 8}, Hardware.read("cpu:8"))
    assert (time.bound, time.compute) == (3.0, 1.0)
