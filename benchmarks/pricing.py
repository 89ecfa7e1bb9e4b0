"""Time and peak memory of planning and pricing large models at the shell, and of reading programs.

Each contender is a process of its own, so that nothing is imported or compiled already. Seconds are
those of the processor, which other load on the machine touches little, of the process and of those
that it starts; memory is the highest resident of any of them. What is asked of each: a plan of a
model of 70B parameters in 80 blocks under 10 s and 1 GB, as a table and as JSON, and the price of a
training step on 512 simulated devices under 90 s.

``read`` compiles the training step of a small transformer, whose blocks are not in a loop, and says
how much longer it takes to find out what each collective moves for whom, and what the memory is.

    python -m benchmarks.pricing [--quick] [--rounds 3]
"""

import argparse
import dataclasses
import json
import os
import pathlib
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from typing import Any

MODEL = "llama-3-70b"
PLAN = ["-m", "penzai_shard", "plan", MODEL, "--mesh", "data=16,model=16"]
PRICE = ["-m", "penzai_shard", "price", "llama-3-8b", "--mesh", "data=64,model=8"]
PRICE += ["--batch", "512", "--seq", "4096", "--json"]
READ = ["-m", "benchmarks.pricing", "--read"]
CONTENDERS = {
    f"plan {MODEL}, 16x16": PLAN,
    f"plan {MODEL}, 16x16, as JSON": [*PLAN, "--json"],
    "price llama-3-8b, 64x8 simulated": PRICE,
    "read a step of 32 blocks": [*READ, "32"],
}
SMALL_PRICE = ["-m", "penzai_shard", "price", "pythia-14m", "--mesh", "data=4,model=2"]
QUICK_CONTENDERS = {
    f"plan {MODEL}, 16x16, as JSON": [*PLAN, "--json"],
    "price pythia-14m, 4x2 simulated": [*SMALL_PRICE, "--batch", "8", "--seq", "128", "--json"],
    "read a step of 4 blocks": [*READ, "4"],
}


@dataclasses.dataclass(frozen=True)
class Measured:
    """One run of a contender.

    Attributes:
        elapsed: Seconds by the clock.
        processor: Seconds of all its processes on all cores.
        peak: The highest resident memory of any of them, in bytes.
        output: What it printed.
    """

    elapsed: float
    processor: float
    peak: int
    output: str


def measured(arguments: Sequence[str]) -> Measured:
    """Runs Python with some arguments.

    Raises:
        RuntimeError: It failed.
    """
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": str(_ROOT)}
    # A program that is compiled already would cost nothing.
    environment.pop("JAX_COMPILATION_CACHE_DIR", None)
    with tempfile.TemporaryFile("w+") as printed:
        start = time.perf_counter()
        command = [sys.executable, *arguments]
        process = subprocess.Popen(command, stdout=printed, env=environment)
        # Of the process and of those that it has waited for.
        _, status, usage = os.wait4(process.pid, 0)
        elapsed = time.perf_counter() - start
        process.returncode = os.waitstatus_to_exitcode(status)
        if process.returncode:
            raise RuntimeError(f"{' '.join(command)} ended with {process.returncode}")
        printed.seek(0)
        return Measured(
            elapsed, usage.ru_utime + usage.ru_stime, usage.ru_maxrss * 1024, printed.read()
        )


_ROOT = pathlib.Path(__file__).parents[1]


def read(blocks: int) -> dict[str, Any]:
    """Compiles the training step of so many blocks for 4x2 simulated devices, and reads it.

    Args:
        blocks: How many.

    Returns:
        Processor seconds of both, and how much there was to read.
    """
    import benchmarks.simulated_devices  # noqa: F401, I001 - before JAX
    import jax
    import jax.numpy as jnp
    import optax
    from penzai import pz

    import penzai_shard as pzs
    from benchmarks.memory_at_scale import loss_fn
    from benchmarks.sharded_init import build_initializer

    mesh = pzs.make_mesh({"data": 4, "model": 2})
    layout = pzs.Layout.two_dimensional(min_size=0)
    model = pzs.abstract_model(build_initializer(blocks, 64, 128, 256), jax.random.key(0))
    edited = layout.recipe(model, mesh).apply(model)
    state = pzs.TrainState.initial_state(edited, optax.adamw(1e-3), jax.random.key(0))
    planned = layout.plan(state, mesh).restore_structs()
    tokens = jax.eval_shape(lambda: pz.nx.wrap(jnp.zeros((8, 33), jnp.int32)).tag("batch", "seq"))
    batch = pzs.shard_batch(tokens, mesh, {"batch": "data"})
    start = time.process_time()
    program = pzs.compile_step(pzs.build_train_step_fn(loss_fn), planned, tokens=batch)
    compiled = time.process_time()
    traffic, memory = pzs.collectives(program), pzs.device_memory(program)
    printed = f"{traffic}\n{memory}"
    return {
        "compile": compiled - start,
        "read": time.process_time() - compiled,
        "instructions": sum(1 for _ in program.module),
        "collectives": len(traffic.collectives),
        "unattributed": len(traffic.unattributed),
        "lines": printed.count("\n"),
    }


def _said(figures: Mapping[str, Any]) -> str:
    return (
        f"compiled in {figures['compile']:.1f} s, read in {figures['read']:.2f} s: "
        f"{figures['instructions']:,} instructions, {figures['collectives']} collectives, "
        f"{figures['unattributed']} of unknown origin"
    )


def main(argv: list[str] | None = None) -> dict[str, list[Measured]]:
    """Prints the figures.

    Args:
        argv: Command line arguments; those of the process by default.

    Returns:
        All runs of each contender.
    """
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="small models, one round")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--read", type=int, metavar="BLOCKS", help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    if options.read is not None:
        print(json.dumps(read(options.read)))
        return {}
    contenders = QUICK_CONTENDERS if options.quick else CONTENDERS
    runs: dict[str, list[Measured]] = {name: [] for name in contenders}
    for _ in range(1 if options.quick else options.rounds):
        for name, arguments in contenders.items():
            runs[name].append(measured(arguments))
    print(f"{'median of ' + str(len(next(iter(runs.values())))):36} processor    clock    peak")
    for name, each in runs.items():
        processor = statistics.median(one.processor for one in each)
        elapsed = statistics.median(one.elapsed for one in each)
        peak = max(one.peak for one in each) / 1e9
        print(f"{name:36} {processor:7.1f} s {elapsed:6.1f} s  {peak:.2f} GB")
        if name.startswith("read"):
            print(f"  {_said(json.loads(each[-1].output))}")
    return runs


if __name__ == "__main__":
    main()
