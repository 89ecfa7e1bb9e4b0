"""Collectives inside of fusions, as compilers for TPUs write them.

One that runs beside other work is written in each fusion that it runs beside. Where it starts, it
goes into a custom call ``AsyncCollectiveStart``; where it ends, into ``AsyncCollectiveDone``; in
between it is only named, with the same ``chain_id``. That is one collective.

A reduce-scatter is written as an all-reduce and the slice that the device keeps, fused.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from penzai_shard.compiled_programs.instruction_text import ArrayType, arrays_of
from penzai_shard.compiled_programs.modules import Instruction, Module

START = "AsyncCollectiveStart"
DONE = "AsyncCollectiveDone"
_SAME_ELEMENTS = frozenset({"bitcast", "copy", "get-tuple-element", "reshape", "transpose"})


class _Chain(NamedTuple):
    """What the parts of one collective have in common."""

    opcode: str
    groups: str | None
    channel: str | None
    settings: str | None

    @property
    def has_id(self) -> bool:
        return "chain_id=" in (self.settings or "")

    @classmethod
    def of(cls, one: Instruction) -> "_Chain":
        keys = ("replica_groups", "channel_id", "frontend_attributes")
        return cls(one.opcode, *(one.attributes.get(key) for key in keys))


def continuations(module: Module, collectives: Sequence[Instruction]) -> frozenset[str]:
    """Those collectives, by name, that only continue or end one that another fusion starts."""
    uses = {one.name: asynchronous_uses(module, one) for one in collectives}
    started = {_Chain.of(one) for one in collectives if START in uses[one.name]}
    return frozenset(
        one.name
        for one in collectives
        if START not in uses[one.name]
        and _Chain.of(one) in started
        and (DONE in uses[one.name] or _Chain.of(one).has_id)
    )


def asynchronous_uses(module: Module, one: Instruction) -> frozenset[str]:
    """Which of ``START`` and ``DONE`` a collective goes into."""
    siblings = module.computations[one.computation].instructions
    users = [siblings[name] for name in one.user_names]
    targets = {
        user.attributes.get("custom_call_target", "").strip('"')
        for user in users
        if user.opcode == "custom-call"
    }
    return frozenset(targets & {START, DONE})


def scattered_results(
    module: Module, one: Instruction, group_size: int
) -> tuple[ArrayType, ...] | None:
    """What each device keeps of a fused all-reduce of which it keeps its share alone.

    Args:
        module: The program.
        one: An all-reduce in a fusion's computation.
        group_size: How many devices share the sum.

    Returns:
        The shares; None if anything else is done with the sum.
    """
    slices = list(_ends(module, one))
    if not slices or any(end.opcode != "dynamic-slice" for end in slices):
        return None
    shares = tuple(array for end in slices for array in arrays_of(end.read.type))
    whole = sorted(array.bytes for array in one.results)
    return shares if whole == sorted(array.bytes * group_size for array in shares) else None


def _ends(module: Module, one: Instruction) -> Iterator[Instruction]:
    """What is first done with a value beside putting its elements into another order."""
    if one.is_root:
        yield one
    siblings = module.computations[one.computation].instructions
    for name in one.user_names:
        user = siblings[name]
        if user.opcode in _SAME_ELEMENTS:
            yield from _ends(module, user)
        else:
            yield user
