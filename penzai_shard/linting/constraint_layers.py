"""What the constraint layers of a model name: logical axes, and mesh axes."""

import dataclasses
from collections.abc import Iterable, Iterator
from typing import Any

import jax
from jax.sharding import NamedSharding, PartitionSpec

from penzai_shard.axis_rules import AxisRules
from penzai_shard.inspection.steps.pinning_layers import PinningLayer
from penzai_shard.layers import ConstrainSharding, ShardMapped
from penzai_shard.partition_specs import mesh_axes_used
from penzai_shard.rule_kinds import IdentityRule, LogicalAxis, NameRule
from penzai_shard.surgery.tree_nodes import nodes_of


@dataclasses.dataclass(frozen=True)
class Constraints:
    """What the constraint layers of a model name.

    Attributes:
        logical_axes: The logical axes that their rules name.
        mesh_axes: The mesh axes that their rules, and their shardings, name.
        rules: Their rules that name a logical axis, each once.
    """

    logical_axes: frozenset[LogicalAxis]
    mesh_axes: frozenset[str]
    rules: tuple[NameRule, ...] = ()


def constraints_in(model: Any) -> Constraints:
    """What the constraint layers of a model name.

    >>> from penzai_shard.layers import ConstrainShardingByName
    >>> mesh = jax.sharding.AbstractMesh((2,), ("data",))
    >>> constraints_in([ConstrainShardingByName(mesh, {"seq": "data"})]).mesh_axes
    frozenset({'data'})
    """
    logical_axes: set[LogicalAxis] = set()
    mesh_axes: set[str] = set()
    named_rules: dict[NameRule, None] = {}
    for _, node in nodes_of(model):
        for rules in _rules_of(node):
            logical_axes.update(rules.logical_axes)
            for rule in rules.rules:
                # The identity names every mesh axis.
                named = node.mesh.shape if isinstance(rule, IdentityRule) else rule.mesh_axes
                mesh_axes.update(named)
            named_rules |= {rule: None for rule in rules.rules if isinstance(rule, NameRule)}
        if isinstance(node, ConstrainSharding):
            mesh_axes.update(_mesh_axes_of(node.sharding))
    return Constraints(frozenset(logical_axes), frozenset(mesh_axes), tuple(named_rules))


def _rules_of(node: Any) -> Iterable[AxisRules]:
    if isinstance(node, ShardMapped):
        return map(AxisRules.of, (node.parameter_rules, node.activation_rules))
    pinning = PinningLayer.of(node)
    return () if pinning is None else pinning.rules


def _mesh_axes_of(shardings: Any) -> Iterator[str]:
    for leaf in jax.tree_util.tree_leaves(
        shardings, is_leaf=lambda node: isinstance(node, PartitionSpec)
    ):
        spec = leaf.spec if isinstance(leaf, NamedSharding) else leaf
        if isinstance(spec, PartitionSpec):
            yield from mesh_axes_used(spec)
