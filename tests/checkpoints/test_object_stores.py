"""Checkpoints by url: ``file://`` stands for the stores that TensorStore opens alike."""

import pathlib
import tempfile

import jax.numpy as jnp
import pytest

import penzai_shard as pzs
from penzai_shard.checkpoints import object_stores
from tests.checkpoints.trees import assert_lies, blank, contents, params
from tests.models import model
from tests.refusals import problem_paths, problems_of, refused

WIDE, RULES = pzs.make_mesh({"data": 4, "model": 2}), {"features": "data"}
MLP = model("penzai mlp")


@pytest.fixture
def url(tmp_path):
    return f"file://{tmp_path}/bucket/run/params"


def test_save_params_and_restore_params_by_url(url):
    placed = pzs.place(MLP, WIDE, RULES)
    assert pzs.save_params(url, placed) == url
    restored = pzs.restore_params(url, blank(MLP), WIDE, RULES)
    assert params(restored) == params(MLP)
    assert_lies(restored, WIDE, RULES)
    # What is there is what a disk would have.
    assert params(pzs.restore_params(url.removeprefix("file://"), blank(MLP))) == params(MLP)
    assert pzs.verify_checkpoint(url + "/").ok
    assert pzs.compare_checkpoints(url, MLP).ok
    assert pzs.describe_checkpoint(url).facts["kind"] == "params"


def test_save_params_by_url_replaces_nothing(url):
    tree = {"step": jnp.int32(3), "params": {"w": jnp.ones(8)}}
    pzs.save_train_state(url, tree)
    for options in ({}, {"overwrite": True}):
        call = pzs.save_params, url, {"w": jnp.zeros(8)}
        assert problem_paths(pzs.CheckpointWriteError, *call, **options) == [url]
    assert contents(pzs.restore_train_state(url, blank(tree))) == contents(tree)
    refused(pzs.RuleTypeError, pzs.CheckpointManager, url)


def test_save_params_by_url_that_fails_leaves_no_checkpoint(url, monkeypatch, tmp_path):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    sent, call = [], object_stores._call

    class Full:
        def __init__(self, store):
            self._store, self.list = store, store.list

        def write(self, name, value):
            sent.append(name)
            if len(sent) == 3:
                raise OSError("quota exceeded")
            return self._store.write(name, value)

    def call_full(*options):
        return call(*options[:-1], lambda store: options[-1](Full(store)))

    monkeypatch.setattr(object_stores, "_call", call_full)
    with pytest.raises(pzs.CheckpointWriteError, match="quota"):
        pzs.save_params(url, MLP)
    assert not [*tmp_path.glob("penzai_shard_*")]
    refused(pzs.CheckpointWriteError, pzs.save_params, url, MLP)
    pzs.save_params(url + "2", MLP)
    assert sent[-1] == "penzai_shard"
    monkeypatch.undo()
    refused(pzs.CheckpointNotFoundError, pzs.restore_params, url, MLP)


def test_restore_params_by_url_refuses_what_is_not_whole(url):
    (problem,) = problems_of(pzs.CheckpointNotFoundError, pzs.restore_params, url, MLP)
    assert (problem.path, "nothing is there" in problem.what) == (url, True)
    pzs.save_params(url, MLP)
    folder = pathlib.Path(url.removeprefix("file://"))
    for file in (folder / "state").rglob("*ocdbt"):
        file.unlink()
    refused(pzs.CheckpointDamagedError, pzs.restore_params, url, MLP)
    (folder / "_CHECKPOINT_METADATA").write_text("{}")
    refused(pzs.CheckpointDamagedError, pzs.restore_params, url, MLP)
    (folder / "penzai_shard").unlink()
    for path in (url, "nothing://bucket/a"):
        refused(pzs.CheckpointNotFoundError, pzs.restore_params, path, MLP)
    refused(pzs.CheckpointWriteError, pzs.save_params, "nothing://bucket/a", MLP)
