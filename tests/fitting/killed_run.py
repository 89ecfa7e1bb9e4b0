"""Run as a program: trains in a folder, prints each loss, and sends itself a signal at a step.

Usage: killed_run.py FOLDER STEP SIGNAL
"""

import os
import signal
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
from penzai import pz

from penzai_shard import TrainState, build_train_step_fn, fit, make_mesh, place


def loss_fn(model, rng, state, x):
    weights = model["w"].unwrap("features")
    loss = jnp.mean((x.unwrap("batch", "features") @ weights - 1.0) ** 2)
    loss += 0.1 * jnp.mean(jax.random.normal(rng, weights.shape) * weights)
    return loss, state, {"loss": loss}


def batches():
    random = np.random.default_rng(0)
    while True:
        yield {"x": pz.nx.wrap(random.normal(size=(8, 4)).astype("float32"), "batch", "features")}


def train(folder, kill_at=None, number=None):
    mesh = make_mesh({"data": 8})

    def on_log(record):
        print(record.loss.hex(), flush=True)
        if record.step == kill_at:
            os.kill(os.getpid(), number)

    model = place({"w": pz.nx.wrap(jnp.zeros(4), "features")}, mesh, {})
    fit(
        TrainState.initial_state(model, optax.adam(0.1), jax.random.key(0)),
        build_train_step_fn(loss_fn, donate_params_and_state=True),
        batches,
        steps=10,
        mesh=mesh,
        rules={"batch": "data"},
        checkpoint=folder,
        save_every=3,
        log_every=1,
        on_log=on_log,
        progress=False,
    )


if __name__ == "__main__":
    train(sys.argv[1], int(sys.argv[2]), getattr(signal, sys.argv[3]))
