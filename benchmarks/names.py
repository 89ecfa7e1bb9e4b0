"""CPU time per array of ``name_to_name_sharding``, against the function of that name in Penzai.

Both get the same mapping and the same tree, a flat dictionary as a model's parameters are, and take
turns in one process; medians are printed.

    python -m benchmarks.names [--arrays N]
"""

import functools
import os
import statistics
import time
from collections.abc import Callable, Iterator

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8"

from penzai import pz
from penzai.toolshed import sharding_util

import penzai_shard as pzs
from benchmarks.measure import Figure, make_parser, median_ratio, print_figures, take_turns

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


def measure(arrays_in_all: int) -> Iterator[Figure]:
    makers = (pzs.name_to_name_sharding, sharding_util.name_to_name_sharding)
    for count, floor in FLOORS.items():
        tree = make_tree(count)
        timers = [functools.partial(microseconds, make, tree) for make in makers]
        ours, theirs = take_turns(timers, max(arrays_in_all // count, 1), warm_up=0)
        medians = [statistics.median(column) for column in (ours, theirs)]
        detail = "{:.2f} µs of CPU per array against {:.2f} µs".format(*medians)
        ratio = median_ratio(theirs, ours)
        work = f"name_to_name_sharding, {count:,} arrays, times faster than penzai.toolshed's"
        yield Figure(work, ratio, floor=floor, at_least=True, digits=1, detail=detail)


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--arrays", type=int, default=500_000, help="of all rounds of a size")
    options = parser.parse_args()
    print_figures(measure(10_000 if options.quick else options.arrays), options)


if __name__ == "__main__":
    main()
