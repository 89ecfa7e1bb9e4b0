"""The picks of the search, judged by the compiled steps of all candidates.

Each candidate of each pair is compiled once; a file for each pair keeps what it costs, so that this
may be interrupted. Under limits of memory into which all candidates fit, half, a tenth and one, the
search is then told what the judge says of those that it wants compiled.

    python -m benchmarks.choosing.picks --cache FOLDER [--pairs NAME ...] [--truth]
"""

import argparse
import dataclasses
import gc
import json
import math
import os
import pathlib
import random
import re
import warnings
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

# The largest mesh of the pairs.
os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=16"

import jax

from benchmarks.choosing.judge import Verdict, judge
from benchmarks.choosing.pairs import BLIND, PAIRS, SEEN, Pair
from penzai_shard.choosing.bound import bound
from penzai_shard.choosing.candidates import Candidate, make_candidates, mesh_shapes
from penzai_shard.choosing.cost import Prices
from penzai_shard.choosing.hardware import Hardware, step_time
from penzai_shard.choosing.search import Price, search
from penzai_shard.choosing.workload import Workload, read_workload
from penzai_shard.errors import ShardingError
from penzai_shard.progress import progress

# What is asked of a pair


@dataclasses.dataclass(frozen=True)
class Question:
    """A pair, read: the step, the devices, and every candidate."""

    workload: Workload
    hardware: Hardware
    candidates: list[Candidate]

    @classmethod
    def read(cls, pair: Pair) -> "Question":
        step, hardware = pair.make_step(), Hardware.read(pair.devices)
        workload = read_workload(
            **{x.name: getattr(step, x.name) for x in dataclasses.fields(step)}
        )
        meshes = mesh_shapes(hardware) if pair.mesh is None else [pair.mesh]
        ways = {"rematerialise": pair.rematerialise, "microbatches": pair.microbatches}
        return cls(workload, hardware, make_candidates(workload, meshes, keep=pair.keep, **ways))


def read_truth(name: str, question: Question, cache: pathlib.Path) -> dict[str, Verdict]:
    """What each candidate costs, by its words; what is not in the cache is compiled.

    What no layout can be, or the compiler refuses, is in the cache with the reason.
    """
    file = cache / f"{re.sub(r'[^a-z0-9]+', '_', name.lower())}.jsonl"
    lines = file.read_text().splitlines() if file.exists() else []
    known: dict[str, Any] = {row["words"]: row for row in map(json.loads, lines)}
    missing = [one for one in question.candidates if one.words not in known]
    with progress(len(missing), f"steps of {name}", bool(missing)) as bar:
        for one in missing:
            row: dict[str, Any] = {"words": one.words}
            try:
                row |= dataclasses.asdict(judge(question.workload, one))
            except (ShardingError, ValueError, jax.errors.JaxRuntimeError) as error:
                row["error"] = f"{type(error).__name__}: {error}"
            known[one.words] = row
            with file.open("a") as lines_of_all:
                lines_of_all.write(f"{json.dumps(row)}\n")
            bar.advance()
            bar.show("")
            # Programs of hundreds of layouts would stay in JAX's caches.
            jax.clear_caches()
            gc.collect()
    rows = (known[one.words] for one in question.candidates)
    return {
        row["words"]: Verdict(**{x.name: row[x.name] for x in dataclasses.fields(Verdict)})
        for row in rows
        if "error" not in row
    }


# The picks

# Of all candidates this part fits; of the last one a single one does.
FITTING = {"all": 1.0, "half": 0.5, "a tenth": 0.1, "one": 0.0}
# Limits are above what the last one that fits needs by so much.
SLACK = 1e-3
# By so much a pick may be slower than the best that fits.
ALLOWED = 0.02
SEEDS = 3
# What a certificate should say at most, and what ``choose_layout`` compiles by default.
MOST_GAP, COMPILED = 0.05, 12


class Picked(NamedTuple):
    """What became of a search under one limit.

    Attributes:
        slower: By which part the pick takes longer than the best that fits; infinite without one.
        compiled: What was compiled.
        pick: The pick, if there is one.
        best: The best that fits.
    """

    slower: float
    compiled: set[int]
    pick: int | None
    best: int

    @property
    def is_good(self) -> bool:
        return self.slower <= ALLOWED


def pick_under(
    part: float,
    estimates: Sequence[Price],
    exact: Sequence[Price],
    kinds: Sequence[Any],
    least: float,
) -> Picked:
    """Searches under a limit of memory into which a part of the candidates fit."""
    held = sorted(price.memory for price in exact)
    limit = held[min(int(part * len(held)), len(held) - 1)] * (1 + SLACK)
    most = min(max(len(exact) // 6, 1), 12)
    given = dict(enumerate(estimates)), dict(enumerate(kinds))
    found = search(*given, lambda numbers: [exact[i] for i in numbers], limit, most, least)
    best = min(price for price in exact if price.memory <= limit)
    fitting = [(price, number) for number, price in found.items() if price.memory <= limit]
    if not fitting:
        return Picked(math.inf, set(found), None, exact.index(best))
    price, number = min(fitting)
    slower = max(price.seconds / best.seconds - 1, 0.0)
    return Picked(slower, set(found), number, exact.index(best))


def kinds_of(candidate: Candidate) -> list[Any]:
    """What a candidate has in common with others whose estimates err alike, the closest first."""
    layout, mesh = candidate.layout, candidate.mesh_sizes
    run = layout.rematerialise, layout.reshard_after_forward, candidate.microbatches > 1
    activations = run, mesh, layout.compute
    return [(*activations, layout.parameters), activations, run, ()]


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What became of a pair.

    Attributes:
        count: How many candidates were compiled.
        unpriced: How many of these cannot be priced by propagation, which the search does not see.
        picks: By how much fits.
        control: How many picks are good with estimates in random order.
        bound: The largest bound of a layout, as a part of what it costs compiled.
        gap: By which part the pick is slower than what was not compiled can be; all fit.
        held: How many are compiled for that.
    """

    count: int
    unpriced: int
    picks: Mapping[str, Picked]
    control: int
    bound: float
    gap: float
    held: int


def judge_picks(name: str, question: Question, truth: Mapping[str, Verdict]) -> Outcome:
    """Prices and searches the candidates of a pair, and prints how each pick went wrong."""
    hardware, prices = question.hardware, Prices(question.workload)
    candidates, estimates, exact = [], [], []
    known = [one for one in question.candidates if one.words in truth]
    for one in known:
        sizes, verdict = dict(one.mesh_sizes), truth[one.words]
        try:
            cost = prices.price(one)
        except ShardingError as error:
            print(f"  not priced: {one.words}: {error}")
            continue
        time = step_time(cost, sizes, hardware)
        # Equal but for the last digits is equal.
        seconds, total = (float(f"{x:.9g}") for x in (time.bound, time.total))
        candidates.append(one)
        estimates.append(Price(seconds, total, cost.memory_bytes))
        exact.append(Price(*verdict.price(sizes, hardware), verdict.memory))

    kinds = [kinds_of(one) for one in candidates]
    bounds = [bound(question.workload, one, hardware) for one in candidates]
    picks = {
        fits: pick_under(x, estimates, exact, kinds, min(bounds)) for fits, x in FITTING.items()
    }
    for fits, picked in picks.items():
        if not picked.is_good:
            print(f"  {fits} fits: {picked.slower:.1%} slower")
            for label, number in (("pick", picked.pick), ("best", picked.best)):
                if number is not None:
                    told, true = estimates[number], exact[number]
                    print(
                        f"    {label}: {true.seconds * 1e3:.3f} ms ({told.seconds * 1e3:.3f}), "
                        f"{true.memory / 1e6:.0f} MB ({told.memory / 1e6:.0f} estimated): "
                        f"{candidates[number].words}"
                    )
    control = 0
    for seed in range(SEEDS):
        mixed = random.Random(seed).sample(estimates, len(estimates))
        control += sum(pick_under(x, mixed, exact, kinds, 0.0).is_good for x in FITTING.values())

    ratios = [least / price.seconds for least, price in zip(bounds, exact, strict=True)]
    for ratio, one in zip(ratios, candidates, strict=True):
        # The judge's linear programs are solved to about seven digits.
        if ratio > 1 + 1e-6:
            print(f"  bound {ratio:.4f} of the compiled: {one.words}")
    # As ``choose_layout`` does, where everything fits.
    given = dict(enumerate(estimates)), dict(enumerate(kinds))
    held = search(*given, lambda some: [exact[i] for i in some], math.inf, COMPILED, min(bounds))
    best = min(held.values()).seconds
    left = [i for i, least in enumerate(bounds) if i not in held and least * (1 + MOST_GAP) < best]
    if len(held) + len(left) <= 3 * COMPILED:
        held |= {i: exact[i] for i in left}
    rest = [least for i, least in enumerate(bounds) if i not in held]
    best = min(held.values()).seconds
    gap = max(best / min(rest, default=best) - 1, 0.0)
    counts = len(known), len(known) - len(exact)
    return Outcome(*counts, picks, control, max(ratios), gap, len(held))


HEADS = ("layouts", "unpriced", *FITTING, "compiled", "control", "bound", "gap")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--cache", type=pathlib.Path, required=True, help="a folder for the truth")
    parser.add_argument("--pairs", nargs="+", choices=PAIRS, default=[*PAIRS])
    parser.add_argument("--truth", action="store_true", help="only compile")
    options = parser.parse_args()
    options.cache.mkdir(parents=True, exist_ok=True)
    warnings.simplefilter("ignore")
    outcomes: dict[str, Outcome] = {}
    print(f"| pair | {' | '.join(HEADS)} |\n{'|---' * (len(HEADS) + 1)}|", flush=True)
    for name in options.pairs:
        question = Question.read(PAIRS[name])
        truth = read_truth(name, question, options.cache)
        if options.truth:
            continue
        one = outcomes[name] = judge_picks(name, question, truth)
        cells = [f"{one.count}", f"{one.unpriced}"]
        cells += [f"{picked.slower:.1%}" for picked in one.picks.values()]
        cells += [" ".join(f"{len(picked.compiled)}" for picked in one.picks.values())]
        cells += [f"{one.control} of {SEEDS * len(FITTING)}", f"{one.bound:.3f}"]
        cells += [f"{one.gap:.1%} ({one.held})"]
        print(f"| {name} | {' | '.join(cells)} |", flush=True)
        jax.clear_caches()
    for label, pairs in (("seen", SEEN), ("not seen", BLIND)):
        own = [one for name, one in outcomes.items() if name in pairs]
        picks = [picked for one in own for picked in one.picks.values()]
        good, control = sum(x.is_good for x in picks), sum(one.control for one in own)
        compiled = sum(len(x.compiled) for x in picks) / max(len(picks), 1)
        close = sum(one.gap <= MOST_GAP for one in own)
        print(
            f"{label}: {good} of {len(picks)} picks within {ALLOWED:.0%} of the best, "
            f"{compiled:.1f} compiled in the mean; with estimates in random order "
            f"{control} of {SEEDS * len(picks)}; "
            f"gaps up to {MOST_GAP:.0%}: {close} of {len(own)}"
        )


if __name__ == "__main__":
    main()
