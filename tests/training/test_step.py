"""Steps: equal to what is written by hand, compiled once, and true to what the state held."""

import functools
import gc
import re
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from penzai import pz

import penzai_shard as pzs
from penzai_shard.arrays import structure
from tests.models import MODELS, OPTIMIZERS
from tests.refusals import problem_paths
from tests.training import losses as cases
from tests.training.losses import KEY, LOSSES, W, X, batch, initial, layout, loss_fn, weights

MESH = pzs.make_mesh({"data": 8})
EXPLICIT = pzs.make_mesh({"data": 8}, explicit=True)


def placed():
    return jax.device_put(initial(), layout(MESH))


MORE_OPTIMIZERS = {
    "adam": optax.adam,
    "multi_transform": lambda rate: optax.multi_transform(
        {"fast": optax.adam(rate), "frozen": optax.set_to_zero()}, {"w": "fast", "b": "frozen"}
    ),
    "apply_if_finite": lambda rate: optax.apply_if_finite(optax.adam(rate), 2),
    "sam": lambda rate: optax.contrib.sam(
        optax.sgd(rate), optax.chain(optax.contrib.normalize(), optax.sgd(0.05)), opaque_mode=True
    ),
    "sophia": lambda rate: optax.contrib.sophia(rate, update_interval=2),
}


@functools.cache
def by_hand(name="adam", rate=0.1, steps=5, paths="w"):
    """Parameters and losses of plain optax steps on one device."""
    optimizer = (OPTIMIZERS | MORE_OPTIMIZERS)[name](rate)
    arrays = {"b": jnp.zeros(8), "w": jnp.asarray(W)}
    params = {path: arrays[path] for path in paths}
    opt_state, losses = optimizer.init(params), []

    @jax.jit
    def run(params, opt_state, x):
        def find_loss(params, grad_fn=None, obj_fn=None):
            return cases.mean_square(x @ params["w"])

        loss, grads = jax.value_and_grad(find_loss)(params)
        extra = {"grad_fn": jax.grad(find_loss)} if name == "sam" else {}
        if name == "lbfgs":
            extra = {"value": loss, "grad": grads, "value_fn": find_loss}
        if name == "sophia":
            extra = {"obj_fn": find_loss}
        updates, opt_state = optimizer.update(grads, opt_state, params, **extra)
        return optax.apply_updates(params, updates), opt_state, loss

    for _ in range(steps):
        params, opt_state, loss = run(params, opt_state, X)
        losses.append(float(loss))
    return params, losses


def run_steps(state, x, steps=5, donate=False, **options):
    options = {"donate_params_and_state": donate, "step_metrics": ["loss"], **options}
    step = pzs.build_train_step_fn(loss_fn, **options)
    losses = []
    for _ in range(steps):
        state, aux = step(state, x=x)
        losses.append(float(aux["loss"]))
    return state, losses, step


# The same as by hand, in one program


def lay_with_trailing_none(array):
    return jax.device_put(array, NamedSharding(MESH, P(*("data", None)[: array.ndim])))


# A state, the mesh of the batch, and whether a layout is declared.
STATES = {
    "free": (initial, None, False),
    "placed": (placed, MESH, False),
    "placed, batch free": (placed, None, False),
    "batch on a mesh": (initial, MESH, False),
    "declared": (placed, None, True),
    "declared, state free": (initial, None, True),
    "trailing None": (lambda: jax.tree.map(lay_with_trailing_none, initial()), None, False),
    "Explicit batch": (placed, EXPLICIT, False),
    "Explicit": (lambda: initial(weights(NamedSharding(EXPLICIT, P("data")))), EXPLICIT, False),
}


@pytest.mark.parametrize("name", STATES)
def test_step_is_as_by_hand_in_one_program(name):
    make, mesh, is_declared = STATES[name]
    options = {"train_state_shardings": layout(MESH)} if is_declared else {}
    state, losses, step = run_steps(make(), batch(mesh), donate=True, **options)
    params, expected = by_hand()
    if name == "free":
        assert losses == expected
        np.testing.assert_array_equal(state.params["w"].data_array, params["w"])
    np.testing.assert_allclose(losses, expected, rtol=1e-6)
    np.testing.assert_allclose(state.params["w"].data_array, params["w"], rtol=1e-5, atol=1e-6)
    assert cases.count_programs(step) == 1
    assert int(state.step) == 5
    if is_declared or name.startswith("placed"):
        assert state.trained_arrays["w"].sharding == NamedSharding(MESH, P("data"))


def test_step_of_a_free_state_with_a_batch_on_a_mesh_later():
    state, _, step = run_steps(initial(), batch(), 2)
    for _ in range(3):
        state, _ = step(state, x=batch(MESH))
    assert cases.count_programs(step) == 2
    assert {leaf.sharding.spec for leaf in jax.tree.leaves(state)} == {P()}


def test_step_takes_nothing_apart_and_holds_no_earlier_state(monkeypatch):
    state, _, step = run_steps(initial(), batch(), 1)
    calls = []
    monkeypatch.setattr(structure._Walk, "__init__", lambda self: calls.append(self))
    gc.disable()
    held = [weakref.ref(state), weakref.ref(state.trained_arrays["w"])]
    for _ in range(2):
        state, _ = step(state, x=batch())
    assert [ref() for ref in held] == [None, None]
    gc.enable()
    assert not calls


def test_step_updates_in_the_layout_of_the_moments():
    shardings = pzs.train_state_sharding(initial(), MESH, {}, {"in": "data"})
    state, x = jax.device_put(initial(), shardings), batch(MESH)
    step = pzs.build_train_step_fn(loss_fn, donate_params_and_state=True)
    lowered = step.lower(state, x=x)
    assert "gradient/w/sharding_constraint" in lowered.as_text(debug_info=True)
    text = lowered.compile().as_text()
    # Each device computes the moments of its own part, and gathers parameters only.
    assert {*re.findall(r"f32\[(\d+),(\d+)\]\S* sqrt", text)} == {("1", "8")}
    assert len(re.findall(r" all-gather(?:-start)?\(", text)) == 1
    after, _ = step(state, x=x)
    assert after.trained_arrays["w"].sharding.is_fully_replicated
    assert after.opt_arrays[0].mu["w"].sharding.spec == P("data")


def test_step_of_a_model_made_again_compiles_nothing():
    step = pzs.build_train_step_fn(loss_fn)
    for rate, count in ((0.1, 1), (0.1, 1), (0.2, 2)):
        step(initial(optimizer=optax.adam(rate)), x=batch())
        assert cases.count_programs(step) == count


@pytest.mark.filterwarnings("ignore:jax.core.is_constant_dim:DeprecationWarning")
@pytest.mark.parametrize("name", LOSSES)
def test_step_trains_each_library(name):
    loss, x = LOSSES[name]
    first = MODELS[name]()
    state = initial(first, optax.adam(1e-2))
    step = pzs.build_train_step_fn(loss, step_metrics=["loss"])
    losses = []
    for _ in range(3):
        before, (state, aux) = state, step(state, x=x)
        losses.append(float(aux["loss"]))
    assert losses[-1] < losses[0]
    assert cases.count_programs(step) == 1
    assert jax.tree.structure(state) == jax.tree.structure(before)
    model = state.model
    assert type(model) is type(first)
    if name == "counted mlp":
        assert float(model.count.value) == 3
    if name == "linen":
        means = (jax.tree.leaves(each["batch_stats"]) for each in (model, MODELS[name]()))
        assert all(np.allclose(mean, before + 3) for mean, before in zip(*means, strict=True))
    if name == "nnx":
        assert model.tied is model.first
        assert np.any(np.asarray(model.norm.mean[...]))
        assert int(model.dropout.rngs.count[...]) == 3


# Donation


def test_donation_takes_all_but_step_and_constants():
    state = initial(MODELS["counted mlp"]())
    loss, x = LOSSES["counted mlp"]
    step = pzs.build_train_step_fn(loss, donate_params_and_state=True)
    state, _ = step(state, x=x)
    new, _ = step(state, x=x)
    fields, *kept = state.arguments()
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(fields))
    assert not any(leaf.is_deleted() for leaf in jax.tree.leaves(kept))
    paths = problem_paths(pzs.ShardingError, step, state, x=x)
    assert {*paths} >= {f"params/{path}" for path in state.params}
    step(new, x=x)


@pytest.mark.parametrize("optimizer", [optax.sgd(0.1), optax.contrib.schedule_free_sgd(0.1)])
def test_donation_of_arrays_that_occur_twice(optimizer):
    w = weights()["w"]
    state, *_ = run_steps(initial({"w": w, "v": w}, optimizer), batch(), 2, donate=True)
    assert np.all(np.isfinite(state.params["w"].data_array))


# What a loss function may do


def test_fixed_arrays_stay_and_the_state_of_the_loss_goes_on():
    def loss(model, rng, state, x):
        aux = {"noise": jax.random.uniform(rng)}
        return cases.mean_square(x @ model["w"] * model["f"]), {"n": state["n"] + 1}, aux

    model = {"w": jnp.asarray(W), "f": jnp.ones(8), "n": jnp.arange(8)}
    state = initial(model, trainable=lambda p: p.label != "f", loss_fn_state={"n": 0})
    step, noises = pzs.build_train_step_fn(loss, donate_params_and_state=True), []
    for _ in range(3):
        state, aux = step(state, x=X)
        noises.append(float(aux["noise"]))
    assert state.model["f"] is model["f"]
    assert state.model["n"] is model["n"]
    assert not np.array_equal(state.model["w"], W)
    assert int(state.loss_fn_state["n"]) == 3
    assert noises == [float(jax.random.uniform(jax.random.fold_in(KEY, i))) for i in range(3)]
    assert cases.count_programs(step) == 1


def test_state_of_the_loss_may_differ_between_the_replicas_of_a_shard_map_around_the_step():
    def loss(model, rng, state, x):
        return cases.mean_square(x @ model["w"]), {"n": state["n"] + 1}, {}

    def run(n):
        state = initial({"w": jnp.asarray(W)}, loss_fn_state={"n": n})
        return pzs.build_train_step_fn(loss)(state, x=X)[0].loss_fn_state["n"]

    over = {"in_specs": P("data"), "out_specs": P("data")}
    found = jax.shard_map(run, mesh=pzs.make_mesh({"data": 8}), **over)(jnp.arange(8))
    np.testing.assert_array_equal(found, jnp.arange(8) + 1)


def test_plain_arrays():
    box = linen.LogicallyPartitioned(jnp.ones(8), ("in",))
    is_named = {}

    def loss(model, rng, state):
        kinds = (linen.LogicallyPartitioned, pz.nx.NamedArray)
        for name, value in model["params"].items():
            is_named[name] = isinstance(value, kinds)
        return sum(leaf.sum() for leaf in jax.tree.leaves(model)), state, {}

    step = pzs.build_train_step_fn(loss, jit=False)
    for plain_arrays, expected in ((None, (0, 1)), (True, (0, 0)), (False, (1, 1))):
        state, _ = step(initial({"params": {"b": box, **weights()}}, plain_arrays=plain_arrays))
        assert is_named == dict(zip(("b", "w"), expected, strict=True))
        types = [type(value) for value in state.model["params"].values()]
        assert types == [linen.LogicallyPartitioned, pz.nx.NamedArray]


def test_a_loss_of_plain_arrays_that_gets_named_ones_is_told_how():
    step = pzs.build_train_step_fn(lambda model, rng, state: (model["w"][0, 0], state, {}))
    with pytest.raises(IndexError, match="plain_arrays=True"):
        step(initial())


# Layouts of inputs and outputs


def test_declared_inputs_and_outputs():
    split = NamedSharding(MESH, P("data"))
    by_name = pzs.name_to_name_sharding(batch(), MESH, {"batch": "data"})
    for shardings in ({"x": split}, {"x": by_name}):
        step = pzs.build_train_step_fn(
            loss_fn, input_kwarg_shardings=shardings, aux_output_shardings={"out": split}
        )
        state, aux = step(initial(), x=batch())
        assert aux["out"].sharding == split
        assert state.trained_arrays["w"].sharding.mesh == MESH
        assert step.lower(initial(), x=jax.eval_shape(batch)).compile()


def test_declared_shardings_of_unnamed_arrays_are_left_open():
    model = weights(bias=jnp.ones(8))
    shardings = pzs.name_to_name_sharding(
        initial(model), MESH, axis_name_to_mesh_name={"in": "data"}, ignore_unnamed_arrays=True
    )
    state, losses, step = run_steps(initial(model), batch(), train_state_shardings=shardings)
    np.testing.assert_allclose(losses, by_hand()[1], rtol=1e-6)
    assert state.trained_arrays["w"].sharding.spec == P("data")
    assert cases.count_programs(step) == 1


def test_metrics_are_added_unless_the_loss_function_reports_them():
    def report_twice(*args, **inputs):
        loss, state, _ = loss_fn(*args, **inputs)
        return loss, state, {"loss": 2 * loss}

    for loss, factor, declared in ((loss_fn, 1, "out"), (report_twice, 2, "loss")):
        options = {"step_metrics": ["loss"], "aux_output_shardings": {declared: None}}
        _, aux = pzs.build_train_step_fn(loss, **options)(initial(), x=batch())
        assert float(aux["loss"]) == factor * by_hand()[1][0]


# Other ways to call a step


def test_lowerable():
    state = placed()
    step = pzs.build_train_step_fn(loss_fn, donate_params_and_state=True)
    structs = pzs.make_plan(initial(), MESH, {"in": "data"}).restore_structs()
    found = step.lowerable(structs, x=jax.eval_shape(batch))
    assert [leaf.value for leaf in found.leaves] == jax.tree.leaves(found.args)
    names = {leaf.path: leaf.names for leaf in found.leaves}
    state_paths = ["params/w", "opt_state/0/count", "opt_state/0/mu/w", "opt_state/0/nu/w"]
    assert [*names] == [*state_paths, "step", "root_rng", "inputs/x"]
    assert names["opt_state/0/mu/w"] == ("in", "out")
    assert names["inputs/x"] == ("batch", "in")
    lowered = step.lower(state, x=batch())
    assert found.trace().lower().as_text() == lowered.as_text()
    assert lowered.compile().memory_analysis().alias_size_in_bytes == 3 * W.nbytes // 8 + 4


def test_evaluation_changes_nothing():
    evaluate = pzs.build_eval_step_fn(loss_fn)
    state, _, step = run_steps(initial(), batch(), 2)
    for _ in range(2):
        loss, aux = evaluate(state, x=batch())
        state, after = step(state, x=batch())
        assert aux.keys() == {"out"}
        assert float(loss) == float(after["loss"])
    assert cases.count_programs(step) == cases.count_programs(evaluate) == 1


# Optimizers


@pytest.mark.parametrize("name", OPTIMIZERS | MORE_OPTIMIZERS)
def test_state_of_each_optimizer_keeps_its_layout(name):
    mesh, rules = pzs.make_mesh({"data": 4, "model": 2}), {"in": "data", "out": "model"}
    optimizer = (OPTIMIZERS | MORE_OPTIMIZERS)[name](0.01)
    model = weights(b=pz.nx.zeros({"out": 8}))
    state = initial(model, optimizer)
    shardings = pzs.train_state_sharding(state, mesh, rules)
    options = {"train_state_shardings": shardings, "step_metrics": ["loss", "gradient_norm"]}
    placed = jax.device_put(state, shardings)
    after, losses, step = run_steps(placed, batch(), 3, donate=True, **options)
    assert cases.count_programs(step) == 1
    for each in (after, initial(pzs.place(model, mesh, rules), optimizer)):
        assert [leaf.sharding for leaf in jax.tree.leaves(each)] == jax.tree.leaves(shardings)
    params, expected = by_hand(name, 0.01, 3, "bw")
    np.testing.assert_allclose(losses, expected, rtol=1e-5)
    for path, value in params.items():
        np.testing.assert_allclose(after.trained_arrays[path], value, rtol=1e-4, atol=1e-5)


def test_optimizer_gets_what_it_asks_for():
    asked = {}

    def update(updates, state, params=None, **extra):
        asked.update(extra)
        same = jnp.allclose(extra["grad_fn"](params)["w"], updates["w"])
        return updates, (same, extra["value_fn"](jax.tree.map(jnp.zeros_like, params)))

    optimizer = optax.GradientTransformationExtraArgs(
        lambda params: (jnp.zeros((), bool), jnp.zeros(())), update
    )
    state, *_ = run_steps(initial(optimizer=optimizer), batch(), 1)
    assert asked.keys() == {"value", "grad", "value_fn", "grad_fn", "obj_fn"}
    # Of parameters that are zero the loss is one.
    assert (*map(float, state.opt_arrays),) == (True, 1)


def test_bfloat16_parameters_keep_their_dtype():
    model = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), weights())
    before = initial(model, optax.adamw(0.01))
    after, losses, step = run_steps(before, batch(), 3)
    assert cases.count_programs(step) == 1
    assert losses[-1] < losses[0]
    for state in (before, after):
        assert state.trained_arrays["w"].dtype == state.opt_arrays[0].mu["w"].dtype == "bfloat16"
