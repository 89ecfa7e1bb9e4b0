"""``penzai-shard why``: where the layouts of a step come from."""

import argparse
import json
from typing import Any

from penzai_shard.cli.answers import add_answer_options, print_lines, print_table
from penzai_shard.cli.asked_steps import AskedStep, add_asked_arguments
from penzai_shard.cli.price_commands import print_without_layout
from penzai_shard.errors import PlanError
from penzai_shard.inspection.sharding_causes import why


def add_why_command(commands: Any) -> None:
    """Adds the command to the parser's."""
    parser = commands.add_parser(
        "why",
        help="which layout each layer's output and each gradient gets, and where it comes from",
        description=(
            "Traces a step, without compiling or running it, and says of each layer's output and "
            "each parameter's gradient how it is laid out, which parameter, input, constraint or "
            "rule that comes from, and where a sharding was lost. Exit status 0, 1 if the model "
            "has no valid layout, 2 after a mistake in the command line."
        ),
        epilog=(
            "For example: penzai-shard why llama-3-8b --mesh data=64,model=8 --at '**/mlp'; "
            "penzai-shard why train.py:step_and_arguments"
        ),
    )
    add_asked_arguments(parser, is_compiled=False)
    parser.add_argument(
        "--at",
        metavar="blocks/3/mlp",
        help="a layer, with all in it, a parameter or a result, as the table names it, or a "
        "pattern as '**/mlp'; tells the whole way then",
    )
    add_answer_options(parser)
    parser.set_defaults(run=_why)


def _why(options: argparse.Namespace) -> int:
    asked = AskedStep(options)
    try:
        lowered = asked.lowered()
    except PlanError as error:
        return print_without_layout(asked, options, error)
    report = why(lowered, at=options.at)
    if options.json:
        print(json.dumps({**asked.said(), "why": json.loads(report.to_json())}, indent=2))
    else:
        print_lines(*asked.lines(), "")
        print_table(report.table(collapse=not options.all))
        print_lines(*asked.notes)
    return 0
