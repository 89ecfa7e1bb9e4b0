"""A path has its old or its new checkpoint, whatever stops a save, and while others save there.

So has a run, of which a manager keeps the newest. As a program this file stops saves in 70 ways,
and says what there is after each.
"""

import contextlib
import gc
import os
import pathlib
import resource
import signal
import sys
import threading

import numpy as np

import penzai_shard as pzs
from penzai_shard.arrays.structure import leaves_of
from penzai_shard.checkpoints.replacement import Replacement
from penzai_shard.checkpoints.saving import begin_save
from tests.processes.launching import run_program
from tests.refusals import problem_paths, refused

EVENTS = ("open", "os.mkdir", "os.rename", "os.remove", "os.rmdir", "ctypes")


def draw(value):
    return {"value": np.full(8, value), "w": np.random.default_rng(value).normal(size=10_000)}


def save(folder, value):
    pzs.save_params(folder / "may", draw(value), overwrite=True)


def save_step(folder, value):
    manager = pzs.CheckpointManager(folder, keep_last=1, asynchronous=False)
    manager.save(value, {"step": value, "params": draw(value)}, {"loss": value})


def restore(folder):
    """The number from which the newest checkpoint was made; each of a run must be whole."""
    manager = pzs.CheckpointManager(folder)
    for step in manager.steps():
        assert (read(manager.path_of(step)), manager.metrics(step)) == (step, {"loss": step})
    return manager.latest or read(folder / "may")


def read(path):
    try:
        restored = pzs.restore_params(path, draw(0))
    except pzs.CheckpointNotFoundError:
        return 0
    (value,) = {*np.asarray(restored["value"]).tolist()}
    assert np.array_equal(restored["w"], draw(value)["w"].astype("float32")), value
    return value


def test_save_params_stopped_anywhere_leaves_the_old_or_the_new(tmp_path):
    found = run_program(__file__, tmp_path)[0].split()
    assert len(found) >= 70
    assert {*found} == {"new", "old"}


def test_begin_save_refuses_a_second_saver_and_a_path_that_was_taken_meanwhile(tmp_path):
    finish = begin_save("save", tmp_path / "may", leaves_of(draw(1)), "params")
    path = tmp_path / "may"
    assert problem_paths(pzs.CheckpointWriteError, save, tmp_path, 2) == [str(path)]
    (tmp_path / "may").mkdir()
    (tmp_path / "may" / "notes").touch()
    refused(pzs.CheckpointWriteError, finish)
    assert [*tmp_path.rglob("*")] == [tmp_path / "may", tmp_path / "may" / "notes"]


# The program


class Stopped(BaseException):
    """Takes the place of a kill."""


class Steps:
    """Counts the audit events of Python about a folder, and raises an error at one of them."""

    def __init__(self, folder):
        self.folder, self.count, self.first, self.error = str(folder), 0, 0, Exception
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
        self.count, self.first, self.error = 0, first, error
        yield
        self.first = 0


@contextlib.contextmanager
def fill_disk(limit):
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY,) * 2)


def stop_save(save, folder, value, name, stop):
    threads = {*threading.enumerate()}
    with stop:
        with contextlib.suppress(Stopped, KeyboardInterrupt, pzs.CheckpointWriteError):
            save(folder, value + 1)
        # What Orbax does in threads is stopped too.
        for thread in {*threading.enumerate()} - threads:
            if not thread.name.startswith("asyncio_"):
                threading.Thread.join(thread, 5)
    for one in gc.get_objects():
        if type(one) is Replacement and one._lock is not None:
            one._lock.close()  # As the system does when it kills.
    found = restore(folder)
    print({value: "old", value + 1: "new"}.get(found, name))
    # The next save works, and clears what the stopped one left.
    save(folder, found + 1)
    assert len(os.listdir(folder)) == 1, name
    return found + 1


def main(folder):
    # What there is now is not looked through for each failure.
    gc.freeze()
    steps = Steps(folder)
    for save_one, errors in (
        (save_step, (Stopped,)),
        (save, (Stopped, KeyboardInterrupt, PermissionError)),
    ):
        path = folder / save_one.__name__
        value = stop_save(save_one, path, 0, "not_at_all", steps.stop(Stopped, 10**9))
        # Now there is an old checkpoint to be replaced.
        value = stop_save(save_one, path, value, "not_at_all", steps.stop(Stopped, 10**9))
        last = steps.count
        for error in errors:
            # Most of them at the end, where the old checkpoint is replaced.
            for first in [*range(1, last - 5, 3), *range(last - 5, last + 1)]:
                name = f"{error.__name__}_at_{first}_of_{last}"
                value = stop_save(save_one, path, value, name, steps.stop(error, first))
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    for limit in (0, 1, 3_000, 30_000):
        value = stop_save(save, path, value, f"limit_of_{limit}_bytes", fill_disk(limit))


if __name__ == "__main__":
    main(pathlib.Path(sys.argv[1]))
