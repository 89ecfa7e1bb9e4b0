"""The models of Flax' guide, by the guide's own code and by penzai_shard.

Four layers of two matrix products, 1024 wide, a batch of 8, adam, on eight devices as 2x4
(simulated on a CPU unless there are as many others): annotated with mesh axes, and with logical
axes, unrolled and scanned. ``flax`` is the program of the guide "Scale up Flax Modules on multiple
devices", with Flax' helpers; ``flax-donating`` the same with the old state's memory used for the
new one; ``penzai-shard`` takes the same module as it is.

First it is made sure that all do the same: equal numbers of parameters, initial values, planned
and actual specs, boxes, and losses of three steps, and of a fourth, before which penzai_shard's
state was saved and restored. Then figures of the compiled steps, which no noise touches, and
times of steps taken in turns in one process, and of making the state. Figures are ratios to
``flax``, of times their median over rounds of five steps; lower is better. ``cpu`` is the time that
the process had on all cores, which other load on the machine touches little.

    python -m benchmarks.flax_guide [--rounds 20] [--depth 1024] [--show]
"""

import argparse
import inspect
import pathlib
import sys
import tempfile
import time
from statistics import median
from typing import Any

import jax
import numpy as np

from benchmarks.contenders import Contender, median_ratios, times_in_turns
from benchmarks.flax_guide import by_flax, by_penzai_shard
from benchmarks.flax_guide.agreement import (
    lines_of,
    outcome_by_flax,
    outcome_by_penzai_shard,
    spec_differences,
)
from benchmarks.flax_guide.work import Work, works
from benchmarks.parallel_training.compiled_figures import CompiledFigures

CONTENDERS = {
    "flax": by_flax.build,
    "flax-donating": by_flax.build_donating,
    "penzai-shard": by_penzai_shard.build,
}

STEPS_PER_ROUND = 5
"""A loop waits for its devices now and then, not at every step."""


def check_agreement(work: Work) -> None:
    """Ends the run if both programs do not come to the same."""
    theirs = outcome_by_flax(work)
    with tempfile.TemporaryDirectory() as folder:
        own = outcome_by_penzai_shard(work, pathlib.Path(folder))
    problems = spec_differences(work)
    for field in ("parameters", "planned", "placed", "boxes", "losses"):
        if getattr(own, field) != getattr(theirs, field):
            problems.append(f"{field}: {getattr(own, field)} and {getattr(theirs, field)}")
    if not all(map(np.array_equal, own.initial, theirs.initial)):
        problems.append("initial values")
    if problems:
        sys.exit("\n    ".join([f"{work.name}: penzai_shard and Flax differ:", *problems]))
    print(f"\n{work.name}: {own.parameters:,} parameters, losses {own.losses}, by both")


def held(compiled: Any) -> int:
    """The bytes that a step needs on each device, the states before and after it included."""
    memory = compiled.memory_analysis()
    return (
        memory.argument_size_in_bytes
        + memory.output_size_in_bytes
        + memory.temp_size_in_bytes
        - memory.alias_size_in_bytes
    )


def in_loops(contender: Contender) -> Contender:
    """The same, with several steps in place of one."""

    def steps(state: Any) -> Any:
        for _ in range(STEPS_PER_ROUND):
            state, loss = contender.step(state)
        return state, loss

    return Contender(contender.parameters, contender.compiled, contender.start, steps)


def first_states(work: Work, rounds: int) -> dict[str, float]:
    """Median seconds from a module to its first state, tracing and compilation included."""
    programs = {"flax": by_flax.program, "penzai-shard": by_penzai_shard.program}
    times: dict[str, list[float]] = {name: [] for name in programs}
    arguments = work.arguments
    for turn in range(rounds + 1):
        for name, program in programs.items():
            jax.clear_caches()
            start = time.perf_counter()
            jax.block_until_ready(jax.tree.leaves(program(*arguments)[1]))
            if turn:
                times[name].append(time.perf_counter() - start)
    return {name: median(seconds) for name, seconds in times.items()}


def measure(work: Work, rounds: int) -> list[dict[str, Any]]:
    """Prints and returns the figures of one model."""
    check_agreement(work)
    starts = first_states(work, min(rounds, 3)) if rounds else {}
    contenders = {name: build(work) for name, build in CONTENDERS.items()}
    figures = {n: CompiledFigures.of(c.compiled, work.mesh) for n, c in contenders.items()}
    loops = {name: in_loops(contender) for name, contender in contenders.items()}
    times = times_in_turns(loops, rounds)
    ratios = median_ratios(times.elapsed, "flax") if rounds else {}
    processor = median_ratios(times.processor, "flax") if rounds else {}
    base = figures["flax"]
    columns = ("time", "cpu", "flops", "bytes", "sent", "held")
    print(" " * 14, *(f"{column:>7}" for column in columns), " collectives")
    rows = []
    for name, own in figures.items():
        compared = own.ratios_to(base)
        row = {
            "model": work.name,
            "contender": name,
            "time": ratios.get(name, float("nan")),
            "processor time": processor.get(name, float("nan")),
            **{figure: compared[figure] for figure in ("flops", "bytes accessed", "bytes sent")},
            "held": held(contenders[name].compiled) / held(contenders["flax"].compiled),
        }
        shown = " ".join(f"{ratio:>7.3f}" for ratio in list(row.values())[2:])
        print(f"{name:>14} {shown}  {own.collectives_text()}")
        rows.append(row)
    if rounds:
        milliseconds = median(times.elapsed["flax"]) / STEPS_PER_ROUND * 1e3
        print(
            f"flax: {milliseconds:.0f} ms per step; to the first state "
            f"{starts['flax']:.2f} s, by penzai_shard {starts['penzai-shard']:.2f} s"
        )
    return rows


def main(argv: list[str] | None = None) -> list[dict[str, Any]]:
    """Prints the tables.

    Args:
        argv: Command line arguments; those of the process by default.

    Returns:
        A row of ratios for each contender and model.
    """
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=20, help="timed loops each; 0 for no times")
    parser.add_argument("--depth", type=int, default=1024, help="how wide the layers are")
    parser.add_argument("--show", action="store_true", help="print both programs")
    options = parser.parse_args(argv)
    programs = {"flax": by_flax.program, "penzai-shard": by_penzai_shard.program}
    lines = ", ".join(f"{name} {lines_of(program)}" for name, program in programs.items())
    print(f"lines of code for layout, state and step: {lines}")
    if options.show:
        for name, program in programs.items():
            print(f"\n# {name}\n{inspect.getsource(program)}")
    return [row for work in works(options.depth).values() for row in measure(work, options.rounds)]


if __name__ == "__main__":
    main()
