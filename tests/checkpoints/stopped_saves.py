"""Run as a program: stops saves in 60 ways, and says what each left, in a line of JSON.

Usage: stopped_saves.py FOLDER. A line says how a save was stopped, the value that the path had
before, the value to which it then restored, and the files there after one more save.
"""

import contextlib
import fcntl
import gc
import json
import os
import pathlib
import random
import resource
import signal
import sys
import threading
import time

import numpy as np
import orbax.checkpoint.experimental.v1  # noqa: F401 (forks need not import it)

import penzai_shard as pzs
from penzai_shard.checkpoints import replacement

EVENTS = ("open", "os.mkdir", "os.rename", "os.remove", "os.rmdir", "ctypes")


def draw(value):
    return {"value": np.full(8, value), "w": np.random.default_rng(value).normal(size=10_000)}


def save(path, value):
    pzs.save_params(path, draw(value), overwrite=True)


def restore(path):
    try:
        restored = pzs.restore_params(path, draw(0))
    except pzs.CheckpointNotFoundError:
        return 0
    (value,) = {*np.asarray(restored["value"]).tolist()}
    assert np.array_equal(restored["w"], draw(value)["w"].astype("float32")), value
    return value


def say(*what):
    print(json.dumps(what), flush=True)


# By signals


def save_for_ever(path, pipe):
    value = restore(path)
    while True:
        os.write(pipe, f"{value}\n".encode())
        value += 1
        save(path, value)


def kill_saves(path):
    """Each process is a fork of this one, which has begun nothing; it says what is there first."""
    random.seed(0)
    before = None
    for number in [signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGKILL]:
        read, write = os.pipe()
        process = os.fork()
        if not process:
            try:
                save_for_ever(path, write)
            finally:
                os._exit(1)
        os.close(write)
        with os.fdopen(read) as lines:
            found, value = int(next(lines)), int(next(lines))
            if before is not None:
                say(*before, found, None)
            time.sleep(random.uniform(0, 0.2))
            # Python drops an interrupt that comes in a callback of its garbage collector.
            while os.waitpid(process, os.WNOHANG) == (0, 0):
                os.kill(process, number)
                time.sleep(0.1)
            before = f"signal {number}", [value, *map(int, lines)][-1]


# In this process


class Stopped(BaseException):
    """Takes the place of a kill."""


class Steps:
    """Counts the audit events of Python about a folder, and raises an error at one of them."""

    def __init__(self, folder):
        self.folder, self.count, self.first, self.error = str(folder), 0, 0, Exception
        self.locks, self.take = [], fcntl.flock
        fcntl.flock = lambda lock, how: (self.take(lock, how), self.locks.append(lock))
        sys.addaudithook(self.note)

    def note(self, event, arguments):
        if not self.first or not event.startswith(EVENTS):
            return
        paths = [os.fsdecode(a) for a in arguments if isinstance(a, str | bytes | os.PathLike)]
        if event.startswith("ctypes") or any(self.folder in path for path in paths):
            self.count += 1
            # A kill goes on, so that nothing is cleaned up; other errors come once.
            is_kill = self.error is Stopped and self.count > self.first
            is_here = threading.current_thread() is threading.main_thread()
            if is_kill or (self.count == self.first and is_here):
                raise self.error("stopped")

    @contextlib.contextmanager
    def stop(self, error, first):
        self.locks, self.count, self.first, self.error = [], 0, first, error
        yield
        self.first = 0
        # The system frees the locks of a process that is killed.
        for lock in self.locks:
            if not lock.closed:
                self.take(lock, fcntl.LOCK_UN)


@contextlib.contextmanager
def fill_disk(limit):
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY,) * 2)


def stop_save(path, value, name, stop):
    with stop, contextlib.suppress(Stopped, KeyboardInterrupt, pzs.CheckpointWriteError):
        save(path, value + 1)
    found = restore(path)
    save(path, found + 1)
    say(name, value, found, os.listdir(path.parent))
    return found + 1


def main(folder):
    for name in ("killed", "stopped"):
        (folder / name).mkdir()
    kill_saves(folder / "killed" / "may")

    # What there is now is not looked through for each failure.
    gc.freeze()
    steps, exchange, path = Steps(folder), replacement._exchange, folder / "stopped" / "may"
    value = stop_save(path, 0, "not at all", steps.stop(Stopped, 10**9))
    last = steps.count
    for exchanges in (True, False):
        replacement._exchange = exchange if exchanges else lambda first, second: False
        for error in (Stopped, KeyboardInterrupt, PermissionError):
            # Most of them at the end, where the old checkpoint is replaced.
            for first in [*range(1, last - 5, 8), *range(last - 4, last + 1)]:
                name = f"{error.__name__} at {first} of {last}"
                value = stop_save(path, value, name, steps.stop(error, first))
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    for limit in (0, 1, 3_000, 30_000):
        value = stop_save(path, value, f"a limit of {limit} bytes", fill_disk(limit))


if __name__ == "__main__":
    main(pathlib.Path(sys.argv[1]))
