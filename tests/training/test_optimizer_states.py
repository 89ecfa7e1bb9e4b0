"""Every optimizer's state of a sharded model: planned, placed, stepped."""

import collections

import jax
import jax.numpy as jnp
import optax
import pytest
from jax.sharding import NamedSharding, PartitionSpec
from penzai import pz

from penzai_shard.planning import make_plan
from penzai_shard.training import (
    TrainState,
    build_train_step_fn,
    shard_batch,
    train_state_sharding,
)

RULES = {"features": "data", "features_out": "model", "batch": "data"}

FACTORED = {"adafactor", "sm3"}


def _labels(params):
    return {name: "matrix" if "weights" in name else "rest" for name in params}


OPTIMIZERS = {
    "sgd": lambda: optax.sgd(1e-2, momentum=0.9),
    "adam": lambda: optax.adam(1e-2),
    "adamw": lambda: optax.adamw(1e-2),
    "lion": lambda: optax.lion(1e-2),
    "lamb": lambda: optax.lamb(1e-2),
    "rmsprop": lambda: optax.rmsprop(1e-2),
    "adafactor": lambda: optax.adafactor(1e-2, min_dim_size_to_factor=8),
    "sm3": lambda: optax.sm3(1e-2),
    "novograd": lambda: optax.novograd(1e-2),
    "yogi": lambda: optax.yogi(1e-2),
    "schedule_free_adamw": lambda: optax.contrib.schedule_free_adamw(1e-2),
    "muon": lambda: optax.contrib.muon(1e-2),
    "chain": lambda: optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-2)),
    "masked": lambda: optax.masked(
        optax.adam(1e-2), lambda params: {name: "weights" in name for name in params}
    ),
    "partition": lambda: optax.partition(
        {"matrix": optax.adafactor(1e-2, min_dim_size_to_factor=8), "rest": optax.sgd(1e-2, 0.9)},
        _labels,
    ),
    "MultiSteps": lambda: optax.MultiSteps(
        optax.adam(1e-2), every_k_schedule=2
    ).gradient_transformation(),
    "inject_hyperparams": lambda: optax.inject_hyperparams(optax.adamw)(learning_rate=1e-2),
    "everything": lambda: optax.chain(
        optax.masked(optax.add_decayed_weights(1e-2), _is_matrix),
        optax.inject_hyperparams(optax.adafactor, static_args=("min_dim_size_to_factor",))(
            learning_rate=1e-2, min_dim_size_to_factor=8
        ),
    ),
}


def _is_matrix(params):
    return {name: "weights" in name for name in params}


@pytest.fixture(params=list(OPTIMIZERS))
def optimizer(request):
    return OPTIMIZERS[request.param]()


def arrays_of_param(opt_state, name):
    """Every array that an optimizer keeps for one parameter."""
    return [
        leaf
        for path, leaf in jax.tree_util.tree_flatten_with_path(opt_state)[0]
        if any(isinstance(key, jax.tree_util.DictKey) and key.key == name for key in path)
    ]


def expected_specs(param, shape):
    """The layouts that a statistic of some shape may have: those of the dimensions it keeps."""
    data = param.data_array
    if shape == data.shape:
        return {data.sharding.spec}
    if shape in ((), (1,)):
        return {PartitionSpec()}
    entries = (*data.sharding.spec, *(None,) * (data.ndim - len(data.sharding.spec)))
    return {
        PartitionSpec(entry) if entry else PartitionSpec()
        for size, entry in zip(data.shape, entries, strict=True)
        if (size,) == shape
    }


def assert_moments_follow(opt_state, params):
    kept = 0
    for name, param in params.items():
        for array in arrays_of_param(opt_state, name):
            assert array.sharding.spec in expected_specs(param, array.shape), (name, array.shape)
            kept += 1
    assert kept or not jax.tree.leaves(opt_state)


def assert_nothing_on_one_device(tree, mesh):
    for leaf in jax.tree.leaves(tree):
        assert leaf.sharding.device_set == set(mesh.devices.flat)
        if not leaf.ndim:
            assert leaf.sharding == NamedSharding(mesh, PartitionSpec())


def test_plan_of_the_state_is_valid_and_moments_lie_as_their_parameters(
    optimizer, make_model, batch, mesh
):
    traces = []

    def loss_fn(model, rng, state, x):
        traces.append(x)
        loss = (model(x).untag("batch", "features").unwrap() ** 2).mean()
        return loss, state, {"loss": loss}

    state = TrainState.initial_state(make_model((8, 16)), optimizer, jax.random.key(0))
    shardings = train_state_sharding(state, mesh, RULES)
    state = jax.device_put(state, shardings)
    for leaf, sharding in zip(jax.tree.leaves(state), jax.tree.leaves(shardings), strict=True):
        assert leaf.sharding == sharding
        assert leaf.addressable_shards[0].data.shape == sharding.shard_shape(leaf.shape)
    assert_moments_follow(state.opt_state, state.params)
    assert_nothing_on_one_device(state, mesh)

    step = build_train_step_fn(
        loss_fn, donate_params_and_state=True, train_state_shardings=shardings
    )
    placed = shard_batch(batch["x"], mesh, {"batch": "data"})
    for _ in range(3):
        state, aux = step(state, x=placed)
    assert jnp.isfinite(aux["loss"])
    assert len(traces) == 1
    (program,) = step._programs.values()
    assert program.run._cache_size() == 1
    for leaf, sharding in zip(jax.tree.leaves(state), jax.tree.leaves(shardings), strict=True):
        assert leaf.sharding == sharding


def test_initial_state_of_a_sharded_model_is_laid_out_alike(optimizer, make_model, mesh):
    model = make_model((8, 16))
    for parameter in pz.unbind_params(model)[1]:
        tree = make_plan(parameter.value, mesh, RULES).sharding_tree()
        parameter.value = jax.device_put(parameter.value, tree)
    state = TrainState.initial_state(model, optimizer, jax.random.key(0))
    assert_nothing_on_one_device(state, mesh)
    assert_moments_follow(state.opt_state, state.params)
    declared = train_state_sharding(state, mesh, RULES)
    for leaf, sharding in zip(jax.tree.leaves(state), jax.tree.leaves(declared), strict=True):
        assert leaf.sharding == sharding


@pytest.mark.parametrize("name", ["adafactor", "sm3"])
def test_factored_statistics_keep_the_layout_of_what_they_keep(name, mesh):
    weights = {"w": pz.nx.ones({"features": 16, "features_out": 32})}
    state = TrainState.initial_state(weights, OPTIMIZERS[name](), jax.random.key(0))
    shardings = train_state_sharding(state, mesh, RULES)
    arrays = arrays_of_param(state.opt_state, "w")
    specs = [s.spec for s in arrays_of_param(shardings.opt_state, "w")]
    by_shape = collections.defaultdict(set)
    for array, spec in zip(arrays, specs, strict=True):
        by_shape[array.shape].add(spec)
    assert by_shape[(16,)] == {PartitionSpec("data")}
    assert by_shape[(32,)] == {PartitionSpec("model")}


def test_equal_layouts_are_one_object(make_model, mesh):
    state = TrainState.initial_state(make_model(), optax.adam(1e-2), jax.random.key(0))
    shardings = jax.tree.leaves(train_state_sharding(state, mesh, RULES))
    assert len({id(s) for s in shardings}) == len(set(shardings))
    assert not any(s.spec and s.spec[-1] is None for s in shardings)


def test_optimizer_rules_give_zero_stage_one(make_model, loss_fn, batch, mesh):
    state = TrainState.initial_state(make_model(), optax.adamw(1e-2), jax.random.key(0))
    shardings = train_state_sharding(state, mesh, {}, {"features_out": "data"})
    state = jax.device_put(state, shardings)
    step = build_train_step_fn(loss_fn, train_state_shardings=shardings)
    placed = shard_batch(batch, mesh, {"batch": "data"})
    reference = TrainState.initial_state(make_model(), optax.adamw(1e-2), jax.random.key(0))
    plain = build_train_step_fn(loss_fn)
    for _ in range(3):
        state, aux = step(state, **placed)
        reference, expected = plain(reference, **batch)
        assert jnp.allclose(aux["loss"], expected["loss"], rtol=1e-4)
    weights = state.params["mlp/Affine_0/Linear.weights"].data_array
    moment = state.opt_state[0].mu["mlp/Affine_0/Linear.weights"].data_array
    assert weights.sharding == NamedSharding(mesh, PartitionSpec())
    assert moment.sharding == NamedSharding(mesh, PartitionSpec(None, "data"))
    assert moment.addressable_shards[0].data.shape == (8, 4)


def test_abstract_state_plans_without_memory(make_model, mesh):
    optimizer = optax.adamw(1e-2)

    def build():
        return TrainState.initial_state(make_model(), optimizer, jax.random.key(0))

    shardings = train_state_sharding(jax.eval_shape(build), mesh, RULES)
    state = jax.jit(build, out_shardings=shardings)()
    assert_moments_follow(state.opt_state, state.params)
    placed = jax.device_put(build(), shardings)
    assert jax.tree.structure(placed) == jax.tree.structure(state)


def test_parameters_without_names_are_refused_or_replicated(mesh):
    weights = {"layer": {"w": jnp.ones((8, 8))}}
    state = TrainState.initial_state(weights, optax.adam(1e-2), jax.random.key(0))
    with pytest.raises(ValueError, match=r"params/layer/w: .*no logical axis names"):
        train_state_sharding(state, mesh, RULES)
    shardings = train_state_sharding(state, mesh, RULES, on_unnamed="replicate")
    assert {s.spec for s in jax.tree.leaves(shardings)} == {PartitionSpec()}
