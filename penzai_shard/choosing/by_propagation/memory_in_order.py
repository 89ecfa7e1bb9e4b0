"""What a program with its collectives written down holds at once, in the order that it runs in."""

import collections
import functools
from collections.abc import Iterator, Sequence
from typing import TypeAlias

from penzai_shard.choosing.by_propagation.placed_steps import (
    BARRIER,
    BROADCAST,
    OF_FORM,
    PlacedStep,
    same_place,
)
from penzai_shard.library_apis.shardy_placed import COLLECTIVES, LOOP, PlacedOperation
from penzai_shard.library_apis.shardy_records import CONSTANTS, MAKING
from penzai_shard.path_folding import NUMBER, folding_key

Place: TypeAlias = tuple[str, str, str]
"""Where memory is used: a phase, a layer, and which of several equal ones."""

# All or a part of one array, and an array with a part written anew.
_SLICES = frozenset({"stablehlo.slice", "stablehlo.dynamic_slice"})
_UPDATE = "stablehlo.dynamic_update_slice"
_CONCATENATE = "stablehlo.concatenate"
_SCATTER = "stablehlo.scatter"
# These are made where they are used: constants from nothing, a broadcast in what uses it.
_MADE_ANYWHERE = CONSTANTS | {BROADCAST}
# The memory of what is made of constants.
_NOWHERE = -1
# What they make is written down, and what they take, but for the first of these.
_REDUCTION = "stablehlo.reduce"
_WRITING = (MAKING | COLLECTIVES | {BARRIER, LOOP, _UPDATE}) - {"sdy.all_slice"}
_READING = _WRITING - {_REDUCTION}
# They hold nothing by themselves, and say which part of others is needed.
_SOON = CONSTANTS | {"sdy.all_slice"}


class MemoryInOrder:
    """The values that a step holds at once, beside what it is called with.

    Operations run in the order in which JAX wrote them, but that the update of a parameter comes
    as soon as its gradient is there, or is added to those of other microbatches, as compilers do it
    to hold fewer gradients; and that parameters which are used in all turns of a loop, one for
    each microbatch, are gathered in front of it and kept. What is computed
    element by element is not written down where all that takes it is computed so too: it becomes
    one loop with that, and what it comes of is there until then.

    Args:
        step: The step.
    """

    def __init__(self, step: PlacedStep) -> None:
        self._step = step
        self._program = step.program
        # What is gathered for all turns of a loop, with the last operation of these.
        self._kept: dict[int, PlacedOperation] = {}
        self._operations = list(self._in_order())
        # What is added to looked up rows is read in turns: it is written down, if a broadcast too.
        scatters = (each for each in self._operations if each.kind == _SCATTER)
        self._added = {step.origin(each.operands[-1]) for each in scatters}
        self._roots = functools.cache(self._root)

    def peaks(self) -> dict[Place, tuple[float, ...]]:
        """The most bytes of gradients and of other values at once, at each place.

        A place is a phase and a layer, of equal blocks the first and the last one.
        """
        found: dict[tuple[str, str], tuple[float, float]] = {}
        for each, there in self._held_at():
            place = self._step.phase(each.name), self._step.label(each.name)
            found[place] = max(found.get(place, (0.0, 0.0)), there, key=sum)
        alike: dict[tuple[str, str], list[str]] = collections.defaultdict(list)
        for phase, label in found:
            alike[phase, folding_key(label)].append(label)
        peaks: dict[Place, tuple[float, ...]] = {}
        for (phase, folded), labels in alike.items():
            labels.sort(key=lambda label: list(map(int, NUMBER.findall(label))))
            for which, label in (("first", labels[0]), ("last", labels[-1])):
                peaks[phase, folded, which] = found[phase, label]
        return peaks

    def _in_order(self) -> Iterator[PlacedOperation]:
        """The operations in the order that they run in."""
        made: dict[int, int] = {}
        ready: list[tuple[int, int, PlacedOperation]] = []
        updates, start, gathered = False, 0, list[int]()
        for number, each in enumerate(self._program.operations):
            updates = updates or self._step.phase(each.name) == "optimizer"
            if each.times == 1:
                start, gathered = number, []
            when = number
            if updates or each.kind in _SOON or self._sum_of(each) is not None:
                when = max((made.get(value, -1) for value in each.operands), default=-1)
            elif each.times > 1 and self._step.is_same_in_loops(each):
                when = start
                gathered += each.results
            self._kept.update(dict.fromkeys(gathered, each))
            made.update(dict.fromkeys(each.results, when))
            ready.append((when, number, each))
        yield from (each for _, _, each in sorted(ready, key=lambda one: one[:2]))

    def _held_at(self) -> Iterator[tuple[PlacedOperation, tuple[float, float]]]:
        """The bytes of gradients and of other values that are there at each operation."""
        written = self._written()
        last = self._last_uses(written)
        ends: dict[int, list[tuple[float, bool]]] = collections.defaultdict(list)
        there = [0.0, 0.0]
        for number, each in enumerate(self._operations):
            for value in each.results:
                if value not in written or value not in last:
                    continue
                bytes_, is_gradient = self._step.value_bytes(value), self._is_gradient(each, value)
                there[not is_gradient] += bytes_
                ends[last[value]].append((bytes_, is_gradient))
            yield each, (there[0], there[1])
            for bytes_, is_gradient in ends.pop(number, ()):
                there[not is_gradient] -= bytes_

    def _written(self) -> set[int]:
        """The values that have memory of their own: not those outside, nor what is fused."""
        roots, program = self._roots, self._program
        outside = {roots(value) for value in (*program.arguments, *program.results)}
        found: set[int] = set()
        for each in self._operations:
            if each.kind in _WRITING:
                found.update(value for value in each.results if roots(value) == value)
            if each.kind in _READING:
                found.update(map(roots, each.operands))
        return found - outside - {_NOWHERE}

    def _last_uses(self, written: set[int]) -> dict[int, int]:
        """When what has memory is used last, by the numbers of operations."""
        last: dict[int, int] = {}
        ends: dict[int, list[int]] = collections.defaultdict(list)
        for value, each in self._kept.items():
            ends[id(each)].append(value)
        for number, each in reversed(list(enumerate(self._operations))):
            for value in ends[id(each)]:
                last[value] = max(last.get(value, 0), number)
            if self._is_in_place(each):
                continue
            until = number
            for value in map(self._roots, each.results):
                if each.kind not in _WRITING and value not in written:
                    # It runs where what it makes is used.
                    until = max(until, last.get(value, number))
            for value in each.operands:
                if not self._is_gathered_behind(each, value):
                    root = self._roots(value)
                    last[root] = max(last.get(root, 0), until)
        return last

    def _is_gathered_behind(self, barrier: PlacedOperation, operand: int) -> bool:
        maker = self._step.makers.get(operand)
        return barrier.kind == BARRIER and maker is not None and maker.kind == "sdy.all_gather"

    def _root(self, value: int) -> int:
        """The value whose memory a value has: that which it is a form of, or none."""
        makers = self._step.makers
        maker = makers.get(value)
        while maker is not None and (operand := self._in_place_of(maker, value)) is not None:
            if self._is_gathered_behind(maker, operand):
                return value
            value, maker = operand, makers.get(operand)
        is_made = maker is not None and maker.kind in _MADE_ANYWHERE and value not in self._added
        return _NOWHERE if is_made else value

    def _in_place_of(self, maker: PlacedOperation, value: int) -> int | None:
        """The operand whose memory a result has; None if it has memory of its own.

        What a stack of layers keeps for the backward pass is written down as stacks and slices of
        these; the compiler takes what a slice is of, if that is all of something stacked.
        """
        if maker.kind in OF_FORM or maker.kind == BARRIER:
            return same_place(maker, value)
        if maker.kind == LOOP:
            # What it starts with is written down, if it is not there yet.
            taken = same_place(maker, value)
            return None if self._root(taken) == _NOWHERE else taken
        if maker.results[0] == value and (total := self._sum_of(maker)) is not None:
            return total
        if maker.kind == _UPDATE and self._has_one_shape(value, maker.operands[1]):
            return maker.operands[1]
        if maker.kind == _CONCATENATE:
            # With nothing but empty arrays.
            return next((one for one in maker.operands if self._has_one_shape(one, value)), None)
        if maker.kind not in _SLICES:
            return None
        if self._has_one_shape(value, maker.operands[0]):
            return maker.operands[0]
        stack = self._step.makers.get(self._root(maker.operands[0]))
        if stack is None or stack.kind != _CONCATENATE:
            return None
        return self._part_at(stack, maker.starts, value)

    def _sum_of(self, each: PlacedOperation) -> int | None:
        """What a loop carries on, if an operation adds to it and nothing else takes it."""
        makers, users = self._step.makers, self._step.users
        if each.kind != "stablehlo.add":
            return None
        carried = (
            value
            for value in each.operands
            if value in makers and makers[value].kind == LOOP and len(users[value]) == 1
        )
        return next(carried, None)

    def _part_at(self, stack: PlacedOperation, starts: Sequence[int], value: int) -> int | None:
        """Which of the parts of a stack a slice of it is; None if it is not one of them."""
        whole = self._program.values[stack.results[0]].shape
        start = [0] * len(whole)
        for part in stack.operands:
            shape = self._program.values[part].shape
            if list(starts) == start and self._has_one_shape(part, value):
                return part
            along = next((i for i, n in enumerate(shape) if n != whole[i]), 0)
            start[along] += shape[along]
        return None

    def _has_one_shape(self, one: int, other: int) -> bool:
        return self._program.values[one].shape == self._program.values[other].shape

    def _is_in_place(self, each: PlacedOperation) -> bool:
        """Whether it only says which part of memory is meant."""
        return (
            each.kind in {*_SLICES, _CONCATENATE}
            and self._in_place_of(each, each.results[0]) is not None
        )

    def _is_gradient(self, each: PlacedOperation, value: int) -> bool:
        shape = tuple(sorted(self._program.values[value].shape))
        return self._step.phase(each.name) == "backward" and shape in self._step.parameters
