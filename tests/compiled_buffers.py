"""Reads out of a compiled program's text what one device holds while it runs.

The text of a compiled program is in the order in which it runs, and its shapes are those of one
device. A value that an instruction outside of a fusion gives has memory of its own.
"""

import contextlib
import dataclasses
import math
import re
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import jax
import pytest

from penzai_shard.library_apis.jax_api import Tracer

_COMPUTATION = re.compile(r"^(?:ENTRY )?%?([\w.\-]+) \(.*\) -> .*\{$")
_INSTRUCTION = re.compile(r"^\s+(?:ROOT )?%?([\w.\-]+) = (.*)$")
_ARRAY = re.compile(r"\b([a-z]+\d*\w*)\[([\d,]*)\]")
_FUSED = re.compile(r"\bfusion\(.*\bcalls=%?([\w.\-]+)")
_OPCODE = re.compile(r"\}? ([a-z][\w\-]*)\(")
_OPERAND = re.compile(r"%([\w.\-]+)")
# They give a name to memory that something else has written.
_NO_MEMORY = frozenset(
    {"bitcast", "get-tuple-element", "tuple", "parameter", "while", "call", "conditional"}
)


@dataclasses.dataclass(frozen=True)
class Buffer:
    """A value that a device holds.

    Attributes:
        name: Its name in the program.
        opcode: The operation that writes it.
        dtype: Its dtype, as XLA writes it.
        shape: Its shape on one device.
        first: When it is written, counted in instructions of its computation.
        last: When it is read for the last time.
        computation: Where it is: the entry, or the body of a loop.
    """

    name: str
    opcode: str
    dtype: str
    shape: tuple[int, ...]
    first: int
    last: int
    computation: str

    @property
    def size(self) -> int:
        """How many elements it has."""
        return math.prod(self.shape)


def read_buffers(program: Any) -> list[Buffer]:
    """The values that get memory in a compiled program, in the order in which they are written.

    Args:
        program: A ``jax.stages.Compiled``, or the text of one.
    """
    text = program if isinstance(program, str) else program.as_text()
    fused = set(_FUSED.findall(text))
    found: list[Buffer] = []
    lines: list[tuple[str, str]] = []
    computation = ""
    for line in text.splitlines():
        opening = _COMPUTATION.match(line)
        if opening:
            computation, lines = opening[1], []
        elif line.startswith("}"):
            if computation not in fused:
                found += _buffers(computation, lines)
        elif (instruction := _INSTRUCTION.match(line)) is not None:
            lines.append((instruction[1], instruction[2]))
    return found


def _buffers(computation: str, lines: Sequence[tuple[str, str]]) -> Iterable[Buffer]:
    order = {name: index for index, (name, _) in enumerate(lines)}
    # A view keeps what it is a view of alive.
    last = dict.fromkeys(order, 0)
    for name, rest in reversed(lines):
        opcode = _opcode(rest)
        at = max(last[name], order[name]) if opcode in _NO_MEMORY else order[name]
        arguments = rest.partition("(")[2].partition("), ")[0]
        for operand in _OPERAND.findall(arguments):
            if operand in order:
                last[operand] = max(last[operand], at)
    for name, rest in lines:
        opcode = _opcode(rest)
        if opcode in _NO_MEMORY:
            continue
        for dtype, sizes in _ARRAY.findall(rest.partition(f" {opcode}(")[0]):
            shape = tuple(int(size) for size in sizes.split(",") if size)
            ends = max(last[name], order[name])
            yield Buffer(name, opcode, dtype, shape, order[name], ends, computation)


def _opcode(rest: str) -> str:
    found = _OPCODE.search(rest) or re.search(r"([a-z][\w\-]*)\(", rest)
    return "" if found is None else found[1]


def whole_copies(program: Any, shapes: Iterable[Sequence[int]]) -> list[Buffer]:
    """The values as large as one of the given arrays, in any order of its dimensions.

    Args:
        program: As for ``read_buffers``.
        shapes: Global shapes of arrays of which no device is to hold the whole.
    """
    sizes = {math.prod(shape) for shape in shapes}
    return [buffer for buffer in read_buffers(program) if buffer.size in sizes]


def most_at_once(buffers: Sequence[Buffer]) -> int:
    """How many elements of the given values are there at the same time, at most."""
    return max(
        (
            sum(
                other.size
                for other in buffers
                if other.computation == buffer.computation
                and other.first <= buffer.first <= other.last
            )
            for buffer in buffers
        ),
        default=0,
    )


@contextlib.contextmanager
def compiled_programs() -> Iterator[list[str]]:
    """Collects the texts of the programs that are compiled in a block of code.

    Those that ``jax.jit`` compiled earlier and still has are not compiled again, nor are those of
    functions that were jitted outside of the block.
    """
    texts: list[str] = []
    collecting = True
    compile_lowered, jit = jax.stages.Lowered.compile, jax.jit

    def recorded(lowered: Any, *arguments: Any, **options: Any) -> Any:
        compiled = compile_lowered(lowered, *arguments, **options)
        texts.append(compiled.as_text())
        return compiled

    class Recorded:
        """A jitted function whose calls are lowered and compiled in sight."""

        def __init__(self, function: Any, **options: Any) -> None:
            self.jitted = jit(function, **options)

        def __call__(self, *arguments: Any, **keywords: Any) -> Any:
            leaves = jax.tree.leaves((arguments, keywords))
            if collecting and not any(isinstance(leaf, Tracer) for leaf in leaves):
                self.jitted.lower(*arguments, **keywords).compile()
            return self.jitted(*arguments, **keywords)

        def __getattr__(self, name: str) -> Any:
            return getattr(self.jitted, name)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(jax.stages.Lowered, "compile", recorded)
        patch.setattr(jax, "jit", Recorded)
        yield texts
    collecting = False  # Functions that were jitted in the block are called as ever.


def text_of_running(name: str) -> str:
    """The text of the one program of a name, such as ``jit_step``, that JAX has ready to run."""
    modules = [
        module
        for program in jax.devices()[0].client.live_executables()
        for module in program.hlo_modules()
        if module.name == name
    ]
    return str(modules[0].to_string())
