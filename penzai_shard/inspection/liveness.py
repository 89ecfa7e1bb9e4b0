"""Finds what a device holds at the moment of most while it runs a program: an estimate.

A compiler does not say what it puts where. A program says in which order its instructions run, so
when each value is written and when it is read for the last time.
"""

import collections
import functools
import itertools
from collections.abc import Mapping
from typing import NamedTuple

from penzai_shard.inspection.attribution import split_merged_names
from penzai_shard.inspection.hlo import Instruction, Place, Program, places_of

# What these give is in memory that something else has written, or that is no temporary.
_VIEWS = """
    add-dependency after-all bitcast constant domain dynamic-update-slice get-tuple-element
    optimization-barrier parameter partition-id replica-id tuple while"""
_NOT_WRITTEN = frozenset(_VIEWS.split())
# Layouts of TPUs name another memory than the large one, as in {1,0:T(8,128)S(1)}.
_OTHER_MEMORY = "S(1)"


class Value(NamedTuple):
    """An array that a device holds for a part of a program.

    Attributes:
        op_name: The name that JAX gave to the operation that makes it, or to the nearest one that
            has a name.
        bytes: What it takes on one device.
    """

    op_name: str
    bytes: int


def read_peak(program: Program, temporary_bytes: int) -> list[Value]:
    """What is in memory at the moment of most, arguments and results excepted.

    Nothing is returned if that does not explain the compiler's figure.

    Compilers put values into the memory of others that nobody reads any more, and of results that
    are not yet written, so the sum may be off; by more than a factor of two it explains nothing.

    Args:
        program: A compiled program, in the order in which it runs.
        temporary_bytes: What the compiler says that temporaries take on one device.
    """
    held = _Peaks(program).find(program.entry)
    explained = sum(map(_bytes, held))
    if not temporary_bytes <= 2 * explained <= 4 * temporary_bytes:
        return []
    return [Value(_name(program, place.instruction), _bytes(place)) for place in held]


def _name(program: Program, one: Instruction) -> str:
    """The name of an operation, else the nearest before it, else behind it."""
    places = itertools.chain(
        program.walk([Place(one)], program.sources), program.walk([Place(one)], program.uses)
    )
    near = (one.op_name for one, _ in places if one.opcode != "parameter" and "/" in one.op_name)
    return split_merged_names(next(near, one.op_name))[0]


def _bytes(place: Place) -> int:
    """What an array takes in the large memory of a device."""
    array = place.instruction.results[place.number]
    return 0 if _OTHER_MEMORY in array.layout else array.bytes


class _Peaks:
    """The values at the moment of most of each computation, but for its parameters and result."""

    def __init__(self, program: Program) -> None:
        self._program = program
        self.find = functools.cache(self._find)

    def _find(self, name: str) -> tuple[Place, ...]:
        # The last instruction that reads each value. What the result consists of is no temporary.
        owners: dict[Place, Place | None] = {}
        last: dict[Place | None, Instruction] = {}
        for one in self._program.computations[name].values():
            owners |= {place: self._owner(place, owners) for place in places_of(one)}
            # An array that is taken out of a tuple keeps none of the others, of which there may be
            # thousands.
            read = self._program.operands(one) if one.opcode != "get-tuple-element" else []
            for place in (place for each in (one, *read) for place in places_of(each)):
                last[owners[place]] = one
        for place in places_of(self._program.root(name)):
            last.pop(owners[place], None)
        ending = collections.defaultdict(list)
        for written, one in last.items():
            if written is not None:
                ending[one].append(written)

        alive: dict[Place, int] = {}
        held = most = 0
        peak: tuple[Place, ...] = ()
        for one in self._program.computations[name].values():
            made = {place: _bytes(place) for place in places_of(one) if place in last}
            alive |= made
            held += sum(made.values())
            inside = self._inside(one)
            if (total := held + sum(map(_bytes, inside))) > most:
                most, peak = total, (*alive, *inside)
            for written in ending[one]:
                held -= alive.pop(written, 0)
        return peak

    def _inside(self, one: Instruction) -> tuple[Place, ...]:
        """What is there at the moment of most of what an instruction runs."""
        if one.opcode not in ("call", "conditional", "while"):
            return ()
        peaks = map(self.find, one.called)
        return max(peaks, key=lambda places: sum(map(_bytes, places)), default=())

    def _owner(self, place: Place, known: Mapping[Place, Place | None]) -> Place | None:
        """The value in whose memory an array is; None of a parameter."""
        one, number = place
        # A start gives back what goes in; a copy does so behind what comes out.
        is_given_back = number < self._program.given_back(one)
        if one.opcode == "copy-start":
            is_given_back = number > 0
        if one.opcode in _NOT_WRITTEN or one.opcode.endswith("-done") or is_given_back:
            sources = self._program.sources(place)
            return next((known[source] for source in sources if source in known), None)
        return place
