"""Weak scaling on paper: what one device does, as devices and examples grow together.

A Llama-like transformer, one example per device, in each preset of ``Layout``, compiled for 1 to 64
devices that are not there. Where a layout scales, what one device sends and holds stays the same,
or gets less.

    python -m benchmarks.weak_scaling [--quick]
"""

import argparse

import jax
import jax.numpy as jnp
import optax
from penzai import pz
from penzai.models.transformer.variants import llamalike_common

import penzai_shard as pzs
from penzai_shard.reports.quantities import bytes_text

LENGTH, MODEL_DEVICES, NODE = 128, 2, 4
CONFIG = llamalike_common.LlamalikeTransformerConfig(
    num_kv_heads=8,
    query_head_multiplier=1,
    embedding_dim=512,
    projection_dim=64,
    mlp_hidden_dim=1024,
    num_decoder_blocks=2,
    vocab_size=1024,
    mlp_variant="swiglu",
    tie_embedder_and_logits=False,
)
# For each layout its mesh for some number of devices: one mesh axis grows.
LAYOUTS = {
    "data_parallel": (pzs.Layout.data_parallel(), lambda n: {"data": n}),
    "zero1": (pzs.Layout.zero1(), lambda n: {"data": n}),
    "fully_sharded": (pzs.Layout.fully_sharded(), lambda n: {"data": n}),
    "tensor_parallel": (
        pzs.Layout.tensor_parallel(),
        lambda n: {"data": n // MODEL_DEVICES, "model": MODEL_DEVICES},
    ),
    "two_dimensional": (
        pzs.Layout.two_dimensional(),
        lambda n: {"data": n // MODEL_DEVICES, "model": MODEL_DEVICES},
    ),
    "hybrid": (pzs.Layout.hybrid(), lambda n: {"replica": n // NODE, "data": NODE}),
}


def loss_fn(model, rng, state, tokens):
    logits = model(tokens[{"seq": pz.slice[:-1]}])
    return pzs.cross_entropy(logits, tokens[{"seq": pz.slice[1:]}]), state, {}


def compile_for(layout, sizes, devices):
    mesh = pzs.make_mesh(sizes, abstract=True)
    state, step = layout.build(
        llamalike_common.build_llamalike_transformer,
        CONFIG,
        jax.random.key(0),
        mesh=mesh,
        loss_fn=loss_fn,
        optimizer=optax.adamw(1e-3),
        rng=jax.random.key(0),
    )
    tokens = jax.eval_shape(lambda: pz.nx.zeros({"batch": devices, "seq": LENGTH + 1}, jnp.int32))
    return pzs.compile_step(step, state, tokens=layout.shard_batch(tokens, mesh))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="up to 16 devices")
    counts = (1, 4, 16) if parser.parse_args().quick else (1, 4, 16, 64)
    print("| layout | devices | sent | collectives | held |\n" + "|---" * 5 + "|")
    for name, (layout, sizes) in LAYOUTS.items():
        for devices in counts:
            if 0 in sizes(devices).values():
                continue
            compiled = compile_for(layout, sizes(devices), devices)
            sent = bytes_text(compiled.collectives.wire_bytes)
            count = sum(one.times or 1 for one in compiled.collectives.collectives)
            held = bytes_text(compiled.figures.total)
            print(f"| {name} | {devices} | {sent} | {count} | {held} |", flush=True)


if __name__ == "__main__":
    main()
