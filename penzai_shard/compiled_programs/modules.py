"""A compiled program as computations and instructions, read from what the compiler gives.

No device is touched, and nothing is searched for in the text of a whole program: an instruction's
opcode, operands and users come from the compiler's own objects, and what they do not say is read
from the text of that one instruction.
"""

import dataclasses
import functools
import math
import re
from collections.abc import Iterator, Mapping

from penzai_shard.library_apis.compiler_api import (
    HloInstruction,
    HloModule,
    module_from_text,
    opcode_of,
)

_ARRAY = re.compile(r"\b(pred|token|opaque|[a-z]+\d+\w*)\[([\d,<=]*)\]")
_BITS = {"pred": 8, "token": 0, "opaque": 0}
_CALLED = re.compile(
    r"\b(?:to_apply|calls|condition|body|true_computation|false_computation"
    r"|branch_computations|called_computations)=(%?[\w.\-]+|\{[^}]*\})"
)
_OP_NAME = re.compile(r'op_name="((?:[^"\\]|\\.)*)"')
_TRIP_COUNT = re.compile(r'"known_trip_count":\{"n":"(\d+)"\}')


@dataclasses.dataclass(frozen=True)
class ArrayType:
    """Dtype and shape of an array on one device, as programs write them.

    >>> ArrayType("bf16", (4, 8)).bytes
    64
    """

    dtype: str
    shape: tuple[int, ...]

    @property
    def bytes(self) -> int:
        """Its size in bytes; elements of less than a byte are packed."""
        bits = _BITS.get(self.dtype)
        if bits is None:
            bits = int(re.search(r"\d+", self.dtype)[0])  # type: ignore[index]
        return -(-math.prod(self.shape) * bits // 8)

    def __str__(self) -> str:
        return f"{self.dtype}[{','.join(map(str, self.shape))}]"


@dataclasses.dataclass(frozen=True, eq=False)
class Instruction:
    """One instruction of a program.

    Attributes:
        name: Its name, unique in the program.
        opcode: What it does, such as ``"all-gather"``.
        computation: The name of the computation that it is in.
        handle: The compiler's object.
    """

    name: str
    opcode: str
    computation: str
    handle: HloInstruction = dataclasses.field(repr=False)

    @functools.cached_property
    def text(self) -> str:
        """Its line in the program's text."""
        return str(self.handle.to_string())

    @functools.cached_property
    def results(self) -> tuple[ArrayType, ...]:
        """What it gives; several arrays if that is a tuple."""
        declared = self.text.partition(" = ")[2].partition(f" {self.opcode}(")[0]
        return tuple(
            ArrayType(dtype, tuple(int(n.lstrip("<=")) for n in shape.split(",") if n))
            for dtype, shape in _ARRAY.findall(declared)
        )

    @functools.cached_property
    def operand_names(self) -> tuple[str, ...]:
        """The names of its operands, instructions of the same computation."""
        return tuple(operand.name for operand in self.handle.operands())

    @functools.cached_property
    def attributes(self) -> str:
        """What its text says behind the operands."""
        return self.text.partition(f" {self.opcode}(")[2]

    @functools.cached_property
    def op_name(self) -> str:
        """Where it comes from: the scopes and the primitive that JAX wrote; empty if unknown."""
        found = _OP_NAME.search(self.attributes)
        return re.sub(r"\\(.)", r"\1", found[1]) if found else ""

    @functools.cached_property
    def called(self) -> tuple[str, ...]:
        """The computations that it runs."""
        return tuple(
            name.lstrip("%")
            for group in _CALLED.findall(self.attributes)
            for name in re.findall(r"%?[\w.\-]+", group)
        )

    @functools.cached_property
    def trip_count(self) -> int | None:
        """Of a loop, how often its body runs, if the program says so."""
        found = _TRIP_COUNT.search(self.attributes)
        return int(found[1]) if found else None

    @property
    def is_root(self) -> bool:
        """Whether its result is that of its computation."""
        return self.text.startswith("ROOT ")


@dataclasses.dataclass(frozen=True)
class Computation:
    """A function of a program: instructions by name, in the order of its text."""

    name: str
    instructions: Mapping[str, Instruction]

    def __iter__(self) -> Iterator[Instruction]:
        return iter(self.instructions.values())


@dataclasses.dataclass(frozen=True)
class Module:
    """A compiled program.

    Attributes:
        name: Its name, such as ``"jit_step"``.
        computations: By name.
        entry: The name of the one that runs first.
    """

    name: str
    computations: Mapping[str, Computation]
    entry: str

    @classmethod
    def of(cls, module: HloModule) -> "Module":
        """Reads the compiler's module."""
        computations = {
            computation.name: Computation(
                computation.name,
                {
                    one.name: Instruction(one.name, opcode_of(one), computation.name, one)
                    for one in computation.instructions()
                },
            )
            for computation in module.computations()
        }
        called = {name for each in computations.values() for one in each for name in one.called}
        (entry,) = computations.keys() - called
        return cls(module.name, computations, entry)

    @classmethod
    def from_text(cls, text: str) -> "Module":
        """Reads a program's text, such as ``compiled.as_text()``."""
        return cls.of(module_from_text(text))

    def __iter__(self) -> Iterator[Instruction]:
        for computation in self.computations.values():
            yield from computation
