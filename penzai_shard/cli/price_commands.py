"""``penzai-shard price`` and ``lock``: what a step needs and moves, before it runs."""

import argparse
import json
from typing import Any

from penzai_shard.cli.answers import add_answer_options, print_lines, print_report, print_table
from penzai_shard.cli.asked_steps import AskedStep, StepPrice, add_asked_arguments
from penzai_shard.cli.chosen_layouts import for_shell
from penzai_shard.cli.mesh_arguments import mesh_shape
from penzai_shard.cli.price_pages import write_price_page
from penzai_shard.errors import CompilationError, MeshError, PlanError
from penzai_shard.inspection.devices.quantities import read_bandwidths, read_bytes
from penzai_shard.inspection.locks.locks import ShardingLock
from penzai_shard.whole_files import refuse_unwritable


def add_price_commands(commands: Any) -> None:
    """Adds the commands to the parser's."""
    _add_price(commands)
    _add_lock(commands)


def _add_price(commands: Any) -> None:
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
    add_asked_arguments(price)
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
    price.add_argument(
        "--report",
        metavar="out.html",
        help="also write all of it, with plan, findings and why, as one page that a browser opens",
    )
    add_answer_options(price)
    price.set_defaults(run=_price)


def _add_lock(commands: Any) -> None:
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
    add_asked_arguments(lock)
    what = lock.add_mutually_exclusive_group(required=True)
    what.add_argument("--out", metavar="FILE", help="write the lock to this file")
    what.add_argument("--check", metavar="FILE", help="compare the step with this lock")
    add_answer_options(lock)
    lock.set_defaults(run=_lock)


def _price(options: argparse.Namespace) -> int:
    limit = None if options.limit is None else read_bytes(options.limit, "--limit")
    bandwidth = None if options.bandwidth is None else read_bandwidths(options.bandwidth)
    if bandwidth is not None and options.mesh is not None:
        # Before anything is compiled.
        others = [axis for axis in bandwidth if axis not in mesh_shape(options.mesh)]
        if others:
            raise MeshError(
                f"--bandwidth: mesh ({options.mesh}) has no mesh axis {' and '.join(others)}. Give "
                "what a device can send over each of its own: data=25GB,model=450GB."
            )
    if options.report is not None:
        refuse_unwritable(options.report, "--report ", "report.html", "page")
    asked = AskedStep(options)
    try:
        found = asked.compiled()
    except PlanError as error:
        if options.report is not None:
            write_price_page(asked, None, options, [])
        return print_without_layout(asked, options, error)
    if limit is not None:
        found = found.with_limit(limit)
    seconds = None
    if bandwidth is not None and found.moved is not None:
        seconds = found.moved.time(bandwidth)
    bounds = [] if seconds is None else [_time_text(seconds)]
    if options.report is not None:
        write_price_page(asked, found, options, bounds)
    if options.json:
        print(json.dumps({**asked.said(), **_data(found), "time_at_least_s": seconds}, indent=2))
    else:
        print_lines(*asked.lines(), found.devices, "")
        print_table(found.memory.table(collapse=not options.all))
        if found.moved is not None:
            print()
            print_table(found.moved.table(collapse=not options.all))
        print_lines("", *bounds, *found.certainty(), *asked.notes, *_compiler_notes(found))
    return 1 if found.fits is False else 0


def _data(found: StepPrice) -> dict[str, Any]:
    return {
        "devices": found.devices,
        "fits": found.fits,
        "exact": list(found.exact),
        "estimated": list(found.estimated),
        "memory": json.loads(found.memory.to_json()),
        "collectives": None if found.moved is None else json.loads(found.moved.to_json()),
        "compiler_notes": _compiler_notes(found),
    }


def _compiler_notes(found: StepPrice) -> list[str]:
    return [*filter(None, [found.compiled_by]), *found.notes]


def _lock(options: argparse.Namespace) -> int:
    # Read before anything is compiled.
    wanted = None if options.check is None else ShardingLock.load(options.check)
    asked = AskedStep(options)
    try:
        program = asked.compiled().program
    except PlanError as error:
        return print_without_layout(asked, options, error)
    if program is None:
        raise CompilationError(
            "the step does not fit into the devices, and so has no program to lock. penzai-shard "
            "price says what it needs."
        )
    if wanted is not None:
        found = wanted.check(program)
        print_report(found, options)
        return 0 if found else 1
    lock = ShardingLock.of(program)
    path = lock.save(options.out)
    if options.json:
        print(json.dumps({**asked.said(), "lock": json.loads(lock.to_json())}, indent=2))
    else:
        print_lines(*asked.lines(), f"{lock!r} is in {path}")
    return 0


def print_without_layout(asked: AskedStep, options: argparse.Namespace, error: PlanError) -> int:
    """Says that a step has no valid layout; gives the exit status."""
    findings = list(map(for_shell, error.problems or (str(error),)))
    if options.json:
        print(json.dumps({**asked.said(), "fits": False, "findings": findings}, indent=2))
    else:
        print_lines(*asked.lines())
        print(PlanError("NO VALID LAYOUT:", findings))
    return 1


def _time_text(seconds: float) -> str:
    size = f"{seconds:.3g} s" if seconds >= 0.1 else f"{seconds * 1e3:.3g} ms"
    return (
        f"Moving this takes at least {size} in each step, if all of it overlaps and no link idles."
    )
