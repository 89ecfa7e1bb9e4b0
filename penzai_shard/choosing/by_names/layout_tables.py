"""Which rules a layout lays each kind of array out by, as its edits of a model have it."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from jax.sharding import AbstractMesh

from penzai_shard.axis_rules import AxisRules
from penzai_shard.choosing.by_names.step_arrays import Table
from penzai_shard.choosing.by_names.stored_arrays import StoredArrays
from penzai_shard.layouts import Layout
from penzai_shard.rule_kinds import LogicalAxis, OnIndivisible


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
        on_indivisible: What becomes of lengths of parameters that do not divide.
    """

    rules: Mapping[Table, AxisRules]
    optimizer: AxisRules
    batch: AxisRules
    blocks: Any
    policy: str | None
    vocabulary: LogicalAxis
    gathers_again: bool
    on_indivisible: OnIndivisible

    @classmethod
    def of(
        cls,
        layout: Layout,
        stored: StoredArrays,
        mesh: AbstractMesh,
        on_indivisible: OnIndivisible = "error",
    ) -> "LayoutTables":
        """Reads a layout.

        Args:
            layout: The layout.
            stored: The parameters that it is for.
            mesh: The mesh.
            on_indivisible: What the layout is applied with.

        Raises:
            ShardingError: The layout does not fit.
        """
        model = stored.representatives
        asked = layout.edit_request(model, mesh, on_indivisible)
        parameters, compute = asked.parameters, asked.compute
        between = compute if asked.between is None else asked.between
        optimizer = parameters
        if layout.optimizer is not None:
            laid_out = layout.for_model(model, mesh, on_indivisible=on_indivisible)
            optimizer = laid_out.optimizer or parameters
        # Only then lookups and logits are edited too.
        edits_regions = (
            asked.split_in_layers or asked.splits_vocabulary or asked.between is not None
        )
        rules = {
            Table.STORED: parameters,
            Table.IN_BLOCKS: compute,
            Table.IN_VOCABULARY: compute if edits_regions else parameters,
            Table.UPDATE: optimizer if stored.has_moments else parameters,
            Table.INSIDE: compute,
            Table.LOGITS: compute if asked.splits_vocabulary else between,
            Table.BETWEEN: between,
        }
        return cls(
            rules,
            optimizer,
            layout.batch_rules,
            asked.blocks,
            asked.rematerialise,
            asked.vocabulary,
            asked.gather_again,
            on_indivisible,
        )
