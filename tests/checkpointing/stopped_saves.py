"""Run as a program: stops saves at every step on the file system, and reports what is left.

Usage: stopped_saves.py DIRECTORY [EVERY]

A step is one of Python's audit events about a path in the directory. From the chosen step on every
further one fails with an exception that nothing catches, so that no clean-up runs either, as after
a kill. Prints one line of JSON: for each way of replacing a directory, ``exchange`` or ``renames``,
a list: for each step the value that was saved before (0 for a new path), the step, what the path
then restored to, what it did after the next save, and what is beside it then.
"""

import contextlib
import fcntl
import functools
import gc
import json
import os
import pathlib
import sys

import numpy as np
from penzai import pz

from penzai_shard import make_mesh, restore_params, save_params
from penzai_shard.checkpointing import replacement
from penzai_shard.errors import ShardingError

EVENTS = {"open", "os.mkdir", "os.rename", "os.remove", "os.rmdir", "ctypes.call_function"}


class Stopped(BaseException):
    """Takes the place of a kill."""


class Steps:
    """Counts the steps, and stops at one of them."""

    def __init__(self, directory):
        self.directory, self.count, self.stop = directory, 0, None
        self.locks = []
        take = fcntl.flock
        fcntl.flock = lambda lock, how: (take(lock, how), self.locks.append(lock))
        sys.addaudithook(self.on_event)

    def on_event(self, event, arguments):
        if self.stop is None or event not in EVENTS:
            return
        is_here = any(self.directory in os.fsdecode(a) for a in arguments if _is_path(a))
        if is_here or event.startswith("ctypes"):
            self.count += 1
            if self.count >= self.stop:
                raise Stopped(f"{event}{arguments}")

    def run(self, act, stop):
        """Whether the act was stopped."""
        self.count, self.stop = 0, stop
        try:
            act()
        except Stopped:
            return True
        except ShardingError as error:
            return "Stopped" in str(error) or self.count >= stop
        finally:
            self.stop = None
            # The kernel frees the locks of a process that is killed.
            for lock in self.locks:
                with contextlib.suppress(OSError):
                    os.close(lock)
            self.locks.clear()
        return self.count >= stop


def _is_path(argument):
    return isinstance(argument, str | bytes | os.PathLike)


def main(directory, every=1):
    mesh = make_mesh({"data": 8})
    # Orbax' failures are collected each time: not everything else that this process holds.
    gc.freeze()

    def state(value):
        return {"w": pz.nx.wrap(np.full((8, 4), value, "float32")).tag("a", "b")}

    def restored(path):
        try:
            array = restore_params(path, state(0), mesh, {"a": "data"})["w"].data_array
        except ShardingError as error:
            return type(error).__name__
        return sorted({float(x) for x in np.asarray(array).flat})

    def save(path, value):
        save_params(path, state(value), overwrite=True)

    def run(path, value, stop):
        assert steps.run(functools.partial(save, path, value + 1), stop)
        first = restored(path)
        save(path, value + 2)
        return value, stop, first, restored(path), sorted(os.listdir(path.parent))

    def stopped_everywhere(folder, is_exchanged):
        path = folder / "params"
        save(path, 1)
        assert not steps.run(functools.partial(save, path, 2), 10**9)
        last = steps.count
        stops = sorted({*range(1, last, every), *range(last - 10, last + 1)})
        found = [run(path, 2 + 2 * count, stop) for count, stop in enumerate(stops)]
        for stop in stops[::2] if is_exchanged else ():
            fresh = folder / f"{stop}" / "params"
            fresh.parent.mkdir()
            found.append(run(fresh, 0, min(stop, last - 12)))
        return found

    steps = Steps(str(directory))
    found = {"exchange": stopped_everywhere(pathlib.Path(directory) / "exchange", True)}
    replacement._exchanged = lambda first, second: False
    found["renames"] = stopped_everywhere(pathlib.Path(directory) / "renames", False)
    print(json.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1], *map(int, sys.argv[2:]))
