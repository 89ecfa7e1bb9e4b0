"""What a sharding lock holds: layouts, collectives and memory, as plain values."""

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any

from jax.sharding import PartitionSpec

from penzai_shard.inspection.steps.step_arrays import StepArray, StepPart
from penzai_shard.partition_specs import canonical_spec, mesh_axes_by_dimension

# Of a dimension that the compiler decides about.
FREE = "?"

SpecEntries = tuple[str | tuple[str, ...] | None, ...]


@dataclasses.dataclass(frozen=True)
class LockedArray:
    """An array that goes into a step.

    Attributes:
        part: What it is for the step, such as ``"parameters"``.
        spec: The entries of its canonical spec, ``FREE`` for one that is left to the compiler;
            None if its whole layout is.
        shape: Its global shape, as it is stored.
        dtype: Its dtype, such as ``"float32"`` or ``"key<fry>"``.
        donated: Whether a result may take its memory.
        on_host: Whether it is kept in the host's memory.
        chosen: The shape of what one device holds, where the compiler decided to split it.
        true_shape: Its global shape without padding, if it is stored padded.
    """

    part: StepPart
    spec: SpecEntries | None
    shape: tuple[int, ...]
    dtype: str
    donated: bool = False
    on_host: bool = False
    chosen: tuple[int, ...] | None = None
    true_shape: tuple[int, ...] | None = None

    @classmethod
    def of(cls, array: StepArray) -> "LockedArray":
        """That of an array of a step."""
        spec = None if array.sharding is None else _entries(array.spec)
        return cls(
            array.part,
            spec,
            array.shape,
            str(array.dtype),
            array.donated,
            array.is_on_host,
            array.shard_shape if spec is None and array.shard_shape != array.shape else None,
            array.true_shape if array.true_shape != array.shape else None,
        )

    @property
    def spec_text(self) -> str:
        """Its spec for people.

        >>> LockedArray("inputs", ("data", None, ("x", "y")), (8, 2, 4), "int32").spec_text
        "P('data', None, ('x', 'y'))"
        """
        if self.spec is None:
            parts = "" if self.chosen is None else f", {list(self.chosen)} on each device"
            return f"left to the compiler{parts}"
        return f"P({', '.join(map(repr, self.spec))})"

    @property
    def type_text(self) -> str:
        """Its dtype and shape for people; behind a true length what it is padded to.

        >>> LockedArray("inputs", (), (8, 2), "int32").type_text
        'int32[8,2]'
        >>> LockedArray("parameters", (), (16, 2), "float32", true_shape=(13, 2)).type_text
        'float32[13(16),2]'
        """
        lengths = (
            f"{length}({stored})" if stored != length else str(length)
            for length, stored in zip(self.true_shape or self.shape, self.shape, strict=True)
        )
        return f"{self.dtype}[{','.join(lengths)}]"


@dataclasses.dataclass(frozen=True, order=True)
class CollectiveGroup:
    """The collectives of a program that are counted together.

    Attributes:
        layers: The layers that they belong to, as ``Collective.labels`` names them; several for
            those that the compiler merged. Empty if nobody is known to own them.
        phase: ``"forward"``, ``"backward"``, ``"optimizer"``; empty if not known.
        kind: Such as ``"all-gather"``.
        mesh_axes: The mesh axes that they go over, as ``Collective.axes_text`` names them.
    """

    layers: tuple[str, ...]
    phase: str
    kind: str
    mesh_axes: str


@dataclasses.dataclass(frozen=True)
class CollectiveCount:
    """How many collectives of a group one run of the step executes, and what they move.

    Attributes:
        count: How many are executed; of a loop whose number of turns the program does not say,
            each counts once.
        payload_bytes: The larger of what goes in and what comes out, on one device, of all
            executions together.
        unknown_times: How many of them are in a loop whose number of turns is not known.
    """

    count: int
    payload_bytes: int
    unknown_times: int = 0

    def __add__(self, other: "CollectiveCount") -> "CollectiveCount":
        return CollectiveCount(
            self.count + other.count,
            self.payload_bytes + other.payload_bytes,
            self.unknown_times + other.unknown_times,
        )


@dataclasses.dataclass(frozen=True)
class LockContent:
    """All that a lock holds.

    Attributes:
        mesh: The mesh axes in their order, each with its size.
        device_kind: What the program is for, such as ``"cpu"`` or ``"TPU v5 lite"``.
        made_with: The versions of what made the program, by package.
        arrays: What goes into the step, by path.
        collectives: What one run of it moves between devices.
        not_counted: What may move data besides, and is not known, in sentences, each with how
            often the program says it.
        memory: What one device needs, in bytes, by item.
    """

    mesh: tuple[tuple[str, int], ...]
    device_kind: str
    made_with: Mapping[str, str]
    arrays: Mapping[str, LockedArray]
    collectives: Mapping[CollectiveGroup, CollectiveCount]
    not_counted: Mapping[str, int]
    memory: Mapping[str, int]


def locked_arrays(arrays: Iterable[StepArray]) -> dict[str, LockedArray]:
    """Arrays by path; a path that occurs twice gets a number behind it.

    Constants are left out: they go by where they are in the edited model, and nobody lays them out.
    """
    locked: dict[str, LockedArray] = {}
    for array in arrays:
        if array.part == "constants":
            continue
        path, number = array.path, 1
        while path in locked:
            number += 1
            path = f"{array.path} ({number})"
        locked[path] = LockedArray.of(array)
    return locked


def summed(
    counts: Iterable[tuple[CollectiveGroup, CollectiveCount]],
) -> dict[CollectiveGroup, CollectiveCount]:
    """The sum of what is counted in each group."""
    total: dict[CollectiveGroup, CollectiveCount] = {}
    for group, count in counts:
        total[group] = total[group] + count if group in total else count
    return total


def _entries(spec: PartitionSpec) -> SpecEntries:
    def entry(given: Any) -> str | tuple[str, ...] | None:
        if given is PartitionSpec.UNCONSTRAINED:
            return FREE
        (axes,) = mesh_axes_by_dimension(PartitionSpec(given))
        return axes[0] if len(axes) == 1 else axes or None

    return tuple(map(entry, canonical_spec(spec)))
