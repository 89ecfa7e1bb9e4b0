"""What it takes to build a model sharded: CPU seconds and peak memory, as ratios.

Each pair is measured in one process by turns, with nothing compiled before; medians are printed.
Peak memory is that of a process that builds one model.

    python -m benchmarks.sharded_init [--rounds N] [--blocks N]
"""

import functools
import os
import resource
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8"

import jax
import jax.numpy as jnp
from penzai import pz
from penzai.models.transformer.variants import llamalike_common
from penzai.toolshed import sharding_util

import penzai_shard as pzs
from benchmarks.measure import (
    Figure,
    make_parser,
    median_ratio,
    print_figures,
    run_anew,
    take_turns,
)

RULES = {"embedding": "data", "neurons": "model", "heads": "model", "vocabulary": "model"}
# Blocks, embedding, neurons, vocabulary.
DEEP, QUICK_DEEP = (96, 64, 128, 256), (4, 64, 128, 256)
LARGE, QUICK_LARGE = (20, 1024, 2816, 16384), (1, 1024, 2816, 2048)
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


def measure_deep(sizes: tuple[int, ...]) -> Figure:
    builds = [functools.partial(build, sizes) for build in (build_sharded, build_by_penzai)]
    timers = [functools.partial(cpu_seconds, build) for build in builds]
    # Penzai compiles each array by itself: one round is long enough to be steady.
    (ours,), (theirs,) = take_turns(timers, rounds=1, warm_up=0)
    detail = f"{ours:.1f} s against {theirs:.1f} s"
    work = f"sharded_init of {sizes[0]} small blocks, times less CPU time than penzai.toolshed's"
    return Figure(work, theirs / ours, floor=20, at_least=True, digits=1, detail=detail)


def measure_large(sizes: tuple[int, ...], rounds: int) -> Iterator[Figure]:
    # Before this process is large: a new one counts the memory of its parent.
    texts = [run_anew("sharded_init", "--peak", *map(str, sizes)) for _ in range(rounds)]
    peak = statistics.median(map(float, texts))
    structs = [
        jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=array.sharding)
        for array in build_sharded(sizes)
        if array.size > MOST_SMALL_ELEMENTS
    ]
    size = f"{sum(s.size * s.dtype.itemsize for s in structs) / 2**20:,.0f} MiB"
    builds = (
        functools.partial(build_sharded, sizes),
        functools.partial(make_random_numbers, structs),
    )
    timers = [functools.partial(cpu_seconds, build) for build in builds]
    found = take_turns(timers, rounds, warm_up=0)
    detail = "{:.1f} s against {:.1f} s".format(*map(statistics.median, found))
    work = f"sharded_init of {size}, CPU time against the random numbers of its arrays"
    yield Figure(work, median_ratio(*found), floor=1.3, detail=detail)
    yield Figure(f"sharded_init of {size}, peak memory over its arrays", peak, floor=1.2)


def measure(deep: tuple[int, ...], large: tuple[int, ...], rounds: int) -> Iterator[Figure]:
    yield from measure_large(large, rounds)
    yield measure_deep(deep)


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--rounds", type=int, default=3, help="of the large model")
    parser.add_argument("--blocks", type=int, default=DEEP[0], help="of the deep model")
    parser.add_argument("--peak", nargs="+", type=int, help="one round: sizes of the model")
    options = parser.parse_args()
    if options.peak:
        print(peak_memory(tuple(options.peak)))
        return
    deep, large, rounds = (options.blocks, *DEEP[1:]), LARGE, options.rounds
    if options.quick:
        deep, large, rounds = QUICK_DEEP, QUICK_LARGE, 1
    print_figures(measure(deep, large, rounds), options)


if __name__ == "__main__":
    main()
