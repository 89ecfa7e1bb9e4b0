"""What ``Checkpointed`` keeps for the backward pass, by the name of a policy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import penzai_shard as pzs
from penzai_shard.programs import equations_in


def multiply(weights, x):
    """A linear product, and one with a batch dimension as in attention."""
    linear = jnp.sin(x @ weights)
    return jnp.sin(jnp.einsum("bij,bjk->bik", linear, linear)).sum()


LAYER = jax.tree_util.Partial(multiply, jnp.linspace(-1.0, 1.0, 16).reshape(4, 4))
X = jnp.linspace(0.0, 1.0, 32).reshape(2, 4, 4)


def products(policy):
    program = jax.make_jaxpr(jax.grad(pzs.Checkpointed(LAYER, policy)))(X)
    return [e.primitive.name for e in equations_in(program)].count("dot_general")


def test_policies_keep_what_they_say():
    bare = str(jax.make_jaxpr(jax.grad(LAYER))(X)).count("dot_general")
    assert products("everything") == products("dots") == bare
    assert bare < products("dots_without_batch") < products("nothing")
    assert products(None) == products("nothing")
    assert products(jax.checkpoint_policies.dots_saveable) == bare


def test_offload_dots_keeps_products_in_the_memory_of_the_host():
    layer = pzs.Checkpointed(LAYER, "offload_dots")
    assert "host" in str(jax.make_jaxpr(jax.grad(layer))(X)).lower()
    np.testing.assert_allclose(jax.grad(layer)(X), jax.grad(LAYER)(X), rtol=1e-5, atol=1e-6)


def test_an_unknown_policy_is_refused_where_it_is_written():
    for policy, nearest in (("dots_without_bach", "dots_without"), (3, "dots")):
        with pytest.raises(pzs.RuleTypeError) as caught:
            pzs.Checkpointed(LAYER, policy)
        assert nearest in caught.value.problems[0].fix
