"""Batches in parts: the same step as with the whole batch, and what becomes of the outputs."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from penzai import pz

import penzai_shard as pzs
from penzai_shard import RuleTypeError, ShardingError
from penzai_shard.training.aux_reductions import join_microbatches, split_microbatches
from tests.models import hax
from tests.training.losses import KEY

MESH = pzs.make_mesh({"data": 4, "model": 2})
X = np.linspace(-1, 1, 128, dtype=np.float32).reshape(16, 8)
MASK = (np.arange(16) % 3 > 0).astype(np.float32)


def initial():
    model = {"w": pz.nx.wrap(jax.random.normal(KEY, (8, 4)), "in", "out")}
    return pzs.TrainState.initial_state(model, optax.sgd(0.5), KEY, {"seen": 0})


def batch(mesh=None):
    x, mask = pz.nx.wrap(jnp.asarray(X), "batch", "in"), pz.nx.wrap(jnp.asarray(MASK), "batch")
    return (
        pzs.shard_batch({"x": x, "mask": mask}, mesh, {"batch": "data"})
        if mesh
        else {"x": x, "mask": mask}
    )


def outputs(model, x):
    return x.unwrap("batch", "in") @ model["w"].unwrap("in", "out")


def mean_loss(model, rng, state, x, mask):
    out = outputs(model, x)
    aux = {"out": pz.nx.wrap(out).tag("batch", "out"), "top": out.max(), "n": len(out)}
    return jnp.mean((out - 1) ** 2), {"seen": state["seen"] + len(out)}, aux


def masked_loss(model, rng, state, x, mask):
    mask = mask.unwrap("batch")
    return (((outputs(model, x) - 1) ** 2).sum(1) @ mask, mask.sum()), state, {}


REDUCTIONS = {"top": "max", "n": "sum"}


@pytest.mark.parametrize("mesh", [None, MESH])
@pytest.mark.parametrize("count", [2, 8])
def test_microbatches_are_the_whole_batch(count, mesh):
    whole, aux = pzs.build_train_step_fn(mean_loss)(initial(), **batch(mesh))
    step = pzs.build_train_step_fn(
        mean_loss,
        accumulate_steps=count,
        aux_reduction=REDUCTIONS,
        step_metrics=["loss", "gradient_norm"],
    )
    state, joined = step(initial(), **batch(mesh))
    np.testing.assert_allclose(
        state.params["w"].data_array, whole.params["w"].data_array, rtol=1e-5, atol=1e-6
    )
    np.testing.assert_allclose(
        joined["out"].unwrap("batch", "out"), aux["out"].unwrap("batch", "out"), rtol=1e-4
    )
    np.testing.assert_allclose(float(joined["top"]), float(aux["top"]), rtol=1e-5)
    assert int(joined["n"]) == 16
    assert int(state.loss_fn_state["seen"]) == 16
    loss, _ = pzs.build_eval_step_fn(mean_loss, accumulate_steps=count, aux_reduction=REDUCTIONS)(
        initial(), **batch(mesh)
    )
    np.testing.assert_allclose(float(loss), float(joined["loss"]), rtol=1e-6)


def test_mean_of_a_sum_and_a_count_is_over_the_whole_batch():
    def normalized(model, rng, state, x, mask):
        (total, count), state, aux = masked_loss(model, rng, state, x, mask)
        return total / count, state, aux

    expected, _ = pzs.build_train_step_fn(normalized)(initial(), **batch())
    for count in (1, 4):
        step = pzs.build_train_step_fn(masked_loss, accumulate_steps=count)
        state, _ = step(initial(), **batch())
        np.testing.assert_allclose(
            state.params["w"].data_array, expected.params["w"].data_array, rtol=1e-5, atol=1e-6
        )


def test_microbatches_of_a_split_batch_need_no_communication():
    def loss(model, rng, state, x, mask):
        return jnp.mean(outputs(model, x) ** 2), state, {}

    step = pzs.build_train_step_fn(loss, accumulate_steps=4)
    text = step.lower(initial(), **batch(MESH)).compile().as_text()
    assert "all-to-all" not in text
    assert "all-gather" not in text
    assert "collective-permute" not in text


def test_microbatches_of_plain_arrays_and_of_haliax():
    def loss(model, rng, state, x):
        x = x.array if isinstance(x, hax.NamedArray) else x
        return jnp.mean((x @ model["w"] - 1) ** 2), state, {"key": jax.random.key_data(rng)}

    def run(x, **options):
        state = pzs.TrainState.initial_state({"w": jnp.ones((8, 4))}, optax.sgd(0.5), KEY)
        state, aux = pzs.build_train_step_fn(loss, **options)(state, x=x)
        return np.asarray(state.params["w"]), aux

    whole, _ = run(X)
    parts, aux = run(X, accumulate_steps=4, batch_axis=0, aux_reduction={"key": "last"})
    np.testing.assert_allclose(parts, whole, rtol=1e-5)
    expected = jax.random.fold_in(jax.random.fold_in(KEY, 0), 3)
    np.testing.assert_array_equal(aux["key"], jax.random.key_data(expected))
    named = hax.named(X, ("batch", "in"))
    parts, _ = run(named, accumulate_steps=4, aux_reduction="max")
    np.testing.assert_allclose(parts, whole, rtol=1e-5)


@pytest.mark.parametrize("dim", [0, 1, 2])
def test_split_microbatches_undone(dim):
    array = np.arange(6**3).reshape(6, 6, 6)
    parts = split_microbatches(array, dim, 3)
    assert parts.shape == (3, *(2 if i == dim else 6 for i in range(3)))
    np.testing.assert_array_equal(parts[1], np.take(array, [1, 4], dim))
    np.testing.assert_array_equal(join_microbatches(parts, dim), array)


# Refusals


def refuse(path, error=ShardingError, loss=mean_loss, **options):
    with pytest.raises(error) as caught:
        pzs.build_train_step_fn(loss, **options)(initial(), **batch())
    assert path in [problem.path for problem in caught.value.problems]


def test_refusals():
    refuse("x", accumulate_steps=3)
    refuse("mask", accumulate_steps=3)
    refuse("", accumulate_steps=2, batch_axis="example")
    refuse("", accumulate_steps=2, batch_axis=0)
    refuse("n", accumulate_steps=2)
    refuse("tops", accumulate_steps=2, aux_reduction={**REDUCTIONS, "tops": "max"})
    refuse("top", accumulate_steps=2, aux_reduction={**REDUCTIONS, "top": "concatenate"})
    refuse("n", RuleTypeError, aux_reduction={"n": "median"})
