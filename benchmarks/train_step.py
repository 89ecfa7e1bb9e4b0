"""Time to dispatch a train step, against the same step written by hand over dictionaries of arrays.

The models compute next to nothing, so that what is measured is the way of a call to its program:
every array of model and optimizer goes in and comes out. The two take turns in one process; medians
are printed, and the median of the ratios of turns.

    python -m benchmarks.train_step [--rounds N]
"""

import functools
import gc
import statistics
import time
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import optax
from penzai.models.transformer.variants import llamalike_common

import penzai_shard as pzs
from benchmarks.measure import Figure, make_parser, median_ratio, print_figures, take_turns

DEPTHS = (2, 12, 24)
FLOOR = 1.05
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


def seconds(run, x) -> float:
    """Time until a call returns, which is before its program ends."""
    started = time.perf_counter()
    loss = run(x)
    found = time.perf_counter() - started
    jax.block_until_ready(loss)
    return found


def measure(depths: tuple[int, ...], rounds: int) -> Iterator[Figure]:
    for blocks in depths:
        state = pzs.TrainState.initial_state(build(blocks), OPTIMIZER, jax.random.key(0))
        count, x = len(jax.tree.leaves(state)), jnp.ones(())
        timers = [
            functools.partial(seconds, run, x) for run in (make_ours(state), make_by_hand(state))
        ]
        gc.collect()
        gc.disable()
        ours, hand = take_turns(timers, rounds, warm_up=4)
        gc.enable()
        medians = [statistics.median(column) * 1e3 for column in (ours, hand)]
        detail = "{:.2f} ms against {:.2f} ms, {} arrays".format(*medians, count)
        ratio = median_ratio(ours, hand)
        # Next to few arrays, the time of any call shows.
        floor = FLOOR if blocks == max(DEPTHS) else None
        work = f"dispatch of a train step, {blocks} blocks of adamw, against one by hand"
        yield Figure(work, ratio, floor=floor, detail=detail)


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--rounds", type=int, default=400)
    options = parser.parse_args()
    depths, rounds = (DEPTHS[:1], 10) if options.quick else (DEPTHS, options.rounds)
    print_figures(measure(depths, rounds), options)


if __name__ == "__main__":
    main()
