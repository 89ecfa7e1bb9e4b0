"""The collectives of a compiled program: what runs, among which devices, how often."""

import dataclasses
import math
from collections.abc import Mapping, Sequence

from penzai_shard.compiled_programs.device_groups import (
    GroupAxes,
    Groups,
    mesh_axes_of,
    mesh_axes_of_pairs,
    read_groups,
    read_pairs,
)
from penzai_shard.compiled_programs.executions import Executions, executions
from penzai_shard.compiled_programs.fused_collectives import (
    DONE,
    asynchronous_uses,
    continuations,
    scattered_results,
)
from penzai_shard.compiled_programs.instruction_text import ArrayType, Type, arrays_of
from penzai_shard.compiled_programs.modules import Instruction, Module
from penzai_shard.compiled_programs.operation_names import merged_names
from penzai_shard.compiled_programs.slices import Slices, kind_of_transfer, received
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
# Their groups may count copies of the program instead of devices.
_BY_REPLICA = frozenset({"all-gather", "all-reduce", "reduce-scatter"})
# What comes out of these was computed, so it may be rounded too.
_SUMS = frozenset({"all-reduce", "reduce-scatter"})


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

    def axes(self, mesh_sizes: Mapping[str, int]) -> GroupAxes | None:
        """The mesh axes that it goes over; None if its groups are not made along mesh axes.

        Args:
            mesh_sizes: The mesh's axes and their sizes, as ``mesh.shape`` has them.
        """
        if self.kind == "collective-permute":
            return mesh_axes_of_pairs(self.groups, mesh_sizes)
        return mesh_axes_of(self.groups, mesh_sizes)


def read_collectives(
    module: Module, device_count: int, slice_of: Sequence[int] | None = None
) -> list[CollectiveOperation]:
    """The collectives of a program, in the order in which they run.

    Those in computations that never run are left out. What may communicate and is of none of these
    kinds, ``unknown_communication`` tells.

    Args:
        module: The program.
        device_count: How many devices it runs on.
        slice_of: Which TPU slice each device is of; None if those of one are next to each other.

    Raises:
        ProgramError: There are collectives that cannot be read; the message names all of them.
    """
    times = executions(module)
    reader = _Reader(module, Slices.of(module, device_count, slice_of))
    collectives = [
        one for one in module.in_running_order() if one.computation in times and _kind(one) in KINDS
    ]
    continued = continuations(module, collectives)
    found, unread = [], []
    for one in collectives:
        if one.name in continued:
            continue
        try:
            found.append(reader.read(one, times[one.computation]))
        except ValueError as error:
            unread.append(f"{one.name} ({one.opcode}): {error}.")
    raise_all(ProgramError, f"{module.name}: collectives that cannot be read:", unread)
    return found


def _kind(one: Instruction) -> str:
    return kind_of_transfer(one) or one.opcode.removesuffix("-start")


class _Reader:
    """Reads the collectives of one program."""

    def __init__(self, module: Module, slices: Slices) -> None:
        self.module = module
        self.slices = slices
        # Of what is in a fusion or runs in the background, names may be outside alone.
        self.outside = {
            name: one
            for one in module
            if one.opcode in ("fusion", "async-start")
            for name in module.called_by(one)
        }

    def read(self, one: Instruction, executed: Executions) -> CollectiveOperation:
        if DONE in asynchronous_uses(self.module, one):
            raise ValueError("it ends, and starts nowhere")
        kind = _kind(one)
        if one.opcode == "send":
            groups = self.slices.across(one)
            operands, results = self._operands(kind, one)[:1], received(self.module, one)
        else:
            groups = self.slices.everywhere(self._groups(kind, one))
            operands, results = self._operands(kind, one), self._results(kind, one)
        outside = self.outside.get(one.computation)
        if kind == "all-reduce" and outside is not None and outside.opcode == "fusion":
            shares = scattered_results(self.module, one, len(groups[0]))
            if shares is not None:
                kind, results = "reduce-scatter", shares
        _check_sizes(kind, operands, results, len(groups[0]) if groups else 1)
        op_name = one.op_name or (outside.op_name if outside is not None else "")
        return CollectiveOperation(
            kind=kind,
            name=outside.name if outside is not None and outside.opcode != "fusion" else one.name,
            groups=groups,
            operands=operands,
            results=results,
            times=executed.times,
            at_most=executed.at_most,
            op_names=merged_names(op_name) if op_name else (),
            instruction=one,
        )

    def _groups(self, kind: str, one: Instruction) -> Groups:
        """The groups of the devices of a slice."""
        count = self.slices.size
        if kind == "collective-permute":
            return read_pairs(_attribute(one, "source_target_pairs"), count)
        groups = read_groups(_attribute(one, "replica_groups"), count)
        by_device = one.attributes.get("use_global_device_ids") == "true"
        if "channel_id" in one.attributes and kind in _BY_REPLICA and not by_device:
            # Groups of copies of the program, of which there is one, on all devices.
            if groups not in (((0,),), (tuple(range(count)),)):
                raise ValueError("its groups are not of devices but of copies of the program")
            return (tuple(range(count)),)
        return groups

    def _operands(self, kind: str, one: Instruction) -> tuple[ArrayType, ...]:
        siblings = self.module.computations[one.computation].instructions
        names = one.operand_names
        if kind == "ragged-all-to-all":
            # Behind the first are the room for what comes out, and tables of where it goes.
            names = names[:1]
        return tuple(array for name in names for array in siblings[name].results)

    def _results(self, kind: str, one: Instruction) -> tuple[ArrayType, ...]:
        """What comes out of a collective; the start of one gives what went in, too."""
        type_: Type = one.read.type
        if one.opcode != kind and kind != "all-reduce":
            if isinstance(type_, ArrayType) or len(type_) < 2:
                raise ValueError("it starts, and does not say what comes out")
            type_ = type_[1]
        return arrays_of(type_)


def _attribute(one: Instruction, key: str) -> str:
    if key not in one.attributes:
        raise ValueError(f"it has no {key}")
    return one.attributes[key]


def _check_sizes(
    kind: str,
    operands: tuple[ArrayType, ...],
    results: tuple[ArrayType, ...],
    group_size: int,
) -> None:
    """Whether what goes in and what comes out fit to each other: else something was misread."""
    if kind == "ragged-all-to-all":
        return
    grows = {"all-gather": group_size}.get(kind, 1)
    shrinks = {"reduce-scatter": group_size}.get(kind, 1)
    into, out = (_elements_by_dtype(side) for side in (operands, results))
    same_dtypes = {dtype: n * grows for dtype, n in into.items()} == {
        dtype: n * shrinks for dtype, n in out.items()
    }
    if not same_dtypes and not (kind in _SUMS and _is_rounded(operands, results, shrinks)):
        texts = (", ".join(map(str, side)) for side in (operands, results))
        raise ValueError(
            f"what goes in does not fit to what comes out in groups of {group_size}: "
            + " -> ".join(texts)
        )


def _is_rounded(
    operands: tuple[ArrayType, ...], results: tuple[ArrayType, ...], shrinks: int
) -> bool:
    """Whether sums of float32 come out as bfloat16, array by array.

    The compiler for TPUs lets an all-reduce round what is rounded behind it anyway.
    """
    return len(operands) == len(results) and all(
        math.prod(one.shape) == math.prod(other.shape) * shrinks
        and (one.dtype, other.dtype) in ((other.dtype, one.dtype), ("f32", "bf16"))
        for one, other in zip(operands, results, strict=True)
    )


def _elements_by_dtype(arrays: tuple[ArrayType, ...]) -> dict[str, int]:
    total: dict[str, int] = {}
    for array in arrays:
        total[array.dtype] = total.get(array.dtype, 0) + math.prod(array.shape)
    return total
