"""Named arrays of Haliax: ``haliax.NamedArray``, each of whose axes has a name and a size.

Source: Haliax, ``haliax.core`` and ``haliax.partitioning``.
"""

import sys
from collections.abc import Sequence
from typing import Any

from penzai_shard.readers.array_reader import ArrayReader, ReadArray


class _HaliaxReader(ArrayReader):
    """Reads ``haliax.NamedArray``; modules of Haliax are pytrees that hold such arrays."""

    library = "haliax.core"

    def reads(self, node_type: type) -> bool:
        return issubclass(node_type, sys.modules["haliax.core"].NamedArray)

    def read(self, node: Any) -> ReadArray:
        sizes = tuple(axis.size for axis in node.axes)
        return ReadArray(node.array, tuple(axis.name for axis in node.axes), sizes=sizes)

    def with_data(self, node: Any, data: Any) -> Any:
        return _made(node, data, node.axes)

    def resized(self, node: Any, shape: Sequence[int], data: Any) -> Any:
        pairs = zip(node.axes, shape, strict=True)
        return _made(node, data, tuple(axis.resize(size) for axis, size in pairs))


def _made(node: Any, data: Any, axes: tuple[Any, ...]) -> Any:
    """An array of the node's type, past its constructor, which compares the sizes."""
    made = object.__new__(type(node))
    object.__setattr__(made, "array", data)
    object.__setattr__(made, "axes", axes)
    return made


READER = _HaliaxReader()
