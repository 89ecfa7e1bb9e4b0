"""One way to lay out a training step: a mesh, a layout and microbatches."""

import dataclasses
from collections.abc import Mapping

from penzai_shard.layouts import Layout


@dataclasses.dataclass(frozen=True)
class Candidate:
    """One way to lay out a training step.

    Attributes:
        mesh_axes: Name and size of each mesh axis, in the mesh's order.
        layout: In the model's own logical axis names.
        microbatches: In how many parts, one after the other, the batch is computed.
    """

    mesh_axes: tuple[tuple[str, int], ...]
    layout: Layout
    microbatches: int = 1

    @property
    def mesh_shape(self) -> Mapping[str, int]:
        """The size of each mesh axis."""
        return dict(self.mesh_axes)
