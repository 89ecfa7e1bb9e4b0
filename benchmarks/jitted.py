"""Time of a call of ``Jitted(model)`` against ``jax.jit`` over a list of the model's arrays.

The model is a small transformer, called as a whole, and held by a layer that takes in all of its
arrays and returns its input: then a call is little else than its overhead. Calls take turns in one
process; medians are printed, and the Python functions that a call of Jitted calls.

    python benchmarks/jitted.py [--quick]
"""

import argparse
import gc
import os
import statistics
import sys
import time
from collections.abc import Callable

os.environ["JAX_PLATFORMS"] = "cpu"

import jax
from penzai import pz
from penzai.models.transformer.variants import llamalike_common

import penzai_shard as pzs

FLOOR = 1.26


@pz.pytree_dataclass
class Hold(pz.nn.Layer):
    """Returns its input; the arrays of the layer that it holds count as used."""

    held: pz.nn.Layer

    def __call__(self, x, /, **side_inputs):
        values = jax.tree.leaves(pz.freeze_variables(self.held))
        return jax.lax.optimization_barrier((x, values))[0]


def build_model(blocks: int):
    config = llamalike_common.LlamalikeTransformerConfig(
        num_kv_heads=1,
        query_head_multiplier=1,
        embedding_dim=4,
        projection_dim=4,
        mlp_hidden_dim=4,
        num_decoder_blocks=blocks,
        vocab_size=8,
        mlp_variant="swiglu",
        tie_embedder_and_logits=False,
    )
    return llamalike_common.build_llamalike_transformer(config, jax.random.key(0))


def flat_call(model, x) -> Callable[[], object]:
    """The same call with Penzai's own means: a list of arrays, and ``jax.jit``."""
    slots, variables = pz.unbind_variables(model, freeze=True)
    arrays, definition = jax.tree.flatten((slots, variables))
    run = jax.jit(lambda arrays, x: pz.bind_variables(*definition.unflatten(arrays))(x))
    return lambda: run(arrays, x)


def seconds(call: Callable[[], object], repeats: int = 10) -> float:
    jax.block_until_ready(call())
    started = time.perf_counter()
    for _ in range(repeats):
        result = call()
    jax.block_until_ready(result)
    return (time.perf_counter() - started) / repeats


def count_calls(call: Callable[[], object]) -> int:
    counted = []
    sys.setprofile(lambda frame, event, argument: counted.append(event))
    call()
    sys.setprofile(None)
    return counted.count("call") - 1  # That of the lambda.


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="a fifth of the rounds")
    rounds = 20 if parser.parse_args().quick else 100
    x = pz.nx.wrap(jax.numpy.ones((2, 4), int), "batch", "seq")
    print("| blocks | arrays | called | jax.jit | Jitted | ratio | floor | Python calls |")
    print("|---" * 8 + "|")
    for blocks in (2, 12, 48):
        model = build_model(blocks)
        for name, called in {"held": Hold(model), "whole": model}.items():
            jitted = pzs.Jitted(called)
            calls = flat_call(called, x), lambda jitted=jitted: jitted(x)
            [seconds(call) for call in calls]
            gc.collect()
            gc.disable()
            pairs = [[seconds(call) for call in calls] for _ in range(rounds)]
            flat, own = (statistics.median(column) * 1e6 for column in zip(*pairs, strict=True))
            ratio = statistics.median(own / flat for flat, own in pairs)
            arrays = len(jax.tree.leaves(pz.freeze_variables(model)))
            print(
                f"| {blocks} | {arrays} | {name} | {flat:.0f} µs | {own:.0f} µs | {ratio:.2f}x "
                f"| {FLOOR}x | {count_calls(calls[1])} |",
                flush=True,
            )


if __name__ == "__main__":
    main()
