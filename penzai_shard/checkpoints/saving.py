"""Saves arrays by name, so that the path has a whole checkpoint at every moment.

Everything but the disk is checked before anything is written. With several processes all make the
same calls: each writes what its devices hold, and the first one puts the result in place.
"""

import contextlib
import dataclasses
import math
import os
import pathlib
import secrets
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from penzai_shard.arrays.inputs import run_inputs
from penzai_shard.arrays.kinds import is_key_type, is_traced
from penzai_shard.arrays.structure import Leaf
from penzai_shard.checkpoints.records import (
    MARKER,
    absolute_path,
    is_checkpoint,
    make_record,
    write_section,
)
from penzai_shard.checkpoints.replacement import Replacement
from penzai_shard.checkpoints.storage import begin_writing, can_store
from penzai_shard.checkpoints.value_checksums import compute_checksums, no_mesh
from penzai_shard.errors import CheckpointWriteError, Problem, Problems, ShardingError
from penzai_shard.processes.agreement import on_first, refuse_differences, together

_SECONDS_TO_STOP, _SECONDS_TO_SEE = 5.0, 10.0
_MOST_CHARACTERS = 300


@dataclasses.dataclass(frozen=True)
class Save:
    """A checkpoint that is being written; nothing is at its path before ``finish``.

    Attributes:
        path: Where it will be.
        finish: Waits until everything is written, and puts it in place; gives the path.
    """

    path: str
    finish: Callable[[], str]


def begin_save(
    path: str | os.PathLike[str],
    leaves: Sequence[Leaf],
    kind: str,
    *,
    overwrite: bool = False,
    metadata: Mapping[str, Any] | None = None,
    copy: bool = False,
) -> Save:
    """Begins to save arrays, each under its leaf's path.

    Args:
        path: A path at which nothing is yet. With ``overwrite`` also that of a checkpoint, or of an
            empty directory.
        leaves: The arrays, each with a path that no other has.
        kind: What they are together, ``"params"`` for instance.
        overwrite: Whether to replace a checkpoint.
        metadata: What else the checkpoint is to keep; JSON holds it.
        copy: Whether the arrays may be donated or changed as soon as this returns.

    Raises:
        ShardingError: Some arrays cannot be saved, or differ between processes or devices; all of
            them are in it.
        CheckpointWriteError: The path is taken, or nothing can be written there.
    """
    final = absolute_path(path)
    on_first("looking for what is at a path", lambda: _refuse_existing(final, overwrite))
    with together("checking what is to be saved"):
        leaves = _check_leaves(leaves)
    with no_mesh():
        stored = {leaf.path: _read_numbers(leaf) for leaf in leaves}
        values = compute_checksums(stored)
    records = {
        leaf.path: dataclasses.replace(make_record(leaf), values=values[leaf.path])
        for leaf in leaves
    }
    refuse_differences("saving", {name: repr(record) for name, record in records.items()})

    replacement, threads = Replacement(final), frozenset(threading.enumerate())
    with _whole_or_nothing(replacement, threads):
        on_first(f"beginning to save to {final}", replacement.begin)
        save = on_first("naming a save", lambda: secrets.token_hex(8))
        with together("beginning to write"):
            _wait_for_directory(replacement.new.parent)
            full = {name: array for name, array in stored.items() if array.size}
            section = {**(metadata or {}), **write_section(records, kind, save)}
            wait = begin_writing(replacement.new, full, section, copy=copy)

    def put_in_place() -> None:
        _refuse_existing(final, overwrite)
        (replacement.new / MARKER).touch()
        replacement.commit()

    def finish() -> str:
        with _whole_or_nothing(replacement, threads):
            with together("writing a checkpoint"):
                wait()
            on_first("putting a checkpoint in its place", put_in_place)
        replacement.close()
        return str(final)

    return Save(str(final), finish)


def _check_leaves(leaves: Sequence[Leaf]) -> list[Leaf]:
    """The leaves as what can be saved: on meshes with Auto axes."""
    problems = Problems("cannot save these arrays:")
    for leaf in leaves:
        if is_traced(leaf.value):
            what = "it is traced by jax.jit and has no values"
            problems.add(leaf.path, what, "Save what the compiled function returns.")
        if not is_key_type(leaf.dtype) and not can_store(leaf.dtype):
            what = f"Orbax cannot store {leaf.dtype}"
            problems.add(leaf.path, what, "Save it as int8 or float32: array.astype(dtype).")
        for name in leaf.names or ():
            if name is not None and not isinstance(name, str | tuple):
                what = f"its logical axis {name!r} is no text"
                problems.add(leaf.path, what, "Rename the axis.")
    if not any(math.prod(leaf.shape) for leaf in leaves):
        problems.add("", "there are no arrays with elements", "Give a model with parameters.")
    try:
        found, _ = run_inputs({leaf.path: leaf.value for leaf in leaves}, "saving")
    except ShardingError as error:
        problems.extend(error.problems)
    problems.raise_if_any(ShardingError)
    values = {leaf.path: leaf.value for leaf in found}
    return [dataclasses.replace(leaf, value=values[leaf.path]) for leaf in leaves]


def _refuse_existing(final: pathlib.Path, overwrite: bool) -> None:
    if not os.path.lexists(final):
        return
    is_empty = final.is_dir() and not any(final.iterdir())
    if not overwrite:
        problem = Problem(str(final), "something is there", "Write overwrite=True to replace it.")
    elif not is_empty and not is_checkpoint(final):
        what = "it is no checkpoint and would be deleted"
        problem = Problem(str(final), what, "Save to another path.")
    else:
        return
    raise CheckpointWriteError("cannot save:", [problem])


def _wait_for_directory(directory: pathlib.Path) -> None:
    """Refuses a process that does not see what the first one has made."""
    end = time.monotonic() + _SECONDS_TO_SEE
    while not directory.exists():
        if time.monotonic() > end:
            what = f"process {jax.process_index()} does not see what process 0 makes there"
            fix = "Save to a file system that all processes share."
            raise CheckpointWriteError("cannot save:", [Problem(str(directory), what, fix)])
        time.sleep(0.05)


def _read_numbers(leaf: Leaf) -> Any:
    """What is stored of an array."""
    array = leaf.value
    if not isinstance(array, jax.Array):
        return np.asarray(array, make_record(leaf).dtype)
    if is_key_type(array.dtype):
        array = jax.random.key_data(array)
    if jax.process_count() > 1 and array.is_fully_addressable:
        return np.asarray(array)  # Every process has it, and Orbax has the first one write it.
    return array


@contextlib.contextmanager
def _whole_or_nothing(
    replacement: Replacement, before: Collection[threading.Thread]
) -> Iterator[None]:
    """Leaves nothing behind if a save fails, neither files nor threads that write them.

    Of what Orbax and the system raise it makes one error.
    """
    try:
        yield
    except BaseException as error:
        replacement.stop_writers()
        # Orbax' threads end once their directory is gone. Their own ``join`` raises once more what
        # the save has failed with.
        end = time.monotonic() + _SECONDS_TO_STOP
        for thread in {*threading.enumerate()} - {*before, threading.current_thread()}:
            if not thread.daemon and not thread.name.startswith("asyncio_"):
                threading.Thread.join(thread, max(0.0, end - time.monotonic()))
        replacement.close()
        if isinstance(error, ShardingError) or not isinstance(error, Exception):
            raise
        what = str(error).partition("\n")[0][:_MOST_CHARACTERS]
        fix = "Make room or give permission there, or save to another path."
        problem = Problem(str(replacement.final), what, fix)
        raise CheckpointWriteError("cannot save:", [problem]) from error
