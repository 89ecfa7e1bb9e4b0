"""The line of one instruction in a program's text, taken apart: type, opcode, attributes."""

import dataclasses
import functools
import math
import re
from collections.abc import Iterator, Mapping

_BITS = {"pred": 8, "token": 0, "opaque": 0}
_ARRAY = re.compile(r"(pred|token|opaque|[a-z]+(\d+)[a-z\d]*)\[((?:(?:<=)?\d+(?:,(?:<=)?\d+)*)?)\]")
# What a type says beside dtype and shape: the layout, and a count of the parts of a tuple.
_BESIDE_SHAPES = re.compile(r"/\*.*?\*/|\{[^{}]*\}|\s")
_BRACKETS_AND_TEXTS = re.compile(r'"(?:[^"\\]|\\.)*"|[(\[{]|[)\]}]|, ')
_DEPTH = {"(": 1, "[": 1, "{": 1, ")": -1, "]": -1, "}": -1}
_HEAD = re.compile(r"\s*(?:ROOT )?%?([\w.\-]+) = ")
_OPCODE = re.compile(r"\s*([\w\-]+)\(")
_KEY = re.compile(r"([a-z_][\w\-]*)=")


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
            bits = int(_ARRAY.fullmatch(f"{self.dtype}[]")[2])  # type: ignore[index]
        return -(-math.prod(self.shape) * bits // 8)

    def __str__(self) -> str:
        return f"{self.dtype}[{','.join(map(str, self.shape))}]"


Type = ArrayType | tuple["Type", ...]


@dataclasses.dataclass(frozen=True)
class InstructionText:
    """What the line of an instruction says.

    Attributes:
        type_text: What comes out, as it is written.
        opcode: The opcode as it is written.
        operands: What stands between its brackets.
        attributes: What stands behind the operands, by key.
    """

    type_text: str
    opcode: str
    operands: str
    attributes: Mapping[str, str]

    @functools.cached_property
    def type(self) -> Type:
        """What comes out: an array, or a tuple of types.

        Raises:
            ValueError: It is not a type.
        """
        return read_type(self.type_text)

    @classmethod
    def of(cls, line: str) -> "InstructionText":
        """Reads a line.

        >>> text = InstructionText.of("%r = f32[4]{0} all-reduce(%p), channel_id=1, to_apply=%add")
        >>> text.opcode, dict(text.attributes)
        ('all-reduce', {'channel_id': '1', 'to_apply': '%add'})

        Raises:
            ValueError: It is not such a line.
        """
        head = _HEAD.match(line)
        if head is None:
            raise ValueError(f"not an instruction: {line[:200]!r}")
        end = _end_of_type(line, head.end())
        opcode = _OPCODE.match(line, end)
        if opcode is None:
            raise ValueError(f"not an instruction: {line[:200]!r}")
        behind = _closing(line, opcode.end() - 1)
        return cls(
            line[head.end() : end],
            opcode[1],
            line[opcode.end() : behind - 1],
            dict(_attributes(line[behind:])),
        )


def read_type(text: str) -> Type:
    """A type as programs write it.

    >>> read_type("(f32[4,2]{1,0:T(8,128)}, u32[])")
    (ArrayType(dtype='f32', shape=(4, 2)), ArrayType(dtype='u32', shape=()))

    Raises:
        ValueError: It is not a type.
    """
    bare = _BESIDE_SHAPES.sub("", text)
    read, end = _read_type(bare, 0)
    if end != len(bare):
        raise ValueError(f"not a type: {text!r}")
    return read


def arrays_of(read: Type) -> tuple[ArrayType, ...]:
    """The arrays of a type, in order."""
    if isinstance(read, ArrayType):
        return (read,)
    return tuple(array for part in read for array in arrays_of(part))


def _read_type(text: str, start: int) -> tuple[Type, int]:
    if array := _ARRAY.match(text, start):
        shape = tuple(int(size.removeprefix("<=")) for size in array[3].split(",") if size)
        return ArrayType(array[1], shape), array.end()
    if not text.startswith("(", start):
        raise ValueError(f"not a type: {text!r}")
    parts: list[Type] = []
    start += 1
    while not text.startswith(")", start):
        if parts:
            if not text.startswith(",", start):
                raise ValueError(f"not a type: {text!r}")
            start += 1
        part, start = _read_type(text, start)
        parts.append(part)
    return tuple(parts), start + 1


def _end_of_type(line: str, start: int) -> int:
    if line.startswith("(", start):
        return _closing(line, start)
    end = line.find(" ", start)
    return len(line) if end < 0 else end


def _closing(line: str, opening: int) -> int:
    """The position behind the bracket that closes the one at a position."""
    depth = 0
    for found in _BRACKETS_AND_TEXTS.finditer(line, opening):
        depth += _DEPTH.get(found[0], 0)
        if not depth:
            return found.end()
    raise ValueError(f"a bracket is not closed: {line[:200]!r}")


def _attributes(behind: str) -> Iterator[tuple[str, str]]:
    """Key and value of each attribute; groups by mesh axes are written with a comma inside."""
    pieces: list[str] = []
    for piece in _pieces(behind):
        if pieces and piece.startswith("device_ids="):
            pieces[-1] += f", {piece}"
        else:
            pieces.append(piece)
    for piece in pieces:
        if key := _KEY.match(piece):
            yield key[1], piece[key.end() :]


def _pieces(behind: str) -> Iterator[str]:
    depth = start = 0
    for found in _BRACKETS_AND_TEXTS.finditer(behind):
        depth += _DEPTH.get(found[0], 0)
        if found[0] == ", " and not depth:
            yield behind[start : found.start()]
            start = found.end()
    yield behind[start:].rstrip()
