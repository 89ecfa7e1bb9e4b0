"""``penzai-shard price`` and ``lock``: what a step needs and moves, before it runs."""

import argparse
import contextlib
import dataclasses
import json
import sys
import warnings
from collections.abc import Iterator
from typing import Any

from penzai_shard.cli.answers import add_answer_options, print_lines, print_report, print_table
from penzai_shard.cli.chosen_layouts import add_layout_arguments, chosen_layout
from penzai_shard.cli.chosen_models import add_list_option, add_model_arguments, chosen_model
from penzai_shard.cli.chosen_steps import (
    ChosenStep,
    add_step_arguments,
    step_of_reference,
    training_step,
)
from penzai_shard.cli.quantities import read_bandwidths, read_bytes
from penzai_shard.errors import MeshError, PlanError, RuleTypeError, ShardingWarning
from penzai_shard.inspection.collective_report import CollectiveReport
from penzai_shard.inspection.locks import ShardingLock
from penzai_shard.inspection.memory_report import MemoryReport
from penzai_shard.inspection.programs import CompiledProgram, compile_step

_OF_CPUS = (
    "Compiled for simulated CPU devices, which is exact for them. Layouts and what they make a "
    "step move are the same anywhere; an accelerator's compiler may merge and split collectives, "
    "and needs other temporaries."
)
_OF_MODELS = ("mesh", "rules", "layout", "dtype", "batch", "remat")


def add_price_commands(commands: Any) -> None:
    """Adds the commands to the parser's."""
    price = commands.add_parser(
        "price",
        help="what a training step of a model needs and moves, before it runs",
        description=(
            "Compiles a step, without running it, for devices that need not be there: memory per "
            "device, and what moves over which mesh axis, by layer. Exit status 0 if it fits into "
            "the devices, as far as that is known, 1 if it does not, or the model has no valid "
            "layout, 2 after a mistake in the command line."
        ),
        epilog=(
            "For example: penzai-shard price llama-3-8b --mesh data=64,model=8 --batch 512 "
            "--seq 4096; penzai-shard price model.py:build --mesh data=8 --layout fully_sharded; "
            "penzai-shard price train.py:step_and_arguments"
        ),
    )
    _add_arguments(price)
    price.add_argument(
        "--bandwidth",
        metavar="data=25GB,model=450GB",
        help="what a device can send in a second over each mesh axis; gives a lower bound of time",
    )
    price.add_argument(
        "--limit",
        metavar="80GB",
        help="the memory of a device, if it is not known or not all of it",
    )
    add_answer_options(price)
    price.set_defaults(run=_price)
    lock = commands.add_parser(
        "lock",
        help="keep what a step needs and moves in a file, or compare it with such a file",
        description=(
            "Writes layouts, collectives and memory of a step to a file, as ShardingLock does, or "
            "says in what a step differs from it. Exit status 0 if nothing differs, 1 if something "
            "does, or the model has no valid layout, 2 after a mistake in the command line."
        ),
        epilog=(
            "For example: penzai-shard lock llama-3-8b --mesh data=8 --out lock.json; "
            "penzai-shard lock llama-3-8b --mesh data=8 --check lock.json"
        ),
    )
    _add_arguments(lock)
    what = lock.add_mutually_exclusive_group(required=True)
    what.add_argument("--out", metavar="FILE", help="write the lock to this file")
    what.add_argument("--check", metavar="FILE", help="compare the step with this lock")
    add_answer_options(lock)
    lock.set_defaults(run=_lock)


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    add_model_arguments(
        parser,
        "; or one that returns (step, args) or (step, args, kwargs), to price any step; --mesh "
        "and what else concerns a model is then left out",
    )
    add_layout_arguments(parser, mesh_required=False)
    add_list_option(parser)
    add_step_arguments(parser)


def _price(options: argparse.Namespace) -> int:
    limit = None if options.limit is None else read_bytes(options.limit, "--limit")
    bandwidth = None if options.bandwidth is None else read_bandwidths(options.bandwidth)
    asked = _Asked(options)
    try:
        program = asked.compiled(limit)
    except PlanError as error:
        return _without_layout(asked, options, error)
    memory, moved = MemoryReport.of(program), CollectiveReport.of(program)
    seconds = None if bandwidth is None else moved.time(bandwidth)
    if options.json:
        print(
            json.dumps(
                {
                    **asked.said(),
                    "devices": program.device_kind,
                    "fits": memory.fits,
                    "memory": json.loads(memory.to_json()),
                    "collectives": json.loads(moved.to_json()),
                    "time_at_least_s": seconds,
                },
                indent=2,
            )
        )
    else:
        print_lines(*asked.lines(), "")
        print_table(memory.table(collapse=not options.all))
        print()
        print_table(moved.table(collapse=not options.all))
        print_lines("", *([] if seconds is None else [_time_text(seconds)]), *asked.notes)
    return 1 if memory.fits is False else 0


def _lock(options: argparse.Namespace) -> int:
    # Read before anything is compiled.
    wanted = None if options.check is None else ShardingLock.load(options.check)
    asked = _Asked(options)
    try:
        program = asked.compiled()
    except PlanError as error:
        return _without_layout(asked, options, error)
    if wanted is not None:
        found = wanted.check_program(program)
        print_report(found, options)
        return 0 if found else 1
    lock = ShardingLock.of_program(program)
    path = lock.save(options.out)
    if options.json:
        print(json.dumps({**asked.said(), "lock": json.loads(lock.to_json())}, indent=2))
    else:
        print_lines(*asked.lines(), f"{lock!r} is in {path}")
    return 0


class _Asked:
    """What was asked for: a model's step, or one that a function gives."""

    def __init__(self, options: argparse.Namespace) -> None:
        self._options = options
        self._said: dict[str, Any] = {}
        self._lines: list[str] = []
        self.notes: list[str] = []

    def compiled(self, limit: int | None = None) -> CompiledProgram:
        with _warnings_as(self.notes):
            step = self._step()
            _progress(f"compiling {step.text.partition(';')[0]}")
            program = compile_step(step.step, *step.args, **step.kwargs)
        if program.device_kind == "cpu":
            self.notes.append(_OF_CPUS)
        return program if limit is None else dataclasses.replace(program, memory_limit=limit)

    def said(self) -> dict[str, Any]:
        """What there is to know of it, for programs."""
        return {**self._said, "notes": self.notes}

    def lines(self) -> list[str]:
        """The same for people."""
        return self._lines

    def _step(self) -> ChosenStep:
        options = self._options
        given = step_of_reference(options.model)
        if given is not None:
            _refuse_options_of_models(options)
            self._said = {"step": given.text}
            self._lines = [given.text]
            return given
        if options.mesh is None:
            raise MeshError("the mesh is needed too: --mesh data=8,model=4.")
        chosen = chosen_model(
            options.model, options.dtype, stacked=False if options.unroll else None
        )
        layout = chosen_layout(options, chosen.model)
        self._said = {**chosen.said(), **layout.said()}
        self._lines = [chosen.headline(), layout.line()]
        step = training_step(chosen, layout, options)
        self._said["step"] = step.text
        self._lines.append(step.text)
        return step


def _without_layout(asked: _Asked, options: argparse.Namespace, error: PlanError) -> int:
    findings = list(error.problems) or [str(error)]
    if options.json:
        print(json.dumps({**asked.said(), "fits": False, "findings": findings}, indent=2))
    else:
        print_lines(*asked.lines())
        print(PlanError("NO VALID LAYOUT:", findings))
    return 1


def _refuse_options_of_models(options: argparse.Namespace) -> None:
    given = [f"--{name}" for name in _OF_MODELS if getattr(options, name) is not None]
    if given:
        raise RuleTypeError(
            f"{options.model} gives a step with its arguments, which say their mesh and layouts "
            f"themselves. Leave out {' and '.join(given)}."
        )


def _time_text(seconds: float) -> str:
    size = f"{seconds:.3g} s" if seconds >= 0.1 else f"{seconds * 1e3:.3g} ms"
    return (
        f"Moving this takes at least {size} in each step, if all of it overlaps and no link idles."
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
