"""Which rules a layout lays each kind of array out by, as its edits of a model have it."""

import dataclasses
from collections.abc import Hashable, Mapping
from typing import Any

from jax.sharding import AbstractMesh

from penzai_shard.axis_rules import AxisRules
from penzai_shard.choosing.by_names.step_arrays import Table
from penzai_shard.choosing.by_names.stored_arrays import StoredArrays
from penzai_shard.layouts import Layout
from penzai_shard.layouts.model_roles import DEFAULT_NAMES, OF_LAYERS, groups_of
from penzai_shard.rule_kinds import LogicalAxis


@dataclasses.dataclass(frozen=True)
class LayoutTables:
    """What of a layout decides on the price of a step.

    Attributes:
        rules: The rules of each kind of array.
        optimizer: The rules of the optimizer's state.
        batch: The rules of the inputs.
        blocks: The blocks, as of the layout.
        policy: What blocks keep for the backward pass, as of the layout.
        vocabulary: The logical axis of the vocabulary.
        gathers_again: Whether gathered parameters are dropped after the forward pass.
    """

    rules: Mapping[Table, AxisRules]
    optimizer: AxisRules
    batch: AxisRules
    blocks: Any
    policy: str | None
    vocabulary: LogicalAxis
    gathers_again: bool

    @classmethod
    def of(cls, layout: Layout, stored: StoredArrays, mesh: AbstractMesh) -> "LayoutTables":
        """Reads a layout.

        Args:
            layout: The layout.
            stored: The parameters that it is for.
            mesh: The mesh.

        Raises:
            ShardingError: The layout does not fit.
        """
        found = layout.for_model(stored.representatives, mesh)
        parameters, compute = found.parameters, found.compute
        between = compute if found.between_blocks is None else found.between_blocks
        optimizer = parameters if found.optimizer is None else found.optimizer
        tables = [parameters, compute, optimizer, between]
        names = {role: _names(role, layout) for role in DEFAULT_NAMES}
        splits_vocabulary = _splits(tables, names["vocabulary"])
        edits_regions = (
            any(_splits(tables, names[role]) for role in OF_LAYERS)
            or splits_vocabulary
            or found.between_blocks is not None
        )
        rules = {
            Table.STORED: parameters,
            Table.IN_BLOCKS: compute,
            Table.IN_VOCABULARY: compute if edits_regions else parameters,
            Table.UPDATE: optimizer if stored.has_moments else parameters,
            Table.INSIDE: compute,
            Table.LOGITS: compute if splits_vocabulary else between,
            Table.BETWEEN: between,
        }
        return cls(
            rules,
            optimizer,
            layout.batch_rules,
            layout.blocks,
            layout.rematerialise,
            next(iter(groups_of("vocabulary", layout.names)), ("vocabulary",))[0],
            layout.reshard_after_forward,
        )


def _names(role: str, layout: Layout) -> frozenset[Hashable]:
    return frozenset(name for group in groups_of(role, layout.names) for name in group)


def _splits(tables: list[AxisRules], names: frozenset[Hashable]) -> bool:
    """Whether some rule splits one of these logical axes."""
    return any(
        rule.mesh_axes and rule.logical_axis in names
        for rules in tables
        for rule in rules.name_rules
    )
