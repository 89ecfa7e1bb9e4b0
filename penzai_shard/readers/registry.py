"""Which reader reads what: our own readers, and those that other packages announce."""

import functools
import importlib
import importlib.metadata
import sys
from collections.abc import Hashable
from typing import Any

from penzai_shard.errors import RuleTypeError
from penzai_shard.readers.array_reader import ArrayReader

ENTRY_POINTS = "penzai_shard.readers"
"""The group of entry points under which other packages announce their readers.

The name of an entry point is the module that must have been imported for its reader to be loaded;
what it refers to is an ``ArrayReader``.
"""

# The module that must have been imported, and the reader.
OWN_READERS: dict[str, str] = {
    "flax.core.meta": "penzai_shard.readers.flax_linen:READER",
    "flax.nnx": "penzai_shard.readers.flax_nnx:READER",
    "haliax.core": "penzai_shard.readers.haliax_arrays:READER",
    "torch": "penzai_shard.readers.torch_tensors:READER",
}


def reader_of(node: Any) -> ArrayReader | None:
    """The reader of a node of a tree, or None if no library that is known has its type.

    >>> reader_of({}) is None
    True
    """
    return reader_of_type(node.__class__)


@functools.lru_cache(maxsize=4096)
def reader_of_type(node_type: Hashable) -> ArrayReader | None:
    """The reader of the nodes of a type, or None if no library that is known has it."""
    assert isinstance(node_type, type)
    # Types of Python and of JAX, which make up most trees, belong to no reader.
    if node_type.__module__ in ("builtins", "collections"):
        return None
    return next((reader for reader in loaded_readers() if reader.reads(node_type)), None)


def loaded_readers() -> list[ArrayReader]:
    """The readers of all libraries that were imported."""
    known = {**OWN_READERS, **_announced()}
    return [_loaded(reference) for library, reference in known.items() if library in sys.modules]


def sharing_readers() -> list[ArrayReader]:
    """Those of them whose objects may occur several times in a tree."""
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


@functools.cache
def _announced() -> dict[str, str]:
    """The readers that installed packages announce, by the module that they are for."""
    return {
        found.name: found.value for found in importlib.metadata.entry_points(group=ENTRY_POINTS)
    }


@functools.cache
def _loaded(reference: str) -> ArrayReader:
    module, _, name = reference.partition(":")
    reader = getattr(importlib.import_module(module), name)
    if not isinstance(reader, ArrayReader):
        raise RuleTypeError(
            f"the entry point {reference!r} of group {ENTRY_POINTS!r} refers to a "
            f"{type(reader).__name__}, which is not an ArrayReader. Give an instance of a class "
            "that derives from penzai_shard.readers.ArrayReader."
        )
    return reader
