"""Arrays of which every process has its own part.

The method is that of ``jax.make_array_from_process_local_data``: along a dimension that is split
over devices of several processes, each of them gives the rows of its own devices, and the length
of the whole is the sum.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding

from penzai_shard.errors import MeshError
from penzai_shard.processes.whole_values import from_host, host_data, with_kind_of


@dataclasses.dataclass(frozen=True)
class Parts:
    """How a dimension that is split over some mesh axes is divided among processes.

    Attributes:
        count: How many different parts processes have; 1 if each has the whole.
        own: Which of them this process has, None if it has none.
    """

    count: int
    own: int | None


def parts_along(mesh: Mesh, mesh_axes: Sequence[str]) -> Parts:
    """The parts of a dimension that the processes of a mesh have.

    Args:
        mesh: The mesh.
        mesh_axes: The mesh axes that the dimension is split over, the first one major.

    Raises:
        MeshError: Parts of processes overlap or differ in length, so that nobody can say which
            rows are whose.

    >>> mesh = Mesh(np.array(jax.devices()).reshape(4, 2), ("data", "model"))
    >>> parts_along(mesh, ("data",))
    Parts(count=1, own=0)
    """
    order = [mesh.axis_names.index(axis) for axis in mesh_axes]
    others = [i for i in range(mesh.devices.ndim) if i not in order]
    positions = np.transpose(mesh.devices, order + others)
    positions = positions.reshape(int(np.prod([mesh.devices.shape[i] for i in order])), -1)
    had: dict[int, set[int]] = {}
    for position, devices in enumerate(positions):
        for device in devices:
            had.setdefault(device.process_index, set()).add(position)
    parts = sorted({tuple(sorted(part)) for part in had.values()})
    if sum(map(len, parts)) != len(positions) or len({len(part) for part in parts}) != 1:
        raise MeshError(
            f"processes cannot give their own parts of a dimension that is split over mesh axes "
            f"{', '.join(map(repr, mesh_axes))}: their devices have parts that overlap or differ "
            "in length. Make the mesh with make_mesh, its first mesh axis over the processes, or "
            "give every process the whole batch: local=False."
        )
    own = had.get(jax.process_index())
    return Parts(len(parts), None if own is None else parts.index(tuple(sorted(own))))


def array_of_parts(value: Any, shape: Sequence[int], sharding: NamedSharding) -> jax.Array:
    """The array of which every process has given its part; nothing is sent.

    Args:
        value: The part of this process.
        shape: The shape of the whole.
        sharding: Where the whole is to be.

    >>> from jax.sharding import PartitionSpec
    >>> mesh = Mesh(np.array(jax.devices()), ("data",))
    >>> array_of_parts(np.ones(8), (8,), NamedSharding(mesh, PartitionSpec("data"))).shape
    (8,)
    """
    host = host_data(value)
    if not shape:
        return from_host(value, host, sharding)
    shape = (*shape, *host.shape[len(shape) :])
    array = jax.make_array_from_process_local_data(sharding, host, shape)
    return with_kind_of(value, array, sharding)
