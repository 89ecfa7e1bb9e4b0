"""Edits of a saved checkpoint as somebody would make them who knows the formats well.

Written from the formats alone: nothing here comes from the library. Whoever edits a file of JSON
can also make the checksums anew of what stands in it, but not those of the arrays' values.
"""

import contextlib
import hashlib
import json
import pathlib
from collections.abc import Callable, Iterator
from typing import Any

import tensorstore as ts

SEAL = "penzai_shard.json"
METADATA = "_CHECKPOINT_METADATA"
ARRAYS = "state"

# Texts that are replaced in JSON by what no value of Python is written as.
RAW = {
    "@deep@": "[" * 20_000 + "]" * 20_000,
    "@1e999@": "1e999",
    "@digits@": "9" * 5_000,
    "@NaN@": "NaN",
    "@surrogate@": '"\\ud800"',
}


def files_of(directory: pathlib.Path) -> list[str]:
    """The relative paths of all files."""
    return sorted(str(p.relative_to(directory)) for p in directory.rglob("*") if p.is_file())


def is_json(content: bytes) -> bool:
    """Whether a file holds an object of JSON."""
    try:
        return isinstance(json.loads(content), dict)
    except (ValueError, RecursionError):
        return False


def seal_anew(directory: pathlib.Path) -> None:
    """Writes into the seal the checksums that the files have now, and the seal's own."""
    content = json.loads((directory / SEAL).read_bytes())
    for name in list(content["files"]):
        file = directory / name
        if file.is_file():
            content["files"][name] = hashlib.sha256(file.read_bytes()).hexdigest()
        else:
            del content["files"][name]
    write_seal(directory, content)


def write_seal(directory: pathlib.Path, content: dict[str, Any]) -> None:
    """Writes a seal with its own checksum."""
    content.pop("checksum", None)
    content["checksum"] = _checksum(content)
    (directory / SEAL).write_text(json.dumps(content, indent=1))


def sign_entries(content: dict[str, Any]) -> None:
    """Gives the entries of all arrays in Orbax' metadata the checksum of what they say now."""
    section = content["custom_metadata"]["penzai_shard"]
    for name, entry in section["arrays"].items():
        if isinstance(entry, dict):
            entry.pop("checksum", None)
            signed = [name, entry, section["save"]] if "save" in section else [name, entry]
            entry["checksum"] = _checksum(signed)


def _checksum(content: Any) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:16]


def edit_json(
    directory: pathlib.Path, name: str, edit: Callable[[Any], Any], *, checksums: bool
) -> None:
    """Edits a file of JSON.

    Args:
        directory: The checkpoint.
        name: The file.
        edit: Changes the content, or returns another.
        checksums: Make all checksums anew that can be, so that none of them tells.
    """
    content = json.loads((directory / name).read_bytes())
    edited = edit(content)
    content = content if edited is None else edited
    if checksums and name == METADATA:
        with contextlib.suppress(KeyError, TypeError, AttributeError):  # No entries any more.
            sign_entries(content)
    if checksums and name == SEAL and isinstance(content, dict):
        write_seal(directory, content)
    else:
        indent = 1 if name == SEAL else None
        (directory / name).write_text(as_text(content, indent))
    if checksums and name != SEAL:
        seal_anew(directory)


def as_text(content: Any, indent: int | None = None) -> str:
    """JSON, in which some texts stand for what JSON can hold and Python would not write."""
    text = json.dumps(content, indent=indent)
    for mark, raw in RAW.items():
        text = text.replace(json.dumps(mark), raw)
    return text


def places(content: Any, before: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The place of everything in a JSON content, from the outside to the inside."""
    items: Any = ()
    if isinstance(content, dict):
        items = content.items()
    elif isinstance(content, list):
        items = enumerate(content)
    for key, value in items:
        yield (*before, key)
        yield from places(value, (*before, key))


def at(content: Any, place: tuple[Any, ...]) -> Any:
    """What stands at a place."""
    for key in place:
        content = content[key]
    return content


class StoredArrays:
    """The arrays' storage: keys with their contents, in Orbax' OCDBT."""

    def __init__(self, directory: pathlib.Path) -> None:
        base = f"file://{directory / ARRAYS}/"
        self._kvstore = {"driver": "ocdbt", "base": base}
        self._open = ts.KvStore.open(self._kvstore).result()

    def keys(self) -> list[str]:
        """All keys, such as ``mlp/up/c/0/1`` for a chunk of an array and ``mlp/up/zarr.json``."""
        return sorted(key.decode() for key in self._open.list().result())

    def chunks(self, name: str) -> list[str]:
        """The keys of the chunks of an array."""
        return [k for k in self.keys() if k == f"{name}/c" or k.startswith(f"{name}/c/")]

    def read(self, key: str) -> bytes:
        """What stands under a key."""
        return self._open.read(key).result().value

    def write(self, contents: dict[str, bytes | None]) -> None:
        """Writes keys, or removes those with None, in one transaction."""
        with ts.Transaction() as transaction:
            store = self._open.with_transaction(transaction)
            for key, content in contents.items():
                store.write(key, content).result()

    def array(self, name: str) -> Any:
        """An array, to be read and written."""
        kvstore = {**self._kvstore, "path": f"{name}/"}
        return ts.open({"driver": "zarr3", "kvstore": kvstore}).result()
