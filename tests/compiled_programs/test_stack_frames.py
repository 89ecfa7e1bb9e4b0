"""Stack frames of a compiled program: the functions that wrote an operation, innermost first."""

import jax
import jax.numpy as jnp
import pytest

from penzai_shard.compiled_programs import Module
from penzai_shard.compiled_programs.stack_frames import StackFrames
from penzai_shard.library_apis.compiler_api import (
    bytecode_of,
    compile_bytecode,
    module_from_bytes,
    module_to_bytes,
)


def inner(x):
    return jax.lax.sort(x)


def first(x):
    return inner(x)


def second(x):
    return inner(x + 1)


def both(x):
    return first(jnp.sin(x)), second(x)


@pytest.mark.parametrize("sent", [False, True], ids=["here", "from another process"])
def test_an_operation_says_which_functions_called_it(sent):
    lowered = jax.jit(both).lower(jnp.ones(16))
    module = compile_bytecode(bytecode_of(lowered), jax.devices()[:1]).module
    if sent:
        module = module_from_bytes(module_to_bytes(module))
    read = Module.of(module)
    frames = StackFrames.of(read)
    found = {
        tuple(frame.function for frame in frames.of_instruction(one))[:3]
        for one in read
        if one.op_name.endswith("/sort")
    }
    assert found == {("inner", "first", "both"), ("inner", "second", "both")}
    assert {frame.file for one in read for frame in frames.of_instruction(one)} >= {__file__}


def test_a_program_without_frames_has_none():
    read = Module.from_text("HloModule m\nENTRY e { ROOT p = f32[2]{0} parameter(0) }")
    (one,) = read
    assert list(StackFrames.of(read).of_instruction(one)) == []
