"""Time of a train step of an edited model, against code written by hand with the same layout.

The model is a stack of residual blocks (norm, two linear layers) of Penzai's, on eight devices
(simulated on a CPU unless there are as many others). Two layouts are compared:

* ``fsdp``: each block under ``ShardMapped``, against raw arrays under ``jax.shard_map`` with the
  gathers written out;
* ``constrained``: parameters placed by name and ``ConstrainShardingByName`` after each block,
  against raw arrays and ``jax.lax.with_sharding_constraint``.

``forward`` is a call of the model under ``Jitted``, against a jitted function of the raw arrays;
``train`` is loss, gradients and update. Measured in turns in one process, medians. The figure is
edited over hand-written; lower is better.
"""

import argparse
import os
import re
import statistics
import time
from collections.abc import Callable
from typing import Any

if "xla_force_host_platform_device_count" not in os.environ.get("XLA_FLAGS", ""):
    os.environ["XLA_FLAGS"] = (
        os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8"
    )

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec
from penzai import pz

from penzai_shard.layers import ConstrainShardingByName, Jitted, ShardMapped
from penzai_shard.meshes import make_mesh
from penzai_shard.placement import name_to_name_device_put

RULES = {"embedding": "data", "batch": "data"}
ACTIVATION_RULES = {"batch": "data"}


def block(name: str, rng: Any, embedding: int, neurons: int) -> Any:
    """One residual block."""
    return pz.nn.Residual(
        pz.nn.Sequential(
            [
                pz.nn.RMSLayerNorm.from_config(f"{name}/norm", rng, {"embedding": embedding}),
                pz.nn.Linear.from_config(
                    f"{name}/up", rng, {"embedding": embedding}, {"neurons": neurons}
                ),
                pz.nn.Elementwise(jax.nn.gelu),
                pz.nn.Linear.from_config(
                    f"{name}/down", rng, {"neurons": neurons}, {"embedding": embedding}
                ),
            ]
        )
    )


def raw_parameters(model: Any, mesh: Any) -> list[dict[str, Any]]:
    """The model's parameters as raw arrays, placed by hand."""
    places = {
        "scale": (PartitionSpec(), "norm/scale", ("embedding",)),
        "up": (PartitionSpec("data"), "up", ("embedding", "neurons")),
        "down": (PartitionSpec(None, "data"), "down", ("neurons", "embedding")),
    }
    values = {p.label: p.value for p in pz.unbind_params(model)[1]}
    return [
        {
            key: jax.device_put(
                values[f"block_{i}/{label}.weights"].unwrap(*names), NamedSharding(mesh, spec)
            )
            for key, (spec, label, names) in places.items()
        }
        for i in range(len(model.sublayers))
    ]


def raw_block(parameters: dict[str, Any], x: Any) -> Any:
    """What a block computes, on raw arrays."""
    normed = x * jax.lax.rsqrt(jnp.mean(jnp.square(x), -1, keepdims=True) + 1e-6)
    hidden = jax.nn.gelu((normed * parameters["scale"]) @ parameters["up"])
    return x + hidden @ parameters["down"]


def by_hand(mesh: Any, layout: str) -> Callable[[Any, Any], Any]:
    """The model as one writes it without Penzai."""

    def gathering_block(parameters: Any, x: Any) -> Any:
        whole = {
            "scale": parameters["scale"],
            "up": jax.lax.all_gather(parameters["up"], "data", axis=0, tiled=True),
            "down": jax.lax.all_gather(parameters["down"], "data", axis=1, tiled=True),
        }
        return raw_block(whole, x)

    specs = {
        "scale": PartitionSpec(),
        "up": PartitionSpec("data"),
        "down": PartitionSpec(None, "data"),
    }
    batch = PartitionSpec("data")
    mapped = jax.shard_map(gathering_block, mesh=mesh, in_specs=(specs, batch), out_specs=batch)

    def run(parameters: Any, x: Any) -> Any:
        for of_block in parameters:
            if layout == "fsdp":
                x = mapped(of_block, x)
            else:
                x = raw_block(of_block, x)
                x = jax.lax.with_sharding_constraint(x, NamedSharding(mesh, batch))
        return x

    return run


def edited(model: Any, mesh: Any, layout: str, embedding: int) -> Any:
    """The model edited with this library."""
    if layout == "constrained":
        constraint = ConstrainShardingByName(mesh, ACTIVATION_RULES)
        return pz.select(model).at_instances_of(pz.nn.Residual).insert_after(constraint)

    def fsdp(layer: Any) -> Any:
        return ShardMapped(layer, mesh, RULES, ACTIVATION_RULES, min_size=embedding + 1)

    return pz.select(model).at_instances_of(pz.nn.Residual).apply(fsdp)


def train_step(loss: Callable[[Any, Any], Any], shardings: Any) -> Callable[[Any, Any], Any]:
    """Loss, gradients, and an update."""

    def step(parameters: Any, x: Any) -> Any:
        value, gradients = jax.value_and_grad(loss)(parameters, x)
        return value, jax.tree_util.tree_map(lambda p, g: p - 1e-3 * g, parameters, gradients)

    return jax.jit(step, out_shardings=(None, shardings))


def median_times(calls: dict[str, Callable[[], Any]], rounds: int) -> dict[str, float]:
    """Median seconds of each call, measured in turns."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    for call in calls.values():
        jax.block_until_ready(call())
        jax.block_until_ready(call())
    for _ in range(rounds):
        for name, call in calls.items():
            start = time.perf_counter()
            jax.block_until_ready(call())
            times[name].append(time.perf_counter() - start)
    return {name: statistics.median(seconds) for name, seconds in times.items()}


def program_size(step: Any, parameters: Any, x: Any) -> tuple[int, float]:
    """Collectives and floating-point operations of a compiled step, which no noise touches."""
    compiled = step.lower(parameters, x).compile()
    collectives = re.findall(
        r" (?:all-gather|all-reduce|reduce-scatter|all-to-all|collective-permute)(?:-start)?\(",
        compiled.as_text(),
    )
    return len(collectives), compiled.cost_analysis()["flops"]


def measure(layout: str, blocks: int, embedding: int, batch: int, rounds: int) -> dict[str, Any]:
    """All figures of one layout."""
    mesh = make_mesh({"data": jax.device_count()})
    model = pz.nn.Sequential(
        [block(f"block_{i}", jax.random.key(i), embedding, 4 * embedding) for i in range(blocks)]
    )
    raw = raw_parameters(model, mesh)
    named_x = name_to_name_device_put(
        pz.nx.wrap(jax.random.normal(jax.random.key(9), (batch, embedding))).tag(
            "batch", "embedding"
        ),
        mesh,
        ACTIVATION_RULES,
    )
    raw_x = named_x.data_array
    slots, variables = pz.unbind_params(edited(model, mesh, layout, embedding))
    for variable in variables:
        whole = variable.value.data_array.size <= embedding
        rules = {} if whole else RULES
        variable.value = name_to_name_device_put(variable.value, mesh, rules)
    parameters = tuple(variable.freeze() for variable in variables)

    run = by_hand(mesh, layout)
    jitted_run, jitted_model = jax.jit(run), Jitted(pz.bind_variables(slots, variables))

    def hand_loss(parameters: Any, x: Any) -> Any:
        return jnp.mean(jnp.square(run(parameters, x)))

    def edited_loss(parameters: Any, x: Any) -> Any:
        output = pz.bind_variables(slots, parameters)(x)
        return jnp.mean(jnp.square(output.unwrap("batch", "embedding")))

    hand_step = train_step(hand_loss, jax.tree_util.tree_map(lambda x: x.sharding, raw))
    edited_step = train_step(edited_loss, jax.tree_util.tree_map(lambda x: x.sharding, parameters))
    difference = abs(float(hand_step(raw, raw_x)[0]) - float(edited_step(parameters, named_x)[0]))
    assert difference < 1e-4, difference
    return {
        "layout": layout,
        "program by hand": program_size(hand_step, raw, raw_x),
        "program edited": program_size(edited_step, parameters, named_x),
        **median_times(
            {
                "forward by hand": lambda: jitted_run(raw, raw_x),
                "forward edited": lambda: jitted_model(named_x).data_array,
                "train by hand": lambda: hand_step(raw, raw_x),
                "train edited": lambda: edited_step(parameters, named_x),
            },
            rounds,
        ),
    }


def main(argv: list[str] | None = None) -> list[dict[str, Any]]:
    """Prints the table.

    Args:
        argv: Command line arguments; those of the process by default.

    Returns:
        The figures of each row, times in seconds.
    """
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="a smaller model, fewer rounds")
    options = parser.parse_args(argv)
    blocks, embedding, batch, rounds = (2, 256, 256, 15) if options.quick else (4, 256, 512, 31)
    print(f"{'layout':>12} {'what':>8} {'by hand ms':>11} {'edited ms':>10} {'ratio':>6}")
    rows = []
    for layout in ("fsdp", "constrained"):
        row = measure(layout, blocks, embedding, batch, rounds)
        rows.append(row)
        for what in ("forward", "train"):
            hand, ours = row[f"{what} by hand"], row[f"{what} edited"]
            print(
                f"{layout:>12} {what:>8} {hand * 1e3:>11.2f} {ours * 1e3:>10.2f} "
                f"{ours / hand:>6.3f}"
            )
        (hand_moves, hand_flops), (moves, flops) = row["program by hand"], row["program edited"]
        print(
            f"{layout:>12} compiled train step: {hand_moves} collectives by hand, {moves} edited; "
            f"{flops / hand_flops:.3f} times the floating-point operations"
        )
    return rows


if __name__ == "__main__":
    main()
