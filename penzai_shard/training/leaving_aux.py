"""How a loss function's auxiliary outputs leave the devices that computed them."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from penzai_shard.layers.manual_region import (
    as_varying,
    varying_axes,
)
from penzai_shard.layers.shard_map_regions.boundaries import BoundaryTree, take_apart
from penzai_shard.training.device_part import DevicePart
from penzai_shard.training.manual_axes import ManualAxes


@dataclasses.dataclass(frozen=True)
class LeavingAux:
    """How auxiliary outputs leave the region.

    Attributes:
        tree: One microbatch's outputs, without their arrays.
        joined: Of each array with the batch axis, which dimension that is, after the microbatches.
        once: Which arrays are the same on all devices, and not to be counted for each.
    """

    tree: BoundaryTree
    joined: Sequence[int | None]
    once: Sequence[bool]

    @classmethod
    def of(cls, auxes: Any, axes: ManualAxes, device: DevicePart) -> "LeavingAux":
        """Decides it for the outputs of all microbatches."""
        tree, _ = take_apart(jax.tree.map(lambda x: x[0], auxes))
        joined = [
            1 + names.index(axes.batch_axis) if names and axes.batch_axis in names else None
            for names in tree.array_names()
        ]
        once = [
            device.tracked
            and not varying_axes(array).intersection(axes.names)
            and axes.aux_reductions.word(path) is None
            for path, array in zip(tree.array_paths(), jax.tree.leaves(auxes), strict=True)
        ]
        return cls(tree, joined, once)

    def leave(self, auxes: Any, device: DevicePart) -> tuple[list[Any], list[Any], list[Any]]:
        """The arrays to put together along the batch, along a first dimension, and those alike."""
        joined, stacked, once = [], [], []
        for array, dimension, alike in zip(
            jax.tree.leaves(auxes), self.joined, self.once, strict=True
        ):
            if dimension is not None:
                joined.append(as_varying(jnp.moveaxis(array, dimension, 0), device.axes.names))
            elif alike:
                once.append(array)
            else:
                stacked.append(as_varying(array, device.axes.names))
        return joined, stacked, once

    def put_together(self, left: tuple[list[Any], list[Any], list[Any]]) -> Any:
        """The outputs of all devices and microbatches along a new first dimension."""
        joined, stacked, once = map(iter, left)
        arrays = []
        for dimension, alike in zip(self.joined, self.once, strict=True):
            if dimension is not None:
                arrays.append(jnp.moveaxis(next(joined), 0, dimension))
            else:
                arrays.append(next(once if alike else stacked))
        one = self.tree.put_together(
            [jax.ShapeDtypeStruct(array.shape[1:], array.dtype) for array in arrays]
        )
        return jax.tree.unflatten(jax.tree.structure(one), arrays)
