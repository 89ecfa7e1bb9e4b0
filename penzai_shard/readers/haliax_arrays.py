"""Named arrays of Haliax: ``haliax.NamedArray``, each of whose axes has a name and a size.

Source: Haliax, ``haliax.core`` and ``haliax.partitioning``.
"""

import contextlib
import sys
from collections.abc import Iterator, Sequence
from typing import Any

from penzai_shard.axis_rules import AxisRules
from penzai_shard.errors import RuleTypeError, raise_all
from penzai_shard.meshes import AnyMesh
from penzai_shard.readers.array_reader import ArrayReader, ReadArray
from penzai_shard.readers.rules_in_force import in_mesh, rules_as_pairs


class _HaliaxReader(ArrayReader):
    """Reads ``haliax.NamedArray``; modules of Haliax are pytrees that hold such arrays."""

    library = "haliax.core"

    def reads(self, node_type: type) -> bool:
        return issubclass(node_type, sys.modules["haliax.core"].NamedArray)

    def read(self, node: Any) -> ReadArray:
        sizes = tuple(axis.size for axis in node.axes)
        return ReadArray(node.array, tuple(axis.name for axis in node.axes), sizes=sizes)

    def with_data(self, node: Any, data: Any) -> Any:
        return _made(node, data, node.axes)

    def resized(self, node: Any, shape: Sequence[int], data: Any) -> Any:
        pairs = zip(node.axes, shape, strict=True)
        return _made(node, data, tuple(axis.resize(size) for axis, size in pairs))

    def constrains(self, model: Any) -> bool:
        return "haliax.partitioning" in sys.modules and self.occurs_in(model)

    @contextlib.contextmanager
    def computing(self, model: Any, mesh: AnyMesh, rules: AxisRules) -> Iterator[Any]:
        """Haliax's own axis mapping, and the mesh that its constraints are for.

        ``hax.shard`` and ``hax.auto_sharded`` follow them, which Haliax's layers call.
        """
        partitioning = sys.modules["haliax.partitioning"]
        mapping = _mapping(rules_as_pairs(rules, mesh, "Haliax", "Haliax's axis mapping"))
        given = partitioning.current_thread_local_mapping()
        if given and dict(given) != mapping:
            raise RuleTypeError(
                f"hax.axis_mapping is in force with another mapping, {dict(given)}, than that by "
                f"which this layout computes, {mapping}. Leave it out around the step, or give "
                "the layout this mapping: compute=mapping."
            )
        with partitioning.axis_mapping(mapping), in_mesh(mesh):
            yield model


def _mapping(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    """Pairs as Haliax's mapping, which has one entry for a name."""
    first: dict[str, Any] = {}
    problems = []
    for name, mesh_axes in pairs:
        if first.setdefault(name, mesh_axes) != mesh_axes:
            problems.append(
                f"{name!r} -> {mesh_axes!r}: {name!r} has the rule {name!r} -> {first[name]!r} "
                "already. Give compute= one of the two."
            )
    raise_all(
        RuleTypeError,
        "this model constrains its activations by Haliax's axis mapping, which has one rule for a "
        "name:",
        problems,
    )
    return {name: mesh_axes for name, mesh_axes in first.items() if mesh_axes is not None}


def _made(node: Any, data: Any, axes: tuple[Any, ...]) -> Any:
    """An array of the node's type, past its constructor, which compares the sizes."""
    made = object.__new__(type(node))
    object.__setattr__(made, "array", data)
    object.__setattr__(made, "axes", axes)
    return made


READER = _HaliaxReader()
