"""Stacking sharded arrays along a new dimension, and taking them apart, each device its own part.

The values are moved and never computed with, so that every bit stays.
"""

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding

from penzai_shard.checkpointing.orbax_store import mesh_context
from penzai_shard.partition_specs import mesh_axes_by_dimension, spec_with_whole, spec_without


def sharding_of_blocks(sharding: Sharding, dimension: int) -> Sharding:
    """The layout of one block of a stack: that of the stack in its other dimensions."""
    if not isinstance(sharding, NamedSharding):
        return sharding
    spec = spec_without(sharding.spec, dimension)
    return NamedSharding(sharding.mesh, spec, memory_kind=sharding.memory_kind)


def sharding_of_stack(sharding: Sharding, dimension: int) -> Sharding:
    """The layout of a stack that is not split along the new dimension."""
    if not isinstance(sharding, NamedSharding):
        return sharding
    spec = spec_with_whole(sharding.spec, dimension)
    return NamedSharding(sharding.mesh, spec, memory_kind=sharding.memory_kind)


def stacked(arrays: Sequence[Any], dimension: int) -> Any:
    """Arrays of one layout as one array, not split along the new dimension."""
    sharding = getattr(arrays[0], "sharding", None)
    if sharding is None:
        return jnp.stack(arrays, dimension)
    arrays = [jax.device_put(array, sharding) for array in arrays]
    with mesh_context(sharding):
        return _stacker(dimension, sharding_of_stack(sharding, dimension))(arrays)


@functools.lru_cache(maxsize=256)
def _stacker(dimension: int, sharding: Sharding) -> Any:
    return jax.jit(lambda arrays: jnp.stack(arrays, dimension), out_shardings=sharding)


def unstacked(array: Any, dimension: int, shardings: Sequence[Any] | None = None) -> list[Any]:
    """The arrays that are stacked along a dimension.

    Args:
        array: The stack.
        dimension: Which dimension.
        shardings: The layout of each; by default that of the stack in its other dimensions.
    """
    count = array.shape[dimension]
    if not hasattr(array, "sharding"):
        array = jnp.asarray(array)
    if shardings is None:
        shardings = [sharding_of_blocks(array.sharding, dimension)] * count
    with mesh_context(array.sharding):
        return list(_unstacker(dimension, tuple(shardings))(array))


@functools.lru_cache(maxsize=256)
def _unstacker(dimension: int, shardings: tuple[Sharding, ...]) -> Any:
    def unstack(array: jax.Array) -> tuple[jax.Array, ...]:
        return tuple(
            jax.lax.index_in_dim(array, i, dimension, keepdims=False) for i in range(len(shardings))
        )

    return jax.jit(unstack, out_shardings=shardings)


class GrowingStack:
    """A stack that is filled block by block, so that only one block is there twice.

    Attributes:
        struct: Shape, dtype and sharding of the whole.
        dimension: The dimension along which the blocks are.
        missing: The numbers of the blocks that it does not have yet.
    """

    def __init__(self, struct: jax.ShapeDtypeStruct, dimension: int) -> None:
        self.struct = struct
        self.dimension = dimension
        self.missing = set(range(struct.shape[dimension]))
        self._array: jax.Array | None = None

    def put(self, number: int, block: jax.Array) -> None:
        """Puts one block in its place."""
        sharding = self.struct.sharding
        with mesh_context(sharding):
            if self._array is None:
                self._array = jnp.zeros(self.struct.shape, self.struct.dtype, device=sharding)
            updated = _updater(sharding, self.struct.shape, self.dimension)(
                self._array, block, number
            )
            # Else the blocks that wait for their update would all be kept.
            self._array = jax.block_until_ready(updated)
        self.missing.remove(number)

    def whole(self) -> jax.Array:
        """The stack, once no block is missing."""
        assert self._array is not None
        assert not self.missing
        return self._array


@functools.lru_cache(maxsize=256)
def _updater(sharding: Sharding, shape: tuple[int, ...], dimension: int) -> Any:
    def update(stack: jax.Array, block: jax.Array, number: Any) -> jax.Array:
        return jax.lax.dynamic_update_index_in_dim(stack, block, number, dimension)

    if not isinstance(sharding, NamedSharding) or not isinstance(sharding.mesh, Mesh):
        return jax.jit(update, donate_argnums=0)
    axes = mesh_axes_by_dimension(sharding.spec, len(shape))[dimension]
    if not axes:
        return jax.jit(update, donate_argnums=0, out_shardings=sharding)
    length = sharding.shard_shape(shape)[dimension]

    def update_own_part(stack: jax.Array, block: jax.Array, number: Any) -> jax.Array:
        """Where the stack's dimension is split, only the device that has this block changes."""
        here = number - jax.lax.axis_index(axes) * length
        is_here = (here >= 0) & (here < length)
        at = jnp.clip(here, 0, length - 1)
        old = jax.lax.dynamic_index_in_dim(stack, at, dimension, keepdims=False)
        return update(stack, jnp.where(is_here, block, old), at)

    return jax.jit(
        jax.shard_map(
            update_own_part,
            mesh=sharding.mesh,
            in_specs=(sharding.spec, spec_without(sharding.spec, dimension), PartitionSpec()),
            out_specs=sharding.spec,
        ),
        donate_argnums=0,
        out_shardings=sharding,
    )
