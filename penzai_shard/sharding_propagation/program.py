"""A program after propagation as one list of operations: calls and loops are laid open."""

import dataclasses
import functools
from collections.abc import Iterator, Mapping, Sequence

import jax

from penzai_shard.library_apis.shardy_api import (
    PythonFrame,
    ShardyBlock,
    ShardyEdge,
    ShardyOperation,
    ShardyProgram,
    ShardyRule,
    ShardyValue,
    propagated,
)

FLOW = "flow"
"""The kind of an operation that only hands values on: into and out of calls, loops, branches."""

_EDGE_KINDS = ("sdy.data_flow_edge", "sdy.func_data_flow_edge")
_CALLS = ("sdy.named_computation", "sdy.manual_computation")


@dataclasses.dataclass(frozen=True)
class Edge:
    """A mesh axis that was taken from one value to others.

    Attributes:
        step: When, counted over the program.
        mesh_axis: The mesh axis, or a part of one, as ``data:(1)2``.
        source: The value that had it.
        targets: The values that got it.
    """

    step: int
    mesh_axis: str
    source: int
    targets: tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class Operation:
    """One operation; values go by their numbers in the program.

    Attributes:
        number: Its place in the program.
        kind: Such as ``stablehlo.dot_general``, or ``flow``.
        name: What JAX called it, the calls around it in front.
        frames: Where in Python it was written, the innermost call first.
        operands: What it takes; of a flow, all that may come in.
        results: What it makes.
        rule: Which dimensions belong together; None where that is not known.
        edges: Which mesh axes were taken from where to where at it.
        constraint: What Shardy calls it in origins, if it pins a layout.
    """

    number: int
    kind: str
    name: str
    frames: tuple[PythonFrame, ...]
    operands: tuple[int, ...]
    results: tuple[int, ...]
    rule: ShardyRule | None
    edges: tuple[Edge, ...]
    constraint: str = ""


@dataclasses.dataclass(frozen=True)
class Hop:
    """One piece of the way that a mesh axis came: at an operation, from one value to the next.

    Attributes:
        operation: Where.
        source: The value that had it.
        target: The value that got it.
    """

    operation: Operation
    source: int
    target: int


@dataclasses.dataclass(frozen=True)
class PropagatedProgram:
    """A program with the layout of every value.

    Attributes:
        values: What is known of each value.
        operations: The operations, in order; those of a call or a loop stand where it stands.
        arguments: The values that go in, by the name that JAX gives them.
        results: The values that come out.
        returned: What is known of the results as they come out.
        mesh: The mesh axes with their sizes.
    """

    values: tuple[ShardyValue, ...]
    operations: tuple[Operation, ...]
    arguments: Mapping[str, int]
    results: tuple[int, ...]
    returned: tuple[ShardyValue, ...]
    mesh: Mapping[str, int]

    @classmethod
    def of(cls, lowered: jax.stages.Lowered) -> "PropagatedProgram":
        """Propagates a lowered program, without any device.

        >>> program = PropagatedProgram.of(jax.jit(jax.numpy.sin).lower(1.0))
        >>> [operation.kind for operation in program.operations]
        ['stablehlo.sine', 'func.return']
        """
        return _Flattening(propagated(lowered)).program()

    @functools.cached_property
    def makers(self) -> Mapping[int, Operation]:
        """The operation that makes each value; arguments have none."""
        return {value: each for each in self.operations for value in each.results}

    @functools.cached_property
    def users(self) -> Mapping[int, tuple[Operation, ...]]:
        """The operations that take each value."""
        users: dict[int, dict[int, Operation]] = {}
        for each in self.operations:
            for value in each.operands:
                users.setdefault(value, {})[each.number] = each
        return {value: tuple(found.values()) for value, found in users.items()}

    def way(self, value: int, mesh_axis: str) -> tuple[Hop, ...]:
        """How a mesh axis came to a value: from the value back to where it comes from.

        Args:
            value: A value that is laid out over the mesh axis.
            mesh_axis: As its layout has it.

        Returns:
            The hops, the last one first; empty if the mesh axis is the value's own.
        """
        hops: list[Hop] = []
        seen = {value}
        while found := self._arrivals.get((value, mesh_axis)):
            operation, edge = found
            hops.append(Hop(operation, edge.source, value))
            value = edge.source
            if value in seen:
                break
            seen.add(value)
        return tuple(hops)

    @functools.cached_property
    def _arrivals(self) -> Mapping[tuple[int, str], tuple[Operation, Edge]]:
        """The first edge that brought each mesh axis to each value."""
        arrivals: dict[tuple[int, str], tuple[Operation, Edge]] = {}
        for operation in self.operations:
            for edge in operation.edges:
                for target in edge.targets:
                    key = (target, edge.mesh_axis)
                    if key not in arrivals or edge.step < arrivals[key][1].step:
                        arrivals[key] = (operation, edge)
        return arrivals


class _Flattening:
    """Makes one list of a program's operations.

    Shardy puts an edge behind each value that a call, a loop or branches hand on, which everything
    that uses the value takes it from; a loop's own values are those behind the loop's edges.
    """

    def __init__(self, program: ShardyProgram) -> None:
        self._program = program
        self._operations: list[Operation] = []
        self._same: dict[int, int] = {}
        self._sources: dict[int, tuple[int, ...]] = {}
        self._edge_of: dict[int, int] = {}

    def program(self) -> PropagatedProgram:
        """The program laid open."""
        given = self._program
        self._find_edges(given.main)
        returned = self._block(given.main, "")
        for value, edges in zip(returned, given.result_edges, strict=True):
            self._add("func.return", "", (), (value,), (), None, edges)
        return PropagatedProgram(
            given.values,
            tuple(self._operations),
            dict(zip(given.argument_names, given.main.arguments, strict=True)),
            returned,
            given.result_values,
            given.mesh,
        )

    def _find_edges(self, block: ShardyBlock) -> None:
        for each in block.operations:
            if each.kind in _EDGE_KINDS:
                self._edge_of[each.operands[0]] = each.results[0]
            for inner in each.blocks:
                self._find_edges(inner)

    def _block(self, block: ShardyBlock, around: str) -> tuple[int, ...]:
        """Adds the operations of a block; returns what it hands back."""
        for each in block.operations[:-1]:
            self._operation(each, around)
        return self._read(block.operations[-1].operands) if block.operations else ()

    def _operation(self, each: ShardyOperation, around: str) -> None:
        name = "/".join(filter(None, (around, each.name)))
        if each.kind in _EDGE_KINDS:
            sources = self._sources.get(each.operands[0], each.operands)
            edges = each.edges
            self._add(FLOW, name, each.frames, self._read(sources), each.results, None, edges)
        elif self._hands_on(each):
            self._enter(each, name if each.kind in _CALLS else around)
        else:
            operands = self._read(each.operands)
            self._add(
                each.kind,
                name,
                each.frames,
                operands,
                each.results,
                each.rule,
                each.edges,
                each.constraint,
            )

    def _hands_on(self, each: ShardyOperation) -> bool:
        """Whether an operation is a call, a loop, a branch or the like: its results have edges."""
        return each.kind in _CALLS or any(value in self._edge_of for value in each.results)

    def _enter(self, each: ShardyOperation, around: str) -> None:
        """Adds what is within a call, a loop or branches, and notes where its results come from."""
        loops = each.kind == "stablehlo.while"
        for block in each.blocks:
            for argument, operand, result in self._paired(block, each, loops):
                if result is not None:
                    self._same[argument] = result
                else:
                    self._sources[argument] = (operand,)
        handed = [self._block(block, around) for block in each.blocks]
        for number, result in enumerate(each.results):
            sources = list(self._read(each.operands[number : number + 1])) if loops else []
            if loops:
                # The first block of a loop is its condition.
                handed = handed[-1:]
            if not each.blocks:
                sources += self._read(each.operands[number : number + 1])
            sources += [values[number] for values in handed if number < len(values)]
            self._sources[result] = tuple(sources)

    def _paired(
        self, block: ShardyBlock, each: ShardyOperation, loops: bool
    ) -> Iterator[tuple[int, int, int | None]]:
        """A block's arguments, each with what goes in and, of a loop, what goes round."""
        for number, argument in enumerate(block.arguments):
            if number < len(each.operands):
                result = self._edge_of.get(each.results[number]) if loops else None
                yield argument, each.operands[number], result

    def _read(self, values: Sequence[int]) -> tuple[int, ...]:
        return tuple(self._same.get(value, value) for value in values)

    def _add(
        self,
        kind: str,
        name: str,
        frames: tuple[PythonFrame, ...],
        operands: tuple[int, ...],
        results: tuple[int, ...],
        rule: ShardyRule | None,
        edges: Sequence[ShardyEdge],
        constraint: str = "",
    ) -> None:
        def value(place: tuple[str, int]) -> int | None:
            values = operands if place[0] == "operand" else results
            return values[place[1]] if place[1] < len(values) else None

        read = []
        for edge in edges:
            source = value(edge.source)
            targets = tuple(t for t in map(value, edge.targets) if t is not None)
            if source is not None:
                read.append(Edge(edge.step, edge.mesh_axis, source, targets))
        self._operations.append(
            Operation(
                len(self._operations),
                kind,
                name,
                frames,
                operands,
                results,
                rule,
                tuple(read),
                constraint,
            )
        )
