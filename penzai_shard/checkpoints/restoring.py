"""Restores arrays onto any mesh: chosen by name, read in parts, verified as they are read."""

import dataclasses
import os
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from penzai_shard.checkpoints.filling import ChecksumStore, Source, fill_arrays
from penzai_shard.checkpoints.records import ArrayRecord, Manifest, absolute_path, read_manifest
from penzai_shard.checkpoints.replacement import content_of
from penzai_shard.checkpoints.storage import refuse_damage
from penzai_shard.checkpoints.value_checksums import plain_context
from penzai_shard.errors import CheckpointDamagedError
from penzai_shard.processes import agreement

Sources = Mapping[str, Source]
Structs = Mapping[str, jax.ShapeDtypeStruct]

_MOST_ATTEMPTS = 3


def restore(
    called: str,
    path: str | os.PathLike[str],
    choose: Callable[[Manifest], tuple[Sources, Structs]],
    *,
    verify: bool = True,
    free: Any = (),
) -> dict[str, jax.Array]:
    """Restores arrays, on any devices; with several processes all call it.

    Any of the arrays can be donated. If the checkpoint is replaced while it is read, reading begins
    again, up to three times.

    Args:
        called: The function that was called, for messages.
        path: The checkpoint.
        choose: Says for what a checkpoint holds what each array is to be read from, and which
            shape, dtype and sharding it gets. Where a struct has no sharding, the array goes to the
            default device. It is called anew if reading begins again.
        verify: Whether numbers are compared with the checksums that were saved. All numbers of a
            stored array are read for that, also where only a part of them is wanted.
        free: A tree of arrays that are deleted once the checkpoint is found to fit.

    Raises:
        CheckpointNotFoundError: There is no checkpoint.
        CheckpointDamagedError: Something is not as it was saved; all that differs is in it.
        CheckpointMismatchError: A number does not fit into the dtype that is wanted.
        ShardingError: Processes want other arrays, or see other checkpoints.
    """
    attempt = 0
    while True:
        attempt += 1
        before = agreement.on_first("looking for a checkpoint", lambda: _identify(path))
        try:
            with agreement.together("reading what a checkpoint holds"), plain_context(called):
                manifest = read_manifest(path)
                sources, structs = choose(manifest)
            # Each process may have other arrays to itself.
            spread = {name: str(struct) for name, struct in structs.items() if _is_spread(struct)}
            agreement.refuse_differences(called, spread)
            with agreement.together("reading the arrays of a checkpoint"), plain_context(called):
                return _read_arrays(manifest, sources, structs, verify, free)
        except CheckpointDamagedError:
            after = agreement.on_first("looking for a checkpoint again", lambda: _identify(path))
            if after == before or attempt == _MOST_ATTEMPTS:
                raise


def _identify(path: str | os.PathLike[str]) -> list[int]:
    """What changes if the directory at a path becomes another one."""
    try:
        found = os.stat(content_of(absolute_path(path)))
    except OSError:
        return []
    return [found.st_ino, found.st_ctime_ns]


def _is_spread(struct: jax.ShapeDtypeStruct) -> bool:
    return bool(struct.sharding and not struct.sharding.is_fully_addressable)


def _read_arrays(
    manifest: Manifest, sources: Sources, structs: Structs, verify: bool, free: Any
) -> dict[str, jax.Array]:
    # In one order in all processes. Arrays without elements have an entry only.
    names = sorted({name for source in sources.values() for name in source.stored})
    records = {name: manifest.records[name] for name in names}
    full = [name for name, record in records.items() if record.nbytes]

    # Everything is opened before anything is read.
    store = manifest.store
    damaged = {}
    for name, (shape, dtype) in store.open(full).items():
        said = records[name].stored_shape, records[name].stored_dtype
        if (shape, dtype) != said:
            damaged[name] = f"its entry says {said[1]}{[*said[0]]}, stored is {dtype}{[*shape]}"
    refuse_damage(manifest.path, damaged)
    for array in jax.tree.leaves(free):
        if isinstance(array, jax.Array):
            array.delete()

    # Random keys are read as their numbers, and made again.
    record_of = {name: records[source.stored[0]] for name, source in sources.items()}
    pairs = {
        name: _read_as_numbers(source, structs[name], record_of[name])
        for name, source in sources.items()
    }
    checked = [name for name in full if verify and records[name].values]
    checksums = ChecksumStore(store, {name: records[name].stored_shape for name in checked})
    arrays = fill_arrays(pairs, store, checksums)

    found = checksums.compute_checksums()
    changed = [name for name in checked if found[name] != records[name].values]
    refuse_damage(
        manifest.path, dict.fromkeys(changed, "its numbers are not those that were saved")
    )
    for name, record in record_of.items():
        if record.key_impl is not None:
            arrays[name] = jax.random.wrap_key_data(arrays[name], impl=record.key_impl)
    return arrays


def _read_as_numbers(
    source: Source, struct: jax.ShapeDtypeStruct, record: ArrayRecord
) -> tuple[Source, jax.ShapeDtypeStruct]:
    """The same for the numbers as which random keys are stored, in a dimension behind their own."""
    rank, shape = len(record.shape), record.stored_shape
    order = (*source.order, *range(rank, len(shape)))
    dtype = struct.dtype if record.key_impl is None else jnp.uint32
    sharding = struct.sharding or jnp.zeros(()).sharding
    numbers = jax.ShapeDtypeStruct((*struct.shape, *shape[rank:]), dtype, sharding=sharding)
    return dataclasses.replace(source, shape=shape, order=order), numbers
