"""Trees put on a mesh: values, layouts, variables, buffers of their own, constraints in a trace."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from penzai import pz

import penzai_shard as pzs
from tests.checkpoints.trees import numbers, pointers
from tests.models import MODELS, counted_mlp

MESH = pzs.make_mesh({"data": 4, "model": 2})
EXPLICIT = jax.make_mesh((4, 2), ("data", "model"))
RULES = {"embedding": "data", "embed": "data", "features": "data", "mlp": "model"}


def named(array, *names):
    """With its data as they are: Penzai itself would make an array of JAX of one of NumPy."""
    return pzs.name_axes({"array": array}, {"array": names})["array"]


@pytest.mark.parametrize(
    "name", ["counted mlp", "v1 mlp", "nnx optimizer", "haliax linear", "equinox", "plain"]
)
def test_place_values_and_layouts(name):
    relaxed = {"on_indivisible": "replicate", "on_unnamed": "replicate"}
    model = MODELS[name]()
    plan = pzs.make_plan(model, MESH, RULES, **relaxed)

    def check(before, after, sharding):
        if isinstance(sharding, NamedSharding):
            np.testing.assert_array_equal(numbers(before), numbers(after))
            assert after.sharding == sharding
        else:
            assert after == before

    for placed in (pzs.place(model, mesh=MESH, rules=RULES, **relaxed), pzs.place(model, plan)):
        trees = map(pz.freeze_variables, (model, placed))
        jax.tree.map(check, *trees, plan.sharding_tree())


def test_place_variables():
    model = counted_mlp()
    placed = pzs.place([model, model.count], MESH, RULES, on_unnamed="infer")
    assert placed[1] is placed[0].count is not model.count
    placed[1].value += 1
    assert (model.count.value, placed[0].count.value) == (0, 1)


def test_place_plan_in_another_order():
    up, down = (pz.Parameter(value=named(np.ones(8), name), label=name) for name in ("up", "down"))
    plan = pzs.make_plan([up, down], MESH, {"up": "data", "down": "model"})
    placed = pzs.place([down, up], plan=plan)
    assert [x.value.data_array.sharding.spec for x in placed] == [P("model"), P("data")]


def shared_memory(value):
    """A NumPy array whose memory JAX takes for its own on a CPU: 64 bytes aligned."""
    memory = np.empty(64 * 4 + 64, np.uint8)
    array = memory[-memory.ctypes.data % 64 :][: 64 * 4].view(np.float32)
    array[:] = value
    return array


def fixed(array):
    array.flags.writeable = False
    return array


def test_place_copies_what_can_be_written_to():
    source = shared_memory(1)
    tree = {"own": named(source, "a"), "view": named(fixed(source.view()), "b")}
    placed = pzs.place(tree, MESH, {"a": "data"})
    source[:] = 0
    assert all((array == 1).all() for array in jax.tree.leaves(placed))


@pytest.mark.parametrize("on_unnamed", ["replicate", "infer"])
@pytest.mark.parametrize("mesh", [MESH, EXPLICIT], ids=["auto", "explicit"])
def test_place_owned(on_unnamed, mesh):
    on_mesh = jax.device_put(jnp.ones(8), NamedSharding(MESH, P("data")))
    arrays = [on_mesh, fixed(shared_memory(2)), shared_memory(3), jnp.ones(8), jnp.ones(8), 4.0]
    tree = [*(named(array, "a") for array in arrays[:-1]), *arrays, on_mesh, jax.random.key(0)]
    with jax.set_mesh(mesh):
        owned = pzs.place(tree, mesh, {"a": "data"}, on_unnamed=on_unnamed, owned=True)
    sources, results = jax.tree.leaves(tree), jax.tree.leaves(owned)
    results.pop().delete()
    assert not sources.pop().is_deleted()
    results[9] + results[0]  # An array that is left to JAX goes where others are.
    own = pointers(*results)
    assert len(set(own)) == len(own)
    assert set(own).isdisjoint(pointers(*map(jnp.asarray, sources)))
    for source, result in zip(sources, results, strict=True):
        np.testing.assert_array_equal(source, np.array(result))
        memory = pointers(result)
        assert pointers(jax.jit(lambda x: x + 1, donate_argnums=0)(result)) == memory
        assert result.is_deleted()


def test_place_in_a_trace_is_a_constraint():
    def compute(x):
        return pzs.place([named(x * 2, "a"), {"one": jnp.ones(8)}, x], MESH, rules, **options)

    rules, options = {"a": ("model", "data")}, {"on_unnamed": "infer"}
    equations = jax.make_jaxpr(compute)(jnp.ones(8)).eqns
    pinned = [e.params["sharding"] for e in equations if e.primitive.name == "sharding_constraint"]
    assert pinned == [NamedSharding(MESH, P(("model", "data")))]


@pytest.mark.parametrize("context", [MESH, EXPLICIT], ids=["auto", "explicit"])
def test_place_on_an_explicit_mesh(context):
    def put(array):
        return pzs.name_to_name_device_put(named(array, "a"), EXPLICIT, {"a": "data"}).data_array

    lies = jax.device_put(np.arange(8.0), NamedSharding(EXPLICIT, P("model")))
    with jax.set_mesh(context):
        for placed in (put(lies), put(np.arange(8.0)), jax.jit(put)(lies)):
            assert placed.sharding == NamedSharding(MESH, P("data"))
            np.testing.assert_array_equal(placed, np.arange(8))


def test_place_takes_a_plan_of_absent_devices():
    tree, rules = pz.nx.ones({"a": 8}), {"a": "data"}
    absent, present = (pzs.make_mesh({"data": 8}, abstract=kind) for kind in (True, False))
    placed = pzs.place(tree, pzs.make_plan(tree, absent, rules), mesh=present)
    assert placed.data_array.sharding == NamedSharding(present, P("data"))


def test_place_keeps_frozen_what_was_frozen():
    one, other = (pz.Parameter(value=pz.nx.ones({"a": 8}), label=label) for label in "xy")
    placed = pzs.place({"base": one.freeze(), "lora": other}, pzs.make_mesh({"data": 8}), {})
    assert (type(placed["base"]), type(placed["lora"])) == (pz.ParameterValue, pz.Parameter)
