"""Safetensors files are described, compared and verified as checkpoints are."""

import io
import json

import jax.numpy as jnp
import numpy as np
import pytest
from penzai import pz
from rich.console import Console
from safetensors.numpy import save_file

import penzai_shard as pzs
from penzai_shard.errors import CheckpointDamagedError

RANDOM = np.random.default_rng(0).normal(size=(2, 8, 4)).astype(np.float32)


def build():
    blocks = {f"block_{i}/w": pz.nx.wrap(RANDOM[i], "in", "out") for i in range(2)}
    return {**blocks, "scale": pz.nx.ones({"out": 4}).astype(jnp.bfloat16)}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    made = tmp_path_factory.mktemp("weights")
    pzs.save_params(made / "params", build())
    pzs.save_safetensors(made / "exported", build())
    (made / "theirs").mkdir()
    tensors = {f"layers.{i}.weight": RANDOM[i].T.copy() for i in range(2)}
    save_file(tensors, made / "theirs" / "model.safetensors")
    return made


def test_files_of_others_are_described_without_axes(folder):
    description = pzs.describe_checkpoint(folder / "theirs")
    assert description.table().rows == (("layers.*.weight", "2", "4, 8", "float32", "256 B"),)
    assert str(description).startswith("safetensors files: 2 arrays, 256 B")
    assert "no logical axis names" in str(description)
    one = pzs.describe_checkpoint(folder / "theirs" / "model.safetensors")
    assert one.table().rows == description.table().rows
    assert json.loads(one.to_json())["metadata"] == {"files": "model.safetensors"}


def test_our_files_have_the_axes_and_the_values_of_the_checkpoint_that_they_are_of(folder):
    found = pzs.compare_checkpoints(folder / "params", folder / "exported")
    assert found.kinds == ("params", "safetensors")
    assert found.are_equal
    other = pzs.save_params(folder / "other", {**build(), "scale": build()["scale"] * 2})
    (changed,) = pzs.compare_checkpoints(folder / "exported", other).differences
    assert (changed.name, changed.what) == ("scale", ("values",))


def test_a_damaged_number_in_a_file_is_found(folder, tmp_path):
    (file,) = (folder / "exported").glob("*.safetensors")
    assert pzs.verify_checkpoint(folder / "exported").ok
    content = bytearray(file.read_bytes())
    content[content.index(RANDOM[1].tobytes()) + 5] ^= 1
    damaged = tmp_path / "model.safetensors"
    damaged.write_bytes(content)
    found = pzs.verify_checkpoint(damaged)
    assert found.damaged == ("block_1/w",)
    assert [array.finding for array in found.arrays].count("ok") == 2
    assert not pzs.verify_checkpoint(folder / "theirs").ok
    damaged.write_bytes(content[:-1])
    with pytest.raises(CheckpointDamagedError, match=r"model\.safetensors: is truncated"):
        pzs.describe_checkpoint(damaged)


@pytest.mark.parametrize("name", ["params", "exported"])
def test_a_bar_shows_how_many_bytes_are_verified(name, folder):
    written = io.StringIO()
    console = Console(file=written, force_terminal=True, width=80)
    seen = []
    found = pzs.verify_checkpoint(folder / name, on_array=seen.append, progress=console)
    assert tuple(seen) == found.arrays
    assert "264/264 bytes" in written.getvalue()


def test_no_file_is_taken_for_weights_without_its_ending(tmp_path):
    (tmp_path / "model.txt").write_text("text")
    with pytest.raises(pzs.CheckpointNotFoundError, match="it is a file"):
        pzs.describe_checkpoint(tmp_path / "model.txt")
