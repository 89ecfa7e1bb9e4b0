"""Train states by path: of this library, of Flax, of dictionaries; what optimizers keep follows."""

import jax
import jax.numpy as jnp
import optax
import pytest
from penzai import pz

import penzai_shard as pzs
from penzai_shard.arrays.structure import flatten, leaves_of
from tests.checkpoints.trees import assert_lies, assert_lies_as, contents, refused_kinds, structs_of
from tests.models import OPTIMIZERS, counted_mlp
from tests.refusals import problems_of, refused

WIDE, TALL = (pzs.make_mesh({"data": n, "model": 8 // n}) for n in (4, 2))
RULES, ZERO = {"embed": "data", "mlp": "model"}, {"mlp": ("data", "model")}
OPTIONS = {"on_unnamed": "replicate", "on_indivisible": "replicate"}


def named_params(names=("up", "down"), first=0):
    w = jnp.arange(128.0).reshape(8, 16) + first
    pairs = zip(names, (("embed", "mlp"), ("mlp", "embed")), (w, w.T), strict=True)
    return {f"{name}/w": pz.nx.wrap(data, *axes) for name, axes, data in pairs}


def dictionary(parameters, optimizer=None, step=3):
    """A state whose arrays are all different."""
    optimizer = optimizer or optax.adam(1e-3)
    leaves, structure = flatten({"params": parameters, "opt_state": optimizer.init(parameters)})
    filled = structure.fill([leaf.value + i for i, leaf in enumerate(leaves)])
    return {**filled, "step": step, "rng": jax.random.key(step), "act": jax.nn.relu}


@pytest.mark.parametrize("name", ["adamw", "masked", "multi_steps", "adafactor", "sm3", "muon"])
def test_restore_train_state_any_optimizer_on_another_mesh(tmp_path, name):
    state = dictionary(named_params(), OPTIMIZERS[name](1e-3))
    placed = pzs.place(state, WIDE, RULES, **OPTIONS)
    path = pzs.save_train_state(tmp_path / "state", placed)
    restored = pzs.restore_train_state(path, structs_of(state), TALL, RULES, **OPTIONS)
    assert contents(restored) == contents(state)
    assert_lies(restored, TALL, RULES, **OPTIONS)
    assert restored["act"] is jax.nn.relu


def test_restore_train_state_of_this_library(tmp_path):
    def state_of(seed):
        build = pz.nn.Sequential([counted_mlp(seed), pz.nn.ConstantRescale(jnp.float32(seed))])
        return pzs.TrainState.initial_state(build, optax.adam(1e-3), jax.random.key(seed))

    state, other = state_of(1), state_of(2)
    rules, options = {"features": "data"}, {"on_indivisible": "replicate"}
    path = pzs.save_train_state(tmp_path / "state", state)
    restored = pzs.restore_train_state(path, other, WIDE, rules, **options)
    assert_lies_as(restored, pzs.train_state_sharding(other, WIDE, rules, **options))
    # Constants are the model's own.
    (constant,) = [leaf.path for leaf in leaves_of(other) if leaf.role == "constant"]
    expected = contents(state) | {constant: contents(other)[constant]}
    assert contents(restored) == expected
    shardings = pzs.train_state_sharding(other, TALL, rules, **options)
    assert_lies_as(pzs.restore_train_state(path, other, shardings=shardings), shardings)


def test_restore_train_state_where_arrays_go(tmp_path):
    state = pzs.place(dictionary(named_params()), WIDE, RULES)
    path = pzs.save_train_state(tmp_path / "state", state)
    expected = contents(state)
    for array in jax.tree.leaves(state["params"]):
        # As a step that donates its state leaves it.
        array.delete()
    restored = pzs.restore_train_state(path, state)
    assert_lies(restored, WIDE, RULES)
    assert contents(restored) == expected
    other = pzs.make_plan(state, TALL, ZERO).sharding_tree()
    more = {"mesh": TALL}, {"rules": RULES}, {"optimizer_rules": ZERO}
    for options in ({"shardings": other["params"]}, *({"shardings": other, **x} for x in more)):
        refused(pzs.RuleTypeError, pzs.restore_train_state, path, state, **options)
    restored = pzs.restore_train_state(path, state, WIDE, RULES, optimizer_rules=ZERO)
    assert restored["params"]["up/w"].data_array.sharding.spec == jax.P("data", "model")
    mu = restored["opt_state"][0].mu["up/w"]
    assert mu.data_array.sharding.spec == jax.P(None, ("data", "model"))


def test_restore_train_state_of_parameters(tmp_path):
    path = pzs.save_params(tmp_path / "params", named_params())
    call = pzs.restore_train_state, path, dictionary(named_params())
    assert refused_kinds(pzs.CheckpointMismatchError, *call) == {"": "kind"}
    path = pzs.save_train_state(tmp_path / "state", dictionary(named_params()))
    other = dictionary(named_params(), optax.sgd(1e-3, momentum=0.9))
    problems = problems_of(pzs.CheckpointMismatchError, pzs.restore_train_state, path, other)
    assert all("restore_params" in x.fix for x in problems if x.kind == "missing")
    (problem,) = problems_of(pzs.CheckpointMismatchError, call[0], path, named_params())
    assert "restore_params" in problem.fix


def test_restore_train_state_of_an_optimizer_in_a_chain(tmp_path):
    outer, inner = (
        dictionary(named_params(), optimizer)
        for optimizer in (optax.adam(1e-3), optax.chain(optax.clip(1.0), optax.adam(1e-3)))
    )
    rule = {"opt_state/**": "opt_state/1/**"}
    for stored, wanted, names in (
        (outer, inner, rule),
        (inner, outer, {new: old for old, new in rule.items()}),
    ):
        path = pzs.save_train_state(tmp_path / "state", stored, overwrite=True)
        call = pzs.restore_train_state, path, wanted
        problems = problems_of(pzs.CheckpointMismatchError, *call)
        assert {problem.fix for problem in problems} == {f"Write names={names}."}
        assert pzs.restore_train_state(path, wanted, names=names)["step"] == 3
