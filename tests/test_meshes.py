"""Making meshes, and moving between Auto and Explicit ones."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from penzai_shard import make_mesh
from penzai_shard.errors import MeshError
from penzai_shard.meshes import auto_twin, has_explicit_axes


def explicit_mesh():
    return jax.make_mesh((4, 2), ("data", "model"), axis_types=(AxisType.Explicit,) * 2)


def test_a_mesh_has_auto_axes_in_the_order_given():
    mesh = make_mesh({"data": 4, "model": 2})
    assert tuple(mesh.shape.items()) == (("data", 4), ("model", 2))
    assert mesh.axis_types == (AxisType.Auto, AxisType.Auto)
    assert mesh.devices.shape == (4, 2)


def test_the_sizes_may_be_keywords_and_are_given_once():
    assert make_mesh(data=4, model=2) == make_mesh({"data": 4, "model": 2})
    with pytest.raises(MeshError, match="given twice"):
        make_mesh({"data": 4}, model=2)
    with pytest.raises(MeshError, match="from the sizes of its mesh axes by name"):
        make_mesh()


def test_devices_lie_in_the_order_that_jax_makes():
    given = jax.make_mesh((4, 2), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
    assert make_mesh({"data": 4, "model": 2}) == given


def test_some_of_the_devices_can_be_used():
    mesh = make_mesh({"data": 2, "model": 2}, jax.devices()[4:])
    assert set(mesh.devices.flat) == set(jax.devices()[4:])


def test_too_few_devices_name_the_setting_that_simulates_them():
    with pytest.raises(
        MeshError, match=r"data=4 x model=4: it needs 16 devices, and there are 8"
    ) as caught:
        make_mesh({"data": 4, "model": 4})
    message = str(caught.value)
    assert "XLA_FLAGS=--xla_force_host_platform_device_count=16" in message
    assert "product is 8" in message


def test_too_many_devices_say_how_to_use_fewer():
    with pytest.raises(MeshError, match=r"it needs 4 devices, and there are 8") as caught:
        make_mesh({"data": 4})
    assert "make_mesh({'data': 4}, jax.devices()[:4])" in str(caught.value)


def test_a_mesh_of_absent_devices_may_have_any_number_of_them():
    mesh = make_mesh({"data": 512, "model": 8}, abstract=True)
    assert tuple(mesh.shape.items()) == (("data", 512), ("model", 8))
    assert isinstance(mesh, AbstractMesh)
    assert mesh.axis_types == (AxisType.Auto, AxisType.Auto)
    with pytest.raises(MeshError, match=r"make_mesh\(\{'data': 512, 'model': 8\}, abstract=True\)"):
        make_mesh(data=512, model=8)
    with pytest.raises(MeshError, match=r"has no devices\. Leave out devices"):
        make_mesh({"data": 8}, jax.devices(), abstract=True)
    with pytest.raises(MeshError, match="must be a positive integer"):
        make_mesh(data=-1, abstract=True)


def test_all_wrong_sizes_are_reported_at_once():
    with pytest.raises(MeshError, match="mesh axis 'data': its size must be a positive") as caught:
        make_mesh({"data": 0, "model": 2.0, "seq": 2, "pipe": True})
    assert len(caught.value.problems) == 3


def test_the_twin_has_the_same_devices_names_and_order_but_auto_axes():
    mesh = explicit_mesh()
    twin = auto_twin(mesh)
    assert has_explicit_axes(mesh)
    assert not has_explicit_axes(twin)
    assert twin.axis_names == mesh.axis_names
    assert np.array_equal(twin.devices, mesh.devices)
    assert twin == Mesh(mesh.devices, mesh.axis_names, axis_types=(AxisType.Auto,) * 2)


def test_the_twin_of_an_auto_mesh_is_itself():
    mesh = make_mesh({"data": 8})
    assert auto_twin(mesh) is mesh
    assert auto_twin(auto_twin(explicit_mesh())) is auto_twin(explicit_mesh())


def test_an_abstract_mesh_has_a_twin_too():
    mesh = AbstractMesh((4, 2), ("data", "model"), axis_types=(AxisType.Explicit, AxisType.Auto))
    twin = auto_twin(mesh)
    assert isinstance(twin, AbstractMesh)
    assert twin.axis_types == (AxisType.Auto, AxisType.Auto)
    assert twin.shape == mesh.shape


def test_manual_axes_stay_manual_in_the_twin():
    mesh = AbstractMesh((4, 2), ("data", "model"), axis_types=(AxisType.Manual, AxisType.Explicit))
    assert auto_twin(mesh).axis_types == (AxisType.Manual, AxisType.Auto)


def test_an_array_moves_onto_the_twin_without_being_copied():
    mesh = explicit_mesh()
    x = jax.device_put(jnp.arange(8.0), NamedSharding(mesh, PartitionSpec("data")))
    moved = jax.device_put(x, NamedSharding(auto_twin(mesh), PartitionSpec("data")))
    assert [s.data.unsafe_buffer_pointer() for s in moved.addressable_shards] == [
        s.data.unsafe_buffer_pointer() for s in x.addressable_shards
    ]


def test_sizes_may_be_numpy_integers():
    assert dict(make_mesh({"data": np.int64(8)}).shape) == {"data": 8}


@pytest.mark.parametrize("shape", [[("data", 8)], {}, "data=8"])
def test_what_is_no_mapping_of_sizes_is_refused(shape):
    with pytest.raises(MeshError, match=r"sizes of its mesh axes by name, not from .*make_mesh\("):
        make_mesh(shape)
