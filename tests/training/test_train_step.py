import gc
import sys
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from penzai import pz
from penzai.models.simple_mlp import DropoutMLP

from penzai_shard.errors import ShardingError
from penzai_shard.training import (
    TrainState,
    build_train_step_fn,
)


def initial(model, optimizer=None, **kwargs):
    return TrainState.initial_state(
        model, optimizer or optax.adam(1e-2), jax.random.key(3), **kwargs
    )


def values(tree):
    return [np.asarray(leaf) for leaf in jax.tree.leaves(tree)]


def assert_close(a, b, **kwargs):
    for left, right in zip(values(a), values(b), strict=True):
        np.testing.assert_allclose(left, right, **({"rtol": 1e-5, "atol": 1e-6} | kwargs))


@pytest.mark.parametrize("jit", [True, False])
def test_steps_equal_a_hand_written_optax_loop(make_model, loss_fn, batch, jit):
    optimizer = optax.adamw(1e-2)
    state = initial(make_model(), optimizer)
    step = build_train_step_fn(loss_fn, jit=jit)
    unbound, frozen = pz.unbind_params(make_model(), freeze=True)
    opt_state = optimizer.init(frozen)

    def loss_of(params):
        model = pz.bind_variables(unbound, params)
        return loss_fn(model=model, rng=None, state=None, **batch)[0]

    for _ in range(3):
        loss, grads = jax.value_and_grad(loss_of)(frozen)
        updates, opt_state = optimizer.update(grads, opt_state, frozen)
        frozen = optax.apply_updates(frozen, updates)
        state, aux = step(state, **batch)
        np.testing.assert_allclose(aux["loss"], loss, rtol=1e-5)
    assert int(state.step) == 3
    assert_close([state.params[p.label] for p in frozen], [p.value for p in frozen])


def test_any_number_of_steps_traces_once(make_model, loss_fn, batch):
    state = initial(make_model())
    step = build_train_step_fn(loss_fn)
    with jax.log_compiles(False):
        for _ in range(4):
            state, _ = step(state, **batch)
    assert loss_fn.traces == 1
    (program,) = step._programs.values()
    assert program.run._cache_size() == 1


def test_params_changed_in_place_are_seen_by_the_next_step(linear, batch):
    step = build_train_step_fn(linear.loss_fn)
    state, _ = step(initial(linear.weights, optax.sgd(0.0)), **batch)
    state.params["w"] = jax.tree.map(jnp.zeros_like, state.params["w"])
    after, aux = step(state, **batch)
    assert not np.any(after.params["w"].data_array)
    np.testing.assert_allclose(aux["loss"], np.mean(batch["y"].data_array ** 2), rtol=1e-6)
    (program,) = step._programs.values()
    assert program.run._cache_size() == 1


def test_reading_a_state_does_not_change_it(linear, batch):
    step = build_train_step_fn(linear.loss_fn)
    state, _ = step(initial(linear.weights), **batch)
    state.step, state.root_rng, state.model, jax.tree.leaves(state), repr(state)
    assert "params" not in state.__dict__
    flat = state.__dict__["_flat"]
    state.params, state.opt_state
    from penzai_shard.training.train_state import to_flat

    assert to_flat(state) is flat


def test_no_state_outlives_its_last_reference(linear, batch):
    step = build_train_step_fn(linear.loss_fn)
    state = initial({"w": jax.tree.map(jnp.copy, linear.weights["w"])})
    seen = []
    for _ in range(3):
        state, _ = step(state, **batch)
        seen.append(weakref.ref(state.__dict__["_flat"].changing[1]))
    gc.collect()
    assert [ref() is None for ref in seen] == [True, True, False]
    del state
    gc.collect()
    assert seen[-1]() is None


def test_donation_takes_the_old_state_and_leaves_frozen_and_constants(make_model, loss_fn, batch):
    model = make_model()
    model.sublayers[0].sublayers[0].weights.metadata["trainable"] = False
    state = initial(model)
    frozen = state.params["mlp/Affine_0/Linear.weights"].data_array
    before = np.asarray(frozen)
    trained = [v.data_array for n, v in state.params.items() if n != "mlp/Affine_0/Linear.weights"]
    step = build_train_step_fn(loss_fn, donate_params_and_state=True)
    for _ in range(3):
        state, _ = step(state, **batch)
    assert all(array.is_deleted() for array in trained)
    assert not frozen.is_deleted()
    assert not state.root_rng.is_deleted()
    kept = state.params["mlp/Affine_0/Linear.weights"].data_array
    assert kept.unsafe_buffer_pointer() == frozen.unsafe_buffer_pointer()
    np.testing.assert_array_equal(frozen, before)


def test_donation_copes_with_an_array_that_is_there_twice(linear, batch):
    weights = {"w": jax.tree.map(jnp.copy, linear.weights["w"])}
    state = initial(weights, loss_fn_state={"start": weights["w"]})
    step = build_train_step_fn(linear.loss_fn, donate_params_and_state=True)
    for _ in range(2):
        state, _ = step(state, **batch)
    np.testing.assert_array_equal(
        state.loss_fn_state["start"].data_array, linear.weights["w"].data_array
    )


def test_donation_without_jit_is_refused(loss_fn):
    with pytest.raises(ShardingError, match="needs compilation"):
        build_train_step_fn(loss_fn, jit=False, donate_params_and_state=True)


def test_frozen_parameters_get_no_gradient_and_stay(linear, batch):
    weights = linear.weights | {"unused": jnp.ones(3)}
    state = initial(weights, optax.adamw(0.1), trainable=lambda p: p.label != "unused")
    state, _ = build_train_step_fn(linear.loss_fn)(state, **batch)
    np.testing.assert_array_equal(state.params["unused"], np.ones(3))
    assert sorted(state.params) == ["unused", "w"]


def test_state_variables_are_updated_and_may_reorder_their_axes():
    model = {
        "w": pz.Parameter(value=pz.nx.ones({"a": 2}), label="w"),
        "count": pz.StateVariable(value=0, label="count"),
        "table": pz.StateVariable(value=pz.nx.ones({"a": 2, "b": 3})),
    }

    def loss_fn(model, rng, state):
        model["count"].value = model["count"].value + 1
        table = model["table"].value * 2
        model["table"].value = pz.nx.wrap(table.unwrap("b", "a"), "b", "a")
        return model["w"].value.untag("a").sum(), state, None

    step = build_train_step_fn(loss_fn)
    state = initial(model)
    for _ in range(3):
        state, _ = step(state)
    assert int(state.state_vars["count"]) == 3
    assert list(state.state_vars["table"].named_axes) == ["a", "b"]
    np.testing.assert_array_equal(state.state_vars["table"].data_array, np.full((2, 3), 8.0))
    assert int(state.model["count"].value) == 3
    assert next(iter(step._programs.values())).run._cache_size() == 1


def test_assigning_to_a_parameter_in_the_loss_fails():
    def loss_fn(model, rng, state):
        model["w"].value = model["w"].value * 2
        return jnp.float32(0), state, None

    model = {"w": pz.Parameter(value=pz.nx.ones({"a": 2}), label="w")}
    with pytest.raises(AttributeError, match="cannot assign to field 'value'"):
        build_train_step_fn(loss_fn)(initial(model))


def test_loss_state_is_threaded_through(linear, batch):
    def loss_fn(model, rng, state, x, y):
        loss, _, aux = linear.loss_fn(model, rng, state, x, y)
        return loss, {"seen": state["seen"] + 1.0}, aux

    state = initial(linear.weights, loss_fn_state={"seen": 0.0})
    step = build_train_step_fn(loss_fn)
    for _ in range(3):
        state, _ = step(state, **batch)
    assert float(state.loss_fn_state["seen"]) == 3.0
    assert next(iter(step._programs.values())).run._cache_size() == 1


def test_each_step_has_its_own_randomness(batch):
    model = DropoutMLP.from_config(jax.random.key(0), [8, 32, 8], drop_rate=0.5)

    def loss_with_stream(model, rng, state, x):
        out = model(x, random_stream=pz.RandomStream.from_base_key(rng))
        return (
            out.untag("batch", "features").mean(),
            state,
            {
                "draw": jax.random.uniform(rng),
                "out": out,
            },
        )

    state = initial(model, optax.sgd(0.0))
    step = build_train_step_fn(loss_with_stream)
    first, a = step(state, x=batch["x"])
    _, again = step(state, x=batch["x"])
    _, b = step(first, x=batch["x"])
    expected = jax.random.uniform(jax.random.fold_in(jax.random.key(3), 0))
    assert float(a["draw"]) == float(again["draw"]) == float(expected)
    assert float(a["draw"]) != float(b["draw"])
    assert np.any(a["out"].data_array != b["out"].data_array)


def test_v1_model_trains():
    from penzai.deprecated.v1 import pz as pz_v1

    definition = pz_v1.nn.Affine.from_config({"features": 4}, {"features": 2})
    model = pz_v1.nn.initialize_parameters(definition, jax.random.key(0))
    x = pz.nx.wrap(jnp.ones((8, 4)), "batch", "features")

    def loss_fn(model, rng, state, x):
        loss = (model(x).untag("batch", "features").unwrap() ** 2).mean()
        return loss, state, loss

    step = build_train_step_fn(loss_fn)
    state, first = step(initial(model, optax.sgd(0.1)), x=x)
    for _ in range(5):
        state, last = step(state, x=x)
    assert float(last) < float(first)
    assert type(state.model) is type(model)


def test_step_works_inside_other_transformations(linear, batch):
    step = build_train_step_fn(linear.loss_fn)
    state = initial(linear.weights)
    expected, _ = step(step(state, **batch)[0], **batch)
    scanned, aux = jax.lax.scan(lambda s, _: step(s, **batch), state, None, length=2)
    assert_close(scanned.params, expected.params)
    assert aux["loss"].shape == (2,)
    abstract, _ = jax.eval_shape(step, state, **batch)
    assert jax.tree.structure(abstract) == jax.tree.structure(state)


def test_optimizers_that_watch_the_loss_get_it(linear, batch):
    optimizer = optax.chain(optax.adam(1e-2), optax.contrib.reduce_on_plateau())
    step = build_train_step_fn(linear.loss_fn)
    state, _ = step(initial(linear.weights, optimizer), **batch)
    step(state, **batch)


def test_mixed_precision_state_keeps_its_dtypes(linear, batch):
    weights = jax.tree.map(lambda w: w.astype(jnp.bfloat16), linear.weights)
    state = initial(weights, optax.adamw(1e-2, mu_dtype=jnp.float32))
    dtypes = [leaf.dtype for leaf in jax.tree.leaves(state)]
    step = build_train_step_fn(linear.loss_fn)
    for _ in range(2):
        state, _ = step(state, **batch)
    assert [leaf.dtype for leaf in jax.tree.leaves(state)] == dtypes


@pytest.mark.parametrize(
    ("loss_fn", "message"),
    [
        (lambda model, rng, state, x: (jnp.float32(0), state, None), "cannot be called with"),
        (
            lambda model, rng, state, x, y: jnp.float32(0),
            r"returned one array of shape \(\); it must be",
        ),
        (lambda model, rng, state, x, y: (jnp.float32(0), state), "returned 2 values"),
        (lambda model, rng, state, x, y: (x, state, 0), r"untag\('batch', 'features'\)"),
        (lambda model, rng, state, x, y: (jnp.ones(2), state, 0), r"of shape \(2,\)"),
        (lambda model, rng, state, x, y: (jnp.int32(0), state, 0), "floating scalar"),
        (
            lambda model, rng, state, x, y: (jnp.float32(0), {}, 0),
            "loss_fn_state/seen: went missing",
        ),
        (
            lambda model, rng, state, x, y: (jnp.float32(0), {"seen": jnp.ones(2)}, 0),
            r"seen: was float32 of shape \(\), became float32 of shape \(2,\)",
        ),
    ],
)
def test_broken_loss_functions_are_told_what_to_do(linear, batch, loss_fn, message):
    state = initial(linear.weights, loss_fn_state={"seen": 0.0})
    with pytest.raises(ShardingError, match=message):
        build_train_step_fn(loss_fn)(state, **batch)


def test_reserved_input_names_are_refused(linear):
    with pytest.raises(ShardingError, match="inputs cannot be named rng"):
        build_train_step_fn(linear.loss_fn)(initial(linear.weights), rng=1)


def test_abstract_and_foreign_states_are_refused(linear, batch):
    step = build_train_step_fn(linear.loss_fn)
    abstract = jax.eval_shape(lambda: initial(linear.weights))
    with pytest.raises(ShardingError, match="this train state is abstract"):
        step(abstract, **batch)
    with pytest.raises(ShardingError, match=r"takes a TrainState first, .* got a dict"):
        step({}, **batch)


def test_python_calls_per_step_do_not_grow_with_the_model():
    def loss_fn(model, rng, state, x):
        arrays = [leaf for leaf in jax.tree.leaves(model) if leaf.ndim]
        return x * sum(jnp.sum(array) for array in arrays), state, None

    def calls(count):
        weights = {f"w{i}": pz.nx.ones({"a": 2}) for i in range(count)}
        step = build_train_step_fn(loss_fn, donate_params_and_state=True)
        state, x = initial(weights), jnp.float32(1)
        for _ in range(3):
            state, _ = step(state, x=x)
        seen = []
        sys.setprofile(lambda frame, event, arg: seen.append(event))
        try:
            state, _ = step(state, x=x)
        finally:
            sys.setprofile(None)
        return sum(event in ("call", "c_call") for event in seen)

    assert calls(2) == calls(40) < 100


def test_scalar_constants_are_passed_in_one_array_and_keep_their_weak_types(linear, batch):
    def model(epsilons):
        return [
            {"w": pz.Parameter(value=linear.weights["w"], label="w"), "eps": list(epsilons[:4])},
            {"eps": list(epsilons[4:])},
        ]

    def loss_fn(model, rng, state, x, y):
        assert model[0]["eps"][0].weak_type
        loss, state, _ = linear.loss_fn({"w": model[0]["w"].value}, rng, state, x, y)
        return loss, state, {"eps": model[0]["eps"] + model[1]["eps"]}

    step = build_train_step_fn(loss_fn)
    for epsilons in ([0.5, 0.5, 0.5, 0.5, 0.5, 0.25], [1.0, 2.0, 3.0, 4.0, 5.0, 6.0]):
        state, aux = step(initial(model(epsilons)), **batch)
        assert [float(x) for x in aux["eps"]] == epsilons
        assert len(state.__dict__["_flat"].constant) == 7
        assert len(state.__dict__["_flat"].packed) == 2
        assert [float(x) for x in state.model[1]["eps"]] == epsilons[4:]
    (program,) = step._programs.values()  # No value is part of a program's key.
    assert program.run._cache_size() == 1
