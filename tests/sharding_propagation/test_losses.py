"""Where layouts get lost, and why: small programs of which that is known."""

import jax
import jax.numpy as jnp
import pytest
from jax.experimental import io_callback
from jax.sharding import AbstractMesh, AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from penzai_shard.sharding_propagation import PropagatedProgram, Standing
from tests.sharding_propagation.small_programs import (
    MESH,
    array,
    manual,
    pinned,
    propagate,
    undecided,
)


def scanned(x, weights):
    return jax.lax.scan(lambda c, w: (jnp.tanh(c @ w), None), x, weights)[0]


# What each loses: why, which mesh axis, and at which operation.
TABLE = {
    # Nothing is lost.
    "elementwise": (lambda x: jnp.sin(x), [array("data", "model")], []),
    "a product": (lambda x, w: x @ w, [array("data"), array(None, "model")], []),
    "transposed": (lambda x: x.T + 1, [array("data", "model")], []),
    "the same pinned": (lambda x: pinned(x, "data"), [array("data")], []),
    "sorted": (lambda x: jnp.sort(x, 0), [array("data")], []),
    "summed along": (lambda x: jnp.cumsum(x, 0), [array("data")], []),
    "joined": (lambda x, y: jnp.concatenate([x, y]), [array("data"), array("data")], []),
    "cut where the mesh axis is": (lambda x: x.reshape(4, 4, 16), [array("data")], []),
    "cut within the mesh axis": (
        lambda x: x.reshape(2, 8, 16).sum(2).sum((0, 1)),
        [array("data")],
        ["reduced data:(1)2 reduce", "reduced data:(2)2 reduce"],
    ),
    "more of the same": (lambda x, y: x + y, [array("data"), array(("data", "model"))], []),
    "inverse error function": (lambda x: jax.lax.erf_inv(x), [array("data")], []),
    "a gradient": (lambda x: jax.grad(lambda x: jnp.sin(x).sum())(x), [array("data")], []),
    "all of it": (lambda x: jnp.sin(x).reshape(256), [array("data")], []),
    "kept in a shard_map of another mesh axis": (
        lambda x: manual(jnp.sin, P("data"), P("data"), axes={"data"})(x),
        [array("data", "model")],
        [],
    ),
    # Reductions, which are no losses.
    "a sum": (lambda x: x.sum(0), [array("data")], ["reduced data reduce"]),
    "both of it summed": (
        lambda x: x.max(),
        [array("data", "model")],
        ["reduced data reduce", "reduced model reduce"],
    ),
    "a product summed": (
        lambda x, w: x @ w,
        [array(None, "model"), array("model")],
        ["reduced model dot_general"],
    ),
    "looked up": (
        lambda x, i: x[i],
        [array("data"), undecided((5,), jnp.int32)],
        ["reduced data gather"],
    ),
    # A layout is fixed.
    "pinned whole": (
        lambda x: jnp.sin(pinned(jnp.sin(x))),
        [array("data")],
        ["pinned data sharding_constraint"],
    ),
    "two of them pinned whole": (
        lambda x, y: pinned(x + y),
        [array("data"), array("data")],
        ["pinned data sharding_constraint"],
    ),
    "pinned otherwise": (
        lambda x: pinned(jnp.sin(x), "model"),
        [array("data")],
        ["pinned data sharding_constraint"],
    ),
    "taken whole by a shard_map": (
        lambda x: manual(jnp.sin, P(), P())(jnp.sin(x)),
        [array("data")],
        ["pinned data flow"],
    ),
    "in a branch": (
        lambda x, p: jax.lax.cond(p, jnp.sin, pinned, x),
        [array("data"), undecided((), jnp.bool_)],
        ["pinned data sharding_constraint"],
    ),
    # Another dimension has the mesh axis.
    "gathered weights": (
        lambda x, w: x @ w,
        [array("data"), array("data")],
        ["used data dot_general"],
    ),
    "gathered columns": (
        lambda x, w: x @ w,
        [array("data"), array(None, "data")],
        ["used data dot_general"],
    ),
    "added across": (lambda x, y: x + y, [array("data"), array(None, "data")], ["used data add"]),
    "added across where another mesh axis is": (
        lambda x, y: x + y,
        [array("data", "model"), array(None, "data")],
        ["conflict model add", "used data add"],
    ),
    "gathered in each turn": (
        scanned,
        [array("data"), array(None, "data", shape=(3, 16, 16))],
        ["used data dot_general"],
    ),
    # Several want the same dimension.
    "two layouts of one dimension": (
        lambda x, y: x + y,
        [array("data"), array("model")],
        ["conflict data add", "conflict model add"],
    ),
    "two orders": (
        lambda x, y: x + y,
        [array(("data", "model")), array(("model", "data"))],
        [
            "conflict data add",
            "conflict model add",
            "conflict model add",
            "conflict data add",
        ],
    ),
    "two layouts of what is summed": (
        lambda x, w: x @ w,
        [array(None, "data"), array("model")],
        ["conflict data dot_general", "conflict model dot_general"],
    ),
    # It does not fit.
    "joined from the right": (
        lambda x: x.reshape(256),
        [array(None, "data")],
        ["cut data reshape"],
    ),
    "cut in three": (
        lambda x: x.reshape(3, 4, 16),
        [array("data", shape=(12, 16))],
        ["cut data reshape"],
    ),
    "cut in the middle": (lambda x: x.reshape(2, 3, 16), [array(("model",), shape=(6, 16))], []),
    "a part of a mesh axis coming out": (
        lambda x: x.reshape(2, 8, 16),
        [array("data")],
        ["uneven data:(1)2 flow", "uneven data:(2)2 flow"],
    ),
    "uneven coming out": (lambda x: x[:5], [array("data")], ["uneven data flow"]),
    # No such dimension.
    "one of it": (lambda x: x[3], [array("data")], ["absent data reshape"]),
    "a piece of it": (
        lambda x, i: jax.lax.dynamic_slice_in_dim(x, i, 4),
        [array("data"), undecided((), jnp.int32)],
        ["whole data dynamic_slice"],
    ),
    "layers of a stack": (
        scanned,
        [array(), array("data", shape=(4, 16, 16))],
        ["whole data dynamic_slice"],
    ),
    "the largest": (
        lambda x: jax.lax.top_k(x, 2)[0],
        [array("data", "model")],
        ["whole model top_k"],
    ),
    "decomposed": (
        lambda x: jnp.linalg.qr(x)[0],
        [array("data", "model")],
        ["absent data custom_call", "absent model custom_call"],
    ),
}


@pytest.mark.parametrize("name", TABLE)
def test_the_operation_that_loses_a_layout_is_named_with_its_reason(name):
    function, arguments, expected = TABLE[name]
    found = [
        f"{loss.kind} {loss.mesh_axis} {loss.operation.kind.partition('.')[2] or 'flow'}"
        for loss in propagate(function, *arguments).losses()
    ]
    assert found == expected


def only(losses):
    (loss,) = losses
    return loss


def test_a_mesh_axis_that_another_dimension_uses_says_which():
    program = propagate(lambda x, w: x @ w, array("data"), array("data"))
    loss = only(program.losses())
    assert (loss.operand, loss.dimension) == (program.arguments["w"], 0)
    (result,) = loss.operation.results
    assert loss.rival == Standing(result, 0, ("data",))
    assert loss.rival_won
    assert loss.rival_came == "at once"
    assert program.cause(result, "data").name == "x"


def test_of_two_layouts_of_one_dimension_neither_wins():
    program = propagate(lambda x, y: x + y, array("data"), array("model"))
    of_x, of_y = program.losses()
    x, y = program.arguments.values()
    assert of_x.rival == Standing(y, 0, ("model",))
    assert of_y.rival == Standing(x, 0, ("data",))
    assert not of_x.rival_won
    assert not of_y.rival_won
    assert not any(program.values[of_x.result].spec or ())


def test_a_layout_that_is_there_earlier_wins():
    # Elementwise operations go first: by the time that the product would give its columns to the
    # sum, the bias has given it its own.
    program = propagate(
        lambda x, w, b: x @ w + b, array(), array(None, "data"), array("data", None)
    )
    loss = only(program.losses())
    assert loss.kind == "used"
    assert loss.operation.kind == "stablehlo.dot_general"
    assert loss.rival_won
    assert loss.rival_came == "earlier"
    assert program.cause(loss.rival.value, "data").name == "b"


def test_the_layout_asked_for_an_output_takes_what_it_does_not_have():
    shardings = NamedSharding(MESH, P(None, "model"))
    program = propagate(lambda x: x * 1, array("data"), out_shardings=shardings)
    loss = only(program.losses())
    assert (loss.kind, loss.result) == ("pinned", program.results[0])


def test_only_the_first_operation_behind_which_a_layout_is_gone_is_told():
    program = propagate(lambda x: jnp.cos(jnp.sin(pinned(x))) * 2, array("data"))
    assert only(program.losses()).operation.constraint


def test_a_value_tells_what_its_own_dimensions_would_have_had():
    def function(x, y):
        return jnp.sin(pinned(x)), jnp.cos(y).reshape(256), x.sum(1)

    program = propagate(function, array("data"), array(None, "model"))
    of_results = [program.losses(result) for result in program.results]
    assert [[loss.kind for loss in losses] for losses in of_results] == [["pinned"], ["cut"], []]


def test_a_value_that_has_a_mesh_axis_again_did_not_lose_it():
    program = propagate(lambda x: pinned(pinned(x), "data"), array("data"))
    assert len(program.losses()) == 1
    assert program.losses(program.results[0]) == ()


def test_mesh_axes_of_one_device_are_never_lost():
    auto = (AxisType.Auto,) * 2
    mesh = AbstractMesh((1, 2), ("data", "model"), axis_types=auto)
    program = propagate(
        lambda x: pinned(x, None, "model", mesh=mesh).sum(0), array("data", mesh=mesh)
    )
    assert program.losses() == ()


def test_what_a_constraint_pins_was_lost_at_the_operation_before_it():
    program = propagate(lambda x: pinned(jnp.sin(x)), array("data"))
    loss = only(program.losses())
    assert loss.operation.constraint
    assert loss.made_by.kind == "stablehlo.sine"
    assert (loss.operand, loss.result) == (program.arguments["x"], loss.operation.operands[0])
    assert program.losses(loss.result) == program.losses(program.results[0]) == (loss,)


def test_what_calls_back_to_python_is_on_one_device_and_loses_the_layout():
    mesh = jax.make_mesh((4, 2), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
    like = jax.ShapeDtypeStruct((16, 16), jnp.float32)

    def function(x):
        return jnp.sin(io_callback(lambda data: data, like, x))

    lowered = jax.jit(function).lower(array("data", mesh=mesh))
    program = PropagatedProgram.of(lowered)
    loss = only(program.losses())
    assert (loss.kind, loss.mesh_axis, loss.operand) == ("unruled", "data", program.arguments["x"])
    given = program.values[loss.operation.results[0]]
    assert (given.shape, given.spec) == ((16, 16), ((), ()))
    assert program.losses(program.results[0]) == (loss,)
