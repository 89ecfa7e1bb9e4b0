"""Where mesh axes come from and where they are lost: small programs of which that is known."""

import random

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from penzai_shard.causes.ways import base
from tests.causes.programs import SideBySide, draw, find_ways, scanned
from tests.propagation.programs import MESH, PARTLY, array, manual, pinned
from tests.propagation.programs import undecided as free

# Matrices of 16 x 16: rows over data, rows over model, both, columns over either, whole, free.
DATA, MODEL, BOTH = array("data"), array("model"), array("data", "model")
COLUMNS, COLUMNS_MODEL, WHOLE, FREE = array(None, "data"), array(None, "model"), array(), free()
STACK = array(None, None, "model", shape=(3, 16, 16))
TWELVE, ROWS = array("data", shape=(12, 16)), P("data")
OF_X, OF_BOTH = "data argument x", "data argument x, model argument y"
CONSTRAINED = "data constraint sharding_constraint"
AROUND = "data shard_map shard_map, model argument x"


def causes_of_result(ways):
    """For each mesh axis of the first result kind and name of its cause."""
    found, value = [], ways.program.results[0]
    for axis in (axis for axes in ways.values[value].spec or () for axis in axes):
        cause = ways.cause(value, axis)
        name = cause.operation.name.rpartition("/")[2] if cause.operation else ""
        if cause.kind == "argument":
            name = "xyz"[ways.program.arguments.index(cause.value)]
        found.append(f"{axis} {cause.kind} {name}".strip())
    return ", ".join(found)


def pinned_behind(x):
    y = jnp.sin(x)
    return y, pinned(y, "data")


CAUSES = {
    "an argument": (lambda x: jnp.sin(x.T), [COLUMNS], OF_X),
    "a product": (lambda x, y: x @ y, [DATA, COLUMNS_MODEL], OF_BOTH),
    "a constraint": (lambda x: jnp.sin(pinned(x, "data")), [WHOLE], CONSTRAINED),
    "a constraint behind": (pinned_behind, [FREE], CONSTRAINED),
    "around a shard_map": (lambda x: PARTLY(jnp.cos(x)), [BOTH], AROUND),
    "a scan": (scanned, [DATA, STACK], OF_BOTH),
    "branches": (lambda x: jax.lax.cond(x[0, 0] > 0, jnp.sin, jnp.cos, x), [DATA], OF_X),
    "parts together": (lambda x: jnp.sin(x.reshape(2, 8, 16)).reshape(16, 16) + 1, [DATA], OF_X),
    "two that want it": (lambda x, y: x + y, [DATA, COLUMNS], OF_X),
    "nothing": (lambda x: x + 1, [FREE], ""),
}


@pytest.mark.parametrize("name", CAUSES)
def test_cause_of_a_layout(name):
    function, arguments, expected = CAUSES[name]
    assert causes_of_result(find_ways(function, *arguments)) == expected


def test_cause_of_a_layout_that_is_asked_for():
    ways = find_ways(lambda x: jnp.sin(x.T), FREE, out_shardings=NamedSharding(MESH, ROWS))
    cause = ways.cause(ways.program.arguments[0], "data")
    assert (cause.kind, cause.dimension) == ("result", 0)


def piece(x, i):
    return jax.lax.dynamic_slice_in_dim(x, i, 4)


UNEVEN = "uneven data:(1)2 flow, uneven data:(2)2 flow"
# Reason, mesh axis and operation of each loss.
LOSSES = {
    "elementwise": (lambda x: jnp.sin(x.T), [BOTH], ""),
    "cut where the mesh axis is": (lambda x: x.reshape(4, 4, 16), [DATA], ""),
    "in a shard_map": (PARTLY, [BOTH], ""),
    "summed": (lambda x: x.max(), [BOTH], "reduced data reduce, reduced model reduce"),
    "looked up": (lambda x, i: x[i], [DATA, free((5,), "int32")], "reduced data gather"),
    "into a shard_map": (lambda x: manual(jnp.sin, P(), P())(x.T), [DATA], "pinned data flow"),
    "gathered": (lambda x, y: x @ y, [DATA, DATA], "used data dot_general"),
    "across": (lambda x, y: x + y, [BOTH, COLUMNS], "conflict model add, used data add"),
    "two layouts": (lambda x, y: x + y, [DATA, MODEL], "conflict data add, conflict model add"),
    "joined": (lambda x: x.reshape(256), [COLUMNS], "cut data reshape"),
    "cut in three": (lambda x: x.reshape(3, 4, 16), [TWELVE], "cut data reshape"),
    "parts coming out": (lambda x: x.reshape(2, 8, 16), [DATA], UNEVEN),
    "a piece": (piece, [DATA, free((), "int32")], "whole data dynamic_slice"),
    "the largest": (lambda x: jax.lax.top_k(x, 2)[0], [BOTH], "whole model top_k"),
    "decomposed": (lambda x: jnp.linalg.qr(x)[0], [DATA], "absent data custom_call"),
}


def loss_text(losses):
    pinning = ((loss, loss.pinned_by or loss.operation) for loss in losses)
    return ", ".join(
        f"{loss.reason} {loss.mesh_axis} {by.kind.rpartition('.')[2]}" for loss, by in pinning
    )


@pytest.mark.parametrize("name", LOSSES)
def test_loss_has_reason_mesh_axis_and_operation(name):
    function, arguments, expected = LOSSES[name]
    assert loss_text(find_ways(function, *arguments).losses) == expected


def test_losses_of_a_value_are_those_of_its_own_dimensions():
    def function(x, y):
        return jnp.sin(pinned(x)), jnp.cos(y).reshape(256), x.sum(1), pinned(pinned(x), "data")

    ways = find_ways(function, DATA, COLUMNS_MODEL)
    found = [loss_text(ways.lost(value)) for value in ways.program.results]
    assert found == ["pinned data sharding_constraint", "cut model reshape", "", ""]


# Drawn programs


def test_taking_a_cause_away_takes_its_mesh_axis_away():
    """The cause alone brings the mesh axis; without it that is gone, or comes from elsewhere."""
    rng = random.Random(0)
    drawn = [draw(rng) for _ in range(180)]
    whole, found = SideBySide(drawn), []
    for number, one in enumerate(drawn):
        split = [(i, axis) for i, axes in enumerate(whole.spec(number)) for axis in axes]
        for dimension, axis in split[:1]:
            cause = whole.source(number, axis)
            assert cause in one.sources(base(axis))
            found.append((one, dimension, base(axis), cause))
    assert len(found) > 100
    others = [one.sources(axis) - {cause} for one, _, axis, cause in found]
    alone = SideBySide([x[0].without(x[2], rest) for x, rest in zip(found, others, strict=True)])
    gone = SideBySide([one.without(axis, {cause}) for one, _, axis, cause in found])
    for number, (_, dimension, axis, _) in enumerate(found):
        is_there = axis in map(base, alone.spec(number)[dimension])
        assert is_there or alone.is_contested(number, axis)
        if axis in map(base, gone.spec(number)[dimension]):
            assert gone.source(number, axis) in others[number]
