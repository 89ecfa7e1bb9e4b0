"""The collectives of a compiled program: what runs, among which devices, how often."""

import dataclasses
from collections.abc import Iterator, Mapping

from penzai_shard.compiled_programs.device_groups import Groups, read_groups, read_pairs
from penzai_shard.compiled_programs.executions import Executions, executions
from penzai_shard.compiled_programs.instruction_text import ArrayType, Type, arrays_of
from penzai_shard.compiled_programs.modules import Instruction, Module
from penzai_shard.compiled_programs.operation_names import merged_names
from penzai_shard.errors import ProgramError, raise_all

KINDS = (
    "all-gather",
    "all-reduce",
    "reduce-scatter",
    "all-to-all",
    "ragged-all-to-all",
    "collective-permute",
    "collective-broadcast",
)


@dataclasses.dataclass(frozen=True)
class CollectiveOperation:
    """One collective of a program, synchronous or not; an asynchronous one counts once.

    Attributes:
        kind: One of ``KINDS``.
        name: The instruction's name.
        groups: Which devices exchange with each other, as positions in the mesh; of a permute the
            pairs of source and target.
        operands: What goes in on one device.
        results: What comes out.
        times: How often one run of the program executes it; None if the program does not say.
        at_most: Whether it may be executed less often, since it is in a branch of a conditional.
        op_names: Where it comes from, one name for each operation that the compiler merged into it.
        instruction: The instruction.
    """

    kind: str
    name: str
    groups: Groups
    operands: tuple[ArrayType, ...]
    results: tuple[ArrayType, ...]
    times: int | None
    at_most: bool
    op_names: tuple[str, ...]
    instruction: Instruction

    @property
    def payload_bytes(self) -> int:
        """The larger of what goes in and what comes out, on one device, in bytes."""
        return max(sum(array.bytes for array in side) for side in (self.operands, self.results))


def read_collectives(module: Module, device_count: int) -> list[CollectiveOperation]:
    """The collectives of a program, in the order of its computations.

    Those in computations that never run are left out.

    Args:
        module: The program.
        device_count: How many devices it runs on.

    Raises:
        ProgramError: There are collectives that cannot be read; the message names all of them.
    """
    times = executions(module)
    found, unread = [], []
    for one, executed in _in_order(module, times):
        kind = one.opcode.removesuffix("-start")
        if kind not in KINDS:
            continue
        try:
            found.append(_collective(kind, one, module, executed, device_count))
        except ValueError as error:
            unread.append(f"{one.name} ({one.opcode}): {error}.")
    raise_all(ProgramError, f"{module.name}: collectives that cannot be read:", unread)
    return found


def _in_order(
    module: Module, times: Mapping[str, Executions]
) -> Iterator[tuple[Instruction, Executions]]:
    for one in module:
        if one.computation in times:
            yield one, times[one.computation]


def _collective(
    kind: str, one: Instruction, module: Module, executed: Executions, device_count: int
) -> CollectiveOperation:
    siblings = module.computations[one.computation].instructions
    operands = tuple(array for name in one.operand_names for array in siblings[name].results)
    return CollectiveOperation(
        kind=kind,
        name=one.name,
        groups=_groups(kind, one, device_count),
        operands=operands,
        results=_results(kind, one),
        times=executed.times,
        at_most=executed.at_most,
        op_names=merged_names(one.op_name) if one.op_name else (),
        instruction=one,
    )


def _groups(kind: str, one: Instruction, device_count: int) -> Groups:
    if kind == "collective-permute":
        return read_pairs(_attribute(one, "source_target_pairs"), device_count)
    return read_groups(_attribute(one, "replica_groups"), device_count)


def _attribute(one: Instruction, key: str) -> str:
    if key not in one.attributes:
        raise ValueError(f"it has no {key}")
    return one.attributes[key]


def _results(kind: str, one: Instruction) -> tuple[ArrayType, ...]:
    """What comes out of a collective; the start of one gives what went in, too."""
    type_: Type = one.read.type
    if one.opcode.endswith("-start") and kind != "all-reduce":
        if isinstance(type_, ArrayType) or len(type_) < 2:
            raise ValueError(f"the start of a collective that gives {one.results}")
        type_ = type_[1]
    return arrays_of(type_)
