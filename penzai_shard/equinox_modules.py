"""Modules of Equinox in a tree, whose code computes with plain arrays.

Equinox is looked up and not imported: a tree can hold its modules only if somebody imported it.
In a module every field that is not declared static is part of the tree: the rate of a dropout, the
name of an axis, a function. As for Equinox itself (``eqx.is_array``), arrays alone are arrays
there, and everything else stays as it is.
"""

import dataclasses
import sys
from collections.abc import Callable
from typing import Any

import jax

from penzai_shard.array_kinds import is_array_like
from penzai_shard.tree_paths import join_paths, path_text

_LIBRARY = "equinox"


def is_equinox_module(node: Any) -> bool:
    """Whether a node of a tree is a module of Equinox.

    >>> is_equinox_module({})
    False
    """
    return is_equinox_module_type(node.__class__)


def is_equinox_module_type(node_type: type) -> bool:
    """Whether a type is one of modules of Equinox."""
    equinox = sys.modules.get(_LIBRARY)
    return equinox is not None and issubclass(node_type, equinox.Module)


def leaves_in_modules(tree: Any, is_leaf: Callable[[Any], bool] | None = None) -> list[bool]:
    """For each leaf of a tree whether it is in a module of Equinox.

    Args:
        tree: Any pytree.
        is_leaf: Which nodes count as leaves, as in ``jax.tree.leaves``.

    >>> leaves_in_modules({"w": 1.0})
    [False]
    """

    if sys.modules.get(_LIBRARY) is None:
        return [False] * len(jax.tree_util.tree_leaves(tree, is_leaf=is_leaf))

    def ends(node: Any) -> bool:
        return is_equinox_module(node) or (is_leaf is not None and is_leaf(node))

    found: list[bool] = []
    for node in jax.tree_util.tree_leaves(tree, is_leaf=ends):
        is_module = is_equinox_module(node) and not (is_leaf is not None and is_leaf(node))
        count = len(jax.tree_util.tree_leaves(node, is_leaf=is_leaf)) if is_module else 1
        found += [is_module] * count
    return found


def is_module_value(leaf: Any) -> bool:
    """Whether a leaf in a module is a value that stays as it is, and not an array.

    >>> is_module_value(0.5), is_module_value(jax.numpy.ones(2))
    (True, False)
    """
    return not (hasattr(leaf, "shape") and hasattr(leaf, "dtype"))


def declared_axis_names(module: Any, path: str = "") -> dict[str, tuple[str, ...]]:
    """The axis names that the fields of a module declare for plain arrays, as ``hax.field`` does.

    Args:
        module: A module of Equinox, with other modules anywhere in it.
        path: Prepended to all paths.

    Returns:
        The names by the path of the array.

    >>> declared_axis_names({})
    {}
    """
    found: dict[str, tuple[str, ...]] = {}
    if is_equinox_module(module):
        for field in dataclasses.fields(module):
            if names := field.metadata.get("axis_names"):
                found[join_paths(path, field.name)] = tuple(names)
    for key_path, node in jax.tree_util.tree_leaves_with_path(
        module, is_leaf=lambda node: node is not module and is_equinox_module(node)
    ):
        if is_equinox_module(node):
            found |= declared_axis_names(node, join_paths(path, path_text(key_path)))
    return found


def are_arrays(tree: Any) -> list[bool]:
    """For each leaf of a tree whether it is an array, and not a value of a module.

    >>> are_arrays({"rate": 0.5, "text": "a"})
    [True, False]
    """
    leaves = zip(leaves_in_modules(tree), jax.tree_util.tree_leaves(tree), strict=True)
    return [
        is_array_like(leaf) and not (is_inside and is_module_value(leaf))
        for is_inside, leaf in leaves
    ]


def initial_states(module: Any) -> list[str]:
    """Where a tree holds initial values of states, which ``eqx.nn.make_with_state`` takes out.

    Returns:
        The paths of the ``eqx.nn.StateIndex`` objects that hold some.

    >>> initial_states({"w": 1.0})
    []
    """
    equinox = sys.modules.get(_LIBRARY)
    if equinox is None:
        return []

    def is_index(node: Any) -> bool:
        return isinstance(node, equinox.nn.StateIndex)

    return [
        path_text(key_path)
        for key_path, node in jax.tree_util.tree_leaves_with_path(module, is_leaf=is_index)
        if is_index(node) and jax.tree_util.tree_leaves(node.init)
    ]
