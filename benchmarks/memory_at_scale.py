"""Memory per device of training 1.5 billion parameters, from the plan and from the compiled step.

A Llama-like model (2,048 wide, 24 blocks, 1.5e9 parameters in float32) under adamw, fully sharded
over eight simulated devices. Parameters, gradients and two moments are 16 bytes per parameter, so
that each device should hold 2 bytes for each of all parameters, 3 GB. Everything is abstract:
nothing of it is ever allocated, and a laptop compiles the step.

What a device holds from step to step are the arguments of the compiled step: parameters and
moments. Its results take their memory (donation). Gradients are among the temporaries, next to
activations and the parameters that are gathered for the moment.

    python -m benchmarks.memory_at_scale [--no-compile] [--unrolled] [--seq 2048]
"""

import argparse
import dataclasses
import math
import os
import resource
import time
from collections import OrderedDict
from typing import Any

if "xla_force_host_platform_device_count" not in os.environ.get("XLA_FLAGS", ""):
    os.environ["XLA_FLAGS"] = (
        os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8"
    )

import jax
import jax.numpy as jnp
import optax
from jax.sharding import NamedSharding, PartitionSpec
from penzai import pz
from penzai.models.transformer.variants import llamalike_common

import penzai_shard as pzs
from benchmarks.compiled_collectives import counts, read_collectives
from benchmarks.weak_scaling import loss_fn

DEVICES = 8
# In bytes: float32 parameters, gradients, and the two moments of adamw.
IDEAL_PER_PARAMETER = 4 + 4 + 8


def build_model(blocks: int = 24, stacked: bool = True) -> Any:
    """1.5e9 parameters in 24 blocks."""
    config = llamalike_common.LlamalikeTransformerConfig(
        num_kv_heads=32,
        query_head_multiplier=1,
        embedding_dim=2048,
        projection_dim=64,
        mlp_hidden_dim=5632,
        num_decoder_blocks=blocks,
        vocab_size=65536,
        mlp_variant="swiglu",
        tie_embedder_and_logits=False,
        use_layer_stack=stacked,
    )
    return llamalike_common.build_llamalike_transformer(config, jax.random.key(0), name="lm")


def abstract_state(layout: pzs.Layout, mesh: Any, *, stacked: bool = True) -> pzs.TrainState:
    """The state before the first step, without memory, its model edited as the layout needs."""
    model = pzs.abstract_model(build_model, stacked=stacked)
    # Outside of the gathering, so that a gathered parameter is not kept for the backward pass.
    edits = layout.recipe(model, mesh) + pzs.rematerialise_blocks(pzs.GatherParameters)
    if stacked:
        edits += pzs.roll_layer_stacks()
    return pzs.TrainState.initial_state(edits.apply(model), optax.adamw(1e-3), jax.random.key(0))


@dataclasses.dataclass(frozen=True)
class PlannedMemory:
    """What the plan of a train state says of one device's memory.

    Attributes:
        parameters: The number of parameters.
        resident: Bytes of parameters, gradients, moments, and what is small.
        gradients: Bytes of the gradients among them, which are there while a step runs.
        whole: The number of arrays that every device holds whole.
        whole_bytes: The size of those.
        largest: The largest parameter of a layer, whole as it is when it is used, in bytes.
    """

    parameters: int
    resident: int
    gradients: int
    whole: int
    whole_bytes: int
    largest: int

    @classmethod
    def of(cls, plan: pzs.ShardingPlan) -> "PlannedMemory":
        """Reads the plan of a train state."""
        parameters = [leaf for leaf in plan.leaves if leaf.path.startswith("params/")]
        return cls(
            parameters=sum(math.prod(leaf.shape) for leaf in parameters),
            resident=plan.bytes_per_device,
            gradients=plan.transient_bytes_per_device,
            whole=sum(leaf.is_replicated for leaf in (*plan.leaves, *plan.transient)),
            whole_bytes=plan.replicated_bytes,
            # A stack gathers one block in each turn.
            largest=max(
                4 * math.prod(leaf.shape[leaf.names[:1] == ("blocks",) :]) for leaf in parameters
            ),
        )

    @property
    def held(self) -> int:
        """What is held from step to step, in bytes: all but the gradients."""
        return self.resident - self.gradients

    @property
    def ideal(self) -> float:
        """16 bytes for every parameter, split evenly over the devices."""
        return self.parameters * IDEAL_PER_PARAMETER / DEVICES


def compiled_step(layout: pzs.Layout, mesh: Any, plan: pzs.ShardingPlan, seq: int) -> Any:
    """The step for one example of so many tokens per device, compiled."""
    step = pzs.build_train_step_fn(
        loss_fn, train_state_shardings=plan.sharding_tree(), donate_params_and_state=True
    )
    over_data = NamedSharding(mesh, PartitionSpec("data"))
    shape = OrderedDict(batch=DEVICES, seq=seq + 1)
    tokens = jax.ShapeDtypeStruct(tuple(shape.values()), jnp.int32, sharding=over_data)
    return step.lower(plan.restore_structs(), tokens=pz.nx.NamedArray(shape, tokens)).compile()


def main(argv: list[str] | None = None) -> dict[str, Any]:
    """Prints the figures.

    Args:
        argv: Command line arguments; those of the process by default.

    Returns:
        The figures, in bytes per device.
    """
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--no-compile", action="store_true", help="the plan alone")
    parser.add_argument("--unrolled", action="store_true", help="24 blocks instead of one stack")
    parser.add_argument("--seq", type=int, default=2048, help="tokens per device")
    options = parser.parse_args(argv)
    mesh, layout = pzs.make_mesh({"data": DEVICES}), pzs.Layout.fully_sharded()
    start = time.perf_counter()
    plan = layout.plan(abstract_state(layout, mesh, stacked=not options.unrolled), mesh)
    memory = PlannedMemory.of(plan)
    gb = 1e9
    print(f"{memory.parameters:,} parameters, adamw, float32, FSDP over {DEVICES} devices")
    print(f"ideal, 16 bytes per parameter / {DEVICES}:   {memory.ideal / gb:.4f} GB per device")
    print(
        f"planned: held {memory.held / gb:.4f} + gradients {memory.gradients / gb:.4f} = "
        f"{memory.resident / gb:.4f} GB, {memory.resident / memory.ideal:.5f} of the ideal"
    )
    print(f"what stays whole: {memory.whole} arrays, {memory.whole_bytes:,} bytes; no padding")
    print(f"planned in {time.perf_counter() - start:.1f} s")
    result = dataclasses.asdict(memory) | {"ideal": memory.ideal}
    if options.no_compile:
        return result
    start = time.process_time()
    compiled = compiled_step(layout, mesh, plan, options.seq)
    seconds = time.process_time() - start
    sizes = compiled.memory_analysis()
    held = sizes.argument_size_in_bytes
    added = sizes.output_size_in_bytes - sizes.alias_size_in_bytes
    resident = held + added + memory.gradients
    print(
        f"compiled: arguments {held / gb:.4f} + results in memory of their own {added:,} bytes + "
        f"gradients = {resident / gb:.4f} GB, {resident / memory.ideal:.5f} of the ideal"
    )
    print(
        f"temporaries {sizes.temp_size_in_bytes / gb:.3f} GB with {options.seq} tokens per device, "
        f"gradients among them; the largest parameter, gathered, is {memory.largest / gb:.3f} GB"
    )
    for (kind, axes), number in sorted(counts(read_collectives(compiled, mesh)).items(), key=str):
        print(f"  {number} {kind} over {'/'.join(axes or ('other devices',))}")
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    print(f"compiled in {seconds:.0f} s of CPU time; peak memory of this process {peak:.2f} GiB")
    return result | {"compiled": resident, "temporaries": sizes.temp_size_in_bytes}


if __name__ == "__main__":
    main()
