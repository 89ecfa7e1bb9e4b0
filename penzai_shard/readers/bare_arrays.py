"""Arrays of other libraries that have nothing around them, as arrays that JAX takes."""

from collections.abc import Hashable, Mapping
from typing import Any

import jax

from penzai_shard.errors import ShardingError, raise_all, warn_caller
from penzai_shard.readers.registry import read_node, reader_of
from penzai_shard.tree_paths import path_text


def without_bare_arrays(tree: Any, called: str) -> Any:
    """A tree with the data of other libraries' bare arrays in their places, such as of tensors.

    Args:
        tree: Any pytree.
        called: The function that was called, for messages.

    Returns:
        The tree with NumPy or JAX arrays, and with structs for what has no values; the tree itself
        if nothing in it is of other libraries.

    Raises:
        ShardingError: Some of them cannot be read; all are reported at once.

    Warns:
        ShardingWarning: Some of them are one and the same, as tied weights are.

    >>> tree = {"w": 1.0}
    >>> without_bare_arrays(tree, "place") is tree
    True
    """
    if not any(map(reader_of, jax.tree_util.tree_leaves(tree))):
        return tree
    problems: list[str] = []
    nodes: dict[str, Any] = {}

    def read(key_path: Any, leaf: Any) -> Any:
        reader = reader_of(leaf)
        if reader is None:
            return leaf
        held = read_node(reader, leaf)
        if reader.bare:
            nodes[path_text(key_path)] = leaf
        if held.problem:
            problems.append(f"{path_text(key_path) or 'the array'}: {held.problem}.")
        return held.data

    made = jax.tree_util.tree_map_with_path(read, tree)
    raise_all(ShardingError, f"{called}: some arrays cannot be read:", problems)
    warn_of_tied_arrays(called, nodes)
    return made


def warn_of_tied_arrays(called: str, nodes: Mapping[str, Any]) -> None:
    """Warns of bare arrays that are one and the same, as tied weights are.

    Args:
        called: The function that was called, for messages.
        nodes: Bare arrays by path.

    Warns:
        ShardingWarning: For every group of them.

    >>> warn_of_tied_arrays("place", {})
    """
    groups: dict[Hashable, list[str]] = {}
    for path, node in nodes.items():
        reader = reader_of(node)
        memory = None if reader is None else reader.memory(node)
        if memory is not None:
            groups.setdefault(memory, []).append(path)
    warn_caller(
        f"{called}: {' and '.join(map(repr, paths))} are one array, as tied weights are. Here "
        "each becomes an array of its own, which is trained by itself. Give one of them, and have "
        "the model use it in both places."
        for paths in groups.values()
        if len(paths) > 1
    )


def is_bare_array(node: Any) -> bool:
    """Whether a leaf is an array of another library with nothing around it.

    >>> is_bare_array(1.0)
    False
    """
    reader = reader_of(node)
    return reader is not None and reader.bare
