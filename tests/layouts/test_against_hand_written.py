"""The step of a preset does no more than one that is written by hand on plain arrays."""

import jax
import pytest

import penzai_shard as pzs
from penzai_shard.layouts.layout import Layout
from tests.layouts import hand_written
from tests.layouts.transformers import count_collectives, loss_fn, make_builder


def compile_preset(name):
    layout = getattr(Layout, name)(**({} if name == "data_parallel" else {"min_size": 128}))
    mesh = pzs.make_mesh(hand_written.LAYOUTS[name][0])
    build = make_builder(vocabulary=hand_written.VOCABULARY, **hand_written.LLAMA)
    state, step = layout.build(
        build,
        mesh=mesh,
        loss_fn=loss_fn,
        optimizer=hand_written.OPTIMIZER,
        rng=jax.random.key(0),
    )
    shape = hand_written.BATCH, hand_written.SEQ + 1
    tokens = jax.ShapeDtypeStruct(shape, "int32")
    tokens = layout.shard_batch(tokens, mesh, first_axis="batch")
    return step.lower(state, tokens=tokens).compile()


def read_costs(compiled):
    costs, memory = compiled.cost_analysis(), compiled.memory_analysis()
    figures = costs["flops"], costs["bytes accessed"], memory.temp_size_in_bytes
    return figures, count_collectives(compiled)


@pytest.mark.parametrize("name", hand_written.LAYOUTS)
def test_preset_costs_what_a_step_by_hand_costs(name):
    ours, our_collectives = read_costs(compile_preset(name))
    hand, collectives = read_costs(hand_written.compile_step(name))
    for figure, by_hand, limit in zip(ours, hand, (1.01, 1.02, 1.02), strict=True):
        assert figure <= limit * by_hand
    assert our_collectives == collectives
