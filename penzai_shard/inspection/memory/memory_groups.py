"""What is on a device between steps, parameter by parameter."""

import dataclasses
from collections.abc import Collection, Iterable, Sequence
from typing import Any

from jax.sharding import PartitionSpec

from penzai_shard.inspection.steps.step_arrays import StepArray, StepPart
from penzai_shard.path_folding import folded_path, folding_key
from penzai_shard.planning.plan_table import SCALARS, axes_text
from penzai_shard.rule_kinds import LogicalAxis
from penzai_shard.tree_paths import path_endings


@dataclasses.dataclass(frozen=True)
class MemoryGroup:
    """Arrays that are alike, such as one parameter of each of many equal blocks.

    Attributes:
        path: Their path, with ``*`` in place of the numbers in which they differ.
        part: What they are for the step.
        count: How many there are.
        names: The logical axes of each; None without names.
        shape: The global shape of each, without padding.
        dtype: The dtype of each.
        spec: The spec of each.
        is_replicated: Whether every device holds all of them.
        array_bytes: What one device holds of them, in bytes.
        optimizer_bytes: What one device holds of the optimizer's state for them, in bytes.
        stored_shape: The global shape that each is stored with, which may be padded.
    """

    path: str
    part: StepPart
    count: int
    names: tuple[LogicalAxis | None, ...] | None
    shape: tuple[int, ...]
    dtype: str
    spec: PartitionSpec
    is_replicated: bool
    array_bytes: int
    optimizer_bytes: int
    stored_shape: tuple[int, ...]

    @property
    def bytes(self) -> int:
        """What one device holds of all that, in bytes."""
        return self.array_bytes + self.optimizer_bytes

    @property
    def axes_text(self) -> str:
        """The dimensions of each, with the mesh axes that they are split over."""
        return axes_text(self.names, self.shape, self.spec, self.stored_shape)

    def data(self) -> dict[str, Any]:
        """All but the count, for programs."""
        return {
            "path": self.path,
            "part": self.part,
            "names": self.names and [None if name is None else str(name) for name in self.names],
            "shape": self.shape,
            "dtype": self.dtype,
            "spec": list(self.spec),
            "is_replicated": self.is_replicated,
            "array_bytes": self.array_bytes,
            "optimizer_bytes": self.optimizer_bytes,
            "stored_shape": self.stored_shape,
        }


def memory_groups(arrays: Iterable[StepArray], collapse: bool = True) -> tuple[MemoryGroup, ...]:
    """Arrays in groups, the largest first; a parameter together with its optimizer's state.

    Args:
        arrays: Those that are on the device between steps.
        collapse: Whether arrays are alike that differ in the numbers of their paths only, and
            all scalars of a part.
    """
    arrays = list(arrays)
    parameters = {_name(array): array for array in arrays if array.part == "parameters"}
    of_optimizer = dict.fromkeys(parameters, 0)
    own: list[StepArray] = []
    for array in arrays:
        name = _parameter_of(array, parameters)
        if name is None:
            own.append(array)
        else:
            of_optimizer[name] += array.bytes_per_device
    groups: dict[tuple[object, ...], list[StepArray]] = {}
    for array in own:
        groups.setdefault((array.part, *_likeness(array, collapse)), []).append(array)
    made = [_group(members, of_optimizer) for members in groups.values()]
    return tuple(sorted(made, key=lambda group: -group.bytes))


def _group(members: Sequence[StepArray], of_optimizer: dict[str, int]) -> MemoryGroup:
    first = members[0]
    paths = [array.path for array in members]
    alike = len(set(map(folding_key, paths))) == 1
    trained = [_name(array) for array in members if array.part == "parameters"]
    return MemoryGroup(
        path=folded_path(paths) if alike else SCALARS,
        part=first.part,
        count=len(members),
        names=first.names,
        shape=first.true_shape or first.shape,
        dtype=str(first.dtype),
        spec=first.spec,
        is_replicated=first.is_replicated,
        array_bytes=sum(array.bytes_per_device for array in members),
        optimizer_bytes=sum(of_optimizer[name] for name in trained),
        stored_shape=first.shape,
    )


def _likeness(array: StepArray, collapse: bool) -> tuple[object, ...]:
    if not collapse:
        return (array.path,)
    if not array.shape:
        return (SCALARS,)
    axes = axes_text(array.names, array.true_shape or array.shape, array.spec, array.shape)
    return (folding_key(array.path), axes, str(array.dtype), array.is_replicated)


def _name(array: StepArray) -> str:
    """What a parameter is called where the optimizer keeps something for it."""
    return array.path.partition("/")[2]


def _parameter_of(array: StepArray, names: Collection[str]) -> str | None:
    """The parameter that an array of the optimizer's state belongs to, if it is in its path.

    Args:
        array: Any array.
        names: The names of the parameters.
    """
    if array.part != "optimizer state":
        return None
    return next((end for end in path_endings(array.path) if end in names), None)
