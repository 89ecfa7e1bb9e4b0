"""Groups of devices as programs write them, and the mesh axes that they go over.

Programs write groups in three forms, and pairs of a permute in one:

- ``{{0,1},{2,3}}``, or ``{}`` for all devices;
- ``[4,2]<=[2,4]T(1,0)``: the numbers from 0 on as an array of shape [2,4], transposed, as rows;
- ``mesh['a'=4,'b'=2], device_ids=([2,4]T(1,0)) {'a','b':(1)2}``: groups along axes of a mesh that
  the compiler made up, or along parts of them: ``:(m)k`` are k of the steps that are left when the
  axis is cut into m;
- ``source_target_pairs={{0,1},{1,0}}``.

What is none of these is an error, never a guess.
"""

import dataclasses
import functools
import itertools
import math
import re
from collections.abc import Mapping, Sequence

import numpy as np

Groups = tuple[tuple[int, ...], ...]

_NUMBERS = r"\d+(?:,\d+)*"
_LISTED = re.compile(rf"\{{(?:\{{{_NUMBERS}\}}(?:,\{{{_NUMBERS}\}})*)?\}}")
_IOTA = re.compile(rf"\[({_NUMBERS})\]<=\[({_NUMBERS})\](?:T\(({_NUMBERS})\))?")
# Within a mesh the order of devices is written without the shape that it gets.
_ORDER = re.compile(rf"(?:\[{_NUMBERS}\]<=)?\[({_NUMBERS})\](?:T\(({_NUMBERS})\))?")
_LIST = re.compile(_NUMBERS)
_MESH = re.compile(r"mesh\[([^\[\]]*)\](?:, device_ids=\((.*)\))? \{([^{}]*)\}")
_MESH_AXIS = re.compile(r"('[^']*'|[\w.\-]+)=(\d+)")
_PART_OF_AXIS = re.compile(r"('[^']*'|[\w.\-]+)(?::\((\d+)\)(\d+))?")


@dataclasses.dataclass(frozen=True)
class GroupAxes:
    """The mesh axes that groups of devices go over.

    Attributes:
        mesh_axes: Their names in the mesh's order; none if each group is one device.
        is_whole: Whether each group has all devices along these axes.
        text: The same in words: ``"data"``, ``"data x model"``, ``"data (4 of 8, neighbours)"``.
    """

    mesh_axes: tuple[str, ...]
    is_whole: bool
    text: str


@functools.lru_cache(maxsize=256)
def read_groups(text: str, device_count: int) -> Groups:
    """The groups that an instruction's ``replica_groups`` says.

    Args:
        text: The attribute's value.
        device_count: How many devices the program runs on.

    Returns:
        The devices of each group by their position in the mesh.

    Raises:
        ValueError: It has none of the known forms, or its numbers make no groups.

    >>> read_groups("[2,2]<=[2,2]T(1,0)", 4)
    ((0, 2), (1, 3))
    """
    return checked_groups(_read_groups(text, device_count), device_count)


def read_pairs(text: str, device_count: int) -> Groups:
    """Source and target of each pair of a permute's ``source_target_pairs``.

    Args:
        text: The attribute's value.
        device_count: How many devices the program runs on.

    Raises:
        ValueError: It has not the known form, or its numbers make no pairs.

    >>> read_pairs("{{0,1},{1,0}}", 2)
    ((0, 1), (1, 0))
    """
    if not _LISTED.fullmatch(text):
        raise ValueError(f"not pairs of devices: {text!r}")
    pairs = _rows(text)
    if any(len(pair) != 2 for pair in pairs):
        raise ValueError(f"not pairs of devices: {text!r}")
    for side in zip(*pairs, strict=True):
        checked_groups((side,), device_count)
    return pairs


def _read_groups(text: str, device_count: int) -> Groups:
    if _LISTED.fullmatch(text):
        return _rows(text) or (tuple(range(device_count)),)
    if iota := _IOTA.fullmatch(text):
        ids = _transposed(iota[2], iota[3])
        return _as_rows(_shaped(ids, _numbers(iota[1]), dimensions=2))
    if mesh := _MESH.fullmatch(text):
        return _groups_of_mesh(*mesh.groups())
    raise ValueError(f"groups of devices in a form that is not known: {text!r}")


def checked_groups(groups: Groups, device_count: int) -> Groups:
    """The same groups.

    Raises:
        ValueError: They are of different sizes, or have a device twice, or one that is not there.
    """
    ids = [device for group in groups for device in group]
    if len(set(ids)) != len(ids):
        raise ValueError("a device is in two groups, or in one twice")
    if not all(0 <= device < device_count for device in ids):
        raise ValueError(f"there is a device {max(ids)}, the program runs on {device_count}")
    if len({len(group) for group in groups}) > 1:
        raise ValueError("groups of different sizes")
    return groups


def _rows(text: str) -> Groups:
    return tuple(tuple(_numbers(row)) for row in re.findall(rf"\{{({_NUMBERS})\}}", text))


def _numbers(text: str) -> list[int]:
    return [int(number) for number in text.split(",")]


def _as_rows(array: np.ndarray) -> Groups:
    return tuple(map(tuple, array.tolist()))


def _transposed(counted: str, permutation: str | None) -> np.ndarray:
    shape = _numbers(counted)
    ids = np.arange(math.prod(shape)).reshape(shape)
    if permutation is None:
        return ids
    order = _numbers(permutation)
    if sorted(order) != list(range(len(shape))):
        raise ValueError(f"T({permutation}) is not an order of the dimensions of [{counted}]")
    return ids.transpose(order)


def _shaped(ids: np.ndarray, shape: Sequence[int], dimensions: int | None = None) -> np.ndarray:
    if math.prod(shape) != ids.size or dimensions not in (None, len(shape)):
        raise ValueError(f"{ids.size} devices are not of shape {list(shape)}")
    return ids.reshape(shape)


def _groups_of_mesh(axes: str, device_ids: str | None, over: str) -> Groups:
    sizes: dict[str, int] = {}
    for written in axes.split(","):
        axis = _MESH_AXIS.fullmatch(written)
        if axis is None or axis[1] in sizes:
            raise ValueError(f"not the axes of a mesh: {axes!r}")
        sizes[axis[1]] = int(axis[2])
    ids = np.arange(math.prod(sizes.values()))
    if device_ids is not None:
        ids = _shaped(_order(device_ids).reshape(-1), [ids.size])
    shape, grouped = _pieces(sizes, over)
    rest = [i for i in range(len(shape)) if i not in grouped]
    ids = ids.reshape(shape).transpose(rest + grouped)
    return _as_rows(ids.reshape(-1, math.prod(shape[i] for i in grouped)))


def _order(text: str) -> np.ndarray:
    if order := _ORDER.fullmatch(text):
        return _transposed(*order.groups())
    if _LIST.fullmatch(text):
        return np.array(_numbers(text))
    raise ValueError(f"an order of devices in a form that is not known: {text!r}")


def _pieces(sizes: Mapping[str, int], over: str) -> tuple[list[int], list[int]]:
    """The mesh's shape, axes cut where groups go over a part of them; and which pieces these are.

    The pieces are in the order in which the groups have them.
    """
    parts: list[tuple[str, int, int]] = []
    for written in over.split(",") if over else ():
        part = _PART_OF_AXIS.fullmatch(written)
        if part is None or part[1] not in sizes:
            raise ValueError(f"not axes of the mesh, or parts of them: {over!r}")
        parts.append((part[1], int(part[2] or 1), int(part[3] or sizes[part[1]])))
    shape: list[int] = []
    position: dict[tuple[str, int, int], int] = {}
    for name, size in sizes.items():
        cuts = {1, size}
        cuts.update(cut for axis, m, k in parts if axis == name for cut in (m, m * k))
        for low, high in itertools.pairwise(sorted(cuts)):
            if high % low:
                raise ValueError(f"parts that do not cut {name} evenly: {over!r}")
            position[name, low, high // low] = len(shape)
            shape.append(high // low)
    grouped = [position.get(part) for part in parts if part[2] > 1]
    if None in grouped or len(set(grouped)) < len(grouped):
        raise ValueError(f"parts that overlap: {over!r}")
    return shape, [i for i in grouped if i is not None]


# Groups as mesh axes


def mesh_axes_of(groups: Groups, mesh_sizes: Mapping[str, int]) -> GroupAxes | None:
    """The mesh axes that groups go over.

    Args:
        groups: Positions in the mesh, as ``read_groups`` gives them.
        mesh_sizes: The mesh's axes and their sizes, as ``mesh.shape`` has them.

    Returns:
        The mesh axes; None if the groups are not made along mesh axes or parts of them.

    >>> mesh_axes_of(((0, 1), (2, 3), (4, 5), (6, 7)), {"data": 4, "model": 2}).text
    'model'
    >>> mesh_axes_of(((0, 1), (2, 3), (4, 5), (6, 7)), {"data": 8}).text
    'data (2 of 8, neighbours)'
    """
    return _mesh_axes_of(groups, tuple(mesh_sizes.items()))


def mesh_axes_of_pairs(pairs: Groups, mesh_sizes: Mapping[str, int]) -> GroupAxes:
    """The mesh axes along which a permute moves: those in which a source and its target differ.

    Args:
        pairs: Sources and targets, as ``read_pairs`` gives them.
        mesh_sizes: The mesh's axes and their sizes, as ``mesh.shape`` has them.

    >>> mesh_axes_of_pairs(((0, 2), (2, 0)), {"data": 2, "model": 2}).text
    'data (2 of 4 devices send)'
    """
    sent = [pair for pair in pairs if pair[0] != pair[1]]
    if not sent:
        return GroupAxes((), True, "no mesh axis")
    shape = tuple(mesh_sizes.values())
    coordinates = np.stack(np.unravel_index(np.array(sent), shape))
    differs = (coordinates[:, :, 0] != coordinates[:, :, 1]).any(axis=1)
    names = tuple(name for name, one in zip(mesh_sizes, differs, strict=True) if one)
    total = math.prod(shape)
    some = "" if len(sent) == total else f" ({len(sent)} of {total} devices send)"
    return GroupAxes(names, not some, " x ".join(names) + some)


@functools.lru_cache(maxsize=1024)
def _mesh_axes_of(groups: Groups, mesh: tuple[tuple[str, int], ...]) -> GroupAxes | None:
    rows = np.array(groups)
    shape = tuple(size for _, size in mesh)
    if rows.size > math.prod(shape):
        return None
    lengths, texts = [], []
    for (name, size), along in zip(mesh, np.unravel_index(rows, shape), strict=True):
        found = {tuple(np.unique(row - row.min())) for row in along}
        if len(found) != 1:
            return None
        (steps,) = found
        lengths.append(len(steps))
        texts.append(name if len(steps) == size else f"{name} ({_part(steps, size)})")
    # A group has all combinations of its places along each axis, or goes along none.
    if math.prod(lengths) != rows.shape[1]:
        return None
    named = [i for i, length in enumerate(lengths) if length > 1]
    all_take_part = rows.size == math.prod(shape)
    text = " x ".join(texts[i] for i in named) or "no mesh axis"
    if not all_take_part:
        text += f", {rows.size} of {math.prod(shape)} devices"
    whole = all_take_part and all(lengths[i] == shape[i] for i in named)
    return GroupAxes(tuple(mesh[i][0] for i in named), whole, text)


def _part(steps: Sequence[int], size: int) -> str:
    distances = set(np.diff(steps).tolist())
    if distances == {1}:
        return f"{len(steps)} of {size}, neighbours"
    if len(distances) == 1:
        return f"{len(steps)} of {size}, {distances.pop()} apart"
    return f"{len(steps)} of {size}, at {', '.join(map(str, steps))}"
