"""Takes a ``PartitionSpec`` apart, and puts one together.

A spec may be shorter than the array's rank. The *canonical* spec of a layout has no trailing None;
a compiled program gives its results such specs, so only with them is a program found again.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from jax.sharding import PartitionSpec


def canonical(entries: Iterable[Any]) -> PartitionSpec:
    """The canonical spec of a layout.

    Args:
        entries: A spec, or an entry for each dimension: a mesh axis, a tuple of them, None.

    >>> canonical([(), ("data",), None])
    P(None, 'data')
    """
    kept = list(entries)
    while kept and not kept[-1]:
        kept.pop()
    # JAX itself writes a tuple of one mesh axis as that axis, and an empty one as None.
    return PartitionSpec(*kept)


def mesh_axes(spec: PartitionSpec, rank: int) -> tuple[tuple[str, ...], ...]:
    """The mesh axes of each dimension, major first; none for a dimension that is whole.

    Args:
        spec: A spec.
        rank: The number of dimensions of the array.

    Raises:
        ValueError: The spec has more entries than the array has dimensions, or leaves one to JAX.

    >>> mesh_axes(PartitionSpec("data", None, ("x", "y")), 4)
    (('data',), (), ('x', 'y'), ())
    """
    if len(spec) > rank or PartitionSpec.UNCONSTRAINED in spec:
        raise ValueError(f"{spec} does not say the mesh axes of {rank} dimensions.")
    # A dimension has several mesh axes, one, which is no tuple, or None.
    entries = (() if entry is None else entry for entry in (*spec, *(None,) * (rank - len(spec))))
    return tuple(entry if isinstance(entry, tuple) else (entry,) for entry in entries)


def part_count(axes: Iterable[str], mesh_sizes: Mapping[str, int]) -> int:
    """How many parts a dimension has that is split over some mesh axes.

    >>> part_count(("data", "model"), {"data": 4, "model": 2})
    8
    """
    return math.prod(mesh_sizes[axis] for axis in axes)


def bytes_per_device(
    spec: PartitionSpec, shape: Sequence[int], item_bytes: int, mesh_sizes: Mapping[str, int]
) -> int:
    """The bytes of an array that one device holds.

    Args:
        spec: The array's spec.
        shape: Its lengths, each of which divides over its mesh axes.
        item_bytes: The bytes of one element.
        mesh_sizes: The size of each mesh axis.

    >>> bytes_per_device(PartitionSpec("data"), (8, 3), 4, {"data": 4})
    24
    """
    pairs = zip(shape, mesh_axes(spec, len(shape)), strict=True)
    return item_bytes * math.prod(length // part_count(axes, mesh_sizes) for length, axes in pairs)
