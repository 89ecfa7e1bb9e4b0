"""Operations that XLA computes wrongly of unequal parts: steps of padded parameters are right."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from penzai import pz

from penzai_shard import TrainState, build_eval_step_fn, build_train_step_fn, make_mesh, place
from penzai_shard.traced_programs import equations
from penzai_shard.training.padded_sums.whole_operands import with_whole_operands

MESH = make_mesh({"data": 4, "model": 2})
EXPLICIT = jax.make_mesh(
    (4, 2), ("data", "model"), axis_types=(jax.sharding.AxisType.Explicit,) * 2
)
GROUPS = np.arange(5) % 3


def sums_in_groups(w):
    # Of the zeros behind the parameter these are ones.
    return jax.ops.segment_sum(jnp.exp(w), GROUPS, 3)


OPERATIONS = {
    "sums by index": sums_in_groups,
    "greatest by index": lambda w: jax.ops.segment_max(w, GROUPS, 3),
    "counts": lambda w: jnp.bincount(jnp.argmax(w, 1), length=7) * w[0],
    "looked up by its own rows": lambda w: w[0][jnp.argmax(w, 1)] + w[:, 0],
    "updated late": lambda w: jax.lax.dynamic_update_slice(w, w[:1] ** 2, (jnp.argmax(w) + 9, 0)),
    "greatest of windows": lambda w: jax.lax.reduce_window(
        w, -jnp.inf, jax.lax.max, (2, 2), (1, 1), "SAME"
    ),
    "sorted": lambda w: jnp.sort(w, 0),
    "made again in a loop": lambda w: jax.lax.scan(
        jax.checkpoint(lambda total, _: (total + sums_in_groups(w), None)),
        jnp.zeros((3, 7)),
        length=2,
    )[0],
    "in a branch": lambda w: jax.lax.cond(w[0, 0] > 9, lambda w: w[:3], sums_in_groups, w),
}


def loss_fn(model, rng, state, x):
    def of_one(result):
        return jnp.sum(jnp.sin(result) * jnp.arange(1.0, 1.0 + result.size).reshape(result.shape))

    losses = {
        name: of_one(operation(model[name].unwrap("in", "out")) + x)
        for name, operation in OPERATIONS.items()
    }
    return sum(losses.values()), state, losses


@pytest.fixture(scope="module", params=[MESH, EXPLICIT], ids=["Auto", "Explicit"])
def stepped(request):
    """A step and an evaluation of parameters that are stored padded, and of ones that are not."""
    values = np.random.default_rng(0).normal(size=(5, 7)).astype(np.float32)
    weights = {name: pz.nx.wrap(values, "in", "out") for name in OPERATIONS}
    found = []
    for mesh, rules in ((request.param, {"in": "data"}), (MESH, {})):
        model = place(weights, mesh, rules, on_indivisible="pad")
        state = TrainState.initial_state(model, optax.sgd(1.0), jax.random.key(0))
        with jax.set_mesh(mesh):
            _, evaluated = build_eval_step_fn(loss_fn)(state, x=jnp.zeros(()))
            state, losses = build_train_step_fn(loss_fn)(state, x=jnp.zeros(()))
        found.append((losses, evaluated, state.params))
    return found


@pytest.mark.parametrize("name", OPERATIONS)
def test_what_xla_computes_wrongly_of_unequal_parts_is_computed_of_whole_ones(stepped, name):
    (losses, evaluated, params), (expected, _, expected_params) = stepped
    np.testing.assert_allclose(losses[name], expected[name], rtol=1e-4)
    np.testing.assert_allclose(evaluated[name], expected[name], rtol=1e-4)
    found, own = (each[name].unwrap("in", "out") for each in (params, expected_params))
    np.testing.assert_allclose(found, own, rtol=1e-4, atol=1e-4)


def test_other_lengths_and_other_operations_stay_as_they_are():
    w = jnp.ones((5, 7))
    for operation in OPERATIONS.values():
        program = jax.make_jaxpr(jax.grad(lambda w, of=operation: of(w).sum()))(w)
        assert with_whole_operands(program, [4, 6], MESH) is program
    program = jax.make_jaxpr(lambda w: jnp.cumsum(jnp.tanh(w @ w.T), 0))(w)
    assert with_whole_operands(program, [5, 7], MESH) is program


def test_dimensions_that_hold_whole_windows_stay_split():
    def added(table, rows):
        return table.at[jnp.array([1, 2])].add(rows)

    program = jax.make_jaxpr(added)(jnp.ones((5, 7)), jnp.ones((2, 7)))
    assert with_whole_operands(program, [5, 7], MESH) is program
    (pin,) = (
        one
        for one in equations(with_whole_operands(program, [2], MESH))
        if one.primitive.name == "sharding_constraint" and one.outvars[0].aval.shape == (2, 7)
    )
    assert pin.params["unconstrained_dims"] == {1}
