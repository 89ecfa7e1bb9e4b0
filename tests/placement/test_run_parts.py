"""Traced initialisers run part by part: values, buffers, effects, and how much is compiled."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from penzai_shard.meshes import auto_context
from penzai_shard.placement.run_parts import run_initializer

SIZES = ((1, 8), (2, 4), (8, 1))
MESHES = [Mesh(np.reshape(jax.devices(), size), ("data", "model")) for size in SIZES]
TABLE = np.arange(4096, dtype=np.float32).reshape(64, 64)


def trace(initializer, *args):
    return jax.make_jaxpr(lambda: jax.tree.leaves(initializer(*args)))()


def run(traced, mesh=None):
    """All outputs: those with two dimensions that divide lie over both axes of the mesh."""
    shardings = dict.fromkeys(range(len(traced.out_avals)))
    for number, aval in enumerate(traced.out_avals):
        divides = aval.ndim == 2 and all(size % 8 == 0 for size in aval.shape)
        if mesh is not None:
            shardings[number] = NamedSharding(mesh, P("data", "model") if divides else P())
    outputs = run_initializer(traced, shardings)
    assert list(outputs) == list(shardings)
    for number, sharding in shardings.items():
        lies = outputs[number].sharding
        assert sharding is None or lies.is_equivalent_to(sharding, outputs[number].ndim)
    return list(outputs.values())


def block(key, size=64):
    up, down = jax.random.split(key)
    return {
        "scale": jnp.ones(size),
        "up": jax.random.normal(up, (size, size)) / np.sqrt(size),
        "down": jax.random.normal(down, (size, size)) / np.sqrt(size),
        "bias": jax.random.uniform(key, (size,)),
    }


def blocks(key, depth=2):
    return [block(jax.random.fold_in(key, number)) for number in range(depth)]


def scanned(key):
    body = jax.jit(jax.checkpoint(jax.vmap(block)))
    return jax.lax.scan(lambda key, _: (key, body(jax.random.split(key))), key, None, 3)


def others(key):
    """Parts of one large array, constants, and what is small."""
    numbers = 1.5, 2, True, np.float32(1.5), jnp.bfloat16(2), jnp.zeros((0, 8))
    parts = list(jax.random.normal(key, (2, 64, 64)))
    parts += [jnp.tril(TABLE) * scale for scale in (2.0, 3.0)]
    return numbers, parts, key, jax.random.permutation(key, 8), TABLE, jnp.tril(TABLE)


def orthogonal(key):
    return [jax.nn.initializers.orthogonal()(own, (64, 64)) for own in jax.random.split(key)]


def constrained(key):
    def pin(x):
        return jax.lax.with_sharding_constraint(x, NamedSharding(MESHES[1], P("data")))

    twice = jax.jit(lambda x: x * 2, out_shardings=NamedSharding(MESHES[1], P("data")))
    weights = pin(jax.nn.initializers.orthogonal()(key, (64, 64)))
    return jax.lax.scan(lambda x, _: (pin(x * 2), twice(x)), weights, None, 2)


EXPLICIT = jax.make_mesh((2, 4), ("data", "model"), axis_types=(AxisType.Explicit,) * 2)
SUMS = orthogonal, constrained
EXACT = blocks, scanned, others


def assert_same_bits(arrays, others):
    for pair in zip(arrays, others, strict=True):
        is_key = jnp.issubdtype(pair[0].dtype, jax.dtypes.prng_key)
        np.testing.assert_array_equal(*map(jax.random.key_data, pair) if is_key else pair)


@pytest.mark.parametrize(
    ("initializer", "make_key"),
    [(blocks, jax.random.PRNGKey), *((f, jax.random.key) for f in EXACT + SUMS)],
)
def test_run_initializer_values(initializer, make_key):
    key = make_key(7)
    outputs = run(trace(initializer, key))
    # Exact parts are compiled at this level. Tests have level 0, without fused multiply-adds.
    level = None if initializer in SUMS else {"xla_backend_optimization_level": "1"}
    wanted = jax.tree.leaves(jax.jit(initializer, compiler_options=level)(key))
    for output, expected in zip(outputs, wanted, strict=True):
        assert output.aval == expected.aval
        if output.dtype == jnp.float32:
            np.testing.assert_array_max_ulp(output, expected, 1)
        else:
            assert_same_bits([output], [expected])
    for mesh in MESHES if initializer in (blocks, orthogonal) else MESHES[1:2]:
        assert_same_bits(run(trace(initializer, key), mesh), outputs)


@pytest.mark.parametrize("context", [MESHES[1], EXPLICIT], ids=["auto", "explicit"])
@pytest.mark.parametrize("initializer", [blocks, constrained])
def test_run_initializer_inside_a_mesh(initializer, context):
    key = jax.random.key(7)
    expected = run(trace(initializer, key), MESHES[1])
    with jax.set_mesh(context):
        with auto_context():
            traced = trace(initializer, key)
        assert_same_bits(run(traced, MESHES[1]), expected)


@jax.custom_jvp
def doubled(x):
    return x * 2


doubled.defjvps(lambda t, _, x: t * 2)


def nested(key, depth):
    def weights(key, number):
        return jax.random.normal(jax.random.fold_in(key, number), (64, 64))

    first = jax.jit(lambda keys: [jax.random.normal(own, (64, 64)) for own in keys])
    keys = [jax.random.fold_in(key, number) for number in range(depth)]
    second = [jax.jit(weights)(key, number) for number in range(depth)]
    return list(map(doubled, (*first(keys), *second)))


@pytest.mark.parametrize("make_key", [jax.random.key, jax.random.PRNGKey])
@pytest.mark.parametrize("initializer", [blocks, nested])
def test_run_initializer_compiles_equal_blocks_once(initializer, make_key):
    events, counts = [], []

    def listen(event, duration, **_):
        events.append(event)

    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        for depth in (2, 2, 6):
            events.clear()
            run(trace(initializer, make_key(0), depth), MESHES[1])
            counts.append(events.count("/jax/core/compile/backend_compile_duration"))
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)
    # The small operations of the first run are compiled for all. All weights are one program.
    assert counts[1:] == [1, 1]


def test_run_initializer_computes_only_what_is_wanted():
    def refuse(_):
        raise AssertionError

    def initializer():
        return jax.pure_callback(refuse, jax.typeof(1.0), 1.0), jnp.tril(TABLE)

    (output,) = run_initializer(jax.make_jaxpr(initializer)(), {1: None}).values()
    np.testing.assert_array_equal(output, np.tril(TABLE))


@pytest.mark.parametrize("mesh", [None, MESHES[1]], ids=["unsharded", "mesh"])
def test_run_initializer_gives_buffers_of_their_own(mesh):
    sharding = None if mesh is None else NamedSharding(mesh, P("data", "model"))
    kept = [jnp.asarray(TABLE), jnp.ones(3), TABLE.copy(), jax.device_put(TABLE, sharding)]
    twice = [jnp.ones(3) * 2, jnp.tril(TABLE)]
    outputs = run(trace(lambda: [*kept, *map(jax.jit(lambda x: x), kept), twice, twice]), mesh)
    pointers = [output.addressable_shards[0].data.unsafe_buffer_pointer() for output in outputs]
    assert len(set(pointers)) == len(pointers)
    jax.jit(lambda outputs: [x + 1 for x in outputs], donate_argnums=0)(outputs)
    assert_same_bits(kept, (TABLE, np.ones(3), TABLE, TABLE))


def test_run_initializer_has_each_effect_once():
    seen = []

    def initializer(key):
        jax.debug.callback(seen.append, "small", ordered=True)
        weights = jax.random.normal(key, (64, 64))
        jax.debug.callback(lambda x: seen.append(x.shape), weights, ordered=True)
        jax.debug.callback(seen.append, "last", ordered=True)
        return weights, jnp.tril(TABLE), jnp.zeros(3)

    traced = trace(initializer, jax.random.key(0))
    outputs = run(traced, MESHES[1])
    jax.effects_barrier()
    assert seen == ["small", (64, 64), "last"]
    np.testing.assert_array_equal(outputs[1], np.tril(TABLE))
    seen.clear()
    assert list(run_initializer(traced, {2: None})) == [2]
    jax.effects_barrier()
    assert seen == ["small", (64, 64), "last"]


def scaled_by(factor):
    table = jnp.asarray(TABLE * factor)

    @jax.custom_jvp
    def scaled(x):
        return jax.jit(lambda x: x + table)(x)

    scaled.defjvps(lambda t, _, x: t)
    return scaled


def called_with(factor):
    return lambda x: jax.pure_callback(lambda x: x + TABLE * factor, jax.typeof(x), x)


@pytest.mark.parametrize("make", [scaled_by, called_with])
def test_run_initializer_tells_functions_of_equal_text_apart(make):
    functions = [make(np.float32(factor)) for factor in range(3)]
    outputs = run(trace(lambda: [function(jnp.tril(TABLE)) for function in functions]))
    assert_same_bits(outputs, [np.tril(TABLE) + TABLE * factor for factor in range(3)])
