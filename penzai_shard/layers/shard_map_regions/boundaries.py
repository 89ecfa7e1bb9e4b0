"""Trees taken apart into bare arrays, and put together again from arrays of other lengths.

A named array says how long its logical axes are, so it cannot go through a boundary behind which
each device holds a part of it. Bare arrays can; the names wait on the other side.
"""

import collections
import dataclasses
from collections.abc import Hashable, Iterable, Sequence
from typing import Any

import jax
import numpy as np
from penzai import pz

from penzai_shard.array_kinds import is_array_like
from penzai_shard.named_arrays import dimension_names
from penzai_shard.named_nodes import is_named_node, named_like, node_data, node_names
from penzai_shard.readers import reader_of
from penzai_shard.tree_paths import path_text


class ByEquality:
    """Makes a value that cannot be hashed part of a key; compared by ``==`` alone.

    >>> ByEquality({"a": 1}) == ByEquality({"a": 1}), ByEquality({"a": 1}) == ByEquality({})
    (True, False)
    """

    __slots__ = ("value",)

    def __init__(self, value: Any) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ByEquality) and bool(self.value == other.value)

    def __hash__(self) -> int:
        return hash(ByEquality)


@dataclasses.dataclass(frozen=True)
class BoundaryLeaf:
    """One leaf of a tree without its array.

    Attributes:
        names: For a named array, the logical axis of each dimension of its data, None for a
            positional one; None altogether for a bare array.
        view: For a ``pz.nx.NamedArrayView``, which dimension of its data each positional axis is,
            and the names in their order; None for a ``pz.nx.NamedArray``.
        fixed: For a leaf that is not an array, the leaf; it does not go through the boundary.
        holder: For an array of another library, the structure of what holds it there, with None
            for its data.
    """

    names: tuple[Hashable | None, ...] | None = None
    view: tuple[tuple[int, ...], tuple[Hashable, ...]] | None = None
    fixed: ByEquality | None = None
    holder: ByEquality | None = None

    def wrap(self, array: Any) -> Any:
        """A leaf like this one with an array of any lengths."""
        if self.holder is not None:
            return named_like(jax.tree_util.tree_unflatten(self.holder.value, []), array)
        if self.names is None:
            return array
        if self.view is not None:
            positional, ordered = self.view
            return pz.nx.NamedArrayView(
                data_shape=tuple(array.shape),
                data_axis_for_logical_axis=positional,
                data_axis_for_name={name: self.names.index(name) for name in ordered},
                data_array=array,
            )
        sizes = zip(self.names, array.shape, strict=True)
        return pz.nx.NamedArray(
            named_axes=collections.OrderedDict(
                (name, size) for name, size in sizes if name is not None
            ),
            data_array=array,
        )


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class BoundaryTree:
    """A tree without its arrays. Two such trees are equal if they are built alike.

    To JAX it is static: a compiled function can take and return it.

    Attributes:
        structure: The structure of the tree, in which each named array is one leaf.
        leaves: Its leaves.
    """

    structure: ByEquality
    leaves: tuple[BoundaryLeaf, ...]

    def array_names(self) -> list[tuple[Hashable | None, ...] | None]:
        """For each array the logical axis of each of its dimensions, None for a bare array."""
        return [leaf.names for leaf in self._array_leaves()]

    def array_paths(self) -> list[str]:
        """For each array where it is in the tree, for people."""
        places = jax.tree_util.tree_leaves_with_path(self._numbered())
        return [path_text(path) for path, _ in places]

    def random_keys(self) -> list[int]:
        """Which of the arrays are base keys of ``pz.RandomStream`` objects."""

        def is_stream(node: Any) -> bool:
            return isinstance(node, pz.RandomStream)

        nodes = jax.tree_util.tree_leaves(self._numbered(), is_leaf=is_stream)
        keys = [node.base_key for node in nodes if is_stream(node)]
        return [key for key in keys if isinstance(key, int)]

    def built_alike(self, other: "BoundaryTree") -> bool:
        """Whether another tree has the same structure and names, whatever is not an array."""
        mine, theirs = (
            [(leaf.names, leaf.view, leaf.fixed is None, leaf.holder) for leaf in tree.leaves]
            for tree in (self, other)
        )
        return self.structure == other.structure and mine == theirs

    def put_together(self, arrays: Sequence[Any], *, fixed: bool = True) -> Any:
        """The tree with the given arrays, of any lengths, in place of its own.

        Args:
            arrays: One array for each leaf that is one.
            fixed: Whether leaves that are not arrays are in it; None stands for them otherwise.

        Returns:
            The tree.
        """
        pairs = zip(self._array_leaves(), arrays, strict=True)
        return self._filled([leaf.wrap(array) for leaf, array in pairs], fixed)

    def _array_leaves(self) -> list[BoundaryLeaf]:
        return [leaf for leaf in self.leaves if leaf.fixed is None]

    def _numbered(self) -> Any:
        """The tree with the index of each array in place of the array."""
        return self._filled(range(len(self._array_leaves())), fixed=False)

    def _filled(self, values: Iterable[Any], fixed: bool) -> Any:
        remaining = iter(values)
        leaves = [
            next(remaining) if leaf.fixed is None else leaf.fixed.value if fixed else None
            for leaf in self.leaves
        ]
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
    leaves, structure = jax.tree_util.tree_flatten(tree, is_leaf=_is_named)
    described, arrays = [], []
    for leaf in leaves:
        if pz.nx.is_namedarray(leaf):
            view = None
            if isinstance(leaf, pz.nx.NamedArrayView):
                view = (tuple(leaf.data_axis_for_logical_axis), tuple(leaf.data_axis_for_name))
            described.append(BoundaryLeaf(dimension_names(leaf), view))
            arrays.append(leaf.data_array)
        elif (reader := reader_of(leaf)) is not None and _is_named(leaf):
            holder: Any = jax.tree_util.tree_structure(reader.with_data(leaf, None))
            described.append(BoundaryLeaf(node_names(leaf), holder=ByEquality(holder)))
            arrays.append(node_data(leaf))
        elif isinstance(leaf, jax.Array | np.ndarray | jax.ShapeDtypeStruct):
            described.append(BoundaryLeaf())
            arrays.append(leaf)
        else:
            described.append(BoundaryLeaf(fixed=ByEquality(leaf)))
    return BoundaryTree(ByEquality(structure), tuple(described)), arrays


def _is_named(node: Any) -> bool:
    """Whether a node is a named array with data, whoever's it is."""
    return pz.nx.is_namedarray(node) or (is_named_node(node) and is_array_like(node_data(node)))
