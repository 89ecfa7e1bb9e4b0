"""The same run over one, two and four processes: losses, checkpoints, and a job that is killed."""

import json
import os
import pathlib
import signal
import subprocess
import sys

import pytest

from tests.processes import jobs
from tests.processes.training_programs import LAYOUTS, SAVED_AT, STEPS, train

# Every process costs seconds, and this layout has the collectives of the others.
OF_FOUR = ["two dimensions"]


def exactly(losses):
    return [float.fromhex(loss) for loss in losses]


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """By number of processes what each of them saw; two of them have saved what all restore."""
    folder = str(tmp_path_factory.mktemp("saved"))
    found = {
        count: jobs.run("training_programs.train", [folder, of, count == 2], processes=count)
        for count, of in ((2, list(LAYOUTS)), (4, OF_FOUR))
    }
    return found | {1: [train(folder, LAYOUTS, saves=False)]}


def test_all_processes_see_all_devices_and_the_same_losses(runs):
    for count, found in runs.items():
        assert all(each["devices"] == [8, 8 // count] for each in found)
        assert all(each == found[0] for each in found)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_losses_are_those_of_one_process_with_the_same_devices(runs, layout):
    alone = exactly(runs[1][0][layout]["losses"])
    assert len(alone) == STEPS
    assert alone[-1] < alone[0]
    for count in (2, 4) if layout in OF_FOUR else (2,):
        # Sums over devices of several processes may be taken in another order.
        assert exactly(runs[count][0][layout]["losses"]) == pytest.approx(alone, rel=1e-6)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_what_two_processes_saved_is_restored_by_one_and_by_four(runs, layout):
    resumed = exactly(runs[2][0][layout]["losses"][SAVED_AT:])
    assert exactly(runs[2][0][layout]["resumed"]) == resumed
    for count in (1, 4) if layout in OF_FOUR else (1,):
        assert exactly(runs[count][0][layout]["resumed"]) == pytest.approx(resumed, rel=1e-6)


def test_a_job_that_was_killed_goes_on_from_its_last_checkpoint_with_the_same_losses(tmp_path):
    results = tmp_path / "results.json"
    program = pathlib.Path(__file__).with_name("training_programs.py")
    root = program.parent.parent.parent
    command = [sys.executable, "-m", "penzai_shard", "run", "--processes", "2"]
    command += ["--simulate-devices", "8", str(program), str(tmp_path), str(results)]

    def run(*killed_at):
        return subprocess.run(
            [*command, *killed_at],
            cwd=root,
            env={**os.environ, "PYTHONPATH": str(root)},
            capture_output=True,
            text=True,
            check=False,
            timeout=200,
        )

    killed = run("5")
    assert killed.returncode == 128 + signal.SIGKILL, killed.stderr
    assert "process 0 of 2 was ended by SIGKILL. Ending the others." in killed.stderr
    assert (tmp_path / "run" / "step_00000002").exists()
    assert not results.exists()
    assert run().returncode == 0
    resumed, undisturbed = json.loads(results.read_text())
    # The checkpoint after step 4 may not have been complete.
    assert list(resumed) in (["5", "6", "7", "8"], ["3", "4", "5", "6", "7", "8"])
    assert resumed == {step: undisturbed[step] for step in resumed}
