"""What goes in and comes out of programs is laid out as XLA, which compiles them, says."""

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from penzai_shard.meshes import make_mesh
from penzai_shard.sharding_propagation import PropagatedProgram
from tests.sharding_propagation.small_programs import array, manual, pinned, undecided

MESH = make_mesh({"data": 4, "model": 2})


def on(*spec, shape=(16, 16), dtype=jnp.float32):
    return array(*spec, shape=shape, dtype=dtype, mesh=MESH)


def scanned(x, weights):
    return jax.lax.scan(lambda c, w: (jnp.tanh(c @ w), c.sum(0)), x, weights)


# Several small programs in each, as compiling costs the more the more programs there are.
PROGRAMS = {
    "products": (
        lambda x, w, v: (x @ w, x @ v, (x @ w) @ v.T, x.T @ x),
        [on("data"), on(None, "model"), on("data")],
    ),
    "forms": (
        lambda x: (
            x.reshape(256),
            x.reshape(2, 8, 16),
            x.reshape(4, 4, 16),
            x[:5],
            x[3],
            jnp.concatenate([x, x]),
            jnp.pad(x, 1),
            x[::-1],
        ),
        [on("data", "model")],
    ),
    "along a dimension": (
        lambda x: (
            jnp.sort(x, 0),
            jnp.cumsum(x, 0),
            jax.lax.top_k(x, 2)[0],
            jax.lax.top_k(x, 16)[1],
            x.sum(0),
            jnp.argmax(x, 1),
        ),
        [on("data", "model")],
    ),
    "of each element": (
        lambda x: (
            jax.lax.erf_inv(x),
            jax.scipy.special.gammaln(x),
            jnp.arcsinh(x),
            jax.random.normal(jax.random.key(0), x.shape) + x,
        ),
        [on("data")],
    ),
    "conflicts": (
        lambda x, y, z: (x + y, x + z, y * z, x + y + z),
        [on("data"), on("model"), on(None, "data")],
    ),
    "constraints": (
        lambda x, y: (pinned(jnp.sin(x), "model", mesh=MESH) + y, jnp.cos(y), x * 2),
        [on("data"), undecided()],
    ),
    "shard_map": (
        lambda x, y: (
            manual(jnp.sin, P("data"), P("data"), axes={"data"}, mesh=MESH)(x),
            manual(jnp.sin, P("data"), P("data"), mesh=MESH)(y) + 1,
        ),
        [on("data", "model"), undecided()],
    ),
    "a loop": (scanned, [on("data"), on(None, None, "model", shape=(3, 16, 16))]),
    "branches": (
        lambda p, x, y: (jax.lax.cond(p, lambda: jnp.sin(x), lambda: y), y + 1),
        [undecided((), jnp.bool_), on("data"), undecided()],
    ),
    "a gradient": (
        lambda w, x: jax.grad(lambda w: jnp.tanh(x @ w).mean())(w),
        [on(None, "model"), on("data")],
    ),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_layouts_are_those_of_the_compiled_program(name):
    function, arguments = PROGRAMS[name]
    lowered = jax.jit(function).lower(*arguments)
    program = PropagatedProgram.of(lowered)
    compiled = lowered.compile()
    pairs = [
        *zip(program.arguments.values(), jax.tree.leaves(compiled.input_shardings), strict=True),
        *zip(program.results, jax.tree.leaves(compiled.output_shardings), strict=True),
    ]
    for value, sharding in pairs:
        shape, spec = program.values[value].shape, program.values[value].spec or ()
        expected = NamedSharding(MESH, P(*spec))
        assert sharding.shard_shape(shape) == expected.shard_shape(shape)
        assert sharding.is_equivalent_to(expected, len(shape))


def test_a_function_on_the_host_takes_its_operand_whole():
    def function(x):
        jax.debug.print("{}", x)
        return x * 2

    program = PropagatedProgram.of(jax.jit(function).lower(on("data")))
    lost = [(loss.kind, loss.operation.kind, loss.mesh_axis) for loss in program.losses()]
    assert lost == [("unruled", "stablehlo.custom_call", "data")]
    assert program.cause(program.results[0], "data").name == "x"


def test_what_keeps_functions_on_the_host_in_order_has_no_layout():
    def function(x):
        jax.debug.print("{}", x, ordered=True)
        return x * 2

    mesh = make_mesh({"data": 1}, jax.devices()[:1])
    program = PropagatedProgram.of(jax.jit(function).lower(array("data", mesh=mesh)))
    assert program.losses() == ()
    token, result = (program.values[value] for value in program.results)
    assert (token.dtype, token.spec) == ("!stablehlo.token", None)
    assert result.shape == (16, 16)
