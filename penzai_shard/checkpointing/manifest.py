"""What a checkpoint says that it holds, and whether it may be believed.

Orbax keeps neither the names of dimensions nor checksums of its own metadata or of the numbers. So
a checkpoint says in two places that it is ours: in Orbax' metadata, where each array has an entry
with its logical axes and a checksum of its numbers, and in a file of its own, the seal, which has
a checksum of every metadata file. Both have the random id of the save, which is in the checksum
of each entry. What does not match is refused; only what has neither counts as plain Orbax.
"""

import dataclasses
import hashlib
import json
import pathlib
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from penzai_shard.checkpointing.array_records import (
    ArrayRecord,
    checksum_of,
    key_data_shape,
    record_from_json,
    record_to_json,
)
from penzai_shard.checkpointing.file_kinds import problems_of_files
from penzai_shard.checkpointing.locations import (
    SEAL,
    PathLike,
    absolute_path,
    found_directory,
    no_checkpoint,
)
from penzai_shard.errors import (
    CheckpointDamagedError,
    CheckpointMismatchError,
    raise_all,
)
from penzai_shard.library_apis import orbax_api
from penzai_shard.tree_paths import path_text

SECTION = "penzai_shard"
"""Under what key of Orbax' custom metadata ours is."""

_VERSION = 3
# Without checksums of the numbers.
_OLDEST = 2
_METADATA = orbax_api.METADATA_FILE
_PLAIN = (
    "was written without logical axis names, so that only names, shapes and dtypes could be "
    "compared: an axis that was renamed or swapped with another of its length goes unnoticed. "
    "Save it with save_params to keep the axes."
)
_WITHOUT_CHECKSUMS = (
    f"has format {_OLDEST}, which keeps no checksums of the numbers: damaged ones go unnoticed. "
    "Save it anew to have them checked from then on."
)


# Under what key JAX's paths have the data of boxes and variables of Flax, and of Haliax's arrays.
_DATA_OF_BOXES = ("value", "0")


@dataclasses.dataclass(frozen=True)
class Manifest:
    """What a checkpoint holds, known without reading any array.

    Attributes:
        path: Where it is, for messages.
        directory: Where its content is: the path, but for a moment of a save that was killed.
        kind: ``"params"`` or ``"train_state"``; None if plain Orbax wrote it.
        records: Every array by name.
        stored_tree: What Orbax says of the arrays that it keeps, in the structure in which it
            keeps them.
        prefixes: What stands before each name in the checkpoint, if this is a part of one: one of
            these.
        holders: The names of arrays that have other names than those stored: these are what held
            them where plain Orbax stored an attribute, or what a model calls them. None where
            nothing is to be read.
        save: The random id of the save; None if it has none, and no checksums of the numbers.
    """

    path: str
    directory: str
    kind: str | None
    records: Mapping[str, ArrayRecord]
    stored_tree: Any
    prefixes: tuple[str, ...] = ("",)
    holders: Mapping[str, str | None] = dataclasses.field(default_factory=dict)
    save: str | None = None

    @property
    def caveat(self) -> str:
        """What could not be checked, in words; empty if all could."""
        if self.kind is None:
            return _PLAIN
        return _WITHOUT_CHECKSUMS if self.save is None else ""

    def name_of(self, key_path: Any) -> str | None:
        """The name of an array at a place of the stored tree; None if it is in another part."""
        name = path_text(key_path)
        if self.kind is None:
            # A NamedArray that plain Orbax saved is a dictionary with its data array.
            name = name.removesuffix("/data_array")
        prefix = next((prefix for prefix in self.prefixes if name.startswith(prefix)), None)
        if prefix is None:
            return None
        name = name.removeprefix(prefix)
        return self.holders.get(name, name)

    def called_as(self, names: Collection[str]) -> "Manifest":
        """The same, with arrays in boxes called by where the boxes are.

        Plain Orbax calls them by the attribute or the number of a box's data.

        Args:
            names: The names of the arrays to be filled.
        """
        if self.kind is not None:
            return self
        missing = [name for name in names if name not in self.records]
        holders = {
            stored: name
            for name in missing
            for stored in (f"{name}/{attribute}" for attribute in _DATA_OF_BOXES)
            if stored in self.records and stored not in names
        }
        records = {holders.get(name, name): record for name, record in self.records.items()}
        return dataclasses.replace(self, records=records, holders=holders)

    def renamed(self, stored_names: Mapping[str, str]) -> "Manifest":
        """The same with other names, and only the arrays that have one.

        Args:
            stored_names: What each array is called here, by its new name.
        """
        new = {stored: name for name, stored in stored_names.items()}
        full = {name: stored for stored, name in self.holders.items()}
        holders = {full.get(name, name): new.get(name) for name in self.records}
        records = {name: self.records[stored] for name, stored in stored_names.items()}
        return dataclasses.replace(self, records=records, holders=holders)

    def part(self, *fields: str) -> "Manifest":
        """The part of a checkpoint whose arrays' names begin with one of ``field/``, without it."""
        starts = tuple(f"{field}/" for field in fields)
        records = {
            full.removeprefix(start): record
            for start in reversed(starts)
            for full, record in self.records.items()
            if full.startswith(start)
        }
        return dataclasses.replace(self, records=records, prefixes=starts)


def section_of(records: Mapping[str, ArrayRecord], kind: str, save: str) -> dict[str, Any]:
    """The part of Orbax' custom metadata that says what the arrays are.

    >>> records = {"w": ArrayRecord((2,), "int32", ("a",))}
    >>> section_of(records, "params", "5e1f")["penzai_shard"]["kind"]
    'params'
    """
    arrays = {name: record_to_json(name, record, save) for name, record in records.items()}
    return {SECTION: {"version": _VERSION, "kind": kind, "save": save, "arrays": arrays}}


def seal(directory: Any, names: Iterable[str], save: str) -> None:
    """Writes the seal of a checkpoint, after all its other files.

    Args:
        directory: A path object with the interface of ``pathlib.Path``.
        names: The names of its arrays.
        save: The random id of the save.
    """
    content = _seal_content(names, dict(_metadata_checksums(directory)), save)
    (directory / SEAL).write_bytes(content)


def _seal_content(names: Iterable[str], files: Mapping[str, str], save: str | None) -> bytes:
    """The one way in which a seal is written, so that any other byte in it is damage."""
    content: dict[str, Any] = {"version": _OLDEST if save is None else _VERSION}
    if save is not None:
        content["save"] = save
    content["arrays"] = sorted(names)
    content["files"] = dict(sorted(files.items(), key=lambda file: file[0].split("/")))
    content["checksum"] = checksum_of(content)
    return json.dumps(content, indent=1).encode()


def read_manifest(path: PathLike) -> Manifest:
    """Reads what a checkpoint holds, but no array.

    Args:
        path: The checkpoint's directory.

    Returns:
        Its manifest.

    Raises:
        CheckpointNotFoundError: There is no Orbax checkpoint at the path.
        CheckpointDamagedError: It is not as it was saved.
        CheckpointMismatchError: It was written by another version of this library, in a format
            that this one does not read, or what it holds is not a tree of arrays.
    """
    where = absolute_path(path)
    directory = found_directory(where)
    headline = f"the checkpoint at {where} is not as it was saved. Restore another copy of it:"
    # First of all: nothing may be opened that never ends.
    raise_all(CheckpointDamagedError, headline, problems_of_files(directory))
    own = _own_records(where, directory)
    raise_all(CheckpointDamagedError, headline, own.problems)
    try:
        tree = orbax_api.described_arrays(str(directory))
    except Exception as error:
        if own.kind is None and orbax_api.is_unknown_layout(error):
            raise no_checkpoint(where, directory) from None
        problems = _unreadable(directory, own.records, orbax_api.first_line(error))
        raise CheckpointDamagedError(headline, problems) from error
    manifest = Manifest(where, str(directory), own.kind, own.records, tree, save=own.save)
    stored = _stored_by_name(manifest)
    if own.kind is not None:
        raise_all(CheckpointDamagedError, headline, _contradictions(own.records, stored))
        return manifest
    records = {name: ArrayRecord(*_shape_and_dtype(array)) for name, array in stored.items()}
    return dataclasses.replace(manifest, records=records)


def _unreadable(directory: Any, records: Mapping[str, ArrayRecord], reason: str) -> list[str]:
    """Which arrays Orbax cannot describe; where none tells, the files that it reads for that."""
    if isinstance(directory, pathlib.Path):
        stored = [name for name, record in records.items() if 0 not in record.shape]
        reasons = orbax_api.unreadable_arrays(str(directory), stored)
        if reasons:
            return [f"{name}: cannot be read: {text}" for name, text in reasons.items()]
    return [f"Orbax cannot read what it says of the arrays: {reason}"]


def identity_of(path: PathLike) -> str:
    """A text that changes when another save replaces a checkpoint; empty if there is none.

    Orbax' metadata has the time of the save in it, in nanoseconds.
    """
    try:
        file = found_directory(absolute_path(path)) / _METADATA
        # Anything but a file may never end.
        content = file.read_bytes() if file.is_file() else b""
    except OSError:
        return ""
    return hashlib.sha256(content).hexdigest()


@dataclasses.dataclass(frozen=True)
class _OwnRecords:
    """What a checkpoint says of itself.

    Attributes:
        kind: As in ``Manifest``.
        records: The arrays by name.
        save: As in ``Manifest``.
        problems: What is wrong with that.
    """

    kind: str | None = None
    records: Mapping[str, ArrayRecord] = dataclasses.field(default_factory=dict)
    save: str | None = None
    problems: Sequence[str] = ()


def _own_records(where: str, directory: Any) -> _OwnRecords:
    """What the checkpoint says of itself."""
    metadata_file = directory / _METADATA
    metadata = _mapping_in(metadata_file)
    custom = {} if metadata is None else metadata.get("custom_metadata") or {}
    if not isinstance(custom, Mapping):
        metadata, custom = None, {}
    section = custom.get(SECTION)
    version = section.get("version") if isinstance(section, Mapping) else None
    is_sealed = (directory / SEAL).exists()
    # Sealed, a checkpoint of an older version is one of this version that was damaged.
    if isinstance(version, int) and (version > _VERSION or (version < _OLDEST and not is_sealed)):
        raise _other_format(where, version)
    if is_sealed:
        return _sealed_records(directory, section)
    problems = []
    if metadata is None and metadata_file.exists():
        problems.append(f"{_METADATA}: cannot be read as JSON.")
    elif metadata is None and (directory / orbax_api.INDICATOR_FILE).exists():
        # Orbax writes both, or neither in its older layouts.
        problems.append(f"{_METADATA}: is missing.")
    elif section is not None:
        problems.append(f"{SEAL}: is missing. It stands beside {_METADATA}.")
    return _OwnRecords(problems=problems)


def _other_format(where: str, version: int) -> CheckpointMismatchError:
    if version > _VERSION:
        return CheckpointMismatchError(
            f"the checkpoint at {where} has format {version}, and this version of "
            f"penzai_shard reads up to {_VERSION}. Update it: pip install -U penzai-shard"
        )
    return CheckpointMismatchError(
        f"the checkpoint at {where} has format {version}, which was written before the first "
        "release of penzai_shard and has no checksums. This version reads formats "
        f"{_OLDEST} to {_VERSION}. Orbax still reads the numbers, so name their logical axes and "
        "save them anew: arrays = "
        f"orbax.checkpoint.experimental.v1.load({where!r}); save_params(new_path, "
        "{'w': pz.nx.wrap(arrays['w']).tag('in', 'out'), ...})."
    )


def _mapping_in(file: Any) -> dict[str, Any] | None:
    """What a file of JSON holds; None if it is missing or holds anything but a mapping."""
    try:
        content = json.loads(file.read_bytes()) if file.exists() else None
    except (ValueError, RecursionError):
        return None
    return content if isinstance(content, dict) else None


def _sealed_records(directory: Any, section: Any) -> _OwnRecords:
    """What a checkpoint with a seal says of itself."""
    names, save, broken = _read_seal(directory)
    if section is None:
        return _OwnRecords(problems=broken or [f"{_METADATA}: says nothing of the arrays."])
    kind = section.get("kind") if isinstance(section, Mapping) else None
    entries = section.get("arrays") if kind in ("params", "train_state") else None
    if not isinstance(entries, Mapping):
        problem = f"{_METADATA}: the list of arrays is not as it was written."
        return _OwnRecords(problems=[problem])
    if names and section.get("save") != save:
        return _OwnRecords(problems=[f"{_METADATA}: is of another save than {SEAL}."])
    found = {
        name: record_from_json(name, entry, section.get("save")) for name, entry in entries.items()
    }
    records = {name: record for name, record in found.items() if record is not None}
    problems = [f"{n}: its entry is not as it was written." for n in entries if n not in records]
    problems += [f"{name}: its entry is missing." for name in names if name not in entries]
    return _OwnRecords(kind, records, save, problems or broken)


def _read_seal(directory: Any) -> tuple[list[str], str | None, list[str]]:
    """The names of the arrays, the id of the save, and which metadata files are not as they were
    when sealed."""
    content = _mapping_in(directory / SEAL) or {}
    save = content.get("save")
    is_ours = _is_seal(content) and (directory / SEAL).read_bytes() == _seal_content(
        content["arrays"], content["files"], save
    )
    if not is_ours:
        return [], None, [f"{SEAL}: is not as it was written."]
    # Files of anybody else's beside these do not concern it.
    present = {
        name: _checksum_of_file(directory / name)
        for name in content["files"]
        if (directory / name).is_file()
    }
    changed = [
        f"{name}: {'is not as it was written' if name in present else 'is missing'}."
        for name, written in content["files"].items()
        if present.get(name) != written
    ]
    return content["arrays"], save, changed


def _is_seal(content: Mapping[str, Any]) -> bool:
    """Whether a seal says which arrays and files there are, in the form that is written."""
    names, files = content.get("arrays"), content.get("files")
    return (
        isinstance(names, list)
        and isinstance(files, dict)
        and all(isinstance(text, str) for text in [*names, *files, *files.values()])
    )


def _stored_by_name(manifest: Manifest) -> dict[str, Any]:
    """What Orbax says of each array, by name."""
    stored: dict[str, Any] = {}
    problems = []
    for key_path, array in jax.tree_util.tree_leaves_with_path(manifest.stored_tree):
        name = str(manifest.name_of(key_path))
        if getattr(array, "shape", None) is None or name in stored:
            problems.append(f"{name}: is not an array, or not the only one of this name.")
        stored[name] = array
    raise_all(
        CheckpointMismatchError, f"the checkpoint at {manifest.path} cannot be read:", problems
    )
    return stored


def _contradictions(records: Mapping[str, ArrayRecord], stored: Mapping[str, Any]) -> list[str]:
    """One line for each array of which our entry and Orbax say different things."""
    problems = [
        f"{name}: has no entry that says its axes." for name in stored if name not in records
    ]
    for name, record in records.items():
        found = _shape_and_dtype(stored[name]) if name in stored else None
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


def _shape_and_dtype(description: Any) -> tuple[tuple[int, ...], str]:
    return tuple(description.shape), str(jnp.dtype(description.dtype))


def _metadata_checksums(directory: Any, prefix: str = "") -> Iterator[tuple[str, str]]:
    """A checksum of each file that says what the arrays are: all but those with the numbers."""
    for entry in sorted(directory.iterdir(), key=lambda entry: entry.name):
        if not entry.is_dir():
            if entry.name != SEAL:
                yield prefix + entry.name, _checksum_of_file(entry)
        elif not orbax_api.holds_numbers(entry.name):
            yield from _metadata_checksums(entry, f"{prefix}{entry.name}/")


def _checksum_of_file(file: Any) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest()
