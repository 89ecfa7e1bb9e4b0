"""Prices by propagation against compiled steps, and against what rings send by the textbook."""

import functools

import jax
import jax.numpy as jnp
import optax
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import penzai_shard as pzs
from penzai_shard.arrays.structure import leaves_of
from penzai_shard.choosing.candidates import Candidate
from penzai_shard.choosing.compiled import compile_candidates
from penzai_shard.choosing.cost import Prices, StepCost, extrapolate, price_program
from penzai_shard.choosing.device_program import DeviceProgram, MarkedSteps
from penzai_shard.choosing.workload import read_workload
from penzai_shard.errors import PropagationError
from penzai_shard.layouts.layout import Layout
from penzai_shard.propagation.partition import MarkedProgram
from tests.choosing.models import read_llama, read_weights

WIDE, LONG = (("data", 2), ("model", 4)), (("data", 8),)
BATCH = {"batch": "data"}
SPLIT = {"neurons": "model", "heads": "model", "vocabulary": "model"}
SMALL = {"embedding": 64, "heads": 4, "projection": 8, "neurons": 256, "vocabulary": 128}
TOKENS = jax.ShapeDtypeStruct((16, 32), "int32")
LARGEST = pzs.fully_sharded("data", min_size=1)


@functools.cache
def llama():
    return read_llama(multiplier=2, **SMALL)


@functools.cache
def neurons():
    """A feed-forward layer on a table, in which nothing but the batch is pinned."""

    def loss(w, tokens):
        x = w["table"][tokens]
        x = x - x.mean(-1, keepdims=True)
        y = x + jnp.einsum(
            "bsn,en->bse", jax.nn.gelu(jnp.einsum("bse,ne->bsn", x, w["up"])), w["down"]
        )
        return (y**2).mean()

    weights = {
        "table": {"vocabulary": 128, "embedding": 32},
        "up": {"neurons": 128, "embedding": 32},
        "down": {"embedding": 32, "neurons": 128},
    }
    return read_weights(loss, weights, TOKENS)


@functools.cache
def logits():
    """Logits that are far larger than all weights."""

    def loss(w, tokens):
        x = w["table"][tokens] + w["table"][tokens].mean(1, keepdims=True)
        x = x * jax.lax.rsqrt((x**2).mean(-1, keepdims=True))
        losses = optax.softmax_cross_entropy_with_integer_labels(x @ w["head"], tokens)
        return losses.mean()

    weights = {
        "table": {"vocabulary": 2048, "embedding": 16},
        "head": {"embedding": 16, "vocabulary": 2048},
    }
    return read_weights(loss, weights, jax.ShapeDtypeStruct((128, 4), "int32"))


@functools.cache
def scanned():
    """Layers that are stacked, run as a loop and are computed again; no constraint in them."""

    def loss(w, tokens):
        def turn(x, w):
            return x + jax.nn.gelu(x @ w[0]) @ w[1], None

        x = jax.lax.scan(jax.checkpoint(turn), w["table"][tokens], (w["up"], w["down"]))[0]
        losses = optax.softmax_cross_entropy_with_integer_labels(x @ w["table"].T, tokens)
        return losses.mean()

    weights = {
        "table": {"vocabulary": 256, "embedding": 64},
        "up": {"layers": 3, "embedding": 64, "neurons": 256},
        "down": {"layers": 3, "neurons": 256, "embedding": 64},
    }
    return read_weights(loss, weights, jax.ShapeDtypeStruct((16, 8), "int32"), optax.adamw(1e-3))


def whole(parameters, **options):
    return Layout(parameters=parameters, compute=BATCH, blocks=(), **options)


SEQUENCE = Layout(
    parameters={"embedding": "data"} | SPLIT,
    compute=BATCH | SPLIT,
    between_blocks=BATCH | {"seq": "model"},
    rematerialise="nothing",
)
AGAIN = Layout(parameters={"embedding": "data"}, compute=BATCH, reshard_after_forward=True)
STEPS = {
    "sequence": (llama, Candidate(WIDE, SEQUENCE)),
    "ZeRO-1 in parts": (
        llama,
        Candidate(LONG, Layout(parameters={}, compute=BATCH, optimizer=LARGEST), 2),
    ),
    "gathered again": (llama, Candidate(LONG, AGAIN)),
    # Here two dimensions of products want one mesh axis.
    "neurons over the batch's axis": (neurons, Candidate(LONG, whole({"neurons": "data"}))),
    "largest": (neurons, Candidate(LONG, whole(LARGEST))),
    "logits by embedding": (logits, Candidate(LONG, whole({"embedding": "data"}))),
    "logits, largest": (logits, Candidate(LONG, whole(LARGEST))),
    "scanned, ZeRO-1": (scanned, Candidate(LONG, whole({}, optimizer=LARGEST))),
}


@pytest.mark.parametrize("name", STEPS)
def test_price_is_that_of_the_compiled_step(name):
    make, candidate = STEPS[name]
    cost = Prices(make()).price(candidate)
    (truth,) = compile_candidates(make(), [candidate])
    assert cost.flops == truth.flops
    least = 0.15 if "scanned" in name else 0.03
    assert sum(cost.traffic.values()) == pytest.approx(sum(truth.traffic.values()), rel=least)
    assert cost.memory["parameters"] == pytest.approx(truth.memory["parameters"], rel=0.01)
    assert cost.memory["optimizer"] == truth.memory["optimizer"]
    # Memory is an estimate.
    assert 0.5 < cost.memory_bytes / truth.memory_bytes < 1.3


def test_price_of_a_deep_model_is_that_of_all_its_blocks():
    names = {"up": ("embedding", "neurons"), "down": ("neurons", "embedding")}
    block = {name: jax.ShapeDtypeStruct((64, 64), "float32") for name in names}
    model = [pzs.name_axes(block, names) for _ in range(6)]

    def loss_fn(model, rng, state, x):
        for w in model:
            x = x + jnp.tanh(x @ w["up"]) @ w["down"]
        return (x**2).mean(), state, {}

    x = jax.ShapeDtypeStruct((32, 64), "float32")
    workload = read_workload(model, loss_fn, optax.adam(1e-3), {"x": x}, plain_arrays=True)
    candidate = Candidate(LONG, whole(LARGEST))
    deep = Prices(workload).price(candidate)
    all_blocks = price_program(MarkedSteps(workload, workload.model).place(candidate))
    assert deep.flops == all_blocks.flops == (6 * 2 * 3 - 1) * 2 * 4 * 64**2
    assert deep.memory["optimizer"] == all_blocks.memory["optimizer"]
    assert deep.traffic == pytest.approx(all_blocks.traffic)


def test_what_is_sent_says_its_axes():
    cost = Prices(llama()).price(Candidate(LONG, AGAIN))
    assert {axes for _, axes in cost.sent} == {("data",)}


def test_extrapolate_goes_on_line_by_line():
    one, two = (
        StepCost(n, {("gradient", ("x",)): 3.0 * n, ("activation", ("y",)): 1.0}, {"inputs": held})
        for n, held in ((1.0, 9.0), (2.0, 7.0))
    )
    cost = extrapolate([one, two], 10)
    assert (cost.flops, cost.traffic) == (10.0, {("x",): 30.0, ("y",): 1.0})
    # All blocks hold no less than one.
    assert cost.memory == {"inputs": 9.0}


# Small programs


def price(function, *specs, shape=(16, 16), **mesh_sizes):
    """The cost of a function of arrays of 1 KiB in some layouts."""
    sizes = mesh_sizes or {"data": 4}
    mesh = jax.sharding.AbstractMesh(tuple(sizes.values()), tuple(sizes))
    structs = [
        jax.ShapeDtypeStruct(shape, "float32", sharding=NamedSharding(mesh, P(*spec)))
        for spec in specs
    ]

    def pin(x, *spec):
        return jax.lax.with_sharding_constraint(x, NamedSharding(mesh, P(*spec)))

    traced = jax.jit(lambda *arrays: function(pin, *arrays)).trace(*structs)
    program = MarkedProgram(traced.lower(lowering_platforms=("cpu",)))
    own = [tuple((axis,) if axis else () for axis in mark.axes) for mark in program.marks]
    placed = program.place(sizes, own)
    (leaf,) = leaves_of({"inputs": structs[0]})
    return price_program(DeviceProgram(placed, dict.fromkeys(placed.arguments, leaf), {}))


ROWS, COLUMNS = ("data",), (None, "data")


def use_both(pin, x):
    product = pin(x @ x.T)
    return pin(-product, "data"), jnp.sin(product)


def gather_twice(pin, x):
    return jnp.sin(pin(x)).sum(), jnp.cos(pin(x)).sum()


def run_loop(turn, pin, x):
    return jax.lax.scan(lambda c, _: (turn(c), None), pin(jnp.sin(x)), None, 5)[0]


def gather_in_turns(pin, x):
    return run_loop(lambda c: pin(jnp.sin(pin(c, "data"))), pin, x)


def gather_the_same(pin, x, y):
    return run_loop(lambda c: pin(c @ pin(y)), pin, x)


# A function, how its arrays are split, and what is sent as a part of one array.
SENT = {
    # What rings send, by the textbook.
    "all-gather": (lambda pin, x: pin(x), [ROWS], 3 / 4),
    "sum": (lambda pin, x: pin(jnp.tile(x.sum(0), (16, 1))), [ROWS], 2 / 16 * 3 / 4),
    "all-reduce": (lambda pin, x: pin(x @ x.T), [COLUMNS], 2 * 3 / 4),
    "reduce-scatter": (lambda pin, x: pin(x @ x.T, "data"), [COLUMNS], 3 / 4),
    "all-to-all": (lambda pin, x: pin(x, "data"), [COLUMNS], 3 / 4 / 4),
    # Reductions scatter if only parts are used; sums that are only added are reduced once.
    "used in parts": (lambda pin, x: pin(-pin(x @ x.T), "data"), [COLUMNS], 3 / 4),
    "used whole, too": (use_both, [COLUMNS], 2 * 3 / 4),
    "added": (lambda pin, x, y: pin(x @ x.T) + pin(y @ y.T), [COLUMNS, COLUMNS], 2 * 3 / 4),
    "equal gathers": (gather_twice, [ROWS], 3 / 4),
    "in a loop": (gather_in_turns, [()], 5 * 3 / 4),
    "the same in a loop": (gather_the_same, [(), ROWS], 3 / 4),
}


@pytest.mark.parametrize("program", SENT)
def test_price_has_what_a_program_sends(program):
    function, specs, share = SENT[program]
    assert price(function, *specs).traffic == {("data",): 1024 * share}


def test_loop_of_unknown_turns_is_refused_if_something_in_it_costs():
    def turn(pin, x):
        return jax.lax.while_loop(lambda c: c.sum() < 5, lambda c: c @ x, x)

    def count(pin, x):
        return x + jax.lax.while_loop(lambda c: c < 5, lambda c: c * 2, x[0, 0])

    with pytest.raises(PropagationError) as raised:
        price(turn, ())
    assert "while" in raised.value.problems[0].path
    assert price(count, ()).flops == 0


def test_what_runs_per_device_is_refused():
    mesh = jax.sharding.AbstractMesh((4,), ("data",))
    sine = jax.shard_map(jnp.sin, mesh=mesh, in_specs=P("data"), out_specs=P("data"))
    with pytest.raises(PropagationError) as raised:
        price(lambda pin, x: sine(x), ROWS)
    assert "compile_step" in raised.value.problems[0].fix


def test_operations_are_those_of_one_device():
    product = price(lambda pin, x, y: x @ y, ("data", "model"), ("model",), data=4, model=2, idle=5)
    assert product.flops == 2 * 16**3 / 8

    def convolve(pin, x, kernel):
        image, kernel = x.reshape(1, 4, 16, 4), kernel.reshape(4, 4, 4, 4)
        return jax.lax.conv(image, kernel, (1, 1), "SAME")

    assert price(convolve, (), ()).flops == 2 * (4 * 16 * 4) * (4 * 4 * 4)
    assert price(gather_the_same, (), ROWS).flops == 5 * 2 * 16**3


def test_memory_is_that_of_what_is_there_at_once():
    def sort_sine(pin, x):
        first = jnp.sort(x)
        return jnp.sort(first + jnp.sin(first))

    def sort_twice(pin, x):
        first = jnp.sort(x)
        return jnp.sort(jnp.sort(first) + first)

    # What is computed element by element is there only if something else has to read it.
    held = [price(function, ()).memory["activations"] for function in (sort_sine, sort_twice)]
    assert held == [2 * 1024, 3 * 1024]
