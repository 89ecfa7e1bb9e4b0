"""Gradients that are padded before they are summed up: the same values, scattered."""

import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from benchmarks.compiled_collectives import read_collectives
from penzai_shard import make_mesh
from penzai_shard.traced_programs import equations
from penzai_shard.training.padded_sums import summed_in_equal_parts
from penzai_shard.training.padded_sums.running import PaddedValue, run_padded


def numbers(*shape):
    return jnp.asarray(np.random.default_rng(len(shape)).standard_normal(shape), jnp.float32)


def whole_numbers(*shape):
    """Their sums are exact in any order."""
    return jnp.round(4 * numbers(*shape))


def ran(function, wanted, *arguments):
    """The shape of a result that is wanted longer; its values have to be the same."""
    program = jax.make_jaxpr(function)(*arguments)
    values = run_padded(program, list(map(PaddedValue.of, arguments)), [wanted])
    np.testing.assert_array_equal(values[0].whole(), function(*arguments))
    return values[0].array.shape


def looped(carried, slices):
    def turn(total, one):
        return total + one[0] @ one[1], one[1] @ one[0]

    return jax.lax.scan(turn, carried, slices)


A, B, C = whole_numbers(3, 5), whole_numbers(5, 7), whole_numbers(2, 3, 5)
SLICES = whole_numbers(4, 3, 5), whole_numbers(4, 5, 3)
PADDED = {
    "product": (lambda a, b: a @ b, (4, 8), (A, B)),
    "product by batch": (lambda c: jnp.einsum("bij,bkj->bik", c, c), (4, 4, 4), (C,)),
    "sum": (lambda c: c.sum(0), (4, 8), (C,)),
    "product by elements": (lambda a: 2.0 * a * a + a[:, :1], (4, 8), (A,)),
    "transposed": (lambda c: jnp.einsum("bij,bij->bi", c, c).T, (4, 2), (C,)),
    "split heads": (lambda a, b: (a @ b).reshape(3, 1, 7), (4, 1, 8), (A, B)),
    "joined beside": (
        lambda b, c: jnp.einsum("bij,jk->bik", c, b).reshape(6, 7),
        (6, 8),
        (B, C),
    ),
    "one of two": (lambda a, b: jnp.where(a > 0, a, a @ b @ b.T), (4, 8), (A, B)),
    "concatenated": (lambda a, b: jnp.concatenate([a @ b, a], 1), (4, 12), (A, B)),
    "with more behind": (lambda a, b: jnp.pad(a @ b, ((0, 0), (1, 2))), (4, 10), (A, B)),
    "some of it": (lambda a, b: (a @ b)[:, 1:4], (4, 3), (A, B)),
    "repeated": (lambda a: jnp.broadcast_to(a.sum(1)[:, None], (3, 5)), (4, 8), (A,)),
    "two of length one": (lambda a: (a[:1, :1] @ a[:1, :1]).reshape(1, 1, 1), (4, 2, 1), (A,)),
    "of length one": (lambda a: a[:1] @ a.T, (8, 4), (A,)),
    "called": (lambda a, b: jax.jit(jnp.matmul)(a, b), (4, 8), (A, B)),
    "made again": (
        lambda a, b: jax.checkpoint(lambda a, b: a @ b)(a, b),
        (4, 8),
        (A, B),
    ),
    "carried": (lambda *x: looped(jnp.zeros((3, 3)), x)[0], (4, 4), SLICES),
    "stacked": (lambda *x: looped(jnp.zeros((3, 3)), x)[1], (4, 8, 8), SLICES),
}


@pytest.mark.parametrize("name", PADDED)
def test_what_is_summed_up_is_padded_before_and_has_the_same_values(name):
    function, wanted, arguments = PADDED[name]
    assert ran(function, wanted, *arguments) == wanted


@pytest.mark.parametrize(
    ("function", "wanted"),
    [
        (lambda a: jnp.cumsum(a, 0), (4, 8)),
        (lambda a: a.reshape(15), (16,)),
        (lambda a: a[:1].reshape(1, 1, 5), (4, 2, 8)),
        (lambda a: jnp.concatenate([a, a]), (8, 8)),
        (lambda a: jax.lax.cond(a.sum() > 0, jnp.sin, jnp.cos, a), (4, 8)),
    ],
)
def test_what_cannot_be_padded_before_is_left_as_it_is(function, wanted):
    assert ran(function, wanted, A) == function(A).shape


INDICES = jnp.array([0, 2, 2, 7, 8, 11, -1, -3])


@pytest.mark.parametrize("mode", ["clip", "drop", "promise_in_bounds"])
def test_sums_by_index_leave_out_or_clip_what_they_did(mode):
    indices = jnp.abs(INDICES) % 7 if mode == "promise_in_bounds" else INDICES

    def added(rows):
        return jnp.zeros((7, 5)).at[indices].add(rows, mode=mode)

    assert ran(added, (8, 8), whole_numbers(8, 5)) == (8, 8)


def sums_in_windows(size, mode):
    numbers_of = jax.lax.ScatterDimensionNumbers((1, 2), (), (0,))

    def added(rows):
        return jax.lax.scatter_add(jnp.zeros((7, 5)), INDICES[:, None], rows, numbers_of, mode=mode)

    return added, whole_numbers(8, size, 5)


@pytest.mark.parametrize(
    ("size", "mode", "is_padded"),
    [(1, "clip", True), (3, "clip", True), (1, "drop", True), (3, "drop", False)],
)
def test_sums_of_windows_are_padded_unless_a_window_could_reach_into_the_padding(
    size, mode, is_padded
):
    added, rows = sums_in_windows(size, mode)
    assert ran(added, (8, 8), rows) == ((8, 8) if is_padded else (7, 5))


# A loss of stacked weights and of a table that is used twice; no length divides over 8.

LAYERS, WIDTH, WORDS = 3, 10, 21


def loss(weights, tokens):
    @jax.checkpoint
    def layer(x, weight):
        return jnp.tanh(x @ weight), None

    x, _ = jax.lax.scan(layer, weights["table"][tokens], weights["layers"])
    logits = jax.nn.log_softmax(x @ weights["table"].T)
    return -jnp.take_along_axis(logits, tokens[..., None], -1).mean(), logits.sum()


def gradients_on(mesh, split, layouts):
    shapes = {"layers": (LAYERS, WIDTH, WIDTH), "table": (WORDS, WIDTH)}
    weights = {name: numbers(*shape) for name, shape in shapes.items()}
    tokens = jnp.arange(16 * 4).reshape(16, 4) * 5 % WORDS
    placed = {name: [NamedSharding(mesh, spec)] for name, spec in layouts.items()}
    plain = jax.grad(loss, has_aux=True)
    summed = summed_in_equal_parts(plain, placed, "gradient")

    def pinned(weights, tokens):
        tokens = jax.lax.with_sharding_constraint(tokens, NamedSharding(mesh, split))
        gradients, more = summed(weights, tokens)
        for name in gradients:
            gradients[name] = jax.lax.with_sharding_constraint(gradients[name], placed[name][0])
            gradients[name] = gradients[name] * 2.0
        return gradients, more

    jitted = jax.jit(pinned, out_shardings=NamedSharding(mesh, PartitionSpec()))
    found, more = jitted(weights, tokens)
    expected, expected_more = plain(weights, tokens)
    for name in shapes:
        np.testing.assert_allclose(found[name], 2.0 * expected[name], rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(more, expected_more, rtol=1e-5)
    return read_collectives(jitted.lower(weights, tokens).compile(), mesh)


@pytest.mark.parametrize(
    ("sizes", "split", "layouts"),
    [
        ({"data": 8}, "data", {"table": ("data",), "layers": (None, "data")}),
        ({"data": 8}, "data", {"table": (None, "data"), "layers": (None, None, "data")}),
        (
            {"replica": 2, "data": 4},
            ("replica", "data"),
            {"table": ("data",), "layers": (None, "data")},
        ),
    ],
)
def test_gradients_of_lengths_that_do_not_divide_are_scattered(sizes, split, layouts):
    specs = {name: PartitionSpec(*axes) for name, axes in layouts.items()}
    found = gradients_on(make_mesh(sizes), PartitionSpec(split), specs)
    reduced = [one for one in found if one.kind == "all-reduce" and "data" in one.mesh_axes]
    summed = [
        math.prod(map(int, lengths.split(",")))
        for one in reduced
        for lengths in re.findall(r"\[([\d,]+)\]", str(one.arrays))
    ]
    # Of 21 words are 24, of a width of 10 are 12 or 16; none of the true sizes divides by 8.
    assert max(summed) >= 120
    assert not [size for size in summed if size % 8]
    gathered = [one for one in found if one.kind == "all-gather" and "f32" in str(one.arrays)]
    # The weights that come out, and nothing to add gradients to.
    assert len(gathered) == 2
    if "replica" not in sizes:
        # The loss beside them is a few bytes.
        assert all(one.payload_bytes - one.scattered_bytes < 64 for one in reduced)


def test_programs_whose_lengths_divide_stay_as_they_are():
    def gradient_of(parameters, x):
        return jax.grad(lambda p: (p["w"] @ x).sum())(parameters), x

    layout = NamedSharding(make_mesh({"data": 8}), PartitionSpec("data"))
    summed = summed_in_equal_parts(gradient_of, {"w": [layout]}, "gradient")
    given = {"w": numbers(8, 3)}, numbers(3, 2)
    assert str(jax.make_jaxpr(summed)(*given)) == str(jax.make_jaxpr(gradient_of)(*given))
    uneven = {"w": numbers(9, 3)}, numbers(3, 2)
    kinds = {one.primitive.name for one in equations(jax.make_jaxpr(summed)(*uneven))}
    assert "sharding_constraint" in kinds


def test_constants_beside_the_gradient_stay_arrays():
    def gradient_of(parameters):
        count = jnp.asarray(64.0), jnp.int32(3), jnp.asarray(True), jnp.zeros(2)
        return jax.grad(lambda p: (p["w"] ** 2).sum())(parameters), count

    layout = NamedSharding(make_mesh({"data": 8}), PartitionSpec("data"))
    seen = []

    def kinds(parameters):
        for function in (gradient_of, summed_in_equal_parts(gradient_of, {"w": [layout]}, "g")):
            more = function(parameters)[1]
            seen.append([(x.sum().shape, x.dtype, jax.typeof(x).weak_type) for x in more])
        return more

    found = jax.jit(kinds)({"w": numbers(9)})
    assert seen[0] == seen[1]
    assert [x.tolist() for x in found] == [64.0, 3, True, [0.0, 0.0]]
