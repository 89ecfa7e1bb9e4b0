"""Finds where a mesh axis of a value comes from, and the operations at which one is lost.

A value has a mesh axis because it has a layout of its own, or because another value of the same
operation handed it on. Shardy notes the latter as edges, each with the step of propagation at which
it was used. The earliest edge that brought a mesh axis leads to a value that had it before, so
going back over edges always ends at a layout of somebody: of an argument, a declared result, a
constraint, or the border of a ``jax.shard_map``. Loops need nothing more: what is handed round
comes over an edge from the start or from the body, whichever was first.

A mesh axis is lost at an operation whose operand has it, and whose result has it not, though both
have the dimension: in Shardy's words, though they share a factor of the operation's rule. What a
value lacks was lost at the first such operation behind it; only loops hand losses round, hence a
fixpoint. A dimension that is summed up ends, and takes its mesh axis along: that is no loss.

Names of parts of mesh axes, such as ``data:(2)4``, are Shardy's: the part of size 4 behind 2. Here
a part counts as its mesh axis.
"""

import functools
from collections.abc import Iterator, Mapping, Sequence
from typing import Literal, NamedTuple

from penzai_shard.propagation.flat import Operation, Propagated, Rule, Spec, Value

CauseKind = Literal["argument", "result", "constraint", "shard_map", "unknown"]
# A value, a dimension, and a mesh axis.
_Place = tuple[int, int, str]
_ENDED = -1  # In the place of a dimension.


class Cause(NamedTuple):
    """Where a mesh axis of a value comes from.

    Attributes:
        kind: What has it of its own.
        value: The value that has it of its own.
        dimension: The dimension of that value.
        operation: The constraint or the border; None of arguments and results.
    """

    kind: CauseKind
    value: int
    dimension: int
    operation: Operation | None


class Loss(NamedTuple):
    """A mesh axis that an operand of an operation has, and its result has not.

    Attributes:
        reason: Why. ``"pinned"``: the layout of the result is fixed. ``"used"``: the mesh axis
            splits another dimension. ``"conflict"``: another value brought other mesh axes for the
            dimension. ``"whole"``: the operation needs the dimension whole. ``"cut"``: it cuts or
            joins the dimension, and the mesh axis does not fit into the parts. ``"absent"``: the
            result has no such dimension. ``"uneven"``: results of programs are split evenly, by
            whole mesh axes. ``"unruled"``: Shardy knows nothing of the operation.
            ``"undecided"``: another reason. ``"reduced"``: the dimension is summed up, or reduced
            in another way, which is no loss.
        operation: The operation.
        mesh_axis: The mesh axis, or a part of it.
        operand: The value that has it.
        dimension: The dimension of the operand.
        result: The value that has it not; None where the dimension ends.
        pinned_by: The constraint or border that fixes the layout of the result.
        rival: What has the place: a value, and its mesh axis.
    """

    reason: str
    operation: Operation
    mesh_axis: str
    operand: int
    dimension: int
    result: int | None = None
    pinned_by: Operation | None = None
    rival: tuple[int, str] | None = None


class _Placed(NamedTuple):
    """A mesh axis of a value, as an operation sees it; no factor where it fits into none."""

    dimension: int
    factor: int | None
    mesh_axis: str


def base(mesh_axis: str) -> str:
    """The mesh axis of which another may be a part.

    >>> base("data:(2)4"), base("data")
    ('data', 'data')
    """
    return mesh_axis.partition(":")[0]


class Ways:
    """The ways of mesh axes through a propagated program.

    Attributes:
        program: The program.
        values: Its values.
        makers: By the number of a value the operation that makes it.
        users: By the number of a value the operations that take it.
    """

    def __init__(self, program: Propagated) -> None:
        self.program = program
        self.values: Sequence[Value] = program.values
        self.makers, self.users = program.makers, program.users
        # How a mesh axis first came to a value: the step of propagation, and from which value.
        self._arrivals: dict[tuple[int, str], tuple[int, int]] = {}
        for operation in program.operations:
            for step, mesh_axis, source, targets in operation.edges:
                # Within a shard_map a value has not the mesh axes of the border, which come of it.
                for target in targets if self.find_dimension(source, mesh_axis) is not None else ():
                    key, new = (target, base(mesh_axis)), (step, source)
                    first = self._arrivals.setdefault(key, new)
                    self._arrivals[key] = new if step < first[0] else first
        self.cause = functools.cache(self._find_cause)
        self._placed = functools.cache(self._place)

    # Causes

    def _find_cause(self, value: int, mesh_axis: str) -> Cause:
        """Where a mesh axis of a value comes from."""
        seen = set[int]()
        while value not in seen and (found := self._arrivals.get((value, base(mesh_axis)))):
            seen.add(value)
            _, value = found
        kind, end = self._own_layout(value)
        return Cause(kind, value, self.find_dimension(value, mesh_axis) or 0, end)

    def find_dimension(self, value: int, mesh_axis: str) -> int | None:
        """The dimension of a value that has a mesh axis, or any part of it."""
        spec = self.values[value].spec
        return next((i for i, axes in enumerate(spec) if base(mesh_axis) in map(base, axes)), None)

    def _own_layout(self, value: int) -> tuple[CauseKind, Operation | None]:
        if value in self.program.laid_out:
            return "argument", None
        if value in self.program.results:
            return "result", None
        pinning = self.pinning(value)
        if pinning is None or pinning.pin is None:
            return "unknown", self.makers.get(value)
        return "constraint" if pinning.pin.kind == "constraint" else "shard_map", pinning

    def pinning(self, value: int) -> Operation | None:
        """The constraint or border whose layout a value has: what makes the value, or takes it."""
        maker = self.makers.get(value)
        if maker is not None and (maker.pin or value in self.program.results):
            return maker
        known, users = self.values[value], self.users.get(value, ())
        takers = [(u.pin, u) for u in users if u.pin and u.pin.kind != "result of region"]
        named = [taker for pin, taker in takers if pin.origin in known.origins.values()]
        is_fixed = not all(known.is_open)
        same = [taker for pin, taker in takers if is_fixed and pin.spec == known.spec]
        return next(iter(named + same), None)

    # Losses

    @functools.cached_property
    def losses(self) -> Sequence[Loss]:
        """What is lost or reduced at each operation, in the order of the program."""
        found: list[Loss] = []
        for operation in self.program.operations:
            here: dict[tuple[object, ...], Loss] = {}
            for loss in self._lost_at(operation):
                # What is summed is summed once, and what a constraint pins is lost once.
                is_once = loss.reason in ("reduced", "pinned")
                place = () if is_once else (loss.operand, loss.dimension)
                if self._size(loss.mesh_axis) > 1:
                    here.setdefault((loss.reason, loss.mesh_axis, *place), loss)
            found += here.values()
        return found

    def _lost_at(self, operation: Operation) -> Iterator[Loss]:
        if operation.kind == "sdy.sharding_group":
            return
        if (pin := operation.pin) is not None and pin.kind == "region":
            # What is no business of the region is propagated into it.
            result = operation.results[0]
            inside = self.values[result].spec
            kept = [{*map(base, (*a, *b))} for a, b in zip(pin.spec, inside, strict=True)]
            for operand, i, axis in self._axes_of(operation.operands):
                if base(axis) not in kept[i]:
                    yield Loss("pinned", operation, axis, operand, i, result, operation)
        elif operation.rule is None:
            for operand, i, axis in self._axes_of(operation.operands):
                yield Loss("unruled", operation, axis, operand, i)
        else:
            operands = zip(operation.operands, self._placed(operation), strict=False)
            for number, (operand, placed) in enumerate(operands):
                for one in placed:
                    loss = Loss("cut", operation, one.mesh_axis, operand, one.dimension)
                    if one.factor is None:
                        yield loss
                    elif found := self._judge(operation.rule, number, one.factor, loss):
                        yield found

    def _axes_of(self, values: Sequence[int]) -> Iterator[tuple[int, int, str]]:
        for value in values:
            for i, axes in enumerate(self.values[value].spec):
                yield from ((value, i, axis) for axis in axes)

    def _judge(self, rule: Rule, number: int, factor: int, loss: Loss) -> Loss | None:
        """Why a mesh axis of an operand does not get through; None if it does."""
        operation, shape = loss.operation, self.values[loss.operand].shape
        is_whole = factor in rule.replicated | rule.blocked
        results = ((n, i, x) for n, dims in enumerate(rule.results) for i, x in enumerate(dims))
        found = next(((n, i, x) for n, i, x in results if factor in x), None)
        if found is None:
            if is_whole and shape[loss.dimension] > 1:
                return loss._replace(reason="whole")
            if factor not in rule.reduced:
                return loss._replace(reason="absent")
            return self._find_rival(number, factor, loss) or loss._replace(reason="reduced")
        n, i, joined = found
        result = operation.results[n]
        there = self._on_factor(operation, len(operation.operands) + n, factor)
        if base(loss.mesh_axis) in map(base, there):
            return None
        loss = loss._replace(result=result)
        if not self.values[result].is_open[i]:
            return loss._replace(reason="pinned", pinned_by=self.pinning(result) or operation)
        if rival := None if factor in rule.blocked else self._find_rival(number, factor, loss):
            return rival
        is_cut = len(joined) > 1 or len(rule.operands[number][loss.dimension]) > 1
        is_end = result in self.program.results
        reasons = {"whole": is_whole, "uneven": is_end, "cut": is_cut, "undecided": True}
        return loss._replace(reason=next(reason for reason, holds in reasons.items() if holds))

    def _find_rival(self, number: int, factor: int, loss: Loss) -> Loss | None:
        """The loss to another dimension with the mesh axis, or to another layout of this one."""
        operation, mine = loss.operation, self._on_factor(loss.operation, number, factor)
        values = (*operation.operands, *operation.results)
        placed = [*enumerate(zip(values, self._placed(operation), strict=False))]
        # Results come first: what got through has won.
        others = [(n, value, axes) for n, (value, axes) in reversed(placed) if n != number]
        for _, value, axes in others:
            for other in axes if value != loss.operand else ():
                if other.factor != factor and base(other.mesh_axis) == base(loss.mesh_axis):
                    return loss._replace(reason="used", rival=(value, other.mesh_axis))
        for n, value, _ in others:
            theirs = self._on_factor(operation, n, factor)
            length = min(len(mine), len(theirs))
            if mine[:length] != theirs[:length]:
                return loss._replace(reason="conflict", rival=(value, theirs[0]))
        return None

    # What an operation sees

    def _place(self, operation: Operation) -> Sequence[Sequence[_Placed]]:
        """The mesh axes of an operation's operands, then of its results, with their factors."""
        rule, values = operation.rule, (*operation.operands, *operation.results)
        assert rule is not None
        pairs = zip(values, (*rule.operands, *rule.results), strict=False)
        return [[*self._factors(rule, self.values[x].spec, factors)] for x, factors in pairs]

    def _factors(
        self, rule: Rule, spec: Spec, mapping: Sequence[Sequence[int]]
    ) -> Iterator[_Placed]:
        """Mesh axes split the factors of a dimension one after the other, the major ones first.

        One that is larger than a factor is on the next one, too.
        """
        for dimension, (axes, factors) in enumerate(zip(spec, mapping, strict=False)):
            end = 1
            for mesh_axis in axes:
                start, end, behind = end, end * self._size(mesh_axis), 1
                for factor in factors:
                    before, behind = behind, behind * rule.sizes[factor]
                    is_last = factor == factors[-1]
                    if before < end and (is_last or start < behind):
                        fits = is_last or max(behind, end) % min(behind, end) == 0
                        yield _Placed(dimension, factor if fits else None, mesh_axis)

    def _on_factor(self, operation: Operation, place: int, factor: int) -> Sequence[str]:
        placed = self._placed(operation)
        axes = placed[place] if place < len(placed) else ()
        return [axis.mesh_axis for axis in axes if axis.factor == factor]

    def _size(self, mesh_axis: str) -> int:
        """How many parts a mesh axis, or a part of it, makes."""
        part = mesh_axis.partition(")")[2]
        return int(part) if part else self.program.mesh[mesh_axis]

    # What a value has lost

    def lost(self, value: int) -> list[Loss]:
        """What the dimensions of a value would have had, and what ended with the last that did."""
        dims = [*range(len(self.values[value].shape)), _ENDED]
        places = ((value, i, name) for i in dims for name in self.program.mesh)
        numbers = {n for place in places for n in self._lost_before.get(place, ())}
        return [self.losses[n] for n in sorted(numbers)]

    @functools.cached_property
    def _lost_before(self) -> Mapping[_Place, set[int]]:
        """For each dimension of a value and each mesh axis that it lacks the losses behind it.

        In the place of a dimension stands also what ended with the last ones that did.
        """
        at: dict[tuple[int, _Place], set[int]] = {}
        for n, loss in enumerate(self.losses):
            dims = [loss.dimension] if loss.result is not None else [loss.dimension, _ENDED]
            for i in dims:
                place = loss.operand, i, base(loss.mesh_axis)
                at.setdefault((loss.operation.number, place), set()).add(n)
        lacking = []
        for value, maker in self.makers.items():
            ends = maker.rule is not None and maker.rule.reduced
            for i, axes in [*enumerate(self.values[value].spec), (_ENDED, ())]:
                sources = self._find_sources(value, i)
                for name in self.program.mesh.keys() - {*map(base, axes)}:
                    places = [(*source, name) for source in sources]
                    here = {n for one in places for n in at.get((maker.number, one), ())}
                    lacking.append(((value, i, name), here, [] if i == _ENDED and ends else places))
        found: dict[_Place, set[int]] = {}
        size = -1
        # Once through the program, and once more for each time that a loop hands a loss on.
        while size != (size := sum(map(len, found.values()))):
            for place, here, places in lacking:
                if lost := here.union(*(found.get(one, ()) for one in places)):
                    found[place] = lost
        return found

    def _find_sources(self, value: int, dimension: int) -> list[tuple[int, int]]:
        """The dimensions of what a value is made of that belong together with one of its own."""
        maker = self.makers[value]
        if dimension == _ENDED:
            return [(operand, _ENDED) for operand in maker.operands]
        if maker.rule is None:
            shapes = [(one, self.values[one].shape) for one in maker.operands]
            return [(one, i) for one, shape in shapes for i in range(len(shape))]
        factors = {*maker.rule.results[maker.results.index(value)][dimension]}
        pairs = zip(maker.operands, maker.rule.operands, strict=False)
        dims = ((operand, *each) for operand, own in pairs for each in enumerate(own))
        return [(operand, i) for operand, i, own in dims if factors.intersection(own)]
