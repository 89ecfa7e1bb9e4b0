"""Which device holds which part of an array, worked out without any device.

A ``NamedSharding`` says it by its mesh and spec, also where the mesh is abstract; any other kind of
sharding by its map of devices to indices.
"""

import dataclasses
import functools
import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec, Sharding

from penzai_shard.errors import ShardingError
from penzai_shard.partition_specs import (
    canonical_spec,
    mesh_axes_by_dimension,
    mesh_axes_used,
    part_count,
)
from penzai_shard.rule_kinds import LogicalAxis, PositionalDimension

Interval = tuple[int, int]
"""Where a part of a dimension begins and where it ends; the end is not in it."""


@dataclasses.dataclass(frozen=True)
class ArrayPart:
    """A part of an array, and who holds it.

    Attributes:
        intervals: For each dimension where the part begins and where it ends.
        devices: The devices that hold it, by their ids, or by their places in an abstract mesh.
        processes: The processes that these devices belong to; none if the mesh is abstract.
    """

    intervals: tuple[Interval, ...]
    devices: tuple[int, ...]
    processes: tuple[int, ...] = ()

    @property
    def size(self) -> int:
        """How many elements it has."""
        return math.prod(stop - start for start, stop in self.intervals)


@dataclasses.dataclass(frozen=True)
class ArrayDimension:
    """A dimension of an array and how it is split.

    Attributes:
        name: Its logical axis, or ``PositionalDimension``.
        length: Its length.
        intervals: Its parts, in their order.
        mesh_axes: The mesh axes that it is split over, the first one major; None if the sharding
            does not say.
        is_left_to_compiler: Whether the compiler may split it over other mesh axes.
    """

    name: LogicalAxis | PositionalDimension
    length: int
    intervals: tuple[Interval, ...]
    mesh_axes: tuple[str, ...] | None
    is_left_to_compiler: bool = False


@dataclasses.dataclass(frozen=True)
class ArrayParts:
    """An array taken apart over its devices.

    Attributes:
        dimensions: Its dimensions, in the order of the data.
        parts: Its parts, each with the devices that hold it, in the order of the data.
        mesh: The sizes of the mesh axes; None for a sharding that has no mesh.
        replicating: The mesh axes along which devices hold the same part.
        manual: The mesh axes that a ``jax.shard_map`` has taken over: the array is that of one
            place along them.
        unreduced: The mesh axes along which the devices hold summands of the same part.
        uneven: The dimensions, by number, whose length does not divide.
        platform: The kind of the devices, such as ``cpu``; empty if the mesh is abstract.
        own_process: The number of this process; None if the mesh is abstract.
        memory_kind: The memory of the devices that it is in; None for their default.
    """

    dimensions: tuple[ArrayDimension, ...]
    parts: tuple[ArrayPart, ...]
    mesh: Mapping[str, int] | None = None
    replicating: tuple[str, ...] = ()
    manual: tuple[str, ...] = ()
    unreduced: tuple[str, ...] = ()
    uneven: tuple[int, ...] = ()
    platform: str = ""
    own_process: int | None = None
    memory_kind: str | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the array."""
        return tuple(dimension.length for dimension in self.dimensions)

    @property
    def device_count(self) -> int:
        """How many devices hold a part."""
        return sum(len(part.devices) for part in self.parts)

    @property
    def largest(self) -> int:
        """How many elements the largest part has."""
        return max(part.size for part in self.parts)

    @functools.cached_property
    def is_on_others(self) -> bool:
        """Whether other processes have devices that hold a part."""
        return any({*part.processes} - {self.own_process} for part in self.parts)

    def is_own(self, part: ArrayPart) -> bool:
        """Whether this process has devices that hold a part."""
        return self.own_process in part.processes


def array_parts(
    shape: Sequence[int], sharding: Sharding, names: Sequence[LogicalAxis | None] | None = None
) -> ArrayParts:
    """Which device holds which part of an array.

    A length that does not divide is split as XLA pads it: all parts are as long as the first, but
    the last ones, which are shorter or empty.

    Args:
        shape: The shape of the array.
        sharding: Its sharding, of any kind.
        names: The logical axis of each dimension, None for a positional one.

    Returns:
        Its parts.

    Raises:
        ShardingError: The sharding is not one of arrays of this shape.

    >>> mesh = AbstractMesh((2, 2), ("data", "model"))
    >>> parts = array_parts((4, 6), NamedSharding(mesh, PartitionSpec(None, "model")))
    >>> [(part.intervals, part.devices) for part in parts.parts]
    [(((0, 4), (0, 3)), (0, 2)), (((0, 4), (3, 6)), (1, 3))]
    >>> parts.replicating
    ('data',)
    """
    shape = tuple(map(int, shape))
    labels = [
        PositionalDimension(i) if name is None else name
        for i, name in enumerate(names or (None,) * len(shape))
    ]
    if isinstance(sharding, NamedSharding):
        return _parts_of_spec(shape, sharding, labels)
    return _parts_of_map(shape, sharding, labels)


def _parts_of_spec(
    shape: tuple[int, ...], sharding: NamedSharding, names: Sequence[Any]
) -> ArrayParts:
    mesh, spec = sharding.mesh, canonical_spec(sharding.spec.partitions)
    if len(spec) > len(shape):
        raise ShardingError(
            f"{spec} splits {len(spec)} dimensions, and the array has shape {shape}. "
            "Give the shape and the sharding of one array."
        )
    is_open = [entry is PartitionSpec.UNCONSTRAINED for entry in spec]
    is_open += [False] * (len(shape) - len(spec))
    closed = canonical_spec(None if o else e for o, e in zip(is_open, spec, strict=False))
    by_dimension = mesh_axes_by_dimension(closed, len(shape))
    counts = [part_count(mesh_axes, mesh.shape) for mesh_axes in by_dimension]
    per_dimension = [_split(*each) for each in zip(shape, counts, strict=True)]
    # For every place in the mesh, its coordinate along each mesh axis.
    coordinates = np.indices(mesh.axis_sizes).reshape(-1, mesh.size)
    places = dict(zip(mesh.axis_names, coordinates, strict=True))
    numbers = [_numbers(mesh_axes, places, mesh) for mesh_axes in by_dimension]
    held: dict[tuple[Interval, ...], list[int]] = {}
    for place in range(mesh.size):
        at = zip(per_dimension, numbers, strict=True)
        held.setdefault(tuple(split[n[place]] for split, n in at), []).append(place)
    kinds = dict(zip(mesh.axis_names, mesh.axis_types, strict=True))
    manual = tuple(axis for axis in mesh.axis_names if kinds[axis] is AxisType.Manual)
    unreduced = tuple(axis for axis in mesh.axis_names if axis in sharding.spec.unreduced)
    taken = mesh_axes_used(closed) | {*manual, *unreduced}
    free = tuple(a for a in mesh.axis_names if mesh.shape[a] > 1 and a not in taken)
    return _with_devices(
        ArrayParts(
            _dimensions(names, shape, held, by_dimension, is_open),
            tuple(ArrayPart(key, tuple(held[key])) for key in sorted(held)),
            dict(mesh.shape),
            # What the compiler may choose, it may also choose to split further.
            () if any(is_open) else free,
            manual,
            unreduced,
            tuple(i for i, count in enumerate(counts) if shape[i] % count),
        ),
        None if isinstance(mesh, AbstractMesh) else mesh.devices.flatten().tolist(),
        sharding,
    )


def _split(length: int, count: int) -> list[Interval]:
    each = -(-length // count)
    return [(min(i * each, length), min((i + 1) * each, length)) for i in range(count)]


def _numbers(mesh_axes: Sequence[str], places: Mapping[str, Any], mesh: Any) -> Any:
    """For every place in the mesh, which part of a dimension it has; the first axis is major."""
    number = np.zeros(mesh.size, int)
    for axis in mesh_axes:
        number = number * mesh.shape[axis] + places[axis]
    return number


def _parts_of_map(shape: tuple[int, ...], sharding: Sharding, names: Sequence[Any]) -> ArrayParts:
    try:
        by_device = sharding.devices_indices_map(shape)
    except ValueError as error:
        raise ShardingError(f"{sharding} is not one of an array of shape {shape}: {error}") from (
            error
        )
    held: dict[tuple[Interval, ...], list[int]] = {}
    for number, index in enumerate(by_device.values()):
        key = tuple(map(_interval, index or (), shape))
        held.setdefault(key, []).append(number)
    unknown = (None,) * len(shape)
    return _with_devices(
        ArrayParts(
            _dimensions(names, shape, held, unknown, [False] * len(shape)),
            tuple(ArrayPart(key, tuple(held[key])) for key in sorted(held)),
        ),
        list(by_device),
        sharding,
    )


def _interval(index: Any, length: int) -> Interval:
    """One dimension of an index: a slice, or a number where that dimension is taken apart."""
    if isinstance(index, slice):
        start, stop, _ = index.indices(length)
        return start, stop
    return int(index), int(index) + 1


def _dimensions(
    names: Sequence[Any],
    shape: tuple[int, ...],
    held: Mapping[tuple[Interval, ...], Any],
    by_dimension: Sequence[tuple[str, ...] | None],
    is_open: Sequence[bool],
) -> tuple[ArrayDimension, ...]:
    return tuple(
        ArrayDimension(
            names[i], shape[i], tuple(sorted({key[i] for key in held})), mesh_axes, is_open[i]
        )
        for i, mesh_axes in enumerate(by_dimension)
    )


def _with_devices(parts: ArrayParts, devices: list[Any] | None, sharding: Sharding) -> ArrayParts:
    """The parts with the ids of devices in the place of their numbers, if there are devices."""
    if devices is None:
        return dataclasses.replace(parts, memory_kind=sharding.memory_kind)
    with_ids = tuple(
        ArrayPart(
            part.intervals,
            tuple(sorted(devices[number].id for number in part.devices)),
            tuple(sorted({devices[number].process_index for number in part.devices})),
        )
        for part in parts.parts
    )
    platform = ", ".join(sorted({device.platform for device in devices}))
    usual = ("device", "unpinned_host") if platform == "cpu" else ("device",)
    return dataclasses.replace(
        parts,
        parts=with_ids,
        platform=platform,
        own_process=jax.process_index(),
        memory_kind=None if sharding.memory_kind in usual else sharding.memory_kind,
    )
