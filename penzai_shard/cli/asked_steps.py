"""A step that a command line asks for, compiled: what ``price`` and ``lock`` have in common."""

import argparse
import contextlib
import dataclasses
import sys
import warnings
from collections.abc import Iterator
from typing import Any, Self

from penzai_shard.cli.chosen_layouts import ChosenLayout, add_layout_arguments, chosen_layout
from penzai_shard.cli.chosen_models import ChosenModel, add_model_arguments, chosen_model
from penzai_shard.cli.chosen_steps import (
    ChosenStep,
    add_step_arguments,
    not_of_tokens,
    step_of_problem,
    step_of_reference,
    training_step,
)
from penzai_shard.errors import (
    MissingExtraError,
    RuleTypeError,
    ShardingError,
    ShardingWarning,
)
from penzai_shard.inspection.ahead.ahead_report import OTHER_DEVICES
from penzai_shard.inspection.ahead.compile_ahead import compile_ahead
from penzai_shard.inspection.devices.topologies import Topology
from penzai_shard.inspection.memory.memory_report import MemoryReport
from penzai_shard.inspection.program_view import CompiledProgram, compile_step
from penzai_shard.inspection.steps.lowered_steps import LoweredStep, lower_step
from penzai_shard.inspection.traffic.collective_report import CollectiveReport

_OF_MODELS = (
    *("mesh", "rules", "layout", "dtype", "batch", "seq", "optimizer", "microbatches", "remat"),
    *("unroll", "inference", "on_indivisible"),
)


def add_asked_arguments(parser: argparse.ArgumentParser, is_compiled: bool = True) -> None:
    """Adds the model or the step, its layout, and, if it is compiled, the devices."""
    add_model_arguments(
        parser,
        "; or one that returns (step, args) or (step, args, kwargs), for any step; --mesh "
        "and what else concerns a model is then left out; or what choose takes: {'model': ..., "
        "'loss_fn': ..., 'optimizer': ..., 'batch': {'x': ...}}",
    )
    add_layout_arguments(parser)
    add_step_arguments(parser)
    parser.set_defaults(of_models={name: parser.get_default(name) for name in _OF_MODELS})
    if not is_compiled:
        return
    parser.add_argument(
        "--topology",
        metavar="v5e:16x16",
        help="the devices, which need not be there: TPUs such as v5e:16x16 or v5p:8x8x16, "
        "four of them as v5e:16x16*4 (pip install 'penzai-shard[tpu]'); or gpu:4x8, hosts and "
        "GPUs of each, with --target-config; by default simulated CPU devices",
    )
    parser.add_argument(
        "--target-config",
        metavar="FILE",
        help="what GPUs are like: a file such as XLA has in xla/tools/hlo_opt/gpu_specs",
    )


@dataclasses.dataclass(frozen=True)
class StepPrice:
    """What a step needs and moves.

    Attributes:
        memory: What it needs of each device.
        moved: What it moves; None if it is too large for the compiler to say.
        program: What was compiled; None if it is too large.
        devices: What for.
        exact: What is as in a run on them.
        estimated: What is an estimate.
        notes: What else there is to know.
        compiled_by: What compiled it, and how long that took; empty for the compiler of this JAX.
    """

    memory: MemoryReport
    moved: CollectiveReport | None
    program: CompiledProgram | None
    devices: str
    exact: tuple[str, ...]
    estimated: tuple[str, ...]
    notes: tuple[str, ...] = ()
    compiled_by: str = ""

    @classmethod
    def of(cls, program: CompiledProgram) -> Self:
        """Of a program for the devices of this machine, or simulated ones."""
        mesh = program.step.mesh
        count = 1 if mesh is None else mesh.size
        return cls(
            MemoryReport.of(program),
            CollectiveReport.of(program),
            program,
            f"{count:,} x {program.device_kind}",
            ("program, memory and collectives on these devices",),
            (f"{OTHER_DEVICES}: see --topology",),
        )

    @property
    def fits(self) -> bool | None:
        """Whether it fits; None if it is not known."""
        return False if self.program is None else self.memory.fits

    def certainty(self) -> tuple[str, str]:
        """What of it is exact, and what is an estimate, in sentences."""
        return f"Exact: {'; '.join(self.exact)}.", f"Estimated: {'; '.join(self.estimated)}."

    def with_limit(self, limit: int) -> Self:
        """The same on devices of so much memory, in bytes."""
        program = dataclasses.replace(self.memory.program, memory_limit=limit)
        return dataclasses.replace(self, memory=dataclasses.replace(self.memory, program=program))


class AskedStep:
    """What was asked for: a model's step, or one that a function gives.

    Attributes:
        model: The model, once it is built; None of a step that a function gives.
        layout: The same of its layout.
        notes: What was warned of.
    """

    def __init__(self, options: argparse.Namespace) -> None:
        self._options = options
        self._said: dict[str, Any] = {}
        self._lines: list[str] = []
        self.model: ChosenModel | None = None
        self.layout: ChosenLayout | None = None
        self.notes: list[str] = []

    def compiled(self) -> StepPrice:
        """Compiles it, without running it.

        Raises:
            PlanError: Something has no valid layout.
            ShardingError: Something does not go together, or cannot be compiled.
        """
        topology = self._topology()
        with _warnings_as(self.notes):
            step = self._step(topology)
            where = "" if topology is None else f" for {topology.name}"
            _progress(f"compiling {step.text.partition(';')[0]}{where}")
            with self._naming_what_is_called():
                if topology is None:
                    program = compile_step(step.step, *step.args, **step.kwargs)
                    return StepPrice.of(program)
                report = compile_ahead(step.step, *step.args, topology=topology, **step.kwargs)
        return StepPrice(
            report.memory,
            report.collectives,
            report.program,
            f"{report.device_count:,} x {report.device_kind} ({topology.name})",
            report.exact,
            report.estimated,
            report.notes,
            f"Compiled by {report.compiler} in {report.seconds:.1f} s.",
        )

    def lowered(self) -> LoweredStep:
        """Lowers it, without compiling it.

        Raises:
            PlanError: Something has no valid layout.
            ShardingError: Something does not go together.
        """
        with _warnings_as(self.notes):
            step = self._step(None)
            _progress(f"tracing {step.text.partition(';')[0]}")
            with self._naming_what_is_called():
                return lower_step(step.step, step.args, step.kwargs)

    @contextlib.contextmanager
    def _naming_what_is_called(self) -> Iterator[None]:
        """A block that calls the model, which may be none of tokens."""
        try:
            yield
        except Exception as error:
            is_of_tokens = self.model is not None and self.model.problem is None
            if isinstance(error, ShardingError | MissingExtraError) or not is_of_tokens:
                raise
            raise not_of_tokens(
                self._said["model"], error, "(step, args), or (step, args, kwargs)"
            ) from error

    def said(self) -> dict[str, Any]:
        """What there is to know of it, for programs."""
        return {**self._said, "notes": self.notes}

    def lines(self) -> list[str]:
        """The same for people."""
        return self._lines

    def _topology(self) -> Topology | None:
        options = self._options
        if options.topology is not None:
            return Topology(options.topology, options.target_config)
        if options.target_config is not None:
            raise RuleTypeError(
                "--target-config says what GPUs are like, and belongs to a topology of them: "
                "--topology gpu:4x8."
            )
        return None

    def _step(self, topology: Topology | None) -> ChosenStep:
        options = self._options
        given = step_of_reference(options.model)
        if given is not None:
            _refuse_options_of_models(options)
            self._said = {"step": given.text}
            self._lines = [given.text]
            return given
        chosen = chosen_model(
            options.model,
            options.dtype,
            stacked=False if options.unroll else None,
            is_trained=True,
        )
        layout = chosen_layout(options, chosen.model)
        if topology is not None:
            topology.refuse_mesh(layout.mesh.shape)
        self._said = {**chosen.said(), **layout.said()}
        self._lines = [chosen.headline(), layout.line()]
        self.model, self.layout = chosen, layout
        of_step = training_step if chosen.problem is None else step_of_problem
        step = of_step(chosen, layout, options)
        self._said["step"] = step.text
        self._lines.append(step.text)
        return step


def _refuse_options_of_models(options: argparse.Namespace) -> None:
    given = [
        f"--{name.replace('_', '-')}"
        for name, unset in options.of_models.items()
        if getattr(options, name) != unset
    ]
    if given:
        raise RuleTypeError(
            f"{options.model} gives a step with its arguments, which say their mesh and layouts "
            f"themselves. Leave out {' and '.join(given)}."
        )


def _progress(text: str) -> None:
    print(f"penzai-shard: {text} ...", file=sys.stderr, flush=True)


@contextlib.contextmanager
def _warnings_as(notes: list[str]) -> Iterator[None]:
    """A block whose warnings of this library become notes."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", ShardingWarning)
        yield
    for warning in caught:
        if issubclass(warning.category, ShardingWarning):
            notes.append(str(warning.message))
        else:
            warnings.warn_explicit(
                warning.message, warning.category, warning.filename, warning.lineno
            )
