"""Time and peak memory of building a model sharded, ours against penzai's.

Each measurement is a process of its own with 8 simulated devices, so that nothing is compiled
already and the peak of resident memory is that of one initialisation. Time includes tracing and
compiling, which is most of it.

    python benchmarks/sharded_init.py [--quick] [--repeats N] [--reference-repeats N]
"""

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

# Blocks, widths and rules of the models; heads x projection is the embedding's length.
MODELS = {
    "1.1 GB in 183 parameters": {"blocks": 20, "embedding": 1024, "mlp": 2816, "vocabulary": 16384},
    "96 small blocks in 867 parameters": {
        "blocks": 96,
        "embedding": 64,
        "mlp": 128,
        "vocabulary": 256,
    },
}
QUICK_MODELS = {
    "70 MB in 39 parameters": {"blocks": 4, "embedding": 512, "mlp": 1408, "vocabulary": 4096},
    "16 small blocks in 147 parameters": {
        "blocks": 16,
        "embedding": 64,
        "mlp": 128,
        "vocabulary": 256,
    },
}
RULES = {"embedding": "data", "neurons": "model", "heads": "model", "vocabulary": "model"}
IMPLEMENTATIONS = ("penzai_shard", "penzai")


def build_initializer(blocks: int, embedding: int, mlp: int, vocabulary: int) -> Callable[..., Any]:
    import jax.numpy as jnp
    from penzai.models.transformer.variants import llamalike_common

    heads = 8
    config = llamalike_common.LlamalikeTransformerConfig(
        num_kv_heads=heads,
        query_head_multiplier=1,
        embedding_dim=embedding,
        projection_dim=embedding // heads,
        mlp_hidden_dim=mlp,
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
    return lambda key: llamalike_common.build_llamalike_transformer(config, key, name="model")


def peak_bytes() -> int:
    """The highest resident memory of this process so far."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def measure(implementation: str, model: dict[str, int]) -> dict[str, float]:
    """Builds one model in this process and says what it took."""
    import jax
    from penzai import pz
    from penzai.toolshed import sharding_util

    from penzai_shard.meshes import make_mesh
    from penzai_shard.placement import sharded_init

    initialize = sharded_init if implementation == "penzai_shard" else sharding_util.sharded_init
    mesh = make_mesh({"data": 4, "model": 2})
    initializer = build_initializer(**model)
    key = jax.random.key(0)
    # The compiler and the devices are started before the clock is.
    jax.block_until_ready(jax.jit(lambda key: jax.random.normal(key, (16,)))(key))

    memory_before = peak_bytes()
    cpu_before = time.process_time()
    started = time.perf_counter()
    built = initialize(initializer, key, mesh=mesh, axis_name_to_mesh_name=RULES)
    arrays = jax.tree.leaves(pz.unbind_variables(built, freeze=True))
    jax.block_until_ready(arrays)
    seconds = time.perf_counter() - started
    size = sum(shard.data.nbytes for array in arrays for shard in array.addressable_shards)
    return {
        "seconds": seconds,
        "cpu_seconds": time.process_time() - cpu_before,
        "peak_per_size": (peak_bytes() - memory_before) / size,
        "size": size,
        "parameters": len(pz.unbind_params(built)[1]),
    }


def measure_in_new_process(implementation: str, model: dict[str, int]) -> dict[str, float]:
    environment = os.environ | {
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": "--xla_force_host_platform_device_count=8",
    }
    done = subprocess.run(
        [sys.executable, __file__, "--measure", implementation, json.dumps(model)],
        env=environment,
        check=True,
        capture_output=True,
        text=True,
    )
    return json.loads(done.stdout.splitlines()[-1])


def medians(measurements: list[dict[str, float]]) -> dict[str, float]:
    return {
        name: statistics.median(measured[name] for measured in measurements)
        for name in measurements[0]
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="smaller models")
    parser.add_argument("--repeats", type=int, default=3, help="of ours; medians are printed")
    parser.add_argument("--reference-repeats", type=int, default=1, help="of penzai's")
    parser.add_argument("--measure", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.measure:
        implementation, model = options.measure
        print(json.dumps(measure(implementation, json.loads(model))))
        return
    for name, model in (QUICK_MODELS if options.quick else MODELS).items():
        ours, reference = (
            medians([measure_in_new_process(implementation, model) for _ in range(repeats)])
            for implementation, repeats in zip(
                IMPLEMENTATIONS, (options.repeats, options.reference_repeats), strict=True
            )
        )
        print(f"{name} ({ours['size'] / 2**30:.2f} GiB, {ours['parameters']:.0f} parameters)")
        for label, measured in zip(IMPLEMENTATIONS, (ours, reference), strict=True):
            print(
                f"  {label:<13} {measured['seconds']:7.2f} s  (processor "
                f"{measured['cpu_seconds']:7.2f} s)  peak {measured['peak_per_size']:6.2f} x model"
            )
        print(
            f"  faster        {reference['seconds'] / ours['seconds']:7.1f} x  (processor "
            f"{reference['cpu_seconds'] / ours['cpu_seconds']:7.1f} x)"
        )


if __name__ == "__main__":
    main()
