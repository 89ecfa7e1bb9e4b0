"""Ties the dimensions of all values of a program that are one logical axis.

Shapes say nothing here. Equal lengths are never a reason; only an operation is.
"""

# Each dimension of each value is an element, and elements that are one logical axis are a class:
# union-find. A class may be a product, and then is a list of parts, the major one first: so a
# reshape of (embedding, 32) to (embedding, 8, 4) cuts the class of the 32 into parts of 8 and 4,
# wherever else that class occurs. Two lists are made one from the minor end: of two parts the
# longer is cut by the shorter, then both are one. If it does not divide, that is a conflict, and
# nothing is tied: (4, 6) reshaped to (6, 4) has no common parts but the whole.
# Shardy's rule of an operation numbers factors; dimensions with one factor are one. Dimensions of
# length 1 are tied to nothing, nor are those that an operation changes in length. Loops and
# branches hand values on, and so tie; and what one loop takes element by element, at an index that
# it counts, is one logical axis of that loop, as layers are.

import collections
import dataclasses
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence

from penzai_shard.propagation.flat import FLOW, Operation, Propagated

# The elements of the dimensions of each value.
Elements = Sequence[tuple[int, ...]]

# In results of these, places along some dimensions are another axis: ranks, frequencies.
_REORDERING = frozenset({"chlo.top_k", "stablehlo.fft", "stablehlo.sort"})


@dataclasses.dataclass(frozen=True, order=True)
class AxisClass:
    """A logical axis of a program.

    Attributes:
        number: Its place: arguments come first, then operations.
        size: Its length.
    """

    number: int
    size: int


Parts = tuple[AxisClass, ...]
"""What a dimension is the product of, the major part first."""

Dims = Sequence[tuple[Parts, ...]]
"""For each value of a program the parts of each of its dimensions."""


def length_of(parts: Iterable[AxisClass]) -> int:
    """The length of a dimension that is the product of some classes.

    >>> length_of([AxisClass(0, 2), AxisClass(1, 4)])
    8
    """
    return math.prod(part.size for part in parts)


class Ties:
    """Union-find over elements with a length, each of which may turn out to be a product.

    Attributes:
        sizes: The length of each element.
        count: How many pairs have been tied so far.

    >>> ties = Ties()
    >>> merged, heads, projection = ties.new(24), ties.new(4), ties.new(6)
    >>> ties.unify([merged], [heads, projection])
    True
    >>> ties.parts([merged]) == [heads, projection]
    True
    """

    def __init__(self) -> None:
        self.sizes: list[int] = []
        self.count = 0
        self._parents: list[int] = []
        self._cut: dict[int, tuple[int, int]] = {}

    def new(self, size: int) -> int:
        """A new element, one with no other."""
        self._parents.append(len(self._parents))
        self.sizes.append(size)
        return len(self.sizes) - 1

    def parts(self, elements: Iterable[int]) -> list[int]:
        """The uncut parts of a product, the major first, without those of length 1."""
        found = []
        for element in elements:
            root = self.root(element)
            if root in self._cut:
                found += self.parts(self._cut[root])
            elif self.sizes[root] != 1:
                found.append(root)
        return found

    def unify(self, first: Sequence[int], second: Sequence[int]) -> bool:
        """Makes two products one; False if their lengths do not allow it."""
        left, right = self.parts(first), self.parts(second)
        while left != right:
            # Asked in each turn, as what was just cut may stand in what is left.
            if not self._can_be_one(left, right):
                return False
            a, b = left.pop(), right.pop()
            size = min(self.sizes[a], self.sizes[b])
            left += self._split_off(a, size)
            right += self._split_off(b, size)
            a, b = self.parts([a])[-1], self.parts([b])[-1]
            if a != b:
                self.count += 1
                # The older element stays the root, so that classes are numbered as values are.
                self._parents[max(a, b)] = min(a, b)
            left, right = self.parts(left), self.parts(right)
        return True

    def _can_be_one(self, left: Sequence[int], right: Sequence[int]) -> bool:
        """Whether both have one length, and the ends of their parts divide one another."""
        sizes = [[self.sizes[part] for part in reversed(side)] for side in (left, right)]
        ends = sorted({end for side in sizes for end in itertools.accumulate(side, int.__mul__)})
        is_equal = math.prod(sizes[0]) == math.prod(sizes[1]) > 0
        return is_equal and all(after % before == 0 for before, after in itertools.pairwise(ends))

    def _split_off(self, element: int, minor: int) -> tuple[int, ...]:
        """Cuts a part of some length off the minor end; what is left."""
        if self.sizes[element] == minor:
            return ()
        self._cut[element] = (self.new(self.sizes[element] // minor), self.new(minor))
        return self._cut[element][:1]

    def root(self, element: int) -> int:
        """The oldest element that is one with an element."""
        parents = self._parents
        while parents[element] != element:
            parents[element] = parents[parents[element]]
            element = parents[element]
        return element


def number_classes(ties: Ties, elements: Elements) -> Dims:
    """The classes of all dimensions; one of length 1 is a class by itself."""
    found: dict[int, AxisClass] = {}

    def number(element: int) -> Parts:
        parts = ties.parts([element]) or [ties.root(element)]
        return tuple(
            found.setdefault(part, AxisClass(len(found), ties.sizes[part])) for part in parts
        )

    return [tuple(map(number, dims)) for dims in elements]


# Operations


def tie_operations(program: Propagated, ties: Ties, elements: Elements) -> None:
    """Ties the dimensions of all values as operations and loops do."""
    for operation in program.operations:
        for left, right in _group_by_factors(operation, ties, elements):
            ties.unify(left, right)
    stepped: dict[tuple[int, int], int] = {}
    for operation, dim, counter in indices_of_loops(program):
        element = elements[operation.operands[0]][dim]
        first = stepped.setdefault((counter, ties.sizes[element]), element)
        ties.unify([first], [element])


def _group_by_factors(
    operation: Operation, ties: Ties, elements: Elements
) -> Iterator[tuple[list[int], list[int]]]:
    """Each dimension with the factors of the rule that it is the product of."""
    rule = operation.rule
    if rule is None:
        return
    sizes, results = rule.sizes, rule.results
    if operation.kind in _REORDERING:
        # What is reordered gets factors that operands do not have.
        shift = len(sizes)
        sizes = sizes * 2
        results = tuple(
            tuple(tuple(f + shift * (f in rule.replicated) for f in dim) for dim in value)
            for value in results
        )
    of_factor: dict[int, int] = {}
    products = []
    values = (*operation.operands, *operation.results)
    for value, dims in zip(values, (*rule.operands, *results), strict=False):
        for element, factors in zip(elements[value], dims, strict=False):
            length = ties.sizes[element]
            if length == 1 or math.prod(sizes[factor] for factor in factors) != length:
                continue
            if len(factors) == 1:
                yield [of_factor.setdefault(factors[0], element)], [element]
            else:
                products.append((element, factors))
    # Last, as a factor that is a whole dimension is best tied to that.
    for element, factors in products:
        for factor in factors:
            if factor not in of_factor:
                of_factor[factor] = ties.new(sizes[factor])
        yield [element], [of_factor[factor] for factor in factors]


# Loops


def indices_of_loops(program: Propagated) -> Iterator[tuple[Operation, int, int]]:
    """All that loops take element by element, as ``scan`` does with what it scans.

    Yields:
        The operation, the dimension of its first operand, and the value that the loop counts, which
        tells loops apart.
    """
    for operation in program.operations:
        if operation.kind != "stablehlo.dynamic_slice":
            continue
        values = operation.operands[0], operation.results[0]
        whole, taken = (program.values[value].shape for value in values)
        for dim, index in enumerate(operation.operands[1:]):
            if taken[dim] == 1 < whole[dim]:
                counter = _find_counter(program, index)
                if counter is not None:
                    yield operation, dim, counter


def _find_counter(program: Propagated, index: int) -> int | None:
    """The one number that a loop counts from which an index is computed, and nothing else is."""
    waiting, seen, counters = [index], {index}, set()
    while waiting:
        value = waiting.pop()
        maker = program.makers.get(value)
        if maker is None or program.values[value].shape:
            return None
        # It comes from before the loop and from the last turn, so that it has two sources.
        if maker.kind == FLOW and len({*maker.operands} - {value}) > 1:
            counters.add(value)
            continue
        waiting += {*maker.operands} - seen
        seen.update(maker.operands)
    return counters.pop() if len(counters) == 1 else None


def walk(
    start: Iterable[int], following: Callable[[int], Iterable[int]], most: float = math.inf
) -> Iterator[int]:
    """Some values and those that follow them, each once, the nearest first."""
    seen = dict.fromkeys(start)
    waiting = collections.deque(seen)
    while waiting:
        value = waiting.popleft()
        yield value
        for each in following(value) if len(seen) < most else ():
            if each not in seen:
                seen[each] = None
                waiting.append(each)
