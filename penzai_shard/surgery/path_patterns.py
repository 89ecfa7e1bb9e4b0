"""Matching path patterns while a tree is walked, so that hopeless subtrees are never entered.

A pattern is read as in ``tree_paths.path_matches``, with one addition: each part of it matches
the key of a node, or the name of the node's type in snake case. ``**/attention/**`` thus finds
what is under the key ``attention``, and the ``pz.nn.Attention`` layers and what is in them.
"""

import fnmatch
import functools

from penzai_shard.tree_paths import split_path


def first_position(parts: tuple[str, ...]) -> int:
    """The position of the root.

    A position is a set of places in a pattern, as bits of an integer: bit ``i`` says that the path
    so far can be read by the first ``i`` parts. None says that nothing below can match.

    >>> first_position(("**", "mlp")), first_position(("mlp",))
    (3, 1)
    """
    return _close(parts, 1)


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
def next_position(
    parts: tuple[str, ...], position: int, key: str, names: tuple[str, ...]
) -> int | None:
    """The position of a child.

    Args:
        parts: The parts of the pattern.
        position: The position of the child's parent.
        key: The child's key.
        names: What the child is called beside it.

    Returns:
        The position, None if neither the child nor anything below it can match.

    >>> next_position(("sublayers", "linear"), 2, "0", ("linear",))
    4
    """
    by_key = position
    for text in split_path(key):
        by_key = _read(parts, by_key, text)
    result = by_key
    for name in names:
        result |= _read(parts, position, name)
    # Beyond the end of the pattern there is nothing more to read.
    return result or None
