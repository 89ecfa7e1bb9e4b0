"""How fast simulated devices are: what ``Hardware.read("cpu:8")`` says of them.

Simulated devices share the cores of one machine and its memory. So nothing overlaps: what any
device computes, sends, or reads and writes takes some core's time. Figures are for one second of
one core, that of the process on all cores, which other load on the machine touches little; medians.

``computing`` is a product of matrices in float32, as in the layers of a small model. ``sending``
are collectives of float32, by the bytes that a ring would send. ``memory`` is adamw, by the bytes
of its moments, which it reads and writes.

    python -m benchmarks.simulated_hardware [--rounds 15]
"""

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import benchmarks.simulated_devices  # noqa: F401 isort: skip
import jax
import jax.numpy as jnp
import optax
from jax.sharding import NamedSharding, PartitionSpec

import penzai_shard as pzs

DEVICES = 8
MIB = 2**20


def seconds(run: Callable[[], Any], rounds: int) -> float:
    """Median seconds of the processor, after two runs that warm up."""
    found = []
    for _ in range(rounds + 2):
        start = time.process_time()
        jax.block_until_ready(run())
        found.append(time.process_time() - start)
    return statistics.median(found[2:])


def placed(array: jax.Array, spec: PartitionSpec) -> jax.Array:
    """An array on all devices."""
    return jax.device_put(array, NamedSharding(pzs.make_mesh({"data": DEVICES}), spec))


matmul = jax.jit(jnp.matmul)


def computing(rows: int, wide: int, narrow: int, rounds: int) -> float:
    """Operations per second of a product whose rows are split."""
    split, whole = PartitionSpec("data"), PartitionSpec()
    x = placed(jnp.ones((rows, narrow)), split)
    w = placed(jnp.ones((narrow, wide)), whole)
    return 2 * rows * wide * narrow / seconds(lambda: matmul(x, w), rounds)


def sending(kind: str, mib: int, rounds: int) -> float:
    """Bytes per second that all devices together send for a collective, as a ring would."""
    mesh = pzs.make_mesh({"data": DEVICES})
    split, whole = PartitionSpec("data"), PartitionSpec()
    count = mib * MIB // 4
    if kind == "all-gather":
        x = placed(jnp.ones(count), split)
        collective = lambda x: jax.lax.all_gather(x, "data", tiled=True)  # noqa: E731
        run = jax.jit(
            jax.shard_map(collective, mesh=mesh, in_specs=split, out_specs=whole, check_vma=False)
        )
        sent = count * 4 * (DEVICES - 1)
    else:
        x = placed(jnp.ones((DEVICES, count)), split)
        run = jax.jit(
            jax.shard_map(
                lambda x: jax.lax.psum(x, "data"), mesh=mesh, in_specs=split, out_specs=whole
            )
        )
        sent = 2 * count * 4 * (DEVICES - 1)
    return sent / seconds(lambda: run(x), rounds)


def memory(mib: int, rounds: int) -> float:
    """Bytes per second of the moments that an update reads and writes."""
    params = placed(jnp.ones(mib * MIB // 4), PartitionSpec())
    optimizer = optax.adamw(1e-3)
    state = [params, optimizer.init(params)]

    @jax.jit
    def update(gradients: Any, params: Any, moments: Any) -> Any:
        updates, moments = optimizer.update(gradients, moments, params)
        return optax.apply_updates(params, updates), moments

    def run() -> Any:
        state[:] = update(params, *state)
        return state

    return 2 * 2 * params.nbytes * DEVICES / seconds(run, rounds)


def main() -> None:
    """Prints the figures."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=15)
    rounds = parser.parse_args().rounds
    for rows, wide, narrow in ((2048, 768, 256), (2048, 256, 768), (512, 2048, 512)):
        found = computing(rows, wide, narrow, rounds)
        print(f"computing {rows} x {narrow} x {wide}: {found / 1e9:.0f} billion operations")
    for kind in ("all-gather", "all-reduce"):
        for mib in (1, 8):
            print(f"sending, {kind} of {mib} MiB: {sending(kind, mib, rounds) / 1e9:.1f} GB")
    for mib in (1, 8):
        print(f"memory, {mib} MiB of parameters: {memory(mib, rounds) / 1e9:.1f} GB")


if __name__ == "__main__":
    main()
