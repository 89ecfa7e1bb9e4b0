"""A step compiled and not run: what every report of this package is a view of."""

import dataclasses
import functools
from typing import TYPE_CHECKING, Any

import jax
from jax.sharding import AbstractMesh

from penzai_shard.compiled_programs import Module
from penzai_shard.errors import RuleTypeError
from penzai_shard.inspection.absent_devices import CompilerProcess
from penzai_shard.inspection.device_figures import memory_limit_of
from penzai_shard.inspection.lowered_steps import LoweredStep, lower_step
from penzai_shard.inspection.topologies import Topology
from penzai_shard.library_apis.compiler_api import (
    Compiled,
    ExecutableMemory,
    bytecode_of,
    compile_bytecode,
    slices_of,
)
from penzai_shard.meshes import AnyMesh
from penzai_shard.report_trees import ReportTree
from penzai_shard.text_tables import Report, TextTable

if TYPE_CHECKING:
    from penzai_shard.inspection.program_view import ProgramView


@dataclasses.dataclass(frozen=True, repr=False)
class CompiledProgram(Report):
    """A step compiled for devices, present or absent.

    It shows itself layer by layer, as a tree in treescope and else as a table: what each layer
    holds of a device's memory, and what it sends.

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

    @functools.cached_property
    def _view(self) -> "ProgramView":
        # It stands on the reports, which are made of this.
        from penzai_shard.inspection.program_view import ProgramView

        return ProgramView(self)

    def tree(self, *, collapse: bool = True) -> ReportTree:
        """Every layer in the order of the model, with its memory and its traffic.

        The figures named ``"memory"`` add up to what ``device_memory`` finds in all, those named
        ``"sent"`` to what ``collectives`` finds.

        Args:
            collapse: Show equal blocks as one, and all scalars of a part.
        """
        return self._view.tree(collapse)

    def table(self, *, collapse: bool = True) -> TextTable:
        """The same as a table, without what is in the innermost layers.

        Args:
            collapse: Show equal blocks as one.
        """
        return self._view.table(collapse)

    def to_json(self) -> str:
        """Memory, collectives and every layer's figures as JSON text."""
        return self._view.to_json()

    @classmethod
    def of(
        cls,
        step: LoweredStep,
        compiled: Compiled,
        device_kind: str,
        memory_limit: int | None = None,
        slice_of: tuple[int, ...] | None = None,
    ) -> "CompiledProgram":
        """What a compiler made of a lowered step."""
        module = Module.of(compiled.module)
        step = _with_chosen_layouts(step, module)
        return cls(step, module, compiled.memory, device_kind, memory_limit, slice_of)


def compile_step(step: Any, /, *args: Any, **kwargs: Any) -> CompiledProgram:
    """Compiles a step for the devices of its arguments, without running it.

    JAX' persistent cache is not asked, since it takes programs for the same that differ in the
    names of their operations alone.

    ``device_memory``, ``collectives`` and ``ShardingLock.of`` take the program in place of a step
    with its arguments, so that for several of them it is compiled once.

    Args:
        step: A train step, a function under ``jax.jit``, or a layer; or a program that is compiled
            already, which comes back as it is.
        *args: What it is called with, concrete or abstract.
        **kwargs: The same by keyword.

    Returns:
        The program. On an abstract mesh it is that of as many simulated CPU devices, compiled in
        a process of its own if there are not as many here.

    Raises:
        MeshError: The arrays are on several meshes, or some are on other devices.
        RuleTypeError: It is not a step, or these are not its arguments.

    >>> from penzai_shard import collectives, device_memory
    >>> program = compile_step(jax.numpy.dot, jax.numpy.ones((4, 4)), jax.numpy.ones((4, 4)))
    >>> device_memory(program).total, len(collectives(program).collectives)
    (192, 0)
    """
    if isinstance(step, CompiledProgram):
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
        return CompiledProgram.of(lowered, elsewhere.compiled, elsewhere.device_kind)
    devices = _devices(mesh)
    compiled = compile_bytecode(bytecode, devices)
    kind, limit = devices[0].device_kind, memory_limit_of(devices[0])
    return CompiledProgram.of(lowered, compiled, kind, limit, slices_of(devices))


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
