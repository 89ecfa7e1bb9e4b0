"""A compiled program as computations and instructions, read from what the compiler gives.

No device is touched. An instruction's opcode, operands and users come from the compiler's own
objects, and what they do not say is read from the text of that one instruction. Which computation
runs first, and which instruction gives a computation's result, no object says: these two are read
from the short form of the program's text.
"""

import dataclasses
import functools
import re
from collections.abc import Iterator, Mapping

from penzai_shard.compiled_programs.instruction_text import ArrayType, InstructionText, arrays_of
from penzai_shard.errors import ProgramError
from penzai_shard.library_apis.compiler_api import (
    HloInstruction,
    HloModule,
    instructions_in_order,
    module_from_text,
    opcode_of,
    short_text,
    wrapped_by,
)

# What names a computation that an instruction runs.
_CALLS = (
    "to_apply",
    "calls",
    "condition",
    "body",
    "true_computation",
    "false_computation",
    "branch_computations",
    "called_computations",
)
_NAMES_A_COMPUTATION = re.compile(rf"\b(?:{'|'.join(_CALLS)})=")
_NAMES = re.compile(r"%?([\w.\-]+)")
_OP_NAME = re.compile(r'op_name="((?:[^"\\]|\\.)*)"')
_TRIP_COUNT = re.compile(r'"known_trip_count":\{"n":"(\d+)"\}')
_ENTRY = re.compile(r"^ENTRY %?([\w.\-]+) ", re.MULTILINE)
_PARTITIONS = re.compile(r"\AHloModule .*\bnum_partitions=(\d+)")
_ROOT = re.compile(r"^ +ROOT %?([\w.\-]+) = ", re.MULTILINE)


@dataclasses.dataclass(frozen=True, eq=False)
class Instruction:
    """One instruction of a program.

    Attributes:
        name: Its name, unique in the program.
        opcode: What it does, such as ``"all-gather"``.
        computation: The name of the computation that it is in.
        is_root: Whether its result is that of its computation.
        handle: The compiler's object.
    """

    name: str
    opcode: str
    computation: str
    is_root: bool
    handle: HloInstruction = dataclasses.field(repr=False)

    @functools.cached_property
    def text(self) -> str:
        """Its line in the program's text."""
        return str(self.handle.to_string())

    @functools.cached_property
    def read(self) -> InstructionText:
        """What its line says, taken apart.

        Raises:
            ProgramError: It cannot be read.
        """
        try:
            return InstructionText.of(self.text)
        except ValueError as error:
            raise ProgramError(f"{self.name} ({self.opcode}): {error}.") from error

    @functools.cached_property
    def results(self) -> tuple[ArrayType, ...]:
        """What it gives; several arrays if that is a tuple."""
        return arrays_of(self.read.type)

    @functools.cached_property
    def operand_names(self) -> tuple[str, ...]:
        """The names of its operands, instructions of the same computation."""
        return tuple(operand.name for operand in self.handle.operands())

    @functools.cached_property
    def positions(self) -> Mapping[str, tuple[int, ...]]:
        """As which operands each of the instructions that it uses comes in."""
        found: dict[str, tuple[int, ...]] = {}
        for position, name in enumerate(self.operand_names):
            found[name] = (*found.get(name, ()), position)
        return found

    @functools.cached_property
    def user_names(self) -> tuple[str, ...]:
        """The names of the instructions that use its result, all of the same computation."""
        return tuple(user.name for user in self.handle.users())

    @property
    def attributes(self) -> Mapping[str, str]:
        """What its text says behind the operands, by key."""
        return self.read.attributes

    @functools.cached_property
    def op_name(self) -> str:
        """Where it comes from: the scopes and the primitive that JAX wrote; empty if unknown."""
        found = _OP_NAME.search(self.attributes.get("metadata", ""))
        return re.sub(r"\\(.)", r"\1", found[1]) if found else ""

    @functools.cached_property
    def called(self) -> tuple[str, ...]:
        """The computations that it runs, as its text names them."""
        # Most run none, and need not be taken apart.
        if not _NAMES_A_COMPUTATION.search(self.text):
            return ()
        return tuple(
            name for key in _CALLS for name in _NAMES.findall(self.attributes.get(key, ""))
        )

    @functools.cached_property
    def trip_count(self) -> int | None:
        """Of a loop, how often its body runs, if the program says so."""
        found = _TRIP_COUNT.search(self.attributes.get("backend_config", ""))
        return int(found[1]) if found else None


@dataclasses.dataclass(frozen=True)
class Computation:
    """A function of a program: instructions by name, in the order in which they run.

    In any order in which operands come first, where the program does not say it.
    """

    name: str
    instructions: Mapping[str, Instruction]

    def __iter__(self) -> Iterator[Instruction]:
        return iter(self.instructions.values())

    @functools.cached_property
    def root(self) -> Instruction:
        """The instruction that gives its result."""
        return next(one for one in self if one.is_root)

    @functools.cached_property
    def parameters(self) -> tuple[Instruction, ...]:
        """Its parameters by position."""
        found = [one for one in self if one.opcode == "parameter"]
        return tuple(sorted(found, key=lambda one: int(one.read.operands)))


@dataclasses.dataclass(frozen=True)
class Module:
    """A compiled program.

    Attributes:
        name: Its name, such as ``"jit_step"``.
        computations: By name.
        entry: The name of the one that runs first.
        handle: The compiler's object.
        partitions: How many devices it is for, of one slice if there are several; None if it does
            not say.
    """

    name: str
    computations: Mapping[str, Computation]
    entry: str
    handle: HloModule = dataclasses.field(repr=False)
    partitions: int | None = None

    @classmethod
    def of(cls, module: HloModule) -> "Module":
        """Reads the compiler's module."""
        text = short_text(module)
        (entry,) = _ENTRY.findall(text)
        roots = set(_ROOT.findall(text))
        found = {one.name: instructions_in_order(module, one) for one in module.computations()}
        # What an asynchronous instruction wraps may be written in its line alone.
        roots |= {
            wrapped_by(one).name
            for instructions in found.values()
            for one in instructions
            if opcode_of(one) == "async-start"
        }
        computations = {
            name: Computation(
                name,
                {
                    one.name: Instruction(one.name, opcode_of(one), name, one.name in roots, one)
                    for one in instructions
                },
            )
            for name, instructions in found.items()
        }
        partitions = _PARTITIONS.search(text)
        count = int(partitions[1]) if partitions else None
        return cls(module.name, computations, entry, module, count)

    @classmethod
    def from_text(cls, text: str) -> "Module":
        """Reads a program's text, such as ``compiled.as_text()``."""
        return cls.of(module_from_text(text))

    def __iter__(self) -> Iterator[Instruction]:
        for computation in self.computations.values():
            yield from computation

    def in_running_order(self) -> Iterator[Instruction]:
        """All instructions that may run, each behind what it runs and what comes before it.

        The same in every process; the compiler orders computations otherwise in each.
        """
        seen: set[str] = set()

        def visit(name: str) -> Iterator[Instruction]:
            seen.add(name)
            for one in self.computations[name]:
                for called in self.called_by(one):
                    if called not in seen:
                        yield from visit(called)
                yield one

        return visit(self.entry)

    def called_by(self, instruction: Instruction) -> tuple[str, ...]:
        """The computations that an instruction runs.

        An asynchronous instruction may be written without the computation that it wraps.
        """
        if not instruction.opcode.startswith("async-"):
            return instruction.called
        return (self._computation_of[wrapped_by(instruction.handle).name],)

    def called_as(self, instruction: Instruction, role: str) -> Computation:
        """The computation that a loop runs as its ``"body"`` or its ``"condition"``."""
        return self.computations[instruction.attributes[role].lstrip("%")]

    @functools.cached_property
    def _computation_of(self) -> Mapping[str, str]:
        return {one.name: one.computation for one in self}
