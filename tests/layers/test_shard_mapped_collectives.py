"""Who moves what: the collectives of fully sharded training, counted.

XLA's compiler for CPU keeps ``reduce-scatter`` as it is, so the compiled text is what is counted.
"""

import re

import jax
import jax.numpy as jnp
import pytest
from penzai import pz

from penzai_shard import placement
from penzai_shard.layers import Checkpointed, Jitted, RolledLayerStack, ShardMapped
from penzai_shard.meshes import make_mesh

RULES = {"embedding": "data"}
ACTIVATIONS = {"batch": "data"}
LINEAR_LAYERS = 2
BLOCKS = 2
PARAMETERS = LINEAR_LAYERS * BLOCKS


@pytest.fixture(scope="module")
def mesh():
    return make_mesh({"data": 8})


def block(name, rng=None):
    return pz.nn.NamedGroup(
        "block",
        [
            pz.nn.Linear.from_config(f"{name}/up", rng, {"embedding": 8}, {"neurons": 16}),
            pz.nn.Elementwise(jnp.tanh),
            pz.nn.Linear.from_config(f"{name}/down", rng, {"neurons": 16}, {"embedding": 8}),
            pz.nn.Elementwise(jnp.tanh),
        ],
    )


def blocks():
    return pz.nn.Sequential([block(f"block_{i}", jax.random.key(i)) for i in range(BLOCKS)])


def fsdp(layer, mesh):
    return ShardMapped(layer, mesh, RULES, ACTIVATIONS)


def at_blocks(wrapper, model=None):
    return (
        pz.select(blocks() if model is None else model)
        .at_instances_of(pz.nn.NamedGroup)
        .apply(wrapper)
    )


def lower(model, mesh):
    """Loss and gradients, lowered, with parameters, gradients and batch in their layout."""
    x = pz.nx.ones({"batch": 16, "embedding": 8})
    slots, parameters = pz.unbind_params(model, freeze=True)
    parameters = placement.name_to_name_device_put(parameters, mesh, RULES)
    x = placement.name_to_name_device_put(x, mesh, ACTIVATIONS)
    shardings = jax.tree_util.tree_map(lambda leaf: leaf.sharding, parameters)

    def loss(parameters, x):
        output = pz.bind_variables(slots, parameters)(x)
        return jnp.mean(output.unwrap("batch", "embedding") ** 2)

    step = jax.jit(jax.value_and_grad(loss), out_shardings=(None, shardings))
    return step.lower(parameters, x)


def compiled_counts(model, mesh):
    """How often each collective stands in the compiled program."""
    text = lower(model, mesh).compile().as_text()
    return {
        name: len(re.findall(rf" {name}(?:-start)?\(", text))
        for name in ("all-gather", "reduce-scatter", "all-to-all", "collective-permute")
    }


def lowered_gathers(model, mesh):
    """How often the program asks for a gather before the compiler sees it."""
    return lower(model, mesh).as_text().count("stablehlo.all_gather")


def one_each(gathers, scatters):
    return {
        "all-gather": gathers,
        "reduce-scatter": scatters,
        "all-to-all": 0,
        "collective-permute": 0,
    }


@pytest.mark.parametrize(
    "edit",
    [
        lambda mesh: fsdp(blocks(), mesh),
        lambda mesh: at_blocks(lambda layer: fsdp(layer, mesh)),
        lambda mesh: at_blocks(lambda layer: fsdp(Checkpointed(layer), mesh)),
        lambda mesh: Jitted(at_blocks(lambda layer: fsdp(layer, mesh))),
    ],
    ids=["whole model", "per block", "remat inside", "jitted"],
)
def test_one_gather_and_one_scatter_per_parameter(mesh, edit):
    assert compiled_counts(edit(mesh), mesh) == one_each(PARAMETERS, PARAMETERS)


def test_rematerialisation_outside_gathers_once_more_than_inside(mesh):
    outside = at_blocks(lambda layer: Checkpointed(fsdp(layer, mesh)))
    inside = at_blocks(lambda layer: fsdp(Checkpointed(layer), mesh))
    # What is lowered is counted here: outside of loops the compiler for CPU drops the barrier
    # that keeps the two gathers of a parameter apart, and merges them.
    assert lowered_gathers(outside, mesh) == 2 * PARAMETERS
    assert lowered_gathers(inside, mesh) == PARAMETERS
    assert compiled_counts(outside, mesh)["reduce-scatter"] == PARAMETERS


@pytest.mark.parametrize(
    ("wrapper", "gathers"),
    [
        (lambda layer, mesh: fsdp(layer, mesh), 1),
        (lambda layer, mesh: fsdp(Checkpointed(layer), mesh), 1),
        (lambda layer, mesh: Checkpointed(fsdp(layer, mesh)), 2),
    ],
    ids=["alone", "remat inside", "remat outside"],
)
def test_the_loop_of_a_rolled_stack_gathers_per_turn(mesh, wrapper, gathers):
    stack = pz.nn.LayerStack.from_sublayer_builder(
        lambda init_base_rng: block("block", init_base_rng), "layers", 3, jax.random.key(0), {}
    )
    edited = at_blocks(lambda layer: wrapper(layer, mesh), stack)
    counts = compiled_counts(RolledLayerStack.from_layer_stack(edited), mesh)
    assert counts == one_each(gathers * LINEAR_LAYERS, LINEAR_LAYERS)


def test_small_parameters_are_not_gathered_and_their_gradients_are_summed(mesh):
    model = ShardMapped(blocks(), mesh, RULES, ACTIVATIONS, min_size=1000)
    text = lower(model, mesh).as_text()
    assert "all_gather" not in text
    assert text.count("stablehlo.all_reduce") == PARAMETERS


def test_gradients_leave_in_the_parameters_layout(mesh):
    compiled = lower(fsdp(blocks(), mesh), mesh).compile()
    _, gradients = compiled.output_shardings
    assert all("data" in sharding.spec for sharding in jax.tree_util.tree_leaves(gradients))
