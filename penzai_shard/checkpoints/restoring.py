"""Reads arrays of a checkpoint onto any mesh, in parts, verified as they are read."""

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from penzai_shard.checkpoints.filling import ChecksumStore, Source, fill_arrays
from penzai_shard.checkpoints.matching import Options
from penzai_shard.checkpoints.records import ArrayRecord, Manifest, read_manifest
from penzai_shard.checkpoints.storage import refuse_damage
from penzai_shard.checkpoints.value_checksums import plain_context
from penzai_shard.processes import agreement
from penzai_shard.progress import progress


def read_arrays(
    manifest: Manifest,
    wanted: Mapping[str, tuple[Source, jax.ShapeDtypeStruct]],
    options: Options,
    free: Any,
) -> dict[str, jax.Array]:
    """Reads arrays onto any devices; with several processes all call it.

    Any of the arrays can be donated.

    Args:
        manifest: What the checkpoint holds.
        wanted: What each array is read from, and the shape, dtype and sharding that it gets.
            Without a sharding it goes to the default device.
        options: Whether numbers are compared with the checksums that were saved. All numbers of a
            stored array are read for that, also where only a part of them is wanted. And whether
            a bar is shown.
        free: A tree of arrays that are deleted once the checkpoint is found to fit.

    Raises:
        CheckpointDamagedError: Something is not as it was saved, or was replaced while it was read;
            all that differs is in it.
        CheckpointMismatchError: A number does not fit into the dtype that is wanted.
        ShardingError: Processes want other arrays, or see other checkpoints.
    """
    # Each process may have other arrays to itself.
    spread = {
        name: str(struct)
        for name, (_, struct) in wanted.items()
        if struct.sharding and not struct.sharding.is_fully_addressable
    }
    agreement.refuse_differences(options.called, spread)
    with agreement.together("reading the arrays of a checkpoint"), plain_context(options.called):
        # In one order in all processes. Arrays without elements have an entry only.
        names = sorted({name for source, _ in wanted.values() for name in source.stored})
        records = {name: manifest.records[name] for name in names}
        full = [name for name, record in records.items() if record.nbytes]
        open_arrays(manifest, full)
        for array in jax.tree.leaves(free):
            if isinstance(array, jax.Array):
                array.delete()

        # Random keys are read as their numbers, and made again.
        record_of = {name: records[source.stored[0]] for name, (source, _) in wanted.items()}
        pairs = {name: _read_as_numbers(*x, record_of[name]) for name, x in wanted.items()}
        checked = [name for name in full if options.verify and records[name].values]
        shapes = {name: records[name].stored_shape for name in checked}
        shown = options.progress if jax.process_index() == 0 else False
        with progress(sum(record.nbytes for record in records.values()), "bytes", shown) as bar:
            store = ChecksumStore(manifest.store, shapes, bar.advance)
            arrays = fill_arrays(pairs, store)
            found = store.compute_checksums()
        what = "its numbers are not those that were saved"
        changed = {name: what for name in checked if found[name] != records[name].values}
        refuse_damage(manifest.path, changed)
        # Without checksums nothing else tells that some arrays are of one save, some of another.
        if not options.verify and read_manifest(manifest.path).records != manifest.records:
            refuse_damage(manifest.path, {"": "it was replaced while it was read"})
        for name, record in record_of.items():
            if record.key_impl is not None:
                arrays[name] = jax.random.wrap_key_data(arrays[name], impl=record.key_impl)
        return arrays


def open_arrays(manifest: Manifest, names: Iterable[str]) -> None:
    """Opens arrays before anything is read.

    Raises:
        CheckpointDamagedError: Some are not what the manifest says; all of them are in it.
    """
    damaged = {}
    for name, (shape, dtype) in manifest.store.open(names).items():
        record = manifest.records[name]
        said = record.stored_shape, record.stored_dtype
        if (shape, dtype) != said:
            damaged[name] = f"its entry says {said[1]}{[*said[0]]}, stored is {dtype}{[*shape]}"
    refuse_damage(manifest.path, damaged)


def _read_as_numbers(
    source: Source, struct: jax.ShapeDtypeStruct, record: ArrayRecord
) -> tuple[Source, jax.ShapeDtypeStruct]:
    """The same for the numbers as which random keys are stored, in a dimension behind their own."""
    # Tensors may be looked at in another shape than the stored one.
    rank, behind = len(source.shape), record.stored_shape[len(record.shape) :]
    shape, order = (*source.shape, *behind), (*source.order, *range(rank, rank + len(behind)))
    dtype = struct.dtype if record.key_impl is None else jnp.uint32
    sharding = struct.sharding or jnp.zeros(()).sharding
    numbers = jax.ShapeDtypeStruct((*struct.shape, *behind), dtype, sharding=sharding)
    return dataclasses.replace(source, shape=shape, order=order), numbers
