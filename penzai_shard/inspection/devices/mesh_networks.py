"""What one device can send over each axis of a mesh, from where JAX lays the mesh.

Mesh axes may share links: those inside of a host all go through its switch, and two that divide
an axis of a torus go over the same wires. They then have together what one of them has alone.
"""

import dataclasses
import math
from collections.abc import Collection, Mapping, Sequence
from typing import Protocol

import numpy as np

from penzai_shard.errors import MeshError
from penzai_shard.inspection.devices.topologies import Topology
from penzai_shard.library_apis.mesh_orders import positions_of_mesh
from penzai_shard.meshes import mesh_text

_BETWEEN = "between"


@dataclasses.dataclass(frozen=True)
class MeshNetwork:
    """What one device can send over the axes of a mesh.

    Attributes:
        rates: For each mesh axis the links that it goes over, and how many bytes one device can
            send over these in a second; empty for a mesh axis of size 1.
    """

    rates: Mapping[str, Mapping[str, float]]

    @property
    def bandwidth(self) -> dict[str, float]:
        """What one device can send in a second over each mesh axis of more than one device."""
        return {axis: sum(links.values()) for axis, links in self.rates.items() if links}

    def carried(self, mesh_axes: Collection[str]) -> float:
        """What one device can send in a second over some mesh axes at once.

        >>> shared = MeshNetwork({"data": {"host": 450e9}, "model": {"host": 450e9}})
        >>> shared.carried(["data", "model"])
        450000000000.0
        """
        best: dict[str, float] = {}
        for axis in mesh_axes:
            for link, rate in self.rates[axis].items():
                best[link] = max(best.get(link, 0.0), rate)
        return sum(best.values())

    def used(self, mesh_axes: Collection[str]) -> frozenset[str]:
        """Of some mesh axes those of more than one device; if they are not known, all of these."""
        real = [axis for axis, links in self.rates.items() if links]
        return frozenset(axis for axis in mesh_axes or real if axis in real)


class DeviceNetwork(Protocol):
    """How devices are connected."""

    @property
    def device_count(self) -> int:
        """How many JAX devices there are."""

    def of_mesh(self, mesh_shape: Mapping[str, int]) -> MeshNetwork:
        """What a device can send over the axes of a mesh."""


@dataclasses.dataclass(frozen=True)
class HostNetwork:
    """Devices in hosts, each host with a switch or a bus that all its devices share.

    JAX lays a mesh over them in order, so that the last mesh axes are inside of a host.

    Attributes:
        hosts: How many hosts there are.
        devices_per_host: How many devices each has.
        within: What a device can send to others of its host, in bytes per second; None if that is
            not known.
        between: What it can send to other hosts.
    """

    hosts: int
    devices_per_host: int
    within: float | None
    between: float | None

    @property
    def device_count(self) -> int:
        """How many devices there are."""
        return self.hosts * self.devices_per_host

    def of_mesh(self, mesh_shape: Mapping[str, int]) -> MeshNetwork:
        """What a device can send over the axes of a mesh.

        Raises:
            MeshError: The mesh has another number of devices, or a figure that it needs is not
                known.

        >>> HostNetwork(2, 8, 450e9, 50e9).of_mesh({"data": 2, "model": 8}).bandwidth
        {'data': 50000000000.0, 'model': 450000000000.0}
        """
        _refuse_count(mesh_shape, self.device_count)
        numbers = np.arange(self.device_count)
        positions = np.stack(
            [numbers // self.devices_per_host, numbers % self.devices_per_host], axis=-1
        ).reshape(*mesh_shape.values(), 2)
        rates = {}
        for number, (axis, size) in enumerate(mesh_shape.items()):
            lines = np.moveaxis(positions, number, -2).reshape(-1, size, 2)
            hosts = max(_parts(line)[0] for line in lines)
            inside = -(-size // hosts)
            levels = []
            if hosts > 1:
                levels.append(({_BETWEEN: _known(self.between, axis, "between", "hosts")}, hosts))
            if inside > 1:
                levels.append(({"host": _known(self.within, axis, "within", "a host")}, inside))
            rates[axis] = _over_levels(levels)
        return MeshNetwork(rates)


@dataclasses.dataclass(frozen=True)
class TorusNetwork:
    """Slices of TPUs: chips along the axes of a torus, and a network between slices.

    A mesh axis that goes once around an axis of the torus sends in both directions. Where there is
    no link back, or it goes over a part of that axis alone, its devices are a line, whose ends
    limit it to one link. One that goes over several axes of the torus has the links of all.

    Attributes:
        topology: The slices.
        device_kind: As JAX names it.
        link: What a chip can send over one link to one neighbour, in bytes per second.
        within_chip: What a device can send to the other device of its chip, in bytes per second.
        between: What a chip can send to other slices.
    """

    topology: Topology
    device_kind: str
    link: float | None
    within_chip: float | None
    between: float | None

    @property
    def device_count(self) -> int:
        """How many devices there are."""
        return self.topology.device_count

    def of_mesh(self, mesh_shape: Mapping[str, int]) -> MeshNetwork:
        """What a device can send over the axes of a mesh.

        Raises:
            MeshError: The mesh has another number of devices, JAX cannot lay it over them, or a
                figure that it needs is not known.

        >>> network = TorusNetwork(Topology("v5e:4x8"), "TPU v5 lite", 50e9, None, None)
        >>> network.of_mesh({"data": 8, "model": 4}).bandwidth
        {'data': 50000000000.0, 'model': 50000000000.0}
        """
        self.topology.refuse_mesh(mesh_shape)
        per_chip = self.topology.devices_per_chip
        positions = positions_of_mesh(
            self.device_kind,
            self.topology.shape,
            per_chip,
            tuple(mesh_shape.values()),
            self.topology.slices_of_axes(mesh_shape),
        )
        if positions is None:
            raise MeshError(
                f"JAX cannot lay mesh ({mesh_text(mesh_shape)}) over {self.topology.name!r}: each "
                "mesh axis needs whole axes of the torus. Choose sizes that are products of "
                f"{', '.join(map(str, self.topology.shape))}."
            )
        rates = {}
        for number, axis in enumerate(mesh_shape):
            line = _line(positions, number)
            slices, *torus, on_chip = _parts(line)
            levels = []
            if slices > 1:
                between = _known(self.between, axis, "between", "slices") / per_chip
                levels.append(({_BETWEEN: between}, slices))
            if any(count > 1 for count in torus):
                link = _known(self.link, axis, "within", "a slice") / per_chip
                chips = len(line) // (slices * on_chip)
                levels.append((self._along_torus(line, torus, chips, link), chips))
            if on_chip > 1:
                within = _known(self.within_chip, axis, "within_chip", "a chip")
                levels.append(({"chip": within}, on_chip))
            rates[axis] = _over_levels(levels)
        return MeshNetwork(rates)

    def _along_torus(
        self, line: np.ndarray, counts: Sequence[int], chips: int, link: float
    ) -> dict[str, float]:
        """The rates of a mesh axis along each axis of the torus, by those of one link."""
        if math.prod(counts) != chips:
            # A path through the chips that is no part of the grid: a ring that JAX has chosen.
            return {f"torus axis {max(range(len(counts)), key=lambda which: counts[which])}": link}
        found = {}
        for which, count in enumerate(counts):
            if count == 1:
                continue
            stride = int(np.diff(np.unique(line[:, 1 + which])).min())
            is_ring = self.topology.wraps[which] and count * stride == self.topology.shape[which]
            # As many lines as the stride is share each link.
            found[f"torus axis {which}"] = link * (2 if is_ring else 1) / stride
        return found


def _over_levels(levels: Sequence[tuple[dict[str, float], int]]) -> dict[str, float]:
    """The rates of a mesh axis that goes over links of several kinds, the outermost first.

    To gather parts of all, a device first sends its own over the outermost links, to as many others
    as there are groups of devices; then what it has over the next ones, and so on. The level that
    takes longest limits them all.
    """
    sent, held = [], 1
    for _, size in levels:
        sent.append((size - 1) * held)
        held *= size
    scaled = [
        {link: rate * (held - 1) / bytes_ for link, rate in rates.items()}
        for (rates, _), bytes_ in zip(levels, sent, strict=True)
    ]
    return min(scaled, key=lambda rates: sum(rates.values()), default={})


def _line(positions: np.ndarray, number: int) -> np.ndarray:
    """The positions of the first devices along a mesh axis."""
    index: list[int | slice] = [0] * (positions.ndim - 1)
    index[number] = slice(None)
    return positions[tuple(index)]


def _parts(line: np.ndarray) -> list[int]:
    """In how many values each coordinate differs."""
    return [len(np.unique(line[:, each])) for each in range(line.shape[1])]


def _known(rate: float | None, axis: str, figure: str, where: str) -> float:
    if rate is None:
        place = "between" if figure == "between" else "inside of"
        raise MeshError(
            f"mesh axis {axis!r} goes {place} {where}, and what a device can send there is not "
            "published. Give it, in bytes per second: "
            f"hardware.with_figures({figure}=25e9)."
        )
    return rate


def _refuse_count(mesh_shape: Mapping[str, int], count: int) -> None:
    wanted = math.prod(mesh_shape.values())
    if wanted != count:
        raise MeshError(
            f"the mesh ({mesh_text(mesh_shape)}) has {wanted:,} devices, and the hardware has "
            f"{count:,}. Choose sizes of the mesh axes whose product is {count:,}."
        )
