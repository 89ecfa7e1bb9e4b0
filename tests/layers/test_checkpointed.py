"""What is particular to ``Checkpointed``: what is kept for the backward pass."""

import jax
import jax.numpy as jnp
import pytest
from penzai import pz

from penzai_shard.errors import RuleTypeError
from penzai_shard.layers import Checkpointed


def count_sines(layer):
    def loss(value):
        return layer(jnp.sin(layer(value))).sum()

    return str(jax.make_jaxpr(jax.grad(loss))(jnp.ones(3))).count(" sin ")


def test_intermediates_are_computed_again():
    layer = pz.nn.Sequential([pz.nn.Elementwise(jnp.sin), pz.nn.Elementwise(jnp.sin)])
    assert count_sines(Checkpointed(layer)) > count_sines(layer)


def test_a_policy_that_keeps_everything_computes_nothing_again():
    layer = pz.nn.Sequential([pz.nn.Elementwise(jnp.sin), pz.nn.Elementwise(jnp.sin)])
    everything = Checkpointed(layer, jax.checkpoint_policies.everything_saveable)
    assert count_sines(everything) == count_sines(layer)


def test_the_policy_is_static_and_may_be_left_out():
    layer = Checkpointed(pz.nn.Identity())
    assert layer.policy is None
    assert jax.tree_util.tree_leaves(Checkpointed(pz.nn.Identity(), max)) == []


def test_a_policy_of_another_type_is_refused():
    with pytest.raises(RuleTypeError, match=r"checkpoint policy is .*, not 3"):
        Checkpointed(pz.nn.Identity(), 3)(jnp.ones(()))


def test_parameters_that_the_layer_assigns_are_updated():
    @pz.pytree_dataclass
    class Assigns(pz.nn.Layer):
        weight: pz.Parameter

        def __call__(self, value, /, **side_inputs):
            self.weight.value = self.weight.value * 2
            return value * self.weight.value

    weight = pz.Parameter(value=jnp.asarray(1.0), label="w")
    assert float(Checkpointed(Assigns(weight))(jnp.asarray(3.0))) == 6
    assert float(weight.value) == 2


def test_returned_variables_are_refused(small):
    @pz.pytree_dataclass
    class Leaks(pz.nn.Layer):
        weight: pz.Parameter

        def __call__(self, value, /, **side_inputs):
            return self.weight

    layer = Checkpointed(Leaks(pz.Parameter(value=jnp.ones(()), label="w")))
    with pytest.raises(ValueError, match="inside Checkpointed returned mutable variables"):
        layer(jnp.ones(()))
