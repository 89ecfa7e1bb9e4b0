"""One of the processes that ``penzai-shard run`` starts: it works, and one of them fails.

Usage: ending_script.py PROCESS: that process fails, the others go on.
"""

import sys

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

import penzai_shard as pzs


def main(victim):
    mesh = pzs.make_mesh({"data": 4})
    sharding = NamedSharding(mesh, PartitionSpec("data"))
    x = jax.make_array_from_callback((4,), sharding, lambda index: np.ones(4, np.float32)[index])
    total = jax.jit(lambda x: x.sum())
    for turn in range(10**9):
        jax.block_until_ready(total(x))
        if turn == 3 and jax.process_index() == int(victim):
            print("about to end", flush=True)
            raise ValueError("this cannot go on")


if __name__ == "__main__":
    with pzs.several_processes():
        main(*sys.argv[1:])
