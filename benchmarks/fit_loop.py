"""What ``fit`` adds to the steps of a training loop, and what placing batches ahead saves.

One process, interleaved rounds, medians of ratios taken round by round. The hand-written loop
calls the same donated step with batches that were placed beforehand, and waits for the devices once
per round; ``fit`` draws its batches from an iterator of NumPy arrays, places them by name, reads
every loss, and makes a record every tenth step. Slow batches sleep for about as long as a step
takes: drawn between the steps they double the time, drawn ahead they should cost nothing.

    python benchmarks/fit_loop.py [--quick]
"""

import argparse
import functools
import gc
import itertools
import os
import statistics
import time

os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")

import jax
import jax.numpy as jnp
import numpy as np
import optax
from penzai import pz

from penzai_shard import TrainState, build_train_step_fn, fit, make_mesh, place, shard_batch

RULES = {"batch": "data"}
LAYERS = 4


def loss_fn(model, rng, state, x):
    values = x.unwrap("batch", "features")
    for i in range(LAYERS):
        values = jnp.tanh(values @ model[f"w{i}"].unwrap("in", "features"))
    loss = jnp.mean((values - 1.0) ** 2)
    return loss, state, {"loss": loss}


class Case:
    """One size of the model, with its step, its batches, and a state for each way."""

    def __init__(self, width, batch_size):
        mesh = make_mesh({"data": len(jax.devices())})
        self.place = functools.partial(shard_batch, mesh=mesh, rules=RULES)
        self.step = build_train_step_fn(loss_fn, donate_params_and_state=True)
        random = np.random.default_rng(0)
        weights = {
            f"w{i}": pz.nx.wrap(
                random.normal(size=(width, width)).astype("float32") / width**0.5, "in", "features"
            )
            for i in range(LAYERS)
        }
        self.batches = [
            {
                "x": pz.nx.wrap(
                    random.normal(size=(batch_size, width)).astype("float32"), "batch", "features"
                )
            }
            for _ in range(8)
        ]
        self.placed = [self.place(batch) for batch in self.batches]
        state = TrainState.initial_state(
            place(weights, mesh, {}), optax.adam(1e-3), jax.random.key(0)
        )
        # A step takes the memory of its state, so each way has one of its own.
        self.states = {
            name: jax.tree.map(jnp.copy, state) for name in ("by hand", "fit", "inline", "ahead")
        }

    def by_hand(self, steps):
        """The loop that one writes who has placed all batches."""
        state = self.states["by hand"]
        for batch in itertools.islice(itertools.cycle(self.placed), steps):
            state, aux = self.step(state, **batch)
        jax.block_until_ready((state.step, aux))
        self.states["by hand"] = state

    def fit(self, steps, name="fit", batches=None, prefetch=2):
        """As many steps of ``fit``, which places batches."""
        state = self.states[name]
        state = fit(
            state,
            self.step,
            itertools.cycle(self.batches) if batches is None else batches,
            steps=int(state.step) + steps,
            shard_batch=self.place,
            prefetch=prefetch,
            progress=False,
        )
        jax.block_until_ready(state.step)
        self.states[name] = state

    def slow(self, seconds):
        """Batches that take some seconds each."""
        for batch in itertools.cycle(self.batches):
            time.sleep(seconds)
            yield batch


def timed(run):
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def measure(width, batch_size, rounds, steps):
    case = Case(width, batch_size)
    for run in (case.by_hand, case.fit):
        run(3)
    gc.collect()
    times = {"by hand": [], "fit": []}
    for _ in range(rounds):
        times["by hand"].append(timed(lambda: case.by_hand(steps)) / steps)
        times["fit"].append(timed(lambda: case.fit(steps)) / steps)
    ratio = statistics.median(
        ours / theirs for ours, theirs in zip(times["fit"], times["by hand"], strict=True)
    )
    seconds = statistics.median(times["by hand"])
    slow = {"inline": [], "ahead": []}
    for _ in range(max(3, rounds // 4)):
        for name, prefetch in (("inline", 0), ("ahead", 2)):
            run = functools.partial(case.fit, steps, name, case.slow(seconds), prefetch)
            slow[name].append(timed(run) / steps)
    return {
        "width": width,
        "seconds": seconds,
        "added": statistics.median(times["fit"]) - seconds,
        "ratio": ratio,
        "slow": {name: statistics.median(values) / seconds for name, values in slow.items()},
    }


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="few rounds")
    arguments = parser.parse_args(argv)
    rounds, steps = (8, 20) if arguments.quick else (30, 50)
    results = []
    for width, batch_size in ((8, 8), (256, 512), (512, 1024)):
        result = measure(width, batch_size, rounds, steps)
        results.append(result)
        slow = result["slow"]
        print(
            f"step of {result['seconds'] * 1e3:.2f} ms by hand (width {width}): fit "
            f"{result['ratio']:.3f}x, {result['added'] * 1e6:+.0f} us per step; batches as slow as "
            f"a step: drawn between the steps {slow['inline']:.2f}x, ahead {slow['ahead']:.2f}x"
        )
    return results


if __name__ == "__main__":
    main()
