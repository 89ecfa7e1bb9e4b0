"""Weak scaling on paper: 8 to 4,096 devices, steps compiled and never run.

A small Llama-like transformer, one example per device, under each layout. For every number of
devices the whole train step is lowered and compiled for that many simulated devices, and the
collectives in the compiled text are set against what the literature says, worked out from the plan
and the sizes of the activations alone. Bytes are those that one device sends in one step by ring
algorithms; see ``compiled_collectives``.

XLA's compiler for CPUs writes a reduce-scatter as an all-reduce whose result each device slices,
and reduces before it adds up what several layers give. "as run" counts both sides so, "as meant"
as compilers for GPUs and TPUs do.

Each number of devices has a process of its own, and above 2,048, which is as many as one process
may have on a CPU, several that know of each other. Compile times are CPU times, so that other load
on the machine counts little.

    python -m benchmarks.weak_scaling [--quick] [--devices 8 64 512 4096]
"""

import argparse
import dataclasses
import json
import math
import os
import resource
import socket
import subprocess
import sys
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import NamedSharding
from penzai import pz
from penzai.models.transformer.variants import llamalike_common

import penzai_shard as pzs
from benchmarks.compiled_collectives import bytes_by_kind, bytes_moved, read_collectives

MOST_PER_PROCESS = 2048
BLOCKS = 2
# As wide as there are devices, so that the parameters can be split over all of them.
WIDTH = 4096
SEQUENCE = 512
MODEL_DEVICES = 2
NODE = 4

# For each layout its mesh for some number of devices: one mesh axis grows.
LAYOUTS: dict[str, tuple[pzs.Layout, Callable[[int], dict[str, int]]]] = {
    "data parallel": (pzs.Layout.data_parallel(), lambda n: {"data": n}),
    "ZeRO-1": (pzs.Layout.zero1(), lambda n: {"data": n}),
    "fully sharded": (pzs.Layout.fully_sharded(), lambda n: {"data": n}),
    "tensor parallel": (
        pzs.Layout.tensor_parallel(),
        lambda n: {"data": n // MODEL_DEVICES, "model": MODEL_DEVICES},
    ),
    "two-dimensional": (
        pzs.Layout.two_dimensional(),
        lambda n: {"data": n // MODEL_DEVICES, "model": MODEL_DEVICES},
    ),
    "hybrid": (pzs.Layout.hybrid(), lambda n: {"replica": n // NODE, "data": NODE}),
}


def build_model(width: int = WIDTH, blocks: int = BLOCKS) -> Any:
    """A Llama-like transformer, all of whose matrices have the width as a dimension."""
    config = llamalike_common.LlamalikeTransformerConfig(
        num_kv_heads=8,
        query_head_multiplier=1,
        embedding_dim=width,
        projection_dim=8,
        mlp_hidden_dim=64,
        num_decoder_blocks=blocks,
        vocab_size=64,
        mlp_variant="swiglu",
        tie_embedder_and_logits=False,
    )
    return llamalike_common.build_llamalike_transformer(config, jax.random.key(0), name="lm")


def loss_fn(model: Any, rng: Any, state: Any, tokens: Any) -> Any:
    logits = model(tokens[{"seq": pz.slice[:-1]}])
    log_probs = pz.nx.nmap(jax.nn.log_softmax)(logits.untag("vocabulary")).tag("vocabulary")
    right = log_probs[{"vocabulary": tokens[{"seq": pz.slice[1:]}]}]
    loss = -right.untag("batch", "seq").mean().unwrap()
    return loss, state, {"loss": loss}


# What the literature says


@dataclasses.dataclass(frozen=True)
class Movement:
    """What one device sends in one step, in bytes.

    Attributes:
        gathered: Parameters, by all-gathers.
        scattered: Gradients, by reduce-scatters.
        reduced: Gradients of copies, and activations, by all-reduces.
        not_added: What the compiler for CPUs reduces besides, since it adds up the gradients of
            query, key and value, and of gate and value, afterwards.
    """

    gathered: float
    scattered: float
    reduced: float
    not_added: float

    @property
    def as_meant(self) -> float:
        """With reduce-scatters, and what is added up being added before it is reduced."""
        return self.gathered + self.scattered + self.reduced

    @property
    def as_run(self) -> float:
        """With an all-reduce, which moves twice as much, for each reduce-scatter."""
        return self.gathered + 2 * self.scattered + self.reduced + self.not_added


def expected_movement(
    plan: pzs.ShardingPlan,
    layout: pzs.Layout,
    mesh_shape: Mapping[str, int],
    activation_bytes: int,
    blocks: int,
) -> Movement:
    """What the layout moves by the literature, from the plan of the train state.

    A parameter that is split over the devices which share the batch is gathered once, and its
    gradient reduce-scattered (ZeRO-3, FSDP); over what is left of these devices, each of which has
    a copy of the part, the gradient is all-reduced. Where the optimizer's state alone is split
    (ZeRO-1), the gradient is scattered and the updated parameter gathered. Tensor parallelism
    all-reduces the activations twice per block in each direction (Megatron-LM). The loss, a number,
    is all-reduced.

    Args:
        plan: The plan of the train state.
        layout: The layout.
        mesh_shape: The mesh's.
        activation_bytes: The size of the activations between blocks, on one device.
        blocks: The number of blocks.
    """
    (batch,) = layout.batch_rules.spec(("batch",), (math.prod(mesh_shape.values()),), mesh_shape)
    batch_axes = {batch} if isinstance(batch, str) else set(batch)
    moments = {
        leaf.path.removeprefix("opt_state/0/mu/"): leaf
        for leaf in plan.leaves
        if leaf.path.startswith("opt_state/0/mu/")
    }
    copies = math.prod(mesh_shape[axis] for axis in batch_axes)
    gathered = scattered = 0.0
    reduced = 4 * ring(copies, 2)
    for leaf in plan.leaves:
        if not leaf.path.startswith("params/"):
            continue
        # Where the parameter is not split, the optimizer's state may be.
        moment = moments[leaf.path.removeprefix("params/")]
        stored = {axis for entry in moment.spec for axis in _axes(entry)}
        parts = math.prod(mesh_shape[axis] for axis in stored & batch_axes)
        others = math.prod(mesh_shape[axis] for axis in stored - batch_axes)
        in_use = math.prod(leaf.shape) * 4 / others
        gathered += in_use * ring(parts)
        scattered += in_use * ring(parts)
        reduced += in_use / parts * ring(copies // parts, 2)
    model = math.prod(mesh_shape.values()) // copies
    per_reduction = blocks * activation_bytes * ring(model, 2)
    return Movement(gathered, scattered, reduced + 4 * per_reduction, 3 * per_reduction)


def ring(devices: int, rounds: int = 1) -> float:
    """The share of an array that each of some devices sends in a ring."""
    return rounds * (devices - 1) / devices


def _axes(entry: Any) -> tuple[str, ...]:
    return () if entry is None else (entry,) if isinstance(entry, str) else tuple(entry)


# What the compiler does


def measure(
    name: str, devices: int, *, width: int = WIDTH, blocks: int = BLOCKS, seq: int = SEQUENCE
) -> dict[str, Any]:
    """Plans, lowers and compiles the step of a layout for some number of devices.

    Returns:
        Bytes moved, as compiled and as expected, and by kind; CPU seconds of each stage.
    """
    layout, shape_for = LAYOUTS[name]
    mesh = pzs.make_mesh(shape_for(devices))
    seconds: dict[str, float] = {}

    def timed(what: str, call: Callable[[], Any]) -> Any:
        start = time.process_time()
        result = call()
        seconds[what] = time.process_time() - start
        return result

    model = timed("abstract model", lambda: pzs.abstract_model(build_model, width, blocks))
    timed("plan of the model", lambda: layout.plan(model, mesh))
    edited = timed("recipe", lambda: layout.recipe(model, mesh).apply(model))
    state = timed(
        "state",
        lambda: pzs.TrainState.initial_state(edited, optax.adamw(1e-3), jax.random.key(0)),
    )
    plan = timed("plan of the state", lambda: layout.plan(state, mesh))
    step = pzs.build_train_step_fn(
        loss_fn, train_state_shardings=plan.sharding_tree(), donate_params_and_state=True
    )
    shape = OrderedDict(batch=devices, seq=seq + 1)
    spec = layout.batch_rules.spec(tuple(shape), tuple(shape.values()), mesh.shape)
    struct = jax.ShapeDtypeStruct(
        tuple(shape.values()), jnp.int32, sharding=NamedSharding(mesh, spec)
    )
    tokens = pz.nx.NamedArray(shape, struct)
    lowered = timed("lower", lambda: step.lower(plan.restore_structs(), tokens=tokens))
    compiled = timed("compile", lowered.compile)
    found = read_collectives(compiled, mesh)
    copies = devices // dict(mesh.shape).get("model", 1)
    activations = devices // copies * seq * width * 4
    expected = expected_movement(plan, layout, mesh.shape, activations, blocks)
    return {
        "layout": name,
        "devices": devices,
        "seconds": seconds,
        "as run": (bytes_moved(found), expected.as_run),
        "as meant": (bytes_moved(found, as_meant=True), expected.as_meant),
        "moved": {
            f"{kind} over {'/'.join(axes or ('part of the mesh',))}": moved
            for (kind, axes), moved in sorted(bytes_by_kind(found, as_meant=True).items(), key=str)
        },
        "temporaries": compiled.memory_analysis().temp_size_in_bytes,
    }


def work(devices: int, names: list[str], process: int, processes: int, port: int) -> None:
    """Measures some layouts in this process, and prints a line of JSON for each."""
    if processes > 1:
        jax.distributed.initialize(f"127.0.0.1:{port}", processes, process)
    assert len(jax.devices()) == devices, len(jax.devices())
    if process:
        return  # It only lends its devices; JAX waits for the first process before it ends.
    jax.jit(lambda x: x + 1).lower(1.0).compile()  # What the first compilation costs once.
    for name in names:
        row = measure(name, devices)
        row["peak"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        print(json.dumps(row), flush=True)


def run(devices: int, names: list[str]) -> list[dict[str, Any]]:
    """Measures some layouts for a number of devices, in a process, or several, of its own."""
    processes = -(-devices // MOST_PER_PROCESS)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    environment = {k: v for k, v in os.environ.items() if k != "JAX_COMPILATION_CACHE_DIR"} | {
        "JAX_PLATFORMS": "cpu",
        "TF_CPP_MIN_LOG_LEVEL": "2",
        "XLA_FLAGS": f"--xla_force_host_platform_device_count={devices // processes}",
    }
    command = [sys.executable, "-m", "benchmarks.weak_scaling", "--devices", str(devices)]
    started = [
        subprocess.Popen(
            [*command, "--worker", str(process), str(processes), str(port), "--layouts", *names],
            env=environment,
            stdout=subprocess.PIPE if process == 0 else subprocess.DEVNULL,
            text=True,
        )
        for process in range(processes)
    ]
    output, _ = started[0].communicate()
    if any(process.wait() for process in started):
        raise RuntimeError(f"measuring for {devices} devices failed; see above.")
    return [json.loads(line) for line in output.splitlines() if line.startswith("{")]


def main(argv: list[str] | None = None) -> list[dict[str, Any]]:
    """Prints the table.

    Args:
        argv: Command line arguments; those of the process by default.

    Returns:
        The figures of each layout and number of devices.
    """
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="8 and 512 devices only")
    parser.add_argument("--devices", type=int, nargs="+", default=None)
    parser.add_argument("--layouts", nargs="+", choices=list(LAYOUTS), default=list(LAYOUTS))
    parser.add_argument("--worker", type=int, nargs=3, help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    devices = options.devices or ([8, 512] if options.quick else [8, 64, 512, 4096])
    if options.worker:
        work(devices[0], options.layouts, *options.worker)
        return []
    print("MB sent by one device in one step: compiled, by the literature, and their ratio")
    print(
        f"{'layout':>16} {'devices':>7} {'as run':>24} {'as meant':>24} "
        f"{'lower s':>8} {'compile s':>9} {'growth':>6}"
    )
    rows: list[dict[str, Any]] = []
    first: dict[str, float] = {}
    for number in devices:
        for row in run(number, options.layouts):
            rows.append(row)
            compile_seconds = row["seconds"]["compile"]
            growth = compile_seconds / first.setdefault(row["layout"], compile_seconds)
            texts = [
                f"{found / 1e6:>8.2f} {wanted / 1e6:>8.2f} {found / wanted:>6.3f}"
                for found, wanted in (row["as run"], row["as meant"])
            ]
            print(
                f"{row['layout']:>16} {number:>7} {texts[0]} {texts[1]} "
                f"{row['seconds']['lower']:>8.2f} {compile_seconds:>9.2f} {growth:>6.2f}",
                flush=True,
            )
    print("\nCPU seconds on the host before anything is compiled, all layouts together")
    stages = [stage for stage in rows[0]["seconds"] if stage != "compile"]
    print(f"{'devices':>7} " + " ".join(f"{stage:>18}" for stage in stages) + "  peak GiB")
    for number in devices:
        of_number = [row for row in rows if row["devices"] == number]
        sums = [sum(row["seconds"][stage] for row in of_number) for stage in stages]
        peak = max(row["peak"] for row in of_number) / 2**30
        print(f"{number:>7} " + " ".join(f"{total:>18.3f}" for total in sums) + f"  {peak:>8.2f}")
    print(f"\nMB sent by kind, as meant, with {devices[-1]} devices")
    for row in rows:
        if row["devices"] == devices[-1]:
            text = ", ".join(f"{what} {moved / 1e6:.2f}" for what, moved in row["moved"].items())
            print(f"{row['layout']:>16}: {text}")
    return rows


if __name__ == "__main__":
    main()
