"""Mesh axes and parts of them, as Shardy writes them.

``data:(2)4`` is the part of ``data`` that numbers 4 groups of devices within each of 2: where
``data`` has 8, ``data:(1)2`` and ``data:(2)4`` are the whole.
"""

import functools
import re
from collections.abc import Iterable, Mapping
from typing import NamedTuple

_PART = re.compile(r"(.*):\((\d+)\)(\d+)")


class MeshAxisPart(NamedTuple):
    """A part of a mesh axis, or a whole one.

    Attributes:
        name: The mesh axis.
        before: How many groups there are, in each of which it numbers devices.
        size: How many it numbers; None of a whole mesh axis.
    """

    name: str
    before: int
    size: int | None

    def __str__(self) -> str:
        return self.name if self.size is None else f"{self.name}:({self.before}){self.size}"


@functools.cache
def part_of(mesh_axis: str) -> MeshAxisPart:
    """What a mesh axis in a layout is.

    >>> part_of("data:(2)4")
    MeshAxisPart(name='data', before=2, size=4)
    """
    if found := _PART.fullmatch(mesh_axis):
        return MeshAxisPart(found[1], int(found[2]), int(found[3]))
    return MeshAxisPart(mesh_axis, 1, None)


def part_text(mesh_axis: str) -> str:
    """What a part of a mesh axis is, in a sentence; empty of a whole mesh axis.

    >>> part_text("data:(2)4")
    "'data:(2)4' is a part of mesh axis 'data': 4 groups of its devices in each of 2."
    """
    name, before, size = part_of(mesh_axis)
    if size is None:
        return ""
    within = f" in each of {before}" if before > 1 else ""
    return f"{mesh_axis!r} is a part of mesh axis {name!r}: {size} groups of its devices{within}."


def overlap(one: str, other: str) -> bool:
    """Whether two mesh axes, or parts of them, have devices' numbers in common.

    >>> overlap("data", "data:(2)4"), overlap("data:(1)2", "data:(2)4")
    (True, False)
    """
    if one == other:
        return True
    a, b = part_of(one), part_of(other)
    if a.name != b.name:
        return False
    if a.size is None or b.size is None:
        return True
    return a.before < b.before * b.size and b.before < a.before * a.size


def size_of(mesh_axis: str, mesh: Mapping[str, int]) -> int:
    """Over how many devices a mesh axis, or a part of it, spreads a dimension."""
    part = part_of(mesh_axis)
    return mesh[part.name] if part.size is None else part.size


def split(mesh_axis: str, first: int, mesh: Mapping[str, int]) -> tuple[str, str]:
    """A mesh axis in two parts, the first of a given size.

    >>> split("data", 2, {"data": 8})
    ('data:(1)2', 'data:(2)4')
    """
    part, size = part_of(mesh_axis), size_of(mesh_axis, mesh)
    return (
        str(MeshAxisPart(part.name, part.before, first)),
        str(MeshAxisPart(part.name, part.before * first, size // first)),
    )


def is_covered(mesh_axis: str, others: Iterable[str], mesh: Mapping[str, int]) -> bool:
    """Whether others have all of a mesh axis, or of a part of it.

    >>> is_covered("data", ["data:(1)2", "data:(2)4"], {"data": 8})
    True
    """
    part, size = part_of(mesh_axis), size_of(mesh_axis, mesh)
    reached = part.before
    for other in sorted(map(part_of, others), key=lambda each: each.before):
        end = other.before * (mesh[other.name] if other.size is None else other.size)
        if other.name == part.name and other.before <= reached < end:
            reached = end
    return reached >= part.before * size
