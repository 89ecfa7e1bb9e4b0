"""What it takes to build a model sharded: CPU seconds and peak memory, as ratios.

Each pair is measured in one process by turns, with nothing compiled before; medians are printed.
Peak memory is that of a process that builds one model.

    python benchmarks/sharded_init.py [--quick] [--rounds N]
"""

import argparse
import functools
import os
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8"

import jax
import jax.numpy as jnp
from penzai import pz
from penzai.models.transformer.variants import llamalike_common
from penzai.toolshed import sharding_util

import penzai_shard as pzs

RULES = {"embedding": "data", "neurons": "model", "heads": "model", "vocabulary": "model"}
# Blocks, embedding, neurons, vocabulary.
DEEP, QUICK_DEEP = (96, 64, 128, 256), (16, 64, 128, 256)
LARGE, QUICK_LARGE = (20, 1024, 2816, 16384), (4, 1024, 2816, 8192)
# Smaller arrays are constants and scales, which take no random numbers.
MOST_SMALL_ELEMENTS = 1024


def build_transformer(key: jax.Array, blocks: int, embedding: int, neurons: int, vocabulary: int):
    config = llamalike_common.LlamalikeTransformerConfig(
        num_kv_heads=8,
        query_head_multiplier=1,
        embedding_dim=embedding,
        projection_dim=embedding // 8,
        mlp_hidden_dim=neurons,
        num_decoder_blocks=blocks,
        vocab_size=vocabulary,
        mlp_variant="swiglu",
        tie_embedder_and_logits=False,
        rope_wavelength=10000,
        rms_norm_eps=1e-6,
        attention_type=llamalike_common.AttentionTypeGlobalCausal(),
        activation_dtype=jnp.float32,
        parameter_dtype=jnp.float32,
    )
    return llamalike_common.build_llamalike_transformer(config, key, name="model")


def build_sharded(sizes: tuple[int, ...]) -> list[jax.Array]:
    mesh = pzs.make_mesh({"data": 4, "model": 2})
    model = pzs.sharded_init(build_transformer, jax.random.key(0), *sizes, mesh=mesh, rules=RULES)
    return jax.tree.leaves(pz.unbind_variables(model, freeze=True))


def build_by_penzai(sizes: tuple[int, ...]) -> list[jax.Array]:
    mesh = pzs.make_mesh({"data": 4, "model": 2})
    build = functools.partial(build_transformer, jax.random.key(0), *sizes)
    model = sharding_util.sharded_init(build, mesh=mesh, axis_name_to_mesh_name=RULES)
    return jax.tree.leaves(pz.unbind_variables(model, freeze=True))


def make_random_numbers(structs: list[Any]) -> list[jax.Array]:
    @functools.cache
    def compile_normal(shape: tuple[int, ...], sharding: Any):
        return jax.jit(
            lambda seed: jax.random.normal(jax.random.key(seed), shape), out_shardings=sharding
        )

    return [compile_normal(s.shape, s.sharding)(seed) for seed, s in enumerate(structs)]


def cpu_seconds(build: Callable[[], list[jax.Array]]) -> float:
    jax.clear_caches()
    started = time.process_time()
    jax.block_until_ready(build())
    return time.process_time() - started


def peak_memory(sizes: tuple[int, ...]) -> float:
    """Resident memory that building a model adds at most, over the bytes of its arrays."""
    # Starts the compiler and the devices.
    jax.block_until_ready(jax.jit(lambda: jax.random.normal(jax.random.key(0), (16,)))())
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    arrays = jax.block_until_ready(build_sharded(sizes))
    unit = 1 if sys.platform == "darwin" else 1024
    added = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * unit
    return added / sum(part.data.nbytes for array in arrays for part in array.addressable_shards)


def print_row(work: str, other: str, rounds: int, *builds: Callable[[], list[jax.Array]]) -> None:
    pairs = [[cpu_seconds(build) for build in builds] for _ in range(rounds)]
    ours, theirs = (statistics.median(column) for column in zip(*pairs, strict=True))
    print(
        f"| {work} | {ours:.1f} s | {other} | {theirs:.1f} s | {ours / theirs:.2f}x |", flush=True
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="smaller models")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--peak", nargs="+", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.peak:
        print(peak_memory(tuple(options.peak)))
        return
    deep, large = (QUICK_DEEP, QUICK_LARGE) if options.quick else (DEEP, LARGE)
    command = [sys.executable, __file__, "--peak", *map(str, large)]
    # Before this process is large: a new one counts the memory of its parent.
    peaks = [
        float(subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout)
        for _ in range(options.rounds)
    ]
    structs = [
        jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=array.sharding)
        for array in build_sharded(large)
        if array.size > MOST_SMALL_ELEMENTS
    ]
    size = f"{sum(s.size * s.dtype.itemsize for s in structs) / 2**20:,.0f} MiB"
    print("| sharded_init | CPU | against | CPU | ratio |\n|---|---|---|---|---|")
    ours, theirs = (functools.partial(f, deep) for f in (build_sharded, build_by_penzai))
    print_row(f"{deep[0]} small blocks", "penzai", options.rounds, ours, theirs)
    ours, theirs = (
        functools.partial(build_sharded, large),
        functools.partial(make_random_numbers, structs),
    )
    print_row(size, "its random numbers", options.rounds, ours, theirs)
    print(f"| {size} | | peak memory over its arrays | | {statistics.median(peaks):.2f}x |")


if __name__ == "__main__":
    main()
