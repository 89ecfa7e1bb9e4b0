"""Which parameters of blocks are stacked in a checkpoint and not in a model, or the reverse.

Decided from names and records alone. What is wanted is said anew in the form that is stored, so
that it is compared array by array like everything else.
"""

import collections
import dataclasses
from collections.abc import Collection, Iterable, Iterator, Mapping

from penzai_shard.checkpointing.array_records import ArrayRecord
from penzai_shard.checkpointing.block_names import BlockNames, by_group

_NAMES = BlockNames()


@dataclasses.dataclass(frozen=True)
class BlockConversion:
    """The arrays of blocks one by one, and the one array in which they are stacked.

    Attributes:
        stacked: The name of the stacked array.
        blocks: The names of the others, in the order of the blocks.
        dimension: Which dimension of the wanted stacked array, or of the stored one, the blocks
            are stacked along.
        stacks: Whether the model wants the stacked one; if not, the others.
    """

    stacked: str
    blocks: tuple[str, ...]
    dimension: int
    stacks: bool

    @property
    def stored(self) -> tuple[str, ...]:
        """The names of what is read."""
        return self.blocks if self.stacks else (self.stacked,)

    @property
    def wanted(self) -> tuple[str, ...]:
        """The names of what the model has."""
        return (self.stacked,) if self.stacks else self.blocks

    def as_stored(self, record: ArrayRecord) -> ArrayRecord:
        """The record of what is to be read for an array of the model."""
        k, count = self.dimension, len(self.blocks)
        axes, shape = record.axes, record.shape
        if self.stacks:
            axes = axes and (*axes[:k], *axes[k + 1 :])
            shape = (*shape[:k], *shape[k + 1 :])
        else:
            axes = axes and (*axes[:k], _NAMES.axis, *axes[k:])
            shape = (*shape[:k], count, *shape[k:])
        return dataclasses.replace(record, axes=axes, shape=shape)


def other_forms(wanted: Mapping[str, ArrayRecord]) -> Iterator[str]:
    """What the arrays of a model's blocks are called where they are stacked and the model's not.

    And the reverse.

    >>> list(other_forms({"blocks/w": ArrayRecord((2,), "int32", ("blocks",)), "block_0/v": None}))
    ['block_0/w', 'block_1/w', 'blocks/v']
    """
    for name, record in wanted.items():
        for member in _NAMES.stacks(name):
            for number in range(_count(record)):
                yield _NAMES.of_block(member, number)
        for member in _NAMES.numbered(name):
            yield _NAMES.of_stack(member)


def find_conversions(
    stored: Mapping[str, ArrayRecord], wanted: Mapping[str, ArrayRecord]
) -> tuple[list[BlockConversion], list[str]]:
    """Finds all wanted arrays of blocks that are stored in the other form, and only so.

    Args:
        stored: The stored arrays, by their names in the model or those that these would have.
        wanted: The arrays of the model.

    Returns:
        The conversions, and a line for each that cannot be made.

    >>> blocks = {f"block_{i}/w": ArrayRecord((3,), "int32", ("a",)) for i in range(2)}
    >>> stacked = {"blocks/w": ArrayRecord((2, 3), "int32", ("blocks", "a"))}
    >>> find_conversions(blocks, stacked)[0][0].blocks
    ('block_0/w', 'block_1/w')
    """
    found: list[BlockConversion] = []
    problems: list[str] = []
    for name, record in wanted.items():
        if name in stored or not _count(record):
            continue
        choices = [
            tuple(_NAMES.of_block(member, i) for i in range(_count(record)))
            for member in _NAMES.stacks(name)
        ]
        choices = [blocks for blocks in choices if any(block in stored for block in blocks)]
        if len(choices) > 1:
            candidates = " or ".join(f"{blocks[0]!r}" for blocks in choices)
            problems.append(f"{name}: its blocks may be {candidates} and so on. Stack them first.")
        elif choices:
            dimension = (record.axes or ()).index(_NAMES.axis)
            found.append(BlockConversion(name, choices[0], dimension, stacks=True))
    members = [
        (name, member)
        for name in wanted
        if name not in stored
        for member in _NAMES.numbered(name)
        if _NAMES.of_stack(member) in stored
    ]
    for (before, after), blocks in by_group(members).items():
        conversion, problem = _unstacking(before, after, blocks, stored, wanted)
        found += [conversion] if conversion else []
        problems += [problem] if problem else []
    times = collections.Counter(name for conversion in found for name in conversion.wanted)
    problems += [
        f"{name}: {count} stacked arrays of the checkpoint may hold it. Unstack them first."
        for name, count in times.items()
        if count > 1
    ]
    return found, problems


def _unstacking(
    before: str,
    after: str,
    blocks: Mapping[int, str],
    stored: Mapping[str, ArrayRecord],
    wanted: Mapping[str, ArrayRecord],
) -> tuple[BlockConversion | None, str]:
    names = tuple(blocks[number] for number in sorted(blocks))
    stacked = f"{before}{_NAMES.stacked}{after}"
    if sorted(blocks) != list(range(len(blocks))):
        return None, (
            f"{stacked}: the checkpoint has all blocks of it stacked, and the model wants "
            f"{_listed(names)} of them alone. Unstack it first: restore it as it is, and use "
            "unstack_blocks."
        )
    different = {str(wanted[name]) + wanted[name].dtype: name for name in names}
    if len(different) > 1:
        return None, (
            f"{stacked}: the checkpoint has it stacked, and the model's blocks differ: "
            + "; ".join(
                f"{name} is {wanted[name]} {wanted[name].dtype}" for name in different.values()
            )
            + ". Build the model with equal blocks."
        )
    axes = stored[stacked].axes or ()
    dimension = axes.index(_NAMES.axis) if _NAMES.axis in axes else 0
    return BlockConversion(stacked, names, dimension, stacks=False), ""


def conversion_problems(conversions: Iterable[BlockConversion]) -> list[str]:
    """One line for each conversion that was not asked for."""
    return [
        (
            f"{c.stacked}: the checkpoint has its blocks one by one, {_listed(c.blocks)}, and the "
            "model has them stacked. Pass on_block_mismatch='convert' to have them stacked."
        )
        if c.stacks
        else (
            f"{c.stacked}: the checkpoint has its blocks stacked, and the model has them one by "
            f"one, {_listed(c.blocks)}. Pass on_block_mismatch='convert' to have them unstacked."
        )
        for c in conversions
    ]


def _count(record: ArrayRecord | None) -> int:
    """How many blocks are stacked in an array; zero if it is not stacked."""
    axes = (record and record.axes) or ()
    return record.shape[axes.index(_NAMES.axis)] if record and _NAMES.axis in axes else 0


def _listed(names: Collection[str]) -> str:
    names = list(names)
    return ", ".join(names) if len(names) < 3 else f"{names[0]} to {names[-1]}"
