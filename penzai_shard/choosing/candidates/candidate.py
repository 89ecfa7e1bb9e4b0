"""One way to lay out a training step: a mesh, a layout and microbatches."""

import dataclasses
from collections.abc import Mapping
from typing import NamedTuple

from jax.sharding import AbstractMesh

from penzai_shard.layouts import Layout
from penzai_shard.meshes import make_mesh
from penzai_shard.rule_kinds import LogicalAxis, OnIndivisible


class PaddedAxis(NamedTuple):
    """A logical axis of parameters that is stored padded.

    Attributes:
        name: The logical axis.
        length: Its length.
        stored: The length that is stored.
    """

    name: LogicalAxis
    length: int
    stored: int


@dataclasses.dataclass(frozen=True)
class Candidate:
    """One way to lay out a training step.

    Attributes:
        mesh_axes: Name and size of each mesh axis, in the mesh's order.
        layout: In the model's own logical axis names.
        microbatches: In how many parts, one after the other, the batch is computed.
        padded: What is stored padded, as it does not divide over its mesh axes.
    """

    mesh_axes: tuple[tuple[str, int], ...]
    layout: Layout
    microbatches: int = 1
    padded: tuple[PaddedAxis, ...] = ()

    @property
    def on_indivisible(self) -> OnIndivisible:
        """``"pad"`` if something is stored padded, with which the layout is to be applied."""
        return "pad" if self.padded else "error"

    @property
    def mesh_shape(self) -> Mapping[str, int]:
        """The size of each mesh axis."""
        return dict(self.mesh_axes)

    @property
    def mesh(self) -> AbstractMesh:
        """The mesh, without devices."""
        return make_mesh(self.mesh_shape, abstract=True)
