"""Ways of writing one train step, and their times, taken in turns."""

import dataclasses
import gc
import statistics
import sys
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
    times = times_in_turns(contenders, rounds).elapsed
    return {name: statistics.median(seconds) for name, seconds in times.items()}


def median_ratios(times: Mapping[str, list[float]], base: str) -> dict[str, float]:
    """Median ratios of times in turns to those of one of them.

    They are taken round by round, so that other load on the machine hits all ways alike.

    >>> median_ratios({"a": [1.0, 2.0], "b": [2.0, 4.0]}, "a")
    {'a': 1.0, 'b': 2.0}
    """
    return {
        name: statistics.median(a / b for a, b in zip(seconds, times[base], strict=True))
        for name, seconds in times.items()
    }


@dataclasses.dataclass(frozen=True)
class TimesInTurns:
    """Seconds of a step in every round, by contender.

    Attributes:
        elapsed: By the clock.
        processor: Of the process on all cores, which other load on the machine touches little.
    """

    elapsed: dict[str, list[float]]
    processor: dict[str, list[float]]


def times_in_turns(contenders: Mapping[str, Contender], rounds: int) -> TimesInTurns:
    """Measures steps in turns, whose order is reversed in every other round.

    Two rounds before those that count warm up.
    """
    states = {name: contender.start() for name, contender in contenders.items()}

    times = TimesInTurns({name: [] for name in contenders}, {name: [] for name in contenders})
    for turn in range(rounds + 2):
        for name in list(contenders)[:: 1 if turn % 2 else -1]:
            gc.collect()
            processor, start = time.process_time(), time.perf_counter()
            states[name], loss = contenders[name].step(states[name])
            jax.block_until_ready((loss, jax.tree.leaves(states[name])))
            if turn >= 2:
                times.elapsed[name].append(time.perf_counter() - start)
                times.processor[name].append(time.process_time() - processor)
    return times


def chosen(text: str, known: Any, what: str) -> list[str]:
    """Names that were given, separated by commas."""
    names = [name.strip() for name in text.split(",")]
    unknown = [name for name in names if name not in known]
    if unknown:
        sys.exit(f"no such {what}: {', '.join(unknown)}. There are {', '.join(known)}.")
    return names
