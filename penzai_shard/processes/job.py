"""Joins and leaves a job of several processes, which end together."""

from collections.abc import Callable

_before_end: list[Callable[[], None]] = []


def before_end(function: Callable[[], None]) -> None:
    """Has a function called at the end of a job, while its processes can still agree."""
    _before_end.append(function)
