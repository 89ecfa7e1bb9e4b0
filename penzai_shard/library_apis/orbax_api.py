"""What this library uses of Orbax: its experimental interface, and the files that it makes.

Orbax is imported when it is first needed. Its functions are called here with the options that this
library depends on, and what it logs of a failure that is raised anyway is held back.
"""

import contextlib
import dataclasses
import functools
import gc
import logging
import threading
import types
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any

import jax
from jax.sharding import PartitionSpec

from penzai_shard.errors import require_extra

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
_LOGGERS = ("absl", "asyncio")


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
    directory: str, arrays: Mapping[str, Any], custom_metadata: Mapping[str, Any]
) -> Callable[[], None]:
    """Begins to write a dictionary of arrays, none of them without elements, to a new directory.

    Returns:
        A function that waits until all is written, and raises what went wrong; it may be called
        from another thread. What this process writes is in host memory, so that the arrays may be
        donated, and arrays of NumPy be written to.
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
    with context:
        response = ocp.save_async(directory, arrays, custom_metadata=custom_metadata)
    return response.result


def described_arrays(directory: str) -> Any:
    """The tree of what Orbax says of each array in a checkpoint.

    A leaf has ``shape`` and ``dtype``, and in ``storage_metadata.chunk_shape`` the shape of the
    pieces that can be read one by one.

    Raises:
        Exception: Whatever Orbax meets in a damaged checkpoint; see ``is_unknown_layout``.
    """
    ocp = orbax()
    with without_noise():
        found = ocp.metadata(directory).metadata
        if found is None:
            raise ValueError("it gives nothing.")
        return found


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
    # Read from JSON, several mesh axes of one dimension are a list.
    entries = [tuple(e) if isinstance(e, list) else e for e in found.partition_spec]
    return SavedSharding(mesh, PartitionSpec(*entries))


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
        Exception: Whatever Orbax meets in a damaged checkpoint.
    """
    ocp = orbax()
    context = ocp.Context()
    context.memory.read_concurrent_bytes = read_bytes
    context.pytree.loading.partial_load = True
    with context, without_noise():
        return ocp.load(directory, structs)


def first_line(error: BaseException) -> str:
    """The first line of what Orbax raised, cut to what one can read.

    >>> first_line(ValueError("wrong\\nand more"))
    'wrong'
    """
    text = str(error) or type(error).__name__
    return text.splitlines()[0][:300]


@contextlib.contextmanager
def without_noise(before: Collection[threading.Thread] | None = None) -> Iterator[None]:
    """Keeps Orbax from logging, hundreds of lines long, what is raised as one error anyway.

    Its threads and event loops report the same failure one after the other. What is logged is
    passed on once all went well, and what other threads log at once.

    Args:
        before: The threads that ran before Orbax began, if it began before this.
    """
    held: list[logging.LogRecord] = []
    others = {*(threading.enumerate() if before is None else before)} - {threading.current_thread()}

    def hold(record: logging.LogRecord) -> bool:
        # Called by the thread that logs. Numbers of threads are used again, so they do not count.
        if threading.current_thread() in others:
            return True
        held.append(record)
        return False

    loggers = [logging.getLogger(name) for name in _LOGGERS]
    for logger in loggers:
        logger.addFilter(hold)
    try:
        yield
    except BaseException:
        # Tasks of a failed read or write, of which only the first error was raised, report theirs
        # to the log of asyncio when they are collected: now, instead of at any later time.
        gc.collect()
        held.clear()
        raise
    finally:
        for logger in loggers:
            logger.removeFilter(hold)
        for record in held:
            logging.getLogger(record.name).handle(record)
