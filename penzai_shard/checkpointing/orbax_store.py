"""Writing a flat dictionary of arrays with Orbax.

Everything that is particular to what Orbax writes is in this module: arrays that it cannot store
(empty ones, typed keys), threads that outlive a failure.
"""

import contextlib
import dataclasses
import math
import secrets
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, Sharding

from penzai_shard.array_kinds import is_abstract, is_deleted, is_traced
from penzai_shard.checkpointing.array_records import record_of
from penzai_shard.checkpointing.locations import (
    PathLike,
    absolute_path,
    is_remote,
    path_object,
    refuse_existing,
)
from penzai_shard.checkpointing.manifest import seal, section_of
from penzai_shard.checkpointing.padded_layouts import leaf_to_save
from penzai_shard.checkpointing.replacement import Replacement
from penzai_shard.checkpointing.taking_part import (
    refuse_other_arrays_elsewhere,
    refuse_unshared,
    save_together,
)
from penzai_shard.checkpointing.value_checksums import checksums_of, sums_of
from penzai_shard.checkpointing.write_failures import raise_write_failure
from penzai_shard.errors import (
    CheckpointMismatchError,
    ShardingError,
    raise_all,
)
from penzai_shard.library_apis import orbax_api
from penzai_shard.named_leaves import NamedLeaf
from penzai_shard.processes import (
    failing_together,
    host_data,
    is_on_this_process,
    on_first_process,
    under_way,
)

# This much of the arrays is copied to host memory and written at a time.
_WRITE_BYTES = 128 * 2**20
_SECONDS_TO_STOP = 5.0


@dataclasses.dataclass(frozen=True)
class PreparedSave:
    """A save that nothing can be wrong with any more but the disk.

    Attributes:
        where: The absolute path.
        names: The names of all arrays.
        stored: What Orbax is to write, by name: all arrays but those without elements.
        metadata: The custom metadata, which says what the arrays are.
        save: The random id of the save, which is in the metadata too.
        overwrite: Whether a checkpoint at the path is replaced.
    """

    where: str
    names: tuple[str, ...]
    stored: Mapping[str, Any]
    metadata: Mapping[str, Any]
    save: str
    overwrite: bool

    def write(self) -> str:
        """Writes it, so that the path has a whole checkpoint at every moment.

        Returns:
            The absolute path.

        Raises:
            CheckpointExistsError: Something is at the path that may not be replaced.
            CheckpointWriteError: It cannot be written: no permission, a full disk.
        """
        return self._begun(_WRITE_BYTES).finish()

    def begin(self) -> "BegunSave":
        """Copies what this process writes to host memory, and begins to write it.

        Returns:
            What remains to be done, by this thread or another. The arrays may be donated meanwhile.

        Raises:
            CheckpointExistsError: Something is at the path that may not be replaced.
            CheckpointWriteError: It cannot be written.
        """
        return self._begun(None)

    def _begun(self, host_bytes: int | None) -> "BegunSave":
        size = sum(array.size * array.dtype.itemsize for array in self.stored.values())
        before = set(threading.enumerate())
        with orbax_api.without_noise(before), contextlib.ExitStack() as ending:
            ending.enter_context(under_way(f"saving a checkpoint to {self.where}"))
            beside = ending.enter_context(
                _written_beside(self.where, size, before, overwrite=self.overwrite)
            )
            # Orbax fails where one single piece exceeds the bound.
            write_bytes = max(_WRITE_BYTES, 1 + max(map(_largest_piece, self.stored.values())))
            written = orbax_api.begin_save(
                beside, self.stored, self.metadata, write_bytes, host_bytes
            )
            ending = ending.pop_all()
            return BegunSave(self.where, self.names, self.save, beside, written, before, ending)


@dataclasses.dataclass(frozen=True)
class BegunSave:
    """A save that is being written, while the arrays may be donated.

    It does not refer to them. Orbax does, until it has written what it copied.

    Attributes:
        where: The absolute path.
        names: The names of all arrays.
        save: The random id of the save.
        beside: Where it is written.
        written: Waits until all arrays are written.
        before: The threads that ran before it began.
        ending: Puts what is written at its path, or removes it after an error.
    """

    where: str
    names: tuple[str, ...]
    save: str
    beside: str
    written: Callable[[], None]
    before: Collection[threading.Thread]
    ending: contextlib.ExitStack

    def finish(self) -> str:
        """Waits until all is written, and puts it at its path.

        In a job of several processes all must call it, in threads of the same name. It has to be
        called, once.

        Returns:
            The absolute path.

        Raises:
            CheckpointWriteError: It cannot be written; what is at the path stays as it was.
        """
        with orbax_api.without_noise(self.before), self.ending:
            with failing_together("writing a checkpoint"):
                self.written()
            directory = path_object(self.beside)
            on_first_process("sealing a checkpoint", lambda: seal(directory, self.names, self.save))
        return self.where


def _largest_piece(array: Any) -> int:
    """How many bytes of an array are written at once: what one device has of it."""
    if not isinstance(array, jax.Array):
        return int(array.nbytes)
    return math.prod(array.sharding.shard_shape(array.shape)) * array.dtype.itemsize


def prepare_save(
    path: PathLike, leaves: Mapping[str, NamedLeaf], *, kind: str, overwrite: bool
) -> PreparedSave:
    """Finds everything that can be wrong with a save before anything is written.

    Args:
        path: Directory to make. Relative paths start at the working directory.
        leaves: The arrays by name.
        kind: ``"params"`` or ``"train_state"``, stored in the metadata.
        overwrite: Replace a checkpoint at the path, once the new one is complete.

    Returns:
        What remains to be written. It refers to the arrays given, which must not be donated or
        deleted before.

    Raises:
        CheckpointExistsError: The path exists and may not be replaced.
        CheckpointMismatchError: Some arrays cannot be saved.
    """
    orbax_api.orbax()  # Refused first where it is not installed.
    where = absolute_path(path)
    save_together(where, kind, leaves, overwrite)
    on_first_process("saving a checkpoint", lambda: refuse_existing(where, overwrite))
    with failing_together("saving a checkpoint"):
        raise_all(
            CheckpointMismatchError,
            f"cannot save to {where}:",
            [problem for name, leaf in leaves.items() if (problem := unsavable(name, leaf))],
        )
    leaves = {name: leaf_to_save(leaf) for name, leaf in leaves.items()}
    records = {name: record_of(leaf) for name, leaf in leaves.items()}
    refuse_other_arrays_elsewhere(where, leaves, records)
    # Orbax refuses arrays without elements. Their records say everything about them.
    stored = {
        name: _storable(leaf) for name, leaf in leaves.items() if 0 not in records[name].shape
    }
    if not stored:
        raise CheckpointMismatchError(
            f"cannot save to {where}: there is no array with elements to save."
        )
    values = _checksums(leaves, stored)
    records = {
        name: dataclasses.replace(record, values=values[name]) for name, record in records.items()
    }
    # Only what the first process says is written.
    save = secrets.token_hex(8)
    section = section_of(records, kind, save)
    return PreparedSave(where, tuple(leaves), stored, section, save, overwrite)


def _checksums(leaves: Mapping[str, NamedLeaf], stored: Mapping[str, Any]) -> dict[str, str]:
    """The checksum of each array's numbers, computed where they are.

    Raises:
        CheckpointMismatchError: Copies of an array on several devices differ.
    """
    # A single process writes one copy of each array, and several write parts of any.
    all_copies = jax.process_count() > 1
    sums = {name: sums_of(stored.get(name, np.zeros(0)), all_copies=all_copies) for name in leaves}
    found = checksums_of(sums)
    raise_all(
        CheckpointMismatchError,
        "cannot save arrays whose copies differ between devices:",
        [
            f"{name}: its copies on several devices are not the same, so that nobody can say which "
            "one to save. Make them the same in the step, or place one of them anew."
            for name, copies in found.items()
            if len(set(copies)) > 1
        ],
    )
    return {name: copies[0] for name, copies in found.items()}


@contextlib.contextmanager
def _written_beside(
    where: str, size: int, before: Collection[threading.Thread], *, overwrite: bool
) -> Iterator[str]:
    """Where to write what is then put at a path in one step, or not at all.

    Args:
        where: The path.
        size: Number of bytes to be written, for messages.
        before: The threads that do not write it.
        overwrite: Whether what is at the path may be replaced.
    """
    if is_remote(where):
        # Orbax marks a directory in an object store as complete once it is; nothing is replaced.
        yield where
        return
    replacement = Replacement(where)
    try:
        on_first_process("beginning a save", replacement.begin)
        refuse_unshared(str(replacement.new.parent), where)
        # Once more, now that nobody else can save to the path.
        on_first_process("saving a checkpoint", lambda: refuse_existing(where, overwrite))
        yield str(replacement.new)
        on_first_process("replacing a checkpoint", replacement.commit)
    except BaseException as error:
        replacement.stop_writers()
        _wait_for_new_threads(before)
        if isinstance(error, ShardingError) or not isinstance(error, Exception):
            raise
        raise_write_failure(error, where, size)
    finally:
        replacement.discard()


def _wait_for_new_threads(before: Collection[threading.Thread]) -> None:
    """Waits for the threads of a save that failed, which end once their directory is gone."""
    deadline = time.monotonic() + _SECONDS_TO_STOP
    for thread in {*threading.enumerate()} - {*before, threading.current_thread()}:
        # Idle workers and loops of asyncio stay for as long as they are referred to.
        if thread.daemon or thread.name.startswith("asyncio_"):
            continue
        # One that an interrupt found being started cannot be joined before it has begun.
        while not thread.is_alive() and thread in threading.enumerate():
            if time.monotonic() > deadline:
                return
            time.sleep(0.001)
        if thread.is_alive():
            # Orbax' own threads override this to raise what they failed with.
            threading.Thread.join(thread, max(0.0, deadline - time.monotonic()))


def mesh_context(sharding: Sharding) -> contextlib.AbstractContextManager[Any]:
    """The context in which operations on arrays of this sharding work.

    Under ``jax.set_mesh`` with an Explicit mesh, JAX refuses operations on arrays of its Auto
    twin.
    """
    if isinstance(sharding, NamedSharding) and isinstance(sharding.mesh, Mesh):
        return jax.set_mesh(sharding.mesh)
    return contextlib.nullcontext()


def unsavable(name: str, leaf: NamedLeaf) -> str:
    """Why an array cannot be saved; empty if it can."""
    array = leaf.array
    if is_abstract(array):
        return (
            f"{name}: has a shape and no values. Initialise the model first, for instance with "
            "sharded_init, or restore it."
        )
    if is_traced(array):
        return f"{name}: is being traced. Save outside of jax.jit."
    if is_deleted(array):
        return f"{name}: its buffer was donated or deleted. Save the state that the step returned."
    if isinstance(array, np.ndarray | np.generic) and array.dtype != leaf.dtype:
        return (
            f"{name}: NumPy's {array.dtype} would be restored as {leaf.dtype}. Convert it with "
            f".astype({str(leaf.dtype)!r}), or set jax.config.update('jax_enable_x64', True)."
        )
    return ""


def _storable(leaf: NamedLeaf) -> Any:
    if not isinstance(leaf.array, jax.Array):
        return np.asarray(leaf.array, leaf.dtype)
    if jax.process_count() > 1 and is_on_this_process(leaf.array):
        # Every process has the same, and Orbax has the first one write it.
        return host_data(leaf.array)
    if not jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        return leaf.array
    with mesh_context(leaf.array.sharding):
        return jax.random.key_data(leaf.array)
