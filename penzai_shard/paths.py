"""Writes paths of trees as text, matches them against patterns, and folds those of equal blocks.

A path is written with slashes: ``layers/0/weight``. Dots, slashes and brackets all part its pieces
when a pattern is matched, so that ``layers.*.weight`` finds both a nested dictionary and a flat one
whose keys are ``layers.0.weight``.
"""

import difflib
import functools
import itertools
import math
import re
from collections.abc import Hashable, Iterable, Sequence
from typing import Any

_SEPARATORS = re.compile(r"[./\[\]]+")
_WILDCARDS = re.compile(r"(\*+|\?)")
_NUMBER = re.compile(r"\d+")


def path_text(keys: Iterable[Any]) -> str:
    """A key path of JAX as text.

    >>> import jax
    >>> path_text([jax.tree_util.DictKey("layers"), jax.tree_util.SequenceKey(0)])
    'layers/0'
    """
    return "/".join(map(_key_text, keys))


def _key_text(key: Any) -> str:
    for attribute in ("key", "idx", "name"):
        if hasattr(key, attribute):
            return str(getattr(key, attribute))
    return str(key).lstrip(".")


def join_paths(*paths: str) -> str:
    """Paths one below the other; empty ones are left out.

    >>> join_paths("model", "", "w")
    'model/w'
    """
    return "/".join(filter(None, paths))


# Patterns


@functools.lru_cache(maxsize=4096)
def pattern_parts(text: str) -> tuple[str, ...]:
    """The pieces of a path or pattern that are compared one by one.

    >>> pattern_parts("layers[0].mlp/weight")
    ('layers', '0', 'mlp', 'weight')
    """
    return tuple(filter(None, _SEPARATORS.split(text)))


@functools.lru_cache(maxsize=4096)
def _expression(pattern: str, lazy: bool) -> re.Pattern[str]:
    more = "?" if lazy else ""
    expression = ""
    for part in pattern_parts(pattern):
        if part == "**":
            expression += f"((?:[^/]+/)*{more})"
            continue
        for piece in _WILDCARDS.split(part):
            if piece.startswith("*"):
                expression += f"([^/]*{more})"
            else:
                expression += "([^/])" if piece == "?" else re.escape(piece)
        expression += "/"
    return re.compile(expression)


def _match(pattern: str, path: str, lazy: bool = False) -> re.Match[str] | None:
    return _expression(pattern, lazy).fullmatch("".join(f"{p}/" for p in pattern_parts(path)))


def matches(pattern: str, path: str) -> bool:
    """Whether a whole path fits a pattern, or is the pattern to the letter.

    ``*`` and ``?`` match within one piece, ``**`` matches any number of pieces, also none.

    >>> matches("**/attention/**", "decoder/block_3/attention/query/weights")
    True
    >>> matches("layers.*.weight", "layers/3/mlp/weight")
    False
    """
    return pattern == path or _match(pattern, path) is not None


def rename(pattern: str, new: str, path: str) -> str | None:
    """The path that another becomes; None where the pattern fits in no way, or in several.

    Args:
        pattern: A pattern that fits ``path``.
        new: The new path, with the wildcards of the pattern in their order.
        path: The path.

    >>> rename("layers.*.w", "blocks/block_*/weights", "layers/3/w")
    'blocks/block_3/weights'
    """
    # If the greedy and the lazy reading are one, there is no other.
    readings = {m.groups() for lazy in (False, True) if (m := _match(pattern, path, lazy))}
    if len(readings) != 1:
        return None
    texts = iter(text.rstrip("/") for text in readings.pop())
    return _WILDCARDS.sub(lambda _: next(texts), new)


def nearest(name: object, known: Iterable[object]) -> str | None:
    """The known name that is most like a name, or None if none is. Only texts are compared.

    >>> nearest("embeding", ["embedding", "neurons"])
    'embedding'
    """
    if not isinstance(name, str):
        return None
    texts = [other for other in known if isinstance(other, str)]
    return next(iter(difflib.get_close_matches(name, texts, n=1, cutoff=0.7)), None)


# Folding


def fold_key(path: str) -> str:
    """Equal for paths that differ only in their numbers."""
    return _NUMBER.sub("*", path)


def fold_paths(paths: Sequence[str]) -> str:
    """Paths of one ``fold_key`` as one text.

    >>> fold_paths(["block_0/w", "block_1/w", "block_2/w"])
    'block_{0-2}/w'
    """
    if len({*paths}) == 1:
        return paths[0]  # With its leading zeros.
    columns = zip(*(map(int, _NUMBER.findall(path)) for path in paths), strict=True)
    texts = iter([_ranges(sorted(set(column))) for column in columns])
    return _NUMBER.sub(lambda _: next(texts), paths[0])


def group_paths(items: Iterable[tuple[str, Hashable]]) -> list[list[int]]:
    """Which items can be shown as one line.

    Args:
        items: A path, and what else must be equal, of each item.

    Returns:
        The positions of each group, in the order of their first member. A group with several
        numbers has every combination of them, so that ``block_{0-1}/w_{0-1}`` says what is there.

    >>> group_paths([("block_0/w", 8), ("head", 8), ("block_1/w", 8)])
    [[0, 2], [1]]
    """
    paths: list[str] = []
    groups: dict[Hashable, list[int]] = {}
    for index, (path, other) in enumerate(items):
        paths.append(path)
        groups.setdefault((fold_key(path), other), []).append(index)
    found: list[list[int]] = []
    for members in groups.values():
        numbers = {tuple(_NUMBER.findall(paths[i])) for i in members}
        product = math.prod(len({*column}) for column in zip(*numbers, strict=True))
        is_whole = product == len(numbers) == len(members)
        found += [members] if is_whole else [[i] for i in members]
    return sorted(found)


def paths_text(paths: Iterable[str], most: int) -> str:
    """Paths as one text: those of equal blocks folded, and no more than some.

    >>> paths_text(["block_0/w", "block_1/w", "head", "table"], 2)
    'block_{0-1}/w, head, and 1 more'
    """
    known = list(dict.fromkeys(paths))
    groups = group_paths((path, None) for path in known)
    folded = [fold_paths([known[i] for i in members]) for members in groups]
    if len(folded) > most:
        folded = [*folded[:most], f"and {len(folded) - most:,} more"]
    return ", ".join(folded)


def write_runs(numbers: Sequence[int]) -> list[str]:
    """Numbers in their order, those without a gap by their ends.

    >>> write_runs([0, 1, 2, 8])
    ['0-2', '8']
    """
    groups = itertools.groupby(enumerate(numbers), lambda pair: pair[1] - pair[0])
    runs = [[number for _, number in run] for _, run in groups]
    return [str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs]


def _ranges(numbers: Sequence[int]) -> str:
    if len(numbers) == 1:
        return str(numbers[0])
    runs = write_runs(numbers)
    return "{" + (",".join(runs) if len(runs) < 7 else f"{numbers[0]}..{numbers[-1]}") + "}"
