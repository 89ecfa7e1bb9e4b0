"""What the operations of a program say of its logical axes, before any has a name."""

import collections
import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence, Set
from typing import TypeAlias

from penzai_shard.choosing.dimensions import DimensionClass
from penzai_shard.choosing.naming.cut_runs import Runs, cut_runs
from penzai_shard.choosing.naming.traced_call import CalledArray, TracedCall
from penzai_shard.library_apis.shardy_records import PRODUCTS
from penzai_shard.rule_kinds import LogicalAxis
from penzai_shard.sharding_propagation import FLOW, Operation, walk

Classes: TypeAlias = frozenset[DimensionClass]

DOT = "stablehlo.dot_general"
# What hands on what it takes, in another form.
_MOVES = frozenset(
    {
        FLOW,
        "stablehlo.broadcast_in_dim",
        "stablehlo.convert",
        "stablehlo.optimization_barrier",
        "stablehlo.reshape",
        "stablehlo.transpose",
    }
)
# The same, where what is handed on may be a part.
_FORMS = _MOVES | {"stablehlo.dynamic_slice", "stablehlo.slice"}
_SCALES = frozenset({"stablehlo.multiply", "stablehlo.divide"})
# So many values are looked at on the way to what comes of one.
_FAR = 1000


@dataclasses.dataclass(frozen=True)
class Product:
    """A matrix product, or a convolution.

    Attributes:
        operation: The operation.
        contracted: What is summed over.
        batch: What both operands and the result have.
        free: What the result has of each operand alone.
        weight: Which of its operands is computed from weights alone; None if none is, or both.
    """

    operation: Operation
    contracted: Classes
    batch: Classes
    free: tuple[Classes, Classes]
    weight: int | None

    @property
    def of_result(self) -> Classes:
        """What the result has."""
        return self.batch | self.free[0] | self.free[1]

    @property
    def has_weight(self) -> bool:
        """Whether one of its operands is of weights alone."""
        return self.weight is not None

    @property
    def data(self) -> int:
        """The operand that is not of weights alone."""
        assert self.weight is not None
        return self.operation.operands[1 - self.weight]

    @property
    def weight_operand(self) -> int:
        """The operand that is of weights alone."""
        assert self.weight is not None
        return self.operation.operands[self.weight]

    @property
    def made(self) -> Classes:
        """What the result has of the weights alone."""
        return frozenset() if self.weight is None else self.free[self.weight]


@dataclasses.dataclass(frozen=True)
class Lookup:
    """Rows that are taken out of an array by an index.

    Attributes:
        operation: The operation.
        rows: The class of what is looked up.
        others: The other classes of the array.
        index: The value of the indices.
    """

    operation: Operation
    rows: DimensionClass
    others: Classes
    index: int


class ProgramFacts:
    """What the operations of a traced call say.

    Attributes:
        call: The traced call.
        program: Its operations, without those that go back over others for a gradient.
        in_weights: The weights that have a class; those of length 1 are left out.
        of_inputs: The names of the classes of inputs that have one.
        from_inputs: The values that are computed from inputs.
        from_weights: The values that are computed from weights.
    """

    def __init__(self, call: TracedCall) -> None:
        self.call = call
        self.program = call.dimensions.forward
        self.in_weights: dict[DimensionClass, list[CalledArray]] = {}
        for weight in call.weights:
            for part in dict.fromkeys(weight.classes):
                if part.size > 1:
                    self.in_weights.setdefault(part, []).append(weight)
        self.of_inputs: dict[DimensionClass, LogicalAxis] = {}
        for each in call.inputs:
            for parts, name in zip(each.parts, each.names, strict=False):
                if name is not None and self._is_one(parts):
                    for part in parts:
                        self.of_inputs.setdefault(part, name)
        self.from_inputs = self.reached(array.value for array in call.inputs)
        self.from_weights = self.reached(array.value for array in call.weights)

    def reached(self, values: Iterable[int | None], last: float = math.inf) -> Set[int]:
        """The values that are computed from some, and these.

        Args:
            values: The values; None for none.
            last: The number of an operation: those behind it are not looked at.
        """
        start = [value for value in values if value is not None]
        return set(walk(start, lambda each: self._made_by(each, lambda one: one.number <= last)))

    def _made_by(self, value: int, counts: Callable[[Operation], bool]) -> Iterator[int]:
        """What those operations that count make of a value."""
        for user in self.program.users.get(value, ()):
            if counts(user):
                yield from user.results

    def classes(self, value: int) -> Classes:
        """The classes of a value."""
        return frozenset(p for parts in self.call.dimensions.of_value(value) for p in parts)

    @functools.cached_property
    def together(self) -> Mapping[DimensionClass, Classes]:
        """For each class those one of which always follows it in weights, and only it.

        Both are then one logical axis, which some operation looks at as a product: rotary
        embeddings of neighbours, say, split a projection in pairs.
        """
        before, behind = self._neighbours
        return {
            first: frozenset(each for each in seconds if each is not None)
            for first, seconds in behind.items()
            if all(each is not None and before[each] == {first} for each in seconds)
            and len({each.size for each in seconds if each is not None}) == 1
        }

    @functools.cached_property
    def leads(self) -> Mapping[DimensionClass, DimensionClass]:
        """For each class the one that stands before it in all weights, in one dimension with it.

        So the groups do that a norm, or a scale of what was quantised, makes of the embedding.
        """
        before, _ = self._neighbours
        return {
            second: first
            for second, firsts in before.items()
            if len(firsts) == 1
            for first in firsts
            if first is not None
        }

    @functools.cached_property
    def _neighbours(
        self,
    ) -> tuple[
        Mapping[DimensionClass, set[DimensionClass | None]],
        Mapping[DimensionClass, set[DimensionClass | None]],
    ]:
        """What stands before each class in dimensions of weights, and what behind it."""
        before: dict[DimensionClass, set[DimensionClass | None]] = collections.defaultdict(set)
        behind: dict[DimensionClass, set[DimensionClass | None]] = collections.defaultdict(set)
        for weight in self.call.weights:
            for parts in weight.parts:
                for first, second in zip((None, *parts), (*parts, None), strict=True):
                    if first is not None:
                        behind[first].add(second)
                    if second is not None:
                        before[second].add(first)
        return before, behind

    def _is_one(self, parts: Sequence[DimensionClass]) -> bool:
        """Whether parts are one logical axis, such as channels in the groups of a norm."""
        pairs = itertools.pairwise(parts)
        return all(second in self.together.get(first, ()) for first, second in pairs)

    @functools.cached_property
    def products(self) -> tuple[Product, ...]:
        """The matrix products and convolutions."""
        found = []
        for operation in self.program.operations:
            if operation.kind in PRODUCTS and operation.rule is not None:
                found.append(self._product(operation))
        return tuple(found)

    def _product(self, operation: Operation) -> Product:
        assert operation.rule is not None
        left, right = (
            {factor: number for number, factors in enumerate(dimensions) for factor in factors}
            for dimensions in operation.rule.operands
        )
        made = {factor for dimension in operation.rule.results[0] for factor in dimension}

        def classes(of: int, factors: Mapping[int, int], chosen: Iterable[int]) -> Classes:
            parts = self.call.dimensions.of_value(operation.operands[of])
            return frozenset(p for factor in chosen for p in parts[factors[factor]] if p.size > 1)

        both = left.keys() & right.keys()
        of_weights = [
            any(each in self._of_weights for each in self.moved_from(operand))
            for operand in operation.operands
        ]
        return Product(
            operation,
            classes(0, left, both - made),
            classes(0, left, both & made),
            (
                classes(0, left, made & left.keys() - both),
                classes(1, right, made & right.keys() - both),
            ),
            of_weights.index(True) if sum(of_weights) == 1 else None,
        )

    @functools.cached_property
    def by_result(self) -> Mapping[int, Product]:
        """The products by the values that they make."""
        return {each.operation.results[0]: each for each in self.products}

    def nearest_products(self, value: int) -> Sequence[Product]:
        """The products that a value is computed from, with none in between."""
        made = self.by_result
        return [made[each] for each in self.before(value, made) if each in made]

    @functools.cached_property
    def made_by_weights(self) -> Mapping[int, Operation]:
        """The matrix products with weights by the values that they make."""
        made = {value: each.operation for value, each in self.by_result.items() if each.has_weight}
        return {value: operation for value, operation in made.items() if operation.kind == DOT}

    @functools.cached_property
    def with_weights(self) -> tuple[Product, ...]:
        """The products of weights with what is not."""
        return tuple(each for each in self.products if each.weight is not None)

    @functools.cached_property
    def mapped_over(self) -> Classes:
        """What products with weights do side by side and nothing else: members, or stages."""
        side_by_side = {part for each in self.with_weights for part in each.batch}
        used = {p for each in self.with_weights for p in (*each.contracted, *each.made)}
        return frozenset(side_by_side - used)

    def is_of_a_weight(self, product: Product) -> bool:
        """Whether an operand of a product is a weight itself, in whatever form."""
        return product.weight is not None and self.is_weight(product.weight_operand)

    def is_weight(self, value: int) -> bool:
        """Whether a value is a weight, or a part of one, in whatever form and scale."""
        if any(each in self._given for each in self.moved_from(value)):
            return True
        is_of_weights = value in self.from_weights and value not in self.from_inputs
        return is_of_weights and self._is_scaled(value)

    def _is_scaled(self, value: int) -> bool:
        """Whether all that makes a value is weights, moved and scaled, as what was quantised is."""
        makers = self.program.makers
        before = walk([value], lambda each: sources_of(makers[each]) if each in makers else ())
        return all(each not in makers or makers[each].kind in _FORMS | _SCALES for each in before)

    @functools.cached_property
    def _of_weights(self) -> Set[int]:
        """What is computed from weights alone, and what of it a choice that is computed takes."""
        chosen = {
            lookup.operation.results[0]
            for lookup in self.lookups
            if lookup.operation.operands[0] not in self.from_inputs
            and lookup.index in self.from_weights
        }
        return (self.from_weights - self.from_inputs) | chosen

    @functools.cached_property
    def _given(self) -> Set[int]:
        return {weight.value for weight in self.call.weights if weight.value is not None}

    def moved_from(self, value: int) -> Iterator[int]:
        """A value, and those that it is another form of."""
        yield value
        while (maker := self.program.makers.get(value)) and maker.kind in _FORMS:
            sources = sources_of(maker)
            if len(sources) != 1 and maker.kind == FLOW:
                return
            value = sources[0]
            yield value

    @functools.cached_property
    def runs(self) -> Mapping[DimensionClass, Runs]:
        """What slices cut out of each class, and lookups by a number that is known beforehand."""
        found = {part: dict(runs) for part, runs in cut_runs(self.call.dimensions).items()}
        given = self.from_inputs | self.from_weights
        for lookup in self.lookups:
            if lookup.index in given or math.prod(self.program.values[lookup.index].shape) != 1:
                continue
            # The number does not show; as many lookups as elements take one each, as in unbinding.
            runs = found.setdefault(lookup.rows, {})
            runs[len(runs), len(runs) + 1] = [(lookup.operation.results[0], ())]
        return found

    @functools.cached_property
    def lookups(self) -> tuple[Lookup, ...]:
        """What is looked up by an index that is not known beforehand."""
        found = []
        for operation in self.program.operations:
            rule = operation.rule
            if operation.kind != "stablehlo.gather" or rule is None:
                continue
            table, index = operation.operands
            parts = self.call.dimensions.of_value(table)
            rows = [
                number
                for number, factors in enumerate(rule.operands[0])
                if rule.reduced.intersection(factors)
            ]
            if len(rows) == 1 and len(parts[rows[0]]) == 1:
                others = {p for n, each in enumerate(parts) if n != rows[0] for p in each}
                found.append(Lookup(operation, parts[rows[0]][0], frozenset(others), index))
        return tuple(found)

    def linear_origins(self, value: int) -> Iterator[Operation]:
        """What makes a value, but for moves and for scales that are not data."""
        makers = self.program.makers

        def sources(value: int) -> Sequence[int]:
            if value not in makers:
                return ()
            if makers[value].kind in _MOVES:
                return sources_of(makers[value])
            scaled = [each for each in makers[value].operands if each in self.from_inputs]
            return scaled if makers[value].kind in _SCALES and len(scaled) == 1 else ()

        return (
            makers[each] for each in walk([value], sources) if each in makers and not sources(each)
        )

    def after(self, value: int, until: Set[str]) -> Iterator[Operation]:
        """The operations that a value comes to, the nearest first, those of some kinds last.

        Args:
            value: The value.
            until: Kinds of operations behind which nothing is looked at.
        """
        for each in self.made_of(value, until):
            yield from self.program.users.get(each, ())

    def made_of(self, value: int, until: Set[str]) -> Iterator[int]:
        """A value, and those that are computed from it, the nearest first.

        Args:
            value: The value.
            until: Kinds of operations whose results are left out.
        """
        return walk(
            [value], lambda each: self._made_by(each, lambda one: one.kind not in until), _FAR
        )

    def before(self, value: int, until: Container[int] = ()) -> Iterator[int]:
        """A value, and those that it is computed from, the nearest first.

        Within one round of a loop.

        Args:
            value: The value.
            until: Values behind which nothing is looked at.
        """

        def sources(each: int) -> Sequence[int]:
            maker = self.program.makers.get(each)
            if maker is None or each in until:
                return ()
            found = sources_of(maker)
            return found if maker.kind != FLOW or len(found) == 1 else ()

        return walk([value], sources, _FAR)

    def kinds_before(self, value: int, until: Container[int] = ()) -> Set[str]:
        """The kinds of the operations that make a value, and what it is computed from."""
        makers = self.program.makers
        return {makers[each].kind for each in self.before(value, until) if each in makers}


def sources_of(operation: Operation) -> Sequence[int]:
    """What an operation takes; what a loop hands on as it was has one source."""
    if operation.kind == FLOW and len(operation.operands) > 1:
        return [each for each in operation.operands if each not in operation.results]
    return operation.operands
