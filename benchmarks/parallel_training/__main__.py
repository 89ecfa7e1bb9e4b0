"""A train step of a transformer in three layouts, against hand-written JAX and other frameworks.

A Llama-like transformer of 4 blocks (256 wide, 8 heads, sequences of 128, a batch of 16) under
adamw on eight devices (simulated on a CPU unless there are as many others): data parallel, fully
sharded, and fully sharded times tensor parallel (4x2). ``hand`` is raw arrays under ``jax.jit``
with sharding constraints; ``penzai`` is Penzai's model in the preset of ``Layout`` of that name;
``penzai-manual`` the same with ``manual_fsdp``; ``penzai-bare`` with no edit at all. ``linen``,
``nnx`` and ``haliax`` are the same model written for these libraries, which the extra
``benchmarks`` installs.

All start from the same weights and see the same tokens: the numbers of parameters, the losses of
three steps and the floating-point operations must be equal, or the run fails. Times are medians
of steps taken in turns in one process; everything else is read from the compiled program, and no
noise touches it. Figures are ratios to ``hand``; lower is better.

    python -m benchmarks.parallel_training [--only hand,penzai] [--layouts 4x2] [--rounds 15]
"""

import argparse
import functools
import importlib
import importlib.util
import sys
from typing import Any

from benchmarks.contenders import Contender, chosen, losses, median_times
from benchmarks.parallel_training.compiled_figures import CompiledFigures
from benchmarks.parallel_training.work import LAYOUTS, Layout, Shape

CONTENDERS = {
    "hand": ("by_hand", None),
    "penzai": ("with_penzai", "by_preset"),
    "penzai-manual": ("with_penzai", "by_manual_fsdp"),
    "penzai-bare": ("with_penzai", "without_edits"),
    "linen": ("with_linen", None),
    "nnx": ("with_nnx", None),
    "haliax": ("with_haliax", None),
}
"""For each way of writing the step its module, and the edits that it makes."""

PACKAGES = {"linen": "flax", "nnx": "flax", "haliax": "haliax"}

LOSS_TOLERANCE = 1e-5
"""Relative: sums in another order round otherwise."""

FLOPS_TOLERANCE = 0.02
"""Relative. The compiler counts a few elementwise operations more or less."""


def check_installed(names: list[str]) -> None:
    """Ends the run if a framework that was asked for is not installed."""
    missing = {PACKAGES[n] for n in names if n in PACKAGES} - {
        package for package in PACKAGES.values() if importlib.util.find_spec(package)
    }
    if missing:
        left = ",".join(name for name in names if PACKAGES.get(name) not in missing)
        sys.exit(
            f"not installed: {', '.join(sorted(missing))}. Install them, pip install "
            f"'.[benchmarks]', or leave them out: --only {left}"
        )


def built(name: str, shape: Shape, layout: Layout) -> Contender:
    """A contender's step, compiled."""
    module_name, edits = CONTENDERS[name]
    module = importlib.import_module(f"benchmarks.parallel_training.{module_name}")
    build = module.build
    if edits is not None:
        build = functools.partial(build, edits=getattr(module, edits))
    return build(shape, layout)


def check_equal_work(contenders: dict[str, Contender], figures: dict[str, Any]) -> None:
    """Ends the run if some contender does other work than the first."""
    first, *others = contenders
    expected = losses(contenders[first])
    print(f"{contenders[first].parameters:,} parameters; losses {expected}")
    for name in others:
        found = losses(contenders[name])
        problems = []
        if contenders[name].parameters != contenders[first].parameters:
            problems.append(f"{contenders[name].parameters:,} parameters")
        if any(abs(a / b - 1) > LOSS_TOLERANCE for a, b in zip(found, expected, strict=True)):
            problems.append(f"losses {found}")
        # Without a constraint the compiler may repeat work on several devices; that is its price.
        ratio = figures[name].flops / figures[first].flops
        if abs(ratio - 1) > FLOPS_TOLERANCE and name != "penzai-bare":
            problems.append(f"{ratio:.3f} times the floating-point operations")
        if problems:
            sys.exit(f"{name} does other work than {first}: {'; '.join(problems)}")


def measure(layout: Layout, names: list[str], rounds: int) -> list[dict[str, Any]]:
    """Prints and returns the figures of one layout; the first contender's as they are."""
    contenders = {name: built(name, Shape(), layout) for name in names}
    figures = {
        name: CompiledFigures.of(contender.compiled, layout.mesh)
        for name, contender in contenders.items()
    }
    print(f"\n{layout.name}: ", end="")
    check_equal_work(contenders, figures)
    times = median_times(contenders, rounds) if rounds else dict.fromkeys(names, float("nan"))
    first = names[0]
    head = f"{'':>14} {'time':>7} {'flops':>7} {'bytes':>7} {'temps':>7} {'sent':>7}"
    print(f"{head} {'transposes':>10} {'copies':>7}  collectives")
    rows = []
    for name in names:
        own, base = figures[name], figures[first]
        row = {
            "layout": layout.name,
            "contender": name,
            "time": times[name] / times[first],
            **own.ratios_to(base),
        }
        ratios = " ".join(f"{ratio:>7.3f}" for ratio in list(row.values())[2:])
        print(f"{name:>14} {ratios} {own.transposes:>10} {own.copies:>7}  {own.collectives_text()}")
        rows.append(row)
    base = figures[first]
    print(
        f"{first}: {times[first] * 1e3:.0f} ms, {base.flops / 1e9:.3f} Gflop, "
        f"{base.bytes_accessed / 1e6:.1f} MB accessed, {base.temporaries / 1e6:.1f} MB of "
        f"temporaries, {base.bytes_sent / 1e6:.2f} MB sent"
    )
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
    parser.add_argument("--only", default=",".join(CONTENDERS), help="contenders, the base first")
    parser.add_argument("--layouts", default=",".join(LAYOUTS))
    parser.add_argument("--rounds", type=int, default=15, help="timed steps each; 0 for no times")
    options = parser.parse_args(argv)
    names = chosen(options.only, CONTENDERS, "contender")
    check_installed(names)
    return [
        row
        for layout in chosen(options.layouts, LAYOUTS, "layout")
        for row in measure(LAYOUTS[layout], names, options.rounds)
    ]


if __name__ == "__main__":
    main()
