"""Keeps checkpoints in object stores, by url: each is a new one, written once.

An object store has no rename, so that nothing in it can be replaced in one step. A checkpoint is
written to a local disk, and its files are sent: the marker last, which says that it is whole.
TensorStore sends and reads them: ``gs://bucket/path``, ``s3://bucket/path``, ``file:///path``.
"""

import pathlib
import tempfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax

from penzai_shard.checkpoints.replacement import refuse_save
from penzai_shard.checkpoints.storage import shorten
from penzai_shard.errors import CheckpointNotFoundError, CheckpointWriteError, Problem, require

_MOST_THREADS = 8


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
    act = f"reading {name}"
    return bytes(_call(CheckpointNotFoundError, act, url, lambda store: store[name]))


def upload(url: str, last: str, save: Callable[[pathlib.Path], object]) -> None:
    """Saves a checkpoint at a url. If that fails, what was sent stays there without the last file.

    Args:
        url: A path at which nothing is yet.
        last: The file that is sent last.
        save: Saves it at a path of the file system.

    Raises:
        CheckpointWriteError: Something is there, or nothing can be written there.
    """
    found = _call(CheckpointWriteError, "listing", url, lambda store: store.list().result())
    if found or jax.process_count() > 1:
        what = "an object store takes checkpoints of one process, and where nothing is yet"
        fix = "Save to a new path, or several processes to a disk that they share."
        refuse_save(url, what, fix)
    with tempfile.TemporaryDirectory(prefix="penzai_shard_") as folder:
        content = pathlib.Path(folder) / "checkpoint"
        save(content)
        _call(CheckpointWriteError, "sending", url, lambda store: _send(store, content, last))


def _send(store: Any, content: pathlib.Path, last: str) -> None:
    def send(path: pathlib.Path) -> None:
        store.write(path.relative_to(content).as_posix(), path.read_bytes()).result()

    files = [path for path in content.rglob("*") if path.is_file() and path.name != last]
    with ThreadPoolExecutor(_MOST_THREADS) as pool:
        list(pool.map(send, files))
    send(content / last)


def _call(error: Callable[..., Exception], act: str, url: str, function: Any) -> Any:
    """Calls a function of an object store; of whatever fails it makes an error."""
    ts = require("tensorstore", "checkpoint")
    # Without a limit it tries for many minutes where there is no such bucket or no permission.
    retries = {"max_retries": 8, "max_delay": "8s"}
    context = ts.Context({f"{x}_request_retries": retries for x in ("gcs", "s3", "http")})
    try:
        return function(ts.KvStore.open(f"{url.rstrip('/')}/", context=context).result())
    except Exception as reason:  # TensorStore raises whatever its drivers raise.
        said = f"{type(reason).__name__} {shorten(reason)}"
        # Of what is not there TensorStore says nothing else.
        what = f"{act} fails there: {'nothing is there' if isinstance(reason, KeyError) else said}"
        fix = "Write the url that saving returned, or give permission there."
        raise error("there is no checkpoint:", [Problem(url, what, fix)]) from reason
