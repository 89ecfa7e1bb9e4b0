"""``penzai-shard plan`` and ``penzai-shard rules``: where each array goes, and files of rules."""

import argparse
import json
import warnings
from typing import Any

from penzai_shard.cli.answers import add_answer_options, print_lines, print_table
from penzai_shard.cli.chosen_layouts import ChosenLayout, for_shell
from penzai_shard.cli.chosen_models import ChosenModel
from penzai_shard.cli.chosen_trees import add_tree_arguments, chosen_tree
from penzai_shard.errors import PlanError, ShardingWarning
from penzai_shard.layouts.example_file import EXAMPLE
from penzai_shard.planning import ShardingPlan
from penzai_shard.rule_kinds import did_you_mean


def add_plan_commands(commands: Any) -> None:
    """Adds the commands to the parser's."""
    plan = commands.add_parser(
        "plan",
        help="where each array of a model goes, and what each device holds",
        description=(
            "Decides the layout of every array of a model, without devices and without memory. "
            "Exit status 0 if all have one, 1 if some do not or a rule's name is in no array, 2 "
            "after a mistake in the command line."
        ),
        epilog=(
            "For example: penzai-shard plan llama-3-70b --mesh data=16,model=16; "
            "penzai-shard plan model.py:build --mesh data=8 --rules embedding=data,batch=data"
        ),
    )
    add_tree_arguments(plan, also="plan", unnamed="an error")
    add_answer_options(plan)
    plan.set_defaults(run=_plan)
    rules = commands.add_parser(
        "rules",
        help="print a file of rules to start from",
        description="Files of rules, for --rules and Layout.from_toml.",
        epilog="For example: penzai-shard rules --example > rules.toml",
    )
    rules.add_argument(
        "--example", action="store_true", required=True, help="print one, with explanations"
    )
    rules.add_argument("--debug", action="store_true", help="show the traceback of a failure")
    rules.set_defaults(run=_rules, answers=True)


def _rules(_: argparse.Namespace) -> int:
    print(EXAMPLE, end="")
    return 0


def _plan(options: argparse.Namespace) -> int:
    chosen, layout, tree = chosen_tree(options)
    plan, findings = None, []
    try:
        # Rules that match nothing are found below, those that are nearly a name among them.
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ShardingWarning)
            plan = layout.layout.plan(
                tree,
                layout.mesh,
                on_unnamed=options.on_unnamed,
                on_indivisible=layout.on_indivisible,
            )
        findings = _unused(plan)
    except PlanError as error:
        findings = [for_shell(problem) for problem in error.problems or (str(error),)]
    if options.json:
        print(_json(chosen, layout, plan, findings))
    else:
        _print(chosen, layout, plan, findings, options.all)
    return 1 if findings else 0


def _unused(plan: ShardingPlan) -> list[str]:
    """What is strange in rules that no array follows."""
    return [
        f"rule {rule}: no array has logical axis {rule.logical_axis!r}."
        f"{did_you_mean(rule.logical_axis, plan.logical_axes)}"
        for rule in plan.unused_rules
        if not rule.is_expected_to_be_unused
    ]


def _print(
    chosen: ChosenModel,
    layout: ChosenLayout,
    plan: ShardingPlan | None,
    findings: list[str],
    every_array: bool,
) -> None:
    print_lines(chosen.headline(), layout.line())
    if plan is not None:
        print_table(plan.table(collapse=not every_array))
        print_lines(*(f"FOUND: {finding}" for finding in findings))
    else:
        print(PlanError("NO VALID LAYOUT:", findings))


def _json(
    chosen: ChosenModel,
    layout: ChosenLayout,
    plan: ShardingPlan | None,
    findings: list[str],
) -> str:
    found: dict[str, Any] = {
        **chosen.said(),
        **layout.said(),
        "fits": plan is not None,
        "findings": findings,
        "plan": None if plan is None else json.loads(plan.to_json()),
    }
    return json.dumps(found, indent=2)
