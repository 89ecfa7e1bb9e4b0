"""The manager of a run's checkpoints: what it keeps, what it offers, and that it loses nothing."""

import errno
import gc
import json
import logging
import math
import os
import pathlib
import shutil
import sys
import threading
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import NamedSharding, PartitionSpec

from penzai_shard.checkpointing import CheckpointManager, manager, restore_train_state
from penzai_shard.checkpointing.retention import Best, Retention
from penzai_shard.errors import (
    CheckpointDamagedError,
    CheckpointExistsError,
    CheckpointNotFoundError,
    CheckpointWriteError,
    RuleTypeError,
)
from penzai_shard.library_apis import orbax_api
from tests.checkpointing.disk import Disk
from tests.processes.jobs import run_script

ROOT = pathlib.Path(__file__).parent.parent.parent


def state(value=0.0):
    return {"w": np.full(3, value, np.float32)}


def value_of(restored):
    (value,) = np.unique(np.asarray(restored["w"]))
    return float(value)


def replicated(mesh):
    return {"w": NamedSharding(mesh, PartitionSpec())}


@pytest.fixture
def where(wide):
    return {"shardings": replicated(wide)}


@pytest.fixture
def disk(monkeypatch):
    return Disk(monkeypatch)


# What is kept


def kept_by_definition(keep_last, keep_every, best, steps, losses):
    """For each step by itself: does any condition keep it?"""

    def is_kept(step):
        if keep_last is None or sum(other > step for other in steps) < keep_last:
            return True
        if keep_every is not None and step % keep_every == 0:
            return True
        if best is None or not math.isfinite(losses.get(step, math.nan)):
            return False
        sign = {"min": 1, "max": -1}[best[1]]
        better = [
            other
            for other in steps
            if math.isfinite(losses.get(other, math.nan))
            and (sign * losses[other], -other) < (sign * losses[step], -step)
        ]
        return len(better) < best[2]

    return {step for step in steps if is_kept(step)}


FIGURES = st.sampled_from([0.0, 1.0, 2.5, -1.0, math.nan, math.inf, -math.inf])


@settings(max_examples=50)
@given(
    keep_last=st.none() | st.integers(1, 4),
    keep_every=st.none() | st.integers(1, 5),
    best=st.none() | st.tuples(st.just("loss"), st.sampled_from(["min", "max"]), st.integers(1, 3)),
    losses=st.dictionaries(st.integers(0, 12), st.none() | FIGURES, min_size=1),
)
def test_a_checkpoint_is_kept_if_any_condition_keeps_it(keep_last, keep_every, best, losses):
    metrics = {step: {} if loss is None else {"loss": loss} for step, loss in losses.items()}
    known = {step: loss for step, loss in losses.items() if loss is not None}
    kept = Retention.of(keep_last, keep_every, best).kept(list(losses), metrics)
    assert kept == kept_by_definition(keep_last, keep_every, best, set(losses), known)
    assert max(losses) in kept


def test_the_newest_the_regular_and_the_best_are_kept_and_nothing_else_is_left(tmp_path, where):
    losses = [5.0, 3.0, math.nan, -math.inf, 4.0, 9.0, 8.0]
    options = {"keep_last": 1, "keep_every": 4, "best": ("loss", "min", 2)}
    with CheckpointManager(tmp_path, **options) as run:
        for step, loss in enumerate(losses, 1):
            run.save(step, state(step), {"loss": jnp.float32(loss), "other": 1})
    assert sorted(os.listdir(tmp_path)) == [f"step_0000000{step}" for step in (2, 4, 5, 7)]
    # Another manager sees the same, by the metrics that the checkpoints have.
    again = CheckpointManager(tmp_path, **options)
    assert (again.steps(), again.latest, again.best) == ([2, 4, 5, 7], 7, 2)
    assert again.metrics(2) == {"loss": 3.0, "other": 1.0}
    assert again.metrics(4) == {"loss": -math.inf, "other": 1.0}
    assert value_of(again.restore(state(), again.best, **where)) == 2
    assert value_of(again.restore(state(), **where)) == 7


def test_what_was_just_saved_is_never_removed_by_that(tmp_path):
    run = CheckpointManager(tmp_path, keep_last=1, best=("loss", "min"), asynchronous=False)
    run.save(1, state(), {"loss": 1.0})
    run.save(2, state(), {"loss": 2.0})
    run.save(1, state(), {"loss": 3.0}, overwrite=True)
    assert run.steps() == [1, 2]
    assert run.metrics(1) == {"loss": 3.0}


# In the background


def test_a_state_may_be_donated_as_soon_as_save_returns(tmp_path, disk, wide, where):
    add = jax.jit(lambda x: jax.tree.map(lambda leaf: leaf + 1, x), donate_argnums=0)
    for name, spec in (("split", PartitionSpec("data")), ("whole", PartitionSpec())):
        array = jax.device_put(jnp.zeros((8, 4)), NamedSharding(wide, spec))
        given = {"w": array, "host": np.zeros(3, np.float32)}
        disk.may_write.clear()
        with CheckpointManager(tmp_path / name) as run:
            run.save(1, given)
            assert run.latest is None
            changed = add({"w": given["w"]})
            given["host"] += 1
            disk.may_write.set()
        wanted = jax.tree.map(lambda _: where["shardings"]["w"], given)
        restored = run.restore({**changed, "host": given["host"]}, shardings=wanted)
        assert not any(np.asarray(leaf).any() for leaf in restored.values())
        assert np.asarray(changed["w"]).all()


def test_a_state_is_not_kept_longer_than_orbax_keeps_it(tmp_path, disk, wide):
    shape = (8, 1237)

    def kept():
        gc.collect()
        return [array for array in jax.live_arrays() if array.shape == shape]

    given = {"w": jax.device_put(jnp.ones(shape), NamedSharding(wide, PartitionSpec("data")))}
    disk.may_write.clear()
    with CheckpointManager(tmp_path) as run:
        run.save(1, given)
        assert len(kept()) == 1
        del given
        # Orbax writes on, and keeps the arrays until it has written them.
        ends = time.monotonic() + 120
        while kept() and time.monotonic() < ends:
            time.sleep(0.01)
        assert not kept()
        assert run.latest is None
        disk.may_write.set()


def test_a_second_save_waits_for_the_first_and_both_are_there(tmp_path, disk, caplog, monkeypatch):
    monkeypatch.setattr(manager, "_SECONDS_WORTH_SAYING", 0.0)
    run = CheckpointManager(tmp_path)
    disk.may_write.clear()
    first = run.save(1, state())
    second = threading.Thread(target=run.save, args=(2, state()))
    second.start()
    second.join(0.3)
    assert second.is_alive()
    assert run.steps() == []
    with caplog.at_level(logging.WARNING):
        disk.may_write.set()
        second.join()
        run.close()
    assert run.steps() == [1, 2]
    assert f"until {first} was written. Save less often" in caplog.text


def test_a_failure_in_the_background_is_raised_by_whatever_comes_next(tmp_path, disk, where):
    run = CheckpointManager(tmp_path)

    def fail():
        disk.fails_once("step_00000001")
        return run.save(1, state())

    message = rf"cannot save to {tmp_path}/step_00000001: the disk is full\. The arrays take 12 "
    fail()
    with pytest.raises(CheckpointWriteError, match=message) as caught:
        run.save(2, state())
    assert caught.value.__notes__ == ["So step 2 was not saved."]
    for act in (run.wait, lambda: run.restore(state(), **where)):
        fail()
        with pytest.raises(CheckpointWriteError, match=message):
            act()
    fail()
    with pytest.raises(CheckpointWriteError, match=message):
        run.close()
    run.close()
    with pytest.raises(RuleTypeError, match=rf"Manager of {tmp_path} is closed\. Make another"):
        run.save(3, state())
    assert os.listdir(tmp_path) == []
    with pytest.raises(CheckpointWriteError, match=message), CheckpointManager(tmp_path) as run:
        fail()
    mine = KeyError("mine")
    with pytest.raises(KeyError) as caught, CheckpointManager(tmp_path) as run:
        raise fail() and mine
    assert caught.value.__notes__[0].startswith(f"Besides, cannot save to {tmp_path}/step_00000001")
    assert not [t for t in threading.enumerate() if t.name.startswith("penzai-shard")]


AT_EXIT = """
import sys
import numpy as np
from penzai_shard import CheckpointManager
from penzai_shard.library_apis import orbax_api
from tests.checkpointing.disk import Disk
begin = orbax_api.begin_save
def begin_save(*arguments):
    written = begin(*arguments)
    def wait():
        written()
        raise OSError(28, "full")
    return wait
CheckpointManager(sys.argv[1]).save(1, {"w": np.arange(1_000_000, dtype=np.int32)})
orbax_api.begin_save = begin_save
CheckpointManager(sys.argv[2]).save(1, {"w": np.arange(1_000_000, dtype=np.int32)})
print("end of the script")
"""


def test_a_program_that_ends_finishes_its_saves_and_reports_those_that_failed(tmp_path, where):
    done = run_script(AT_EXIT, tmp_path / "good", tmp_path / "bad")
    assert done.returncode == 0
    assert done.stdout == "end of the script\n"
    *others, last = done.stderr.splitlines()
    assert last.startswith(f"penzai_shard: cannot save to {tmp_path}/bad/step_00000001: ")
    assert last.endswith("or use it in a with statement.")
    assert CheckpointManager(tmp_path / "bad").latest is None
    run = CheckpointManager(tmp_path / "good")
    if sys.version_info < (3, 12) or not others:
        assert not others
        assert "the disk is full. The arrays take 4,000,000 bytes" in last
        restored = run.restore({"w": np.zeros(1_000_000, np.int32)}, **where)
        assert np.array_equal(restored["w"], np.arange(1_000_000))
    else:
        # Python started no thread any more for what was left to do.
        assert run.latest is None
        assert len(others) == 1
        assert others[0].startswith(f"penzai_shard: cannot save to {run.path}/step_00000001: ")


def test_whenever_a_process_is_killed_only_whole_checkpoints_are_left(tmp_path):
    done = run_script(pathlib.Path(__file__).with_name("killed_manager.py"), tmp_path, 2)
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout)
    assert (found["killed"], found["problems"], found["left"]) == (2, [], [])
    assert found["saves"] > 1


# What is offered


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A folder with two checkpoints."""
    folder = tmp_path_factory.mktemp("saved") / "run"
    with CheckpointManager(folder) as run:
        run.save(3, state(3))
        run.save(7, state(7))
    return folder


@pytest.fixture
def run(saved, tmp_path):
    """A manager of a copy of it."""
    return CheckpointManager(shutil.copytree(saved, tmp_path / "run"))


def test_a_folder_without_checkpoints_has_none(tmp_path):
    run = CheckpointManager(tmp_path / "new", best=("loss", "min"))
    assert (run.steps(), run.latest, run.best) == ([], None, None)
    with pytest.raises(CheckpointNotFoundError, match=r"no checkpoint in .*/new\. Begin a run: sa"):
        run.restore(state())
    assert os.listdir(tmp_path) == []


def test_what_is_not_whole_is_not_offered(run, where):
    folder = pathlib.Path(run.path)
    (folder / "step_00000009").mkdir()
    (folder / "step_00000007").rename(folder / "step_00000008.penzai-shard-removing")
    (folder / "step_00000010").write_text("a file")
    (folder / ".step_00000011.penzai-shard-saving" / "writing").mkdir(parents=True)
    (folder / "other").mkdir()
    assert (run.steps(), run.latest) == ([3], 3)
    assert value_of(run.restore(state(), **where)) == 3
    # The next save removes what was left of a removal.
    run.save(12, state())
    run.wait()
    names = set(os.listdir(folder))
    assert names == {"step_00000003", "step_00000009", "step_00000010", "step_00000012", "other"}


def test_a_checkpoint_set_aside_by_a_replacement_that_was_killed_is_offered(run, where):
    aside = pathlib.Path(run.path) / ".step_00000007.penzai-shard-saving"
    aside.mkdir()
    (pathlib.Path(run.path) / "step_00000007").rename(aside / "old")
    assert run.latest == 7
    assert value_of(run.restore(state(), **where)) == 7


def test_a_damaged_one_is_refused_and_the_others_are_named(run, where):
    (pathlib.Path(run.path) / "step_00000007" / orbax_api.METADATA_FILE).write_text("{}")
    with pytest.raises(CheckpointDamagedError, match="_CHECKPOINT_METADATA") as caught:
        run.restore(state(), **where)
    assert caught.value.__notes__ == [f"{run.path} also has step 3: restore(state, step=3)."]
    assert value_of(run.restore(state(), step=3, **where)) == 3
    with pytest.raises(CheckpointDamagedError, match=r"the metrics in .*7 cannot be read: _CHECK"):
        run.metrics(7)


def test_a_removal_that_fails_is_an_error_and_what_was_saved_is_whole(run, monkeypatch, where):
    remove = shutil.rmtree

    def refuse(path, ignore_errors=False):
        if str(path).endswith("removing") and not ignore_errors:
            raise PermissionError(errno.EACCES, "Permission denied")
        remove(path, ignore_errors)

    with monkeypatch.context() as patch:
        patch.setattr(shutil, "rmtree", refuse)
        run.save(8, state(8))
        with pytest.raises(CheckpointWriteError, match=r"cannot remove .*3, which is not kept any"):
            run.wait()
    assert value_of(run.restore(state(), **where)) == 8
    assert run.steps() == [7, 8]


# Mistakes


def test_a_step_that_exists_or_is_older_is_refused(run, where):
    with pytest.raises(CheckpointExistsError, match=r"step_00000007: it exists\. Pass overwrite="):
        run.save(7, state())
    with pytest.raises(CheckpointExistsError, match=r"save step 5: .*/run has step 7, which is ne"):
        run.save(5, state())
    run.save(7, state(70), overwrite=True)
    assert value_of(run.restore(state(), **where)) == 70
    assert run.steps() == [3, 7]


def test_a_checkpoint_is_not_a_folder_of_a_run(run):
    with pytest.raises(CheckpointExistsError, match=r"is a checkpoint\. Give the folder that hol"):
        CheckpointManager(run.checkpoint(7)).save(1, state())
    (pathlib.Path(run.path) / "file").write_text("")
    with pytest.raises(CheckpointWriteError, match=r"cannot write checkpoints to .*Give another"):
        CheckpointManager(pathlib.Path(run.path) / "file" / "x").save(1, state())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"keep_last": 0}, r"keep_last must be a number of 1 or more, not 0"),
        ({"keep_every": 2.5}, r"keep_every must be a number of 1 or more, not 2\.5"),
        ({"keep_last": True}, r"keep_last must be a number of 1 or more, not True"),
        ({"best": "loss"}, r"best='loss' is not a metric, 'min' or 'max'\. Write for instance"),
        ({"best": ("loss", "least")}, r"is not a metric, 'min' or 'max'\. Write"),
        ({"best": ("loss", "min", 0)}, r"how many of the best to keep, best\[2\], must be"),
    ],
)
def test_what_is_kept_must_be_readable(tmp_path, options, message):
    with pytest.raises(RuleTypeError, match=message):
        CheckpointManager(tmp_path, **options)


def test_arguments_of_calls_must_be_readable(run, mlp, wide):
    for act, message in (
        (lambda: run.save(state(), 1), r"step must be a number of 0 or more, not \{'w'"),
        (lambda: run.save(-1, state()), r"step must be a number of 0 or more, not -1"),
        (lambda: run.save(8, mlp), r"CheckpointManager\.save takes a TrainState, not a Sequen"),
        (lambda: run.save(8, state(), 0.5), r"metrics must be numbers by name, such as \{'loss'"),
        (lambda: run.save(8, state(), {"a": "b"}), r"metrics\['a'\] must be a number, not 'b'"),
        (lambda: run.restore(state(), "best"), r"not 'best'\. Write .*, or step=manager\.best; "),
        (lambda: run.restore(state(), wide), r"step must be a number .*restore\(state, mesh=mesh"),
        (lambda: run.best, r"nothing says what is best: CheckpointManager\(path, best=\('loss'"),
    ):
        with pytest.raises(RuleTypeError, match=message):
            act()
    with pytest.raises(CheckpointNotFoundError, match=r"of step 4 in .*run\. It has step 3, 7\."):
        run.restore(state(), 4)
    best = CheckpointManager(run.path, best=("loss", "min"))
    with pytest.raises(RuleTypeError, match=r"are 'los'\. Did you mean 'los'\? Save without metr"):
        best.save(8, state(), {"los": 1.0})
    assert Best.of(["a", "max", 2]) == Best("a", "max", 2)
    assert run.steps() == [3, 7]


def test_the_folder_of_a_run_is_not_a_checkpoint_and_the_newest_is_named(run, where):
    newest = pathlib.Path(run.path) / "step_00000007"
    newest.rename(newest.with_name("step_100000000"))
    with pytest.raises(
        CheckpointNotFoundError, match=r"run: it is the folder of a run\..* is .*/step_100000000$"
    ):
        restore_train_state(run.path, state(), shardings=where["shardings"])


def test_its_checkpoints_are_ordinary_ones(run, wide):
    restored = restore_train_state(run.checkpoint(7), state(), shardings=replicated(wide))
    assert value_of(restored) == 7
