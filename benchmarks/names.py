"""CPU time per array of ``name_to_name_sharding``, against the function of that name in Penzai.

Both get the same mapping and the same tree, a flat dictionary as a model's parameters are, and take
turns in one process; medians are printed.

    python benchmarks/names.py [--quick]
"""

import argparse
import os
import statistics
import time
from collections.abc import Callable

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8"

from penzai import pz
from penzai.toolshed import sharding_util

import penzai_shard as pzs

MESH = pzs.make_mesh({"data": 4, "model": 2})
RULES = {"embedding": "data", "neurons": "model"}
SHAPES = [
    {"embedding": 8, "neurons": 16},
    {"neurons": 16, "embedding": 8},
    {"embedding": 8},
    {"heads": 4, "projection": 2, "embedding": 8},
    {"vocabulary": 32, "embedding": 8},
]
# How many arrays, and how many times faster this library is to be.
FLOORS = {1_000: 6, 10_000: 8, 100_000: 10}


def make_tree(count: int) -> dict[str, pz.nx.NamedArray]:
    arrays = [pz.nx.zeros(shape) for shape in SHAPES]
    # Each with a mapping of its own, as if each was made by itself.
    return {
        f"block_{i // 5}/{i % 5}": pz.nx.NamedArray(
            arrays[i % 5].named_axes.copy(), arrays[i % 5].data_array
        )
        for i in range(count)
    }


def microseconds(make: Callable[..., object], tree: dict[str, pz.nx.NamedArray]) -> float:
    # The first call fills the processor's caches: otherwise one would work for the other.
    make(tree, MESH, RULES)
    started = time.process_time()
    make(tree, MESH, RULES)
    return (time.process_time() - started) / len(tree) * 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="a tenth of the rounds")
    options = parser.parse_args()
    makers = (pzs.name_to_name_sharding, sharding_util.name_to_name_sharding)
    print("| arrays | ours | penzai | ratio | floor |\n|---|---|---|---|---|")
    for count, floor in FLOORS.items():
        tree = make_tree(count)
        pairs = []
        for _ in range((100_000 if options.quick else 1_000_000) // count):
            pairs.append([microseconds(make, tree) for make in makers])
        ours, theirs = (statistics.median(column) for column in zip(*pairs, strict=True))
        ratio = statistics.median(theirs / ours for ours, theirs in pairs)
        print(
            f"| {count:,} | {ours:.2f} µs | {theirs:.2f} µs | {ratio:.1f}x | {floor}x |", flush=True
        )


if __name__ == "__main__":
    main()
