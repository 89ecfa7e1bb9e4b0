"""A trainer: its state is replaced by each step, and what it handed out stays usable."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P
from penzai import pz

import penzai_shard as pzs
from penzai_shard import RuleTypeError, ShardingError
from tests.models import counted_mlp
from tests.training.losses import KEY, LOSSES, X

MESH = pzs.make_mesh({"data": 8})


def loss_fn(model, rng, state, x):
    loss = jnp.mean((x @ model["w"].unwrap("in", "out") - 1) ** 2)
    return loss, state, {"loss": loss}


def build(**options):
    model = {"w": pz.nx.ones({"in": 8, "out": 4})}
    return pzs.StatefulTrainer.build(
        root_rng=KEY, model=model, optimizer_def=optax.adam(0.1), loss_fn=loss_fn, **options
    )


def test_step_on_a_mesh_as_without():
    plain, placed = (
        build(),
        build(mesh=MESH, rules={"in": "data", "batch": "data"}, first_axis="batch"),
    )
    for _ in range(3):
        losses = [float(trainer.step(x=X)["loss"]) for trainer in (plain, placed)]
    np.testing.assert_allclose(*losses, rtol=1e-6)
    assert placed.state.trained_arrays["w"].sharding.spec == P("data")
    assert placed.state.opt_arrays[0].mu["w"].sharding.spec == P("data")
    assert "step=3" in repr(placed)


def test_what_was_handed_out_stays_usable():
    loss, x = LOSSES["counted mlp"]
    model = counted_mlp()
    trainer = pzs.StatefulTrainer.build(KEY, model, optax.adam(0.1), loss)
    for _ in range(2):
        trainer.step(x=x)
    kept, between = trainer.state, trainer.model
    trainer.step(x=x)
    assert int(trainer.state.step) == 3
    assert int(kept.step) == 2
    for held in (kept.model, between, model):
        assert all(np.all(np.isfinite(leaf)) for leaf in jax.tree.leaves(pz.freeze_variables(held)))
    trainer.state = kept
    trainer.step(x=x)
    assert int(trainer.state.step) == 3


def test_step_takes_memory_where_nothing_was_handed_out():
    trainer = build()
    trainer.step(x=X)
    held = trainer._state.trained_arrays["w"]
    trainer.step(x=X)
    assert held.is_deleted()


def test_options_of_steps():
    trainer = build(accumulate_steps=2, batch_axis=0, step_metrics="gradient_norm", jit=False)
    assert trainer.step(x=X).keys() == {"loss", "gradient_norm"}


def test_refusals():
    with pytest.raises(RuleTypeError):
        build(rules={"in": "data"})
    trainer = build()
    with pytest.raises(ShardingError) as caught:
        trainer.step(x="text")
    assert [problem.path for problem in caught.value.problems] == ["x"]
    assert float(trainer.step(x=X)["loss"]) > 0
