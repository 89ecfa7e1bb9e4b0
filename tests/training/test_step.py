"""Steps: equal to what is written by hand, compiled once, and true to what the state held."""

import functools
import gc
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from penzai import pz

import penzai_shard as pzs
from penzai_shard import ShardingError
from penzai_shard.arrays import structure
from tests.models import MODELS, nnx_block
from tests.training.losses import KEY, LOSSES, X, mean_square

MESH = pzs.make_mesh({"data": 8})
EXPLICIT = pzs.make_mesh({"data": 8}, explicit=True)
W = np.linspace(-1, 1, 64, dtype=np.float32).reshape(8, 8)


def named(sharding=None):
    # A copy: on a CPU the arrays of JAX may share memory with those of NumPy.
    return {"w": pz.nx.wrap(jax.device_put(W.copy(), sharding), "in", "out")}


def loss_fn(model, rng, state, x):
    out = pz.nx.nmap(jnp.dot)(x.untag("in"), model["w"].untag("in")).unwrap("batch", "out")
    return mean_square(out) + 0 * jax.random.uniform(rng), state, {"out": out}


def batch(mesh=None):
    array = pz.nx.wrap(jnp.asarray(X), "batch", "in")
    return array if mesh is None else jax.device_put(array, NamedSharding(mesh, P("data")))


def initial(model=None, optimizer=None, **options):
    model = named() if model is None else model
    return pzs.TrainState.initial_state(model, optimizer or optax.adam(0.1), KEY, **options)


def placed(rules=None, mesh=MESH):
    rules = {"in": "data"} if rules is None else rules
    return jax.device_put(initial(), pzs.train_state_sharding(initial(), mesh, rules))


@functools.cache
def by_hand(steps=5):
    """Parameters and losses of plain optax steps on one device."""
    optimizer, params = optax.adam(0.1), {"w": jnp.asarray(W)}
    opt_state, losses = optimizer.init(params), []

    @jax.jit
    def run(params, opt_state, x):
        loss, gradients = jax.value_and_grad(lambda p: mean_square(x @ p["w"]))(params)
        updates, opt_state = optimizer.update(gradients, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, loss

    for _ in range(steps):
        params, opt_state, loss = run(params, opt_state, X)
        losses.append(float(loss))
    return np.asarray(params["w"]), losses


def run_steps(state, x, steps=5, **options):
    step = pzs.build_train_step_fn(loss_fn, step_metrics=["loss"], **options)
    losses = []
    for _ in range(steps):
        state, aux = step(state, x=x)
        losses.append(float(aux["loss"]))
    return state, losses, step


def count_programs(step):
    return sum(prepared.run._cache_size() for prepared in step.programs.values())


# The same as by hand, in one program

STATES = {
    "free": (initial, batch, {}),
    "placed": (placed, functools.partial(batch, MESH), {}),
    "placed, batch free": (placed, batch, {}),
    "batch on a mesh": (initial, functools.partial(batch, MESH), {}),
    "declared": (placed, batch, {"in": "data"}),
    "declared, state free": (initial, batch, {"in": "data"}),
    "trailing None": (
        lambda: jax.tree.map(
            lambda x: jax.device_put(x, NamedSharding(MESH, P(*("data", None)[: x.ndim]))),
            initial(),
        ),
        batch,
        {},
    ),
    "Explicit batch": (placed, functools.partial(batch, EXPLICIT), {}),
    "Explicit": (
        lambda: initial(named(NamedSharding(EXPLICIT, P("data")))),
        functools.partial(batch, EXPLICIT),
        {},
    ),
}


@pytest.mark.parametrize("name", STATES)
def test_step_is_as_by_hand_in_one_program(name):
    make, make_batch, rules = STATES[name]
    options = {}
    if rules:
        options["train_state_shardings"] = pzs.train_state_sharding(initial(), MESH, rules)
    state, losses, step = run_steps(make(), make_batch(), donate_params_and_state=True, **options)
    params, expected = by_hand()
    if name == "free":
        assert losses == expected
        np.testing.assert_array_equal(state.params["w"].data_array, params)
    np.testing.assert_allclose(losses, expected, rtol=1e-6)
    np.testing.assert_allclose(state.params["w"].data_array, params, rtol=1e-5, atol=1e-6)
    assert count_programs(step) == 1
    assert int(state.step) == 5
    if rules or name.startswith("placed"):
        assert state.trained_arrays["w"].sharding == NamedSharding(MESH, P("data"))


def test_step_of_a_free_state_with_a_batch_on_a_mesh_later():
    state, _, step = run_steps(initial(), batch(), 2)
    for _ in range(3):
        state, _ = step(state, x=batch(MESH))
    assert count_programs(step) == 2
    assert {leaf.sharding.spec for leaf in jax.tree.leaves(state)} == {P()}


def test_step_takes_nothing_apart(monkeypatch):
    state, _, step = run_steps(initial(), batch(), 1)
    calls = []
    monkeypatch.setattr(structure._Walk, "__init__", lambda self: calls.append(self))
    for _ in range(2):
        state, _ = step(state, x=batch())
    assert not calls


def test_step_of_a_model_made_again_compiles_nothing():
    step = pzs.build_train_step_fn(loss_fn)
    for _ in range(2):
        step(initial(named(), optax.adam(0.1)), x=batch())
    assert count_programs(step) == 1
    step(initial(optimizer=optax.adam(0.2)), x=batch())
    assert count_programs(step) == 2


def test_step_holds_no_earlier_state():
    state, _, step = run_steps(initial(), batch(), 1)
    gc.disable()
    held = weakref.ref(state.trained_arrays["w"])
    state, _ = step(state, x=batch())
    state, _ = step(state, x=batch())
    assert held() is None
    gc.enable()


@pytest.mark.filterwarnings("ignore:jax.core.is_constant_dim:DeprecationWarning")
@pytest.mark.parametrize("name", LOSSES)
def test_step_trains_each_library(name):
    loss, x = LOSSES[name]
    state = initial(MODELS[name](), optax.adam(1e-2))
    step = pzs.build_train_step_fn(loss, step_metrics=["loss"])
    losses = []
    for _ in range(3):
        before, (state, aux) = state, step(state, x=x)
        losses.append(float(aux["loss"]))
    assert losses[-1] < losses[0]
    assert count_programs(step) == 1
    assert jax.tree.structure(state) == jax.tree.structure(before)
    assert type(state.model) is type(MODELS[name]())
    if name == "counted mlp":
        assert float(state.model.count.value) == 3
    if name == "linen":
        means = jax.tree.leaves(state.model["batch_stats"])
        first = jax.tree.leaves(MODELS[name]()["batch_stats"])
        for mean, before in zip(means, first, strict=True):
            np.testing.assert_allclose(mean, before + 3)
    if name == "nnx":
        model = state.model
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
    replaced, *kept = state.arguments()
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(replaced))
    assert not any(leaf.is_deleted() for leaf in jax.tree.leaves(kept))
    with pytest.raises(ShardingError) as caught:
        step(state, x=x)
    assert {problem.path for problem in caught.value.problems} >= {
        *map("params/{}".format, state.params)
    }
    step(new, x=x)


@pytest.mark.parametrize("optimizer", [optax.sgd(0.1), optax.contrib.schedule_free_sgd(0.1)])
def test_donation_of_arrays_that_occur_twice(optimizer):
    w = jnp.ones((8, 8))
    state = initial({"a": w, "b": w, "name": "tied"}, optimizer)
    step = pzs.build_train_step_fn(
        lambda model, rng, state, x: (mean_square(x @ model["a"] @ model["b"]), state, {}),
        donate_params_and_state=True,
    )
    for _ in range(2):
        state, _ = step(state, x=X)
    assert np.all(np.isfinite(state.params["a"]))


# What a loss function may do


def test_frozen_parameters_and_constants_stay():
    model = {"w": jnp.asarray(W), "f": jnp.ones(8), "n": jnp.arange(8)}
    state = initial(model, trainable=lambda parameter: parameter.label != "f")
    step = pzs.build_train_step_fn(
        lambda model, rng, state, x: (mean_square(x @ model["w"] * model["f"]), state, {}),
        donate_params_and_state=True,
    )
    for _ in range(2):
        state, _ = step(state, x=X)
    assert state.model["f"] is model["f"]
    assert state.model["n"] is model["n"]
    assert not np.array_equal(state.model["w"], W)


def test_loss_fn_state_and_rng():
    def loss(model, rng, state, x):
        noise = jax.random.uniform(rng)
        return mean_square(x @ model["w"]), {"n": state["n"] + 1}, {"noise": noise}

    state = initial({"w": jnp.asarray(W)}, loss_fn_state={"n": 0})
    step, noises = pzs.build_train_step_fn(loss), []
    for _ in range(3):
        state, aux = step(state, x=X)
        noises.append(float(aux["noise"]))
    assert int(state.loss_fn_state["n"]) == 3
    expected = [float(jax.random.uniform(jax.random.fold_in(KEY, i))) for i in range(3)]
    assert noises == expected
    assert count_programs(step) == 1


def test_transformations_of_nnx_assign_no_parameter():
    @nnx.jit
    def call(model, x):
        return nnx.remat(lambda model, x: model(x))(model, x)

    def loss(model, rng, state, x):
        return mean_square(call(model, x)), state, {}

    state = initial(nnx_block())
    step = pzs.build_train_step_fn(loss)
    state, _ = step(state, x=X)
    assert np.any(np.asarray(state.model.norm.mean[...]))

    def assigning(model, rng, state, x):
        model.first.kernel[...] = model.first.kernel[...] * 2
        return loss(model, rng, state, x)

    with pytest.raises(ShardingError) as caught:
        pzs.build_train_step_fn(assigning)(state, x=X)
    assert [problem.path for problem in caught.value.problems] == ["first/kernel"]


@pytest.mark.parametrize("plain_arrays", [None, True, False])
def test_plain_arrays(plain_arrays):
    from flax import linen

    box = linen.LogicallyPartitioned(jnp.ones(8), ("in",))
    kinds = []

    def loss(model, rng, state):
        kinds[:] = [type(model["params"]["b"]), type(model["params"]["w"])]
        flat = [leaf.sum() for leaf in jax.tree.leaves(model)]
        return sum(flat), state, {}

    state = initial({"params": {"b": box, "w": named()["w"]}}, plain_arrays=plain_arrays)
    state, _ = pzs.build_train_step_fn(loss, jit=False)(state)
    is_named = [issubclass(kind, (linen.LogicallyPartitioned, pz.nx.NamedArray)) for kind in kinds]
    assert (
        is_named == {None: [False, True], True: [False, False], False: [True, True]}[plain_arrays]
    )
    assert type(state.model["params"]["b"]) is linen.LogicallyPartitioned
    assert type(state.model["params"]["w"]) is pz.nx.NamedArray


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
    shardings = pzs.name_to_name_sharding(
        initial(), MESH, axis_name_to_mesh_name={"in": "data"}, ignore_unnamed_arrays=True
    )
    state, losses, step = run_steps(initial(), batch(), train_state_shardings=shardings)
    np.testing.assert_allclose(losses, by_hand()[1], rtol=1e-6)
    assert state.trained_arrays["w"].sharding.spec == P("data")
    assert count_programs(step) == 1


# Other ways to call a step


def test_step_within_jit_and_without():
    params, losses = by_hand(1)
    step = pzs.build_train_step_fn(loss_fn, step_metrics="loss")
    plain = pzs.build_train_step_fn(loss_fn, step_metrics="loss", jit=False)
    for run in (jax.jit(step), plain, lambda state, x: jax.jit(lambda x: step(state, x=x))(x)):
        state, aux = run(initial(), x=batch())
        np.testing.assert_allclose(state.params["w"].data_array, params, rtol=1e-6)
        np.testing.assert_allclose(float(aux["loss"]), losses[0], rtol=1e-6)


def test_lowerable():
    state = placed()
    step = pzs.build_train_step_fn(loss_fn, donate_params_and_state=True)
    structs = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), state
    )
    described = step.lowerable(structs, x=jax.eval_shape(lambda: batch()))
    leaves = jax.tree.leaves(described.args)
    assert [leaf.value for leaf in described.leaves] == leaves
    donated = {
        leaf.path
        for leaf, is_donated in zip(described.leaves, described.donated, strict=True)
        if is_donated
    }
    assert donated == {"params/w", "opt_state/0/count", "opt_state/0/mu/w", "opt_state/0/nu/w"}
    kept = [leaf.path for leaf in described.leaves if leaf.path not in donated]
    assert kept == ["step", "root_rng", "inputs/x"]
    names = {leaf.path: leaf.names for leaf in described.leaves}
    assert names["opt_state/0/mu/w"] == ("in", "out")
    assert names["inputs/x"] == ("batch", "in")
    assert described.lower().as_text() == step.lower(state, x=batch()).as_text()
    aliased = step.lower(state, x=batch()).compile().memory_analysis().alias_size_in_bytes
    assert aliased == 3 * W.nbytes // 8 + 4


def test_evaluation_changes_nothing():
    evaluate = pzs.build_eval_step_fn(loss_fn)
    state, _, step = run_steps(initial(), batch(), 2)
    arrays = [*map(id, jax.tree.leaves(state))]
    loss, aux = evaluate(state, x=batch())
    assert aux.keys() == {"out"}
    assert [*map(id, jax.tree.leaves(state))] == arrays
    state, after = step(state, x=batch())
    assert float(loss) == float(after["loss"])
    evaluate(state, x=batch())
    assert count_programs(step) == count_programs(evaluate) == 1
