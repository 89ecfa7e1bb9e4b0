"""Says how fast devices are, by name, and how long a step takes on them at least."""

import dataclasses
import math
import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple, Self

import jax
from jax.sharding import AbstractMesh, Mesh

from penzai_shard.errors import MeshError, Problem, Problems, RuleTypeError
from penzai_shard.inspection.topologies import (
    FIGURES,
    SLICES,
    Topology,
    find_figures,
    least_time,
    mesh_bandwidths,
)
from penzai_shard.meshes import mesh_text
from penzai_shard.paths import nearest

if TYPE_CHECKING:
    from penzai_shard.choosing.cost import StepCost

_NAME = re.compile(r"([a-z][\w-]*):(\d+)(?:x\d+)*")
_EXAMPLES = "Write for instance 'v5e:32', 'v5p:4x4x8', 'h100:16' or 'cpu:8'."
_GPUS_OF_A_HOST = 8
# Bytes per second that one GPU has of the network between hosts: a port of 200 or 400 Gbit/s for
# each, https://docs.nvidia.com/dgx/.
_BETWEEN_HOSTS = {"a100": 25e9, "a100-80gb": 25e9, "h100": 50e9, "h200": 50e9, "b200": 50e9}
# Of all simulated devices together on one core of a server's processor, measured and rounded:
# operations, and bytes of memory and of links, per second. Only their ratios matter.
_SIMULATED = 120e9, 7e9, 10e9


@dataclasses.dataclass(frozen=True)
class Hardware:
    """Devices of one kind, with the figures that their vendor publishes.

    Attributes:
        name: What they are called.
        topology: Their number, and the links of TPUs.
        flops: Dense operations in bfloat16 per second of one device.
        memory: The bytes that programs can have on one device; None if that is not known.
        memory_bandwidth: Bytes per second of its own memory.
        link: Bytes per second that a GPU, or a simulated device, sends to others of its host.
        between: Bytes per second that it sends to other hosts.
    """

    name: str
    topology: Topology
    flops: float
    memory: int | None
    memory_bandwidth: float
    link: float = 0.0
    between: float = 0.0

    @classmethod
    def read(cls, name: str) -> Self:
        """The hardware of a name.

        Args:
            name: A kind of device and how many: chips of a slice of TPUs (``"v5e:32"``), or along
                its links (``"v5p:4x4x8"``); GPUs in hosts of eight (``"h100:16"``), or hosts and
                GPUs of each (``"h100:4x4"``); simulated devices (``"cpu:8"``).

        Raises:
            MeshError: There is none of that name.

        >>> Hardware.read("h100:16").bandwidths({"data": 2, "model": 8})
        {'data': 50000000000.0, 'model': 450000000000.0}
        """
        problems = Problems(f"there is no hardware {name!r}:")
        found = _NAME.fullmatch(str(name).lower())
        kinds = [*(figures.kind for figures in FIGURES), "cpu"]
        kind, count = (found[1], int(found[2])) if found else (str(name).partition(":")[0], 8)
        if found is None or kind not in kinds:
            near = kind if kind in kinds else nearest(kind, kinds)
            what = f"a name is a kind of device ({', '.join(kinds)}) and a number of them"
            problems.add("", what, f"Write '{near}:{count}'." if near else _EXAMPLES)
        elif kind in _BETWEEN_HOSTS and count > 8 and count % 8 and found[0] == f"{kind}:{count}":
            near = f"{kind}:{count // 8 * 8 + 8}"
            fix = f"Write '{near}', or how many GPUs each host has: '{kind}:{count}x1'."
            problems.add("", f"{count} GPUs are no whole hosts of {_GPUS_OF_A_HOST}", fix)
        problems.raise_if_any(MeshError)
        assert found is not None
        return cls._of_kind(kind, found[0])

    @classmethod
    def _of_kind(cls, kind: str, name: str) -> Self:
        shape = tuple(map(int, name.partition(":")[2].split("x")))
        if kind == "cpu":
            topology = Topology(name)
            flops, memory, link = (figure / topology.device_count for figure in _SIMULATED)
            return cls(name, topology, flops, None, memory, link)
        figures = next(each for each in FIGURES if each.kind == kind)
        known = figures.flops, int(figures.memory), figures.memory_bandwidth
        if kind in SLICES:
            slices = (each for each in SLICES[kind].all_shapes() if (math.prod(each),) == shape)
            topology = Topology(f"{kind}:{'x'.join(map(str, next(slices, shape)))}")
            return cls(topology.name, topology, *known)
        if len(shape) == 1:
            each = min(shape[0], _GPUS_OF_A_HOST)
            shape = shape[0] // each, each
        topology = Topology(f"gpu:{shape[0]}x{shape[1]}", f'device_description_str: "{kind}"')
        return cls(name, topology, *known, figures.link, _BETWEEN_HOSTS[kind])

    @property
    def device_count(self) -> int:
        """How many devices there are."""
        return self.topology.device_count

    @property
    def hosts(self) -> int:
        """In how many hosts GPUs are; 1 of other devices."""
        return self.topology.shape[0] if self.topology.kind == "gpu" else 1

    @property
    def overlaps(self) -> bool:
        """Whether devices compute while they send; simulated ones share the cores of a machine."""
        return self.topology.kind != "cpu"

    def bandwidths(self, mesh_sizes: Mapping[str, int]) -> dict[str, float]:
        """The bytes per second that one device can send over each mesh axis at most.

        Args:
            mesh_sizes: The size of each mesh axis. The last ones are within a host, as JAX lays
                them.

        Raises:
            MeshError: The mesh has another number of devices.
        """
        if not self.link:
            return mesh_bandwidths(self.topology, mesh_sizes)
        self.topology.check_mesh(mesh_sizes)
        inside, rates = self.device_count // self.hosts, {}
        for axis, size in reversed(mesh_sizes.items()):
            # Over several hosts, as many devices of the axis as a host has share their ports.
            own = math.gcd(inside, size)
            rates[axis] = self.link if own == size else min(self.link, own * self.between)
            inside //= own
        return {axis: rates[axis] for axis in mesh_sizes}


class Devices(NamedTuple):
    """The devices that a layout is looked for.

    Attributes:
        hardware: What they are.
        memory: The bytes that a step may need on one of them.
        mesh_sizes: The size of each mesh axis, if a mesh was given; None leaves it open.
    """

    hardware: Hardware
    memory: int
    mesh_sizes: Mapping[str, int] | None

    @property
    def words(self) -> str:
        """What they are, for people."""
        mesh = f", mesh ({mesh_text(self.mesh_sizes)})" if self.mesh_sizes else ""
        return f"{self.hardware.name}{mesh}"


class StepTime(NamedTuple):
    """How long a step takes at least, and what for, in seconds.

    Real steps take longer; which of two layouts is faster is said by the same figures. Source of
    the method: Williams et al. 2009, "Roofline"; of the update's part in it: Xu et al. 2020
    (arXiv:2004.13336).

    Attributes:
        compute: For products and convolutions, at the peak in bfloat16.
        send: For all that is sent, by the best division over the links.
        update: For the optimizer's state, which is read from memory and written back once.
        by_mesh_axis: For what is sent over each mesh axis.
        overlaps: Whether all of that happens at the same time.
    """

    compute: float
    send: float
    update: float
    by_mesh_axis: Mapping[str, float]
    overlaps: bool

    @property
    def total(self) -> float:
        """The three one after the other."""
        return self.compute + self.send + self.update

    @property
    def bound(self) -> float:
        """The largest of the three, or their sum where devices do one thing at a time."""
        return max(self[:3]) if self.overlaps else self.total


def step_time(cost: "StepCost", mesh_sizes: Mapping[str, int], hardware: Hardware) -> StepTime:
    """How long a step takes at least.

    Args:
        cost: What it costs one device.
        mesh_sizes: The size of each mesh axis.
        hardware: The devices.

    Raises:
        MeshError: The mesh has another number of devices.

    >>> from penzai_shard.choosing.cost import Sent, StepCost
    >>> sent = (Sent("parameter", (), ("data",), 5e10),)
    >>> cost = StepCost(flops=1.97e14, sent=sent, memory={"optimizer": 8.19e9})
    >>> time = step_time(cost, {"data": 8, "model": 4}, Hardware.read("v5e:32"))
    >>> time.compute, time.send, time.update, time.bound
    (1.0, 1.0, 0.02, 1.0)
    """
    rates = hardware.bandwidths(mesh_sizes)
    by_mesh_axis = dict.fromkeys(mesh_sizes, 0.0)
    for axes, sent in cost.traffic.items():
        for axis in axes:
            by_mesh_axis[axis] += sent / sum(rates[each] for each in axes)
    updated = 2 * cost.memory.get("optimizer", 0.0)
    return StepTime(
        cost.flops / hardware.flops,
        least_time(cost.traffic, mesh_sizes, rates),
        updated / hardware.memory_bandwidth,
        by_mesh_axis,
        hardware.overlaps,
    )
