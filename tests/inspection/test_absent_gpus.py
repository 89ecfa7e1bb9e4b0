"""Steps compiled for GPUs that are not there, by JAX' plugin for CUDA and what it is told."""

import importlib.util

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec

import penzai_shard as pzs
from penzai_shard.errors import CompilationError

if importlib.util.find_spec("jax_plugins") is None or not any(
    importlib.util.find_spec(f"jax_plugins.xla_cuda{version}") for version in (12, 13)
):
    pytest.skip(
        "JAX' plugin for CUDA is not installed: "
        f"pip install --no-deps jax-cuda12-plugin=={jax.__version__} "
        f"jax-cuda12-pjrt=={jax.__version__}",
        allow_module_level=True,
    )

MEMORY = 48 * 2**30
CONFIG = f"""
platform_name: "CUDA"
device_description_str: "GPU of a test"
gpu_device_info {{
  device_memory_size: {MEMORY}
  cuda_compute_capability {{ major: 9 }}
  core_count: 100
  clock_rate_ghz: 1.5
  fpus_per_core: 128
  memory_bandwidth: 2000000000000
  l2_cache_size: 50000000
  threads_per_warp: 32
  threads_per_block_limit: 1024
  threads_per_core_limit: 2048
  block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535
  block_dim_limit_z: 65535
  shared_memory_per_block: 49152
  shared_memory_per_core: 233472
  shared_memory_per_block_optin: 232448
  registers_per_core_limit: 65536
  registers_per_block_limit: 65536
}}
"""
MESH = AbstractMesh((8, 2), ("data", "model"), axis_types=(AxisType.Auto,) * 2)


def ahead(rows, config=CONFIG):
    def array(shape, *spec):
        sharding = NamedSharding(MESH, PartitionSpec(*spec))
        return jax.ShapeDtypeStruct(shape, jnp.float32, sharding=sharding)

    return pzs.compile_ahead(
        jax.jit(lambda x, w: jnp.tanh(x @ w).sum()),
        array((rows, 256), "data", "model"),
        array((256, 256), "model"),
        topology=pzs.Topology("gpu:2x8", target_config=config),
    )


def test_collectives_and_memory_of_gpus_that_are_not_there():
    report = ahead(rows=512)
    assert report.device_kind == "GPU of a test"
    assert report.device_count == 16
    assert report.memory.inputs == (64 * 128 + 128 * 256) * 4
    assert report.memory.limit == MEMORY * 3 // 4
    assert report.fits is True
    found = {(one.kind, one.mesh_axes, one.payload_bytes) for one in report.collectives.collectives}
    assert ("all-reduce", ("model",), 64 * 256 * 4) in found
    assert report.compiler.startswith("jax-cuda")


def test_what_does_not_fit_gpus_is_reported_as_such():
    report = ahead(rows=2**30)
    assert report.fits is False
    assert "GiB of 36 GiB: does not fit" in str(report)
    assert report.collectives is not None


def test_a_target_configuration_that_cannot_be_read_is_an_error_in_the_compilers_words():
    with pytest.raises(CompilationError, match="cannot describe the devices of topology 'gpu:2x8'"):
        ahead(rows=512, config="gpu_device_info { no_such_field: 1 }")
