"""A time that no compilation of a layout can beat, by hand and against compiled steps."""

import jax
import jax.numpy as jnp
import optax
import pytest
from penzai import pz

import penzai_shard as pzs
from penzai_shard.choosing.bound import bound
from penzai_shard.choosing.candidates import Candidate, make_candidates
from penzai_shard.choosing.compiled import compile_candidates
from penzai_shard.choosing.hardware import Hardware, step_time
from penzai_shard.choosing.workload import read_workload
from tests.choosing.models import build_layers, mlp_weights, read_weights, square_loss

HARDWARE = Hardware.read("v5e:4")
LINK = 50e9
WITHOUT = {"vocabulary": None, "names": {"heads": None}}
TENSOR_PARALLEL = pzs.Layout.tensor_parallel(**WITHOUT)
LAYERS = mlp_weights(512, 2048)
# Two weights of float32.
WEIGHTS = 2 * 512 * 2048 * 4


def make_mlp():
    """Two layers of Penzai, whose parameters a layout gathers."""
    model = pzs.abstract_model(build_layers, 512, 2048)
    x = jax.eval_shape(lambda: pz.nx.zeros({"batch": 8, "embedding": 512}))
    return read_workload(model, square_loss, optax.adam(1e-3), {"x": x})


def make_weights():
    """The same of plain weights, and a table of which few rows are looked up."""

    def loss(w, tokens):
        x = w["table"][tokens]
        x = x + jnp.tanh(x @ w["up"]) @ w["down"]
        return ((x @ w["head"].T) ** 2).mean()

    table = {"vocabulary": 8192, "embedding": 512}
    # The head is told apart from the table by nothing but what is done with it.
    weights = {"table": table, **LAYERS, "head": table}
    tokens = jax.ShapeDtypeStruct((8,), "int32")
    return read_weights(loss, weights, tokens, optax.adam(1e-3))


@pytest.fixture(scope="module")
def mlp():
    return make_mlp()


@pytest.mark.parametrize(
    ("layout", "mesh_sizes", "sent", "parts"),
    [
        # An all-reduce; scattered and gathered; gathered and scattered: all the same.
        (pzs.Layout.data_parallel(), {"data": 4}, 2 * 3 / 4, 1),
        (pzs.Layout.zero1(), {"data": 4}, 2 * 3 / 4, 4),
        (pzs.Layout.fully_sharded(), {"data": 4}, 2 * 3 / 4, 4),
        # Each device has half of each weight, and one other device has the same half.
        (TENSOR_PARALLEL, {"data": 2, "model": 2}, 1 / 2, 2),
        # Activations are not counted.
        (pzs.Layout.tensor_parallel(None, **WITHOUT), {"model": 4}, 0.0, 4),
    ],
)
def test_bound_is_what_must_be_sent_by_hand(mlp, layout, mesh_sizes, sent, parts):
    candidate = Candidate(tuple(mesh_sizes.items()), layout)
    rate = HARDWARE.bandwidths(mesh_sizes).get("data", LINK)
    # Two moments, read and written.
    update = 4 * WEIGHTS / parts / HARDWARE.memory_bandwidth
    assert bound(mlp, candidate, HARDWARE) == pytest.approx(
        max(sent * WEIGHTS / rate, update), rel=0.01
    )


def test_bound_between_hosts_is_that_of_their_network(mlp):
    layout = pzs.Layout.hybrid()
    candidate = Candidate((("replica", 2), ("data", 2)), layout)
    # Over both: gradients; within hosts: parameters; between them: what each has of gradients.
    rates = {"replica": 50e9, "data": 450e9}
    between, within, over_both = WEIGHTS / 4, WEIGHTS / 2, WEIGHTS * 3 / 4
    # Of what goes over both, hosts send a part of a third between them.
    least = max(
        (between + over_both / 3) / rates["replica"],
        (between + within + over_both) / sum(rates.values()),
    )
    assert bound(mlp, candidate, Hardware.read("h100:2x2")) == pytest.approx(least, rel=0.01)


def test_bound_of_much_computing_is_that_of_its_operations():
    """Three products of 2 x 64 x 512 x 2048 for each of two weights, but the first input's."""
    x = jax.ShapeDtypeStruct((65_536, 512), "float32")
    workload = read_weights(lambda w, x: (jnp.tanh(x @ w["up"]) @ w["down"]).mean(), LAYERS, x)
    candidate = Candidate((("data", 4),), pzs.Layout.data_parallel(blocks=()))
    flops = 5 * 2 * 65_536 * 512 * 2048 / 4
    assert bound(workload, candidate, HARDWARE) == pytest.approx(flops / HARDWARE.flops, rel=1e-6)


def test_bound_of_one_example_at_a_time_counts_no_gradients_of_weights(mlp):
    def flops_of(microbatches):
        candidate = Candidate((("data", 2), ("model", 2)), TENSOR_PARALLEL, microbatches)
        # Where nothing but computing takes time.
        fast = Hardware("fast", HARDWARE.topology, 1.0, None, memory_bandwidth=1e30, link=1e30)
        return bound(mlp, candidate, fast)

    # Of five products, two give gradients of weights: sums over the examples.
    assert flops_of(4) == flops_of(2) * 3 / 5


def make_small(loss, optimizer=None):
    """Two weights, of which a loss may use less than all."""
    x = jax.ShapeDtypeStruct((64, 512), "float32")
    return read_weights(
        lambda w, x: (loss(w["up"], w["down"], x) ** 2).mean(),
        *(LAYERS, x, optimizer or optax.adam(1e-3)),
    )


def half(x):
    return x.astype(jnp.bfloat16)


def in_turns(up, down, x):
    return jax.lax.scan(lambda x, _: (jnp.tanh(x @ up) @ down, None), x, length=3)[0]


CLIPPED = optax.chain(optax.clip_by_global_norm(1.0), optax.lamb(1e-3))
SMALL = {
    "cast": lambda: make_small(lambda up, down, x: half(x) @ half(up) @ half(down)),
    "cast, clipped": lambda: make_small(lambda up, down, x: half(x) @ half(up) @ down, CLIPPED),
    "not used": lambda: make_small(lambda up, down, x: x @ up + 0 * down.sum()),
    "decayed only": lambda: make_small(lambda up, down, x: (x @ up).mean() + (down**2).mean()),
    "frozen": lambda: make_small(lambda up, down, x: x @ jax.lax.stop_gradient(up) @ down),
    "in turns": lambda: make_small(in_turns),
    "penalty": lambda: make_small(lambda up, down, x: (x @ up).mean() + (down @ down.T).mean()),
    "of rank 1": lambda: make_small(lambda up, down, x: x @ (up[:, :1] @ down[:1])),
    "of a mean": lambda: make_small(lambda up, down, x: x.mean(0) @ up @ down),
    "of one example": lambda: make_small(lambda up, down, x: x[:1] @ up @ down),
    "first factors": lambda: make_small(lambda up, down, x: x[:, :1] @ up[:1] @ down),
}


@pytest.mark.parametrize("make_workload", [make_mlp, make_weights, *SMALL.values()])
def test_bound_is_never_above_a_compiled_step(make_workload):
    """With few examples, XLA moves rows and activations rather than what is not gathered."""
    workload = make_workload()
    found = make_candidates(workload, [{"data": 4}, {"data": 2, "model": 2}], microbatches=(1,))
    # The optimizer's state split, parameters split by two dimensions, and two mesh axes.
    chosen = [*[each for each in found if each.layout.rematerialise is None][1:4], found[-1]]
    for candidate, cost in zip(chosen, compile_candidates(workload, chosen), strict=True):
        exact = step_time(cost, dict(candidate.mesh_sizes), HARDWARE).bound
        assert bound(workload, candidate, HARDWARE) <= exact * 1.0001, candidate.words
