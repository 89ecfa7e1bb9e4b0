"""Programs whose traffic can be worked out on paper: what ``collectives`` says equals it.

The mesh is 4 x 2; D and M are the sizes of its axes "data" and "model". Arrays are float32 where
nothing else is said, F bytes per element. An index with a mesh axis, as in A[R, J/model], is split
over that axis.

XLA's CPU compiler writes a reduce-scatter that it finds itself as an all-reduce of which each
device keeps a slice. Where a step asks for one, by ``jax.lax.psum_scatter``, it stays what it is.

Sources: Austin et al. 2025, "How to Scale Your Model", chapter "Sharded matrices and how to
multiply them", whose four cases come first; Shoeybi et al. 2019, "Megatron-LM", section 3;
Rajbhandari et al. 2020, "ZeRO", section 7; Xu et al. 2021, "GSPMD", section 3; Korthikanti et al.
2022, "Reducing activation recomputation", section 4.2.2; Lepikhin et al. 2021, "GShard", section
3.2; Liu et al. 2023, "Ring attention", section 3.
"""

import collections

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import roofline
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import penzai_shard as pzs

D, M, F = 4, 2, 4
MESH = pzs.make_mesh({"data": D, "model": M})
DATA, MODEL, BOTH = ("data",), ("model",), ("data", "model")
DEVICES = {DATA: D, MODEL: M, BOTH: D * M}
GATHER, REDUCE, SCATTER = "all-gather", "all-reduce", "reduce-scatter"
EXCHANGE, PERMUTE = "all-to-all", "collective-permute"

# Sizes of a matrix product, C[R, K] = A[R, J] B[J, K].
R, J, K = 64, 128, 256
# Of a feed-forward layer: batch, model dimension, hidden dimension; of its stack: layers.
B, E, H, N = 1024, 64, 256, 6
# Of a loss: vocabulary. Of attention: sequence, and the dimension of a head.
V, S, HEAD = 512, 128, 16


def sent(kind, payload, count):
    """What one device sends in a ring (Thakur et al. 2005; Chan et al. 2007)."""
    shares = {REDUCE: 2 * (count - 1) / count, PERMUTE: 1}
    return payload * shares.get(kind, (count - 1) / count)


def on_mesh(*spec):
    return NamedSharding(MESH, P(*spec))


def array(shape, *spec, dtype="float32"):
    return jax.ShapeDtypeStruct(shape, dtype, sharding=on_mesh(*spec))


def per_device(function, into, out):
    return jax.shard_map(function, mesh=MESH, in_specs=into, out_specs=out, check_vma=False)


def split(function, *over):
    """A function of one array per device, split over some mesh axes before and behind."""
    return per_device(function, P(*over), P(*over))


def mlp(weights, x):
    up, down = weights
    return jax.nn.relu(x @ up) @ down


def squared(function):
    """A loss whose gradient is linear in what the function gives: nothing is added for it."""
    return lambda *arguments: (function(*arguments) ** 2).sum()


def stack(weights, x):
    """N feed-forward layers in a loop, the activations split over the batch between them."""

    def layer(x, weights):
        return jax.lax.with_sharding_constraint(mlp(weights, x), on_mesh("data")), None

    return jax.lax.scan(layer, x, weights)[0]


def nested(weights, x):
    return jax.lax.scan(lambda x, _: (stack(weights, x), None), x, length=3)[0]


def vocabulary_loss(table, x, labels):
    """Cross entropy of each token, of logits that are split over the vocabulary."""
    logits = x @ table
    right = (logits * jax.nn.one_hot(labels, V)).sum(-1)
    return jax.nn.logsumexp(logits, axis=-1) - right


def sequence_parallel_mlp(weights, x):
    """Korthikanti et al.: gather the sequence, the layer's part, add and scatter the sequence."""
    x = jax.lax.all_gather(x, "model", axis=0, tiled=True)
    return jax.lax.psum_scatter(mlp(weights, x), "model", scatter_dimension=0, tiled=True)


def experts(weights, tokens):
    """GShard: tokens [experts, capacity, E] go to their expert's device, and back."""
    tokens = jax.lax.all_to_all(tokens, "data", 0, 1, tiled=True)
    return jax.lax.all_to_all(tokens @ weights, "data", 1, 0, tiled=True)


RING = [(i, (i + 1) % D) for i in range(D)]


def ring_attention(query, key, value):
    """Each device's queries meet the keys and values of all, which go round, one place a turn."""

    def turn(carry, _):
        key, value, total = carry
        total += jax.nn.relu(query @ key.T) @ value
        return (*jax.lax.ppermute((key, value), "data", RING), total), None

    carry = (key, value, jnp.zeros_like(query))
    return jax.lax.scan(turn, carry, length=D)[0][2]


def until_large(x):
    grown = lambda x: jax.lax.psum(x, "data") * 0.5  # noqa: E731
    return jax.lax.while_loop(lambda x: x[0, 0] < 100.0, grown, x)


def counted(x):
    """Starts at 2, goes up by 3, as long as it is at most 11: 2, 5, 8, 11."""
    turn = lambda c: (c[0] + 3, jax.lax.psum(c[1], "data") * 0.5)  # noqa: E731
    return jax.lax.while_loop(lambda c: c[0] <= 11, turn, (2, x))[1]


def scatter(a, b):
    return jax.lax.psum_scatter(a @ b, "data", scatter_dimension=1, tiled=True)


FSDP = (array((E, H), "data"), array((H, E), None, "data"))
FSDP_STACK = (array((N, E, H), None, "data"), array((N, H, E), None, None, "data"))
TENSOR = (array((E, H), None, "model"), array((H, E), "model"))
TENSOR_STACK = (array((N, E, H), None, None, "model"), array((N, H, E), None, "model"))
BATCH = array((B, E), "data")

# A step, what it is called with, how its results are split, and what it moves on paper: kind, mesh
# axes, payload, times.
PROGRAMS = {
    # No contracting dimension is split: nothing moves.
    "case 1": (jnp.dot, (array((R, J), "data"), array((J, K), None, "model")), on_mesh(*BOTH), []),
    # That of one is split, and is gathered.
    "case 2": (jnp.dot, (array((R, J), None, "model"), array((J, K))), on_mesh(),
               [(GATHER, MODEL, F * R * J, 1)]),
    # Both are split over it: each device has a partial sum.
    "case 3": (jnp.dot, (array((R, J), None, "model"), array((J, K), "model")), on_mesh(),
               [(REDUCE, MODEL, F * R * K, 1)]),
    # R and K are split over the same mesh axis, which C cannot have twice.
    "case 4": (jnp.dot, (array((R, J), "data"), array((J, K), None, "data")), on_mesh("data"),
               [(GATHER, DATA, F * J * K, 1)]),
    "case 3, scattered": (jnp.dot, (array((R, J), None, "data"), array((J, K), "data")),
                          on_mesh(None, "data"), [("kept slice", DATA, F * R * K, 1)]),
    "case 3, scattered by name": (
        per_device(scatter, (P(None, "data"), P("data")), P(None, "data")),
        (array((R, J), None, "data"), array((J, K), "data")), None,
        [(SCATTER, DATA, F * R * K, 1)]),
    # GSPMD's A[R/data, J/model] B[J/model, K/data] -> C[R/data].
    "two dimensions": (
        jnp.dot, (array((R, J), *BOTH), array((J, K), "model", "data")), on_mesh("data"),
        [(GATHER, DATA, F * J // M * K, 1), (REDUCE, MODEL, F * R // D * K, 1)]),
    # A byte per element.
    "gathered over both": (jnp.transpose, (array((R, K), BOTH, dtype="int8"),), on_mesh(),
                           [(GATHER, BOTH, R * K, 1)]),
    # The CPU moves bfloat16 as float32.
    "bfloat16": (jnp.transpose, (array((R, K), BOTH, dtype="bfloat16"),), on_mesh(),
                 [(GATHER, BOTH, F * R * K, 1)]),
    # ZeRO stage 3: each weight is gathered once; forward, and kept for the backward pass.
    "FSDP": (mlp, (FSDP, BATCH), on_mesh("data"), [(GATHER, DATA, F * E * H, 1)] * 2),
    "FSDP, gradients": (
        jax.grad(squared(mlp)), (FSDP, BATCH), (on_mesh("data"), on_mesh(None, "data")),
        [(GATHER, DATA, F * E * H, 1)] * 2 + [("kept slice", DATA, 2 * F * E * H, 1)]),
    # In a loop they are gathered once more in each turn backwards.
    "FSDP, gradients, loop": (
        jax.grad(squared(stack)), (FSDP_STACK, BATCH),
        (on_mesh(None, "data"), on_mesh(None, None, "data")),
        [(GATHER, DATA, F * E * H, N)] * 4 + [("kept slice", DATA, 2 * F * E * H, N)]),
    # Megatron: one sum of the activations forward, one of the input's gradient backward. The batch
    # is whole on each device there, so that no gradient of a weight is added.
    "tensor parallel": (mlp, (TENSOR, BATCH), on_mesh("data"),
                        [(REDUCE, MODEL, F * B // D * E, 1)]),
    "tensor parallel, gradients": (
        jax.grad(squared(mlp), (0, 1)), (TENSOR, array((B, E))),
        ((on_mesh(None, "model"), on_mesh("model")), on_mesh()),
        [(REDUCE, MODEL, F * B * E, 1)] * 2),
    "tensor parallel, loop in a loop": (nested, (TENSOR_STACK, BATCH), on_mesh("data"),
                                        [(REDUCE, MODEL, F * B // D * E, 3 * N)]),
    "sequence parallel": (
        per_device(sequence_parallel_mlp, ((P(None, "model"), P("model")), P("model")), P("model")),
        (TENSOR, array((S, E), "model")), None,
        [(GATHER, MODEL, F * S * E, 1), (SCATTER, MODEL, F * S * E, 1)]),
    # Both gradients in one sum (ZeRO, 7.1).
    "data parallel": (jax.grad(squared(mlp)), ((array((E, H)), array((H, E))), BATCH),
                      (on_mesh(), on_mesh()), [(REDUCE, DATA, 2 * F * E * H, 1)]),
    # Three numbers per token: the maximum; then the sum and the target's logit, in one.
    "vocabulary parallel": (
        vocabulary_loss,
        (array((E, V), None, "model"), BATCH, array((B,), "data", dtype="int32")), on_mesh("data"),
        [(REDUCE, MODEL, F * B // D, 1), (REDUCE, MODEL, 2 * F * B // D, 1)]),
    # One mesh axis after the other.
    "norm": (lambda x: (x**2).sum(), (array((R, K), *BOTH),), on_mesh(),
             [(REDUCE, DATA, F, 1), (REDUCE, MODEL, F, 1)]),
    # Each device keeps 1/D of its part.
    "another dimension": (lambda x: x + x, (array((S, K), "data"),), on_mesh(None, "data"),
                          [(EXCHANGE, DATA, F * S // D * K, 1)]),
    "another mesh axis": (lambda x: x + x, (array((S, K), "data", "model"),),
                          on_mesh(None, ("model", "data")),
                          [(EXCHANGE, DATA, F * S // D * K // M, 1)]),
    "experts": (per_device(experts, (P("data"), P(None, "data")), P(None, "data")),
                (array((D, E, E), "data"), array((D, D * S, E), None, "data")), None,
                [(EXCHANGE, DATA, F * D * S * E, 1)] * 2),
    "shifted": (split(lambda x: jax.lax.ppermute(x, "data", RING), "data"),
                (array((S, K), "data"),), None, [(PERMUTE, DATA, F * S // D * K, 1)]),
    "ring attention": (per_device(ring_attention, (P("data"),) * 3, P("data")),
                       (array((S, HEAD), "data"),) * 3, None,
                       [(PERMUTE, DATA, F * S // D * HEAD, D)] * 2),
    "counted": (split(counted, "data"), (array((S, K), "data"),), None,
                [(REDUCE, DATA, F * S // D * K, 4)]),
    "until large": (split(until_large, "data"), (array((S, K), "data"),), None,
                    [(REDUCE, DATA, F * S // D * K, None)]),
    "added over both": (split(lambda x: jax.lax.psum(x, BOTH), *BOTH), (array((S, K), *BOTH),),
                        None, [(REDUCE, BOTH, F * S // D * K // M, 1)]),
}  # fmt: skip


@pytest.mark.parametrize("name", PROGRAMS)
def test_collectives_on_paper(name):
    step, arguments, results, moves = PROGRAMS[name]
    report = pzs.collectives(jax.jit(step, out_shardings=results), *arguments)
    found = [(c.kind, c.mesh_axes, c.payload_bytes, c.times) for c in report.collectives]
    written = [(REDUCE if kind == "kept slice" else kind, *rest) for kind, *rest in moves]
    assert collections.Counter(found) == collections.Counter(written)
    totals = [
        sum(sent(k, size, DEVICES[axes]) * (times or 0) for k, axes, size, times in each)
        for each in (written, moves)
    ]
    assert [report.wire_bytes, report.wire_bytes_with_reduce_scatters] == totals
    assert all(sum(p.payload_bytes for p in c.parts) == c.payload_bytes for c in report.collectives)
    assert len(report.unknown_times) == sum(times is None for *_, times in moves)


def test_collectives_of_a_program_per_device_are_those_of_roofline():
    def step(x, y):
        x = jax.lax.all_gather(x, "model", axis=1, tiled=True) * 2
        x = jax.lax.ppermute(jnp.sin(x), "data", RING)
        y = jax.lax.psum(jnp.cos(y), "data")
        return x, jax.lax.psum_scatter(jnp.tan(y), "model", scatter_dimension=1, tiled=True)

    specs = {"in_specs": (P("data", "model"), P("data")), "out_specs": (P(*BOTH), P(None, "model"))}
    arrays = array((S, K), *BOTH), array((R, J), "data")
    _, expected = roofline.roofline(step, mesh=MESH, **specs)(*arrays)
    jitted = jax.jit(jax.shard_map(step, mesh=MESH, check_vma=False, **specs))
    totals = pzs.collectives(jitted, *arrays).by_mesh_axis()
    assert {axis: total.wire_bytes for axis, total in totals.items()} == expected.ici_bytes
    assert np.prod(list(expected.ici_bytes.values())) > 0
