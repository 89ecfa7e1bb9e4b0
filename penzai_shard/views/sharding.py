"""Shows how an array lies over its mesh: which device holds which part.

The parts follow from the shape and the sharding. No data is read and no device is needed, so shapes
on abstract meshes, deleted arrays and arrays of other processes are drawn like any other.
"""

import dataclasses
import functools
import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np
from jax.sharding import AbstractMesh, NamedSharding, PartitionSpec, Sharding

from penzai_shard import specs
from penzai_shard.arrays.kinds import is_traced, itemsize
from penzai_shard.arrays.structure import leaves_of
from penzai_shard.errors import PlanError, Problem, RuleTypeError, ShardingError
from penzai_shard.meshes import mesh_text
from penzai_shard.paths import write_runs
from penzai_shard.planning.plan import LeafPlan, write_axes
from penzai_shard.reports.quantities import bytes_text, plain_text
from penzai_shard.reports.report import HasReport, Line, Report

# Where a part of one dimension begins, and where it ends; the end is not in it.
Interval = tuple[int, int]

# More rows or columns than this are not drawn: the first and the last stand for them.
_MOST_ROWS, _MOST_COLUMNS, _FEWEST_COLUMNS = 32, 16, 3
# An array of one dimension in more parts than this is drawn as a column, which always fits.
_MOST_ACROSS = 4
_MOST_RUNS = 4
_GAP = "..."
_COLOURS = ("cyan", "green", "yellow", "magenta", "blue", "red")


@dataclasses.dataclass(frozen=True, slots=True)
class ArrayPart:
    """A part of an array, and who holds it.

    Attributes:
        intervals: Where it begins and ends in each dimension.
        devices: The ids of the devices that hold it, or their places in an abstract mesh.
        processes: The processes of these devices; none if the mesh is abstract.
    """

    intervals: tuple[Interval, ...]
    devices: tuple[int, ...]
    processes: tuple[int, ...] = ()


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class ShardedArray(HasReport):
    """How an array lies over its devices; ``print`` and notebooks draw it.

    Attributes:
        path: Its path, ``""`` for one that has none.
        names: What its dimensions are called: by their logical axes, or ``dimension 0``.
        shape: Its shape.
        dtype: Its dtype.
        sharding: Its sharding.
        mesh_axes: The mesh axes of each dimension, major first; None where there is no mesh.
        parts: Its parts, in the order of the data.
    """

    path: str
    names: tuple[str, ...]
    shape: tuple[int, ...]
    dtype: Any
    sharding: Sharding
    mesh_axes: tuple[tuple[str, ...], ...] | None
    parts: tuple[ArrayPart, ...]

    @property
    def bytes_per_device(self) -> int:
        """Size of each part."""
        size = math.prod(stop - start for start, stop in self.parts[0].intervals)
        return size * itemsize(self.dtype)

    def intervals(self, dim: int) -> list[Interval]:
        """The parts of one dimension, in their order."""
        return sorted({part.intervals[dim] for part in self.parts})

    def report(self) -> Report:
        """What it is, with a drawing of the parts."""
        facts = {
            "bytes_per_device": self.bytes_per_device,
            "names": self.names,
            "mesh_axes": self.mesh_axes,
            "parts": [dataclasses.asdict(part) for part in self.parts],
        }
        notes, drawing = [*self._notes()], functools.partial(_draw, self)
        return Report("Sharding", self._verdict(), notes=notes, facts=facts, drawing=drawing)

    def _verdict(self) -> str:
        # As in a plan: each dimension with its length and mesh axes.
        names = [None if x == f"dimension {dim}" else x for dim, x in enumerate(self.names)]
        axes = write_axes(names, self.shape, specs.canonical(self.mesh_axes or ()))
        total = bytes_text(math.prod(self.shape) * itemsize(self.dtype))
        what = f"{self.path}: {self.dtype}" if self.path else str(self.dtype)
        what += f"[{axes}], {total}"
        holders = len(self.parts[0].devices)
        if len(self.parts) == 1:
            return f"{what}: whole on {'one device' if holders == 1 else f'{holders} devices'}"
        held = "one device holds each" if holders == 1 else f"{holders} devices hold each"
        return f"{what}: {len(self.parts)} parts of {bytes_text(self.bytes_per_device)}, {held}"

    def _notes(self) -> Iterator[str]:
        devices = "devices"
        if isinstance(self.sharding, NamedSharding) and self.mesh_axes is not None:
            mesh, unreduced = self.sharding.mesh, self.sharding.spec.unreduced
            taken = {*unreduced, *itertools.chain(*self.mesh_axes)}
            free = {axis for axis, size in mesh.shape.items() if axis not in taken and size > 1}
            words = {"replicated": free, "not summed yet": unreduced}
            for word in filter(words.get, words):
                yield f"{word} over {', '.join(sorted(words[word]))}"
            devices = f"devices of mesh ({mesh_text(mesh)})"
        if self.sharding.memory_kind == "pinned_host":
            yield "in the memory of the host"
        is_abstract = not self.parts[0].processes
        what = "by their places in it" if is_abstract else "by their ids"
        yield f"in each cell the {devices} that hold the part, {what}"


def show_sharding(array: Any) -> ShardedArray:
    """Draws which device holds which part of an array.

    Args:
        array: An array of JAX; a named array, a variable or a layer that holds one; a
            ``jax.ShapeDtypeStruct`` with a sharding, also on an abstract mesh; or one of
            ``plan.leaves``. It may be deleted, and may lie on devices of other processes.

    Returns:
        What ``print`` and notebooks draw; its ``parts`` have all intervals and devices.

    Raises:
        RuleTypeError: There is no array, or there are several.
        PlanError: Nobody has said yet where the array lies.
        ShardingError: The sharding is not one of an array of this shape.

    >>> import jax, penzai_shard as pzs
    >>> mesh = pzs.make_mesh({"data": 4, "model": 2}, abstract=True)
    >>> sharding = jax.NamedSharding(mesh, jax.P(None, "model"))
    >>> print(show_sharding(jax.ShapeDtypeStruct((8, 512), "float32", sharding=sharding)))
    float32[8, 512/model], 16.0 KiB: 2 parts of 8.0 KiB, 4 devices hold each
    dimension 1    0:256        256:512
    dimension 0  ┌────────────┬────────────┐
    0:8          │ 0, 2, 4, 6 │ 1, 3, 5, 7 │
                 └────────────┴────────────┘
    replicated over data
    in each cell the devices of mesh (data=4, model=2) that hold the part, by their places in it
    """
    path, names, shape, dtype, sharding = _read_array(array)
    axes = None
    try:
        if isinstance(sharding, NamedSharding):
            # A spec that says what is not summed yet cannot be iterated.
            entries = PartitionSpec(*sharding.spec.partitions)
            axes = specs.mesh_axes(entries, len(shape))
            parts = _find_parts(shape, axes, sharding)
        else:
            parts = _read_parts(shape, sharding)
    except ValueError as error:
        # Most do not divide. What is left to the compiler has no parts yet.
        fix = "Draw what planning gives: make_plan(tree, mesh, rules).leaves[0]."
        problem = Problem(path, str(error).rstrip("."), fix)
        raise ShardingError("show_sharding:", [problem]) from error
    labels = [f"dimension {dim}" if name is None else plain_text(name) for dim, name in names]
    return ShardedArray(path, tuple(labels), shape, dtype, sharding, axes, parts)


def _read_array(array: Any) -> tuple[str, Any, tuple[int, ...], Any, Sharding]:
    """Path, names by dimension, shape, dtype and sharding of the one array of a value."""
    called, leaf, value = "show_sharding:", array, array
    if not isinstance(array, LeafPlan):
        leaves = [leaf for leaf in leaves_of(array) if leaf.dtype is not None]
        if len(leaves) != 1:
            what = f"{type(array).__name__} holds {len(leaves)} arrays, and one is drawn at a time"
            fix = "Give an array, a struct with a sharding, or one of plan.leaves."
            raise RuleTypeError(called, [Problem("", what, fix)])
        leaf, value = leaves[0], leaves[0].value
    if is_traced(value):
        what = "it is traced, and the compiler decides later where it lies"
        fix = "Draw what the compiled function returns, or print jax.typeof(x)."
        raise PlanError(called, [Problem(leaf.path, what, fix)])
    sharding = getattr(value, "sharding", None)
    if sharding is None:
        what = "nobody has said where it lies"
        fix = "Place it: place(tree, mesh, rules); or draw make_plan(tree, mesh, rules).leaves[0]."
        raise PlanError(called, [Problem(leaf.path, what, fix)])
    names = leaf.names or (None,) * len(leaf.shape)
    return leaf.path, enumerate(names), tuple(leaf.shape), leaf.dtype, sharding


# Parts


def _find_parts(
    shape: tuple[int, ...], axes: Sequence[Sequence[str]], sharding: NamedSharding
) -> tuple[ArrayPart, ...]:
    """The parts by mesh and spec.

    Raises:
        ValueError: A length does not divide, which JAX refuses of arrays too.
    """
    mesh = sharding.mesh
    # For every place in the mesh its coordinate along each mesh axis.
    coordinates = np.indices(mesh.axis_sizes).reshape(len(mesh.axis_names), mesh.size)
    places = dict(zip(mesh.axis_names, coordinates, strict=True))
    columns = []
    for length, own in zip(shape, axes, strict=True):
        step, rest = divmod(length, specs.part_count(own, mesh.shape))
        if rest:
            raise ValueError(f"{length} does not divide over mesh axes {[*own]}")
        starts = np.zeros(mesh.size, int)
        for axis in own:
            starts = starts * mesh.shape[axis] + places[axis] * step
        columns.append([*zip(starts.tolist(), (starts + step).tolist(), strict=True)])
    keys = [*zip(*columns, strict=True)] or [()] * mesh.size
    return _group(keys, range(mesh.size) if isinstance(mesh, AbstractMesh) else mesh.devices.flat)


def _read_parts(shape: tuple[int, ...], sharding: Sharding) -> tuple[ArrayPart, ...]:
    """The parts as JAX says them, of a sharding that has no mesh."""
    found = sharding.devices_indices_map(shape)
    keys = [
        tuple(own.indices(length)[:2] for own, length in zip(index, shape, strict=True))
        for index in found.values()
    ]
    return _group(keys, found)


def _group(keys: Iterable[tuple[Interval, ...]], devices: Iterable[Any]) -> tuple[ArrayPart, ...]:
    """The parts of devices that each hold one; devices of an abstract mesh are numbers."""
    held: dict[tuple[Interval, ...], list[Any]] = {}
    for key, device in zip(keys, devices, strict=True):
        held.setdefault(key, []).append(device)
    parts = []
    for key in sorted(held):
        ids = sorted(getattr(device, "id", device) for device in held[key])
        processes = {d.process_index for d in held[key] if hasattr(d, "process_index")}
        parts.append(ArrayPart(key, tuple(ids), tuple(sorted(processes))))
    return tuple(parts)


# The drawing


def _draw(array: ShardedArray, width: int) -> list[Line]:
    """A table of the parts, with as many columns as fit the width; three at least."""
    dims = range(len(array.shape))
    split = [dim for dim in dims if len(array.intervals(dim)) > 1]
    # A matrix is drawn as one, whichever of its dimensions are split.
    whole = [dim for dim in reversed(dims) if dim not in split]
    drawn = sorted([*split, *whole[: max(2 - len(split), 0)]])
    # The last dimension runs across, the others down.
    is_long = len(drawn) == 1 and len(array.intervals(drawn[0])) > _MOST_ACROSS
    down, across = (drawn, []) if is_long else (drawn[:-1], drawn[-1:])
    for most in range(_MOST_COLUMNS, _FEWEST_COLUMNS - 1, -1):
        lines = _draw_table(array, down, across, most)
        if max(sum(len(text) for text, _ in line) for line in lines) <= width:
            break
    return lines


def _draw_table(array: ShardedArray, down: list[int], across: list[int], most: int) -> list[Line]:
    # Rows and columns are intervals by dimension, or None for those that are left out.
    def keys(dims: list[int], most: int) -> list[Any]:
        found = [*itertools.product(*map(array.intervals, dims))]
        first = most // 2
        return found if len(found) <= most else [*found[:first], None, *found[first + 1 - most :]]

    def labels(key: Any, dims: list[int]) -> list[str]:
        if key is None:
            return [_GAP] * len(dims)
        return [f"{start}:{stop}" for start, stop in key]

    places = {
        tuple(tuple(part.intervals[dim] for dim in dims) for dims in (down, across)): number
        for number, part in enumerate(array.parts)
    }
    rows, columns = keys(down, _MOST_ROWS), keys(across, most)
    numbers = [[places.get((row, column)) for column in columns] for row in rows]
    texts = [[_GAP if n is None else _runs(array.parts[n].devices) for n in row] for row in numbers]
    heads = ["".join(labels(column, across)) for column in columns]
    widths = [max(map(len, column)) for column in zip(heads, *texts, strict=True)]

    # What stands left of the cells: a column for each dimension that runs down.
    left = [[array.names[dim] for dim in down], *(labels(row, down) for row in rows)]
    sizes = [max(map(len, column)) + 2 for column in zip(*left, strict=True)]
    names, *margins = ["".join(map(str.ljust, line, sizes)) for line in left]
    corner = "".join(array.names[dim] for dim in across)
    margin = max(len(names), len(corner) + 2)
    lines: list[Line] = []
    if across:
        line = (f"  {head.ljust(size)} " for head, size in zip(heads, widths, strict=True))
        lines.append([(corner.ljust(margin), "bold"), ("".join(line), "")])
    lines.append([(names.ljust(margin), "bold"), (_border("┌┬┐", widths), "")])
    for label, row, cells in zip(margins, numbers, texts, strict=True):
        pieces = [(label.ljust(margin) + "│", "")]
        for number, text, size in zip(row, cells, widths, strict=True):
            colour = "" if number is None else _COLOURS[number % len(_COLOURS)]
            pieces += [(f" {text.ljust(size)} ", colour), ("│", "")]
        lines.append(pieces)
    return [*lines, [(" " * margin + _border("└┴┘", widths), "")]]


def _runs(numbers: Sequence[int]) -> str:
    """Numbers in their order, with those without a gap by their ends: ``0-3, 8``."""
    texts = write_runs(numbers)
    if len(texts) > _MOST_RUNS:
        texts = [*texts[:2], _GAP, texts[-1]]
    return ", ".join(texts)


def _border(corners: str, widths: Sequence[int]) -> str:
    return corners[0] + corners[1].join("─" * (size + 2) for size in widths) + corners[2]
