"""How the arrays of a state are laid out, and bringing them to a form in which that is certain.

A compiled step is made for one layout. For every later step to fit it, arrays must be committed
to their places, on the Auto twin of their mesh, with canonical specs and strong types.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding

from penzai_shard.array_kinds import is_deleted, is_traced
from penzai_shard.errors import ShardingError, raise_all
from penzai_shard.library_apis.jax_api import is_weakly_typed, memory_addresses
from penzai_shard.meshes import AnyMesh, auto_twin, mesh_text
from penzai_shard.partition_specs import canonical_spec
from penzai_shard.planning import shared_named_sharding
from penzai_shard.processes import put_all


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
    if is_weakly_typed(leaf):
        return jax.lax.convert_element_type(leaf, leaf.dtype)
    return leaf


def meshes_of(arrays: Iterable[tuple[str, Any]]) -> dict[AnyMesh, str]:
    """The Auto twins of the meshes that arrays are on, each with the path of the first on it.

    Args:
        arrays: Arrays, structs, shardings, or what else has one, each with its path.

    >>> meshes_of([("x", 1.0), ("y", jnp.ones(2))])
    {}
    """
    found: dict[AnyMesh, str] = {}
    for path, leaf in arrays:
        sharding = leaf if isinstance(leaf, Sharding) else getattr(leaf, "sharding", None)
        if isinstance(sharding, NamedSharding) and not is_traced(leaf):
            found.setdefault(auto_twin(sharding.mesh), path)
    return found


def mesh_of(leaves: Iterable[Any]) -> Mesh | None:
    """The Auto twin of the first mesh that an array is on; None if none is on one.

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


def committed(
    leaves: Sequence[Any], mesh: Mesh | None, paths: Callable[[], list[str]]
) -> list[Any]:
    """Arrays committed to their places, in canonical form; moves nothing that is committed.

    Args:
        leaves: Arrays. Those that JAX was free to place go to every device of the mesh.
        mesh: The mesh of the state, or None for a state on one device.
        paths: Gives the path of each leaf, for messages.

    Raises:
        ShardingError: Some arrays are committed to other devices than the mesh's.
    """
    targets = [_target(leaf, mesh) for leaf in leaves]
    moved = [i for i, target in enumerate(targets) if target is not None]

    def moved_paths() -> list[str]:
        texts = paths()
        return [texts[i] for i in moved]

    placed = list(leaves)
    arrays = put_all(
        [leaves[i] for i in moved], [targets[i] for i in moved], moved_paths, "the train state"
    )
    for i, array in zip(moved, arrays, strict=True):
        placed[i] = array
    devices = None if mesh is None else set(mesh.devices.flat)
    elsewhere = [
        i
        for i, leaf in enumerate(placed)
        if devices and isinstance(leaf, jax.Array) and leaf.sharding.device_set != devices
    ]
    if elsewhere and devices:
        texts = paths()
        raise_all(
            ShardingError,
            "the arrays of this train state are on different devices:",
            [
                f"{texts[i]}: is on {_devices_text(placed[i].sharding.device_set)}, the rest of "
                f"the state on a mesh of {len(devices)} devices. Place it too: "
                "jax.device_put(state, train_state_sharding(state, mesh, rules))."
                for i in elsewhere
            ],
        )
    return placed


def _target(leaf: Any, mesh: Mesh | None) -> Sharding | None:
    """Where an array is to be put; None if it stays as it is."""
    if not isinstance(leaf, jax.Array):
        return None
    target = canonical(leaf.sharding)
    if leaf.committed and target is leaf.sharding:
        return None
    if not leaf.committed and mesh is not None:
        return shared_named_sharding(mesh, PartitionSpec())
    return target


def own_copy(leaf: Any) -> Any:
    """A copy of an array with memory of its own, as committed to its place as the array is."""
    copy = jnp.copy(leaf)
    return jax.device_put(copy, leaf.sharding) if getattr(leaf, "committed", False) else copy


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
        result.append(own_copy(leaf) if used & buffers else leaf)
        used |= buffers
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

    >>> packed, packing = packed_scalars([jnp.asarray(1.0), jnp.ones(2), jnp.asarray(3.0)])
    >>> packing, [float(x) for x in unpacked(packed, packing)[::2]]
    (((1, 0), (0, None), (1, 1)), [1.0, 3.0])
    """
    packed: list[Any] = []
    where: dict[int, tuple[int, int | None]] = {}
    alike: dict[Any, list[int]] = {}
    for i, leaf in enumerate(leaves):
        if _is_packable(leaf):
            key = (leaf.dtype, is_weakly_typed(leaf), leaf.sharding, leaf.committed)
            alike.setdefault(key, []).append(i)
        else:
            where[i] = (len(packed), None)
            packed.append(leaf)
    for (_, _, sharding, is_committed), members in alike.items():
        where |= {i: (len(packed), position) for position, i in enumerate(members)}
        array = jax.lax.concatenate([jax.lax.reshape(leaves[i], (1,)) for i in members], 0)
        packed.append(jax.device_put(array, sharding) if is_committed else array)
    return packed, tuple(where[i] for i in range(len(leaves)))


def _is_packable(leaf: Any) -> bool:
    return (
        isinstance(leaf, jax.Array)
        and not leaf.ndim
        and leaf.is_fully_replicated
        and not jnp.issubdtype(leaf.dtype, jax.dtypes.extended)
    )


def unpacked(packed: Sequence[Any], packing: Packing) -> list[Any]:
    """The leaves that `packed_scalars` packed, with their weak types."""
    return [
        packed[i] if j is None else jax.lax.index_in_dim(packed[i], j, keepdims=False)
        for i, j in packing
    ]


def _buffers(leaf: Any) -> frozenset[int]:
    if not isinstance(leaf, jax.Array) or not leaf.size:
        return frozenset()
    if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        leaf = jax.random.key_data(leaf)
    return memory_addresses(leaf)


def sharding_text(sharding: Sharding | None) -> str:
    """A sharding as short text for messages; None is that of a struct without one.

    >>> from penzai_shard.meshes import make_mesh
    >>> sharding_text(NamedSharding(make_mesh({"data": 8}), PartitionSpec("data")))
    "P('data',) on mesh data=8"
    """
    if sharding is None:
        return "no layout"
    if isinstance(sharding, NamedSharding):
        return f"{sharding.spec} on mesh {mesh_text(sharding.mesh)}"
    return _devices_text(sharding.device_set)


def _devices_text(devices: Iterable[jax.Device]) -> str:
    found = sorted(devices, key=lambda device: device.id)
    return f"device {found[0].id}" if len(found) == 1 else f"{len(found)} devices"
