"""Taking specs apart and putting them together; the one place that does.

A ``PartitionSpec`` has an entry per dimension: None, a mesh axis, a tuple of mesh axes (the first
one major), or ``UNCONSTRAINED``. It may be shorter than the array's rank. *Canonical* specs have no
trailing None, so that equal layouts are equal specs.
"""

import math
from collections.abc import Container, Iterable, Mapping, Sequence
from typing import Any

from jax.sharding import PartitionSpec


def canonical_spec(entries: Iterable[Any]) -> PartitionSpec:
    """A spec without trailing None, from another spec or from mesh axes per dimension.

    Args:
        entries: A spec, or for each dimension its entry; an empty tuple is the same as None, and a
            tuple of one mesh axis the same as that axis.

    >>> canonical_spec(PartitionSpec("data", None)), canonical_spec([(), ("data",), ()])
    (P('data',), P(None, 'data'))
    """
    shortened = list(entries)
    while shortened and not shortened[-1]:
        shortened.pop()
    return PartitionSpec(*shortened)


def mesh_axes_by_dimension(
    spec: PartitionSpec, rank: int | None = None
) -> tuple[tuple[str, ...], ...]:
    """The mesh axes of each dimension, none for a dimension that is whole.

    Args:
        spec: A spec.
        rank: The rank of the array, if there is to be a tuple for each of its dimensions.

    Raises:
        ValueError: An entry leaves its dimension to JAX, so that its mesh axes are not known; or
            the spec has more entries than ``rank``.

    >>> mesh_axes_by_dimension(PartitionSpec("data", None, ("x", "y")), 4)
    (('data',), (), ('x', 'y'), ())
    """
    entries = tuple(spec) if rank is None else _padded(spec, rank)
    if PartitionSpec.UNCONSTRAINED in entries:
        raise ValueError(f"{spec} leaves a dimension to JAX: its mesh axes are not known.")
    return tuple(map(_mesh_axes, entries))


def mesh_axes_used(spec: PartitionSpec) -> frozenset[str]:
    """All mesh axes that a spec names.

    >>> sorted(mesh_axes_used(PartitionSpec("data", None, ("x", "y"))))
    ['data', 'x', 'y']
    """
    return frozenset(axis for entry in spec for axis in _mesh_axes(entry))


def decided_spec(spec: PartitionSpec) -> PartitionSpec:
    """A spec without what it leaves to JAX: those dimensions are whole in it.

    >>> decided_spec(PartitionSpec("data", PartitionSpec.UNCONSTRAINED, "model"))
    P('data', None, 'model')
    """
    left = PartitionSpec.UNCONSTRAINED
    return canonical_spec(None if entry is left else entry for entry in spec)


def restricted_spec(spec: PartitionSpec, mesh_axes: Container[str]) -> PartitionSpec:
    """The canonical spec over some mesh axes alone; what is left to JAX stays so.

    >>> restricted_spec(PartitionSpec(("x", "y"), "z"), {"y"})
    P('y',)
    """
    return canonical_spec(
        entry
        if entry is PartitionSpec.UNCONSTRAINED
        else tuple(axis for axis in _mesh_axes(entry) if axis in mesh_axes)
        for entry in spec
    )


def evenly_splitting(
    spec: PartitionSpec, shape: Sequence[int], mesh_shape: Mapping[str, int]
) -> PartitionSpec:
    """The canonical spec, in which dimensions are whole whose length does not divide.

    >>> evenly_splitting(PartitionSpec("x", "y"), (6, 6), {"x": 4, "y": 2})
    P(None, 'y')
    """
    return canonical_spec(
        entry
        if entry is PartitionSpec.UNCONSTRAINED
        or not size % part_count(_mesh_axes(entry), mesh_shape)
        else None
        for entry, size in zip(spec, shape, strict=False)
    )


def permuted_spec(spec: PartitionSpec, order: Sequence[int]) -> PartitionSpec:
    """The canonical spec of an array whose dimensions are transposed.

    Args:
        spec: The spec of the array.
        order: For each dimension of the result the one of the array, as ``numpy.transpose``
            takes them.

    >>> permuted_spec(PartitionSpec("x", "y"), (1, 2, 0))
    P('y', None, 'x')
    """
    entries = _padded(spec, len(order))
    return canonical_spec(entries[i] for i in order)


def spec_without(spec: PartitionSpec, dimension: int) -> PartitionSpec:
    """The canonical spec of an array that has one dimension less.

    >>> spec_without(PartitionSpec("x", "y"), 0)
    P('y',)
    """
    return canonical_spec((*spec[:dimension], *spec[dimension + 1 :]))


def spec_with_whole(spec: PartitionSpec, dimension: int) -> PartitionSpec:
    """The canonical spec of an array that has one dimension more, which is not split.

    >>> spec_with_whole(PartitionSpec("x", "y"), 1)
    P('x', None, 'y')
    """
    entries = _padded(spec, max(len(spec), dimension))
    return canonical_spec((*entries[:dimension], None, *entries[dimension:]))


def part_count(mesh_axes: Iterable[str], mesh_shape: Mapping[str, int]) -> int:
    """How many parts a dimension has that is split over some mesh axes.

    >>> part_count(("x", "y"), {"x": 4, "y": 2, "z": 2}), part_count((), {"x": 4})
    (8, 1)
    """
    return math.prod(mesh_shape[axis] for axis in mesh_axes)


def largest_part(
    spec: PartitionSpec, shape: Sequence[int], mesh_shape: Mapping[str, int]
) -> tuple[int, ...]:
    """The shape of the largest part of an array; all parts are equal if every length divides.

    >>> largest_part(PartitionSpec("x"), (10, 3), {"x": 4})
    (3, 3)
    """
    mesh_axes = mesh_axes_by_dimension(spec, len(shape))
    return tuple(
        -(-size // part_count(axes, mesh_shape))
        for size, axes in zip(shape, mesh_axes, strict=True)
    )


def padded_length(length: int, parts: int) -> int:
    """The least length from this one on that divides into equal parts.

    >>> padded_length(50257, 8), padded_length(10, 5), padded_length(0, 4)
    (50264, 10, 0)
    """
    return -(-length // parts) * parts


def _padded(spec: PartitionSpec, rank: int) -> tuple[Any, ...]:
    if len(spec) > rank:
        raise ValueError(f"{spec} has {len(spec)} entries, more than an array of rank {rank}.")
    return (*spec, *(None,) * (rank - len(spec)))


def _mesh_axes(entry: Any) -> tuple[str, ...]:
    if entry is None or entry is PartitionSpec.UNCONSTRAINED:
        return ()
    return entry if isinstance(entry, tuple) else (entry,)
