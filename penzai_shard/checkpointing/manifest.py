"""What a checkpoint says that it holds, and whether it may be believed.

Orbax keeps neither the names of dimensions nor checksums of its own metadata. So a checkpoint
says in two places that it is ours: in Orbax' metadata, where each array has an entry with its
logical axes and a checksum, and in a file of its own, the seal, which has a checksum of every
metadata file. What does not match is refused; only what has neither counts as plain Orbax.
"""

import dataclasses
import hashlib
import json
import os
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from penzai_shard.checkpointing.array_records import (
    ArrayRecord,
    checksum_of,
    key_data_shape,
    key_struct,
    record_from_json,
    record_to_json,
)
from penzai_shard.checkpointing.locations import (
    PathLike,
    absolute_path,
    found_directory,
    nearby,
    what_it_is,
)
from penzai_shard.checkpointing.orbax_calls import first_line, orbax, without_noise
from penzai_shard.errors import (
    CheckpointDamagedError,
    CheckpointMismatchError,
    CheckpointNotFoundError,
    raise_all,
)
from penzai_shard.tree_paths import path_text

SEAL = "penzai_shard.json"

_SECTION = "penzai_shard"
_VERSION = 2
_ORBAX_METADATA = "_CHECKPOINT_METADATA"
_INDICATOR = "orbax.checkpoint"
_PLAIN = (
    "was written without logical axis names, so that only names, shapes and dtypes could be "
    "compared: an axis that was renamed or swapped with another of its length goes unnoticed. "
    "Save it with save_params to keep the axes."
)
_FIRST_FORMAT = (
    "was written by the first version of penzai_shard and has no checksums, so that damage to its "
    "axis names may go unnoticed. Save it again to add them."
)


@dataclasses.dataclass(frozen=True)
class Manifest:
    """What a checkpoint holds, known without reading any array.

    Attributes:
        path: Where it is, for messages.
        directory: Where its content is: the path, but for a moment of a save that was killed.
        kind: ``"params"`` or ``"train_state"``; None if plain Orbax wrote it.
        records: Every array by name.
        stored_tree: The structure in which Orbax keeps the arrays: a tree of their names.
        chunks: By name, the shape of the pieces in which the numbers can be read.
        caveat: What could not be checked, in words; empty if all could.
        prefix: What stands before each name in the checkpoint, if this is a part of one.
    """

    path: str
    directory: str
    kind: str | None
    records: Mapping[str, ArrayRecord]
    stored_tree: Any
    chunks: Mapping[str, tuple[int, ...]]
    caveat: str = ""
    prefix: str = ""

    def part(self, name: str) -> "Manifest":
        """The part of a checkpoint whose arrays' names begin with ``name/``, without that."""
        start = f"{name}/"

        def inside(table: Mapping[str, Any]) -> dict[str, Any]:
            return {
                full.removeprefix(start): entry
                for full, entry in table.items()
                if full.startswith(start)
            }

        return dataclasses.replace(
            self,
            records=inside(self.records),
            chunks=inside(self.chunks),
            prefix=self.prefix + start,
        )


def section_of(records: Mapping[str, ArrayRecord], kind: str) -> dict[str, Any]:
    """The part of Orbax' custom metadata that says what the arrays are.

    >>> section_of({"w": ArrayRecord((2,), "int32", ("a",))}, "params")["penzai_shard"]["kind"]
    'params'
    """
    arrays = {name: record_to_json(name, record) for name, record in records.items()}
    return {_SECTION: {"version": _VERSION, "kind": kind, "arrays": arrays}}


def seal(directory: Any, names: Iterable[str]) -> None:
    """Writes the seal of a checkpoint whose other files are all there.

    Args:
        directory: A path object with the interface of ``pathlib.Path``.
        names: The names of its arrays.
    """
    files = dict(_metadata_checksums(directory))
    content: dict[str, Any] = {"version": _VERSION, "arrays": sorted(names), "files": files}
    content["checksum"] = checksum_of(content)
    (directory / SEAL).write_text(json.dumps(content, indent=1))


def read_manifest(path: PathLike) -> Manifest:
    """Reads what a checkpoint holds, but no array.

    Args:
        path: The checkpoint's directory.

    Returns:
        Its manifest.

    Raises:
        CheckpointNotFoundError: There is no Orbax checkpoint at the path.
        CheckpointDamagedError: It is not as it was saved.
        CheckpointMismatchError: It was written by a later version of this library, or what it
            holds is not a tree of arrays.
    """
    where = absolute_path(path)
    directory = found_directory(where)
    if (directory.parent / SEAL).exists() and not (directory / SEAL).exists():
        raise CheckpointNotFoundError(
            f"there is no checkpoint at {where}: it is a part of one. Restore the whole: "
            f"{os.path.dirname(where.rstrip('/'))}"
        )
    section, problems = _own_section(directory)
    version = _version_of(section)
    if isinstance(version, int) and version > _VERSION:
        raise CheckpointMismatchError(
            f"the checkpoint at {where} has format {version}, and this version of "
            f"penzai_shard reads up to {_VERSION}. Update it: pip install -U penzai-shard"
        )
    headline = f"the checkpoint at {where} is not as it was saved. Restore another copy of it:"
    raise_all(CheckpointDamagedError, headline, problems)
    stored, tree = _stored_arrays(where, directory, is_plain=section is None)
    kind, caveat = None, _PLAIN
    if section is None:
        records = {name: ArrayRecord(tuple(a.shape), _dtype_text(a)) for name, a in stored.items()}
    elif version == 1:
        kind, caveat = section["kind"], _FIRST_FORMAT
        records, problems = _records_of_version_1(section["arrays"], stored)
    else:
        kind, caveat = section["kind"], ""
        records = _records(section["arrays"])
    if kind is not None:
        problems = problems or _contradictions(records, stored)
    raise_all(CheckpointDamagedError, headline, problems)
    return Manifest(where, str(directory), kind, records, tree, _chunks(stored), caveat)


def identity_of(path: PathLike) -> str:
    """A text that changes when another save replaces a checkpoint; empty if there is none.

    Orbax' metadata has the time of the save in it, in nanoseconds.
    """
    try:
        content = (found_directory(absolute_path(path)) / _ORBAX_METADATA).read_bytes()
    except OSError:
        return ""
    return hashlib.sha256(content).hexdigest()


def _own_section(directory: Any) -> tuple[Mapping[str, Any] | None, list[str]]:
    """What the checkpoint says of itself, None if it is plain Orbax', and what is wrong with it."""
    outer, sealed = directory / _ORBAX_METADATA, directory / SEAL
    section: Any = None
    problems = []
    if outer.exists():
        try:
            section = (json.loads(outer.read_bytes()).get("custom_metadata") or {}).get(_SECTION)
        except (ValueError, AttributeError, RecursionError):
            problems.append(f"{_ORBAX_METADATA}: cannot be read as JSON.")
    elif (directory / _INDICATOR).exists():
        # Orbax writes both, or neither in its older layouts.
        problems.append(f"{_ORBAX_METADATA}: is missing.")
    if not sealed.exists():
        if section is None:
            return None, problems
        if _version_of(section) != 1:
            problems.append(f"{SEAL}: is missing. It stands beside {_ORBAX_METADATA}.")
        return section, problems + _wrong_form(section)
    names, broken = _read_seal(directory)
    if section is None:
        return {}, broken or [f"{_ORBAX_METADATA}: says nothing of the arrays."]
    wrong = _wrong_form(section) or _broken_entries(section["arrays"], names)
    return section, wrong or broken


def _records(entries: Mapping[str, Any]) -> dict[str, ArrayRecord]:
    """The entries' records, without those that are not as they were written."""
    found = {name: record_from_json(name, entry) for name, entry in entries.items()}
    return {name: record for name, record in found.items() if record is not None}


def _wrong_form(section: Any) -> list[str]:
    is_right = (
        isinstance(section, Mapping)
        and isinstance(section.get("arrays"), Mapping)
        and section.get("kind") in ("params", "train_state")
    )
    return [] if is_right else [f"{_ORBAX_METADATA}: the list of arrays is not as it was written."]


def _broken_entries(entries: Mapping[str, Any], names: Iterable[str]) -> list[str]:
    records = _records(entries)
    return [
        f"{name}: its entry is not as it was written." for name in entries if name not in records
    ] + [f"{name}: its entry is missing." for name in names if name not in entries]


def _read_seal(directory: Any) -> tuple[list[str], list[str]]:
    """The names of the arrays, and which metadata files are not as they were when sealed."""
    try:
        content = json.loads((directory / SEAL).read_bytes())
        checksum = content.pop("checksum")
        names, files = list(content["arrays"]), dict(content["files"])
    except (ValueError, AttributeError, KeyError, TypeError, RecursionError):
        checksum, content = None, {}
    if checksum != checksum_of(content):
        return [], [f"{SEAL}: is not as it was written."]
    present = dict(_metadata_checksums(directory))
    return names, [
        f"{name}: {'is not as it was written' if name in present else 'is missing'}."
        for name, written in files.items()
        if present.get(name) != written
    ]


def _version_of(section: Any) -> Any:
    return section.get("version") if isinstance(section, Mapping) else None


def _stored_arrays(where: str, directory: Any, *, is_plain: bool) -> tuple[dict[str, Any], Any]:
    """What Orbax says of the arrays by name, and the tree of the names."""
    found = _orbax_metadata(where, directory, is_plain=is_plain)
    flat, structure = jax.tree_util.tree_flatten_with_path(
        found, is_leaf=lambda node: hasattr(node, "shape") and hasattr(node, "dtype")
    )
    stored: dict[str, Any] = {}
    names, problems = [], []
    for key_path, array in flat:
        name = stored_name(key_path, None if is_plain else "ours")
        names.append(name)
        if getattr(array, "shape", None) is None or name in stored:
            problems.append(f"{name}: is not an array, or not the only one of this name.")
        stored[name] = array
    raise_all(CheckpointMismatchError, f"the checkpoint at {where} cannot be read:", problems)
    return stored, jax.tree_util.tree_unflatten(structure, names)


def _orbax_metadata(where: str, directory: Any, *, is_plain: bool) -> Any:
    ocp = orbax()
    reason = "it gives nothing."
    with without_noise():
        try:
            found = ocp.metadata(str(directory)).metadata
        except Exception as error:
            if is_plain and isinstance(error, ocp.errors.InvalidLayoutError):
                raise CheckpointNotFoundError(
                    f"there is no checkpoint at {where}: {what_it_is(directory)}{nearby(where)}"
                ) from None
            found, reason = None, first_line(error)
        if found is None:
            raise CheckpointDamagedError(
                f"the checkpoint at {where} is not as it was saved. Restore another copy of it:",
                [f"Orbax cannot read what it says of the arrays: {reason}"],
            )
    return found


def _contradictions(records: Mapping[str, ArrayRecord], stored: Mapping[str, Any]) -> list[str]:
    """One line for each array of which our entry and Orbax say different things."""
    problems = [
        f"{name}: has no entry that says its axes." for name in stored if name not in records
    ]
    for name, record in records.items():
        array = stored.get(name)
        found = None if array is None else (tuple(array.shape), _dtype_text(array))
        if found != _stored_form(record):
            text = "nothing is stored" if found is None else f"{found[0]} {found[1]} is stored"
            problems.append(f"{name}: its entry says {record} {record.dtype}, and {text}.")
    return problems


def _stored_form(record: ArrayRecord) -> tuple[tuple[int, ...], str] | None:
    """Shape and dtype of what Orbax stores for an array: nothing if it has no elements."""
    if 0 in record.shape:
        return None
    if record.key_impl is None:
        return record.shape, record.dtype
    return (*record.shape, *key_data_shape(record.key_impl)), "uint32"


def _records_of_version_1(
    entries: Mapping[str, Any], stored: Mapping[str, Any]
) -> tuple[dict[str, ArrayRecord], list[str]]:
    found = {name: _record_of_version_1(entry, stored.get(name)) for name, entry in entries.items()}
    records = {name: record for name, record in found.items() if record is not None}
    broken = [
        f"{name}: its entry is not as it was written." for name in found if name not in records
    ]
    return records, broken


def _record_of_version_1(entry: Any, array: Any) -> ArrayRecord | None:
    """The first format had no checksums, and shape and dtype for empty arrays alone."""
    try:
        axes = tuple(entry["axes"])
        if not all(axis is None or isinstance(axis, str) for axis in axes):
            return None
        if set(entry) - {"axes", "key_impl", "empty"}:
            return None
        impl = entry.get("key_impl")
        if "empty" in entry:
            shape, dtype = tuple(entry["empty"]["shape"]), entry["empty"]["dtype"]
        elif impl is not None:
            shape = tuple(array.shape)[: len(array.shape) - len(key_data_shape(impl))]
            dtype = str(key_struct(impl).dtype)
        else:
            shape, dtype = tuple(array.shape), _dtype_text(array)
    except (AttributeError, KeyError, TypeError, ValueError):
        return None
    return ArrayRecord(shape, dtype, axes, impl) if len(axes) == len(shape) else None


def _dtype_text(array: Any) -> str:
    return str(jnp.dtype(array.dtype))


def _chunks(stored: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    layouts = {name: getattr(array, "storage_metadata", None) for name, array in stored.items()}
    return {
        name: tuple(layout.chunk_shape)
        for name, layout in layouts.items()
        if layout is not None and layout.chunk_shape is not None
    }


def stored_name(key_path: Any, kind: str | None) -> str:
    """The name of an array in Orbax' tree of a checkpoint of some kind.

    >>> stored_name([jax.tree_util.DictKey("w"), jax.tree_util.DictKey("data_array")], None)
    'w'
    """
    name = path_text(key_path)
    # A NamedArray that plain Orbax saved is a dictionary with its data array.
    return name.removesuffix("/data_array") if kind is None else name


def _metadata_checksums(directory: Any, prefix: str = "") -> Iterator[tuple[str, str]]:
    """A checksum of each file that says what the arrays are: all but those with the numbers."""
    for entry in sorted(directory.iterdir(), key=lambda entry: entry.name):
        if not entry.is_dir():
            if entry.name != SEAL:
                yield prefix + entry.name, hashlib.sha256(entry.read_bytes()).hexdigest()
        elif entry.name != "d" and not entry.name.startswith("ocdbt."):
            yield from _metadata_checksums(entry, f"{prefix}{entry.name}/")
