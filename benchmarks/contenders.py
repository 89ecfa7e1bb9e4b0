"""Ways of writing one train step, and their times, taken in turns."""

import dataclasses
import gc
import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any

import jax


@dataclasses.dataclass
class Contender:
    """One way of writing the train step, compiled and ready to run.

    Attributes:
        parameters: The number of trained numbers.
        compiled: The compiled step.
        start: Makes the state to start from.
        step: Takes a state, which it may use up; returns the next one and the loss.
    """

    parameters: int
    compiled: jax.stages.Compiled
    start: Callable[[], Any]
    step: Callable[[Any], tuple[Any, Any]]


def losses(contender: Contender, steps: int = 3) -> list[float]:
    """The losses of the first steps."""
    state, found = contender.start(), []
    for _ in range(steps):
        state, loss = contender.step(state)
        found.append(float(loss))
    return found


def median_times(contenders: Mapping[str, Contender], rounds: int) -> dict[str, float]:
    """Median seconds of a step, measured in turns."""
    states = {name: contender.start() for name, contender in contenders.items()}

    def one_step(name: str) -> Any:
        states[name], loss = contenders[name].step(states[name])
        return loss, jax.tree.leaves(states[name])

    return in_turns({name: lambda name=name: one_step(name) for name in contenders}, rounds)


def in_turns(calls: Mapping[str, Callable[[], Any]], rounds: int) -> dict[str, float]:
    """Median seconds of calls that are made in turns, waiting for the arrays that they return.

    Two rounds before those that count warm up.
    """
    times: dict[str, list[float]] = {name: [] for name in calls}
    for turn in range(rounds + 2):
        for name, call in calls.items():
            gc.collect()
            start = time.perf_counter()
            jax.block_until_ready(call())
            if turn >= 2:
                times[name].append(time.perf_counter() - start)
    return {name: statistics.median(seconds) for name, seconds in times.items()}
