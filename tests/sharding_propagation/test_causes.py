"""Where each mesh axis of a value comes from: small programs with one cause each, and with two."""

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AbstractMesh, AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from penzai_shard.errors import PropagationError
from tests.sharding_propagation.small_programs import (
    MESH,
    array,
    manual,
    pinned,
    propagate,
    spec_of_result,
    undecided,
)


def causes_of_result(program, number=0):
    """The causes of each mesh axis of a result, the first one first."""
    return {
        mesh_axis: [
            f"{cause.kind} {cause.name.rpartition('/')[2]}"
            for cause in program.causes(program.results[number], mesh_axis)
        ]
        for dimension in spec_of_result(program, number) or ()
        for mesh_axis in dimension
    }


def scanned(x, weights):
    return jax.lax.scan(lambda c, w: (jnp.tanh(c @ w), None), x, weights)[0]


@jax.custom_vjp
def own_gradient(x):
    return jnp.sin(x)


own_gradient.defvjp(lambda x: (jnp.sin(x), x), lambda x, g: (g * jnp.cos(x),))


KEYS = jax.eval_shape(lambda: jax.random.split(jax.random.key(0), 8))

# The causes of the first result's layout.
TABLE = {
    "the argument itself": (lambda x: x, [array("data")], {"data": ["argument x"]}),
    "an argument": (lambda x: jnp.sin(x), [array("data")], {"data": ["argument x"]}),
    "an argument for each": (
        lambda x, w: x @ w,
        [array("data"), array(None, "model")],
        {"data": ["argument x"], "model": ["argument w"]},
    ),
    "an argument in a tree": (
        lambda t: t["a"][1] * 2,
        [{"a": (undecided((3,)), array("data"))}],
        {"data": ["argument t['a'][1]"]},
    ),
    "a constraint": (
        lambda x: jnp.sin(pinned(x, "data")),
        [array()],
        {"data": ["constraint sharding_constraint"]},
    ),
    "a constraint behind": (
        lambda x: (lambda y: (y, pinned(y, "data")))(jnp.sin(x)),
        [undecided()],
        {"data": ["constraint sharding_constraint"]},
    ),
    "a constraint that agrees": (
        lambda x: jnp.sin(pinned(x, "data")),
        [array("data")],
        {"data": ["constraint sharding_constraint", "argument x"]},
    ),
    "a constraint that does not agree": (
        lambda x: jnp.sin(pinned(x, ("data", "model"))),
        [array("model")],
        {
            "data": ["constraint sharding_constraint"],
            "model": ["constraint sharding_constraint"],
        },
    ),
    "a shard_map": (
        lambda x: manual(jnp.sin, P("data"), P("data"))(x) + 1,
        [undecided()],
        {"data": ["manual shard_map"]},
    ),
    "in and out of a shard_map": (
        lambda x: manual(jnp.sin, P("data"), P("data"), axes={"data"})(jnp.cos(x)),
        [array("data", "model")],
        {"data": ["manual shard_map"], "model": ["argument x"]},
    ),
    "a scan": (
        scanned,
        [array("data"), array(None, None, "model", shape=(3, 16, 16))],
        {"data": ["argument x"], "model": ["argument weights"]},
    ),
    "a loop": (
        lambda x: jax.lax.while_loop(
            lambda c: c[1] < 3, lambda c: (jnp.sin(c[0]), c[1] + 1), (x, 0)
        ),
        [array("data")],
        {"data": ["argument x"]},
    ),
    "branches": (
        lambda p, x, y: jax.lax.cond(p, lambda: jnp.sin(x), lambda: y),
        [undecided((), jnp.bool_), array("data"), undecided()],
        {"data": ["argument x"]},
    ),
    "a function in a function": (
        lambda x: jax.jit(lambda x: jax.jit(jnp.sin)(x) + 1)(x),
        [array("data")],
        {"data": ["argument x"]},
    ),
    "computed again": (
        lambda x: jax.grad(lambda x: jax.checkpoint(lambda x: jnp.sin(jnp.sin(x)))(x).sum())(x),
        [array("data")],
        {"data": ["argument x"]},
    ),
    "a gradient of one's own": (
        lambda x: jax.grad(lambda x: own_gradient(x).sum())(x),
        [array("data")],
        {"data": ["argument x"]},
    ),
    "mapped": (
        lambda x, w: jax.vmap(lambda x: jnp.tanh(x @ w))(x),
        [array("data"), array(None, "model")],
        {"data": ["argument x"], "model": ["argument w"]},
    ),
    "random keys": (
        lambda k: jax.vmap(lambda k: jax.random.normal(k, (16,)))(k),
        [array("data", shape=KEYS.shape, dtype=KEYS.dtype)],
        {"data": ["argument k"]},
    ),
    "one random key": (
        lambda k, x: jax.random.normal(k, x.shape) + x,
        [jax.eval_shape(lambda: jax.random.key(0)), array("data")],
        {"data": ["argument x"]},
    ),
    "a function's own option": (
        lambda x: jax.jit(jnp.sin, in_shardings=NamedSharding(MESH, P("data")))(jnp.cos(x)),
        [undecided()],
        {"data": ["constraint jit(sin)"]},
    ),
    "two that agree": (
        lambda x, y: x + y,
        [array("data"), array("data")],
        {"data": ["argument x", "argument y"]},
    ),
    "two that agree behind operations": (
        lambda x, y: jnp.sin(x) * jnp.cos(y),
        [array("data"), array("data")],
        {"data": ["argument x", "argument y"]},
    ),
    "one with more": (
        lambda x, y: x + y,
        [array("data"), array(("data", "model"))],
        {"data": ["argument y", "argument x"], "model": ["argument y"]},
    ),
    "parts that came together again": (
        lambda x: jnp.sin(x.reshape(2, 8, 16)).reshape(16, 16) + 1,
        [array("data")],
        {"data": ["argument x"]},
    ),
    "a conflict of two": (
        lambda x, y: x + y,
        [array("data"), array(None, "data")],
        {"data": ["argument x"]},
    ),
    "nothing": (lambda x: x + 1, [undecided()], {}),
    "no arguments": (lambda: jnp.zeros((16, 16)), [], {}),
}


@pytest.mark.parametrize("name", TABLE)
def test_the_cause_of_a_layout_is_named(name):
    function, arguments, expected = TABLE[name]
    assert causes_of_result(propagate(function, *arguments)) == expected


def test_parts_of_a_mesh_axis_have_their_causes():
    program = propagate(lambda x: jnp.sin(x.reshape(2, 8, 16)), array("data"))
    value = program.operations[-1].operands[0]
    assert program.values[value].spec == (("data:(1)2",), ("data:(2)2",), ())
    for part in ("data:(1)2", "data:(2)2", "data"):
        assert [cause.name for cause in program.causes(value, part)] == ["x"]


def test_a_layout_asked_for_an_output_is_the_cause_of_what_is_laid_out_for_it():
    shardings = NamedSharding(MESH, P("data"))
    program = propagate(lambda x: jnp.sin(x), undecided(), out_shardings=shardings)
    x = program.arguments["x"]
    (cause,) = program.causes(x, "data")
    assert (cause.kind, cause.name, len(cause.way)) == ("output", "result 0", 2)
    assert causes_of_result(program) == {"data": ["output result 0"]}


def test_an_argument_has_its_own_layout_although_a_constraint_says_the_same():
    # Shardy's note of where it comes from names the constraint.
    program = propagate(lambda x: jnp.sin(pinned(x, "data")), array("data"))
    x = program.arguments["x"]
    assert program.values[x].origins == {"data": "constraint_0"}
    assert [cause.kind for cause in program.causes(x, "data")] == ["argument"]


def test_an_argument_without_a_layout_gets_that_of_a_constraint():
    program = propagate(lambda x: jnp.sin(pinned(x, "data")), undecided())
    (cause,) = program.causes(program.arguments["x"], "data")
    assert cause.kind == "constraint"
    assert cause.operation.frames[0].function == "pinned"


def test_a_cause_says_which_dimension_it_had_and_how_it_came():
    program = propagate(lambda x: jnp.sin(x.T), array(None, "model"))
    (cause,) = program.causes(program.results[0], "model")
    assert (cause.value, cause.dimension) == (program.arguments["x"], 1)
    kinds = [hop.operation.kind for hop in cause.way]
    assert kinds == ["flow", "stablehlo.sine", "stablehlo.transpose"]
    assert cause.way[0].target == program.results[0]
    assert [hop.target for hop in cause.way[1:]] == [hop.source for hop in cause.way[:-1]]
    assert cause.way[-1].source == cause.value


def test_the_way_of_a_cause_that_agrees_leads_from_it_to_the_value():
    program = propagate(
        lambda x, y: jnp.tanh(jnp.sin(x) * jnp.cos(y)), array("data"), array("data")
    )
    for cause in program.causes(program.results[0], "data"):
        assert cause.way[0].target == program.results[0]
        assert [hop.target for hop in cause.way[1:]] == [hop.source for hop in cause.way[:-1]]
        assert cause.way[-1].source == cause.value


def test_on_explicit_meshes_the_argument_is_the_cause_and_not_the_types():
    mesh = AbstractMesh((4, 2), ("data", "model"), axis_types=(AxisType.Explicit,) * 2)
    program = propagate(
        lambda x, w: jnp.tanh(x @ w).T * 2,
        array("data", mesh=mesh),
        array(None, "model", mesh=mesh),
    )
    assert causes_of_result(program) == {"model": ["argument w"], "data": ["argument x"]}


def test_on_explicit_meshes_a_layout_that_is_asked_for_is_its_own_cause():
    mesh = AbstractMesh((4, 2), ("data", "model"), axis_types=(AxisType.Explicit,) * 2)
    with jax.sharding.use_abstract_mesh(mesh):
        program = propagate(
            lambda x: jax.sharding.reshard(jnp.sin(x), P("data")) * 2, array(mesh=mesh)
        )
    assert causes_of_result(program) == {"data": ["constraint reshard"]}


@pytest.mark.parametrize("platform", ["tpu", "cuda"])
def test_programs_for_absent_devices_are_propagated(platform):
    program = propagate(
        lambda x, w: jax.nn.softmax(x @ w), array("data"), array(None, "model"), platform=platform
    )
    assert causes_of_result(program) == {"data": ["argument x"], "model": ["argument w"]}


def test_shapes_that_are_not_known_are_refused_by_name():
    (length,) = jax.export.symbolic_shape("length")
    struct = jax.ShapeDtypeStruct((length, 16), jnp.float32)
    with pytest.raises(PropagationError, match=r"alone:\n  x: is a tensor<\?x16xf32>\. Lower the"):
        propagate(lambda x: x + 1, struct)
