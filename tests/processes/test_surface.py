"""What else works over processes, and what is refused in all of them by name."""

import numpy as np
import pytest

from tests.processes import jobs


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    return jobs.run("surface", [str(tmp_path_factory.mktemp("saved"))])


def test_trainers_and_steps_take_what_every_process_has_whole(found):
    numbers = np.random.default_rng(0).normal(size=(8, 8)).astype("float32")
    for each in found:
        assert each["losses"] == pytest.approx([np.mean((numbers @ numbers) ** 2)] * 2, rel=1e-5)


def test_an_edit_is_checked_on_arrays_of_several_processes(found):
    assert [each["equivalent"] for each in found] == [[True, False]] * 2


def test_a_state_of_several_processes_is_shown_by_treescope(found):
    for each in found:
        assert each["view"].startswith("TrainState(")
        assert "NamedArray float32(| a:8, b:8)" in each["view"]


def test_what_cannot_work_is_said_in_every_process(found):
    first, last = found
    for name in ("other seeds", "other meshes", "other names", "other values"):
        assert first[name] == last[name], name
    assert "the initialiser got arrays that differ between processes" in first["other seeds"]
    assert (
        "w: is on 8 devices of several processes, and is to go to others" in (first["other meshes"])
    )
    assert "names: process 0: w; process 1: v." in first["other names"]
    assert "w: process 0: float32(a=8, b=8) with checksum" in first["other values"]
    assert first["exists"].startswith("CheckpointExistsError: cannot save to")
    assert last["exists"].startswith("CheckpointExistsError: process 0 failed: cannot save to")
    start = "CheckpointNotFoundError: there is no checkpoint at"
    assert first["nothing there"].startswith(start)
    assert last["nothing there"].startswith(
        "CheckpointNotFoundError: process 0 failed: there is no"
    )
    for each in found:
        assert "input x: has device" in each["other input"]
