"""The same run over one, two and four processes: losses, checkpoints, and a job that is killed."""

import signal

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


@pytest.mark.long
def test_a_job_that_was_killed_goes_on_from_its_last_checkpoint_with_the_same_losses(tmp_path):
    folder = str(tmp_path / "run")
    with jobs.Job("training_programs.fitted", [folder, 5], 2, 8, tmp_path, begun_by="slurm") as job:
        assert job.wait() == [-signal.SIGKILL, 75], job.printed(1)
    assert (tmp_path / "run" / "step_00000002").exists()
    resumed, undisturbed = jobs.run(
        "training_programs.resumed_and_undisturbed", [str(tmp_path / "whole"), folder]
    )[0]
    # The checkpoint after step 4 may not have been complete.
    assert list(resumed) in (["5", "6", "7", "8"], ["3", "4", "5", "6", "7", "8"])
    assert resumed == {step: undisturbed[step] for step in resumed}
