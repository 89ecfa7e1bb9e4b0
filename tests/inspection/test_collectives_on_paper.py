"""Programs whose traffic can be worked out on paper: what the report says of them equals it.

The mesh is 4 x 2; D and M are the sizes of its axes "data" and "model". Arrays are float32 where
nothing else is said, F bytes per element. An index with a mesh axis, as in A[R, J/model], is split
over that axis. Of n devices and a payload of P bytes, by a ring, each sends (n - 1) / n P in an
all-gather, a reduce-scatter and an all-to-all, 2 (n - 1) / n P in an all-reduce, and P in a permute
(Thakur et al. 2005; Chan et al. 2007). P is the larger of what goes in and comes out on one device.

XLA's CPU compiler writes a reduce-scatter that it finds itself as an all-reduce of which each
device keeps a slice. The papers' reduce-scatter is then an all-reduce here, with twice its bytes;
where a step asks for one itself, by ``jax.lax.psum_scatter``, it stays what it is.

Sources: Austin et al. 2025, "How to Scale Your Model", chapter "Sharded matrices and how to
multiply them", whose four cases come first; Shoeybi et al. 2019, "Megatron-LM", section 3;
Rajbhandari et al. 2020, "ZeRO", section 7; Xu et al. 2021, "GSPMD", section 3; Korthikanti et al.
2022, "Reducing activation recomputation", section 4.2.2; Lepikhin et al. 2021, "GShard", section
3.2; Liu et al. 2023, "Ring attention", section 3; Huang et al. 2019, "GPipe", section 2.
"""

import dataclasses
from collections import Counter
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from penzai_shard.inspection.traffic.collective_report import collectives
from penzai_shard.meshes import make_mesh

D, M = 4, 2
MESH = make_mesh({"data": D, "model": M})
P = PartitionSpec
F = 4
DATA, MODEL, BOTH = ("data",), ("model",), ("data", "model")

# Sizes of a matrix product, C[R, K] = A[R, J] B[J, K].
R, J, K = 64, 128, 256
# Of a feed-forward layer: batch, model dimension, hidden dimension; of its stack: layers.
B, E, H, N = 1024, 64, 256, 6
# Of a loss: vocabulary. Of attention: sequence, and the dimension of a head.
V, S, HEAD = 512, 128, 16


def array(shape, *spec, dtype="float32"):
    return jax.ShapeDtypeStruct(shape, dtype, sharding=on_mesh(*spec))


def on_mesh(*spec):
    return NamedSharding(MESH, P(*spec))


def per_device(function, into, out):
    return jax.shard_map(function, mesh=MESH, in_specs=into, out_specs=out, check_vma=False)


def mlp(weights, x):
    up, down = weights
    return jax.nn.relu(x @ up) @ down


def squared(function):
    """A loss whose gradient is linear in what the function gives: nothing is reduced for it."""
    return lambda *arguments: (function(*arguments) ** 2).sum()


def stack(weights, x):
    """N feed-forward layers in a loop, the activations split over the batch between them."""

    def layer(x, weights):
        return jax.lax.with_sharding_constraint(mlp(weights, x), on_mesh("data")), None

    return jax.lax.scan(layer, x, weights)[0]


def vocabulary_loss(table, x, labels):
    """Cross-entropy of each token, of logits that are split over the vocabulary."""
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


def ring_attention(query, key, value):
    """Each device's queries meet the keys and values of all, which go round, one place a turn."""
    ring = [(i, (i + 1) % D) for i in range(D)]

    def turn(carry, _):
        key, value, total = carry
        total += jax.nn.relu(query @ key.T) @ value
        return (*jax.lax.ppermute((key, value), "data", ring), total), None

    carry = (key, value, jnp.zeros_like(query))
    return jax.lax.scan(turn, carry, length=D)[0][2]


def pipeline(weights, x):
    """GPipe: N microbatches through D stages, one stage a turn, in N + D - 1 turns."""

    def turn(x, _):
        return jax.lax.ppermute(x @ weights, "data", [(i, i + 1) for i in range(D - 1)]), None

    return jax.lax.scan(turn, x, length=N + D - 1)[0]


def nested(weights, x):
    return jax.lax.scan(lambda x, _: (stack(weights, x), None), x, length=3)[0]


def until_large(x):
    def grown(x):
        return jax.lax.psum(x, "data") * 0.5

    return jax.lax.while_loop(lambda x: x[0, 0] < 100.0, grown, x)


@dataclasses.dataclass
class Program:
    """A step, what it is called with, how its results are split, and what it moves on paper.

    Each collective as (kind, mesh axes, payload, what one device sends each time, times).
    ``scatters`` says that its all-reduces are reduce-scatters on paper.
    """

    step: Callable[..., Any]
    arguments: tuple[Any, ...]
    results: Any
    moves: list[tuple[str, tuple[str, ...], int, float, int | None]]
    scatters: bool = False


PROGRAMS = {
    # Case 1 of "How to Scale Your Model": no contracting dimension is split. Nothing moves.
    "split over R and K": Program(
        jnp.dot, (array((R, J), "data"), array((J, K), None, "model")), on_mesh(*BOTH), []
    ),
    # Case 2: the contracting dimension of one is split. It is gathered: A, F R J bytes.
    "split over J in one": Program(
        jnp.dot,
        (array((R, J), None, "model"), array((J, K))),
        on_mesh(),
        [("all-gather", MODEL, F * R * J, F * R * J * (M - 1) / M, 1)],
    ),
    # Case 3: both are split over J. Each device has a partial sum of C, F R K bytes.
    "split over J in both": Program(
        jnp.dot,
        (array((R, J), None, "model"), array((J, K), "model")),
        on_mesh(),
        [("all-reduce", MODEL, F * R * K, 2 * F * R * K * (M - 1) / M, 1)],
    ),
    # The same with C[R, K/data]: a reduce-scatter of F R K bytes, which sends (D - 1) / D of them;
    # the CPU's compiler writes an all-reduce, which sends twice that.
    "split over J in both, and K in the result": Program(
        jnp.dot,
        (array((R, J), None, "data"), array((J, K), "data")),
        on_mesh(None, "data"),
        [("all-reduce", DATA, F * R * K, 2 * F * R * K * (D - 1) / D, 1)],
        scatters=True,
    ),
    # The same asked for by name: what goes in is the larger side, all of C.
    "split over J in both, scattered by name": Program(
        per_device(
            lambda a, b: jax.lax.psum_scatter(a @ b, "data", scatter_dimension=1, tiled=True),
            (P(None, "data"), P("data")),
            P(None, "data"),
        ),
        (array((R, J), None, "data"), array((J, K), "data")),
        None,
        [("reduce-scatter", DATA, F * R * K, F * R * K * (D - 1) / D, 1)],
    ),
    # Case 4: R and K are split over the same mesh axis, which C cannot have twice. With C[R/data]
    # B is gathered.
    "R and K split over one mesh axis": Program(
        jnp.dot,
        (array((R, J), "data"), array((J, K), None, "data")),
        on_mesh("data"),
        [("all-gather", DATA, F * J * K, F * J * K * (D - 1) / D, 1)],
    ),
    # GSPMD's two-dimensional split, A[R/data, J/model] B[J/model, K/data] -> C[R/data]: a device's
    # rows of B, J/M of them, are gathered over data; partial sums, R/D rows, are added over model.
    "split over both mesh axes": Program(
        jnp.dot,
        (array((R, J), *BOTH), array((J, K), "model", "data")),
        on_mesh("data"),
        [
            ("all-gather", DATA, F * J // M * K, F * J // M * K * (D - 1) / D, 1),
            ("all-reduce", MODEL, F * R // D * K, 2 * F * R // D * K * (M - 1) / M, 1),
        ],
    ),
    # A whole array from all eight devices: 7/8 of it comes from others. In int8, a byte each.
    "gathered over both mesh axes": Program(
        jnp.transpose,
        (array((R, K), BOTH, dtype="int8"),),
        on_mesh(),
        [("all-gather", BOTH, R * K, R * K * (D * M - 1) / (D * M), 1)],
    ),
    # ZeRO stage 3, forward: each weight is gathered once.
    "FSDP, forward": Program(
        mlp,
        ((array((E, H), "data"), array((H, E), None, "data")), array((B, E), "data")),
        on_mesh("data"),
        [("all-gather", DATA, F * E * H, F * E * H * (D - 1) / D, 1)] * 2,
    ),
    # Forward and backward: each weight is gathered once, as it is kept for the backward pass, and
    # each gradient is added and scattered: by one all-reduce of both, on the CPU.
    "FSDP, gradients": Program(
        jax.grad(squared(mlp)),
        ((array((E, H), "data"), array((H, E), None, "data")), array((B, E), "data")),
        (on_mesh("data"), on_mesh(None, "data")),
        [("all-gather", DATA, F * E * H, F * E * H * (D - 1) / D, 1)] * 2
        + [("all-reduce", DATA, 2 * F * E * H, 4 * F * E * H * (D - 1) / D, 1)],
        scatters=True,
    ),
    # N layers in a loop: what they need is gathered in each turn, and once more in each turn
    # backwards, where a loop keeps no gathered weights: ZeRO's 3 P (n - 1) / n with P the bytes of
    # all weights, of which the third part is here an all-reduce of both gradients at once.
    "FSDP, gradients of a loop of N layers": Program(
        jax.grad(squared(stack)),
        (
            (array((N, E, H), None, "data"), array((N, H, E), None, None, "data")),
            array((B, E), "data"),
        ),
        (on_mesh(None, "data"), on_mesh(None, None, "data")),
        [("all-gather", DATA, F * E * H, F * E * H * (D - 1) / D, N)] * 4
        + [("all-reduce", DATA, 2 * F * E * H, 4 * F * E * H * (D - 1) / D, N)],
        scatters=True,
    ),
    # Megatron's feed-forward layer: one all-reduce of the activations, [B/data, E].
    "tensor parallel, forward": Program(
        mlp,
        ((array((E, H), None, "model"), array((H, E), "model")), array((B, E), "data")),
        on_mesh("data"),
        [("all-reduce", MODEL, F * B // D * E, 2 * F * B // D * E * (M - 1) / M, 1)],
    ),
    # Backward, one more: of the gradient of the input. The batch is whole on each device here, so
    # that no gradient of a weight is added.
    "tensor parallel, gradients": Program(
        jax.grad(squared(mlp), (0, 1)),
        ((array((E, H), None, "model"), array((H, E), "model")), array((B, E))),
        ((on_mesh(None, "model"), on_mesh("model")), on_mesh()),
        [("all-reduce", MODEL, F * B * E, 2 * F * B * E * (M - 1) / M, 1)] * 2,
    ),
    # The same in a loop of N layers, forward: N times.
    "tensor parallel, a loop of N layers": Program(
        stack,
        (
            (array((N, E, H), None, None, "model"), array((N, H, E), None, "model")),
            array((B, E), "data"),
        ),
        on_mesh("data"),
        [("all-reduce", MODEL, F * B // D * E, 2 * F * B // D * E * (M - 1) / M, N)],
    ),
    # The loop in a loop of three turns: 3 N times.
    "tensor parallel, a loop in a loop": Program(
        nested,
        (
            (array((N, E, H), None, None, "model"), array((N, H, E), None, "model")),
            array((B, E), "data"),
        ),
        on_mesh("data"),
        [("all-reduce", MODEL, F * B // D * E, 2 * F * B // D * E * (M - 1) / M, 3 * N)],
    ),
    # Megatron's sequence parallelism: in place of that all-reduce a gathering of the input and a
    # reduce-scatter of the result, each of [S, E]; together they send as much.
    "sequence parallel, forward": Program(
        per_device(sequence_parallel_mlp, ((P(None, "model"), P("model")), P("model")), P("model")),
        ((array((E, H), None, "model"), array((H, E), "model")), array((S, E), "model")),
        None,
        [
            ("all-gather", MODEL, F * S * E, F * S * E * (M - 1) / M, 1),
            ("reduce-scatter", MODEL, F * S * E, F * S * E * (M - 1) / M, 1),
        ],
    ),
    # Data parallel: all gradients are added, 2 P (n - 1) / n with P = 2 E H elements (ZeRO, 7.1);
    # XLA combines them into one all-reduce.
    "data parallel, gradients": Program(
        jax.grad(squared(mlp)),
        ((array((E, H)), array((H, E))), array((B, E), "data")),
        (on_mesh(), on_mesh()),
        [("all-reduce", DATA, 2 * F * E * H, 4 * F * E * H * (D - 1) / D, 1)],
    ),
    # Megatron's vocabulary-parallel loss: three numbers per token of [B/data] are reduced: the
    # maximum first; then the sum of exponentials and the target's logit, which XLA combines.
    "vocabulary parallel loss": Program(
        vocabulary_loss,
        (array((E, V), None, "model"), array((B, E), "data"), array((B,), "data", dtype="int32")),
        on_mesh("data"),
        [
            ("all-reduce", MODEL, F * B // D, 2 * F * B // D * (M - 1) / M, 1),
            ("all-reduce", MODEL, 2 * F * B // D, 4 * F * B // D * (M - 1) / M, 1),
        ],
    ),
    # From a split over the batch to one over the sequence: each device keeps 1/D of its [S/D, K].
    "from one dimension to another": Program(
        lambda x: x + x,
        (array((S, K), "data"),),
        on_mesh(None, "data"),
        [("all-to-all", DATA, F * S // D * K, F * S // D * K * (D - 1) / D, 1)],
    ),
    # GShard: two all-to-alls of a device's tokens, [D experts, capacity S, E].
    "experts": Program(
        per_device(experts, (P("data"), P(None, "data")), P(None, "data")),
        (array((D, E, E), "data"), array((D, D * S, E), None, "data")),
        None,
        [("all-to-all", DATA, F * D * S * E, F * D * S * E * (D - 1) / D, 1)] * 2,
    ),
    # One place along a ring: all that a device has.
    "shifted along a ring": Program(
        per_device(
            lambda x: jax.lax.ppermute(x, "data", [(i, (i + 1) % D) for i in range(D)]),
            P("data"),
            P("data"),
        ),
        (array((S, K), "data"),),
        None,
        [("collective-permute", DATA, F * S // D * K, F * S // D * K, 1)],
    ),
    # Ring attention: keys and values, [S/D, HEAD] each, in each of D turns.
    "ring attention": Program(
        per_device(ring_attention, (P("data"),) * 3, P("data")),
        (array((S, HEAD), "data"),) * 3,
        None,
        [("collective-permute", DATA, F * S // D * HEAD, F * S // D * HEAD, D)] * 2,
    ),
    # GPipe: a microbatch's activations, [S, E], go on by one stage in each of N + D - 1 turns.
    "pipeline": Program(
        per_device(pipeline, (P("data"), P("data")), P("data")),
        (array((D * E, E), "data"), array((D * S, E), "data")),
        None,
        [("collective-permute", DATA, F * S * E, F * S * E, N + D - 1)],
    ),
    # A loop that ends by what it computes: the program does not say how often it runs.
    "in a loop of unknown length": Program(
        per_device(until_large, P("data"), P("data")),
        (array((S, K), "data"),),
        None,
        [("all-reduce", DATA, F * S // D * K, 2 * F * S // D * K * (D - 1) / D, None)],
    ),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_kinds_mesh_axes_bytes_and_times_are_those_on_paper(name):
    program = PROGRAMS[name]
    report = collectives(jax.jit(program.step, out_shardings=program.results), *program.arguments)
    found = Counter(
        (one.kind, one.mesh_axes, one.payload_bytes, one.wire_bytes, one.times)
        for one in report.collectives
    )
    assert found == Counter(program.moves)
    assert report.wire_bytes == sum(wire * (times or 0) for *_, wire, times in program.moves)
    # Where the papers have a reduce-scatter, half of what the CPU's all-reduces send.
    reduced = sum(
        wire * times for kind, *_, wire, times in program.moves if kind == "all-reduce" and times
    )
    saved = reduced / 2 if program.scatters else 0
    assert report.wire_bytes_as_meant == report.wire_bytes - saved


def test_groups_that_are_a_part_of_a_mesh_axis_are_named_as_such():
    """Two groups of two neighbours along data add [S/D, K] each: 2 (2 - 1) / 2 of it is sent."""
    pairs = [[0, 1], [2, 3]]
    step = per_device(
        lambda x: jax.lax.psum(x, "data", axis_index_groups=pairs), P("data"), P("data")
    )
    (one,) = collectives(jax.jit(step), array((S, K), "data")).collectives
    assert (one.mesh_axes, one.axes_text) == (DATA, "data (2 of 4, neighbours)")
    assert (one.group_size, one.wire_bytes) == (2, F * S // D * K)


def test_what_is_in_a_branch_counts_as_run_and_not_in_the_least_time():
    def step(flag, x):
        summed = jax.lax.cond(flag, lambda x: jax.lax.psum(x, "data"), lambda x: x, x)
        return jax.lax.psum(summed, "model")

    into, out = (P(), P("data", "model")), P("data")
    report = collectives(
        jax.jit(per_device(step, into, out)), array((), dtype="bool"), array((S, K), *BOTH)
    )
    payload = F * S // D * K // M
    data, model = 2 * payload * (D - 1) / D, 2 * payload * (M - 1) / M
    assert [(one.mesh_axes, one.at_most) for one in report.collectives] == [
        (DATA, True),
        (MODEL, False),
    ]
    assert report.wire_bytes == data + model
    assert report.time({"data": 1, "model": 1}) == model
    assert "1 place is in a branch of a condition, and counts as always run" in str(report)


def test_what_the_cpu_moves_in_wider_numbers_is_said():
    x = array((R, K), BOTH, dtype="bfloat16")
    report = collectives(jax.jit(jnp.transpose, out_shardings=on_mesh()), x)
    assert report.collectives[0].arrays == (f"f32[{K},{R}]",)
    said = "the compiler for CPUs moves bfloat16 as float32"
    assert [note.startswith(said) for note in report.notes] == [True]
