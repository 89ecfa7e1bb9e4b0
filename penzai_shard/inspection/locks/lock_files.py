"""Sharding locks as JSON text, one line for each array or group of equal ones, and back.

The text depends on the lock alone, so that the difference of two texts is that of their locks.
"""

import hashlib
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, get_args

from penzai_shard.errors import LockError, raise_all
from penzai_shard.inspection.locks.lock_content import (
    CollectiveCount,
    CollectiveGroup,
    LockContent,
    LockedArray,
)
from penzai_shard.inspection.steps.operation_owners import PHASES
from penzai_shard.inspection.steps.step_arrays import StepPart
from penzai_shard.path_folding import paths_in_ranges, ranged_paths

FORMAT = "penzai_shard sharding lock"
VERSION = 1

_PARTS = get_args(StepPart)
_PHASES = (*PHASES, "")
_KINDS_OF_JSON: dict[type, str] = {dict: "an object", list: "a list"}
# Each section has a checksum, so that a change by hand is found where it is.
_HEAD = ("mesh", "device_kind", "made_with")
_LISTS = ("arrays", "collectives")
_FIGURES = ("not_counted", "memory")
_SECTIONS = ("head", *_LISTS, *_FIGURES)
_REWRITE = "Write the lock anew instead of changing it."


def lock_to_text(content: LockContent) -> str:
    """A lock as JSON text, the same for equal locks."""
    data = {
        "format": FORMAT,
        "version": VERSION,
        "mesh": dict(content.mesh),
        "device_kind": content.device_kind,
        "made_with": dict(sorted(content.made_with.items())),
        "arrays": _written_arrays(content.arrays),
        "collectives": _written_collectives(content.collectives),
        "not_counted": dict(sorted(content.not_counted.items())),
        "memory": dict(content.memory),
    }
    data["checksums"] = _checksums(data)
    return "{\n" + ",\n".join(_members(data)) + "\n}\n"


def lock_from_text(text: Any) -> LockContent:
    """Reads what ``lock_to_text`` wrote.

    Raises:
        LockError: It is something else, or was changed; all such places are named.
    """
    data = _sections(text)
    reader = _Reader()
    content = LockContent(
        mesh=tuple(reader.mapping("mesh", data["mesh"], _is_size).items()),
        device_kind=reader.text("device_kind", data["device_kind"]),
        made_with=reader.mapping("made_with", data["made_with"], _is_text),
        arrays=dict(reader.arrays(data["arrays"])),
        collectives=dict(reader.collectives(data["collectives"])),
        not_counted=reader.mapping("not_counted", data["not_counted"], _is_size),
        memory=reader.mapping("memory", data["memory"], _is_count),
    )
    broken = {problem.partition(":")[0].partition(" ")[0] for problem in reader.problems}
    broken = {"head" if name in _HEAD else name for name in broken}
    written = data["checksums"]
    for section, checksum in _checksums(data).items():
        kept = written.get(section) if isinstance(written, dict) else None
        if section not in broken and kept != checksum:
            names = ", ".join(_HEAD) if section == "head" else section
            reader.problems.append(f"{names}: changed after they were written. {_REWRITE}")
    raise_all(LockError, "this sharding lock cannot be read:", reader.problems)
    return content


# Writing


def _members(data: Mapping[str, Any]) -> Iterator[str]:
    """The lines of the outermost object; some of its members have a line for each entry."""
    for name, value in data.items():
        lines = None
        if name in _LISTS:
            lines, brackets = list(map(json.dumps, value)), "[]"
        elif name in _FIGURES:
            lines, brackets = [f"{json.dumps(item)}: {n}" for item, n in value.items()], "{}"
        if lines:
            inner = ",\n".join(f"    {line}" for line in lines)
            yield f'  "{name}": {brackets[0]}\n{inner}\n  {brackets[1]}'
        else:
            yield f'  "{name}": {json.dumps(value)}'


def _written_arrays(arrays: Mapping[str, LockedArray]) -> list[dict[str, Any]]:
    alike: dict[LockedArray, list[str]] = {}
    for path, array in arrays.items():
        alike.setdefault(array, []).append(path)
    lines = [(array, path) for array, paths in alike.items() for path in ranged_paths(paths)]
    lines.sort(key=lambda line: (_PARTS.index(line[0].part), _by_number(line[1])))
    return [_written_array(path, array) for array, path in lines]


def _written_array(path: str, array: LockedArray) -> dict[str, Any]:
    written: dict[str, Any] = {
        "path": path,
        "part": array.part,
        "spec": None if array.spec is None else list(array.spec),
        "shape": list(array.shape),
        "dtype": array.dtype,
    }
    written |= {name: True for name in ("donated", "on_host") if getattr(array, name)}
    shapes = {"chosen": array.chosen, "true_shape": array.true_shape}
    return written | {name: list(shape) for name, shape in shapes.items() if shape is not None}


def _written_collectives(
    collectives: Mapping[CollectiveGroup, CollectiveCount],
) -> list[dict[str, Any]]:
    lines: list[tuple[Any, dict[str, Any]]] = []
    of_one_layer: dict[tuple[CollectiveGroup, CollectiveCount], list[str]] = {}
    for group, count in collectives.items():
        if len(group.layers) == 1:
            same = CollectiveGroup((), group.phase, group.kind, group.mesh_axes)
            of_one_layer.setdefault((same, count), []).append(group.layers[0])
        else:
            layers = ranged_paths(group.layers)
            lines.append((layers, {"layers": layers} | _written_count(group, count)))
    for (group, count), paths in of_one_layer.items():
        for path in ranged_paths(paths):
            lines.append(([path], {"layer": path} | _written_count(group, count)))
    lines.sort(
        key=lambda line: (
            not line[0],  # What nobody owns comes last.
            list(map(_by_number, line[0])),
            _PHASES.index(line[1]["phase"]),
            line[1]["kind"],
            line[1]["mesh_axes"],
        )
    )
    return [line for _, line in lines]


def _written_count(group: CollectiveGroup, count: CollectiveCount) -> dict[str, Any]:
    written = {
        "phase": group.phase,
        "kind": group.kind,
        "mesh_axes": group.mesh_axes,
        "count": count.count,
        "payload_bytes": count.payload_bytes,
    }
    return written | ({"unknown_times": count.unknown_times} if count.unknown_times else {})


def _checksums(data: Mapping[str, Any]) -> dict[str, str]:
    """A short checksum of each section, whatever its text is spaced like."""
    sections: dict[str, Any] = {name: data[name] for name in _SECTIONS[1:]}
    sections["head"] = [list(data["mesh"]), *(data[name] for name in _HEAD)]
    return {
        name: hashlib.sha256(json.dumps(sections[name], sort_keys=True).encode()).hexdigest()[:8]
        for name in _SECTIONS
    }


def _by_number(text: str) -> list[tuple[bool, int, str]]:
    """A key that sorts texts by the first path of each, block_10 behind block_9."""
    pieces = re.split(r"(\d+)", next(paths_in_ranges(text)))
    return [(p.isdecimal(), int(p) if p.isdecimal() else 0, p) for p in pieces]


# Reading


def _sections(text: Any) -> dict[str, Any]:
    """The members of a lock's outermost object, all there."""
    if not isinstance(text, str):
        raise LockError(
            f"a sharding lock is read from text, and this is of type {type(text).__name__}. "
            "Give the text of to_json(); ShardingLock.load(path) reads a file."
        )
    try:
        data = json.loads(text, object_pairs_hook=_without_repeats)
    except (ValueError, RecursionError) as error:
        conflict = re.search(r"^(<{7}|={7}|>{7})", text, re.MULTILINE)
        cause = "it has the marks of a merge conflict" if conflict else str(error)
        raise LockError(f"this is not a sharding lock: {cause}. {_REWRITE}") from error
    if not isinstance(data, dict) or data.get("format") != FORMAT:
        raise LockError(
            f'this JSON is not a sharding lock: it has no "format": "{FORMAT}". '
            "Give the text of to_json()."
        )
    if data.get("version") != VERSION:
        raise LockError(
            f"this sharding lock has version {data.get('version')!r}, and {VERSION} is known. "
            "Write it anew, or read it with the penzai_shard that wrote it."
        )
    names = ("format", "version", *_HEAD, *_LISTS, *_FIGURES, "checksums")
    problems = [f"{name}: is missing. {_REWRITE}" for name in names if name not in data]
    problems += [f"{name}: is not known. {_REWRITE}" for name in data if name not in names]
    kinds: dict[str, type] = dict.fromkeys(("mesh", "made_with", *_FIGURES), dict)
    kinds |= dict.fromkeys(_LISTS, list)
    problems += [
        f"{name}: is {json.dumps(data[name])[:40]}, not {_KINDS_OF_JSON[kind]}. {_REWRITE}"
        for name, kind in kinds.items()
        if name in data and not isinstance(data[name], kind)
    ]
    raise_all(LockError, "this sharding lock cannot be read:", problems)
    return data


def _without_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"{twice!r} is in it twice")
    return found


class _WrongEntryError(ValueError):
    """An entry is not as it was written."""


class _Reader:
    """Reads sections, and collects what is wrong in them."""

    def __init__(self) -> None:
        self.problems: list[str] = []

    def text(self, name: str, value: Any) -> str:
        if not _is_text(value):
            self.problems.append(f"{name}: is {value!r}, not a text. {_REWRITE}")
        return str(value)

    def mapping(self, name: str, value: Any, fits: Callable[[Any], bool]) -> dict[str, Any]:
        for key, member in value.items():
            if not fits(member):
                self.problems.append(f"{name}: has {member!r} for {key!r}. {_REWRITE}")
        return value

    def arrays(self, entries: list[Any]) -> Iterator[tuple[str, LockedArray]]:
        def read(entry: Any) -> Iterator[tuple[str, LockedArray]]:
            chosen = _taken(entry, "chosen", _is_list_of(_is_count), None)
            shape = _taken(entry, "shape", _is_list_of(_is_count))
            true_shape = _taken(entry, "true_shape", _is_padded_to(shape), None)
            array = LockedArray(
                part=_taken(entry, "part", lambda value: value in _PARTS),
                spec=_spec(_taken(entry, "spec", _is_spec)),
                shape=tuple(shape),
                dtype=_taken(entry, "dtype", _is_text),
                donated=_taken(entry, "donated", _is_truth, False),
                on_host=_taken(entry, "on_host", _is_truth, False),
                chosen=None if chosen is None else tuple(chosen),
                true_shape=None if true_shape is None else tuple(true_shape),
            )
            return ((path, array) for path in _paths(_taken(entry, "path", _is_text)))

        return self._entries("arrays", entries, read)

    def collectives(self, entries: list[Any]) -> Iterator[tuple[CollectiveGroup, CollectiveCount]]:
        return self._entries("collectives", entries, _read_collectives)

    def _entries(
        self, section: str, entries: list[Any], read: Callable[[Any], Iterable[tuple[Any, Any]]]
    ) -> Iterator[tuple[Any, Any]]:
        """What all entries of a list stand for, nothing twice."""
        seen = set()
        for number, entry in enumerate(entries, 1):
            try:
                if not isinstance(entry, dict):
                    raise _WrongEntryError(f"{entry!r} is not an object")
                entry = dict(entry)
                for key, value in read(entry):
                    if key in seen:
                        raise _WrongEntryError("is of something that an earlier entry is of")
                    seen.add(key)
                    yield key, value
                if entry:
                    raise _WrongEntryError(f"{next(iter(entry))!r} is not known")
            except ValueError as error:
                self.problems.append(f"{section} entry {number}: {error}. {_REWRITE}")


def _read_collectives(entry: dict[str, Any]) -> Iterator[tuple[CollectiveGroup, CollectiveCount]]:
    owners: list[tuple[str, ...]]
    if "layer" in entry:
        owners = [(path,) for path in _paths(_taken(entry, "layer", _is_text))]
    else:
        layers = _taken(entry, "layers", _is_list_of(_is_text))
        owners = [tuple(sorted(path for text in layers for path in _paths(text)))]
    phase = _taken(entry, "phase", lambda value: value in _PHASES)
    kind = _taken(entry, "kind", _is_text)
    mesh_axes = _taken(entry, "mesh_axes", _is_text)
    count = CollectiveCount(
        _taken(entry, "count", _is_size),
        _taken(entry, "payload_bytes", _is_count),
        _taken(entry, "unknown_times", _is_size, 0),
    )
    return ((CollectiveGroup(owner, phase, kind, mesh_axes), count) for owner in owners)


_MISSING = object()


def _taken(
    entry: dict[str, Any], name: str, fits: Callable[[Any], bool], default: Any = _MISSING
) -> Any:
    """A member of an entry, taken out of it."""
    value = entry.pop(name, default)
    if value is _MISSING:
        raise _WrongEntryError(f"{name!r} is missing")
    if value is not default and not fits(value):
        raise _WrongEntryError(f"{name!r} is {value!r}")
    return value


def _paths(text: str) -> list[str]:
    return list(paths_in_ranges(text))


def _spec(written: list[Any] | None) -> tuple[Any, ...] | None:
    if written is None:
        return None
    return tuple(tuple(entry) if isinstance(entry, list) else entry for entry in written)


def _is_spec(value: Any) -> bool:
    if value is None:
        return True
    is_list = _is_list_of(_is_text)
    return isinstance(value, list) and all(e is None or _is_text(e) or is_list(e) for e in value)


def _is_list_of(fits: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, list) and all(map(fits, value))


def _is_padded_to(stored: list[int]) -> Callable[[Any], bool]:
    """Whether something is the true lengths of what is stored with these."""
    is_list = _is_list_of(_is_count)
    return lambda value: (
        is_list(value)
        and len(value) == len(stored)
        and value != stored
        and all(true <= length for true, length in zip(value, stored, strict=True))
    )


def _is_truth(value: Any) -> bool:
    return isinstance(value, bool)


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _is_count(value: Any) -> bool:
    return type(value) is int and value >= 0


def _is_size(value: Any) -> bool:
    return _is_count(value) and value > 0
