"""Flax NNX: modules, states and optimizers are saved, and restored onto another mesh."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P
from penzai import pz

from penzai_shard import (
    TrainState,
    abstract_model,
    make_mesh,
    param_dict,
    place,
    restore_params,
    restore_train_state,
    save_params,
    save_train_state,
    sharded_init,
    train_state_sharding,
    with_params,
)
from penzai_shard.errors import CheckpointMismatchError, ShardingWarning

RULES = {"embed": "data", "mlp": "model"}
KERNEL = "block/up/kernel"
LEFT_OUT = (
    r"^save_params stores parameters alone, and this model has statistics beside them "
    r"\(block/scale\), which are left out\. Save all of it with save_train_state\(path, model\), "
    r"and read it with restore_train_state\.$"
)


class Block(nnx.Module):
    def __init__(self, rngs, names=("embed", "mlp")):
        metadata = {"out_sharding": names}
        self.up = nnx.Linear(8, 4, rngs=rngs, use_bias=False, kernel_metadata=metadata)
        self.scale = nnx.BatchStat(jnp.ones(4), out_sharding=("mlp",))
        self.dropout = nnx.Dropout(0.5, rngs=rngs)


class Model(nnx.Module):
    def __init__(self, rngs, names=("embed", "mlp")):
        self.block = Block(rngs, names)
        self.same = self.block
        self.tied = self.block.up.kernel


def is_shared_as_written(model):
    return model.same is model.block and model.tied is model.block.up.kernel


def model_and_optimizer(rngs):
    model = Model(rngs)
    return {"model": model, "optimizer": nnx.Optimizer(model, optax.adam(1e-3), wrt=nnx.Param)}


@pytest.fixture(scope="module")
def mesh():
    return make_mesh({"data": 4, "model": 2})


@pytest.fixture(scope="module")
def other_mesh():
    return make_mesh({"data": 2, "model": 4})


@pytest.fixture(scope="module")
def model(mesh):
    return sharded_init(Model, nnx.Rngs(0), mesh=mesh, rules=RULES)


@pytest.fixture(scope="module")
def saved(model, tmp_path_factory):
    with pytest.warns(ShardingWarning, match=LEFT_OUT):
        return save_params(tmp_path_factory.mktemp("nnx") / "params", model)


def test_random_streams_and_counters_are_no_statistics(tmp_path):
    module = nnx.Dict(dropout=nnx.Dropout(0.5, rngs=nnx.Rngs(0)), steps=nnx.BatchStat(jnp.array(3)))
    module.w = nnx.Param(jnp.ones(2))
    save_params(tmp_path / "params", module)


def test_parameters_by_name_are_those_alone(model):
    assert list(param_dict(model)) == [KERNEL]
    assert param_dict(model)[KERNEL].named_shape == {"embed": 8, "mlp": 4}
    assert param_dict({"m": model})["m/" + KERNEL].named_shape == {"embed": 8, "mlp": 4}
    assert list(param_dict(nnx.state(model))) == [KERNEL]


def test_other_values_are_put_into_a_new_module(model):
    zeros = {KERNEL: pz.nx.zeros({"embed": 8, "mlp": 4})}
    other = with_params(model, zeros)
    assert is_shared_as_written(other)
    assert not other.tied[...].any()
    assert model.tied[...].any()
    assert other.tied.get_metadata() == model.tied.get_metadata()
    # What the new module changes is its own.
    other.block.scale[...] = jnp.zeros(4)
    assert model.block.scale[...].all()
    state = with_params(nnx.state(model), zeros)
    assert type(state) is nnx.State
    assert not state["block"]["up"]["kernel"][...].any()


@pytest.mark.parametrize("as_state", [False, True], ids=["module", "state"])
def test_parameters_are_restored_onto_another_mesh(model, saved, other_mesh, as_state):
    target = abstract_model(Model, nnx.Rngs(1))
    graph, state = nnx.split(target)
    restored = restore_params(saved, state if as_state else target, other_mesh, RULES)
    if as_state:
        assert type(restored) is nnx.State
        restored = nnx.merge(graph, restored)
    assert type(restored) is Model
    assert is_shared_as_written(restored)
    assert restored.tied.get_metadata() == model.tied.get_metadata()
    kernel = restored.tied.get_raw_value()
    np.testing.assert_array_equal(kernel, model.tied.get_raw_value())
    assert {shard.data.shape for shard in kernel.addressable_shards} == {(4, 1)}
    assert restored.block.scale.get_raw_value().sharding.spec == P("model")


def test_renamed_axes_are_refused(saved, other_mesh):
    target = abstract_model(Model, nnx.Rngs(1), ("embed", "neurons"))
    rules = {"embed": "data", "neurons": "model"}
    with pytest.raises(CheckpointMismatchError, match=f"{KERNEL}: the checkpoint has .*mlp=4"):
        restore_params(saved, target, other_mesh, {**rules, "mlp": "model"})
    renamed = restore_params(
        saved, target, other_mesh, {**rules, "mlp": "model"}, rename_axes={"mlp": "neurons"}
    )
    assert renamed.tied.get_metadata()["out_sharding"] == ("embed", "neurons")


def test_states_without_values_are_refused(saved, other_mesh):
    with nnx.use_eager_sharding(False):
        target = nnx.eval_shape(lambda: Model(nnx.Rngs(1)))
    with pytest.raises(CheckpointMismatchError, match=r"block/scale: .*has a shape and no value"):
        restore_params(saved, target, other_mesh, RULES)


def test_a_model_with_its_optimizer_of_flax(mesh, other_mesh, tmp_path):
    both = sharded_init(model_and_optimizer, nnx.Rngs(0), mesh=mesh, rules=RULES)
    path = save_train_state(tmp_path / "both", both)
    target = abstract_model(model_and_optimizer, nnx.Rngs(1))
    restored = restore_train_state(path, target, other_mesh, RULES)
    assert is_shared_as_written(restored["model"])
    moment = restored["optimizer"].opt_state[0].mu["block"]["up"]["kernel"]
    assert isinstance(moment, nnx.training.optimizer.OptVariable)
    for array in (moment, restored["model"].tied):
        assert {s.data.shape for s in array.get_raw_value().addressable_shards} == {(4, 1)}
    keys = (m.block.dropout.rngs.key[...] for m in (restored["model"], both["model"]))
    assert len({jax.random.key_data(key).tobytes() for key in keys}) == 1


def test_train_states_are_restored_with_the_module_in_them(model, mesh, other_mesh, tmp_path):
    state = TrainState.initial_state(model, optax.adam(1e-3), jax.random.key(0))
    path = save_train_state(tmp_path / "state", state)
    target = jax.eval_shape(lambda: state)
    restored = restore_train_state(path, target, other_mesh, RULES).model
    assert is_shared_as_written(restored)
    np.testing.assert_array_equal(restored.tied.get_raw_value(), model.tied.get_raw_value())
    moved = place(state, other_mesh, RULES).model
    assert is_shared_as_written(moved)
    assert moved.tied.get_raw_value().sharding == restored.tied.get_raw_value().sharding
    shardings = train_state_sharding(state, mesh, RULES)
    assert is_shared_as_written(jax.device_put(state, shardings).model)
    # Its parameters alone, into a module.
    alone = restore_params(path, abstract_model(Model, nnx.Rngs(1)), other_mesh, RULES)
    np.testing.assert_array_equal(alone.tied.get_raw_value(), model.tied.get_raw_value())
