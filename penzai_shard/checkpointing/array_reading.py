"""Reading arrays with Orbax, and checking that their numbers are those that were saved.

Everything that is particular to reading is in this module: arrays that Orbax does not store (empty
ones, typed keys), bounds on what is read at once, what it raises where files are damaged.
"""

import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from penzai_shard.checkpointing.array_records import ArrayRecord, key_data_shape
from penzai_shard.checkpointing.manifest import Manifest
from penzai_shard.checkpointing.orbax_store import mesh_context
from penzai_shard.checkpointing.value_checksums import (
    ValueSums,
    checksums_of,
    no_sums,
    sums_of,
)
from penzai_shard.errors import CheckpointDamagedError, raise_all
from penzai_shard.library_apis import orbax_api
from penzai_shard.library_apis.c_library import give_back_free_memory

# Of arrays that take this much together, so much is read at once. While a piece is read, it is in
# host memory up to three times: as it is in the file, unpacked, and on its device.
_GROUP_BYTES = 64 * 2**20
_READ_BYTES = 16 * 2**20
# Once a group of arrays cannot be read, they are read one by one until so many are found out.
_MOST_UNREADABLE = 8


def load_arrays(
    manifest: Manifest,
    wanted: Mapping[str, jax.ShapeDtypeStruct],
    *,
    verify: bool,
    take: Callable[[str, Any], None],
) -> None:
    """Reads arrays straight into their shardings: each device reads its own part.

    Args:
        manifest: What the checkpoint holds.
        wanted: By name, the shape and dtype as stored, and the sharding. All names must be in the
            manifest, and shapes and PRNG implementations must agree with it.
        verify: Whether to refuse numbers that are not those saved, where the checkpoint has their
            checksums. All copies on devices are checked.
        take: Called with the name of each array and with the array once it has been read, in the
            sharding asked for. What it does not keep is not kept.

    Raises:
        CheckpointDamagedError: Numbers cannot be read, or are not those saved. With several
            processes all raise it, as long as they call this together within
            ``failing_together``.
    """
    structs = {name: data_struct(struct, manifest.records[name]) for name, struct in wanted.items()}
    sums: dict[str, ValueSums] = {}
    unreadable: dict[str, str] = {}
    has_checksums = manifest.save is not None
    for group in read_in_groups(manifest, structs, add_up=verify and has_checksums):
        sums |= group.sums
        unreadable |= group.unreadable
        for name in list(group.arrays):
            impl = manifest.records[name].key_impl
            array = group.arrays.pop(name)
            take(name, array if impl is None else _keys(array, impl))
            del array
    raise_all(
        CheckpointDamagedError,
        f"the checkpoint at {manifest.path} is not as it was saved. Restore another copy of it:",
        _problems(manifest.records, checksums_of(sums), unreadable),
    )


@dataclasses.dataclass(frozen=True)
class ReadGroup:
    """Some arrays of a checkpoint.

    Attributes:
        arrays: Those that could be read, by name.
        sums: The sums of their numbers, and of those that could not be read, if asked for.
        unreadable: Why others could not be read.
    """

    arrays: dict[str, Any]
    sums: Mapping[str, ValueSums]
    unreadable: Mapping[str, str]


def read_in_groups(
    manifest: Manifest,
    structs: Mapping[str, jax.ShapeDtypeStruct],
    *,
    add_up: bool,
    most_unreadable: int | None = _MOST_UNREADABLE,
) -> Iterator[ReadGroup]:
    """Reads arrays, a bounded number of bytes at a time.

    Args:
        manifest: What the checkpoint holds.
        structs: By name, shape and dtype of what is stored, and the sharding. Without a sharding,
            and where JAX does not have the dtype, an array of NumPy is read.
        add_up: Whether to add up the numbers for checksums.
        most_unreadable: After how many failures the rest of a group is given up, which would each
            take their time.

    Yields:
        The groups. What is taken out of their arrays is not kept here.
    """
    for names in _groups(structs):
        wanted = {name: structs[name] for name in names}
        arrays, unreadable = _read(manifest, wanted, most_unreadable)
        sums = {}
        if add_up:
            sums = {name: sums_of(array) for name, array in arrays.items()}
            sums = {name: found.finished() for name, found in sums.items()}
            sums |= {name: no_sums(struct) for name, struct in wanted.items() if name not in sums}
        give_back_free_memory()
        yield ReadGroup(arrays, sums, unreadable)
        del arrays


def _problems(
    records: Mapping[str, ArrayRecord],
    found: Mapping[str, tuple[str, ...]],
    unreadable: Mapping[str, str],
) -> list[str]:
    """One line for each array whose numbers are damaged, in the order of the checkpoint."""
    problems = {
        name: f"{name}: its numbers are not those that were saved."
        for name, copies in found.items()
        if set(copies) != {records[name].values}
    }
    problems |= {
        name: f"{name}: its numbers cannot be read: {why}" for name, why in unreadable.items()
    }
    return [problems[name] for name in records if name in problems]


def _groups(structs: Mapping[str, jax.ShapeDtypeStruct]) -> Iterator[list[str]]:
    """The names in groups of which this process reads a bounded number of bytes each."""
    sizes = {
        name: math.prod(_part(struct)) * struct.dtype.itemsize * _devices_here(struct)
        for name, struct in structs.items()
    }
    group: list[str] = []
    size = 0
    # The large ones first, as long as there is room: what is needed to read and convert an array
    # comes on top of all that have been read before.
    for name in sorted(structs, key=lambda name: -sizes[name]):
        if group and size + sizes[name] > _GROUP_BYTES:
            yield group
            group, size = [], 0
        group.append(name)
        size += sizes[name]
    if group:
        yield group


def _read(
    manifest: Manifest,
    structs: Mapping[str, jax.ShapeDtypeStruct],
    most_unreadable: int | None,
) -> tuple[dict[str, Any], dict[str, str]]:
    """Some arrays, and why others of them cannot be read."""
    arrays: dict[str, Any] = {}
    unreadable: dict[str, str] = {}
    with orbax_api.without_noise():
        try:
            return _loaded(manifest, structs), {}
        except orbax_api.UnreadableError as error:
            if len(structs) == 1:
                return {}, dict.fromkeys(structs, str(error))
        for name, struct in structs.items():
            if len(unreadable) == most_unreadable:
                break
            try:
                arrays |= _loaded(manifest, {name: struct})
            except orbax_api.UnreadableError as error:
                unreadable[name] = str(error)
    given_up = [name for name in structs if name not in arrays and name not in unreadable]
    return arrays, unreadable | dict.fromkeys(given_up, "not tried, as so many others cannot")


def _loaded(manifest: Manifest, structs: Mapping[str, jax.ShapeDtypeStruct]) -> dict[str, Any]:
    """Some arrays by name, those without elements too, which are not stored."""
    arrays = {n: _empty(struct) for n, struct in structs.items() if 0 in struct.shape}
    stored = {n: _abstract(struct) for n, struct in structs.items() if n not in arrays}
    if not stored:
        return arrays
    described, structure = jax.tree_util.tree_flatten_with_path(manifest.stored_tree)
    names = [manifest.name_of(key_path) for key_path, _ in described]
    wanted = [stored.get(name) if name is not None else None for name in names]
    largest = max(
        _largest_piece(description, structs[str(name)])
        for (_, description), name in zip(described, names, strict=True)
        if name in stored
    )
    # Orbax fails where one single piece exceeds the bound on bytes read at once.
    read_bytes = max(_READ_BYTES, 1 + largest)
    tree = jax.tree_util.tree_unflatten(structure, wanted)
    loaded = orbax_api.load(manifest.directory, tree, read_bytes)
    for key_path, array in jax.tree_util.tree_leaves_with_path(loaded):
        arrays[str(manifest.name_of(key_path))] = array
    return arrays


def _largest_piece(description: Any, struct: jax.ShapeDtypeStruct) -> int:
    """How many bytes of an array are read at once, for one device's part of it."""
    part = _part(struct)
    chunk = getattr(description.storage_metadata, "chunk_shape", None) or struct.shape
    if len(chunk) != len(part):
        chunk = struct.shape
    # A part that starts inside a chunk may touch one chunk more than its length tells.
    touched = math.prod(
        min(-(-whole // piece), -(-length // piece) + 1) * piece
        for whole, length, piece in zip(struct.shape, part, chunk, strict=True)
    )
    return touched * struct.dtype.itemsize


def _is_for_jax(struct: jax.ShapeDtypeStruct) -> bool:
    """Whether an array is read into JAX, and not into NumPy."""
    # Without jax_enable_x64, JAX would make 32-bit numbers of what was saved with it.
    is_known = jax.dtypes.canonicalize_dtype(struct.dtype) == struct.dtype
    return struct.sharding is not None and is_known


def _abstract(struct: jax.ShapeDtypeStruct) -> Any:
    """What Orbax takes for an array to be read: for NumPy an array, here one that has no memory."""
    if _is_for_jax(struct):
        return struct
    return np.broadcast_to(np.zeros((), struct.dtype), struct.shape)


def _empty(struct: jax.ShapeDtypeStruct) -> Any:
    empty = np.zeros(struct.shape, struct.dtype)
    return jax.device_put(empty, struct.sharding) if _is_for_jax(struct) else empty


def _part(struct: jax.ShapeDtypeStruct) -> tuple[int, ...]:
    """The shape of the part that each device reads."""
    if not _is_for_jax(struct):
        return tuple(struct.shape)
    return tuple(struct.sharding.shard_shape(struct.shape))


def _devices_here(struct: jax.ShapeDtypeStruct) -> int:
    return len(struct.sharding.addressable_devices) if _is_for_jax(struct) else 1


def data_struct(struct: jax.ShapeDtypeStruct, record: ArrayRecord) -> jax.ShapeDtypeStruct:
    """The struct of what is stored for an array: for keys, of the numbers that make them up."""
    if record.key_impl is None:
        return struct
    # The key's own dimensions are whole on each device: a spec says nothing of further dimensions.
    shape = (*struct.shape, *key_data_shape(record.key_impl))
    return jax.ShapeDtypeStruct(shape, jnp.uint32, sharding=struct.sharding)


def _keys(numbers: jax.Array, impl: str) -> jax.Array:
    """Typed random keys made of their numbers, in the same sharding."""
    with mesh_context(numbers.sharding):
        keys = jax.random.wrap_key_data(numbers, impl=impl)
    return jax.device_put(keys, numbers.sharding)
