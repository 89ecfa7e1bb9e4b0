"""A train step of a transformer in three layouts, against hand-written JAX and other libraries.

A Llama-like transformer of 4 blocks (256 wide, 8 heads, sequences of 128, a batch of 16) under
adamw on eight devices: data parallel, fully sharded, and fully sharded times tensor parallel (4x2).
``hand`` is raw arrays under ``jax.jit`` with sharding constraints; ``penzai`` is Penzai's model in
the preset of ``Layout``, and nothing else. ``linen``, ``nnx`` and ``haliax`` are the same model,
written for these libraries with their own ways of laying it out.

All start from the same weights and see the same tokens: the losses of three steps must be equal, or
the run fails. Times are medians of the ratios of turns in one process; all else is read from the
compiled program, which no noise touches. Figures are ratios to ``hand``; lower is better.

    python -m benchmarks.parallel_training [--only hand,penzai] [--layouts 4x2] [--rounds 15]
"""

import argparse
import gc
import importlib
import os
import re
import statistics
import sys
import time
from collections import Counter

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8"

import jax

from benchmarks.parallel_training.work import LAYOUTS, Contender, Shape

CONTENDERS = {
    "hand": "by_hand",
    "penzai": "with_penzai",
    "linen": "with_linen",
    "nnx": "with_nnx",
    "haliax": "with_haliax",
}
COLLECTIVE = re.compile(
    r" (all-reduce|all-gather|reduce-scatter|all-to-all|collective-permute)(?:-start)?\("
)


def read_figures(contender: Contender) -> tuple[dict[str, float], str]:
    """What a compiled step does on one device, and its collectives by kind."""
    compiled = contender.compiled
    cost, text = compiled.cost_analysis(), compiled.as_text()
    figures = {
        "flops": cost["flops"],
        "bytes": cost["bytes accessed"],
        "temporaries": compiled.memory_analysis().temp_size_in_bytes,
    }
    kinds = Counter(COLLECTIVE.findall(text))
    return figures, ", ".join(f"{count} {kind}" for kind, count in sorted(kinds.items()))


def find_losses(contender: Contender, steps: int = 3) -> list[float]:
    state, found = contender.start(), []
    for _ in range(steps):
        state, loss = contender.step(state)
        found.append(float(loss))
    return found


def measure_ratios(contenders: dict[str, Contender], rounds: int) -> dict[str, float]:
    """Median ratio of each contender's time to the first one's, round by round."""
    states = {name: contender.start() for name, contender in contenders.items()}
    times: dict[str, list[float]] = {name: [] for name in contenders}
    # Two rounds warm up; whoever is first finds colder caches.
    for turn in range(rounds + 2):
        for name in list(contenders)[:: 1 if turn % 2 else -1]:
            gc.collect()
            started = time.perf_counter()
            states[name], loss = contenders[name].step(states[name])
            jax.block_until_ready((loss, jax.tree.leaves(states[name])))
            if turn >= 2:
                times[name].append(time.perf_counter() - started)
    first = times[next(iter(times))]
    return {
        name: statistics.median(a / b for a, b in zip(own, first, strict=True))
        for name, own in times.items()
    }


def compare(layout_name: str, names: list[str], rounds: int) -> None:
    shape, layout = Shape(), LAYOUTS[layout_name]
    contenders = {
        name: importlib.import_module(f"benchmarks.parallel_training.{CONTENDERS[name]}").build(
            shape, layout
        )
        for name in names
    }
    losses = {name: find_losses(contender) for name, contender in contenders.items()}
    expected = losses[names[0]]
    for name, found in losses.items():
        if any(abs(a / b - 1) > 1e-5 for a, b in zip(found, expected, strict=True)):
            sys.exit(f"{layout_name}: losses of {name} are {found}, of {names[0]} {expected}")
    ratios = measure_ratios(contenders, rounds) if rounds else {}
    figures = {name: read_figures(contender) for name, contender in contenders.items()}
    base, _ = figures[names[0]]
    for name, (own, collectives) in figures.items():
        cells = [f"{ratios.get(name, float('nan')):.3f}"]
        cells += [f"{own[key] / base[key]:.3f}" for key in base]
        print(f"| {layout_name} | {name} | {' | '.join(cells)} | {collectives} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default=",".join(CONTENDERS), help="the first one is the base")
    parser.add_argument("--layouts", default=",".join(LAYOUTS))
    parser.add_argument("--rounds", type=int, default=15, help="timed steps each; 0 for no times")
    options = parser.parse_args()
    print("| layout | written with | time | flops | bytes | temporaries | collectives |")
    print("|---" * 7 + "|")
    for layout_name in options.layouts.split(","):
        compare(layout_name, options.only.split(","), options.rounds)


if __name__ == "__main__":
    main()
