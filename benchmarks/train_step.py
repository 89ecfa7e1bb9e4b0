"""Time to dispatch a train step, against the same step written by hand over dictionaries of arrays.

The models compute next to nothing, so that what is measured is the way of a call to its program:
every array of model and optimizer goes in and comes out. The two take turns in one process; medians
are printed, and the median of the ratios of turns.

    python benchmarks/train_step.py [--rounds N]
"""

import argparse
import gc
import statistics
import time

import jax
import jax.numpy as jnp
import optax
from penzai.models.transformer.variants import llamalike_common

import penzai_shard as pzs

BLOCKS = (2, 12, 24)
OPTIMIZER = optax.adamw(1e-3)


def build(blocks: int):
    config = llamalike_common.LlamalikeTransformerConfig(
        num_kv_heads=2,
        query_head_multiplier=2,
        embedding_dim=8,
        projection_dim=2,
        mlp_hidden_dim=16,
        num_decoder_blocks=blocks,
        vocab_size=16,
        mlp_variant="swiglu",
        tie_embedder_and_logits=False,
    )
    return llamalike_common.build_llamalike_transformer(config, jax.random.key(0))


def sum_arrays(arrays, x):
    return sum((array * x).sum() for array in arrays)


def loss_fn(model, rng, state, x):
    arrays = [leaf for leaf in jax.tree.leaves(model) if leaf.ndim]
    return sum_arrays(arrays, x), state, {}


def make_ours(state):
    step = pzs.build_train_step_fn(loss_fn, donate_params_and_state=True, step_metrics=["loss"])

    def run(x):
        nonlocal state
        state, aux = step(state, x=x)
        return aux["loss"]

    return run


def make_by_hand(state):
    params = jax.tree.map(jnp.copy, state.trained_arrays)
    held = params, OPTIMIZER.init(params)

    def update(held, x):
        params, opt_state = held
        loss, gradients = jax.value_and_grad(lambda p: sum_arrays(p.values(), x))(params)
        updates, opt_state = OPTIMIZER.update(gradients, opt_state, params)
        return (optax.apply_updates(params, updates), opt_state), loss

    jitted = jax.jit(update, donate_argnums=0)

    def run(x):
        nonlocal held
        held, loss = jitted(held, x)
        return loss

    return run


def measure(blocks: int, rounds: int) -> tuple[int, list[float], list[float]]:
    """Arrays, and seconds of each call by us and by hand."""
    state = pzs.TrainState.initial_state(build(blocks), OPTIMIZER, jax.random.key(0))
    count, x = len(jax.tree.leaves(state)), jnp.ones(())
    runs = make_ours(state), make_by_hand(state)
    for run in runs:
        jax.block_until_ready([run(x) for _ in range(3)])
    times: tuple[list[float], list[float]] = ([], [])
    gc.disable()
    for turn in range(rounds):
        # Whoever is first finds colder caches.
        for which in (0, 1) if turn % 2 else (1, 0):
            started = time.perf_counter()
            loss = runs[which](x)
            times[which].append(time.perf_counter() - started)
            jax.block_until_ready(loss)
    gc.enable()
    return count, *times


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=400)
    options = parser.parse_args()
    print("| blocks | arrays | ours | by hand | ratio |")
    print("|---" * 5 + "|")
    for blocks in BLOCKS:
        count, ours, hand = measure(blocks, options.rounds)
        ratio = statistics.median(a / b for a, b in zip(ours, hand, strict=True))
        a, b = (statistics.median(times) * 1e3 for times in (ours, hand))
        print(f"| {blocks} | {count} | {a:.2f} ms | {b:.2f} ms | {ratio:.3f}x |", flush=True)


if __name__ == "__main__":
    main()
