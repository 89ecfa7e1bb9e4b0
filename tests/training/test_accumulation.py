import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding, PartitionSpec
from penzai import pz

from penzai_shard.errors import RuleTypeError, ShardingError
from penzai_shard.training import TrainState, build_train_step_fn, shard_batch
from penzai_shard.training.microbatches import split_inputs


def initial(model, optimizer=None, **kwargs):
    return TrainState.initial_state(model, optimizer or optax.sgd(0.1), jax.random.key(3), **kwargs)


def test_gradient_equals_that_of_the_whole_batch(make_model, loss_fn, batch):
    whole, whole_aux = build_train_step_fn(loss_fn)(initial(make_model()), **batch)
    loss_fn.traces = 0
    step = build_train_step_fn(loss_fn, accumulate_steps=4)
    state, aux = step(initial(make_model()), **batch)
    for name, value in whole.params.items():
        np.testing.assert_allclose(
            state.params[name].data_array, value.data_array, rtol=1e-5, atol=1e-6
        )
    np.testing.assert_allclose(aux["loss"], whole_aux["loss"], rtol=1e-6)
    for _ in range(2):
        state, _ = step(state, **batch)
    assert loss_fn.traces == 1
    assert int(state.step) == 3


def test_sharded_batches_stay_on_their_devices(make_model, loss_fn, batch, mesh):
    layout = NamedSharding(mesh, PartitionSpec())
    expected, _ = build_train_step_fn(loss_fn)(initial(make_model()), **batch)
    step = build_train_step_fn(loss_fn, accumulate_steps=2)
    state = jax.device_put(initial(make_model()), layout)
    placed = shard_batch(batch, mesh, {"batch": "data"})
    hlo = step.lower(state, **placed).compile().as_text()
    assert "all-to-all" not in hlo
    assert "all-gather" not in hlo
    state, _ = step(state, **placed)
    for name, value in expected.params.items():
        np.testing.assert_allclose(
            state.params[name].data_array, value.data_array, rtol=1e-5, atol=1e-6
        )


def test_split_is_strided_and_leaves_other_inputs_whole():
    inputs = {
        "x": pz.nx.wrap(jnp.arange(12).reshape(2, 6), "features", "batch"),
        "view": pz.nx.wrap(jnp.arange(12).reshape(6, 2), "batch", "time").untag("time"),
        "mask": pz.nx.wrap(jnp.ones(3), "time"),
        "plain": jnp.ones(5),
    }
    split = split_inputs(inputs, 3, "batch")
    part = split.part(jax.tree.map(lambda data: data[1], split.stacked))
    np.testing.assert_array_equal(
        part["x"].unwrap("features", "batch"), np.arange(12).reshape(2, 6)[:, [1, 4]]
    )
    np.testing.assert_array_equal(
        part["view"].tag("time").unwrap("batch", "time"), np.arange(12).reshape(6, 2)[[1, 4]]
    )
    assert part["mask"] is inputs["mask"]
    assert part["plain"] is inputs["plain"]


def test_every_part_has_its_own_randomness_and_aux_is_summed_up():
    def loss_fn(model, rng, state, x):
        model["seen"].value = model["seen"].value + x.named_shape["batch"]
        draw = jax.random.uniform(rng)
        aux = {"mean": draw, "last": state["count"], "key": rng}
        return model["w"].value * 1.0, {"count": state["count"] + 1}, aux

    model = {
        "w": pz.Parameter(value=pz.nx.wrap(1.0), label="w"),
        "seen": pz.StateVariable(value=0, label="seen"),
    }
    state = initial(model, loss_fn_state={"count": 0})
    step = build_train_step_fn(
        loss_fn,
        accumulate_steps=4,
        batch_axis="batch",
        aux_reduction={"last": "last", "key": "last"},
    )
    state, aux = step(state, x=pz.nx.ones({"batch": 8}))
    step_key = jax.random.fold_in(jax.random.key(3), 0)
    draws = [jax.random.uniform(jax.random.fold_in(step_key, i)) for i in range(4)]
    np.testing.assert_allclose(aux["mean"], np.mean(draws), rtol=1e-6)
    assert int(aux["last"]) == 3
    assert aux["key"] == jax.random.fold_in(step_key, 3)
    assert int(state.loss_fn_state["count"]) == 4
    assert int(state.state_vars["seen"]) == 8


def test_half_precision_gradients_are_summed_in_single():
    def loss_fn(model, rng, state, x):
        scale = jnp.mean(x.unwrap("batch"))
        return (model["w"] * scale.astype(jnp.bfloat16)).sum(), state, None

    state = initial({"w": jnp.zeros((), jnp.bfloat16)}, optax.sgd(1.0))
    x = pz.nx.wrap(jnp.full(1024, 1 / 256), "batch")
    state, _ = build_train_step_fn(loss_fn, accumulate_steps=1024)(state, x=x)
    assert state.params["w"].dtype == jnp.bfloat16
    np.testing.assert_allclose(float(state.params["w"]), -1 / 256, rtol=1e-2)


def test_length_that_does_not_divide_is_refused(make_model, loss_fn, batch):
    step = build_train_step_fn(loss_fn, accumulate_steps=3)
    with pytest.raises(ShardingError, match="cannot be split") as caught:
        step(initial(make_model()), **batch)
    assert caught.value.problems[0] == (
        "input x: logical axis 'batch' (16) does not divide into accumulate_steps=3 "
        "microbatches. Pad the batch to 18, or choose a divisor of 16."
    )
    assert len(caught.value.problems) == 2


def test_inputs_without_the_axis_are_refused(make_model, loss_fn):
    step = build_train_step_fn(loss_fn, accumulate_steps=2)
    inputs = {"x": jnp.ones((4, 8)), "y": pz.nx.ones({"rows": 4})}
    with pytest.raises(ShardingError, match="no input has the logical axis 'batch'") as caught:
        step(initial(make_model()), **inputs)
    assert caught.value.problems == (
        "x: an array without names.",
        "y: its logical axes are ('rows',).",
    )


@pytest.mark.parametrize("steps", [0, -1, 1.5, True])
def test_number_of_parts_must_be_a_positive_integer(loss_fn, steps):
    with pytest.raises(RuleTypeError, match="accumulate_steps must be a positive integer"):
        build_train_step_fn(loss_fn, accumulate_steps=steps)


def plain_step(steps, batch_axis):
    def loss(model, rng, state, x, y, weight):
        error = x @ model["w"] - y
        return jnp.mean(error**2) * weight, state, {"error": error}

    weights = {"w": jnp.arange(3.0)}
    state = TrainState.initial_state(weights, optax.sgd(0.1), jax.random.key(0))
    step = build_train_step_fn(
        loss,
        accumulate_steps=steps,
        batch_axis=batch_axis,
        aux_reduction={"error": "concatenate"} if steps > 1 else None,
    )
    x = jnp.arange(24.0).reshape(8, 3) / 24
    return step(state, x=x, y=jnp.ones(8), weight=2.0)


def test_plain_inputs_are_split_along_a_dimension_by_its_number():
    whole, whole_aux = plain_step(1, "batch")
    parts, aux = plain_step(4, 0)
    np.testing.assert_allclose(parts.params["w"], whole.params["w"], rtol=1e-6)
    np.testing.assert_allclose(aux["error"], whole_aux["error"], rtol=1e-6)


def test_plain_inputs_need_the_number_of_the_dimension():
    with pytest.raises(ShardingError, match=r"for arrays without names.*batch_axis=0"):
        plain_step(4, "batch")
    with pytest.raises(ShardingError, match=r"input x: dimension 1 \(3\) does not divide into"):
        plain_step(2, 1)
    with pytest.raises(ShardingError, match="no input is an array without names that has a dim"):
        plain_step(2, 2)
    with pytest.raises(RuleTypeError, match=r"the number of a dimension such as 0, not -1"):
        plain_step(2, -1)


def test_plain_inputs_of_other_lengths_than_the_batch_are_refused():
    def loss(model, rng, state, x, classes, weights):
        return jnp.mean(weights[classes] * (x @ model["w"]) ** 2), state, {}

    state = TrainState.initial_state({"w": jnp.ones(3)}, optax.sgd(0.1), jax.random.key(0))
    inputs = {"x": jnp.ones((8, 3)), "classes": jnp.arange(8) % 4}
    weights = jnp.arange(4.0)
    step = build_train_step_fn(loss, accumulate_steps=2, batch_axis=0)
    with pytest.raises(ShardingError, match=r"functools.partial\(loss_fn, weights=") as caught:
        step(state, weights=weights, **inputs)
    assert caught.value.problems == (
        "input classes: dimension 0 is 8 long.",
        "input weights: dimension 0 is 4 long.",
        "input x: dimension 0 is 8 long.",
    )
    bound = functools.partial(loss, weights=weights)
    parts, _ = build_train_step_fn(bound, accumulate_steps=2, batch_axis=0)(state, **inputs)
    whole, _ = build_train_step_fn(loss)(state, weights=weights, **inputs)
    np.testing.assert_allclose(parts.params["w"], whole.params["w"], rtol=1e-6)


@pytest.mark.parametrize("order", [("a", "c"), ("c", "a"), ("c",), ("a",)])
@pytest.mark.parametrize("untagged", ["before", "in the loss"])
def test_views_keep_the_order_of_their_positional_dimensions(order, untagged):
    x = pz.nx.wrap(jnp.arange(24.0).reshape(2, 4, 3), "a", "batch", "c")

    def loss(model, rng, state, x):
        x = x.untag(*order) if untagged == "in the loss" else x
        return jnp.sum(model["w"]), state, {"x": x}

    state = TrainState.initial_state({"w": jnp.ones(3)}, optax.sgd(0.1), jax.random.key(0))
    step = build_train_step_fn(loss, accumulate_steps=2)
    _, aux = step(state, x=x.untag(*order) if untagged == "before" else x)
    assert aux["x"].positional_shape == x.untag(*order).positional_shape
    np.testing.assert_array_equal(aux["x"].tag(*order).unwrap("a", "batch", "c"), x.data_array)
