"""Saves arrays by name, so that the path has a whole checkpoint at every moment.

Everything but the disk is checked before anything is written. With several processes all make the
same calls: each writes what its devices hold, and the first one puts the result in place.
"""

import contextlib
import dataclasses
import functools
import os
import pathlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from penzai_shard.arrays.inputs import run_inputs
from penzai_shard.arrays.kinds import device_dtype, is_key_type
from penzai_shard.arrays.structure import Leaf
from penzai_shard.checkpoints import records
from penzai_shard.checkpoints.replacement import Replacement, refuse_save
from penzai_shard.checkpoints.storage import begin_writing, is_url, shorten, upload
from penzai_shard.checkpoints.value_checksums import compute_checksums, plain_context
from penzai_shard.errors import ShardingError
from penzai_shard.processes.agreement import on_first, refuse_differences, together


def begin_save(
    called: str,
    path: str | os.PathLike[str],
    leaves: Sequence[Leaf],
    kind: str,
    *,
    overwrite: bool = False,
    metadata: Mapping[str, Any] | None = None,
    copy: bool = False,
) -> Callable[[], str]:
    """Begins to save arrays, each under its leaf's path.

    Args:
        called: The function that was called, for messages.
        path: A path at which nothing is yet. With ``overwrite`` also that of a checkpoint, or of an
            empty directory.
        leaves: The arrays, each with a path that no other has.
        kind: What they are together, ``"params"`` for instance.
        overwrite: Whether to replace a checkpoint.
        metadata: What else the checkpoint is to keep; JSON holds it.
        copy: Whether the arrays may be donated or changed as soon as this returns.

    Returns:
        A function that waits until everything is written, puts it at the path, where nothing is
        before, and gives the path.

    Raises:
        ShardingError: Some arrays have no values, or differ between processes; all of them are in
            it.
        CheckpointWriteError: The path is taken, or nothing can be written there.
    """
    if is_url(path):
        # Not in the background: whoever saves there waits.
        begin = functools.partial(begin_save, called, leaves=leaves, kind=kind, metadata=metadata)
        upload(str(path), records.MARKER, lambda content: begin(path=content)())
        return lambda: str(path)
    final = records.absolute_path(path)
    on_first("looking for what is at a path", lambda: refuse_existing(final, overwrite))
    with together("checking what is to be saved"):
        # On meshes with Auto axes.
        found, _ = run_inputs({leaf.path: leaf.value for leaf in leaves}, called)
        values = {leaf.path: leaf.value for leaf in found}
    leaves = [_with_value(leaf, values[leaf.path]) for leaf in leaves]
    with plain_context(called):
        numbers = {leaf.path: read_numbers(leaf.value, leaf.dtype) for leaf in leaves}
        checksums = compute_checksums(numbers)
    saved = {leaf.path: records.make_record(leaf, checksums[leaf.path]) for leaf in leaves}
    refuse_differences(called, {name: repr(record) for name, record in saved.items()})

    replacement = Replacement(final)
    with undo_on_failure(replacement):
        on_first(f"beginning to save to {final}", replacement.begin)
        # Not together with Orbax, which waits for processes that have failed.
        with together("looking for what the first process has made"):
            replacement.check_disk()
        with together("beginning to write"):
            full = {name: array for name, array in numbers.items() if array.size}
            section = records.write_metadata(saved, kind, metadata or {})
            wait = begin_writing(replacement.new, full, section, copy=copy)

    def put_in_place() -> None:
        refuse_existing(final, overwrite)
        (replacement.new / records.MARKER).touch()
        replacement.commit()

    def finish() -> str:
        with undo_on_failure(replacement):
            with together("writing a checkpoint"):
                wait()
            on_first("putting a checkpoint in its place", put_in_place)
        replacement.close()
        return str(final)

    return finish


def refuse_existing(
    final: pathlib.Path,
    overwrite: bool,
    is_ours: Callable[[pathlib.Path], bool] = records.is_checkpoint,
) -> None:
    """Refuses a path at which something is that is not to be replaced.

    Raises:
        CheckpointWriteError: There is.
    """
    is_empty = final.is_dir() and not any(final.iterdir())
    if os.path.lexists(final) and not (overwrite and (is_empty or is_ours(final))):
        what, fix = "something is there", "Save to another path, or write overwrite=True."
        if overwrite:
            what, fix = "not all that is there was saved so", "Save to another path."
        refuse_save(final, what, fix)


def _with_value(leaf: Leaf, value: Any) -> Leaf:
    # An array with 64 bits keeps them, also where JAX has 32 now.
    dtype = value.dtype if isinstance(value, jax.Array) else device_dtype(leaf.dtype)
    return dataclasses.replace(leaf, value=value, dtype=dtype)


def read_numbers(array: Any, dtype: Any) -> Any:
    """What is stored of an array."""
    if not isinstance(array, jax.Array):
        return np.asarray(array, dtype)
    if is_key_type(dtype):
        array = jax.random.key_data(array)
    if jax.process_count() > 1 and array.is_fully_addressable:
        return np.asarray(array)  # Every process has it, and Orbax has the first one write it.
    return array


@contextlib.contextmanager
def undo_on_failure(replacement: Replacement) -> Iterator[None]:
    """Takes off what a save has written if it fails, and ends the threads that write.

    Of what Orbax and the system raise it makes one error. Where a disk is full, TensorStore may
    make the staging directory once more; the next save to the path removes it.
    """
    try:
        yield
    except BaseException as error:
        replacement.stop_writers()
        replacement.close()
        if isinstance(error, ShardingError) or not isinstance(error, Exception):
            raise
        fix = "Make room or give permission there, or save to another path."
        refuse_save(replacement.final, shorten(error), fix if isinstance(error, OSError) else "")
