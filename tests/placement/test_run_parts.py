"""Traced initialisers run part by part: values, effects, buffers, and what is computed."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from penzai_shard import make_mesh
from penzai_shard.placement.run_parts import run_initializer
from tests.checkpoints.trees import numbers, pointers

MESHES = [make_mesh({"data": size, "model": 8 // size}) for size in (2, 8)]
TABLE = np.arange(4096, dtype=np.float32).reshape(64, 64)


def trace(initializer, *args):
    return jax.make_jaxpr(lambda: jax.tree.leaves(initializer(*args)))()


def run(traced, mesh=MESHES[0]):
    """All outputs: those that are large matrices lie over both axes of the mesh."""
    specs = [P("data", "model") if x.shape == (64, 64) else P() for x in traced.out_avals]
    shardings = {number: NamedSharding(mesh, spec) for number, spec in enumerate(specs)}
    outputs = run_initializer(traced, shardings)
    for number, output in outputs.items():
        assert output.sharding.is_equivalent_to(shardings[number], output.ndim)
    return list(outputs.values())


def scanned(key):
    def block(key):
        return jnp.ones(64), jax.random.normal(key, (64, 64)) / 8, jax.random.uniform(key, (64,))

    body = jax.jit(jax.checkpoint(jax.vmap(block)))
    return jax.lax.scan(lambda key, _: (key, body(jax.random.split(key))), key, None, 3)


def others(key):
    """Parts of one large array, constants, and what is small."""
    numbers = 1.5, 2, True, np.float32(1.5), jnp.bfloat16(2), jnp.zeros((0, 8))
    parts = list(jax.random.normal(key, (2, 64, 64)))
    parts += [jnp.tril(TABLE) * scale for scale in (2.0, 3.0)]
    return numbers, parts, key, jax.random.permutation(key, 8), TABLE, jnp.tril(TABLE)


def constrained(key):
    def pin(x):
        return jax.lax.with_sharding_constraint(x, NamedSharding(MESHES[0], P("data")))

    weights = pin(jax.nn.initializers.orthogonal()(key, (64, 64)))
    return jax.lax.scan(lambda x, _: (pin(x * 2), x), weights, None, 2)


@pytest.mark.parametrize("initializer", [scanned, others, constrained])
def test_run_initializer_values(initializer):
    key = jax.random.key(7)
    outputs, again = (run(trace(initializer, key), mesh) for mesh in MESHES)
    # Exact parts are compiled at this level. Tests have level 0, without fused multiply-adds.
    level = None if initializer is constrained else {"xla_backend_optimization_level": "1"}
    wanted = jax.tree.leaves(jax.jit(initializer, compiler_options=level)(key))
    for output, other, expected in zip(outputs, again, wanted, strict=True):
        assert (output.dtype, output.aval.weak_type) == (expected.dtype, expected.aval.weak_type)
        np.testing.assert_array_equal(numbers(output), numbers(other))
        if output.dtype == jnp.float32:
            np.testing.assert_array_max_ulp(output, expected, 1)
        else:
            np.testing.assert_array_equal(numbers(output), numbers(expected))


def test_run_initializer_gives_buffers_of_their_own():
    kept = [jnp.asarray(TABLE), jnp.ones(3), TABLE.copy()]
    kept.append(jax.device_put(TABLE, NamedSharding(MESHES[0], P("data", "model"))))
    twice = [jnp.ones(3) * 2, jnp.tril(TABLE)]
    outputs = run(trace(lambda: [*kept, *map(jax.jit(lambda x: x), kept), twice, twice]))
    own = pointers(*outputs)
    assert len(set(own)) == len(own)
    jax.jit(lambda outputs: [x + 1 for x in outputs], donate_argnums=0)(outputs)
    for array, value in zip(kept, (TABLE, np.ones(3), TABLE, TABLE), strict=True):
        np.testing.assert_array_equal(array, value)


def test_run_initializer_computes_what_is_wanted_and_has_each_effect_once():
    def refuse(_):
        raise AssertionError

    def initializer(key):
        jax.debug.callback(seen.append, "small", ordered=True)
        weights = jax.random.normal(key, (64, 64))
        jax.debug.callback(lambda x: seen.append(x.shape), weights, ordered=True)
        return weights, jnp.tril(TABLE), jax.pure_callback(refuse, jax.typeof(1.0), 1.0)

    seen = []
    traced = trace(initializer, jax.random.key(0))
    for wanted in ({0: None, 1: None}, {1: None}):
        seen.clear()
        np.testing.assert_array_equal(run_initializer(traced, wanted)[1], np.tril(TABLE))
        jax.effects_barrier()
        assert seen == ["small", (64, 64)]


def test_run_initializer_tells_functions_of_equal_text_apart():
    def called_with(table):
        return lambda x: jax.pure_callback(lambda x: x + table, jax.typeof(x), x)

    tables = [TABLE * np.float32(factor) for factor in range(3)]
    functions = list(map(called_with, tables))
    outputs = run(trace(lambda: [function(jnp.tril(TABLE)) for function in functions]))
    for output, table in zip(outputs, tables, strict=True):
        np.testing.assert_array_equal(output, np.tril(TABLE) + table)
