"""Steps on devices that are not there: simulated CPUs, and TPUs and GPUs where a compiler is."""

import functools
import importlib.metadata
import importlib.util
import os
from unittest.mock import Mock

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec

import penzai_shard as pzs
from penzai_shard.errors import ProgramError
from penzai_shard.inspection import compile_ahead as module
from penzai_shard.inspection.compiler_process import TooLargeError
from tests.refusals import problems_of


def needs(package, command):
    found = importlib.util.find_spec(package)
    return pytest.mark.skipif(found is None, reason=f"{package} is not there: {command}")


needs_tpu = needs("libtpu", "pip install 'penzai-shard[tpu]'")
needs_gpu = needs("jax_plugins", "pip install --no-deps jax-cuda12-plugin jax-cuda12-pjrt")


def arrays(rows=64, columns=256, data=8):
    axis_types = (AxisType.Auto,) * 2
    mesh = AbstractMesh((data, 2), ("data", "model"), axis_types=axis_types)
    specs = {(rows, columns): ("data", "model"), (columns, columns): ("model",)}
    return [
        jax.ShapeDtypeStruct(shape, "float32", sharding=NamedSharding(mesh, PartitionSpec(*spec)))
        for shape, spec in specs.items()
    ]


@jax.jit
def step(x, w):
    return jnp.tanh(x @ w).sum()


def collectives_of(report):
    return {(one.kind, one.mesh_axes, one.payload_bytes) for one in report.collectives}


# Partial products over the columns that a device has, then the sum over the rows of all.
PRODUCT, SUM = ("all-reduce", ("model",), 8 * 256 * 4), ("all-reduce", ("data",), 4)
INPUTS = (8 * 128 + 128 * 256) * 4


def test_simulated_devices_give_what_those_here_give():
    before = dict(os.environ), jax.devices()
    there = pzs.compile_ahead(step, *arrays(data=4), topology="cpu:8")
    assert (dict(os.environ), jax.devices()) == before
    here = pzs.compile_step(step, *arrays(data=4))
    assert there.collectives.collectives == here.collectives.collectives
    assert there.figures == here.figures
    assert (there.fits, there.device_kind) == (None, "cpu")
    assert "estimated: all for GPUs and TPUs" in str(there)


def test_abstract_mesh_may_have_more_devices_than_are_here(monkeypatch, tmp_path):
    # Warnings that are switched off, other devices, and what is printed disturb nothing.
    monkeypatch.setenv("TF_CPP_MIN_LOG_LEVEL", "3")
    monkeypatch.setenv("JAX_NUM_CPU_DEVICES", "3")
    (tmp_path / "jax_plugins/noise").mkdir(parents=True)
    (tmp_path / "jax_plugins/noise/__init__.py").write_text("print('words')")
    monkeypatch.syspath_prepend(tmp_path)
    x, w = arrays()
    fine, coarse = (
        NamedSharding(x.sharding.mesh, spec)
        for spec in (PartitionSpec(("data", "model")), PartitionSpec(None, "data"))
    )

    @jax.jit
    def gather(x, w):
        y = jax.lax.with_sharding_constraint(jnp.sin(x), fine)
        return step(x, w), jax.lax.with_sharding_constraint(jnp.cos(y), coarse)

    there = pzs.compile_ahead(gather, x, w, topology="cpu:16")
    for compiled in (pzs.compile_step(gather, x, w), there):
        assert collectives_of(compiled.collectives) >= {PRODUCT, SUM}
        assert compiled.memory.inputs == INPUTS
        assert any("whole" in note for note in compiled.step.notes)


def test_step_that_is_too_large_is_reported_with_what_it_needs(monkeypatch):
    error = TooLargeError("the program does not fit:")
    error.needed, error.limit, error.device_kind = 196 * 2**30, 15 * 2**30, "TPU v5 lite"
    monkeypatch.setattr(module, "compile_in_process", Mock(side_effect=error))
    ignoring = jax.jit(lambda x, w, unused: step(x, w))
    large = arrays(2**19, 2**15)
    report = pzs.compile_ahead(ignoring, *large, large[1], topology="cpu:16")
    assert report.fits is False
    with pytest.raises(ProgramError):
        print(report.collectives)
    memory = report.memory
    used = 2**34 * 4 // 16 + 2**30 * 4 // 2
    needed = 196 * 2**30 + memory.inputs - used
    assert (memory.total, memory.limit, memory.padding) == (needed, 15 * 2**30, 0)
    assert f"exact: {report.exact}\n" in str(report)
    assert ("memory" in report.exact, "total" in report.estimated) == (False, True)
    assert "does not fit" in report.report().verdict


def test_mesh_of_another_size_and_missing_compilers_are_refused(monkeypatch):
    call = functools.partial(pzs.compile_ahead, topology="cpu:8")
    assert "'cpu:16'" in problems_of(pzs.MeshError, call, step, *arrays())[0].fix
    missing = Mock(side_effect=importlib.metadata.PackageNotFoundError)
    monkeypatch.setattr("importlib.metadata.version", missing)
    with pytest.raises(pzs.MissingExtraError, match=r"penzai-shard\[tpu\]"):
        pzs.compile_ahead(step, *arrays(), topology="v5e:4x4")


@pytest.mark.parametrize(("end", "status"), [("exit 3", "3"), ("kill -9 $$", "-9")])
def test_process_that_fails_says_what_it_wrote(monkeypatch, tmp_path, end, status):
    (tmp_path / "python").write_text(f"#!/bin/sh\necho some words >&2\n{end}\n")
    (tmp_path / "python").chmod(0o700)
    monkeypatch.setattr("sys.executable", str(tmp_path / "python"))
    with pytest.raises(pzs.CompilationError, match=rf"(?s)status {status}.*some words") as caught:
        pzs.compile_ahead(step, *arrays(), topology="cpu:16")
    # Linux ends processes so where memory is short.
    assert ("memory" in caught.value.problems[0].fix) == (status == "-9")


@needs_tpu
def test_tpus():
    report = pzs.compile_ahead(step, *arrays(), topology="v5e:4x4")
    assert collectives_of(report.collectives) >= {PRODUCT}
    assert (report.fits, report.memory.inputs) == (True, INPUTS)
    assert "which fits into 15.8 GiB" in str(report)
    rows = report.memory.to_data()["rows"]
    assert sum(row["per device"] or 0 for row in rows) == report.memory.total
    large = pzs.compile_ahead(step, *arrays(2**18, 2**20), topology="v5e:4x4")
    assert large.fits is False
    assert large.memory.total > large.memory.limit == int(15.75 * 2**30)


CONFIG = """
platform_name: "CUDA" device_description_str: "GPU of a test" gpu_device_info {
  device_memory_size: 51539607552 cuda_compute_capability { major: 9 } core_count: 100
  clock_rate_ghz: 1.5 fpus_per_core: 128 memory_bandwidth: 2000000000000 l2_cache_size: 50000000
  threads_per_warp: 32 threads_per_block_limit: 1024 threads_per_core_limit: 2048
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
  shared_memory_per_block: 49152 shared_memory_per_core: 233472 registers_per_core_limit: 65536
  shared_memory_per_block_optin: 232448 registers_per_block_limit: 65536 }
"""


@needs_gpu
def test_gpus():
    topology = pzs.Topology("gpu:2x8", target_config=CONFIG)
    report = pzs.compile_ahead(step, *arrays(), topology=topology)
    assert collectives_of(report.collectives) == {PRODUCT, SUM}
    assert (report.device_kind, report.fits) == ("GPU of a test", True)
    assert report.memory.limit == 51539607552 * 3 // 4
