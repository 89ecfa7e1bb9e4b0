"""A trainer: its state is replaced by each step, and what it handed out stays usable."""

import jax
import numpy as np
import optax
from jax.sharding import PartitionSpec as P
from penzai import pz

import penzai_shard as pzs
from tests.models import counted_mlp
from tests.training.losses import KEY, LOSSES, X, mean_square, weights

RULES = {"in": "data", "batch": "data"}
MESH = pzs.make_mesh({"data": 8})


def loss_fn(model, rng, state, x):
    loss = mean_square(x @ model["w"].unwrap("in", "out"))
    return loss, state, {"loss": loss}


def build(**options):
    return pzs.StatefulTrainer.build(KEY, weights(), optax.adam(0.1), loss_fn, **options)


def test_step_on_a_mesh_as_without():
    placed = build(mesh=MESH, axis_name_to_mesh_name=RULES, first_axis="batch")
    plain = build(accumulate_steps=2, batch_axis=0, step_metrics="gradient_norm", jit=False)
    for _ in range(2):
        losses = [float(trainer.step(x=X)["loss"]) for trainer in (plain, placed)]
    np.testing.assert_allclose(*losses, rtol=1e-6)
    assert plain.step(x=X).keys() == {"loss", "gradient_norm"}
    state = placed.state
    assert int(state.step) == 2
    assert state.trained_arrays["w"].sharding.spec == P("data")
    assert state.opt_arrays[0].mu["w"].sharding.spec == P("data")


def test_what_goes_in_and_out_stays_usable():
    loss, x = LOSSES["counted mlp"]
    model = counted_mlp()
    trainer = pzs.StatefulTrainer.build(KEY, model, optax.adam(0.1), loss)
    trainer.step(x=x)
    kept, between = trainer.state, trainer.model
    held = trainer._state.state_arrays["count"]
    trainer.step(x=x)
    assert held.is_deleted()
    trainer.state = kept
    trainer.step(x=x)
    assert int(trainer.state.step) == 2
    assert repr(trainer).startswith("StatefulTrainer(TrainState(step=2, ")
    for each in (kept.model, between, model):
        arrays = jax.tree.leaves(pz.freeze_variables(each))
        assert all(np.all(np.isfinite(array)) for array in arrays)
