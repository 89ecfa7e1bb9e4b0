"""Plans of arrays without names, under rules that split their largest dimension."""

import dataclasses
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
import pytest
from jax.sharding import PartitionSpec as P
from penzai import pz

from penzai_shard import (
    Layout,
    TrainState,
    fully_sharded,
    make_mesh,
    make_plan,
    name_to_name_sharding,
    tensor_parallel,
    train_state_sharding,
)
from penzai_shard.errors import PlanError

MESH = make_mesh({"data": 4, "model": 2})
RULES = fully_sharded(min_size=32, unnamed="largest")


def weights():
    return {
        "tall": jnp.ones((16, 8)),
        "square": jnp.ones((16, 16)),
        "odd": jnp.ones((7, 9)),
        "small": jnp.ones(4),
        "scale": jnp.ones(()),
    }


def plans(tree, rules=RULES, **options):
    return {leaf.path: leaf for leaf in make_plan(tree, MESH, rules, **options).leaves}


def test_arrays_without_names_are_split_or_the_plan_says_why_not():
    found = plans(weights())
    assert found["tall"].spec == P("data")
    assert found["tall"].shard_shape == (4, 8)
    assert {path: leaf.reason for path, leaf in found.items()} == {
        "tall": "no names: dimension 0 (16) -> 'data' (largest free)",
        "square": "no names: dimension 0 (16) -> 'data' (largest free)",
        "odd": "no names: no free dimension divides over mesh axis 'data' (4)",
        "small": "no names: under 32 elements, not split over 'data'",
        "scale": "scalar: replicated",
    }


def test_named_arrays_beside_them_are_laid_out_by_name():
    tree = {
        "named": pz.nx.ones({"embedding": 16, "neurons": 8}),
        "positional": pz.nx.wrap(jnp.ones((16, 8))),
        "bare": jnp.ones((16, 8)),
    }
    found = plans(tree, RULES | tensor_parallel())
    assert found["named"].spec == P("data", "model")
    assert found["positional"].spec == P()
    assert found["bare"].spec == P("data")


def test_without_the_rule_they_are_an_error_as_before():
    with pytest.raises(PlanError, match=r"bare: this array of shape \(16, 8\) has no logical axis"):
        plans({"bare": jnp.ones((16, 8))}, fully_sharded(min_size=1))


def test_random_keys_and_empty_arrays_stay_whole():
    tree = {"keys": jax.random.split(jax.random.key(0), 16), "empty": jnp.ones((0, 16))}
    found = plans(tree, fully_sharded(min_size=0, unnamed="largest"))
    assert {path: (leaf.spec, leaf.reason) for path, leaf in found.items()} == {
        "keys": (P(), "random keys: replicated"),
        "empty": (P(), "no names: no elements"),
    }


@pytest.mark.parametrize("on_unnamed", ["replicate", "infer"])
def test_what_the_rule_decides_is_not_left_to_the_option_for_arrays_without_names(on_unnamed):
    found = plans(weights(), on_unnamed=on_unnamed)
    assert found["tall"].spec == P("data")
    assert found["small"].spec == P()


def test_texts_are_no_arrays_under_this_rule_either():
    with pytest.raises(PlanError, match="a str is not an array"):
        plans({"name": "text"})


def test_equinox_modules_are_split_without_a_warning():
    module = eqx.filter_eval_shape(eqx.nn.MLP, 8, 8, 16, 1, key=jax.random.key(0))
    found = plans(module)
    assert found["layers/0/weight"].spec == P("data")
    assert found["layers/1/bias"].reason == "no names: under 32 elements, not split over 'data'"
    by_module = name_to_name_sharding(module, MESH, RULES)
    assert by_module.layers[1].weight.spec == P(None, "data")


def abstract_state(optimizer, parameters=weights):
    def build(key):
        return TrainState.initial_state(parameters(), optimizer, key)

    return jax.eval_shape(build, jax.random.PRNGKey(0))


def test_moments_lie_as_their_parameters():
    state = abstract_state(optax.adam(0.1))
    found = plans(state)
    for name in weights():
        for moment in ("mu", "nu"):
            assert found[f"opt_state/0/{moment}/{name}"].spec == found[f"params/{name}"].spec
    assert found["opt_state/0/mu/tall"].spec == P("data")


def test_factored_statistics_lie_as_the_dimensions_of_their_parameter_that_they_keep():
    state = abstract_state(optax.adafactor(0.1, min_dim_size_to_factor=2))
    found = {path: leaf.spec for path, leaf in plans(state).items()}
    # Of both, dimension 0 is split. adafactor's rows have lost the longest dimension, of equals
    # the last one.
    assert found["opt_state/0/v_row/square"] == P("data")
    assert found["opt_state/0/v_col/square"] == P()
    assert found["opt_state/0/v_row/tall"] == P()
    assert found["opt_state/0/v_col/tall"] == P("data")
    reason = plans(state)["opt_state/0/v_col/tall"].reason
    assert reason.startswith("no names: statistic, laid out as its parameter: dimension 0 (16)")


def test_statistics_of_one_dimension_each_lie_as_that_dimension():
    def parameters():
        return {"tall": jnp.ones((16, 8)), "square": jnp.ones((16, 16))}

    found = {
        path: leaf.spec for path, leaf in plans(abstract_state(optax.sm3(0.1), parameters)).items()
    }
    assert found["opt_state/0/mu/square/0"] == P("data")
    assert found["opt_state/0/mu/square/1"] == P()
    assert found["opt_state/0/mu/tall/0"] == P("data")


def test_a_history_of_parameters_is_split_as_each_of_them():
    optimizer = optax.scale_by_lbfgs(memory_size=64)
    found = {path: leaf.spec for path, leaf in plans(abstract_state(optimizer)).items()}
    assert found["opt_state/diff_params_memory/tall"] == P(None, "data")


@pytest.mark.parametrize(
    "optimizer", [optax.adam(0.1), optax.adafactor(0.1, min_dim_size_to_factor=2)]
)
def test_states_are_made_where_the_plan_says(optimizer):
    rules = Layout.fully_sharded(min_size=32, unnamed="largest").parameters
    placed = jax.device_put(weights(), name_to_name_sharding(weights(), MESH, rules))
    state = TrainState.initial_state(placed, optimizer, jax.random.key(0))
    planned = train_state_sharding(state, MESH, rules)
    actual = jax.tree.map(lambda array: array.sharding, state.opt_state)
    assert jax.tree.all(jax.tree.map(lambda a, b: a == b, actual, planned.opt_state))


def test_the_optimizer_may_be_split_where_parameters_are_whole():
    optimizer = optax.adafactor(0.1, min_dim_size_to_factor=2)
    state = TrainState.initial_state(
        jax.device_put(weights(), jax.NamedSharding(MESH, P())),
        optimizer,
        jax.random.key(0),
        optimizer_rules=RULES,
    )
    planned = train_state_sharding(state, MESH, {}, RULES, on_unnamed="replicate")
    assert planned.params["tall"].spec == P()
    assert planned.opt_state[0].v_col["tall"].spec == P("data")
    assert state.opt_state[0].v_col["tall"].sharding == planned.opt_state[0].v_col["tall"]


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class StateOfOthers:
    params: Any
    opt_state: Any


def test_train_states_of_other_libraries_are_read_by_their_fields():
    module = eqx.filter(eqx.nn.Linear(16, 8, key=jax.random.key(0)), eqx.is_array)
    optimizer = optax.adafactor(0.1, min_dim_size_to_factor=2)
    state = jax.eval_shape(lambda: StateOfOthers(module, optimizer.init(module)))
    found = {path: leaf.spec for path, leaf in plans(state).items()}
    assert found["params/weight"] == P(None, "data")
    assert found["opt_state/0/v_col/weight"] == P("data")
    assert found["opt_state/0/v_row/weight"] == P()


@pytest.mark.parametrize("layers", [tuple, list])
@pytest.mark.parametrize("count", [2, 3])
def test_statistics_of_parameters_in_sequences_belong_to_the_one_at_their_place(layers, count):
    parameters = layers([jnp.ones((32, 64)), jnp.ones(32), jnp.ones((64, 8))][:count])
    state = StateOfOthers(parameters, optax.adam(0.1).init(parameters))
    found = {path: leaf.spec for path, leaf in plans(state).items()}
    for place in range(count):
        assert found[f"params/{place}"] != P()
        assert found[f"opt_state/0/mu/{place}"] == found[f"params/{place}"]


def test_keys_of_a_train_state_are_whole_whatever_their_form():
    (leaf,) = [
        leaf
        for leaf in make_plan(
            abstract_state(optax.sgd(0.1)), MESH, fully_sharded("model", 0, "largest")
        ).leaves
        if leaf.path == "root_rng"
    ]
    assert leaf.shape == (2,)
    assert leaf.spec == P()
