"""Checkpoints of several processes: who takes part, who reads and writes what, and who dies."""

import json
import pathlib
import re
import shutil

import jax
import pytest

import penzai_shard as pzs
from tests.processes import checkpoint_programs, jobs

# JAX alone would wait for 100 seconds, as would a process that is to wait for another one. How busy
# the machine is makes less difference.
SOON = 60
DEATHS = (("saving", 1), ("restoring", 0), ("stepping", 1))


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """What two processes of four devices saved, and how many bytes each of them wrote."""
    folder = str(tmp_path_factory.mktemp("saved"))
    # It finds out by itself that it is a job of SLURM.
    return folder, jobs.run("checkpoint_programs.save", [folder], begun_by="slurm")


def test_each_process_writes_its_part_and_replicated_arrays_are_written_once(saved):
    _, written = saved
    sizes = {name: array.nbytes for name, (array, _) in checkpoint_programs.numbers().items()}
    by_process = [written[0][f"ocdbt.process_{number}"] for number in (0, 1)]
    half = sizes["split"] / 2
    # Random numbers are compressed by a few percent.
    assert all(0.85 * half < size < half + sizes["whole"] + 20_000 for size in by_process)
    assert sum(by_process) < sum(sizes.values()) + 20_000


def test_what_two_processes_saved_is_restored_exactly_by_one(saved):
    checkpoint_programs.restore(saved[0])


def test_four_processes_restore_it_exactly_each_its_part_and_all_refuse_what_one_finds_damaged(
    saved,
):
    folder, _ = saved
    damaged = pathlib.Path(shutil.copytree(f"{folder}/exact_params", f"{folder}/damaged"))
    # The largest file that process 1 wrote begins with the rows of "split" that it has.
    file = max(damaged.rglob("ocdbt.process_1/d/*"), key=lambda path: path.stat().st_size)
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)
    found = jobs.run("checkpoint_programs.restore_damaged", [folder], processes=4)
    sizes = {name: array.nbytes for name, (array, _) in checkpoint_programs.numbers().items()}
    rest = sum(sizes.values()) - sizes["split"]
    for read, message in found:
        assert read < sizes["split"] / 4 + rest + 100_000
        assert message.startswith("CheckpointDamagedError: ")
        assert "split: " in message


# What Gloo writes on each connection, in as many pieces, between which others write theirs.
GLOO_PIECES = (
    "[Gloo] Rank ",
    " is connected to ",
    " peer ranks. ",
    "Expected number of connected peer ranks is : ",
)


def lines_without_gloo(printed):
    for piece in GLOO_PIECES:
        printed = printed.replace(piece, "")
    return [line for line in printed.splitlines() if line.strip(" 0123456789")]


def test_what_gloo_writes_is_left_out_however_it_is_torn():
    torn = "[Gloo] Rank penzai-shard: one\n0 is connected to 1 peer ranks. Expected number of "
    torn += "connected peer ranks is : 1\n\n is connected to 1 peer ranks. penzai-shard: two\n1"
    assert lines_without_gloo(torn) == ["penzai-shard: one", "1penzai-shard: two"]


@pytest.mark.parametrize(("when", "victim"), DEATHS)
def test_a_process_that_dies_ends_the_others_with_one_message_and_loses_nothing(
    saved, tmp_path, when, victim
):
    folder, _ = saved
    survivor = 1 - victim
    name = "checkpoint_programs.dying"
    # Two processes of two devices, which first restore what two of four devices saved.
    with jobs.Job(name, [folder, when, victim], 2, 4, tmp_path) as job:
        statuses = job.wait()
        assert statuses[victim] == -9, job.printed(victim)
        assert statuses[survivor] == 75, job.printed(survivor)
        died_at = float(re.search(r"dies at ([\d.]+)", job.printed(victim))[1])
        assert job.ended_at(survivor) - died_at < SOON
        lines = lines_without_gloo(job.printed(survivor))
    doing = {"saving": "saving a checkpoint to", "restoring": "restoring the checkpoint at"}
    doing = f", in the midst of {doing[when]} {folder}/{when}." if when in doing else ". "
    message = (
        f"penzai-shard: process {victim} of 2 is gone: it was killed, or its machine cannot be "
        f"reached. Process {survivor} of 2 ends too{doing}"
    )
    assert "\n".join(lines).count(message) == 1
    # Where process 0 dies, JAX has begun to say so itself, in many lines.
    assert len(lines) == 1 or victim == 0
    mesh = pzs.make_mesh({"data": 8})
    path = f"{folder}/{when}"
    wanted = checkpoint_programs.model_of()
    checkpoint_programs.assert_equal(pzs.restore_params(path, wanted, mesh, {}), wanted)
    pzs.save_params(path, wanted, overwrite=True)
    assert [p.name for p in pathlib.Path(folder).iterdir() if when in p.name] == [when]


@pytest.fixture(scope="module")
def taken(tmp_path_factory):
    """What each process found, what it printed last, and its exit status."""
    folder = tmp_path_factory.mktemp("shared")
    with jobs.Job("checkpoint_programs.taking_part", [str(folder)], 2, 8, folder) as job:
        statuses = job.wait()
        printed = [job.printed(0), job.printed(1)]
        ended = [job.ended_at(0), job.ended_at(1)]
    paths = [folder / f"found.{number}.json" for number in (0, 1)]
    assert all(path.exists() for path in paths), printed
    return [json.loads(path.read_text()) for path in paths], printed, statuses, ended


def test_one_process_that_saves_or_restores_alone_says_who_is_missing_and_where_that_one_is(taken):
    (first, last), *_ = taken
    for here, name, doing, absent in (
        (first, "first saves", "saving", 1),
        (last, "last saves", "saving", 0),
        (first, "first restores", "restoring", 1),
        (last, "manager saves", "saving", 0),
    ):
        text = here[name]
        assert f"process {absent} of 2 has not come to {doing} a checkpoint (/" in text
        assert ") within 1 s: it is at " in text
        assert "in works_on: os.close(os.open(told, os.O_RDONLY))  # Something else." in text
        assert "several_processes(patience_seconds=300)" in text


def test_processes_that_do_different_things_are_told_what_each_of_them_does(taken):
    for each in taken[0]:
        text = each["save and restore"]
        assert "process 0 in saving a checkpoint (/" in text
        assert "process 1 in restoring a checkpoint (/" in text
        assert "process 1 in shall we stop" in each["save and any"]


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("saved paths", r"path: process 0: /\S+/a; process 1: /\S+/b\. All processes save one"),
        ("saved overwrite", r"overwrite: process 0: True; process 1: False"),
        ("saved kinds", r"what is saved: process 0: params; process 1: train_state"),
        ("saved names", r"names: process 0: count, half, split, whole; process 1: split, whole\."),
        ("saved dtypes", r"whole: process 0: float32\(.*; process 1: float16\("),
        ("saved layouts", r"split: process 0: .*'data', 'model'.*; process 1: .*P\('model',\)"),
        ("paths", r"path: process 0: /\S+/params; process 1: /\S+/other\. Give the same path"),
        ("models", r"names: process 0: count, half, split, whole; process 1: split, whole\."),
        ("dtypes", r"whole: process 0: float32\(.*; process 1: float16\("),
        ("rules", r"split: process 0: .*'data', 'model'.*; process 1: .*P\('model',\)"),
        ("meshes", r"over data=4, model=2; process 1: .*over model=2, data=4\."),
        ("options", r"options: process 0: .*on_extra='error'.*; process 1: .*on_extra='ignore'"),
        ("loaded layouts", r"split: process 0: .*'data', 'model'.*; process 1: .*P\('model',\)"),
        ("unshared", r"process 1 does not see what process 0 writes there.*that they share"),
    ],
)
def test_what_differs_between_processes_is_refused_by_name_in_all_of_them(taken, name, said):
    for each in taken[0]:
        assert re.search(said, each[name]), each[name]


def test_one_that_is_done_is_not_waited_for(taken):
    _, (first, last), statuses, ended = taken
    assert statuses == [1, 75]
    text = "process 1 of 2 has not come to saving a checkpoint (/"
    assert text in first
    assert "it is at the end of its program" in first
    assert f"process 0 failed: ShardingError: {text}" in last
    said_at = float(re.search(r"said at ([\d.]+)", first)[1])
    assert max(ended) - said_at < SOON
    assert not jax.distributed.is_initialized()
