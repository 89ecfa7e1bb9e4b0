"""Which optimizers share a compiled step: only those that are known to compute the same."""

import functools
import threading

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from penzai_shard.training import TrainState, build_train_step_fn, train_state_sharding
from penzai_shard.training.compiled_step import MOST_PROGRAMS
from penzai_shard.training.optimizer_identity import OptimizerIdentity


def schedule(peak=1e-2, steps=100):
    return optax.warmup_cosine_decay_schedule(0.0, peak, 10, steps)


def chain(clip=1.0, **kwargs):
    return optax.chain(optax.clip_by_global_norm(clip), optax.adamw(schedule(), **kwargs))


SAME = {
    "adam": lambda: optax.adam(1e-2),
    "adamw with a schedule": lambda: optax.adamw(schedule(), weight_decay=0.1),
    "chain": chain,
    "sgd": lambda: optax.sgd(0.1, momentum=0.9, nesterov=True),
    "masked": lambda: optax.masked(optax.adam(1e-2), {"w": True}),
    "inject_hyperparams": lambda: optax.inject_hyperparams(optax.adam)(learning_rate=1e-2),
    "partition": lambda: optax.partition({"a": optax.adam(1e-2)}, {"w": "a"}),
    "adafactor": lambda: optax.adafactor(1e-2),
    "lbfgs": lambda: optax.lbfgs(),
}


def same_schedule(count):
    return 1e-3 * count


rates = [1e-2]
ARRAY = jax.random.key(0)

# Each pair computes something else, or is not known to compute the same.
DIFFERENT = {
    "learning rate": (lambda: optax.adam(1e-2), lambda: optax.adam(2e-2)),
    "learning rate, in the last place": (
        lambda: optax.adam(1e-2),
        lambda: optax.adam(float(np.nextafter(1e-2, 1.0))),
    ),
    "integer and float": (lambda: optax.sgd(1), lambda: optax.sgd(1.0)),
    "true and one": (lambda: optax.scale(True), lambda: optax.scale(1)),
    "sign of zero": (lambda: optax.scale(0.0), lambda: optax.scale(-0.0)),
    "b2": (lambda: optax.adam(1e-2), lambda: optax.adam(1e-2, b2=0.99)),
    "dtype": (lambda: optax.adam(1e-2), lambda: optax.adam(1e-2, mu_dtype=jnp.bfloat16)),
    "nesterov": (lambda: optax.adam(1e-2), lambda: optax.adam(1e-2, nesterov=True)),
    "function": (lambda: optax.adam(1e-2), lambda: optax.adamw(1e-2)),
    "schedule": (lambda: optax.adam(schedule()), lambda: optax.adam(schedule(2e-2))),
    "length of a schedule": (
        lambda: optax.adam(schedule()),
        lambda: optax.adam(schedule(steps=101)),
    ),
    "order of a chain": (
        lambda: optax.chain(optax.scale(2.0), optax.clip(1.0)),
        lambda: optax.chain(optax.clip(1.0), optax.scale(2.0)),
    ),
    "length of a chain": (
        lambda: optax.chain(optax.scale(2.0)),
        lambda: optax.chain(optax.scale(2.0), optax.scale(2.0)),
    ),
    "clip in a chain": (chain, lambda: chain(2.0)),
    "mask": (
        lambda: optax.masked(optax.adam(1e-2), {"w": True}),
        lambda: optax.masked(optax.adam(1e-2), {"w": False}),
    ),
    "injected rate": (
        lambda: optax.inject_hyperparams(optax.adam)(learning_rate=1e-2),
        lambda: optax.inject_hyperparams(optax.adam)(learning_rate=2e-2),
    ),
    "injected function": (
        lambda: optax.inject_hyperparams(optax.adam)(learning_rate=1e-2),
        lambda: optax.inject_hyperparams(optax.adamw)(learning_rate=1e-2),
    ),
    "label": (
        lambda: optax.partition({"a": optax.adam(1e-2), "b": optax.sgd(0.1)}, {"w": "a"}),
        lambda: optax.partition({"a": optax.adam(1e-2), "b": optax.sgd(0.1)}, {"w": "b"}),
    ),
    "a user's function, twice": (
        lambda: optax.adam(lambda count: rates[0]),
        lambda: optax.adam(lambda count: rates[0]),
    ),
    "arrays of equal value": (
        lambda: optax.sgd(jnp.asarray(1e-2)),
        lambda: optax.sgd(jnp.asarray(1e-2)),
    ),
    "NumPy numbers": (lambda: optax.sgd(np.float32(1)), lambda: optax.sgd(np.float32(1))),
    "accumulation": (
        lambda: optax.MultiSteps(optax.adam(1e-2), 2),
        lambda: optax.MultiSteps(optax.adam(1e-2), 3),
    ),
}


@pytest.mark.parametrize("name", list(SAME))
def test_equal_calls_of_optax_are_one_optimizer(name):
    first, second = OptimizerIdentity.of(SAME[name]()), OptimizerIdentity.of(SAME[name]())
    assert first == second
    assert hash(first) == hash(second)


@pytest.mark.parametrize("name", list(DIFFERENT))
def test_optimizers_not_known_to_be_equal_are_two(name):
    first, second = (OptimizerIdentity.of(make()) for make in DIFFERENT[name])
    assert first != second
    same = DIFFERENT[name][0]()
    assert OptimizerIdentity.of(same) == OptimizerIdentity.of(same)


def test_the_same_function_or_array_in_two_is_the_same():
    for make in (
        lambda: optax.adam(same_schedule),
        lambda: optax.adam(functools.partial(same_schedule)),
        lambda: optax.noisy_sgd(0.1, key=ARRAY),
    ):
        assert OptimizerIdentity.of(make()) == OptimizerIdentity.of(make())


def test_functions_that_pass_for_those_of_optax_are_not_trusted():
    def make(rate):
        made = optax.sgd(0.1)

        @functools.wraps(made.update)
        def update(updates, state, params=None):
            return jax.tree.map(lambda u: -rates[0] * u, updates), state

        return optax.GradientTransformation(made.init, update)

    assert make(1).update.__module__.startswith("optax")
    assert OptimizerIdentity.of(make(1)) != OptimizerIdentity.of(make(1))


def test_a_list_that_was_changed_is_not_what_it_was():
    boundaries = {5: 0.1}
    made = optax.sgd(optax.piecewise_constant_schedule(1.0, boundaries))
    identity = OptimizerIdentity.of(made)
    assert identity.is_current()
    boundaries[5] = 0.5
    assert identity.is_current() == (OptimizerIdentity.of(made) == identity)


def initial(optimizer, value=1.0):
    return TrainState.initial_state({"w": jnp.full(3, value)}, optimizer, jax.random.key(0))


def loss_fn(model, rng, state, x):
    return jnp.sum((model["w"] - x) ** 2), state, None


@pytest.mark.parametrize("name", ["adam", "chain", "inject_hyperparams"])
def test_states_of_equal_optimizers_share_one_program(name):
    traces = []

    def counted(model, rng, state, x):
        traces.append(name)
        return loss_fn(model, rng, state, x)

    step = build_train_step_fn(counted, donate_params_and_state=True)
    for number in range(6):
        state, _ = step(initial(SAME[name](), float(number)), x=jnp.zeros(3))
        state, _ = step(state, x=jnp.zeros(3))
    assert len(traces) == 1
    assert len(step._programs) == 1
    assert jax.tree.structure(initial(SAME[name]())) == jax.tree.structure(initial(SAME[name]()))


def test_states_of_other_optimizers_are_trained_with_their_own():
    step = build_train_step_fn(loss_fn)
    moved = [
        float(step(initial(optax.sgd(r)), x=jnp.zeros(3))[0].params["w"][0]) for r in (0.1, 0.2)
    ]
    np.testing.assert_allclose(moved, [1 - 0.2, 1 - 0.4], rtol=1e-6)


def test_an_optimizer_changed_before_its_first_step_is_trained_as_it_is():
    rate = {"learning_rate": 0.1}

    def update(updates, state, params=None, *, held=rate):
        return jax.tree.map(lambda u: -held["learning_rate"] * u, updates), state

    step = build_train_step_fn(loss_fn)
    for value in (0.1, 0.2, 0.1):
        rate["learning_rate"] = value
        made = optax.GradientTransformation(
            lambda params: (),
            functools.partial(update),  # A new one, of the same function.
        )
        state, _ = step(initial(made), x=jnp.zeros(3))
        np.testing.assert_allclose(state.params["w"], 1 - 2 * value, rtol=1e-6)


def test_shardings_of_a_state_with_an_equal_optimizer_fit(mesh, make_model, batch, loss_fn):
    def state():
        return TrainState.initial_state(make_model(), optax.adam(1e-2), jax.random.key(0))

    shardings = train_state_sharding(state(), mesh, {"features_out": "model"})
    placed = jax.device_put(state(), shardings)
    step = build_train_step_fn(loss_fn, train_state_shardings=shardings)
    after, _ = step(placed, **batch)
    jax.tree.map(lambda x, s: x.sharding == s or pytest.fail(str(s)), after, shardings)
    # Another rate is another program, but no other layout.
    other = TrainState.initial_state(make_model(), optax.adam(2e-2), jax.random.key(0))
    other = jax.tree.unflatten(
        jax.tree.structure(other), jax.tree.leaves(jax.device_put(state(), shardings))
    )
    step(other, **batch)
    assert len(step._programs) == 2


def test_a_step_keeps_a_bounded_number_of_programs():
    step = build_train_step_fn(loss_fn, jit=False)
    for number in range(MOST_PROGRAMS + 5):
        step(initial(optax.sgd(0.01 * number)), x=jnp.zeros(3))
    assert len(step._programs) == MOST_PROGRAMS


def test_threads_that_share_a_step_get_their_own_answers():
    step = build_train_step_fn(loss_fn, donate_params_and_state=True)
    barrier = threading.Barrier(8)
    results = {}

    def train(number):
        state = initial(optax.sgd(0.1 if number % 2 else 0.2), float(number))
        barrier.wait()
        for _ in range(20):
            state, _ = step(state, x=jnp.zeros(3))
        results[number] = float(state.params["w"][0])

    threads = [threading.Thread(target=train, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    expected = {n: n * (0.8 if n % 2 else 0.6) ** 20 for n in range(8)}
    assert results == pytest.approx(expected, rel=1e-4, abs=1e-9)
    assert len(step._programs) == 2
