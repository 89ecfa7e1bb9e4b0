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

Names of parts of mesh axes, such as ``data:(2)4``, are Shardy's: the part of size 4 behind 2.
"""

import functools
from collections.abc import Iterator, Mapping, Sequence
from typing import Literal, NamedTuple

from penzai_shard.propagation.flat import Operation, Propagated, Rule, Value

CauseKind = Literal["argument", "result", "constraint", "shard_map", "unknown"]
# A value, a dimension, and a mesh axis.
_Place = tuple[int, int, str]
_ENDED = -1  # In the place of a dimension.
_CONSTRAINT = "sharding_constraint"  # As JAX names the operation of a user's constraint.


class Cause(NamedTuple):
    """Where a mesh axis of a value comes from.

    Attributes:
        kind: What has it of its own.
        value: The value that has it of its own.
        dimension: The dimension of that value.
        operation: The constraint or the border; None of arguments and results.
        way: The operations that it came through, the first one first.
    """

    kind: CauseKind
    value: int
    dimension: int
    operation: Operation | None
    way: tuple[Operation, ...]


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


def overlap(one: str, other: str) -> bool:
    """Whether two mesh axes, or parts of them, number the same devices.

    >>> overlap("data", "data:(1)2"), overlap("data:(1)2", "data:(2)4")
    (True, False)
    """
    if base(one) != base(other) or ":" not in one or ":" not in other:
        return base(one) == base(other)
    (a, n), (b, m) = (tuple(map(int, x.partition(":(")[2].split(")"))) for x in (one, other))
    return a < b * m and b < a * n


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
        self.makers: dict[int, Operation] = {}
        self.users: dict[int, list[Operation]] = {}
        # Of each value what came to it: the step, the mesh axis, from where, and through what.
        self._arrivals: dict[int, list[tuple[int, str, int, Operation]]] = {}
        for operation in program.operations:
            self.makers |= dict.fromkeys(operation.results, operation)
            for value in dict.fromkeys(operation.operands):
                self.users.setdefault(value, []).append(operation)
            for step, mesh_axis, source, targets in operation.edges:
                # Within a shard_map a value has not the mesh axes of the border, which come of it.
                for target in targets if self.find_dimension(source, mesh_axis) is not None else ():
                    arrival = step, mesh_axis, source, operation
                    self._arrivals.setdefault(target, []).append(arrival)
        self.cause = functools.cache(self._find_cause)
        self._placed = functools.cache(self._place)

    # Causes

    def _find_cause(self, value: int, mesh_axis: str) -> Cause:
        """Where a mesh axis of a value comes from."""
        waiting: list[tuple[int, tuple[Operation, ...]]] = [(value, ())]
        ends, seen = [], set[int]()
        while waiting:
            value, way = waiting.pop()
            while value not in seen and (found := self._arrival(value, mesh_axis)):
                seen.add(value)
                *_, value, operation = found
                way = (operation, *way)
            ends.append((value, way))
            maker = self._find_repeating(value, mesh_axis)
            if maker is None:
                break
            if value not in seen:
                seen.add(value)
                before = self._partners(maker, mesh_axis)
                waiting += [(operand, (maker, *way)) for operand in reversed(before)]
        # Where a type is all there is, as of a constant, the nearest one.
        value, way = ends[0] if maker is not None else ends[-1]
        kind, end = self._own_layout(value)
        return Cause(kind, value, self.find_dimension(value, mesh_axis) or 0, end, way)

    def find_dimension(self, value: int, mesh_axis: str) -> int | None:
        """The dimension of a value that has a mesh axis, or a part of it."""
        places = enumerate(self.values[value].spec or ())
        found = (i for i, axes in places if any(overlap(axis, mesh_axis) for axis in axes))
        return next(found, None)

    def _arrival(self, value: int, mesh_axis: str) -> tuple[int, str, int, Operation] | None:
        found = (one for one in self._arrivals.get(value, ()) if overlap(one[1], mesh_axis))
        return min(found, key=lambda one: one[0], default=None)

    def _find_repeating(self, value: int, mesh_axis: str) -> Operation | None:
        """The operation behind a value's constraint, if that only says what its operands say.

        On Explicit meshes JAX pins each value to the layout that its type has, by a constraint with
        the name of what makes the value.
        """
        pinning = self.pinning(value)
        if pinning is None or pinning.kind != "sdy.sharding_constraint":
            return None
        (before,) = pinning.operands
        i, own = self.find_dimension(value, mesh_axis), self.values[value].spec
        given = self.values[before].spec if before in self.program.laid_out else None
        if own and given and i is not None and own[i] == given[i]:
            return pinning  # An argument has it there already.
        maker = self.makers.get(before)
        is_of_type = maker is not None and not maker.pin and maker.name == pinning.name
        return maker if is_of_type else None

    def _partners(self, operation: Operation, mesh_axis: str) -> list[int]:
        """The operands that have a mesh axis where some result may have it."""
        if operation.rule is None:
            return []
        kept = _factors_of(operation.rule.results)

        def has(placed: Sequence[_Placed]) -> bool:
            return any(x.factor in kept and overlap(x.mesh_axis, mesh_axis) for x in placed)

        operands = zip(operation.operands, self._placed(operation.number), strict=False)
        return [operand for operand, placed in operands if has(placed)]

    def _own_layout(self, value: int) -> tuple[CauseKind, Operation | None]:
        if value in self.program.laid_out:
            return "argument", None
        if value in self.program.results:
            return "result", None
        pinning = self.pinning(value)
        if pinning is None or pinning.pin is None:
            return "unknown", self.makers.get(value)
        is_constraint = pinning.pin.kind == "constraint" and not self._is_border(pinning)
        return "constraint" if is_constraint else "shard_map", pinning

    def _is_border(self, constraint: Operation) -> bool:
        """Whether Shardy has put a constraint in front of a ``jax.shard_map`` itself."""
        spec = self.values[constraint.results[0]].spec
        takers = self.users.get(constraint.results[0], [])
        are_borders = [u.pin is not None and u.pin[::2] == ("region", spec) for u in takers]
        is_written = constraint.name.rpartition("/")[2] == _CONSTRAINT
        return bool(takers) and all(are_borders) and not is_written

    def pinning(self, value: int) -> Operation | None:
        """The constraint or border whose layout a value has: what makes the value, or takes it."""
        maker = self.makers.get(value)
        if maker is not None and (maker.pin or value in self.program.results):
            return maker
        known = self.values[value]
        if value in self.program.laid_out:
            return None
        pins = [(u.pin, u) for u in self.users.get(value, ()) if u.pin]
        takers = [(pin, taker) for pin, taker in pins if pin.kind != "result of region"]
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
                place = () if loss.reason == "reduced" else (loss.operand, loss.dimension)
                if loss.pinned_by is not None and loss.pinned_by is not operation:
                    place = ()
                if self._part(loss.mesh_axis)[1] > 1:
                    here.setdefault((loss.reason, loss.mesh_axis, *place), loss)
            found += here.values()
        return found

    def _lost_at(self, operation: Operation) -> Iterator[Loss]:
        if operation.kind == "sdy.sharding_group":
            return
        enters = operation.pin is not None and operation.pin.kind == "region"
        if operation.pin is not None and enters:
            # What is no business of the region is propagated into it.
            result = operation.results[0]
            inside = self.values[result].spec or ((),) * len(operation.pin.spec)
            kept = [{*map(base, (*a, *b))} for a, b in zip(operation.pin.spec, inside, strict=True)]
            for operand, i, axis in self._axes_of(operation.operands):
                if base(axis) not in kept[i]:
                    yield Loss("pinned", operation, axis, operand, i, result, operation)
        elif operation.rule is None:
            for operand, i, axis in self._axes_of(operation.operands):
                yield Loss("unruled", operation, axis, operand, i)
        else:
            operands = zip(operation.operands, self._placed(operation.number), strict=False)
            for number, (operand, placed) in enumerate(operands):
                for one in placed:
                    loss = Loss("cut", operation, one.mesh_axis, operand, one.dimension)
                    if one.factor is None:
                        yield loss
                    elif found := self._judge(operation.rule, number, one.factor, loss):
                        yield found

    def _axes_of(self, values: Sequence[int]) -> Iterator[tuple[int, int, str]]:
        for value in values:
            for i, axes in enumerate(self.values[value].spec or ()):
                yield from ((value, i, axis) for axis in axes)

    def _judge(self, rule: Rule, number: int, factor: int, loss: Loss) -> Loss | None:
        """Why a mesh axis of an operand does not get through; None if it does."""
        operation, mine = loss.operation, self._on_factor(loss.operation, number, factor)
        for n, dims in enumerate(rule.results):
            places = [i for i, factors in enumerate(dims) if factor in factors]
            if not places:
                continue
            result = operation.results[n]
            there = self._on_factor(operation, len(operation.operands) + n, factor)
            if any(overlap(other, loss.mesh_axis) for other in there):
                return None
            loss = loss._replace(result=result)
            if not self.values[result].is_open[places[0]]:
                return loss._replace(reason="pinned", pinned_by=self.pinning(result) or operation)
            if factor in rule.blocked:
                return loss._replace(reason="whole")
            if there and mine[: len(there)] != there:
                return loss._replace(reason="conflict", rival=(result, there[0]))
            if contested := self._contest(number, factor, mine, loss):
                return contested
            if factor in rule.replicated:
                return loss._replace(reason="whole")
            if result in self.program.results:
                return loss._replace(reason="uneven")
            is_joined = len(dims[places[0]]) > 1
            is_cut = is_joined or len(rule.operands[number][loss.dimension]) > 1
            return loss if is_cut else loss._replace(reason="undecided")
        needs_whole = factor in rule.replicated | rule.blocked
        if needs_whole and self.values[loss.operand].shape[loss.dimension] > 1:
            return loss._replace(reason="whole")
        if factor not in rule.reduced:
            return loss._replace(reason="absent")
        return self._contest(number, factor, mine, loss) or loss._replace(reason="reduced")

    def _contest(self, number: int, factor: int, mine: Sequence[str], loss: Loss) -> Loss | None:
        """The loss to another dimension with the mesh axis, or to another layout of this one."""
        operation = loss.operation
        values = (*operation.operands, *operation.results)
        placed = list(zip(values, self._placed(operation.number), strict=False))
        # Results come first: what got through has won.
        for value, axes in reversed(placed):
            for other in axes if value != loss.operand else ():
                if other.factor != factor and overlap(other.mesh_axis, loss.mesh_axis):
                    return loss._replace(reason="used", rival=(value, other.mesh_axis))
        for n, value in enumerate(operation.operands[: len(placed)]):
            theirs = self._on_factor(operation, n, factor)
            length = min(len(mine), len(theirs))
            if n != number and mine[:length] != theirs[:length]:
                return loss._replace(reason="conflict", rival=(value, theirs[0]))
        return None

    # What an operation sees

    def _place(self, number: int) -> Sequence[Sequence[_Placed]]:
        """The mesh axes of an operation's operands, then of its results, with their factors."""
        operation = self.program.operations[number]
        rule = operation.rule
        if rule is None:
            return ()
        values = (*operation.operands, *operation.results)
        mappings = (*rule.operands, *rule.results)
        return [
            list(self._factors(rule, self.values[value], mapping))
            for value, mapping in zip(values, mappings, strict=False)
        ]

    def _factors(
        self, rule: Rule, value: Value, mapping: Sequence[Sequence[int]]
    ) -> Iterator[_Placed]:
        """Mesh axes split the factors of a dimension one after the other, the major ones first.

        One that is larger than a factor goes on to the next, in parts.
        """
        for dimension, (axes, factors) in enumerate(zip(value.spec or (), mapping, strict=False)):
            left = [[factor, rule.sizes[factor]] for factor in factors]
            for mesh_axis in axes:
                start, rest = self._part(mesh_axis)
                while rest > 1:
                    while len(left) > 1 and left[0][1] == 1:
                        left.pop(0)
                    size, factor = rest, left[0][0] if left else None
                    if len(left) > 1 and left[0][1] % rest:
                        size, factor = (rest, None) if rest % left[0][1] else (left[0][1], factor)
                    is_all = size == self._part(mesh_axis)[1]
                    part = mesh_axis if is_all else f"{base(mesh_axis)}:({start}){size}"
                    yield _Placed(dimension, factor, part)
                    if factor is not None:
                        left[0][1] = max(left[0][1] // size, 1)
                    start, rest = start * size, rest // size

    def _on_factor(self, operation: Operation, place: int, factor: int) -> Sequence[str]:
        placed = self._placed(operation.number)
        axes = placed[place] if place < len(placed) else ()
        return [axis.mesh_axis for axis in axes if axis.factor == factor]

    def _part(self, mesh_axis: str) -> tuple[int, int]:
        """What is in front of a part of a mesh axis, and its size."""
        name, _, part = mesh_axis.partition(":(")
        start, _, size = part.partition(")")
        return (int(start), int(size)) if part else (1, self.program.mesh[name])

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
        for operation in self.program.operations:
            for n, value in enumerate(operation.results):
                spec = self.values[value].spec or ()
                for i in [*range(len(self.values[value].shape)), _ENDED]:
                    has = {*map(base, spec[i])} if spec and i != _ENDED else set()
                    sources = [*self._sources(operation, n, i)]
                    for name in self.program.mesh.keys() - has:
                        places = [(*source, name) for source in sources]
                        here = [at.get((operation.number, place), ()) for place in places]
                        if i == _ENDED and _has_ends(operation.rule):
                            places = []
                        lacking.append(((value, i, name), set[int]().union(*here), places))
        found: dict[_Place, set[int]] = {}
        size = -1
        # Once through the program, and once more for each time that a loop hands a loss on.
        while size != (size := sum(map(len, found.values()))):
            for place, here_lost, places in lacking:
                if lost := here_lost.union(*(found.get(one, ()) for one in places)):
                    found[place] = lost
        return found

    def _sources(self, operation: Operation, n: int, dimension: int) -> Iterator[tuple[int, int]]:
        """The dimensions of operands that belong together with one of a result."""
        rule = operation.rule
        for number, value in enumerate(operation.operands):
            if dimension == _ENDED:
                yield value, _ENDED
            elif rule is None:
                yield from ((value, i) for i in range(len(self.values[value].shape)))
            elif number < len(rule.operands):
                factors = {*rule.results[n][dimension]}
                dims = enumerate(rule.operands[number])
                yield from ((value, i) for i, own in dims if factors.intersection(own))


def _factors_of(values: Sequence[Sequence[Sequence[int]]]) -> set[int]:
    return {factor for dims in values for dim in dims for factor in dim}


def _has_ends(rule: Rule | None) -> bool:
    """Whether dimensions of operands end at an operation."""
    return rule is not None and not _factors_of(rule.operands) <= _factors_of(rule.results)
