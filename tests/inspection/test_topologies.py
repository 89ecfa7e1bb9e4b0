"""Names of devices that are not there: what is known, what is refused, what to write instead."""

import dataclasses
import math

import pytest

from penzai_shard import Topology
from penzai_shard.errors import MeshError
from penzai_shard.inspection.devices.topologies import TPU_GENERATIONS, topologies_of


def test_devices_are_counted_as_jax_counts_them():
    counts = {
        "v2:2x2": 8,
        "v3:32x32": 2048,
        "v4:2x2x1": 4,
        "v5e:16x16": 256,
        "v5e:16x16*4": 1024,
        "v5p:8x8x16": 1024,
        "v6e:1x1": 1,
        "tpu7x:2x2x1": 8,
        "tpu7x:8x8x16": 2048,
        "cpu:512": 512,
        "gpu:8": 8,
        "gpu:4x8": 32,
    }
    assert {name: Topology(name).device_count for name in counts} == counts


def test_what_a_compiler_is_asked_for_describes_devices_as_they_are_in_a_run():
    assert Topology("v5e:4x4").request() == ("v5e:4x4", {})
    assert Topology("v5e:16x16*4").request() == ("v5e:16x16", {"num_slices": 4})
    assert Topology("v4:2x2x1").request() == ("v4:2x2x1", {"chip_config_name": "megacore"})
    assert Topology("v5p:4x4x8").request() == ("v5p:4x4x8", {"wrap": [True] * 3})
    assert Topology("v6e:1x1").request() == ("v6e:1x1", {"chips_per_host_bounds": [1, 1, 1]})
    assert Topology("cpu:512").request() == ("cpu", {})
    config = "gpu_device_info { device_memory_size: 84942979072 }"
    gpus = Topology("gpu:4x8", target_config=config)
    assert gpus.request() == ("gpu", {"topology": "1x4x8", "target_config": config})
    assert gpus.memory_limit == 84942979072 * 3 // 4


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("v5e", r"'v5e' is not the name of a topology\. Names are for instance \"v5e:16x16\""),
        ("v5e-256", r"'v5e-256' is not .*\. Write 'v5e:16x16'\."),
        ("v5litepod-16", r"is not .*\. Write 'v5e:4x4'\."),
        ("v5p-1024", r"is not .*\. Write 'v5p:4x8x16' or 'v5p:8x8x8'\."),
        ("v5e-1024", r"is not .*\. Write 'v5e:16x16\*4'\."),
        (512, r"512 is not the name"),
        ("v5e:4,4", r"'v5e:4,4' is not the name"),
        ("v5e:4x4*", r"is not the name"),
        ("", r"'' is not the name"),
        ("v5litepod:4x4", r"'v5litepod' is not known\. Write 'v5e:4x4'\."),
        ("v9:4x4", r"'v9' is not known\. There are v2, v3, v4, v5e, v5p, v6e, tpu7x, cpu and gpu"),
        ("v5e:3x3", r"no slice of 3x3 chips of v5e\. There are 1x1, 2x2, .*, 16x16\."),
        ("v5e:32x32", r"no slice of 32x32 .*Of as many there are 'v5e:16x16\*4'\."),
        ("v5e:4x2", r"no slice of 4x2 .*Of as many there are 'v5e:2x4'\."),
        ("v5p:4x4", r"no slice of 4x4 chips of v5p\. Of as many there are 'v5p:2x2x4'\."),
        ("v5p:8x4x4", r"no slice of 8x4x4 .*'v5p:4x4x8'.*in rising order, up to 16x16x24"),
        ("v4:16x16x24", r"no slice of 16x16x24 chips of v4"),
        ("v5e:0x4", r"has no devices"),
        ("v5e:4x4*0", r"has no devices"),
        ("cpu:0", r"has no devices"),
        ("cpu:4x4", r'write "cpu:512"'),
        ("cpu:8*2", r'write "cpu:512"'),
        ("cpu:4096", r"can simulate 2,048 CPU devices at most"),
        ("gpu:2x2x2", r'write "gpu:8", or by hosts and devices "gpu:4x8"'),
        ("cuda:8", r"'cuda' is not known"),
    ],
)
def test_wrong_names_are_refused_with_what_to_write(name, message):
    with pytest.raises(MeshError, match=message):
        Topology(name)


@pytest.mark.parametrize(
    ("name", "mesh", "fix"),
    [
        ("v5e:4x4", {"data": 64, "model": 4}, 'Write topology="v5e:16x16".'),
        ("v5e:4x4", {"data": 1024}, 'Write topology="v5e:16x16*4".'),
        ("v5p:2x2x1", {"data": 512}, 'Write topology="v5p:4x8x16" or topology="v5p:8x8x8".'),
        ("v5p:2x2x1", {"data": 7}, "Choose sizes of the mesh axes whose product is 4."),
        ("cpu:8", {"data": 16}, 'Write topology="cpu:16".'),
        ("gpu:8", {"data": 64}, 'Write topology="gpu:8x8".'),
    ],
)
def test_a_mesh_of_another_number_of_devices_is_refused_with_topologies_of_as_many(name, mesh, fix):
    with pytest.raises(MeshError) as error:
        Topology(name).refuse_mesh(mesh)
    size = math.prod(mesh.values())
    assert f"has {size:,} devices, and topology '{name}' has" in str(error.value)
    assert str(error.value).endswith(fix)
    if fix.startswith("Write"):
        named = fix.removeprefix('Write topology="').partition('"')[0]
        Topology(named).refuse_mesh(mesh)


def test_every_topology_that_is_suggested_has_as_many_devices():
    for kind, generation in TPU_GENERATIONS.items():
        for shape in generation.all_shapes():
            assert generation.has(shape)
            size = math.prod(shape) * generation.devices_per_chip
            names = topologies_of(kind, size)
            assert names
            assert {Topology(name).device_count for name in names} == {size}


def test_slices_are_spread_over_the_first_mesh_axes_that_they_divide():
    four = Topology("v5e:16x16*4")
    assert four.slices_of_axes({"data": 64, "model": 16}) == (4, 1)
    assert four.slices_of_axes({"stage": 2, "data": 32, "model": 16}) == (2, 2, 1)
    assert Topology("v5e:16x16").slices_of_axes({"data": 16, "model": 16}) == (1, 1)
    along_model = dataclasses.replace(four, slice_axes={"model": 4})
    assert along_model.slices_of_axes({"data": 64, "model": 16}) == (1, 4)


@pytest.mark.parametrize("axes", [{"data": 2}, {"pipe": 4}, {"data": 3}, {"data": -4, "model": -1}])
def test_slices_that_cannot_be_spread_so_are_refused(axes):
    with pytest.raises(
        MeshError, match=r"its 4 slices cannot be spread over mesh \(data=6, model=4"
    ):
        Topology("v5e:2x2*4", slice_axes=axes).slices_of_axes({"data": 6, "model": 4})


def test_slices_that_divide_no_mesh_axis_are_refused():
    with pytest.raises(MeshError, match="its 3 slices cannot be spread"):
        Topology("v5e:2x2*3").slices_of_axes({"data": 4, "model": 4})


def test_gpus_need_a_target_configuration_that_can_be_read(tmp_path):
    with pytest.raises(MeshError, match=r"target_config=\"h100\.txtpb\""):
        Topology("gpu:8").request()
    with pytest.raises(MeshError, match=r"absent\.txtpb' cannot be read \(No such file"):
        Topology("gpu:8", target_config=tmp_path / "absent.txtpb").request()
    (tmp_path / "gpu.txtpb").write_text("gpu_device_info {}")
    config = Topology("gpu:8", target_config=tmp_path / "gpu.txtpb").request()[1]["target_config"]
    assert config == "gpu_device_info {}"
