"""What the presets over one mesh axis move, against what the literature says they do.

Source: Rajbhandari et al. 2020, "ZeRO" (arXiv:1910.02054), section 7. With as many bytes of
parameters as P: data parallel reduces P and so sends 2 P (n - 1) / n per device, as does stage 1
with its gathers of new parameters; stage 3 gathers twice and scatters once, 3 P (n - 1) / n. XLA's
CPU backend writes a reduce-scatter as an all-reduce that is sliced afterwards, which is counted as
what it means.
"""

import functools

import jax
import jax.numpy as jnp
import optax
import pytest
from jax.sharding import PartitionSpec
from penzai import pz

from benchmarks.compiled_collectives import read_collectives
from penzai_shard import Layout, make_mesh
from tests.judged_collectives import assert_report_is_as_judged
from tests.layouts.preset_runs import loss_fn
from tests.model_families import transformer

N = 8
MESH = make_mesh({"data": N})
LAYOUTS = {
    "data_parallel": Layout.data_parallel(),
    "zero1": Layout.zero1(min_size=1024),
    "fully_sharded": Layout.fully_sharded(min_size=1024),
    "fully_sharded, gathered again": Layout.fully_sharded(
        min_size=1024, reshard_after_forward=True
    ),
}
BLOCKS = 1
IN_BLOCK = BLOCKS * 7  # Query, key, value, output; gate, up, down.


def build_model():
    return transformer(
        "llama",
        jax.random.key(0),
        num_decoder_blocks=BLOCKS,
        num_kv_heads=8,
        query_head_multiplier=1,
        embedding_dim=32,
        projection_dim=8,
        mlp_hidden_dim=128,
        vocab_size=64,
    )


@functools.cache
def compiled(name):
    """The state before the first step, the compiled step, and its collectives."""
    layout = LAYOUTS[name]
    state, step = layout.build(
        build_model, mesh=MESH, loss_fn=loss_fn, optimizer=optax.adam(1e-3), rng=jax.random.key(1)
    )
    # Far more tokens than parameters, as in training: otherwise it is cheaper to move activations.
    tokens = layout.shard_batch(pz.nx.wrap(jnp.zeros((64, 17), int), "batch", "seq"), MESH)
    program = step.lower(state, tokens=tokens).compile()
    return state, program, read_collectives(program, MESH)


@pytest.mark.parametrize("name", LAYOUTS)
def test_the_report_of_collectives_is_as_judged(name):
    assert_report_is_as_judged(compiled(name)[1].as_text(), MESH)


def matrices(state):
    """The bytes of each parameter that is not the scale of a norm."""
    arrays = [value.data_array for value in state.params.values()]
    return [array.nbytes for array in arrays if array.ndim > 1]


def reduced(collectives):
    """The bytes that are summed over all devices, and the part that each keeps a slice of."""
    sums = [one for one in collectives if one.kind == "all-reduce"]
    return sum(one.payload_bytes for one in sums), sum(one.scattered_bytes for one in sums)


def gathered(collectives):
    return sorted(one.payload_bytes for one in collectives if one.kind == "all-gather")


@pytest.mark.parametrize("name", LAYOUTS)
def test_only_gathers_and_reductions_over_the_data_axis(name):
    _, _, collectives = compiled(name)
    assert {one.kind for one in collectives} <= {"all-gather", "all-reduce"}
    assert {one.mesh_axes for one in collectives} == {("data",)}


@pytest.mark.parametrize("name", LAYOUTS)
def test_every_gradient_is_summed_once(name):
    state, _, collectives = compiled(name)
    parameters = sum(value.data_array.nbytes for value in state.params.values())
    # And the loss, which is reported.
    assert reduced(collectives)[0] == parameters + 4


def test_data_parallel_is_one_reduction():
    state, _, collectives = compiled("data_parallel")
    assert [one.kind for one in collectives] == ["all-reduce"]
    parameters = sum(value.data_array.nbytes for value in state.params.values())
    assert collectives[0].bytes_moved() == 2 * (parameters + 4) * (N - 1) / N


def test_zero1_gathers_each_new_parameter_once():
    state, _, collectives = compiled("zero1")
    assert gathered(collectives) == sorted(matrices(state))
    assert all(array.sharding.spec == PartitionSpec() for array in jax.tree.leaves(state.params))
    moments = [leaf for leaf in jax.tree.leaves(state.opt_state) if leaf.size >= 1024]
    assert len(moments) == 2 * len(matrices(state))
    assert all(leaf.sharding.shard_shape(leaf.shape) != leaf.shape for leaf in moments)


@pytest.mark.parametrize("name", ["zero1", "fully_sharded", "fully_sharded, gathered again"])
def test_of_a_gradient_each_device_keeps_its_part(name):
    state, _, collectives = compiled(name)
    assert reduced(collectives)[1] == sum(matrices(state))


def test_fully_sharded_gathers_each_parameter_once_if_the_compiler_may_keep_it():
    state, _, collectives = compiled("fully_sharded")
    assert gathered(collectives) == sorted(matrices(state))


def test_gathered_again_a_block_moves_what_stage_3_of_zero_does():
    state, _, collectives = compiled("fully_sharded, gathered again")
    block = [value.data_array.nbytes for label, value in state.params.items() if "block" in label]
    in_block = [size for size in block if size >= 4096]
    assert len(in_block) == IN_BLOCK
    outside = sorted(matrices(state))
    assert gathered(collectives) == sorted([*outside, *in_block])


@pytest.mark.parametrize("name", ["fully_sharded", "fully_sharded, gathered again"])
def test_fully_sharded_state_is_split_and_stays_so(name):
    state, program, _ = compiled(name)
    for array in jax.tree.leaves((state.params, state.opt_state)):
        if array.size >= 1024:
            assert array.sharding.shard_shape(array.shape) != array.shape
    argument_bytes = program.memory_analysis().argument_size_in_bytes
    assert argument_bytes < 3 * 4 * sum(matrices(state)) / N * 1.1 + 3 * 4 * 32 * 5 + 10_000
