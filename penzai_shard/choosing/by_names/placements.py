"""How arrays are split by rules of names, and what it takes to bring them from one way to another.

A placement says for each dimension which mesh axes split it. Sizes are those of the whole array;
bytes are what one device sends, by the ring algorithms that ``ring_bytes`` counts.
"""

import dataclasses
import functools
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple, TypeAlias

from penzai_shard.axis_decisions import decide
from penzai_shard.axis_rules import AxisRules
from penzai_shard.inspection.traffic.collective_records import ring_bytes
from penzai_shard.partition_specs import mesh_axes_by_dimension, padded_length, part_count
from penzai_shard.rule_kinds import LogicalAxis, OnIndivisible

Placement: TypeAlias = tuple[tuple[str, ...], ...]


class Dimension(NamedTuple):
    """A dimension of an array in a program.

    Attributes:
        name: The logical axis of its slowest part; None if that is not known.
        size: The length of that part.
        inner: The length of what the dimension has behind it: 1 if it is one logical axis.
    """

    name: LogicalAxis | None
    size: int
    inner: int = 1


class Moved(NamedTuple):
    """What one device sends over some mesh axes, in bytes."""

    mesh_axes: tuple[str, ...]
    bytes: float


@dataclasses.dataclass(frozen=True)
class Tensor:
    """An array in a program.

    Attributes:
        dimensions: Its dimensions.
        itemsize: The bytes of an element.
    """

    dimensions: tuple[Dimension, ...]
    itemsize: int

    @functools.cached_property
    def names(self) -> tuple[LogicalAxis | None, ...]:
        """The logical axes of its dimensions."""
        return tuple(dimension.name for dimension in self.dimensions)

    @functools.cached_property
    def nbytes(self) -> int:
        """The bytes of all of it."""
        return self.itemsize * math.prod(d.size * d.inner for d in self.dimensions)

    def of_microbatch(self, batch: LogicalAxis, count: int) -> "Tensor":
        """The same of one of several parts of the batch."""
        if count == 1 or batch not in self.names:
            return self
        dimensions = tuple(
            d._replace(size=max(d.size // count, 1)) if d.name == batch else d
            for d in self.dimensions
        )
        return Tensor(dimensions, self.itemsize)

    def placed(
        self, rules: AxisRules, mesh_items: tuple[tuple[str, int], ...], pads: bool = False
    ) -> Placement:
        """How rules split it; what does not divide stays whole, as it does in a computation.

        Args:
            rules: The rules.
            mesh_items: Name and size of each mesh axis.
            pads: Whether such lengths are split too, as they are where parameters are padded.
        """
        names = [d.name if d.size > 1 else None for d in self.dimensions]
        for i, name in enumerate(names):
            if name is not None and name in names[:i]:
                # Such as the sequence of queries and that of keys: the first one is split.
                names[i] = None
        sizes = tuple(d.size for d in self.dimensions)
        unfit: OnIndivisible = "pad" if pads else "replicate"
        spec = decide(rules.rules, tuple(names), sizes, mesh_items, unfit).spec
        return mesh_axes_by_dimension(spec, len(sizes))

    def local_bytes(self, placement: Placement, mesh: Mapping[str, int]) -> float:
        """The bytes of one device's part; of one that does not divide, of the largest part."""
        return self.itemsize * math.prod(
            -(-d.size // part_count(axes, mesh)) * d.inner
            for d, axes in zip(self.dimensions, placement, strict=True)
        )

    def moves(
        self,
        source: Mapping[str, int],
        target: Mapping[str, int],
        partial: Mapping[str, int],
        mesh: Mapping[str, int],
        is_gradient: bool = False,
    ) -> tuple[Moved, ...]:
        """What one device sends to bring it from one placement to another; see ``moves``.

        Of a length that does not divide, padding is sent too. What is summed up is then not
        scattered: compilers sum up all of it, pad that, and take a slice. A gradient is padded
        before.
        """
        before, after = (self._counts(split, mesh) for split in (source, target))
        whole = frozenset(
            axis
            for axis in partial
            if axis in target and not is_gradient and self._is_uneven(target[axis], after)
        )
        if whole:
            target = {axis: i for axis, i in target.items() if axis not in whole}
            after = self._counts(target, mesh)
        lengths = [
            max(padded_length(d.size, before[i]), padded_length(d.size, after[i])) * d.inner
            for i, d in enumerate(self.dimensions)
        ]
        nbytes = self.itemsize * math.prod(lengths)
        return tuple(moves(nbytes, source, target, partial, mesh))

    def _counts(self, split: Mapping[str, int], mesh: Mapping[str, int]) -> list[int]:
        """In how many parts each dimension is split."""
        counts = [1] * len(self.dimensions)
        for axis, dimension in split.items():
            counts[dimension] *= mesh[axis]
        return counts

    def _is_uneven(self, dimension: int, counts: Sequence[int]) -> bool:
        return self.dimensions[dimension].size % counts[dimension] != 0


def moves(
    nbytes: float,
    source: Mapping[str, int],
    target: Mapping[str, int],
    partial: Mapping[str, int],
    mesh: Mapping[str, int],
) -> Iterator[Moved]:
    """What one device sends to bring an array from one placement to another.

    Sums of what several devices have come first: those of which all devices need the result, then
    those that are scattered where the target is split. Then what is split otherwise is exchanged,
    and last what is whole in the target is gathered. To take a slice costs nothing.

    Args:
        nbytes: The bytes of the whole array.
        source: Which dimension each mesh axis splits before; those of sums are not among them.
        target: The same afterwards.
        partial: The mesh axes over whose devices it is to be summed, each with the factor of the
            operation that it splits.
        mesh: The sizes of the mesh axes.

    >>> mesh = {"data": 4, "model": 2}
    >>> list(moves(80.0, {"data": 0}, {}, {}, mesh))
    [Moved(mesh_axes=('data',), bytes=60.0)]
    >>> list(moves(80.0, {}, {"data": 0}, {"data": 5, "model": 6}, mesh))
    [Moved(mesh_axes=('model',), bytes=80.0), Moved(mesh_axes=('data',), bytes=60.0)]
    """
    sliced = [axis for axis in target if axis not in source and axis not in partial]
    local = nbytes / part_count(source, mesh) / part_count(sliced, mesh)
    for group in sorted(
        _summed_together(partial, mesh), key=lambda group: target.keys() >= {*group}
    ):
        kind = "reduce-scatter" if target.keys() >= {*group} else "all-reduce"
        yield Moved(group, ring_bytes(kind, 1, part_count(group, mesh)) * local)
        local /= part_count([axis for axis in group if axis in target], mesh)
    exchanged = tuple(
        axis for axis in mesh if axis in source and axis in target and source[axis] != target[axis]
    )
    if exchanged:
        yield Moved(exchanged, ring_bytes("all-to-all", 1, part_count(exchanged, mesh)) * local)
    gathered = tuple(axis for axis in mesh if axis in source and axis not in target)
    if gathered:
        count = part_count(gathered, mesh)
        yield Moved(gathered, ring_bytes("all-gather", 1, count) * local * count)


def _summed_together(partial: Mapping[str, int], mesh: Mapping[str, int]) -> list[tuple[str, ...]]:
    """The mesh axes of a sum, by the factors that they split: compilers sum over one by one."""
    factors = dict.fromkeys(partial.values())
    return [tuple(axis for axis in mesh if partial.get(axis) == each) for each in factors]


def dimension_of(placement: Sequence[Sequence[str]]) -> dict[str, int]:
    """Which dimension each mesh axis splits.

    >>> dimension_of((("data",), (), ("model",)))
    {'data': 0, 'model': 2}
    """
    return {axis: i for i, axes in enumerate(placement) for axis in axes}
