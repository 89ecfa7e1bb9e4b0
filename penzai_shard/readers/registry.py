"""Which reader reads what: our own readers, and those that other packages announce."""

import dataclasses
import functools
from collections.abc import Hashable
from typing import Any

import jax

from penzai_shard.errors import RuleTypeError
from penzai_shard.readers.announcements import Announcement, active_announcements
from penzai_shard.readers.array_reader import ArrayReader, ReadArray
from penzai_shard.tree_paths import KeyPath


def reader_of(node: Any) -> ArrayReader | None:
    """The reader of a node of a tree, or None if no library that is known has its type.

    >>> reader_of({}) is None
    True
    """
    return reader_of_type(node.__class__)


def is_foreign(node: Any) -> bool:
    """Whether a node is what a known library puts around one of its arrays, or such an array.

    >>> is_foreign({})
    False
    """
    return reader_of(node) is not None


def foreign_nodes(tree: Any) -> list[tuple[KeyPath, ArrayReader, Any]]:
    """Where a tree has such nodes, the reader of each, and the node.

    >>> foreign_nodes({"w": 1.0})
    []
    """
    flat, _ = jax.tree_util.tree_flatten_with_path(tree, is_leaf=is_foreign)
    found = [(key_path, reader_of(node), node) for key_path, node in flat]
    return [(key_path, reader, node) for key_path, reader, node in found if reader is not None]


def read_node(reader: ArrayReader, node: Any) -> ReadArray:
    """What a node holds, or why nobody could do anything with it.

    Args:
        reader: Its reader.
        node: The node.

    Raises:
        RuleTypeError: The reader does not keep to its protocol.
    """
    held = reader.read(node)
    if not isinstance(held, ReadArray) or not isinstance(held.names, tuple | None):
        given = f"a {type(held).__name__}"
        if isinstance(held, ReadArray):
            given = f"a ReadArray with {held.names!r} as names"
        raise RuleTypeError(
            f"{type(reader).__module__}.{type(reader).__qualname__}.read gave {given}. It must "
            "give a ReadArray(data, names), with a tuple of names or None."
        )
    if not held.problem and not reader.bare and jax.tree_util.all_leaves([node]):
        return dataclasses.replace(
            held,
            problem=f"it is a {type(node).__name__}, into which JAX cannot look. Register the "
            "type as a pytree, jax.tree_util.register_pytree_node(...), or let its reader say "
            "bare = True if its data may stand in its place",
        )
    return held


@functools.lru_cache(maxsize=4096)
def reader_of_type(node_type: Hashable) -> ArrayReader | None:
    """The reader of the nodes of a type, or None if no library that is known has it.

    Raises:
        RuleTypeError: Two readers read the type, or the type's library has one that is broken.
    """
    assert isinstance(node_type, type)
    # Types of Python and of JAX, which make up most trees, belong to no reader.
    if node_type.__module__ in ("builtins", "collections"):
        return None
    found = [each for each in active_announcements() if _reads(each, node_type)]
    if len(found) > 1:
        raise RuleTypeError(
            f"objects of the type {node_type.__module__}.{node_type.__qualname__} are read by "
            f"{' and by '.join(map(str, found))}. Uninstall the one package or the other, or "
            "have its reader's method reads() say no to this type."
        )
    return found[0].loaded() if found else None


def _reads(announced: Announcement, node_type: type) -> bool:
    """Whether a reader reads a type.

    Raises:
        RuleTypeError: It cannot be asked, and the type may be one that it is for.
    """
    reader = announced.loaded()
    name = f"{node_type.__module__}.{node_type.__qualname__}"
    if reader is not None:
        try:
            return reader.reads(node_type)
        except Exception as error:
            reason = f"fails when it is asked: {type(error).__name__}: {error}"
            problem = f"{announced}, for {announced.library!r}, {reason}. {announced.mend()}"
            announced.warn_once(problem)
    else:
        problem = announced.problem()
    if announced.is_for(node_type):
        raise RuleTypeError(f"cannot read a {name}: {problem}")
    return False


def loaded_readers() -> list[ArrayReader]:
    """The readers of all libraries that were imported."""
    loaded = (announced.loaded() for announced in active_announcements())
    return [reader for reader in loaded if reader is not None]


def initializer_of(node: Any) -> str:
    """How a user writes the method that makes the arrays of an object that holds none.

    Empty for anything else than such an object of a library that is known.

    >>> initializer_of({})
    ''
    """
    found = (reader.initializer_of(node) for reader in loaded_readers())
    return next(filter(None, found), "")


def naming_in(tree: Any) -> str:
    """What a user writes to name the plain arrays of a tree, if it is a library's; else empty."""
    return next(filter(None, (reader.naming_in(tree) for reader in loaded_readers())), "")


def refusal(tree: Any, as_model: bool = False) -> str:
    """Why something of another library cannot be used as a tree of arrays; empty if it can.

    Args:
        tree: What was given.
        as_model: Whether its arrays are to be parameters by name.

    >>> refusal({"w": 1.0})
    ''
    """
    found = (reader.refusal(tree, as_model) for reader in loaded_readers())
    return next(filter(None, found), "")


def sharing_readers() -> list[ArrayReader]:
    """The readers whose objects may occur several times in a tree."""
    return [reader for reader in loaded_readers() if reader.shares]


def is_shared_object(node: Any) -> bool:
    """Whether a node is one object wherever in a tree it occurs, as a mutable variable is.

    >>> is_shared_object({})
    False
    """
    return _is_shared_type(node.__class__)


@functools.lru_cache(maxsize=4096)
def _is_shared_type(node_type: Hashable) -> bool:
    assert isinstance(node_type, type)
    if node_type.__module__ in ("builtins", "collections"):
        return False
    return any(
        reader.reads(node_type) or reader.shares_type(node_type) for reader in sharing_readers()
    )
