"""A drawing of which device holds which part of an array, as text, in rich, HTML and JSON."""

import dataclasses
import json
import math
from collections.abc import Iterator, Mapping
from typing import Any

from penzai_shard.meshes import mesh_text
from penzai_shard.planning.plan import itemsize
from penzai_shard.report_trees import bytes_text, count_text
from penzai_shard.rule_kinds import PositionalDimension
from penzai_shard.text_tables import PreparedTable, Report, Segments, TextTable
from penzai_shard.views.array_parts import ArrayDimension, ArrayPart, ArrayParts
from penzai_shard.views.part_grid import (
    PartGrid,
    devices_text,
    html_drawing,
    part_grid,
    text_drawing,
)


@dataclasses.dataclass(frozen=True, repr=False)
class DrawnTable(PreparedTable):
    """The dimensions of an array, with a drawing of its parts below them.

    Attributes:
        grid: The parts in rows and columns.
    """

    headings = ("dimension", "length", "parts", "mesh axes")
    right_aligned = frozenset({"length"})
    has_headings_alone = False

    grid: PartGrid | None = None

    def lines(self, width: int) -> Iterator[Segments]:
        """The table, then the drawing."""
        yield from super().lines(width)
        if self.grid is not None:
            yield from text_drawing(self.grid, width)

    def html(self) -> str:
        """The table, then the drawing."""
        return super().html() + (html_drawing(self.grid) if self.grid else "")


class PartsTable(PreparedTable):
    """Every part of an array, with the devices that hold it."""

    headings = ("part", "devices", "processes", "bytes")
    right_aligned = frozenset({"bytes"})


@dataclasses.dataclass(frozen=True, repr=False)
class ShardingDrawing(Report):
    """Which device holds which part of an array; ``print`` and notebooks draw it.

    It is made by ``show_sharding``, and holds no array.

    Attributes:
        parts: The dimensions of the array, and its parts with the devices that hold them.
        dtype: The dtype of the array, or None where only a shape is known.
        path: What the array is called, such as the label of a parameter; empty for none.
        is_traced: Whether it is one in a traced function, of which its type says the layout.
        stored_shape: The shape that it is stored with, if it is stored padded.
    """

    parts: ArrayParts
    dtype: Any = None
    path: str = ""
    is_traced: bool = False
    stored_shape: tuple[int, ...] | None = None

    @property
    def total_bytes(self) -> int:
        """The size of the array, counted once, in bytes; 0 if its dtype is not known."""
        return math.prod(self.parts.shape) * itemsize(self.dtype)

    @property
    def bytes_per_device(self) -> int:
        """The size of the largest part, in bytes; 0 if the dtype is not known."""
        return self.parts.largest * itemsize(self.dtype)

    def table(self, *, collapse: bool = True) -> TextTable:
        """The drawing as a table: plain text for ``print``, coloured by ``rich.print``.

        Args:
            collapse: Show a row for each dimension, and a drawing of the parts; otherwise a row
                for each part, all of them.
        """
        if not collapse:
            rows = tuple(self._part_row(part) for part in self.parts.parts)
            return PartsTable(rows, self._verdict())
        rows = tuple(map(self._dimension_row, self.parts.dimensions))
        grid = part_grid(self.parts)
        return DrawnTable(rows, self._verdict(), tuple(self._remarks()), grid)

    def to_json(self) -> str:
        """All of it as JSON text: every dimension, and every part with its devices."""
        parts = self.parts
        return json.dumps(
            {
                "path": self.path,
                "dtype": None if self.dtype is None else str(self.dtype),
                "shape": parts.shape,
                "stored_shape": self.stored_shape or parts.shape,
                "mesh": parts.mesh,
                "total_bytes": self.total_bytes,
                "bytes_per_device": self.bytes_per_device,
                "replicating_mesh_axes": parts.replicating,
                "manual_mesh_axes": parts.manual,
                "unreduced_mesh_axes": parts.unreduced,
                "platform": parts.platform,
                "memory_kind": parts.memory_kind,
                "dimensions": [_dimension_data(dimension) for dimension in parts.dimensions],
                "parts": [
                    {
                        "intervals": part.intervals,
                        "devices": part.devices,
                        "processes": part.processes,
                        "bytes": part.size * itemsize(self.dtype),
                    }
                    for part in parts.parts
                ],
            },
            indent=2,
        )

    def _verdict(self) -> str:
        parts = self.parts
        sizes = ", ".join(
            str(each.length)
            if isinstance(each.name, PositionalDimension)
            else f"{each.name}={each.length}"
            for each in parts.dimensions
        )
        kind = "array" if self.dtype is None else str(self.dtype)
        what = f"{self.path}: {kind}[{sizes}]" if self.path else f"{kind}[{sizes}]"
        total, each = self._size(math.prod(parts.shape)), self._size(parts.largest)
        if parts.device_count == 1:
            return f"{what}, {total}, is on one device"
        # Places along a manual mesh axis have other arrays, and those not summed other summands.
        apart = math.prod((parts.mesh or {})[axis] for axis in (*parts.manual, *parts.unreduced))
        copies = max(len(part.devices) for part in parts.parts) // apart
        if any(dimension.is_left_to_compiler for dimension in parts.dimensions):
            known = f"at least {count_text(len(parts.parts), 'part')}"
            return f"{what}, {total}, is in {known}; the compiler decides"
        if len(parts.parts) > 1:
            held = f"{copies} devices hold each" if copies > 1 else "one device holds each"
            return f"{what}, {total}, is in {len(parts.parts)} parts; {held}, {each} on each device"
        if copies > 1:
            return f"{what} is whole on each of {copies} devices, {each} on each"
        return f"{what}, {total}, is not split"

    def _size(self, elements: int) -> str:
        if self.dtype is None:
            return count_text(elements, "element")
        return bytes_text(elements * itemsize(self.dtype))

    def _dimension_row(self, dimension: ArrayDimension) -> tuple[str, ...]:
        lengths = [stop - start for start, stop in dimension.intervals]
        if len(lengths) == 1:
            split = "whole"
        elif min(lengths) == max(lengths):
            split = f"{len(lengths)} of {lengths[0]:,}"
        else:
            split = f"{len(lengths)} of {min(lengths):,} to {max(lengths):,}"
        if dimension.is_left_to_compiler:
            mesh_axes = "left to the compiler"
        elif dimension.mesh_axes is None:
            mesh_axes = "" if len(lengths) == 1 else "?"
        else:
            mesh_axes = _axes_text(dimension.mesh_axes, self.parts.mesh or {})
        return str(dimension.name), f"{dimension.length:,}", split, mesh_axes

    def _part_row(self, part: ArrayPart) -> tuple[str, ...]:
        where = ", ".join(
            f"{dimension.name} {start}:{stop}"
            for dimension, (start, stop) in zip(self.parts.dimensions, part.intervals, strict=True)
        )
        held = str(part.size * itemsize(self.dtype)) if self.dtype is not None else "?"
        processes = devices_text(part.processes)
        return where or "all", ", ".join(map(str, part.devices)), processes, held

    def _remarks(self) -> Iterator[str]:
        parts = self.parts
        mesh = parts.mesh or {}
        if parts.replicating:
            axes = _axes_text(parts.replicating, mesh)
            copies = math.prod(mesh[axis] for axis in parts.replicating)
            text = f"replicated over {axes}: {copies} devices hold the same part"
            # A type does not say how the dimension is split that jax.vmap has taken off.
            yield text + ", unless jax.vmap splits what it maps over" * self.is_traced
        if parts.manual:
            axes = _axes_text(parts.manual, mesh)
            yield f"manual over {axes}: this is the array of one place along them"
        if parts.unreduced:
            axes = _axes_text(parts.unreduced, mesh)
            yield f"not summed yet over {axes}: each device holds a summand of its part"
        for number in parts.uneven:
            dimension = parts.dimensions[number]
            what = (
                "JAX refuses this of arguments and results, and pads such intermediate values"
                if self.stored_shape is None
                else f"it is stored padded to {self.stored_shape[number]}"
            )
            yield (
                f"{dimension.name} ({dimension.length}) does not divide over "
                f"{_axes_text(dimension.mesh_axes or (), mesh)}: {what}; drawn without the padding"
            )
        if parts.memory_kind:
            yield f"in memory of kind {parts.memory_kind}"
        yield self._remark_on_devices()

    def _remark_on_devices(self) -> str:
        parts = self.parts
        if not parts.platform:
            return "in each cell the devices that hold the part, by their places in the mesh"
        text = f"in each cell the {parts.platform} devices that hold the part, by their ids"
        if parts.is_on_others:
            text += f"; * marks what this process ({parts.own_process}) has"
        return text


def _axes_text(mesh_axes: tuple[str, ...], mesh: Mapping[str, int]) -> str:
    """Mesh axes with their sizes."""
    return mesh_text({axis: mesh[axis] for axis in mesh_axes})


def _dimension_data(dimension: ArrayDimension) -> dict[str, Any]:
    return {
        "name": str(dimension.name),
        "length": dimension.length,
        "intervals": dimension.intervals,
        "mesh_axes": dimension.mesh_axes,
        "left_to_compiler": dimension.is_left_to_compiler,
    }
