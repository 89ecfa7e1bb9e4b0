"""States of models of each library: what they hold, give back, and how they are laid out."""

import copy
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import treescope
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from penzai import pz
from penzai.deprecated.v1 import pz as pz_v1

import penzai_shard as pzs
from tests.models import MODELS, llama, mlp_v1, nnx_block, penzai_mlp
from tests.training.losses import KEY, LOSSES, initial

MESH = pzs.make_mesh({"data": 4, "model": 2})
RULES = {"embedding": "data", "embed": "data", "features": "data", "mlp": "model"}
RELAXED = {"on_indivisible": "replicate", "on_unnamed": "replicate"}
NAMED = {"w": pz.nx.ones({"in": 8, "out": 4}), "b": pz.nx.ones({"out": 4})}
FACTORED = optax.adafactor(1e-2, min_dim_size_to_factor=2)


def assert_same(a, b):
    pairs = zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)
    assert all((x == y).all() for x, y in pairs)


# Models in and out


@pytest.mark.parametrize("name", LOSSES)
def test_initial_state_of_equal_builds(name):
    model = MODELS[name]()
    first, second = initial(model), initial(MODELS[name]())
    again, held = (pz.freeze_variables(tree) for tree in (first.model, model))
    assert type(again) is type(held)
    if name not in ("nnx", "plain"):
        assert jax.tree.structure(again) == jax.tree.structure(held)
    assert {*map(id, first.trained_arrays.values())} <= {*map(id, jax.tree.leaves(held))}

    structures = [jax.tree.structure(state) for state in (first, second)]
    assert structures[0] == structures[1]
    assert hash(structures[0]) == hash(structures[1])
    assert jax.tree.structure(initial(model, optax.adam(1e-2))) != structures[0]
    placed = jax.device_put(second, pzs.train_state_sharding(first, MESH, RULES, **RELAXED))
    assert_same(placed, second)
    assert jax.tree.structure(placed) == structures[0]


def change_first(kind, model, change):
    return pz.select(model).at_instances_of(kind).pick_nth_selected(0).apply(change)


def forbid(parameter):
    return pz.Parameter(value=parameter.value, label="w", metadata={"trainable": False})


def freeze(parameter):
    return pz_v1.nn.FrozenParameter(parameter.value, parameter.name)


# A model, and how many of its arrays are trained, frozen, state, constant.
KINDS = {
    "counted mlp": (MODELS["counted mlp"], (4, 0, 1, 0)),
    "linen": (MODELS["linen"], (6, 0, 2, 0)),
    "nnx": (nnx_block, (4, 0, 4, 0)),
    "equinox": (MODELS["equinox"], (6, 0, 0, 0)),
    "plain": (MODELS["plain"], (1, 0, 0, 0)),
    "one array": (lambda: jnp.ones(3), (1, 0, 0, 0)),
    "metadata": (lambda: change_first(pz.Parameter, penzai_mlp(), forbid), (3, 1, 0, 0)),
    "value": (lambda: change_first(pz.Parameter, penzai_mlp(), pz.Parameter.freeze), (3, 1, 0, 0)),
    "first API": (lambda: change_first(pz_v1.nn.Parameter, mlp_v1(), freeze), (3, 1, 0, 0)),
}


@pytest.mark.parametrize("name", KINDS)
def test_initial_state_kinds(name):
    make, counts = KINDS[name]
    kinds = [*initial(make()).template.kinds.values()]
    assert tuple(map(kinds.count, ("trained", "frozen", "state", "constant"))) == counts


def test_initial_state_trainable():
    state = initial(NAMED, trainable=lambda parameter: "in" in parameter.value.named_axes)
    assert state.trained_arrays.keys() == {"w"}
    assert state.params.keys() == {"w", "b"}


def test_initial_state_keeps_settings():
    settings = {"rate": 0.5, "scale": 2, "on": True}
    state = initial({"w": jnp.ones(2), **settings})
    assert {name: state.model[name] for name in settings} == settings
    assert state.params.keys() == {"w"}


def test_initial_state_of_shapes():
    state, real = initial(pzs.abstract_model(llama)), initial(llama())
    by_trace = jax.eval_shape(lambda: initial(llama()))
    assert jax.tree.structure(state) == jax.tree.structure(by_trace) == jax.tree.structure(real)
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
    state = initial(pzs.place(NAMED, MESH, {"in": "data", "out": "model"}), FACTORED)
    factored = state.opt_arrays[0]
    assert factored.v_row["w"].sharding.spec == P("model")
    assert factored.v_col["w"].sharding.spec == P("data")
    for leaf in jax.tree.leaves(state):
        assert leaf.sharding.mesh == MESH
    explicit = pzs.make_mesh({"data": 4, "model": 2}, explicit=True)
    w = jax.device_put(jnp.ones((8, 4)), NamedSharding(explicit, P("data")))
    assert initial({"w": w}).trained_arrays["w"].sharding.mesh == MESH


# Views and replacement


def test_state_views_have_names():
    state = initial(NAMED, FACTORED)
    assert dict(state.params["w"].named_shape) == {"in": 8, "out": 4}
    assert dict(state.opt_state[0].v_row["w"].named_shape) == {"out": 4}
    text = treescope.render_to_text(state, ignore_exceptions=False)
    assert "in:8" in text
    shown = re.findall(r"^  (\w+)=", text, re.MULTILINE)
    assert shown[:4] == ["step", "params", "opt_state", "state_vars"]
    assert shown[4:] == ["loss_fn_state", "root_rng", "constants"]
    assert "template" not in text
    assert "1 trained" in repr(initial({"m": jnp.ones((2, 3))}))
    kernel = initial(MODELS["linen"]()).params["params/Dense_0/kernel"]
    assert dict(kernel.named_shape) == {"embed": 8, "mlp": 16}


def test_replace():
    state = initial(MODELS["counted mlp"]())
    path = next(iter(state.params))
    zeros = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, "float16"), state.params[path])
    others = {"params": {path: zeros}, "state_vars": {"count": jnp.ones(())}}
    new = state.replace(**others, step=7, root_rng=KEY)
    assert (int(new.step), float(new.model.count.value)) == (7, 1)
    assert (new.params[path].dtype, np.any(new.params[path].data_array)) == ("float32", False)
    assert_same(new.opt_state, state.opt_state)
    moments = jax.tree.map(lambda leaf: leaf + 1, state.opt_state)
    assert_same(state.replace(opt_state=moments).opt_state, moments)


def test_state_is_a_tree():
    state = initial(MODELS["counted mlp"]())
    assert_same(jax.tree.map(lambda leaf: leaf, state), state)
    for copied in (copy.copy(state), copy.deepcopy(state)):
        assert_same(copied.params, state.params)
    assert jax.tree.structure(jax.device_get(state)) == jax.tree.structure(state)


# Layouts


def test_train_state_sharding_of_optimizer_rules():
    state = initial(NAMED)
    shardings = pzs.train_state_sharding(state, MESH, {"in": "data"}, {"out": "model"})
    assert shardings.trained_arrays["w"].spec == P("data")
    assert shardings.opt_arrays[0].mu["w"].spec == P(None, "model")
    by_name = pzs.name_to_name_sharding(state, MESH, {"in": "data"})
    assert by_name.trained_arrays["w"] is shardings.trained_arrays["w"]


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
