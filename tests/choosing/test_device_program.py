"""Steps that are lowered once with marks: a layout in their place is as if lowered for it."""

import collections

import optax
import pytest

import penzai_shard as pzs
from penzai_shard.choosing.candidates import Candidate
from penzai_shard.choosing.device_program import MarkedSteps
from penzai_shard.errors import PlanError
from penzai_shard.layouts.layout import Layout
from penzai_shard.propagation.partition import MarkedProgram
from tests.choosing.models import read_llama

WIDE, LONG = (("data", 4), ("model", 2)), (("data", 8),)
BATCH, STORED = {"batch": "data"}, {"embedding": "data"}
HEADS = {"neurons": "model", "heads": "model"}
SPLIT = HEADS | {"vocabulary": "model"}
LARGEST = pzs.fully_sharded("data", min_size=1)


def lay(stored, compute, **options):
    return Layout(parameters=stored, compute=BATCH | compute, **options)


SEQUENCE = BATCH | {"seq": "model"}
CANDIDATES = {
    "fully sharded in parts": Candidate(LONG, lay(LARGEST, {}, reshard_after_forward=True), 2),
    "ZeRO-1": Candidate(LONG, lay({}, {}, optimizer=LARGEST)),
    "ZeRO-1, finer or not": Candidate(LONG, lay(STORED, {}, optimizer=LARGEST)),
    "tensor parallel": Candidate(WIDE, lay(SPLIT, SPLIT)),
    "sequence": Candidate(WIDE, lay(STORED | SPLIT, SPLIT, between_blocks=SEQUENCE)),
    "sequence of logits": Candidate(
        WIDE, lay(STORED | HEADS, HEADS, between_blocks=SEQUENCE, rematerialise="dots")
    ),
    "idle": Candidate(WIDE, lay(STORED, {})),
    "three axes": Candidate(
        (("x", 2), ("y", 2), ("z", 2)),
        Layout(
            parameters={"embedding": ("x", "y"), "neurons": "z"},
            compute={"batch": ("x", "y"), "neurons": "z"},
        ),
    ),
}


def make_steps(batch, optimizer=None):
    sizes = {"embedding": 16, "heads": 4, "projection": 4, "neurons": 32, "vocabulary": 64}
    workload = read_llama(batch, 8, optimizer, multiplier=2, **sizes)
    return workload, MarkedSteps(workload, workload.model)


@pytest.fixture(scope="module")
def steps():
    return make_steps(16)


def lower_for(workload, candidate):
    """The same program, lowered for this very layout."""
    step, state, inputs = workload.build(candidate)
    lowered = step.lowerable(state, **inputs).trace().lower(lowering_platforms=("cpu",))
    # Axes that a mark does not show: the second one of a dimension.
    program = MarkedProgram(lowered)
    more = {"x": ("x", "y")} if "x" in dict(candidate.mesh_sizes) else {}
    specs = [tuple(more.get(x, (x,) if x else ()) for x in mark.axes) for mark in program.marks]
    return program.place(dict(candidate.mesh_sizes), specs)


def read_collectives(operations, values):
    return collections.Counter(
        (each.kind, each.mesh_axes, each.times, values[value].shape, values[value].spec)
        for each in operations
        for value in each.results
        if each.mesh_axes
    )


def check_equal(steps, candidate):
    workload, marked = steps
    placed, own = marked.place(candidate), lower_for(workload, candidate)
    found = read_collectives(placed.operations, placed.values)
    assert found == read_collectives(own.operations, own.values)
    assert [placed.values[n].spec for n in placed.arguments] == [
        own.values[n].spec for n in own.arguments
    ]


@pytest.mark.parametrize("name", CANDIDATES)
def test_layout_in_place_of_marks_is_as_if_the_step_were_lowered_for_it(name, steps):
    check_equal(steps, CANDIDATES[name])


def test_statistics_of_some_dimensions_lie_as_those_of_their_own_parameter():
    factored = make_steps(16, optax.adafactor(1e-3, min_dim_size_to_factor=8))
    check_equal(factored, Candidate(WIDE, lay(HEADS, HEADS, optimizer=LARGEST | HEADS), 2))


def test_arguments_are_the_arrays_of_the_step(steps):
    placed = steps[1].place(CANDIDATES["ZeRO-1"])
    arrays = [(value, leaf) for value, leaf in placed.arguments.items() if leaf.shape]
    assert {leaf.path.partition("/")[0] for _, leaf in arrays} == {"params", "opt_state", "inputs"}
    for value, leaf in arrays:
        parts = 1 if leaf.path.startswith("params") else 8
        assert placed.values[value].shape == leaf.shape
        assert placed.bytes(value) == 4 * leaf.value.size / parts


def test_batch_that_is_not_split_may_be_of_any_length():
    whole = Layout(parameters=HEADS, compute=HEADS)
    placed = make_steps(3)[1].place(Candidate((("model", 2),), whole))
    assert {each.mesh_axes for each in placed.operations} == {(), ("model",)}


def test_length_that_does_not_divide_is_a_problem(steps):
    three = Candidate((("data", 3),), lay(LARGEST, {}))
    with pytest.raises(PlanError):
        steps[1].place(three)
