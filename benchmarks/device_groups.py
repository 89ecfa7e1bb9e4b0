"""Groups of devices as compiled programs write them, read as mesh axes."""

import itertools
import math
import re
from collections.abc import Mapping, Sequence

import numpy as np

_IOTA = re.compile(r"\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?")
_MESH_GROUPS = re.compile(
    r"replica_groups=mesh\[([^\]]*)\](?:, ?device_ids=\(([^)]*(?:T\([\d,]+\))?)\))? ?\{([^}]*)\}"
)
# Within a mesh the order of devices is given without the final shape.
_ORDER = re.compile(r"\[([\d,]+)\](?:T\(([\d,]+)\))?$")
_MESH_AXIS = re.compile(r"'([^']*)'=(\d+)")
_AXIS_OF_GROUPS = re.compile(r"'([^']*)'(?::\((\d+)\)(\d+))?")


def groups_of(
    kind: str, name: str, attributes: str, sizes: Mapping[str, int] | None
) -> tuple[tuple[str, ...] | None, int]:
    """The mesh axes that a collective goes over, and the size of each of its groups.

    Args:
        kind: The kind of collective.
        name: Its name, for messages.
        attributes: What the program's text says behind its operands.
        sizes: The mesh's shape, if it is known. Devices count in the mesh's order.

    Returns:
        The mesh axes, None if the groups are not those of whole mesh axes; and the size.

    Raises:
        ValueError: The groups cannot be read.
    """
    if kind == "collective-permute":
        pairs = re.search(r"source_target_pairs=\{(.*?)\}\}", attributes)
        ids = list(map(int, re.findall(r"\d+", pairs[1]))) if pairs else []
        axes = _axes_of_pairs(list(zip(ids[::2], ids[1::2], strict=True)), sizes)
        return axes, 2
    groups = _replica_groups(name, attributes, sizes)
    return _axes_of_groups(groups, sizes), groups.shape[1]


def _replica_groups(name: str, attributes: str, sizes: Mapping[str, int] | None) -> np.ndarray:
    """The groups of devices as rows, from any of the forms in which XLA writes them."""
    if by_mesh := _MESH_GROUPS.search(attributes):
        return _groups_of_mesh(*by_mesh.groups())
    if iota := re.search(r"replica_groups=" + _IOTA.pattern, attributes):
        return _iota(*iota.groups())
    if listed := re.search(r"replica_groups=\{(\{[\d,{}]*\})\}", attributes):
        rows = re.findall(r"\{([\d,]+)\}", listed[1])
        return np.array([[int(i) for i in row.split(",")] for row in rows])
    if "replica_groups={}" in attributes and sizes:
        return np.arange(math.prod(sizes.values()))[None]  # All devices.
    raise ValueError(f"{name}: its groups of devices cannot be read: {attributes[:200]}")


def _numbers(text: str) -> list[int]:
    return [int(number) for number in text.split(",")]


def _iota(shape: str, counted: str, permutation: str | None) -> np.ndarray:
    """``[4,2]<=[2,4]T(1,0)``: numbers in order, as an array, transposed, and reshaped."""
    ids = np.arange(math.prod(_numbers(counted))).reshape(_numbers(counted))
    if permutation:
        ids = ids.transpose(_numbers(permutation))
    return ids.reshape(_numbers(shape))


def _order(text: str) -> np.ndarray:
    """The order of a mesh's devices: ``[2,4]T(1,0)``, ``[8]<=[2,4]T(1,0)``, or a list."""
    if iota := _IOTA.fullmatch(text):
        return _iota(*iota.groups()).reshape(-1)
    if order := _ORDER.fullmatch(text):
        shape = _numbers(order[1])
        ids = np.arange(math.prod(shape)).reshape(shape)
        return (ids.transpose(_numbers(order[2])) if order[2] else ids).reshape(-1)
    return np.array(_numbers(text))


def _groups_of_mesh(axes: str, device_ids: str | None, over: str) -> np.ndarray:
    """``mesh['a'=4,'b'=2] {'a'}``: groups along some axes, or parts of them (``'a':(2)2``)."""
    sizes = {name: int(size) for name, size in _MESH_AXIS.findall(axes)}
    ids = np.arange(math.prod(sizes.values()))
    if device_ids:
        ids = _order(device_ids)
    grouped = [
        (n, int(pre or 1), int(size or sizes[n])) for n, pre, size in _AXIS_OF_GROUPS.findall(over)
    ]
    # Each axis is cut where a part of it begins or ends, so that groups go over whole pieces.
    pieces: list[tuple[str, int, int]] = []
    for name, size in sizes.items():
        cuts = {1, size}
        for other, pre, part in grouped:
            if other == name:
                cuts |= {pre, pre * part}
        ordered = sorted(cuts)
        pieces += [(name, a, b // a) for a, b in itertools.pairwise(ordered)] or [(name, 1, 1)]
    ids = ids.reshape([size for _, _, size in pieces])
    inside = [
        i
        for name, pre, part in grouped
        for i, (other, start, size) in enumerate(pieces)
        if other == name and pre <= start and start * size <= pre * part
    ]
    outside = [i for i in range(len(pieces)) if i not in inside]
    size = math.prod(pieces[i][2] for i in inside)
    return ids.transpose(outside + inside).reshape(-1, size)


def _axes_of_groups(groups: np.ndarray, sizes: Mapping[str, int] | None) -> tuple | None:
    if sizes is None or groups.size != math.prod(sizes.values()):
        return None
    shape = tuple(sizes.values())
    coordinates = np.stack(np.unravel_index(groups, shape))
    varying = [i for i, along in enumerate(coordinates) if (along != along[:, :1]).any()]
    # Whole axes: as many devices per group as the axes have, and nothing else varies.
    if math.prod(shape[i] for i in varying) != groups.shape[1]:
        return None
    return tuple(list(sizes)[i] for i in varying)


def _axes_of_pairs(pairs: Sequence[tuple[int, int]], sizes) -> tuple | None:
    if sizes is None or not pairs:
        return None
    shape = tuple(sizes.values())
    sources, targets = (np.array(np.unravel_index(ids, shape)) for ids in zip(*pairs, strict=True))
    return tuple(name for i, name in enumerate(sizes) if (sources[i] != targets[i]).any())
