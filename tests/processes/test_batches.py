"""Batches in jobs of several processes: own parts, the same whole, and what is refused."""

import pytest

from tests.processes import jobs


@pytest.fixture(scope="module")
def found():
    """What each process of a job found; that its own checks passed is part of it."""
    return jobs.run("batches", begun_by="open mpi")


def test_processes_give_their_parts_or_the_same_whole_and_all_are_refused_together(found):
    first, *others = found
    own = {"failed", "first", "failed before", "failed inside", "failed twice", "kept"}
    for name in first.keys() - own:
        assert all(other[name] == first[name] for other in others), name
    assert (
        "x: process 0: int32[batch=2, seq=3]; process 1: int32[batch=4, seq=3]"
        in (first["lengths"])
    )
    assert "Give parts of one length" in first["lengths"]
    assert "names: process 0: y; process" in first["names"]
    assert "the batch: process 0: float32[batch=4, seq=3]; process" in first["dtypes"]
    whole = 3 * len(found)
    if whole % 4:
        assert (
            f"x: logical axis 'batch' ({whole}) does not divide over mesh axis 'data' (4)"
            in (first["indivisible"])
        )
        assert "sums of the parts" in first["indivisible"]
    assert "x, of which each has the whole: process 0: data with checksum" in first["same part"]
    assert "must give the same data" in first["same part"]
    assert "rate, of which each has the whole: process 0: data" in first["numbers"]
    assert "tokens: is on devices of several processes already" in first["placed"]
    assert "name: is a str. Give named arrays and numbers." in first["text"]
    assert "x/y: process 0: int32[8, 3] with checksum" in first["whole"]
    assert "local=True" in first["whole"]
    assert "process 0 in shall we stop" in first["other calls"]
    assert "in shard_batch. Every process must make the same calls" in first["other calls"]


def test_what_one_process_says_or_fails_with_reaches_all(found):
    last = len(found) - 1
    for number, each in enumerate(found):
        assert each["any"] == [False, True]
        start = "" if number == last else f"process {last} failed: "
        assert each["failed"] == f"CheckpointNotFoundError: {start}there is nothing at /x."
        start = "" if number == 0 else "process 0 failed: "
        assert each["first"] == f"CheckpointNotFoundError: {start}there is nothing at /x."


def test_a_process_that_fails_in_a_block_ends_what_others_do_in_it(found):
    last = len(found) - 1
    for number, each in enumerate(found):
        by = ["" if number == who else f"process {who} failed: " for who in (0, last)]
        expected = [f"CheckpointNotFoundError: {start}there is nothing at /x." for start in by]
        assert each["failed before"] == each["failed inside"] == expected
        assert each["failed twice"] == each["kept"] == expected[0]
        assert "process 0 in shall we stop" in each["other calls inside"]
        assert each["afterwards"] is True
