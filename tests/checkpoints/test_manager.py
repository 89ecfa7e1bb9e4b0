"""The checkpoints of a run: which are kept, which are offered, and that none is lost.

Run as a program it ends while it saves. ``test_interrupted_saves`` stops saves at any moment.
"""

import errno
import itertools
import math
import os
import pathlib
import signal
import sys
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import penzai_shard as pzs
from penzai_shard.checkpoints.manager import CheckpointManager, choose_kept
from penzai_shard.checkpoints.replacement import Replacement
from tests.processes.launching import run_program
from tests.refusals import problem_paths, problems_of, refused

NUMBERS = np.linspace(0, 1, 20_000, dtype="float32")
BEST = ("loss", "min")


def make_state(value=0.0):
    return {"step": np.int32(value), "w": NUMBERS + np.float32(value)}


def read_value(manager, step=None):
    """The number from which a state was made, all of which must be there."""
    restored = manager.restore(make_state(), step)
    (value,) = {*(np.asarray(restored["w"]) - NUMBERS).round(3).tolist()}
    assert int(restored["step"]) == int(value)
    return value


# What is kept


SEEN = {0: -math.inf, 1: 5.0, 2: 1.0, 3: math.nan, 4: 1.0, 5: 3.0, 6: math.inf}


@pytest.mark.parametrize(
    ("keep_last", "keep_every", "best", "kept"),
    [
        (None, 3, ("loss", "min", 1), {*SEEN}),
        (1, None, None, {6}),
        (2, 5, None, {0, 5, 6}),
        # Of equals the newer one; infinite ones and those of no number are never the best.
        (1, None, ("loss", "min", 1), {4, 6}),
        (1, None, ("loss", "max", 2), {1, 5, 6}),
        (1, None, ("other", "max", 3), {6}),
    ],
)
def test_choose_kept(keep_last, keep_every, best, kept):
    metrics = {step: {"loss": loss} for step, loss in SEEN.items()}
    assert choose_kept(metrics, keep_last, keep_every, best) == kept


def test_save_keeps_the_newest_the_regular_and_the_best(tmp_path):
    options = {"keep_last": 1, "keep_every": 4, "best": [*BEST, 2]}
    with CheckpointManager(tmp_path, **options) as manager:
        for step, loss in enumerate([5.0, 3.0, math.nan, -math.inf, 4.0, 9.0, 8.0], 1):
            extra = {"batches": [step, None], "nan": loss}
            metrics = {"loss": jnp.float32(loss), "other": 1}
            state = jax.tree.map(jnp.asarray, make_state(step))
            path = manager.save(state["step"], state, metrics, extra=extra)
    assert path == manager.path_of(7) == str(tmp_path / "step_00000007")
    assert sorted(os.listdir(tmp_path)) == [f"step_0000000{step}" for step in (2, 4, 5, 7)]
    # Another manager sees the same, from what the checkpoints say.
    again = CheckpointManager(tmp_path, **options)
    assert (again.steps(), again.latest, again.best) == ([2, 4, 5, 7], 7, 2)
    assert again.metrics(4) == {"loss": -math.inf, "other": 1}
    assert again.extra(2) == {"batches": [2, None], "nan": 3.0}
    assert (read_value(again), read_value(again, again.best)) == (7, 2)
    assert CheckpointManager(tmp_path).best is None
    # Each is an ordinary checkpoint.
    restored = pzs.restore_train_state(again.path_of(5), make_state())
    assert int(restored["step"]) == 5


def test_save_never_removes_what_it_has_just_saved(tmp_path):
    with CheckpointManager(tmp_path, keep_last=1, best=BEST, asynchronous=False) as manager:
        manager.save(2, make_state(2), {"loss": 1.0})
        manager.save(2, make_state(2.5), {"loss": 3.0}, overwrite=True)
        assert (read_value(manager, 2), manager.metrics(2)) == (2.5, {"loss": 3.0})


# In the background


class Disk:
    """A disk that writes nothing before it may, and raises an error if it has one."""

    def __init__(self, patch):
        self.may_write, self.error, commit = threading.Event(), None, Replacement.commit

        def wait_and_commit(replacement):
            assert self.may_write.wait(60)
            if self.error:
                raise self.error
            commit(replacement)

        patch.setattr(Replacement, "commit", wait_and_commit)


@pytest.fixture
def disk(monkeypatch):
    return Disk(monkeypatch)


def test_save_returns_when_the_state_may_be_donated(tmp_path, disk):
    mesh = pzs.make_mesh({"data": 8})
    halves = jax.NamedSharding(mesh, jax.P("data"))
    state = {"jax": jax.device_put(NUMBERS, halves), "numpy": NUMBERS.copy(), "step": 1}
    change = jax.jit(lambda x: x + 1, donate_argnums=0)
    with CheckpointManager(tmp_path) as manager:
        manager.save(1, state)
        change(state["jax"]).block_until_ready()
        state["numpy"] += 1
        assert manager.latest is None
        saving = [t for t in threading.enumerate() if t.name.startswith("penzai_shard saving")]
        assert len(saving) == 1
        disk.may_write.set()
    saving[0].join(10)
    assert not saving[0].is_alive()
    restored = manager.restore(state)
    for name in ("jax", "numpy"):
        np.testing.assert_array_equal(restored[name], NUMBERS)
    assert restored["jax"].sharding == halves


def test_save_raises_what_went_wrong_before(tmp_path, disk):
    disk.may_write.set()
    manager = CheckpointManager(tmp_path)
    acts = [
        lambda: manager.save(2, make_state(2)),
        lambda: manager.restore(make_state()),
        manager.wait,
        manager.close,
        lambda: manager.__exit__(None, None, None),
    ]
    # The second is as TensorStore has it.
    errors = OSError(errno.ENOSPC, "No space left"), ValueError(f"Failed {'a/path/' * 60}: no room")
    for act, error in zip(acts, itertools.cycle(errors)):
        disk.error = error
        manager.save(1, make_state(1))
        (problem,) = problems_of(pzs.CheckpointWriteError, act)
        assert problem.path == manager.path_of(1)
        assert problem.what.endswith(str(error)[-10:])
        # Only if it is known what helps.
        assert bool(problem.fix) == isinstance(error, OSError)
        assert os.listdir(tmp_path) == []
        # It was raised once.
        manager.wait()


def test_ctrl_c_ends_the_waiting_but_not_the_save(tmp_path, disk):
    manager = CheckpointManager(tmp_path)
    before = signal.signal(signal.SIGALRM, signal.default_int_handler)
    try:
        manager.save(1, make_state(1))
        for _ in range(2):
            signal.setitimer(signal.ITIMER_REAL, 0.05)
            with pytest.raises(KeyboardInterrupt):
                manager.close()
    finally:
        signal.signal(signal.SIGALRM, before)
        disk.may_write.set()
    manager.close()
    assert manager.latest == 1


# What is offered


@pytest.fixture
def run(tmp_path):
    """A manager of a folder with two steps."""
    with CheckpointManager(tmp_path / "run") as manager:
        for step in (3, 7):
            manager.save(step, make_state(step))
    return CheckpointManager(tmp_path / "run", best=BEST)


def test_steps_are_those_of_whole_checkpoints(run):
    folder = pathlib.Path(run.path)
    (folder / "step_00000009").mkdir()
    (folder / "step_00000007").rename(folder / "step_00000008.penzai-shard-removing")
    (folder / "step_00000010").touch()
    (folder / ".step_00000011.penzai-shard-saving" / "writing").mkdir(parents=True)
    assert (run.steps(), run.latest, run.best) == ([3], 3, None)
    run.save(12, make_state(12), {"loss": 1.0})
    run.wait()
    # What killed programs have left is removed, what is somebody else's is not.
    assert sorted(path.name[-2:] for path in folder.iterdir()) == ["03", "09", "10", "12"]
    assert read_value(run) == 12
    # A checkpoint without a manager has no metrics.
    pzs.save_train_state(run.path_of(13), make_state(13))
    assert (run.latest, run.metrics(13), run.extra(13), read_value(run)) == (13, {}, {}, 13)


def test_a_damaged_checkpoint_is_refused_and_kept_from_nothing(run):
    file = pathlib.Path(run.path_of(7)) / "_CHECKPOINT_METADATA"
    # All of it is under the checksum.
    file.write_text(file.read_text().replace('\\"metrics\\": {}', '\\"metrics\\": {\\"loss\\": 0}'))
    for act in (run.metrics, run.extra, lambda step: run.restore(make_state(), step)):
        refused(pzs.CheckpointDamagedError, act, 7)
    assert (run.best, run.latest, read_value(run, 3)) == (None, 7, 3)
    with run:
        run.save(8, make_state(8), {"loss": 1.0})
    assert (run.steps(), run.best) == ([7, 8], 8)


# Mistakes


def test_save_refuses_earlier_steps_and_metrics_without_that_of_best(run):
    for step, metrics, paths in [
        (8, {"los": 1.0}, ["metrics"]),
        (8, None, ["metrics"]),
        (7, {"loss": 1.0}, [run.path_of(7)]),
        (5, {"loss": 1.0}, [run.path]),
        (5, None, [run.path, "metrics"]),
    ]:
        call = run.save, step, make_state(step), metrics
        assert problem_paths(pzs.CheckpointWriteError, *call) == paths
    run.save(7, make_state(7.5), {"loss": 1.0}, overwrite=True)
    assert (read_value(run), run.steps()) == (7.5, [3, 7])
    # As the fixes say: saves between evaluations do not know the metric.
    run.save(8, make_state(8), {"loss": math.nan, "los": 1.0})
    run.close()
    assert (run.steps(), run.best) == ([7, 8], 7)


def test_restore_names_the_steps_that_are_there(run, tmp_path):
    (problem,) = problems_of(pzs.CheckpointNotFoundError, run.restore, make_state(), 8)
    assert problem.fix == f"Write {run.path_of(7)!r}."
    empty = CheckpointManager(tmp_path / "none")
    assert (empty.steps(), empty.latest) == ([], None)
    (problem,) = problems_of(pzs.CheckpointNotFoundError, empty.restore, make_state())
    assert not (tmp_path / "none").exists()
    assert problem.path == empty.path
    # Not that of another run beside it.
    assert "manager.save(step, state)" in problem.fix
    # Of the run itself the newest one, whatever is beside it.
    pzs.save_train_state(tmp_path / "runs", make_state())
    call = pzs.restore_train_state, run.path, make_state()
    (problem,) = problems_of(pzs.CheckpointNotFoundError, *call)
    assert problem.fix == f"Write {run.path_of(7)!r}."


def test_arguments_that_cannot_be_read(run):
    options = {"best": ("loss", "least"), "keep_last": 0, "keep_every": 2.5}
    paths = problem_paths(pzs.RuleTypeError, CheckpointManager, run.path_of(7), **options)
    assert paths == ["path", *options]
    for step, metrics, extra in [("8", {}, {}), (-1, {}, {}), (8, {"a": "b"}, {}), (8, {}, {1})]:
        refused(pzs.RuleTypeError, run.save, step, make_state(8), metrics, extra=extra)
    assert run.steps() == [3, 7]


# The program


def test_a_program_that_ends_completes_its_saves(tmp_path):
    printed, failed = run_program(__file__, tmp_path)
    # A program that ends completes its saves, and prints those that failed. Python 3.12 and 3.13
    # start no threads then.
    assert printed == "end of the program\n"
    for name in ("good", "bad"):
        is_saved = CheckpointManager(tmp_path / name).latest == 1
        assert is_saved == (str(tmp_path / name) not in failed)
        if name == "bad" or sys.version_info < (3, 12):
            assert is_saved == (name == "good")


def main(folder):
    CheckpointManager(folder / "good").save(1, make_state(1))
    commit = Replacement.commit

    def fail_at_times(replacement):
        if replacement.final.parent.name == "bad":
            raise OSError(28, "No space left on device")
        commit(replacement)

    Replacement.commit = fail_at_times
    CheckpointManager(folder / "bad").save(1, make_state(1))
    print("end of the program")


if __name__ == "__main__":
    main(pathlib.Path(sys.argv[1]))
