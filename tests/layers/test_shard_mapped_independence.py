"""What a region lets through: a body either computes what the bare layer computes, or is refused.

The bare layer on whole arrays is the oracle of every body here.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from penzai import pz

from penzai_shard.layers import ManualRegionError, ShardMapped
from penzai_shard.layers.shard_map_regions.following import SplitFlow
from penzai_shard.layers.shard_map_regions.split_values import Flow, Split
from penzai_shard.library_apis.jax_api import Literal
from penzai_shard.meshes import make_mesh
from penzai_shard.traced_programs import program_of
from tests.layers.quick_programs import result_of, results_together

LENGTH, WIDTH = 8, 6
MESH = make_mesh({"data": 4, "model": 2})
X = pz.nx.wrap(jax.random.normal(jax.random.key(0), (LENGTH, WIDTH))).tag("seq", "embedding")
TABLE = jax.random.normal(jax.random.key(1), (LENGTH,))
PERMUTATION = np.array([3, 1, 0, 2, 7, 6, 4, 5])
KERNEL = jax.random.normal(jax.random.key(2), (WIDTH, WIDTH))


@pz.pytree_dataclass
class Body(pz.nn.Layer):
    """A function of the whole array, the split dimension first."""

    function: Any

    def __call__(self, x, /, **side_inputs):
        return self.function(x.untag("seq", "embedding")).tag("seq", "embedding")


def body(function):
    return Body(pz.nx.nmap(function))


def region(layer, parts=4, **options):
    """With parts of length 2, or of length 1."""
    mesh = MESH if parts == 4 else make_mesh({"data": 8})
    return ShardMapped(layer, mesh, {}, {"seq": "data"}, **options)


def gradient_of(layer):
    """A function of the input: the loss with the output, and the gradient."""

    def loss(x):
        output = layer(x).unwrap("seq", "embedding")
        return jnp.sum(jnp.sin(output) * jnp.arange(WIDTH)), output

    return jax.value_and_grad(loss, has_aux=True)


def gradient(layer, x):
    return jax.jit(gradient_of(layer))(x)


def shifted(x):
    return jnp.concatenate([x[1:], x[:1]])


def mixing_backward(x):
    @jax.custom_vjp
    def function(x):
        return jnp.sin(x)

    function.defvjp(lambda x: (jnp.sin(x), None), lambda _, ct: (ct[::-1],))
    return function(x)


def normalising_backward(x):
    @jax.custom_vjp
    def function(x):
        return x * 1.0

    function.defvjp(lambda x: (x, None), lambda _, ct: (ct / jnp.linalg.norm(ct),))
    return function(x)


def mixing_forward(x):
    @jax.custom_jvp
    def function(x):
        return jnp.sin(x)

    function.defjvp(lambda x, t: (jnp.sin(x[0]), jnp.roll(t[0], 1, 0)))
    return function(x)


def counted_backward(x):
    @jax.custom_vjp
    def function(x):
        return x * 1.0

    function.defvjp(lambda x: (x, None), lambda _, ct: (ct / len(ct),))
    return function(x)


def data_loop(x):
    return jax.lax.while_loop(lambda x: jnp.any(x < 3), lambda x: x + 1.0, x)


def grouped(x):
    return jax.ops.segment_sum(x, jnp.arange(LENGTH)[: len(x)] // 2, num_segments=len(x))


def mutated(x):
    held = jax.new_ref(x)
    held[...] = x[::-1]
    return held[...]


def callback(x):
    return jax.pure_callback(lambda x: np.asarray(x)[::-1].copy(), jax.typeof(x), x)


FROM_THE_ISSUE = {
    "reverse": lambda x: x[::-1],
    "roll": lambda x: jnp.roll(x, 1, 0),
    "shift by concatenation": shifted,
    "plus positions": lambda x: x + jnp.arange(len(x))[:, None],
    "mask of positions": lambda x: jnp.where(jnp.arange(len(x))[:, None] < 2, 0.0, x),
    "divided by the length": lambda x: x / len(x),
    "minus the first": lambda x: x - x[0],
    "associative scan": lambda x: jax.lax.associative_scan(jnp.add, x),
    "window": lambda x: jax.lax.reduce_window(x, 0.0, jax.lax.add, (2, 1), (1, 1), "SAME"),
    "padding": lambda x: jnp.pad(x, ((1, 0), (0, 0)))[:-1],
    "fft": lambda x: jnp.fft.fft(x, axis=0).real,
    "permutation": lambda x: x[PERMUTATION[: len(x)] % len(x)],
    "reshape": lambda x: x.reshape(2, -1, WIDTH).swapaxes(0, 1).reshape(x.shape),
    "flip in a loop": lambda x: jax.lax.fori_loop(0, 3, lambda i, x: x[::-1], x),
    "update of a slice": lambda x: jax.lax.dynamic_update_slice(x, x[:1] * 0, (1, 0)),
    "decided by one element": lambda x: jax.lax.cond(x[0, 0] > 0, jnp.sin, jnp.cos, x),
}
MIXING = FROM_THE_ISSUE | {
    "cumsum": lambda x: jnp.cumsum(x, 0),
    "sort": lambda x: jnp.sort(x, 0),
    "argsort": lambda x: x + jnp.argsort(x, 0),
    "softmax": lambda x: jax.nn.softmax(x, 0),
    "standardised": lambda x: (x - x.mean(0)) / x.std(0),
    "mean again": lambda x: jnp.broadcast_to(x.mean(0), x.shape),
    "scan": lambda x: jax.lax.scan(lambda c, x: (c + x, c), x[0] * 0, x)[1],
    "contraction": lambda x: jnp.einsum("ij,kj,kl->il", x, x, x),
    "outer product": lambda x: (x @ x.T)[:, :WIDTH],
    "argmax": lambda x: x + jnp.argmax(x, 0),
    "one-hot of positions": lambda x: x + jax.nn.one_hot(jnp.arange(len(x)), WIDTH),
    "triangle": lambda x: jnp.tril(x),
    "triangle ones": lambda x: x * jnp.tri(len(x), WIDTH),
    "linspace": lambda x: x * jnp.linspace(0, 1, len(x))[:, None],
    "numpy positions": lambda x: x + np.arange(len(x), dtype=np.float32)[:, None],
    "sliced table": lambda x: x + TABLE[: len(x), None],
    "whole table": lambda x: x + TABLE[:, None],
    "indexed table": lambda x: x + TABLE[jnp.arange(len(x))][:, None],
    "numpy table": lambda x: x + np.asarray(TABLE)[: len(x), None],
    "ones counted": lambda x: x / jnp.ones_like(x[:, 0]).sum(),
    "ones counted on": lambda x: x + jnp.cumsum(jnp.ones_like(x), 0),
    "length squared": lambda x: x * float(len(x) ** 2),
    "size": lambda x: x * x.size,
    "more where short": lambda x: jnp.sin(x) if len(x) < LENGTH else x,
    "other values where short": lambda x: x * (jnp.sin(x) if len(x) < LENGTH else x),
    "other power where short": lambda x: x ** (2 if len(x) < LENGTH else 3),
    "other axis where short": lambda x: (
        jnp.cumsum(x, 1, dtype=x.dtype) if len(x) < LENGTH else jax.lax.cumsum(x, 1, reverse=True)
    ),
    "other column where short": lambda x: x + x[:, min(len(x), WIDTH - 1)][:, None],
    "other branch where short": lambda x: jax.lax.cond(len(x) < LENGTH, jnp.sin, jnp.cos, x),
    "diagonal": lambda x: x + jnp.diagonal(x @ x.T)[:, None] * 1.0,
    "batch statistics": lambda x: x * jax.lax.rsqrt(jnp.var(x) + 1),
    "norm of all": lambda x: x / jnp.linalg.norm(x),
    "largest of all": lambda x: x - x.max(),
    "top": lambda x: x + jax.lax.top_k(x[:, 0], 2)[0][0],
    "quantile": lambda x: x - jnp.median(x, axis=0),
    "random": lambda x: x + jax.random.normal(jax.random.key(0), x.shape),
    "random mask": lambda x: x * jax.random.bernoulli(jax.random.key(0), 0.5, (len(x), 1)),
    "random keys": lambda x: (
        x
        + jax.vmap(lambda key: jax.random.normal(key))(jax.random.split(jax.random.key(0), len(x)))[
            :, None
        ]
    ),
    "segments": grouped,
    "scattered": lambda x: jnp.zeros_like(x).at[jnp.argsort(x[:, 0])].set(x),
    "scattered in place": lambda x: x.at[0].set(0.0),
    "last made zero": lambda x: x.at[-1].multiply(0.0),
    "dynamic slice": lambda x: x - jax.lax.dynamic_slice(x, (1, 0), (1, WIDTH)),
    "bytes": lambda x: (
        jnp.flip(jax.lax.bitcast_convert_type(x, jnp.uint8), 0).astype(jnp.float32).sum(-1)
    ),
    "convolution": lambda x: jax.lax.conv_general_dilated(
        x[None], jnp.ones((3, WIDTH, WIDTH)), (1,), "SAME", dimension_numbers=("NWC", "WIO", "NWC")
    )[0],
    "numpy convolution": lambda x: jax.vmap(
        lambda c: jnp.convolve(c, jnp.ones(3), "same"), in_axes=1, out_axes=1
    )(x),
    "diff": lambda x: jnp.diff(x, axis=0, prepend=0.0),
    "repeated": lambda x: jnp.repeat(x, 2, 0)[: len(x)],
    "tiled": lambda x: jnp.tile(x, (2, 1))[1::2],
    "every second": lambda x: jnp.concatenate([x[::2], x[1::2]]),
    "strided window": lambda x: x.reshape(-1, 2, WIDTH)[:, ::-1].reshape(x.shape),
    "flattened and turned": lambda x: x.reshape(-1)[::-1].reshape(x.shape),
    "transposed by order": lambda x: x.reshape(WIDTH, -1).T,
    "merged as the minor one": lambda x: x.T.reshape(-1, 2)[:, ::-1].reshape(WIDTH, -1).T,
    "flattened running sum": lambda x: jnp.cumsum(x.reshape(-1)).reshape(x.shape),
    "vmapped reverse": lambda x: jax.vmap(lambda c: c[::-1], 1, 1)(x),
    "vmapped index": lambda x: jax.vmap(lambda c, i: c - c[i], (1, 0), 1)(x, jnp.arange(WIDTH) % 2),
    "jitted reverse": lambda x: jax.jit(lambda x: x[::-1])(x),
    "rematerialised roll": lambda x: jax.checkpoint(lambda x: jnp.roll(x, 1, 0))(x),
    "loop until all": data_loop,
    "loop as long": lambda x: jax.lax.fori_loop(0, len(x), lambda i, x: x * 1.1, x),
    "loop over elements": lambda x: jax.lax.fori_loop(
        0, len(x), lambda i, y: y.at[i].add(y[i - 1]), x
    ),
    "branch that mixes": lambda x: jax.lax.cond(True, lambda x: x[::-1], lambda x: x, x),
    "carry that mixes late": lambda x: jax.lax.fori_loop(
        0, 3, lambda i, c: (c[1], c[2], c[2][::-1]), (x, x, x)
    )[0],
    "backward mixes": mixing_backward,
    "backward normalises": normalising_backward,
    "backward counts": counted_backward,
    "forward derivative mixes": mixing_forward,
    "host callback": callback,
    "own gradient of a mix": lambda x: jax.grad(lambda x: jnp.sum(jnp.cumsum(x, 0) ** 2))(x),
    "solved": lambda x: x @ jnp.linalg.inv(x.T @ x + jnp.eye(WIDTH)),
    "searched": lambda x: x + jnp.searchsorted(jnp.sort(x[:, 0]), x),
    "unique positions": lambda x: x * (jax.lax.broadcasted_iota(jnp.int32, x.shape, 0) % 2),
    "rotary": lambda x: x * jnp.cos(jax.lax.iota(jnp.float32, len(x)))[:, None],
    "cross of ends": lambda x: jnp.cross(x[0, :3], x[1, :3]).sum() + x,
    "interpolated": lambda x: jax.image.resize(x, (len(x), WIDTH), "linear") + x[0],
    "swapped halves": lambda x: jnp.concatenate(jnp.split(x, 2)[::-1]),
    "other precision where short": lambda x: x.astype(
        jnp.bfloat16 if len(x) < LENGTH else jnp.float32
    ).astype(jnp.float32),
    "other order where short": lambda x: x - jnp.sin(x) if len(x) < LENGTH else jnp.sin(x) - x,
    "reversed sum where short": lambda x: jax.lax.cumsum(x, 1, reverse=len(x) < LENGTH),
    "other table where short": lambda x: x + np.float32({8: 1.0, 2: 2.0, 1: 3.0, 16: 4.0}[len(x)]),
    "as many turns as elements": lambda x: jax.lax.scan(
        lambda c, _: (c * 1.1, None), x, None, length=len(x)
    )[0],
    "largest by length": lambda x: x + jax.lax.top_k(x, min(len(x), 3))[0].sum(1, keepdims=True),
    "rolled by length": lambda x: jnp.roll(x, len(x), 1),
    "rolled by an element": lambda x: jnp.roll(x, jnp.int32(9 * x[0, 0]), 1),
    "identity matrix": lambda x: x + jnp.eye(*x.shape),
    "reduced by a function": lambda x: x + jax.lax.reduce(x, 0.0, lambda a, b: a * 2 + b, (0,)),
    "histogram": lambda x: x + jnp.histogram(x, WIDTH)[0],
    "singular vectors": lambda x: jnp.linalg.svd(x, full_matrices=False)[0],
    "grouped channels": lambda x: jax.lax.conv_general_dilated(
        x[None, :, None], jnp.ones((len(x), 1, 1, 3)), (1, 1), "SAME", feature_group_count=len(x)
    )[0, :, 0],
    "attention": lambda x: jax.nn.dot_product_attention(*[x[None, :, None]] * 3)[0, :, 0],
    "mutable": lambda x: mutated(x),
    "gradient of the mean": lambda x: jax.grad(lambda x: jnp.mean(x**2))(x),
    "gradient of a normaliser": lambda x: jax.grad(lambda x: jax.nn.logsumexp(x))(x),
    "shuffled": lambda x: jax.random.permutation(jax.random.key(0), x, axis=0),
    "stacked and unstacked": lambda x: jnp.stack([*x][::-1]),
}

INDEPENDENT = {
    "elementwise": lambda x: jnp.tanh(x) * 2 + x**3,
    "matrix product": lambda x: x @ KERNEL,
    "softmax": lambda x: jax.nn.softmax(x, -1),
    "norm": lambda x: (x - x.mean(-1, keepdims=True)) / (x.std(-1, keepdims=True) + 1e-3),
    "sort": lambda x: jnp.sort(x, -1),
    "argsort": lambda x: x + jnp.argsort(x, -1),
    "taken along": lambda x: jnp.take_along_axis(x, jnp.argsort(x, -1), -1),
    "running sum": lambda x: jnp.cumsum(x, -1),
    "reverse": lambda x: x[:, ::-1],
    "roll": lambda x: jnp.roll(x, 1, -1),
    "positions": lambda x: x + jnp.arange(WIDTH),
    "mask": lambda x: jnp.where(jnp.arange(WIDTH) < 2, 0.0, x),
    "outer product": lambda x: (x[:, :, None] * x[:, None]).sum(-1),
    "einsum": lambda x: jnp.einsum("bi,bj,jk->bk", x, x, KERNEL),
    "batched product": lambda x: jnp.einsum("bij,bj->bi", x[:, :, None] * x[:, None], x),
    "transposed": lambda x: (KERNEL @ x.T).T,
    "vmapped": lambda x: jax.vmap(lambda r: jnp.cumsum(r[::-1]) / len(r))(x),
    "mapped": lambda x: jax.lax.map(lambda r: r[::-1] * r.sum(), x),
    "loop": lambda x: jax.lax.fori_loop(0, 3, lambda i, x: jnp.sin(x) + i, x),
    "loop from zero": lambda x: jax.lax.fori_loop(
        0, 3, lambda i, y: y + x, jnp.zeros(x.shape, x.dtype)
    ),
    "scan over the other": lambda x: (
        jax.lax.scan(lambda c, r: (c + r, c * r), jnp.zeros(x.shape[0]), x.T)[1].T
    ),
    "while": lambda x: (
        x
        * jax.lax.while_loop(
            lambda c: c[0] < 3, lambda c: (c[0] + 1, c[1] * 2), (0, jax.lax.stop_gradient(x))
        )[1]
    ),
    "branch": lambda x: jax.lax.switch(1, [jnp.sin, jnp.cos], x),
    "jit": lambda x: jax.jit(jnp.sin)(x),
    "remat": lambda x: jax.checkpoint(lambda x: jnp.sin(x) @ KERNEL)(x),
    "relu and gelu": lambda x: jax.nn.relu(x) + jax.nn.gelu(x) + jax.nn.silu(x),
    "logsumexp": lambda x: x - jax.nn.logsumexp(x, -1, keepdims=True),
    "heads": lambda x: jax.nn.softmax(x.reshape(-1, 2, 3), -1).reshape(x.shape),
    "merged and divided": lambda x: jnp.sin(x.reshape(-1)).reshape(x.shape),
    "padded": lambda x: jnp.pad(x, ((0, 0), (1, 1)))[:, 1:-1],
    "concatenated": lambda x: jnp.concatenate([x[:, 3:], x[:, :3]], -1),
    "divided": lambda x: sum(jnp.split(x, 2, -1)).repeat(2, -1),
    "tiled": lambda x: jnp.tile(x[:, :3], (1, 2)),
    "stacked": lambda x: jnp.stack([x, x * 2], 1).sum(1),
    "unstacked": lambda x: jnp.stack(jnp.unstack(x, axis=1)[::-1], 1),
    "set": lambda x: x.at[:, 1].set(0.0).at[:, 2:4].add(1.0),
    "embedded": lambda x: jnp.asarray(KERNEL)[jnp.argmax(x, -1)],
    "one-hot": lambda x: jax.nn.one_hot(jnp.argmax(x, -1), WIDTH),
    "largest": lambda x: x - jax.lax.top_k(x, 2)[0].sum(-1, keepdims=True),
    "quantile": lambda x: x - jnp.quantile(x, 0.25, axis=-1, keepdims=True),
    "ones": lambda x: x + jnp.ones_like(x) * 2,
    "fft": lambda x: jnp.abs(jnp.fft.fft(x)),
    "window": lambda x: jax.lax.reduce_window(x, -jnp.inf, jax.lax.max, (1, 2), (1, 1), "SAME"),
    "convolution": lambda x: jax.lax.conv_general_dilated(
        x[..., None], jnp.ones((3, 1, 1)), (1,), "SAME", dimension_numbers=("NWC", "WIO", "NWC")
    )[..., 0],
    "associative scan": lambda x: jax.lax.associative_scan(jnp.add, x, axis=1),
    "triangles": lambda x: jnp.einsum("bi,ij->bj", x, jnp.tril(jnp.ones((WIDTH, WIDTH)))),
    "cholesky": lambda x: jnp.linalg.cholesky(x[:, :, None] * x[:, None] + jnp.eye(WIDTH))[:, 0],
    "same numbers for all": lambda x: x + jax.random.normal(jax.random.key(0), (WIDTH,)),
    "own gradient": lambda x: jax.vmap(jax.grad(lambda r: jnp.sum(jnp.sin(r) ** 2)))(x),
    "gradient of the sum": lambda x: jax.grad(lambda x: jnp.sum(jnp.sin(x) ** 2))(x),
    "unused reduction": lambda x: (x.sum(), x * 2)[1],
    "low precision": lambda x: (x.astype(jnp.bfloat16) @ KERNEL.astype(jnp.bfloat16)).astype(
        x.dtype
    ),
    "bits": lambda x: jax.lax.bitcast_convert_type(
        jax.lax.bitcast_convert_type(x, jnp.uint32) >> 1, jnp.float32
    ),
    "indexed in a loop": lambda x: jax.lax.fori_loop(
        0, WIDTH, lambda i, y: y.at[:, i].set(2 * y[:, WIDTH - 1 - i]), x
    ),
    "table lookup in a loop": lambda x: jax.lax.fori_loop(
        0, 2, lambda i, y: y + KERNEL[i] + jax.lax.dynamic_slice(x, (0, i), (len(x), 1)), x
    ),
    "incomplete beta": lambda x: jax.scipy.special.betainc(1.0, 2.0, jax.nn.sigmoid(x)),
    "attention within": lambda x: jax.nn.dot_product_attention(
        *[x.reshape(-1, 2, 1, 3)] * 3
    ).reshape(x.shape),
    "batched solve": lambda x: jnp.linalg.solve(
        x[:, :, None] * x[:, None] + jnp.eye(WIDTH), x[..., None]
    )[..., 0],
    "second derivative": lambda x: jax.jvp(jax.grad(lambda x: jnp.sum(x**3)), (x,), (x,))[1],
    "interpolated": lambda x: jnp.interp(x, jnp.arange(4.0), jnp.arange(4.0) ** 2),
    "rows written": lambda x: jax.vmap(lambda r, i: r.at[i].set(0.0))(x, jnp.argmax(x, 1)),
    "segments": lambda x: jax.vmap(
        lambda r: jax.ops.segment_sum(r, jnp.arange(WIDTH) // 2, num_segments=WIDTH)
    )(x),
    "clipped": lambda x: jnp.clip(x, -0.5, 0.5) + jnp.sign(x) * jnp.isfinite(x),
    "stopped": lambda x: x * jax.lax.stop_gradient(x),
}


def test_the_bodies_are_as_many_as_promised():
    assert len(MIXING) >= 42
    assert len(INDEPENDENT) >= 32


@pytest.mark.parametrize("name", MIXING)
@pytest.mark.parametrize("parts", [4, 8], ids=["parts of 2", "parts of 1"])
def test_a_body_that_mixes_is_refused_by_name_or_equal(name, parts):
    layer = body(MIXING[name])
    try:
        found = gradient(region(layer, parts), X)
    except ManualRegionError as error:
        found = str(error)
    if not isinstance(found, str):
        check_equal(found, gradient(layer, X))
        assert name not in FROM_THE_ISSUE
        return
    assert __file__.rsplit("/", 1)[-1] in found
    assert "activation_rules" in found


# Since jax 0.12 it is an operation whose program and derivative cannot be seen.
VOUCHED = {"interpolated": ("searchsorted",)} if jax.__version_info__ >= (0, 12) else {}


@functools.cache
def independent(parts):
    """What all independent bodies give, in parts or bare (1), compiled as one program."""
    layers = {
        name: body(function)
        if parts == 1
        else region(body(function), parts, assume_independent=VOUCHED.get(name, ()))
        for name, function in INDEPENDENT.items()
    }
    kind = gradient_of if parts < 8 else lambda layer: lambda x: layer(x).unwrap(*X.named_shape)
    return results_together({name: kind(layer) for name, layer in layers.items()}, X)


@pytest.mark.parametrize("parts", [4, 8], ids=["parts of 2", "parts of 1"])
@pytest.mark.parametrize("name", INDEPENDENT)
def test_an_independent_body_runs_and_equals_the_bare_layer(name, parts):
    found, expected = (result_of(independent(number)[name]) for number in (parts, 1))
    # XLA is free to leave out roundings to bfloat16, and does so otherwise in either program.
    tolerance = 2**-3 if name == "low precision" else 1e-4
    if parts == 4:
        check_equal(found, expected, tolerance)
    else:
        (_, output), _ = expected
        check_equal(found, output, tolerance)


def check_equal(found, expected, tolerance=1e-4):
    for one, other in zip(*map(jax.tree_util.tree_leaves, (found, expected)), strict=True):
        np.testing.assert_allclose(one, other, rtol=tolerance, atol=tolerance)


def times(number, length, is_converted):
    """``x * number`` traced, as a literal, or as an integer that the program converts.

    Newer releases of JAX write the one in the whole and the other in a part.
    """
    if not is_converted:
        return jax.make_jaxpr(lambda x: x * number)(jnp.ones(length))
    jaxpr = jax.make_jaxpr(lambda x, n: x * n)(jnp.ones(length), np.int32(number)).jaxpr
    x, own = jaxpr.invars
    literal = Literal(np.int32(number), own.aval)
    equations = [
        one.replace(invars=[literal if atom is own else atom for atom in one.invars])
        for one in jaxpr.eqns
    ]
    names = [one.primitive.name for one in equations]
    assert names == ["convert_element_type", "mul"]
    return program_of(equations, [x], jaxpr.outvars, "times")


@pytest.mark.parametrize(
    ("of_whole", "of_part", "refused"),
    [
        ((2, False), (2, True), False),
        ((2, True), (2, False), False),
        ((2, True), (2, True), False),
        ((2, False), (3, True), True),
        ((2, True), (3, False), True),
        ((2, True), (3, True), True),
    ],
)
def test_a_converted_number_is_the_number_that_it_becomes(of_whole, of_part, refused):
    split = Split(("data",), 4, "seq")
    programs = [
        times(number, length, is_converted)
        for (number, is_converted), length in ((of_whole, LENGTH), (of_part, LENGTH // 4))
    ]
    (flow,) = SplitFlow(frozenset({split})).results(*programs, [Flow((split,))])
    assert bool(flow.refused) == refused
    assert refused or flow.dims == (split,)


def test_a_derivative_that_cannot_be_followed_is_refused():
    @jax.custom_vjp
    def function(x):
        return jnp.sin(x)

    def backward(residual, cotangent):
        raise RuntimeError("no rule today")

    function.defvjp(lambda x: (jnp.sin(x), None), backward)
    with pytest.raises(ManualRegionError, match="its derivative cannot be followed: no rule today"):
        region(body(function))(X)
