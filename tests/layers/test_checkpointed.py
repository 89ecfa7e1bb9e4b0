"""What ``Checkpointed`` keeps for the backward pass, by the name of a policy."""

import jax
import jax.numpy as jnp
import numpy as np
from penzai import pz

import penzai_shard as pzs
from penzai_shard.programs import equations_in
from tests.models import penzai_mlp


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
    assert bare < products("dots_without_batch") < products("nothing") == products(None)
    assert products(jax.checkpoint_policies.dots_saveable) == bare


def test_all_but_gathered_gathers_the_parameters_of_a_region_again():
    mesh = pzs.make_mesh({"data": 4}, jax.devices()[:4])
    body = pzs.place(penzai_mlp(), mesh, {"features": "data"})
    x = pz.nx.ones({"batch": 8, "features": 8})
    slots, parameters = pz.unbind_params(body, freeze=True)

    def count_gathers(wrap):
        def loss(parameters):
            output = wrap(pz.bind_variables(slots, parameters))(x)
            return (output.unwrap("batch", "features") ** 2).sum()

        program = jax.make_jaxpr(jax.grad(loss))(parameters)
        return [equation.primitive.name for equation in equations_in(program)].count("all_gather")

    def region(body):
        return pzs.ShardMapped(body, mesh, {"features": "data"}, {"batch": "data"})

    again = count_gathers(lambda body: pzs.Checkpointed(region(body), "all_but_gathered"))
    assert again > count_gathers(region) > 0


def test_offload_dots_keeps_products_in_the_memory_of_the_host():
    layer = pzs.Checkpointed(LAYER, "offload_dots")
    assert "host" in str(jax.make_jaxpr(jax.grad(layer))(X)).lower()
    np.testing.assert_allclose(jax.grad(layer)(X), jax.grad(LAYER)(X), rtol=1e-5, atol=1e-6)
