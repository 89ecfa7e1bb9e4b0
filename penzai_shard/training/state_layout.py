"""How the arrays of a state are laid out, and bringing them to a form in which that is certain.

A compiled step is made for one layout. For every later step to fit it, arrays must be committed
to their places, on the Auto twin of their mesh, with canonical specs and strong types.
"""

from collections.abc import Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding

from penzai_shard.array_kinds import is_deleted
from penzai_shard.meshes import auto_twin, mesh_text
from penzai_shard.partition_specs import canonical_spec
from penzai_shard.planning import shared_named_sharding


def deleted(leaves: Iterable[Any]) -> bool:
    """Whether the memory of any array was given away, as donation does.

    >>> deleted([1, jnp.ones(2)])
    False
    """
    return any(map(is_deleted, leaves))


def as_array(leaf: Any) -> Any:
    """A number or NumPy array as a JAX array; anything else as it is.

    >>> as_array(2).dtype
    dtype('int32')
    """
    if isinstance(leaf, jax.Array) or not isinstance(
        leaf, bool | int | float | complex | np.ndarray | np.generic
    ):
        return leaf
    return jnp.asarray(leaf)


def with_strong_type(leaf: Any) -> Any:
    """An array without JAX's weak type, which the result of a computation would lose.

    >>> jnp.asarray(1.0).weak_type, with_strong_type(1.0).weak_type
    (True, False)
    """
    leaf = as_array(leaf)
    if getattr(leaf, "weak_type", False):
        return jax.lax.convert_element_type(leaf, leaf.dtype)
    return leaf


def mesh_of(leaves: Iterable[Any]) -> Mesh | None:
    """The Auto twin of the first mesh that an array lies on; None if none lies on one.

    >>> mesh_of([1.0, jnp.ones(2)]) is None
    True
    """
    for leaf in leaves:
        sharding = getattr(leaf, "sharding", None)
        if isinstance(sharding, NamedSharding) and isinstance(sharding.mesh, Mesh):
            twin = auto_twin(sharding.mesh)
            assert isinstance(twin, Mesh)
            return twin
    return None


def canonical(sharding: Sharding) -> Sharding:
    """The same layout on the Auto twin, its spec without trailing ``None``.

    >>> from penzai_shard.meshes import make_mesh
    >>> canonical(NamedSharding(make_mesh({"data": 8}), PartitionSpec("data", None))).spec
    P('data',)
    """
    if not isinstance(sharding, NamedSharding):
        return sharding
    mesh = auto_twin(sharding.mesh)
    spec = canonical_spec(sharding.spec)
    if mesh == sharding.mesh and spec == sharding.spec:
        return sharding
    if sharding.memory_kind == "device":
        return shared_named_sharding(mesh, spec)
    return NamedSharding(mesh, spec, memory_kind=sharding.memory_kind)


def committed(leaf: Any, mesh: Mesh | None) -> Any:
    """An array committed to its place, in canonical form; moves nothing that is committed.

    Args:
        leaf: An array. One that JAX was free to place goes to every device of the mesh.
        mesh: The mesh of the state, or None for a state on one device.
    """
    if not isinstance(leaf, jax.Array):
        return leaf
    sharding = leaf.sharding
    if not leaf.committed:
        target = sharding if mesh is None else shared_named_sharding(mesh, PartitionSpec())
        return jax.device_put(leaf, target)
    target = canonical(sharding)
    return leaf if target is sharding else jax.device_put(leaf, target)


def device_problems(paths: Iterable[str], leaves: Sequence[Any], mesh: Mesh | None) -> list[str]:
    """One line for every array that is committed to other devices than the mesh's.

    Args:
        paths: Path of each leaf.
        leaves: The leaves.
        mesh: The mesh of the state, or None for a state on one device.
    """
    if mesh is None:
        return []
    devices = set(mesh.devices.flat)
    return [
        f"{path}: lies on {_devices_text(leaf.sharding.device_set)}, "
        f"the rest of the state on a mesh of {len(devices)} devices. Place it too: "
        "jax.device_put(state, train_state_sharding(state, mesh, rules))."
        for path, leaf in zip(paths, leaves, strict=True)
        if isinstance(leaf, jax.Array) and leaf.sharding.device_set != devices
    ]


def without_shared_buffers(leaves: Sequence[Any], others: Iterable[Any]) -> list[Any]:
    """The arrays, those copied whose memory another one uses too, so that all can be donated.

    Args:
        leaves: Arrays to donate.
        others: Arrays that must survive.
    """
    used = {buffer for other in others for buffer in _buffers(other)}
    result = []
    for leaf in leaves:
        buffers = _buffers(leaf)
        if used.intersection(buffers):
            copy = jnp.copy(leaf)
            leaf = jax.device_put(copy, leaf.sharding) if leaf.committed else copy
        used.update(buffers)
        result.append(leaf)
    return result


Packing = tuple[tuple[int, int | None], ...]


def packed_scalars(leaves: Sequence[Any]) -> tuple[list[Any], Packing]:
    """The arrays, scalars that are alike in all but their value put into one array.

    Models repeat scalars, such as a norm's epsilon, in every block. Passing each to a program by
    itself would cost time at every call.

    Args:
        leaves: Placed arrays.

    Returns:
        The arrays to pass, and for every leaf which of them it is, or is in and where. That
        depends on dtypes and layouts, not on values.

    >>> passed, packing = packed_scalars([jnp.asarray(1.0), jnp.ones(2), jnp.asarray(3.0)])
    >>> packing, [float(x) for x in unpacked(passed, packing)[::2]]
    (((1, 0), (0, None), (1, 1)), [1.0, 3.0])
    """
    passed: list[Any] = []
    where: list[tuple[int, int | None]] = []
    alike: dict[Any, list[int]] = {}
    for i, leaf in enumerate(leaves):
        if _is_packable(leaf):
            key = (leaf.dtype, leaf.weak_type, leaf.sharding, leaf.committed)
            alike.setdefault(key, []).append(i)
            where.append((-1, None))
        else:
            where.append((len(passed), None))
            passed.append(leaf)
    for (_, _, sharding, committed), members in alike.items():
        for position, i in enumerate(members):
            where[i] = (len(passed), position)
        packed = jax.lax.concatenate([jax.lax.reshape(leaves[i], (1,)) for i in members], 0)
        passed.append(jax.device_put(packed, sharding) if committed else packed)
    return passed, tuple(where)


def _is_packable(leaf: Any) -> bool:
    return (
        isinstance(leaf, jax.Array)
        and not leaf.ndim
        and leaf.is_fully_replicated
        and not jnp.issubdtype(leaf.dtype, jax.dtypes.extended)
    )


def unpacked(passed: Sequence[Any], packing: Packing) -> list[Any]:
    """The leaves that `packed_scalars` packed, weak types kept."""
    return [
        passed[i] if j is None else jax.lax.index_in_dim(passed[i], j, keepdims=False)
        for i, j in packing
    ]


def _buffers(leaf: Any) -> set[int]:
    if not isinstance(leaf, jax.Array) or not leaf.size:
        return set()
    if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        leaf = jax.random.key_data(leaf)
    return {shard.data.unsafe_buffer_pointer() for shard in leaf.addressable_shards}


def sharding_text(sharding: Sharding) -> str:
    """A sharding as short text for messages.

    >>> from penzai_shard.meshes import make_mesh
    >>> sharding_text(NamedSharding(make_mesh({"data": 8}), PartitionSpec("data")))
    "P('data',) on mesh data=8"
    """
    if isinstance(sharding, NamedSharding):
        return f"{sharding.spec} on mesh {mesh_text(sharding.mesh)}"
    return _devices_text(sharding.device_set)


def _devices_text(devices: Iterable[jax.Device]) -> str:
    found = sorted(devices, key=lambda device: device.id)
    return f"device {found[0].id}" if len(found) == 1 else f"{len(found)} devices"
