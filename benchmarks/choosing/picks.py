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
import os
import pathlib
import re
import warnings
from typing import Any

# The largest mesh of the pairs.
os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=16"

import jax

from benchmarks.choosing.judge import Verdict, judge
from benchmarks.choosing.pairs import PAIRS, Pair
from penzai_shard.choosing.candidates import Candidate, make_candidates, mesh_shapes
from penzai_shard.choosing.hardware import Hardware
from penzai_shard.choosing.problem import Problem, read_problem
from penzai_shard.errors import ShardingError
from penzai_shard.progress import progress

# What is asked of a pair


@dataclasses.dataclass(frozen=True)
class Question:
    """A pair, read: the step, the devices, and every candidate."""

    problem: Problem
    hardware: Hardware
    candidates: list[Candidate]

    @classmethod
    def read(cls, pair: Pair) -> "Question":
        step, hardware = pair.make_step(), Hardware.read(pair.devices)
        problem = read_problem(**{x.name: getattr(step, x.name) for x in dataclasses.fields(step)})
        meshes = mesh_shapes(hardware) if pair.mesh is None else [pair.mesh]
        ways = {"rematerialise": pair.rematerialise, "microbatches": pair.microbatches}
        return cls(problem, hardware, make_candidates(problem, meshes, keep=pair.keep, **ways))


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
                row |= dataclasses.asdict(judge(question.problem, one))
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--cache", type=pathlib.Path, required=True, help="a folder for the truth")
    parser.add_argument("--pairs", nargs="+", choices=PAIRS, default=[*PAIRS])
    parser.add_argument("--truth", action="store_true", help="only compile")
    options = parser.parse_args()
    options.cache.mkdir(parents=True, exist_ok=True)
    warnings.simplefilter("ignore")
    for name in options.pairs:
        question = Question.read(PAIRS[name])
        truth = read_truth(name, question, options.cache)
        print(f"{name}: {len(truth)} of {len(question.candidates)}", flush=True)


if __name__ == "__main__":
    main()
