"""Walks from value to value through a program."""

import collections
import math
from collections.abc import Callable, Iterable, Iterator


def walk(
    start: Iterable[int], following: Callable[[int], Iterable[int]], most: float = math.inf
) -> Iterator[int]:
    """Some values and those that follow them, each once, the nearest first.

    Args:
        start: The values to begin at.
        following: What follows a value, such as what it is computed from.
        most: Once so many are found, none is followed further.

    >>> list(walk([6], lambda value: [value // 2, value // 3]))
    [6, 3, 2, 1, 0]
    """
    seen = dict.fromkeys(start)
    waiting = collections.deque(seen)
    yield from tuple(seen)
    while waiting and len(seen) < most:
        for value in following(waiting.popleft()):
            if value not in seen:
                seen[value] = None
                waiting.append(value)
                yield value
