"""Train steps of a small Llama in several layouts, lowered for eight devices."""

import functools

import jax
import optax

import penzai_shard as pzs
from penzai_shard.layouts.layout import Layout
from tests.layouts.transformers import loss_fn, make_builder, make_tokens

DATA, TWO = {"data": 8}, {"data": 4, "model": 2}
LLAMA = {"blocks": 2, "vocabulary": 32}


def lower_step(layout, sizes, model=LLAMA, **options):
    mesh = pzs.make_mesh(sizes)
    make = make_builder(**model)
    state, step = layout.build(
        make, mesh=mesh, loss_fn=loss_fn, optimizer=optax.adamw(1e-2), rng=jax.random.key(1), **options
    )
    batch = layout.shard_batch({"tokens": make_tokens(16)}, mesh, first_axis="batch")
    return step.lower(state, **batch), mesh


STEPS = {
    "data parallel": functools.partial(lower_step, Layout.data_parallel(), DATA),
    "fully sharded": functools.partial(lower_step, Layout.fully_sharded(min_size=128), DATA),
    "tensor parallel": functools.partial(lower_step, Layout.tensor_parallel(), TWO),
    "two dimensional": functools.partial(lower_step, Layout.two_dimensional(min_size=128), TWO),
    "zero1": functools.partial(lower_step, Layout.zero1(min_size=128), DATA),
    "sequence parallel": functools.partial(lower_step, Layout.sequence_parallel(), TWO),
    "accumulation": functools.partial(lower_step, Layout.zero1(min_size=128), DATA, accumulate_steps=2, batch_axis=0),
}
