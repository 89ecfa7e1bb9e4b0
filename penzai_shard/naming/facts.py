"""Says what the operations of a traced call do with its logical axes, before any has a name.

A value is *of weights* if it is computed from them and from no input. Most facts are about products
of a value of weights with data, and about what is between two of them.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence, Set
from typing import Any

from penzai_shard.naming.ties import AxisClass, Parts, length_of, walk
from penzai_shard.naming.trace import Call, CalledArray
from penzai_shard.propagation.flat import FLOW, Operation

Classes = frozenset[AxisClass]

DOT = "stablehlo.dot_general"
PRODUCTS = frozenset({DOT, "stablehlo.convolution"})
# What hands on what it takes, in another form.
_MOVES = frozenset({FLOW, "sdy.sharding_constraint"}) | {
    f"stablehlo.{kind}" for kind in ("broadcast_in_dim", "convert", "reshape", "transpose")
}
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
        free: What the result has only of the first operand, and only of the second.
        weight: Which of its operands is of weights; None if none is, or both.
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
    def made(self) -> Classes:
        """What the result has only of weights."""
        return frozenset() if self.weight is None else self.free[self.weight]

    @property
    def data(self) -> int:
        """The operand that is not of weights; for products with a ``weight``."""
        assert self.weight is not None
        return self.operation.operands[1 - self.weight]

    @property
    def weight_operand(self) -> int:
        """The operand that is of weights; for products with a ``weight``."""
        assert self.weight is not None
        return self.operation.operands[self.weight]


@dataclasses.dataclass(frozen=True)
class Lookup:
    """Rows that are taken out of an array by an index that is computed.

    Attributes:
        operation: The operation.
        rows: The class of what is looked up.
        others: The other classes of the array.
        index: The value of the indices.
        is_table: Whether the array is computed from no input.
    """

    operation: Operation
    rows: AxisClass
    others: Classes
    index: int
    is_table: bool


Runs = Mapping[tuple[int, int], Sequence[tuple[int, Parts]]]
"""By start and end in a class: the values that are cut out there, and the parts of each."""


class Facts:
    """What the operations of a traced call say.

    Attributes:
        call: The traced call.
        program: Its operations, without those of gradients.
        in_weights: The weights that have a class; those of length 1 are left out.
        of_inputs: The names of the classes of inputs that have one.
        makers: The operation that makes each value.
        users: The operations that take each value.
        from_inputs: The values that are computed from inputs.
        from_weights: The values that are computed from weights.
    """

    def __init__(self, call: Call) -> None:
        self.call, self.program = call, call.program
        self.in_weights: dict[AxisClass, list[CalledArray]] = {}
        for weight in call.weights:
            for part in dict.fromkeys(weight.classes):
                if part.size > 1:
                    self.in_weights.setdefault(part, []).append(weight)
        self.of_inputs: dict[AxisClass, Any] = {}
        for each in call.inputs:
            for parts, name in zip(each.parts, each.names, strict=False):
                if name is not None and len(parts) == 1:
                    self.of_inputs.setdefault(parts[0], name)
        self.makers, self.users = self.program.makers, self.program.users
        self.from_inputs = self.reached(array.value for array in call.inputs)
        self.from_weights = self.reached(array.value for array in call.weights)

    def classes(self, value: int) -> Classes:
        """The classes of a value."""
        return frozenset(part for parts in self.call.dims[value] for part in parts)

    def neighbours(self, part: AxisClass) -> Set[AxisClass]:
        """The other classes of the weights that contain this class."""
        weights = self.in_weights.get(part, ())
        return {each for weight in weights for each in weight.classes} - {part}

    # Operations

    @functools.cached_property
    def products(self) -> tuple[Product, ...]:
        """The matrix products and convolutions."""
        found = (each for each in self.program.operations if each.kind in PRODUCTS and each.rule)
        return tuple(map(self._read_product, found))

    def _read_product(self, operation: Operation) -> Product:
        assert operation.rule is not None
        left, right = (
            {factor: dim for dim, factors in enumerate(dims) for factor in factors}
            for dims in operation.rule.operands
        )
        made = {factor for dim in operation.rule.results[0] for factor in dim}

        def classes(side: int, factors: Iterable[int]) -> Classes:
            dims, places = self.call.dims[operation.operands[side]], (left, right)[side]
            return frozenset(p for f in factors for p in dims[places[f]] if p.size > 1)

        both = left.keys() & right.keys()
        free = classes(0, left.keys() & made - both), classes(1, right.keys() & made - both)
        origins = map(self.moved_from, operation.operands)
        of_weights = [not self._of_weights.isdisjoint(values) for values in origins]
        weight = of_weights.index(True) if sum(of_weights) == 1 else None
        return Product(operation, classes(0, both - made), classes(0, both & made), free, weight)

    @functools.cached_property
    def _of_weights(self) -> Set[int]:
        """What is of weights, and what is taken of it by a choice that is computed, as experts."""
        lookups = [each for each in self.lookups if each.is_table]
        chosen = {e.operation.results[0] for e in lookups if e.index in self.from_weights}
        return (self.from_weights - self.from_inputs) | chosen

    @functools.cached_property
    def with_weights(self) -> tuple[Product, ...]:
        """The products of what is of weights with what is not."""
        return tuple(each for each in self.products if each.weight is not None)

    @functools.cached_property
    def by_result(self) -> Mapping[int, Product]:
        """The products by the values that they make."""
        return {each.operation.results[0]: each for each in self.products}

    @functools.cached_property
    def made_by_weights(self) -> Mapping[int, Operation]:
        """The matrix products with weights, by the values that they make."""
        operations = (each.operation for each in self.with_weights)
        return {each.results[0]: each for each in operations if each.kind == DOT}

    @functools.cached_property
    def lookups(self) -> tuple[Lookup, ...]:
        """What is looked up along one dimension by an index that is computed."""
        found = []
        for operation in self.program.operations:
            if operation.kind != "stablehlo.gather" or operation.rule is None:
                continue
            table, index = operation.operands
            dims, reduced = self.call.dims[table], operation.rule.reduced
            rows = [n for n, dim in enumerate(operation.rule.operands[0]) if reduced & {*dim}]
            if len(rows) == 1 and len(dims[rows[0]]) == 1:
                others = (part for n, parts in enumerate(dims) if n != rows[0] for part in parts)
                own = dims[rows[0]][0], frozenset(others), index, table not in self.from_inputs
                found.append(Lookup(operation, *own))
        return tuple(found)

    @functools.cached_property
    def runs(self) -> Mapping[AxisClass, Runs]:
        """What is cut out of the major part of dimensions, without the minor ones in both."""
        found: dict[AxisClass, dict[tuple[int, int], list[tuple[int, Parts]]]] = {}
        for operation in (operation for operation in self.program.operations if operation.cuts):
            values = operation.operands[0], operation.results[0]
            dims = (self.call.dims[value] for value in values)
            for before, after, (start, end, stride) in zip(*dims, operation.cuts, strict=True):
                minor = before[1:]
                step, major = length_of(minor), after[: len(after) - len(minor)]
                is_even = stride == 1 and start % step == end % step == 0
                if is_even and before != after == (*major, *minor):
                    runs = found.setdefault(before[0], {})
                    cut = values[1], tuple(part for part in major if part.size > 1)
                    runs.setdefault((start // step, end // step), []).append(cut)
        return found

    # Walks

    def reached(self, values: Iterable[int | None], last: float = math.inf) -> Set[int]:
        """The values that are computed from some, and these.

        Args:
            values: The values; None for none.
            last: The number of an operation: those behind it are not looked at.
        """
        start = [value for value in values if value is not None]
        return set(walk(start, lambda each: self._made_of(each, lambda one: one.number <= last)))

    def after(self, value: int, until: Container[str]) -> Iterator[Operation]:
        """The operations that a value comes to, the nearest first, those of some kinds last."""
        for each in walk(
            [value], lambda each: self._made_of(each, lambda one: one.kind not in until), _FAR
        ):
            yield from self.users.get(each, ())

    def _made_of(self, value: int, counts: Callable[[Operation], bool]) -> Iterator[int]:
        """What those operations that count make of a value."""
        users = self.users.get(value, ())
        return (result for user in users if counts(user) for result in user.results)

    def before(self, value: int, until: Container[int] = ()) -> Iterator[int]:
        """A value, and those that it is computed from, the nearest first.

        Args:
            value: The value. Of loops only one turn is looked at.
            until: Values behind which nothing is looked at.
        """

        def sources(each: int) -> Sequence[int]:
            maker = self.makers.get(each)
            if maker is None or each in until:
                return ()
            found = sources_of(maker)
            return found if maker.kind != FLOW or len(found) == 1 else ()

        return walk([value], sources, _FAR)

    def kinds_before(self, value: int) -> Set[str]:
        """The kinds of the operations that a value is computed by."""
        return {self.makers[v].kind for v in self.before(value) if v in self.makers}

    def nearest_products(self, value: int) -> Sequence[Product]:
        """The products that a value is computed from, with none in between."""
        values = self.before(value, self.by_result)
        return [self.by_result[v] for v in values if v in self.by_result]

    def moved_from(self, value: int) -> Iterator[int]:
        """A value, and those that it is another form or a part of."""
        yield value
        while (maker := self.makers.get(value)) and maker.kind in _FORMS:
            sources = sources_of(maker)
            if len(sources) != 1 and maker.kind == FLOW:
                return
            value = sources[0]
            yield value

    def is_of_a_weight(self, product: Product) -> bool:
        """Whether an operand of a product is one weight, in whatever form."""
        given = {weight.value for weight in self.call.weights}
        is_of_one = product.weight is not None
        return is_of_one and not given.isdisjoint(self.moved_from(product.weight_operand))

    def linear_origins(self, value: int) -> Iterator[Operation]:
        """What makes a value, but for moves and for scales that are not data."""

        def sources(each: int) -> Sequence[int]:
            maker = self.makers.get(each)
            if maker is None or maker.kind in _MOVES:
                return sources_of(maker)
            scaled = [one for one in maker.operands if one in self.from_inputs]
            return scaled if maker.kind in _SCALES and len(scaled) == 1 else ()

        found = walk([value], sources)
        return (self.makers[each] for each in found if each in self.makers and not sources(each))


def sources_of(operation: Operation | None) -> Sequence[int]:
    """What an operation takes; what a loop hands on as it was has one source."""
    if operation is None:
        return ()
    if operation.kind == FLOW and len(operation.operands) > 1:
        return [each for each in operation.operands if each not in operation.results]
    return operation.operands
