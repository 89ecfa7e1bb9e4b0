"""States of models of each library: what they hold, give back, and how they are laid out."""

import copy
import pickle

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P
from penzai import pz

import penzai_shard as pzs
from penzai_shard import ShardingError
from tests.models import MODELS, llama, mlp_v1, nnx_block, penzai_mlp
from tests.training.losses import KEY, LOSSES

MESH = pzs.make_mesh({"data": 4, "model": 2})
RULES = {"embedding": "data", "embed": "data", "features": "data", "mlp": "model"}
RELAXED = {"on_indivisible": "replicate", "on_unnamed": "replicate"}
NAMED = {"w": pz.nx.ones({"in": 8, "out": 4}), "b": pz.nx.ones({"out": 4})}


def initial(model, optimizer=None, key=KEY, **options):
    return pzs.TrainState.initial_state(model, optimizer or optax.adam(1e-3), key, **options)


def bits(array):
    return jax.random.key_data(array) if jnp.issubdtype(array.dtype, jax.dtypes.prng_key) else array


def assert_same(a, b):
    pairs = zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)
    assert all(np.array_equal(bits(x), bits(y)) for x, y in pairs)


def freeze(tree):
    return pz.freeze_variables(tree)


# Models in and out


@pytest.mark.parametrize("name", LOSSES)
def test_initial_state_gives_the_model_back(name):
    model = MODELS[name]()
    state = initial(model)
    again = state.model
    assert type(again) is type(model)
    if name not in ("nnx", "plain"):
        assert jax.tree.structure(freeze(again)) == jax.tree.structure(freeze(model))
    arrays = [*map(id, jax.tree.leaves(freeze(model)))]
    assert {*map(id, state.trained_arrays.values())} <= {*arrays}


@pytest.mark.parametrize("name", LOSSES)
def test_initial_state_of_equal_builds(name):
    first, second = (initial(MODELS[name]()) for _ in range(2))
    structures = [jax.tree.structure(state) for state in (first, second)]
    assert structures[0] == structures[1]
    assert hash(structures[0]) == hash(structures[1])
    assert jax.tree.structure(initial(MODELS[name](), optax.adam(1e-2))) != structures[0]
    shardings = pzs.train_state_sharding(first, MESH, RULES, **RELAXED)
    placed = jax.device_put(second, shardings)
    assert_same(placed, second)
    assert jax.tree.structure(placed) == structures[0]


def test_initial_state_of_another_depth():
    assert jax.tree.structure(initial(llama())) != jax.tree.structure(initial(llama(kv_heads=1)))


def count_kinds(state):
    kinds = [*state.template.kinds.values()]
    return tuple(map(kinds.count, ("trained", "frozen", "state", "constant")))


def test_initial_state_kinds():
    counts = {
        "counted mlp": (4, 0, 1, 0),
        "linen": (6, 0, 2, 0),
        "nnx": (4, 0, 4, 0),
        "equinox": (6, 0, 0, 0),
        "plain": (1, 0, 0, 0),
    }
    assert {name: count_kinds(initial(MODELS[name]())) for name in counts} == counts


def test_initial_state_keeps_settings():
    state = initial({"w": jnp.ones(2), "rate": 0.5, "scale": 2, "on": True})
    assert {name: state.model[name] for name in ("rate", "scale", "on")} == {
        "rate": 0.5,
        "scale": 2,
        "on": True,
    }
    assert state.params.keys() == {"w"}


def test_initial_state_frozen_parameters():
    model = penzai_mlp()
    frozen = pz.select(model).at_instances_of(pz.Parameter).pick_nth_selected(0)
    frozen = frozen.apply(lambda parameter: parameter.freeze())
    label = pz.select(model).at_instances_of(pz.Parameter).get_sequence()[0].label
    assert initial(frozen).fixed_arrays.keys() == {label}
    assert initial(frozen).params.keys() == initial(model).params.keys()
    of_predicate = initial(model, trainable=lambda parameter: parameter.label != label)
    assert of_predicate.fixed_arrays.keys() == {label}
    assert label not in of_predicate.opt_state[0].mu
    v1 = mlp_v1()
    first = pz.select(v1).at_instances_of(type(v1.sublayers[0].sublayers[0].weights))
    from penzai.deprecated.v1 import pz as pz_v1

    froze = first.pick_nth_selected(0).apply(
        lambda parameter: pz_v1.nn.FrozenParameter(parameter.value, parameter.name)
    )
    assert count_kinds(initial(froze)) == (3, 1, 0, 0)


def test_initial_state_of_shapes():
    state = initial(pzs.abstract_model(llama))
    by_trace = jax.eval_shape(lambda: initial(llama()))
    assert jax.tree.structure(state) == jax.tree.structure(initial(llama()))
    assert jax.tree.structure(state) == jax.tree.structure(by_trace)
    for leaf in jax.tree.leaves((state.trained_arrays, state.opt_arrays)):
        assert isinstance(leaf, jax.ShapeDtypeStruct)
    # No checkpoint has the constants of a model.
    assert all(isinstance(leaf, jax.Array) for leaf in jax.tree.leaves(state.fixed_arrays))
    for mesh in (MESH, pzs.make_mesh({"data": 16, "model": 2}, abstract=True)):
        plan = pzs.make_plan(pzs.abstract_model(lambda: NAMED), mesh, {"in": None})
        on_mesh = initial(plan.restore_structs())
        assert on_mesh.opt_arrays[0].mu["w"].sharding.mesh == mesh
        assert on_mesh.step.sharding.mesh == mesh


def test_initial_state_on_a_mesh():
    placed = pzs.place(NAMED, MESH, {"in": "data", "out": "model"})
    optimizer = optax.adafactor(1e-2, min_dim_size_to_factor=2)
    state = initial(placed, optimizer)
    factored = state.opt_arrays[0]
    assert factored.v_row["w"].sharding.spec == P("model")
    assert factored.v_col["w"].sharding.spec == P("data")
    for leaf in jax.tree.leaves(state):
        assert leaf.sharding.mesh == MESH
    split = initial(placed, optimizer_rules={"in": ("data", "model")}, on_unnamed="error")
    assert split.opt_arrays[0].mu["w"].sharding.spec == P(("data", "model"))
    explicit = pzs.make_mesh({"data": 4, "model": 2}, explicit=True)
    on_explicit = jax.device_put(
        {"w": jnp.ones((8, 4))}, jax.sharding.NamedSharding(explicit, P("data"))
    )
    assert initial(on_explicit).trained_arrays["w"].sharding.mesh == MESH


@pytest.mark.parametrize("key", [jax.random.key(3), jax.random.PRNGKey(3)])
def test_initial_state_keys(key):
    state = initial(NAMED, key=key)
    placed = jax.device_put(state, pzs.train_state_sharding(state, MESH, {"in": "data"}))
    assert_same(placed.root_rng, key)


# Views and replacement


def test_state_views_have_names():
    state = initial(NAMED, optax.adafactor(1e-2, min_dim_size_to_factor=2))
    assert dict(state.params["w"].named_shape) == {"in": 8, "out": 4}
    assert dict(state.opt_state[0].v_row["w"].named_shape) == {"out": 4}
    assert initial({"m": jnp.ones((2, 3))}).params["m"].shape == (2, 3)
    state = initial(MODELS["linen"]())
    assert dict(state.params["params/Dense_0/kernel"].named_shape) == {"embed": 8, "mlp": 16}


def test_replace():
    state = initial(MODELS["counted mlp"]())
    path = next(iter(state.params))
    zeros = jax.tree.map(jnp.zeros_like, state.params[path])
    new = state.replace(params={path: zeros}, step=7, state_vars={"count": jnp.ones(())})
    assert (int(new.step), float(new.model.count.value)) == (7, 1)
    assert not np.any(new.params[path].data_array)
    assert_same(new.opt_state, state.opt_state)
    moments = jax.tree.map(lambda leaf: leaf + 1, state.opt_state)
    assert_same(state.replace(opt_state=moments).opt_state, moments)


def test_replace_refusals():
    state = initial(NAMED)
    other = pz.nx.ones({"out": 4, "in": 8})
    with pytest.raises(ShardingError) as caught:
        state.replace(params={"w": other, "c": jnp.ones(3), "b": jnp.ones(3)}, speed=1)
    assert {problem.path for problem in caught.value.problems} == {
        "params/w",
        "params/c",
        "params/b",
        "speed",
    }


def test_state_is_a_tree():
    state = initial(MODELS["counted mlp"]())
    doubled = jax.tree.map(lambda leaf: leaf, state)
    assert_same(doubled, state)
    for copied in (copy.copy(state), copy.deepcopy(state)):
        assert_same(copied.params, state.params)
    leaves, structure = jax.tree.flatten(jax.device_get(state.replace(root_rng=state.root_rng)))
    numbers = [leaf for leaf in leaves if isinstance(leaf, np.ndarray)]
    assert len(pickle.loads(pickle.dumps(numbers))) == len(leaves) - 1
    assert structure == jax.tree.structure(state)
    assert "step=0, 4 trained, 0 frozen, 1 state" in repr(state)


# Layouts


def test_train_state_sharding_of_optimizer_rules():
    state = initial(NAMED)
    shardings = pzs.train_state_sharding(state, MESH, {"in": "data"}, {"out": "model"})
    assert shardings.trained_arrays["w"].spec == P("data")
    assert shardings.opt_arrays[0].mu["w"].spec == P(None, "model")
    by_name = pzs.name_to_name_sharding(state, MESH, {"in": "data"})
    assert by_name.trained_arrays["w"] is shardings.trained_arrays["w"]


def test_train_state_sharding_paths_of_problems():
    state = initial({"w": pz.nx.ones({"in": 6})})
    with pytest.raises(pzs.PlanError) as caught:
        pzs.train_state_sharding(state, MESH, {"in": "data"})
    assert {problem.path for problem in caught.value.problems} == {
        "params/w",
        "opt_state/0/mu/w",
        "opt_state/0/nu/w",
    }
    assert {problem.kind for problem in caught.value.problems} == {"indivisible"}


def test_plan_of_a_state():
    plan = pzs.make_plan(initial(nnx_block()), MESH, RULES, on_unnamed="replicate")
    specs = {leaf.path: leaf.spec for leaf in plan.leaves}
    assert (
        specs["params/first/kernel"] == specs["opt_state/0/mu/first/kernel"] == P("data", "model")
    )
    assert pzs.place(initial(NAMED), MESH, {"in": "data"}).trained_arrays["w"].sharding.spec == P(
        "data"
    )


def test_statistics_of_parameters_with_other_names():
    # Called as fields of the optimizer's state, and as its groups.
    state = initial({"mu/w": pz.nx.ones({"a": 8}), "w": pz.nx.ones({"b": 8})})
    groups = {"mu/w": "w", "w": "mu/w"}
    optimizer = optax.multi_transform({name: optax.adam(0.1) for name in groups}, groups)
    for each in (state, initial(state.params, optimizer)):
        shardings = pzs.train_state_sharding(each, MESH, {"a": "data", "b": "model"})
        leaves = jax.tree_util.tree_leaves_with_path(shardings.opt_arrays)
        specs = {(path[-1].key, leaf.spec) for path, leaf in leaves if hasattr(path[-1], "key")}
        assert specs == {("mu/w", P("data")), ("w", P("model"))}
