"""Loss scale, clipping and skipped steps: what stands between a gradient and the parameters."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from penzai import pz

from penzai_shard.checkpointing import restore_train_state, save_train_state
from penzai_shard.errors import RuleTypeError, ShardingError
from penzai_shard.layers import InPrecision
from penzai_shard.training import (
    DynamicLossScaling,
    StatefulTrainer,
    TrainState,
    build_train_step_fn,
    shard_batch,
    train_state_sharding,
)

KEY = jax.random.key(3)
GUARDS = ["finite_steps", "loss_scale", "skipped_in_a_row", "skipped_steps"]
initial = TrainState.initial_state


def weights(dtype=jnp.float32):
    values = jnp.sin(jnp.arange(64, dtype=jnp.float32)).reshape(8, 8)
    return {"w": pz.nx.wrap(values.astype(dtype), "in", "out")}


def loss_fn(model, rng, state, x):
    """A squared error of a matrix product; big inputs overflow, NaN inputs stay NaN."""
    out = x.unwrap("batch", "in") @ model["w"].unwrap("in", "out").astype(jnp.float32)
    return jnp.mean(out**2), state, {"out": jnp.mean(out)}


def linear(compute_dtype="float16"):
    layer = pz.nn.Linear.from_config("up", jax.random.key(0), {"in": 8}, {"out": 8})
    return InPrecision(layer, compute_dtype) if compute_dtype else layer


def linear_loss(model, rng, state, x):
    out = model(x).untag("batch", "out").unwrap()
    return jnp.mean(out**2), state, {"out": jnp.mean(out)}


def inputs(scale=1.0):
    return pz.nx.wrap(jnp.cos(jnp.arange(128.0)).reshape(16, 8) * scale, "batch", "in")


def values(tree):
    return [np.asarray(leaf) for leaf in jax.tree.leaves(tree)]


def assert_same(a, b, rtol=0.0):
    for left, right in zip(values(a), values(b), strict=True):
        np.testing.assert_allclose(left, right, rtol=rtol, atol=rtol)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("steps", [1, 2])
def test_nothing_is_scaled_where_nothing_is_float16(dtype, steps):
    model = linear("bfloat16") if dtype == "bfloat16" else weights()
    loss = linear_loss if dtype == "bfloat16" else loss_fn
    state = initial(model, optax.adam(1e-2), KEY)
    assert state.guards == {}
    programs = [
        build_train_step_fn(loss, accumulate_steps=steps, **options).lower(state, x=inputs())
        for options in ({}, {"loss_scaling": None})
    ]
    assert programs[0].as_text() == programs[1].as_text()


def with_frozen_half():
    frozen = pz.freeze_params(pz.Parameter(value=weights(jnp.float16)["w"], label="half"))
    return {"half": frozen, "w": pz.Parameter(value=weights()["w"], label="w")}


@pytest.mark.parametrize(
    ("model", "keeps"),
    [
        (linear, True),
        (lambda: pz.nn.Sequential([InPrecision(linear(), "float32")]), True),
        (lambda: weights(jnp.float16), True),
        (lambda: linear("bfloat16"), False),
        (lambda: weights(jnp.bfloat16), False),
        (lambda: linear(None), False),
        (with_frozen_half, False),
    ],
)
def test_a_state_keeps_a_scale_where_float16_is_computed_in(model, keeps):
    state = initial(model(), optax.sgd(0.1), KEY)
    assert sorted(state.guards) == (GUARDS if keeps else [])
    assert initial(model(), optax.sgd(0.1), KEY, loss_scaling=None).guards == {}
    assert sorted(initial(model(), optax.sgd(0.1), KEY, loss_scaling="dynamic").guards) == GUARDS
    abstract = jax.eval_shape(lambda: initial(model(), optax.sgd(0.1), KEY))
    assert sorted(abstract.guards) == (GUARDS if keeps else [])


def test_gradients_too_small_for_float16_arrive():
    def small_loss(model, rng, state, x):
        loss, *rest = linear_loss(model, rng, state, x)
        return (loss * 1e-6, *rest)

    def moved(compute_dtype, **options):
        """How far one step moves each array."""
        state = initial(linear(compute_dtype), optax.sgd(1e6), KEY)
        new, _ = build_train_step_fn(small_loss, **options)(state, x=inputs())
        pairs = zip(values(new.params), values(state.params), strict=True)
        return np.concatenate([(a - b).ravel() for a, b in pairs])

    exact = moved(None)
    largest = np.abs(exact).max()
    errors = {
        scaling: np.abs(moved("float16", loss_scaling=scaling) - exact).max() / largest
        for scaling in ("auto", None, 2.0**14)
    }
    assert errors["auto"] < 5e-3
    assert errors[2.0**14] < 5e-3
    assert errors[None] > 0.5


def test_the_scale_follows_overflows_and_good_steps():
    scaling = DynamicLossScaling(initial=2.0**14, growth_interval=2)
    metrics = ("loss_scale", "skipped", "skipped_steps", "skipped_in_a_row")
    state = initial(linear(), optax.adam(1e-2), KEY, loss_scaling=scaling)
    step = build_train_step_fn(
        linear_loss,
        loss_scaling=scaling,
        donate_params_and_state=True,
        step_metrics=metrics,
    )
    seen = []
    # The gradient of the large inputs overflows in float16, and their loss does not.
    for scale in (1.0, 1.0, 60.0, 60.0, 1.0, 1.0):
        before = values(state.params) + values(state.opt_state)
        state, aux = step(state, x=inputs(scale))
        after = values(state.params) + values(state.opt_state)
        same = all(np.array_equal(a, b) for a, b in zip(before, after, strict=True))
        assert same == bool(aux["skipped"])
        seen.append(
            [
                float(aux[name])
                for name in ("loss_scale", "skipped", "skipped_steps", "skipped_in_a_row")
            ]
        )
        assert np.isfinite(float(aux["out"]))
    assert seen == [
        [2.0**14, 0, 0, 0],
        [2.0**14, 0, 0, 0],
        [2.0**15, 1, 1, 1],
        [2.0**14, 1, 2, 2],
        [2.0**13, 0, 2, 0],
        [2.0**13, 0, 2, 0],
    ]
    assert float(state.guards["loss_scale"]) == 2.0**14
    assert int(state.step) == 6
    assert int(state.opt_state[0].count) == 4
    (program,) = step._programs.values()
    assert program.run._cache_size() == 1


def test_a_scale_stays_between_its_bounds():
    scaling = DynamicLossScaling(initial=2.0, growth_interval=1, smallest=1.0)
    kept = scaling.start()
    for _ in range(3):
        kept = scaling.next(kept, jnp.asarray(False))
    assert float(kept["loss_scale"]) == 1.0
    kept["loss_scale"] = jnp.asarray(3e38, jnp.float32)
    assert float(scaling.next(kept, jnp.asarray(True))["loss_scale"]) == np.float32(3e38)


def test_the_scale_is_laid_out_saved_and_restored_with_the_state(mesh, tmp_path):
    rules = {"in": "data", "out": "model"}
    state = initial(linear(), optax.adam(1e-2), KEY)
    shardings = train_state_sharding(state, mesh, rules)
    state = jax.device_put(state, shardings)
    step = build_train_step_fn(linear_loss, train_state_shardings=shardings)
    x = shard_batch(inputs(100.0), mesh, {"batch": "data"})
    state, _ = step(state, x=x)
    assert float(state.guards["loss_scale"]) == 2.0**14
    path = save_train_state(tmp_path / "state", state)
    restored = restore_train_state(path, initial(linear(), optax.adam(1e-2), KEY), mesh, rules)
    assert_same(restored.guards, state.guards)
    jax.tree.map(_assert_laid_out, restored, shardings)
    again, _ = step(restored, x=x)
    expected, _ = step(state, x=x)
    assert_same(again.params, expected.params)
    assert float(again.guards["loss_scale"]) == 2.0**13


def _assert_laid_out(leaf, sharding):
    assert leaf.sharding == sharding


def test_a_run_that_began_without_guards_takes_those_of_a_new_state():
    state, _ = build_train_step_fn(loss_fn)(initial(weights(), optax.adam(1e-2), KEY), x=inputs())
    fresh = initial(weights(), optax.adam(1e-2), KEY, skip_nonfinite=True)
    state = dataclasses.replace(state, guards=fresh.guards)
    state, _ = build_train_step_fn(loss_fn, skip_nonfinite=True)(state, x=inputs(jnp.nan))
    assert (int(state.step), int(state.guards["skipped_steps"])) == (2, 1)
    assert np.isfinite(values(state.params)[0]).all()


@pytest.mark.parametrize(("broken", "steps"), [("loss", 1), ("gradient", 4), ("update", 1)])
def test_a_step_that_is_not_finite_changes_its_number_and_counts_alone(broken, steps):
    def loss(model, rng, state, x):
        model["seen"].value = model["seen"].value + 1
        value, _, aux = loss_fn({"w": model["w"].value}, rng, state, x)
        bad = jnp.any(jnp.isnan(x.unwrap("batch", "in")))
        weight = model["w"].value.unwrap("in", "out")
        if broken == "loss":
            value = value + jax.lax.stop_gradient(jnp.where(bad, jnp.inf, 0.0))
        elif broken == "gradient":
            clean = jnp.nan_to_num(x.unwrap("batch", "in")) @ weight
            # The gradient of a root at nought is infinite, and its value is not.
            value = jnp.mean(clean**2) + jnp.sqrt(jnp.where(bad, 0.0, 1.0) * jnp.sum(weight**2))
        else:
            value = jnp.where(bad, 1e30, 1.0) * jnp.sum(weight)
        return value, {"count": state["count"] + 1}, aux

    def model():
        return {
            "w": pz.Parameter(value=weights()["w"], label="w"),
            "seen": pz.StateVariable(value=0, label="seen"),
        }

    optimizer = optax.chain(optax.trace(0.9), optax.scale(-1e10 if broken == "update" else -0.1))
    state = initial(model(), optimizer, KEY, {"count": 0}, skip_nonfinite=True)
    step = build_train_step_fn(
        loss,
        skip_nonfinite=True,
        accumulate_steps=steps,
        donate_params_and_state=True,
        step_metrics=("skipped", "loss"),
    )
    state, aux = step(state, x=inputs())
    assert not aux["skipped"]
    kept = ("params", "opt_state", "state_vars", "loss_fn_state")
    before = [values(getattr(state, name)) for name in kept]
    assert int(before[2][0]) == int(before[3][0]) == steps
    x = inputs().unwrap("batch", "in").at[3, 2].set(jnp.nan)
    for row in (1, 2):
        state, aux = step(state, x=pz.nx.wrap(x, "batch", "in"))
        assert aux["skipped"]
        assert int(state.guards["skipped_in_a_row"]) == row
    for name, old in zip(kept, before, strict=True):
        assert_same(getattr(state, name), old)
    state, aux = step(state, x=inputs())
    assert (int(state.step), int(state.guards["skipped_steps"])) == (4, 2)
    assert int(state.guards["skipped_in_a_row"]) == 0
    assert int(state.loss_fn_state["count"]) == 2 * steps
    (program,) = step._programs.values()
    assert program.run._cache_size() == 1


LAYOUTS = {
    "fully_sharded": {"in": "data"},
    "tensor_parallel": {"out": "model"},
    "both": {"in": "data", "out": "model"},
}


def test_a_clipped_step_is_that_of_optax_under_every_layout(mesh):
    """With an own option and in the optimizer; over microbatches; the norm before clipping."""
    clip = optax.chain(optax.clip_by_global_norm(0.1), optax.adam(1e-2))
    expected, _ = build_train_step_fn(loss_fn)(initial(weights(), clip, KEY), x=inputs())
    grads = jax.grad(lambda model: loss_fn(model, None, None, inputs())[0])(weights())
    norm = float(optax.tree.norm(grads))
    assert norm > 0.4
    x = shard_batch(inputs(), mesh, {"batch": "data"})
    for i, rules in enumerate(LAYOUTS.values()):
        own = i % 2 == 0
        state = initial(weights(), optax.adam(1e-2) if own else clip, KEY)
        state = jax.device_put(state, train_state_sharding(state, mesh, rules))
        step = build_train_step_fn(
            loss_fn,
            clip_global_norm=0.1 if own else None,
            step_metrics="gradient_norm",
            accumulate_steps=2,
        )
        state, aux = step(state, x=x)
        assert_same(state.params, expected.params, rtol=1e-5)
        np.testing.assert_allclose(aux["gradient_norm"], norm, rtol=1e-5)


def test_a_gradient_shorter_than_allowed_is_left_alone():
    state = initial(weights(), optax.sgd(0.1), KEY)
    clipped, _ = build_train_step_fn(loss_fn, clip_global_norm=1e6)(state, x=inputs())
    assert_same(clipped.params, build_train_step_fn(loss_fn)(state, x=inputs())[0].params)


def test_a_gradient_whose_norm_overflows_is_not_clipped_to_nothing_in_silence():
    def steep(model, rng, state, x):
        return model["w"].unwrap("in", "out").sum() * 1e25, state, {}

    state = initial(weights(), optax.sgd(1e-2), KEY, skip_nonfinite=True)
    step = build_train_step_fn(
        steep, skip_nonfinite=True, clip_global_norm=1.0, step_metrics=["skipped", "gradient_norm"]
    )
    _, aux = step(state, x=inputs())
    assert bool(aux["skipped"])
    assert np.isinf(aux["gradient_norm"])


@pytest.mark.parametrize("explicit", [False, True])
def test_all_options_together_give_the_plain_step(explicit, mesh, explicit_mesh):
    chosen = explicit_mesh if explicit else mesh
    rules = {"in": "data", "out": "model"}
    state = initial(linear(None), optax.adam(1e-2), KEY)
    plain = build_train_step_fn(linear_loss)
    for _ in range(3):
        state, _ = plain(state, x=inputs())
    guarded = initial(
        linear(None), optax.adam(1e-2), KEY, loss_scaling="dynamic", skip_nonfinite=True
    )
    shardings = train_state_sharding(guarded, chosen, rules)
    guarded = jax.device_put(guarded, shardings)
    step = build_train_step_fn(
        linear_loss,
        train_state_shardings=shardings,
        donate_params_and_state=True,
        accumulate_steps=4,
        aux_reduction={"out": "mean"},
        loss_scaling="dynamic",
        skip_nonfinite=True,
        clip_global_norm=1e3,
        step_metrics=("loss", "gradient_norm", "skipped_steps", "loss_scale"),
    )
    x = shard_batch(inputs(), chosen, {"batch": "data"})
    nan = jax.tree.map(lambda data: data * jnp.nan, x)
    for batch in (x, nan, x, nan, x):
        guarded, aux = step(guarded, x=batch)
        jax.tree.map(_assert_laid_out, guarded, shardings)
    assert_same(guarded.params, state.params, rtol=1e-5)
    assert sorted(aux) == ["gradient_norm", "loss", "loss_scale", "out", "skipped_steps"]
    assert (int(aux["skipped_steps"]), float(aux["loss_scale"])) == (2, 2.0**13)
    (program,) = step._programs.values()
    assert program.run._cache_size() == 1


def test_a_trainer_takes_the_options():
    trainer = StatefulTrainer.build(
        KEY,
        weights(),
        optax.sgd(0.1),
        loss_fn,
        loss_scaling="dynamic",
        skip_nonfinite=True,
        clip_global_norm=0.5,
        step_metrics=("skipped_steps",),
    )
    for x in (inputs(), inputs(jnp.nan)):
        aux = trainer.step(x=x)
    assert int(aux["skipped_steps"]) == 1
    assert "guards/loss_scale" in str(trainer.notebook_table())


@pytest.mark.parametrize(
    ("state_options", "step_options", "fix"),
    [
        ({}, {"loss_scaling": "dynamic"}, r'key, loss_scaling="dynamic"\)'),
        ({}, {"skip_nonfinite": True}, r"key, skip_nonfinite=True\)"),
        (
            {"model": "half", "loss_scaling": None},
            {},
            r"build_train_step_fn\(loss_fn, ",
        ),
        ({}, {"step_metrics": ("loss_scale",)}, 'loss_scale: pass loss_scaling="dynamic" to'),
        ({}, {"step_metrics": ("skipped",)}, "skipped: pass skip_nonfinite=True to"),
        ({}, {"step_metrics": "loss", "aux": {"loss": 0.0}}, "loss: leave one of the two out"),
        (
            {},
            {"step_metrics": "loss", "aux": [0.0]},
            "dictionary, and the loss function ret",
        ),
    ],
)
def test_what_does_not_fit_the_state_is_refused(state_options, step_options, fix):
    half = state_options.pop("model", None)
    aux = step_options.pop("aux", None)
    state = initial(
        weights(jnp.float16 if half else jnp.float32), optax.sgd(0.1), KEY, **state_options
    )

    def loss(model, rng, state, x):
        return (*loss_fn(model, rng, state, x)[:2], aux)

    with pytest.raises(ShardingError, match=fix):
        build_train_step_fn(loss, **step_options)(state, x=inputs())


def test_metrics_are_added_to_no_outputs():
    def loss(model, rng, state, x):
        return (*loss_fn(model, rng, state, x)[:2], None)

    step = build_train_step_fn(loss, step_metrics="loss")
    _, aux = step(initial(weights(), optax.sgd(0.1), KEY), x=inputs())
    np.testing.assert_allclose(aux["loss"], loss_fn(weights(), None, None, inputs())[0], rtol=1e-6)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"loss_scaling": "dynamik"}, "must be 'auto', 'dynamic'.*Did you mean 'dynamic'"),
        ({"loss_scaling": 0}, "a positive number for a scale that stays, or None, not 0"),
        ({"loss_scaling": True}, "not True"),
        ({"loss_scaling": float("nan")}, "not nan"),
        ({"skip_nonfinite": 1}, "skip_nonfinite must be True or False, not 1"),
        ({"clip_global_norm": -1.0}, "clip_global_norm must be a positive number or None, not -1"),
        ({"clip_global_norm": True}, "not True"),
        ({"clip_global_norm": float("inf")}, "not inf"),
        ({"step_metrics": "gradient_nrm"}, "'gradient_nrm': .*Did you mean 'gradient_norm'"),
        ({"step_metrics": ["lr"]}, "'lr': is not a metric of a step. They are 'loss', "),
        ({"step_metrics": 3}, "step_metrics must be names, not 3"),
    ],
)
def test_options_that_cannot_be_read_are_refused(options, message):
    with pytest.raises(RuleTypeError, match=message):
        build_train_step_fn(loss_fn, **options)


@pytest.mark.parametrize(
    "bad",
    [{"initial": 0}, {"initial": "big"}, {"factor": 1}, {"growth_interval": 0.5}, {"smallest": -1}],
)
def test_scales_that_cannot_be_are_refused(bad):
    with pytest.raises(RuleTypeError, match="must be a"):
        DynamicLossScaling(**bad)
    with pytest.raises(RuleTypeError, match="skip_nonfinite must be"):
        functools.partial(initial, skip_nonfinite="yes")(weights(), optax.sgd(0.1), KEY)
