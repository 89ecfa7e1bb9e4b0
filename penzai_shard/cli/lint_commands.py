"""``penzai-shard lint``: what in a model's layout is probably a mistake or a waste."""

import argparse
import ast
import dataclasses
import json
import re
from typing import Any

from penzai_shard.cli.answers import add_answer_options, print_lines, print_table
from penzai_shard.cli.chosen_layouts import ChosenLayout, for_shell
from penzai_shard.cli.chosen_models import ChosenModel
from penzai_shard.cli.chosen_steps import SEQUENCE_LENGTH, batch_of_tokens, less_than_one
from penzai_shard.cli.chosen_trees import add_tree_arguments, chosen_tree
from penzai_shard.errors import RuleTypeError, raise_all
from penzai_shard.inspection.devices.quantities import read_bytes
from penzai_shard.layouts import Layout
from penzai_shard.layouts.layout_file import table_line
from penzai_shard.layouts.rule_expressions import read_rules_expression
from penzai_shard.linting import Finding, LintReport, lint
from penzai_shard.linting.lint_subject import MIN_BYTES
from penzai_shard.linting.subject_flows import NO_BATCH
from penzai_shard.planning import bytes_text

_NO_BATCH = "what flows through the model was not looked at: see --batch"


def add_lint_command(commands: Any) -> None:
    """Adds the command to the parser's."""
    parser = commands.add_parser(
        "lint",
        help="what in a model's rules and layout is probably a mistake or a waste",
        description=(
            "Looks for rules that cannot be followed or match nothing, for large arrays that are "
            "whole over a mesh axis which is free for them, and for mesh axes that nothing is "
            "split over, without devices and without memory. Exit status 0 if nothing is found, 1 "
            "if something is, 2 after a mistake in the command line."
        ),
        epilog=(
            "For example: penzai-shard lint llama-3-70b --mesh data=16,model=8 --rules "
            "batch=data,embedding=data,neurons=model; penzai-shard lint model.py:build --mesh "
            "data=8 --layout fully_sharded --optimizer adamw"
        ),
    )
    add_tree_arguments(parser, also="look at", unnamed="they are findings")
    parser.add_argument(
        "--batch",
        type=int,
        metavar="N",
        help="also look at what flows through a model of tokens, called with N sequences; for any "
        "other, MODEL may be a function that returns (model, args), or (model, args, kwargs)",
    )
    parser.add_argument(
        "--seq",
        type=int,
        metavar="N",
        help=f"tokens in each of these sequences (default {SEQUENCE_LENGTH:,})",
    )
    parser.add_argument(
        "--min-bytes",
        metavar="1MiB",
        help="the part of an array in each device from which on it is called wasteful (default "
        f"{bytes_text(MIN_BYTES)})",
    )
    add_answer_options(parser)
    parser.set_defaults(run=_lint)


def _lint(options: argparse.Namespace) -> int:
    given = options.min_bytes
    min_bytes = MIN_BYTES if given is None else read_bytes(given, "--min-bytes")
    tokens = _tokens(options)
    chosen, layout, tree = chosen_tree(options, is_called=True)
    batch = _batch(chosen, tokens)
    how = {"min_bytes": min_bytes, "on_unnamed": options.on_unnamed, "batch": batch}
    found = linted(tree, layout, options, **how)
    if tokens is not None and chosen.published is None:
        _refuse_other_than_tokens(chosen, found)
    notes = tuple(_NO_BATCH if note == NO_BATCH else note for note in found.notes)
    report = dataclasses.replace(found, notes=notes)
    if options.json:
        said = {**chosen.said(), **layout.said(), "lint": json.loads(report.to_json())}
        print(json.dumps(said, indent=2))
    else:
        print_lines(chosen.headline(), layout.line())
        print_table(report.table(collapse=not options.all))
    return 0 if report.ok else 1


def linted(tree: Any, layout: ChosenLayout, options: argparse.Namespace, **how: Any) -> LintReport:
    """What ``lint`` finds in a model or a state, with what to write on the command line.

    Args:
        tree: The model, or its train state.
        layout: Its mesh and layout.
        options: What was parsed.
        **how: Further arguments of ``lint``.
    """
    how["on_indivisible"] = layout.on_indivisible
    found = lint(tree, layout.mesh, _as_given(layout, options), **how)
    findings = [_for_shell(finding, options) for finding in found.findings]
    return dataclasses.replace(found, findings=tuple(findings))


def _tokens(options: argparse.Namespace) -> Any:
    """The tokens that are asked for; None if there are none."""
    problems = less_than_one(options, "batch", "seq")
    if options.seq is not None and options.batch is None:
        problems.append("--seq says how long the sequences of --batch are. Give --batch 8 too.")
    raise_all(RuleTypeError, "this cannot be linted:", problems)
    if options.batch is None:
        return None
    return batch_of_tokens(options.batch, options.seq or SEQUENCE_LENGTH)


def _batch(chosen: ChosenModel, tokens: Any) -> Any:
    """What the model is called with, as far as that is said."""
    if tokens is not None and chosen.called_with is not None:
        raise RuleTypeError(
            f"{chosen.name} says itself what its model is called with. Leave out --batch."
        )
    return chosen.called_with if tokens is None else tokens


def _refuse_other_than_tokens(chosen: ChosenModel, found: LintReport) -> None:
    """Refuses --batch for a model that cannot be called with tokens."""
    for finding in found.findings:
        if finding.kind == "uncallable":
            raise RuleTypeError(
                f"{chosen.name} cannot be called with numbers of tokens that have the logical axes "
                f"batch and seq: at {finding.path}, {finding.problem.rstrip('.:')}. For any other "
                "model leave out --batch, and give a function that returns (model, args), or "
                "(model, args, kwargs)."
            )


def _as_given(layout: ChosenLayout, options: argparse.Namespace) -> Any:
    """One table of rules where one was given, so that what is found is said of it."""
    rules = layout.layout.parameters
    is_one_table = options.rules is not None and layout.layout == Layout.of_rules(rules)
    return rules if is_one_table and not _is_file(options) else layout.layout


def _is_file(options: argparse.Namespace) -> bool:
    return options.rules is not None and ("/" in options.rules or ".toml" in options.rules)


def _for_shell(finding: Finding, options: argparse.Namespace) -> Finding:
    """A finding with what to write on the command line in place of code."""
    finding = dataclasses.replace(finding, problem=for_shell(finding.problem))
    if not finding.fix:
        return finding
    (line,) = ast.parse(finding.fix).body
    assert isinstance(line, ast.Assign)
    target, value = ast.unparse(line.targets[0]), line.value
    fix = finding.fix
    if target == "rules":
        rules = ast.unparse(value)
        fix = f'--rules "{rules if rules[0] not in "[{" else f"AxisRules({rules})"}"'
    elif target == "layout" and isinstance(value, ast.Call):
        fix = _layout_fix(value.keywords, options) or fix
    return dataclasses.replace(finding, fix=fix)


def _layout_fix(changed: list[ast.keyword], options: argparse.Namespace) -> str:
    """What to write in a file of rules, or in the options of a preset; empty for neither."""
    names = {each.arg: ast.unparse(each.value) for each in changed}
    if _is_file(options):
        lines = []
        for name, text in names.items():
            if name == "names":
                lines.append(table_line(name, ast.literal_eval(text)))
            elif name is not None:
                expression = f"AxisRules({text})" if text[0] in "[{" else text
                lines.append(table_line(name, read_rules_expression(expression)))
        return f"in {options.rules}: {'; '.join(lines)}"
    preset = re.fullmatch(r"(\w+)(?:\((.*)\))?", (options.layout or "").strip(), re.DOTALL)
    if preset is None or list(names) != ["names"]:
        return ""
    call = ast.parse(f"{preset[1]}({preset[2] or ''})", mode="eval").body
    assert isinstance(call, ast.Call)
    call.keywords = [each for each in call.keywords if each.arg != "names"] + changed
    return f'--layout "{ast.unparse(call)}"'
