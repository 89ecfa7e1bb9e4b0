"""What can happen to a saved checkpoint, drawn at random from a seed.

A damage is data: its kind, what it is done to, where, and the edit that does it to a copy. Each
kind is a function of a random generator and a save. ``damages_of_content`` has further kinds, and
``damage_verdicts`` carries all of them out and judges.
"""

import contextlib
import dataclasses
import json
import os
import pathlib
import shutil
import socket
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from tests.checkpointing import checkpoint_editing as editing
from tests.checkpointing.checkpoint_editing import METADATA, SEAL, StoredArrays

Edit = Callable[[pathlib.Path], Any]


@dataclasses.dataclass(frozen=True)
class Save:
    """A checkpoint to be damaged.

    Attributes:
        name: What it is called in the table.
        path: Where it is.
        twin: Another checkpoint of the same model with other values.
        arrays: The names of its arrays that have elements.
        alike: Pairs of arrays of the same shape and dtype.
    """

    name: str
    path: pathlib.Path
    twin: pathlib.Path
    arrays: tuple[str, ...]
    alike: tuple[tuple[str, str], ...]

    def files(self, kind: str = "") -> list[str]:
        """Its files: all, ``"numbers"``, ``"metadata"`` or ``"json"``."""
        files = editing.files_of(self.path)
        if kind == "json":
            return [f for f in files if editing.is_json((self.path / f).read_bytes())]
        if kind:
            return [f for f in files if holds_numbers(f) == (kind == "numbers")]
        return files


@dataclasses.dataclass(frozen=True)
class Damage:
    """One damage.

    Attributes:
        kind: Its row in the table.
        save: What is damaged.
        names: The files and arrays concerned; a refusal must name one of them.
        where: What exactly is done, in words.
        edit: Does it to a copy of the checkpoint.
    """

    kind: str
    save: Save
    names: tuple[str, ...]
    where: str
    edit: Edit = dataclasses.field(repr=False)


# Where Orbax' metadata has the entries of arrays.
ENTRIES_PLACE = ("custom_metadata", "penzai_shard", "arrays")

Drawn = tuple[tuple[str, ...], str, Edit]
KINDS: dict[str, Callable[[np.random.Generator, Save], Drawn]] = {}


def kind_of_damage(kind: str) -> Callable[[Any], Any]:
    """Registers a function as a kind of damage."""

    def register(draw: Any) -> Any:
        KINDS[kind] = draw
        return draw

    return register


def drawn_damages(saves: list[Save], seed: int, count: int) -> Iterator[Damage]:
    """So many damages, as equally many of every kind as possible."""
    kinds = list(KINDS)
    for number in range(count):
        rng = np.random.default_rng([seed, number])
        # The saves change with every round through the kinds, each starting elsewhere.
        save = saves[(number // len(kinds) + number % len(kinds)) % len(saves)]
        kind = kinds[number % len(kinds)]
        yield Damage(kind, save, *KINDS[kind](rng, save))


def holds_numbers(file: str) -> bool:
    """Whether a file is part of the storage of arrays: it is of no use to say which array's."""
    parts = pathlib.PurePath(file).parts
    return any(p == "d" or p.startswith("ocdbt.") for p in parts) or file.endswith(".ocdbt")


def chosen(rng: np.random.Generator, options: Any) -> Any:
    """One of some options."""
    options = list(options)
    return options[int(rng.integers(len(options)))]


def concerned(save: Save, *files: str) -> tuple[str, ...]:
    """What a refusal may name for some damaged files."""
    arrays = save.arrays if any(holds_numbers(f) for f in files) else ()
    entries = entries_of(save) if METADATA in files else ()
    return (*files, *arrays, *entries)


def entries_of(save: Save) -> tuple[str, ...]:
    """The names of all arrays of which a checkpoint has an entry."""
    return tuple(editing.at(json.loads((save.path / METADATA).read_bytes()), ENTRIES_PLACE))


def edit_entries(copy: pathlib.Path, edit: Callable[[Any], Any], *, checksums: bool) -> None:
    """Edits the entries of all arrays in a copy."""

    def edit_all(content: Any) -> None:
        edit(editing.at(content, ENTRIES_PLACE))

    editing.edit_json(copy, METADATA, edit_all, checksums=checksums)


# Bytes of files.


def _bytes_flipped(rng: np.random.Generator, save: Save, kind: str) -> Drawn:
    file = chosen(rng, [f for f in save.files(kind) if (save.path / f).stat().st_size])
    content = bytearray((save.path / file).read_bytes())
    first = int(rng.integers(len(content)))
    count = min(chosen(rng, [1, 1, 1, 4, 64]), len(content) - first)
    mask = rng.integers(1, 256, count)
    for i in range(count):
        content[first + i] ^= int(mask[i])
    where = f"{count} bytes from {first} of {len(content)}"
    return concerned(save, file), where, lambda copy: (copy / file).write_bytes(content)


@kind_of_damage("bytes flipped in metadata")
def _(rng: np.random.Generator, save: Save) -> Drawn:
    return _bytes_flipped(rng, save, "metadata")


@kind_of_damage("bytes flipped in the storage of arrays")
def _(rng: np.random.Generator, save: Save) -> Drawn:
    return _bytes_flipped(rng, save, "numbers")


@kind_of_damage("a byte flipped in an array's data")
def _(rng: np.random.Generator, save: Save) -> Drawn:
    store = StoredArrays(save.path)
    name = chosen(rng, save.arrays)
    chunk = store.read(chosen(rng, store.chunks(name)))
    bit = int(rng.integers(8))
    file, first = chosen(rng, _found_in(save, chunk))
    # The last 20 bytes of a chunk are its index, which has a checksum.
    position = first + int(rng.integers(max(len(chunk) - 20, 1)))
    content = bytearray((save.path / file).read_bytes())
    content[position] ^= 1 << bit
    where = f"bit {bit} of byte {position}, in {name}"
    return concerned(save, file), where, lambda copy: (copy / file).write_bytes(content)


def _found_in(save: Save, chunk: bytes) -> list[tuple[str, int]]:
    """Where a chunk's bytes are in the files; what stands inside a compressed node is not found."""
    contents = {file: (save.path / file).read_bytes() for file in save.files("numbers")}
    found = [(f, c.find(chunk)) for f, c in contents.items() if chunk in c]
    largest = max(contents, key=lambda file: len(contents[file]))
    return found or [(largest, len(contents[largest]) // 2)]


@kind_of_damage("a file cut")
def _(rng: np.random.Generator, save: Save) -> Drawn:
    file = chosen(rng, [f for f in save.files() if (save.path / f).stat().st_size])
    content = (save.path / file).read_bytes()
    size = len(content)
    kept = chosen(rng, [0, 1, size // 3, size // 2, size - 8, size - 1, int(rng.integers(size))])
    where = f"after {max(kept, 0)} of {size} bytes"
    return concerned(save, file), where, lambda copy: (copy / file).write_bytes(content[:kept])


@kind_of_damage("a file grown or zeroed")
def _(rng: np.random.Generator, save: Save) -> Drawn:
    file = chosen(rng, save.files())
    content = (save.path / file).read_bytes()
    how = chosen(rng, ["zeros after it", "twice", "a line after it", "a hole in it", "all zeros"])
    half = len(content) // 2
    changed = {
        "zeros after it": content + bytes(512),
        "twice": content + content,
        "a line after it": content + b"\n",
        "a hole in it": content[:half] + bytes(min(64, half)) + content[half + 64 :],
        "all zeros": bytes(len(content)),
    }[how]
    return concerned(save, file), how, lambda copy: (copy / file).write_bytes(changed)


@kind_of_damage("a file or directory removed")
def _(rng: np.random.Generator, save: Save) -> Drawn:
    files = save.files()
    folders = sorted({str(p) for f in files for p in pathlib.PurePath(f).parents} - {"."})
    gone = chosen(rng, [*files, *folders])
    names = concerned(save, gone, *(f for f in files if f.startswith(f"{gone}/")))
    return names, "removed", lambda copy: _remove(copy / gone)


def _remove(path: pathlib.Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink()


@kind_of_damage("two files or directories swapped")
def _(rng: np.random.Generator, save: Save) -> Drawn:
    files = save.files()
    folders = sorted({str(p) for f in files for p in pathlib.PurePath(f).parents} - {"."})
    first, second = (chosen(rng, x) for x in ([files, files] if rng.integers(3) else [folders] * 2))
    if first.startswith(f"{second}/") or second.startswith(f"{first}/") or first == second:
        first, second = chosen(rng, [(METADATA, SEAL), (SEAL, "state/_METADATA")])
    names = concerned(
        save, first, second, *(f for f in files if f.startswith((f"{first}/", f"{second}/")))
    )

    def edit(copy: pathlib.Path) -> None:
        aside = copy.parent / "aside"
        os.rename(copy / first, aside)
        os.rename(copy / second, copy / first)
        os.rename(aside, copy / second)

    return names, f"{first} and {second}", edit


# Files that are no files, and other things on a disk.


@kind_of_damage("another thing in place of a file")
def _(rng: np.random.Generator, save: Save) -> Drawn:
    file = chosen(rng, save.files())
    what = chosen(rng, THINGS)

    def edit(copy: pathlib.Path) -> None:
        (copy / file).unlink()
        THINGS[what](copy / file)

    return concerned(save, file), what, edit


def _make_socket(path: pathlib.Path) -> None:
    # A path of a socket has at most 108 bytes.
    here = os.getcwd()
    os.chdir(path.parent)
    with contextlib.closing(socket.socket(socket.AF_UNIX)) as bound:
        bound.bind(path.name)
    os.chdir(here)


THINGS: dict[str, Edit] = {
    "a FIFO": os.mkfifo,
    "an empty directory": os.mkdir,
    "a link to nothing": lambda path: path.symlink_to("nowhere"),
    "a link to itself": lambda path: path.symlink_to(path.name),
    "a link to a device without end": lambda path: path.symlink_to("/dev/zero"),
    "a link to its directory": lambda path: path.symlink_to("."),
    "a socket": _make_socket,
}


@kind_of_damage("a file of text where none was")
def _(rng: np.random.Generator, save: Save) -> Drawn:
    files = [f for f in save.files() if (save.path / f).stat().st_size]
    file = chosen(rng, files)
    what = chosen(rng, TEXTS)
    reseals = bool(rng.integers(2)) and file != SEAL

    def edit(copy: pathlib.Path) -> None:
        (copy / file).write_bytes(TEXTS[what])
        if reseals:
            editing.seal_anew(copy)

    return concerned(save, file), f"{what}{', sealed anew' if reseals else ''}", edit


TEXTS = {
    "no UTF-8": b'{"a": "\xff\xfe\x80"}',
    "UTF-16": '{"version": 2}'.encode("utf-16"),
    "a byte order mark": b"\xef\xbb\xbf{}",
    "deep lists": b"[" * 100_000 + b"]" * 100_000,
    "deep objects": b'{"a":' * 50_000 + b"1" + b"}" * 50_000,
    "null": b"null",
    "a list": b"[1, 2]",
    "an empty object": b"{}",
    "a number without end": b"1" * 20_000,
    "two objects": b"{}{}",
    "not a number": b'{"version": NaN, "files": Infinity}',
    "a web page": b"<!DOCTYPE html><html><body>404</body></html>",
    "a pointer of git": b"version https://git-lfs.github.com/spec/v1\nsize 12\n",
}


# Other checkpoints of the same model.


@kind_of_damage("files of another checkpoint")
def _(rng: np.random.Generator, save: Save) -> Drawn:
    here, there = save.files(), editing.files_of(save.twin)
    # Data files have random names; of each directory there is one.
    same = {file: _same_role(file, there) for file in here}
    files = [f for f, other in same.items() if _differs(save.path / f, save.twin / other)]
    taken = sorted(
        rng.choice(files, size=min(chosen(rng, [1, 1, 2, 3]), len(files)), replace=False)
    )
    reseals = bool(rng.integers(2)) and SEAL not in taken

    def edit(copy: pathlib.Path) -> None:
        for file in taken:
            shutil.copy(save.twin / same[file], copy / file)
        if reseals:
            editing.seal_anew(copy)

    where = f"{', '.join(taken)}{', sealed anew' if reseals else ''}"
    # Whoever has the seal of another finds all other files changed.
    others = save.files("metadata") if SEAL in taken else []
    return concerned(save, *taken, *others, *save.arrays * reseals), where, edit


def _same_role(file: str, others: list[str]) -> str:
    if file in others:
        return file
    folder = os.path.dirname(file)
    return next(other for other in others if os.path.dirname(other) == folder)


def _differs(first: pathlib.Path, second: pathlib.Path) -> bool:
    return first.read_bytes() != second.read_bytes()


@kind_of_damage("directories of another checkpoint")
def _(rng: np.random.Generator, save: Save) -> Drawn:
    folder = chosen(rng, ["state", "state", "state/d", "state/ocdbt.process_0", "state/*"])
    reseals = bool(rng.integers(3)) or folder == "state"
    keeps = folder == "state/*"

    def edit(copy: pathlib.Path) -> None:
        if keeps:  # Only the storage, not what describes it.
            for entry in ("d", "ocdbt.process_0", "manifest.ocdbt"):
                _remove(copy / "state" / entry)
                _copy(save.twin / "state" / entry, copy / "state" / entry)
        else:
            shutil.rmtree(copy / folder)
            shutil.copytree(save.twin / folder, copy / folder)
        if reseals:
            editing.seal_anew(copy)

    names = concerned(save, *(f for f in save.files() if f.startswith(folder.strip("*"))))
    return (*names, *save.arrays), f"{folder}{', sealed anew' if reseals else ''}", edit


def _copy(source: pathlib.Path, target: pathlib.Path) -> None:
    (shutil.copytree if source.is_dir() else shutil.copy)(source, target)


@kind_of_damage("an array of another checkpoint")
def _(rng: np.random.Generator, save: Save) -> Drawn:
    name = chosen(rng, save.arrays)
    what = chosen(rng, ["chunks", "one chunk", "everything", "chunks and entry"])

    def edit(copy: pathlib.Path) -> None:
        theirs, ours = StoredArrays(save.twin), StoredArrays(copy)
        keys = ours.chunks(name)
        keys = keys[-1:] if what == "one chunk" else keys
        keys += [f"{name}/zarr.json"] * (what == "everything")
        ours.write({key: theirs.read(key) for key in keys})
        if what == "chunks and entry":
            entry = editing.at(
                json.loads((save.twin / METADATA).read_bytes()), (*ENTRIES_PLACE, name)
            )
            edit_entries(copy, lambda entries: entries.update({name: entry}), checksums=False)
        editing.seal_anew(copy)

    return (name,), f"{what} of {name}", edit
