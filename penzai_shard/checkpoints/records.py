"""Says what a checkpoint holds: of each array shape, dtype, logical axes, and its checksum.

A checkpoint of this library is one of Orbax with a section in Orbax' custom metadata, and a marker
file. The marker says that the section must be there: without it a damaged section would make the
checkpoint pass for one of Orbax only, which has no names and no checksums.
"""

import dataclasses
import hashlib
import json
import math
import os
import pathlib
from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp

from penzai_shard.arrays.structure import Leaf
from penzai_shard.checkpoints import storage, tensor_files
from penzai_shard.checkpoints.filling import Store
from penzai_shard.errors import CheckpointNotFoundError, Problem, RuleTypeError
from penzai_shard.paths import nearest
from penzai_shard.planning.plan import write_axes

SECTION = MARKER = "penzai_shard"
METADATA = "_CHECKPOINT_METADATA"
VERSION = 1
# The implementation of random keys of a dtype, and the numbers of each.
_KEYS = {"key<fry>": ("threefry2x32", 2), "key<rbg>": ("rbg", 4), "key<urbg>": ("unsafe_rbg", 4)}
_ABSENT = "there is no checkpoint:"


@dataclasses.dataclass(frozen=True)
class ArrayRecord:
    """What is known of an array without its numbers.

    Attributes:
        shape: Its shape.
        dtype: The name of its dtype; of random keys the name that JAX gives, as ``key<fry>``.
        names: A logical axis for each dimension, None for a positional one; None altogether for an
            array without names.
        values: The checksum of what is stored, if there is one.
    """

    shape: tuple[int, ...]
    dtype: str
    names: tuple[str | None, ...] | None
    values: str | None = None

    @property
    def key_impl(self) -> str | None:
        """The implementation of typed random keys, which are stored as their numbers."""
        return _KEYS[self.dtype][0] if self.dtype.startswith("key<") else None

    @property
    def stored_shape(self) -> tuple[int, ...]:
        """The shape of what is stored: random keys have a last dimension of numbers."""
        return self.shape if self.key_impl is None else (*self.shape, _KEYS[self.dtype][1])

    @property
    def stored_dtype(self) -> str:
        """The dtype of what is stored."""
        return self.dtype if self.key_impl is None else "uint32"

    @property
    def nbytes(self) -> int:
        """The bytes of what is stored, before it is compressed."""
        return math.prod(self.stored_shape) * jnp.dtype(self.stored_dtype).itemsize

    def __str__(self) -> str:
        return f"{self.dtype}[{write_axes(self.names, self.shape, None)}]"


def make_record(leaf: Leaf, values: str | None = None) -> ArrayRecord:
    """The record of an array of a tree, or of a struct that describes one, with its checksum.

    >>> from penzai_shard.arrays.structure import leaves_of
    >>> str(make_record(leaves_of({"w": jnp.zeros((2, 3))})[0]))
    'float32[2, 3]'
    """
    record = ArrayRecord(leaf.shape, str(leaf.dtype), leaf.names, values)
    _ = record.key_impl  # Raises for random keys of an implementation that nobody could restore.
    return record


# On disk


@dataclasses.dataclass(frozen=True)
class Manifest:
    """What a checkpoint holds, known without reading any array.

    Attributes:
        path: Where it is, as the caller wrote it but absolute.
        kind: What was saved, ``"params"`` for instance; ``"tensors"`` of safetensors files, and
            None if Orbax wrote it for somebody else.
        records: The record of each array by name.
        metadata: What else the saver wrote into Orbax' custom metadata.
        store: The arrays, to be opened and read.
    """

    path: str
    kind: str | None
    records: Mapping[str, ArrayRecord]
    metadata: Mapping[str, Any]
    store: Store


def write_metadata(
    records: Mapping[str, ArrayRecord], kind: str, others: Mapping[str, Any]
) -> dict[str, Any]:
    """Orbax' custom metadata: what the arrays are, what else the saver says, and a checksum."""
    entries = {name: dataclasses.asdict(record) for name, record in records.items()}
    section = {"version": VERSION, "kind": kind, "arrays": entries}
    return {**others, SECTION: {**section, "checksum": _digest({**others, **section})}}


def write_texts(records: Mapping[str, ArrayRecord]) -> dict[str, str]:
    """What each safetensors file of a save says of all arrays of the save.

    So a file that is missing, or of another save, is noticed.

    Args:
        records: The arrays of all files, with their checksums.
    """
    section = write_metadata(records, "tensors", {})[SECTION]
    # "pt" is what readers of other libraries look for.
    return {"format": "pt", SECTION: json.dumps(section), "writer": MARKER}


def _digest(section: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(section, sort_keys=True).encode()).hexdigest()[:16]


def absolute_path(path: str | os.PathLike[str]) -> pathlib.Path:
    """The path of a checkpoint in the file system.

    Raises:
        RuleTypeError: It is no path, or one of an object store.
    """
    text = os.fspath(path) if isinstance(path, str | os.PathLike) else ""
    if not text or "://" in text:
        what = f"this {type(path).__name__} is no path of a file system: {text!r}"
        fix = "Write for instance 'runs/may/params', or mount an object store as a file system."
        raise RuleTypeError("a checkpoint needs a path:", [Problem("", what, fix)])
    return pathlib.Path(os.path.abspath(os.path.expanduser(text)))


def is_checkpoint(directory: pathlib.Path) -> bool:
    """Whether somebody saved a checkpoint in a directory, be it ours or another one of Orbax."""
    # Unlike those of pathlib, this does not raise where nobody may look.
    names = MARKER, METADATA, storage.PLAIN_METADATA
    return any(os.path.isfile(directory / name) for name in names)


def read_manifest(path: str | os.PathLike[str]) -> Manifest:
    """What the checkpoint at a path holds.

    Raises:
        CheckpointNotFoundError: There is none.
        CheckpointDamagedError: It is not as it was saved; all that differs is in it.
    """
    if storage.is_url(path):
        return _read_remote(str(path))
    final = absolute_path(path)
    if not is_checkpoint(final):
        if tensor_files.is_tensors(final):
            return _read_tensors(final)
        raise CheckpointNotFoundError(_ABSENT, [_explain_absence(final)])
    # Opening a pipe in place of a file would never end.
    files = [file for file in final.rglob("*") if not file.is_dir()]
    others = [file for file in files if not (file.is_file() and os.access(file, os.R_OK))]
    texts = [str(file.relative_to(final)) for file in others]
    storage.refuse_damage(final, dict.fromkeys(texts, "it is no readable file"))
    with storage.refuse_unreadable(final, f"{METADATA}, {MARKER} or {storage.PLAIN_METADATA}"):
        # Old releases of Orbax wrote no file.
        file = final / METADATA
        content = json.loads(file.read_bytes()) if file.exists() else {}
        metadata = dict(content.get("custom_metadata") or {})
        if SECTION in metadata or (final / MARKER).exists():
            return _read_own(final, final / storage.STATE, metadata)
        store = storage.find_plain_store(final)
    if store is None:
        raise CheckpointNotFoundError(_ABSENT, [_explain_absence(final)])

    # Orbax wrote no dtypes, but the arrays have them.
    found = store.open(store.prefixes)
    records = {name: ArrayRecord(shape, dtype, None) for name, (shape, dtype) in found.items()}
    return Manifest(str(final), None, records, metadata, store)


def _explain_absence(final: pathlib.Path) -> Problem:
    # It may be inside, or misspelt.
    inside = sorted(filter(_can_be_read, final.glob("*")))
    beside = {x.name: str(x) for x in filter(_can_be_read, final.parent.glob("*"))}
    fix = "Write the path that saving, or huggingface_hub.snapshot_download, has returned."
    # Of the steps of a run the newest.
    if found := str(inside[-1]) if inside else beside.get(nearest(final.name, beside) or ""):
        fix = f"Write {found!r}."
    what = "it is no checkpoint" if final.exists() else "nothing is there"
    return Problem(str(final), what, fix)


def _can_be_read(path: pathlib.Path) -> bool:
    return is_checkpoint(path) or tensor_files.is_tensors(path)


def _read_tensors(final: pathlib.Path) -> Manifest:
    store = tensor_files.TensorStore(final)
    found = store.open(store.names)
    records = {name: ArrayRecord(shape, dtype, None) for name, (shape, dtype) in found.items()}
    if any(MARKER in {*texts, *texts.values()} for texts in store.texts.values()):
        sections = {file: texts.get(SECTION, "") for file, texts in store.texts.items()}
        first, section = next(iter(sections.items()))
        others = [file for file in sections if sections[file] != section]
        storage.refuse_damage(final, dict.fromkeys(others, f"it is of another save than {first}"))
        with storage.refuse_unreadable(final, first):
            records = _read_section(final, first, json.loads(section), {})
        what = "either no file has it, or the files do not say that it was saved"
        storage.refuse_damage(final, dict.fromkeys(records.keys() ^ found.keys(), what))
    return Manifest(str(final), "tensors", records, {}, store)


def _read_remote(url: str) -> Manifest:
    """The same in an object store, of what this library saved."""
    storage.read_object(url, MARKER)
    content = storage.read_object(url, METADATA)
    with storage.refuse_unreadable(url, METADATA):
        metadata = json.loads(content)["custom_metadata"]
        return _read_own(url, f"{url.rstrip('/')}/{storage.STATE}", metadata)


def _read_own(final: object, directory: pathlib.Path | str, metadata: dict[str, Any]) -> Manifest:
    section = metadata.pop(SECTION)
    records = _read_section(final, METADATA, section, metadata)
    store = storage.OrbaxStore(final, directory, {name: name for name in records})
    return Manifest(str(final), section["kind"], records, metadata, store)


def _read_section(
    final: object, file: str, section: dict[str, Any], metadata: Mapping[str, Any]
) -> dict[str, ArrayRecord]:
    is_changed = section.pop("checksum") != _digest({**metadata, **section})
    if is_changed or section["version"] != VERSION:
        what = "what it says of the arrays, or of their run, is not what was saved"
        other = f"it is of a release with format {section['version']!r:.20}, this one has {VERSION}"
        storage.refuse_damage(final, {file: what if is_changed else other})
    return {name: _read_record(entry) for name, entry in section["arrays"].items()}


def _read_record(entry: Mapping[str, Any]) -> ArrayRecord:
    """The record of an entry.

    Raises:
        ValueError, TypeError, LookupError: It describes no array, though its checksum is right.
    """
    names = entry["names"]
    if names is not None:
        names = tuple(tuple(name) if type(name) is list else name for name in names)
    shape, values = tuple(entry["shape"]), entry["values"]
    record = ArrayRecord(shape, entry["dtype"], names, values)
    # These raise where it has no hash, or no dtype.
    _ = hash(record), record.nbytes
    are_sizes = all(type(size) is int and size >= 0 for size in shape)
    fits = names is None or len(names) == len(shape)
    if not (are_sizes and fits and isinstance(values, str)):
        raise ValueError(f"{entry} describes no array")
    return record
