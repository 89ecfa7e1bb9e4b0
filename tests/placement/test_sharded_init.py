"""Models built where they belong: values, layouts, buffers, what is compiled, and memory."""

import subprocess
import sys
import textwrap

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from flax import nnx
from jax.sharding import PartitionSpec as P
from penzai import pz

import penzai_shard as pzs
from tests.checkpoints.trees import numbers
from tests.models import LinenBlock, NnxBlock, counted_mlp, hax, llama, nnx_block, penzai_mlp

MESH, *OTHER_MESHES = (pzs.make_mesh({"data": data, "model": 8 // data}) for data in (2, 1, 8))
EXPLICIT = jax.make_mesh((2, 4), ("data", "model"))
RULES = {"features": "data", "embed": "data", "mlp": "model"}
RELAXED = {"on_unnamed": "replicate", "on_indivisible": "replicate"}
KEY = jax.random.key(0)
TABLE = np.arange(4096, dtype=np.float32).reshape(64, 64)


def arrays_of(tree):
    return [x for x in jax.tree.leaves(pz.freeze_variables(tree)) if isinstance(x, jax.Array)]


def build_plain(key, raw_key, table):
    names = ("embed", "mlp")
    weights = jax.random.normal(key, (64, 128))
    others = {"text": "gelu", "function": jnp.tanh, "rate": 0.5, "raw": raw_key, "key": key}
    arrays = {"orthogonal": nn.initializers.orthogonal()(raw_key, (64, 64)), "table": table}
    return {"named": pz.nx.wrap(weights).tag(*names), "captured": TABLE, **others, **arrays}


# Initialiser, arguments, named arguments.
FAMILIES = {
    "penzai": (penzai_mlp, (), {"seed": 1, "sizes": (64, 64, 32)}),
    "linen": (LinenBlock().init, (KEY, jnp.ones((2, 512))), {}),
    "nnx": (nnx_block, (), {}),
    "haliax": (hax.nn.Linear.init, (hax.Axis("embed", 64), hax.Axis("mlp", 128)), {"key": KEY}),
    "equinox": (eqx.nn.MLP, (8, 8, 64, 2), {"key": KEY}),
    "plain": (build_plain, (KEY, jax.random.PRNGKey(3), jnp.asarray(TABLE)), {}),
}


@pytest.mark.parametrize("name", FAMILIES)
def test_sharded_init_values_and_layouts(name):
    initializer, args, named = FAMILIES[name]
    made = pzs.sharded_init(initializer, *args, mesh=MESH, rules=RULES, **RELAXED, **named)

    def build():
        leaves = jax.tree.leaves(pz.freeze_variables(initializer(*args, **named)))
        return [leaf for leaf in leaves if not callable(leaf) and not isinstance(leaf, str)]

    # Exact operations are compiled at level 1, sums of floats at that of tests.
    level = None if name == "plain" else {"xla_backend_optimization_level": "1"}
    expected = jax.jit(build, compiler_options=level)()
    for ours, theirs in zip(arrays_of(made), expected, strict=True):
        assert ours.dtype == theirs.dtype
        # One bit of the largest: a small number may be the difference of two larger ones.
        is_float = ours.dtype == jnp.float32
        bit = np.abs(theirs).max(initial=0) * np.finfo(np.float32).eps if is_float else 0
        np.testing.assert_allclose(numbers(ours), numbers(theirs), rtol=0, atol=bit)

    # A plan for shapes, on an Explicit mesh, says the same and is carried out.
    abstract = pzs.abstract_model(initializer, *args, **named)
    plan = pzs.make_plan(abstract, EXPLICIT, RULES, **RELAXED)
    leaves = jax.tree.leaves(plan.sharding_tree())
    shardings = [leaf for leaf in leaves if isinstance(leaf, jax.sharding.Sharding)]
    again = pzs.sharded_init(initializer, *args, plan=plan, **named)
    for model in (made, again):
        assert [x.sharding for x in arrays_of(model)] == shardings

    # The same bits on every mesh.
    for mesh in OTHER_MESHES if name in ("penzai", "plain") else ():
        other = pzs.sharded_init(initializer, *args, mesh=mesh, rules=RULES, **RELAXED, **named)
        for a, b in zip(arrays_of(made), arrays_of(other), strict=True):
            np.testing.assert_array_equal(numbers(a), numbers(b))


def test_sharded_init_leaves_arguments_alone():
    table = jnp.asarray(TABLE)
    made = pzs.sharded_init(build_plain, KEY, KEY, table, mesh=MESH, rules=RULES, **RELAXED)
    assert (made["text"], made["function"], made["rate"]) == ("gelu", jnp.tanh, 0.5)
    for array in arrays_of(made):
        array.delete()
    np.testing.assert_array_equal(table, TABLE)
    assert not KEY.is_deleted()


@pytest.mark.parametrize("mesh", [MESH, EXPLICIT], ids=["auto", "explicit"])
@pytest.mark.parametrize("name", ["penzai", "nnx"])
def test_sharded_init_inside_a_mesh(name, mesh):
    initializer, args, named = FAMILIES[name]
    expected = pzs.sharded_init(initializer, *args, mesh=MESH, rules=RULES, **RELAXED, **named)
    with jax.set_mesh(mesh):
        made = pzs.sharded_init(initializer, *args, mesh=mesh, rules=RULES, **RELAXED, **named)
        # An argument that lies on the mesh.
        table = jax.device_put(TABLE, jax.sharding.NamedSharding(mesh, P("model")))
        double = pzs.sharded_init(lambda x: x * 2, table, mesh=mesh, **RELAXED)
        assert pzs.abstract_model(lambda x: x * 2, table).shape == double.shape
    np.testing.assert_array_equal(double, TABLE * 2)
    for ours, theirs in zip(arrays_of(made), arrays_of(expected), strict=True):
        np.testing.assert_array_equal(numbers(ours), numbers(theirs))
        assert ours.sharding == theirs.sharding


def test_sharded_init_compiles_equal_blocks_once():
    events, counts = [], []

    def listen(event, duration, **_):
        events.append(event)

    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        for depth in (2, 2, 6):
            events.clear()
            sizes = (64,) * (depth + 1)
            pzs.sharded_init(penzai_mlp, 0, sizes, mesh=MESH, rules={"features_out": "model"})
            counts.append(events.count("/jax/core/compile/backend_compile_duration"))
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)
    assert counts[1] == counts[2] > 0


def test_sharded_init_peak_memory():
    code = """
        import os, resource, sys
        if os.fork():  # A process starts with the peak of the one that started it; a fork does not.
            sys.exit(os.waitstatus_to_exitcode(os.wait()[1]))
        import jax
        import penzai_shard as pzs

        def build(key, count):
            weights = {str(i): jax.random.normal(key, (2048, 2048)) for i in range(count)}
            return pzs.name_axes(weights, {"*": ("data", "model")})

        def peak():
            unit = 1 if sys.platform == "darwin" else 1024
            return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit

        mesh = pzs.make_mesh({"data": 4, "model": 2})
        # One array first: compiling takes 70 MB however many follow.
        jax.block_until_ready(pzs.sharded_init(build, jax.random.key(0), 1, mesh=mesh))
        before = peak()
        model = jax.block_until_ready(pzs.sharded_init(build, jax.random.key(0), 16, mesh=mesh))
        print((peak() - before) / sum(array.nbytes for array in jax.tree.leaves(model)))
        """
    command = [sys.executable, "-c", textwrap.dedent(code)]
    output = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
    assert 0.9 < float(output) < 1.3


def test_sharded_init_warns_of_random_streams_that_stay_where_they_are():
    given = {"mesh": MESH, "rules": RULES, **RELAXED}
    rngs = nnx.Rngs(0)
    with pytest.warns(pzs.ShardingWarning, match="lambda"):
        made = pzs.sharded_init(NnxBlock, rngs, **given)
    assert rngs.params.count[...] == 0
    kernels = (model.first.kernel[...] for model in (made, nnx_block()))
    np.testing.assert_allclose(*kernels, atol=1e-6)
    pzs.sharded_init(lambda: NnxBlock(nnx.Rngs(0)), **given)


def test_sharded_init_of_shapes_is_told_to_take_the_function_that_builds_them():
    shapes = pzs.abstract_model(counted_mlp)
    with pytest.raises(pzs.RuleTypeError) as caught:
        pzs.sharded_init(shapes, mesh=MESH, rules=RULES)
    assert "sharded_init(build, ...)" in caught.value.problems[0].fix


def test_sharded_init_makes_a_model_beside_its_variables():
    options = {"mesh": MESH, "rules": RULES, **RELAXED}
    model, variables = pzs.sharded_init(lambda: pz.unbind_variables(counted_mlp()), **options)
    x = pz.nx.ones({"features": 8})
    found = pz.bind_variables(model, variables)(x).data_array
    np.testing.assert_allclose(found, counted_mlp()(x).data_array, atol=1e-6)


def test_abstract_model_makes_what_is_no_parameter():
    abstract, model = pzs.abstract_model(counted_mlp), counted_mlp()
    restored = pzs.with_params(abstract, pzs.param_dict(model))
    x = pz.nx.ones({"features": 8})
    weights = abstract.body.sublayers[0].sublayers[0].weights.value
    assert isinstance(weights.data_array, jax.ShapeDtypeStruct)
    np.testing.assert_array_equal(restored(x).data_array, model(x).data_array)
    assert float(restored.count.value) == 1


def test_abstract_model_keeps_constants_free_of_devices():
    """So that they may go with arrays over a mesh, which need not be there."""
    constants = [x for x in jax.tree.leaves(pzs.abstract_model(llama)) if isinstance(x, jax.Array)]
    assert constants
    assert not any(x.committed for x in constants)
