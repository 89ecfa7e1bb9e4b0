"""Layouts of equal parts, for arrays of which some lengths do not divide over the mesh.

Outside of compiled programs JAX has no others.
"""

from collections.abc import Sequence
from typing import Any

from jax.sharding import NamedSharding

from penzai_shard.partition_specs import canonical_spec, mesh_axes_by_dimension, part_count


def true_layout(sharding: Any, shape: Sequence[int]) -> Any:
    """A layout for the true array outside of a program, where every split length has to divide.

    Mesh axes over which a dimension does not divide split the longest other one that does, so that
    the array is whole on no device if that can be.

    Args:
        sharding: How the padded array is laid out; one that is not by mesh axes is returned.
        shape: The true shape.

    >>> from jax.sharding import AbstractMesh, PartitionSpec
    >>> mesh = AbstractMesh((4, 2), ("data", "model"))
    >>> true_layout(NamedSharding(mesh, PartitionSpec("data", "model")), (10, 16)).spec
    P(None, ('model', 'data'))
    """
    if not isinstance(sharding, NamedSharding):
        return sharding
    sizes = sharding.mesh.shape
    given = mesh_axes_by_dimension(sharding.spec, len(shape))
    kept = [
        axes if length % part_count(axes, sizes) == 0 else ()
        for axes, length in zip(given, shape, strict=True)
    ]
    longest_first = sorted(range(len(shape)), key=lambda i: (-shape[i], i))
    for axis in [
        axis for axes, own in zip(given, kept, strict=True) if axes != own for axis in axes
    ]:
        for i in longest_first:
            if shape[i] % part_count((*kept[i], axis), sizes) == 0:
                kept[i] = (*kept[i], axis)
                break
    return NamedSharding(sharding.mesh, canonical_spec(kept), memory_kind=sharding.memory_kind)


def layouts_between(sharding: Any, shape: Sequence[int]) -> tuple[NamedSharding, ...]:
    """The layouts on the way from that of a padded array to ``true_layout``, if there are any.

    XLA gathers an array whole on every device where mesh axes go from or to several dimensions at
    once. Each of these layouts moves one of them.

    Args:
        sharding: How the padded array is laid out.
        shape: The true shape.

    >>> from jax.sharding import AbstractMesh, PartitionSpec
    >>> mesh = AbstractMesh((4, 2), ("data", "model"))
    >>> split = NamedSharding(mesh, PartitionSpec(("data", "model")))
    >>> true_layout(split, (9, 12, 6)).spec
    P(None, 'data', 'model')
    >>> [layout.spec for layout in layouts_between(split, (9, 12, 6))]
    [P('data', None, 'model')]
    """
    if not isinstance(sharding, NamedSharding):
        return ()
    given, kept = (
        mesh_axes_by_dimension(each.spec, len(shape))
        for each in (sharding, true_layout(sharding, shape))
    )
    goes_to = {axis: i for i, axes in enumerate(kept) for axis in axes}
    # Of one dimension the minor ones first, so that parts become whole ones of other parts.
    moved = [
        (i, axis) for i, axes in enumerate(given) for axis in reversed(axes) if axis not in kept[i]
    ]
    if len({(i, goes_to.get(axis)) for i, axis in moved}) < 2:
        return ()
    between, current = [], list(given)
    for i, axis in moved[:-1]:
        current[i] = tuple(own for own in current[i] if own != axis)
        if (to := goes_to.get(axis)) is not None:
            current[to] = tuple(own for own in kept[to] if own in (*current[to], axis))
        spec = canonical_spec(current)
        between.append(NamedSharding(sharding.mesh, spec, memory_kind=sharding.memory_kind))
    return tuple(between)
