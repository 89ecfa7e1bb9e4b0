"""A few steps under every preset: what they compute, where arrays lie, what they move.

The papers: Megatron-LM (arXiv:1909.08053) reduces activations twice a block and direction, after
the lookup and before the logits; sequence parallel (arXiv:2205.05198) gathers and scatters instead;
hybrid sharding (arXiv:2304.11277) gathers within ``data``. XLA for CPUs writes a reduce-scatter as
an all-reduce of which each device keeps its part.
"""

import functools
import re

import jax
import numpy as np
import pytest

import penzai_shard as pzs
from penzai_shard.layouts import presets
from penzai_shard.layouts.layout import Layout
from tests.layouts import hand_written
from tests.layouts.transformers import (
    build,
    count_collectives,
    loss_fn,
    make_builder,
    make_tokens,
    train,
)
from tests.training.losses import count_programs

INSTRUCTION = re.compile(r"^\s+(?:ROOT )?%?[\w.-]+ = ", re.MULTILINE)
DATA, TWO, HYBRID = {"data": 8}, {"data": 4, "model": 2}, {"replica": 2, "data": 4}
LAYOUTS = {
    "one device": (Layout.data_parallel(), {"data": 1}),
    "data_parallel": (Layout.data_parallel(), DATA),
    "zero1": (Layout.zero1(min_size=128), DATA),
    "fully_sharded": (Layout.fully_sharded(min_size=128), DATA),
    "manual": (Layout.fully_sharded(min_size=128, manual=True), DATA),
    "hybrid": (Layout.hybrid(min_size=128, reshard_after_forward=True), HYBRID),
    "tensor_parallel": (Layout.tensor_parallel(), TWO),
    "sequence_parallel": (Layout.sequence_parallel(), TWO),
    "two_dimensional": (Layout.two_dimensional(min_size=128), TWO),
}
PRESETS = [*LAYOUTS][1:]
GROUPED = {"heads": 2, "multiplier": 2, "vocabulary": hand_written.VOCABULARY}
TOKENS = make_tokens(hand_written.BATCH, hand_written.SEQ, hand_written.VOCABULARY)


@functools.cache
def run(name):
    build_model = make_builder(vocabulary=hand_written.VOCABULARY, **hand_written.LLAMA)
    return train(*LAYOUTS[name], build_model, {"tokens": TOKENS})


@pytest.mark.parametrize("name", PRESETS)
def test_preset_trains_as_one_device(name):
    found = run(name)
    np.testing.assert_allclose(found.losses, run("one device").losses, rtol=1e-5)
    assert count_programs(found.step) == 1
    # Everything is donated, and stays where the plan puts it.
    assert all(array.is_deleted() for array in found.first.trained_arrays.values())
    plan = found.layout.plan(found.state, found.mesh)
    trees = jax.tree.leaves(plan.sharding_tree()), jax.tree.leaves(found.state)
    for sharding, array in zip(*trees, strict=True):
        assert array.sharding.is_equivalent_to(sharding, array.ndim)


def test_every_preset_is_tried():
    assert {*presets.PRESETS} <= LAYOUTS.keys()


# What they move, and how much they compute


def read_costs(compiled):
    costs, memory = compiled.cost_analysis(), compiled.memory_analysis()
    count = len(INSTRUCTION.findall(compiled.as_text()))
    return costs["flops"], costs["bytes accessed"], memory.temp_size_in_bytes, count


@pytest.mark.parametrize("name", hand_written.LAYOUTS)
def test_preset_costs_what_a_step_by_hand_costs(name):
    ours, hand = run(name).compiled, hand_written.compile_step(name)
    for figure, by_hand in zip(read_costs(ours), read_costs(hand), strict=True):
        assert figure <= 1.001 * by_hand
    donated = [each.memory_analysis().alias_size_in_bytes for each in (ours, hand)]
    assert donated[0] == donated[1]
    assert count_collectives(ours) == count_collectives(hand)


# A step has 9 matrices, and reduces all gradients at once, but over several mesh axes. Layers that
# are split reduce activations after the lookup, attention and feed-forward, the gradients of their
# inputs and of the logits', and the maximum and sum of the loss.
MOVES = {
    "data_parallel": {"all-reduce": 1},
    "zero1": {"all-reduce": 1, "all-gather": 9},
    "fully_sharded": {"all-reduce": 1, "all-gather": 9},
    # Within data, of the parts over replicas, and over both of what is whole. A block has 7
    # matrices, which are gathered again.
    "hybrid": {"all-reduce": 3, "all-gather": 9 + 7},
    "tensor_parallel": {"all-reduce": 1 + 8},
    # Gradients of the norms, too; each of the six reductions of activations has a gathering.
    "sequence_parallel": {"all-reduce": 1 + 8 + 1, "all-gather": 6},
}


@pytest.mark.parametrize("name", MOVES)
def test_preset_moves_what_its_paper_says(name):
    assert count_collectives(run(name).compiled) == MOVES[name]


VOCABULARY = 32_000


@pytest.mark.parametrize("name", ["tensor_parallel", "two_dimensional"])
def test_no_device_computes_all_logits(name):
    layout, sizes = LAYOUTS[name]
    state, step, mesh = build(layout, sizes, make_builder(vocabulary=VOCABULARY))
    tokens = jax.ShapeDtypeStruct((16, 33), "int32")
    batch = layout.shard_batch({"tokens": tokens}, mesh, first_axis="batch")
    # The whole program, and the part of one device.
    lowered = step.lower(state, **batch)
    found = lowered.compile()
    assert found.cost_analysis()["flops"] <= 1.05 * lowered.cost_analysis()["flops"] / 8
    assert re.search(rf"[\[,]{VOCABULARY // 2}[\],]", found.as_text())
    assert not re.search(rf"[\[,]{VOCABULARY}[\],]", found.as_text())


def test_everything_in_one_layout():
    # Two mappings, tensor parallel on a 2-D mesh, bfloat16, a policy, donation, stacked layers.
    build_stack = make_builder(stacked=True, blocks=2, **GROUPED)

    def model():
        return pzs.roll_layer_stacks().apply(build_stack())

    layout = Layout.two_dimensional(min_size=128, precision="bfloat16", rematerialise="dots")
    found = train(layout, TWO, model, {"tokens": TOKENS})
    one = jax.jit(lambda: loss_fn(model(), None, None, TOKENS)[0])()
    assert found.losses[0] == pytest.approx(float(one), rel=5e-3)
    assert found.losses[-1] < found.losses[0]
    text = found.lowered.as_text()
    assert {*re.findall(r"dot_general.*-> tensor<[\dx]*(\w+)>", text)} == {"bf16"}
    assert all(array.dtype == "float32" for array in found.state.trained_arrays.values())
    # A loop gathers one layer at a time, forwards and backwards, and 2 matrices are outside.
    assert count_collectives(found.compiled)["all-gather"] == 2 * 7 + 2
    memory = found.compiled.memory_analysis()
    assert memory.alias_size_in_bytes >= 0.99 * memory.argument_size_in_bytes - 2**10
