"""What is at a path after a save to it was killed, ran out of disk, or was interrupted."""

import errno
import itertools
import json
import logging
import os
import pathlib
import shutil
import signal
import subprocess
import sys
import threading
import time

import jax.numpy as jnp
import numpy as np
import pytest
from penzai import pz

from penzai_shard.checkpointing import orbax_store, replacement, restore_params, save_params
from penzai_shard.errors import (
    CheckpointDamagedError,
    CheckpointExistsError,
    CheckpointNotFoundError,
    CheckpointWriteError,
)
from penzai_shard.library_apis.orbax_api import orbax, without_noise
from tests.processes.jobs import run_script

HERE = pathlib.Path(__file__).parent
# Orbax' threads would wait for five minutes; how busy the machine is makes less difference.
MUCH_SOONER = 200
# A process that hangs is ended.
SECONDS_PER_PROCESS = 600
ONES = {"w": pz.nx.ones({"a": 8, "b": 2})}
TWOS = {"w": ONES["w"] * 2}


def run_python(*arguments, **options):
    return subprocess.run(
        [sys.executable, *map(str, arguments)],
        capture_output=True,
        text=True,
        cwd=HERE.parent.parent,
        check=False,
        timeout=SECONDS_PER_PROCESS,
        **options,
    )


def restored(path, wide):
    array = restore_params(path, ONES, wide, {"a": "data"})["w"].data_array
    (value,) = np.unique(np.asarray(array))
    return float(value)


DROPS_AN_INTERRUPT = """
import pathlib, random, sys, time
from tests.checkpointing import killed_saves

class Dropped:
    def __del__(self):
        time.sleep(10)

class Place(killed_saves.OnePath):
    def versions(self):
        return []

    def save(self, version, tree):
        Dropped()
        time.sleep(10)

killed_saves.PLACES["a place"] = Place
kill = killed_saves.killed(
    pathlib.Path(sys.argv[1]), "a place", "SIGINT", random.Random(1), killed_saves.Kill("", "")
)
print(kill.problems)
"""


def test_an_interrupt_that_python_drops_is_sent_again(tmp_path):
    done = run_script(DROPS_AN_INTERRUPT, tmp_path)
    assert done.stdout == "[]\n", done.stdout + done.stderr[-2000:]


@pytest.fixture(scope="module")
def stopped_saves(tmp_path_factory):
    """What saves left that were stopped, for both ways of replacing a directory."""
    done = run_script(HERE / "stopped_saves.py", tmp_path_factory.mktemp("stopped"), 20)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("mode", ["exchange", "renames"])
def test_a_save_stopped_at_any_step_leaves_the_old_or_the_new_checkpoint(stopped_saves, mode):
    seen = []
    for value, stop, first, second, beside in stopped_saves[mode]:
        old, new = [value] if value else "CheckpointNotFoundError", [value + 1]
        assert first in (old, new), (value, stop, first)
        seen.append((value > 0, first == new))
        # The next save works, and clears what the stopped one left.
        assert second == [value + 2], (value, stop)
        assert not [name for name in beside if name.startswith(".")], (value, stop, beside)
    assert {(True, False), (True, True)} <= set(seen)
    assert len(seen) >= 12


def test_a_killed_process_leaves_the_old_or_the_new_checkpoint():
    # One kill of each kind; the script alone does 110. Of a manager: see test_manager.
    options = ("--kills", 6, "--manager-kills", 0, "--seed", 7)
    done = run_script(HERE / "killed_saves.py", *options)
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
    assert "6 kills, 0 wrong" in done.stdout


SAVE_MUCH = """
import sys
import numpy as np
from penzai import pz
from penzai_shard import save_params
numbers = np.random.default_rng(0).normal(size=(8, 1_000_000)).astype("float32")
values = {"w": pz.nx.wrap(numbers).tag("a", "b")}
"""
# An interrupt comes before the old checkpoint is replaced, however late it is. The wait ends, since
# one that comes in a callback of the garbage collector is lost.
REPLACE_LATE = """
import time
from penzai_shard.checkpointing.replacement import Replacement
commit = Replacement.commit
Replacement.commit = lambda self: (time.sleep(60), commit(self))
print(1, flush=True)
save_params(sys.argv[1], values, overwrite=True)
"""
FAIL_TWICE = f"""{SAVE_MUCH}
import resource
import signal
try:
    save_params(sys.argv[1], values)
except ValueError as error:
    print(error)
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
save_params(sys.argv[2], values, overwrite=True)
"""


@pytest.fixture(scope="module")
def failed_twice(tmp_path_factory):
    """A process to which a path is refused, and whose disk is full then; and what it took."""
    directory = tmp_path_factory.mktemp("failed")
    path = save_params(directory / "runs" / "params", ONES)
    (directory / "file").write_text("text")
    start = time.monotonic()
    done = run_python("-c", FAIL_TWICE, directory / "file" / "params", path)
    return done, time.monotonic() - start, path


def test_a_full_disk_is_one_error_and_keeps_what_was_there(failed_twice, wide):
    done, seconds, path = failed_twice
    assert seconds < MUCH_SOONER
    assert done.returncode == 1
    # One traceback, and nothing else; Python's releases mark more or fewer places in it.
    begins, *frames, error = done.stderr.splitlines()
    assert begins == "Traceback (most recent call last):"
    assert [line for line in frames if not line.startswith("  ")] == []
    assert sum(line.startswith("  File ") for line in frames) < 12
    assert error.startswith(
        f"penzai_shard.errors.CheckpointWriteError: cannot save to {path}: the disk is full. The "
        "arrays take 32,000,000 bytes, and "
    )
    assert error.endswith("choose another disk. What is at the path stays as it was.")
    assert os.listdir(os.path.dirname(path)) == ["params"]
    assert restored(path, wide) == 1
    save_params(path, TWOS, overwrite=True)
    assert restored(path, wide) == 2


def test_the_process_goes_on_after_a_refused_path_and_ends_soon(failed_twice):
    done, seconds, _ = failed_twice
    assert seconds < MUCH_SOONER
    assert done.stdout.splitlines()[-1].endswith("Choose another path.")
    assert "Choose another path" not in done.stderr


def test_a_process_ends_soon_after_an_interrupt(tmp_path, wide):
    path = save_params(tmp_path / "params", ONES)
    with subprocess.Popen(
        [sys.executable, "-c", SAVE_MUCH + REPLACE_LATE, path],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        process.stdout.readline()
        # Until the save has begun to write.
        staging = replacement.staging_of(pathlib.Path(path))
        while not list(staging.glob("*/*/state")) and process.poll() is None:
            time.sleep(0.001)
        start = time.monotonic()
        process.send_signal(signal.SIGINT)
        errors = process.stderr.read()
    assert time.monotonic() - start < MUCH_SOONER
    if process.returncode:
        # Python warns at its end of coroutines that the interrupt left, depending on the moment.
        lines = [line for line in errors.splitlines() if line and "never awaited" not in line]
        assert lines[-1] == "KeyboardInterrupt"
        assert errors.count("Traceback") == 1 + errors.count("Exception ignored in")
        assert restored(path, wide) == 1
    assert os.listdir(tmp_path) == ["params"]


def test_a_thread_that_is_being_started_as_a_save_fails_is_waited_for():
    goes_on = threading.Event()

    class Hesitating(threading.Thread):
        def _bootstrap(self):
            goes_on.wait()
            super()._bootstrap()

    before = threading.enumerate()
    hesitating = Hesitating(target=time.sleep, args=(0.05,))
    threading.Thread(target=hesitating.start, daemon=True).start()
    while hesitating not in threading.enumerate():
        time.sleep(0.001)
    release = threading.Timer(0.05, goes_on.set)
    release.daemon = True
    release.start()
    orbax_store._wait_for_new_threads(before)
    assert hesitating.ident is not None
    assert not hesitating.is_alive()


def test_paths_that_cannot_be_written_are_refused_at_once(tmp_path):
    (tmp_path / "file").write_text("text")
    with pytest.raises(CheckpointWriteError) as caught:
        save_params(tmp_path / "file" / "params", ONES)
    assert str(caught.value) == (
        f"cannot save to {tmp_path}/file/params: {tmp_path}/file is a file. Choose another path."
    )
    with pytest.raises(CheckpointExistsError, match=r"file: it is a file, and a checkpoint is a"):
        save_params(tmp_path / "file", ONES, overwrite=True)
    with pytest.raises(CheckpointWriteError, match=r"/proc takes no new directories\. Choose"):
        save_params("/proc/params", ONES)
    assert os.listdir(tmp_path) == ["file"]


@pytest.mark.parametrize("name", ["EACCES", "EROFS"])
def test_a_directory_that_may_not_be_written_is_refused(tmp_path, monkeypatch, name):
    code = getattr(errno, name)

    def refuse(*_, **__):
        raise OSError(code, os.strerror(code), "anything")

    monkeypatch.setattr(pathlib.Path, "mkdir", refuse)
    with pytest.raises(CheckpointWriteError) as caught:
        save_params(tmp_path / "params", ONES)
    assert str(caught.value) == (
        f"cannot save to {tmp_path}/params: the directory {tmp_path} may not be written "
        f"({os.strerror(code)}). Choose one that may, or change its permissions."
    )


def test_a_removal_cut_short_is_replaced(tmp_path, wide):
    path = pathlib.Path(save_params(tmp_path / "params", ONES))
    for name in (
        "_CHECKPOINT_METADATA",
        "orbax.checkpoint",
        replacement.SUFFIX,
        "penzai_shard.json",
    ):
        (path / name).unlink(missing_ok=True)
    (path / "state" / "_METADATA").unlink()
    with pytest.raises(CheckpointExistsError, match="Pass overwrite=True"):
        save_params(path, TWOS)
    save_params(path, TWOS, overwrite=True)
    assert restored(path, wide) == 2


@pytest.mark.parametrize("name", ["notes.txt", "d/notes.txt", "state/d/model.bin", ".git/config"])
def test_what_orbax_never_made_is_not_replaced(tmp_path, name):
    file = tmp_path / "mine" / name
    file.parent.mkdir(parents=True)
    file.write_text("text")
    with pytest.raises(CheckpointExistsError, match="it exists and is not a checkpoint, so"):
        save_params(tmp_path / "mine", ONES, overwrite=True)
    assert file.read_text() == "text"


def test_temporary_directories_are_not_proposed(tmp_path, wide):
    path = pathlib.Path(save_params(tmp_path / "params", ONES))
    shutil.copytree(path, tmp_path / "params.orbax-checkpoint-tmp")
    shutil.copytree(path, tmp_path / f".other{replacement.SUFFIX}")
    with pytest.raises(CheckpointNotFoundError) as caught:
        restore_params(tmp_path / "param", ONES, wide, {})
    assert str(caught.value) == (
        f"there is no checkpoint at {tmp_path}/param: the path does not exist. Did you mean {path}?"
    )
    save_params(path, TWOS, overwrite=True)
    assert os.listdir(tmp_path) == ["params"]


def test_a_save_in_progress_is_not_cleared_away(tmp_path):
    busy = replacement.Replacement(str(tmp_path / "busy"))
    busy.begin()
    save_params(tmp_path / "other", ONES)
    assert busy.new.parent.is_dir()
    with pytest.raises(CheckpointExistsError, match="another process is saving there now"):
        save_params(tmp_path / "busy", ONES)
    assert busy.new.parent.is_dir()
    busy.discard()
    assert os.listdir(tmp_path) == ["other"]


def test_a_link_keeps_pointing_at_what_is_replaced(tmp_path, wide):
    path = save_params(tmp_path / "runs" / "params", ONES)
    (tmp_path / "latest").symlink_to(path)
    save_params(tmp_path / "latest", TWOS, overwrite=True)
    assert (tmp_path / "latest").is_symlink()
    assert restored(path, wide) == restored(tmp_path / "latest", wide) == 2


def test_a_failed_commit_keeps_what_was_there(tmp_path, wide, monkeypatch):
    path = save_params(tmp_path / "params", ONES)
    monkeypatch.setattr(replacement, "_exchanged", lambda *_: False)
    rename = os.rename

    def fail_to_put_in_place(source, target):
        if str(target) == path and "new" in str(source):
            raise OSError(5, "Input/output error")
        rename(source, target)

    monkeypatch.setattr(os, "rename", fail_to_put_in_place)
    with pytest.raises(CheckpointWriteError, match=r"Input/output error\. What is at the path"):
        save_params(path, {"w": jnp.zeros(3)}, overwrite=True)
    assert restored(path, wide) == 1
    assert os.listdir(tmp_path) == ["params"]


@pytest.mark.skipif(sys.platform != "linux", reason="the system call of Linux")
def test_two_directories_are_exchanged_in_one_step(tmp_path):
    for name in ("first", "second"):
        (tmp_path / name / name).mkdir(parents=True)
    assert replacement._exchanged(tmp_path / "first", tmp_path / "second")
    assert os.listdir(tmp_path / "first") == ["second"]
    assert os.listdir(tmp_path / "second") == ["first"]
    assert not replacement._exchanged(tmp_path / "first", tmp_path / "missing")


def test_what_was_set_aside_is_still_what_the_path_holds(tmp_path, wide):
    path = pathlib.Path(save_params(tmp_path / "params", ONES))
    # As after a kill between the two renames, where there is no exchange.
    aside = replacement.staging_of(path) / "old"
    aside.parent.mkdir()
    path.rename(aside)
    assert restored(path, wide) == 1
    with pytest.raises(CheckpointExistsError, match=r"it exists\. Pass overwrite=True"):
        save_params(path, TWOS)
    assert restored(path, wide) == 1
    # Another save puts it back.
    save_params(tmp_path / "other", TWOS)
    assert sorted(os.listdir(tmp_path)) == ["other", "params"]
    assert restored(path, wide) == 1


def test_another_save_that_came_first_is_not_replaced_unasked(tmp_path, wide, monkeypatch):
    begin = replacement.Replacement.begin

    def save_first(self):
        monkeypatch.setattr(replacement.Replacement, "begin", begin)
        save_params(tmp_path / "params", TWOS)
        begin(self)

    monkeypatch.setattr(replacement.Replacement, "begin", save_first)
    with pytest.raises(CheckpointExistsError, match=r"it exists\. Pass overwrite=True"):
        save_params(tmp_path / "params", ONES)
    assert restored(tmp_path / "params", wide) == 2
    assert os.listdir(tmp_path) == ["params"]


@pytest.mark.parametrize("times", [1, 100])
def test_a_checkpoint_replaced_while_it_is_read_is_read_again(tmp_path, wide, monkeypatch, times):
    numbers = np.arange(64.0, dtype="float32").reshape(8, 8)
    values = {"w": pz.nx.wrap(numbers).tag("a", "b")}
    path = save_params(tmp_path / "params", values)
    load, count = orbax().load, itertools.count()

    def replace_and_load(*arguments):
        if next(count) < times:
            save_params(path, {"w": values["w"].order_as("b", "a")}, overwrite=True)
        return load(*arguments)

    monkeypatch.setattr(orbax(), "load", replace_and_load)

    def restore():
        return restore_params(path, values, wide, {}, on_axis_mismatch="transpose")

    if times == 1:
        np.testing.assert_array_equal(restore()["w"].data_array, numbers)
        assert next(count) == 2
    else:
        with pytest.raises(CheckpointDamagedError, match=r"was replaced 5 times while it was bei"):
            restore()


def test_only_what_orbax_reports_of_a_failure_is_kept_back(caplog):
    orbax_log = logging.getLogger("absl")
    go, done = threading.Event(), threading.Event()

    def log_meanwhile():
        go.wait()
        orbax_log.error("from a thread of somebody else's")
        done.set()

    other = threading.Thread(target=log_meanwhile)
    other.start()

    def fail():
        go.set()
        done.wait()
        orbax_log.error("of the failure")
        of_it = threading.Thread(target=orbax_log.error, args=("of a thread of it",))
        of_it.start()
        of_it.join()
        raise OSError("reason")

    with pytest.raises(OSError, match="reason"), without_noise():
        fail()
    with without_noise():
        orbax_log.error("of a success")
    other.join()
    assert caplog.messages == ["from a thread of somebody else's", "of a success"]
