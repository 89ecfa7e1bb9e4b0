"""The arrays of a tree by where they are in it, and the tree with others in their places."""

import collections
from collections.abc import Callable, Mapping
from typing import Any

import jax
from jax.sharding import Sharding
from penzai import pz
from penzai.core.variables import LabeledVariable

from penzai_shard.checkpointing.padded_layouts import Layout, PaddedLayout
from penzai_shard.errors import CheckpointMismatchError, RuleTypeError, raise_all
from penzai_shard.model_variables import thawed, with_own_label
from penzai_shard.named_leaves import NamedLeaf, Stored, is_named_unit, map_arrays
from penzai_shard.padded_arrays import is_padded
from penzai_shard.readers import is_foreign, reader_of, with_repeats, without_repeats
from penzai_shard.surgery import strip
from penzai_shard.tree_paths import array_path_text, join_paths, path_text, sortable_keys


class ArraysByName:
    """The arrays of a tree, each named by its key path.

    The label of a state variable can be a number of this process alone, so labels do not count. A
    variable that occurs several times is named by its first place.

    Attributes:
        tree: The tree.
        leaves: Its arrays by name; leaves that are not arrays are left out.
        paths: The key path of each in the tree, by name. It is the name itself, unless layers that
            were put in do not count.

    >>> arrays = ArraysByName({"w": pz.nx.ones({"a": 2}), "name": "text"}, "saving")
    >>> list(arrays.leaves), arrays.filled({"w": "data"})["w"].data_array
    (['w'], 'data')
    """

    def __init__(self, tree: Any, doing: str = "", *, without_inserted: bool = False) -> None:
        """Names the arrays of a tree.

        Args:
            tree: Any pytree.
            doing: What is done with a checkpoint of it, ``saving`` or ``restoring``. A view with
                positional dimensions in another order than that in memory is refused then.
            without_inserted: Whether an array is named by where it is once all that was put into
                models is taken off, so that one model has the same names under every layout.

        Raises:
            CheckpointMismatchError: Two arrays have one path, or there is such a view, or
                something of another library that is not an array.
            RuleTypeError: The keys of some dictionary cannot be sorted.
        """
        tree = without_repeats(tree)
        if doing:
            _refuse_permuted_positions(tree, doing)
        visited: list[NamedLeaf] = []

        def number(leaf: NamedLeaf) -> int:
            visited.append(leaf)
            return len(visited) - 1

        numbered = map_arrays(tree, number)
        raise_all(
            CheckpointMismatchError,
            "cannot read some arrays:",
            [f"{x.path}: {x.problem}." for x in visited if x.problem and x.whole is None],
        )
        paths = _paths_of_numbers(numbered)
        bare = _paths_of_numbers(_without_inserted(numbered)) if without_inserted else paths
        self._names: list[str | None] = [
            # What belongs to a layer that was put in has no other place.
            None if leaf.dtype is None else bare.get(index, f"inserted/{paths[index]}")
            for index, leaf in enumerate(visited)
        ]
        counts = collections.Counter(name for name in self._names if name is not None)
        raise_all(
            CheckpointMismatchError,
            "cannot tell arrays apart by path:",
            [
                f"{name}: {count} arrays have this path. Rename all but one of them."
                for name, count in counts.items()
                if count > 1
            ],
        )
        self.tree = tree
        self.leaves = {
            name: leaf for name, leaf in zip(self._names, visited, strict=True) if name is not None
        }
        self.paths = {name: paths[i] for i, name in enumerate(self._names) if name is not None}

    def filled(self, arrays: Mapping[str, Any]) -> Any:
        """The tree with other arrays by name; mutable variables are new mutable ones.

        An array is stored without padding, unless it is a ``Stored`` that says how it is padded.
        """
        names = iter(self._names)

        def array_of(leaf: NamedLeaf) -> Any:
            name = next(names)
            if name is None:
                return leaf.array
            array = arrays[name]
            is_other = leaf.padding is not None and not isinstance(array, Stored)
            return Stored(array, None) if is_other else array

        fresh: dict[int, Any] = {}

        def as_in_tree(node: Any, value: Any) -> Any:
            if not isinstance(node, LabeledVariable):
                return value
            if id(node) not in fresh:
                fresh[id(node)] = with_own_label(thawed(value))
            return fresh[id(node)]

        made = jax.tree_util.tree_map(
            as_in_tree,
            self.tree,
            map_arrays(self.tree, array_of),
            is_leaf=pz.nx.is_namedarray,  # Which may come to be padded.
        )
        return with_repeats(made)


def _paths_of_numbers(tree: Any) -> dict[int, str]:
    """The first path of each number in a tree whose arrays are numbers."""
    paths: dict[int, str] = {}
    for path, index in _data_with_paths(tree):
        paths.setdefault(index.stored if is_padded(index) else index, path)
    return paths


def _data_with_paths(tree: Any) -> list[tuple[str, Any]]:
    """What stands in the places of a tree's arrays, each with the path of what holds it.

    A named array has one path, whoever's it is, and whatever it calls the attribute of its data.
    """
    found: list[tuple[str, Any]] = []
    for key_path, node in jax.tree_util.tree_leaves_with_path(
        tree, is_leaf=lambda node: is_foreign(node) or is_padded(node)
    ):
        reader = reader_of(node)
        if reader is None:
            found.append((array_path_text(key_path), node))
            continue
        # Several arrays, if an optimizer keeps several for one of the model's.
        parts = jax.tree_util.tree_leaves_with_path(reader.read(node).data)
        found += [(join_paths(path_text(key_path), path_text(key)), part) for key, part in parts]
    return found


def _without_inserted(tree: Any) -> Any:
    """The tree as it was before anything was put into it.

    One that cannot be taken apart any more, as its layers were changed by hand, is saved and
    restored as it is.
    """
    try:
        return strip(tree)
    except RuleTypeError:
        return tree


def layouts_by_name(tree: Any) -> dict[str, Layout]:
    """The layout of every array by its key path.

    Args:
        tree: A tree of shardings, or of structs or arrays that have one.
    """
    layouts: dict[str, Layout] = {}
    for path, leaf in _data_with_paths(tree):
        padding = leaf.padding if is_padded(leaf) else None
        data = leaf.stored if is_padded(leaf) else leaf
        found = data if isinstance(data, Sharding) else getattr(data, "sharding", None)
        layouts[path] = found if padding is None else PaddedLayout(found, padding)
    return layouts


def leaves_with_paths(tree: Any, is_leaf: Callable[[Any], bool]) -> list[tuple[Any, Any]]:
    """``jax.tree_util.tree_leaves_with_path``, with an error that one can act on.

    Raises:
        RuleTypeError: The keys of some dictionary cannot be sorted.

    >>> leaves_with_paths({"a": 1, 0: 2}, lambda node: False)
    Traceback (most recent call last):
    penzai_shard.errors.RuleTypeError: a dictionary has keys of different types, which JAX cannot...
    """
    with sortable_keys():
        return list(jax.tree_util.tree_leaves_with_path(tree, is_leaf=is_leaf))


def _refuse_permuted_positions(tree: Any, doing: str) -> None:
    """Refuses named array views whose positional dimensions have another order in memory.

    Positional dimensions have no names, so that nothing in a checkpoint could tell them apart.
    """
    problems = [
        f"{path_text(key_path)}: its positional dimensions have the order "
        f"{tuple(node.data_axis_for_logical_axis)} in memory. Give its data the usual order with "
        ".with_positional_prefix()."
        for key_path, node in leaves_with_paths(tree, is_named_unit)
        if isinstance(node, pz.nx.NamedArrayView)
        and list(node.data_axis_for_logical_axis) != sorted(node.data_axis_for_logical_axis)
    ]
    raise_all(
        CheckpointMismatchError, f"cannot tell positional dimensions apart while {doing}:", problems
    )
