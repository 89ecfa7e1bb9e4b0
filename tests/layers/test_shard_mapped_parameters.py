"""Bodies with a parameter, per device: outputs and gradients are those of the bare layer.

Or they are refused. The bare layer on whole arrays is the oracle.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.custom_derivatives import linear_call
from penzai import pz

import penzai_shard as pzs
from tests.layers.calls import Calls

MESH = pzs.make_mesh({"data": 2, "model": 2, "other": 2})
KEYS = jax.random.split(jax.random.key(9))
X = pz.nx.wrap(jax.random.normal(KEYS[0], (4, 4, 4)), "batch", "seq", "embedding")
WEIGHTS = pz.nx.wrap(jax.random.normal(KEYS[1], (4, 4)), "embedding", "out")
OUT = ("batch", "seq", "out")
# Rules for the parameter, and for activations.
LAYOUTS = {
    "batch": ({"embedding": "model"}, {"batch": "data"}),
    "batch over two": ({}, {"batch": ("data", "model")}),
    "batch and seq": ({"out": "data"}, {"batch": "data", "seq": "model"}),
    "seq": ({"embedding": "other"}, {"seq": ("data", "model")}),
}


def body(function):
    """A layer that calls a function of the bare arrays of the input and of a parameter."""

    def run(weights, x):
        values = (array.untag(*array.named_shape) for array in (x, weights.value))
        return pz.nx.nmap(function)(*values).tag(*OUT)

    return Calls(run, pz.Parameter(value=WEIGHTS, label="w"))


def own_gradient(gradient):
    """A product whose gradient is what a function of x, w and its cotangent gives."""

    def function(x, w):
        product = jax.custom_vjp(jnp.matmul)
        product.defvjp(lambda x, w: (x @ w, (x, w)), lambda k, ct: gradient(*k, ct))
        return product(x, w)

    return function


def own_tangent(tangent):
    def function(x, w):
        product = jax.custom_jvp(lambda x, w: x @ w)
        product.defjvp(lambda p, t: (p[0] @ p[1], tangent(t[0] @ p[1] + p[0] @ t[1])))
        return product(x, w)

    return function


@jax.jit
def random_bits(x):
    """Has the name of an operation, and does something else at the length of the whole."""
    return x * 2 if x.shape[1] == 4 else x


@jax.jit
def clipped_transpose(w):
    """The identity, whose transpose is not linear."""
    transpose = lambda _, ct: jnp.clip(ct, -0.1, 0.1)  # noqa: E731
    return linear_call(lambda _, w: w * 1.0, transpose, (), w)


def summed(x, ct):
    return jnp.einsum("bsi,bsj->ij", x, ct)


def times_each(x, w):
    return jax.lax.scan(lambda c, r: (c + x * r, None), jnp.zeros(x.shape), w)[0]


# These run in every layout.
INDEPENDENT = {
    "product": lambda x, w: x @ w,
    "tied": lambda x, w: (x @ w) @ w.T + x,
    "normalised weights": lambda x, w: x @ (w / jnp.linalg.norm(w)),
    "loop over weights": lambda x, w: x @ jax.lax.fori_loop(0, 2, lambda i, w: jnp.sin(w), w),
    "lookup": lambda x, w: w[jnp.argmax(x, -1)],
    "decided by weights": lambda x, w: jax.lax.cond(w[0, 0] > 0, lambda x: x @ w, jnp.sin, x),
    "loop from zeros": times_each,
    "tangent": own_tangent(lambda t: t),
    "softplus": lambda x, w: jax.nn.softplus(x) @ jax.nn.softplus(w),
    "where": lambda x, w: jnp.where(x > 0, x, 1.0) @ w,
    "inverse of weights": lambda x, w: x @ jnp.linalg.inv(w + 9 * jnp.eye(4)),
}
# A function with its own backward rule is refused.
OWN_GRADIENTS = {
    "right": lambda x, w, ct: (ct @ w.T, summed(x, ct)),
    "through tanh": lambda x, w, ct: (ct @ w.T, jnp.tanh(summed(x, ct))),
    "mixed in": lambda x, w, ct: (ct @ w.T + summed(x, ct).sum(), summed(x, ct)),
    "spread over batch": lambda x, w, ct: (jnp.broadcast_to(ct.sum(0), x.shape), summed(x, ct)),
    "turned": lambda x, w, ct: ((ct @ w.T)[::-1], summed(x, ct)),
}
EITHER = {f"gradient {name}": own_gradient(function) for name, function in OWN_GRADIENTS.items()}
EITHER |= {
    "other at its length": lambda x, w: x @ w * 2 if x.shape[1] == 4 else x @ w,
    "mapped": lambda x, w: jax.lax.map(lambda r: r @ w, x),
    "tangent turned": own_tangent(lambda t: t[::-1]),
    "tangent centred": own_tangent(lambda t: t - t.mean(1, keepdims=True)),
    "attention": lambda x, w: jax.nn.softmax(x @ w @ x.swapaxes(1, 2), -1) @ x,
    "weights as long as the batch": lambda x, w: x + w[:, None, :1],
    "weights by position": lambda x, w: x + w[jnp.arange(x.shape[0])][:, None],
    "weights by seq position": lambda x, w: x + w[: x.shape[1]],
    "identity product": lambda x, w: jnp.einsum("bc,csd->bsd", jnp.eye(x.shape[0]), x) @ w,
    "batch and seq merged": lambda x, w: (x.reshape(-1, 4) @ w).reshape(x.shape),
    "batch and seq exchanged": lambda x, w: (x @ w).swapaxes(0, 1),
    "named as another": lambda x, w: (x @ w).transpose(2, 1, 0),
    "other under a name": lambda x, w: random_bits(x) @ w,
    "own transpose": lambda x, w: x @ clipped_transpose(w),
    "random along seq": lambda x, w: x @ w + jax.random.normal(jax.random.key(0), (4, 1)),
}


def loss_and_gradients(layer, parameters, x):
    slots, _ = pz.unbind_params(layer, freeze=True)

    def loss(parameters, x):
        output = pz.bind_variables(slots, parameters)(x).unwrap(*OUT)
        return jnp.sum(jnp.sin(output) * jnp.arange(64).reshape(4, 4, 4)), output

    return jax.value_and_grad(loss, argnums=(0, 1), has_aux=True)(parameters, x)


@functools.cache
def run_all(layout):
    """What all bodies give in a layout, or bare (None), as one program; and what is refused."""
    layers = {name: body(function) for name, function in (INDEPENDENT | EITHER).items()}
    if layout is not None:
        layers = {k: pzs.ShardMapped(v, MESH, *LAYOUTS[layout]) for k, v in layers.items()}
    _, parameters = pz.unbind_params(body(None), freeze=True)
    refused = {}

    def run(parameters, x):
        found = {}
        for name, layer in layers.items():
            try:
                found[name] = loss_and_gradients(layer, parameters, x)
            except pzs.ManualRegionError as error:
                refused[name] = error
        return found

    return jax.jit(run)(parameters, X), refused


@pytest.mark.parametrize("layout", LAYOUTS)
def test_outputs_and_gradients_are_those_of_the_bare_layer_or_refused(layout):
    found, refused = run_all(layout)
    expected, _ = run_all(None)
    assert INDEPENDENT.keys() <= found.keys()
    assert {name for name in EITHER if name.startswith("gradient")} <= refused.keys()
    for name, own in found.items():
        for one, other in zip(*map(jax.tree.leaves, (own, expected[name])), strict=True):
            np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-4)
    for error in refused.values():
        assert all(problem.fix for problem in error.problems)
