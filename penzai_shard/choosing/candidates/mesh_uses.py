"""What the axes of a mesh are used for: the batch, storing parameters, or splitting the model."""

import dataclasses
import itertools
from collections.abc import Iterator, Mapping, Sequence

from penzai_shard.inspection.devices.hardware import Hardware

_OF_THE_MODEL = "model"


@dataclasses.dataclass(frozen=True)
class MeshUse:
    """What the axes of a mesh are used for.

    Attributes:
        mesh_axes: Name and size of each mesh axis.
        batch: The mesh axes that the batch is split over.
        model: The mesh axes that layers are split over.
    """

    mesh_axes: tuple[tuple[str, int], ...]
    batch: tuple[str, ...]
    model: tuple[str, ...]

    @property
    def mesh_shape(self) -> dict[str, int]:
        """The size of each mesh axis."""
        return dict(self.mesh_axes)

    def stored_over(self) -> tuple[tuple[str, ...], ...]:
        """The mesh axes of the batch that parameters may be stored over: all, or the nearest.

        >>> MeshUse((("replica", 2), ("data", 4)), ("replica", "data"), ()).stored_over()
        (('replica', 'data'), ('data',))
        """
        return tuple(self.batch[start:] for start in range(len(self.batch)))

    def split_over(self) -> tuple[tuple[str, ...], ...]:
        """The mesh axes of the model that one logical axis may be split over: all, or one."""
        if len(self.model) < 2:
            return (self.model,) if self.model else ()
        return (self.model, *((each,) for each in self.model))


def mesh_uses(
    mesh_shape: Mapping[str, int],
    hardware: Hardware | None = None,
    batch: Sequence[str] | None = None,
) -> list[MeshUse]:
    """The ways to use a mesh, each mesh axis for the batch or for the model.

    Where all mesh axes are called ``replica``, ``data`` or ``model``, the last one is for the model
    and the others are for the batch. In any other mesh each may be for either; of ways that differ
    only in which of several equal mesh axes are used, the first is taken.

    Args:
        mesh_shape: The size of each mesh axis; those of size 1 are not used.
        hardware: The devices, by which mesh axes of one size may differ.
        batch: The mesh axes of the batch, the major one first, if that is decided: it may be split
            over one that is called ``model``, too.

    >>> [use.batch for use in mesh_uses({"x": 4, "y": 2})]
    [('x', 'y'), ('x',), ('y',), ()]
    >>> [use.batch for use in mesh_uses({"data": 4, "model": 2}, batch=("data", "model"))]
    [('data', 'model')]
    """
    mesh_axes = tuple(mesh_shape.items())
    used = tuple(name for name, size in mesh_axes if size > 1)
    if batch is not None and _OF_THE_MODEL in batch:
        of_batch = tuple(name for name in batch if name in used)
        return [MeshUse(mesh_axes, of_batch, tuple(n for n in used if n not in of_batch))]
    if set(used) <= {"replica", "data", _OF_THE_MODEL}:
        batch = tuple(name for name in used if name != _OF_THE_MODEL)
        return [MeshUse(mesh_axes, batch, tuple(name for name in used if name not in batch))]
    bandwidth = {} if hardware is None else hardware.bandwidth(mesh_shape)
    found: dict[object, MeshUse] = {}
    for batch in _subsets(used):
        model = tuple(name for name in used if name not in batch)
        alike = tuple(
            tuple((mesh_shape[name], bandwidth.get(name)) for name in names)
            for names in (batch, model)
        )
        found.setdefault(alike, MeshUse(mesh_axes, batch, model))
    return list(found.values())


def _subsets(names: tuple[str, ...]) -> Iterator[tuple[str, ...]]:
    for size in range(len(names), -1, -1):
        yield from itertools.combinations(names, size)
