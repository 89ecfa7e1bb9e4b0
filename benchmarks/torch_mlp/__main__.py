"""A train step of torch's weights, by name, against hand-written JAX and torchax.

An MLP 784-1024-1024-1024-10 as ``torch.nn.Sequential`` holds its weights, a batch of 8192, adam, on
eight devices (simulated on a CPU unless there are as many others): data parallel, fully sharded,
and fully sharded times tensor parallel (4x2). ``hand`` is raw arrays under ``jax.jit`` with
shardings and constraints; ``penzai-shard`` names the state dict's arrays; ``torchax`` runs torch's
own module, if torch and torchax are installed.

All start from the same weights and see the same batch: the numbers of parameters and the losses of
three steps must be equal, or the run fails. Times are of steps taken in turns in one process, the
median of their ratios round by round; ``cpu`` is the time that the process used on all cores, which
other load on the machine touches little. Everything else is read from the compiled program, and no
noise touches it. Figures are ratios to ``hand``; lower is better.

    python -m benchmarks.torch_mlp [--layouts 4x2] [--rounds 5] [--batch 8192]
"""

import argparse
import importlib
import importlib.util
import statistics
import sys
from typing import Any

from benchmarks.contenders import Contender, chosen, losses, median_ratios, times_in_turns
from benchmarks.parallel_training.compiled_figures import CompiledFigures
from benchmarks.parallel_training.work import Layout
from benchmarks.torch_mlp.work import LAYOUTS, Shape

CONTENDERS = {"hand": "by_hand", "penzai-shard": "by_penzai_shard", "torchax": "by_torchax"}

LOSS_TOLERANCE = 1e-5
"""Relative: sums in another order round otherwise."""


def check_equal_work(contenders: dict[str, Contender]) -> None:
    """Ends the run if some contender does other work than the first."""
    first, *others = contenders
    expected = losses(contenders[first])
    print(f"{contenders[first].parameters:,} parameters; losses {expected}")
    for name in others:
        found = losses(contenders[name])
        if contenders[name].parameters != contenders[first].parameters:
            sys.exit(f"{name} has {contenders[name].parameters:,} parameters")
        if any(abs(a / b - 1) > LOSS_TOLERANCE for a, b in zip(found, expected, strict=True)):
            sys.exit(f"{name} has other losses than {first}: {found}")


def measure(layout: Layout, shape: Shape, names: list[str], rounds: int) -> list[dict[str, Any]]:
    """Prints and returns the figures of one layout; the first contender's as they are."""
    contenders = {}
    for name in names:
        module = importlib.import_module(f"benchmarks.torch_mlp.{CONTENDERS[name]}")
        contenders[name] = module.build(shape, layout)
    print(f"\n{layout.name}: ", end="")
    check_equal_work(contenders)
    figures = {n: CompiledFigures.of(c.compiled, layout.mesh) for n, c in contenders.items()}
    first, base = names[0], figures[names[0]]
    times = times_in_turns(contenders, rounds)
    unknown = dict.fromkeys(names, float("nan"))
    ratios = median_ratios(times.elapsed, first) if rounds else unknown
    processor = median_ratios(times.processor, first) if rounds else unknown
    headings = ("time", "cpu", "flops", "bytes", "temps", "sent")
    print(f"{'':>14} {' '.join(f'{heading:>7}' for heading in headings)}  collectives")
    rows = []
    for name, own in figures.items():
        row = {
            "layout": layout.name,
            "contender": name,
            "time": ratios[name],
            "cpu": processor[name],
            **own.ratios_to(base),
        }
        shown = " ".join(f"{ratio:>7.3f}" for ratio in list(row.values())[2:])
        print(f"{name:>14} {shown}  {own.collectives_text()}")
        rows.append(row)
    milliseconds = statistics.median(times.elapsed[first]) * 1e3 if rounds else float("nan")
    print(f"{first}: {milliseconds:.0f} ms per step, {base.flops / 1e9:.2f} Gflop per device")
    return rows


def main(argv: list[str] | None = None) -> list[dict[str, Any]]:
    """Prints the tables.

    Args:
        argv: Command line arguments; those of the process by default.

    Returns:
        A row of ratios for each contender in each layout.
    """
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--layouts", default=",".join(LAYOUTS))
    parser.add_argument("--rounds", type=int, default=5, help="timed steps each; 0 for no times")
    parser.add_argument("--batch", type=int, default=Shape.batch)
    options = parser.parse_args(argv)
    layouts = chosen(options.layouts, LAYOUTS, "layout")
    names = ["hand", "penzai-shard"]
    if all(map(importlib.util.find_spec, ("torch", "torchax"))):
        names.append("torchax")
    else:
        print("torchax is left out: torch and torchax are not both installed")
    shape = Shape(batch=options.batch)
    return [row for name in layouts for row in measure(LAYOUTS[name], shape, names, options.rounds)]


if __name__ == "__main__":
    main()
