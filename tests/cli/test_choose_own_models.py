"""``penzai-shard choose`` of models of one's own: of tokens, or with all that trains them."""

import json

import pytest

MODELS = """
import jax
import jax.numpy as jnp
import optax
from penzai.models import simple_mlp

import penzai_shard as pzs


def perceptron():
    return simple_mlp.MLP.from_config(
        name="mlp", init_base_rng=jax.random.key(0), feature_sizes=(8, 16)
    )


def plain(neurons=128):
    return {"up": jnp.ones((64, neurons)), "down": jnp.ones((neurons, 64))}


def loss_fn(model, rng, state, x):
    return ((jax.nn.relu(x @ model["up"]) @ model["down"]) ** 2).mean(), state, {}


def problem(neurons=128):
    axes = {"up": ("embedding", "neurons"), "down": ("neurons", "embedding")}
    return {
        "model": pzs.name_axes(jax.eval_shape(lambda: plain(neurons)), axes),
        "loss_fn": loss_fn,
        "optimizer": optax.sgd(0.1),
        "batch": {"x": jax.ShapeDtypeStruct((64, 64), "float32")},
        "plain_arrays": True,
    }


def problem_without_a_batch():
    return {name: each for name, each in problem().items() if name != "batch"}


def problem_without_names():
    return {**problem(), "model": plain()}
"""
QUICK = ("--devices", "v5e:8", "--propagated", "0", "--compiled", "0")


@pytest.fixture(autouse=True)
def models(tmp_path, shell):
    """A file of models, in the folder that the shell is in."""
    (tmp_path / "models.py").write_text(MODELS)


def test_a_function_may_say_all_that_a_layout_is_chosen_for(shell):
    asked = ("choose", "models.py:problem(neurons=256)", *QUICK, "--keep", "neurons=model")
    status, printed, errors = shell(*asked, "--json")
    assert status == 0, errors
    found = json.loads(printed)
    assert found["parameters"] == 2 * 64 * 256
    assert found["asked"] == "batch 64 x 64 on 8 devices (v5e:2x4)"
    assert all("neurons over model" in one["layout"] for one in found["choices"])
    assert "pricing by names: " in errors
    status, printed, _ = shell(*asked[:-2])
    assert (status, "\none training step\n" in printed) == (0, True)
    assert "\nThose that share a row: --all.\n" in printed


MISTAKES = {
    ("models.py:problem", "--batch", "8"): "--batch: models.py:problem says itself what is",
    ("models.py:problem", "--optimizer", "sgd(1.0)"): "--optimizer: models.py:problem says itself",
    ("models.py:plain", "--batch", "8"): "2 arrays without logical axis names, such as 'down'.",
    ("models.py:problem_without_a_batch",): "and 'batch' of what choose_layout is called with is",
    ("models.py:problem_without_names",): "in the function, name_axes(model, infer_names(...)).",
    ("models.py:perceptron", "--batch", "8"): "For any other model give a function that returns wh",
    ("models.py:perceptron",): "the following arguments are required: --batch",
}


@pytest.mark.parametrize("asked", MISTAKES, ids=MISTAKES.get)
def test_what_is_missing_or_said_twice_is_answered_in_one_line(asked, shell):
    status, printed, errors = shell("choose", *asked, *QUICK)
    last = errors.splitlines()[-1]
    assert (status, printed) == (2, "")
    assert MISTAKES[asked] in last
    assert "internal frames" not in last


def test_the_choice_is_planned_priced_and_locked_from_its_file(shell, tmp_path):
    asked = ("models.py:problem", "--rules", "rules.toml")
    status, printed, _ = shell("choose", asked[0], *QUICK, "--write", "rules.toml", "--json")
    assert status == 0
    best = json.loads(printed)["choices"][0]
    status, printed, _ = shell("plan", *asked, "--json")
    found = json.loads(printed)
    assert (status, found["parameters"], found["mesh"]) == (0, 2 * 64 * 128, best["mesh"])
    # The arrays of the model alone are looked at, and not the batch.
    status, printed, _ = shell("lint", *asked)
    assert (status, "batch/x" in printed) == (0, False)
    status, printed, errors = shell("lock", *asked, "--out", "lock.json")
    assert status == 0, errors
    assert "one training step of batch 64 x 64" in printed
    lock = json.loads((tmp_path / "lock.json").read_text())
    assert lock["mesh"] == best["mesh"]
    status, _, errors = shell("price", *asked, "--batch", "8", "--remat", "dots")
    assert status == 2
    assert "--batch: models.py:problem says itself what is computed. Leave it out." in errors
    assert "--remat: models.py:problem says itself what is computed. Leave it out." in errors
