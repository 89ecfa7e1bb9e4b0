"""The one way arrays come out of a checkpoint: compare everything, read, put right."""

import dataclasses
import functools
import warnings
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import jax
from jax.sharding import NamedSharding, Sharding

from penzai_shard.checkpointing.array_records import ArrayRecord, record_of
from penzai_shard.checkpointing.comparison import Tolerance, Wording, compare
from penzai_shard.checkpointing.locations import PathLike, absolute_path
from penzai_shard.checkpointing.manifest import Manifest, identity_of, read_manifest
from penzai_shard.checkpointing.orbax_store import load_arrays, mesh_context
from penzai_shard.errors import (
    CheckpointDamagedError,
    CheckpointMismatchError,
    RuleTypeError,
    ShardingError,
    ShardingWarning,
    raise_all,
)
from penzai_shard.named_leaves import NamedLeaf
from penzai_shard.partition_specs import permuted_spec

Result = TypeVar("Result")

_ATTEMPTS = 5


def from_checkpoint(path: PathLike, read: Callable[[Manifest], Result]) -> Result:
    """Reads from a checkpoint, and does so again if a save replaced it meanwhile.

    Args:
        path: The checkpoint's directory.
        read: Called with what it holds.

    Returns:
        What ``read`` returned.

    Raises:
        CheckpointDamagedError: The checkpoint was replaced over and over.
        ShardingError: As ``read_manifest`` and ``read`` do.
    """
    for _ in range(_ATTEMPTS):
        before = identity_of(path)
        try:
            result = read(read_manifest(path))
        except ShardingError:
            if identity_of(path) == before:
                raise
        else:
            if identity_of(path) == before:
                return result
    raise CheckpointDamagedError(
        f"the checkpoint at {absolute_path(path)} was replaced {_ATTEMPTS} times while it was "
        "being read. Restore it once the saves are done."
    )


def restore_arrays(
    manifest: Manifest,
    leaves: Mapping[str, NamedLeaf],
    places: Mapping[str, Sharding],
    *,
    wording: Wording,
    tolerance: Tolerance,
    rename_axes: Mapping[str, str] | None = None,
) -> dict[str, jax.Array]:
    """Restores arrays by name, each device reading its own part.

    Args:
        manifest: What the checkpoint holds.
        leaves: The arrays to be filled, by name.
        places: By name, where each shall lie.
        wording: How messages call the two sides.
        tolerance: What may differ.
        rename_axes: Logical axis names in the checkpoint that have other names here.

    Returns:
        The arrays by name, exactly in the shardings asked for.

    Raises:
        CheckpointMismatchError: Something differs that may not; nothing has been read then.

    Warns:
        ShardingWarning: The checkpoint was written without axis names.
    """
    stored = renamed_axes(manifest.records, rename_axes or {})
    permutations = compare(
        stored,
        {name: record_of(leaf) for name, leaf in leaves.items()},
        headline=f"the checkpoint at {manifest.path} does not fit {wording.target}:",
        wording=wording,
        tolerance=tolerance,
    )
    if manifest.caveat:
        warnings.warn(
            f"the checkpoint at {manifest.path} {manifest.caveat}", ShardingWarning, stacklevel=3
        )
    arrays = load_arrays(
        manifest,
        {
            name: _struct_as_stored(leaf, places[name], permutations.get(name))
            for name, leaf in leaves.items()
        },
    )
    for name, permutation in permutations.items():
        arrays[name] = _transposed(arrays[name], permutation, places[name])
    return arrays


def renamed_axes(
    records: Mapping[str, ArrayRecord], names: Mapping[str, str]
) -> dict[str, ArrayRecord]:
    """Records with other logical axis names.

    Raises:
        CheckpointMismatchError: A name to be replaced occurs nowhere.
        RuleTypeError: It is not a mapping of names.

    >>> renamed_axes({"w": ArrayRecord((2,), "int32", ("old",))}, {"old": "new"})["w"].axes
    ('new',)
    """
    if not isinstance(names, Mapping) or not all(isinstance(new, str) for new in names.values()):
        raise RuleTypeError(f"rename_axes={names!r}: give a dictionary of names, {{'old': 'new'}}.")
    present = {axis for record in records.values() for axis in record.axes or () if axis}
    raise_all(
        CheckpointMismatchError,
        "cannot rename logical axes:",
        [
            f"{old}: no array in the checkpoint has this logical axis. It has "
            f"{', '.join(map(repr, sorted(present))) or 'none'}."
            for old in names
            if old not in present
        ],
    )
    return {
        name: record
        if record.axes is None
        else dataclasses.replace(
            record, axes=tuple(None if a is None else names.get(a, a) for a in record.axes)
        )
        for name, record in records.items()
    }


def _struct_as_stored(
    leaf: NamedLeaf, sharding: Sharding, permutation: tuple[int, ...] | None
) -> jax.ShapeDtypeStruct:
    """What to read: the stored order of the axes, laid out so that transposing moves no data."""
    shape = leaf.shape
    if permutation is not None:
        inverse = [permutation.index(i) for i in range(len(shape))]
        shape = tuple(shape[i] for i in inverse)
        if isinstance(sharding, NamedSharding):
            spec = permuted_spec(sharding.spec, inverse)
            sharding = NamedSharding(sharding.mesh, spec, memory_kind=sharding.memory_kind)
    return jax.ShapeDtypeStruct(shape, leaf.dtype, sharding=sharding)


def _transposed(array: jax.Array, permutation: tuple[int, ...], sharding: Sharding) -> jax.Array:
    with mesh_context(sharding):
        return _transposer(sharding)(array, permutation)


@functools.lru_cache(maxsize=256)
def _transposer(sharding: Sharding) -> Any:
    return jax.jit(jax.numpy.transpose, static_argnums=1, out_shardings=sharding)
