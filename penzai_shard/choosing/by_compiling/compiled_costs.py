"""What a compiled step costs, read from its program."""

import collections
import dataclasses
import math
from collections.abc import Callable, Mapping

import jax.numpy as jnp

from penzai_shard.choosing.step_costs import Sent, SentReason, StepCost
from penzai_shard.compiled_programs.lean_orders import in_lean_order
from penzai_shard.compiled_programs.live_values import values_at_peak
from penzai_shard.compiled_programs.matrix_products import product_flops
from penzai_shard.inspection.memory.memory_report import MemoryReport
from penzai_shard.inspection.steps.programs import StepProgram
from penzai_shard.inspection.steps.step_arrays import StepArray
from penzai_shard.inspection.traffic.attribution import GRADIENT_OF, NEW_VALUE_OF
from penzai_shard.inspection.traffic.collective_records import Collective, CollectivePart
from penzai_shard.inspection.traffic.collective_report import CollectiveReport
from penzai_shard.path_folding import folding_key

_ACTIVATION = "activation "
# Bytes are whole numbers, and shares of them are not.
_ROUNDING = 1e-9


def cost_of(program: StepProgram) -> StepCost:
    """What a compiled step costs one device.

    Bytes are those of the program, with two corrections of what compilers for CPUs write: a
    reduce-scatter as an all-reduce, and sums of gradients in float32, whatever the parameters are
    in. What is in memory beside parameters, optimizer state and inputs counts as activations,
    gradients and what is gathered included: a program does not say which is which.

    Args:
        program: The step.
    """
    sent: dict[SentReason, float] = collections.defaultdict(float)
    is_cpu = program.device_kind == "cpu"
    has_layers = bool(program.step.scopes.paths)
    paths = {array.path: array for array in program.step.arguments.values()}
    for one in CollectiveReport.of(program).collectives:
        payload = sum(part.payload_bytes for part in one.parts)
        for part in one.parts:
            what, path = _what(one, part)
            array = paths.get(path)
            if what == "gradient" and not _is_of(array, part, has_layers):
                # What goes on from layer to layer, down to a table of embeddings.
                what, array = "activation", None
            names = () if array is None or array.names is None else tuple(array.names)
            share = part.payload_bytes / payload if payload else 1 / len(one.parts)
            if is_cpu and what == "gradient" and array is not None and one.dtype == "f32":
                share *= min(jnp.dtype(array.dtype).itemsize / 4, 1)
            # Of a program without layers, labels say no more than the names of the array.
            labels = part.labels if has_layers else ()
            where = " + ".join(dict.fromkeys(map(folding_key, labels)))
            reason = what, where, names, one.mesh_axes or ()
            times = 1 if one.times is None else one.times
            sent[reason] += share * one.wire_bytes_as_meant * times
    lines = tuple(Sent(*reason, bytes=bytes_) for reason, bytes_ in sent.items() if bytes_)
    return StepCost(
        float(product_flops(program.module)), lines, memory_of(MemoryReport.of(program))
    )


def in_leaner_order(cost: StepCost, program: StepProgram) -> StepCost:
    """The cost of a step whose instructions run in an order that holds little at once.

    Compilers for accelerators look for such an order and those for CPUs do not; see
    ``in_lean_order``. What there is at once is then summed up value by value.

    Args:
        cost: What ``cost_of`` gives, which is returned for all but CPUs.
        program: The step.
    """
    if program.device_kind != "cpu":
        return cost
    lean = sum(value.bytes for value in values_at_peak(in_lean_order(program.module)))
    activations = cost.memory["activations"] - program.memory.temporaries + lean
    memory = {**cost.memory, "activations": max(activations, 0.0)}
    return dataclasses.replace(cost, memory=memory)


def memory_of(report: MemoryReport) -> Mapping[str, float]:
    """What a step needs of a device's memory, by what it is for."""
    held = {
        "parameters": report.parameters + report.constants + report.state_variables,
        "optimizer": report.optimizer_state,
        "inputs": report.inputs,
    }
    held["activations"] = max(report.total - sum(held.values()), 0)
    return {name: float(bytes_) for name, bytes_ in held.items()}


def _what(one: Collective, part: CollectivePart) -> tuple[str, str]:
    """What a collective moves, and the path of the array that it is of; empty if of none."""
    moves = part.moves
    if moves.startswith(NEW_VALUE_OF):
        return "optimizer", moves.removeprefix(NEW_VALUE_OF)
    is_gradient = moves.startswith(GRADIENT_OF)
    moves = moves.removeprefix(GRADIENT_OF)
    if (part.phase or one.phase) == "optimizer":
        return "optimizer", moves
    if not moves or moves.startswith(_ACTIVATION):
        return "activation", ""
    return "gradient" if is_gradient else "parameter", moves


def _is_of(array: StepArray | None, part: CollectivePart, has_layers: bool) -> bool:
    """Whether a gradient that ends in an array alone is that of the array."""
    if array is None:
        return False
    if has_layers:
        name = array.path.partition("/")[2]
        return not part.labels or any(map(name.startswith, part.labels))
    # It has the length of the array or of a split of it, and the dtype of the array or float32.
    return any(
        math.prod(array.shape) * itemsize % max(part.payload_bytes, 1) == 0
        for itemsize in (jnp.dtype(array.dtype).itemsize, 4)
    )


def extrapolated(one: StepCost, two: StepCost, blocks: int) -> StepCost:
    """The cost for many blocks, from that of one block and of two.

    The compiler may merge collectives of one block otherwise than those of two, and then a line
    has another owner, though all of them together send what they should. Where there is less of a
    line with two blocks than with one, the lines of its kind are put together. Memory in all
    gets no less with more blocks.
    """
    less = max(sum(one.memory.values()) - sum(two.memory.values()), 0.0)
    if less:
        held = {**two.memory, "activations": two.memory["activations"] + less}
        two = dataclasses.replace(two, memory=held)
    kinds = {(line.what, line.mesh_axes) for line in _shrinking(one, two)}
    one, two = (
        _without_owners(cost, lambda line: (line.what, line.mesh_axes) in kinds)
        for cost in (one, two)
    )
    axes = {line.mesh_axes for line in _shrinking(one, two)}
    one, two = (
        _without_owners(cost, lambda line: line.mesh_axes in axes, "activation")
        for cost in (one, two)
    )
    return one.deeper(two, blocks)


def _shrinking(one: StepCost, two: StepCost) -> list[Sent]:
    """The lines of one block of which there is less with two."""
    left: dict[SentReason, float] = collections.defaultdict(float)
    for line in two.sent:
        left[line.reason] += line.bytes
    for line in one.sent:
        left[line.reason] -= line.bytes
    return [line for line in one.sent if left[line.reason] < -_ROUNDING * line.bytes]


def _without_owners(
    cost: StepCost, is_meant: Callable[[Sent], bool], what: str | None = None
) -> StepCost:
    """A cost in which some lines are nobody's, or of another kind; equal ones are added up."""
    sent: dict[SentReason, float] = collections.defaultdict(float)
    for line in cost.sent:
        if is_meant(line):
            line = Sent(what or line.what, "", (), line.mesh_axes, line.bytes)
        sent[line.reason] += line.bytes
    lines = tuple(Sent(*reason, bytes=bytes_) for reason, bytes_ in sent.items())
    return dataclasses.replace(cost, sent=lines)
