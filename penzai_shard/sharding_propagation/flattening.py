"""One list of a program's operations: calls, loops and branches are laid open."""

import dataclasses
import itertools
from collections.abc import Iterator, Mapping, Sequence

from penzai_shard.library_apis.shardy_records import (
    ShardyBlock,
    ShardyBoundary,
    ShardyEdge,
    ShardyOperation,
    ShardyProgram,
    ShardyValue,
)
from penzai_shard.sharding_propagation.operations import FLOW, Edge, Operation

# Later than any step of Shardy's.
_LAST = 1 << 62

_EDGE_KINDS = ("sdy.data_flow_edge", "sdy.func_data_flow_edge")
_CALLS = ("sdy.named_computation", "sdy.manual_computation")


@dataclasses.dataclass(frozen=True)
class FlatProgram:
    """The parts of a program whose operations are one list.

    Attributes:
        values: What is known of each value; the last ones are the results as they come out.
        operations: The operations.
        arguments: The values that go in, by name.
        laid_out: Those of them that had a layout before propagation.
        results: The values that come out.
    """

    values: tuple[ShardyValue, ...]
    operations: tuple[Operation, ...]
    arguments: Mapping[str, int]
    laid_out: frozenset[int]
    results: tuple[int, ...]


def flattened(program: ShardyProgram) -> FlatProgram:
    """Makes one list of a program's operations.

    Shardy puts an edge behind each value that a call, a loop or branches hand on, which everything
    that uses the value takes it from; a loop's own values are those behind the loop's edges.
    """
    return _Flattening(program).flat()


class _Flattening:
    def __init__(self, program: ShardyProgram) -> None:
        self._program = program
        self._operations: list[Operation] = []
        self._same: dict[int, int] = {}
        self._sources: dict[int, tuple[int, ...]] = {}
        self._edge_of: dict[int, int] = {}
        self._boundaries: dict[int, ShardyBoundary] = {}
        self._first_taken: dict[tuple[int, str], int] = {}

    def flat(self) -> FlatProgram:
        given = self._program
        self._find_edges(given.main)
        returned = self._block(given.main, "")
        results = tuple(range(len(given.values), len(given.values) + len(returned)))
        values = given.values + given.result_values
        for number, (value, result) in enumerate(zip(returned, results, strict=True)):
            edges = tuple(self._edges_of_result(number, value, values[value], values[result]))
            self._add(ShardyOperation(FLOW, "", (), (value,), (result,), (), None, edges, ""))
        return FlatProgram(
            values,
            tuple(self._operations),
            dict(zip(_distinct(given.argument_names), given.main.arguments, strict=True)),
            frozenset(itertools.compress(given.main.arguments, given.laid_out)),
            results,
        )

    def _edges_of_result(
        self, number: int, value: int, handed: ShardyValue, result: ShardyValue
    ) -> Iterator[ShardyEdge]:
        """The edges between a result and the value that is handed out as such.

        Shardy notes those of all results in one place, and not whose each is.
        """
        for mesh_axis in (each for mesh_axes in result.spec or () for each in mesh_axes):
            if result.origins.get(mesh_axis) != "self":
                yield ShardyEdge(_LAST, mesh_axis, ("operand", 0), (("result", 0),))
            elif handed.origins.get(mesh_axis) == f"output: {number}":
                # Not later than it was taken on from there.
                before = [
                    edge.step
                    for edges in self._program.result_edges
                    for edge in edges
                    if edge.mesh_axis == mesh_axis
                    and edge.source[0] == "result"
                    and edge.step < self._first_taken.get((value, mesh_axis), _LAST)
                ]
                step = max(before, default=-1)
                yield ShardyEdge(step, mesh_axis, ("result", 0), (("operand", 0),))

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
            handed = each.operands[0]
            sources = self._sources.get(handed, each.operands)
            flow = dataclasses.replace(each, kind=FLOW, name=name, operands=self._read(sources))
            self._add(flow, self._boundaries.get(handed))
        elif self._hands_on(each):
            self._enter(each, name if each.kind in _CALLS else around)
        else:
            self._add(dataclasses.replace(each, name=name, operands=self._read(each.operands)))

    def _hands_on(self, each: ShardyOperation) -> bool:
        """Whether an operation is a call, a loop, a branch or the like: its results have edges."""
        return each.kind in _CALLS or any(value in self._edge_of for value in each.results)

    def _enter(self, each: ShardyOperation, around: str) -> None:
        """Adds what is within a call, a loop or branches, and notes where its results come from."""
        loops = each.kind == "stablehlo.while"
        for block in each.blocks:
            self._boundaries.update(zip(block.arguments, each.taken, strict=False))
            for argument, operand, result in self._paired(block, each, loops):
                if result is not None:
                    self._same[argument] = result
                else:
                    self._comes_from(argument, (operand,))
        self._boundaries.update(zip(each.results, each.given, strict=False))
        handed = [self._block(block, around) for block in each.blocks]
        for number, result in enumerate(each.results):
            sources = list(self._read(each.operands[number : number + 1])) if loops else []
            if loops:
                # The first block of a loop is its condition.
                handed = handed[-1:]
            if not each.blocks:
                sources += self._read(each.operands[number : number + 1])
            sources += [values[number] for values in handed if number < len(values)]
            self._comes_from(result, tuple(sources))

    def _comes_from(self, value: int, sources: tuple[int, ...]) -> None:
        """Notes what may be in a value; one without an edge, such as a token, is what it is."""
        self._sources[value] = sources
        if value not in self._edge_of and len(sources) == 1:
            self._same[value] = self._read(sources)[0]

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

    def _add(self, each: ShardyOperation, boundary: ShardyBoundary | None = None) -> None:
        def value(place: tuple[str, int]) -> int | None:
            values = each.operands if place[0] == "operand" else each.results
            return values[place[1]] if place[1] < len(values) else None

        edges = []
        for edge in each.edges:
            source = value(edge.source)
            targets = tuple(t for t in map(value, edge.targets) if t is not None)
            if source is not None:
                edges.append(Edge(edge.step, edge.mesh_axis, source, targets))
                key = (source, edge.mesh_axis)
                self._first_taken[key] = min(edge.step, self._first_taken.get(key, _LAST))
        self._operations.append(
            Operation(
                number=len(self._operations),
                kind=each.kind,
                name=each.name,
                frames=each.frames,
                operands=each.operands,
                results=each.results,
                rule=each.rule,
                edges=tuple(edges),
                constraint=each.constraint,
                boundary=boundary,
                cuts=each.cuts,
            )
        )


def _distinct(names: Sequence[str]) -> Iterator[str]:
    """Names by which each argument can be told from the others."""
    for number, name in enumerate(names):
        yield name if name and names.count(name) == 1 else f"{name or 'argument'} ({number})"
