"""Reads groups of devices in a compiled program as mesh axes.

A program numbers its devices in the order of the mesh. It lists a group, or writes it as a range of
numbers in another order, or by axes of a mesh that has sizes in common with the user's, but neither
its names nor always its number of axes.
"""

import functools
import itertools
import math
import re
from collections.abc import Sequence

import numpy as np

Groups = tuple[tuple[int, ...], ...]

_LISTED = re.compile(r"\{(?:\{\d+(?:,\d+)*\},?)+\}")
_RANGE = re.compile(r"(?:\[([\d,]+)\]<=)?\[([\d,]+)\](?:T\(([\d,]+)\))?")
_BY_AXES = re.compile(r"mesh\[([^\]]*)\](?:, ?device_ids=\((.*)\))? ?\{([^}]*)\}")
_AXIS = re.compile(r"'?([\w.\-]+)'?=(\d+)")
_PART_OF_AXIS = re.compile(r"'?([\w.\-]+)'?(?::\((\d+)\)(\d+))?")


@functools.lru_cache(maxsize=512)
def read_groups(text: str, count: int) -> Groups | None:
    """The devices that exchange with each other; of a permute its pairs of source and target.

    Args:
        text: The attribute ``replica_groups`` or ``source_target_pairs``.
        count: The number of devices.

    Returns:
        Groups of one size, each a tuple of numbers; None if the text is in a form that is not
        known, or not of so many devices.

    >>> read_groups("[2,2]<=[2,2]T(1,0)", 4)
    ((0, 2), (1, 3))
    """
    try:
        if text in ("{}", "{{0}}"):  # Of copies of the program there is one, on all devices.
            ids = np.arange(count)[None]
        elif _LISTED.fullmatch(text):
            ids = np.array([_numbers(row) for row in re.findall(r"[\d,]*\d", text)])
        elif (found := _RANGE.fullmatch(text)) and found[1]:
            ids = _order(found[2], found[3]).reshape(_numbers(found[1]))
        elif found := _BY_AXES.fullmatch(text):
            ids = _groups_by_axes(*found.groups())
        else:
            return None
    except ValueError:  # Rows of several lengths, or numbers that do not fit their shape.
        return None
    if ids.ndim != 2 or ids.max() >= count:
        return None
    return tuple(map(tuple, ids.tolist()))


def _numbers(text: str) -> list[int]:
    return [int(number) for number in text.split(",")]


def _order(shape: str, permutation: str | None) -> np.ndarray:
    """Numbers from zero in an array, with its axes in another order."""
    ids = np.arange(math.prod(_numbers(shape))).reshape(_numbers(shape))
    return ids.transpose(_numbers(permutation)) if permutation else ids


def _groups_by_axes(axes: str, device_ids: str | None, over: str) -> np.ndarray:
    """Groups along axes of a mesh: ``mesh['a'=4,'b'=2], device_ids=([8]) {'a':(2)2}``.

    ``'a':(m)k`` is the part of an axis that has ``k`` places, with the product ``m`` of the sizes
    of the parts before it.
    """
    sizes = {name: int(size) for name, size in _AXIS.findall(axes)}
    grouped = [
        (name, int(before or 1), int(size or sizes.get(name, 0)))
        for name, before, size in _PART_OF_AXIS.findall(over)
    ]
    # Each axis is cut where a part begins or ends.
    parts = []
    for name, size in sizes.items():
        cuts = {1, size}.union(*({m, m * k} for other, m, k in grouped if other == name))
        parts += [(name, a, b // a) for a, b in itertools.pairwise(sorted(cuts))]
    inside = [parts.index(part) for part in grouped if part[2] != 1]
    outside = [i for i in range(len(parts)) if i not in inside]

    ids = np.arange(math.prod(sizes.values()))
    if device_ids:
        found = _RANGE.fullmatch(device_ids)
        ids = _order(found[2], found[3]) if found else np.array(_numbers(device_ids))
    ids = ids.reshape([size for *_, size in parts]).transpose(outside + inside)
    return ids.reshape(-1, math.prod(parts[i][2] for i in inside))


@functools.lru_cache(maxsize=512)
def mesh_axes(
    groups: Groups, mesh: tuple[tuple[str, int], ...], *, are_pairs: bool = False
) -> tuple[tuple[str, ...] | None, str]:
    """The mesh axes that groups of devices go over, and the same as text.

    Args:
        groups: The groups.
        mesh: Each mesh axis and its size.
        are_pairs: Whether they are the sources and targets of a permute.

    Returns:
        The mesh axes, also where groups go over a part of one, which the text says; None where
        groups do not go along mesh axes.

    >>> mesh_axes(((0, 1), (2, 3)), (("data", 2), ("model", 2)))
    (('model',), 'model')
    >>> mesh_axes(((0, 1), (2, 3)), (("data", 4),))
    (('data',), 'data (in 2 groups of 2, neighbours)')
    """
    names, shape = [name for name, _ in mesh], [size for _, size in mesh]
    groups = tuple(group for group in groups if len(set(group)) > 1)
    if not groups:
        return (), "no mesh axis"
    places = np.unravel_index(np.array(groups), shape)
    if are_pairs:
        axes = [n for n, axis in zip(names, places, strict=True) if (axis != axis[:, :1]).any()]
        is_all = len(groups) == math.prod(shape)
        some = "" if is_all else f" ({len(groups)} of {math.prod(shape)} devices send)"
        return tuple(axes), "+".join(axes) + some

    # Along mesh axes, all groups take the same steps on each axis, and each step on one axis with
    # each on the others.
    steps = [{tuple(np.unique(row - row.min()).tolist()) for row in axis} for axis in places]
    if any(len(each) > 1 for each in steps):
        return None, "devices that are not along mesh axes"
    along = [next(iter(each)) for each in steps]
    if math.prod(map(len, along)) != len(groups[0]):
        return None, "devices that are not along mesh axes"
    over = [i for i, each in enumerate(along) if len(each) > 1]
    texts = [
        names[i] + ("" if len(along[i]) == shape[i] else f" ({_part_text(along[i], shape[i])})")
        for i in over
    ]
    return tuple(names[i] for i in over), "+".join(texts)


def _part_text(steps: Sequence[int], size: int) -> str:
    """Which part of an axis steps are, ``"in 2 groups of 2, neighbours"``."""
    distances = sorted({b - a for a, b in itertools.pairwise(steps)})
    where = "neighbours" if distances == [1] else f"{' and '.join(map(str, distances))} apart"
    return f"in {size // len(steps)} groups of {len(steps)}, {where}"
