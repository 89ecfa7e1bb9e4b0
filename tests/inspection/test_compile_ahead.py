"""Steps on devices that are not there: what is reported, and what is refused beforehand."""

import json
import os

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec

import penzai_shard as pzs
from penzai_shard.errors import CompilationError, MeshError, MissingExtraError
from penzai_shard.inspection.ahead import compile_ahead as module
from penzai_shard.inspection.devices.absent_devices import (
    CompilerProcess,
    TooLargeError,
    memory_figures,
    version_note,
)

MESH = AbstractMesh((8, 2), ("data", "model"), axis_types=(AxisType.Auto,) * 2)


def array(*spec, shape=(64, 32), mesh=MESH):
    sharding = NamedSharding(mesh, PartitionSpec(*spec))
    return jax.ShapeDtypeStruct(shape, jnp.float32, sharding=sharding)


@jax.jit
def step(x, w):
    return jnp.tanh(x @ w.T).sum()


ARGUMENTS = (array("data", "model"), array(None, "model"))


@pytest.fixture(scope="module")
def report():
    return pzs.compile_ahead(step, *ARGUMENTS, topology="cpu:16")


def test_it_unfolds_as_its_program_does(report):
    tree = report.tree()
    sums = {figure.name: figure.value for figure in tree.figures}
    assert sums["memory"] == report.memory.total
    assert sums["sent"] == pytest.approx(report.collectives.wire_bytes)
    assert tree.kind == "AheadReport"
    assert any("16 x cpu" in note for note in tree.notes)


def test_the_reports_are_those_of_as_many_devices(report):
    # Partial products over the columns that a device has; the sum over the rows of all.
    found = {(one.kind, one.mesh_axes, one.payload_bytes) for one in report.collectives.collectives}
    assert ("all-reduce", ("model",), 8 * 64 * 4) in found
    assert report.memory.inputs == (8 * 16 + 64 * 16) * 4
    assert report.device_count == 16
    assert report.device_kind == "cpu"
    assert report.fits is None
    assert report.program is not None
    assert report.seconds > 0


def test_the_report_says_what_is_exact_and_what_an_estimate(report):
    text = str(report)
    assert "devices         16 x cpu (cpu:16)" in text
    assert "exact: program, memory and collectives on as many CPU devices" in text
    assert "estimated: all of it for other devices" in text
    data = json.loads(report.to_json())
    assert data["memory"] == json.loads(report.memory.to_json())
    assert data["collectives"] == json.loads(report.collectives.to_json())
    assert (data["topology"], data["device_count"], data["fits"]) == ("cpu:16", 16, None)
    assert data["compiler"].startswith("jaxlib ")


def test_a_step_on_more_devices_than_there_are_is_compiled_for_as_many(report):
    assert pzs.collectives(step, *ARGUMENTS).to_json() == report.collectives.to_json()


def test_what_is_too_large_is_reported_with_what_it_needs_and_what_there_is(monkeypatch):
    def refuse(self, bytecode, mesh):
        raise TooLargeError("too large", 196 * 2**30, int(15.75 * 2**30), "TPU v5 lite")

    monkeypatch.setattr(CompilerProcess, "compile", refuse)
    large = (array("data", "model", shape=(2**19, 2**15)), array(None, "model", shape=(64, 2**15)))
    report = pzs.compile_ahead(step, *large, topology="cpu:16")
    assert report.fits is False
    assert report.collectives is None
    assert report.program is None
    assert report.memory.total == 196 * 2**30
    assert report.memory.limit == int(15.75 * 2**30)
    assert report.memory.inputs == 2**34 * 4 // 16 + 64 * 2**14 * 4
    text = str(report)
    assert text.startswith(
        "needs 196.0 GiB of 15.75 GiB: does not fit, on each device of mesh (data=8"
    )
    assert "sent in a step" not in text
    assert 'compile_ahead(..., topology="cpu:16")' in " ".join(text.split())
    assert json.loads(report.to_json())["collectives"] is None


# As libtpu 0.0.42 and the runtimes of TPUs write them.
@pytest.mark.parametrize(
    ("message", "needed", "limit"),
    [
        (
            "JaxRuntimeError: RESOURCE_EXHAUSTED: Ran out of memory on HBM, the total memory "
            "required for HLO temporaries (70.19G) exceeds available HBM (15.75G).",
            70.19 * 2**30,
            15.75 * 2**30,
        ),
        (
            "JaxRuntimeError: RESOURCE_EXHAUSTED: Ran out of memory on HBM, the total memory "
            "required for HLO temporaries (4.00T) exceeds available HBM (95.74G).",
            4 * 2**40,
            95.74 * 2**30,
        ),
        (
            "RESOURCE_EXHAUSTED: XLA:TPU compile permanent error. Ran out of memory in memory "
            "space hbm. Used 17.39G of 15.48G hbm. Exceeded hbm capacity by 1.91G.\n\nTotal hbm "
            "usage >= 17.91G:\n    reserved        530.00M \n    program          17.39G \n",
            17.39 * 2**30,
            15.48 * 2**30,
        ),
    ],
)
def test_figures_of_programs_that_are_too_large_are_read(message, needed, limit):
    assert memory_figures(message) == (round(needed), round(limit))


@pytest.mark.parametrize(
    "message",
    [
        "RESOURCE_EXHAUSTED: Ran out of memory in memory space vmem. Used 20.0M of 16.0M vmem.",
        "INVALID_ARGUMENT: No such compile option: 'xla_bogus'",
        "RESOURCE_EXHAUSTED: Out of memory while trying to allocate 1024 bytes.",
    ],
)
def test_other_refusals_are_not_taken_for_that(message):
    assert memory_figures(message) is None


def test_a_mesh_of_another_size_is_refused_before_anything_compiles():
    with pytest.raises(
        MeshError, match=r"\(data=8, model=2\) has 16 devices.*topology=\"v5e:4x4\""
    ):
        pzs.Topology("v5e:2x4").refuse_mesh(MESH.shape)
    with pytest.raises(MeshError, match=r'has 16 devices, and .* 8\. Write topology="cpu:16"'):
        pzs.compile_ahead(step, *ARGUMENTS, topology="cpu:8")


def test_absent_compilers_are_named_with_the_command_that_installs_them(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    before = dict(os.environ)
    with pytest.raises(MissingExtraError, match=r"'libtpu', .*pip install 'penzai-shard\[tpu\]'"):
        pzs.compile_ahead(step, *ARGUMENTS, topology="v5e:4x4")
    gpus = pzs.Topology("gpu:16", target_config="gpu_device_info {}")
    with pytest.raises(
        MissingExtraError, match=r"pip install --no-deps jax-cuda12-plugin==[\d.]+ "
    ):
        pzs.compile_ahead(step, *ARGUMENTS, topology=gpus)
    assert dict(os.environ) == before


def test_a_compiler_that_does_not_start_is_an_error_in_its_own_words(tmp_path, monkeypatch):
    (tmp_path / "libtpu").mkdir()
    (tmp_path / "libtpu" / "__init__.py").write_text(
        "import os\n"
        "os.write(1, b'what compilers print')\n"
        f"def get_library_path(): return {str(tmp_path / 'nothing.so')!r}"
    )
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delenv("TPU_LIBRARY_PATH", raising=False)
    with pytest.raises(CompilationError, match=r"describe the devices of .*'v5e:4x4'.*nothing\.so"):
        pzs.compile_ahead(step, *ARGUMENTS, topology="v5e:4x4")


def test_a_compiler_for_another_version_of_jax_is_noted(monkeypatch):
    versions = {"jax": "0.10.2", "libtpu": "0.0.50.1"}
    wanted = ['jaxlib>=0.10.2; extra == "tpu"', 'libtpu==0.0.42.*; extra == "tpu"']
    monkeypatch.setattr("importlib.metadata.version", versions.__getitem__)
    monkeypatch.setattr("importlib.metadata.requires", lambda name: wanted)
    note = version_note("libtpu 0.0.50.1")
    assert "another version of JAX than 0.10.2, which comes with libtpu 0.0.42." in note
    assert version_note("libtpu 0.0.42.1") is None
    assert version_note("libtpu 0.0.42") is None
    assert version_note("jaxlib 0.10.2") is None


def test_a_step_that_cannot_be_traced_fails_as_it_would_and_leaves_no_process(monkeypatch):
    started = []

    class Process(CompilerProcess):
        def __init__(self, topology):
            super().__init__(topology)
            started.append(self._process)

    monkeypatch.setattr(module, "CompilerProcess", Process)
    with pytest.raises(TypeError, match="dot_general"):
        pzs.compile_ahead(jax.jit(lambda x, w: x @ w), *ARGUMENTS, topology="cpu:16")
    (process,) = started
    assert process.returncode is not None


def test_a_step_that_calls_back_to_python_is_refused_by_name():
    def talking(x, w):
        return step(x, w) + jax.pure_callback(lambda: 1.0, jax.ShapeDtypeStruct((), x.dtype))

    with pytest.raises(CompilationError, match="calls back to Python"):
        pzs.compile_ahead(jax.jit(talking), *ARGUMENTS, topology="cpu:16")
