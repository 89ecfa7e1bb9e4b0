"""Hardware by name: how fast it computes, what memory it has, and how its devices are joined."""

import dataclasses
import difflib
import functools
import re
from collections.abc import Mapping
from typing import Any

from penzai_shard.errors import MeshError, raise_all
from penzai_shard.inspection.devices.device_figures import device_figures
from penzai_shard.inspection.devices.mesh_networks import (
    DeviceNetwork,
    HostNetwork,
    MeshNetwork,
    TorusNetwork,
)
from penzai_shard.inspection.devices.published_figures import (
    PUBLISHED,
    SIMULATED,
    PublishedFigures,
)
from penzai_shard.inspection.devices.quantities import is_positive
from penzai_shard.inspection.devices.topologies import (
    OTHER_NAMES,
    TPU_GENERATIONS,
    Topology,
    machine_fix,
    topologies_of,
)

_NAME = re.compile(r"([A-Za-z][\w-]*):(\d+(?:x\d+)*)((?:_twisted)?(?:\*\d+)?)")
_EXAMPLES = '"v5e:32", "v5p:4x4x8", "v5e:16x16*2" (two slices), "h100:16" (two hosts of 8)'


@dataclasses.dataclass(frozen=True)
class Hardware:
    """Devices of one kind, with the figures that their vendor publishes, or figures of one's own.

    Attributes:
        name: What they are called.
        flops: What one JAX device can compute, in dense bfloat16 operations per second.
        memory: How much of its memory a program can have, in bytes; None if that is not known.
        network: How the devices are joined: a ``HostNetwork``, or a ``TorusNetwork`` of TPUs.
        sources: Where the figures are from.
        memory_bandwidth: What one device can read from its memory and write to it, in bytes per
            second; None if that is not known.
        overlaps: Whether a device can compute while it sends. Simulated devices cannot: they share
            the cores of one machine, and its memory.

    >>> hardware = Hardware.read("v5e:32")
    >>> hardware.name, hardware.device_count, f"{hardware.flops:.3g}"
    ('v5e:4x8', 32, '1.97e+14')
    >>> own = Hardware("own", 4e14, 64 * 10**9, HostNetwork(2, 8, within=2e11, between=2e10))
    >>> own.bandwidth({"data": 2, "model": 8})
    {'data': 20000000000.0, 'model': 200000000000.0}
    """

    name: str
    flops: float
    memory: int | None
    network: DeviceNetwork
    sources: tuple[str, ...] = dataclasses.field(default=(), compare=False)
    memory_bandwidth: float | None = None
    overlaps: bool = True

    def __post_init__(self) -> None:
        problems = [
            f"{figure}: must be a positive number, not {given!r}."
            for figure in ("flops", "memory", "memory_bandwidth")
            for given in (getattr(self, figure),)
            if given is not None and not is_positive(given)
        ]
        raise_all(MeshError, f"hardware {self.name!r} cannot be:", problems)

    @classmethod
    def read(cls, name: str) -> "Hardware":
        """The hardware of a name.

        Args:
            name: A kind of device and how many: chips of TPUs (``"v5e:32"``), or the name of a
                topology (``"v5p:4x4x8"``, ``"v5e:16x16*2"``); GPUs in hosts of 8 (``"h100:16"``),
                or hosts and devices of each (``"h100:4x4"``); simulated devices (``"cpu:8"``).

        Returns:
            The hardware, with published figures; of simulated devices with measured ones.

        Raises:
            MeshError: There is none of that name; the message says which there is.

        >>> Hardware.read("h100:16").bandwidth({"data": 2, "model": 8})
        {'data': 50000000000.0, 'model': 450000000000.0}
        """
        found = _NAME.fullmatch(name) if isinstance(name, str) else None
        if found is None:
            fix = _meant_name(name) if isinstance(name, str) else ""
            raise MeshError(
                f"{name!r} is not the name of hardware. {fix}Names are for instance {_EXAMPLES}."
            )
        kind, shape = found[1].lower(), tuple(map(int, found[2].split("x")))
        if kind == "cpu":
            return _simulated(name, shape, found[3])
        if kind not in PUBLISHED:
            raise MeshError(f"hardware {name!r}: {_unknown_kind(name, found[1])}")
        figures = PUBLISHED[kind]
        if kind in TPU_GENERATIONS:
            return _tpus(_topology(kind, shape, found[3]), figures)
        if found[3]:
            raise MeshError(f"hardware {name!r}: GPUs have no slices. Write {kind}:{found[2]}.")
        return _gpus(kind, shape, figures)

    @property
    def device_count(self) -> int:
        """How many JAX devices there are."""
        return self.network.device_count

    @functools.cached_property
    def _of_mesh(self) -> "functools._lru_cache_wrapper[MeshNetwork]":
        return functools.lru_cache(maxsize=None)(
            lambda mesh_axes: self.network.of_mesh(dict(mesh_axes))
        )

    def __getstate__(self) -> dict[str, Any]:
        # What is kept of meshes stays behind: it cannot be pickled, and is found again.
        return {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}

    def of_mesh(self, mesh_shape: Mapping[str, int]) -> MeshNetwork:
        """What a device can send over the axes of a mesh, and which of them share links.

        Args:
            mesh_shape: The size of each mesh axis.

        Raises:
            MeshError: As ``bandwidth`` does.
        """
        return self._of_mesh(tuple(mesh_shape.items()))

    def bandwidth(self, mesh_shape: Mapping[str, int]) -> dict[str, float]:
        """What one device can send in a second over each axis of a mesh of more than one device.

        Args:
            mesh_shape: The size of each mesh axis. ``make_mesh`` lays the last ones on devices that
                are near each other.

        Returns:
            Bytes per second, in both directions of a ring together, as ``CollectiveReport.time``
            takes them.

        Raises:
            MeshError: The mesh has another number of devices, it cannot be laid over them, or a
                figure that it needs is not published.
        """
        return self.of_mesh(mesh_shape).bandwidth

    def with_figures(
        self,
        *,
        flops: float | None = None,
        memory: int | None = None,
        within: float | None = None,
        between: float | None = None,
        within_chip: float | None = None,
        memory_bandwidth: float | None = None,
    ) -> "Hardware":
        """The same with figures of one's own, measured or not published.

        Args:
            flops: As the attribute.
            memory: As the attribute.
            within: What a GPU can send to others of its host, or a TPU chip over one link, in bytes
                per second.
            between: What a GPU or a chip can send to other hosts or slices.
            within_chip: What a device can send to the other one of its TPU chip.
            memory_bandwidth: As the attribute.

        >>> hardware = Hardware.read("v4:4x4x4*2").with_figures(between=6.25e9)
        >>> hardware.bandwidth({"data": 2, "model": 64})["data"]
        6250000000.0
        """
        given = {"within": within, "between": between, "within_chip": within_chip}
        if isinstance(self.network, TorusNetwork):
            given["link"] = given.pop("within")
        changed = {name: value for name, value in given.items() if value is not None}
        problems = [
            f"{figure}: must be a positive number of bytes per second, not {value!r}."
            for figure, value in changed.items()
            if not is_positive(value)
        ]
        raise_all(MeshError, f"hardware {self.name!r} cannot be:", problems)
        network: Any = self.network
        return dataclasses.replace(
            self,
            flops=self.flops if flops is None else flops,
            memory=self.memory if memory is None else memory,
            memory_bandwidth=(
                self.memory_bandwidth if memory_bandwidth is None else memory_bandwidth
            ),
            network=dataclasses.replace(network, **changed),
        )


def _tpus(topology: Topology, figures: PublishedFigures) -> Hardware:
    per_chip = topology.devices_per_chip
    # Of what the two devices of a chip send each other no figure is published. It comes from the
    # memory of one, and goes to that of the other.
    within_chip = figures.memory_bandwidth / per_chip
    network = TorusNetwork(
        topology, figures.device_kind, figures.link, within_chip, figures.network
    )
    return _of_kind(topology.name, figures, network, per_chip)


def _simulated(name: str, shape: tuple[int, ...], rest: str) -> Hardware:
    """Simulated devices, each with its share of one machine."""
    if len(shape) > 1 or rest or shape[0] == 0:
        raise MeshError(f'hardware {name!r}: simulated devices are counted. Write "cpu:8".')
    count, figures = shape[0], SIMULATED
    return Hardware(
        f"cpu:{count}",
        figures.flops / count,
        None,
        HostNetwork(1, count, figures.link / count, None),
        figures.sources,
        figures.memory_bandwidth / count,
        overlaps=False,
    )


def _gpus(kind: str, shape: tuple[int, ...], figures: PublishedFigures) -> Hardware:
    count, most = shape[0], figures.devices_per_host
    name = f"{kind}:{'x'.join(map(str, shape))}"
    if len(shape) > 2 or 0 in shape:
        raise MeshError(
            f'hardware {name!r}: write "{kind}:16", or by hosts and devices "{kind}:2x8".'
        )
    if len(shape) == 1 and count > most and count % most:
        fewer = count - count % most
        raise MeshError(
            f"hardware {name!r}: {count} is not a number of whole hosts of {most}. Write "
            f"'{kind}:{fewer}' or '{kind}:{fewer + most}', or how many devices each host has: "
            f"'{kind}:{count}x1'."
        )
    hosts, each = shape if len(shape) == 2 else (-(-count // most), min(count, most))
    network = HostNetwork(hosts, each, figures.link, figures.network)
    return _of_kind(name, figures, network, 1)


def _of_kind(
    name: str, figures: PublishedFigures, network: DeviceNetwork, per_chip: int
) -> Hardware:
    usable = device_figures(figures.device_kind)
    assert usable is not None
    sources = (*figures.sources, usable.source)
    bandwidth = figures.memory_bandwidth / per_chip
    return Hardware(name, figures.flops / per_chip, usable.memory, network, sources, bandwidth)


def _topology(kind: str, shape: tuple[int, ...], rest: str) -> Topology:
    """The slices of a name, which may say the number of chips instead of their shape."""
    if len(shape) > 1:
        return Topology(f"{kind}:{'x'.join(map(str, shape))}{rest}")
    per_chip = TPU_GENERATIONS[kind].devices_per_chip
    fitting = topologies_of(kind, shape[0] * per_chip) if not rest and shape[0] else []
    if not fitting:
        raise MeshError(
            f"hardware {f'{kind}:{shape[0]}{rest}'!r}: there are no slices of {shape[0]} chips of "
            f"{kind}. {_near_counts(kind, shape[0])}"
        )
    return Topology(fitting[0])


def _near_counts(kind: str, chips: int) -> str:
    per_chip = TPU_GENERATIONS[kind].devices_per_chip
    fewer, more = (
        next((n for n in counts if topologies_of(kind, n * per_chip)), None)
        for counts in (range(chips - 1, 0, -1), range(chips + 1, 2 * chips + 64))
    )
    names = [f"'{kind}:{n}'" for n in (fewer, more) if n is not None]
    return f"Write {' or '.join(names)}."


def _meant_name(name: str) -> str:
    """What to write in place of a number, of a kind alone, or of other people's forms of a name."""
    if name.isdecimal():
        return f"Say what they are: 'v5e:{name}'. "
    kind = OTHER_NAMES.get(name.lower(), name.lower())
    if kind in PUBLISHED:
        return f"Say how many: '{kind}:8'. "
    counted_first = re.fullmatch(r"(\d+)\s*x?\s*([A-Za-z][\w-]*)", name)
    if counted_first and counted_first[2].lower() in PUBLISHED:
        return f"Write '{counted_first[2].lower()}:{counted_first[1]}'. "
    kinds = "|".join(sorted(PUBLISHED, key=len, reverse=True))
    counted_last = re.fullmatch(rf"({kinds})[\s:x*]*(\d[\dx]*)", name.strip().lower())
    if counted_last:
        return f"Write '{counted_last[1]}:{counted_last[2]}'. "
    last_word = name.split()[-1] if name.split() else ""
    if last_word != name and _NAME.fullmatch(last_word):
        return f"Write {last_word!r}. "
    return machine_fix(name)


def _unknown_kind(name: str, kind: str) -> str:
    known = f"Figures are known of {', '.join(PUBLISHED)}, cpu."
    if kind.lower() in OTHER_NAMES:
        return f"{kind!r} is not known. Write {name.replace(kind, OTHER_NAMES[kind.lower()])!r}."
    near = [name.replace(kind, each) for each in difflib.get_close_matches(kind.lower(), PUBLISHED)]
    meant = f"Did you mean {' or '.join(map(repr, near[:2]))}? " if near else ""
    return (
        f"{kind!r} is not known. {meant}{known} Others can be described: Hardware({name!r}, "
        "flops=4e14, memory=64 * 10**9, network=HostNetwork(hosts=2, devices_per_host=8, "
        "within=2e11, between=2e10))."
    )
