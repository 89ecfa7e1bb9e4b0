"""Collections of variables beside the parameters of a Flax linen module: what steps carry on."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax.core import FrozenDict, freeze
from penzai import pz

from penzai_shard import (
    TrainState,
    abstract_model,
    build_eval_step_fn,
    build_train_step_fn,
    restore_params,
    restore_train_state,
    save_params,
    save_train_state,
)
from penzai_shard.errors import PlanError, ShardingError
from penzai_shard.layouts import Layout
from penzai_shard.meshes import make_mesh

RULES = {"batch": "data", "hidden": "model"}
LAYOUT = Layout(parameters=RULES, compute=RULES)
KEY = jax.random.key(0)
X = np.asarray(jax.random.normal(jax.random.key(1), (16, 8)))
OPTIMIZER = optax.sgd(0.1)
MEAN = "batch_stats/BatchNorm_0/mean"


class Model(nn.Module):
    """Statistics without names, as Flax makes them, and a counter in a box."""

    @nn.compact
    def __call__(self, x):
        kernel = nn.with_logical_partitioning(nn.initializers.normal(), ("embed", "hidden"))
        y = nn.Dense(16, kernel_init=kernel, use_bias=False)(x)
        y = nn.BatchNorm(use_running_average=False, momentum=0.5)(y)
        y = nn.with_logical_constraint(y, ("batch", "hidden"))
        boxed = nn.with_logical_partitioning(nn.initializers.zeros, ("hidden",))
        count = self.variable("counts", "seen", boxed, None, (16,))
        if not self.is_initializing():
            count.value = count.value + 1
        self.sow("intermediates", "mean", y.mean())
        return nn.relu(y)


MODEL = Model()
INIT = jax.jit(MODEL.init)  # Compiled once: one operation at a time would compile each.


def loss_fn(model, rng, state, x):
    x = x.unwrap("batch", "features") if pz.nx.is_namedarray(x) else x
    y, updates = MODEL.apply(model, x, mutable=["batch_stats", "counts"])
    model.update(updates)
    return jnp.mean((y - 1) ** 2), state, {}


def initial(variables=None):
    return TrainState.initial_state(variables or INIT(KEY, X), OPTIMIZER, jax.random.key(2))


def traced(loss):
    """A step that is traced and not run."""
    return jax.eval_shape(build_train_step_fn(loss), initial(), x=X)


@pytest.fixture(scope="module")
def mesh():
    return make_mesh({"data": 2, "model": 4})


@pytest.fixture(scope="module")
def of_flax():
    """Losses and final statistics of three steps by Flax's own code, on one device."""
    variables = INIT(KEY, X)
    params, others = variables.pop("params"), variables
    opt_state = OPTIMIZER.init(params)

    @jax.jit
    def step(params, others, opt_state):
        def loss(params):
            y, updates = MODEL.apply({"params": params, **others}, X, mutable=list(others))
            return jnp.mean((y - 1) ** 2), updates

        (value, others), grads = jax.value_and_grad(loss, has_aux=True)(params)
        updates, opt_state = OPTIMIZER.update(grads, opt_state)
        return optax.apply_updates(params, updates), others, opt_state, value

    losses = []
    for _ in range(3):
        params, others, opt_state, loss = step(params, others, opt_state)
        losses.append(float(loss))
    return losses, others


@pytest.fixture(scope="module")
def trained(mesh):
    state, step = LAYOUT.build(
        MODEL.init,
        KEY,
        X,
        mesh=mesh,
        loss_fn=loss_fn,
        optimizer=OPTIMIZER,
        rng=jax.random.key(2),
        step_metrics="loss",
        on_unnamed="replicate",
    )
    losses = []
    for _ in range(3):
        state, aux = step(state, x=X)
        losses.append(float(aux["loss"]))
    return state, losses


def test_other_collections_are_state_that_steps_carry_on(trained, of_flax):
    state, losses = trained
    wanted, others = of_flax
    np.testing.assert_allclose(losses, wanted, rtol=1e-5)
    assert set(state.params) == {
        f"params/{name}" for name in ("BatchNorm_0/bias", "BatchNorm_0/scale", "Dense_0/kernel")
    }
    assert set(state.state_vars) == {MEAN, "batch_stats/BatchNorm_0/var", "counts/seen"}
    model = state.model
    assert jax.tree.structure(model) == jax.tree.structure(INIT(KEY, X))
    for name in ("batch_stats", "counts"):
        got, expected = jax.tree.leaves(model[name]), jax.tree.leaves(others[name])
        for one, other in zip(got, expected, strict=True):
            np.testing.assert_allclose(one, other, rtol=1e-4)
    assert model["counts"]["seen"].names == ("hidden",)
    np.testing.assert_array_equal(model["counts"]["seen"].value, 3)


def test_state_of_boxes_is_laid_out_by_its_names(trained):
    counts = trained[0].model["counts"]["seen"].value
    assert counts.sharding.shard_shape(counts.shape) == (4,)


def test_microbatches_pass_statistics_on_and_evaluations_do_not_change_them(trained, mesh):
    state = trained[0]
    step = build_train_step_fn(LAYOUT.computing(loss_fn, mesh), accumulate_steps=2)
    after, _ = step(state, x=pz.nx.wrap(X, "batch", "features"))
    np.testing.assert_array_equal(after.model["counts"]["seen"].value, 5)
    loss, _ = build_eval_step_fn(LAYOUT.computing(loss_fn, mesh))(state, x=X)
    assert np.isfinite(loss)
    np.testing.assert_array_equal(state.model["counts"]["seen"].value, 3)


def test_statistics_are_saved_and_restored_with_the_state(trained, tmp_path):
    state = trained[0]
    save_train_state(tmp_path / "state", state)
    other = make_mesh({"data": 4, "model": 2})
    restored = restore_train_state(tmp_path / "state", state, other, RULES, on_unnamed="replicate")
    np.testing.assert_array_equal(restored.state_vars[MEAN], state.state_vars[MEAN])
    assert restored.model["counts"]["seen"].value.sharding.mesh.shape["model"] == 2
    # Variables have both, so they are read from the state's checkpoint with its statistics.
    abstract = abstract_model(MODEL.init, KEY, X)
    variables = restore_params(tmp_path / "state", abstract, other, RULES, on_unnamed="replicate")
    assert jax.tree.structure(variables) == jax.tree.structure(state.model)
    for got, wanted in zip(jax.tree.leaves(variables), jax.tree.leaves(state.model), strict=True):
        np.testing.assert_array_equal(got, wanted)
    # Checkpoints of variables hold all collections, as a model needs all of them.
    save_params(tmp_path / "variables", state.model)
    variables = restore_params(
        tmp_path / "variables", abstract, other, RULES, on_unnamed="replicate"
    )
    assert jax.tree.structure(variables) == jax.tree.structure(state.model)
    np.testing.assert_array_equal(variables["counts"]["seen"].value, 3)


def test_statistics_have_no_names_and_are_copied_only_if_asked(mesh):
    with pytest.raises(PlanError, match=f"{MEAN}: this array of shape .* has no logical axis"):
        LAYOUT.plan(abstract_model(MODEL.init, KEY, X), mesh)


def test_updates_without_boxes_are_as_good():
    def loss(model, rng, state, x):
        y, updates = MODEL.apply(model, x, mutable=["batch_stats", "counts"])
        model["batch_stats"] = updates["batch_stats"]
        model["counts"] = nn.unbox(updates["counts"])
        return y.mean(), state, {}

    new, _ = traced(loss)
    assert dict(new.state_vars["counts/seen"].named_shape) == {"hidden": 16}


def deep_loss(model, rng, state, x):
    y, updates = MODEL.apply(model, x, mutable=["batch_stats", "counts"])
    model["counts"]["seen"] = updates["counts"]["seen"]
    model["batch_stats"]["BatchNorm_0"].update(updates["batch_stats"]["BatchNorm_0"])
    return jnp.mean((y - 1) ** 2), state, {}


def test_assignments_deep_in_a_collection_are_carried_on_under_a_layout_too(mesh):
    step = build_train_step_fn(LAYOUT.computing(deep_loss, mesh))
    state, _ = step(initial(), x=X)
    wanted, _ = build_train_step_fn(loss_fn)(initial(), x=X)
    assert wanted.state_vars["batch_stats/BatchNorm_0/var"][0] != 1
    for name, value in wanted.state_vars.items():
        np.testing.assert_allclose(*map(jax.tree.leaves, (state.state_vars[name], value)))


def test_assignments_deep_in_the_parameters_are_refused_under_a_layout_too(mesh):
    def assigning(model, rng, state, x):
        model["params"]["BatchNorm_0"]["scale"] = jnp.zeros(16)
        return loss_fn(model, rng, state, x)

    with pytest.raises(ShardingError, match="params/BatchNorm_0/scale: was assigned"):
        traced(LAYOUT.computing(assigning, mesh))


def test_frozen_dictionaries_are_trained_too():
    state = initial(freeze(INIT(KEY, X)))
    new, _ = jax.eval_shape(build_train_step_fn(loss_fn), state, x=X)
    assert isinstance(new.model, FrozenDict)
    assert len(new.state_vars) == 3


def test_a_dictionary_of_the_caller_keeps_its_boxes(mesh):
    variables = INIT(KEY, X)
    before, statistics = variables["params"], variables["batch_stats"]

    def evaluated(x):
        LAYOUT.computing(loss_fn, mesh)(model=variables, rng=None, state=None, x=x)
        return x

    jax.eval_shape(evaluated, X)
    assert variables["params"] is before
    assert variables["batch_stats"] is not statistics  # What the loss assigned.


@pytest.mark.parametrize(
    ("assign", "message"),
    [
        (
            lambda model, updates: model.update(updates),
            "intermediates/mean/0: not there when the train state was made. Assign only what was",
        ),
        (
            lambda model, updates: model.update(counts={}),
            "counts/seen: went missing. Assign collections as they came",
        ),
        (
            lambda model, updates: model.update(params=jax.tree.map(jnp.abs, model["params"])),
            "params/Dense_0/kernel: was assigned. Keep what the loss changes in a variable of",
        ),
        (
            lambda model, updates: model.update(
                batch_stats=jax.tree.map(jnp.int32, updates["batch_stats"])
            ),
            f"state_vars/{MEAN}: was float32 of shape (16,), became int32",
        ),
    ],
    ids=["new", "missing", "parameter", "dtype"],
)
def test_assignments_that_cannot_be_carried_on_are_refused(assign, message):
    def loss(model, rng, state, x):
        y, updates = MODEL.apply(model, x, mutable=["batch_stats", "counts", "intermediates"])
        assign(model, updates)
        return y.mean(), state, {}

    with pytest.raises(ShardingError) as caught:
        traced(loss)
    assert message in str(caught.value)


def test_parameters_that_are_given_back_as_they_were_are_not_assigned():
    def loss(model, rng, state, x):
        model.update(params=dict(model["params"]))
        return MODEL.apply(model, x, mutable=["batch_stats", "counts"])[0].mean(), state, {}

    assert len(traced(loss)[0].params) == 3


def test_a_collection_that_takes_gradients_as_values_is_refused():
    variables = {**INIT(KEY, X), "_overwrite_with_gradient": {"scale": jnp.ones(1)}}
    with pytest.raises(ShardingError, match="_overwrite_with_gradient: Flax takes the gradient"):
        initial(variables)


def test_trainable_is_asked_about_parameters_alone():
    asked = []
    TrainState.initial_state(
        INIT(KEY, X),
        OPTIMIZER,
        KEY,
        trainable=lambda parameter: asked.append(parameter.label) or True,
    )
    assert len(asked) == 3
    assert all(label.startswith("params/") for label in asked)


def test_a_dictionary_of_weights_is_trained_whole():
    weights = {"w": jnp.ones(3), "batch_stats": {"mean": jnp.ones(3)}}
    assert len(initial(weights).params) == 2
    weights = {"params": jnp.ones(3), "batch_stats": {"mean": jnp.ones(3)}}
    assert len(initial(weights).params) == 2
