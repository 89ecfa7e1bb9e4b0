"""Matching path patterns while a tree is walked, so that hopeless subtrees are never entered.

A pattern is read as in ``tree_paths.path_matches``, with one addition: each part of it matches
the key of a node, or the name of the node's type in snake case. ``**/attention/**`` thus finds
what lies under the key ``attention``, and the ``pz.nn.Attention`` layers and what lies in them.
"""

import fnmatch
import functools
from typing import Any

from penzai_shard.surgery.tree_nodes import names_of
from penzai_shard.tree_paths import split_path


class PathPattern:
    """A path pattern, and how far into it a walk has come.

    A position is a set of places in the pattern, as bits of an integer: bit ``i`` says that the
    path so far can be read by the first ``i`` parts. None says that nothing below can match.

    Args:
        pattern: The pattern's text.
    """

    def __init__(self, pattern: str) -> None:
        self.parts = split_path(pattern)
        self._end = 1 << len(self.parts)

    def start(self) -> int | None:
        """The position of the root."""
        return _close(self.parts, 1)

    def step(self, position: int | None, key: Any, child: Any) -> int | None:
        """The position of a child.

        Args:
            position: The position of its parent.
            key: The child's key.
            child: The child.

        Returns:
            The position, None if neither the child nor anything below it can match.
        """
        return None if position is None else _step(self.parts, position, str(key), names_of(child))

    def ends_at(self, position: int | None) -> bool:
        """Whether the whole pattern is read at a position."""
        return position is not None and bool(position & self._end)


def _close(parts: tuple[str, ...], position: int) -> int:
    for i, part in enumerate(parts):
        if part == "**" and position >> i & 1:
            position |= 1 << (i + 1)
    return position


def _read(parts: tuple[str, ...], position: int, text: str) -> int:
    result = 0
    for i, part in enumerate(parts):
        if position >> i & 1:
            if part == "**":
                result |= 1 << i
            elif fnmatch.fnmatchcase(text, part):
                result |= 1 << (i + 1)
    return _close(parts, result)


@functools.lru_cache(maxsize=65536)
def _step(parts: tuple[str, ...], position: int, key: str, names: tuple[str, ...]) -> int | None:
    by_key = position
    for text in split_path(key):
        by_key = _read(parts, by_key, text)
    result = by_key
    for name in names:
        result |= _read(parts, position, name)
    # Beyond the end of the pattern there is nothing more to read.
    return result or None
