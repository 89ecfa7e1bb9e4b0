"""The flat list: layouts with and without notes, edges that belong together, turns of loops."""

import random

import pytest
from jax import lax

from penzai_shard.propagation.flat import propagate_lowered
from tests.causes.programs import ALL_KINDS, draw
from tests.propagation.programs import array, lower


def axes_of(spec):
    return {axis for axes in spec or () for axis in axes}


@pytest.mark.parametrize("seed", range(40))
def test_drawn_program_is_laid_out_as_without_notes(seed):
    drawn = draw(random.Random(seed), ALL_KINDS)
    lowered = lower(lambda *xs: drawn.run(0, xs), *drawn.structs())
    program = propagate_lowered(lowered)
    plain = propagate_lowered(lowered, notes=False)
    specs = [value.spec for value in program.values]
    assert specs == [value.spec for value in plain.values]
    assert all({*value.origins} == axes_of(value.spec) for value in program.values)
    # All that an edge names belongs to its operation, and has the mesh axis, or is fixed to it.
    for operation in program.operations:
        fixed = axes_of(operation.pin and operation.pin.spec)
        for edge in operation.edges:
            values = {edge.source, *edge.targets}
            assert values <= {*operation.operands, *operation.results}
            assert all(edge.mesh_axis in axes_of(specs[n]) | fixed for n in values)


def loop(first, last, step=1, compare=lax.lt):
    """A loop whose turns are easily counted by hand."""

    def turn(carry):
        return carry[0] + step, lax.tan(carry[1])

    return lambda x: lax.while_loop(lambda carry: compare(carry[0], last), turn, (first, x))[1]


def repeat(count, body, x):
    return lax.fori_loop(0, count, lambda _, y: body(y), x)


TURNS = {
    "up": (loop(0, 3), 3),
    "starts at 2, by threes": (loop(2, 9, 3), 3),
    "never": (loop(5, 3), 0),
    "down": (loop(9, 2, -1, lax.gt), None),
    "by nothing": (loop(0, 3, 0), None),
    "of floats": (loop(0.0, 3.0, 1.0), None),
    "until it is small": (lambda x: lax.while_loop(lambda y: y.sum() < 3, lax.tan, x), None),
    "twice in a loop": (lambda x: repeat(5, lambda y: lax.tan(repeat(4, lax.tan, y)), x), 20),
    "in an unknown loop": (lambda x: repeat(x[0, 0].astype(int), loop(0, 3), x), None),
}


@pytest.mark.parametrize("name", TURNS)
def test_operations_know_how_often_they_run(name):
    function, times = TURNS[name]
    program = propagate_lowered(lower(function, array("data")))
    assert next(each.times for each in program.operations if each.kind.endswith(".tan")) == times
