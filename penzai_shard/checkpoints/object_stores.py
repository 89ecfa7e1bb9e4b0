"""Keeps checkpoints in object stores, by url: each is a new one, written once.

An object store has no rename, so that nothing in it can be replaced in one step. A checkpoint is
written to a local disk, and its files are sent: the marker last, which says that it is whole.
TensorStore sends and reads them: ``gs://bucket/path``, ``s3://bucket/path``, ``file:///path``.
"""

import contextlib
import pathlib
import tempfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax

from penzai_shard.errors import (
    CheckpointNotFoundError,
    CheckpointWriteError,
    Problem,
    ShardingError,
    require,
)

_MOST_THREADS = 8
_MOST_CHARACTERS = 300
_HEADLINE = "cannot save:"


def is_url(path: Any) -> bool:
    """Whether a path is that of an object store.

    >>> is_url("gs://runs/may/params"), is_url("runs/may/params")
    (True, False)
    """
    return isinstance(path, str) and "://" in path


def read_object(url: str, name: str) -> bytes | None:
    """A file of a checkpoint in an object store; None if there is none.

    Raises:
        CheckpointNotFoundError: The object store cannot be reached, or refuses it.
    """
    found = _call(url, lambda store: store.read(name).result(), CheckpointNotFoundError)
    return bytes(found.value) if found.state == "value" else None


def begin_upload(
    url: str, begin: Callable[[pathlib.Path], Callable[[], str]], *, overwrite: bool, last: str
) -> Callable[[], str]:
    """Begins to save a checkpoint at a url.

    Args:
        url: A path at which nothing is yet.
        begin: Begins to save it at a path of the file system, and returns how to finish.
        overwrite: Must be false.
        last: The file that is sent last.

    Returns:
        A function that waits until everything is at the url, and gives the url.

    Raises:
        CheckpointWriteError: Something is there, or nothing can be written there.
    """
    if jax.process_count() > 1:
        fix = "Save to a disk that they share, and copy the checkpoint."
        problem = Problem(url, "several processes cannot save to an object store", fix)
        raise CheckpointWriteError(_HEADLINE, [problem])
    if overwrite or _call(url, lambda store: store.list().result()):
        what = "something is there, or overwrite= is given: nothing is replaced in one step there"
        raise CheckpointWriteError(_HEADLINE, [Problem(url, what, "Save to a new path.")])
    folder = tempfile.TemporaryDirectory(prefix="penzai_shard_")
    try:
        wait = begin(pathlib.Path(folder.name) / "checkpoint")
    except BaseException:
        folder.cleanup()
        raise

    def finish() -> str:
        with folder:
            content = pathlib.Path(wait())
            _call(url, lambda store: _send(store, content, last))
        return url

    return finish


def _send(store: Any, content: pathlib.Path, last: str) -> None:
    def send(path: pathlib.Path) -> None:
        store.write(path.relative_to(content).as_posix(), path.read_bytes()).result()

    try:
        files = [path for path in content.rglob("*") if path.is_file() and path.name != last]
        with ThreadPoolExecutor(_MOST_THREADS) as pool:
            list(pool.map(send, files))
        send(content / last)
    except BaseException:
        # The path is free again for another attempt.
        with contextlib.suppress(Exception):
            store.delete_range(require("tensorstore", "checkpoint").KvStore.KeyRange()).result()
        raise


def _call(
    url: str,
    function: Callable[[Any], Any],
    error: type[ShardingError] = CheckpointWriteError,
) -> Any:
    ts = require("tensorstore", "checkpoint")
    # Without a limit it tries for many minutes where there is no such bucket or no permission.
    retries = {"max_retries": 8, "max_delay": "8s"}
    context = ts.Context({"gcs_request_retries": retries, "s3_request_retries": retries})
    try:
        return function(ts.KvStore.open(f"{url.rstrip('/')}/", context=context).result())
    except Exception as reason:  # TensorStore raises whatever its drivers raise.
        what = f"the object store refuses it: {reason!s:.{_MOST_CHARACTERS}}"
        problem = Problem(url, what, "Correct the url, or give permission there.")
        raise error("no checkpoint there:", [problem]) from reason
