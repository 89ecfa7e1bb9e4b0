"""Boxes of Flax linen: ``nn.Partitioned``, ``nn.LogicallyPartitioned`` and their like.

Source: Flax, "Scale up Flax Modules on multiple devices", and ``flax.core.meta``.
"""

import sys
from collections.abc import Hashable
from typing import Any

import jax
from jax.sharding import PartitionSpec

from penzai_shard.readers.array_reader import ArrayReader, ReadArray
from penzai_shard.rule_kinds import LogicalAxis

_EXAMPLE = 'nn.with_logical_partitioning(initializer, ("embed", "hidden"))'


class _LinenReader(ArrayReader):
    """Reads every kind of ``flax.core.meta.AxisMetadata``; refuses those that it does not know.

    The names of a box are those that Flax's own ``nn.get_partition_spec`` reads. What a box says
    beside them, a mesh and rules of its own, is where Flax lays the array out when it is used.
    """

    library = "flax.core.meta"

    def reads(self, node_type: type) -> bool:
        return issubclass(node_type, sys.modules["flax.core.meta"].AxisMetadata)

    def read(self, node: Any) -> ReadArray:
        data, kind = _content(node), type(node).__name__
        if isinstance(data, sys.modules["flax.core.meta"].AxisMetadata):
            return ReadArray(
                data,
                (),
                f"a {type(data).__name__} is in a {kind}, and both say the names of one array. "
                f"Annotate its initialiser once: {_EXAMPLE}",
            )
        given = _given_names(node)
        names, problem = _read_names(given)
        if problem:
            text = f"the names {given!r} of its {kind}" if given is not None else f"its {kind}"
            return ReadArray(data, (), f"{text} {problem}")
        mesh, rules = getattr(node, "mesh", None), getattr(node, "rules", None)
        return ReadArray(data, names, mesh=mesh, rules=rules)

    def with_data(self, node: Any, data: Any) -> Any:
        return node.replace_boxed(data)


def _content(box: Any) -> Any:
    """What is in a box, without what ``unbox`` does to it."""
    if hasattr(box, "value"):
        return box.value
    leaves = jax.tree_util.tree_leaves(box)
    return leaves[0] if len(leaves) == 1 else None


def _given_names(box: Any) -> Any:
    """The names of a box as they are in it; None if it has none that are known."""
    meta = sys.modules["flax.core.meta"]
    own = getattr(type(box), "get_partition_spec", None)
    if own is None:
        return None
    if own is meta.Partitioned.get_partition_spec:
        return box.names
    # Whoever derives from a box, or writes one, may keep names in any way, but says them so.
    return box.get_partition_spec()


def _read_names(given: Any) -> tuple[tuple[LogicalAxis | None, ...], str]:
    """The names, one for each dimension as far as they go, and why they cannot be used."""
    if given is None:
        return (), (
            "has no names that are known: it has no get_partition_spec(), by which Flax asks for "
            f"them too. Give the class that method, or annotate the initialiser: {_EXAMPLE}"
        )
    if isinstance(given, str):
        return (), f"are one text. Write a tuple with a name for each dimension: ({given!r},)"
    if not isinstance(given, tuple | list | PartitionSpec):
        return (), f"are not a tuple. Write a name, or None, for each dimension: {_EXAMPLE}"
    names: list[LogicalAxis | None] = []
    for entry in given:
        name = tuple(entry) if isinstance(entry, list) else entry
        if name is PartitionSpec.UNCONSTRAINED:
            return (), (
                "leave a dimension to the compiler (UNCONSTRAINED), and a stored array has a "
                "layout in all of them. Write a name in its place, or None for a dimension that "
                "stays whole"
            )
        if isinstance(name, tuple) and len(name) < 2:
            # As a PartitionSpec reads it.
            name = name[0] if name else None
        if not isinstance(name, Hashable):
            return (), f"have {name!r} among them, which is not a name. Write a text, or None"
        names.append(name)
    return tuple(names), ""


READER = _LinenReader()
