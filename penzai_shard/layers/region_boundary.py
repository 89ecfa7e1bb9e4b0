"""Trees taken apart into bare arrays, and put together again from arrays of other lengths.

A named array says how long its logical axes are, so it cannot go through a boundary behind which
each device holds a part of it. Bare arrays can; the names wait on the other side.
"""

import collections
import dataclasses
from collections.abc import Hashable, Sequence
from typing import Any

import jax
import numpy as np
from penzai import pz

from penzai_shard.layers.compiled_structure import ByEquality


@dataclasses.dataclass(frozen=True)
class BoundaryLeaf:
    """One leaf of a tree without its array.

    Attributes:
        names: For a named array, the logical axes of its last dimensions; None for a bare one.
        fixed: For a leaf that is no array, the leaf; it does not go through the boundary.
    """

    names: tuple[Hashable, ...] | None = None
    fixed: ByEquality | None = None


@dataclasses.dataclass(frozen=True)
class BoundaryTree:
    """A tree without its arrays. Two such trees are equal if they are built alike.

    Attributes:
        structure: The structure of the tree, in which each named array is one leaf.
        leaves: Its leaves.
    """

    structure: ByEquality
    leaves: tuple[BoundaryLeaf, ...]

    def put_together(self, arrays: Sequence[Any], *, fixed: bool = True) -> Any:
        """The tree with the given arrays, of any lengths, in place of its own.

        Args:
            arrays: One array for each leaf that is one.
            fixed: Whether leaves that are no arrays are in it; None stands for them otherwise.

        Returns:
            The tree. Named arrays are ``pz.nx.NamedArray``, positional dimensions first.
        """
        remaining = iter(arrays)
        leaves = []
        for leaf in self.leaves:
            if leaf.fixed is not None:
                leaves.append(leaf.fixed.value if fixed else None)
                continue
            array = next(remaining)
            leaves.append(array if leaf.names is None else _named(leaf.names, array))
        return jax.tree_util.tree_unflatten(self.structure.value, leaves)


def take_apart(tree: Any) -> tuple[BoundaryTree, list[Any]]:
    """Takes the arrays out of a tree.

    Args:
        tree: Any tree without mutable variables.

    Returns:
        The tree without its arrays, and the bare arrays in the order of its leaves.

    >>> boundary, arrays = take_apart({"x": pz.nx.ones({"batch": 4}), "rate": 0.5})
    >>> local = boundary.put_together([array[:2] for array in arrays])
    >>> dict(local["x"].named_shape), local["rate"]
    ({'batch': 2}, 0.5)
    """
    structure: Any
    leaves, structure = jax.tree_util.tree_flatten(tree, is_leaf=pz.nx.is_namedarray)
    described, arrays = [], []
    for leaf in leaves:
        if pz.nx.is_namedarray(leaf):
            leaf = leaf.with_positional_prefix()
            described.append(BoundaryLeaf(names=tuple(leaf.named_axes)))
            arrays.append(leaf.data_array)
        elif isinstance(leaf, jax.Array | np.ndarray | jax.ShapeDtypeStruct):
            described.append(BoundaryLeaf())
            arrays.append(leaf)
        else:
            described.append(BoundaryLeaf(fixed=ByEquality(leaf)))
    return BoundaryTree(ByEquality(structure), tuple(described)), arrays


def _named(names: tuple[Hashable, ...], array: Any) -> Any:
    sizes = array.shape[array.ndim - len(names) :]
    return pz.nx.NamedArray(
        named_axes=collections.OrderedDict(zip(names, sizes, strict=True)), data_array=array
    )
