"""Bytes and time of a train step with Penzai's order of axes, and with ``keep_axis_order``.

The two steps take turns in one process; medians are printed. The bytes are those that the compiled
program accesses. ``tests/layouts/test_presets.py`` compares a step with one written by hand.

    python -m benchmarks.axis_order [--rounds N]
"""

import functools
import statistics
import time
from collections.abc import Iterator

import jax
import jax.numpy as jnp
from penzai import pz
from penzai.models.transformer.variants import llamalike_common

import penzai_shard as pzs
from benchmarks.measure import Figure, make_parser, median_ratio, print_figures, take_turns

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


def seconds(step, values) -> float:
    started = time.perf_counter()
    jax.block_until_ready(step(values))
    return time.perf_counter() - started


def measure(rounds: int) -> Iterator[Figure]:
    steps = [compile_step(recipe) for recipe in (pzs.keep_axis_order(), pzs.Recipe())]
    kept, penzai = (step.cost_analysis()["bytes accessed"] / 1e6 for step, _ in steps)
    detail = f"{kept:.0f} MB against {penzai:.0f} MB"
    work = "a train step with keep_axis_order against one without, bytes accessed"
    yield Figure(work, kept / penzai, detail=detail)
    times = take_turns([functools.partial(seconds, *step) for step in steps], rounds)
    detail = "{:.0f} ms against {:.0f} ms".format(*(statistics.median(x) * 1e3 for x in times))
    work = "a train step with keep_axis_order against one without, time"
    yield Figure(work, median_ratio(*times), detail=detail)


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--rounds", type=int, default=15)
    options = parser.parse_args()
    print_figures(measure(1 if options.quick else options.rounds), options)


if __name__ == "__main__":
    main()
