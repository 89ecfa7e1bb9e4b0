"""Train states by path: of this library, of Flax, of dictionaries; what optimizers keep follows."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P
from penzai import pz

import penzai_shard as pzs
from penzai_shard.arrays.structure import flatten
from tests.models import OPTIMIZERS, counted_mlp, model

WIDE, TALL = (pzs.make_mesh({"data": n, "model": 8 // n}) for n in (4, 2))
RULES, ZERO = {"embed": "data", "mlp": "model"}, {"mlp": ("data", "model")}
OPTIONS = {"on_unnamed": "replicate", "on_indivisible": "replicate"}


def numbers(value):
    is_key = jnp.issubdtype(getattr(value, "dtype", int), jax.dtypes.prng_key)
    return np.asarray(jax.random.key_data(value) if is_key else value)


def values_of(tree):
    return {leaf.path: numbers(leaf.value) for leaf in flatten(tree)[0]}


def assert_same(found, expected):
    found, expected = values_of(found), values_of(expected)
    assert found.keys() == expected.keys()
    for path, value in expected.items():
        np.testing.assert_array_equal(found[path], value, err_msg=path)


def assert_lies(tree, shardings):
    for leaf, wanted in zip(flatten(tree)[0], flatten(shardings)[0], strict=True):
        assert leaf.value.sharding == wanted.value, leaf.path


def named_params(names=("up", "down"), first=0):
    w = jnp.arange(128.0).reshape(8, 16) + first
    pairs = zip(names, (("embed", "mlp"), ("mlp", "embed")), (w, w.T), strict=True)
    return {f"{name}/w": pz.nx.wrap(data, *axes) for name, axes, data in pairs}


def dictionary(params, optimizer=None, step=3):
    """A state whose arrays are all different."""
    state = {"params": params, "opt_state": (optimizer or optax.adam(1e-3)).init(params)}
    leaves, structure = flatten(state)
    filled = structure.fill([leaf.value + i for i, leaf in enumerate(leaves)])
    return {**filled, "step": step, "rng": jax.random.key(step), "act": jax.nn.relu}


def structs_of(state):
    leaves, structure = flatten(state)
    return structure.fill([jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) for leaf in leaves])


@pytest.mark.parametrize("name", ["adamw", "masked", "multi_steps", "adafactor", "sm3", "muon"])
def test_restore_train_state_any_optimizer_on_another_mesh(tmp_path, name):
    state = dictionary(named_params(), OPTIMIZERS[name](1e-3))
    placed = pzs.place(state, WIDE, RULES, **OPTIONS)
    path = pzs.save_train_state(tmp_path / "state", placed)
    restored = pzs.restore_train_state(path, structs_of(state), TALL, RULES, **OPTIONS)
    assert_same(restored, state)
    assert_lies(restored, pzs.make_plan(state, TALL, RULES, **OPTIONS).sharding_tree())
    assert restored["act"] is jax.nn.relu


def test_restore_train_state_of_flax(tmp_path):
    state = model("linen state")
    path = pzs.save_train_state(tmp_path / "state", state)
    restored = pzs.restore_train_state(path, structs_of(state), WIDE, RULES, **OPTIONS)
    assert_same(restored, state)
    assert jax.tree.structure(restored) == jax.tree.structure(state)
    assert restored.params["Dense_0"]["kernel"].value.sharding.spec == P("data", "model")


def test_restore_train_state_of_this_library(tmp_path):
    def state_of(seed):
        build = pz.nn.Sequential([counted_mlp(seed), pz.nn.ConstantRescale(jnp.float32(seed))])
        return pzs.TrainState.initial_state(build, optax.adam(1e-3), jax.random.key(seed))

    state, other = state_of(1), state_of(2)
    rules = {"features": "data"}
    path = pzs.save_train_state(tmp_path / "state", state)
    restored = pzs.restore_train_state(path, other, WIDE, rules, on_indivisible="replicate")
    assert_same(restored.params, state.params)
    assert_same(restored.opt_state, state.opt_state)
    assert_same(restored.root_rng, state.root_rng)
    # Constants are the model's own, and lie on the mesh too.
    (constant,) = [leaf for leaf in flatten(restored)[0] if leaf.role == "constant"]
    assert (float(constant.value), constant.value.sharding.mesh) == (2.0, WIDE)
    shardings = pzs.train_state_sharding(other, TALL, rules, on_indivisible="replicate")
    assert_lies(pzs.restore_train_state(path, other, shardings=shardings), shardings)
    # The parameters of a checkpoint of a state fit the model.
    params = pzs.param_dict(pzs.restore_params(path, other.model))
    assert_same(params, pzs.param_dict(state.model))


def test_restore_train_state_optimizer_rules(tmp_path):
    state = dictionary(named_params())
    path = pzs.save_train_state(tmp_path / "state", state)
    restored = pzs.restore_train_state(path, state, WIDE, RULES, optimizer_rules=ZERO)
    assert_same(restored, state)
    assert restored["params"]["up/w"].data_array.sharding.spec == P("data", "model")
    mu = restored["opt_state"][0].mu["up/w"]
    assert mu.data_array.sharding.spec == P(None, ("data", "model"))
    rules = {"embed": "data", "mlp": "data"}
    with pytest.raises(pzs.PlanError) as caught:
        pzs.restore_train_state(path, state, WIDE, RULES, optimizer_rules=rules)
    assert all(problem.path.startswith("opt_state/") for problem in caught.value.problems)


def test_restore_train_state_without_mesh(tmp_path):
    state = pzs.place(dictionary(named_params()), WIDE, RULES)
    shardings = pzs.make_plan(state, WIDE, RULES).sharding_tree()
    path = pzs.save_train_state(tmp_path / "state", state)
    expected = jax.tree.map(lambda x: x + 0 if hasattr(x, "shape") else x, state["params"])
    for array in jax.tree.leaves(state["params"]):
        # As a step that donates its state leaves it.
        array.delete()
    restored = pzs.restore_train_state(path, state)
    assert_lies(restored, shardings)
    assert_same(restored["params"], expected)
    other = pzs.make_plan(state, TALL, ZERO).sharding_tree()
    assert_lies(pzs.restore_train_state(path, state, shardings=other), other)
    for options in ({"shardings": shardings["params"]}, {"shardings": other, "mesh": TALL}):
        with pytest.raises(pzs.RuleTypeError):
            pzs.restore_train_state(path, state, **options)


@pytest.mark.parametrize("name", ["adafactor", "sm3"])
def test_restore_train_state_renamed_parameters(tmp_path, name):
    state = dictionary(named_params(), OPTIMIZERS[name](1e-3))
    path = pzs.save_train_state(tmp_path / "state", state)
    other = dictionary(named_params(("net/up", "net/down"), 1), OPTIMIZERS[name](1e-3), step=4)
    with pytest.raises(pzs.CheckpointMismatchError):
        pzs.restore_train_state(path, other)
    restored = pzs.restore_train_state(path, other, names={"*/w": "net/*/w"})
    found = {path.replace("net/", ""): value for path, value in values_of(restored).items()}
    np.testing.assert_equal(found, values_of(state))


def test_restore_train_state_blocks(tmp_path):
    def params_of(stacked, first):
        w = jnp.arange(24.0).reshape(2, 3, 4) + first
        if stacked:
            return {"net/blocks/w": pz.nx.wrap(w, "blocks", "a", "b")}
        return {f"net/block_{i}/w": pz.nx.wrap(w[i], "a", "b") for i in range(2)}

    for stacked in (True, False):
        first, other = params_of(stacked, 1), params_of(not stacked, 0)
        state = {"params": first, "opt_state": optax.adam(1e-3).init(first)[0]._replace(mu=first)}
        wanted = {"params": other, "opt_state": optax.adam(1e-3).init(other)[0]}
        path = pzs.save_train_state(tmp_path / str(stacked), state)
        restored = pzs.restore_train_state(path, wanted, allow="blocks")
        for found in (restored["params"], restored["opt_state"].mu):
            assert_same(found, params_of(not stacked, 1))


def test_restore_train_state_differences(tmp_path):
    state = dictionary(named_params())
    path = pzs.save_train_state(tmp_path / "state", state)
    other = dictionary(named_params(), optax.sgd(1e-3, momentum=0.9))
    with pytest.raises(pzs.CheckpointMismatchError) as caught:
        pzs.restore_train_state(path, other)
    found = {(problem.kind, problem.path.split("/")[2]) for problem in caught.value.problems}
    assert found == {("missing", "trace"), ("extra", "mu"), ("extra", "nu"), ("extra", "count")}
    params = pzs.save_params(tmp_path / "params", named_params())
    with pytest.raises(pzs.CheckpointMismatchError) as caught:
        pzs.restore_train_state(params, state)
    assert [problem.kind for problem in caught.value.problems] == ["kind"]
