"""A step compiled for devices that are not there: what it needs and moves on them."""

import time
from collections.abc import Mapping, Sequence
from typing import Any

from penzai_shard.compiled_programs import Module
from penzai_shard.errors import CompilationError
from penzai_shard.inspection.ahead.ahead_report import AheadReport
from penzai_shard.inspection.devices.absent_devices import (
    CompilerProcess,
    TooLargeError,
    version_note,
)
from penzai_shard.inspection.devices.topologies import Topology
from penzai_shard.inspection.memory.memory_report import MemoryReport
from penzai_shard.inspection.program_view import CompiledProgram
from penzai_shard.inspection.steps.lowered_steps import LoweredStep, lower_step
from penzai_shard.inspection.traffic.collective_report import CollectiveReport
from penzai_shard.library_apis.compiler_api import ExecutableMemory, bytecode_of, is_lacking_devices
from penzai_shard.meshes import mesh_shape_of

_NO_PROGRAM = (
    "collectives: the compiler gives no program that does not fit. Those of simulated CPU devices "
    'are a guess at them: compile_ahead(..., topology="cpu:{count}")'
)
# In place of the program that there is none of.
_NOTHING = "HloModule nothing\n\nENTRY main { ROOT nothing = () tuple() }"
_CALLS_BACK = (
    "the step calls back to Python (jax.debug.print, jax.debug.callback, jax.pure_callback or "
    "jax.experimental.io_callback), which JAX lowers only where the devices are. Leave the call "
    "out of what is compiled ahead."
)


def compile_ahead(step: Any, /, *args: Any, topology: str | Topology, **kwargs: Any) -> AheadReport:
    """Compiles a step for devices that need not be there, and runs nothing.

    The compiler for these devices compiles it in a process of its own: the caller's JAX, its
    devices and its environment stay as they are. The mesh is laid over the devices as
    ``make_mesh`` does where they are. The step is lowered here, which starts JAX as any use of it
    does; ``JAX_PLATFORMS=cpu`` keeps it from looking for TPUs once libtpu is installed.

    Args:
        step: A train step, a function under ``jax.jit``, or a layer.
        *args: What it is called with, concrete or abstract, on a mesh of as many devices as the
            topology has; the mesh may be a ``jax.sharding.AbstractMesh``.
        topology: The devices, such as ``"v5e:16x16"`` (TPUs, which need the extra ``tpu``),
            ``"v5e:16x16*4"`` (four such slices), ``"cpu:512"`` (simulated CPU devices), or a
            ``Topology`` (for GPUs, with their target configuration).
        **kwargs: What it is called with by keyword.

    Returns:
        What the step needs of each device's memory and what it moves between devices, as
        ``device_memory`` and ``collectives`` report it. A step that is too large is reported with
        what it needs and what there is.

    Raises:
        MeshError: There is no such topology, it has another number of devices than the mesh, or
            JAX cannot lay the mesh over it.
        MissingExtraError: The compiler for the devices is not installed.
        CompilationError: The compiler refuses the program for another reason than its size, or
            the process that compiles was ended.

    >>> import jax
    >>> from jax.sharding import AbstractMesh, NamedSharding, PartitionSpec
    >>> mesh = AbstractMesh((16,), ("data",))
    >>> x = jax.ShapeDtypeStruct(
    ...     (64, 128), "float32", sharding=NamedSharding(mesh, PartitionSpec("data"))
    ... )
    >>> report = compile_ahead(jax.jit(lambda x: x.sum()), x, topology="cpu:16")
    >>> [one.kind for one in report.collectives.collectives], report.memory.inputs
    (['all-reduce'], 2048)
    """
    if not isinstance(topology, Topology):
        topology = Topology(topology)
    # It starts while the step is lowered here.
    with CompilerProcess(topology) as process:
        lowered = _lowered(step, args, kwargs, topology)
        return _report(process, lowered)


def _lowered(
    step: Any, args: Sequence[Any], kwargs: Mapping[str, Any], topology: Topology
) -> LoweredStep:
    try:
        lowered = lower_step(
            step, args, kwargs, platform=topology.platform, called="compile_ahead("
        )
    except ValueError as error:
        if is_lacking_devices(error):
            raise CompilationError(_CALLS_BACK) from error
        raise
    if lowered.mesh is not None:
        topology.refuse_mesh(mesh_shape_of(lowered.mesh))
    return lowered


def _report(process: CompilerProcess, lowered: LoweredStep) -> AheadReport:
    topology, start = process.topology, time.perf_counter()
    note = version_note(process.compiler)
    notes = () if note is None else (note,)
    try:
        elsewhere = process.compile(bytecode_of(lowered.lowered), lowered.mesh)
    except TooLargeError as error:
        return AheadReport(
            topology,
            error.device_kind,
            process.compiler,
            time.perf_counter() - start,
            memory_of_too_large(lowered, error),
            collectives=None,
            program=None,
            notes=(_NO_PROGRAM.format(count=topology.device_count), *notes),
        )
    kind, limit = elsewhere.device_kind, topology.memory_limit
    program = CompiledProgram.of(lowered, elsewhere.compiled, kind, limit, elsewhere.slice_of)
    return AheadReport(
        topology,
        kind,
        process.compiler,
        elsewhere.seconds,
        MemoryReport.of(program),
        CollectiveReport.of(program),
        program,
        notes,
    )


def memory_of_too_large(step: LoweredStep, error: TooLargeError) -> MemoryReport:
    """What a step needs that the compiler refused: what comes in, and the rest of its figure.

    Args:
        step: The step.
        error: What the compiler said.
    """
    arrays = [array for array in step.arguments.values() if not array.is_on_host]
    arguments = sum(array.bytes_per_device for array in arrays)
    memory = ExecutableMemory(
        arguments,
        outputs=0,
        aliased=0,
        temporaries=max(error.needed - arguments, 0),
        generated_code=0,
    )
    program = CompiledProgram(
        step, Module.from_text(_NOTHING), memory, error.device_kind, error.limit
    )
    return MemoryReport(program, frozenset(step.arguments))
