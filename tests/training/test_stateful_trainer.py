import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from penzai import pz
from penzai.toolshed import basic_training

from penzai_shard.checkpointing import restore_train_state, save_train_state
from penzai_shard.errors import ShardingError, ShardingWarning
from penzai_shard.training import StatefulTrainer, TrainState, build_train_step_fn

RULES = {"features_out": "model", "batch": "data"}


def build(model, loss_fn, **options):
    return StatefulTrainer.build(
        root_rng=jax.random.key(3),
        model=model,
        optimizer_def=optax.adam(1e-2),
        loss_fn=loss_fn,
        **options,
    )


def arrays(model):
    return [p.value.data_array for p in pz.unbind_params(model, freeze=True)[1]]


def test_it_trains_as_penzai_s_trainer_does(make_model, loss_fn, batch):
    ours = build(make_model(), loss_fn)
    theirs = basic_training.StatefulTrainer.build(
        root_rng=jax.random.key(3),
        model=make_model(),
        optimizer_def=optax.adam(1e-2),
        loss_fn=loss_fn,
    )
    for _ in range(4):
        aux = ours.step(**batch)
        expected = theirs.step(**batch)
        np.testing.assert_allclose(aux["loss"], expected["loss"], rtol=1e-5)
    for mine, penzai in zip(arrays(ours.model), arrays(theirs.model), strict=True):
        np.testing.assert_allclose(mine, penzai, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("donate", [True, False])
def test_nothing_that_was_handed_out_dies(make_model, loss_fn, batch, donate):
    model = make_model()
    before = [np.asarray(array) for array in arrays(model)]
    trainer = build(model, loss_fn, donate_states=donate)
    trainer.step(**batch)
    seen, seen_state = trainer.model, trainer.state
    values = [np.asarray(array) for array in arrays(seen)]
    for _ in range(3):
        trainer.step(**batch)
    for array, value in zip(arrays(model), before, strict=True):
        np.testing.assert_array_equal(array, value)
    for array, value in zip(arrays(seen), values, strict=True):
        np.testing.assert_array_equal(array, value)
    assert int(seen_state.step) == 1
    assert int(trainer.state.step) == 4
    seen(batch["x"])


def test_memory_is_donated_while_nobody_looks(make_model, loss_fn, batch):
    trainer = build(make_model(), loss_fn)
    trainer.step(**batch)
    inside = trainer._state.__dict__["_flat"].changing[1]
    trainer.step(**batch)
    assert inside.is_deleted()
    assert loss_fn.traces == 1


def test_looking_does_not_compile_again(make_model, loss_fn, batch):
    trainer = build(make_model(), loss_fn)
    for _ in range(4):
        trainer.step(**batch)
        trainer.model, trainer.state, repr(trainer)
    assert loss_fn.traces == 1
    assert repr(trainer) == "StatefulTrainer(step=4, 4 trainable, 0 frozen, 0 state variables)"


@pytest.mark.parametrize("explicit", [True, False])
def test_on_a_mesh_everything_lies_as_the_rules_say(
    explicit, make_model, loss_fn, batch, mesh, explicit_mesh
):
    reference = build(make_model(), loss_fn)
    trainer = build(make_model(), loss_fn, mesh=explicit_mesh if explicit else mesh, rules=RULES)
    for _ in range(3):
        aux = trainer.step(**batch)
        np.testing.assert_allclose(aux["loss"], reference.step(**batch)["loss"], rtol=1e-4)
    jax.tree.map(
        lambda array, sharding: array.sharding == sharding or pytest.fail(str(sharding)),
        trainer.state,
        trainer.shardings,
    )
    weights = trainer.state.params["mlp/Affine_0/Linear.weights"].data_array
    assert weights.addressable_shards[0].data.shape == (8, 8)
    moment = trainer.state.opt_state[0].mu["mlp/Affine_0/Linear.weights"].data_array
    assert moment.sharding == weights.sharding


def test_a_restored_state_is_put_in(make_model, loss_fn, batch, mesh, tmp_path):
    trainer = build(make_model(), loss_fn, mesh=mesh, axis_name_to_mesh_name=RULES)
    trainer.step(**batch)
    save_train_state(tmp_path / "run", trainer.state)
    expected = [float(trainer.step(**batch)["loss"]) for _ in range(2)]
    again = build(make_model(), loss_fn, mesh=mesh, rules=RULES)
    again.state = restore_train_state(tmp_path / "run", again.state)
    assert [float(again.step(**batch)["loss"]) for _ in range(2)] == expected
    with pytest.raises(ShardingError, match="takes a TrainState, not a dict"):
        again.state = {}


def test_a_step_that_fails_leaves_the_state(make_model, loss_fn, batch):
    trainer = build(make_model(), loss_fn)
    trainer.step(**batch)
    with pytest.raises(ShardingError, match="x: is the str"):
        trainer.step(x="abc", y=batch["y"])
    trainer.step(**batch)
    assert int(trainer.state.step) == 2


def test_options_reach_state_and_step(linear, batch, mesh):
    def loss_fn(model, rng, state, x, y):
        loss, _, _ = linear.loss_fn(model, rng, state, x, y)
        count = x.named_shape["batch"]
        return loss, state + 1, {"count": jnp.int32(count)}

    trainer = StatefulTrainer.build(
        jax.random.key(0),
        linear.weights | {"fixed": pz.nx.ones({"in": 8})},
        optax.sgd(0.1),
        loss_fn,
        0,
        trainable=lambda parameter: parameter.label == "w",
        mesh=mesh,
        rules={"in": "data", "batch": "model"},
        optimizer_rules={},
        accumulate_steps=4,
        aux_reduction={"count": "sum"},
    )
    assert int(trainer.step(**batch)["count"]) == 16
    assert int(trainer.state.loss_fn_state) == 4
    assert trainer.state.variables.trainable_names == {"w"}
    assert trainer.optimizer_def is trainer.state.optimizer_def
    assert trainer.root_rng.shape == ()


def test_a_state_of_one_s_own(linear, batch):
    state = TrainState.initial_state(linear.weights, optax.sgd(0.1), jax.random.key(0))
    trainer = StatefulTrainer(state, linear.loss_fn)
    trainer.step(**batch)
    expected, _ = build_train_step_fn(linear.loss_fn)(state, **batch)
    np.testing.assert_allclose(
        trainer.model["w"].data_array, expected.params["w"].data_array, rtol=1e-6
    )


def test_a_misspelt_rule_for_the_batch_is_announced_once(linear, batch, mesh):
    trainer = StatefulTrainer.build(
        jax.random.key(0),
        linear.weights,
        optax.sgd(0.1),
        linear.loss_fn,
        mesh=mesh,
        rules={"in": "data", "bacth": "model"},
    )
    with pytest.warns(ShardingWarning, match="Did you mean 'batch'") as caught:
        trainer.step(**batch)
    trainer.step(**batch)
    assert len(caught) == 1
