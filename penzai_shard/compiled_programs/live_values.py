"""What a device holds at once while it runs a program: an estimate, value by value.

The compiler's own assignment of memory is not to be had for every kind of device. What a program
says is the order of its instructions, and so when each value is written and read for the last time.
"""

import collections
import dataclasses
import functools
import re
from collections.abc import Mapping, Sequence

from penzai_shard.compiled_programs.executions import RUN_INSIDE
from penzai_shard.compiled_programs.instruction_text import ArrayType, arrays_of
from penzai_shard.compiled_programs.modules import Instruction, Module

# Their results are other names for memory that something else has written.
_VIEWS = frozenset(
    {
        "add-dependency",
        "after-all",
        "all-reduce-done",
        "bitcast",
        "constant",
        "dynamic-update-slice",
        "optimization-barrier",
        "parameter",
        "partition-id",
        "replica-id",
        "while",
    }
)
# What these run has no memory of its own.
_WITHOUT_INNER = RUN_INSIDE | {"fusion"}
# They may write where an operand was that nobody reads later.
_IN_PLACE = frozenset({"add", "call", "convert", "copy", "fusion", "multiply", "select", "tanh"})
_LAYOUT = re.compile(r"[a-z]+\d*[a-z\d]*\[[\d,<=]*\](?:\{([^{}]*)\})?")
_TILE = re.compile(r"T\(([\d,]+)\)")
_MEMORY_SPACE = re.compile(r"S\((\d+)\)")


@dataclasses.dataclass(frozen=True)
class LiveValue:
    """An array that a device holds for a part of a program.

    Attributes:
        instruction: What writes it.
        array: Its dtype and shape.
        bytes: The memory that it takes.
        last_use: The instruction that reads it last, of the same computation.
    """

    instruction: Instruction
    array: ArrayType
    bytes: int
    last_use: Instruction


_Key = tuple[str, int]
# Who wrote what each array of a result is; of an array in a tuple, by its position.
_Owners = list[frozenset[_Key]]


def values_at_peak(module: Module) -> tuple[LiveValue, ...]:
    """What is there at the moment at which most is there, beside arguments and results.

    An estimate: compilers put values into the memory of others that are not read any more, and
    into that of results that are not written yet. Values in the memory of other computations, such
    as what a loop carries, count where they were made.

    Args:
        module: A compiled program, in the order in which it runs.
    """
    return _Peaks(module).of(module.entry)


class _Peaks:
    def __init__(self, module: Module) -> None:
        self._module = module
        self.of = functools.cache(self._of)

    def _of(self, name: str) -> tuple[LiveValue, ...]:
        instructions = list(self._module.computations[name])
        values, ends = lives_of(instructions)
        alive: dict[_Key, LiveValue] = {}
        held = most = 0
        peak: tuple[LiveValue, ...] = ()
        for position, one in enumerate(instructions):
            keys = [(one.name, i) for i in range(len(one.results))]
            made = {key: values[key] for key in keys if key in values}
            inner = self._inside(one)
            alive |= made
            held += sum(value.bytes for value in made.values())
            over = _overwritten(one, made, [alive[k] for k in ends[position] if k in alive])
            now = held + sum(value.bytes for value in inner) - (over.bytes if over else 0)
            if now > most:
                most = now
                peak = (*(value for value in alive.values() if value is not over), *inner)
            for key in ends[position]:
                if (value := alive.pop(key, None)) is not None:
                    held -= value.bytes
        return peak

    def _inside(self, one: Instruction) -> tuple[LiveValue, ...]:
        """What is there at the peak of what an instruction runs."""
        if one.opcode in _WITHOUT_INNER:
            return ()
        peaks = [self.of(name) for name in self._module.called_by(one)]
        return max(peaks, key=lambda values: sum(value.bytes for value in values), default=())


def lives_of(
    instructions: Sequence[Instruction],
) -> tuple[dict[_Key, LiveValue], dict[int, list[_Key]]]:
    """The values of a computation that are not its result, and which of them end where."""
    positions = {one.name: i for i, one in enumerate(instructions)}
    owners: dict[str, _Owners] = {}
    last: dict[_Key, int] = {}
    for position, one in enumerate(instructions):
        owners[one.name] = owners_of(one, [owners[name] for name in one.operand_names])
        for name in (one.name, *one.operand_names):
            for key in frozenset[_Key]().union(*owners[name]):
                last[key] = max(position, last.get(key, 0))
    root = next(one for one in instructions if one.is_root)
    results = frozenset[_Key]().union(*owners[root.name])
    values: dict[_Key, LiveValue] = {}
    ends: dict[int, list[_Key]] = collections.defaultdict(list)
    for key in last.keys() - results:
        one = instructions[positions[key[0]]]
        array, size = one.results[key[1]], _sizes(one)[key[1]]
        if size:
            values[key] = LiveValue(one, array, size, instructions[last[key]])
            ends[last[key]].append(key)
    return values, ends


def owners_of(one: Instruction, operands: Sequence[_Owners]) -> _Owners:
    """Who wrote what an instruction gives."""
    own: _Owners = [frozenset({(one.name, i)}) for i in range(len(one.results))]
    if one.opcode == "tuple":
        return [frozenset[_Key]().union(*operand) for operand in operands]
    if one.opcode == "get-tuple-element":
        return operands[0][int(one.attributes["index"]) :][:1]
    if one.opcode == "copy-start":
        return [own[0], *operands[0], frozenset()]
    if one.opcode == "copy-done":
        return operands[0][:1]
    if one.opcode in _VIEWS:
        return operands[0] if operands else [frozenset()] * len(own)
    if one.opcode.endswith("-start") and not isinstance(one.read.type, ArrayType):
        # What goes in, what comes out, and more.
        count = len(arrays_of(one.read.type[0]))
        given = frozenset[_Key]().union(*(o for operand in operands for o in operand))
        made = len(arrays_of(one.read.type[1]))
        return [given, *own[count : count + made]]
    if one.opcode.endswith(("-done", "-update")):
        return operands[0] if one.opcode.endswith("-update") else operands[0][1:]
    return own


def _overwritten(
    one: Instruction, made: Mapping[_Key, LiveValue], ending: Sequence[LiveValue]
) -> LiveValue | None:
    """The operand whose memory an instruction may take for its result."""
    if one.opcode not in _IN_PLACE or len(made) != 1:
        return None
    (result,) = made.values()
    alike = (value for value in ending if value.bytes == result.bytes and value is not result)
    return next(alike, None)


def _sizes(one: Instruction) -> list[int]:
    """The memory that each array of a result takes on the device."""
    return [
        _padded_bytes(array, layout)
        for array, layout in zip(one.results, _LAYOUT.findall(one.read.type_text), strict=True)
    ]


def _padded_bytes(array: ArrayType, layout: str) -> int:
    """The memory that an array takes in a layout; 0 if it is not in the device's main memory.

    Layouts of TPUs, as ``{1,0:T(8,128)S(1)}``, name the dimensions from the innermost on, the tile
    that the innermost ones are filled up to, and the memory.
    """
    space = _MEMORY_SPACE.search(layout)
    if space and int(space[1]):
        return 0
    if not (tile := _TILE.search(layout)):
        return array.bytes
    order = [int(number) for number in layout.partition(":")[0].split(",") if number]
    shape = [array.shape[dimension] for dimension in order]
    for position, size in enumerate(reversed([int(number) for number in tile[1].split(",")])):
        if position < len(shape):
            shape[position] = -(-shape[position] // size) * size
        else:
            shape.append(size)
    return dataclasses.replace(array, shape=tuple(shape)).bytes
