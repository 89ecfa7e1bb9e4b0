"""The ``penzai-shard`` command."""

import argparse
import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import penzai_shard
from penzai_shard.cli.answers import OneLineParser, answer
from penzai_shard.cli.checkpoint_commands import add_checkpoint_commands
from penzai_shard.cli.choose_command import add_choose_command
from penzai_shard.cli.demo_failure import DemoFailure
from penzai_shard.cli.lint_commands import add_lint_command
from penzai_shard.cli.mesh_arguments import mesh_shape
from penzai_shard.cli.plan_commands import add_plan_commands
from penzai_shard.cli.price_commands import add_price_commands
from penzai_shard.cli.processes import is_started, joined, start_processes
from penzai_shard.cli.why_command import add_why_command
from penzai_shard.errors import MeshError, MissingExtraError, ShardingError


def _parser() -> argparse.ArgumentParser:
    parser = OneLineParser(
        prog="penzai-shard", description="Model surgery and sharding by axis name, for JAX."
    )
    parser.set_defaults(answers=False)
    parser.add_argument(
        "--version", action="version", version=f"%(prog)s {penzai_shard.__version__}"
    )
    commands = parser.add_subparsers(dest="command", required=True)
    _add_demo(commands)
    _add_run(commands)
    add_checkpoint_commands(commands)
    add_plan_commands(commands)
    add_price_commands(commands)
    add_choose_command(commands)
    add_why_command(commands)
    add_lint_command(commands)
    return parser


def _add_demo(commands: Any) -> None:
    demo = commands.add_parser(
        "demo",
        help="plan, shard, edit, train, save and restore a small transformer",
        description=(
            "Builds a byte-level transformer, prints its plan, initialises it sharded, trains it "
            "on Python's help pages, saves it, and restores it on another mesh. Runs on the "
            "accelerators of this machine, else on eight simulated CPU devices."
        ),
    )
    demo.add_argument("--steps", type=int, default=250, help="training steps (default 250)")
    demo.add_argument(
        "--mesh",
        default=None,
        metavar="data=4,model=2",
        help="sizes of the mesh axes data and model (default: 4 x 2, or what the devices allow)",
    )
    demo.add_argument(
        "--simulate-devices",
        type=int,
        default=None,
        metavar="N",
        help="simulate N devices on the CPU, even where there are accelerators",
    )
    demo.add_argument(
        "--out", type=Path, default=Path("penzai-shard-demo"), metavar="DIR", help="where to write"
    )
    demo.add_argument(
        "--processes",
        type=int,
        default=1,
        metavar="N",
        help="run in N processes, which share the devices; started here, on simulated devices",
    )
    demo.add_argument(
        "--coordinator",
        default=None,
        metavar="HOST:PORT",
        help="with --processes and --process-id: be one of N processes that somebody else starts",
    )
    demo.add_argument(
        "--process-id", type=int, default=None, metavar="I", help="which one, from 0 to N-1"
    )
    demo.add_argument("--seed", type=int, default=0, help="seed of everything random (default 0)")
    demo.add_argument("--debug", action="store_true", help="show the traceback of a failure")


def _add_run(commands: Any) -> None:
    run = commands.add_parser(
        "run",
        help="run a script of your own in several processes on this machine",
        description=(
            "Runs a program in N processes, which find each other with "
            "penzai_shard.several_processes(). If one of them fails or is killed, all are ended."
        ),
    )
    run.add_argument("--processes", type=int, required=True, metavar="N", help="how many")
    run.add_argument(
        "--simulate-devices",
        type=int,
        default=None,
        metavar="M",
        help="simulate M devices on the CPU, divided among the processes",
    )
    run.add_argument("program", help="a Python script, or any other program")
    run.add_argument("arguments", nargs=argparse.REMAINDER, help="its arguments")


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line.

    Args:
        arguments: The arguments, those of the process by default.

    Returns:
        The exit status: 0, 1 after a failure reported in one line, 130 after Ctrl-C. Of commands
        that answer a question 1 is an answer, and 2 a failure.
    """
    options = _parser().parse_args(arguments)
    try:
        if options.command == "run":
            command = [options.program, *options.arguments]
            return start_processes(command, options.processes, options.simulate_devices)
        if options.answers:
            return answer(options)
        return _demo(options, sys.argv[1:] if arguments is None else arguments)
    except KeyboardInterrupt:
        print("\npenzai-shard: stopped.", file=sys.stderr)
        return 130
    except Exception as error:
        # Whatever the cause, the shell gets one line of it, or the traceback if it asks for that.
        if getattr(options, "debug", False):
            raise
        is_ours = isinstance(error, ShardingError | DemoFailure | MissingExtraError)
        kind = "" if is_ours else f"{type(error).__name__}: "
        print(f"penzai-shard: {kind}{_one_line(error)}", file=sys.stderr)
        return 2 if options.answers else 1


def _demo(options: argparse.Namespace, arguments: Sequence[str]) -> int:
    """Runs the demo here, or in processes that are started here."""
    try:
        # Imported here, because it needs optional dependencies that other commands do without.
        from penzai_shard.cli.demo import SIMULATED_DEVICES, run_demo
    except (MissingExtraError, ModuleNotFoundError) as error:
        name = getattr(error, "name", None)
        reason = str(error) if name is None else f"this needs {name!r}, which is not installed"
        print(f"penzai-shard: {reason}. Try: pip install 'penzai-shard[cli]'", file=sys.stderr)
        return 1
    shape = None if options.mesh is None else mesh_shape(options.mesh)
    wanted = SIMULATED_DEVICES if shape is None else math.prod(shape.values())
    total = options.simulate_devices or wanted
    if options.processes != 1 and options.coordinator is None and not is_started():
        command = [sys.executable, "-m", "penzai_shard", *arguments]
        return start_processes(command, options.processes, total)
    if (options.coordinator is None) != (options.process_id is None):
        raise MeshError(
            "--coordinator and --process-id belong together: --processes 2 --coordinator "
            "HOST:PORT --process-id 0."
        )
    with joined(options.coordinator, options.processes, options.process_id, total):
        run_demo(
            steps=options.steps,
            shape=shape,
            out=options.out,
            seed=options.seed,
            simulated=options.simulate_devices,
        )
    return 0


def _one_line(error: Exception) -> str:
    # JAX says of every error in a traced function that it has shortened the traceback.
    notes = [note for note in getattr(error, "__notes__", ()) if "internal frames" not in note]
    return " ".join(line.strip() for text in (str(error), *notes) for line in text.splitlines())
