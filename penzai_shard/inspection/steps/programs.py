"""A step compiled and not run: what every report of this package is a view of."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, Self

import jax
from jax.sharding import AbstractMesh

from penzai_shard.compiled_programs import Module
from penzai_shard.errors import RuleTypeError
from penzai_shard.inspection.devices.absent_devices import CompilerProcess
from penzai_shard.inspection.devices.device_figures import memory_limit_of
from penzai_shard.inspection.devices.topologies import Topology
from penzai_shard.inspection.steps.lowered_steps import LoweredStep, lower_step
from penzai_shard.library_apis.compiler_api import (
    Compiled,
    ExecutableMemory,
    bytecode_of,
    compile_bytecode,
    slices_of,
)
from penzai_shard.meshes import AnyMesh


@dataclasses.dataclass(frozen=True, repr=False)
class StepProgram:
    """A step compiled for devices, present or absent.

    Attributes:
        step: What was compiled: its arrays, its mesh, its layers.
        module: The program.
        memory: What one device needs, as the compiler counts it.
        device_kind: What it is for, such as ``"cpu"`` or ``"TPU v5 lite"``.
        memory_limit: Bytes of memory of one such device, None if not known.
        slice_of: Which TPU slice each device of its mesh is of; None if the devices do not say.
    """

    step: LoweredStep
    module: Module
    memory: ExecutableMemory
    device_kind: str
    memory_limit: int | None = None
    slice_of: tuple[int, ...] | None = None

    @property
    def device_count(self) -> int:
        """How many devices it runs on."""
        return 1 if self.step.mesh is None else self.step.mesh.size

    @classmethod
    def of(
        cls,
        step: LoweredStep,
        compiled: Compiled,
        device_kind: str,
        memory_limit: int | None = None,
        slice_of: tuple[int, ...] | None = None,
    ) -> Self:
        """What a compiler made of a lowered step."""
        module = Module.of(compiled.module)
        step = _with_chosen_layouts(step, module)
        return cls(step, module, compiled.memory, device_kind, memory_limit, slice_of)


def compiled_program(step: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> StepProgram:
    """Compiles a step, or takes a program that is one already; see ``compile_step``."""
    if isinstance(step, StepProgram):
        if args or kwargs:
            raise RuleTypeError(
                "this program is compiled already, for the arguments that it was compiled with, "
                "and takes no others. Leave the arguments out, or give the step itself."
            )
        return step
    lowered = lower_step(step, args, kwargs)
    bytecode = bytecode_of(lowered.lowered)
    mesh = lowered.mesh
    if isinstance(mesh, AbstractMesh) and mesh.size > len(jax.devices("cpu")):
        with CompilerProcess(Topology(f"cpu:{mesh.size}")) as process:
            elsewhere = process.compile(bytecode, mesh)
        return StepProgram.of(lowered, elsewhere.compiled, elsewhere.device_kind)
    devices = _devices(mesh)
    compiled = compile_bytecode(bytecode, devices)
    kind, limit = devices[0].device_kind, memory_limit_of(devices[0])
    return StepProgram.of(lowered, compiled, kind, limit, slices_of(devices))


def _with_chosen_layouts(step: LoweredStep, module: Module) -> LoweredStep:
    """A step with what the compiler decided of arrays whose layout was left to it."""
    entry = module.computations[module.entry]
    shapes = {one.op_name: one.results[0].shape for one in entry.parameters}
    arguments = {
        name: array.chosen(shapes[name]) if name in shapes else array
        for name, array in step.arguments.items()
    }
    results = step.results
    # Programs with side effects give more than the step does.
    if len(results) == len(entry.root.results):
        pairs = zip(results, entry.root.results, strict=True)
        results = tuple(array.chosen(result.shape) for array, result in pairs)
    return dataclasses.replace(step, arguments=arguments, results=results)


def _devices(mesh: AnyMesh | None) -> list[Any]:
    """The devices that a program for a mesh is compiled for, in the mesh's order."""
    if mesh is None:
        return jax.devices()[:1]
    if isinstance(mesh, AbstractMesh):
        return jax.devices("cpu")[: mesh.size]
    return list(mesh.devices.flat)
