"""Time to plan a model of 70 billion parameters for 256 devices, and one of 100,000 arrays.

Each round is a new process, from the shell to the plan as text, by the clock; its parts are CPU
seconds. Then come commands of the shell. Medians are printed.

    python -m benchmarks.plan [--rounds N]
"""

import functools
import itertools
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator

import jax
from penzai.models.transformer.variants import llamalike_common

import penzai_shard as pzs
from benchmarks.measure import Figure, make_parser, print_figures, run_anew, take_turns

SIZES = {"embed": 8192, "neurons": 28672, "heads": 8, "group": 8, "head": 128, "vocabulary": 128256}
AXES = {
    **dict.fromkeys(["blocks.*.query", "blocks.*.output"], ("heads", "group", "embed", "head")),
    **dict.fromkeys(["blocks.*.key", "blocks.*.value"], ("heads", "embed", "head")),
    **dict.fromkeys(["blocks.*.gate", "blocks.*.up", "blocks.*.down"], ("embed", "neurons")),
    **dict.fromkeys(["blocks.*.norm_1", "blocks.*.norm_2", "norm"], ("embed",)),
    **dict.fromkeys(["embedder", "head"], ("vocabulary", "embed")),
}


def make_shapes(blocks: int):
    shapes = {
        path.replace("*", str(i)): jax.ShapeDtypeStruct([*map(SIZES.get, names)], "bfloat16")
        for i in range(blocks)
        for path, names in AXES.items()
    }
    return pzs.name_axes(shapes, AXES)


def make_penzai(blocks: int):
    config = llamalike_common.LlamalikeTransformerConfig(
        num_kv_heads=8,
        query_head_multiplier=8,
        embedding_dim=8192,
        projection_dim=128,
        mlp_hidden_dim=28672,
        num_decoder_blocks=blocks,
        vocab_size=128256,
        mlp_variant="swiglu",
        tie_embedder_and_logits=False,
    )
    build = llamalike_common.build_llamalike_transformer
    return pzs.abstract_model(build, config, jax.random.key(0))


# What makes the shapes, and of how many blocks: 100,002 arrays in the last row.
MODELS = {"shapes": (make_shapes, 80), "penzai": (make_penzai, 80), "many": (make_shapes, 11_111)}
# What is measured of them, and the most seconds by the clock.
WORKS = {
    "shapes": ("plan of 70 billion parameters as a dictionary of shapes, whole process", 3),
    "penzai": ("plan of 70 billion parameters as Penzai's model, whole process", 3),
    "many": ("make_plan per array, 100,002 arrays", None),
}
COMMANDS = {"--help": 0.3, "plan llama-3-70b --mesh data=16,model=16": 3}


def plan_model(name: str) -> None:
    """Prints the CPU seconds of imports, shapes, plan and text, and of the plan of an array."""
    make, blocks = MODELS[name]
    times = [0, time.process_time()]
    model = make(blocks)
    times.append(time.process_time())
    mesh = pzs.make_mesh({"data": 32, "model": 8}, abstract=True)
    plan = pzs.make_plan(model, mesh, pzs.tensor_parallel() | pzs.fully_sharded())
    times.append(time.process_time())
    str(plan)
    times.append(time.process_time())
    parts = [after - before for before, after in itertools.pairwise(times)]
    print(*parts, parts[2] / len(plan.leaves) * 1e6)


def seconds(run: Callable[[], object]) -> float:
    started = time.perf_counter()
    run()
    return time.perf_counter() - started


def measure(rounds: int) -> Iterator[Figure]:
    for name, (work, floor) in WORKS.items():
        clock, parts = [], []
        for _ in range(rounds):
            started = time.perf_counter()
            printed = run_anew("plan", "--model", name)
            clock.append(time.perf_counter() - started)
            parts.append(map(float, printed.split()))
        *medians, each = map(statistics.median, zip(*parts, strict=True))
        detail = "imports {:.2f} s, shapes {:.2f} s, plan {:.2f} s, text {:.2f} s".format(*medians)
        if floor:
            yield Figure(work, statistics.median(clock), "s", floor=floor, detail=detail)
        else:
            yield Figure(work, each, "µs", digits=0, detail=detail)
    for arguments, floor in COMMANDS.items():
        command = [sys.executable, "-m", "penzai_shard", *arguments.split()]
        run = functools.partial(subprocess.run, command, check=True, stdout=subprocess.DEVNULL)
        (clock,) = take_turns([functools.partial(seconds, run)], rounds)
        yield Figure(f"penzai-shard {arguments}", statistics.median(clock), "s", floor=floor)


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--model", choices=MODELS, help="one round of one model")
    options = parser.parse_args()
    if options.model:
        plan_model(options.model)
        return
    print_figures(measure(1 if options.quick else options.rounds), options)


if __name__ == "__main__":
    main()
