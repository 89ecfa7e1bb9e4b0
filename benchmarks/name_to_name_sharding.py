"""Time per array of building a sharding tree, against Penzai's and a bare tree map.

Both build the ``NamedSharding`` tree of a flat dictionary of named arrays with the same rules.
Runs alternate in one process; medians are compared.

    python benchmarks/name_to_name_sharding.py
"""

import argparse
import os
import statistics
import time

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8"

import jax
import jax.numpy as jnp
from penzai import pz
from penzai.toolshed import sharding_util

import penzai_shard as pzs

RULES = {"embedding": "data", "neurons": "model"}
SHAPES = [
    {"embedding": 8, "neurons": 16},
    {"neurons": 16, "embedding": 8},
    {"embedding": 8},
    {"heads": 4, "projection": 2, "embedding": 8},
    {"vocabulary": 32, "embedding": 8},
]


def tree_of(count):
    made = [pz.nx.zeros(shape, dtype=jnp.float32) for shape in SHAPES]
    return {
        f"block_{i // 5}/{i % 5}": pz.nx.NamedArray(
            made[i % 5].named_axes.copy(), made[i % 5].data_array
        )
        for i in range(count)
    }


def seconds(function):
    start = time.perf_counter()
    function()
    return time.perf_counter() - start


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="small trees, few repeats")
    options = parser.parse_args(argv)
    repeats = 3 if options.quick else 9
    mesh = pzs.make_mesh({"data": 4, "model": 2})
    print("arrays   ours us/array   penzai us/array   bare tree map   penzai/ours   map/ours")
    for count in (1_000, 10_000) if options.quick else (1_000, 10_000, 100_000):
        tree = tree_of(count)
        contenders = {
            "ours": lambda tree=tree: pzs.name_to_name_sharding(tree, mesh, RULES),
            "penzai": lambda tree=tree: sharding_util.name_to_name_sharding(tree, mesh, RULES),
            "map": lambda tree=tree: jax.tree_util.tree_map(lambda leaf: leaf, tree),
        }
        times = {name: [] for name in contenders}
        for _ in range(repeats):
            for name, function in contenders.items():
                times[name].append(seconds(function) / count * 1e6)
        ours, penzai, bare = (statistics.median(times[name]) for name in contenders)
        print(
            f"{count:6d} {ours:14.2f} {penzai:17.2f} {bare:15.2f} "
            f"{penzai / ours:12.1f}x {bare / ours:9.1f}x"
        )


if __name__ == "__main__":
    main()
