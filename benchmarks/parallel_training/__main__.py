"""A train step of a transformer in three layouts, against hand-written JAX and other libraries.

A Llama-like transformer of 4 blocks (256 wide, 8 heads, sequences of 128, a batch of 16) under
adamw on eight devices: data parallel, fully sharded, and fully sharded times tensor parallel (4x2).
``hand`` is raw arrays under ``jax.jit`` with sharding constraints; ``penzai`` is Penzai's model in
the preset of ``Layout``, and nothing else. ``linen``, ``nnx`` and ``haliax`` are the same model,
written for these libraries with their own ways of laying it out.

All start from the same weights and see the same tokens: the losses of three steps must be equal.
Times are medians of the ratios of turns in one process; all else is read from the compiled program.

    python -m benchmarks.parallel_training [--layouts 4x2] [--rounds 11]
"""

import gc
import importlib
import os
import re
import time
from collections import Counter
from collections.abc import Callable, Iterator

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8"

import jax

from benchmarks.measure import Figure, make_parser, median_ratio, print_figures, take_turns
from benchmarks.parallel_training.work import LAYOUTS, Contender, Shape

CONTENDERS = {
    "hand": "by_hand",
    "penzai": "with_penzai",
    "linen": "with_linen",
    "nnx": "with_nnx",
    "haliax": "with_haliax",
}
OURS, HAND = "penzai", "hand"
COLLECTIVE = re.compile(
    r" (all-reduce|all-gather|reduce-scatter|all-to-all|collective-permute)(?:-start)?\("
)
INSTRUCTION = re.compile(r"^\s+(?:ROOT )?%?[\w.-]+ = ", re.MULTILINE)


def name_work(layout: str) -> str:
    return f"train step by a preset against one by hand, {layout}"


def build_contender(name: str, shape: Shape, layout: str) -> Contender:
    module = importlib.import_module(f"benchmarks.parallel_training.{CONTENDERS[name]}")
    return module.build(shape, LAYOUTS[layout])


def find_losses(contender: Contender, steps: int = 3) -> list[float]:
    state, found = contender.start(), []
    for _ in range(steps):
        state, loss = contender.step(state)
        found.append(float(loss))
    return found


def make_timer(contender: Contender) -> Callable[[], float]:
    """Times a step, which goes on from the one before."""
    state = contender.start()

    def seconds() -> float:
        nonlocal state
        gc.collect()
        started = time.perf_counter()
        state, loss = contender.step(state)
        jax.block_until_ready((loss, jax.tree.leaves(state)))
        return time.perf_counter() - started

    return seconds


def compare_times(layout: str, contenders: dict[str, Contender], rounds: int) -> Figure:
    timers = [make_timer(contender) for contender in contenders.values()]
    times = dict(zip(contenders, take_turns(timers, rounds, warm_up=2), strict=True))
    ratios = {name: median_ratio(own, times[HAND]) for name, own in times.items()}
    others = [f"{name} {ratio:.2f}x" for name, ratio in ratios.items() if name not in (OURS, HAND)]
    work = f"{name_work(layout)}: time"
    return Figure(work, ratios[OURS], floor=1.03, detail=", ".join(others))


def compare_programs(layout: str, contenders: dict[str, Contender]) -> Iterator[Figure]:
    """Figures of the compiled steps for one device, which no noise touches."""
    ours, hand = (contenders[name].compiled for name in (OURS, HAND))
    costs = []
    for compiled in (ours, hand):
        cost, memory = compiled.cost_analysis(), compiled.memory_analysis()
        costs.append(
            {
                "flops": cost["flops"],
                "bytes": cost["bytes accessed"],
                "temporaries": memory.temp_size_in_bytes,
                "aliases": memory.alias_size_in_bytes,
            }
        )
    ratios = {key: own / costs[1][key] for key, own in costs[0].items()}
    detail = ", ".join(f"{key} {ratio:.3f}x" for key, ratio in ratios.items())
    work = f"{name_work(layout)}: greatest ratio of a cost of its program"
    yield Figure(work, max(ratios.values()), floor=1.0, detail=detail)
    counts = [len(INSTRUCTION.findall(compiled.as_text())) for compiled in (ours, hand)]
    work = f"{name_work(layout)}: instructions"
    yield Figure(work, counts[0] / counts[1], floor=1.01, detail="{:,}, {:,}".format(*counts))
    kinds, by_hand = (Counter(COLLECTIVE.findall(compiled.as_text())) for compiled in (ours, hand))
    detail = ", ".join(f"{count} {kind}" for kind, count in sorted(kinds.items()))
    work = f"{name_work(layout)}: collectives, floor: those by hand"
    yield Figure(work, kinds.total(), "", floor=by_hand.total(), digits=0, detail=detail)


def measure(layouts: list[str], shape: Shape, rounds: int) -> Iterator[Figure]:
    for layout in layouts:
        contenders: dict[str, Contender] = {}
        expected: list[float] = []
        for name in CONTENDERS:
            try:
                contender = build_contender(name, shape, layout)
                losses = find_losses(contender)
                expected = expected or losses
                if any(abs(a / b - 1) > 1e-5 for a, b in zip(losses, expected, strict=True)):
                    raise ValueError(f"losses are {losses}, by hand {expected}")
            except Exception as error:
                # Another library can be left out; without these two there is nothing to compare.
                if name in (HAND, OURS):
                    raise
                detail = f"{type(error).__name__}: {error}"
                yield Figure(f"train step of {name}, {layout}", None, detail=detail)
            else:
                contenders[name] = contender
        yield compare_times(layout, contenders, rounds)
        yield from compare_programs(layout, contenders)


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--layouts", default=",".join(LAYOUTS))
    parser.add_argument("--rounds", type=int, default=11, help="timed steps of each")
    options = parser.parse_args()
    layouts, shape, rounds = options.layouts.split(","), Shape(), options.rounds
    if options.quick:
        layouts, shape, rounds = layouts[:1], Shape(blocks=1), 1
    print_figures(measure(layouts, shape, rounds), options)


if __name__ == "__main__":
    main()
