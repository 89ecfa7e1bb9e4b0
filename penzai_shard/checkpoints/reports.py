"""Reports on checkpoints: what one holds, in what two differ, and whether one is as it was saved.

A checkpoint is here whatever ``restore_params`` reads. All but ``verify_checkpoint`` read its
metadata only, and the numbers of arrays of which no checksum was saved.
"""

import base64
import dataclasses
import datetime
import json
import os
from collections import Counter
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
from jax.sharding import PartitionSpec

from penzai_shard.arrays.inputs import run_inputs
from penzai_shard.arrays.kinds import is_key_type, is_struct
from penzai_shard.arrays.statistics import name_statistics
from penzai_shard.checkpoints.filling import read_checksum
from penzai_shard.checkpoints.manager import CheckpointManager
from penzai_shard.checkpoints.object_stores import is_url, read_object
from penzai_shard.checkpoints.parameters import (
    find_parameters,
    is_train_state,
    parameters_of,
    read_tree,
)
from penzai_shard.checkpoints.records import (
    ArrayRecord,
    Manifest,
    absolute_path,
    is_checkpoint,
    make_record,
    read_manifest,
)
from penzai_shard.checkpoints.replacement import content_of
from penzai_shard.checkpoints.restoring import open_arrays
from penzai_shard.checkpoints.storage import STATE
from penzai_shard.checkpoints.value_checksums import compute_checksums, plain_context
from penzai_shard.errors import CheckpointDamagedError
from penzai_shard.meshes import mesh_text
from penzai_shard.planning.plan import LeafPlan
from penzai_shard.progress import progress as draw_progress
from penzai_shard.reports.quantities import bytes_text
from penzai_shard.reports.report import Column, Report

_SHARDINGS = "_sharding"  # Orbax' file with the sharding of each array.
_MOST_THREADS = 8
_GOOD = ("ok", "unchecked")
_VERIFIED = (
    Column("path", "path"),
    Column("state"),
    Column("size", "bytes"),
    Column("why", "detail"),
    Column("ok", "ok", shown=False),
)


def _count_arrays(records: Mapping[str, ArrayRecord]) -> str:
    size = bytes_text(sum(record.nbytes for record in records.values()))
    return f"{len(records):,} array{'s' * (len(records) != 1)}, {size}"


# What it holds


def describe_checkpoint(path: Any) -> Report:
    """What a checkpoint holds, or the folder of a run; no number of an array is read.

    Args:
        path: A checkpoint, safetensors files, or the folder of a ``CheckpointManager``.

    Returns:
        Of a checkpoint a row for each array, with the mesh axes over which it lay when it was
        saved. Of the folder of a run a row for each step, with its metrics.

    Raises:
        CheckpointNotFoundError: There is no checkpoint.
        CheckpointDamagedError: What it says of its arrays is not what was saved.

    >>> import tempfile
    >>> import penzai_shard as pzs
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     path = pzs.save_params(f"{folder}/a", {"w": jax.numpy.ones(8), "v": jax.numpy.ones(8)})
    ...     report = describe_checkpoint(path)
    >>> report.to_data()["rows"][0]
    {'path': 'v', 'axes': '8', 'dtype': 'float32', 'size': 32, 'checksum': '...'}
    """
    content = None if is_url(path) else content_of(absolute_path(path))
    if content and content.is_dir() and not is_checkpoint(content):
        manager = CheckpointManager(content)
        if steps := manager.steps():
            return _describe_run(manager, steps)

    manifest = read_manifest(path)
    notes, specs, mesh = [], dict[str, PartitionSpec](), dict[str, int]()
    try:
        specs, mesh = _read_specs(manifest)
    except (OSError, ValueError, LookupError, TypeError, AttributeError):
        notes.append(f"how arrays lay cannot be read from the file {_SHARDINGS}")
    columns = (
        Column("path", "path"),
        Column("axes"),
        Column("dtype"),
        Column("size", "bytes"),
        Column("checksum", shown=False),
    )
    rows = []
    for name, record in sorted(manifest.records.items()):
        lay = LeafPlan(name, record.names, record.shape, None, specs.get(name), None, "", 0)
        rows.append((name, lay.axes_text, record.dtype, record.nbytes, record.values))
    what = "arrays of plain Orbax" if manifest.kind is None else manifest.kind
    if content and content.is_dir():
        saved = datetime.datetime.fromtimestamp(content.stat().st_mtime)
        notes.append(f"saved at {saved:%Y-%m-%d %H:%M:%S}")
    if mesh:
        notes.append(f"saved from a mesh of {mesh_text(mesh)}, over whose axes arrays are split")
    if not any(record.names for record in manifest.records.values()):
        notes.append("no logical axes are stored: restoring compares shapes only")
    if not all(record.values for record in manifest.records.values()):
        notes.append("of some arrays no checksums are stored: their numbers cannot be verified")
    facts = {"path": manifest.path, "kind": manifest.kind, "mesh": mesh}
    verdict = f"{what}: {_count_arrays(manifest.records)}"
    return Report("Checkpoint", verdict, columns, rows, notes, facts=facts)


def _read_specs(manifest: Manifest) -> tuple[dict[str, PartitionSpec], dict[str, int]]:
    """How each array lay when it was saved, and on which mesh; nothing where nobody wrote it."""
    if is_url(manifest.path):
        text = read_object(manifest.path, f"{STATE}/{_SHARDINGS}")
    else:
        file = next(content_of(absolute_path(manifest.path)).rglob(_SHARDINGS), None)
        text = None if file is None else file.read_bytes()
    entries, specs, mesh = json.loads(text or "{}"), {}, {}
    prefixes: Mapping[str, str] = getattr(manifest.store, "prefixes", {})
    for name, prefix in prefixes.items():
        entry = json.loads(entries.get(base64.b64encode(prefix.encode()).decode(), "{}"))
        if entry.get("sharding_type") == "NamedSharding":
            axes = (tuple(x) if isinstance(x, list) else x for x in entry["partition_spec"])
            specs[name] = PartitionSpec(*axes)
            mesh = dict(zip(entry["axis_names"], entry["shape"], strict=True))
    return specs, mesh


def _describe_run(manager: CheckpointManager, steps: list[int]) -> Report:
    metrics = {step: manager.metrics(step) for step in steps}
    names = sorted({name for each in metrics.values() for name in each})
    rows = []
    for step, each in metrics.items():
        records = read_manifest(manager.path_of(step)).records.values()
        rows.append((step, sum(record.nbytes for record in records), *map(each.get, names)))
    columns = (Column("step"), Column("size", "bytes"), *map(Column, names))
    verdict = f"{len(steps):,} checkpoint{'s' * (len(steps) != 1)}, the newest of step {steps[-1]}"
    return Report("Run", verdict, columns, rows, facts={"path": manager.path})


# In what two differ


@dataclasses.dataclass
class _Side:
    """One of two that are compared.

    Attributes:
        records: What it has.
        read_checksum: Gives the checksum of an array by its path, None of a struct.
        optional: What does not count where the other has no such array.
        start: What paths begin with besides those of the records.
    """

    records: dict[str, ArrayRecord]
    read_checksum: Callable[[str], str | None]
    optional: frozenset[str] = frozenset()
    start: str = ""


def compare_checkpoints(first: Any, second: Any) -> Report:
    """In what two checkpoints differ, or a checkpoint and a model or train state.

    Values are compared by their checksums, where axes, sizes and dtypes are equal. Of a train state
    and a model the parameters are compared.

    Args:
        first: The path of a checkpoint, or a tree.
        second: Another one. Of structs no values are compared.

    Returns:
        A row for each array that differs. ``ok`` is whether none does.

    Raises:
        CheckpointNotFoundError: There is no checkpoint.
        CheckpointDamagedError: What it says of its arrays is not what was saved, or numbers that
            have no checksum cannot be read.
        RuleTypeError, ShardingError: A tree has no arrays, or some were donated.

    >>> import tempfile
    >>> import penzai_shard as pzs
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     path = pzs.save_params(f"{folder}/a", {"w": jax.numpy.ones(8), "v": jax.numpy.ones(8)})
    ...     compare_checkpoints(path, {"w": jax.numpy.zeros(8), "v": jax.numpy.ones(8)})
    1 of 2 arrays differ: 1 values
    path  what    first       second
    w     values  float32[8]  float32[8]
    """
    with plain_context("compare_checkpoints"):
        one, two = (_read_side(side) for side in (first, second))
        for side, other in ((one, two), (two, one)):
            if side.records.keys().isdisjoint(other.records):
                side.start, side.records = find_parameters(side.records, other.records, ())
        for side, other in ((one, two), (two, one)):
            for name in side.optional - other.records.keys():
                side.records.pop(name, None)

        rows, unknown = [], 0
        names = sorted({*one.records, *two.records})
        for name in names:
            pair = one.records.get(name), two.records.get(name)
            what = _find_differences(*pair)
            if not what:
                sums = [side.read_checksum(side.start + name) for side in (one, two)]
                unknown += None in sums
                what = "values" if None not in sums and sums[0] != sums[1] else ""
            if what:
                rows.append((name, what, *pair))
    counts = Counter(row[1] for row in rows)
    said = ", ".join(f"{count:,} {what}" for what, count in counts.items())
    verdict = f"{len(rows):,} of {len(names):,} arrays differ: {said}"
    if not rows:
        verdict = f"all {len(names):,} arrays are equal"
    notes = [f"{unknown:,} arrays are structs on one side: no values were compared"] * bool(unknown)
    columns = (Column("path", "path"), Column("what"), Column("first"), Column("second"))
    return Report("Comparison", verdict, columns, rows, notes, ok=not rows)


def _read_side(side: Any) -> _Side:
    if isinstance(side, str | os.PathLike):
        manifest = read_manifest(side)

        def read_stored(name: str) -> str:
            record = manifest.records[name]
            if record.values is None and record.nbytes:
                open_arrays(manifest, [name])
            return record.values or read_checksum(manifest.store, name, record.stored_shape)

        return _Side(dict(manifest.records), read_stored)

    leaves = name_statistics(read_tree("compare_checkpoints", side)[0])
    leaves = [leaf for leaf in leaves if leaf.role != "constant"]
    values = {leaf.path: leaf.value for leaf in leaves}
    needed = leaves if is_train_state(leaves) else parameters_of(leaves)
    run_inputs({path: x for path, x in values.items() if not is_struct(x)}, "compare_checkpoints")

    def read_own(path: str) -> str | None:
        value = values[path]
        if is_struct(value):
            return None
        numbers = jax.random.key_data(value) if is_key_type(value.dtype) else value
        return compute_checksums({path: numbers})[path]

    optional = frozenset(values) - {leaf.path for leaf in needed}
    return _Side({leaf.path: make_record(leaf) for leaf in leaves}, read_own, optional)


def _find_differences(first: ArrayRecord | None, second: ArrayRecord | None) -> str:
    """In what two arrays differ but for their values."""
    if first is None or second is None:
        return "only in second" if first is None else "only in first"
    found = []
    sizes: list[Any] = [first.shape, second.shape]
    if first.names and second.names:
        if Counter(first.names) != Counter(second.names):
            found.append("axes")
        elif first.names != second.names:
            found.append("order")
            sizes = [Counter(zip(r.names or (), r.shape, strict=True)) for r in (first, second)]
    if sizes[0] != sizes[1]:
        found.append("sizes")
    if (first.dtype, first.key_impl) != (second.dtype, second.key_impl):
        found.append("dtype")
    return ", ".join(found)


# Whether it is as it was saved


def verify_checkpoint(path: Any, *, progress: bool | None = None) -> Report:
    """Reads every number of a checkpoint once, and says which arrays are what was saved.

    Args:
        path: A checkpoint, or safetensors files.
        progress: Whether to show a bar; by default in a terminal.

    Returns:
        A row for each array: ``"ok"``, ``"damaged"``, ``"unreadable"``, or ``"unchecked"`` if no
        checksum was saved, as by other programs. ``ok`` is whether all can be read and none is
        damaged.

    Raises:
        CheckpointNotFoundError: There is no checkpoint.

    >>> import tempfile
    >>> import penzai_shard as pzs
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     path = pzs.save_params(f"{folder}/a", {"w": jax.numpy.ones(8)})
    ...     verify_checkpoint(path)
    1 array, 32 B: 1 ok
    path  state  size
    w     ok     32 B
    """
    try:
        with plain_context("verify_checkpoint"):
            manifest = read_manifest(path)
    except CheckpointDamagedError as error:
        lost = [(p.path, "unreadable", None, p.what, False) for p in error.problems]
        return Report("Verification", error.args[0], _VERIFIED, lost, ok=False)

    full = {name: record for name, record in manifest.records.items() if record.nbytes}
    found, reasons = dict.fromkeys(manifest.records, "ok"), dict[str, str]()
    try:
        open_arrays(manifest, full)
    except CheckpointDamagedError as error:
        reasons = {problem.path: problem.what for problem in error.problems}
        found |= dict.fromkeys(reasons, "unreadable")

    workers = min(_MOST_THREADS, os.cpu_count() or 1)
    total = sum(record.nbytes for record in full.values())
    with (
        draw_progress(total, "bytes", progress is not False) as bar,
        ThreadPoolExecutor(workers) as pool,
    ):
        pending = {
            name: pool.submit(read_checksum, manifest.store, name, record.stored_shape)
            for name, record in full.items()
            if name not in reasons
        }
        for name, future in pending.items():
            try:
                checksum, said = future.result(), full[name].values
                found[name] = "ok" if checksum == said else "damaged" if said else "unchecked"
            except CheckpointDamagedError as error:
                found[name], reasons[name] = "unreadable", error.problems[0].what
            bar.advance(full[name].nbytes)

    rows = [
        (name, state, manifest.records[name].nbytes, reasons.get(name), state in _GOOD)
        for name, state in sorted(found.items(), key=lambda item: (item[1] in _GOOD, item[0]))
    ]
    said = ", ".join(f"{count:,} {state}" for state, count in Counter(found.values()).items())
    ok = all(state in _GOOD for state in found.values())
    verdict = f"{_count_arrays(manifest.records)}: {said}"
    return Report("Verification", verdict, _VERIFIED, rows, ok=ok, facts={"path": manifest.path})
