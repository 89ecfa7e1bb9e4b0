"""Reads the boxes of Flax linen: ``nn.Partitioned``, ``nn.LogicallyPartitioned`` and their like.

Source: the guides of Flax on scaling up linen modules, and ``flax.core.meta``.
"""

import sys
from collections.abc import Hashable
from typing import Any

from flax.core import meta
from jax.sharding import PartitionSpec

from penzai_shard.readers.reader import Content

_EXAMPLE = 'nn.with_logical_partitioning(initializer, ("embed", "hidden"))'


class _Boxes:
    """A box without its data is comparable, and is the template."""

    library = "flax.core.meta"

    def reads(self, kind: type) -> bool:
        return issubclass(kind, meta.AxisMetadata)

    def open(self, node: Any) -> Content:
        # Flax's own boxes may lay their data over a mesh when they are asked for it.
        data = node.value if hasattr(node, "value") else node.unbox()
        template = node.replace_boxed(None)
        names, problem = read_names(_names_of_box(node), f"box {type(node).__name__}", _EXAMPLE)
        if isinstance(data, meta.AxisMetadata):
            problem = (
                f"a {type(data).__name__} stands in a {type(node).__name__}, so that its names are "
                "given twice",
                f"Annotate its initialiser once: {_EXAMPLE}.",
            )
        # A mesh in the box is that of linen's own layout, in whose place a plan stands.
        return Content(data, template, names, is_plain=True, problem=problem)

    def close(self, template: Any, data: Any) -> Any:
        return template.replace_boxed(data)

    def why_not(self, tree: Any) -> tuple[str, str] | None:
        linen = sys.modules.get("flax.linen")
        if linen is None or not isinstance(tree, linen.Module):
            return None
        what = f"{type(tree).__name__} is a module of linen, which holds no arrays"
        return what, "Give its variables: abstract_model(module.init, jax.random.key(0), x)."


def _names_of_box(box: Any) -> Any:
    own = getattr(type(box), "get_partition_spec", None)
    # Partitioned's own method leaves out names that a mesh in force does not have.
    if own is None or own is meta.Partitioned.get_partition_spec:
        return getattr(box, "names", None)
    return box.get_partition_spec()


def read_names(
    given: Any, holder: str, example: str
) -> tuple[tuple[Any, ...] | None, tuple[str, str] | None]:
    """The names that Flax keeps for an array, and why they cannot be used.

    Args:
        given: What stands in the place of the names.
        holder: What has them, for messages.
        example: How they are written, for messages.
    """
    if isinstance(given, str) or not isinstance(given, tuple | list | PartitionSpec):
        what = f"the names of its {holder} are {given!r} and no tuple"
        return None, (what, f"Write a name, or None, for each dimension: {example}.")
    names: list[Any] = []
    for entry in given:
        name = tuple(entry) if isinstance(entry, list) else entry
        if name is PartitionSpec.UNCONSTRAINED or not isinstance(name, Hashable):
            what = f"the names of its {holder} have {name!r} among them, which is no name"
            return None, (what, "Write a text, or None for a dimension that stays whole.")
        if isinstance(name, tuple) and len(name) < 2:
            # As a PartitionSpec reads it.
            name = name[0] if name else None
        names.append(name)
    return tuple(names), None


READERS = [_Boxes()]
