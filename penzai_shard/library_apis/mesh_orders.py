"""In which order JAX lays a mesh over TPUs that need not be there.

The order is decided in ``jax.experimental.mesh_utils`` from a few attributes of the devices, which
descriptions of them have as well.
"""

import dataclasses
import functools
import itertools
import math
from typing import Any

import numpy as np


@dataclasses.dataclass(frozen=True)
class _DescribedTpu:
    """What JAX looks at to lay a mesh."""

    id: int
    device_kind: str
    coords: tuple[int, int, int]
    core_on_chip: int
    slice_index: int
    process_index: int = 0
    platform: str = "tpu"


def _host(chip: tuple[int, int, int]) -> tuple[int, int, int]:
    x, y, z = chip
    return z, y // 2, x // 2


@functools.lru_cache(maxsize=4096)
def positions_of_mesh(
    device_kind: str,
    chips: tuple[int, ...],
    devices_per_chip: int,
    mesh_shape: tuple[int, ...],
    slices: tuple[int, ...],
) -> np.ndarray | None:
    """Where the devices of a mesh are, as ``make_mesh`` lays it.

    Args:
        device_kind: As JAX names it.
        chips: The chips of a slice along the axes of its network.
        devices_per_chip: How many JAX devices a chip is.
        mesh_shape: The sizes of the mesh axes.
        slices: Over how many slices each mesh axis goes.

    Returns:
        An array of the mesh's shape with one dimension more: slice, coordinates of the chip, and
        number of the device on its chip. None if JAX cannot lay such a mesh.

    >>> positions_of_mesh("TPU v5 lite", (4, 8), 1, (8, 4), (1, 1))[1, 2].tolist()
    [0, 2, 1, 0]
    """
    from jax.experimental import mesh_utils

    # The first coordinate is the minor one, and a chip's devices follow each other.
    ranges = [range(size) for size in reversed(chips)]
    places = itertools.product(range(math.prod(slices)), *ranges, range(devices_per_chip))
    devices = []
    for number, (which, *coords, core) in enumerate(places):
        x, y, *z = reversed(coords)
        place = (x, y, z[0] if z else 0)
        devices.append(_DescribedTpu(number, device_kind, place, core, which))
    # JAX has the devices of each host, of 2 x 2 chips, one after the other; v2 and v3 stay so.
    devices.sort(key=lambda each: (each.slice_index, *_host(each.coords), each.id))
    options: dict[str, Any] = {"allow_split_physical_axes": device_kind == "TPU v5 lite"}
    within = [size // count for size, count in zip(mesh_shape, slices, strict=True)]
    try:
        if math.prod(slices) == 1:
            mesh = mesh_utils.create_device_mesh(mesh_shape, devices, **options)
        else:
            mesh = mesh_utils.create_hybrid_device_mesh(within, slices, devices, **options)
    except NotImplementedError:
        return None
    found = [
        (each.slice_index, *each.coords[: len(chips)], each.core_on_chip) for each in mesh.flat
    ]
    return np.array(found).reshape(*mesh_shape, -1)
