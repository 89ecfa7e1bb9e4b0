"""The collectives of a compiled program: what runs, among which devices, how often."""

import dataclasses

from penzai_shard.compiled_programs.modules import ArrayType, Instruction, Module

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
        op_names: Where it comes from, one name for each operation that the compiler merged into it.
        instruction: The instruction.
    """

    kind: str
    name: str
    groups: tuple[tuple[int, ...], ...]
    operands: tuple[ArrayType, ...]
    results: tuple[ArrayType, ...]
    times: int | None
    op_names: tuple[str, ...]
    instruction: Instruction

    @property
    def payload_bytes(self) -> int:
        """The larger of what goes in and what comes out, on one device, in bytes."""
        return max(sum(array.bytes for array in side) for side in (self.operands, self.results))


def read_collectives(module: Module, device_count: int) -> list[CollectiveOperation]:
    """The collectives of a program, in the order of its computations.

    Args:
        module: The program.
        device_count: How many devices it runs on.
    """
    raise NotImplementedError  # BUILT BY: programs
