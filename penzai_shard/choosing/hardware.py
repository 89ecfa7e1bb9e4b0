"""Says how fast devices are, by name, and how long a step takes on them at least."""

import collections
import dataclasses
import itertools
import math
import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple, Self

from jax.sharding import AbstractMesh, Mesh

from penzai_shard.errors import MeshError, Problem, Problems
from penzai_shard.inspection import topologies
from penzai_shard.paths import nearest

if TYPE_CHECKING:
    from penzai_shard.choosing.cost import StepCost

_EXAMPLES = "Write for instance 'v5e:32', 'v5p:4x4x8', 'h100:16' or 'cpu:8'."
_GPUS_OF_A_HOST = 8
# Of all simulated devices together, measured on one core of a server's processor and rounded:
# operations, and bytes of memory and of links, per second. Only their ratios matter.
_SIMULATED = topologies.Figures("cpu", "", 120e9, 0, 7e9, 10e9)
_FIGURES = {each.kind: each for each in (*topologies.FIGURES, _SIMULATED)}
_NUMBERS = re.compile(r"\d+(x\d+)*")
_BYTES = re.compile(r"(\d+(?:\.\d+)?) ?([KMGT]?)(i?)B")


@dataclasses.dataclass(frozen=True)
class Hardware:
    """Devices of one kind, with the figures that their vendor publishes.

    Attributes:
        name: What they are called.
        topology: Their number, and the links of TPUs.
        flops: Dense operations in bfloat16 per second of one device.
        memory: The bytes that programs can have on one device; None if that is not known.
        memory_bandwidth: Bytes per second of its own memory.
        link: Bytes per second of a TPU over one link, of others to all devices of their host.
        between: Bytes per second that a GPU sends to other hosts.
    """

    name: str
    topology: topologies.Topology
    flops: float
    memory: int | None
    memory_bandwidth: float
    link: float
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
        headline = f"there is no hardware {name!r}:"
        kind, _, numbers = str(name).lower().partition(":")
        is_number = _NUMBERS.fullmatch(numbers) is not None
        if kind not in _FIGURES or not is_number:
            near = nearest(kind, _FIGURES)
            fix = f"Write '{near}:{numbers if is_number else 8}'." if near else _EXAMPLES
            what = f"a name is a kind of device ({', '.join(_FIGURES)}) and a number of them"
            raise MeshError(headline, [Problem(kind, what, fix)])
        published, shape = _FIGURES[kind], tuple(map(int, numbers.split("x")))
        count, is_gpu = math.prod(shape), published.between > 0
        # Of one number the slice, or the whole hosts, that come nearest.
        if is_gpu and len(shape) == 1:
            shape = -(-count // _GPUS_OF_A_HOST), min(count, _GPUS_OF_A_HOST)
        elif published.slices and len(shape) == 1:
            slices = published.slices.all_shapes()
            shape = min(slices, key=lambda each: abs(math.prod(each) - count))
        if math.prod(shape) != count:
            what = "slices and whole hosts have other numbers of devices"
            raise MeshError(headline, [Problem("", what, f"Write '{kind}:{math.prod(shape)}'.")])

        size = "x".join(map(str, shape))
        # Which GPUs they are is known here; a description of them is for compilers.
        topology = topologies.Topology(f"{'gpu' if is_gpu else kind}:{size}", "any" * is_gpu)
        _, _, flops, memory, bandwidth, link, between, _ = published
        share = topology.device_count if kind == "cpu" else 1
        figures = flops / share, int(memory) or None, bandwidth / share, link / share
        return cls(f"{kind}:{size}", topology, *figures, between)

    @property
    def device_count(self) -> int:
        """How many devices there are."""
        return self.topology.device_count

    @property
    def hosts(self) -> int:
        """In how many hosts GPUs are; 1 of other devices."""
        return self.topology.shape[0] if self.between else 1

    def has_mesh(self, mesh_sizes: Mapping[str, int]) -> bool:
        """Whether ``jax.make_mesh`` lays a mesh of as many devices over them.

        Args:
            mesh_sizes: The size of each mesh axis.
        """
        # Where a mesh axis does not have whole axes of the grid, each is said to have all links.
        links = sum(self.bandwidths(mesh_sizes).values()) / self.link
        return self.topology.platform != "tpu" or links <= 2 * len(self.topology.shape)

    def bandwidths(self, mesh_sizes: Mapping[str, int]) -> dict[str, float]:
        """The bytes per second that one device can send over each mesh axis at most.

        Args:
            mesh_sizes: The size of each mesh axis. The last ones are within a host, as JAX lays
                them.

        Raises:
            MeshError: The mesh has another number of devices.
        """
        self.topology.check_mesh(mesh_sizes)
        slices = topologies.SLICES.get(self.topology.kind)
        if slices and slices.has_parts:
            return self._split_grid(mesh_sizes, slices.ring)
        if slices:
            links = _count_links(self.topology, mesh_sizes)
            return {axis: links[axis] * self.link for axis in mesh_sizes}
        inside, rates = self.device_count // self.hosts, dict.fromkeys(mesh_sizes, self.link)
        for axis, size in reversed([*mesh_sizes.items()]):
            own = math.gcd(inside, size)
            inside //= own
            if hosts := size // own - 1:
                # What all gather, each sends to every other host once; the rest stays in a host.
                rates[axis] = min(self.link, self.between * (size - 1) / hosts)
        return rates

    def _split_grid(self, mesh_sizes: Mapping[str, int], ring: int) -> dict[str, float]:
        """The same where a mesh axis may have a part of an axis of the grid.

        Several rows that go over the same links, one for each device in between, share them.
        """
        shape = self.topology.shape
        free, rates = [*shape], dict.fromkeys(mesh_sizes, 0.0)
        for axis, size in reversed([*mesh_sizes.items()]):
            rest, dims = size, range(len(shape))
            # An axis of the grid of just that length first, then those that it divides most.
            for dim in sorted(dims, key=lambda d: (free[d] != size, -math.gcd(free[d], size))):
                part, stride = math.gcd(free[dim], rest), shape[dim] // free[dim]
                if part > 1:
                    is_ring = part * stride == shape[dim] == ring
                    rates[axis] += (1 + is_ring) / stride * self.link
                    free[dim] //= part
                    rest //= part
        return rates


def _count_links(topology: topologies.Topology, mesh_sizes: Mapping[str, int]) -> dict[str, int]:
    """How many links a TPU has along each mesh axis.

    A mesh axis with whole axes of a slice's grid of chips has their links, both directions where
    they are rings; where one has none, each may have all links of a chip.
    """
    slices = topologies.SLICES[topology.kind]
    ring, is_torus = slices.ring, topology.shape in slices.cubes()
    free, links = [n for n in topology.shape if n > 1], {}
    # From the last mesh axis on, and rather over several axes of the grid, as JAX lays a mesh.
    for axis, size in reversed([*mesh_sizes.items()]):
        chosen = next(
            (
                own
                for count in range(len(free), -1, -1)
                for own in itertools.combinations(free, count)
                if math.prod(own) == size
            ),
            None,
        )
        if chosen is None:
            return dict.fromkeys(mesh_sizes, 2 * len(topology.shape))
        links[axis] = sum(1 + (is_torus or n == ring) for n in chosen)
        for own in chosen:
            free.remove(own)
    return links


# What choose_layout is given


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


def read_devices(devices: Any, hardware: Any, memory: Any, problems: Problems) -> Any:
    """Reads the arguments of ``choose_layout`` that say what is computed on.

    Args:
        devices: The name of hardware, a mesh, JAX's devices, or a number.
        hardware: What a mesh or a number is of, ``"v5e"``; JAX knows it of devices that are there.
        memory: The bytes that a step may need on a device, also as text: ``"14GiB"``; None for what
            programs can have of it.
        problems: Gets what cannot be read, or does not go together.

    Returns:
        ``Devices``; None if there are problems.

    Raises:
        MeshError: There are no such devices.

    >>> read_devices(32, "v5e", "14GiB", Problems("")).hardware.name
    'v5e:4x8'
    """
    mesh_sizes, members = None, devices if isinstance(devices, list | tuple) else ()
    count = len(members) or devices
    if isinstance(devices, Mesh | AbstractMesh):
        mesh_sizes, count = dict(devices.shape), devices.size
        members = list(devices.devices.flat) if isinstance(devices, Mesh) else ()
    if hardware is None and members and hasattr(members[0], "device_kind"):
        figures = topologies.find_figures(members[0].device_kind)
        hardware = figures.kind if figures else members[0].platform
    is_number = isinstance(count, int) and not isinstance(count, bool)
    if not is_number and not isinstance(devices, str):
        problems.add("devices", f"it is a {type(devices).__name__}", _EXAMPLES)
    elif is_number and hardware is None:
        fix = "Write hardware='v5e', or hardware='cpu' for simulated devices."
        problems.add("devices", f"how fast these devices ({count:,}) are is not known", fix)
    elif not is_number and hardware is not None:
        problems.add("hardware", f"{devices!r} says what they are already", "Leave it out.")
    limit = memory
    if isinstance(memory, str) and (text := _BYTES.fullmatch(memory)):
        power = " KMGT".index(text[2] or " ")
        limit = float(text[1]) * (1024 if text[3] else 1000) ** power
    if memory is not None and not (isinstance(limit, int | float) and 1024 <= limit < math.inf):
        fix = "Write a number of bytes, or for instance memory='14GiB'."
        problems.add("memory", f"{memory!r} is no size of a device's memory", fix)
    if len(problems):
        return None

    name = devices if isinstance(devices, str) else str(hardware)
    found = Hardware.read(name if ":" in name else f"{name}:{count}")
    if is_number and found.device_count != count:
        what = f"there are {count:,} devices, and {found.name!r} has {found.device_count:,}"
        problems.add("hardware", what, f"Write {found.name.partition(':')[0]!r}.")
    if limit is None and found.memory is None:
        what = f"how much a device of {found.name!r} has is not known"
        problems.add("memory", what, "Write memory='16GiB'.")
    problems.raise_if_any(MeshError)
    return Devices(found, int(limit or found.memory or 0), mesh_sizes)


# Times


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
        bound: The largest of the three, or their sum where devices do one thing at a time.
    """

    compute: float
    send: float
    update: float
    by_mesh_axis: Mapping[str, float]
    bound: float

    @property
    def total(self) -> float:
        """The three one after the other."""
        return self.compute + self.send + self.update


def share_out(
    sent: Mapping[tuple[str, ...], float], mesh_sizes: Mapping[str, int]
) -> dict[tuple[str, ...], float]:
    """The bytes that go over single mesh axes at least, and the rest, which may go over several.

    Of what is summed or gathered over several mesh axes each carries a part. It is least where the
    others come first, as in hierarchical collectives: of ``n`` devices, ``a`` of them along that
    axis, the part ``(a - 1) / (n - 1)``.

    >>> share_out({("data", "model"): 7.0}, {"data": 4, "model": 2})
    {('data',): 3.0, ('model',): 1.0, ('data', 'model'): 3.0}
    """
    found = collections.defaultdict[tuple[str, ...], float](float)
    for axes, count in sent.items():
        others = max(math.prod(mesh_sizes[axis] for axis in axes) - 1, 1)
        parts = [count * (mesh_sizes[axis] - 1) / others for axis in axes if len(axes) > 1]
        for axis, part in zip(axes, parts, strict=False):
            found[axis,] += part
        found[axes] += count - sum(parts)
    return dict(found)


def least_time(sent: Mapping[tuple[str, ...], float], rates: Mapping[str, float]) -> float:
    """A lower bound in seconds of the time to send bytes over mesh axes.

    What goes over any set of mesh axes takes at least its bytes divided by what their links carry
    together; the worst set gives the bound, which by the theorem on flows and cuts is enough.

    Args:
        sent: The bytes that one device sends over each set of mesh axes.
        rates: The bytes per second that one device can send over each mesh axis.

    >>> least_time({("data",): 6.0, ("data", "model"): 6.0}, {"data": 1.0, "model": 1.0})
    6.0
    """
    used = sorted({axis for axes, count in sent.items() if count for axis in axes})

    def busy_time(axes: tuple[str, ...]) -> float:
        """The time for what stays within some mesh axes."""
        inside = sum(count for own, count in sent.items() if {*own} <= {*axes})
        return inside / sum(rates[axis] for axis in axes)

    sizes = range(1, len(used) + 1)
    sets = itertools.chain.from_iterable(itertools.combinations(used, size) for size in sizes)
    return max(map(busy_time, sets), default=0.0)


def step_time(cost: "StepCost", mesh_sizes: Mapping[str, int], hardware: Hardware) -> StepTime:
    """How long a step takes at least.

    Args:
        cost: What it costs one device.
        mesh_sizes: The size of each mesh axis.
        hardware: The devices.

    Raises:
        MeshError: The mesh has another number of devices.

    >>> from penzai_shard.choosing.cost import StepCost
    >>> sent = {("parameter", ("data",)): 5e10}
    >>> cost = StepCost(flops=1.97e14, sent=sent, memory={"optimizer": 8.19e9})
    >>> time = step_time(cost, {"data": 8, "model": 4}, Hardware.read("v5e:32"))
    >>> time.compute, time.send, time.update, time.bound
    (1.0, 1.0, 0.02, 1.0)
    """
    rates, shares = hardware.bandwidths(mesh_sizes), share_out(cost.traffic, mesh_sizes)
    send = least_time(shares, rates)
    by_mesh_axis = dict.fromkeys(mesh_sizes, 0.0)
    for axes, sent in shares.items():
        seconds = sent / sum(rates[axis] for axis in axes)
        for axis in axes:
            # By the best division none is busy for longer.
            by_mesh_axis[axis] = min(by_mesh_axis[axis] + seconds, send)
    update = 2 * cost.memory.get("optimizer", 0.0) / hardware.memory_bandwidth
    parts = cost.flops / hardware.flops, send, update
    # Simulated devices share the cores of a machine, so that none computes while it sends.
    bound = sum(parts) if hardware.topology.kind == "cpu" else max(parts)
    return StepTime(*parts, by_mesh_axis, bound)
