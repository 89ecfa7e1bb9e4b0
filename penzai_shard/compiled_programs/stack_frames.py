"""Which functions of which files an operation of a program was written by.

A program has tables of file names, function names, places in files and stack frames; an
instruction names its innermost frame, and a frame the one that called it.
"""

import dataclasses
import re
from collections.abc import Iterator, Mapping
from typing import NamedTuple

from penzai_shard.compiled_programs.modules import Instruction, Module
from penzai_shard.library_apis.compiler_api import text_with_frames

_TABLE = re.compile(
    r"^(FileNames|FunctionNames|FileLocations|StackFrames)\n((?:\d+ .*\n)+)", re.MULTILINE
)
_ROW = re.compile(r"^(\d+) (.*)$", re.MULTILINE)
_FIELD = re.compile(r"(\w+)=(\d+)")
_FRAME_OF = re.compile(r"\bstack_frame_id=(\d+)")


class Frame(NamedTuple):
    """A function, and the file that it is in."""

    file: str
    function: str


@dataclasses.dataclass(frozen=True)
class StackFrames:
    """The stack frames of a program.

    Attributes:
        frames: By number.
        callers: The number of the frame that called each.
    """

    frames: Mapping[int, Frame]
    callers: Mapping[int, int]

    @classmethod
    def of(cls, module: Module) -> "StackFrames":
        """Reads the tables of a program; empty if it has none."""
        tables = {
            name: _rows(rows) for name, rows in _TABLE.findall(text_with_frames(module.handle))
        }
        files, functions = tables.get("FileNames", {}), tables.get("FunctionNames", {})
        places = {n: _fields(row) for n, row in tables.get("FileLocations", {}).items()}
        read = {n: _fields(row) for n, row in tables.get("StackFrames", {}).items()}
        # The first frame has no caller. Where it is written as its own, all are written as one
        # more than they are.
        more = read.get(1, {}).get("parent_frame_id", 0)
        frames = {}
        for number, frame in read.items():
            place = places[frame["file_location_id"]]
            frames[number] = Frame(
                files[place["file_name_id"]].strip('"'),
                functions[place["function_name_id"]].strip('"'),
            )
        callers = {n: frame.get("parent_frame_id", 0) - more for n, frame in read.items()}
        return cls(frames, {n: caller for n, caller in callers.items() if 0 < caller < n})

    def of_instruction(self, one: Instruction) -> Iterator[Frame]:
        """The functions that an operation was written in, the innermost first."""
        found = _FRAME_OF.search(one.attributes.get("metadata", ""))
        number = int(found[1]) if found else 0
        while number in self.frames:
            yield self.frames[number]
            number = self.callers.get(number, 0)


def _rows(text: str) -> dict[int, str]:
    return {int(number): row for number, row in _ROW.findall(text)}


def _fields(row: str) -> dict[str, int]:
    return {name: int(number) for name, number in _FIELD.findall(row)}
