"""Reads Haliax's named arrays, whose axes know their name and their length."""

from typing import Any

from haliax.axis import Axis
from haliax.core import NamedArray

from penzai_shard.readers.reader import AxisSizes, Content


class _NamedArrays:
    library = "haliax.core"

    def reads(self, kind: type) -> bool:
        return issubclass(kind, NamedArray)

    def open(self, node: Any) -> Content:
        names = tuple(axis.name for axis in node.axes)
        sizes = tuple(axis.size for axis in node.axes)
        shape = getattr(node.array, "shape", None)
        if shape is None or tuple(shape) == sizes:
            given = sizes if shape is None else None
            return Content(node.array, AxisSizes(names, None, sizes), names, given)
        return Content(node.array, AxisSizes(names, sizes, sizes), names, sizes)

    def close(self, template: AxisSizes, data: Any) -> Any:
        # Past the constructor, which refuses data that is no array.
        node = object.__new__(NamedArray)
        object.__setattr__(node, "array", data)
        axes = tuple(
            Axis(name, size) for name, size in zip(template.names, template.of(data), strict=True)
        )
        object.__setattr__(node, "axes", axes)
        return node


READERS = [_NamedArrays()]
