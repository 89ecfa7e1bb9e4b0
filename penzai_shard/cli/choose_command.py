"""``penzai-shard choose``: the layout for a model on some devices, found among all sane ones."""

import argparse
import json
import sys
from typing import Any

from penzai_shard.choosing.candidates.kept_axes import Keep
from penzai_shard.choosing.choices import Choices, choose_layout
from penzai_shard.choosing.choices.choose import COMPILED, PROPAGATED
from penzai_shard.cli.answers import add_answer_options, print_lines, print_table
from penzai_shard.cli.chosen_layouts import read_rules
from penzai_shard.cli.chosen_models import ChosenModel, add_model_arguments, chosen_model
from penzai_shard.cli.chosen_steps import (
    add_batch_arguments,
    batch_of_tokens,
    less_than_one,
    next_token_loss,
    optimizer_of,
)
from penzai_shard.cli.mesh_arguments import mesh_shape
from penzai_shard.errors import NothingFitsError, PlanError, RuleTypeError, raise_all
from penzai_shard.meshes import make_mesh


def add_choose_command(commands: Any) -> None:
    """Adds the command to the parser's."""
    parser = commands.add_parser(
        "choose",
        help="find the mesh and the layout for training a model on some devices",
        description=(
            "Lists every sane layout of a model over the devices, which need not be there, prices "
            "them all, the best of them more and more exactly, and says which take the least time "
            "of those that fit. Ctrl-C ends it with the best so far. Exit status 0, 1 if none "
            "fits, 2 after a mistake in the command line."
        ),
        epilog=(
            "For example: penzai-shard choose llama-3-8b --devices v5e:32 --batch 32 --seq 2048 "
            "--write rules.toml; then penzai-shard price llama-3-8b --rules rules.toml"
        ),
    )
    add_model_arguments(parser)
    parser.add_argument(
        "--devices",
        required=True,
        metavar="v5e:32",
        help="a kind of device and how many: v5e:32, v5p:4x4x8, h100:16; with --mesh the kind "
        "alone will do",
    )
    parser.add_argument(
        "--mesh",
        metavar="data=8,model=4",
        help="sizes of the mesh axes, if they are decided already; by default all are tried",
    )
    add_batch_arguments(parser, is_required=True)
    parser.add_argument(
        "--memory",
        metavar="16GiB",
        help="what a step may need of a device's memory (default: what programs can have of it)",
    )
    parser.add_argument(
        "--keep",
        metavar="batch=data,heads=none",
        help="pairs of a logical axis and a mesh axis that are decided already",
    )
    _add_search_arguments(parser)
    parser.add_argument(
        "--write", metavar="rules.toml", help="write the best to this file, for --rules"
    )
    add_answer_options(parser)
    parser.set_defaults(run=_choose)


def _add_search_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds how closely the search looks."""
    parser.add_argument(
        "--propagated",
        type=int,
        default=PROPAGATED,
        metavar="N",
        help=f"how many layouts are priced by propagation (default {PROPAGATED})",
    )
    parser.add_argument(
        "--compiled",
        type=int,
        default=COMPILED,
        metavar="N",
        help="how many layouts are compiled; 0 for none, which is quicker and less exact "
        f"(default {COMPILED})",
    )
    parser.add_argument(
        "--compile-for",
        choices=("simulated", "hardware"),
        default="simulated",
        help="compile for as many simulated devices (default), or for TPUs by their own compiler, "
        "which takes minutes and pip install 'penzai-shard[tpu]'",
    )


def _choose(options: argparse.Namespace) -> int:
    raise_all(RuleTypeError, "no layout can be chosen:", less_than_one(options, "batch", "seq"))
    optimizer = optimizer_of(options.optimizer)
    devices, keep = _devices(options), _kept(options.keep)
    chosen = chosen_model(options.model, options.dtype)
    print(
        f"penzai-shard: choosing a layout of {chosen.name} for {options.devices} ...",
        file=sys.stderr,
        flush=True,
    )
    try:
        choices = choose_layout(
            chosen.model,
            next_token_loss,
            optimizer,
            batch={"tokens": batch_of_tokens(options.batch, options.seq + 1)},
            memory=options.memory,
            propagated=options.propagated,
            compiled=options.compiled,
            compile_for=options.compile_for,
            keep=keep,
            **devices,
        )
    except (NothingFitsError, PlanError) as error:
        return _print_refusal(chosen, options, error)
    written = None if options.write is None else choices.best.save(options.write)
    _print(chosen, options, choices)
    if written is not None:
        print(f"penzai-shard: the best is in {written}", file=sys.stderr, flush=True)
    return 0


def _devices(options: argparse.Namespace) -> dict[str, Any]:
    """The devices, and the mesh over them if that is decided."""
    if options.mesh is None:
        return {"devices": options.devices}
    mesh = make_mesh(mesh_shape(options.mesh), abstract=True)
    return {"devices": mesh, "hardware": options.devices}


def _kept(text: str | None) -> Keep | None:
    if text is None:
        return None
    if ":" in text:
        raise RuleTypeError(f"--keep {text!r}: write {text.replace(':', '=')}.")
    rules = read_rules(text).parameters
    if len(rules.name_rules) < len(rules.rules):
        raise RuleTypeError(
            f"--keep {text!r}: write pairs of a logical axis and a mesh axis: "
            "batch=data,heads=none."
        )
    return {rule.logical_axis: rule.mesh_axes or None for rule in rules.name_rules}


def _print(chosen: ChosenModel, options: argparse.Namespace, choices: Choices) -> None:
    if options.json:
        print(json.dumps({**chosen.said(), **json.loads(choices.to_json())}, indent=2))
    else:
        print_lines(chosen.headline(), f"one training step with {options.optimizer}", "")
        print_table(choices.table(collapse=not options.all))


def _print_refusal(
    chosen: ChosenModel, options: argparse.Namespace, error: NothingFitsError | PlanError
) -> int:
    """Says that no layout fits; gives the exit status."""
    if options.json:
        headline = str(error).partition("\n")[0]
        found = {"fits": False, "problem": headline, "help": list(error.problems)}
        print(json.dumps({**chosen.said(), **found}, indent=2))
    else:
        print_lines(chosen.headline(), *str(error).splitlines())
    return 1
