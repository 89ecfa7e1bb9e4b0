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
from penzai_shard.inspection.collectives import CollectiveReport
from penzai_shard.inspection.compiler_process import TooLargeError, compile_in_process
from penzai_shard.inspection.compiling import CompiledStep, make_compiled_step
from penzai_shard.inspection.lowering import LoweredStep, lower_step
from penzai_shard.inspection.memory import MemoryReport, make_memory_report
from penzai_shard.inspection.topologies import Topology
from penzai_shard.jax_internals.compiler import (
    MemoryFigures,
    compile_options,
    kept_arguments,
    write_bytecode,
)
from penzai_shard.reports.report import HasReport, Report

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
}


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class AheadReport(HasReport):
    """A step compiled for devices that are not there.

    Attributes:
        topology: The devices.
        device_kind: What they are, as JAX names it: ``"TPU v5 lite"``.
        compiler: What compiled, with its version.
        memory: What the step needs of each device. Of a step that is too large the compiler only
            says the total; what does not come in is then in ``temporaries``.
        program: The compiled step; None of one that is too large.
        exact: What is as in a run on these devices, with these versions of JAX and the compiler.
        estimated: What is an estimate.
    """

    topology: Topology
    device_kind: str
    compiler: str
    memory: MemoryReport
    program: CompiledStep | None
    exact: str
    estimated: str

    @property
    def collectives(self) -> CollectiveReport | None:
        """What the step moves; None of one that is too large."""
        return None if self.program is None else self.program.collectives

    @property
    def fits(self) -> bool | None:
        """Whether the step fits into the memory of the devices; None if that is not known."""
        return self.memory.fits

    def report(self) -> Report:
        """What each layer holds and sends; of a step that is too large, what it would hold."""
        found = (self.program or self.memory).report()
        names = ("device_kind", "compiler", "fits", "exact", "estimated")
        facts = {name: getattr(self, name) for name in names} | {"topology": self.topology.name}
        count = self.topology.device_count
        notes = [
            f"{count:,} x {self.device_kind} ({self.topology.name}), compiled by {self.compiler}",
            f"exact: {self.exact}",
            f"estimated: {self.estimated}",
        ]
        if self.program is None:
            notes.append(
                "the compiler gives no program that does not fit, so its collectives are not "
                f"known; compile_ahead(..., topology='cpu:{count}') estimates them"
            )
        return dataclasses.replace(
            found,
            title="Compiled ahead",
            verdict=self.memory.report().verdict,
            notes=[*notes, *found.notes],
            ok=self.fits,
            facts={**found.facts, **facts},
        )


def compile_ahead(step: Any, /, *args: Any, topology: str | Topology, **kwargs: Any) -> AheadReport:
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
        What the step needs and moves. A step that is too large is reported with what it needs and
        what there is.

    Raises:
        MeshError: There is no topology of that name, or it does not carry the mesh.
        MissingExtraError: The compiler for the devices is not installed.
        CompilationError: The compiler refuses the program for another reason than its size.

    >>> import jax
    >>> from jax.sharding import AbstractMesh, NamedSharding, PartitionSpec
    >>> rows = NamedSharding(AbstractMesh((16,), ("data",)), PartitionSpec("data"))
    >>> x = jax.ShapeDtypeStruct((64, 128), "float32", sharding=rows)
    >>> report = compile_ahead(jax.jit(lambda x: x.sum()), x, topology="cpu:16")
    >>> [one.kind for one in report.collectives.collectives], report.memory.inputs
    (['all-reduce'], 2048)
    """
    if not isinstance(topology, Topology):
        topology = Topology(topology)
    compiler = _find_compiler(topology)
    lowered = lower_step(step, args, kwargs, "compile_ahead", platform=topology.platform)
    count = 1 if lowered.mesh is None else lowered.mesh.size
    options = compile_options(count, topology.platform, lowered.options)
    bytecode = write_bytecode(lowered.lowered)
    try:
        answer = compile_in_process(bytecode, lowered.mesh, topology, options)
    except TooLargeError as error:
        memory = _memory_of_too_large(lowered, error)
        estimated = "the total, which the compiler rounds, and so the temporaries"
        known = "the size of what comes in", estimated
        return AheadReport(topology, error.device_kind, compiler, memory, None, *known)
    kind, limit = answer.device_kind, topology.memory_limit
    program = make_compiled_step(lowered, answer.compiled, kind, limit, answer.log, topology)
    known = _EXACT_AND_ESTIMATED[topology.platform]
    return AheadReport(topology, kind, compiler, program.memory, program, *known)


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


def _memory_of_too_large(step: LoweredStep, error: TooLargeError) -> MemoryReport:
    """What comes in, and as temporaries the rest of what the compiler says."""
    used = kept_arguments(step.lowered)
    arrays = [array for number, array in enumerate(step.arguments) if number in used]
    arguments = sum(array.bytes_per_device for array in arrays if not array.is_on_host)
    figures = MemoryFigures(arguments, 0, 0, max(error.needed - arguments, 0), 0, 0)
    return make_memory_report(step, figures, None, error.limit, device_kind=error.device_kind)
