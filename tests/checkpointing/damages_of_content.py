"""What can happen to the content of a saved checkpoint: its storage, and every field of JSON.

These kinds of damage edit with the library that wrote what they change, and make all checksums anew
that can be without knowing the arrays' values.
"""

import json
import pathlib
from collections.abc import Callable
from typing import Any

import numpy as np

from tests.checkpointing import checkpoint_editing as editing
from tests.checkpointing.checkpoint_editing import METADATA, SEAL, StoredArrays
from tests.checkpointing.damages import (
    Drawn,
    Save,
    chosen,
    edit_entries,
    entries_of,
    kind_of_damage,
)

# The storage of arrays, edited with the library that wrote it, and sealed anew.


def _stored(names: tuple[str, ...], where: str, edit: Callable[[StoredArrays], Any]) -> Drawn:
    def edit_and_seal(copy: pathlib.Path) -> None:
        edit(StoredArrays(copy))
        editing.seal_anew(copy)

    return names, where, edit_and_seal


@kind_of_damage("the storage of two arrays exchanged")
def _(rng: np.random.Generator, save: Save) -> Drawn:
    first, second = chosen(rng, save.alike)
    takes_metadata = bool(rng.integers(2))

    def edit(store: StoredArrays) -> None:
        changed: dict[str, bytes | None] = {}
        for mine, other in ((first, second), (second, first)):
            changed |= {key: None for key in store.chunks(mine) if mine == first}
            changed |= {
                key.replace(other, mine, 1): store.read(key)
                for key in [*store.chunks(other), *[f"{other}/zarr.json"] * takes_metadata]
            }
        store.write(changed)

    return _stored((first, second), f"{first} and {second}", edit)


@kind_of_damage("storage and entries of two arrays exchanged")
def _(rng: np.random.Generator, save: Save) -> Drawn:
    first, second = chosen(rng, save.alike)
    what = chosen(rng, ["entries alone", "values of entries", "storage and values", "axes"])

    def edit(copy: pathlib.Path) -> None:
        def exchange(entries: Any) -> None:
            mine, other = entries[first], entries[second]
            if what == "entries alone":
                entries[first], entries[second] = other, mine
            elif what == "axes":
                mine["axes"], other["axes"] = other["axes"], mine["axes"]
            elif "values" in mine:
                mine["values"], other["values"] = other["values"], mine["values"]

        # Whoever makes the checksum of an entry anew with another's values forges a checkpoint.
        edit_entries(copy, exchange, checksums="values" not in what)
        if what == "storage and values":
            store = StoredArrays(copy)
            pairs = ((first, second), (second, first))
            store.write(
                {
                    key.replace(other, mine, 1): store.read(key)
                    for mine, other in pairs
                    for key in store.chunks(other)
                }
            )
        editing.seal_anew(copy)

    return (first, second), f"{what} of {first} and {second}", edit


@kind_of_damage("chunks of an array changed")
def _(rng: np.random.Generator, save: Save) -> Drawn:
    store = StoredArrays(save.path)
    name = chosen(rng, [n for n in save.arrays if len(store.chunks(n)) > 1] or save.arrays)
    chunks = store.chunks(name)
    what = chosen(
        rng, ["exchanged", "exchanged", "the same twice", "removed", "empty", "cut", "junk"]
    )
    one, other = (chosen(rng, chunks), chosen(rng, chunks))
    if one == other:
        one, other = chunks[0], chunks[-1]

    def edit(store: StoredArrays) -> None:
        content = store.read(one)
        changes: dict[str, dict[str, bytes | None]] = {
            "exchanged": {one: store.read(other), other: content},
            "the same twice": {other: content},
            "removed": {one: None},
            "empty": {one: b""},
            "cut": {one: content[: len(content) // 2]},
            "junk": {one: bytes(rng.bytes(len(content)))},
        }
        store.write(changes[what])

    return _stored((name,), f"{what}: {one}, {other}", edit)


@kind_of_damage("values of an array changed")
def _(rng: np.random.Generator, save: Save) -> Drawn:
    name = chosen(rng, save.arrays)
    what = chosen(rng, ["one bit", "one bit", "negated", "two exchanged", "reversed", "rolled"])

    def edit(store: StoredArrays) -> None:
        array = store.array(name)
        values = np.array(array.read().result())
        bits = values.reshape(-1).view(f"u{values.dtype.itemsize}").copy()
        place, other = int(rng.integers(bits.size)), int(rng.integers(bits.size))
        top = bits.dtype.itemsize * 8
        if what == "one bit":
            bits[place] ^= bits.dtype.type(1 << int(rng.integers(top)))
        elif what == "negated":
            bits ^= bits.dtype.type(1 << (top - 1))
        elif what == "two exchanged":
            bits[[place, other]] = bits[[other, place]]
        else:
            bits = bits[::-1].copy() if what == "reversed" else np.roll(bits, 1)
        array.write(bits.view(values.dtype).reshape(values.shape)).result()

    return _stored((name,), f"{what} in {name}", edit)


@kind_of_damage("the storage's description of an array changed")
def _(rng: np.random.Generator, save: Save) -> Drawn:
    name = chosen(rng, save.arrays)
    key = f"{name}/zarr.json"
    what = chosen(rng, DESCRIPTIONS)
    makes_whole = bool(rng.integers(2))

    def edit(store: StoredArrays) -> None:
        if what in ("removed", "emptied"):
            store.write({key: None if what == "removed" else b""})
            return
        content = json.loads(store.read(key))
        DESCRIPTIONS[what](content)
        if makes_whole:  # The chunks are those that there are.
            _set_chunks(content, content["shape"])
        store.write({key: editing.as_text(content).encode()})

    return _stored((name,), f"{what} of {name}{', one chunk' if makes_whole else ''}", edit)


def _inner(content: Any) -> Any:
    return content["codecs"][0]["configuration"]


def _set_chunks(content: Any, shape: Any) -> None:
    content["chunk_grid"]["configuration"]["chunk_shape"] = shape
    if "configuration" in content["codecs"][0]:
        _inner(content)["chunk_shape"] = shape


def _set_endian(content: Any) -> None:
    _inner(content)["codecs"][0]["configuration"] = {"endian": "big"}


def _transpose(content: Any) -> None:
    order = list(range(len(content["shape"])))[::-1]
    codec = {"name": "transpose", "configuration": {"order": order}}
    _inner(content)["codecs"].insert(0, codec)


_OTHER_DTYPES = {"float32": "int32", "int32": "uint32", "bfloat16": "float16", "uint32": "float32"}
DESCRIPTIONS: dict[str, Callable[[Any], Any]] = {
    "removed": lambda c: None,
    "emptied": lambda c: None,
    "lengths swapped": lambda c: c["shape"].reverse(),
    "a length less": lambda c: c["shape"].append(c["shape"].pop() - 1),
    "a length more": lambda c: c["shape"].append(c["shape"].pop() + 1),
    "a length negative": lambda c: c["shape"].append(-c["shape"].pop()),
    "a length huge": lambda c: c["shape"].append(2**62),
    "flattened": lambda c: c.update(shape=[int(np.prod(c["shape"]))]),
    "dtype": lambda c: c.update(data_type=_OTHER_DTYPES.get(c["data_type"], "float64")),
    "half as long": lambda c: c.update(data_type="float16", shape=[2 * n for n in c["shape"]]),
    "dtype unknown": lambda c: c.update(data_type="float33"),
    "dtype a list": lambda c: c.update(data_type=["f4"]),
    "byte order": _set_endian,
    "order of dimensions": _transpose,
    "chunks": lambda c: c["chunk_grid"]["configuration"]["chunk_shape"].reverse(),
    "chunks of one": lambda c: _set_chunks(c, [1] * len(c["shape"])),
    "chunks negative": lambda c: _set_chunks(c, [-1] * len(c["shape"])),
    "chunks of nothing": lambda c: _set_chunks(c, [0] * len(c["shape"])),
    "codecs": lambda c: c.update(codecs=[]),
    "inner codecs": lambda c: _inner(c).update(codecs=_inner(c)["codecs"][:1]),
    "fill value": lambda c: c.update(fill_value=7),
    "key encoding": lambda c: c.update(
        chunk_key_encoding={"name": "v2", "configuration": {"separator": "."}}
    ),
    "format": lambda c: c.update(zarr_format=2),
    "kind of node": lambda c: c.update(node_type="group"),
    "a field deep": lambda c: c.update(attributes="@deep@"),
    "a field endless": lambda c: c.update(shape=["@1e999@"]),
}


# Every field of every file of JSON.


def _json_changed(rng: np.random.Generator, save: Save, file: str, *, checksums: bool) -> Drawn:
    content = json.loads((save.path / file).read_bytes())
    options = list(editing.places(content))
    # A field of many is as likely as one of few: first how deep, then which.
    depth = chosen(rng, sorted({len(place) for place in options}))
    place = chosen(rng, [p for p in options if len(p) == depth])
    what = chosen(rng, FIELDS)
    seed = int(rng.integers(2**32))

    def edit(content: Any) -> None:
        FIELDS[what](editing.at(content, place[:-1]), place[-1], np.random.default_rng(seed))

    names = (file, *map(str, place))
    names += tuple(name for name in save.arrays if any(name in str(part) for part in place))
    if checksums or file == METADATA:
        names = (*names, *entries_of(save))
    where = f"{'/'.join(map(str, place))} {what}{', checksums anew' if checksums else ''}"
    return (
        names,
        f"{file}: {where}"[:160],
        lambda copy: editing.edit_json(copy, file, edit, checksums=checksums),
    )


def _set(value: Any) -> Callable[[Any, Any, Any], None]:
    def edit(parent: Any, key: Any, rng: Any) -> None:
        parent[key] = value

    return edit


def _remove_field(parent: Any, key: Any, rng: Any) -> None:
    del parent[key]


def _rename(parent: Any, key: Any, rng: Any) -> None:
    if isinstance(parent, dict):
        parent[f"{key}x"] = parent.pop(key)
    else:
        parent.insert(key, parent[key])


def _change(parent: Any, key: Any, rng: np.random.Generator) -> None:
    """Changes a value to another of its own kind."""
    value = parent[key]
    if isinstance(value, bool):
        parent[key] = not value
    elif isinstance(value, int):
        parent[key] = value + chosen(rng, [1, -1, 7, 2**31, -value - 1])
    elif isinstance(value, str):
        parent[key] = value[::-1] if len(value) > 1 and rng.integers(2) else f"{value}0"
    elif isinstance(value, list):
        parent[key] = value[::-1] if len(value) > 1 and rng.integers(2) else [*value, *value[:1]]
    elif isinstance(value, dict):
        parent[key] = dict(list(value.items())[:-1])
    else:
        parent[key] = 1


def _swap(parent: Any, key: Any, rng: np.random.Generator) -> None:
    other = chosen(rng, parent if isinstance(parent, dict) else range(len(parent)))
    parent[key], parent[other] = parent[other], parent[key]


FIELDS: dict[str, Callable[[Any, Any, Any], None]] = {
    "removed": _remove_field,
    "renamed or twice": _rename,
    "changed": _change,
    "changed again": _change,
    "swapped": _swap,
    "null": _set(None),
    "-1": _set(-1),
    "[-8, 8]": _set([-8, 8]),
    "huge": _set(2**70),
    "of 5000 digits": _set("@digits@"),
    "1e999": _set("@1e999@"),
    "NaN": _set("@NaN@"),
    "1.5": _set(1.5),
    "true": _set(True),
    "a text": _set("abc"),
    "an empty text": _set(""),
    "half a character": _set("@surrogate@"),
    "an empty list": _set([]),
    "an empty object": _set({}),
    "lists in lists": _set([[["a"]]]),
    "deep": _set("@deep@"),
}


@kind_of_damage("a field of this library's metadata")
def _(rng: np.random.Generator, save: Save) -> Drawn:
    return _json_changed(rng, save, chosen(rng, [METADATA, SEAL]), checksums=False)


@kind_of_damage("a field of this library's metadata, checksums anew")
def _(rng: np.random.Generator, save: Save) -> Drawn:
    return _json_changed(rng, save, chosen(rng, [METADATA, METADATA, SEAL]), checksums=True)


@kind_of_damage("a field of Orbax' metadata, checksums anew")
def _(rng: np.random.Generator, save: Save) -> Drawn:
    file = chosen(rng, [f for f in save.files("json") if f not in (METADATA, SEAL)])
    return _json_changed(rng, save, file, checksums=True)


@kind_of_damage("what an entry says of an array")
def _(rng: np.random.Generator, save: Save) -> Drawn:
    names = entries_of(save)
    name = chosen(rng, names)
    what = chosen(rng, ENTRIES)
    checksums = bool(rng.integers(3))
    other = chosen(rng, names)

    def edit(entries: Any) -> None:
        ENTRIES[what](entries, name, other)

    return (
        (name, other),
        f"{what} of {name}{', checksums anew' if checksums else ''}",
        lambda copy: edit_entries(copy, edit, checksums=checksums),
    )


def _with_axes(change: Callable[[list[Any]], Any]) -> Callable[[Any, str, str], None]:
    def edit(entries: Any, name: str, other: str) -> None:
        if entries[name]["axes"]:
            entries[name]["axes"] = change(entries[name]["axes"])

    return edit


ENTRIES: dict[str, Callable[[Any, str, str], None]] = {
    "axes renamed": _with_axes(lambda axes: [*axes[:-1], "other"]),
    "axes swapped": _with_axes(lambda axes: axes[::-1]),
    "axes the same": _with_axes(lambda axes: [axes[0]] * len(axes)),
    "axes dropped": _with_axes(lambda axes: axes[1:]),
    "axes positional": _with_axes(lambda axes: [None] * len(axes)),
    "axes unknown": lambda e, n, o: e[n].update(axes=None),
    "lengths swapped": lambda e, n, o: e[n].update(shape=e[n]["shape"][::-1]),
    "lengths and axes swapped": lambda e, n, o: e[n].update(
        shape=e[n]["shape"][::-1], axes=e[n]["axes"] and e[n]["axes"][::-1]
    ),
    "shape empty": lambda e, n, o: e[n].update(shape=[0, *e[n]["shape"][1:]]),
    "shape negative": lambda e, n, o: e[n].update(shape=[-x for x in e[n]["shape"]]),
    "dtype": lambda e, n, o: e[n].update(dtype=_OTHER_DTYPES.get(e[n]["dtype"], "float32")),
    "kind of key": lambda e, n, o: e[n].update(key_impl="rbg"),
    "checksum of values gone": lambda e, n, o: e[n].update(values=None),
    "checksum of values dropped": lambda e, n, o: e[n].pop("values", None),
    "checksum of values changed": lambda e, n, o: e[n].update(values=str(e[n].get("values"))[::-1]),
    "checksum of another's values": lambda e, n, o: e[n].update(values=e[o].get("values")),
    "dropped": lambda e, n, o: e.pop(n),
    "renamed": lambda e, n, o: e.update({f"{n}_": e.pop(n)}),
    "of another": lambda e, n, o: e.update({n: dict(e[o])}),
}
