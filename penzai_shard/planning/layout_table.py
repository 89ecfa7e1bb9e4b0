"""The layouts that rules give on one mesh, each worked out once and shared.

Large trees have few distinct layouts. Arrays with equal names and sizes get the very same
``NamedSharding`` object, which keeps trees small and comparisons fast.
"""

import dataclasses
import functools
import reprlib
from typing import Any

from jax.sharding import NamedSharding, PartitionSpec

from penzai_shard.axis_decisions import SpecExplanation, decide
from penzai_shard.axis_rules import AxisRules
from penzai_shard.errors import RuleTypeError
from penzai_shard.meshes import AnyMesh, auto_twin
from penzai_shard.named_leaves import NamedLeaf
from penzai_shard.partition_specs import canonical_spec
from penzai_shard.rule_kinds import LogicalAxis, OnIndivisible, check_option


@functools.lru_cache(maxsize=4096)
def shared_named_sharding(mesh: AnyMesh, spec: PartitionSpec) -> NamedSharding:
    """The one ``NamedSharding`` of a mesh and a spec; equal calls give the same object.

    >>> import jax
    >>> mesh = jax.sharding.AbstractMesh((2,), ("data",))
    >>> shared_named_sharding(mesh, PartitionSpec("data")) is shared_named_sharding(
    ...     mesh, PartitionSpec("data")
    ... )
    True
    """
    return NamedSharding(mesh, spec)


@dataclasses.dataclass(frozen=True)
class Layout:
    """The layout of one array, its reason, and what stands in its way."""

    spec: PartitionSpec
    reason: str
    problems: tuple[str, ...] = ()


class LayoutTable:
    """Rules applied to one mesh, always its Auto twin.

    Args:
        mesh: The mesh, concrete or abstract.
        rules: Rules in any form that ``AxisRules`` reads.
        on_indivisible: ``"error"``, or ``"replicate"`` to leave such dimensions unsharded.

    Raises:
        MeshError: A rule names a mesh axis that is not there.
        RuleTypeError: The rules or options cannot be read.
    """

    def __init__(
        self, mesh: AnyMesh, rules: Any = None, on_indivisible: OnIndivisible = "error"
    ) -> None:
        if not hasattr(mesh, "axis_types") or not hasattr(mesh, "shape"):
            raise RuleTypeError(
                f"a mesh is needed, not {type(mesh).__name__}: {reprlib.repr(mesh)}. "
                "Make one: make_mesh({'data': 4, 'model': 2})."
            )
        check_option("on_indivisible", on_indivisible)
        self.mesh = auto_twin(mesh)
        self.rules = AxisRules.of(rules)
        self.rules.check_mesh(self.mesh)
        self._mesh_items = tuple(self.mesh.shape.items())
        self._on_indivisible = on_indivisible

    @property
    def replicated(self) -> NamedSharding:
        """The sharding of an array that every device holds whole."""
        return shared_named_sharding(self.mesh, PartitionSpec())

    def sharding(self, spec: PartitionSpec) -> NamedSharding:
        """The shared sharding of a spec on this table's mesh."""
        return shared_named_sharding(self.mesh, spec)

    def decide(
        self, names: tuple[LogicalAxis | None, ...], sizes: tuple[int, ...]
    ) -> SpecExplanation:
        """What the rules give for an array of these names and sizes."""
        return decide(self.rules.rules, names, sizes, self._mesh_items, self._on_indivisible)

    def layout(self, leaf: NamedLeaf) -> Layout:
        """The layout of a named leaf; statistics follow the parameter that they belong to."""
        assert leaf.names is not None
        if leaf.problem:
            return Layout(PartitionSpec(), "", (f"{leaf.problem}.",))
        if leaf.whole is None:
            explained = self.decide(leaf.names, leaf.shape)
            reason = f"{leaf.note}: replicated" if leaf.note else explained.reason
            return Layout(explained.spec, reason, explained.problems)
        whole_names, whole_sizes = leaf.whole
        explained = self.decide(whole_names, whole_sizes)
        by_name = dict(zip(whole_names, explained.dimensions, strict=True))
        spec = canonical_spec(
            None if name is None else by_name[name].mesh_axes for name in leaf.names
        )
        reason = f"{leaf.note}, laid out as its parameter: {explained.reason}"
        return Layout(spec, reason, explained.problems)
