"""Bytes and time of a train step with Penzai's order of axes, and with ``keep_axis_order``.

The two steps take turns in one process; medians are printed. The bytes are those that the compiled
program accesses. ``tests/layouts/test_presets.py`` compares a step with one written by hand.

    python benchmarks/axis_order.py
"""

import statistics
import time

import jax
import jax.numpy as jnp
from penzai import pz
from penzai.models.transformer.variants import llamalike_common

import penzai_shard as pzs

TOKENS = pz.nx.wrap(jnp.arange(8 * 128).reshape(8, 128) % 512, "batch", "seq")
CONFIG = llamalike_common.LlamalikeTransformerConfig(
    num_kv_heads=4,
    query_head_multiplier=2,
    embedding_dim=128,
    projection_dim=16,
    mlp_hidden_dim=512,
    num_decoder_blocks=2,
    vocab_size=512,
    mlp_variant="swiglu",
    tie_embedder_and_logits=False,
)


def compile_step(recipe):
    model = llamalike_common.build_llamalike_transformer(CONFIG, jax.random.key(0))
    slots, values = pz.unbind_params(recipe.apply(model), freeze=True)

    def loss(values):
        logits = pz.bind_variables(slots, values)(TOKENS)
        return jnp.mean(logits.unwrap("batch", "seq", "vocabulary") ** 2)

    return jax.jit(jax.value_and_grad(loss)).lower(values).compile(), values


def main() -> None:
    recipes = {"as it is": pzs.Recipe(), "keep_axis_order": pzs.keep_axis_order()}
    steps = {name: compile_step(recipe) for name, recipe in recipes.items()}
    times: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(15):
        for name, (step, values) in steps.items():
            started = time.perf_counter()
            jax.block_until_ready(step(values))
            times[name].append(time.perf_counter() - started)
    print("| axes | bytes accessed | time |\n|---|---|---|")
    for name, (step, _) in steps.items():
        megabytes = step.cost_analysis()["bytes accessed"] / 1e6
        print(f"| {name} | {megabytes:.1f} MB | {statistics.median(times[name]) * 1e3:.1f} ms |")


if __name__ == "__main__":
    main()
