"""Train steps of models whose lengths do not divide over the mesh: stored padded, or else.

Small transformers, adamw in float32. Under tensor parallelism: GPT-2's vocabulary of 50,257 over 8
devices, and 10 heads over 4. Where parameters, or what an optimizer keeps of them, are split over
the devices that have the batch: that vocabulary, then under FSDP, ZeRO-1 and hybrid sharding a
width of 254 and 510 neurons too. Each is compiled as its neighbour whose lengths divide
(``divisible``), stored padded (``padded``), and with what does not divide whole on every device
(``replicated``). Everything is abstract: nothing is ever allocated.

Operations, bytes sent and temporaries are those of one device in one step, as XLA counts them for
simulated CPU devices. A sum of which each device keeps a slice counts as a reduce-scatter, which
compilers for GPUs and TPUs make of it. Arguments are what a device holds from step to step,
parameters and two moments; the plan says the same to the byte, but for the random key of 8 bytes,
which these steps do not use.

    python -m benchmarks.padding
"""

import dataclasses
import math
from collections import OrderedDict
from typing import Any

import jax
import jax.numpy as jnp
import optax
from penzai import pz
from penzai.models.transformer.variants import llamalike_common

import penzai_shard as pzs
from benchmarks.compiled_collectives import bytes_moved, read_collectives
from benchmarks.memory_at_scale import loss_fn

BATCH, SEQUENCE = 8, 64
MODES = ("divisible", "padded", "replicated")


@dataclasses.dataclass(frozen=True)
class Case:
    """A model with a length that does not divide.

    Attributes:
        name: What it is.
        mesh: The sizes of the mesh axes.
        layout: The layout.
        whole: The same, with what does not divide whole on every device.
        sizes: The configuration of the transformer.
        divisible: What is other in the neighbour whose lengths divide.
    """

    name: str
    mesh: dict[str, int]
    layout: pzs.Layout
    whole: pzs.Layout
    sizes: dict[str, int]
    divisible: dict[str, int]


GPT_2_WORDS = {
    "num_kv_heads": 8,
    "query_head_multiplier": 1,
    "embedding_dim": 256,
    "projection_dim": 32,
    "mlp_hidden_dim": 512,
    "vocab_size": 50257,
}
TEN_HEADS = {
    "num_kv_heads": 10,
    "query_head_multiplier": 1,
    "embedding_dim": 320,
    "projection_dim": 32,
    "mlp_hidden_dim": 1024,
    "vocab_size": 4096,
}


def by_data(name: str, layout: pzs.Layout, mesh: dict[str, int], batch: Any = "data") -> Case:
    odd = {"embedding_dim": 254, "mlp_hidden_dim": 510}
    even = {"embedding_dim": 256, "mlp_hidden_dim": 512, "vocab_size": 50264}
    whole = pzs.Layout.data_parallel(batch)
    return Case(f"{name}, width 254 and neurons 510", mesh, layout, whole, GPT_2_WORDS | odd, even)


CASES = (
    Case(
        "tensor parallel, vocabulary 50,257 over 8",
        {"data": 1, "model": 8},
        pzs.Layout.tensor_parallel(vocabulary="model"),
        pzs.Layout.tensor_parallel(),
        GPT_2_WORDS,
        {"vocab_size": 50264},
    ),
    Case(
        "tensor parallel, 10 heads over 4",
        {"data": 2, "model": 4},
        pzs.Layout.tensor_parallel(vocabulary="model"),
        pzs.Layout.tensor_parallel(vocabulary="model", names={"heads": None}),
        TEN_HEADS,
        {"num_kv_heads": 12},
    ),
    Case(
        "FSDP, vocabulary 50,257 over 8",
        {"data": 8},
        pzs.Layout(
            parameters={"vocabulary": "data", "neurons": "data", "heads": "data"},
            compute={"batch": "data"},
        ),
        pzs.Layout(parameters={"neurons": "data", "heads": "data"}, compute={"batch": "data"}),
        GPT_2_WORDS,
        {"vocab_size": 50264},
    ),
    by_data("FSDP", pzs.Layout.fully_sharded(), {"data": 8}),
    by_data("ZeRO-1", pzs.Layout.zero1(), {"data": 8}),
    by_data("hybrid", pzs.Layout.hybrid(), {"replica": 2, "data": 4}, ("replica", "data")),
)


@dataclasses.dataclass(frozen=True)
class Figures:
    """What one device has to do and to hold for one step.

    Attributes:
        planned: What the plan says that is held from step to step, in bytes.
        arguments: What the compiled step takes, its tokens left out, in bytes.
        operations: Floating-point operations.
        sent: Bytes sent by ring algorithms.
        temporaries: Bytes of temporaries.
        whole_gathers: Gathers whose result is as large as the largest parameter.
        padding: What padding adds to the whole state, in bytes.
    """

    planned: int
    arguments: int
    operations: float
    sent: float
    temporaries: int
    whole_gathers: int
    padding: int


def build_model(sizes: dict[str, int]) -> Any:
    config = llamalike_common.LlamalikeTransformerConfig(
        num_decoder_blocks=2, mlp_variant="swiglu", tie_embedder_and_logits=False, **sizes
    )
    return llamalike_common.build_llamalike_transformer(config, jax.random.key(0), name="lm")


def figures_of(case: Case, mode: str) -> Figures:
    """Compiles the step of a case in one of the ways."""
    mesh = pzs.make_mesh(case.mesh)
    sizes = case.sizes | (case.divisible if mode == "divisible" else {})
    model = pzs.abstract_model(build_model, sizes)
    layout = case.whole if mode == "replicated" else case.layout
    pads = {"on_indivisible": "pad"} if mode == "padded" else {}
    edited = layout.recipe(model, mesh, **pads).apply(model)
    state = pzs.TrainState.initial_state(edited, optax.adamw(1e-3), jax.random.key(0))
    plan = layout.plan(state, mesh, **pads)
    step = pzs.build_train_step_fn(
        layout.computing(loss_fn, mesh, **pads),
        train_state_shardings=plan.sharding_tree(),
        donate_params_and_state=True,
    )
    shape = OrderedDict(batch=BATCH, seq=SEQUENCE + 1)
    struct = jax.ShapeDtypeStruct(tuple(shape.values()), jnp.int32)
    tokens = layout.shard_batch(pz.nx.NamedArray(shape, struct), mesh)
    compiled = step.lower(plan.restore_structs(), tokens=tokens).compile()
    collectives = read_collectives(compiled, mesh)
    memory = compiled.memory_analysis()
    largest = max(math.prod(leaf.shape) * 4 for leaf in plan.leaves if leaf.shape)
    token_bytes = math.prod(tokens.data_array.sharding.shard_shape(struct.shape)) * 4
    return Figures(
        planned=plan.bytes_per_device - plan.transient_bytes_per_device,
        arguments=memory.argument_size_in_bytes - token_bytes,
        operations=compiled.cost_analysis()["flops"],
        sent=bytes_moved(collectives, as_meant=True),
        temporaries=memory.temp_size_in_bytes,
        whole_gathers=sum(
            each.kind == "all-gather" and each.payload_bytes >= 0.9 * largest
            for each in collectives
        ),
        padding=plan.padding_bytes,
    )


def main() -> dict[str, dict[str, Figures]]:
    """Prints the figures, and returns them by case and mode."""
    found: dict[str, dict[str, Figures]] = {}
    for case in CASES:
        print(f"{case.name}, mesh {case.mesh}, {BATCH} x {SEQUENCE} tokens")
        found[case.name] = {mode: figures_of(case, mode) for mode in MODES}
        base = found[case.name]["divisible"]
        for mode, own in found[case.name].items():
            print(
                f"  {mode:10}  operations {own.operations / 1e9:7.2f} G "
                f"({own.operations / base.operations:.3f}x)  sent {own.sent / 1e6:6.1f} MB "
                f"({own.sent / base.sent:.3f}x)  arguments {own.arguments / 1e6:6.1f} MB, planned "
                f"{own.planned / 1e6:6.1f} MB ({own.arguments - own.planned:+d} B)  temporaries "
                f"{own.temporaries / 1e6:6.1f} MB  gathers of a whole weight {own.whole_gathers}  "
                f"padding {own.padding:,} B in all"
            )
    return found


if __name__ == "__main__":
    main()
