"""Puts arrays on devices, also on those of several processes.

Where there is one process, ``jax.device_put`` does it all. With several, it refuses arrays of one
process and typed random keys (jax 0.10.2), and compares NumPy data of all processes through the
devices, array by array. So each process fills its own devices here from the whole that it holds.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Sharding

from penzai_shard.processes.agreement import refuse_differences


def put(
    arrays: Sequence[Any], shardings: Sequence[Sharding], *, paths: Sequence[str] = ()
) -> list[jax.Array]:
    """``jax.device_put`` of a list of arrays, whose devices may be those of several processes.

    With several processes all call it, with equal values; a weak type is kept only by numbers.

    Args:
        arrays: Arrays of NumPy or JAX, typed random keys, numbers. What is not on devices of
            several processes yet, every process gives whole.
        shardings: The sharding of each.
        paths: The path of each, for messages.

    Raises:
        ShardingError: Shapes, dtypes or shardings differ between processes.
        ValueError: From JAX: an array of several processes is to go to other devices.

    >>> mesh = jax.make_mesh((8,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    >>> halves = jax.sharding.NamedSharding(mesh, jax.P("data"))
    >>> put([np.arange(8.0)], [halves])[0].sharding == halves
    True
    """
    if jax.process_count() == 1:
        return list(jax.device_put(list(arrays), list(shardings)))
    # Where a process keeps an array to itself, the others do not.
    paths = paths or [f"array {i}" for i in range(len(arrays))]
    texts = {
        path: f"{jax.typeof(array)} to {getattr(sharding, 'spec', sharding)}"
        for path, array, sharding in zip(paths, arrays, shardings, strict=True)
        if not sharding.is_fully_addressable
    }
    if texts:
        refuse_differences("put", texts)

    placed = []
    for array, sharding in zip(arrays, shardings, strict=True):
        numbers = jax.random.key_data(array) if _is_key(array) else array
        is_local = not isinstance(numbers, jax.Array) or numbers.is_fully_addressable
        # JAX moves what stays in this process, and what has devices of several already.
        put_one = _spread if is_local and not sharding.is_fully_addressable else jax.device_put
        numbers = put_one(numbers, sharding)
        if _is_key(array):
            numbers = jax.random.wrap_key_data(numbers, impl=jax.random.key_impl(array))
        placed.append(numbers)
    return placed


def _is_key(array: Any) -> bool:
    return isinstance(array, jax.Array) and jnp.issubdtype(array.dtype, jax.dtypes.prng_key)


def _spread(array: Any, sharding: Sharding) -> jax.Array:
    """An array of which each process fills its own parts from the whole; nothing is sent."""
    host = np.asarray(array, jax.dtypes.result_type(array))
    if jax.typeof(array).weak_type and not host.ndim:
        # Made from NumPy it would turn bfloat16 into float32 where it is multiplied with it. JAX
        # takes a number of Python as equal in all processes.
        number: jax.Array = jax.jit(jnp.asarray, out_shardings=sharding)(host.item())
        return number
    return jax.make_array_from_callback(
        host.shape, sharding, lambda index: host[index], dtype=host.dtype
    )
