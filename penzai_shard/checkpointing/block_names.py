"""How blocks of equal layers are called: each by its number, or all stacked under one name.

Penzai calls the parameters of a block ``transformer/block_0/mlp/...`` where blocks stand one by
one, and ``transformer/blocks/mlp/...`` where they are stacked along the logical axis ``blocks``.
"""

import dataclasses
import fnmatch
import re
from collections.abc import Iterable, Iterator

from penzai_shard.errors import RuleTypeError
from penzai_shard.tree_paths import path_matches, split_path

_PART = re.compile(r"[^./\[\]]+")


@dataclasses.dataclass(frozen=True)
class BlockNames:
    """What the blocks of a model are called.

    Attributes:
        block: The part of a name that says which block it is of, ``*`` standing for the number.
        stacked: What stands in its place where the blocks are stacked.
        axis: The logical axis along which they are.
        within: A pattern of what stands before that part, if only some blocks are meant.
    """

    block: str = "block_*"
    stacked: str = "blocks"
    axis: str = "blocks"
    within: str | None = None

    def __post_init__(self) -> None:
        is_part = len(split_path(self.block)) == 1 and len(split_path(self.stacked)) == 1
        if not is_part or self.block.count("*") != 1 or re.search(r"[*?]", self.stacked):
            raise RuleTypeError(
                f"block={self.block!r}, stacked={self.stacked!r}: both are one part of a name, "
                "without slashes or dots, and * stands for the number in the first alone: "
                "block='block_*', stacked='blocks'."
            )

    def numbered(self, name: str) -> list["Member"]:
        """Each way in which a name can be that of one block's array.

        >>> BlockNames().numbered("transformer/block_2/mlp/w.b")[0].number
        2
        """
        return [
            Member(name[:start], name[end:], int(number))
            for start, end, part in self._parts(name)
            if fnmatch.fnmatchcase(part, self.block)
            and (number := self._number_in(part)).isdecimal()
        ]

    def stacks(self, name: str) -> list["Member"]:
        """Each way in which a name can be that of the stacked arrays of all blocks.

        >>> BlockNames().stacks("transformer/blocks/w")
        [Member(before='transformer/', after='/w', number=-1)]
        """
        return [
            Member(name[:start], name[end:], -1)
            for start, end, part in self._parts(name)
            if part == self.stacked
        ]

    def of_block(self, member: "Member", number: int) -> str:
        """The name of the array of one block."""
        return member.before + self.block.replace("*", str(number)) + member.after

    def of_stack(self, member: "Member") -> str:
        """The name of the arrays of all blocks."""
        return member.before + self.stacked + member.after

    def _parts(self, name: str) -> Iterator[tuple[int, int, str]]:
        for found in _PART.finditer(name):
            before = name[: found.start()]
            if self.within is None or path_matches(self.within, before):
                yield found.start(), found.end(), found.group()

    def _number_in(self, part: str) -> str:
        before, _, after = self.block.partition("*")
        return part.removeprefix(before).removesuffix(after)


@dataclasses.dataclass(frozen=True)
class Member:
    """A name around the part that says which block it is of.

    Attributes:
        before: What stands before that part.
        after: What stands after it.
        number: The number of the block; -1 where all are stacked.
    """

    before: str
    after: str
    number: int

    @property
    def group(self) -> tuple[str, str]:
        """The same for the arrays of all blocks that belong together."""
        return self.before, self.after


def by_group(members: Iterable[tuple[str, Member]]) -> dict[tuple[str, str], dict[int, str]]:
    """For arrays that belong together, the name of each by the number of its block.

    >>> names = BlockNames()
    >>> by_group((name, names.numbered(name)[0]) for name in ("block_1/w", "block_0/w"))
    {('', '/w'): {1: 'block_1/w', 0: 'block_0/w'}}
    """
    groups: dict[tuple[str, str], dict[int, str]] = {}
    for name, member in members:
        groups.setdefault(member.group, {})[member.number] = name
    return groups
