"""Where a mesh axis of a value's layout comes from."""

import dataclasses
from collections.abc import Collection, Iterator, Sequence
from typing import TYPE_CHECKING, Literal

from penzai_shard.sharding_propagation.factors import FactorAxis
from penzai_shard.sharding_propagation.mesh_axis_parts import overlap
from penzai_shard.sharding_propagation.operations import Hop, Operation

if TYPE_CHECKING:
    from penzai_shard.sharding_propagation.program import PropagatedProgram

CauseKind = Literal["argument", "constraint", "output", "manual", "operation"]


@dataclasses.dataclass(frozen=True)
class Cause:
    """Where a mesh axis of a value's layout comes from.

    Attributes:
        kind: ``argument``, the layout that an argument has; ``constraint``, a layout that is
            pinned in the program; ``output``, the layout that was asked for a result; ``manual``,
            how a ``shard_map`` takes or gives a value; ``operation``, one that has a layout of its
            own for another reason.
        name: The name of the argument, or of the operation; ``result 0`` of the first result.
        value: The value whose own layout it is.
        mesh_axis: The mesh axis, or a part of one, as that layout has it.
        dimension: The dimension of that value.
        operation: The constraint, or another operation; None of arguments.
        way: How it came: the hops, the last one first.
    """

    kind: CauseKind
    name: str
    value: int
    mesh_axis: str
    dimension: int
    operation: Operation | None
    way: tuple[Hop, ...]


def causes(program: "PropagatedProgram", value: int, mesh_axis: str) -> tuple[Cause, ...]:
    """Where a mesh axis of a value comes from, and what proposed the same at once on the way."""
    found: dict[tuple[str, int], Cause] = {}
    seen = {value}
    waiting: list[tuple[int, tuple[Hop, ...]]] = [(value, ())]
    while waiting:
        start, behind = waiting.pop(0)
        way = _whole_way(program, start, mesh_axis, set())
        if way is None and start != value:
            continue
        way = way or program.way(start, mesh_axis)
        cause = _cause(program, way[-1].source if way else start, mesh_axis, behind + way)
        # A constraint and what it takes have the same layout from the start.
        place = cause.operation.number if cause.operation else cause.value
        found.setdefault((cause.kind, place), cause)
        for hop, so_far in _agreeing(program, cause, way, mesh_axis, seen):
            if hop.source not in seen:
                seen.add(hop.source)
                waiting.append((hop.source, (*behind, *so_far, hop)))
    return tuple(found.values())


def _whole_way(
    program: "PropagatedProgram", value: int, mesh_axis: str, seen: set[int]
) -> tuple[Hop, ...] | None:
    """The way of a mesh axis, on through the types of values on Explicit meshes.

    There, JAX pins each value to the layout that its type has, which it infers from those of the
    operands; what comes from no operand, as a constant does, is not where a layout comes from.

    Returns:
        The way; None if it ends at a type that no operand has given.
    """
    way = program.way(value, mesh_axis)
    end = way[-1].source if way else value
    pinning = program.pinning(end)
    if pinning is None or not pinning.constraint:
        return way
    before = pinning.operands[0]
    maker = program.makers.get(before)
    # A type's layout goes by the name of what has made the value; one that was asked for does not.
    if maker is None or maker.constraint or maker.name != pinning.name:
        return way
    if end in seen:
        return None
    seen.add(end)
    for operand in _partners(program, maker, before, mesh_axis):
        found = None
        if operand in maker.operands:
            found = _whole_way(program, operand, mesh_axis, seen)
        if found is not None:
            hops = (Hop(maker, operand, before, -1), *found)
            return way + (hops if end == before else (Hop(pinning, before, end, -1), *hops))
    return None


def _cause(program: "PropagatedProgram", value: int, mesh_axis: str, way: tuple[Hop, ...]) -> Cause:
    """What is known of a value that has a mesh axis of its own."""
    operation = program.makers.get(value)
    known = program.values[value]
    dimension, own = next(
        (dimension, each)
        for dimension, mesh_axes in enumerate(known.spec or ())
        for each in mesh_axes
        if overlap(each, mesh_axis)
    )
    kind: CauseKind = "operation"
    name = operation.name if operation else ""
    pinning = program.pinning(value)
    if value in program.laid_out:
        kind, name = "argument", program.argument_names[value]
    elif value in program.results:
        kind, name = "output", f"result {program.results.index(value)}"
    elif pinning is not None:
        kind, name, operation = "constraint", pinning.name, pinning
        if pinning.boundary:
            kind = "manual"
    return Cause(kind, name, value, own, dimension, operation, way)


def _agreeing(
    program: "PropagatedProgram",
    cause: Cause,
    way: tuple[Hop, ...],
    mesh_axis: str,
    seen: Collection[int],
) -> Iterator[tuple[Hop, tuple[Hop, ...]]]:
    """The other values, not seen yet, of which a mesh axis could have come, as hops.

    Yields:
        Each hop, with the way up to there.
    """
    for number, hop in enumerate(way):
        # Ways from many values have most hops in common.
        key = (hop.operation.number, hop.source, hop.target, hop.step, mesh_axis)
        if key not in program.proposals:
            program.proposals[key] = tuple(_proposing(program, hop, mesh_axis))
        for value in program.proposals[key]:
            if value not in seen:
                yield dataclasses.replace(hop, source=value), way[:number]
    if cause.kind == "constraint" and cause.operation:
        for value in _partners(program, cause.operation, cause.value, mesh_axis):
            if program.arrival(value, mesh_axis) is None:
                yield Hop(cause.operation, value, cause.value, -1), way


def _proposing(program: "PropagatedProgram", hop: Hop, mesh_axis: str) -> Iterator[int]:
    """The other values that had the mesh axis before it came by a hop."""
    for value in _partners(program, hop.operation, hop.target, mesh_axis):
        arrival = program.arrival(value, mesh_axis)
        if value != hop.source and (arrival is None or arrival.step < hop.step):
            yield value


def _partners(
    program: "PropagatedProgram", operation: Operation, target: int, mesh_axis: str
) -> Iterator[int]:
    """The values of an operation that have a mesh axis where one of them has it.

    Where a factor is split over several, those in front of it are the same.
    """
    placed = program.placed(operation)
    wanted = {run for value, axes in placed if value == target for run in _runs(axes, mesh_axis)}
    for value, axes in placed:
        if value != target and not wanted.isdisjoint(_runs(axes, mesh_axis)):
            yield value


def _runs(axes: Sequence[FactorAxis], mesh_axis: str) -> Iterator[tuple[int, tuple[str, ...]]]:
    """The factors that a mesh axis splits, each with the mesh axes that split it before."""
    before: dict[int, tuple[str, ...]] = {}
    for each in axes:
        if each.factor is not None:
            found = before.get(each.factor, ())
            if overlap(each.mesh_axis, mesh_axis):
                yield each.factor, found
            before[each.factor] = (*found, each.mesh_axis)
