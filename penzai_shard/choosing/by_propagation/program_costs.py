"""What a program with its collectives written down costs one device."""

import collections
import dataclasses
import math
from collections.abc import Mapping, Sequence

from penzai_shard.choosing.by_propagation.memory_in_order import MemoryInOrder, Place
from penzai_shard.choosing.by_propagation.placed_steps import (
    BARRIER,
    BROADCAST,
    OF_FORM,
    PlacedStep,
    same_place,
)
from penzai_shard.choosing.step_costs import Sent, SentReason, StepCost
from penzai_shard.inspection.steps.lowered_steps import LoweredStep
from penzai_shard.inspection.traffic.collective_records import ring_bytes
from penzai_shard.library_apis.shardy_placed import (
    COLLECTIVES,
    PlacedOperation,
    PlacedProgram,
    PlacedValue,
)
from penzai_shard.library_apis.shardy_records import CONSTANTS, PRODUCTS
from penzai_shard.partition_specs import padded_length
from penzai_shard.path_folding import folding_key
from penzai_shard.rule_kinds import LogicalAxis

# A part of the result is made of parts of the operands, which are summed up alike.
_LINEAR = OF_FORM | {"stablehlo.add", "stablehlo.negate", "stablehlo.subtract"}
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

    Memory is that of the values that are there at once where most are; see ``MemoryInOrder``.

    Args:
        program: The program in a layout.
        step: The step as it was lowered.
        mesh_shape: The size of each mesh axis.
    """
    placed = PlacedStep(program, step, mesh_shape)
    return with_peak(_Costs(placed).cost(), MemoryInOrder(placed).peaks())


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
    one, two = (PlacedStep(program, step, mesh_shape) for program, step in programs)
    of_one, of_two = (MemoryInOrder(each).peaks() for each in (one, two))
    more = blocks - 1
    peaks = {}
    for place, after in of_two.items():
        before = of_one.get(place, after)
        peaks[place] = tuple(b + more * (a - b) for b, a in zip(before, after, strict=True))
    return with_peak(_Costs(one).cost().deeper(_Costs(two).cost(), blocks), peaks)


def with_peak(cost: StepCost, peaks: Mapping[Place, tuple[float, ...]]) -> StepCost:
    """A cost with the memory of gradients and activations where both together are most."""
    gradients, activations = max(peaks.values(), key=sum, default=(0.0, 0.0))
    memory = {"gradients": max(gradients, 0.0), "activations": max(activations, 0.0)}
    return dataclasses.replace(cost, memory={**cost.memory, **memory})


class _Costs:
    def __init__(self, step: PlacedStep) -> None:
        self._step = step
        self._program = step.program

    def cost(self) -> StepCost:
        flops = 0.0
        sent: dict[SentReason, float] = collections.defaultdict(float)
        gathered: set[object] = set()
        for each in self._program.operations:
            if each.kind in PRODUCTS:
                flops += self._flops(each) * each.times
            elif each.kind in COLLECTIVES and each.kind != "sdy.all_slice":
                origin = self._step.origin(each.operands[0])
                # The compiler takes out of a loop what is the same each time.
                times = 1 if origin in self._step.arguments else each.times
                again = (origin, each.mesh_axes, times)
                if each.kind == "sdy.all_gather" and again in gathered:
                    continue
                gathered.add(again)
                moved, where = self._moved(each), folding_key(self._step.label(each.name))
                if each.kind == "sdy.all_gather":
                    times += each.times * len(self._gathered_again(each))
                for mesh_axes, bytes_ in self._bytes_sent(each):
                    reason = (moved.what, where, moved.names, mesh_axes)
                    sent[reason] += bytes_ * times
        found = tuple(Sent(*reason, bytes=bytes_) for reason, bytes_ in sent.items() if bytes_)
        return StepCost(flops, found, self._memory())

    def _flops(self, product: PlacedOperation) -> float:
        result, second = (
            self._program.values[number] for number in (product.results[0], product.operands[1])
        )
        part = self._step.part
        used = {axis for axes in result.spec for axis in axes}
        summed = [
            self._step.part(
                second.shape[each], (axis for axis in second.spec[each] if axis not in used)
            )
            for each in product.contracted
        ]
        return 2.0 * math.prod(map(part, result.shape, result.spec)) * math.prod(summed)

    def _bytes_sent(self, each: PlacedOperation) -> list[tuple[tuple[str, ...], float]]:
        """What one device sends for a collective over which mesh axes, in a ring."""
        held = self._step.value_bytes(each.results[0])
        axes = tuple(axis for axis in self._step.mesh_shape if axis in each.mesh_axes)
        count = self._step.parts(axes)
        if self._is_made_from_nothing(each.operands[0]):
            return []
        if each.kind == "sdy.all_reduce":
            return self._of_reduction(each, axes, held)
        if each.kind == "sdy.reduce_scatter":
            held *= count
        if each.kind == "sdy.all_gather":
            # What is gathered is as long as its parts together, padding included.
            held = self._step.value_bytes(each.operands[0]) * count
        kind = each.kind.removeprefix("sdy.").replace("_", "-")
        return [(axes, ring_bytes(kind, held, count))]

    def _of_reduction(
        self, each: PlacedOperation, axes: tuple[str, ...], held: float
    ) -> list[tuple[tuple[str, ...], float]]:
        sliced = self._sliced(each.results[0])
        # What is sliced afterwards over other mesh axes is sliced before.
        held /= self._step.parts(axis for axis in sliced if axis not in axes)
        if self._moved(each).what == "gradient":
            # The step pads it before.
            held *= math.prod(stored / length for length, stored in {*sliced.values()})
            scattered = set(sliced)
        else:
            # The compiler sums up all of what it has to pad for that.
            scattered = {axis for axis, (length, stored) in sliced.items() if length == stored}
        sent = []
        for group in sorted(self._reduced_together(each, axes), key=lambda g: scattered >= set(g)):
            count = self._step.parts(group)
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
        maker = self._step.makers.get(each.operands[0])
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
        for user in self._step.users[value]:
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
            axis: (length, padded_length(length, self._step.parts(axes)))
            for length, axes in zip(value.shape, value.spec, strict=True)
            for axis in axes
        }

    def _is_made_from_nothing(self, value: int) -> bool:
        """Whether a value is made of constants, or of one number, so that nobody has to send it."""
        value = self._step.origin(value)
        maker = self._step.makers.get(value)
        if maker is not None and maker.kind == BROADCAST:
            (whole,) = maker.operands
            is_number = math.prod(self._program.values[whole].shape) == 1
            return is_number or self._is_made_from_nothing(whole)
        return maker is not None and maker.kind in CONSTANTS

    def _gathered_again(self, each: PlacedOperation) -> list[PlacedOperation]:
        """The barriers behind which something is gathered anew, for a pass that computes again.

        Shardy gathers in front of them, once for all; the compiler behind each.
        """
        return [user for user in self._step.users[each.results[0]] if user.kind == BARRIER]

    def _moved(self, each: PlacedOperation) -> _Moved:
        value = each.operands[0]
        while (maker := self._step.makers.get(value)) is not None and (
            maker.kind in OF_FORM or maker.kind in COLLECTIVES or maker.kind == BARRIER
        ):
            value = same_place(maker, value)
        if (argument := self._step.arguments.get(value)) is not None:
            what = {"parameters": "parameter", "optimizer state": "optimizer"}.get(argument.part)
            return _Moved(what or "activation", argument.names or ())
        shape = self._program.values[each.results[0]].shape
        alike = self._step.parameters.get(tuple(sorted(shape)))
        phase = self._step.phase(each.name)
        if phase == "optimizer":
            what = "parameter" if each.kind == "sdy.all_gather" else "gradient"
            return _Moved(what, alike.names or () if alike else ())
        if alike is not None and phase == "backward":
            return _Moved("gradient", alike.names or ())
        return _Moved("activation", ())

    def _memory(self) -> dict[str, float]:
        held = dict.fromkeys(("parameters", "optimizer", "gradients", "activations", "inputs"), 0.0)
        for value, array in self._step.arguments.items():
            held[_PARTS.get(array.part, "inputs")] += self._step.value_bytes(value)
        # The state's new arrays take the memory of the old ones.
        return held
