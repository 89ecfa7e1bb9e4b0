"""The one way arrays come out of a checkpoint: compare everything, read, put right."""

import dataclasses
import functools
import warnings
from collections.abc import Mapping
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding

from penzai_shard.checkpointing.array_records import ArrayRecord
from penzai_shard.checkpointing.comparison import Tolerance, Wording, compare
from penzai_shard.checkpointing.manifest import Manifest
from penzai_shard.checkpointing.orbax_store import load_arrays, mesh_context
from penzai_shard.errors import CheckpointMismatchError, MeshError, ShardingWarning, raise_all


@dataclasses.dataclass(frozen=True)
class Target:
    """An array to be restored.

    Attributes:
        record: What it must be.
        dtype: Its dtype; of typed keys, the key dtype.
        sharding: Where it shall lie.
    """

    record: ArrayRecord
    dtype: Any
    sharding: Sharding


def restore_arrays(
    manifest: Manifest,
    targets: Mapping[str, Target],
    *,
    wording: Wording,
    tolerance: Tolerance,
    rename_axes: Mapping[str, str] | None = None,
) -> dict[str, jax.Array]:
    """Restores arrays by name, each device reading its own part.

    Args:
        manifest: What the checkpoint holds.
        targets: What is wanted, by name.
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
        {name: target.record for name, target in targets.items()},
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
            name: _struct_as_stored(target, permutations.get(name))
            for name, target in targets.items()
        },
    )
    for name, permutation in permutations.items():
        arrays[name] = _transposed(arrays[name], permutation, targets[name].sharding)
    return arrays


def renamed_axes(
    records: Mapping[str, ArrayRecord], names: Mapping[str, str]
) -> dict[str, ArrayRecord]:
    """Records with other logical axis names.

    Raises:
        CheckpointMismatchError: A name to be replaced occurs nowhere.

    >>> renamed_axes({"w": ArrayRecord((2,), "int32", ("old",))}, {"old": "new"})["w"].axes
    ('new',)
    """
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


def refuse_abstract_mesh(mesh: Any) -> None:
    """Refuses a mesh without devices, since arrays are to be put on them.

    Raises:
        MeshError: It is no ``jax.sharding.Mesh``.
    """
    if not isinstance(mesh, Mesh):
        raise MeshError(
            f"cannot restore onto a {type(mesh).__name__}: it has no devices. "
            'Make a mesh with make_mesh({"data": 4, "model": 2}).'
        )


def _struct_as_stored(target: Target, permutation: tuple[int, ...] | None) -> jax.ShapeDtypeStruct:
    """What to read: the stored order of the axes, laid out so that transposing moves no data."""
    shape, sharding = target.record.shape, target.sharding
    if permutation is not None:
        shape = tuple(shape[permutation.index(i)] for i in range(len(shape)))
        if isinstance(sharding, NamedSharding):
            entries = (*sharding.spec, *(None,) * (len(shape) - len(sharding.spec)))
            spec = PartitionSpec(*(entries[permutation.index(i)] for i in range(len(shape))))
            sharding = NamedSharding(sharding.mesh, spec, memory_kind=sharding.memory_kind)
    return jax.ShapeDtypeStruct(shape, target.dtype, sharding=sharding)


def _transposed(array: jax.Array, permutation: tuple[int, ...], sharding: Sharding) -> jax.Array:
    with mesh_context(sharding):
        return _transposer(sharding)(array, permutation)


@functools.lru_cache(maxsize=256)
def _transposer(sharding: Sharding) -> Any:
    return jax.jit(jax.numpy.transpose, static_argnums=1, out_shardings=sharding)
