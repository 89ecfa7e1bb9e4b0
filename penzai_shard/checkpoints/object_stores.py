"""Keeps checkpoints in object stores, by url: each is a new one, written once.

An object store has no rename, so that nothing in it can be replaced in one step. A checkpoint is
written to a local disk, and its files are sent: the marker last, which says that it is whole.
TensorStore sends and reads them: ``gs://bucket/path``, ``s3://bucket/path``, ``file:///path``.
"""

import contextlib
import os
import pathlib
import shutil
import tempfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax

from penzai_shard.errors import CheckpointNotFoundError, CheckpointWriteError, Problem, require

_MOST_THREADS = 8
_MOST_CHARACTERS = 300


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
    try:
        found = _open(url).read(name).result()
    except Exception as error:  # TensorStore raises whatever its drivers raise.
        problem = Problem(url, f"it cannot be read: {error!s:.{_MOST_CHARACTERS}}", "Correct it.")
        raise CheckpointNotFoundError("there is no checkpoint:", [problem]) from error
    return bytes(found.value) if found.state == "value" else None


def _open(url: str) -> Any:
    ts = require("tensorstore", "checkpoint")
    # Without a limit it tries for many minutes where there is no such bucket or no permission.
    retries = {"max_retries": 8, "max_delay": "8s"}
    context = ts.Context({"gcs_request_retries": retries, "s3_request_retries": retries})
    return ts.KvStore.open(f"{url.rstrip('/')}/", context=context).result()


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
    problems = []
    if overwrite:
        fix = "Save to a new path, without overwrite=True."
        problems.append(Problem(url, "an object store replaces nothing in one step", fix))
    if jax.process_count() > 1:
        fix = "Save to a disk that they share, and copy the checkpoint."
        problems.append(Problem(url, "several processes cannot save to an object store", fix))
    if not problems and _call(url, lambda store: store.list().result()):
        problems.append(Problem(url, "something is there", "Save to a new path."))
    if problems:
        raise CheckpointWriteError("cannot save:", problems)

    folder = pathlib.Path(tempfile.mkdtemp(prefix="penzai_shard_"))
    try:
        wait = begin(folder / "checkpoint")
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise

    def finish() -> str:
        try:
            content = pathlib.Path(wait())
            _call(url, lambda store: _send(store, content, last))
        finally:
            shutil.rmtree(folder, ignore_errors=True)
        return url

    return finish


def _call(url: str, function: Callable[[Any], Any]) -> Any:
    try:
        return function(_open(url))
    except Exception as error:  # TensorStore raises whatever its drivers raise.
        what = f"it cannot be written: {error!s:.{_MOST_CHARACTERS}}"
        problem = Problem(url, what, "Correct the url, or give permission there.")
        raise CheckpointWriteError("cannot save:", [problem]) from error


def _send(store: Any, content: pathlib.Path, last: str) -> None:
    files = [path for path in content.rglob("*") if path.is_file() and path.name != last]

    def send(path: pathlib.Path) -> None:
        store.write(os.fspath(path.relative_to(content)), path.read_bytes()).result()

    try:
        with ThreadPoolExecutor(_MOST_THREADS) as pool:
            list(pool.map(send, files))
        send(content / last)
    except BaseException:
        # The path is free again for another attempt.
        with contextlib.suppress(Exception):
            store.delete_range(require("tensorstore", "checkpoint").KvStore.KeyRange()).result()
        raise
