"""Making meshes, and relabelling what lies on an Explicit one onto its Auto twin."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from penzai_shard.errors import MeshError
from penzai_shard.meshes import auto_context, auto_twin, make_mesh, on_auto_twin, same_devices
from tests.refusals import problems_of

AUTO, EXPLICIT = AxisType.Auto, AxisType.Explicit


@pytest.fixture
def explicit():
    return make_mesh({"data": 4, "model": 2}, explicit=True)


@pytest.fixture
def x(explicit):
    return jax.device_put(jnp.arange(16.0).reshape(8, 2), NamedSharding(explicit, P("data")))


@pytest.mark.parametrize(("is_explicit", "kind"), [(False, AUTO), (True, EXPLICIT)])
def test_make_mesh_is_that_of_jax_with_the_kind_of_axes_asked_for(is_explicit, kind):
    sizes = {"data": np.int64(4), "model": 2}
    of_jax = jax.make_mesh((4, 2), ("data", "model"), axis_types=(kind,) * 2)
    assert make_mesh(sizes, explicit=is_explicit) == of_jax
    abstract = make_mesh(sizes, abstract=True, explicit=is_explicit)
    assert abstract == AbstractMesh((4, 2), ("data", "model"), axis_types=(kind,) * 2)
    assert type(abstract.shape["data"]) is int
    half = jax.devices()[4:]
    assert list(make_mesh({"data": 4}, half, explicit=is_explicit).devices) == half


def test_make_mesh_reports_all_wrong_sizes_and_names_at_once():
    wrong = {"a": 0, "b": -2, "c": 2.0, "d": True, "e": "4", 7: 2, "fine": 1}
    # Of the devices, which an abstract mesh has not, and of all but the fine one.
    assert len(problems_of(MeshError, make_mesh, wrong, jax.devices(), abstract=True)) == 7


def test_auto_twin_changes_explicit_axes_only(explicit):
    assert auto_twin(explicit) == Mesh(explicit.devices, ("data", "model"), axis_types=(AUTO, AUTO))
    abstract = AbstractMesh((4, 2), ("a", "b"), axis_types=(AxisType.Manual, EXPLICIT))
    assert auto_twin(abstract) == abstract.update(axis_types=(AxisType.Manual, AUTO))


def test_same_devices_ignores_the_kind_of_axes_and_needs_the_same_order(explicit):
    sizes = {"data": 4, "model": 2}
    assert same_devices(explicit, make_mesh(sizes))
    assert not same_devices(explicit, make_mesh(sizes, jax.devices()[::-1], explicit=True))
    assert not same_devices(explicit, make_mesh({"model": 2, "data": 4}, abstract=True))


def test_on_auto_twin_moves_no_data_and_keeps_other_leaves(explicit, x):
    struct = jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding, weak_type=True)
    tree = {"x": x, "struct": struct, "sharding": x.sharding, "n": np.ones(2), "t": "text"}
    found = on_auto_twin(tree)
    wanted = NamedSharding(auto_twin(explicit), P("data"))
    assert found["x"].sharding == found["struct"].sharding == found["sharding"] == wanted
    for before, after in zip(x.addressable_shards, found["x"].addressable_shards, strict=True):
        assert before.data.unsafe_buffer_pointer() == after.data.unsafe_buffer_pointer()
    assert found["struct"].weak_type
    assert found["n"] is tree["n"]
    assert on_auto_twin(found["x"]) is found["x"]


def test_on_auto_twin_works_in_traces_and_gradients_have_the_explicit_type(explicit, x):
    def loss(x):
        on_twin = on_auto_twin(x)
        assert jax.typeof(on_twin).sharding.mesh.axis_types == (AUTO, AUTO)
        return jnp.sum(jnp.sin(on_twin.reshape(-1) @ on_twin.reshape(-1)))

    expected = jax.grad(lambda x: jnp.sin(jnp.sum(x * x)))(np.asarray(x))
    for gradient in (jax.grad(loss), jax.jit(jax.grad(loss))):
        found = gradient(x)
        with jax.set_mesh(explicit), auto_context():
            within = gradient(x)
        assert jax.typeof(found) == jax.typeof(within) == jax.typeof(x)
        np.testing.assert_allclose(found, expected, rtol=1e-5)
    assert jax.jit(on_auto_twin)(x).sharding.is_equivalent_to(on_auto_twin(x.sharding), 2)
    # The layout is pinned, not left to the compiler.
    assert jax.make_jaxpr(on_auto_twin)(x).eqns[-1].primitive.name == "sharding_constraint"
    assert not jax.make_jaxpr(on_auto_twin)(on_auto_twin(x)).eqns
    assert jax.vmap(lambda row: on_auto_twin(row).sum())(x).sharding.spec == P("data")
