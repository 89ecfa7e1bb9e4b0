"""Jobs that end badly, and those of one process; ``test_two_processes`` ends well.

This file is the test, and the program of two processes of which the second one fails.
"""

import os
import pathlib
import signal
import sys
import threading

import jax
import numpy as np
import pytest

from penzai_shard.checkpoints.manager import CheckpointManager
from penzai_shard.errors import ShardingError
from penzai_shard.jax_internals import messages
from penzai_shard.processes.agreement import gather
from penzai_shard.processes.job import ENDED_BY_ANOTHER, several_processes
from tests.processes.launching import run_jobs

WRONG_ARGUMENTS = [
    ("127.0.0.1:1", 2, 2),
    ("127.0.0.1:1", 2, -1),
    ("127.0.0.1:1", None, 0),
    ("127.0.0.1", 2, 0),
    (None, 2, 0),
]
STATE = {"step": 1, "w": np.arange(10_000.0, dtype="float32")}


def main(me, address, folder, ending):
    if ending == "arguments":
        for arguments in [*WRONG_ARGUMENTS, (address, 2 + me, me)]:
            with pytest.raises(ShardingError) as caught, several_processes(*arguments):
                pass
            assert caught.value.problems[0].fix
        return
    with several_processes(address, 2, me, heartbeat_seconds=3):
        # It is being written when the job ends.
        CheckpointManager(folder).save(1, STATE)
        assert gather("meeting", me) == [0, 1]
        if me == 1 and ending == "error":
            raise KeyError("mine")
        if me == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        threading.Event().wait(100)


@pytest.fixture(scope="module")
def ends(tmp_path_factory):
    """By ending the folder of a job, and how its processes ended."""
    folders = {ending: tmp_path_factory.mktemp(ending) for ending in ("error", "kill", "arguments")}
    jobs = run_jobs(__file__, [[folder, ending] for ending, folder in folders.items()])
    return {ending: (folders[ending], *job) for ending, job in zip(folders, jobs, strict=True)}


def go_on(folder):
    """The next run finds whole checkpoints, and saves."""
    with CheckpointManager(folder) as manager:
        assert manager.steps() in ([], [1])
        manager.save(2, {**STATE, "step": 2})
    np.testing.assert_array_equal(manager.restore(STATE)["w"], STATE["w"])
    assert {path.name for path in folder.iterdir()} <= {"step_00000001", "step_00000002"}


def test_an_error_in_one_process_ends_both(ends):
    folder, (status, _, errors), (own, _, own_errors) = ends["error"]
    assert (status, own) == (ENDED_BY_ANOTHER, 1)
    assert "process 1 of 2 failed: KeyError: 'mine'" in errors
    assert own_errors.endswith("KeyError: 'mine'\n")
    go_on(folder)


def test_a_killed_process_ends_both(ends):
    folder, (status, _, errors), (own, *_) = ends["kill"]
    assert own == -signal.SIGKILL
    # JAX ends the other one, and says whom it misses.
    assert status == -signal.SIGABRT
    assert "\n1\n" in errors or "task:1" in errors
    go_on(folder)


def test_wrong_arguments_and_other_counts_of_processes_are_refused(ends):
    assert [status for status, *_ in ends["arguments"][1:]] == [0, 0]


def test_one_process_goes_on_as_it_is(capsys):
    for arguments in ((), (None, 1)):
        with several_processes(*arguments):
            assert not jax.distributed.is_initialized()
    assert capsys.readouterr().err.count("the only process") == 1


def test_a_cluster_is_what_jax_knows_as_one(monkeypatch):
    assert not messages.is_cluster()
    for name in ("JOB_ID", "STEP_NODELIST", "NTASKS", "PROCID", "LOCALID"):
        monkeypatch.setenv(f"SLURM_{name}", "1")
    assert messages.is_cluster()


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2], pathlib.Path(sys.argv[3]), sys.argv[4])
