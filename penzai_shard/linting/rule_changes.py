"""Changes of rules, layouts and meshes, as lines of code."""

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from penzai_shard.axis_rules import AxisRules
from penzai_shard.errors import RuleTypeError
from penzai_shard.layouts.rule_expressions import read_rules_expression
from penzai_shard.linting.findings import Change
from penzai_shard.linting.lint_subject import LintSubject
from penzai_shard.rule_kinds import Rule


def change_of_table(subject: LintSubject, table: str, rules: Iterable[Rule]) -> Change:
    """Other rules in a table, as an assignment to ``rules`` or ``layout``."""
    return change_of_tables(subject, {table: AxisRules.from_rules(rules)})


def change_of_tables(subject: LintSubject, tables: Mapping[str, AxisRules]) -> Change:
    """Other rules in some tables, as one assignment to ``rules`` or ``layout``."""
    texts = {name: rules_text(rules) for name, rules in tables.items()}
    # What is tried out is what the code says.
    said: dict[str, Any] = {name: _read(texts[name], rules) for name, rules in tables.items()}
    if subject.given_layout is not None:
        layout = dataclasses.replace(subject.given_layout, **said)
        arguments = ", ".join(f"{name}={text}" for name, text in texts.items())
        return Change(f"layout = dataclasses.replace(layout, {arguments})", {"rules": layout})
    ((name, text),) = texts.items()
    # In brackets it may be broken anywhere.
    text = f"({text})" if " | " in text else text
    return Change(f"rules = {text}", {"rules": said[name]})


def _read(text: str, rules: AxisRules) -> AxisRules:
    """The rules that a text says; those that it was made of, if they have names not of literals."""
    try:
        return read_rules_expression(f"AxisRules({text})" if text[0] in "[{" else text)
    except RuleTypeError:
        return rules


def replaced(rules: Sequence[Rule], old: Rule, new: Sequence[Rule]) -> list[Rule]:
    """Rules with others in the place of one.

    >>> rules = AxisRules({"a": "data", "b": "model"}).rules
    >>> replaced(rules, rules[0], []) == [rules[1]]
    True
    """
    return [each for rule in rules for each in (new if rule == old else [rule])]


def rules_text(rules: AxisRules) -> str:
    """Rules as code, as plainly as they can be written.

    >>> rules_text(AxisRules({"neurons": "model"}))
    "{'neurons': 'model'}"
    """
    text = repr(rules)
    is_plain = " | " not in text and text.startswith(("AxisRules({", "AxisRules(["))
    return text.removeprefix("AxisRules(").removesuffix(")") if is_plain else text
