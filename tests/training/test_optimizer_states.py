"""Every optimizer's state of a sharded model: planned, placed, stepped."""

import collections

import jax
import jax.numpy as jnp
import optax
import pytest
from jax.sharding import NamedSharding, PartitionSpec
from penzai import pz

from penzai_shard.checkpointing import restore_train_state, save_train_state
from penzai_shard.errors import PlanError, ShardingError
from penzai_shard.library_apis.jax_api import is_weakly_typed
from penzai_shard.placement import place
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


def layouts(state, mesh=None):
    """Path, type and layout of every array of a state, on another mesh if one is given."""
    flat, _ = jax.tree_util.tree_flatten_with_path(state)
    return [
        (path, x.shape, x.dtype, is_weakly_typed(x), NamedSharding(mesh or s.mesh, s.spec))
        for path, x in flat
        for s in [x.sharding]
    ]


def test_abstract_states_have_the_layout_of_concrete_ones(
    optimizer, make_model, mesh, explicit_mesh
):
    placed = place(make_model((8, 16)), mesh, RULES)
    state = TrainState.initial_state(placed, optimizer, jax.random.key(0))
    for described in (mesh, explicit_mesh, mesh.abstract_mesh):
        model = make_plan(placed, described, RULES).restore_structs()
        abstract = TrainState.initial_state(model, optimizer, jax.random.key(0))
        assert all(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in jax.tree.leaves(abstract))
        on = described if isinstance(described, jax.sharding.AbstractMesh) else mesh
        assert layouts(abstract) == layouts(state, on)


def test_abstract_states_follow_frozen_parameters_and_rules_of_the_optimizer(make_model, mesh):
    options = {
        "trainable": lambda parameter: "Affine_0" in parameter.label,
        "optimizer_rules": {"features_out": "data"},
        "skip_nonfinite": True,
        "loss_fn_state": jnp.zeros(3),
    }
    placed = place(make_model(), mesh, RULES)
    state = TrainState.initial_state(placed, optax.adam(1e-2), jax.random.key(0), **options)
    model = make_plan(placed, mesh, RULES).restore_structs()
    abstract = TrainState.initial_state(model, optax.adam(1e-2), jax.random.key(0), **options)
    assert layouts(abstract) == layouts(state)
    moments = abstract.opt_state[0].mu
    assert {moment.data_array.sharding.spec for moment in moments.values()} >= {
        PartitionSpec(None, "data")
    }


def test_structs_of_an_explicit_mesh_give_a_state_on_its_auto_twin(mesh, explicit_mesh):
    layout = NamedSharding(explicit_mesh, PartitionSpec("data", None))
    weights = {"w": jax.ShapeDtypeStruct((8, 4), jnp.float32, sharding=layout)}
    state = TrainState.initial_state(weights, optax.sgd(0.1, 0.9), jax.random.key(0))
    expected = NamedSharding(mesh, PartitionSpec("data"))
    assert state.params["w"].sharding == state.opt_state[0].trace["w"].sharding == expected
    assert state.root_rng.sharding == NamedSharding(mesh, PartitionSpec())


def test_structs_of_several_meshes_give_no_state(mesh):
    other = jax.sharding.AbstractMesh((3,), ("data",))
    weights = {
        name: jax.ShapeDtypeStruct((12,), "float32", sharding=NamedSharding(m, PartitionSpec()))
        for name, m in (("v", mesh), ("w", other))
    }
    with pytest.raises(
        ShardingError, match=r"on different meshes(.|\n)*params/w: is on a mesh data=3\."
    ):
        TrainState.initial_state(weights, optax.sgd(0.1), jax.random.key(0))


def test_structs_without_layouts_give_a_state_without(make_model):
    model = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), pz.freeze_params(make_model())
    )
    state = TrainState.initial_state(model, optax.adam(1e-2), jax.random.key(0))
    assert {leaf.sharding for leaf in jax.tree.leaves(state)} == {None}


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


def small_weights():
    keys = jax.random.split(jax.random.key(0), 3)
    return {
        "up": pz.nx.wrap(jax.random.normal(keys[0], (8, 16)) * 0.3, "features", "features_out"),
        "down": pz.nx.wrap(jax.random.normal(keys[1], (16, 8)) * 0.3, "features_out", "features"),
        "bias": pz.nx.wrap(jax.random.normal(keys[2], (8,)) * 0.3, "features"),
    }


def small_loss(model, rng, state, x):
    up = model["up"].unwrap("features", "features_out")
    down = model["down"].unwrap("features_out", "features")
    out = jnp.tanh(x.unwrap("batch", "features") @ up) @ down + model["bias"].unwrap("features")
    return jnp.mean((out - 1) ** 2), state, None


def preconditioned():
    """A matrix of second moments for each dimension, as in Shampoo, made by hand."""

    def init(params):
        return jax.tree.map(lambda p: tuple(jnp.eye(size) for size in p.shape), params)

    def update(updates, state, params=None):
        gradients, treedef = jax.tree.flatten(updates)
        new_state, steps = [], []
        for gradient, moments in zip(gradients, treedef.flatten_up_to(state), strict=True):
            new_moments, step = [], gradient
            for i, moment in enumerate(moments):
                matrix = jnp.moveaxis(gradient, i, 0).reshape(gradient.shape[i], -1)
                new_moments.append(0.9 * moment + 0.1 * matrix @ matrix.T)
                step = jnp.moveaxis(jnp.tensordot(new_moments[-1], step, axes=(1, i)), 0, i)
            new_state.append(tuple(new_moments))
            steps.append(-1e-2 * step)
        return treedef.unflatten(steps), treedef.unflatten(new_state)

    return optax.GradientTransformation(init, update)


ASKING = {
    "lbfgs": lambda: optax.lbfgs(memory_size=3),
    "backtracking": lambda: optax.chain(
        optax.sgd(1.0), optax.scale_by_backtracking_linesearch(max_backtracking_steps=4)
    ),
    "polyak_sgd": lambda: optax.polyak_sgd(),
    "sam": lambda: optax.contrib.sam(optax.sgd(0.1), optax.sgd(0.05)),
    "opaque sam in a chain": lambda: optax.chain(
        optax.clip(1.0),
        optax.contrib.sam(optax.sgd(0.1), optax.sgd(0.05), opaque_mode=True),
    ),
    "sophia": lambda: optax.contrib.sophia(1e-2),
    "galore": lambda: optax.contrib.galore(1e-2, rank=4),
    "preconditioned": preconditioned,
}


@pytest.mark.parametrize("name", list(ASKING))
def test_optimizers_that_ask_for_more_compute_on_a_mesh_what_they_do_on_one_device(name, mesh):
    x = pz.nx.wrap(jax.random.normal(jax.random.key(5), (16, 8)), "batch", "features")
    optimizer = ASKING[name]()
    step = build_train_step_fn(small_loss, donate_params_and_state=True)
    reference = TrainState.initial_state(small_weights(), optimizer, jax.random.key(0))
    weights = small_weights()
    weights = jax.device_put(weights, make_plan(weights, mesh, RULES).sharding_tree())
    state = TrainState.initial_state(weights, optimizer, jax.random.key(0), on_unnamed="replicate")
    declared = train_state_sharding(state, mesh, RULES, on_unnamed="replicate")
    jax.tree.map(lambda leaf, s: leaf.sharding == s or pytest.fail(str(s)), state, declared)
    for _ in range(3):
        reference, _ = step(reference, x=x)
        state, _ = step(state, x=shard_batch(x, mesh, {"batch": "data"}))
    for key, value in reference.params.items():
        found = state.params[key].data_array
        assert jnp.allclose(found, value.data_array, rtol=1e-4, atol=1e-5), key
        assert jnp.any(found != small_weights()[key].data_array)
    jax.tree.map(lambda leaf, s: leaf.sharding == s or pytest.fail(str(s)), state, declared)


@pytest.mark.parametrize("entry", ["initial_state", "train_state_sharding", "restore"])
@pytest.mark.parametrize("name", ["galore", "preconditioned"])
def test_what_is_not_made_of_a_parameter_s_dimensions_is_refused_alike(entry, name, mesh, tmp_path):
    weights = small_weights()
    placed = jax.device_put(weights, make_plan(weights, mesh, RULES).sharding_tree())

    def initial(params, **options):
        return TrainState.initial_state(params, ASKING[name](), jax.random.key(0), **options)

    def enter(**options):
        if entry == "initial_state":
            return initial(placed, **options)
        if entry == "train_state_sharding":
            return train_state_sharding(initial(weights), mesh, RULES, **options)
        state = initial(weights)
        save_train_state(tmp_path / "state", state, overwrite=True)
        return restore_train_state(tmp_path / "state", state, mesh, RULES, **options)

    with pytest.raises(PlanError) as caught:
        enter()
    assert caught.value.problems
    for problem in caught.value.problems:
        assert problem.startswith("opt_state/")
        assert "features" in problem
        assert 'on_unnamed="replicate"' in problem
    leaves = jax.tree.leaves(enter(on_unnamed="replicate"))
    specs = {(leaf if entry == "train_state_sharding" else leaf.sharding).spec for leaf in leaves}
    assert PartitionSpec("data", "model") in specs
