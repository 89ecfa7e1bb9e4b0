"""Weights in safetensors files, in a job of two processes."""

import pytest

from tests.processes import jobs


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """What each process found."""
    return jobs.run("weight_programs.weights", [str(tmp_path_factory.mktemp("job"))])


def test_the_first_process_writes_what_none_has_and_each_reads_its_own_parts(found):
    for own in found:
        assert own["spread"]
        assert own["files"] == [
            "model-00001-of-00002.safetensors",
            "model-00002-of-00002.safetensors",
            "model.safetensors.index.json",
        ]
        # Half of the matrix, and all of the bias.
        assert own["read"] == 16 * 24 * 4 // 2 + 24 * 4
        assert own["holds"]
        assert own["replicated"]


def test_what_one_process_finds_is_refused_in_all(found):
    for own in found:
        assert "path: process 0: " in own["other path"]
        for layout in ("damaged", "damaged, replicated"):
            assert own[layout].startswith("CheckpointDamagedError: the numbers in the weights at")
            assert "up: the tensor 'up' in " in own[layout]
            assert "bias: " not in own[layout]
        assert own["gone"].startswith("CheckpointNotFoundError: ")
        assert "there are no safetensors weights at " in own["gone"]
