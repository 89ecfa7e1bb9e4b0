"""Prices by propagation are those of the compiled step, and marks stand for any layout."""

import collections
import types

import jax
import jax.numpy as jnp
import pytest

from penzai_shard import Layout, fully_sharded, make_mesh
from penzai_shard.choosing.by_propagation import PropagatedPrices
from penzai_shard.choosing.by_propagation.marked_steps import MarkedStep, StepTables
from penzai_shard.choosing.by_propagation.program_costs import cost_of
from penzai_shard.choosing.candidates import Candidate, candidates
from penzai_shard.choosing.shallow_models import Shallow
from penzai_shard.errors import PropagationError
from penzai_shard.library_apis.shardy_collectives import (
    MarkedProgram,
    PlacedOperation,
    PlacedProgram,
    PlacedValue,
)
from tests.choosing.compiled_truth import compiled_truth
from tests.choosing.small_problems import llama, problem_of

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


def collectives_of(placed):
    return collections.Counter(
        (each.kind, each.mesh_axes, placed.values[each.results[0]], each.times)
        for each in placed.operations
        if each.mesh_axes
    )


def test_a_layout_in_place_of_marks_is_as_if_the_step_were_lowered_for_it(problem):
    asked = (
        ({"data": 4, "model": 2}, None, 1),
        ({"data": 8}, "nothing", 2),
        ({"x": 2, "y": 2, "z": 2}, None, 1),
    )
    drawn = [
        one
        for mesh, policy, parts in asked
        for found in [candidates(problem, [mesh], rematerialise=(policy,), microbatches=(parts,))]
        for one in found[1 :: len(found) // 4][:4]
    ]
    assert len({(repr(one.layout), one.mesh_axes) for one in drawn}) == 12
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
    assert short.notes == ("3 equal blocks, priced from one and two of them",)
    found, whole = short.cost(candidate), PropagatedPrices(Shallow((deep,), 1, "")).cost(candidate)
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


WHOLE, ROWS = ((), ()), (("data",), ())


@pytest.mark.parametrize(
    ("kind", "spec", "sent"),
    [
        ("all_gather", WHOLE, 1024 * 3 / 4),
        ("all_reduce", WHOLE, 2 * 1024 * 3 / 4),
        ("reduce_scatter", ROWS, 1024 * 3 / 4),
        ("all_to_all", ROWS, 1024 / 4 * 3 / 4),
        ("collective_permute", ROWS, 1024 / 4),
    ],
)
def test_a_ring_sends_what_the_textbook_says(kind, spec, sent):
    values = [PlacedValue((16, 16), 4, WHOLE), PlacedValue((16, 16), 4, spec)]
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
    product = PlacedOperation("stablehlo.dot_general", "", (0, 1), (2,), contracted=(1,), times=2)
    cost = priced(values, product, mesh={"data": 4, "model": 2, "idle": 5})
    assert cost.flops == 2 * 2 * 16 * 32 * 8 / 8


def test_memory_is_that_of_what_is_there_at_once():
    value = PlacedValue((16, 16), 4, WHOLE)
    operations = [
        PlacedOperation("stablehlo.sine", "", (0,), (1,)),
        PlacedOperation("stablehlo.sine", "", (1,), (2,)),
        PlacedOperation("stablehlo.transpose", "", (2,), (3,)),
        PlacedOperation("stablehlo.add", "", (1, 3), (4,)),
        PlacedOperation("stablehlo.sine", "", (4,), (5,)),
    ]
    cost = priced([value] * 6, *operations, mesh={"data": 4})
    assert cost.memory["activations"] == 3 * 1024


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
