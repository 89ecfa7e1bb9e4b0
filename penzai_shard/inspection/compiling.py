"""Compiles a step without running it: what every report of this folder is a view of.

A program is compiled for the devices of its mesh, and for simulated CPUs if the mesh has none. In
both cases the step is lowered with structs, so that no array is moved or donated.
"""

import collections
import contextlib
import dataclasses
import functools
import os
import re
import sys
import tempfile
import threading
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
from jax.sharding import AbstractMesh, NamedSharding

from penzai_shard.errors import CompilationError, Problem, ProgramError, RuleTypeError
from penzai_shard.inspection.collectives import CollectiveReport, make_collective_report
from penzai_shard.inspection.hlo import Program
from penzai_shard.inspection.lowering import LoweredStep, lower_step
from penzai_shard.inspection.memory import MemoryReport, make_memory_report
from penzai_shard.inspection.step_arrays import StepArray
from penzai_shard.inspection.topologies import Topology
from penzai_shard.jax_internals import compiler
from penzai_shard.jax_internals.compiler import Compiled, MemoryFigures
from penzai_shard.meshes import mesh_text
from penzai_shard.reports.quantities import bytes_text
from penzai_shard.reports.report import Column, HasReport, Report

# Written by the part of XLA that splits programs over devices.
_REMAT = re.compile(
    r"Involuntary full rematerialization.* from sharding (\{.*?\}) to (\{.*?\}) efficiently"
    r'.*? = (\w+\[[\d,]*\]).*?op_name="([^"]*)"'
)


# Standard error belongs to the whole process.
_REDIRECTING = threading.Lock()


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class CompiledStep(HasReport):
    """A compiled step: its arrays, its memory, its collectives, its program.

    Attributes:
        step: The step, with the layouts that the compiler chose.
        text: The program; empty where the compiler refuses it as too large.
        figures: What it needs of one device, as the compiler counts it.
        device_kind: What it is compiled for.
        memory_limit: The bytes that programs can have on one device; None if not known.
        recompilation: Arrays for which the second step compiles again: path, and dtype and layout
            before and after.
        topology: The devices, where they are described.
        exact: Of what ``compile_ahead`` gives: what is as in a run on these devices.
        estimated: Of that too: what is only an estimate.
    """

    step: LoweredStep
    text: str
    figures: MemoryFigures
    device_kind: str
    memory_limit: int | None
    recompilation: tuple[tuple[str, str, str], ...] = ()
    topology: Topology | None = None
    exact: str = ""
    estimated: str = ""

    @functools.cached_property
    def program(self) -> Program:
        """The program as instructions.

        Raises:
            ProgramError: There is none of a step that is too large.
        """
        if not self.text:
            what, fix = "the compiler gives none that does not fit", "Take more or larger devices."
            raise ProgramError("the program of the step:", [Problem("", what, fix)])
        return Program.read(self.text)

    @functools.cached_property
    def collectives(self) -> CollectiveReport:
        """What it moves between devices; an error, as of ``program``, if it is too large."""
        return make_collective_report(self)

    @functools.cached_property
    def memory(self) -> MemoryReport:
        """What it needs of one device."""
        program = self.program if self.text else None
        return make_memory_report(
            self.step, self.figures, program, self.memory_limit, device_kind=self.device_kind
        )

    @property
    def fits(self) -> bool | None:
        """Whether it fits into the memory of the devices; None if that is not known."""
        return self.memory.fits

    def report(self) -> Report:
        """A row for each layer, and for what belongs to none; if it is too large, its memory."""
        if not self.text:
            return self.memory.report()
        layers, mesh = self.step.layers, self.step.mesh
        arrays, temporaries = collections.Counter[str](), collections.Counter[str]()
        for array in self.step.arguments:
            if not array.is_on_host:
                owner, *_ = *layers.holders(array.path), array.part
                arrays[owner] += array.bytes_per_device
        for row in self.memory.peak:
            temporaries[row.layer] += row.bytes
        sent = {layer: total.wire_bytes for layer, total in self.collectives.by_layer().items()}
        owners = dict.fromkeys([*layers.order, *arrays, *temporaries, *sent])
        every = (
            (x, *(found.get(x) or None for found in (arrays, temporaries, sent))) for x in owners
        )
        rows = [row for row in every if any(row[1:])]
        names = ("arrays", "temporaries", "sent")
        columns = (Column("layer", "path"), *(Column(name, "bytes") for name in names))

        over = "one device" if mesh is None else f"mesh ({mesh_text(mesh)})"
        needed, limit = bytes_text(self.memory.total), self.memory.limit
        verdict = f"compiled for {over} of {self.device_kind}: {needed} of memory"
        if limit is not None:
            verdict += f", which {'fits' if self.fits else 'does not fit'} into {bytes_text(limit)}"
        if mesh is not None:
            at_least = "at least " * bool(self.collectives.unknown_times)
            in_all = bytes_text(self.collectives.wire_bytes)
            verdict += f", {at_least}{in_all} sent by each device in a step"
        notes = [*self.step.notes]
        for path, before, after in self.recompilation[:1]:
            notes.append(
                f"step 2 compiles again: step 1 gets {path} as {before}, and returns {after}; all "
                "such arrays are in .recompilation"
            )
        facts = {"device_kind": self.device_kind, "mesh": dict(mesh.shape) if mesh else None}
        return Report("Compiled step", verdict, columns, rows, notes, self.memory.fits, facts)


def compile_step(step: Any, /, *args: Any, **kwargs: Any) -> CompiledStep:
    """Compiles a step, and runs nothing.

    Args:
        step: A train step or evaluation of this package, a trainer, a function under ``jax.jit`` or
            not, or a layer of any library.
        *args: What it is called with: arrays or structs (``jax.ShapeDtypeStruct``), on a mesh with
            devices or an abstract one.
        **kwargs: The same by keyword.

    Returns:
        The program with its memory and collectives; its report has a row for each layer.

    Raises:
        RuleTypeError: It is no step.
        ShardingError: Arrays are deleted, traced, no arrays, or do not divide over the mesh.
        MeshError: They lie over different devices.
        CompilationError: The compiler refuses the program.

    >>> import penzai_shard as pzs
    >>> mesh = pzs.make_mesh({"data": 8}, abstract=True)
    >>> x = jax.ShapeDtypeStruct((64, 8), "float32", sharding=NamedSharding(mesh, jax.P("data")))
    >>> pzs.compile_step(jax.jit(lambda x: x.sum()), x)
    compiled for mesh (data=8) of cpu: 264 B of memory, 7 B sent by each device in a step
    layer         arrays  temporaries  sent
    inputs         256 B
    unattributed                  4 B   7 B
    """
    return _compile(step, args, kwargs, "compile_step")


def collectives(step: Any, /, *args: Any, **kwargs: Any) -> CollectiveReport:
    """What a step moves between devices, by layer, kind, mesh axis and phase.

    Args:
        step: As for ``compile_step``; or what that gives, without arguments.
        *args: As for ``compile_step``.
        **kwargs: As for ``compile_step``.

    Raises:
        ProgramError: A collective is written in a form that is not known. Else as ``compile_step``.

    >>> import penzai_shard as pzs
    >>> mesh = pzs.make_mesh({"data": 8})
    >>> x = jax.device_put(jax.numpy.ones(8), NamedSharding(mesh, jax.P("data")))
    >>> pzs.collectives(jax.jit(lambda x: x.sum()), x).wire_bytes
    7.0
    """
    return _compile(step, args, kwargs, "collectives").collectives


def device_memory(step: Any, /, *args: Any, **kwargs: Any) -> MemoryReport:
    """What a step needs of the memory of one device, item by item.

    Args:
        step: As for ``compile_step``; or what that gives, without arguments.
        *args: As for ``compile_step``.
        **kwargs: As for ``compile_step``.

    Raises:
        ShardingError: As ``compile_step``.

    >>> import penzai_shard as pzs
    >>> pzs.device_memory(jax.jit(lambda x: 2 * x), jax.numpy.ones(8)).outputs
    32
    """
    return _compile(step, args, kwargs, "device_memory").memory


def _compile(
    step: Any, args: Sequence[Any], kwargs: Mapping[str, Any], called: str
) -> CompiledStep:
    if isinstance(step, CompiledStep):
        if args or kwargs:
            problem = Problem("", "the step is compiled already", f"Write {called}(compiled).")
            raise RuleTypeError(f"{called}:", [problem])
        return step
    return compile_lowered(lower_step(step, args, kwargs, called), called)


def compile_lowered(lowered: LoweredStep, called: str) -> CompiledStep:
    """Compiles a step that is lowered already, for ``called``."""
    bytecode, mesh = compiler.write_bytecode(lowered.lowered), lowered.mesh
    if mesh is None:
        devices = jax.devices()[:1]
    elif isinstance(mesh, AbstractMesh):
        devices = compiler.simulated_devices(mesh.size)
    else:
        devices = [*mesh.devices.flat]
    options = compiler.compile_options(len(devices), devices[0].platform, lowered.options)
    log: list[str] = []
    try:
        with read_standard_error(log):
            compiled = compiler.compile_bytecode(bytecode, devices, options)
    except jax.errors.JaxRuntimeError as error:
        raise CompilationError(
            f"{called}: the compiler says:", [Problem("", str(error))]
        ) from error
    limit = (devices[0].memory_stats() or {}).get("bytes_limit")
    return make_compiled_step(lowered, compiled, devices[0].device_kind, limit, "".join(log))


@contextlib.contextmanager
def read_standard_error(lines: list[str], goes_on: bool = True) -> Iterator[None]:
    """Adds what compilers write to standard error to lines; all but the warnings goes on to it."""
    with _REDIRECTING, tempfile.TemporaryFile() as file:
        sys.stderr.flush()
        stderr = os.dup(2)
        os.dup2(file.fileno(), 2)
        try:
            yield
        finally:
            os.dup2(stderr, 2)
            os.close(stderr)
            file.seek(0)
            lines += file.read().decode("utf-8", "replace").splitlines(keepends=True)
            if goes_on:
                sys.stderr.writelines(line for line in lines if not _REMAT.search(line))


def make_compiled_step(
    step: LoweredStep, compiled: Compiled, device_kind: str, memory_limit: int | None, log: str
) -> CompiledStep:
    """A compiled step of what the compiler gave.

    Args:
        step: The step.
        compiled: The program.
        device_kind: What it was compiled for.
        memory_limit: The bytes that programs can have on such a device; None if not known.
        log: What the compiler wrote meanwhile.
    """
    used = sorted(compiler.kept_arguments(step.lowered))
    arguments = _lay(step.arguments, used, compiled.input_shardings, step.mesh)
    results = _lay(step.results, range(len(step.results)), compiled.output_shardings, step.mesh)
    recompilation = tuple(_find_recompilation(step, results))
    notes = (*step.notes, *_read_remat_warnings(log, step))
    step = dataclasses.replace(step, arguments=arguments, results=results, notes=notes)
    figures = compiled.memory
    return CompiledStep(step, compiled.text, figures, device_kind, memory_limit, recompilation)


def _lay(
    arrays: tuple[StepArray, ...], used: Sequence[int], written: Sequence[bytes], mesh: Any
) -> tuple[StepArray, ...]:
    """Arrays with the layouts that the compiler chose, where nobody else has said where they lie.

    Args:
        arrays: The arguments or results.
        used: The numbers of those that the program has.
        written: Their layouts, as the compiler gives them.
        mesh: The mesh.
    """
    if mesh is None or len(written) < len(used):
        return arrays
    # Tokens of programs with side effects come first.
    layouts = dict(zip(used, written[len(written) - len(used) :], strict=True))
    return tuple(
        dataclasses.replace(array, sharding=compiler.read_sharding(layouts[number], mesh))
        if array.sharding is None and number in layouts
        else array
        for number, array in enumerate(arrays)
    )


def _find_recompilation(
    step: LoweredStep, results: Sequence[StepArray]
) -> Iterator[tuple[str, str, str]]:
    """Of arguments and their next values those for which JAX compiles the second step anew.

    It compiles for each dtype and layout of its arguments; those of step 2 are results of step 1.
    """
    first: StepArray | None = next((x for x in step.arguments if x.spec is not None), None)
    for own, number in step.next_arguments.items():
        argument, result = step.arguments[own], results[number]
        # What is not known of a result is no difference, nor is a layout over one device.
        is_laid = step.mesh is not None and step.mesh.size > 1 and result.sharding is not None
        # JAX tells the spec P("data", None) from P("data"). It chooses the latter, unless its first
        # argument has the former (maybe_recover_user_shardings in jax 0.10.2).
        is_free = step.results[number].sharding is None
        if first and is_free and (first.spec, len(first.shape)) == (result.spec, len(result.shape)):
            result = dataclasses.replace(result, sharding=first.sharding)
        before, after = (
            f"{'weak ' * x.is_weak}{x.dtype}" + f" {_write_layout(x)}" * is_laid
            for x in (argument, result)
        )
        if before != after:
            yield argument.path, before, after


def _write_layout(array: StepArray) -> str:
    own = array.sharding
    return f"over {own.spec}" if isinstance(own, NamedSharding) else "on no mesh"


def _read_remat_warnings(log: str, step: LoweredStep) -> Iterator[str]:
    """What the compiler writes of values that it gathers whole, as sentences with layers."""
    arguments = {array.name: array.path for array in step.arguments}
    for line in log.splitlines():
        if found := _REMAT.search(line):
            before, after, array, name = found.groups()
            name = name.replace("\\'", "'")  # The compiler writes state[\'w\'].
            owner = step.layers.owner(name) or arguments.get(name, name)
            yield (
                f"the compiler gathers {array} of {owner} whole: it knows no direct way from "
                f"{before} to {after}"
            )
