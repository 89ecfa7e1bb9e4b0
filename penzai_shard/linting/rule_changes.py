"""Changes of rules, layouts and meshes, as lines of code."""

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from jax.sharding import Mesh

from penzai_shard.axis_rules import AxisRules
from penzai_shard.linting.findings import Change
from penzai_shard.linting.lint_subject import LintSubject
from penzai_shard.meshes import make_mesh
from penzai_shard.rule_kinds import NameRule, Rule, mesh_axes_text


def change_of_table(subject: LintSubject, table: str, rules: Iterable[Rule]) -> Change:
    """Other rules in a table, as an assignment to ``rules`` or ``layout``."""
    return change_of_tables(subject, {table: AxisRules.from_rules(rules)})


def change_of_tables(subject: LintSubject, tables: Mapping[str, AxisRules]) -> Change:
    """Other rules in some tables, as one assignment to ``rules`` or ``layout``."""
    if subject.given_layout is not None:
        given: dict[str, Any] = dict(tables)
        layout = dataclasses.replace(subject.given_layout, **given)
        said = ", ".join(f"{name}={rules_text(rules)}" for name, rules in tables.items())
        return Change(f"layout = dataclasses.replace(layout, {said})", {"rules": layout})
    (rules,) = tables.values()
    text = rules_text(rules)
    # In brackets it may be broken anywhere.
    return Change(f"rules = ({text})" if " | " in text else f"rules = {text}", {"rules": rules})


def replaced(rules: Sequence[Rule], old: Rule, new: Sequence[Rule]) -> list[Rule]:
    """Rules with others in the place of one.

    >>> replaced([NameRule("a", ()), NameRule("b", ())], NameRule("a", ()), [])
    [NameRule(logical_axis='b', mesh_axes=(), yields=False, for_activations=False)]
    """
    return [each for rule in rules for each in (new if rule == old else [rule])]


def rules_text(rules: AxisRules) -> str:
    """Rules as code, as plainly as they can be written."""
    names = [rule for rule in rules.rules if isinstance(rule, NameRule) and not rule.yields]
    if len(names) < len(rules.rules):
        return repr(rules)
    pairs = [(rule.logical_axis, mesh_axes_text(rule.mesh_axes)) for rule in names]
    if len({name for name, _ in pairs}) == len(pairs):
        return "{" + ", ".join(f"{name!r}: {axes}" for name, axes in pairs) + "}"
    return "[" + ", ".join(f"({name!r}, {axes})" for name, axes in pairs) + "]"


def change_of_mesh(subject: LintSubject, shape: dict[str, int]) -> Change:
    """Another mesh, abstract or of the same devices."""
    if isinstance(subject.mesh, Mesh):
        mesh = make_mesh(shape, list(subject.mesh.devices.flat))
        return Change(f"mesh = make_mesh({shape!r}, list(mesh.devices.flat))", {"mesh": mesh})
    abstract = make_mesh(shape, abstract=True)
    return Change(f"mesh = make_mesh({shape!r}, abstract=True)", {"mesh": abstract})
