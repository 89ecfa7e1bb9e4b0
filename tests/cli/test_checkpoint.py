"""``penzai-shard checkpoint``: what it prints, and the exit status."""

import json
import pathlib

import jax.numpy as jnp
import pytest

import penzai_shard as pzs


@pytest.fixture
def checkpoint(run):
    """Calls the command in a folder with two checkpoints."""
    for name, value in (("first", 1.0), ("other", 2.0)):
        blocks = {f"block_{i}/w": jnp.ones(4) for i in range(3)}
        pzs.save_params(name, blocks | {"v": jnp.full(2, value)})
    return lambda *arguments: run("checkpoint", *arguments)


def test_checkpoint_show(checkpoint):
    status, out, _ = checkpoint("show", "first")
    assert (status, "block_{0-2}/w" in out) == (0, True)
    assert "block_1/w" in checkpoint("show", "first", "--all")[1]
    data = json.loads(checkpoint("show", "first", "--json")[1])
    assert [row["path"] for row in data["rows"]] == ["block_0/w", "block_1/w", "block_2/w", "v"]


def test_checkpoint_compare(checkpoint):
    assert checkpoint("compare", "first", "first")[0] == 0
    status, out, _ = checkpoint("compare", "first", "other", "--json")
    assert status == 1
    assert [(row["path"], row["what"]) for row in json.loads(out)["rows"]] == [("v", "values")]


def test_checkpoint_verify(checkpoint):
    assert checkpoint("verify", "first")[0] == 0
    for file in pathlib.Path("first", "state").rglob("d/*"):
        file.write_bytes(file.read_bytes()[:-9])
    status, out, _ = checkpoint("verify", "first", "--json")
    assert status == 1
    assert {row["state"] for row in json.loads(out)["rows"]} == {"unreadable"}


def test_checkpoint_of_a_mistake_says_what_to_write(checkpoint):
    for call in (["show", "firs"], ["compare", "first", "firs"], ["verify", "firs"]):
        status, out, error = checkpoint(*call)
        assert (status, out) == (2, "")
        assert "first" in error
