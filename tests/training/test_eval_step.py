"""Evaluation steps."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding, PartitionSpec
from penzai import pz

from penzai_shard.errors import RuleTypeError, ShardingError
from penzai_shard.training import (
    TrainState,
    build_eval_step_fn,
    build_train_step_fn,
    shard_batch,
    train_state_sharding,
)

RULES = {"features": None, "features_out": "model", "batch": "data"}


class Loss:
    """A loss that counts its traces, assigns a state variable and carries a state along."""

    def __init__(self):
        self.traces = 0

    def __call__(self, model, rng, state, x, y):
        self.traces += 1
        model["seen"].value = model["seen"].value + 1
        error = model["mlp"](x).untag("features", "batch") - y.untag("features", "batch")
        loss = jnp.mean(error.unwrap() ** 2)
        return loss, {"count": state["count"] + 1}, {"loss": loss, "draw": jax.random.uniform(rng)}


@pytest.fixture
def loss_fn():
    return Loss()


def initial(make_model, **options):
    model = {"mlp": make_model(), "seen": pz.StateVariable(value=0, label="seen")}
    return TrainState.initial_state(
        model, optax.adam(1e-2), jax.random.key(3), {"count": 0}, **options
    )


def values(tree):
    return [np.asarray(leaf) for leaf in jax.tree.leaves(jax.tree.map(_data, tree))]


def _data(leaf):
    is_key = jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)
    return jax.random.key_data(leaf) if is_key else leaf


@pytest.mark.parametrize("explicit", [False, True])
def test_it_reports_what_a_train_step_sees_and_changes_nothing(
    explicit, make_model, loss_fn, batch, mesh, explicit_mesh
):
    chosen = explicit_mesh if explicit else mesh
    state = initial(make_model, skip_nonfinite=True)
    shardings = train_state_sharding(state, chosen, RULES)
    state = jax.device_put(state, shardings)
    placed = shard_batch(batch, chosen, RULES)
    step = build_train_step_fn(
        loss_fn, donate_params_and_state=True, train_state_shardings=shardings, skip_nonfinite=True
    )
    evaluate = build_eval_step_fn(loss_fn)
    for row in range(3):
        before = values(state)
        loss, aux = evaluate(state, **placed)
        for old, new in zip(before, values(state), strict=True):
            np.testing.assert_array_equal(old, new)
        if row:
            # In between other states and batches, too.
            assert evaluate(state, **placed)[0] == loss
        state, expected = step(state, **placed)
        np.testing.assert_allclose(loss, expected["loss"], rtol=1e-6)
        np.testing.assert_allclose(aux["loss"], expected["loss"], rtol=1e-6)
        np.testing.assert_allclose(aux["draw"], expected["draw"], rtol=1e-6)
        assert (int(state.state_vars["seen"]), int(state.loss_fn_state["count"])) == (row + 1,) * 2
    assert loss_fn.traces == 2
    (program,) = evaluate._programs.values()
    assert program._cache_size() == 1
    assert "mlp" in state.model


def test_it_takes_states_that_jax_may_place_and_runs_eagerly_and_inline(
    make_model, loss_fn, batch, mesh
):
    evaluate = build_eval_step_fn(loss_fn)
    state = initial(make_model)
    loss, aux = evaluate(state, **batch)
    assert not any(leaf.committed for leaf in jax.tree.leaves((loss, aux)))
    for found in (
        build_eval_step_fn(loss_fn, jit=False)(state, **batch),
        jax.jit(lambda state, batch: evaluate(state, **batch))(state, batch),
        evaluate(state, **shard_batch(batch, mesh, {"batch": "data"})),
    ):
        np.testing.assert_allclose(found[0], loss, rtol=1e-6)
        np.testing.assert_allclose(found[1]["draw"], aux["draw"], rtol=1e-6)
    state, _ = build_train_step_fn(loss_fn)(state, **batch)
    free = evaluate(state, **batch)[0]
    np.testing.assert_allclose(
        evaluate(state, **shard_batch(batch, mesh, {"batch": "data"}))[0], free, rtol=1e-6
    )


def test_it_has_no_gradient_and_is_lowered_from_shapes(make_model, loss_fn, batch, mesh):
    state = initial(make_model)
    shardings = train_state_sharding(state, mesh, RULES)
    abstract = jax.tree.map(
        lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), state, shardings
    )
    options = {"accumulate_steps": 1}
    evaluate, step = (
        build(loss_fn, **options) for build in (build_eval_step_fn, build_train_step_fn)
    )
    flops = [
        lowered.compile().cost_analysis()["flops"]
        for lowered in (evaluate.lower(abstract, **batch), step.lower(abstract, **batch))
    ]
    assert flops[0] < 0.5 * flops[1]
    assert evaluate.lower(state, **batch).as_text().count("dot_general") == 2


def test_layouts_are_declared_as_for_a_train_step(make_model, loss_fn, batch, mesh):
    state = initial(make_model)
    shardings = train_state_sharding(state, mesh, RULES)
    whole = NamedSharding(mesh, PartitionSpec())
    evaluate = build_eval_step_fn(
        loss_fn,
        train_state_shardings=shardings,
        input_kwarg_shardings={"x": NamedSharding(mesh, PartitionSpec("data"))},
        aux_output_shardings=whole,
    )
    _, aux = evaluate(jax.device_put(state, shardings), **batch)
    assert {leaf.sharding for leaf in jax.tree.leaves(aux)} == {whole}
    with pytest.raises(ShardingError, match="not laid out as declared in train_state_shardings"):
        evaluate(jax.device_put(state, whole), **batch)


def test_a_donated_state_is_refused_with_its_step(make_model, loss_fn, batch):
    state = initial(make_model)
    step = build_train_step_fn(loss_fn, donate_params_and_state=True)
    evaluate = build_eval_step_fn(loss_fn)
    state, _ = step(state, **batch)
    step(state, **batch)
    with pytest.raises(ShardingError, match="was donated to the step from 1 to 2"):
        evaluate(state, **batch)


@pytest.mark.parametrize(
    ("call", "kind", "message"),
    [
        (lambda f, s, b: build_eval_step_fn(3), RuleTypeError, "loss_fn must be a function"),
        (
            lambda f, s, b: build_eval_step_fn(f, optax.sgd(0.1)),
            RuleTypeError,
            "build_eval_step_fn takes the loss function, and all else by keyword",
        ),
        (
            lambda f, s, b: build_eval_step_fn(f, accumulate_steps=0),
            RuleTypeError,
            "accumulate_steps must be a positive integer, not 0",
        ),
        (lambda f, s, b: build_eval_step_fn(f)(**b), ShardingError, "TrainState first"),
        (lambda f, s, b: build_eval_step_fn(f)(s.model, **b), ShardingError, "got a dict"),
        (
            lambda f, s, b: build_eval_step_fn(f)(s, b),
            RuleTypeError,
            r"eval_step\(state, \*\*batch",
        ),
        (lambda f, s, b: build_eval_step_fn(f)(s, x="a"), ShardingError, "must be arrays"),
        (lambda f, s, b: build_eval_step_fn(f)(s, x=b["x"]), ShardingError, "missing .*'y'"),
        (
            lambda f, s, b: build_eval_step_fn(f, jit=False).lower(s, **b),
            ShardingError,
            "has nothing to lower",
        ),
    ],
)
def test_it_refuses_what_a_train_step_refuses(call, kind, message, make_model, loss_fn, batch):
    with pytest.raises(kind, match=message):
        call(loss_fn, initial(make_model), batch)
