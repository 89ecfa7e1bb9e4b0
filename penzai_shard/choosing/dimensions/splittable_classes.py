"""Classes of things of equal length that can be split into ordered parts."""

import itertools
import math
from collections.abc import Iterable, Sequence


class SplittableClasses:
    """Union-find over elements with a length, each of which may turn out to be a product.

    An element that is split has parts, the slowest first, and so has every element that is one
    with it, then and later.

    Attributes:
        sizes: The length of each element.
        ties: How many pairs have been tied so far.

    >>> classes = SplittableClasses()
    >>> merged, heads, projection = classes.new(24), classes.new(4), classes.new(6)
    >>> classes.unify([merged], [heads, projection])
    True
    >>> classes.parts(merged) == [heads, projection]
    True
    """

    def __init__(self) -> None:
        self.sizes: list[int] = []
        self.ties = 0
        self._parents: list[int] = []
        self._split: dict[int, tuple[int, ...]] = {}

    def new(self, size: int) -> int:
        """A new element, one with no other."""
        self._parents.append(len(self._parents))
        self.sizes.append(size)
        return len(self.sizes) - 1

    def parts(self, element: int) -> list[int]:
        """The unsplit parts of an element, the slowest first; elements that are one have the same.

        An element of length 1 that others are not one with is its own part.
        """
        root = self._root(element)
        if root not in self._split:
            return [root]
        return [part for each in self._split[root] for part in self.parts(each)]

    def of_all(self, elements: Iterable[int]) -> list[int]:
        """The parts of several elements, one after the other, without those of length 1."""
        return [p for each in elements for p in self.parts(each) if self.sizes[p] != 1]

    def unify(self, first: Sequence[int], second: Sequence[int]) -> bool:
        """Makes two products one: both are refined, then tied part by part.

        Elements of length 1 tie nothing.

        Returns:
            Whether that can be. If their lengths do not allow it, nothing is tied.
        """
        if len(first) == len(second) == 1 and self._unify_whole(first[0], second[0]):
            return True
        left, right = self.of_all(first), self.of_all(second)
        if left == right:
            return True
        if not self._can_be_one(left, right):
            return False
        while left and right:
            # The fastest first; both products are equal, so both end together.
            a, b = left.pop(), right.pop()
            size_a, size_b = self.sizes[a], self.sizes[b]
            if a == b:
                continue
            if size_a == size_b:
                self._unify_whole(a, b)
            elif size_a > size_b:
                slower, faster = self._cut(a, size_b)
                self._unify_whole(faster, b)
                left.append(slower)
            else:
                slower, faster = self._cut(b, size_a)
                self._unify_whole(faster, a)
                right.append(slower)
            # What was just tied or split may stand in what is left.
            left, right = self.of_all(left), self.of_all(right)
            if not self._can_be_one(left, right):
                return False
        return True

    def _unify_whole(self, first: int, second: int) -> bool:
        """Ties two elements without parts and of equal lengths, as nearly all are."""
        a, b = self._root(first), self._root(second)
        if a == b:
            return True
        if a in self._split or b in self._split or self.sizes[a] != self.sizes[b]:
            return False
        if self.sizes[a] != 1:
            self.ties += 1
            # The older element stays the root, so that numbers follow the program.
            self._parents[max(a, b)] = min(a, b)
        return True

    def _can_be_one(self, left: Sequence[int], right: Sequence[int]) -> bool:
        """Whether the ends of both products' parts, from the fastest, divide one another."""
        ends = sorted(set(self._ends(left)) | set(self._ends(right)))
        return math.prod(self.sizes[p] for p in left) == math.prod(
            self.sizes[p] for p in right
        ) and all(after % before == 0 for before, after in itertools.pairwise(ends))

    def _ends(self, parts: Sequence[int]) -> Iterable[int]:
        return itertools.accumulate((self.sizes[p] for p in reversed(parts)), int.__mul__)

    def _cut(self, element: int, faster: int) -> tuple[int, int]:
        parts = self.new(self.sizes[element] // faster), self.new(faster)
        self._split[element] = parts
        return parts

    def _root(self, element: int) -> int:
        parents = self._parents
        while parents[element] != element:
            parents[element] = parents[parents[element]]
            element = parents[element]
        return element
