"""Objects that occur several times in a tree: variables and modules of libraries that share them.

JAX takes such an object for as many objects as it has places. So whoever makes a tree anew first
leaves all but the first occurrence out, and puts them back at the end.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax

from penzai_shard.errors import RuleTypeError
from penzai_shard.readers.registry import (
    is_shared_object,
    reader_of,
    sharing_readers,
)
from penzai_shard.tree_paths import sortable_keys


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class Repeat:
    """Stands in a tree for another occurrence of an object that is shared: static data.

    Attributes:
        number: The place of the object among the shared ones of the tree, in its order.
        depth: How often repeats were taken out of the tree since; as those of a model are when it
            is put into a train state, before they are taken out of the state.
    """

    number: int
    depth: int = 0


def without_repeats(tree: Any) -> Any:
    """A tree in which every shared object occurs once, and a ``Repeat`` at its other places.

    Args:
        tree: Any pytree.

    Returns:
        The tree itself, if nothing occurs twice. Otherwise its shared objects are new ones, with
        the same arrays.

    Raises:
        RuleTypeError: A shared object contains itself, so that the tree is none.

    >>> without_repeats({"a": 1})
    {'a': 1}
    """
    if not sharing_readers():
        return tree
    numbers: dict[int, int] = {}
    open_objects: set[int] = set()
    repeated = False

    def once(node: Any) -> Any:
        nonlocal repeated
        if isinstance(node, Repeat):
            repeated = True
            return dataclasses.replace(node, depth=node.depth + 1)
        if jax.tree_util.all_leaves([node]):
            # It cannot be taken apart, and whoever reads the tree says so.
            return node
        if id(node) in open_objects:
            raise RuleTypeError(
                f"this {type(node).__name__} contains itself, and JAX cannot take it for a tree. "
                "Keep the reference to it out of its attributes."
            )
        if id(node) in numbers:
            repeated = True
            return Repeat(numbers[id(node)])
        numbers[id(node)] = len(numbers)
        open_objects.add(id(node))
        made = _with_children(node, lambda child: _map_shared(child, once))
        open_objects.discard(id(node))
        return made

    found = _map_shared(tree, once)
    return found if repeated else tree


def with_repeats(tree: Any) -> Any:
    """The inverse of ``without_repeats``, for a tree of the same structure.

    Its shared objects are new ones, whether any is repeated or not. A tree without any is given
    back itself.

    >>> with_repeats({"a": 1})
    {'a': 1}
    """
    if not sharing_readers():
        return tree
    if not any(map(_is_unit, jax.tree_util.tree_leaves(tree, is_leaf=_is_unit))):
        return tree
    objects: list[Any] = []

    def restored(node: Any) -> Any:
        if isinstance(node, Repeat):
            if node.depth:
                return dataclasses.replace(node, depth=node.depth - 1)
            return objects[node.number]
        if jax.tree_util.all_leaves([node]):
            return node
        number = len(objects)
        objects.append(None)
        objects[number] = _with_children(node, lambda child: _map_shared(child, restored))
        return objects[number]

    return _map_shared(tree, restored)


def not_a_tree(node: Any) -> str:
    """Why a leaf of a tree, a module that JAX does not take apart, cannot be used; empty if it can.

    >>> not_a_tree("text")
    ''
    """
    if not is_shared_object(node) or reader_of(node) is not None:
        return ""
    if not jax.tree_util.all_leaves([node]):
        return ""
    readers = [reader for reader in sharing_readers() if reader.shares_type(type(node))]
    return readers[0].not_a_tree(node)


def leaves_in_shared_objects(tree: Any, is_leaf: Callable[[Any], bool]) -> list[bool]:
    """For each leaf of a tree whether it is in an object that is shared, such as a module of NNX.

    Args:
        tree: Any pytree.
        is_leaf: Which nodes count as leaves, as in ``jax.tree.leaves``.

    >>> leaves_in_shared_objects({"w": 1.0}, lambda node: False)
    [False]
    """

    def ends(node: Any) -> bool:
        return is_leaf(node) or is_shared_object(node)

    found: list[bool] = []
    for node in jax.tree_util.tree_leaves(tree, is_leaf=ends):
        is_object = is_shared_object(node) and not is_leaf(node)
        count = len(jax.tree_util.tree_leaves(node, is_leaf=is_leaf)) if is_object else 1
        found += [is_object] * count
    return found


def copied(tree: Any) -> Any:
    """A tree whose shared objects are new ones, shared as in the given one.

    What mutates them changes nothing of the given tree.
    """
    return with_repeats(without_repeats(tree))


def _map_shared(tree: Any, make: Callable[[Any], Any]) -> Any:
    with sortable_keys():
        nodes, treedef = jax.tree_util.tree_flatten(tree, is_leaf=_is_unit)
    made = [make(node) if _is_unit(node) else node for node in nodes]
    return jax.tree_util.tree_unflatten(treedef, made)


def _is_unit(node: Any) -> bool:
    return isinstance(node, Repeat) or is_shared_object(node)


def _with_children(node: Any, make: Callable[[Any], Any]) -> Any:
    """A new object like another, with what ``make`` gives for each of its children."""
    at_root = True

    def is_child(_: Any) -> bool:
        # The first node that is asked about is the object itself, which may be its own child too.
        nonlocal at_root
        was_root, at_root = at_root, False
        return not was_root

    children, treedef = jax.tree_util.tree_flatten(node, is_leaf=is_child)
    return jax.tree_util.tree_unflatten(treedef, [make(child) for child in children])
