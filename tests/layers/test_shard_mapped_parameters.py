"""Bodies with parameters in a region: their gradients, custom derivatives, several split axes.

The bare layer on whole arrays is the oracle.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from penzai import pz

from penzai_shard.layers import ManualRegionError, ShardMapped
from penzai_shard.meshes import make_mesh
from tests.layers.quick_programs import result_of, results_together

MESH = make_mesh({"data": 2, "model": 2, "other": 2})
X = pz.nx.wrap(jax.random.normal(jax.random.key(9), (4, 4, 4))).tag("batch", "seq", "embedding")
WEIGHTS = pz.nx.wrap(jax.random.normal(jax.random.key(1), (4, 4))).tag("embedding", "out")
OUT = ("batch", "seq", "out")
LAYOUTS = {
    "batch": ({"embedding": "model"}, {"batch": "data"}),
    "batch over two": ({}, {"batch": ("data", "model")}),
    "batch and seq": ({"out": "data"}, {"batch": "data", "seq": "model"}),
    "seq": ({"embedding": ("data", "model")}, {"seq": "other"}),
}


@pz.pytree_dataclass
class Body(pz.nn.Layer):
    """A function of the positional arrays of the input and of a parameter."""

    weights: pz.Parameter
    function: Any
    names: Any = OUT

    def __call__(self, x, /, **side_inputs):
        weights = self.weights.value
        value = pz.nx.nmap(self.function)(
            x.untag(*x.named_shape), weights.untag(*weights.named_shape)
        )
        return value.tag(*self.names)


def body(function, names=OUT):
    return Body(pz.Parameter(value=WEIGHTS, label="w"), function, names)


def own_gradient(gradient, forward=lambda x, w: x @ w, kept=lambda x, w: (x, w)):
    """A product whose gradient is what a function of x, w and its cotangent gives."""

    def function(x, w):
        @jax.custom_vjp
        def product(x, w):
            return forward(x, w)

        product.defvjp(
            lambda x, w: (forward(x, w), kept(x, w)), lambda kept, ct: gradient(*kept, ct)
        )
        return product(x, w)

    return function


def own_tangent(tangent):
    def function(x, w):
        @jax.custom_jvp
        def product(x, w):
            return x @ w

        product.defjvp(lambda p, t: (p[0] @ p[1], tangent(t[0] @ p[1] + p[0] @ t[1])))
        return product(x, w)

    return function


def repeated(gradient):
    """A product with one weight for all elements, whose gradient is a function of x and ct."""

    @jax.custom_vjp
    def product(x, weights):
        return x * weights

    product.defvjp(lambda x, w: (x * w, (x, w)), lambda xw, ct: (ct * xw[1], gradient(xw[0], ct)))
    return lambda x, w: product(x, jnp.broadcast_to(w[0, 0], x.shape)) @ w


def clipped(value):
    @jax.custom_vjp
    def same(value):
        return value * 1.0

    same.defvjp(lambda value: (value, None), lambda _, ct: (jnp.clip(ct, -0.1, 0.1),))
    return same(value)


def summed(x, ct):
    return jnp.einsum("bsi,bsj->ij", x, ct)


def scanned(x, ct):
    turns = x.swapaxes(0, 1), ct.swapaxes(0, 1)
    return jax.lax.scan(lambda c, t: (c + t[0].T @ t[1], None), jnp.zeros((4, 4)), turns)[0]


EQUAL = {
    "product": lambda x, w: x @ w,
    "tied": lambda x, w: (x @ w) @ w.T + x,
    "normalised weights": lambda x, w: x @ (w / jnp.linalg.norm(w)),
    "relu of weights": lambda x, w: x @ jax.nn.relu(w),
    "loop over weights": lambda x, w: x @ jax.lax.fori_loop(0, 2, lambda i, w: jnp.sin(w), w),
    "lookup": lambda x, w: w[jnp.argmax(x, -1)],
    "decided by weights": lambda x, w: jax.lax.cond(w[0, 0] > 0, lambda x: x @ w, jnp.sin, x),
    "loop from zeros": lambda x, w: jax.lax.scan(
        lambda c, r: (c + x * r, None), jnp.zeros(x.shape), w
    )[0],
    "gradient": own_gradient(lambda x, w, ct: (ct @ w.T, summed(x, ct))),
    "no gradient": own_gradient(lambda x, w, ct: (ct @ w.T, None)),
    "zero gradient": own_gradient(lambda x, w, ct: (ct @ w.T, jnp.zeros_like(w))),
    "scaled gradient": own_gradient(lambda x, w, ct: (3 * ct @ w.T, -summed(x, ct) / 2)),
    "tangent": own_tangent(lambda t: t),
    "scaled tangent": own_tangent(lambda t: 2 * t),
    "repeated weight": repeated(lambda x, ct: x * ct),
    "repeated weight without gradient": repeated(lambda x, ct: jnp.zeros_like(x)),
    "clipped input": lambda x, w: clipped(x) @ w,
    "mapped": lambda x, w: jax.lax.map(lambda r: r @ w, x),
}
EITHER = {
    "clipped weights": lambda x, w: x @ clipped(w),
    "gradient through tanh": own_gradient(lambda x, w, ct: (ct @ w.T, jnp.tanh(summed(x, ct)))),
    "gradient of a mean": own_gradient(lambda x, w, ct: (ct @ w.T, summed(x, ct) / len(x))),
    "constant gradient": own_gradient(lambda x, w, ct: (ct @ w.T, jnp.ones_like(w))),
    "squared gradient": own_gradient(lambda x, w, ct: (ct @ w.T, summed(x, ct) ** 2)),
    "gradient mixed in": own_gradient(
        lambda x, w, ct: (ct @ w.T + summed(x, ct).sum(), summed(x, ct))
    ),
    "gradient spread again": own_gradient(
        lambda x, w, ct: (jnp.broadcast_to(ct.sum(), x.shape), summed(x, ct))
    ),
    "gradient spread over the batch": own_gradient(
        lambda x, w, ct: (jnp.broadcast_to(ct.sum(0), x.shape), summed(x, ct))
    ),
    "gradient of a repeated weight spread again": repeated(
        lambda x, ct: jnp.broadcast_to((x * ct).sum(), x.shape)
    ),
    "constant gradient of a repeated weight": repeated(lambda x, ct: jnp.ones_like(x)),
    "gradient turned": own_gradient(lambda x, w, ct: ((ct @ w.T)[::-1], summed(x, ct))),
    "gradient turned in seq": own_gradient(lambda x, w, ct: ((ct @ w.T)[:, ::-1], summed(x, ct))),
    "gradient of the largest": own_gradient(
        lambda x, w, ct: (ct @ w.T, jnp.where(summed(x, ct) > 0, 1.0, 0.0))
    ),
    "gradient rounded": own_gradient(
        lambda x, w, ct: (ct @ w.T, summed(x, ct).astype(jnp.int32).astype(jnp.float32))
    ),
    "kept length": own_gradient(
        lambda x, w, n, ct: (ct @ w.T * n, summed(x, ct)), kept=lambda x, w: (x, w, 1.0 * len(x))
    ),
    "gradient by a loop": own_gradient(lambda x, w, ct: (ct @ w.T, scanned(x, ct))),
    "tangent turned": own_tangent(lambda t: t[::-1]),
    "tangent centred": own_tangent(lambda t: t - t.mean(1, keepdims=True)),
    "attention": lambda x, w: jax.nn.softmax(x @ w @ x.swapaxes(1, 2), -1) @ x,
    "weights by position": lambda x, w: x + w[jnp.arange(x.shape[0])][:, None],
    "weights by seq position": lambda x, w: x + w[: x.shape[1]],
    "weights as long as the batch": lambda x, w: x + w[:, None, :1],
    "identity product": lambda x, w: jnp.einsum("bc,csd->bsd", jnp.eye(x.shape[0]), x) @ w,
    "batch and seq merged": lambda x, w: (x.reshape(-1, 4) @ w).reshape(x.shape),
    "merged running sum": lambda x, w: jnp.cumsum(x.reshape(-1, 4) @ w, 0).reshape(x.shape),
    "diagonal of batch and seq": lambda x, w: x + jnp.einsum("bbd->bd", x)[:, None] @ w,
    "batch and seq exchanged": lambda x, w: (x @ w).swapaxes(0, 1),
    "named as another": lambda x, w: (x @ w).transpose(2, 1, 0),
    "first sequence": lambda x, w: x @ w - x[:1],
    "random along seq": lambda x, w: x @ w + jax.random.normal(jax.random.key(0), (4, 1)),
}


def loss_and_gradients_of(layer):
    """A function of the frozen parameters and the input."""
    slots, _ = pz.unbind_params(layer, freeze=True)

    def loss(parameters, x):
        output = pz.bind_variables(slots, parameters)(x).unwrap(*OUT)
        return jnp.sum(jnp.sin(output) * jnp.arange(64).reshape(4, 4, 4)), output

    return jax.value_and_grad(loss, argnums=(0, 1), has_aux=True)


def loss_and_gradients(layer):
    _, parameters = pz.unbind_params(layer, freeze=True)
    return jax.jit(loss_and_gradients_of(layer))(parameters, X)


BODIES = {
    "batch": EITHER,
    "batch and seq": EITHER,
    "batch over two": EQUAL,
    "seq": EQUAL,
    None: EQUAL | EITHER,
}


@functools.cache
def together(layout):
    """What bodies give in a layout, or bare (None), or how they are refused; as one program."""
    layers = {name: body(function) for name, function in BODIES[layout].items()}
    if layout is not None:
        layers = {name: mapped(layer, layout) for name, layer in layers.items()}
    functions = {name: loss_and_gradients_of(layer) for name, layer in layers.items()}
    _, parameters = pz.unbind_params(body(EQUAL["product"]), freeze=True)
    return results_together(functions, parameters, X)


def check_equal(found, expected):
    for one, other in zip(*map(jax.tree_util.tree_leaves, (found, expected)), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-4)


def mapped(layer, layout):
    return ShardMapped(layer, MESH, *LAYOUTS[layout])


@pytest.mark.parametrize("name", EQUAL)
@pytest.mark.parametrize("layout", ["batch over two", "seq"])
def test_outputs_and_gradients_are_those_of_the_bare_layer(name, layout):
    check_equal(*(result_of(together(where)[name]) for where in (layout, None)))


@pytest.mark.parametrize("name", EITHER)
@pytest.mark.parametrize("layout", ["batch", "batch and seq"])
def test_a_body_is_refused_by_name_or_equals_the_bare_layer(name, layout):
    found = together(layout)[name]
    if isinstance(found, ManualRegionError):
        found = str(found)
        assert "test_shard_mapped_parameters.py:" in found or "output: logical axis" in found
    else:
        check_equal(*(result_of(together(where)[name]) for where in (layout, None)))


def test_a_wrong_gradient_is_refused_with_the_operation_that_makes_it_wrong():
    with pytest.raises(
        ManualRegionError,
        match=r"'custom_vjp_call' of Body \(test_.*\): its derivative mixes elements: 'tanh' of "
        r"Body .*: it is not linear in a gradient that is summed over the devices",
    ):
        mapped(body(EITHER["gradient through tanh"]), "batch")(X)


def test_output_names_decide_not_the_order_of_dimensions():
    layer = body(lambda x, w: (x @ w).swapaxes(0, 1), ("seq", "batch", "out"))
    check_equal(loss_and_gradients(mapped(layer, "batch")), loss_and_gradients(layer))


# Random numbers.


@pz.pytree_dataclass
class Noise(pz.nn.Layer):
    """Adds numbers drawn along some of the axes."""

    shape: Any

    def __call__(self, x, /, *, random_stream, **side_inputs):
        drawn = jax.random.normal(random_stream.next_key(), tuple(self.shape(x).values()))
        return x + pz.nx.wrap(drawn).tag(*self.shape(x))


def noise(*names):
    return Noise(lambda x: {name: x.named_shape[name] for name in names})


def with_numbers(layer, rules):
    x = pz.nx.ones({"batch": 4, "seq": 4})
    stream = pz.RandomStream.from_base_key(jax.random.key(3), "offset")
    return ShardMapped(layer, MESH, {}, rules)(x, random_stream=stream)


@pytest.mark.parametrize(
    ("names", "rules"),
    [
        (("seq",), {"batch": "data"}),
        (("batch",), {"batch": "data", "seq": "model"}),
        (("seq",), {"batch": "data", "seq": "model"}),
    ],
)
def test_numbers_that_some_parts_should_share_are_refused(names, rules):
    with pytest.raises(
        ManualRegionError,
        match=r"'random_bits' \(in '.*'\) of Noise .* that all parts should share",
    ):
        with_numbers(noise(*names), rules)


def test_numbers_along_all_split_axes_differ_between_the_parts():
    output = with_numbers(noise("batch", "seq"), {"batch": "data", "seq": "model"})
    parts = {np.asarray(shard.data).tobytes() for shard in output.data_array.addressable_shards}
    assert len(parts) == 4
