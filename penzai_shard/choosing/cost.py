"""Says what a train step costs one device: what it computes, sends and holds.

Prices are read of the program that each device runs, as ``device_program`` finds it without
compiling. Where compilers do more than Shardy writes down, that is counted as done: what is
gathered twice alike is gathered once, what stays the same in a loop is moved once, a sum of which
devices take parts is scattered, and sums that are only added are added before they are reduced.
"""

import collections
import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

from penzai_shard.choosing.candidates import PARTS, Candidate
from penzai_shard.choosing.device_program import DeviceProgram, MarkedSteps, spec_of
from penzai_shard.choosing.shallow import cut_model
from penzai_shard.choosing.workload import Workload
from penzai_shard.errors import Problems, PropagationError
from penzai_shard.inspection.collectives import wire_bytes
from penzai_shard.propagation.flat import BARRIER, LOOP, Operation

_GATHER, _SLICE, _REDUCE = "sdy.all_gather", "sdy.all_slice", "sdy.all_reduce"
_PRODUCTS = ("stablehlo.dot_general", "stablehlo.convolution")
_CONSTANTS = ("sdy.constant", "stablehlo.constant", "stablehlo.iota")
_BROADCAST = "stablehlo.broadcast_in_dim"
# They write into what they take first.
_UPDATES = ("stablehlo.dynamic_update_slice", "stablehlo.scatter")
# They give what they take in another form.
_TRANSPOSE = "stablehlo.transpose"
FORM = frozenset({"flow", "stablehlo.convert", "stablehlo.reshape", _TRANSPOSE, "sdy.reshard"})
# A part of what they give is made of the same parts of what they take.
_ADD = "stablehlo.add"
_LINEAR = FORM | {_ADD, "stablehlo.negate", "stablehlo.subtract"}
# They give other elements than they take, so that both have to be in memory.
_WRITES = """
    cholesky convolution custom_call dot_general dynamic_update_slice fft gather reduce
    reduce_window scatter select_and_scatter sort triangular_solve while"""
_WRITING = frozenset(f"stablehlo.{name}" for name in _WRITES.split())


# The bytes that a device sends, by what they are, "parameter", "gradient", "optimizer" or
# "activation", and by the mesh axes that they go over, in the mesh's order. Of a step that is not
# compiled it is "", as what they are is not known.
Sent = Mapping[tuple[str, tuple[str, ...]], float]


@dataclasses.dataclass(frozen=True)
class StepCost:
    """What a train step costs one device.

    Attributes:
        flops: Floating point operations of products and convolutions; a multiplication and an
            addition are two.
        sent: The bytes that it sends, by what they are and the mesh axes.
        memory: The bytes that it holds where it holds most, by what they are for:
            ``"parameters"``, ``"optimizer"``, ``"gradients"``, ``"activations"``, ``"inputs"``.
    """

    flops: float
    sent: Sent
    memory: Mapping[str, float]

    @property
    def memory_bytes(self) -> int:
        """All that it holds."""
        return round(sum(self.memory.values()))

    @property
    def traffic(self) -> dict[tuple[str, ...], float]:
        """The bytes that are sent over each set of mesh axes."""
        found = collections.defaultdict[tuple[str, ...], float](float)
        for (_, mesh_axes), count in self.sent.items():
            found[mesh_axes] += count
        return dict(found)


def extrapolate(costs: Sequence[StepCost], blocks: int) -> StepCost:
    """The cost of a model of many equal blocks, line by line.

    Args:
        costs: The costs of the models of a ``Cut``.
        blocks: How many blocks there are.

    >>> costs = [StepCost(flops, {}, {"parameters": 2.0}) for flops in (5.0, 7.0)]
    >>> extrapolate(costs, 11)
    StepCost(flops=25.0, sent={}, memory={'parameters': 2.0})
    """

    def extend(first: Mapping[Any, float], second: Mapping[Any, float]) -> dict[Any, float]:
        more = {key: second.get(key, 0.0) - first.get(key, 0.0) for key in {**first, **second}}
        # Where two blocks hold less than one, by accident of an order, eighty do not hold nothing.
        return {key: first.get(key, 0.0) + (blocks - 1) * max(n, 0.0) for key, n in more.items()}

    one, two = costs[0], costs[-1]
    flops = extend({"": one.flops}, {"": two.flops})[""]
    return StepCost(flops, extend(one.sent, two.sent), extend(one.memory, two.memory))


# Prices


class Prices:
    """What the layouts of a train step cost, by propagation; nothing is compiled and nothing runs.

    Shardy, the part of XLA that lays arrays out, propagates the layout through the step and says
    what devices exchange. A deep model is priced from one and from two of its blocks. Products and
    what is sent are as compiled, within a few percent; memory is an estimate, on the low side.

    Args:
        workload: The step.

    Attributes:
        steps: The steps of the model, or of the model with one of its blocks and with two.
        blocks: How many blocks it has; 1 if it is not cut.
    """

    def __init__(self, workload: Workload) -> None:
        models, self.blocks = cut_model(workload)
        self.steps = [MarkedSteps(workload, model) for model in models]

    def price(self, candidate: Candidate) -> StepCost:
        """What the step costs in a layout.

        Raises:
            PlanError: A length does not divide.
            RuleTypeError, MeshError: The layout does not fit the model, as for ``Layout.build``.
            PropagationError: The step cannot be priced without compiling it.
        """
        costs = [price_program(steps.place(candidate)) for steps in self.steps]
        return extrapolate(costs, self.blocks)


def price_program(program: DeviceProgram) -> StepCost:
    """The cost of a program."""
    held = dict.fromkeys(("parameters", "optimizer", "inputs"), 0.0)
    for value, leaf in program.arguments.items():
        held[PARTS.get(leaf.path.partition("/")[0], "inputs")] += program.bytes(value)
    held["activations"] = _find_peak(program)
    problems = Problems("a loop that runs an unknown number of times cannot be priced:")
    flops, traffic = 0.0, _Traffic(program)
    for each in program.operations:
        if each.kind not in _PRODUCTS and (not each.mesh_axes or each.kind == _SLICE):
            continue
        if each.times is None:
            problems.add(each.name, "it runs in such a loop", "Write jax.lax.scan, or fori_loop.")
        elif each.kind in _PRODUCTS:
            flops += each.times * count_flops(program, each)
        else:
            traffic.add(each, each.times)
    problems.raise_if_any(PropagationError)
    return StepCost(flops, dict(traffic.sent), held)


def count_flops(program: DeviceProgram, product: Operation) -> float:
    """Two for each element of the result and each that is summed for it, on one device."""
    (result,), second, rule = product.results, product.operands[1], product.rule
    assert rule is not None
    made = {factor for factors in rule.results[0] for factor in factors}
    used = {axis for axes in spec_of(program.values[result]) for axis in axes}
    summed, spec = 1, spec_of(program.values[second])
    for length, axes, factors in zip(program.shapes[second], spec, rule.operands[1], strict=True):
        if made.isdisjoint(factors):
            # A mesh axis that splits the result does not split what is summed, too.
            summed *= length * program.parts(axis for axis in axes if axis in used)
    return 2.0 * math.prod(program.shapes[result]) * summed


# Traffic


class _Traffic:
    """What the collectives of a program send.

    Attributes:
        sent: See ``StepCost``.
    """

    def __init__(self, program: DeviceProgram) -> None:
        self.sent: dict[Any, float] = collections.defaultdict(float)
        self._program = program
        self._gathered: set[Any] = set()

    def add(self, each: Operation, times: int) -> None:
        """Adds a collective that runs some times."""
        program, origin = self._program, self._find_origin(each.operands[0])
        if self._is_constant(origin):
            return
        # Compilers take out of a loop what is the same in each turn, and merge equal gathers.
        count = 1.0 if origin in program.arguments else times
        if each.kind == _GATHER:
            if (key := (origin, each.mesh_axes, count)) in self._gathered:
                return
            self._gathered.add(key)
        for axes, size in self._find_bytes(each):
            if axes and size:
                self.sent["", axes] += size * count

    def _find_origin(self, value: int) -> int:
        """The value that a value is another form of."""
        while (maker := self._program.makers.get(value)) is not None and maker.kind in FORM:
            value = maker.operands[maker.results.index(value)]
        return value

    def _is_constant(self, value: int) -> bool:
        """Whether a value is made of constants or of one number, which nobody has to send."""
        maker = self._program.makers.get(self._find_origin(value))
        if maker is not None and maker.kind == _BROADCAST:
            source = maker.operands[0]
            return not self._program.values[source].shape or self._is_constant(source)
        return maker is not None and maker.kind in _CONSTANTS

    def _find_bytes(self, each: Operation) -> list[tuple[tuple[str, ...], float]]:
        """What one device sends, by mesh axes."""
        program, sizes = self._program, self._program.mesh_sizes
        whole = {axis.partition(":")[0] for axis in each.mesh_axes}
        axes = tuple(axis for axis in sizes if axis in whole)
        size, parts = float(program.bytes(each.results[0])), program.parts(each.mesh_axes)
        if each.kind != _REDUCE:
            payload = size * parts if each.kind == "sdy.reduce_scatter" else size
            kind = each.kind.removeprefix("sdy.").replace("_", "-")
            return [(axes, wire_bytes(kind, payload, parts))]
        # A sum of which every use takes a part is scattered, over other mesh axes cut before.
        cut = self._find_cuts(each.results[0])
        if not cut and self._is_added(each.results[0], each.mesh_axes):
            return []
        payload = size / program.parts(axis for axis in cut if axis not in axes)
        scattered = tuple(axis for axis in axes if axis in cut)
        rest = tuple(axis for axis in axes if axis not in cut)
        first = program.parts(scattered)
        found = [(scattered, wire_bytes("reduce-scatter", payload, first))]
        return [*found, (rest, wire_bytes("all-reduce", payload / first, program.parts(rest)))]

    def _is_added(self, value: int, axes: tuple[str, ...]) -> bool:
        """Whether a sum is only added to another one, which compilers do before they sum both."""
        while [user.kind for user in self._find_users(value)] == [_ADD]:
            (added,) = self._find_users(value)
            operands = [self._find_source(operand) for operand in added.operands]
            if not all(self._is_sum(operand, axes) for operand in operands):
                return False
            if value != operands[0]:
                return True
            (value,) = added.results
        return False

    def _is_sum(self, value: int, axes: tuple[str, ...]) -> bool:
        maker = self._program.makers.get(value)
        if maker is None or len(self._find_users(value)) > 1:
            return False
        if maker.kind == _ADD:
            operands = map(self._find_source, maker.operands)
            return all(self._is_sum(operand, axes) for operand in operands)
        return maker.kind == _REDUCE and maker.mesh_axes == axes

    def _find_users(self, value: int) -> Sequence[Operation]:
        """What takes a value, in whatever form."""
        users = self._program.users[value]
        while len(users) == 1 and users[0].kind in FORM and len(users[0].results) == 1:
            users = self._program.users[users[0].results[0]]
        return users

    def _find_source(self, value: int) -> int:
        """The value that a value is another form of, not transposed."""
        found, turns = value, 0
        while (maker := self._program.makers.get(value)) is not None and maker.kind in FORM:
            turns += maker.kind == _TRANSPOSE
            value = maker.operands[maker.results.index(value)]
            found = found if turns % 2 else value
        return found

    def _find_cuts(self, value: int) -> set[str]:
        """The mesh axes of which every use of a sum takes one device's part."""
        found: list[set[str]] = []
        for user in self._program.users[value]:
            taken: set[str] = set()
            if user.kind == _SLICE or user.kind in _LINEAR:
                taken = {*user.mesh_axes} | self._find_cuts(user.results[0])
            found.append(taken)
        return set.intersection(*found) if found else set()


# Memory


def _find_peak(program: DeviceProgram) -> float:
    """The most bytes at once besides what goes in and comes out.

    What is computed element by element is there only if something else has to read it.
    """
    operations, roots = _order_by_time(program), _find_roots(program)
    written = {
        roots[value]
        for each in operations
        if _is_writing(each)
        for value in (*each.results, *(() if each.kind == "stablehlo.reduce" else each.operands))
    }
    written -= {-1, *(roots[value] for value in (*program.arguments, *program.results))}
    # What is gathered alike in each turn of a loop is there for all of them.
    lasting: dict[Any, float] = {}
    for each in operations:
        if each.kind == _GATHER and (each.times or 1) > 1:
            (source,), (result,) = each.operands, each.results
            if roots[source] in program.arguments:
                lasting[roots[source], each.mesh_axes] = program.bytes(result)
                written.discard(result)

    last: dict[int, int] = {}
    for number, each in reversed([*enumerate(operations)]):
        until = number
        if not _is_writing(each):
            # Computed where its results are used.
            made = (roots[value] for value in each.results)
            until = max([number, *(last.get(root, 0) for root in made if root not in written)])
        for value in each.operands:
            last[roots[value]] = max(last.get(roots[value], 0), until)

    ends: dict[int, float] = collections.defaultdict(float)
    there = peak = 0.0
    for number, each in enumerate(operations):
        for value in each.results:
            if value in written and value in last:
                there += program.bytes(value)
                ends[last[value]] += program.bytes(value)
        peak = max(peak, there)
        there -= ends[number]
    return peak + sum(lasting.values())


def _is_writing(each: Operation) -> bool:
    return each.kind in _WRITING or bool(each.mesh_axes and each.kind != _SLICE)


def _order_by_time(program: DeviceProgram) -> list[Operation]:
    """Operations as JAX wrote them, and what is exchanged as soon as it is there.

    In XLA's order, what is to be computed again for the backward pass comes too early.
    """
    places: dict[int, int] = {}
    for each in program.operations:
        ready = max((places.get(value, -1) for value in each.operands), default=-1)
        places.update(dict.fromkeys(each.results, ready if each.mesh_axes else each.order))
    operations = [each for each in program.operations if each.results]
    return sorted(operations, key=lambda each: places[each.results[0]])


def _find_roots(program: DeviceProgram) -> list[int]:
    """For each value the one whose memory it has; -1 for what is made of constants."""
    roots = list(range(len(program.values)))
    for each in program.operations:
        for number, value in enumerate(each.results):
            if each.kind in (*_CONSTANTS, _BROADCAST):
                roots[value] = -1
            elif each.kind in _UPDATES:
                roots[value] = roots[each.operands[0]]
            elif each.kind in (*FORM, BARRIER, LOOP):
                operand = each.operands[number]
                # What a loop starts with and changes is written, also where it is a constant.
                if each.kind != LOOP or roots[operand] >= 0:
                    roots[value] = roots[operand]
    return roots
