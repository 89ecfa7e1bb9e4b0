"""Train states whose arrays are stored padded: true lengths in a step, zeros in the padding."""

import itertools
import pickle

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import strategies as st
from penzai import pz

from penzai_shard import (
    ConstrainShardingByName,
    StatefulTrainer,
    TrainState,
    build_eval_step_fn,
    build_train_step_fn,
    fit,
    make_mesh,
    make_plan,
    param_dict,
    place,
    shard_batch,
    train_state_sharding,
    why,
)
from penzai_shard.errors import PlanError, RuleTypeError, ShardingError
from penzai_shard.padded_arrays import is_padded, without_padding
from penzai_shard.training.train_state import with_own_buffers
from tests.layouts.preset_runs import compilations
from tests.training.test_optimizer_states import OPTIMIZERS as COMMON

MESH = make_mesh({"data": 4, "model": 2})
RULES = {"in": "data", "out": "model", "batch": "data"}

OPTIMIZERS = COMMON | {
    "adafactor of small arrays": lambda: optax.adafactor(1e-2, min_dim_size_to_factor=2),
    "noisy_sgd": lambda: optax.noisy_sgd(1e-2, key=jax.random.key(5)),
    "ema": lambda: optax.chain(optax.adam(1e-2), optax.ema(0.9)),
    # What these make of zeros, or of how many there are, is not nothing.
    "rprop": lambda: optax.rprop(1e-2),
    "adan": lambda: optax.adan(1e-2, weight_decay=1e-2),
    "signs": lambda: optax.chain(optax.scale_by_sign(), optax.sgd(1e-2, 0.9, nesterov=True)),
    "norms": lambda: optax.chain(
        optax.normalize_by_update_norm(),
        optax.apply_if_finite(
            optax.chain(optax.centralize(), optax.scale_by_param_block_rms(), optax.scale(-1e-2)), 2
        ),
    ),
}


def weights(prefix="", seed=0):
    w, b = (jax.random.key(seed + i) for i in range(2))
    return {
        f"{prefix}weights": pz.nx.wrap(jax.random.normal(w, (5, 7)), "in", "out"),
        f"{prefix}bias": pz.nx.wrap(jax.random.normal(b, (7,)), "out"),
    }


def inputs(examples=8):
    return {"x": pz.nx.wrap(jax.random.normal(jax.random.key(9), (examples, 5)), "batch", "in")}


def squares(model, rng, state, x, prefix=""):
    y = (model[f"{prefix}weights"] * x).untag("in").sum() + model[f"{prefix}bias"]
    loss = jnp.mean(y.untag("batch", "out").unwrap() ** 2)
    return loss, state, {"loss": loss}


def padded(tree, mesh=MESH, rules=RULES):
    return place(tree, mesh, rules, on_indivisible="pad")


def padded_nodes(tree):
    return [node for node in jax.tree.leaves(tree, is_leaf=is_padded) if is_padded(node)]


def assert_padding_is_zero(tree):
    nodes = padded_nodes(tree)
    assert nodes
    for node in nodes:
        padding = np.array(node.stored)
        assert padding.shape != node.data_array.shape
        padding[tuple(map(slice, node.data_array.shape))] = 0
        assert not padding.any()


def numbers(tree):
    leaves = jax.tree.leaves(without_padding(tree))
    return [
        np.asarray(jax.random.key_data(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x)
        for x in leaves
    ]


def assert_same(tree, other, tolerance=1e-5):
    for one, two in zip(numbers(tree), numbers(other), strict=True):
        np.testing.assert_allclose(one, two, rtol=tolerance, atol=tolerance)


def trained(model, optimizer, loss_fn=squares, steps=3, **options):
    state = TrainState.initial_state(model, optimizer, jax.random.key(1))
    step = build_train_step_fn(loss_fn, **options)
    auxes = []
    for _ in range(steps):
        state, aux = step(state, **inputs())
        auxes.append(aux)
    return state, auxes


def of_all(model, rng, state, x):
    """The sum of the losses of a copy of the weights for each optimizer."""
    losses = {name: squares(model, rng, state, x, f"{name}/")[0] for name in OPTIMIZERS}
    return sum(losses.values()), state, losses


@pytest.fixture(scope="module")
def all_optimizers():
    """A few steps of all optimizers, each with weights of its own; and the same without padding."""
    model = {k: v for name in OPTIMIZERS for k, v in weights(f"{name}/").items()}
    optimizer = optax.partition(
        {name: make() for name, make in OPTIMIZERS.items()},
        {k: k.partition("/")[0] for k in model},
    )
    return trained(padded(model), optimizer, of_all), trained(model, optimizer, of_all)


@pytest.mark.parametrize("name", list(OPTIMIZERS))
def test_losses_parameters_and_states_are_those_of_true_lengths(all_optimizers, name):
    (state, losses), (expected, expected_losses) = all_optimizers
    assert_same([x[name] for x in losses], [x[name] for x in expected_losses])
    of_one = [
        (
            [x for key, x in each.params.items() if key.startswith(f"{name}/")],
            each.opt_state.inner_states[name],
        )
        for each in (state, expected)
    ]
    assert_same(*of_one)
    assert_padding_is_zero(of_one[0][0])
    if padded_nodes(of_one[0][1]):
        assert_padding_is_zero(of_one[0][1])


SAFEGUARDS = {
    "accumulate_steps": 2,
    "clip_global_norm": 0.5,
    "skip_nonfinite": True,
    "loss_scaling": "dynamic",
    "step_metrics": ("gradient_norm",),
}


def safe_state(model, optimizer=None):
    return TrainState.initial_state(
        model,
        optimizer or optax.adamw(1e-2),
        jax.random.key(1),
        loss_scaling="dynamic",
        skip_nonfinite=True,
    )


class SafeRun:
    """Four steps with microbatches, clipping, loss scaling and donation; the third has an Inf."""

    def __init__(self, model):
        self.state = safe_state(model)
        step = build_train_step_fn(squares, donate_params_and_state=True, **SAFEGUARDS)
        self.auxes, self.compilations = [], []
        batch = inputs()
        broken = {"x": batch["x"] * jnp.inf}
        for each in (batch, batch, broken, batch):
            before = self.state
            with compilations() as counted:
                self.state, aux = step(before, **each)
            self.donated = jax.tree.leaves(before.params)[0].is_deleted()
            self.auxes.append(aux)
            self.compilations.append(len(counted))


@pytest.fixture(scope="module")
def safe_runs():
    return SafeRun(padded(weights())), SafeRun(weights())


def test_microbatches_and_guards_see_true_lengths(safe_runs):
    run, expected = safe_runs
    assert_same(run.auxes, expected.auxes)
    assert_same(
        (run.state.params, run.state.opt_state), (expected.state.params, expected.state.opt_state)
    )
    assert [int(run.state.guards[name]) for name in ("skipped_steps", "skipped_in_a_row")] == [1, 0]
    assert_padding_is_zero((run.state.params, run.state.opt_state))


def test_padded_states_are_donated_and_compiled_once(safe_runs):
    assert safe_runs[0].donated
    assert safe_runs[0].compilations[1:] == [0, 0, 0]


def test_a_padded_state_shows_true_lengths_and_what_is_stored(safe_runs):
    state = safe_runs[0].state
    assert {k: x.named_shape for k, x in param_dict(state.model).items()} == {
        "weights": {"in": 5, "out": 7},
        "bias": {"out": 7},
    }
    np.testing.assert_array_equal(
        (state.model["weights"] + 1).unwrap("in", "out"), state.params["weights"].data_array + 1
    )
    assert "in=5(8)/data, out=7(8)/model" in str(state.notebook_table())
    plan = str(make_plan(state, MESH, RULES, on_indivisible="pad"))
    assert "'in' (5) padded to 8 over mesh axis 'data' (4)" in plan


def test_copies_of_padded_states_are_padded(safe_runs):
    state = safe_runs[0].state
    copies = [
        with_own_buffers(state),
        jax.tree.map(jnp.copy, state),
        pickle.loads(pickle.dumps(jax.device_get((state.params, state.opt_state)))),
    ]
    for copy in copies:
        if isinstance(copy, TrainState):
            copy = (copy.params, copy.opt_state)
        own = (state.params, state.opt_state)
        assert jax.tree.structure(copy) == jax.tree.structure(own)
        assert_same(copy, own, 0)


def test_padding_that_was_written_to_never_counts(safe_runs):
    state = safe_state(padded(weights()))
    state.params["weights"] = jax.tree.map(
        lambda x: jnp.where(x == 0, jnp.nan, x), state.params["weights"]
    )
    step = build_train_step_fn(squares, **SAFEGUARDS)
    state, aux = step(state, **inputs())
    assert_same(aux, safe_runs[1].auxes[0])
    assert_padding_is_zero(state.params)


def test_a_padded_state_is_evaluated_with_true_lengths(safe_runs):
    run, expected = safe_runs
    evaluate = build_eval_step_fn(squares)
    assert_same(evaluate(run.state, **inputs()), evaluate(expected.state, **inputs()))


def test_why_tells_of_gradients_of_padded_parameters():
    state = TrainState.initial_state(padded(weights()), optax.sgd(0.1), jax.random.key(1))
    rows = why(build_train_step_fn(squares), state, **inputs()).of_kind("gradient")
    assert {row.label: (row.shape, row.spec) for row in rows} == {
        "weights": ((5, 7), (("data",), ("model",))),
        "bias": ((7,), (("model",),)),
    }


def test_steps_without_compilation_take_padded_states():
    def pinned(model, rng, state, x):
        pin = ConstrainShardingByName(MESH, {"in": "data", "out": "model"}, on_indivisible="pad")
        return squares(pin(model), rng, state, x)

    state, _ = trained(padded(weights()), optax.sgd(0.1), pinned, 1, jit=False)
    given = [np.asarray(x.data_array) for x in (*weights().values(), *inputs().values())]
    by_hand = trained_by_hand(*given, steps=1)[:2]
    for name, expected in zip(("weights", "bias"), by_hand, strict=True):
        found = state.params[name].data_array
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)
    assert_padding_is_zero(state.params)


def trained_by_hand(w, b, x, steps, rate=0.1, momentum=0.9):
    """Gradient descent with momentum, written out."""
    velocity = [np.zeros_like(w), np.zeros_like(b)]
    for _ in range(steps):
        slope = 2 * (x @ w + b) / (x.shape[0] * b.shape[0])
        for v, gradient in zip(velocity, (x.T @ slope, slope.sum(0)), strict=True):
            v *= momentum
            v += gradient
        w, b = w - rate * velocity[0], b - rate * velocity[1]
    return w, b, *velocity


@hypothesis.settings(max_examples=5, deadline=None, derandomize=True)
@hypothesis.given(
    lengths=st.tuples(st.integers(1, 11), st.integers(1, 11)),
    sizes=st.sampled_from([(8, 1), (4, 2), (2, 4), (2, 2), (1, 8)]),
    splits=st.sampled_from([("data", "model"), ("model", "data"), (("data", "model"), None)]),
    explicit=st.booleans(),
)
def test_any_lengths_on_any_mesh_train_as_by_hand(lengths, sizes, splits, explicit):
    kind = jax.sharding.AxisType.Explicit if explicit else jax.sharding.AxisType.Auto
    devices = jax.devices()[: sizes[0] * sizes[1]]
    mesh = jax.make_mesh(sizes, ("data", "model"), axis_types=(kind,) * 2, devices=devices)
    rng = np.random.default_rng(0)
    w, b, x = (
        rng.normal(size=s).astype(np.float32) for s in (lengths, lengths[1:], (4, lengths[0]))
    )
    model = {"weights": pz.nx.wrap(w, "in", "out"), "bias": pz.nx.wrap(b, "out")}
    rules = dict(zip(("in", "out"), splits, strict=True))
    state = TrainState.initial_state(
        padded(model, mesh, rules), optax.sgd(0.1, momentum=0.9), jax.random.key(0)
    )
    step = build_train_step_fn(squares)
    for _ in range(2):
        state, _ = step(state, x=pz.nx.wrap(x, "batch", "in"))
    velocity = state.opt_state[0].trace
    found = [t[name].data_array for t in (state.params, velocity) for name in model]
    for one, two in zip(found, trained_by_hand(w, b, x, 2), strict=True):
        np.testing.assert_allclose(one, two, rtol=1e-5, atol=1e-5)
    if padded_nodes((state.params, velocity)):
        assert_padding_is_zero((state.params, velocity))


@pytest.mark.parametrize(
    "optimizer",
    [optax.adafactor(1e-2, min_dim_size_to_factor=2, momentum=0.9), optax.sm3(1e-2)],
    ids=["adafactor", "sm3"],
)
def test_abstract_states_are_padded_too(optimizer):
    mesh = jax.sharding.AbstractMesh((4, 2), ("data", "model"))
    plan = make_plan(jax.eval_shape(weights), mesh, RULES, on_indivisible="pad")
    state = TrainState.initial_state(plan.restore_structs(), optimizer, jax.random.key(0))
    concrete = TrainState.initial_state(padded(weights()), optimizer, jax.random.key(0))
    assert jax.tree.structure(state) == jax.tree.structure(concrete)
    for struct, array in zip(jax.tree.leaves(state), jax.tree.leaves(concrete), strict=True):
        assert struct.shape == array.shape
        assert struct.sharding.spec == array.sharding.spec
    shardings = train_state_sharding(concrete, MESH, RULES, on_indivisible="pad")
    assert jax.tree.structure(shardings) == jax.tree.structure(concrete)
    without_mesh = jax.eval_shape(
        lambda: TrainState.initial_state(padded(weights()), optimizer, jax.random.key(0))
    )
    assert jax.tree.structure(without_mesh) == jax.tree.structure(concrete)
    sizes = [x.shape for x in jax.tree.leaves(without_mesh)]
    assert sizes == [x.shape for x in jax.tree.leaves(concrete)]


def test_optimizer_states_are_padded_by_rules_of_their_own():
    rules = {"in": "data"}
    state = TrainState.initial_state(
        place(weights(), MESH, {}),
        optax.adam(1e-2),
        jax.random.key(1),
        optimizer_rules=rules,
        on_indivisible="pad",
    )
    assert not padded_nodes(state.params)
    assert [x.stored.shape for x in padded_nodes(state.opt_state)] == [(8, 7), (8, 7)]
    state, _ = build_train_step_fn(squares)(state, **inputs())
    expected, _ = trained(weights(), optax.adam(1e-2), steps=1)
    assert_same((state.params, state.opt_state), (expected.params, expected.opt_state))
    assert_padding_is_zero(state.opt_state)
    with pytest.raises(PlanError, match=r"'in' \(5\) does not divide over mesh axis 'data' \(4\)"):
        TrainState.initial_state(
            place(weights(), MESH, {}), optax.adam(1e-2), jax.random.key(1), optimizer_rules=rules
        )


def test_a_trainer_pads_its_state_and_no_batch():
    trainer = StatefulTrainer.build(
        jax.random.key(1),
        weights(),
        optax.sgd(0.1),
        squares,
        mesh=MESH,
        rules={"out": ("data", "model"), "batch": "data"},
        on_indivisible="pad",
    )
    loss = trainer.step(**inputs())["loss"]
    np.testing.assert_allclose(loss, squares(weights(), None, None, **inputs())[0], rtol=1e-5)
    assert_padding_is_zero(trainer.state.params)
    message = (
        "parameters are stored padded, and batches are not, since padding would count as "
        "examples:\n  input x: logical axis 'batch' (6) does not divide over mesh axis 'data' (4), "
        "asked by rule 'batch' -> 'data'. Leave examples out, or add some that the loss does not "
        "count, as cross_entropy(logits, targets, mask=...) does."
    )
    with pytest.raises(PlanError) as caught:
        trainer.step(**inputs(6))
    assert str(caught.value) == message


def test_batches_are_not_padded():
    with pytest.raises(RuleTypeError) as caught:
        shard_batch(inputs(6), MESH, {"batch": "data"}, on_indivisible="pad")
    assert str(caught.value) == (
        'shard_batch: on_indivisible="pad" is for parameters. A batch is not padded, since padding '
        "would count as examples. Leave the option out, and make the batch divide: leave examples "
        "out, or add some that the loss does not count, as cross_entropy(logits, targets, "
        "mask=...) does."
    )


def test_a_state_that_is_not_stored_as_declared_is_refused():
    state = TrainState.initial_state(weights(), optax.sgd(0.1), jax.random.key(1))
    shardings = train_state_sharding(state, MESH, RULES, on_indivisible="pad")
    step = build_train_step_fn(squares, train_state_shardings=shardings)
    with pytest.raises(ShardingError) as caught:
        step(state, **inputs())
    assert str(caught.value) == (
        "train_state_shardings are not shaped like this train state. Store it as it is declared: "
        'place(state, mesh, rules, on_indivisible="pad").\n'
        "  params: what is declared as stored padded is not stored so, or the other way round"
    )
    state, _ = step(place(state, MESH, RULES, on_indivisible="pad"), **inputs())
    assert_padding_is_zero(state.params)


def test_frozen_parameters_are_padded_too():
    def state_of(model):
        return TrainState.initial_state(
            model, optax.adam(1e-2), jax.random.key(1), trainable=lambda p: p.label == "bias"
        )

    step = build_train_step_fn(squares)
    (state, _), (expected, _) = (
        step(state_of(model), **inputs()) for model in (padded(weights()), weights())
    )
    assert_same((state.params, state.opt_state), (expected.params, expected.opt_state))
    assert len(padded_nodes(state.params)) == 2
    assert_padding_is_zero((state.params, state.opt_state))


def test_manual_axes_refuse_what_is_stored_padded():
    with pytest.raises(ShardingError) as caught:
        trained(padded(weights(), rules={"in": "data"}), optax.adam(0.1), manual_axes="data")
    assert str(caught.value) == (
        "with manual_axes, jax.shard_map gives each device an equal part of every array, and what "
        "is stored padded has no equal parts. Leave manual_axes out, and the compiler splits the "
        "work; or leave these logical axes whole:\n"
        "  weights: logical axis 'in' (5) over mesh axis 'data' (4)."
    )


def fitted(state, folder=None, steps=6, mesh=MESH):
    """The losses by step of a call of ``fit``, and the state after it."""
    losses = {}
    state = fit(
        state,
        build_train_step_fn(squares, donate_params_and_state=True),
        lambda: itertools.repeat(inputs()),
        steps=steps,
        mesh=mesh,
        rules={"batch": "data"},
        checkpoint=folder,
        save_every=None if folder is None else 2,
        log_every=1,
        on_log=lambda record: losses.update({record.step: record.loss}),
        progress=False,
        evaluate_every=3,
        eval_step=build_eval_step_fn(squares),
        eval_batches=[inputs()],
    )
    return losses, state


def test_a_padded_run_goes_on_where_it_was_stopped_padded_otherwise_or_not_at_all(tmp_path):
    def state_on(mesh, rules):
        placed = place(weights(), mesh, rules, on_indivisible="pad")
        return TrainState.initial_state(placed, optax.adam(1e-2), jax.random.key(1))

    other = make_mesh({"data": 2, "model": 4})
    expected, trained_whole = fitted(state_on(MESH, {}))
    fitted(state_on(MESH, RULES), tmp_path, 2)
    second, state = fitted(state_on(other, {"out": "model", "in": "data"}), tmp_path, 4, other)
    assert padded_nodes(state.params)[0].stored.shape == (8,)
    assert_padding_is_zero((state.params, state.opt_state))
    third, state = fitted(state_on(MESH, {}), tmp_path)
    assert not padded_nodes(state)
    assert (list(second), list(third)) == ([3, 4], [5, 6])
    np.testing.assert_allclose(
        [*second.values(), *third.values()], [expected[i] for i in (3, 4, 5, 6)], rtol=1e-5
    )
    assert_same((state.params, state.opt_state), (trained_whole.params, trained_whole.opt_state))
