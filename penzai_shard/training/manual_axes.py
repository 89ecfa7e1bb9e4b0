"""The mesh axes along which each device computes the loss of its own examples."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from jax.sharding import Mesh, PartitionSpec

from penzai_shard.errors import RuleTypeError, ShardingError, raise_all
from penzai_shard.layers.manual_region import (
    mesh_axis_names,
)
from penzai_shard.layers.shard_map_regions.boundaries import BoundaryTree, take_apart
from penzai_shard.partition_specs import (
    canonical_spec,
    part_count,
)
from penzai_shard.rule_kinds import sized_mesh_axes_text
from penzai_shard.training.aux_reductions import AuxReductions


@dataclasses.dataclass(frozen=True)
class ManualAxes:
    """The mesh axes along which each device computes the loss of its own examples.

    Attributes:
        names: The mesh axes, the first of them major.
        batch_axis: The logical axis that inputs are split along.
        parts: How many microbatches a device's examples are split into.
        aux_reductions: How auxiliary outputs become one.
    """

    names: tuple[str, ...]
    batch_axis: Any
    parts: int
    aux_reductions: AuxReductions

    @classmethod
    def of(
        cls, given: Any, batch_axis: Any, parts: int, aux_reductions: AuxReductions
    ) -> "ManualAxes | None":
        """Reads what ``build_train_step_fn`` got as ``manual_axes``.

        Raises:
            RuleTypeError: It is something else than a mesh axis or several, or the batch axis is
                the number of a dimension.

        >>> ManualAxes.of("data", "batch", 1, AuxReductions({})).names
        ('data',)
        """
        if given is None:
            return None
        names = mesh_axis_names("manual_axes", given)
        if not names or len(set(names)) < len(names):
            raise RuleTypeError(
                f"manual_axes must name one mesh axis or several different ones, not {given!r}. "
                "Write for instance manual_axes=('data',), or leave it out."
            )
        if isinstance(batch_axis, int):
            raise RuleTypeError(
                "manual_axes splits inputs over devices by a logical axis, and "
                f"batch_axis={batch_axis!r} is the number of a dimension. Name the inputs, "
                'name_axes(batch, {"x": ("batch", None)}), leave batch_axis out, and take the '
                "names off where the loss computes with plain arrays: without_names(x)."
            )
        return cls(names, batch_axis, parts, aux_reductions)

    def check_lengths(self, inputs: Mapping[str, Any], mesh: Mesh) -> None:
        """Checks that inputs can be split over the devices, into microbatches on each.

        Raises:
            ShardingError: They cannot; all offenders are reported.
        """
        tree, arrays = take_apart(dict(inputs))
        devices = part_count(self.names, mesh.shape)
        over = sized_mesh_axes_text(self.names, mesh.shape)
        each = f", into {self.parts} microbatches on each device" if self.parts > 1 else ""
        sizes = {
            path: array.shape[names.index(self.batch_axis)]
            for path, names, array in zip(
                tree.array_paths(), tree.array_names(), arrays, strict=True
            )
            if names is not None and self.batch_axis in names
        }
        whole = devices * self.parts
        raise_all(
            ShardingError,
            "the inputs cannot be split over the devices:",
            [
                f"input {path}: logical axis {self.batch_axis!r} ({size}) does not divide over "
                f"{over}{each}. Pad the batch to {-(-size // whole) * whole}, or leave "
                f"{size % whole} examples out."
                for path, size in sizes.items()
                if size % whole
            ],
        )
        if not sizes:
            raise ShardingError(
                f"manual_axes={self.names!r}, but no input has the logical axis "
                f"{self.batch_axis!r}, so that every device would compute the same. Name it, for "
                f'instance pz.nx.wrap(x, {self.batch_axis!r}, "features"), or pass the name that '
                'it has: build_train_step_fn(..., batch_axis="...").',
                [
                    f"{path}: {_axes_text(names)}."
                    for path, names in zip(tree.array_paths(), tree.array_names(), strict=True)
                ],
            )

    def split(self, tree: BoundaryTree) -> list[PartitionSpec]:
        """The specs of the arrays of inputs and states: split along the batch, or whole."""
        return [
            canonical_spec(self.names if name == self.batch_axis else None for name in names or ())
            for names in tree.array_names()
        ]


def _axes_text(names: Sequence[Any] | None) -> str:
    return "an array without names" if names is None else f"its logical axes are {names}"
