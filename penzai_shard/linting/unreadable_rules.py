"""Findings about what stands in the place of rules, and is none."""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from penzai_shard.axis_rules import AxisRules
from penzai_shard.errors import RuleTypeError
from penzai_shard.layouts import Layout
from penzai_shard.layouts.rule_expressions import RULES, read_rules_expression
from penzai_shard.linting.findings import Change, Finding
from penzai_shard.linting.lint_subject import LintSubject
from penzai_shard.linting.rule_changes import change_of_table
from penzai_shard.planning import ShardingPlan


def unreadable_rules(subject: LintSubject) -> Iterator[Finding]:
    """Rules in no form that can be read."""
    for problem in subject.unreadable:
        changes = _for_readable_rules(subject)
        yield Finding("unreadable", "rules", problem, about=problem, changes=changes)


def _for_readable_rules(subject: LintSubject) -> Iterator[Change]:
    """What was meant, where that can be told."""
    given = subject.rules
    name = getattr(given, "__name__", "")
    if callable(given) and given in (RULES.get(name), getattr(Layout, name, None)):
        # A preset that was not called.
        of_layout = "" if given == RULES.get(name) else "Layout."
        yield Change(f"rules = {of_layout}{name}()", {"rules": given()})
    elif isinstance(given, ShardingPlan):
        yield Change("rules = rules.rules", {"rules": given.rules})
    elif isinstance(given, str):
        try:
            yield change_of_table(subject, "rules", read_rules_expression(given).rules)
        except RuleTypeError:
            return
    elif isinstance(given, Iterable):
        pairs = given.items() if isinstance(given, Mapping) else given
        for meant in (*subject.mesh.shape, None):
            read = [rule for pair in pairs for rule in _rules_of(pair, meant)]
            yield change_of_table(subject, "rules", read)
        read = [rule for pair in pairs for rule in _rules_of(pair)]
        yield change_of_table(subject, "rules", read)


def _rules_of(pair: Any, *meant: Any) -> tuple[Any, ...]:
    """The rule of a pair as it is, with each mesh axis once, or with what may be meant."""
    tried = [pair]
    if isinstance(pair, tuple | list) and len(pair) == 2:
        logical, mesh_axes = pair
        if isinstance(mesh_axes, tuple | list):
            tried.append((logical, tuple(dict.fromkeys(mesh_axes))))
        tried += [(logical, each) for each in meant]
    for each in tried:
        try:
            return AxisRules([each]).rules
        except (RuleTypeError, TypeError):
            pass
    return ()
