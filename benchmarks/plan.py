"""Time to plan a model of 70 billion parameters for 256 devices, and one of 100,000 arrays.

A row is a new process, from the shell to the plan as text, by the clock; then its parts in CPU
seconds. Medians are printed.

    python benchmarks/plan.py [--rounds N]
"""

import argparse
import itertools
import statistics
import subprocess
import sys
import time

import jax
from penzai.models.transformer.variants import llamalike_common

import penzai_shard as pzs

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


def measure_process(name: str) -> list[float]:
    started = time.perf_counter()
    printed = subprocess.check_output([sys.executable, __file__, "--model", name], text=True)
    return [time.perf_counter() - started, *map(float, printed.split())]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--model", choices=MODELS, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.model:
        plan_model(options.model)
        return
    print("| model | process | imports | shapes | plan | text | plan of an array |")
    print("|---" * 7 + "|")
    for name in MODELS:
        rounds = [measure_process(name) for _ in range(options.rounds)]
        *parts, each = (statistics.median(column) for column in zip(*rounds, strict=True))
        print("|", name, *(f"| {part:.2f} s" for part in parts), f"| {each:.0f} µs |", flush=True)


if __name__ == "__main__":
    main()
