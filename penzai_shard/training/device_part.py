"""One device's part of a train step: what it does that a step of the whole batch does not."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
from jax.sharding import Mesh, PartitionSpec

from penzai_shard.errors import ShardingError, raise_all
from penzai_shard.layers.manual_region import (
    as_varying,
    varying_axes,
    with_all_mesh_axes,
)
from penzai_shard.layers.shard_map_regions.boundaries import BoundaryTree, take_apart
from penzai_shard.layers.shard_map_regions.region_plan import Crossing, Tracking
from penzai_shard.partition_specs import (
    canonical_spec,
    part_count,
)
from penzai_shard.rule_kinds import sized_mesh_axes_text
from penzai_shard.training.manual_axes import ManualAxes
from penzai_shard.tree_paths import join_paths


class WholeBatch:
    """What one evaluation of the loss is a part of, if it is of the whole batch."""

    def whole(self, trainable: Any) -> Any:
        """The parameters as the loss sees them."""
        return trainable

    def share(self, loss: Any) -> Any:
        """The loss's share of that of the whole batch, of which the gradient is taken."""
        return loss

    def mean(self, value: Any) -> Any:
        """The mean of a value over the devices."""
        return value

    def agreed(self, old: Any, new: Any) -> Any:
        """What the loss carries on, the same on all devices."""
        del old
        return new


@dataclasses.dataclass(frozen=True)
class WeightCrossing:
    """One array of a trainable parameter.

    Attributes:
        entering: How it enters the region.
        scattered: The mesh axes that each dimension of its gradient is scattered over, apart
            from those that the gather scatters it over.
        summed: The mesh axes that its gradient is added up over.
    """

    entering: Crossing
    scattered: tuple[tuple[str, ...], ...]
    summed: tuple[str, ...]

    @classmethod
    def of(
        cls, entering: Crossing, kept: Sequence[tuple[str, ...]], names: Sequence[str]
    ) -> "WeightCrossing":
        """Decides what becomes of the gradient of an array.

        Args:
            entering: How the array enters.
            kept: The mesh axes of each dimension of the gradient as the optimizer takes it.
            names: The mesh axes of the region.
        """
        left = [name for name in names if all(name not in entry for entry in entering.mesh_axes)]
        scattered: list[tuple[str, ...]] = []
        for stored, entry in zip(entering.mesh_axes, kept, strict=True):
            fits = not stored and set(entry) <= set(left)
            scattered.append(entry if fits else ())
            left = [name for name in left if name not in scattered[-1]]
        return cls(entering, tuple(scattered), tuple(left))

    @property
    def gradient_spec(self) -> PartitionSpec:
        """The spec with which its gradient leaves."""
        pairs = zip(self.entering.mesh_axes, self.scattered, strict=True)
        return canonical_spec(stored or scattered for stored, scattered in pairs)


@dataclasses.dataclass(frozen=True)
class DevicePart(WholeBatch):
    """One device inside the region.

    Attributes:
        axes: The mesh axes of the region.
        mesh: The mesh.
        weights: The trainable parameters without their arrays.
        crossings: How these arrays enter.
        tracking: What JAX knows about values that differ between devices.
    """

    axes: ManualAxes
    mesh: Mesh
    weights: BoundaryTree
    crossings: Sequence[WeightCrossing]
    tracking: Tracking

    @property
    def tracked(self) -> bool:
        """Whether JAX knows what differs between the devices."""
        return self.tracking is not Tracking.UNTRACKED

    def whole(self, trainable: Any) -> Any:
        """The parameters, gathered; the transpose scatters the sum of the gradients."""
        tree, arrays = take_apart(trainable)
        return tree.put_together(
            [
                weight.entering.gathered(array, self.axes.names, self.tracking)
                for weight, array in zip(self.crossings, arrays, strict=True)
            ]
        )

    def share(self, loss: Any) -> Any:
        """The loss over the number of devices, so that the gradients' sum is their mean."""
        if self.tracked:
            # A loss that the loss function has averaged itself is one value for all devices, and
            # the gradient of one value is taken once. Each device's share is to count.
            loss = as_varying(loss, self.axes.names)
        return loss / part_count(self.axes.names, self.mesh.shape)

    def agreed(self, old: Any, new: Any) -> Any:
        """What the loss carries on.

        Raises:
            ShardingError: Something differs between the devices, or may do so.
        """
        names = self.axes.names
        tree, arrays = take_apart(new)
        before = take_apart(old)[1]
        over = sized_mesh_axes_text(names, self.mesh.shape)
        problems = []
        for path, spec, was, is_ in zip(
            _state_paths(new), self.axes.split(tree), before, arrays, strict=True
        ):
            differs = varying_axes(is_).intersection(names) if self.tracked else is_ is not was
            if differs and not spec:
                problems.append(
                    f"{path}: each device would have another after the step over {over}, as it "
                    "sees its own examples alone. Make it one in the loss function: "
                    f"jax.lax.pmean(value, {names!r}), or psum, pmax or pmin; or train without "
                    "manual_axes."
                )
        raise_all(ShardingError, "a state differs between the devices:", problems)
        return new

    def mean(self, value: jax.Array) -> jax.Array:
        """The mean over the devices."""
        names = self.axes.names
        value = as_varying(value, names)
        return with_all_mesh_axes(
            lambda value: jax.lax.pmean(value, names), value, PartitionSpec(), tracked=self.tracked
        )

    def summed(self, gradients: Sequence[jax.Array]) -> list[jax.Array]:
        """The gradients added up over the devices, as they leave the region."""
        found = []
        for weight, gradient in zip(self.crossings, gradients, strict=True):
            for dimension, entry in enumerate(weight.scattered):
                if entry:
                    gradient = weight.entering.scattered(gradient, dimension, entry, self.tracking)
            if weight.summed:
                gradient = weight.entering.summed(gradient, weight.summed, self.tracking)
            found.append(gradient)
        return found


def _state_paths(carried: Any) -> list[str]:
    """The paths of the arrays of what a loss carries on."""
    return [
        join_paths(field, path)
        for field, tree in zip(("state_vars", "loss_fn_state"), carried, strict=True)
        for path in take_apart(tree)[0].array_paths()
    ]
