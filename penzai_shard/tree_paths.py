"""Key paths of a pytree as text that people can read, and patterns that match such text.

A path is written with slashes: ``layers/0/weight``. Dots, slashes and brackets all separate the
parts when a pattern is matched, so that ``layers.*.weight`` finds both a nested dictionary and a
flat one whose keys are ``layers.0.weight``.
"""

import contextlib
import fnmatch
import functools
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax

from penzai_shard.errors import RuleTypeError

KeyPath = Sequence[Any]

_SEPARATORS = re.compile(r"[./\[\]]+")


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
