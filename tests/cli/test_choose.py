"""``penzai-shard choose``: a model of a file, exit status, JSON, and the file that it writes."""

import json

import penzai_shard as pzs

FILES = {
    "model.py": """
import jax
import jax.numpy as jnp
import optax
import penzai_shard as pzs


def build():
    weights = {"embed": jnp.ones((64, 32)), "up": jnp.ones((32, 64))}
    axes = {"embed": ("vocabulary", "embedding"), "up": ("embedding", "neurons")}
    return pzs.name_axes(weights, axes)


def loss_fn(model, rng, state, tokens):
    embed = model["embed"].unwrap("vocabulary", "embedding")
    up = model["up"].unwrap("embedding", "neurons")
    x = embed[tokens.unwrap("batch", "seq")]
    return ((x @ up) ** 2).mean(), state, {}


sgd = optax.sgd(0.1)
"""
}
CALL = "choose model.py:build --loss model.py:loss_fn --optimizer model.py:sgd --batch 16 --seq 8"
CALL += " --devices v5e:4 --keep batch=data,neurons=,vocabulary="


def test_choose_prints_the_best_and_writes_it(run, tmp_path):
    status, out, _ = run(*CALL.split(), "--json", "--out", "layout.toml")
    assert status == 0
    found = json.loads(out)
    assert {row["priced"] for row in found["rows"]} == {"compiled"}
    read = pzs.Layout.read_toml(tmp_path / "layout.toml")
    assert read.mesh_shape == {"data": 4}
    assert found["verdict"].startswith("the best of ")


def test_choose_ends_with_1_where_nothing_fits(run):
    status, out, errors = run(*CALL.split(), "--memory", "2KiB")
    assert (status, out) == (1, "")
    assert "devices='v5e:" in errors
