"""How long a training loop is held by a save: in the background, synchronous, and by Orbax.

One process, interleaved rounds, medians of ratios taken round by round. Each way saves the state of
a donated step to a new directory, with the one before complete; then a step is done. *Held* is the
time from the call of the save until it returns, *step* that of the step after it, which may have to
share the machine with the writing, and *complete* the time until the checkpoint is on the disk.
Orbax' own manager, ``training.Checkpointer.save_async``, writes the same arrays without names,
checksums of their numbers, or a synchronised disk.

    python benchmarks/async_saving.py [--mebibytes 64,512] [--rounds 5]
"""

import argparse
import gc
import os
import shutil
import statistics
import tempfile
import time

import jax
import jax.numpy as jnp
import optax
import orbax.checkpoint.experimental.v1 as ocp
import simulated_devices  # noqa: F401
from contenders import median_ratios
from penzai import pz

from penzai_shard import (
    CheckpointManager,
    TrainState,
    build_train_step_fn,
    make_mesh,
    place,
    save_train_state,
)

ARRAYS = 8


def loss_fn(model, rng, state, x):
    loss = sum(jnp.mean((array.unwrap("a", "b") - x) ** 2) for array in model.values())
    return loss, state, {}


def made(mebibytes):
    """A state of so many MiB, a third of it parameters, split over eight devices."""
    mesh = make_mesh({"data": 8})
    columns = mebibytes * 2**20 // (3 * 4 * ARRAYS * 1024)
    weights = {f"w{n}": pz.nx.zeros({"a": 1024, "b": columns}) for n in range(ARRAYS)}
    weights = place(weights, mesh, {"a": "data"})
    return TrainState.initial_state(weights, optax.adam(1e-3), jax.random.key(0))


class Ways:
    """The ways to save, each with its folder. A way returns a function that waits for the disk."""

    def __init__(self, folder):
        self.folder = folder
        self.manager = CheckpointManager(f"{folder}/manager", keep_last=1)
        keep = ocp.training.preservation_policies.LatestN(1)
        always = ocp.training.save_decision_policies.FixedIntervalPolicy(1)
        self.orbax_manager = ocp.training.Checkpointer(
            f"{folder}/orbax", preservation_policy=keep, save_decision_policy=always
        )

    def synchronous(self, state, number):
        """By ``save_train_state``."""
        shutil.rmtree(f"{self.folder}/synchronous", ignore_errors=True)
        start = time.perf_counter()
        save_train_state(f"{self.folder}/synchronous/{number}", state)
        return time.perf_counter() - start, lambda: None

    def asynchronous(self, state, number):
        """By ``CheckpointManager.save``."""
        start = time.perf_counter()
        self.manager.save(number, state)
        return time.perf_counter() - start, self.manager.wait

    def orbax(self, state, number):
        """By Orbax' manager, but for the random key, which it does not store."""
        arrays = {"params": state.params, "opt_state": state.opt_state, "step": state.step}
        flat = dict(enumerate(jax.tree.leaves(arrays)))
        named = {str(key): array for key, array in flat.items()}
        start = time.perf_counter()
        response = self.orbax_manager.save_async(number, named)
        return time.perf_counter() - start, response.result


def measured(mebibytes, rounds):
    """By figure and way, the seconds in each round."""
    step = build_train_step_fn(loss_fn, donate_params_and_state=True)
    state = made(mebibytes)
    names = ("synchronous", "asynchronous", "orbax")
    found = {figure: {name: [] for name in names} for figure in ("held", "step", "complete")}
    with tempfile.TemporaryDirectory() as folder:
        ways = Ways(folder)
        for turn in range(rounds + 1):
            for name in names[:: 1 if turn % 2 else -1]:
                state, _ = step(state, x=jnp.ones(()))
                jax.block_until_ready(jax.tree.leaves(state.params))
                gc.collect()
                os.sync()
                start = time.perf_counter()
                held, wait = getattr(ways, name)(state, turn)
                begun = time.perf_counter()
                state, _ = step(state, x=jnp.ones(()))
                jax.block_until_ready(jax.tree.leaves(state.params))
                stepped = time.perf_counter() - begun
                wait()
                if turn:
                    found["held"][name].append(held)
                    found["step"][name].append(stepped)
                    found["complete"][name].append(time.perf_counter() - start)
        ways.manager.close()
        ways.orbax_manager.close()
    return found


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--mebibytes", default="64,512")
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    for mebibytes in map(int, options.mebibytes.split(",")):
        found = measured(mebibytes, options.rounds)
        for figure, times in found.items():
            to = {base: median_ratios(times, base) for base in ("synchronous", "orbax")}
            for name, seconds in times.items():
                ratios = ", ".join(f"{to[base][name]:.2f}x {base}" for base in to)
                median = statistics.median(seconds) * 1e3
                print(f"{mebibytes:5d} MiB  {figure:9} {name:13} {median:9.1f} ms  {ratios}")


if __name__ == "__main__":
    main()
