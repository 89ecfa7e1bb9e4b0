"""What is particular to ``Scoped``: the name in compiled programs."""

import jax
import jax.numpy as jnp
from penzai import pz

from penzai_shard.layers import Scoped


def test_operations_forward_and_backward_carry_the_name():
    layer = Scoped(pz.nn.Sequential([pz.nn.Elementwise(jnp.sin)]), "block_3/mlp")

    def text(function):
        return jax.jit(function).lower(jnp.ones(3)).as_text(debug_info=True)

    assert "block_3/mlp/0/sin" in text(lambda value: layer(value))
    assert "jvp(block_3/mlp" in text(jax.grad(lambda value: layer(value).sum()))


def test_the_name_is_static():
    layer = Scoped(pz.nn.Identity(), "here")
    assert jax.tree_util.tree_leaves(layer) == []
    assert pz.select(layer).at_instances_of(Scoped).get().name == "here"
