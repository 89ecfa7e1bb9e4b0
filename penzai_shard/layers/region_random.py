"""Random streams in a region: other numbers for every part of the activations."""

from collections.abc import Sequence
from typing import Any

import jax
from penzai import pz

from penzai_shard.layers.region_boundary import BoundaryTree
from penzai_shard.layers.region_outputs import position


def base_keys(boundary: BoundaryTree) -> list[int]:
    """Which arrays of a tree are base keys of ``pz.RandomStream`` objects.

    Args:
        boundary: The tree without its arrays.

    Returns:
        Their indices among its arrays.
    """
    indices: list[Any] = []
    count = 0
    for leaf in boundary.leaves:
        indices.append(count if leaf.fixed is None else None)
        count += leaf.fixed is None
    structure = boundary.structure.value
    tree = jax.tree_util.tree_unflatten(structure, [_Index(index) for index in indices])
    nodes = jax.tree_util.tree_leaves(tree, is_leaf=lambda node: isinstance(node, pz.RandomStream))
    return [
        node.base_key.value
        for node in nodes
        if isinstance(node, pz.RandomStream)
        and isinstance(node.base_key, _Index)
        and node.base_key.value is not None
    ]


def fold_position(arrays: Sequence[Any], keys: Sequence[int], mesh_axes: Sequence[str]) -> list:
    """The arrays with other keys for every position along some mesh axes.

    Args:
        arrays: One device's arrays.
        keys: Which of them are keys.
        mesh_axes: Manual mesh axes; none leaves everything as it is.
    """
    folded = list(arrays)
    for index in keys if mesh_axes else ():
        folded[index] = jax.random.fold_in(folded[index], position(mesh_axes))
    return folded


class _Index:
    """The index of an array, in its place."""

    def __init__(self, value: int | None) -> None:
        self.value = value
