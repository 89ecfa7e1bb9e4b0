"""Where mesh axes come from and where they are lost: small programs of which that is known."""

import random

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from tests.causes.programs import (
    EXPLICIT,
    MESH,
    array,
    draw,
    find_ways,
    free,
    manual,
    pinned,
    scanned,
    source_of,
)


def causes_of_result(ways, number=0):
    """For each mesh axis of a result kind and name of its cause."""
    found, value = {}, ways.program.results[number]
    for axis in (axis for axes in ways.values[value].spec or () for axis in axes):
        cause = ways.cause(value, axis)
        name = cause.operation.name.rpartition("/")[2] if cause.operation else ""
        if cause.kind == "argument":
            name = "xyz"[ways.program.arguments.index(cause.value)]
        found[axis] = f"{cause.kind} {name}".strip()
    return found


OF_X, OF_BOTH = {"data": "argument x"}, {"data": "argument x", "model": "argument y"}
CONSTRAINED = {"data": "constraint sharding_constraint"}
CAUSES = {
    "the argument itself": (lambda x: x, [array("data")], OF_X),
    "an argument": (lambda x: jnp.sin(x.T), [array(None, "data")], OF_X),
    "a product": (lambda x, y: x @ y, [array("data"), array(None, "model")], OF_BOTH),
    "a constraint": (lambda x: jnp.sin(pinned(x, "data")), [array()], CONSTRAINED),
    "a constraint behind": (
        lambda x: (lambda y: (y, pinned(y, "data")))(jnp.sin(x)),
        [free()],
        CONSTRAINED,
    ),
    "a constraint that disagrees": (
        lambda x: jnp.sin(pinned(x, ("data", "model"))),
        [array("model")],
        CONSTRAINED | {"model": "constraint sharding_constraint"},
    ),
    "a shard_map": (
        lambda x: manual(jnp.sin, P("data"), P("data"))(x) + 1,
        [free()],
        {"data": "shard_map shard_map"},
    ),
    "in and out of a shard_map": (
        lambda x: manual(jnp.sin, P("data"), P("data"), axes={"data"})(jnp.cos(x)),
        [array("data", "model")],
        {"data": "shard_map shard_map", "model": "argument x"},
    ),
    "a scan": (scanned, [array("data"), array(None, None, "model", shape=(3, 16, 16))], OF_BOTH),
    "a loop": (
        lambda x: jax.lax.while_loop(lambda c: c.sum() < 3, lambda c: jnp.sin(c), x),
        [array("data")],
        OF_X,
    ),
    "branches": (
        lambda x, y: jax.lax.cond(y[0, 0] > 0, lambda: jnp.sin(x), lambda: y),
        [array("data"), free()],
        OF_X,
    ),
    "functions": (lambda x: jax.jit(lambda x: jax.jit(jnp.sin)(x) + 1)(x), [array("data")], OF_X),
    "computed again": (
        lambda x: jax.grad(lambda x: jax.checkpoint(lambda x: jnp.sin(jnp.sin(x)))(x).sum())(x),
        [array("data")],
        OF_X,
    ),
    "mapped": (
        lambda x, y: jax.vmap(lambda x: jnp.tanh(x @ y))(x),
        [array("data"), array(None, "model")],
        OF_BOTH,
    ),
    "an option of a function": (
        lambda x: jax.jit(jnp.sin, in_shardings=NamedSharding(MESH, P("data")))(jnp.cos(x)),
        [free()],
        {"data": "constraint jit(sin)"},
    ),
    "parts that come together again": (
        lambda x: jnp.sin(x.reshape(2, 8, 16)).reshape(16, 16) + 1,
        [array("data")],
        OF_X,
    ),
    "two that want it": (lambda x, y: x + y, [array("data"), array(None, "data")], OF_X),
    "types of an Explicit mesh": (
        lambda x, y: jnp.tanh(2 * (x @ y)).T + jnp.ones((16, 16)),
        [array("data", mesh=EXPLICIT), array(None, "model", mesh=EXPLICIT)],
        OF_BOTH,
    ),
    "nothing": (lambda x: x + 1, [free()], {}),
}


@pytest.mark.parametrize("name", CAUSES)
def test_cause_of_a_layout(name):
    function, arguments, expected = CAUSES[name]
    assert causes_of_result(find_ways(function, *arguments)) == expected


def test_cause_of_a_layout_that_is_asked_for():
    ways = find_ways(jnp.sin, free(), out_shardings=NamedSharding(MESH, P("data")))
    cause = ways.cause(ways.program.arguments[0], "data")
    assert (cause.kind, [one.kind for one in cause.way]) == ("result", ["flow", "stablehlo.sine"])
    with jax.sharding.use_abstract_mesh(EXPLICIT):
        resharded = lambda x: jax.sharding.reshard(jnp.sin(x), P("data")) * 2  # noqa: E731
        ways = find_ways(resharded, array(mesh=EXPLICIT))
    assert causes_of_result(ways) == {"data": "constraint reshard"}


def test_way_of_a_cause_leads_from_it_to_the_value():
    ways = find_ways(lambda x: jnp.sin(x.T), array(None, "model"))
    cause = ways.cause(ways.program.results[0], "model")
    assert (cause.value, cause.dimension) == (ways.program.arguments[0], 1)
    kinds = ["stablehlo.transpose", "stablehlo.sine", "flow"]
    assert [one.kind for one in cause.way] == kinds


# Reason, mesh axis and operation of each loss.
LOSSES = {
    "elementwise": (lambda x: jnp.sin(x.T), [array("data", "model")], []),
    "cut where the mesh axis is": (lambda x: x.reshape(4, 4, 16), [array("data")], []),
    "sorted": (lambda x: jnp.sort(x, 0), [array("data")], []),
    "in a shard_map": (
        lambda x: manual(jnp.sin, P("data"), P("data"), axes={"data"})(x),
        [array("data", "model")],
        [],
    ),
    "summed": (
        lambda x: x.max(),
        [array("data", "model")],
        ["reduced data reduce", "reduced model reduce"],
    ),
    "contracted": (
        lambda x, y: x @ y,
        [array(None, "model"), array("model")],
        ["reduced model dot_general"],
    ),
    "looked up": (
        lambda x, i: x[i],
        [array("data"), free((5,), "int32")],
        ["reduced data gather"],
    ),
    "pinned whole": (
        lambda x, y: jnp.cos(pinned(x + y)),
        [array("data"), array("data")],
        ["pinned data sharding_constraint"],
    ),
    "pinned otherwise": (
        lambda x: pinned(jnp.sin(x), "model"),
        [array("data")],
        ["pinned data sharding_constraint"],
    ),
    "whole into a shard_map": (
        lambda x: manual(jnp.sin, P(), P())(jnp.sin(x)),
        [array("data")],
        ["pinned data flow"],
    ),
    "gathered": (
        lambda x, y: x @ y,
        [array("data"), array("data")],
        ["used data dot_general"],
    ),
    "gathered in a loop": (
        scanned,
        [array("data"), array(None, "data", shape=(3, 16, 16))],
        ["used data dot_general"],
    ),
    "added across": (
        lambda x, y: x + y,
        [array("data", "model"), array(None, "data")],
        ["conflict model add", "used data add"],
    ),
    "two layouts": (
        lambda x, y: x + y,
        [array("data"), array("model")],
        ["conflict data add", "conflict model add"],
    ),
    "two layouts of what is summed": (
        lambda x, y: x @ y,
        [array(None, "data"), array("model")],
        ["conflict data dot_general", "conflict model dot_general"],
    ),
    "joined": (lambda x: x.reshape(256), [array(None, "data")], ["cut data reshape"]),
    "cut in three": (
        lambda x: x.reshape(3, 4, 16),
        [array("data", shape=(12, 16))],
        ["cut data reshape"],
    ),
    "parts coming out": (
        lambda x: x.reshape(2, 8, 16),
        [array("data")],
        ["uneven data:(1)2 flow", "uneven data:(2)2 flow"],
    ),
    "uneven": (lambda x: x[:5], [array("data")], ["uneven data flow"]),
    "one of it": (lambda x: x[3], [array("data")], ["absent data reshape"]),
    "a piece": (
        lambda x, i: jax.lax.dynamic_slice_in_dim(x, i, 4),
        [array("data"), free((), "int32")],
        ["whole data dynamic_slice"],
    ),
    "the largest": (
        lambda x: jax.lax.top_k(x, 2)[0],
        [array("data", "model")],
        ["whole model top_k"],
    ),
    "decomposed": (
        lambda x: jnp.linalg.qr(x)[0],
        [array("data")],
        ["absent data custom_call"],
    ),
}


def loss_texts(losses):
    pinning = ((loss, loss.pinned_by or loss.operation) for loss in losses)
    return [f"{loss.reason} {loss.mesh_axis} {by.kind.rpartition('.')[2]}" for loss, by in pinning]


@pytest.mark.parametrize("name", LOSSES)
def test_loss_has_reason_mesh_axis_and_operation(name):
    function, arguments, expected = LOSSES[name]
    assert loss_texts(find_ways(function, *arguments).losses) == expected


def test_rival_of_a_loss():
    ways = find_ways(lambda x, y: x @ y, array("data"), array("data"))
    (loss,) = ways.losses
    assert (loss.operand, loss.dimension) == (ways.program.arguments[1], 0)
    assert loss.rival == (loss.operation.results[0], "data")


def test_losses_of_a_value_are_those_of_its_own_dimensions():
    def function(x, y):
        return jnp.sin(pinned(x)), jnp.cos(y).reshape(256), x.sum(1), pinned(pinned(x), "data")

    ways = find_ways(function, array("data"), array(None, "model"))
    expected = [["pinned data sharding_constraint"], ["cut model reshape"], [], []]
    assert [loss_texts(ways.lost(value)) for value in ways.program.results] == expected


# Drawn programs


def mesh_axes_of_results(ways):
    for number, value in enumerate(ways.program.results):
        for dimension, axes in enumerate(ways.values[value].spec or ()):
            yield from ((number, dimension, axis) for axis in axes)


def has(ways, number, dimension, mesh_axis):
    spec = ways.values[ways.program.results[number]].spec
    return bool(spec) and mesh_axis in {axis.partition(":")[0] for axis in spec[dimension]}


def is_contested(ways, mesh_axis):
    """Whether two dimensions want a mesh axis: who wins then depends on all sources together."""
    return any(
        loss.mesh_axis.partition(":")[0] == mesh_axis and loss.reason in ("used", "conflict")
        for loss in ways.losses
    )


@pytest.mark.parametrize("seed", range(3))
def test_taking_a_cause_away_takes_its_mesh_axis_away(seed):
    """The cause alone brings the mesh axis; without it that is gone, or comes from elsewhere."""
    rng = random.Random(seed)
    for drawn in [draw(rng) for _ in range(60)]:
        ways = drawn.find_ways()
        for number, dimension, found in list(mesh_axes_of_results(ways))[:1]:
            axis = found.partition(":")[0]
            cause = source_of(ways, ways.cause(ways.program.results[number], found))
            others = drawn.sources(axis) - {cause}
            assert cause in drawn.sources(axis)
            alone = drawn.without(axis, others).find_ways() if others else ways
            assert has(alone, number, dimension, axis) or is_contested(alone, axis)
            gone = drawn.without(axis, {cause}).find_ways()
            if has(gone, number, dimension, axis):
                left = source_of(gone, gone.cause(gone.program.results[number], axis))
                assert left in others
