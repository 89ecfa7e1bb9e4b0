"""Writing and reading a flat dictionary of arrays with Orbax.

Everything that is particular to Orbax' arrays is in this module: those that it cannot store
(empty ones, typed keys), limits on concurrent reading, threads that outlive a failure.
"""

import contextlib
import errno
import math
import os
import re
import shutil
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding, Sharding, SingleDeviceSharding

from penzai_shard import errors
from penzai_shard.array_kinds import is_abstract, is_deleted
from penzai_shard.checkpointing.array_records import (
    ArrayRecord,
    key_data_shape,
    record_of,
)
from penzai_shard.checkpointing.locations import (
    PathLike,
    absolute_path,
    is_remote,
    path_object,
    refuse_existing,
)
from penzai_shard.checkpointing.manifest import (
    Manifest,
    seal,
    section_of,
    stored_name,
)
from penzai_shard.checkpointing.orbax_calls import first_line, orbax, without_noise
from penzai_shard.checkpointing.replacement import Replacement
from penzai_shard.errors import (
    CheckpointDamagedError,
    CheckpointMismatchError,
    CheckpointWriteError,
    ShardingError,
    raise_all,
)
from penzai_shard.named_leaves import NamedLeaf

# Reading as much as possible at once holds every array twice in host memory for a while. With
# this bound a restore of 2 GiB peaked at 2.6 instead of 3.3 GiB, and was as fast.
_READ_BYTES = 256 * 2**20
_SHARED_SLICE_BYTES = 2**20
_SECONDS_TO_STOP = 5.0


def save_arrays(
    path: PathLike, leaves: Mapping[str, NamedLeaf], *, kind: str, overwrite: bool
) -> str:
    """Writes arrays under their names, so that the path has a whole checkpoint at every moment.

    Args:
        path: Directory to make. Relative paths start at the working directory.
        leaves: The arrays by name.
        kind: ``"params"`` or ``"train_state"``, kept in the metadata.
        overwrite: Replace a checkpoint that is there, once the new one is complete.

    Returns:
        The absolute path.

    Raises:
        CheckpointExistsError: The path exists and may not be replaced.
        CheckpointMismatchError: Some arrays cannot be saved.
        CheckpointWriteError: It cannot be written: no permission, a full disk.
    """
    ocp = orbax()
    where = absolute_path(path)
    _on_one_process(lambda: refuse_existing(where, overwrite))
    raise_all(
        CheckpointMismatchError,
        f"cannot save to {where}:",
        [problem for name, leaf in leaves.items() if (problem := _unsavable(name, leaf))],
    )
    records = {name: record_of(leaf) for name, leaf in leaves.items()}
    # Orbax refuses arrays without elements. Their records say all there is.
    stored = {
        name: _storable(leaf) for name, leaf in leaves.items() if 0 not in records[name].shape
    }
    if not stored:
        raise CheckpointMismatchError(
            f"cannot save to {where}: there is no array with elements to save."
        )
    context = ocp.Context()
    # Several processes share the writing of replicated arrays, for which every device cuts its
    # slice out. That compiles a program per shape and device, so it is kept for what is worth it:
    # one process wrote 20 small replicated arrays in 0.6 s without it, and in 19 s with it.
    context.array.saving.use_replica_parallel = jax.process_count() > 1
    context.array.saving.min_slice_bytes_for_replica_parallel = _SHARED_SLICE_BYTES
    # Made in the background, a directory that cannot be made leaves threads waiting for it for
    # five minutes, and the interpreter for them.
    context.asynchronous.create_directories_asynchronously = False
    size = sum(array.size * array.dtype.itemsize for array in stored.values())
    with without_noise(), _written_beside(where, size, overwrite=overwrite) as beside:
        with context:
            ocp.save(beside, stored, custom_metadata=section_of(records, kind))
        _on_one_process(lambda: seal(path_object(beside), leaves))
    return where


@contextlib.contextmanager
def _written_beside(where: str, size: int, *, overwrite: bool) -> Iterator[str]:
    """Where to write what then comes to a path in one step, or not at all.

    Args:
        where: The path.
        size: Number of bytes to be written, for messages.
        overwrite: Whether what is there may be replaced.
    """
    if is_remote(where):
        # Orbax marks a directory in an object store as complete once it is; nothing is replaced.
        yield where
        return
    replacement = Replacement(where)
    before = set(threading.enumerate())
    try:
        _on_one_process(replacement.begin)
        # Now that nobody else can save there.
        _on_one_process(lambda: refuse_existing(where, overwrite))
        yield str(replacement.new)
        _on_one_process(replacement.commit)
    except BaseException as error:
        replacement.stop_writers()
        _wait_for_new_threads(before)
        if isinstance(error, ShardingError) or not isinstance(error, Exception):
            raise
        known = _known_reason(error, where, size)
        reason = (known or first_line(error)).removesuffix(".")
        kept = " What is at the path stays as it was." if os.path.lexists(where) else ""
        text = f"cannot save to {where}: {reason}.{kept}"
        raise CheckpointWriteError(text) from (None if known else error)
    finally:
        replacement.discard()


def _wait_for_new_threads(before: set[threading.Thread]) -> None:
    """Waits for the threads of a save that failed, which end once their directory is gone."""
    deadline = time.monotonic() + _SECONDS_TO_STOP
    for thread in set(threading.enumerate()) - before:
        # Idle workers and loops of asyncio stay for as long as they are referred to.
        if not thread.daemon and not thread.name.startswith("asyncio_"):
            # Orbax' own threads override this to raise what they failed with.
            threading.Thread.join(thread, max(0.0, deadline - time.monotonic()))


def _known_reason(error: Exception, where: str, size: int) -> str:
    """What the operating system refused, and what to do; empty if it was something else."""
    code = getattr(error, "errno", None)
    if code is None:
        # Orbax' storage reports the code within its text.
        found = re.search(r"os_error_code='(\d+)'", str(error))
        code = int(found[1]) if found else None
    folder = _first_existing(os.path.dirname(where))
    if code in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        free = shutil.disk_usage(folder).free
        return (
            f"the disk is full. The arrays take {size:,} bytes, and {free:,} are free. Make room, "
            "or choose another disk."
        )
    if code in (errno.EACCES, errno.EPERM, errno.EROFS):
        return (
            f"the directory {folder} may not be written ({os.strerror(code)}). Choose one that "
            "may, or change its permissions."
        )
    if code in (errno.ENOTDIR, errno.EEXIST, errno.ENOENT):
        what = "takes no new directories" if os.path.isdir(folder) else "is a file"
        return f"{folder} {what}. Choose another path."
    return f"{os.strerror(code)}." if code else ""


def _first_existing(where: str) -> str:
    while not os.path.lexists(where) and where != os.path.dirname(where):
        where = os.path.dirname(where)
    return where


def _on_one_process(act: Callable[[], None]) -> None:
    """Has the first process do something to the file system; all raise what it raised."""
    if jax.process_count() == 1:
        act()
        return
    failed: Exception | None = None
    if jax.process_index() == 0:
        try:
            act()
        except Exception as error:
            failed = error
    code = getattr(failed, "errno", None) or 0
    text = f"{type(failed).__name__}:{code}:{failed}".encode()[:4096] if failed else b""
    told = multihost_utils.broadcast_one_to_all(np.frombuffer(text.ljust(4096), np.uint8))
    if failed is not None:
        raise failed
    kind, _, rest = bytes(np.asarray(told)).decode(errors="replace").strip().partition(":")
    code_text, _, message = rest.partition(":")
    if hasattr(errors, kind):
        raise getattr(errors, kind)(message)
    if kind:
        raise OSError(int(code_text), message)


def load_arrays(
    manifest: Manifest, wanted: Mapping[str, jax.ShapeDtypeStruct]
) -> dict[str, jax.Array]:
    """Reads arrays straight into their shardings: each device reads its own part.

    Args:
        manifest: What the checkpoint holds.
        wanted: By name, the shape as stored, the dtype wanted and the sharding. All names must be
            in the manifest, and shapes and PRNG implementations must agree with it.

    Returns:
        The arrays by name, in the shardings asked for.

    Raises:
        CheckpointDamagedError: The numbers cannot be read.
    """
    ocp = orbax()
    structs = {
        name: _data_struct(struct, manifest.records[name])
        for name, struct in wanted.items()
        if 0 not in struct.shape
    }
    loaded: dict[str, jax.Array] = {}
    if structs:
        context = ocp.Context()
        context.memory.read_concurrent_bytes = _read_bytes(manifest, structs)
        # Arrays that nobody wants are left out of the tree given to Orbax.
        context.pytree.loading.partial_load = True
        tree = _pruned(
            manifest.stored_tree,
            {manifest.prefix + name: struct for name, struct in structs.items()},
            manifest.records,
        )
        with context, without_noise():
            tree = _loaded(manifest, tree)
        loaded = {
            stored_name(key_path, manifest.kind).removeprefix(manifest.prefix): array
            for key_path, array in jax.tree_util.tree_leaves_with_path(tree)
        }
    arrays: dict[str, jax.Array] = {}
    for name, struct in wanted.items():
        impl = manifest.records[name].key_impl
        if name in structs:
            array = loaded[name]
        else:
            data = _data_struct(struct, manifest.records[name])
            array = jax.device_put(np.zeros(data.shape, data.dtype), data.sharding)
        if impl is not None:
            with mesh_context(struct.sharding):
                keys = jax.random.wrap_key_data(array, impl=impl)
            array = jax.device_put(keys, struct.sharding)
        arrays[name] = array
    return arrays


def _loaded(manifest: Manifest, tree: Any) -> Any:
    try:
        return orbax().load(manifest.directory, tree)
    except (jax.errors.JaxRuntimeError, MemoryError):
        # Not for the checkpoint's sake: a device has no room for it.
        raise
    except Exception as error:
        raise CheckpointDamagedError(
            f"the numbers in the checkpoint at {manifest.path} cannot be read: "
            f"{first_line(error)} Restore another copy of it."
        ) from error


def mesh_context(sharding: Sharding) -> contextlib.AbstractContextManager[Any]:
    """The context in which operations on arrays of this sharding work.

    Under ``jax.set_mesh`` with an Explicit mesh, JAX refuses operations on arrays that lie on
    its Auto twin.
    """
    if isinstance(sharding, NamedSharding) and isinstance(sharding.mesh, Mesh):
        return jax.set_mesh(sharding.mesh)
    return contextlib.nullcontext()


def _unsavable(name: str, leaf: NamedLeaf) -> str:
    """Why an array cannot be saved; empty if it can."""
    array = leaf.array
    if is_abstract(array):
        return (
            f"{name}: has a shape and no values. Initialise the model first, for instance with "
            "sharded_init, or restore it."
        )
    if isinstance(array, jax.core.Tracer):
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
    if not jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        return leaf.array
    with mesh_context(leaf.array.sharding):
        return jax.random.key_data(leaf.array)


def _data_struct(struct: jax.ShapeDtypeStruct, record: ArrayRecord) -> jax.ShapeDtypeStruct:
    """The struct of what is stored for an array: for keys, of the numbers that make them up."""
    if record.key_impl is None:
        return struct
    # The key's own dimensions are whole on each device: a spec says nothing of further dimensions.
    shape = (*struct.shape, *key_data_shape(record.key_impl))
    return jax.ShapeDtypeStruct(shape, jnp.uint32, sharding=struct.sharding)


def _read_bytes(manifest: Manifest, structs: Mapping[str, jax.ShapeDtypeStruct]) -> int:
    """The bound on bytes read at once; Orbax fails where one single piece exceeds it."""
    largest = 0
    for name, struct in structs.items():
        part = struct.sharding.shard_shape(struct.shape)
        chunk = manifest.chunks.get(name, struct.shape)
        if len(chunk) != len(part):
            chunk = struct.shape
        # A part that starts inside a chunk may touch one chunk more than its length tells.
        touched = math.prod(
            min(-(-whole // piece), -(-length // piece) + 1) * piece
            for whole, length, piece in zip(struct.shape, part, chunk, strict=True)
        )
        record = manifest.records[name]
        stored = struct.dtype if record.key_impl else jnp.dtype(record.dtype)
        largest = max(largest, touched * max(stored.itemsize, struct.dtype.itemsize))
    return max(_READ_BYTES, largest + 1)


def _pruned(
    names: Any,
    structs: Mapping[str, jax.ShapeDtypeStruct],
    records: Mapping[str, ArrayRecord],
) -> Any:
    """The stored structure with structs in place of names, without what is not wanted."""
    if isinstance(names, Mapping):
        kept = {key: _pruned(node, structs, records) for key, node in names.items()}
        return {key: node for key, node in kept.items() if jax.tree_util.tree_leaves(node)}
    if isinstance(names, str):
        return structs.get(names)
    # Orbax leaves keys of a dictionary out, but no entries of a list: those are read and dropped.
    unwanted = SingleDeviceSharding(jax.local_devices()[0])
    return jax.tree_util.tree_map(
        lambda name: structs.get(
            name,
            jax.ShapeDtypeStruct(
                records[name].shape, jnp.dtype(records[name].dtype), sharding=unwanted
            ),
        ),
        names,
    )
