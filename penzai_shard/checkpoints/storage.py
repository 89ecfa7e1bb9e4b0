"""Keeps arrays on disk: Orbax writes them, TensorStore reads any part of one.

Orbax is needed to write, as it joins the files of many processes. For reading it stands in the way:
it needs all processes, reads whole trees, and names no array where a file is damaged. What it
writes are arrays of zarr, each below a prefix in a key-value store, and TensorStore opens those,
also in an object store, by url: ``gs://bucket/path``, ``s3://bucket/path``, ``file:///path``.

An object store has no rename, so that nothing in it can be replaced in one step. A checkpoint is
written to a local disk, and its files are sent: the marker last, which says that it is whole.
"""

import contextlib
import json
import math
import pathlib
import re
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import numpy as np

from penzai_shard import errors
from penzai_shard.checkpoints.replacement import refuse_save

PLAIN_METADATA = "_METADATA"
# The directory of what Orbax saves under no other name, as this library does.
STATE = "state"

_WRITE_BYTES = 128 * 2**20
# A chunk is what must be unpacked to read one of its numbers.
_CHUNK_BYTES, _FILE_BYTES = 2**20, 64 * 2**20
_CACHE_BYTES = 4 * 2**20
# What reading raises, or NumPy warns of, where a file is missing or holds something else.
UNREADABLE = OSError, ValueError, TypeError, LookupError, AttributeError, RecursionError, Warning
_OWN_FORM = dict.fromkeys(["use_ocdbt", "use_zarr3", "store_array_data_equal_to_fill_value"], True)


def begin_writing(
    directory: pathlib.Path, arrays: Mapping[str, Any], metadata: Mapping[str, Any], *, copy: bool
) -> Callable[[], Any]:
    """Begins to write arrays to a new directory.

    Args:
        directory: The directory, which is made.
        arrays: The arrays by name.
        metadata: What Orbax is to keep as the user's metadata.
        copy: Whether the arrays may be donated as soon as this returns.

    Returns:
        A function that waits until everything is written.
    """
    ocp = errors.require("orbax.checkpoint.experimental.v1", "checkpoint")
    context = ocp.Context()
    # Made in the background, a directory that cannot be made leaves threads that wait 5 minutes.
    context.asynchronous.create_directories_asynchronously = False
    # Splitting small arrays over processes took 19 s where writing them whole took 0.6 s.
    context.array.saving.use_replica_parallel = jax.process_count() > 1
    context.array.saving.min_slice_bytes_for_replica_parallel = _CHUNK_BYTES
    context.array.saving.storage_options.chunk_byte_size = _CHUNK_BYTES
    context.array.saving.ocdbt_target_data_file_size = _FILE_BYTES
    # Without a limit Orbax holds everything twice, and it fails at a part above the limit.
    limit = max(_WRITE_BYTES, *(1 + _count_part_bytes(array) for array in arrays.values()), 0)
    context.memory.write_concurrent_bytes = limit
    if not copy:
        context.memory.transfer_concurrent_bytes = limit
        context.memory.is_prioritized_key_fn = lambda key: False
    with context:
        writing = ocp.save_async(directory, dict(arrays), custom_metadata=dict(metadata))
    return lambda: writing.result()


def _count_part_bytes(array: Any) -> int:
    if not isinstance(array, jax.Array):
        return int(array.nbytes)
    return math.prod(array.sharding.shard_shape(array.shape)) * array.dtype.itemsize


# Reading


def refuse_damage(path: object, found: Mapping[str, str]) -> None:
    """Refuses a checkpoint in which something is not as it was saved.

    Args:
        path: The checkpoint.
        found: What is wrong, by array or file; nothing if it is empty.

    Raises:
        CheckpointDamagedError: With a problem for each.
    """
    if found:
        fix = "Restore another copy of it, or once more if it was replaced meanwhile."
        problems = [errors.Problem(name, what, fix) for name, what in found.items()]
        raise errors.CheckpointDamagedError(f"the checkpoint at {path} is damaged:", problems)


@contextlib.contextmanager
def refuse_unreadable(path: object, file: str) -> Iterator[None]:
    """Refuses a checkpoint, by a file, if what is in it cannot be what was saved."""
    try:
        yield
    except errors.ShardingError:
        raise
    except UNREADABLE as error:
        refuse_damage(path, {file: f"it cannot be read: {error!r:.100}"})


def shorten(error: BaseException) -> str:
    """What TensorStore or Orbax says, in one line without source lines of theirs."""
    return re.split(r" \[[a-z]|\n", str(error))[0].rstrip(".")


class OrbaxStore:
    """The arrays of a checkpoint, of which any thread can read parts.

    Args:
        path: The checkpoint, for messages.
        directory: Where the arrays lie, also a url.
        prefixes: The prefix of each array's keys, by its name.
        form: What Orbax says of the form in which they are stored, as this library has it done.
    """

    def __init__(
        self, path: object, directory: Any, prefixes: Mapping[str, str], form: Any = _OWN_FORM
    ) -> None:
        self._ts = errors.require("tensorstore", "checkpoint")
        self.prefixes, self._path = prefixes, path
        # A shared context would refuse what has replaced a checkpoint at its path.
        self._context = self._ts.Context({"cache_pool": {"total_bytes_limit": _CACHE_BYTES}})
        files: Any = {"driver": "file", "path": f"{directory}/"}
        if is_url(directory):
            files = f"{directory}/"
        # Many keys are in few large files, or each is a file.
        store = {"driver": "ocdbt", "base": files} if form["use_ocdbt"] else files
        self._store = self._ts.KvStore.Spec(store)
        driver = "zarr3" if form.get("use_zarr3") else "zarr"
        # If zeros are not stored, numbers that are missing are zeros.
        missing = {"fill_missing_data_reads": not form.get("store_array_data_equal_to_fill_value")}
        self._spec = {"driver": driver, "recheck_cached_data": "open", **missing}
        self._opened: dict[str, Any] = {}

    def open(self, names: Iterable[str]) -> dict[str, tuple[tuple[int, ...], str]]:
        """Opens arrays; the shape and dtype of each.

        Raises:
            CheckpointDamagedError: Some cannot be opened; all of them are in it.
        """
        pending = {}
        for name in names:
            kvstore = self._store / f"{self.prefixes[name]}/"
            options = {"kvstore": kvstore, "context": self._context, "read": True}
            pending[name] = self._ts.open(self._spec, **options)
        damaged = {}
        for name, opened in pending.items():
            try:
                self._opened[name] = opened.result()
            except Exception as error:  # TensorStore raises whatever its drivers raise.
                damaged[name] = f"it cannot be read: {shorten(error)}"
        refuse_damage(self._path, damaged)
        arrays = {name: self._opened[name] for name in pending}
        return {name: (tuple(array.shape), array.dtype.name) for name, array in arrays.items()}

    def chunk(self, name: str) -> tuple[int, ...]:
        """As ``Store.chunk``; no dimensions of an array that is not open, as it has no numbers."""
        array = self._opened.get(name)
        shape = array.chunk_layout.read_chunk.shape if array else None
        return tuple(shape or ())  # TensorStore says None of a scalar.

    def read(self, name: str, index: tuple[slice, ...], shape: Any = None) -> np.ndarray:
        """A part of an opened array; see ``Store.read``. It is looked at as it is stored.

        Raises:
            CheckpointDamagedError: It cannot be read.
        """
        array = self._opened[name]
        # Around TensorStore only: a mistake of ours must not pass for damage.
        try:
            return np.asarray(array[index].read().result())
        except Exception as error:
            refuse_damage(self._path, {name: f"its numbers cannot be read: {shorten(error)}"})
            raise


# Object stores


def is_url(path: Any) -> bool:
    """Whether a path is that of an object store.

    >>> is_url("gs://runs/may/params"), is_url("runs/may/params")
    (True, False)
    """
    return isinstance(path, str) and "://" in path


def read_object(url: str, name: str) -> bytes:
    """A file of a checkpoint in an object store.

    Raises:
        CheckpointNotFoundError: There is none, or the object store cannot be reached.
    """
    with _open_objects(url, f"reading {name}", errors.CheckpointNotFoundError) as objects:
        return bytes(objects[name])


def upload(url: str, last: str, save: Callable[[pathlib.Path], object]) -> None:
    """Saves a checkpoint at a url. If that fails, what was sent stays there without the last file.

    Args:
        url: A path at which nothing is yet.
        last: The file that is sent last.
        save: Saves it at a path of the file system.

    Raises:
        CheckpointWriteError: Something is there, or nothing can be written there.
    """
    with _open_objects(url, "writing", errors.CheckpointWriteError) as objects:
        if objects.list().result() or jax.process_count() > 1:
            what = "an object store takes checkpoints of one process, where nothing is yet"
            refuse_save(url, what, "Save to a new path, or to a disk that all processes share.")
        with tempfile.TemporaryDirectory(prefix="penzai_shard_") as folder:
            content = pathlib.Path(folder) / "checkpoint"
            save(content)

            def send(file: pathlib.Path) -> None:
                objects.write(file.relative_to(content).as_posix(), file.read_bytes()).result()

            files = [path for path in content.rglob("*") if path.is_file() and path.name != last]
            with ThreadPoolExecutor() as pool:
                list(pool.map(send, files))
            send(content / last)


@contextlib.contextmanager
def _open_objects(url: str, act: str, error: Callable[..., Exception]) -> Iterator[Any]:
    """An object store; of whatever fails in it an error is made."""
    ts = errors.require("tensorstore", "checkpoint")
    # Without a limit it tries for many minutes where there is no such bucket or no permission.
    retries = {"max_retries": 8, "max_delay": "8s"}
    context = ts.Context({f"{x}_request_retries": retries for x in ("gcs", "s3", "http")})
    try:
        yield ts.KvStore.open(f"{url.rstrip('/')}/", context=context).result()
    except errors.ShardingError:
        raise
    except Exception as reason:  # TensorStore raises whatever its drivers raise.
        # Of what is not there TensorStore says nothing else.
        said = "nothing is there" if isinstance(reason, KeyError) else shorten(reason)
        what = f"{act} fails: {said}"
        fix = "Write the url that saving returned, or give permission there."
        raise error("the object store:", [errors.Problem(url, what, fix)]) from reason


def find_plain_store(path: pathlib.Path) -> OrbaxStore | None:
    """The arrays of a tree that somebody saved with Orbax; None where there are several trees.

    Texts and empty containers of the tree are no arrays, and are left out. Typed random keys are
    the numbers as which they are stored. Named arrays of Penzai have their paths in the tree.

    Raises:
        OSError, ValueError, LookupError, TypeError: A file is damaged.
    """
    directory = path
    if not (directory / PLAIN_METADATA).exists():
        trees = [found.parent for found in directory.glob(f"*/{PLAIN_METADATA}")]
        if len(trees) != 1:
            return None
        (directory,) = trees
    content = json.loads((directory / PLAIN_METADATA).read_bytes())
    prefixes = {}
    for entry in content["tree_metadata"].values():
        value = entry["value_metadata"]
        if not value["skip_deserialize"] and value["value_type"] != "string":
            keys = [key["key"] for key in entry["key_metadata"]]
            # Of a named array of Penzai, Orbax stores the one field that holds numbers.
            prefixes["/".join(keys).removesuffix("/data_array")] = ".".join(keys)
    return OrbaxStore(path, directory, prefixes, content)
