"""The arrays of a checkpoint, of whatever kind it is, as far as they are known without reading."""

import dataclasses
import datetime
import os
from collections.abc import Mapping
from typing import Any

import jax
from jax.sharding import PartitionSpec

from penzai_shard.checkpointing.array_records import ArrayRecord
from penzai_shard.checkpointing.locations import PathLike, absolute_path, is_remote
from penzai_shard.checkpointing.manifest import SECTION, Manifest, read_manifest
from penzai_shard.library_apis.orbax_api import SavedSharding, saved_metadata, saved_sharding
from penzai_shard.partition_specs import canonical_spec
from penzai_shard.pretrained.safetensors_header import SUFFIX
from penzai_shard.pretrained.tensor_files import SafetensorsReader, open_tensors
from penzai_shard.pretrained.weight_locations import INDEX_SUFFIX

KINDS = {
    "params": "parameters",
    "train_state": "train state",
    "orbax": "plain Orbax checkpoint",
    "safetensors": "safetensors files",
}

_EPOCH = datetime.datetime(1970, 1, 1, tzinfo=datetime.UTC)


@dataclasses.dataclass(frozen=True)
class StoredArray:
    """One array of a checkpoint.

    Attributes:
        name: Its name: of a parameter that of the variable, in a train state its path.
        record: Its shape, dtype and logical axis names.
        mesh: The sizes of the mesh axes that it was laid out over when it was saved, none for a
            single device; None where that was not kept.
        spec: Its spec on this mesh; None where that was not kept.
    """

    name: str
    record: ArrayRecord
    mesh: Mapping[str, int] | None = None
    spec: PartitionSpec | None = None


@dataclasses.dataclass(frozen=True)
class CheckpointContents:
    """What a checkpoint holds.

    Attributes:
        path: Where it is.
        kind: ``"params"``, ``"train_state"``, ``"orbax"`` or ``"safetensors"``.
        arrays: Its arrays, in the order of the checkpoint.
        saved: When it was saved; None where that was not kept.
        metadata: What its writer has noted beside the arrays.
        caveat: What cannot be known of it, in words; empty if all can.
    """

    path: str
    kind: str
    arrays: tuple[StoredArray, ...]
    saved: datetime.datetime | None = None
    metadata: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    caveat: str = ""

    def parameters(self) -> "CheckpointContents":
        """The parameters in the checkpoint of a train state, by their names there."""
        arrays = [
            dataclasses.replace(array, name=array.name.removeprefix("params/"))
            for array in self.arrays
            if array.name.startswith("params/")
        ]
        return dataclasses.replace(self, kind="params", arrays=tuple(arrays))


def contents_of(path: PathLike) -> CheckpointContents:
    """Reads what a checkpoint holds, but no array.

    Raises:
        CheckpointNotFoundError: There is no checkpoint at the path.
        CheckpointDamagedError: It is not as it was saved.
        CheckpointMismatchError: It has a format that this version does not read.
        MissingExtraError: Orbax is not installed, or safetensors.
    """
    if are_weights(path):
        return _contents_of_files(open_tensors(path))
    manifest = read_manifest(path)
    time, metadata = saved_metadata(manifest.directory)
    descriptions = {
        manifest.name_of(key_path): description
        for key_path, description in jax.tree_util.tree_leaves_with_path(manifest.stored_tree)
    }
    return CheckpointContents(
        path=manifest.path,
        kind=manifest.kind or "orbax",
        arrays=tuple(
            _stored_array(name, record, saved_sharding(descriptions.get(name)))
            for name, record in manifest.records.items()
        ),
        saved=None
        if time is None
        else datetime.datetime.fromtimestamp(time // 10**9, datetime.UTC),
        metadata=_of_others(manifest, metadata),
        caveat=_caveat(manifest),
    )


def are_weights(path: PathLike) -> bool:
    """Whether a path has safetensors files, or is one, and not an Orbax checkpoint.

    >>> are_weights("run/params")
    False
    """
    where = absolute_path(path)
    if is_remote(where) or not os.path.exists(where):
        return False
    names = os.listdir(where) if os.path.isdir(where) else [where]
    return any(name.endswith((SUFFIX, SUFFIX + INDEX_SUFFIX)) for name in names)


def record_of_tensor(reader: SafetensorsReader, name: str) -> ArrayRecord:
    """What is known of a tensor: without names of its axes unless ``save_safetensors`` wrote it."""
    tensor = reader.tensors[name]
    return reader.records.get(name) or ArrayRecord(tensor.shape, tensor.dtype)


def _contents_of_files(reader: SafetensorsReader) -> CheckpointContents:
    newest = max(os.path.getmtime(file) for file in reader.files)
    names = list(map(os.path.basename, reader.files))
    files = names[0] if len(names) == 1 else f"{len(names)}, {names[0]} to {names[-1]}"
    has_axes = all(name in reader.records for name in reader.tensors)
    return CheckpointContents(
        path=reader.where,
        kind="safetensors",
        arrays=tuple(StoredArray(name, record_of_tensor(reader, name)) for name in reader.tensors),
        saved=_EPOCH + datetime.timedelta(seconds=int(newest)),
        metadata={"files": files},
        caveat="" if has_axes else "it has no logical axis names and no checksums",
    )


def _caveat(manifest: Manifest) -> str:
    if manifest.kind is None:
        return "it has no logical axis names and no checksums, as plain Orbax keeps none"
    return f"it {manifest.caveat}" if manifest.caveat else ""


def _of_others(manifest: Manifest, metadata: Mapping[str, Any]) -> dict[str, Any]:
    """The metadata without our own entries, of which the format alone is news."""
    if manifest.kind is None:
        return dict(metadata)
    others = {k.removeprefix(f"{SECTION}_"): v for k, v in metadata.items() if k != SECTION}
    return {"format of penzai_shard": metadata[SECTION]["version"], **others}


def _stored_array(name: str, record: ArrayRecord, saved: SavedSharding | None) -> StoredArray:
    if saved is None or len(spec := canonical_spec(saved.spec)) > len(record.shape):
        return StoredArray(name, record)
    return StoredArray(name, record, dict(saved.mesh), spec)
