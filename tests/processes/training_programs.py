"""What the processes of a job train: the same run in several layouts, over any number of them."""

import functools
import itertools
import os
import signal

import jax
import jax.numpy as jnp
import numpy as np
import optax
from penzai import pz

import penzai_shard as pzs

STEPS = 4
SAVED_AT = 2

LAYOUTS = {
    "data parallel": ({"data": 8}, {}),
    "fully sharded": ({"data": 8}, pzs.fully_sharded(min_size=1)),
    "two dimensions": ({"data": 4, "model": 2}, {"features": "data", "features_out": "model"}),
}


def build_model():
    keys = jax.random.split(jax.random.key(0))
    return {
        "up": pz.nx.wrap(jax.random.normal(keys[0], (8, 16)), "features", "features_out"),
        "down": pz.nx.wrap(jax.random.normal(keys[1], (16, 8)), "features_out", "features"),
    }


def loss_fn(model, rng, state, x, y):
    hidden = jnp.tanh(x.data_array @ model["up"].unwrap("features", "features_out"))
    error = hidden @ model["down"].unwrap("features_out", "features") - y.data_array
    loss = jnp.mean(error**2) * (1 + 0.01 * jax.random.normal(rng, ()))
    return loss, state + 1, {"loss": loss, "error": error}


def own_batch(number):
    """This process's rows of a batch of 16."""
    me, share = jax.process_index(), 16 // jax.process_count()
    random = np.random.default_rng(number)
    whole = {name: random.normal(size=(16, 8)).astype("float32") for name in "xy"}
    return {
        name: pz.nx.NamedArray.wrap(rows[me * share : (me + 1) * share]).tag("batch", "features")
        for name, rows in whole.items()
    }


class Run:
    """A run in one layout, from its first state on."""

    def __init__(self, layout):
        shape, self.rules = LAYOUTS[layout]
        self.mesh = pzs.make_mesh(shape)
        model = pzs.sharded_init(build_model, mesh=self.mesh, rules=self.rules)
        state = pzs.TrainState.initial_state(
            model, optax.adam(1e-2), jax.random.key(1), loss_fn_state=jnp.zeros((), jnp.int32)
        )
        self.shardings = pzs.train_state_sharding(state, self.mesh, self.rules)
        self.state = jax.device_put(state, self.shardings)
        self.step = pzs.build_train_step_fn(
            loss_fn,
            donate_params_and_state=True,
            train_state_shardings=self.shardings,
            aux_output_shardings={"loss": None, "error": None},
        )

    def batch(self, number):
        return pzs.shard_batch(own_batch(number), self.mesh, {"batch": "data"}, local=True)

    def train(self, until):
        """The losses of the steps up to one, exactly."""
        losses = []
        for number in range(int(self.state.step), until):
            self.state, aux = self.step(self.state, **self.batch(number))
            losses.append(float(aux["loss"]).hex())
        return losses

    def leaves(self):
        return jax.tree.leaves(self.state)


def train(folder, layouts, saves):
    """Trains in some layouts; saves on the way, or goes on from what another job has saved."""
    found = {"devices": [jax.device_count(), jax.local_device_count()]}
    for layout in layouts:
        run = Run(layout)
        path = f"{folder}/{layout}"
        losses = run.train(SAVED_AT)
        if saves:
            pzs.save_train_state(path, run.state)
            # Replaced by the same: once, by all together.
            pzs.save_train_state(path, run.state, overwrite=True)
        losses += run.train(STEPS)
        assert all(leaf.sharding.device_set == set(jax.devices()) for leaf in run.leaves())
        restored = pzs.restore_train_state(path, run.state, shardings=run.shardings)
        assert int(restored.step) == SAVED_AT
        run.state = restored
        found[layout] = {"losses": losses, "resumed": run.train(STEPS)}
    return found


def fitted(folder, killed_at=None):
    """The losses by step of ``fit``; at one step the first process kills itself."""
    run = Run("two dimensions")
    losses = {}

    def on_log(record):
        losses[record.step] = record.loss.hex()
        if record.step == killed_at and jax.process_index() == 0:
            os.kill(os.getpid(), signal.SIGKILL)

    pzs.fit(
        run.state,
        run.step,
        map(own_batch, itertools.count()),
        steps=8,
        save_every=2,
        checkpoint=folder,
        shard_batch=functools.partial(
            pzs.shard_batch, mesh=run.mesh, rules={"batch": "data"}, local=True
        ),
        log_every=1,
        on_log=on_log,
        progress=False,
    )
    return losses


def resumed_and_undisturbed(folder, killed):
    """The losses of a run that goes on from what was left by a killed one, and of a whole one."""
    return fitted(killed), fitted(folder)
