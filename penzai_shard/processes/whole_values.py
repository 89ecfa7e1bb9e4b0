"""Putting values that every process has whole on devices of several processes.

``jax.device_put`` sends each array through the devices to see whether all processes gave the same,
in the order in which it meets them, and refuses random keys. Here one message says it for all
arrays, and each process then fills its own devices.
"""

import functools
import hashlib
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, Sharding

from penzai_shard.array_kinds import is_traced
from penzai_shard.errors import ShardingError, raise_all
from penzai_shard.library_apis.jax_api import is_weakly_typed
from penzai_shard.processes.differences import refuse_differences

_FIX = (
    "Give every process the same whole array, made from the same seed or file. To give each "
    "process's own part of a batch: shard_batch(batch, mesh, rules, local=True)."
)


def put_all(
    values: Sequence[Any],
    shardings: Sequence[Sharding | None],
    paths: Callable[[], Sequence[str]],
    called: str,
) -> list[Any]:
    """``jax.device_put`` of a list of arrays, whose devices may be those of several processes.

    Args:
        values: Arrays of NumPy or JAX, and numbers. What is not on the mesh yet, every process
            gives whole, and the same.
        shardings: The sharding of each; None leaves it to JAX.
        paths: Gives the path of each, for messages.
        called: The function that was called, for messages.

    Returns:
        The arrays.

    Raises:
        ShardingError: Arrays differ between processes, or are on other devices of several
            processes than they are to be put on.

    >>> [float(x) for x in put_all([1.5, np.ones(())], [None, None], lambda: ["a", "b"], "place")]
    [1.5, 1.0]
    """
    new = [
        index
        for index, (value, sharding) in enumerate(zip(values, shardings, strict=True))
        if sharding is not None and not sharding.is_fully_addressable and is_on_this_process(value)
    ]
    _refuse_other_devices(values, shardings, paths, called)
    result = list(values)
    if new:
        hosted = {index: host_data(values[index]) for index in new}
        names = paths()
        # Arrays on fewer processes than others are compared among those alone.
        groups: dict[tuple[int, ...], dict[str, str]] = {}
        for index, host in hosted.items():
            sharding = shardings[index]
            assert sharding is not None
            text = f"{host.dtype}{list(host.shape)} with checksum {checksum_of(host)}"
            groups.setdefault(processes_of(sharding), {})[names[index]] = text
        for processes, entries in sorted(groups.items()):
            if jax.process_index() in processes:
                headline = f"{called} got arrays that differ between processes:"
                refuse_differences(called, headline, entries, _FIX, processes)
        for index, host in hosted.items():
            result[index] = from_host(values[index], host, shardings[index])
    old = [index for index in range(len(result)) if index not in set(new)]
    placed = jax.device_put([result[i] for i in old], [shardings[i] for i in old])
    for index, array in zip(old, placed, strict=True):
        result[index] = array
    return result


def is_on_this_process(value: Any) -> bool:
    """Whether this process has the whole of a value.

    >>> is_on_this_process(jnp.ones(2)), is_on_this_process(1.5)
    (True, True)
    """
    if not isinstance(value, jax.Array):
        return True
    return not is_traced(value) and value.is_fully_addressable


def processes_of(sharding: Sharding) -> tuple[int, ...]:
    """The processes that have devices of a sharding, in order.

    >>> processes_of(jnp.ones(2).sharding)
    (0,)
    """
    devices: Any = sharding.device_set
    return tuple(sorted({device.process_index for device in devices}))


def layout_text(sharding: Any) -> str:
    """How a sharding lays an array out, and on which devices, in words that tell any two apart.

    >>> from jax.sharding import Mesh, NamedSharding, PartitionSpec
    >>> mesh = Mesh(np.array(jax.devices()), ("data",))
    >>> layout_text(NamedSharding(mesh, PartitionSpec("data")))
    "P('data',) over data=8"
    """
    if not isinstance(sharding, NamedSharding):
        return str(sharding)
    lengths = ", ".join(f"{axis}={length}" for axis, length in sharding.mesh.shape.items())
    text = f"{sharding.spec} over {lengths}"
    order = [device.id for device in sharding.mesh.devices.flat]
    # Said where it may differ between processes that name the same mesh axes.
    return (
        text
        if order == sorted(order) and len(order) == jax.device_count()
        else (f"{text}, devices {_digest(order)}")
    )


def _digest(numbers: Sequence[int]) -> str:
    if len(numbers) <= 16:
        return ", ".join(map(str, numbers))
    return hashlib.blake2b(repr(list(numbers)).encode(), digest_size=6).hexdigest()


def host_data(value: Any) -> np.ndarray:
    """The numbers of a value in host memory, in the dtype that JAX gives them; keys as numbers.

    >>> host_data(2).dtype, host_data(jax.random.key(0)).tolist()
    (dtype('int32'), [0, 0])
    """
    if _is_key(value):
        value = jax.random.key_data(value)
    return np.asarray(value, jax.dtypes.result_type(value))


def checksum_of(value: Any) -> str:
    """A short checksum of the numbers of a value.

    >>> checksum_of(np.arange(3)) == checksum_of(jnp.arange(3))
    True
    """
    flat = np.ascontiguousarray(host_data(value)).reshape(-1).view(np.uint8)
    return hashlib.blake2b(flat.data, digest_size=6).hexdigest()


def from_host(value: Any, host: np.ndarray, sharding: Any) -> jax.Array:
    """An array over devices of several processes, each of which has the whole in host memory.

    Args:
        value: The value, for its kind.
        host: Its ``host_data``.
        sharding: Where the array is to be.

    >>> from_host(1.5, host_data(1.5), jnp.ones(()).sharding)
    Array(1.5, dtype=float32, weak_type=True)
    """
    if not host.ndim and is_weakly_typed(jax.typeof(value)):
        # JAX takes a number of Python for the same in all processes, and keeps its weak type.
        return resharded(host.item(), sharding)
    array = jax.make_array_from_callback(
        host.shape, sharding, lambda index: host[index], dtype=host.dtype
    )
    return with_kind_of(value, array, sharding)


def with_kind_of(value: Any, array: jax.Array, sharding: Any) -> jax.Array:
    """Numbers as random keys again, if a value was keys."""
    if not _is_key(value):
        return array
    impl = jax.random.key_impl(value)
    return jax.jit(lambda x: jax.random.wrap_key_data(x, impl=impl), out_shardings=sharding)(array)


def resharded(array: Any, sharding: Sharding) -> Any:
    """An array in another layout on the same devices, also of several processes, which all ask.

    >>> resharded(jnp.arange(2), jnp.ones(()).sharding).tolist()
    [0, 1]
    """
    return _identity(sharding)(array)


@functools.lru_cache(maxsize=256)
def _identity(sharding: Sharding) -> Callable[[Any], Any]:
    return jax.jit(lambda x: x, out_shardings=sharding)


def _is_key(value: Any) -> bool:
    return isinstance(value, jax.Array) and jnp.issubdtype(value.dtype, jax.dtypes.prng_key)


def _refuse_other_devices(
    values: Sequence[Any],
    shardings: Sequence[Sharding | None],
    paths: Callable[[], Sequence[str]],
    called: str,
) -> None:
    """Refuses arrays of several processes that are to go to other devices, which JAX cannot do."""
    moved = [
        index
        for index, (value, sharding) in enumerate(zip(values, shardings, strict=True))
        if sharding is not None
        and not is_on_this_process(value)
        and value.sharding.device_set != sharding.device_set
    ]
    if moved:
        names = paths()
        raise_all(
            ShardingError,
            f"{called} cannot move arrays between meshes of different processes:",
            [
                f"{names[i]}: is on {len(values[i].sharding.device_set)} devices of several "
                "processes, and is to go to others. Save it, and restore it onto the other mesh: "
                "save_params, restore_params."
                for i in moved
            ],
        )
