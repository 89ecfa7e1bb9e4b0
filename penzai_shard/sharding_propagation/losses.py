"""Where layouts get lost: operations whose operand has a mesh axis that their result has not."""

import dataclasses
import itertools
from collections.abc import Iterator
from typing import TYPE_CHECKING, Literal

from penzai_shard.library_apis.shardy_records import ShardyRule
from penzai_shard.sharding_propagation.factors import FactorAxis, dimensions_with, rule_of
from penzai_shard.sharding_propagation.mesh_axis_parts import is_covered, overlap, part_of
from penzai_shard.sharding_propagation.operations import Operation

if TYPE_CHECKING:
    from penzai_shard.sharding_propagation.program import PropagatedProgram

LossKind = Literal[
    "pinned",
    "used",
    "conflict",
    "whole",
    "unruled",
    "cut",
    "absent",
    "uneven",
    "undecided",
    "reduced",
]

_NOT_COMPUTED = frozenset({"sdy.sharding_group"})


@dataclasses.dataclass(frozen=True)
class Standing:
    """Mesh axes on a dimension of a value."""

    value: int
    dimension: int
    mesh_axes: tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class Loss:
    """A mesh axis that an operand of an operation has, and its result has not.

    Attributes:
        kind: Why. ``pinned``: the result's layout is fixed, by a constraint, by what was asked for
            an output, or by a ``shard_map``. ``used``: the mesh axis splits another dimension,
            which is ``rival``. ``conflict``: another value brought another layout for the same
            dimension, ``rival``; either that won or neither. ``whole``: the operation needs the
            dimension whole. ``unruled``: Shardy knows nothing of the operation. ``cut``: the
            operation cuts the dimension in parts, or joins it with others, and the mesh axis does
            not fit into them.
            ``absent``: the result does not have the dimension, as after indexing. ``uneven``:
            what comes out of a program is split evenly, and by whole mesh axes. ``undecided``:
            another reason. ``reduced``: the dimension is summed up, or reduced in another way, so
            that nothing is lost: devices then sum up what each has.
        operation: The operation that drops it; of a ``pinned`` one, what fixes the layout.
        made_by: The operation that takes the operand and makes the result. It is another than
            ``operation`` where XLA lays out a value at once as a constraint behind it wants it.
        mesh_axis: The mesh axis, or the part of it that got lost.
        operand: The value that has it.
        dimension: The dimension of the operand.
        result: The value that does not have it; None if the operation has no such dimension.
        result_dimension: The dimension of the result.
        rival: What has its place.
        rival_won: Whether the result has the rival's layout.
        rival_came: Whether the rival's layout is the result's ``own``, or came to it ``earlier``
            than the lost one could, or ``at once`` with it, so that Shardy chose.
    """

    kind: LossKind
    operation: Operation
    made_by: Operation
    mesh_axis: str
    operand: int
    dimension: int
    result: int | None = None
    result_dimension: int | None = None
    rival: Standing | None = None
    rival_won: bool = False
    rival_came: Literal["own", "earlier", "at once"] | None = None


def all_losses(program: "PropagatedProgram") -> Iterator[Loss]:
    """The losses of a program, in order."""
    for operation in program.operations:
        seen: set[tuple[LossKind, int | None, int, str]] = set()
        for loss in _Judge(program, operation).losses():
            place: tuple[int | None, int] = loss.operand, loss.dimension
            if loss.kind == "reduced":
                # What is reduced together is reduced once.
                place = None, 0
            elif loss.operation is not operation:
                # And what is pinned behind was lost there, whatever it is made of.
                place = None, loss.result_dimension or 0
            key = (loss.kind, *place, loss.mesh_axis)
            if key not in seen:
                seen.add(key)
                yield loss


class _Judge:
    """Says of one operation which mesh axes do not get through, and why."""

    def __init__(self, program: "PropagatedProgram", operation: Operation) -> None:
        self._program = program
        self._operation = operation

    def losses(self) -> Iterator[Loss]:
        operation = self._operation
        if not any(any(self._program.values[operand].spec or ()) for operand in operation.operands):
            return
        if operation.boundary and operation.boundary.goes_in:
            yield from self._entering()
            return
        rule = rule_of(operation, self._program.values)
        if rule is None:
            if operation.kind not in _NOT_COMPUTED:
                yield from self._unruled()
            return
        self._rule = rule
        self._placed = self._program.placed(operation)
        for operand, axes in self._placed[: len(operation.operands)]:
            for axis in axes:
                loss = self._judged(operand, axis)
                if loss is not None:
                    yield loss

    def _entering(self) -> Iterator[Loss]:
        """What a manual computation does not take as it is."""
        operation = self._operation
        assert operation.boundary
        # What is not handled by the computation itself is propagated into it.
        inside = self._program.values[operation.results[0]].spec
        for operand in operation.operands:
            for dimension, mesh_axes in enumerate(self._program.values[operand].spec or ()):
                kept = operation.boundary.spec[dimension] + (inside[dimension] if inside else ())
                for each in mesh_axes:
                    if not is_covered(each, kept, self._program.mesh):
                        loss = self._loss("pinned", each, operand, dimension)
                        yield dataclasses.replace(
                            loss, result=operation.results[0], result_dimension=dimension
                        )

    def _unruled(self) -> Iterator[Loss]:
        for operand in self._operation.operands:
            for dimension, mesh_axes in enumerate(self._program.values[operand].spec or ()):
                for each in mesh_axes:
                    if not is_covered(each, (), self._program.mesh):
                        yield self._loss("unruled", each, operand, dimension)

    def _loss(self, kind: LossKind, mesh_axis: str, operand: int, dimension: int) -> Loss:
        return Loss(kind, self._operation, self._operation, mesh_axis, operand, dimension)

    def _judged(self, operand: int, axis: FactorAxis) -> Loss | None:
        """Whether a mesh axis of an operand gets through, and if not, why."""
        if is_covered(axis.mesh_axis, (), self._program.mesh):
            return None
        loss = self._loss("cut", axis.mesh_axis, operand, axis.dimension)
        if axis.factor is None:
            return loss
        dimensions = self._rule.results
        results = [
            (result, places[0], kept)
            for (result, kept), mapping in zip(
                self._placed[len(self._operation.operands) :], dimensions, strict=False
            )
            if (places := dimensions_with(axis.factor, mapping))
        ]
        if not results:
            return self._without_result(loss, axis)
        for result, place, kept in results:
            there = tuple(each.mesh_axis for each in kept if each.factor == axis.factor)
            if not is_covered(axis.mesh_axis, there, self._program.mesh):
                loss = dataclasses.replace(loss, result=result, result_dimension=place)
                return self._with_result(loss, axis, there)
        return None

    def _with_result(self, loss: Loss, axis: FactorAxis, there: tuple[str, ...]) -> Loss:
        """Why a result does not have a mesh axis on a dimension that it shares with the operand."""
        assert loss.result is not None
        assert loss.result_dimension is not None
        if not self._program.values[loss.result].is_open[loss.result_dimension]:
            pinning = self._program.pinning(loss.result) or self._operation
            return dataclasses.replace(loss, kind="pinned", operation=pinning)
        if axis.factor in self._rule.blocked:
            return dataclasses.replace(loss, kind="whole")
        mine = self._on_factor(loss.operand, axis.factor)
        if there and mine[: len(there)] != there:
            standing = Standing(loss.result, loss.result_dimension, there)
            return self._against(loss, "conflict", standing, has_won=True)
        if contested := self._contested(loss, axis):
            return contested
        if axis.factor in self._rule.replicated | self._rule.permuted:
            return dataclasses.replace(loss, kind="whole")
        if loss.result in self._program.results:
            return dataclasses.replace(loss, kind="uneven")
        joined = len(self._rule.results[self._place_of(loss.result)][loss.result_dimension]) > 1
        return loss if joined or self._is_split(loss) else _undecided(loss)

    def _without_result(self, loss: Loss, axis: FactorAxis) -> Loss:
        """Why no result has a dimension that an operand has."""
        is_whole = axis.factor in self._rule.replicated | self._rule.blocked
        if is_whole and self._program.values[loss.operand].shape[loss.dimension] > 1:
            return dataclasses.replace(loss, kind="whole")
        if axis.factor not in self._rule.reduced:
            return dataclasses.replace(loss, kind="absent")
        return self._contested(loss, axis) or dataclasses.replace(loss, kind="reduced")

    def _contested(self, loss: Loss, axis: FactorAxis) -> Loss | None:
        """What another operand, or a result, brought against a mesh axis."""
        # The results first: what got through has won.
        for value, _ in reversed(self._placed):
            if value != loss.operand and (rival := self._used(value, axis)):
                has_won = value in self._operation.results
                return self._against(loss, "used", rival, has_won)
        mine = self._on_factor(loss.operand, axis.factor)
        for number, (value, _) in enumerate(self._placed[: len(self._operation.operands)]):
            other = self._on_factor(value, axis.factor)
            together = min(len(mine), len(other))
            if mine[:together] != other[:together]:
                (place, *_) = dimensions_with(axis.factor or 0, self._rule.operands[number])
                return self._against(loss, "conflict", Standing(value, place, other), False)
        return None

    def _used(self, value: int, axis: FactorAxis) -> Standing | None:
        """Another dimension of a value that has the mesh axis."""
        for each in self._axes_of(value):
            if each.factor != axis.factor and overlap(each.mesh_axis, axis.mesh_axis):
                return Standing(value, each.dimension, (each.mesh_axis,))
        return None

    def _axes_of(self, value: int) -> list[FactorAxis]:
        return next((axes for each, axes in self._placed if each == value), [])

    def _on_factor(self, value: int, factor: int | None) -> tuple[str, ...]:
        return tuple(each.mesh_axis for each in self._axes_of(value) if each.factor == factor)

    def _place_of(self, result: int) -> int:
        return self._operation.results.index(result)

    def _is_split(self, loss: Loss) -> bool:
        """Whether the operand's dimension has several factors."""
        place = self._operation.operands.index(loss.operand)
        return len(self._rule.operands[place][loss.dimension]) > 1

    def _against(self, loss: Loss, kind: LossKind, rival: Standing, has_won: bool) -> Loss:
        """A loss to a rival, and when that came."""
        came: Literal["own", "earlier", "at once"] = "at once"
        arrival = self._program.arrival(rival.value, rival.mesh_axes[0])
        mine = self._program.arrival(loss.operand, loss.mesh_axis)
        if arrival is None:
            came = "own"
        elif arrival.operation is not self._operation or (mine and mine.step >= arrival.step):
            came = "earlier" if mine is None or mine.step >= arrival.step else "at once"
        return dataclasses.replace(loss, kind=kind, rival=rival, rival_won=has_won, rival_came=came)


def _undecided(loss: Loss) -> Loss:
    return dataclasses.replace(loss, kind="undecided")


def losses_behind(program: "PropagatedProgram", value: int) -> tuple[Loss, ...]:
    """What the dimensions of a value would have had: the losses on the way to it.

    From the value back: a mesh axis that it does not have is looked for on the same dimension of
    what it was made of, and so on, up to the first operation whose operand has it.
    """
    found = {
        number
        for dimension in range(len(program.values[value].shape))
        for name in program.mesh
        for number in program.lost_on_dimensions.get((value, dimension, name), ())
    }
    found.update(_ended(program, value))
    losses = program.losses()
    return tuple(losses[number] for number in sorted(found))


def lost_on_dimensions(
    program: "PropagatedProgram",
) -> dict[tuple[int, int, str], frozenset[int]]:
    """For each dimension of a value and each mesh axis that it does not have, what lost it.

    Returns:
        The numbers of the losses, by value, dimension and name of the mesh axis.
    """
    found: dict[tuple[int, int, str], frozenset[int]] = {}
    sources = [
        (value, dimension, [*_sources(program, operation, value, dimension)], operation.number)
        for operation in program.operations
        for value in operation.results
        for dimension in range(len(program.values[value].shape))
    ]
    changed = True
    # In their order values come after what they are made of, but for what goes round in loops.
    while changed:
        changed = False
        for (value, dimension, places, operation), name in itertools.product(sources, program.mesh):
            key = (value, dimension, name)
            if not _has(program, *key):
                lost = frozenset[int]().union(
                    *(_lost_here(program, operation, *place, name) for place in places),
                    # What has the mesh axis has none here.
                    *(found.get((*place, name), ()) for place in places),
                )
                if lost and lost != found.get(key):
                    found[key] = lost
                    changed = True
    return found


def losses_by_place(
    program: "PropagatedProgram",
) -> dict[tuple[int, int], tuple[int, ...]]:
    """The numbers of the losses at each operation, by its number and by the operand."""
    lost: dict[tuple[int, int], tuple[int, ...]] = {}
    for number, loss in enumerate(program.losses()):
        key = (loss.made_by.number, loss.operand)
        lost[key] = (*lost.get(key, ()), number)
    return lost


def _lost_here(
    program: "PropagatedProgram", operation: int, operand: int, place: int, name: str
) -> frozenset[int]:
    losses = program.losses()
    return frozenset(
        number
        for number in program.losses_by_place.get((operation, operand), ())
        if losses[number].dimension == place and part_of(losses[number].mesh_axis).name == name
    )


def _has(program: "PropagatedProgram", value: int, dimension: int, name: str) -> bool:
    spec = program.values[value].spec
    return spec is not None and any(part_of(each).name == name for each in spec[dimension])


def _sources(
    program: "PropagatedProgram", operation: Operation, value: int, dimension: int
) -> Iterator[tuple[int, int]]:
    """The dimensions of an operation's operands that belong together with one of a result."""
    rule: ShardyRule | None = rule_of(operation, program.values)
    if rule is None:
        for operand in operation.operands:
            yield from ((operand, place) for place in range(len(program.values[operand].shape)))
        return
    factors = set(rule.results[operation.results.index(value)][dimension])
    for operand, mapping in zip(operation.operands, rule.operands, strict=False):
        for place, there in enumerate(mapping):
            if factors.intersection(there):
                yield operand, place


def _ended(program: "PropagatedProgram", value: int) -> Iterator[int]:
    """What got lost with dimensions that the last operation that ended any has ended."""
    losses = program.losses()
    waiting, seen = [value], {value}
    while waiting:
        operation = program.makers.get(waiting.pop())
        if operation is None:
            continue
        here = [
            number
            for operand in operation.operands
            for number in program.losses_by_place.get((operation.number, operand), ())
            if losses[number].result is None
        ]
        yield from here
        if here or (operation.rule and not _keeps_dimensions(operation.rule)):
            continue
        for operand in operation.operands:
            if operand not in seen:
                seen.add(operand)
                waiting.append(operand)


def _keeps_dimensions(rule: ShardyRule) -> bool:
    """Whether each dimension of the operands is one of the results."""
    kept = {factor for mapping in rule.results for factors in mapping for factor in factors}
    return kept.issuperset(
        factor for mapping in rule.operands for factors in mapping for factor in factors
    )
