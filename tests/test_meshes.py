"""Making meshes, and relabelling what lies on an Explicit one onto its Auto twin."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from penzai_shard.errors import MeshError
from penzai_shard.meshes import (
    auto_context,
    auto_twin,
    make_mesh,
    mesh_text,
    on_auto_twin,
    same_devices,
)

AUTO, EXPLICIT = AxisType.Auto, AxisType.Explicit


@pytest.fixture
def explicit():
    return make_mesh({"data": 4, "model": 2}, explicit=True)


@pytest.fixture
def x(explicit):
    return jax.device_put(jnp.arange(16.0).reshape(8, 2), NamedSharding(explicit, P("data")))


def pointers(array):
    return [shard.data.unsafe_buffer_pointer() for shard in array.addressable_shards]


@pytest.mark.parametrize(("is_explicit", "kind"), [(False, AUTO), (True, EXPLICIT)])
def test_make_mesh_is_that_of_jax_with_the_kind_of_axes_asked_for(is_explicit, kind):
    sizes = {"data": np.int64(4), "model": 2}
    mesh = make_mesh(sizes, explicit=is_explicit)
    assert mesh == jax.make_mesh((4, 2), ("data", "model"), axis_types=(kind,) * 2)
    abstract = make_mesh(sizes, abstract=True, explicit=is_explicit)
    assert abstract == AbstractMesh((4, 2), ("data", "model"), axis_types=(kind,) * 2)
    assert mesh_text(mesh) == mesh_text(abstract) == "data=4, model=2"
    assert type(abstract.shape["data"]) is int


def test_make_mesh_takes_some_of_the_devices_and_absent_ones():
    assert set(make_mesh({"data": 4}, jax.devices()[4:]).devices.flat) == set(jax.devices()[4:])
    assert make_mesh({"data": 4096}, abstract=True).size == 4096


@pytest.mark.parametrize("shape", [{}, [("data", 8)], "data=8", None, 8])
def test_make_mesh_refuses_what_is_no_mapping_of_sizes(shape):
    with pytest.raises(MeshError) as caught:
        make_mesh(shape)
    (problem,) = caught.value.problems
    code = problem.fix.removeprefix("Write for instance ").removesuffix(".")
    assert eval(code).size == 8


def test_make_mesh_reports_all_wrong_sizes_and_names_at_once():
    wrong = {"a": 0, "b": -2, "c": 2.0, "d": True, "e": "4", 7: 2, "fine": 1}
    with pytest.raises(MeshError) as caught:
        make_mesh(wrong, jax.devices(), abstract=True)
    assert len(caught.value.problems) == 1 + len(wrong) - 1


@pytest.mark.parametrize(
    ("sizes", "fitting", "count"),
    [
        ({"data": 4, "model": 4}, {"data": 4, "model": 2}, 16),
        ({"data": 16}, {"data": 8}, 16),
        ({"data": 3, "model": 1}, {"data": 1, "model": 8}, 3),
        ({"data": 2, "model": 2}, {"data": 2, "model": 4}, 4),
    ],
)
def test_make_mesh_names_sizes_that_work_and_the_flag(sizes, fitting, count):
    with pytest.raises(MeshError) as caught:
        make_mesh(sizes)
    (problem,) = caught.value.problems
    assert str(fitting) in problem.fix
    assert f"XLA_FLAGS=--xla_force_host_platform_device_count={count} " in problem.fix
    assert make_mesh(fitting).size == 8


def test_auto_twin_changes_explicit_axes_only(explicit):
    twin = auto_twin(explicit)
    assert twin == Mesh(explicit.devices, ("data", "model"), axis_types=(AUTO, AUTO))
    assert auto_twin(twin) is twin
    abstract = AbstractMesh((4, 2), ("a", "b"), axis_types=(AxisType.Manual, EXPLICIT))
    assert auto_twin(abstract) == abstract.update(axis_types=(AxisType.Manual, AUTO))


def test_same_devices_ignores_the_kind_of_axes_and_needs_the_same_order(explicit):
    auto = make_mesh({"data": 4, "model": 2})
    other_order = make_mesh({"data": 4, "model": 2}, jax.devices()[::-1])
    abstract = make_mesh({"data": 4, "model": 2}, abstract=True)
    assert same_devices(explicit, auto)
    assert same_devices(explicit, abstract)
    assert not same_devices(auto, other_order)
    assert not same_devices(auto, make_mesh({"model": 2, "data": 4}, abstract=True))


def test_on_auto_twin_moves_no_data_and_keeps_other_leaves(explicit, x):
    struct = jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding, weak_type=True)
    tree = {"x": x, "struct": struct, "sharding": x.sharding, "n": np.ones(2), "t": "text"}
    found = on_auto_twin(tree)
    wanted = NamedSharding(auto_twin(explicit), P("data"))
    assert found["x"].sharding == found["struct"].sharding == found["sharding"] == wanted
    assert pointers(found["x"]) == pointers(x)
    assert found["struct"].weak_type
    again = on_auto_twin(found)
    assert all(again[key] is found[key] for key in tree)
    assert found["n"] is tree["n"]


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


def test_auto_context_allows_auto_arrays_under_an_explicit_mesh(explicit, x):
    double = jax.jit(lambda a: jnp.dot(a.reshape(-1), a.reshape(-1)))
    with jax.set_mesh(explicit):
        with pytest.raises(ValueError, match="mesh"):
            double(on_auto_twin(x))
        with auto_context():
            assert double(on_auto_twin(x)) == np.sum(np.asarray(x) ** 2)
    with jax.set_mesh(auto_twin(explicit)), auto_context():
        assert jax.sharding.get_abstract_mesh().axis_types == (AUTO, AUTO)
