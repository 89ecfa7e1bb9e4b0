"""Which ends of a graph are reached from a place in it."""

from collections.abc import Callable, Hashable, Iterable, Iterator
from typing import Generic, TypeVar

_Place = TypeVar("_Place", bound=Hashable)


class ReachableEnds(Generic[_Place]):
    """The ends that are reached from each place of a graph, each place looked at once for all.

    Places that reach each other reach the same ends (strongly connected components: Tarjan 1972,
    SIAM Journal on Computing 1).

    Args:
        following: The places one step on.
        end: The number of the end that a place is; None of any other place.

    >>> ring = {"a": "b", "b": "ca", "c": "b5", "5": ""}
    >>> ends = ReachableEnds(ring.__getitem__, lambda place: int(place) if place == "5" else None)
    >>> ends.of("a"), ends.of("5")
    ((5,), (5,))
    """

    def __init__(
        self, following: Callable[[_Place], Iterable[_Place]], end: Callable[[_Place], int | None]
    ) -> None:
        self._following = following
        self._end = end
        # A bit for each end.
        self._known: dict[_Place, int] = {}

    def of(self, *places: _Place) -> tuple[int, ...]:
        """The numbers of the ends that are reached from some places, these places included."""
        found = 0
        for place in places:
            if place not in self._known:
                self._explore(place)
            found |= self._known[place]
        return tuple(number for number in range(found.bit_length()) if found >> number & 1)

    def _explore(self, start: _Place) -> None:
        """Walks to all that is not known yet; components are known as soon as they are through."""
        open_ = {start: self._opened(start, 0)}
        way: list[tuple[_Place, Iterator[_Place]]] = [(start, iter(self._following(start)))]
        count = 1
        while way:
            place, others = way[-1]
            mine = open_[place]
            for other in others:
                if other in self._known:
                    mine.ends |= self._known[other]
                elif other in open_:
                    mine.lowest = min(mine.lowest, open_[other].number)
                else:
                    open_[other] = self._opened(other, count)
                    way.append((other, iter(self._following(other))))
                    count += 1
                    break
            else:
                way.pop()
                if way:
                    before = open_[way[-1][0]]
                    before.ends |= mine.ends
                    before.lowest = min(before.lowest, mine.lowest)
                if mine.lowest == mine.number:
                    self._close(place, mine.ends, open_)

    def _opened(self, place: _Place, number: int) -> "_Open":
        end = self._end(place)
        return _Open(number, 0 if end is None else 1 << end)

    def _close(self, first: _Place, ends: int, open_: "dict[_Place, _Open]") -> None:
        """All that was opened since the first place of a component is of that component."""
        while True:
            place, _ = open_.popitem()
            self._known[place] = ends
            if place == first:
                return


class _Open:
    """A place whose component is not through yet."""

    __slots__ = ("ends", "lowest", "number")

    def __init__(self, number: int, ends: int) -> None:
        self.number = self.lowest = number
        self.ends = ends
