"""Key paths of a pytree as text that people can read, and patterns that match such text.

A path is written with slashes: ``layers/0/weight``. Dots, slashes and brackets all separate the
parts when a pattern is matched, so that ``layers.*.weight`` finds both a nested dictionary and a
flat one whose keys are ``layers.0.weight``.
"""

import contextlib
import fnmatch
import functools
import itertools
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import jax

from penzai_shard.errors import RuleTypeError

KeyPath = Sequence[Any]

_SEPARATORS = re.compile(r"[./\[\]]+")
_WILDCARDS = re.compile(r"(\*+|\?)")


def key_text(key: Any) -> str:
    """The text of one key of a key path, without brackets or quotes.

    >>> key_text(jax.tree_util.DictKey("mlp.up"))
    'mlp.up'
    """
    match key:
        case jax.tree_util.SequenceKey():
            return str(key.idx)
        case jax.tree_util.DictKey() | jax.tree_util.FlattenedIndexKey():
            return str(key.key)
    name = getattr(key, "name", None)
    return str(key).lstrip(".") if name is None else str(name)


def path_text(key_path: KeyPath) -> str:
    """A key path as readable text.

    >>> leaves, _ = jax.tree_util.tree_flatten_with_path({"layers": [{"w": 1.0}]})
    >>> path_text(leaves[0][0])
    'layers/0/w'
    """
    return "/".join(key_text(key) for key in key_path)


def array_path_text(key_path: KeyPath) -> str:
    """The readable path of an array; for the data of a named array, that of the named array.

    >>> array_path_text([jax.tree_util.DictKey("w"), jax.tree_util.GetAttrKey("data_array")])
    'w'
    """
    if key_path and getattr(key_path[-1], "name", None) == "data_array":
        key_path = key_path[:-1]
    return path_text(key_path)


def paths_and_leaves(
    tree: Any, is_leaf: Callable[[Any], bool] | None = None
) -> list[tuple[str, Any]]:
    """The leaves of a tree, each with its readable path, in the order of flattening.

    Args:
        tree: Any pytree.
        is_leaf: Which nodes count as leaves, as in ``jax.tree.flatten``.

    >>> paths_and_leaves({"layers": [{"w": 1.0}]})
    [('layers/0/w', 1.0)]
    """
    flat, _ = jax.tree_util.tree_flatten_with_path(tree, is_leaf=is_leaf)
    return [(array_path_text(key_path), leaf) for key_path, leaf in flat]


@contextlib.contextmanager
def sortable_keys() -> Iterator[None]:
    """A block in which JAX takes trees apart, with an error that one can act on.

    Raises:
        RuleTypeError: The keys of some dictionary cannot be sorted.

    >>> with sortable_keys():
    ...     jax.tree.leaves({"a": 1, 0: 2})
    Traceback (most recent call last):
    penzai_shard.errors.RuleTypeError: a dictionary has keys of different types, which JAX cannot...
    """
    try:
        yield
    except ValueError as error:
        if "keys" not in str(error):
            raise
        raise RuleTypeError(
            "a dictionary has keys of different types, which JAX cannot sort, such as numbers "
            "beside texts. Make them all text: {str(key): value for key, value in d.items()}."
        ) from error


def join_paths(*parts: str) -> str:
    """Joins readable paths with a slash, leaving out empty ones.

    >>> join_paths("model", "", "w")
    'model/w'
    """
    return "/".join(part for part in parts if part)


def path_endings(path: str) -> list[str]:
    """A readable path and what is left of it without its first keys, the longest first.

    >>> path_endings("opt_state/mu/w")
    ['opt_state/mu/w', 'mu/w', 'w']
    """
    keys = path.split("/")
    return ["/".join(keys[i:]) for i in range(len(keys))]


def is_inside(path: str, outer: str) -> bool:
    """Whether a readable path goes on from another.

    >>> is_inside("block_1/mlp", "block_1"), is_inside("block_10", "block_1")
    (True, False)
    """
    return path.startswith(f"{outer}/")


def common_parts(paths: Iterable[Sequence[str]]) -> list[str]:
    """The parts with which all of some paths begin.

    >>> common_parts([["a", "b"], ["a", "c"]])
    ['a']
    """
    alike = itertools.takewhile(lambda parts: len(set(parts)) == 1, zip(*paths, strict=False))
    return [parts[0] for parts in alike]


def split_path(path: str) -> tuple[str, ...]:
    """The parts of a readable path that patterns are matched against.

    >>> split_path("layers[0].mlp/weight")
    ('layers', '0', 'mlp', 'weight')
    """
    return tuple(part for part in _SEPARATORS.split(path) if part)


@functools.lru_cache(maxsize=4096)
def _pattern_parts(pattern: str) -> tuple[str, ...]:
    return split_path(pattern)


def path_matches(pattern: str, path: str) -> bool:
    """Whether a whole path matches a pattern.

    ``*`` and ``?`` match within one part, ``**`` matches any number of parts, also none.

    Args:
        pattern: For instance ``layers.*.weight`` or ``**/attention/**``.
        path: A readable path, or a parameter's name.

    >>> path_matches("layers.*.weight", "layers/3/weight")
    True
    >>> path_matches("**/attention/**", "decoder/block_3/attention/query/weights")
    True
    >>> path_matches("layers.*.weight", "layers/3/mlp/weight")
    False
    """
    return _parts_match(_pattern_parts(pattern), split_path(path))


def name_matches(pattern: str, name: str) -> bool:
    """Whether a name matches a pattern, which may be the name itself to the letter.

    >>> name_matches("block_*/w", "block_0/w"), name_matches("w[?]*", "w[?]*")
    (True, True)
    """
    return pattern == name or path_matches(pattern, name)


def _parts_match(pattern: tuple[str, ...], parts: tuple[str, ...]) -> bool:
    # Row by row over the pattern: reachable[i] says that the pattern read so far can
    # have consumed exactly the first i parts. Linear in len(pattern) * len(parts).
    reachable = [True] + [False] * len(parts)
    for piece in pattern:
        if piece == "**":
            for i in range(len(parts)):
                reachable[i + 1] = reachable[i + 1] or reachable[i]
        else:
            reachable = [False] + [
                reachable[i] and fnmatch.fnmatchcase(part, piece) for i, part in enumerate(parts)
            ]
    return reachable[-1]


def wildcards(pattern: str) -> tuple[str, ...]:
    """The wildcards of a pattern, in their order.

    >>> wildcards("**/block_*/w?"), wildcards("model.w")
    (('**', '*', '?'), ())
    """
    return tuple(
        wildcard
        for part in _pattern_parts(pattern)
        for wildcard in ([part] if part == "**" else _wildcards_of_part(part))
    )


def _wildcards_of_part(part: str) -> list[str]:
    return ["*" if piece[0] == "*" else piece for piece in _WILDCARDS.split(part)[1::2]]


def wildcard_texts(pattern: str, path: str) -> Iterator[tuple[str, ...]]:
    """What each wildcard of a pattern stands for in a path, in every way to read it.

    Args:
        pattern: As for ``path_matches``.
        path: A readable path.

    Returns:
        For each way, one text per wildcard, in the order of ``wildcards``. ``**`` stands for whole
        parts with slashes between them. Where the pattern does not match there is no way.

    >>> list(wildcard_texts("layers.*.w?", "layers/3/w1"))
    [('3', '1')]
    >>> list(wildcard_texts("*_*", "a_b_c"))
    [('a', 'b_c'), ('a_b', 'c')]
    """
    if path_matches(pattern, path):
        yield from _texts_in_parts(_pattern_parts(pattern), split_path(path))


def _texts_in_parts(pattern: tuple[str, ...], parts: tuple[str, ...]) -> Iterator[tuple[str, ...]]:
    if not pattern:
        if not parts:
            yield ()
    elif pattern[0] == "**":
        for i in range(len(parts) + 1):
            if not _parts_match(pattern[1:], parts[i:]):
                continue
            for rest in _texts_in_parts(pattern[1:], parts[i:]):
                yield ("/".join(parts[:i]), *rest)
    elif parts:
        for first in _texts_in_text(tuple(_WILDCARDS.split(pattern[0])), parts[0]):
            for rest in _texts_in_parts(pattern[1:], parts[1:]):
                yield (*first, *rest)


def _texts_in_text(pieces: tuple[str, ...], text: str) -> Iterator[tuple[str, ...]]:
    """The same for one part; ``pieces`` are literal texts with a wildcard between each two."""
    literal, *others = pieces
    if not text.startswith(literal):
        return
    text = text.removeprefix(literal)
    if not others:
        if not text:
            yield ()
        return
    shortest, longest = (1, 1) if others[0] == "?" else (0, len(text))
    for length in range(shortest, min(longest, len(text)) + 1):
        for rest in _texts_in_text(tuple(others[1:]), text[length:]):
            yield (text[:length], *rest)


def with_wildcards_filled(pattern: str, texts: Sequence[str]) -> tuple[str, ...]:
    """The parts of the path that a pattern becomes with a text in place of each wildcard.

    >>> with_wildcards_filled("blocks/block_*/**", ["3", "mlp/w"])
    ('blocks', 'block_3', 'mlp', 'w')
    """
    remaining = iter(texts)
    parts = [
        next(remaining) if part == "**" else _WILDCARDS.sub(lambda _: next(remaining), part)
        for part in _pattern_parts(pattern)
    ]
    return split_path("/".join(parts))


def text_with_wildcards_filled(pattern: str, texts: Sequence[str]) -> str:
    """The same as one text, whose parts are separated as the pattern's are.

    >>> text_with_wildcards_filled("model.layers.*.w", ["3"])
    'model.layers.3.w'
    >>> text_with_wildcards_filled("model.**", ["mlp/w"])
    'model.mlp.w'
    """
    slash = "." if "." in pattern and "/" not in pattern else "/"
    remaining = iter(texts)
    return _WILDCARDS.sub(lambda _: next(remaining).replace("/", slash), pattern)
