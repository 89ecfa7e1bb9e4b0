"""A path has its old or its new checkpoint, whatever stops a save, and while others save there."""

import json
import os
import pathlib
import subprocess
import sys

import jax
import numpy as np
import pytest

import penzai_shard as pzs
from penzai_shard.arrays.structure import leaves_of
from penzai_shard.checkpoints.filling import Source
from penzai_shard.checkpoints.restoring import restore
from penzai_shard.checkpoints.saving import begin_save


def test_save_params_stopped_anywhere_leaves_the_old_or_the_new(tmp_path):
    script = pathlib.Path(__file__).with_name("stopped_saves.py")
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(
        [sys.executable, script, tmp_path], env=env, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-3000:]
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(rows) >= 60
    # The next save works, and clears what the stopped one left.
    assert not [row for row in rows if row[3] not in (["may"], None)]
    assert {found - before for _, before, found, _ in rows} == {0, 1}


def leaves(value):
    return leaves_of({"w": np.full((8, 4), value, "float32")})


def choose(manifest):
    (record,) = manifest.records.values()
    struct = jax.ShapeDtypeStruct(record.shape, record.dtype)
    return {"w": Source(("w",), record.shape, (0, 1))}, {"w": struct}


def test_restore_begins_again_if_the_checkpoint_is_replaced(tmp_path):
    path = begin_save(tmp_path / "a", leaves(0), "params").finish()
    seen = []

    def replace_and_choose(manifest):
        seen.append(manifest.save)
        if len(seen) < 3:
            begin_save(path, leaves(len(seen)), "params", overwrite=True).finish()
        return choose(manifest)

    restored = restore(path, replace_and_choose)
    assert len(set(seen)) == 3
    assert np.unique(restored["w"]).tolist() == [2]


def test_begin_save_refuses_a_second_saver(tmp_path):
    first = begin_save(tmp_path / "a", leaves(1), "params")
    with pytest.raises(pzs.CheckpointWriteError) as caught:
        begin_save(tmp_path / "a", leaves(2), "params", overwrite=True)
    assert caught.value.problems[0].path == str(tmp_path / "a")
    assert np.unique(restore(first.finish(), choose)["w"]).tolist() == [1]
    begin_save(tmp_path / "a", leaves(2), "params", overwrite=True).finish()


def test_finish_refuses_a_path_that_was_taken_meanwhile(tmp_path):
    first = begin_save(tmp_path / "a", leaves(1), "params")
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "notes").touch()
    with pytest.raises(pzs.CheckpointWriteError):
        first.finish()
    assert os.listdir(tmp_path) == ["a"]
    assert os.listdir(tmp_path / "a") == ["notes"]
