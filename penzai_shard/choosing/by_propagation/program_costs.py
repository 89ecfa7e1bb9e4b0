"""What a program with its collectives written down costs one device."""

import collections
import dataclasses
import functools
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TypeAlias

from penzai_shard.choosing.step_costs import Sent, SentReason, StepCost
from penzai_shard.inspection.steps.lowered_steps import LoweredStep
from penzai_shard.inspection.steps.step_arrays import StepArray
from penzai_shard.inspection.traffic.collective_records import ring_bytes
from penzai_shard.library_apis.shardy_collectives import (
    COLLECTIVES,
    PlacedOperation,
    PlacedProgram,
    PlacedValue,
)
from penzai_shard.library_apis.shardy_records import CONSTANTS, PRODUCTS
from penzai_shard.partition_specs import padded_length
from penzai_shard.path_folding import NUMBER, folding_key
from penzai_shard.rule_kinds import LogicalAxis
from penzai_shard.training.gradient_step import OPTIMIZER_SCOPE

Place: TypeAlias = tuple[str, str, str]
"""Where memory is used: a phase, a layer, and which of several equal ones."""

# What comes out is what went in, in another form or type.
_OF_FORM = frozenset(
    {"stablehlo.convert", "stablehlo.reshape", "stablehlo.transpose", "sdy.reshard"}
)
# Hands its operands on, so that what is behind it is not taken for what is in front of it.
_BARRIER = "stablehlo.optimization_barrier"
# All or a part of one array, and an array with a part written anew.
_SLICES = frozenset({"stablehlo.slice", "stablehlo.dynamic_slice"})
_UPDATE = "stablehlo.dynamic_update_slice"
_CONCATENATE = "stablehlo.concatenate"
# A part of the result is made of parts of the operands, which are summed up alike.
_LINEAR = _OF_FORM | {"stablehlo.add", "stablehlo.negate", "stablehlo.subtract"}
# These are made where they are used: constants from nothing, a broadcast in what uses it.
_BROADCAST = "stablehlo.broadcast_in_dim"
_MADE_ANYWHERE = CONSTANTS | {_BROADCAST}
# The memory of what is made of constants.
_NOWHERE = -1
_PART = re.compile(r"\((\d+)\)(\d+)")
_PARTS = {
    "parameters": "parameters",
    "optimizer state": "optimizer",
    "inputs": "inputs",
}


@dataclasses.dataclass(frozen=True)
class _Moved:
    """What a collective moves.

    Attributes:
        what: As ``Sent`` says.
        names: Its logical axes, as far as they are known.
    """

    what: str
    names: tuple[LogicalAxis | None, ...]


def cost_of(program: PlacedProgram, step: LoweredStep, mesh_shape: Mapping[str, int]) -> StepCost:
    """What a step costs one device, by its program.

    Matrix products count by the mesh axes that split them. A reduction of which every use takes
    one device's part sends as much as one that scatters. What is gathered twice alike counts once.

    Memory is that of the values that are there at once where most are, in the order in which JAX
    wrote the operations. Nothing is fused but what is made of constants and what changes form.

    Args:
        program: The program in a layout.
        step: The step as it was lowered.
        mesh_shape: The size of each mesh axis.
    """
    costs = _Costs(program, step, mesh_shape)
    return with_peak(costs.cost(), costs.peaks())


def cost_of_deep(
    programs: Sequence[tuple[PlacedProgram, LoweredStep]],
    mesh_shape: Mapping[str, int],
    blocks: int,
) -> StepCost:
    """What a step of a deep model costs one device, by its programs with one and with two blocks.

    Where most memory is used may be another place in a deep model. So the most at each place is
    carried on to all blocks, for the first and for the last block apart, and then compared.

    Args:
        programs: The program with one block and that with two, each with its step.
        mesh_shape: The size of each mesh axis.
        blocks: How many blocks the model has.
    """
    one, two = (_Costs(program, step, mesh_shape) for program, step in programs)
    of_one, of_two = one.peaks(), two.peaks()
    more = blocks - 1
    peaks = {}
    for place, after in of_two.items():
        before = of_one.get(place, after)
        peaks[place] = tuple(b + more * (a - b) for b, a in zip(before, after, strict=True))
    return with_peak(one.cost().deeper(two.cost(), blocks), peaks)


def with_peak(cost: StepCost, peaks: Mapping[Place, tuple[float, ...]]) -> StepCost:
    """A cost with the memory of gradients and activations where both together are most."""
    gradients, activations = max(peaks.values(), key=sum, default=(0.0, 0.0))
    memory = {"gradients": max(gradients, 0.0), "activations": max(activations, 0.0)}
    return dataclasses.replace(cost, memory={**cost.memory, **memory})


class _Costs:
    def __init__(
        self, program: PlacedProgram, step: LoweredStep, mesh_shape: Mapping[str, int]
    ) -> None:
        self._program = program
        self._step = step
        self._mesh = mesh_shape
        self._makers = {value: each for each in program.operations for value in each.results}
        self._users: dict[int, list[PlacedOperation]] = collections.defaultdict(list)
        for each in program.operations:
            for value in each.operands:
                self._users[value].append(each)
        self._arguments: dict[int, StepArray] = {
            value: step.arguments[name]
            for value, name in zip(program.arguments, program.argument_names, strict=True)
            if name in step.arguments
        }
        self._parameters = {
            tuple(sorted(array.shape)): array
            for array in self._arguments.values()
            if array.part == "parameters"
        }
        self._bytes = functools.cache(self._local_bytes)
        # What one operation of JAX becomes, all has its name.
        self._label = functools.cache(self._label_of)

    def cost(self) -> StepCost:
        flops = 0.0
        sent: dict[SentReason, float] = collections.defaultdict(float)
        gathered: set[object] = set()
        for each in self._program.operations:
            if each.kind in PRODUCTS:
                flops += self._flops(each) * each.times
            elif each.kind in COLLECTIVES and each.kind != "sdy.all_slice":
                origin = self._origin(each.operands[0])
                # The compiler takes out of a loop what is the same each time.
                times = 1 if origin in self._arguments else each.times
                again = (origin, each.mesh_axes, times)
                if each.kind == "sdy.all_gather" and again in gathered:
                    continue
                gathered.add(again)
                moved, where = self._moved(each), folding_key(self._label(each.name))
                if each.kind == "sdy.all_gather":
                    times += each.times * len(self._gathered_again(each))
                for mesh_axes, bytes_ in self._bytes_sent(each):
                    reason = (moved.what, where, moved.names, mesh_axes)
                    sent[reason] += bytes_ * times
        found = tuple(Sent(*reason, bytes=bytes_) for reason, bytes_ in sent.items() if bytes_)
        return StepCost(flops, found, self._memory())

    def _parts(self, mesh_axes: Iterable[str]) -> int:
        """In how many parts mesh axes, or parts of them, split something."""
        count = 1
        for axis in mesh_axes:
            part = _PART.search(axis)
            count *= int(part[2]) if part else self._mesh[axis]
        return count

    def _part(self, length: int, mesh_axes: Iterable[str]) -> int:
        """The length of the largest part of a dimension that mesh axes split."""
        return -(-length // self._parts(mesh_axes))

    def _local_bytes(self, value: PlacedValue) -> float:
        lengths = map(self._part, value.shape, value.spec)
        return math.prod(lengths) * value.itemsize

    def _value_bytes(self, number: int) -> float:
        return self._bytes(self._program.values[number])

    def _flops(self, product: PlacedOperation) -> float:
        result, second = (
            self._program.values[number] for number in (product.results[0], product.operands[1])
        )
        used = {axis for axes in result.spec for axis in axes}
        summed = [
            self._part(second.shape[each], (axis for axis in second.spec[each] if axis not in used))
            for each in product.contracted
        ]
        return 2.0 * math.prod(map(self._part, result.shape, result.spec)) * math.prod(summed)

    def _bytes_sent(self, each: PlacedOperation) -> list[tuple[tuple[str, ...], float]]:
        """What one device sends for a collective over which mesh axes, in a ring."""
        held = self._value_bytes(each.results[0])
        axes = tuple(axis for axis in self._mesh if axis in each.mesh_axes)
        count = self._parts(axes)
        if self._is_made_from_nothing(each.operands[0]):
            return []
        if each.kind == "sdy.all_reduce":
            return self._of_reduction(each, axes, held)
        if each.kind == "sdy.reduce_scatter":
            held *= count
        if each.kind == "sdy.all_gather":
            # What is gathered is as long as its parts together, padding included.
            held = self._value_bytes(each.operands[0]) * count
        kind = each.kind.removeprefix("sdy.").replace("_", "-")
        return [(axes, ring_bytes(kind, held, count))]

    def _of_reduction(
        self, each: PlacedOperation, axes: tuple[str, ...], held: float
    ) -> list[tuple[tuple[str, ...], float]]:
        sliced = self._sliced(each.results[0])
        # What is sliced afterwards over other mesh axes is sliced before.
        held /= self._parts(axis for axis in sliced if axis not in axes)
        if self._moved(each).what == "gradient":
            # The step pads it before.
            held *= math.prod(stored / length for length, stored in {*sliced.values()})
            scattered = set(sliced)
        else:
            # The compiler sums up all of what it has to pad for that.
            scattered = {axis for axis, (length, stored) in sliced.items() if length == stored}
        sent = []
        for group in sorted(self._reduced_together(each, axes), key=lambda g: scattered >= set(g)):
            count = self._parts(group)
            if scattered >= set(group):
                sent.append((group, ring_bytes("reduce-scatter", held, count)))
                held /= count
            else:
                sent.append((group, ring_bytes("all-reduce", held, count)))
        return sent

    def _reduced_together(
        self, each: PlacedOperation, axes: tuple[str, ...]
    ) -> list[tuple[str, ...]]:
        """The mesh axes of a reduction, those that split one dimension together.

        The compiler reduces over one dimension after the other.
        """
        maker = self._makers.get(each.operands[0])
        for operand in maker.operands if maker is not None else ():
            spec = self._program.values[operand].spec
            groups = [tuple(axis for axis in axes if axis in split) for split in spec]
            if sorted(axis for group in groups for axis in group) == sorted(axes):
                return [group for group in groups if group]
        return [axes]

    def _sliced(self, value: int) -> dict[str, tuple[int, int]]:
        """The mesh axes over which every use takes one device's part.

        Returns:
            For each the length that it splits, and that of all its parts together.
        """
        found: dict[str, tuple[int, int]] | None = None
        for user in self._users[value]:
            if user.kind != "sdy.all_slice" and user.kind not in _LINEAR:
                return {}
            taken = self._sliced(user.results[0])
            if user.kind == "sdy.all_slice":
                lengths = self._lengths(self._program.values[user.results[0]])
                taken = {axis: lengths[axis] for axis in user.mesh_axes} | taken
            common = taken.keys() if found is None else found.keys() & taken.keys()
            found = {axis: max(taken[axis], (found or taken)[axis]) for axis in common}
        return found or {}

    def _lengths(self, value: PlacedValue) -> dict[str, tuple[int, int]]:
        """The length that each mesh axis splits, and that of all its parts together."""
        return {
            axis: (length, padded_length(length, self._parts(axes)))
            for length, axes in zip(value.shape, value.spec, strict=True)
            for axis in axes
        }

    def _origin(self, value: int) -> int:
        """What a value is another form of."""
        while (maker := self._makers.get(value)) is not None and maker.kind in _OF_FORM:
            value = maker.operands[0]
        return value

    def _is_made_from_nothing(self, value: int) -> bool:
        """Whether a value is made of constants, or of one number, so that nobody has to send it."""
        value = self._origin(value)
        maker = self._makers.get(value)
        if maker is not None and maker.kind == _BROADCAST:
            (whole,) = maker.operands
            is_number = math.prod(self._program.values[whole].shape) == 1
            return is_number or self._is_made_from_nothing(whole)
        return maker is not None and maker.kind in CONSTANTS

    def _gathered_again(self, each: PlacedOperation) -> list[PlacedOperation]:
        """The barriers behind which something is gathered anew, for a pass that computes again.

        Shardy gathers in front of them, once for all; the compiler behind each.
        """
        return [user for user in self._users[each.results[0]] if user.kind == _BARRIER]

    def _is_gathered_behind(self, barrier: PlacedOperation, operand: int) -> bool:
        maker = self._makers.get(operand)
        return barrier.kind == _BARRIER and maker is not None and maker.kind == "sdy.all_gather"

    def _moved(self, each: PlacedOperation) -> _Moved:
        value = each.operands[0]
        while (maker := self._makers.get(value)) is not None and (
            maker.kind in _OF_FORM or maker.kind in COLLECTIVES or maker.kind == _BARRIER
        ):
            value = _same_place(maker, value)
        if (argument := self._arguments.get(value)) is not None:
            what = {"parameters": "parameter", "optimizer state": "optimizer"}.get(argument.part)
            return _Moved(what or "activation", argument.names or ())
        shape = self._program.values[each.results[0]].shape
        alike = self._parameters.get(tuple(sorted(shape)))
        phase = self._phase(each.name)
        if phase == "optimizer":
            what = "parameter" if each.kind == "sdy.all_gather" else "gradient"
            return _Moved(what, alike.names or () if alike else ())
        if alike is not None and phase == "backward":
            return _Moved("gradient", alike.names or ())
        return _Moved("activation", ())

    def _label_of(self, name: str) -> str:
        """The layer or the part of the step that an operation is of."""
        scopes = self._step.scopes
        paths = scopes.paths_in(name)
        if paths:
            return scopes.label(paths[-1])
        return next((scope for scope in scopes.of_step if scope in name.split("/")), "")

    def _memory(self) -> dict[str, float]:
        held = dict.fromkeys(("parameters", "optimizer", "gradients", "activations", "inputs"), 0.0)
        for value, array in self._arguments.items():
            held[_PARTS.get(array.part, "inputs")] += self._value_bytes(value)
        # The state's new arrays take the memory of the old ones.
        return held

    def peaks(self) -> dict[Place, tuple[float, ...]]:
        """The most bytes of gradients and of other values at once, at each place.

        A place is a phase and a layer, of equal blocks the first and the last one.
        """
        found: dict[tuple[str, str], tuple[float, float]] = {}
        for each, there in self._held_at():
            place = self._phase(each.name), self._label(each.name)
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

    def _held_at(self) -> Iterator[tuple[PlacedOperation, tuple[float, float]]]:
        """The bytes of gradients and of other values that are there at each operation."""
        roots = functools.cache(self._root)
        last: dict[int, int] = {}
        for number, each in enumerate(self._program.operations):
            if self._is_in_place(each):
                continue
            for value in each.operands:
                if not self._is_gathered_behind(each, value):
                    last[roots(value)] = number
        last.pop(_NOWHERE, None)
        outside = {roots(value) for value in (*self._program.arguments, *self._program.results)}
        ends: dict[int, list[tuple[float, bool]]] = collections.defaultdict(list)
        there = [0.0, 0.0]
        for number, each in enumerate(self._program.operations):
            for value in each.results:
                if roots(value) != value or value in outside or value not in last:
                    continue
                bytes_, is_gradient = self._value_bytes(value), self._is_gradient(each, value)
                there[not is_gradient] += bytes_
                ends[last[value]].append((bytes_, is_gradient))
            yield each, (there[0], there[1])
            for bytes_, is_gradient in ends.pop(number, ()):
                there[not is_gradient] -= bytes_

    def _phase(self, name: str) -> str:
        if OPTIMIZER_SCOPE in name.split("/"):
            return "optimizer"
        return "backward" if "transpose(" in name else "forward"

    def _root(self, value: int) -> int:
        """The value whose memory a value has: that which it is a form of, or none."""
        maker = self._makers.get(value)
        while maker is not None and (operand := self._in_place_of(maker, value)) is not None:
            if self._is_gathered_behind(maker, operand):
                return value
            value, maker = operand, self._makers.get(operand)
        return _NOWHERE if maker is not None and maker.kind in _MADE_ANYWHERE else value

    def _in_place_of(self, maker: PlacedOperation, value: int) -> int | None:
        """The operand whose memory a result has; None if it has memory of its own.

        What a stack of layers keeps for the backward pass is written down as stacks and slices of
        these; the compiler takes what a slice is of, if that is all of something stacked.
        """
        if maker.kind in _OF_FORM or maker.kind == _BARRIER:
            return _same_place(maker, value)
        if maker.kind == _UPDATE and self._has_one_shape(value, maker.operands[1]):
            return maker.operands[1]
        if maker.kind == _CONCATENATE:
            # With nothing but empty arrays.
            return next((one for one in maker.operands if self._has_one_shape(one, value)), None)
        if maker.kind not in _SLICES:
            return None
        if self._has_one_shape(value, maker.operands[0]):
            return maker.operands[0]
        stack = self._makers.get(self._root(maker.operands[0]))
        if stack is None or stack.kind != _CONCATENATE:
            return None
        return self._part_at(stack, maker.starts, value)

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
        return self._phase(each.name) == "backward" and shape in self._parameters


def _same_place(maker: PlacedOperation, value: int) -> int:
    """The operand that a result is another form of."""
    return maker.operands[maker.results.index(value)]
