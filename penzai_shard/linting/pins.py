"""What constraint layers ask of what flows through them, read off the layers."""

import dataclasses
from collections.abc import Mapping
from typing import Any, Literal, TypeAlias

import jax
from jax.sharding import NamedSharding, PartitionSpec

from penzai_shard.axis_rules import AxisRules
from penzai_shard.layers import ConstrainActivations, ConstrainSharding, ConstrainShardingByName
from penzai_shard.linting.model_flows import FlowingArray
from penzai_shard.linting.split_axes import split_of
from penzai_shard.meshes import AnyMesh, auto_twin, mesh_shape_of
from penzai_shard.partition_specs import decided_spec, mesh_axes_used
from penzai_shard.rule_kinds import LogicalAxis, OnIndivisible

Side: TypeAlias = Literal["inputs", "outputs"]


@dataclasses.dataclass(frozen=True)
class Pin:
    """One layout that a constraint layer brings an array to.

    Attributes:
        mesh: The mesh.
        rules: The rules that give the layout; None if it is given as it is.
        sharding: The layout of each array, in the order of the arrays, where there are no rules.
        side: Whether it is for what flows in or out.
        number: Its number among those of that side, which are brought about in turn.
        on_indivisible: As for ``make_plan``.
        needs_names: Whether arrays without names are refused.
    """

    mesh: AnyMesh
    rules: AxisRules | None = None
    sharding: tuple[Any, ...] = ()
    side: Side = "outputs"
    number: int = 0
    on_indivisible: OnIndivisible = "error"
    needs_names: bool = True

    @property
    def mesh_axes(self) -> frozenset[str]:
        """The mesh axes that it speaks of."""
        if self.rules is not None:
            return frozenset(axis for rule in self.rules.rules for axis in rule.mesh_axes)
        return frozenset(axis for spec in self._specs for axis in mesh_axes_used(spec))

    @property
    def _specs(self) -> list[PartitionSpec]:
        """The specs, in which what is left to JAX is whole."""
        return [
            decided_spec(each.spec) if isinstance(each, NamedSharding) else PartitionSpec()
            for each in self.sharding
        ]

    def layout(self, array: FlowingArray, number: int) -> dict[LogicalAxis, tuple[str, ...]]:
        """The mesh axes that each logical axis of an array is split over; whole ones are left out.

        Args:
            array: The array.
            number: Its number among those that are pinned.
        """
        if self.rules is None:
            specs = self._specs
            spec = specs[min(number, len(specs) - 1)]
            if len(spec) > len(array.shape):
                return {}
        elif array.names is None:
            return {}
        else:
            spec = self.rules.explain(
                array.names, array.shape, self.mesh, on_indivisible=self.on_indivisible
            ).spec
        return split_of(array.names, spec, mesh_shape_of(self.mesh))


def pins_of(layer: Any) -> tuple[Pin, ...]:
    """What a layer pins, in turn; nothing for layers that are not constraint layers.

    >>> mesh = jax.sharding.AbstractMesh((2,), ("data",))
    >>> pin, = pins_of(ConstrainShardingByName(mesh, {"batch": "data"}))
    >>> pin.layout(FlowingArray(("batch", "seq"), (4, 3), None, 0), 0)
    {'batch': ('data',)}
    """
    if isinstance(layer, ConstrainShardingByName):
        rules = AxisRules.of(layer.axis_name_to_mesh_name)
        needs_names = layer.on_unnamed == "error"
        mesh = auto_twin(layer.mesh)
        return (Pin(mesh, rules, on_indivisible=layer.on_indivisible, needs_names=needs_names),)
    if isinstance(layer, ConstrainActivations):
        sides: Mapping[Side, Any] = {"inputs": layer.inputs, "outputs": layer.outputs}
        return tuple(
            Pin(
                auto_twin(layer.mesh),
                AxisRules.of(rules),
                side=side,
                number=number,
                on_indivisible=layer.on_indivisible,
            )
            for side, tables in sides.items()
            for number, rules in enumerate(tables)
        )
    if isinstance(layer, ConstrainSharding):
        leaves = jax.tree_util.tree_leaves(layer.sharding)
        named = [leaf for leaf in leaves if isinstance(leaf, NamedSharding)]
        if named:
            return (Pin(auto_twin(named[0].mesh), None, tuple(leaves), needs_names=False),)
    return ()
