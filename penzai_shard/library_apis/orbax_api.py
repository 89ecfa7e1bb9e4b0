"""What this library uses of Orbax: its experimental interface, and the files that it makes.

Orbax is imported when it is first needed. Its functions are called here with the options that this
library depends on, and what it logs of a failure that is raised anyway is held back.
"""

import dataclasses
import functools
import pathlib
import re
import types
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import jax
from jax.sharding import PartitionSpec

from penzai_shard.errors import require_extra
from penzai_shard.library_apis.orbax_noise import without_noise

METADATA_FILE = "_CHECKPOINT_METADATA"
"""JSON about the whole checkpoint; the caller's own metadata is under ``custom_metadata``."""

INDICATOR_FILE = "orbax.checkpoint"
"""An empty file in every directory that Orbax has saved completely."""

MARKER_FILES = (INDICATOR_FILE, METADATA_FILE, "_METADATA")
"""Files of which each complete checkpoint, also of an older layout, has at least one."""

FILE_NAMES = (
    r"orbax\.checkpoint|_CHECKPOINT_METADATA|_METADATA|_sharding|commit_success\.txt|"
    r"manifest\.ocdbt|process_\d+|[0-9a-f]{32}"
)
"""A regular expression of the names of all files in a checkpoint."""

TEMPORARY_SUFFIX = ".orbax-checkpoint-tmp"
"""What Orbax appends to the name of a directory while it saves to it."""

# Several processes share the writing of a replicated array where its parts are at least this large.
_SHARED_SLICE_BYTES = 2**20
# Arrays are stored in pieces of up to this size: whoever reads a part of an array, under whichever
# layout, reads and unpacks whole pieces.
_CHUNK_BYTES = 2**20
# What is written to one file is in memory until it has this size.
_FILE_BYTES = 64 * 2**20
# What TensorStore appends to its messages.
_DETAILS = (" [source locations=", " [tensorstore_spec=")
_DATABASE = re.compile(r' in OCDBT database at [^"]*"[^"]*"')
# The last file or entry that a message names, and what it says of it.
_QUOTED = re.compile(r'.*"([^"]+)":? (.*)')
# The directory with the arrays' storage, and the files that describe it to Orbax.
_ARRAYS = "state"
_IN_ARRAYS = ("_METADATA", "_sharding", "array_metadatas/process_0")
_DESCRIPTIONS = (METADATA_FILE, *(f"{_ARRAYS}/{f}" for f in _IN_ARRAYS))


@functools.cache
def orbax() -> types.ModuleType:
    """The interface of Orbax that this library uses.

    Raises:
        MissingExtraError: Orbax is not installed.
    """
    return require_extra("orbax.checkpoint.experimental.v1", "checkpoint")


def path_object(where: str) -> Any:
    """A path in an object store, with the interface of ``pathlib.Path``."""
    return orbax().Context().file.path_class(where)


def holds_numbers(directory_name: str) -> bool:
    """Whether a directory in a checkpoint has the arrays' numbers, and not what describes them.

    >>> holds_numbers("d"), holds_numbers("ocdbt.process_0"), holds_numbers("array_metadatas")
    (True, True, False)
    """
    return directory_name == "d" or directory_name.startswith("ocdbt.")


def begin_save(
    directory: str,
    arrays: Mapping[str, Any],
    custom_metadata: Mapping[str, Any],
    write_bytes: int | None = None,
    host_bytes: int | None = None,
) -> Callable[[], None]:
    """Begins to write a dictionary of arrays, none of them without elements, to a new directory.

    Args:
        directory: Where to write.
        arrays: The arrays by name.
        custom_metadata: What is kept beside them.
        write_bytes: How many bytes are written at a time, more than any device has of one array.
        host_bytes: How many bytes are copied to host memory at a time, an array at the least. The
            arrays are then read until all is written. By default everything is copied first.

    Returns:
        A function that waits until all is written, and raises what went wrong; it may be called
        from another thread. Without ``host_bytes`` all that this process writes is in host memory,
        so that the arrays may be donated, and arrays of NumPy be written to.
    """
    ocp = orbax()
    context = ocp.Context()
    # To share the writing of replicated arrays, every device cuts its slice out. That compiles a
    # program per shape and device, so it is done only where it is worth it: one process wrote 20
    # small replicated arrays in 0.6 s without it, and in 19 s with it.
    context.array.saving.use_replica_parallel = jax.process_count() > 1
    context.array.saving.min_slice_bytes_for_replica_parallel = _SHARED_SLICE_BYTES
    # Made in the background, a directory that cannot be made leaves threads waiting for it for
    # five minutes, and the interpreter for them.
    context.asynchronous.create_directories_asynchronously = False
    context.array.saving.storage_options.chunk_byte_size = _CHUNK_BYTES
    context.array.saving.ocdbt_target_data_file_size = _FILE_BYTES
    if write_bytes is not None and sum(x.nbytes for x in arrays.values()) > write_bytes:
        # Without this limit Orbax keeps all that it writes in memory, compressed, until the end.
        context.memory.write_concurrent_bytes = write_bytes
    if host_bytes is not None:
        context.memory.transfer_concurrent_bytes = host_bytes
        # Orbax copies what has priority at once, whatever the limit.
        context.memory.is_prioritized_key_fn = lambda key: False
    with context:
        response = ocp.save_async(directory, arrays, custom_metadata=custom_metadata)
    return response.result


def described_arrays(directory: str) -> Any:
    """The tree of what Orbax says of each array in a checkpoint.

    A leaf has ``shape`` and ``dtype``, and in ``storage_metadata.chunk_shape`` the shape of the
    pieces that can be read one by one.

    Raises:
        UnreadableError: The checkpoint is damaged.
        Exception: The directory is not a checkpoint; see ``is_unknown_layout``.
    """
    ocp = orbax()

    def read() -> Any:
        found = ocp.metadata(directory).metadata
        if found is None:
            raise ValueError("it gives nothing.")
        return found

    return _read_quietly(directory, read)


def unreadable_arrays(directory: str, names: Iterable[str]) -> dict[str, str]:
    """Looks up what the storage of a checkpoint says of each array.

    Orbax says only that it cannot read what all of them are.

    Args:
        directory: A checkpoint that ``save`` wrote, on a file system.
        names: The names of its arrays.

    Returns:
        For each array that cannot be looked up the file or the entry, and the reason.
    """
    import tensorstore  # Orbax itself needs it.

    where = {"driver": "file", "path": f"{directory}/{_ARRAYS}/"}
    opened = {
        name: tensorstore.open(
            {
                "driver": "zarr3",
                "kvstore": {"driver": "ocdbt", "base": where, "path": f"{name}/"},
            }
        )
        for name in names
    }
    reasons = {}
    for name, array in opened.items():
        try:
            array.result()
        except Exception as error:
            # TensorStore raises what its drivers raise.
            reasons[name] = _without_details(str(error), directory)
    return reasons


@dataclasses.dataclass(frozen=True)
class SavedSharding:
    """How an array was laid out when it was saved; the devices themselves do not count.

    Attributes:
        mesh: The sizes of the mesh axes by name; none for an array on a single device.
        spec: The spec, of an array that may have more dimensions than are saved of it.
    """

    mesh: tuple[tuple[str, int], ...]
    spec: PartitionSpec


def saved_sharding(description: Any) -> SavedSharding | None:
    """The sharding at save of an array.

    Args:
        description: A leaf of ``described_arrays``.

    Returns:
        The sharding; None where Orbax has not kept it, as of arrays of NumPy, or where it was of
        a kind that names no mesh axes.
    """
    found: Any = getattr(description, "sharding_metadata", None)
    if hasattr(found, "device_str"):
        return SavedSharding((), PartitionSpec())
    if not hasattr(found, "partition_spec"):
        return None
    mesh = tuple(zip(map(str, found.axis_names), map(int, found.shape), strict=True))
    return SavedSharding(mesh, PartitionSpec(*found.partition_spec))


def saved_metadata(directory: str) -> tuple[int | None, dict[str, Any]]:
    """When a checkpoint was saved, in nanoseconds since 1970, and the metadata of who saved it.

    Older layouts of Orbax have neither.
    """
    with without_noise():
        found = orbax().metadata(directory)
    time = found.commit_timestamp_nsecs or found.init_timestamp_nsecs
    return time, dict(found.custom_metadata or {})


def is_unknown_layout(error: Exception) -> bool:
    """Whether Orbax raised this because a directory is not a checkpoint."""
    return isinstance(error, orbax().errors.InvalidLayoutError)


def load(directory: str, structs: Any, read_bytes: int) -> Any:
    """Reads arrays straight into shardings.

    Args:
        directory: The checkpoint.
        structs: The tree of ``described_arrays`` with a ``jax.ShapeDtypeStruct`` that has a
            sharding for each array to be read, and None for each other one.
        read_bytes: How many bytes may be read at once. Orbax fails if one piece has more.

    Returns:
        The tree with arrays in place of the structs.

    Raises:
        UnreadableError: The checkpoint is damaged.
    """
    ocp = orbax()
    context = ocp.Context()
    context.memory.read_concurrent_bytes = read_bytes
    context.pytree.loading.partial_load = True
    if jax.process_count() > 1:
        # Each process reads by itself: one that meets damage would keep the others waiting.
        context.multiprocessing.active_processes = {jax.process_index()}
        context.multiprocessing.primary_host = jax.process_index()
        context.multiprocessing.barrier_sync_key_prefix = f"process_{jax.process_index()}"
    with context:
        return _read_quietly(directory, lambda: ocp.load(directory, structs))


class UnreadableError(ValueError):
    """Orbax cannot read a checkpoint. What it met there is the message, and no more is kept."""


def _read_quietly(directory: str, read: Callable[[], Any]) -> Any:
    """What is read; what Orbax raises is one error that holds on to nothing.

    Through its traceback an error of Orbax holds its tasks and what they read.

    Raises:
        UnreadableError: Something is damaged.
    """
    with without_noise():
        try:
            return read()
        except (jax.errors.JaxRuntimeError, MemoryError, orbax().errors.InvalidLayoutError):
            # Not for the checkpoint's sake: a device has no room for it, or there is none.
            raise
        except Exception as error:
            # Orbax raises whatever its readers of files raise where these are damaged.
            reason = _reason_of(error, directory)
        raise UnreadableError(reason)


def _reason_of(error: BaseException, directory: str) -> str:
    """What is wrong in one line: the storage says it best, and Orbax around it where."""
    while (inner := error.__cause__ or error.__context__) is not None:
        error = inner
    text = str(error) or type(error).__name__
    if _DATABASE.search(text) is None:
        # It does not say where. Orbax describes arrays in these files, and no other library does.
        top = pathlib.Path(directory)
        files = [str(f.relative_to(top)) for glob in _DESCRIPTIONS for f in top.glob(glob)]
        text = f"{text.splitlines()[0][:150]} (in one of {', '.join(files)})"
    return _without_details(text, directory)


def _without_details(text: str, directory: str) -> str:
    """Which file or entry TensorStore cannot read, and the reason, in one line.

    >>> said = 'LOST: Error reading "w/c/0" in OCDBT database at local file "/run/state/": '
    >>> said += 'Error reading local file "/run/state/d/1f": cut short [tensorstore_spec={}]'
    >>> _without_details(said, "/run")
    'state/d/1f: cut short'
    """
    for details in _DETAILS:
        text = text.partition(details)[0]
    text = _DATABASE.sub("", text)
    found = _QUOTED.fullmatch(text.splitlines()[0])
    if found:
        text = f"{found[1].removeprefix(directory).strip('/')}: {found[2]}"
    return text.splitlines()[0][:300]


def first_line(error: BaseException) -> str:
    """The first line of what Orbax raised, cut to what one can read.

    >>> first_line(ValueError("wrong\\nand more"))
    'wrong'
    """
    text = str(error) or type(error).__name__
    return text.splitlines()[0][:300]
