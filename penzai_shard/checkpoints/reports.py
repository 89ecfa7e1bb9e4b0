"""Reports on checkpoints: what one holds, in what two differ, and whether one is as it was saved.

A checkpoint is here whatever ``restore_params`` reads. To compare and to verify, its numbers are
read; to describe, its metadata only.
"""

import dataclasses
import os
from collections import Counter
from collections.abc import Collection, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from penzai_shard.arrays.inputs import run_inputs
from penzai_shard.arrays.kinds import is_struct
from penzai_shard.checkpoints import parameters
from penzai_shard.checkpoints.filling import read_checksum
from penzai_shard.checkpoints.manager import CheckpointManager
from penzai_shard.checkpoints.records import ArrayRecord, Manifest, make_record, read_manifest
from penzai_shard.checkpoints.restoring import open_arrays
from penzai_shard.checkpoints.saving import read_numbers
from penzai_shard.checkpoints.storage import is_url, refuse_damage
from penzai_shard.checkpoints.value_checksums import compute_checksums, plain_context
from penzai_shard.errors import CheckpointDamagedError, CheckpointNotFoundError
from penzai_shard.progress import progress as draw_progress
from penzai_shard.reports.quantities import bytes_text
from penzai_shard.reports.report import Column, Report

_Records = Mapping[str, ArrayRecord]

# Of so many arrays values are in memory at once, at most.
_MOST_THREADS = 8
_GOOD = ("ok", "unchecked")
_PATH, _SIZE = Column("path", "path"), Column("size", "bytes")
_COMPARED = _PATH, Column("what"), Column("first"), Column("second")
_VERIFIED = _PATH, Column("state"), _SIZE, Column("why", "detail"), Column("ok", "ok", shown=False)


def _count_arrays(records: _Records) -> str:
    size = bytes_text(sum(record.nbytes for record in records.values()))
    return f"{len(records):,} array{'s' * (len(records) != 1)}, {size}"


# What it holds


def describe_checkpoint(path: Any) -> Report:
    """What a checkpoint holds, or the folder of a run; no number of an array is read.

    Args:
        path: A checkpoint, safetensors files, or the folder of a ``CheckpointManager``.

    Returns:
        Of a checkpoint a row for each array. Of the folder of a run a row for each step, with four
        digits of its metrics.

    Raises:
        CheckpointNotFoundError: There is no checkpoint.
        CheckpointDamagedError: What it says of its arrays is not what was saved.

    >>> import jax, tempfile
    >>> import penzai_shard as pzs
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     path = pzs.save_params(f"{folder}/a", {"w": jax.numpy.ones(8), "v": jax.numpy.ones(8)})
    ...     report = describe_checkpoint(path)
    >>> report.to_data()["rows"][0]
    {'path': 'v', 'array': 'float32[8]', 'size': 32}
    """
    try:
        manifest = read_manifest(path)
    except CheckpointNotFoundError:
        manager = None if is_url(path) else CheckpointManager(path)
        if manager is None or not manager.steps():
            raise
        return _describe_run(manager, manager.steps())

    rows = [(name, str(record), record.nbytes) for name, record in sorted(manifest.records.items())]
    is_named = any(record.names for record in manifest.records.values())
    notes = [] if is_named else ["no logical axes are stored: restoring compares shapes only"]
    columns, facts = (_PATH, Column("array"), _SIZE), {"path": manifest.path, "kind": manifest.kind}
    verdict = f"{manifest.kind or 'plain Orbax'}: {_count_arrays(manifest.records)}"
    return Report("Checkpoint", verdict, columns, rows, notes, facts=facts)


def _describe_run(manager: CheckpointManager, steps: list[int]) -> Report:
    metrics = {
        step: {name: float(f"{number:.4g}") for name, number in manager.metrics(step).items()}
        for step in steps
    }
    names = sorted({name for each in metrics.values() for name in each})
    rows = []
    for step, each in metrics.items():
        records = read_manifest(manager.path_of(step)).records.values()
        rows.append((step, sum(record.nbytes for record in records), *map(each.get, names)))
    columns = (Column("step"), _SIZE, *map(Column, names))
    verdict = f"{len(steps):,} checkpoint{'s' * (len(steps) != 1)}, the newest of step {steps[-1]}"
    return Report("Run", verdict, columns, rows, facts={"path": manager.path})


# In what two differ


def compare_checkpoints(first: Any, second: Any) -> Report:
    """In what two checkpoints differ, or a checkpoint and a model or train state.

    Values are read, and compared where axes, sizes and dtypes are equal. Of a train state and a
    model the parameters are compared.

    Args:
        first: The path of a checkpoint, or a tree.
        second: Another one. Of structs no values are compared.

    Returns:
        A row for each array that differs, with the words ``"axes"``, ``"sizes"``, ``"dtype"``,
        ``"values"`` for what does. ``ok`` is whether none does.

    Raises:
        CheckpointNotFoundError: There is no checkpoint.
        CheckpointDamagedError: What it says of its arrays is not what was saved, or numbers cannot
            be read.
        RuleTypeError, ShardingError: A tree has no arrays, or some were donated.

    >>> import jax, tempfile
    >>> import penzai_shard as pzs
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     path = pzs.save_params(f"{folder}/a", {"w": jax.numpy.ones(8), "v": jax.numpy.ones(8)})
    ...     compare_checkpoints(path, {"w": jax.numpy.zeros(8), "v": jax.numpy.ones(8)})
    1 of 2 arrays differs: 1 values
    path  what    first       second
    w     values  float32[8]  float32[8]
    """
    with plain_context("compare_checkpoints"):
        (one, optional), (two, others) = _read_side(first), _read_side(second)
    if one.keys().isdisjoint(two):
        sides = (one, two), (two, one)
        one, two = (parameters.find_parameters(*side, ())[1] for side in sides)
    both = one.keys() & two.keys()
    names = sorted(both | (one.keys() - optional) | (two.keys() - others))
    rows = []
    for name in names:
        pair = one.get(name), two.get(name)
        if what := _find_differences(*pair):
            rows.append((name, what, *pair))

    said = ", ".join(f"{count:,} {what}" for what, count in Counter(x[1] for x in rows).items())
    differ = f"array{'s' * (len(names) != 1)} differ{'s' * (len(rows) == 1)}"
    verdict = f"{len(rows):,} of {len(names):,} {differ}: {said}"
    if not rows:
        verdict = f"all {len(names):,} arrays are equal" if len(names) != 1 else "1 array is equal"
    if unknown := sum(None in (one[name].values, two[name].values) for name in both):
        verdict += f"; of {unknown:,} no values were compared, as they are shapes on one side"
    return Report("Comparison", verdict, _COMPARED, rows, ok=not rows)


def _read_side(side: Any) -> tuple[_Records, Collection[str]]:
    """One side with the checksums of its numbers, and what counts only if the other has it too."""
    if isinstance(side, str | os.PathLike):
        # What was saved may not be what is there now.
        manifest = read_manifest(side)
        stored = manifest.records
        sums, damaged = _read_checksums(manifest, False)
        refuse_damage(manifest.path, damaged)
        read = {n: dataclasses.replace(stored[n], values=x) for n, x in sums.items()}
        return {**stored, **read}, ()

    leaves, _ = parameters.read_tree("compare_checkpoints", side)
    leaves = [leaf for leaf in leaves if leaf.role != "constant"]
    values = {leaf.path: leaf.value for leaf in leaves if not is_struct(leaf.value)}
    found, _ = run_inputs(values, "compare_checkpoints")
    dtypes = {leaf.path: leaf.dtype for leaf in leaves}
    sums = compute_checksums({x.path: read_numbers(x.value, dtypes[x.path]) for x in found})
    own = {x.path: make_record(x, sums.get(x.path)) for x in leaves}
    is_whole = parameters.is_train_state(own)
    return own, () if is_whole else own.keys() - {x.path for x in parameters.parameters_of(leaves)}


def _find_differences(first: ArrayRecord | None, second: ArrayRecord | None) -> str:
    if first is None or second is None:
        return "only in second" if first is None else "only in first"
    pairs = {
        "axes": (first.names, second.names),
        "sizes": (first.shape, second.shape),
        "dtype": (first.dtype, second.dtype),
        "values": (first.values, second.values),
    }
    # What other programs have saved has no names, and structs have no values.
    found = [word for word, pair in pairs.items() if None not in pair and pair[0] != pair[1]]
    form = [word for word in found if word != "values"]
    return ", ".join(form or found)


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

    >>> import jax, tempfile
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

    found, reasons = _read_checksums(manifest, progress)
    rows = []
    for name, record in sorted(manifest.records.items()):
        state = "unchecked" if record.values is None else "ok"
        if name in reasons:
            state = "unreadable"
        elif record.values and record.values != found.get(name, record.values):
            state = "damaged"
        rows.append((name, state, record.nbytes, reasons.get(name), state in _GOOD))
    rows.sort(key=lambda row: row[-1])
    said = ", ".join(f"{count:,} {state}" for state, count in Counter(x[1] for x in rows).items())
    verdict = f"{_count_arrays(manifest.records)}: {said}"
    ok, facts = all(row[-1] for row in rows), {"path": manifest.path}
    return Report("Verification", verdict, _VERIFIED, rows, ok=ok, facts=facts)


def _read_checksums(manifest: Manifest, progress: Any) -> tuple[dict[str, str], dict[str, str]]:
    """The checksums of arrays as they are now, and why the others cannot be read."""
    # Arrays without elements have an entry only.
    records = {name: record for name, record in manifest.records.items() if record.nbytes}
    found, damaged = dict[str, str](), dict[str, str]()

    def read(name: str) -> None:
        try:
            open_arrays(manifest, [name])
            found[name] = read_checksum(manifest.store, name, records[name].stored_shape)
        except CheckpointDamagedError as error:
            damaged[name] = error.problems[0].what

    total = sum(record.nbytes for record in records.values())
    with draw_progress(total, "bytes", progress) as bar, ThreadPoolExecutor(_MOST_THREADS) as pool:
        for record, _ in zip(records.values(), pool.map(read, records), strict=True):
            bar.advance(record.nbytes)
    return found, damaged
