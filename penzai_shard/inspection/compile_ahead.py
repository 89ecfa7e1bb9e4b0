"""Compiles a step for devices that are not there, and says what it needs and moves on them.

The compiler for these devices compiles it, in another process, so that its program, memory and
collectives are those of a real run. Simulated CPU devices are another matter: what XLA makes for
them is only an estimate for accelerators.
"""

import contextlib
import dataclasses
import importlib.metadata
from typing import Any

from penzai_shard.errors import MissingExtraError
from penzai_shard.inspection.compiler_process import TooLargeError, compile_in_process
from penzai_shard.inspection.compiling import CompiledStep, make_compiled_step
from penzai_shard.inspection.lowering import LoweredStep, lower_step
from penzai_shard.inspection.topologies import Topology
from penzai_shard.jax_internals import compiler

# By platform the packages that may compile for it, the best first, and how to install one. Neither
# needs the devices.
_COMPILERS = {
    "cpu": (("jaxlib",), "pip install jax"),
    "tpu": (("libtpu",), "pip install 'penzai-shard[tpu]'"),
    "cuda": (
        ("jax-cuda13-pjrt", "jax-cuda12-pjrt"),
        "pip install --no-deps jax-cuda12-plugin jax-cuda12-pjrt, of the version of jax",
    ),
}
_PEAK = "what is in memory at the moment of most"
# By platform what is as in a run on these devices, and what is an estimate.
_EXACT_AND_ESTIMATED = {
    "cpu": ("memory and collectives on as many CPU devices", f"all for GPUs and TPUs; {_PEAK}"),
    "tpu": ("memory and collectives", _PEAK),
    "cuda": ("collectives", f"memory, as kernels are chosen by their time on a GPU; {_PEAK}"),
    "too large": (
        "the size of what comes in",
        "the total, which the compiler rounds, and so the temporaries",
    ),
}


def compile_ahead(
    step: Any, /, *args: Any, topology: str | Topology, **kwargs: Any
) -> CompiledStep:
    """Compiles a step for devices that need not be there, and runs nothing.

    The mesh is laid over the devices as ``jax.make_mesh`` lays it where they are.

    Args:
        step: A train step, a function, or a layer.
        *args: What it is called with, arrays or structs, on a mesh of as many devices as the
            topology has; an abstract mesh will do.
        topology: The devices: ``"v5e:16x16"`` (TPUs, which need the extra ``tpu``),
            ``"cpu:512"`` (simulated devices), or a ``Topology`` (GPUs, with their target
            configuration).
        **kwargs: What it is called with by keyword.

    Returns:
        What the step needs and moves, as ``compile_step`` gives it. A step that is too large has a
        memory report, with what it needs and what there is, but no program and no collectives: the
        compiler only says the total, so what does not come in is in ``temporaries``.

    Raises:
        MeshError: There is no topology of that name, or it does not carry the mesh.
        MissingExtraError: The compiler for the devices is not installed.
        CompilationError: The compiler refuses the program for another reason than its size.

    >>> import jax
    >>> from jax.sharding import AbstractMesh, NamedSharding, PartitionSpec
    >>> rows = NamedSharding(AbstractMesh((16,), ("data",)), PartitionSpec("data"))
    >>> x = jax.ShapeDtypeStruct((64, 128), "float32", sharding=rows)
    >>> compiled = compile_ahead(jax.jit(lambda x: x.sum()), x, topology="cpu:16")
    >>> [one.kind for one in compiled.collectives.collectives], compiled.memory.inputs
    (['all-reduce'], 2048)
    """
    if not isinstance(topology, Topology):
        topology = Topology(topology)
    made_by, platform = _find_compiler(topology), topology.platform
    lowered = lower_step(step, args, kwargs, "compile_ahead", platform=platform)
    count = 1 if lowered.mesh is None else lowered.mesh.size
    options = compiler.compile_options(count, platform, lowered.options)
    bytecode, limit = compiler.write_bytecode(lowered.lowered), topology.memory_limit
    remarks: tuple[str, ...] = ()
    try:
        program, kind, log = compile_in_process(bytecode, lowered.mesh, topology, options)
        compiled = make_compiled_step(lowered, program, kind, limit, log)
        exact, estimated = _EXACT_AND_ESTIMATED[platform]
    except TooLargeError as error:
        figures = _read_figures(lowered, error.needed)
        compiled = CompiledStep(lowered, "", figures, error.device_kind, error.limit)
        exact, estimated = _EXACT_AND_ESTIMATED["too large"]
        unknown = (
            "the compiler gives no program that does not fit, so its collectives are not known"
        )
        remarks = (f"{unknown}; compile_ahead(..., topology='cpu:{count}') estimates them",)
    devices = f"{topology.device_count:,} x {compiled.device_kind} ({topology.name})"
    exactness = f"exact: {exact}", f"estimated: {estimated}"
    remarks = f"{devices}, compiled by {made_by}", *exactness, *remarks
    found = dataclasses.replace(compiled.step, notes=(*remarks, *compiled.step.notes))
    compiled = dataclasses.replace(compiled, step=found, topology=topology)
    return dataclasses.replace(compiled, exact=exact, estimated=estimated)


def _find_compiler(topology: Topology) -> str:
    """The compiler for some devices, with its version.

    Raises:
        MissingExtraError: It is not installed.
    """
    packages, command = _COMPILERS[topology.platform]
    for package in packages:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            return f"{package} {importlib.metadata.version(package)}"
    raise MissingExtraError(
        f"the compiler for {topology.name!r} is not installed. Install it with: {command}"
    )


def _read_figures(step: LoweredStep, needed: int) -> compiler.MemoryFigures:
    """What comes in, and as temporaries the rest of what a step that is too large needs."""
    used = compiler.kept_arguments(step.lowered)
    arrays = [array for number, array in enumerate(step.arguments) if number in used]
    arguments = sum(array.bytes_per_device for array in arrays if not array.is_on_host)
    return compiler.MemoryFigures(arguments, 0, 0, max(needed - arguments, 0), 0, 0)
