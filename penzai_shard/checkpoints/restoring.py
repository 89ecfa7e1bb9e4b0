"""Restores arrays onto any mesh: chosen by name, read in parts, verified as they are read."""

import dataclasses
import math
import os
from collections.abc import Callable, Mapping
from typing import TypeAlias

import jax
import jax.numpy as jnp

from penzai_shard.checkpoints.filling import Source, SummedStore, fill_arrays, sum_stored
from penzai_shard.checkpoints.records import ArrayRecord, Manifest, absolute_path, read_manifest
from penzai_shard.checkpoints.replacement import content_of
from penzai_shard.checkpoints.storage import StoredArrays, refuse_damage
from penzai_shard.checkpoints.value_checksums import no_mesh, write_checksum
from penzai_shard.errors import CheckpointDamagedError
from penzai_shard.processes import agreement

Wanted: TypeAlias = tuple[Mapping[str, Source], Mapping[str, jax.ShapeDtypeStruct]]

_MOST_ATTEMPTS = 3


def restore(
    path: str | os.PathLike[str],
    choose: Callable[[Manifest], Wanted],
    *,
    verify: bool = True,
) -> dict[str, jax.Array]:
    """Restores arrays, on any devices; with several processes all call it.

    Any of the arrays can be donated. If the checkpoint is replaced while it is read, reading begins
    again, up to three times.

    Args:
        path: The checkpoint.
        choose: Says for what a checkpoint holds what each array is to be read from, and which
            shape, dtype and sharding it gets. Where a struct has no sharding, the array goes to the
            default device. It is called anew if reading begins again.
        verify: Whether numbers are compared with the checksums that were saved. All numbers of a
            stored array are read for that, also where only a part of them is wanted.

    Raises:
        CheckpointNotFoundError: There is no checkpoint.
        CheckpointDamagedError: Something is not as it was saved; all that differs is in it.
        CheckpointMismatchError: An integer does not fit into the dtype that is wanted.
        ShardingError: Processes want other arrays, or see other checkpoints.
    """
    attempt = 0
    while True:
        attempt += 1
        before = agreement.on_first("looking for a checkpoint", lambda: _identify(path))
        try:
            with agreement.together("reading what a checkpoint holds"), no_mesh():
                manifest = read_manifest(path)
                sources, structs = choose(manifest)
            agreement.refuse_differences("restoring", _describe_spread(structs))
            with agreement.together("reading the arrays of a checkpoint"), no_mesh():
                return _read_arrays(manifest, sources, structs, verify)
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


def _describe_spread(structs: Mapping[str, jax.ShapeDtypeStruct]) -> dict[str, str]:
    """What all processes must agree on: the arrays that lie on devices of several."""
    spread = {
        n: s for n, s in structs.items() if s.sharding and not s.sharding.is_fully_addressable
    }
    return {name: str(struct) for name, struct in spread.items()}


def _read_arrays(
    manifest: Manifest,
    sources: Mapping[str, Source],
    structs: Mapping[str, jax.ShapeDtypeStruct],
    verify: bool,
) -> dict[str, jax.Array]:
    # In one order in all processes. Arrays without elements have an entry only.
    names = sorted({name for source in sources.values() for name in source.stored})
    records = {name: manifest.records[name] for name in names}
    full = [name for name, record in records.items() if record.nbytes]

    # Everything is opened before anything is read.
    store = manifest.stored
    damaged = {}
    for name, (shape, dtype) in store.open(full).items():
        said = records[name].stored_shape, records[name].stored_dtype
        if (shape, dtype) != said:
            damaged[name] = f"its entry says {said[1]}{[*said[0]]}, stored is {dtype}{[*shape]}"
    refuse_damage(manifest.path, damaged)

    # Random keys are read as their numbers, and made again.
    record_of = {name: records[source.stored[0]] for name, source in sources.items()}
    sources = {name: _with_key_dimensions(s, record_of[name]) for name, s in sources.items()}
    numbers = {name: _describe_numbers(s, record_of[name]) for name, s in structs.items()}
    checked = [name for name in full if verify and records[name].values]
    summed = SummedStore(store, {name: records[name].stored_shape for name in checked})
    arrays = fill_arrays(sources, numbers, store, summed)

    checksums = _total(summed, records, store)
    changed = [name for name in checked if checksums[name] != records[name].values]
    refuse_damage(
        manifest.path, dict.fromkeys(changed, "its numbers are not those that were saved")
    )
    for name, record in record_of.items():
        if record.key_impl is not None:
            arrays[name] = jax.random.wrap_key_data(arrays[name], impl=record.key_impl)
    return arrays


def _with_key_dimensions(source: Source, record: ArrayRecord) -> Source:
    """The source of the numbers that random keys are stored as: they are the last dimension."""
    ndim, stored = len(record.shape), record.stored_shape
    order = (*source.order, *range(ndim, len(stored)))
    return dataclasses.replace(source, shape=stored, order=order)


def _describe_numbers(struct: jax.ShapeDtypeStruct, record: ArrayRecord) -> jax.ShapeDtypeStruct:
    """What is read for an array, with a sharding."""
    sharding = struct.sharding or jnp.zeros(()).sharding
    shape, dtype = struct.shape, struct.dtype
    if record.key_impl is not None:
        shape, dtype = (*shape, *record.stored_shape[len(record.shape) :]), jnp.uint32
    return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)


def _total(
    summed: SummedStore, records: Mapping[str, ArrayRecord], store: StoredArrays
) -> dict[str, str]:
    """The checksum of each array, of which each process has read parts."""
    totals = iter(
        agreement.sum_over_processes([number for row in summed.sums.values() for number in row])
    )
    checksums = {}
    for name in summed.sums:
        first, second, count = next(totals), next(totals), next(totals)
        shape = records[name].stored_shape
        if count != math.prod(shape):
            # Only parts of it were wanted, or several arrays were made of it.
            itemsize = jnp.dtype(records[name].stored_dtype).itemsize
            first, second = sum_stored(store, name, shape, itemsize)
        checksums[name] = write_checksum((first, second))
    return checksums
