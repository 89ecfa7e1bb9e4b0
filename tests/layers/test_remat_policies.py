"""Named rematerialisation policies."""

import jax
import jax.numpy as jnp
import pytest
from penzai import pz

from penzai_shard.errors import RuleTypeError
from penzai_shard.layers import Checkpointed, resolve_policy
from penzai_shard.layers.remat_policies import POLICIES


@pz.pytree_dataclass
class TwoProducts(pz.nn.Layer):
    """A linear product and one with a batch dimension, as in attention."""

    weights: jax.Array

    def __call__(self, x, /, **side_inputs):
        linear = jnp.sin(x @ self.weights)
        return jnp.sin(jnp.einsum("bij,bjk->bik", linear, linear)).sum()


LAYER = TwoProducts(jnp.linspace(-1.0, 1.0, 16).reshape(4, 4))
X = jnp.linspace(0.0, 1.0, 32).reshape(2, 4, 4)


def products_in_gradient(policy):
    jaxpr = jax.make_jaxpr(jax.grad(Checkpointed(LAYER, policy=policy)))(X)
    return str(jaxpr).count("dot_general")


def test_each_name_keeps_what_it_says():
    backward_alone = str(jax.make_jaxpr(jax.grad(LAYER))(X)).count("dot_general")
    counts = {name: products_in_gradient(name) for name in POLICIES if name != "offload_dots"}
    assert counts["everything"] == counts["dots"] == backward_alone
    assert backward_alone < counts["dots_without_batch"] < counts["nothing"] + 1
    assert counts["nothing"] == products_in_gradient(None)


def test_offload_dots_moves_linear_products_to_the_host():
    text = str(jax.make_jaxpr(jax.grad(Checkpointed(LAYER, policy="offload_dots")))(X))
    assert "pinned_host" in text or "host" in text.lower()


@pytest.mark.parametrize("name", sorted(set(POLICIES) - {"offload_dots"}))
def test_values_and_gradients_are_those_of_the_bare_layer(name):
    value, gradient = jax.value_and_grad(LAYER)(X)
    same_value, same_gradient = jax.value_and_grad(Checkpointed(LAYER, policy=name))(X)
    assert jnp.allclose(value, same_value, rtol=1e-6)
    assert jnp.allclose(gradient, same_gradient, rtol=1e-5, atol=1e-6)


def test_callables_and_none_are_taken_as_they_are():
    policy = jax.checkpoint_policies.dots_saveable
    assert resolve_policy(policy) is policy
    assert resolve_policy(None) is None


def test_names_give_the_same_object_every_time():
    assert all(resolve_policy(name) is resolve_policy(name) for name in POLICIES)


def test_an_unknown_name_lists_all_and_the_nearest():
    with pytest.raises(RuleTypeError, match="Did you mean 'dots_without_batch'") as caught:
        Checkpointed(LAYER, policy="dots_without_bach")(X)
    assert all(repr(name) in str(caught.value) for name in POLICIES)


def test_what_is_no_policy_is_refused():
    with pytest.raises(RuleTypeError, match="a name, a callable or None, not 3"):
        Checkpointed(LAYER, policy=3)(X)
