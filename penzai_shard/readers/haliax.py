"""Reads Haliax's named arrays, whose axes know their name and their length."""

import dataclasses
from typing import Any

from haliax.axis import Axis
from haliax.core import NamedArray

from penzai_shard.readers.reader import Content


@dataclasses.dataclass(frozen=True)
class _Template:
    names: tuple[str, ...]
    # Of an optimizer's statistic: the lengths of its parameter.
    fixed_sizes: tuple[int, ...] | None
    sizes: tuple[int, ...] = dataclasses.field(compare=False, repr=False)


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
            return Content(node.array, _Template(names, None, sizes), names, given)
        return Content(node.array, _Template(names, sizes, sizes), names, sizes)

    def close(self, template: _Template, data: Any) -> Any:
        sizes, shape = template.sizes, getattr(data, "shape", None)
        if template.fixed_sizes is None and shape is not None and len(shape) == len(sizes):
            sizes = tuple(shape)
        # Past the constructor, which refuses data that is no array.
        node = object.__new__(NamedArray)
        object.__setattr__(node, "array", data)
        axes = tuple(Axis(name, size) for name, size in zip(template.names, sizes, strict=True))
        object.__setattr__(node, "axes", axes)
        return node


READERS = [_NamedArrays()]
