"""Programs compiled in a process of their own are those of as many devices here."""

import os
import signal

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec

from penzai_shard.compiled_programs import Module, read_collectives
from penzai_shard.errors import CompilationError
from penzai_shard.inspection.devices.absent_devices import CompilerProcess
from penzai_shard.inspection.devices.topologies import Topology
from penzai_shard.library_apis.compiler_api import (
    bytecode_of,
    compile_bytecode,
    module_from_bytes,
    module_to_bytes,
)

AUTO = (AxisType.Auto,) * 2
MESH = AbstractMesh((4, 2), ("data", "model"), axis_types=AUTO)


def lowered(function):
    x = jax.ShapeDtypeStruct(
        (8, 8), jnp.float32, sharding=NamedSharding(MESH, PartitionSpec("data"))
    )
    w = jax.ShapeDtypeStruct(
        (8, 8), jnp.float32, sharding=NamedSharding(MESH, PartitionSpec("model"))
    )
    return bytecode_of(jax.jit(function).trace(x, w).lower(lowering_platforms=("cpu",)))


def test_another_process_compiles_what_this_one_does_and_leaves_this_one_as_it_is(monkeypatch):
    monkeypatch.setenv("XLA_FLAGS", os.environ["XLA_FLAGS"] + " --xla_cpu_enable_fast_math=false")
    before, devices = dict(os.environ), jax.devices()
    bytecode = lowered(lambda x, w: jnp.tanh(x @ w).sum())
    with CompilerProcess(Topology("cpu:8")) as process:
        there = process.compile(bytecode, MESH)
    here = compile_bytecode(bytecode, devices)
    read_again = module_from_bytes(module_to_bytes(here.module))
    assert there.compiled.module.to_string() == read_again.to_string()
    assert "all-reduce" in read_again.to_string()
    names = [
        [one.name for one in read_collectives(Module.of(each), 8)]
        for each in (there.compiled.module, here.module)
    ]
    assert names[0] == names[1]
    assert there.compiled.memory == here.memory
    assert there.device_kind == devices[0].device_kind
    assert dict(os.environ) == before
    assert jax.devices() == devices
    assert process._process.returncode is not None


def test_a_process_that_ends_without_an_answer_is_an_error_that_says_how():
    with CompilerProcess(Topology("cpu:8")) as process:
        process._process.send_signal(signal.SIGKILL)
        with pytest.raises(CompilationError, match=r"(?s)by signal 9, .*where memory is short"):
            process.compile(b"", MESH)


def test_what_the_process_wrote_before_it_ended_is_in_the_error(monkeypatch):
    monkeypatch.setenv("XLA_FLAGS", "--xla_no_such_flag=1")
    with (
        CompilerProcess(Topology("cpu:8")) as process,
        pytest.raises(CompilationError, match=r"(?s)with exit status 1, .*--xla_no_such_flag"),
    ):
        process.compile(lowered(lambda x, w: x @ w), MESH)


def test_a_program_that_the_compiler_refuses_is_an_error_with_its_words():
    with (
        CompilerProcess(Topology("cpu:8")) as process,
        pytest.raises(CompilationError, match=r"jaxlib .* cannot compile the program: MLIR"),
    ):
        process.compile(b"no program", MESH)


def test_one_process_compiles_several_programs_and_goes_on_after_a_failure():
    bytecodes = [lowered(lambda x, w: jnp.tanh(x @ w).sum()), lowered(lambda x, w: x.max() + w)]
    with CompilerProcess(Topology("cpu:8")) as process:
        first = process.compile(bytecodes[0], MESH)
        with pytest.raises(CompilationError, match="cannot compile the program: MLIR"):
            process.compile(b"no program", MESH)
        others = [process.compile(bytecode, MESH) for bytecode in bytecodes]
        assert process._process.poll() is None
    texts = [each.compiled.module.to_string() for each in (first, *others)]
    assert texts[0] == texts[1] != texts[2]


def test_options_are_asked_for_of_one_program_alone():
    bytecode = lowered(lambda x, w: jnp.tanh(x @ w) @ x)
    with CompilerProcess(Topology("cpu:8")) as process:
        plain, changed, again = (
            process.compile(bytecode, MESH, options).compiled.module.to_string()
            for options in (None, {"xla_disable_all_hlo_passes": True}, None)
        )
    assert plain == again != changed
