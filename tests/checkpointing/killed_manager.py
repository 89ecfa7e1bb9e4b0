"""Run as a program: kills processes at random moments of saves to one run, and checks what is left.

Usage: killed_manager.py DIRECTORY COUNT [SEED]

Each process restores every checkpoint that the ones before left, saves further ones until it is
killed, and says before and after each save what it does. Prints one line of JSON: how many were
killed, at how many different newest steps, during how many saves, and what was wrong.
"""

import itertools
import json
import os
import pathlib
import random
import signal
import sys
import time
import traceback

import numpy as np

from penzai_shard.checkpointing import CheckpointManager
from penzai_shard.library_apis import orbax_api

# Every so many steps the one that was just saved is replaced.
REPLACED = 3
OPTIONS = {"keep_last": 2, "keep_every": 10, "best": ("loss", "min")}


def state_of(value):
    numbers = {f"w{number}": np.full(20_000, value, np.float32) for number in range(3)}
    return {"step": np.int32(value), **numbers}


def loss_of(step):
    return float(step % 7)


def expected(step, newest):
    """The values that a checkpoint may have: the newest may have been killed while replaced."""
    values = {float(step)}
    if step % REPLACED == 0:
        values = {step + 0.5} | (values if step == newest else set())
    return values


def check(manager, done, begun):
    """What is wrong with what is left, given the last save that was complete, and begun."""
    import jax

    problems = []
    steps = manager.steps()
    newest = manager.latest
    if not done <= (newest or 0) <= begun:
        problems.append(f"the newest is {newest}, step {done} was complete, {begun} begun")
    everywhere = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    wanted = jax.tree.map(lambda leaf: everywhere, state_of(0))
    for step in steps:
        restored = manager.restore(state_of(0), step, shardings=wanted)
        found = {float(x) for name in ("w0", "w1", "w2") for x in np.unique(restored[name])}
        if len(found) != 1 or not found <= expected(step, newest):
            problems.append(f"step {step} has the values {sorted(found)}")
        if manager.metrics(step) != {"loss": loss_of(step)}:
            problems.append(f"step {step} has the metrics {manager.metrics(step)}")
    if steps and not set(range(10, steps[-1], 10)) <= set(steps):
        problems.append(f"a tenth step is missing in {steps}")
    return problems


def save_until_killed(folder, say, done, begun, last):
    """Checks, then saves; with ``last`` only once, and looks for what should not be left."""
    manager = CheckpointManager(folder, **OPTIONS)
    for problem in check(manager, done, begun):
        say("problem", problem)
    newest = manager.latest or 0
    # The newest may have been about to be replaced.
    for step in itertools.count(newest if newest % REPLACED == 0 and newest else newest + 1):
        for value in (step, step + 0.5) if step % REPLACED == 0 else (step,):
            say("begun", step)
            is_again = step == newest or value != step
            manager.save(step, state_of(value), {"loss": loss_of(step)}, overwrite=is_again)
        if last or step % 4 == 0:
            manager.wait()
            say("done", step)
        if last:
            break
    names = sorted(os.listdir(folder))
    if names != [f"step_{step:08d}" for step in manager.steps()]:
        say("problem", f"at the end there is {names}")


def in_a_process(folder, done, begun, killed=None):
    """What a process said; it is killed after so many lines and then so many seconds."""
    reading, writing = os.pipe()
    process = os.fork()
    if not process:
        with os.fdopen(writing, "w") as out:

            def say(*words):
                print(*words, file=out, flush=True)

            try:
                save_until_killed(folder, say, done, begun, killed is None)
            except BaseException:
                say("problem", traceback.format_exc().replace("\n", " | "))
        os._exit(0)
    os.close(writing)
    lines = []
    with os.fdopen(reading) as said:
        if killed is not None:
            lines += itertools.islice(said, killed[0])
            time.sleep(killed[1])
            os.kill(process, signal.SIGKILL)
        lines += said.readlines()
    os.waitpid(process, 0)
    return [line.rstrip("\n").partition(" ") for line in lines]


def main(directory, count, seed=0):
    # Imported once, but no device is used here, so that processes can be forked.
    orbax_api.orbax()
    moments = random.Random(seed)
    folder = pathlib.Path(directory) / "run"
    done = begun = 0
    problems, newest = [], []
    for number in range(count + 1):
        killed = (moments.randint(1, 12), moments.uniform(0, 1)) if number < count else None
        for kind, _, text in in_a_process(folder, done, begun, killed):
            if kind == "begun":
                begun = int(text)
            elif kind == "done":
                done = int(text)
            else:
                problems.append(f"{number}: {text}")
        newest.append(CheckpointManager(folder).latest)
    left = [name for name in os.listdir(folder) if not name.startswith("step_")]
    found = {"killed": count, "newest": len(set(newest)), "saves": begun, "problems": problems}
    print(json.dumps({**found, "left": left}))


if __name__ == "__main__":
    main(sys.argv[1], *map(int, sys.argv[2:]))
