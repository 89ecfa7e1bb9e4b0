"""`GatherParameters`: stored in one layout, used in another."""

import re

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec
from penzai import pz

from penzai_shard.errors import MeshError, PlanError, ShardingWarning
from penzai_shard.layers import Checkpointed, GatherParameters
from penzai_shard.meshes import make_mesh
from penzai_shard.placement import place

MESH = make_mesh({"data": 4, "model": 2})
STORED = {"features": "data", "neurons": ("model",), "features_out": "data"}


def layer():
    return pz.nn.Sequential(
        [
            pz.nn.Linear.from_config("up", jax.random.key(0), {"features": 8}, {"neurons": 32}),
            pz.nn.Elementwise(jnp.tanh),
            pz.nn.Linear.from_config("down", jax.random.key(1), {"neurons": 32}, {"features": 8}),
        ]
    )


def gathering(body):
    return GatherParameters(body, MESH, {"neurons": "model"})


def gathering_again(body):
    return Checkpointed(gathering(body), "all_but_gathered")


def gradients_of(wrap):
    """The gradients of a loss as a jitted function, and its arguments."""
    slots, parameters = pz.unbind_params(place(layer(), MESH, STORED), freeze=True)
    x = place(pz.nx.ones({"batch": 8, "features": 8}), MESH, {"batch": "data"})

    def loss(parameters, x):
        out = wrap(pz.bind_variables(slots, parameters))(x)
        return jnp.mean(jnp.square(out.unwrap("batch", "features")))

    return jax.jit(jax.grad(loss)), (parameters, x)


def test_a_parameter_is_gathered_over_what_the_rules_leave_out():
    gradients, arguments = gradients_of(gathering)
    text = gradients.lower(*arguments).compile().as_text()
    gathered = re.findall(r"= f32\[([\d,]+)\][^=]*? all-gather(?:-start)?\(", text)
    # Of [features=8, neurons=32] the features are gathered, and the neurons stay split in two.
    assert set(gathered) == {"8,16", "16,8"}
    assert "all-to-all" not in text


def test_under_all_but_gathered_it_is_gathered_again_in_the_backward_pass():
    def gathers(wrap):
        gradients, arguments = gradients_of(wrap)
        return str(gradients.trace(*arguments).jaxpr).count("name=gathered_parameter")

    # The first layer's weights are not needed for their own gradient.
    assert gathers(gathering) == 2
    assert gathers(gathering_again) == 3


def test_parameters_and_gradients_keep_their_layout():
    model = GatherParameters(place(layer(), MESH, STORED), MESH, {})
    slots, parameters = pz.unbind_params(model, freeze=True)

    def loss(parameters):
        out = pz.bind_variables(slots, parameters)(pz.nx.ones({"features": 8}))
        return jnp.sum(out.unwrap("features"))

    shardings = jax.tree.map(lambda leaf: leaf.sharding, parameters)
    gradients = jax.jit(jax.grad(loss), out_shardings=shardings)(parameters)
    specs = [leaf.sharding.spec for leaf in jax.tree.leaves(gradients)]
    assert specs == [PartitionSpec("data", "model"), PartitionSpec("model", "data")]


def test_rules_that_do_not_fit_are_refused_when_written():
    with pytest.raises(MeshError, match=r"no mesh axis 'modle'\. Did you mean 'model'"):
        GatherParameters(layer(), MESH, {"neurons": "modle"})


def test_lengths_that_do_not_divide_are_refused_all_at_once():
    odd = pz.nn.Affine.from_config("odd", jax.random.key(0), {"features": 8}, {"neurons": 3})
    with pytest.raises(PlanError) as caught:
        GatherParameters(odd, MESH, {"neurons": "model"})(pz.nx.ones({"features": 8}))
    assert str(caught.value).startswith("no valid layout for some parameters that are gathered:")
    assert caught.value.problems == tuple(
        f"odd/{name}: logical axis 'neurons' (3) does not divide over mesh axis 'model' (2), asked "
        "by rule 'neurons' -> 'model'. Pad it to 4, or map 'neurons' to None. Or store it padded: "
        'on_indivisible="pad".'
        for name in ("Linear.weights", "AddBias.bias")
    )


def test_rematerialisation_inside_of_the_gathering_is_warned_of():
    inside = GatherParameters(Checkpointed(layer()), MESH, {})
    with pytest.warns(ShardingWarning, match=r"rematerialise_blocks\(\.\.\.\) \+ layout\.recipe"):
        inside(pz.nx.ones({"features": 8}))
