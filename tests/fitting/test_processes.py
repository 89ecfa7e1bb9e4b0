"""``fit`` in a job of two processes: they stop, save and fail together, and one of them prints."""

import os

import pytest

from penzai_shard import CheckpointManager
from tests.processes import jobs, programs


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """What each of two processes saw, and the folder of their checkpoints."""
    folder = tmp_path_factory.mktemp("shared")
    return jobs.run("training_loop", [str(folder)]), folder


def test_two_processes_have_the_losses_of_one(runs, tmp_path):
    alone = programs.training_loop(str(tmp_path))
    for run in runs[0]:
        assert run["whole"]["losses"] == pytest.approx(alone["whole"]["losses"], rel=1e-6)


def test_ctrl_c_in_one_process_stops_all_after_the_same_step(runs):
    (first, last), folder = runs
    # Asked for in the callback of step 3, with which step 4 was on its way: said with step 5.
    assert first["stopped"]["step"] == last["stopped"]["step"] == 6
    for run in (first, last):
        assert run["stopped"]["failed"].startswith("KeyboardInterrupt: stopped after step 6 of 9")
        assert run["stopped"]["losses"] + run["resumed"]["losses"] == run["whole"]["losses"]
    names = [f"step_0000000{step}.batches-{i}-of-2.json" for step in (6, 9) for i in (0, 1)]
    assert sorted(name for name in os.listdir(folder) if "json" in name) == names


def test_batches_that_fail_in_one_process_end_all_at_the_same_step_and_are_saved(runs):
    (first, last), folder = runs
    assert last["failing"]["failed"] == "OSError: the disk is gone"
    assert (
        first["failing"]["failed"] == "ShardingError: process 1 failed: the disk is gone (OSError)"
    )
    for run in (first, last):
        assert run["failing"]["losses"] == run["whole"]["losses"][:4]
    assert (folder / "other" / "step_00000004").exists()


def test_a_checkpoint_that_one_process_cannot_write_ends_all_and_the_one_before_is_whole(runs):
    (first, last), folder = runs
    path = folder / "full" / "step_00000004"
    for run in (first, last):
        message = f"CheckpointWriteError: cannot save to {path}: the disk is full. The arrays take"
        assert run["full"]["failed"].startswith(message)
        # It was written while two more steps were done, after which it was waited for.
        assert run["full"]["step"] == 6
        assert run["full"]["losses"] + run["emptied"]["losses"][-3:] == run["whole"]["losses"]
        assert run["emptied"]["losses"] == run["whole"]["losses"][2:]
    assert "full/step_00000002, 2 batches used" in first["emptied"]["printed"]
    assert CheckpointManager(folder / "full").steps() == [8, 9]


def test_only_the_first_process_prints(runs):
    (first, last), folder = runs
    assert {run["printed"] for run in last.values()} == {""}
    assert f"resumed: {folder}/step_00000006, 6 batches used" in first["resumed"]["printed"]
