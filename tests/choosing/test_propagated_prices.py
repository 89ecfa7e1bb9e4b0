"""Prices by propagation are those of the compiled step, and marks stand for any layout."""

import collections
import types

import jax
import jax.numpy as jnp
import optax
import pytest

from penzai_shard import Layout, fully_sharded, make_mesh
from penzai_shard.choosing.by_propagation import PropagatedPrices
from penzai_shard.choosing.by_propagation.marked_steps import MarkedStep, StepTables
from penzai_shard.choosing.by_propagation.program_costs import cost_of
from penzai_shard.choosing.candidates import Candidate, candidates
from penzai_shard.choosing.shallow_models import Shallow
from penzai_shard.choosing.training_problem import TrainingProblem
from penzai_shard.errors import PropagationError
from penzai_shard.library_apis.compiler_api import FOR_PRICES_ON_CPUS
from penzai_shard.library_apis.shardy_collectives import MarkedProgram
from penzai_shard.library_apis.shardy_placed import PlacedOperation, PlacedProgram, PlacedValue
from penzai_shard.named_arrays import named_array
from tests.choosing.compiled_truth import compiled_truth
from tests.choosing.small_problems import llama, problem_of, tokens_like

WIDE, LONG = (("data", 2), ("model", 4)), (("data", 8),)
SPLIT = {"neurons": "model", "heads": "model", "vocabulary": "model"}
CANDIDATES = {
    "sequence": Candidate(
        WIDE,
        Layout(
            parameters={"embedding": "data"} | SPLIT,
            compute={"batch": "data"} | SPLIT,
            between_blocks={"batch": "data", "seq": "model"},
            rematerialise="nothing",
        ),
    ),
    "zero1 in parts": Candidate(
        LONG,
        Layout(parameters={}, compute={"batch": "data"}, optimizer=fully_sharded("data", 1)),
        2,
    ),
    "again": Candidate(
        LONG,
        Layout(
            parameters={"embedding": "data"}, compute={"batch": "data"}, reshard_after_forward=True
        ),
    ),
}


@pytest.fixture(scope="module")
def problem():
    return problem_of(llama(1, embedding_dim=64, mlp_hidden_dim=256, num_kv_heads=4))


@pytest.fixture(scope="module")
def prices(problem):
    return PropagatedPrices.of(problem)


@pytest.fixture(scope="module")
def truths(problem):
    return {name: compiled_truth(problem, each) for name, each in CANDIDATES.items()}


@pytest.mark.parametrize("name", CANDIDATES)
def test_a_step_costs_what_it_costs_compiled(name, prices, truths):
    cost, truth = prices.cost(CANDIDATES[name]), truths[name]
    assert (cost.memory["parameters"], cost.memory["optimizer"]) == (
        truth.parameters,
        truth.optimizer,
    )
    assert cost.flops == pytest.approx(truth.flops, rel=0.01)
    for axes, bytes_ in truth.traffic.items():
        assert cost.traffic[axes] == pytest.approx(bytes_, rel=0.05)
    temporaries = cost.memory["activations"] + cost.memory["gradients"]
    assert 0.4 * truth.temporaries < temporaries < 1.5 * truth.temporaries


@pytest.fixture(scope="module")
def prices_without_blocks():
    """Those of a feed-forward layer on a table, in which nothing but the batch is pinned."""
    shapes = {
        "table": {"vocabulary": 128, "embedding": 32},
        "up": {"neurons": 128, "embedding": 32},
        "down": {"embedding": 32, "neurons": 128},
    }
    model = {
        name: named_array(jax.ShapeDtypeStruct(tuple(axes.values()), jnp.float32), tuple(axes))
        for name, axes in shapes.items()
    }

    def loss_fn(*, model, rng, state, tokens):
        weights = {name: array.unwrap(*array.named_axes) for name, array in model.items()}
        x = weights["table"][tokens.unwrap("batch", "seq")]
        x = x - x.mean(-1, keepdims=True)
        neurons = jax.nn.gelu(jnp.einsum("bse,ne->bsn", x, weights["up"]))
        y = x + jnp.einsum("bsn,en->bse", neurons, weights["down"])
        return (y**2).mean(), state, {}

    inputs = {"tokens": tokens_like(16, 32)}
    problem = TrainingProblem(model, loss_fn, optax.sgd(0.1), inputs)
    return PropagatedPrices.of(problem), problem


@pytest.mark.parametrize(
    "parameters", [fully_sharded("data", 1), {"neurons": "data"}, {"embedding": "data"}]
)
def test_where_two_layouts_want_a_mesh_axis_the_one_wins_that_wins_compiled(
    parameters, prices_without_blocks
):
    prices, problem = prices_without_blocks
    layout = Layout(parameters=parameters, compute={"batch": "data"}, blocks=())
    candidate = Candidate(LONG, layout)
    cost, truth = prices.cost(candidate), compiled_truth(problem, candidate)
    assert cost.flops == truth.flops
    assert cost.traffic == pytest.approx(truth.traffic, rel=0.05)


@pytest.fixture(scope="module")
def prices_of_logits():
    """Those of a table and of logits that are far larger than all weights."""
    shapes = {
        "table": {"vocabulary": 2048, "embedding": 16},
        "head": {"embedding": 16, "vocabulary": 2048},
    }
    model = {
        name: named_array(jax.ShapeDtypeStruct(tuple(axes.values()), jnp.float32), tuple(axes))
        for name, axes in shapes.items()
    }

    def loss_fn(*, model, rng, state, tokens):
        table, head = (model[name].unwrap(*axes) for name, axes in shapes.items())
        tokens = tokens.unwrap("batch", "seq")
        x = table[tokens] + table[tokens].mean(1, keepdims=True)
        x = x * jax.lax.rsqrt((x**2).mean(-1, keepdims=True))
        losses = optax.softmax_cross_entropy_with_integer_labels(x @ head, tokens)
        return losses.mean(), state, {}

    problem = TrainingProblem(model, loss_fn, optax.sgd(0.1), {"tokens": tokens_like(128, 4)})
    return PropagatedPrices.of(problem), problem


@pytest.mark.parametrize("parameters", [{"embedding": "data"}, fully_sharded("data", 1)])
def test_products_are_split_and_means_of_rows_are_gathered_as_they_are_compiled(
    parameters, prices_of_logits
):
    prices, problem = prices_of_logits
    layout = Layout(parameters=parameters, compute={"batch": "data"}, blocks=())
    candidate = Candidate(LONG, layout)
    cost, truth = prices.cost(candidate), compiled_truth(problem, candidate)
    assert cost.flops == truth.flops
    assert cost.traffic == pytest.approx(truth.traffic, rel=0.01)


def collectives_of(placed):
    return collections.Counter(
        (each.kind, each.mesh_axes, placed.values[each.results[0]], each.times)
        for each in placed.operations
        if each.mesh_axes
    )


def split_in_layers(with_vocabulary, with_sequence, with_gathers):
    split = SPLIT if with_vocabulary else {**SPLIT, "vocabulary": None}
    layout = Layout(
        parameters={"embedding": "data" if with_gathers else None} | split,
        compute={"batch": "data"} | split,
        between_blocks={"batch": "data", "seq": "model"} if with_sequence else None,
        rematerialise="dots",
    )
    return Candidate(WIDE, layout)


def test_a_layout_in_place_of_marks_is_as_if_the_step_were_lowered_for_it(problem):
    asked = (
        ({"data": 4, "model": 2}, None, 1, 2),
        ({"data": 8}, "nothing", 2, 2),
        ({"x": 2, "y": 2, "z": 2}, None, 1, 2),
    )
    drawn = [
        one
        for mesh, policy, parts, count in asked
        for found in [candidates(problem, [mesh], rematerialise=(policy,), microbatches=(parts,))]
        for one in found[1 :: len(found) // count][:count]
    ]
    alike = [split_in_layers(*which) for which in ((1, 0, 1), (1, 1, 0), (0, 0, 0), (0, 1, 1))]
    drawn += alike
    assert len({(repr(one.layout), one.mesh_axes) for one in drawn}) == 10
    structures = [StepTables.of(problem, one).structure for one in alike]
    # One program serves all of these but the last, in which logits are split by the sequence alone.
    assert structures[0] == structures[1] == structures[2] != structures[3]
    steps = {}
    for one in drawn:
        tables = StepTables.of(problem, one)
        if tables.structure not in steps:
            steps[tables.structure] = MarkedStep(problem, tables)
        mesh = make_mesh(one.mesh_shape, abstract=True)
        step, state, inputs = problem.built(one.layout, mesh, one.microbatches)
        direct = MarkedProgram(step.trace(state, **inputs).lower(lowering_platforms=("cpu",)))
        expected = direct.placed(one.mesh_shape, [mark.dimensions for mark in direct.marks])
        placed = steps[tables.structure].placed(tables)
        assert collectives_of(placed) == collectives_of(expected), one
        assert [placed.values[each] for each in placed.arguments] == [
            expected.values[each] for each in expected.arguments
        ]
    assert len(steps) < len(drawn)


def test_a_deep_model_costs_what_one_and_two_blocks_say():
    deep = problem_of(llama(3))
    candidate = Candidate(
        WIDE[:1], Layout(parameters=fully_sharded("data", 1), compute={"batch": "data"})
    )
    short = PropagatedPrices.of(deep)
    found, whole = short.cost(candidate), PropagatedPrices(Shallow((deep,), 1)).cost(candidate)
    assert found.flops == pytest.approx(whole.flops)
    assert found.traffic == pytest.approx(whole.traffic)
    assert found.memory == pytest.approx(whole.memory)


def test_what_is_sent_says_what_it_is_and_whose(prices):
    cost = prices.cost(CANDIDATES["again"])
    assert {each.what for each in cost.sent} >= {"parameter", "gradient"}
    assert all("block_0" not in each.where for each in cost.sent)
    parameters = [each for each in cost.sent if each.what == "parameter"]
    assert all("embedding" in each.names for each in parameters)
    assert {each.mesh_axes for each in cost.sent} == {("data",)}


def test_what_runs_per_device_is_refused_and_not_priced_wrongly():
    mesh = jax.sharding.AbstractMesh((2,), ("rows",))
    rows = jax.NamedSharding(mesh, jax.P("rows"))
    x = jax.ShapeDtypeStruct((8, 8), jnp.float32, sharding=rows)
    per_device = jax.shard_map(jnp.sin, mesh=mesh, in_specs=jax.P("rows"), out_specs=jax.P("rows"))
    lowered = jax.jit(per_device).trace(x).lower(lowering_platforms=("cpu",))
    with pytest.raises(PropagationError, match=r"jax\.shard_map are not priced by propagation"):
        MarkedProgram(lowered)


# The judges of figures: programs written by hand, and what rings send by the textbook.


class Scopes:
    of_step = ("optimizer",)

    def paths_in(self, name):
        return ()

    def label(self, owner):
        return owner


class Step:
    arguments = types.MappingProxyType({})
    scopes = Scopes()


def priced(values, *operations, mesh):
    program = PlacedProgram(tuple(values), operations, (0,), ("x",), (operations[-1].results[0],))
    return cost_of(program, Step(), mesh)


WHOLE, ROWS, COLUMNS = ((), ()), (("data",), ()), ((), ("data",))


@pytest.mark.parametrize(
    ("kind", "before", "after", "sent"),
    [
        ("all_gather", ROWS, WHOLE, 1024 * 3 / 4),
        ("all_reduce", WHOLE, WHOLE, 2 * 1024 * 3 / 4),
        ("reduce_scatter", WHOLE, ROWS, 1024 * 3 / 4),
        ("all_to_all", COLUMNS, ROWS, 1024 / 4 * 3 / 4),
        ("collective_permute", ROWS, ROWS, 1024 / 4),
    ],
)
def test_a_ring_sends_what_the_textbook_says(kind, before, after, sent):
    values = [PlacedValue((16, 16), 4, before), PlacedValue((16, 16), 4, after)]
    one = PlacedOperation(f"sdy.{kind}", "", (0,), (1,), ("data",), times=3)
    cost = priced(values, one, mesh={"data": 4})
    assert cost.traffic == {("data",): 3 * sent}


def test_a_reduction_of_which_parts_are_taken_scatters_also_behind_a_sum():
    whole, part = PlacedValue((16, 16), 4, WHOLE), PlacedValue((16, 16), 4, ROWS)
    operations = [
        PlacedOperation("sdy.all_reduce", "", (0,), (1,), ("data",)),
        PlacedOperation("sdy.all_reduce", "", (0,), (2,), ("data",)),
        PlacedOperation("stablehlo.add", "", (1, 2), (3,)),
        PlacedOperation("sdy.all_slice", "", (3,), (4,), ("data",)),
    ]
    cost = priced([whole] * 4 + [part], *operations, mesh={"data": 4})
    assert cost.traffic == {("data",): 2 * 1024 * 3 / 4}
    used_whole = PlacedOperation("stablehlo.sine", "", (3,), (4,))
    cost = priced([whole] * 5, *operations[:3], used_whole, mesh={"data": 4})
    assert cost.traffic == {("data",): 4 * 1024 * 3 / 4}


def test_a_sum_over_two_dimensions_is_two_reductions():
    split = PlacedValue((8, 8, 16), 4, (("data",), ("model",), ()))
    values = [split, PlacedValue((16,), 4, ((),)), PlacedValue((16,), 4, ((),))]
    operations = [
        PlacedOperation("stablehlo.reduce", "", (0,), (1,)),
        PlacedOperation("sdy.all_reduce", "", (1,), (2,), ("data", "model")),
    ]
    cost = priced(values, *operations, mesh={"data": 4, "model": 2})
    assert cost.traffic == {("data",): 2 * 64 * 3 / 4, ("model",): 2 * 64 / 2}


def test_products_count_by_the_mesh_axes_that_split_them():
    values = [
        PlacedValue((16, 32), 4, (("data",), ("model",))),
        PlacedValue((32, 8), 4, (("model",), ())),
        PlacedValue((16, 8), 4, (("data",), ())),
    ]
    product = PlacedOperation("stablehlo.dot_general", "", (0, 1), (2,), contracted=(0,), times=2)
    cost = priced(values, product, mesh={"data": 4, "model": 2, "idle": 5})
    assert cost.flops == 2 * 2 * 16 * 32 * 8 / 8


def test_memory_is_that_of_what_is_there_at_once():
    value = PlacedValue((16, 16), 4, WHOLE)
    operations = [
        PlacedOperation("stablehlo.sort", "", (0,), (1,)),
        PlacedOperation("stablehlo.sort", "", (1,), (2,)),
        PlacedOperation("stablehlo.transpose", "", (2,), (3,)),
        PlacedOperation("stablehlo.add", "", (1, 3), (4,)),
        PlacedOperation("stablehlo.sort", "", (4,), (5,)),
    ]
    cost = priced([value] * 6, *operations, mesh={"data": 4})
    assert cost.memory["activations"] == 3 * 1024


def test_what_is_computed_element_by_element_is_there_only_if_something_else_reads_it():
    value = PlacedValue((16, 16), 4, WHOLE)
    operations = [
        PlacedOperation("stablehlo.sort", "", (0,), (1,)),
        PlacedOperation("stablehlo.sine", "", (1,), (2,)),
        PlacedOperation("stablehlo.add", "", (1, 2), (3,)),
        PlacedOperation("stablehlo.sort", "", (3,), (4,)),
    ]
    cost = priced([value] * 5, *operations, mesh={"data": 4})
    assert cost.memory["activations"] == 2 * 1024
    reads_sine = PlacedOperation("stablehlo.sort", "", (2,), (5,))
    cost = priced([value] * 6, *operations, reads_sine, mesh={"data": 4})
    assert cost.memory["activations"] == 3 * 1024


def test_what_is_added_to_rows_is_written_down_even_where_it_is_the_same_for_many():
    rows, one = PlacedValue((16, 16), 4, WHOLE), PlacedValue((16,), 4, ((),))
    operations = [
        PlacedOperation("stablehlo.sort", "", (0,), (1,)),
        PlacedOperation("stablehlo.broadcast_in_dim", "", (1,), (2,)),
        PlacedOperation("stablehlo.constant", "", (), (3,)),
        PlacedOperation("stablehlo.scatter", "", (3, 0, 2), (4,)),
        PlacedOperation("stablehlo.sort", "", (4,), (5,)),
    ]
    cost = priced([one, one, rows, rows, rows, rows], *operations, mesh={"data": 4})
    assert cost.memory["activations"] == 2 * 1024


@pytest.fixture(scope="module")
def wide_layers():
    """Layers of which the weights are far larger than what flows."""
    names = {"up": ("embedding", "neurons"), "down": ("neurons", "embedding")}
    lengths = {"batch": 64, "embedding": 128, "neurons": 512}

    def struct(*axes):
        return named_array(jax.ShapeDtypeStruct([lengths[a] for a in axes], jnp.float32), axes)

    def loss_fn(*, model, rng, state, x):
        y = x.unwrap("batch", "embedding")
        for layer in model:
            up, down = (layer[name].unwrap(*axes) for name, axes in names.items())
            y = jnp.tanh(y @ up) @ down
        return jnp.square(y).mean(), state, {}

    layers = [{name: struct(*axes) for name, axes in names.items()} for _ in range(2)]
    inputs = {"x": struct("batch", "embedding")}
    problem = TrainingProblem(layers, loss_fn, optax.adamw(1e-3), inputs)
    return problem, PropagatedPrices.of(problem)


GATHERED = {"embedding": "data"}


@pytest.mark.parametrize(
    ("parameters", "optimizer", "parts"),
    [({}, None, 1), ({}, None, 4), ({}, fully_sharded("data", 1), 4), (GATHERED, None, 4)],
    ids=["whole", "whole, in parts", "zero1, in parts", "gathered, in parts"],
)
def test_gradients_are_there_until_their_update_and_sums_of_parts_all_the_time(
    parameters, optimizer, parts, wide_layers
):
    problem, prices = wide_layers
    batch = {"batch": "data"}
    layout = Layout(parameters=parameters, compute=batch, optimizer=optimizer, blocks=())
    memory = prices.cost(Candidate(LONG, layout, parts)).memory
    step, state, inputs = problem.built(layout, make_mesh(dict(LONG)), parts)
    lowered = step.lower(state, **inputs)
    compiled = lowered.compile(compiler_options=dict(FOR_PRICES_ON_CPUS)).memory_analysis()
    held = memory["gradients"] + memory["activations"]
    assert held == pytest.approx(compiled.temp_size_in_bytes, rel=0.15)


def test_loops_count_as_often_as_they_run_and_others_are_refused():
    mesh = jax.sharding.AbstractMesh((1, 2), ("rows", "rest"))
    rows = jax.NamedSharding(mesh, jax.P("rows"))
    x = jax.ShapeDtypeStruct((8, 8), jnp.float32, sharding=rows)

    def scanned(x):
        return jax.lax.scan(lambda c, _: (c + jnp.sin(x).sum(0), None), jnp.zeros(8), None, 5)[0]

    def unknown(x):
        return jax.lax.while_loop(lambda c: c.sum() < 5, lambda c: c + x.sum(0), jnp.zeros(8))

    def lowered(function):
        return jax.jit(function).trace(x).lower(lowering_platforms=("cpu",))

    marked = MarkedProgram(lowered(scanned))
    specs = [tuple(("data",) if axes else () for axes in each.dimensions) for each in marked.marks]
    program = marked.placed({"data": 2}, specs)
    assert [each.times for each in program.operations if each.kind == "sdy.all_reduce"] == [5]
    with pytest.raises(PropagationError, match="runs an unknown number of times"):
        MarkedProgram(lowered(unknown))


@pytest.mark.parametrize("name", ["again", "sequence"])
def test_layers_in_a_stack_hold_what_layers_in_a_row_do(name):
    """What they keep for the backward pass is written down as stacks, and slices of these."""
    stacked, in_a_row = (
        PropagatedPrices.of(problem_of(llama(5, stack=stack, num_kv_heads=4))).cost(
            CANDIDATES[name]
        )
        for stack in (True, False)
    )
    assert stacked.memory_bytes == pytest.approx(in_a_row.memory_bytes, rel=0.1)
