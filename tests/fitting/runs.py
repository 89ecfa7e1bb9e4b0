"""A tiny model on eight devices, its batches and step; as a program, runs that are killed.

Usage: runs.py FOLDER STEP... For each step a process trains in the folder, prints its losses, and
kills itself in the callback of that step.
"""

import functools
import itertools
import os
import signal
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
from penzai import pz

import penzai_shard as pzs
from penzai_shard.fitting.fit import fit

RULES = {"batch": "data"}
OPTIMIZER = optax.adam(0.125)


@functools.cache
def mesh():
    # Not at the import: processes are forked before JAX has devices.
    return pzs.make_mesh({"data": 8})


def place(batch):
    return pzs.shard_batch(batch, mesh(), RULES)


def loss_fn(model, rng, state, x):
    """A squared error, and noise of the step's key."""
    weights = model["w"].unwrap("features")
    loss = jnp.mean((x.unwrap("batch", "seq", "features") @ weights - 1) ** 2)
    loss += 0.1 * jnp.mean(jax.random.normal(rng, weights.shape) * weights)
    return loss, state, {"loss": loss, "weights": weights}


STEP = pzs.build_train_step_fn(loss_fn, donate_params_and_state=True)
KEEPING_STEP = pzs.build_train_step_fn(loss_fn)
EVALUATE = pzs.build_eval_step_fn(loss_fn)


def initial(weights=None, placed=True):
    model = {"w": pz.nx.wrap(jnp.zeros(4) if weights is None else weights, "features")}
    model = pzs.place(model, mesh(), {"features": None}) if placed else model
    return pzs.TrainState.initial_state(model, OPTIMIZER, jax.random.key(0))


def make_batch(number):
    values = np.random.default_rng(number).normal(size=(8, 3, 4)).astype(np.float32)
    return {"x": pz.nx.wrap(values, "batch", "seq", "features")}


def draw(count=None, start=0):
    """Batches, endless by default, each of which follows from its number."""
    for number in itertools.count(start) if count is None else range(start, start + count):
        yield make_batch(number)


def train(batches=draw, state=None, step=STEP, steps=9, **options):
    """Trains; the state, and the loss of every step."""
    records = []
    usual = {"progress": False, "log_every": 1, "on_log": records.append}
    usual |= {} if "mesh" in options else {"shard_batch": place}
    state = fit(state or initial(), step, batches, steps=steps, **{**usual, **options})
    return state, [record.loss for record in records]


@functools.cache
def losses_by_hand(steps=9):
    """The losses of a plain loop."""
    state, losses = initial(), []
    for batch in draw(steps):
        state, report = STEP(state, **place(batch))
        losses.append(float(report["loss"]))
    return losses


def train_and_kill(folder, kill_at):
    def on_log(record):
        print(record.step, record.loss.hex(), flush=True)
        if record.step == kill_at:
            os.kill(os.getpid(), signal.SIGKILL)

    train(checkpoint=folder, save_every=2, on_log=on_log)


def main(folder, *steps):
    for step in steps:
        if (child := os.fork()) == 0:
            train_and_kill(folder, int(step))
            os._exit(0)
        print("ended", os.waitpid(child, 0)[1], flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
