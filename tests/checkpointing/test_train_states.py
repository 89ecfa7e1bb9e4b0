import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding, PartitionSpec
from penzai import pz

from penzai_shard.checkpointing import (
    param_dict,
    read_manifest,
    restore_train_state,
    save_params,
    save_train_state,
)
from penzai_shard.errors import (
    CheckpointMismatchError,
    CheckpointNotFoundError,
    PlanError,
    RuleTypeError,
)
from penzai_shard.meshes import auto_twin
from penzai_shard.planning import make_plan
from penzai_shard.training import (
    StatefulTrainer,
    TrainState,
    build_train_step_fn,
    train_state_sharding,
)

P = PartitionSpec
FSDP = {"embedding": "data", "neurons": "model"}
ZERO = {"neurons": ("data", "model")}


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class PlainState:
    """A train state of somebody else's."""

    step: object
    params: object
    opt_state: object
    root_rng: object
    note: str = dataclasses.field(metadata={"static": True}, default="")


def plain_state(params, optimizer, seed=0):
    return PlainState(jnp.int32(7), params, optimizer.init(params), jax.random.key(seed), "note")


def assert_equal_leaves(a, b):
    assert jax.tree.structure(a) == jax.tree.structure(b)
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        assert x.dtype == y.dtype
        if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
            x, y = jax.random.key_data(x), jax.random.key_data(y)
        np.testing.assert_array_equal(np.asarray(x), np.asarray(y))


def assert_lies(state, shardings):
    for array, sharding in zip(jax.tree.leaves(state), jax.tree.leaves(shardings), strict=True):
        assert array.sharding == sharding
        shard = sharding.shard_shape(array.shape)
        assert {s.data.shape for s in array.addressable_shards} == {shard}


def loss_fn(model, rng, state, x):
    out = model(x) * (1 + 0.1 * jax.random.normal(rng))
    return (out * out).untag("batch", "embedding").mean().unwrap(), state + 1, {}


def inputs(mesh):
    x = pz.nx.wrap(jnp.arange(32.0).reshape(4, 8) / 32).tag("batch", "embedding")
    return jax.device_put(x, NamedSharding(auto_twin(mesh), P()))


def train_state(model, optimizer=None):
    optimizer = optimizer or optax.sgd(1e-2, momentum=0.9)
    return TrainState.initial_state(model, optimizer, jax.random.key(3), jnp.float32(0))


OPTIMIZERS = {
    "adamw": optax.adamw(1e-2),
    "adafactor": optax.adafactor(1e-2, min_dim_size_to_factor=8),
    "sm3": optax.sm3(1e-2),
    "masked": optax.masked(
        optax.adam(1e-2), lambda params: {name: "up" in name for name in params}
    ),
    "multi_steps": optax.MultiSteps(optax.lion(1e-2), 2).gradient_transformation(),
    "inject": optax.inject_hyperparams(optax.sgd)(learning_rate=1e-2, momentum=0.9),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_any_optimizer_state_survives_on_another_mesh(tmp_path, mlp, wide, tall, name):
    state = plain_state(param_dict(mlp), OPTIMIZERS[name])
    state = jax.tree.map(lambda x: x + 1 if jnp.issubdtype(x.dtype, jnp.number) else x, state)
    placed = jax.device_put(
        state, make_plan(state, wide, FSDP, on_unnamed="replicate").sharding_tree()
    )
    path = save_train_state(tmp_path / "state", placed)
    restored = restore_train_state(path, jax.eval_shape(lambda: state), tall, FSDP)
    assert_equal_leaves(restored, state)
    assert_lies(restored, make_plan(state, tall, FSDP, on_unnamed="replicate").sharding_tree())
    assert restored.note == "note"


def test_a_step_after_the_round_trip_is_the_step_without_it(tmp_path, mlp, build, wide):
    state = train_state(mlp)
    shardings = train_state_sharding(state, wide, FSDP, ZERO)
    step = build_train_step_fn(loss_fn, train_state_shardings=shardings)
    state, _ = step(jax.device_put(state, shardings), x=inputs(wide))
    path = save_train_state(tmp_path / "state", state)

    fresh = train_state(build(seed=9))
    restored = restore_train_state(path, fresh, wide, FSDP, optimizer_rules=ZERO)
    assert_lies(restored, shardings)
    by_tree = restore_train_state(path, fresh, shardings=shardings)
    assert_lies(by_tree, shardings)
    for again in (restored, by_tree):
        assert_equal_leaves(jax.tree.leaves(again), jax.tree.leaves(state))
    expected, _ = step(state, x=inputs(wide))
    got, _ = step(restored, x=inputs(wide))
    assert_equal_leaves(jax.tree.leaves(got), jax.tree.leaves(expected))
    assert int(got.step) == 2


def test_a_run_goes_on_on_another_mesh(tmp_path, mlp, build, wide, tall):
    step = build_train_step_fn(loss_fn)
    state = train_state(mlp)
    state, _ = step(jax.device_put(state, train_state_sharding(state, wide, FSDP)), x=inputs(wide))
    path = save_train_state(tmp_path / "state", state)
    abstract = jax.eval_shape(lambda: train_state(build(seed=2)))
    restored = restore_train_state(path, abstract, tall, {"neurons": "model"})
    assert_lies(restored, train_state_sharding(abstract, tall, {"neurons": "model"}))
    expected, _ = step(state, x=inputs(wide))
    got, _ = build_train_step_fn(loss_fn)(restored, x=inputs(tall))
    for name, value in expected.params.items():
        np.testing.assert_allclose(
            np.asarray(got.params[name].data_array), np.asarray(value.data_array), atol=1e-5
        )
    assert int(got.step) == 2
    assert int(got.state_vars["calls"]) == 2


def test_explicit_meshes_give_states_on_their_auto_twin(tmp_path, mlp, build):
    explicit = jax.make_mesh((4, 2), ("data", "model"))
    path = save_train_state(tmp_path / "state", train_state(mlp))
    with jax.set_mesh(explicit):
        restored = restore_train_state(path, train_state(build(4)), explicit, FSDP)
    assert_lies(restored, train_state_sharding(train_state(mlp), auto_twin(explicit), FSDP))


def test_arrays_are_named_by_their_path(tmp_path, mlp):
    path = save_train_state(tmp_path / "state", train_state(mlp))
    manifest = read_manifest(path)
    assert manifest.kind == "train_state"
    assert {
        "step",
        "root_rng",
        "loss_fn_state",
        "state_vars/calls",
        "params/mlp/up/Linear.weights",
        "opt_state/0/trace/mlp/up/Linear.weights",
    } <= manifest.records.keys()
    assert manifest.records["opt_state/0/trace/mlp/up/Linear.weights"].axes == (
        "embedding",
        "neurons",
    )


def test_without_a_mesh_arrays_go_where_they_are(tmp_path, wide):
    layout = NamedSharding(wide, P("data"))
    state = {"params": {"w": jax.device_put(pz.nx.arange("a", 8), layout)}}
    path = save_train_state(tmp_path / "state", state)
    restored = restore_train_state(path, state)
    assert restored["params"]["w"].data_array.sharding == layout
    with pytest.raises(RuleTypeError, match=r"params/w: no sharding for \(a=8\)\. Pass mesh"):
        restore_train_state(path, jax.eval_shape(lambda: {"params": {"w": pz.nx.arange("a", 8)}}))
    with pytest.raises(RuleTypeError, match="rules need a mesh"):
        restore_train_state(path, state, rules={})
    with pytest.raises(RuleTypeError, match="either a mesh with rules, or shardings"):
        restore_train_state(path, state, wide, {}, shardings=state)


def test_mutable_variables_come_back_as_new_ones(tmp_path, wide):
    label_made_up = pz.StateVariable(jnp.arange(3))
    shared = pz.Parameter(label="w", value=pz.nx.ones({"a": 8}))
    state = {"vars": (label_made_up,), "model": [shared, shared], "callable": len, "none": None}
    path = save_train_state(tmp_path / "state", state)
    assert set(read_manifest(path).records) == {"vars/0/value", "model/0/value"}
    other = {**state, "vars": (pz.StateVariable(jnp.zeros(3, jnp.int32)),)}
    restored = restore_train_state(path, other, wide, {"a": "data"}, on_unnamed="replicate")
    assert restored["vars"][0].value.tolist() == [0, 1, 2]
    assert isinstance(restored["model"][0], pz.Parameter)
    assert restored["model"][0] is restored["model"][1]
    assert restored["model"][0] is not shared
    assert restored["model"][0].value.data_array.sharding == NamedSharding(wide, P("data"))
    assert restored["callable"] is len
    assert other["vars"][0].value.tolist() == [0, 0, 0]


def test_another_optimizer_or_model_is_told_at_once(tmp_path, mlp, build, wide):
    path = save_train_state(tmp_path / "state", train_state(mlp, optax.sgd(0.1)))
    with pytest.raises(CheckpointMismatchError) as caught:
        restore_train_state(path, train_state(build(neurons=32)), wide, FSDP)
    text = str(caught.value)
    assert text.splitlines()[0] == (
        f"the checkpoint at {path} has the state of another optimizer than the train state. Build "
        "the train state with the optimizer that it was saved with. To go on with another one, "
        "which begins anew, take the parameters alone: restore_params(path, model, mesh, rules)."
    )
    assert (
        "params/mlp/up/Linear.weights: the checkpoint has (embedding=8, neurons=16), and the "
        "train state wants (embedding=8, neurons=32): the sizes differ. Build the train state "
        "with the same sizes." in text
    )
    assert "opt_state/0/trace/mlp/up/AddBias.bias: is in the train state alone." in text
    # Three parameters have other sizes, and all four have momenta now.
    assert len(caught.value.problems) == 3 + 4


def test_moments_are_not_dropped_unless_that_is_asked_for(tmp_path, mlp, wide):
    path = save_train_state(tmp_path / "state", train_state(mlp, optax.adam(0.1)))
    other = train_state(mlp, optax.sgd(0.1))
    with pytest.raises(CheckpointMismatchError, match="another optimizer") as caught:
        restore_train_state(path, other, wide, FSDP)
    assert "on_extra" not in str(caught.value)
    assert {p.partition(": ")[2] for p in caught.value.problems} == {"is in the checkpoint alone."}
    restored = restore_train_state(path, other, wide, FSDP, on_extra="ignore")
    assert jax.tree.structure(restored.opt_state) == jax.tree.structure(other.opt_state)


@pytest.mark.parametrize("act", [save_train_state, restore_train_state])
def test_a_model_a_trainer_and_a_function_are_not_train_states(act, tmp_path, mlp, build):
    trainer = StatefulTrainer.build(
        root_rng=jax.random.key(0), model=build(), optimizer_def=optax.sgd(0.1), loss_fn=loss_fn
    )
    for given, message in (
        (mlp, rf"{act.__name__} takes a TrainState, not a Sequential\. .*_params\(path, model"),
        (trainer, r"takes a TrainState, not a StatefulTrainer\. Give its state: trainer\.state"),
        (build, r"takes a TrainState, not a function\. Make one: TrainState\.initial_state\("),
    ):
        with pytest.raises(RuleTypeError, match=message):
            act(tmp_path / "state", given)
    assert not (tmp_path / "state").exists()


def test_a_swapped_axis_of_a_moment_is_put_right_when_asked(tmp_path, wide):
    weights = pz.nx.wrap(jnp.arange(64.0).reshape(8, 8)).tag("a", "b")
    optimizer = optax.sgd(0.1, momentum=0.9)
    path = save_train_state(tmp_path / "state", plain_state({"w": weights}, optimizer))
    swapped = plain_state({"w": weights.order_as("b", "a")}, optimizer)
    with pytest.raises(
        CheckpointMismatchError,
        match=r"opt_state/0/trace/w: the checkpoint has \(a=8, b=8\), and the train state wants "
        r"\(b=8, a=8\): the same logical axes in another order",
    ):
        restore_train_state(path, swapped, wide, {"a": "data"})
    restored = restore_train_state(path, swapped, wide, {"a": "data"}, on_axis_mismatch="transpose")
    assert_equal_leaves(restored, swapped)
    assert_lies(restored, make_plan(swapped, wide, {"a": "data"}).sharding_tree())


def test_parameters_without_names_are_refused_unless_asked(tmp_path, wide):
    state = plain_state({"w": jnp.ones((2, 2))}, optax.adam(1e-2))
    path = save_train_state(tmp_path / "state", state)
    with pytest.raises(PlanError, match="params/w: this array of shape"):
        restore_train_state(path, state, wide, {})
    restored = restore_train_state(path, state, wide, {}, on_unnamed="replicate")
    assert_equal_leaves(restored, state)


def test_a_missing_path_is_refused(tmp_path, mlp, wide):
    with pytest.raises(CheckpointNotFoundError, match="the path does not exist"):
        restore_train_state(tmp_path / "state", train_state(mlp), wide, FSDP)


def test_parameters_alone_are_not_a_train_state(tmp_path, mlp, wide):
    path = save_params(tmp_path / "params", mlp)
    with pytest.raises(CheckpointMismatchError) as caught:
        restore_train_state(path, train_state(mlp), wide, FSDP)
    assert str(caught.value) == (
        f"the checkpoint at {path} holds parameters alone, as save_params writes them, and not a "
        "train state. Restore them and begin a new state with them: "
        "restore_params(path, model, mesh, rules)."
    )
