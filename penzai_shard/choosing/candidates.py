"""Lists every sane way to lay out a train step: meshes, tables of rules, policies, microbatches."""

import dataclasses
from collections.abc import Hashable
from typing import Any

from jax.sharding import AbstractMesh

from penzai_shard.layouts.layout import Layout
from penzai_shard.meshes import make_mesh, mesh_text
from penzai_shard.rules import AxisRules


@dataclasses.dataclass(frozen=True)
class Candidate:
    """One way to lay out a train step.

    Attributes:
        mesh_sizes: Name and size of each mesh axis, in the mesh's order.
        layout: In the model's own names.
        microbatches: In how many parts, one after the other, the batch is computed.
    """

    mesh_sizes: tuple[tuple[str, int], ...]
    layout: Layout
    microbatches: int = 1

    @property
    def mesh(self) -> AbstractMesh:
        """The mesh, without devices."""
        mesh = make_mesh(dict(self.mesh_sizes), abstract=True)
        assert isinstance(mesh, AbstractMesh)
        return mesh

    @property
    def table(self) -> Hashable:
        """What is equal for candidates that differ in policy and microbatches only."""
        layout = self.layout
        tables = layout.parameters, layout.compute, layout.optimizer, layout.between_blocks
        return self.mesh_sizes, tables

    @property
    def words(self) -> str:
        """The layout for people; those of unequal candidates are unequal."""
        layout = self.layout
        parts = [
            _rules_text("computed by", layout.compute),
            _rules_text("stored by", layout.parameters),
            _rules_text("optimizer by", layout.optimizer),
            _rules_text("between blocks by", layout.between_blocks),
            layout.rematerialise and f"keeps {layout.rematerialise}",
            layout.reshard_after_forward and "gathers again",
            self.microbatches > 1 and f"{self.microbatches} microbatches",
        ]
        return f"{mesh_text(dict(self.mesh_sizes))}: {'; '.join(filter(None, parts))}"


def _rules_text(label: str, rules: AxisRules | None) -> str:
    def text(rule: Any) -> str:
        name = "largest" if rule.logical_axis is None else str(rule.logical_axis)
        return f"{name}/{'*'.join(rule.mesh_axes) or 'whole'}"

    if rules is None:
        return ""
    return f"{label} {', '.join(map(text, rules.rules)) or 'nothing'}"
