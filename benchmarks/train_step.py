"""Per-step overhead of a train step, against a hand-written one and penzai's trainer.

One process, interleaved rounds, medians. The models are Llama-like with tiny dimensions, and the
loss is a sum of squares over every parameter, not a forward pass: what is left to measure is
dispatch, the same arithmetic of adamw for all, and the Python time of each way of stepping. Times
are per step of a loop that waits for the device once per round, as training loops do. Rounds are
short and ratios are taken round by round, so that other load on the machine hits all ways alike.

    python benchmarks/train_step.py [--quick]
"""

import argparse
import gc
import statistics
import time
from typing import Any

import jax
import jax.numpy as jnp
import optax
from penzai import pz
from penzai.models.transformer.variants import llamalike_common
from penzai.toolshed import basic_training

from penzai_shard.training import TrainState, build_train_step_fn

OPTIMIZER = optax.adamw(1e-3)


def build_model(blocks):
    """A Llama-like model of some depth with negligible dimensions."""
    config = llamalike_common.LlamalikeTransformerConfig(
        num_kv_heads=1,
        query_head_multiplier=1,
        embedding_dim=2,
        projection_dim=2,
        mlp_hidden_dim=2,
        num_decoder_blocks=blocks,
        vocab_size=2,
        mlp_variant="swiglu",
        tie_embedder_and_logits=False,
    )
    return llamalike_common.build_llamalike_transformer(
        config, init_base_rng=jax.random.key(0), name="transformer"
    )


def sum_of_squares(arrays, x):
    return x * sum(jnp.sum(array**2) for array in arrays)


def loss_fn(model, rng, state, x):
    del rng
    values = pz.select(model).at_instances_of(pz.ParameterValue).get_sequence()
    loss = sum_of_squares(jax.tree.leaves([value.value for value in values]), x)
    return loss, state, loss


def hand_written(model):
    """What one writes who wants no overhead: a donated jit over lists of raw arrays."""
    _, frozen = pz.unbind_params(model, freeze=True)
    params = [jnp.copy(leaf) for leaf in jax.tree.leaves([p.value for p in frozen])]
    opt_leaves, opt_def = jax.tree.flatten(OPTIMIZER.init(params))
    opt_leaves = [jnp.copy(leaf) for leaf in opt_leaves]

    def train_step(params, opt_leaves, x):
        loss, grads = jax.value_and_grad(sum_of_squares)(params, x)
        updates, new_state = OPTIMIZER.update(grads, opt_def.unflatten(opt_leaves), params)
        return optax.apply_updates(params, updates), jax.tree.leaves(new_state), loss

    jitted = jax.jit(train_step, donate_argnums=(0, 1))
    carried = [params, opt_leaves]

    def run(steps, x):
        params, opt_leaves = carried
        for _ in range(steps):
            params, opt_leaves, loss = jitted(params, opt_leaves, x)
        jax.block_until_ready((params, loss))
        carried[:] = params, opt_leaves

    return run


def ours(model):
    state = TrainState.initial_state(copied(model), OPTIMIZER, jax.random.key(1))
    step = build_train_step_fn(loss_fn, donate_params_and_state=True)
    carried = [state]

    def run(steps, x):
        state = carried[0]
        for _ in range(steps):
            state, loss = step(state, x=x)
        jax.block_until_ready((state.step, loss))
        carried[0] = state

    return run


def penzai_trainer(model):
    trainer = basic_training.StatefulTrainer.build(
        root_rng=jax.random.key(1),
        model=copied(model),
        optimizer_def=OPTIMIZER,
        loss_fn=loss_fn,
        donate_states=True,
    )

    def run(steps, x):
        loss = None
        for _ in range(steps):
            loss = trainer.step(x=x)
        jax.block_until_ready(loss)

    return run


def copied(model):
    unbound, variables = pz.unbind_variables(model, freeze=True)
    return pz.bind_variables(unbound, jax.tree.map(jnp.copy, variables), unfreeze_as_copy=True)


def measure(blocks, rounds, steps) -> dict[str, Any]:
    """Median seconds per step of each way, at one depth."""
    model = build_model(blocks)
    x = jnp.asarray(1e-3)
    ways = {
        "hand-written": (hand_written(model), steps),
        "penzai_shard": (ours(model), steps),
        "penzai": (penzai_trainer(model), 1),
    }
    count = len(pz.unbind_params(model)[1])
    times: dict[str, list[float]] = {name: [] for name in ways}
    for run, _ in ways.values():
        run(3, x)
    gc.collect()
    gc.disable()
    try:
        for i in range(rounds):
            for name, (run, number) in ways.items():
                if name == "penzai" and i % 5:
                    continue  # Far slower, so fewer rounds say enough.
                start = time.perf_counter()
                run(number, x)
                times[name].append((time.perf_counter() - start) / number)
    finally:
        gc.enable()
    ratios = [a / b for a, b in zip(times["penzai_shard"], times["hand-written"], strict=True)]
    medians = {name: statistics.median(values) for name, values in times.items()}
    return {
        "blocks": blocks,
        "parameters": count,
        "seconds": medians,
        "ratio": statistics.median(ratios),
        "penzai_ratio": medians["penzai"] / medians["penzai_shard"],
    }


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="few rounds")
    parser.add_argument("--blocks", type=int, nargs="+", default=[12, 48])
    arguments = parser.parse_args(argv)
    rounds, steps = (60, 10) if arguments.quick else (200, 20)
    results = []
    print("one train step, adamw, negligible compute (sum of squares over every parameter)")
    for blocks in arguments.blocks:
        result = measure(blocks, rounds, steps)
        results.append(result)
        seconds = result["seconds"]
        print(
            f"{blocks} blocks, {result['parameters']} parameters: "
            f"hand-written {seconds['hand-written'] * 1e3:.2f} ms, "
            f"penzai_shard {seconds['penzai_shard'] * 1e3:.2f} ms, "
            f"penzai's trainer {seconds['penzai'] * 1e3:.1f} ms; "
            f"{result['ratio']:.2f}x the hand-written, "
            f"{result['penzai_ratio']:.0f}x faster than penzai's"
        )
    return results


if __name__ == "__main__":
    main()
