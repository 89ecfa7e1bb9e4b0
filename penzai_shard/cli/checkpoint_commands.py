"""``penzai-shard checkpoint``: what one holds, in what two differ, whether one is whole."""

import argparse
import json
from typing import Any

from penzai_shard.checkpoint_reports import (
    ModelComparison,
    compare_checkpoints,
    describe_checkpoint,
    describe_run,
    is_run,
    verify_checkpoint,
)
from penzai_shard.cli.answers import add_answer_options, print_report
from penzai_shard.cli.model_references import ModelReference
from penzai_shard.errors import CheckpointDamagedError, CheckpointNotFoundError, RuleTypeError
from penzai_shard.text_tables import Report


def add_checkpoint_commands(commands: Any) -> None:
    """Adds the command with its own commands to the parser's."""
    checkpoint = commands.add_parser(
        "checkpoint",
        help="show a checkpoint, compare it with another one or with a model, verify it",
        description="Looks at checkpoints. The accelerators of this machine are left alone.",
    )
    actions = checkpoint.add_subparsers(dest="action", required=True)
    show = _action(
        actions,
        "show",
        "names, logical axes, shapes, dtypes, sizes and shardings at save; reads no array",
        "penzai-shard checkpoint show run/step_00000100",
    )
    show.add_argument(
        "path",
        metavar="PATH",
        help="a checkpoint's directory, the folder of a run, or safetensors files",
    )
    show.set_defaults(run=_show)
    diff = _action(
        actions,
        "diff",
        "in what two checkpoints differ, or what keeps one from being restored into a model; "
        "reads no array. Exit status 0 if nothing differs, 1 if something does, 2 after an "
        "error and where values could not be compared",
        "penzai-shard checkpoint diff run/step_00000100 run/step_00000200",
        "penzai-shard checkpoint diff params 'train.py:build_model(seed=0)'",
    )
    diff.add_argument("path", metavar="PATH", help="a checkpoint's directory")
    diff.add_argument(
        "other",
        metavar="PATH_OR_MODEL",
        help="another one; or file.py:function or module:function, which builds a model, an "
        "abstract one or a train state, with arguments in brackets if it takes some. Nothing is "
        "initialised",
    )
    diff.set_defaults(run=_diff)
    verify = _action(
        actions,
        "verify",
        "read all of a checkpoint, and compare its numbers with the checksums kept at the save. "
        "Exit status 0 if all are as they were saved, 1 if something is damaged, 2 after an error "
        "and where there are no checksums",
        "penzai-shard checkpoint verify run/step_00000100",
    )
    verify.add_argument("path", metavar="PATH", help="the checkpoint's directory")
    verify.set_defaults(run=_verify)


def _action(actions: Any, name: str, text: str, *examples: str) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = actions.add_parser(
        name,
        help=text.partition(". ")[0],
        description=text[0].upper() + text[1:] + ".",
        epilog="For example: " + "; ".join(examples),
    )
    add_answer_options(parser)
    return parser


def _show(options: argparse.Namespace) -> int:
    found: Report
    try:
        found = describe_checkpoint(options.path)
    except CheckpointNotFoundError:
        if not is_run(options.path):
            raise
        found = describe_run(options.path)
    print_report(found, options)
    return 0


def _diff(options: argparse.Namespace) -> int:
    if ModelReference.read(options.path) is not None:
        raise RuleTypeError(
            f"the checkpoint comes first: penzai-shard checkpoint diff PATH {options.path}"
        )
    reference = ModelReference.read(options.other)
    other = options.other if reference is None else reference.model()
    found = compare_checkpoints(options.path, other)
    print_report(found, options)
    if isinstance(found, ModelComparison):
        return 0 if found.fits else 1
    return 1 if found.are_different else 0 if found.are_equal else 2


def _verify(options: argparse.Namespace) -> int:
    try:
        found = verify_checkpoint(options.path)
    except CheckpointDamagedError as error:
        # What the checkpoint says of its arrays is damaged: an answer too.
        print(json.dumps({"ok": False, "error": str(error)}, indent=2) if options.json else error)
        return 1
    print_report(found, options)
    return 1 if found.damaged else 0 if found.ok else 2
