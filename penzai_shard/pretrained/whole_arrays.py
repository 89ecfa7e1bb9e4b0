"""Whole arrays in host memory, of those that lie on several devices and processes."""

from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from penzai_shard.checkpointing.orbax_store import mesh_context
from penzai_shard.processes import is_on_this_process, resharded


def whole_array(array: Any, *, wanted: bool = True) -> np.ndarray[Any, Any] | None:
    """An array in host memory, whatever its layout; nothing of it stays there with the array.

    Of an array that lies on several processes, each device is given the whole for a moment, and all
    processes must call this.

    Args:
        array: An array of NumPy or JAX.
        wanted: Whether this process wants it.

    Returns:
        The array, maybe its own memory, which is not to be written to; None if it is not wanted.

    >>> whole_array(jax.numpy.arange(3)).tolist()
    [0, 1, 2]
    """
    if not isinstance(array, jax.Array):
        return np.asarray(array) if wanted else None
    if not is_on_this_process(array):
        whole = NamedSharding(array.sharding.mesh, PartitionSpec())  # type: ignore[attr-defined]
        with mesh_context(whole):
            array = resharded(array, whole)
        array = array.addressable_data(0)
    if not wanted:
        jax.block_until_ready(array)
        return None
    if array.is_fully_replicated:
        return _own_values(array.addressable_data(0))
    host = np.empty(array.shape, array.dtype)
    for shard in array.addressable_shards:
        if shard.replica_id == 0:
            host[shard.index] = _own_values(shard.data)
    return host


def _own_values(array: jax.Array) -> np.ndarray[Any, Any]:
    """The numbers of an array on one device."""
    # JAX keeps the host copy with the array that it is asked of.
    alias = jax.make_array_from_single_device_arrays(array.shape, array.sharding, [array])
    return np.asarray(alias)
