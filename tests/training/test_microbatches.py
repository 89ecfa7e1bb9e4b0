"""Batches in parts: the same step as with the whole batch, and what becomes of the outputs."""

import jax
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from penzai import pz

import penzai_shard as pzs
from tests.models import hax
from tests.training.losses import KEY, W, X, initial, mean_square, weights

MESH = pzs.make_mesh({"data": 4, "model": 2})
MASK = (np.arange(8) % 3 > 0).astype(np.float32)


def batch(mesh=None):
    arrays = {"x": pz.nx.wrap(X, "batch", "in"), "mask": pz.nx.wrap(MASK, "batch")}
    return pzs.shard_batch(arrays, mesh, {"batch": "data"}) if mesh else arrays


def outputs(model, x):
    return x.unwrap("batch", "in") @ model["w"].unwrap("in", "out")


def mean_loss(model, rng, state, x, mask):
    out = outputs(model, x)
    aux = {"out": pz.nx.wrap(out).tag("batch", "out"), "top": out.max(), "n": len(out)}
    return mean_square(out), {"seen": state["seen"] + len(out)}, aux


def sum_loss(model, rng, state, x, mask):
    mask = mask.unwrap("batch")
    return (((outputs(model, x) - 1) ** 2).sum(1) @ mask, mask.sum()), state, {}


def run(loss, inputs, build=pzs.build_train_step_fn, **options):
    state = initial(weights(), optax.sgd(0.5), loss_fn_state={"seen": 0})
    return build(loss, **options)(state, **inputs)


def assert_close(a, b):
    np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("mesh", "count"), [(None, 8), (MESH, 2)])
def test_microbatches_are_the_whole_batch(mesh, count):
    whole, aux = run(mean_loss, batch(mesh))
    options = {"accumulate_steps": count, "aux_reduction": {"top": "max", "n": "sum"}}
    state, joined = run(mean_loss, batch(mesh), step_metrics=["loss"], **options)
    assert_close(state.params["w"].data_array, whole.params["w"].data_array)
    assert_close(joined["out"].unwrap("batch", "out"), aux["out"].unwrap("batch", "out"))
    assert_close(joined["top"], aux["top"])
    assert int(joined["n"]) == int(state.loss_fn_state["seen"]) == 8
    loss, _ = run(mean_loss, batch(mesh), pzs.build_eval_step_fn, **options)
    assert_close(loss, joined["loss"])


@pytest.mark.parametrize("count", [1, 4])
def test_mean_of_a_sum_and_a_count_is_over_the_whole_batch(count):
    state, _ = run(sum_loss, batch(), accumulate_steps=count)
    gradient = 2 * X.T @ ((X @ W - 1) * MASK[:, None]) / MASK.sum()
    assert_close(state.params["w"].data_array, W - 0.5 * gradient)


def test_microbatches_of_a_split_batch_need_no_communication():
    def loss(model, rng, state, x):
        return mean_square(outputs(model, x)), state, {}

    step = pzs.build_train_step_fn(loss, accumulate_steps=2)
    x = jax.device_put(pz.nx.wrap(X, "batch", "in"), NamedSharding(MESH, P("data")))
    text = step.lower(initial(), x=x).compile().as_text()
    assert "all-reduce" in text
    assert not any(kind in text for kind in ("all-to-all", "all-gather", "collective-permute"))


def test_microbatches_of_plain_arrays_and_of_haliax():
    def loss(model, rng, state, x):
        x = x.array if isinstance(x, hax.NamedArray) else x
        loss = mean_square(outputs(model, pz.nx.wrap(x, "batch", "in")))
        return loss, state, {"x": x, "key": rng}

    whole, _ = run(loss, {"x": X})
    options = {"accumulate_steps": 4, "aux_reduction": {"key": "last", "x": "concatenate"}}
    parts, aux = run(loss, {"x": X}, batch_axis=0, **options)
    assert_close(parts.params["w"].data_array, whole.params["w"].data_array)
    np.testing.assert_array_equal(aux["x"], X)
    assert aux["key"] == jax.random.fold_in(jax.random.fold_in(KEY, 0), 3)
    named = {"x": hax.named(X, ("batch", "in"))}
    parts, _ = run(loss, named, accumulate_steps=4, aux_reduction="last")
    assert_close(parts.params["w"].data_array, whole.params["w"].data_array)
