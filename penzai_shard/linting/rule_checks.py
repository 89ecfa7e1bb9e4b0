"""Findings about rules by themselves: mesh axes and logical axes that there are not."""

import dataclasses
import difflib
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from penzai_shard.axis_rules import AxisRules
from penzai_shard.layouts.model_roles import DEFAULT_NAMES, OF_LAYERS
from penzai_shard.linting.findings import Change, Finding
from penzai_shard.linting.lint_subject import LintSubject
from penzai_shard.linting.rule_changes import change_of_table, change_of_tables, replaced
from penzai_shard.planning.rule_doubts import near_names, tuples_of_mesh_axes
from penzai_shard.rule_kinds import NameRule, Rule, meant_name, mesh_axes_text, nearest_name


def unknown_mesh_axes(subject: LintSubject) -> Iterator[Finding]:
    """Rules for mesh axes that the mesh does not have; for each mesh axis the first of them."""
    found: dict[str, list[tuple[str, Rule]]] = {}
    for table, rules in subject.given_tables.items():
        for rule in rules.rules:
            for missing in rule.mesh_axes:
                if missing not in subject.mesh.shape:
                    found.setdefault(missing, []).append((table, rule))
    for missing, members in found.items():
        (table, rule), others = members[0], members[1:]
        single = dataclasses.replace(rule, mesh_axes=(missing,))
        (problem,) = AxisRules.from_rules([single]).mesh_problems(subject.mesh)
        also = ", ".join(
            dict.fromkeys(f"rule {rule}" for _, rule in others if rule != members[0][1])
        )
        yield Finding(
            "unknown",
            _name(table),
            problem.replace(str(single), str(rule)) + (f" So do {also}." if also else ""),
            figures={"mesh_axis": missing, "rules": [str(rule) for _, rule in members]},
            about=missing,
            changes=_for_known_mesh_axes(subject, missing, members),
        )


def _for_known_mesh_axes(
    subject: LintSubject, missing: str, members: list[tuple[str, Rule]]
) -> Iterator[Change]:
    """The rules for the mesh axis that was meant, for another one, or for none."""
    shape = subject.mesh.shape

    def change(put: Callable[[Rule], list[Rule]]) -> Change:
        tables = dict(subject.given_tables)
        for table, rule in members:
            changed = replaced(tables[table].rules, rule, put(rule))
            tables[table] = AxisRules.from_rules(changed)
        return change_of_tables(subject, {table: tables[table] for table, _ in members})

    def with_axes(rule: Rule, *mesh_axes: str) -> list[Rule]:
        changed: Any = dataclasses.replace(rule, mesh_axes=tuple(dict.fromkeys(mesh_axes)))
        return [changed]

    def renamed(name: str) -> Change:
        new = {missing: name}
        return change(lambda rule: with_axes(rule, *(new.get(a, a) for a in rule.mesh_axes)))

    if near := nearest_name(missing, shape):
        yield dataclasses.replace(renamed(near), is_meant=True)
    if all(isinstance(rule, NameRule) and rule.logical_axis in shape for _, rule in members):
        yield change(
            lambda rule: (
                [NameRule(missing, (str(rule.logical_axis),))] if isinstance(rule, NameRule) else []
            )
        )
    named = {a for rules in subject.given_tables.values() for r in rules.rules for a in r.mesh_axes}
    # First those that no rule speaks of.
    for name in sorted(shape, key=lambda each: each in named):
        yield renamed(name)
    kept = {missing: ()}
    yield change(
        lambda rule: [
            made
            for made in with_axes(rule, *(a for a in rule.mesh_axes if a not in kept))
            if made.mesh_axes or isinstance(made, NameRule)
        ]
    )
    yield change(lambda rule: [])


def unused_rules(subject: LintSubject) -> Iterator[Finding]:
    """Rules whose logical axis neither an array nor the batch nor a constraint layer has."""
    for table, rules in subject.tables.items():
        near = near_names(rules, subject.known_axes)
        free = subject.known_axes - set(rules.logical_axes)
        unused: dict[Any, list[NameRule]] = {}
        for rule in subject.name_rules(table):
            is_odd = rule in near or not rule.is_expected_to_be_unused
            if rule.logical_axis not in subject.known_axes and is_odd:
                unused.setdefault(rule.logical_axis, []).append(rule)
        for name, alike in unused.items():
            meant = near.get(alike[0]) or meant_name(name, free)
            hint = f"Did you mean {meant!r}?" if meant else "Leave it out."
            if not subject.plan.logical_axes:
                hint = "Give names to the arrays, name_axes(tree, {...}), or leave it out."
            listed = ", ".join(dict.fromkeys(f"rule {rule}" for rule in alike))
            yield Finding(
                "unused",
                _name(table),
                f"{listed}: no array has logical axis {name!r}; there are "
                f"{_listed(subject.plan.logical_axes)}. {hint}",
                about=repr(name),
                changes=_for_used_rules(subject, table, name, meant),
            )
        yield from _presets_of_nothing(subject, table)


def _presets_of_nothing(subject: LintSubject, table: str) -> Iterator[Finding]:
    """Presets none of whose alternatives anything has."""
    alternatives: dict[tuple[str, ...], list[NameRule]] = {}
    for rule in subject.name_rules(table):
        if rule.yields and not rule.is_for_activations:
            alternatives.setdefault(rule.mesh_axes, []).append(rule)
    for mesh_axes, rules in alternatives.items():
        names = [rule.logical_axis for rule in rules]
        if subject.known_axes.isdisjoint(names):
            kept = [rule for rule in subject.given_rules(table) if rule not in rules]
            yield Finding(
                "unused",
                _name(table),
                f"rules {_listed(names)} -> {mesh_axes_text(mesh_axes)}: no array has any of these "
                f"logical axes; there are {_listed(subject.plan.logical_axes)}. Name those that "
                "are to be split: tensor_parallel(axes=(...)).",
                about=f"{mesh_axes}: {names}",
                changes=tuple(
                    change_of_table(subject, table, [*kept, *added])
                    for added in (
                        *([NameRule(name, mesh_axes)] for name in subject.plan.logical_axes),
                        [],
                    )
                ),
            )


def _for_used_rules(
    subject: LintSubject, table: str, name: Any, meant: str | None
) -> Iterator[Change]:
    """The rules for the logical axis that was meant, or no such rules."""
    rules = subject.given_rules(table)
    unused = {rule for rule in rules if isinstance(rule, NameRule) and rule.logical_axis == name}
    if meant is not None:
        renamed: list[Any] = [
            dataclasses.replace(rule, logical_axis=meant)
            if isinstance(rule, NameRule) and rule in unused
            else rule
            for rule in rules
        ]
        yield dataclasses.replace(change_of_table(subject, table, renamed), is_meant=True)
    yield change_of_table(subject, table, [rule for rule in rules if rule not in unused])


def names_of_mesh_axes(subject: LintSubject) -> Iterator[Finding]:
    """Logical axes that are tuples of mesh axes, and which no rule names."""
    for table in subject.storing_tables:
        rules = subject.tables[table]
        found = tuples_of_mesh_axes(rules, subject.mesh, subject.plan.logical_axes)
        for name, axes in found.items():
            known = tuple(axis for axis in axes if axis in subject.mesh.shape)
            added = NameRule(name, known)
            yield Finding(
                "misfit",
                _name(table),
                f"no rule names logical axis {name!r}, a tuple of mesh axes, which therefore stays "
                f"whole. If it means these, say so: ({name!r}, {mesh_axes_text(known)}).",
                about=str(name),
                changes=tuple(
                    change_of_table(subject, table, [*subject.given_rules(table), each])
                    for each in (added, NameRule(name, ()))
                ),
            )


def layout_problems(subject: LintSubject) -> Iterator[Finding]:
    """Why a layout does not fit the model."""
    for kind, problem in subject.layout_problems:
        yield Finding(kind, "layout", problem, about=problem, changes=_for_fitting_layout(subject))


def _for_fitting_layout(subject: LintSubject) -> Iterator[Change]:
    """Other names for the roles that a layout speaks of; None for one that stays whole."""
    layout = subject.given_layout
    assert layout is not None
    present = subject.plan.logical_axes
    tried: list[dict[str, Any]] = []
    for role in (*layout.names, *DEFAULT_NAMES):
        said = str(layout.names.get(role, role))
        if layout.names.get(role, role) in present:
            tried.append({**layout.names, role: None})
            continue
        like = sorted(present, key=lambda name: -_likeness(said, name))
        near = nearest_name(said, present)
        tried += [{**layout.names, role: near}] if near else []
        tried.append({**layout.names, role: None})
        tried += [{**layout.names, role: name} for name in like]
    whole = dict.fromkeys(OF_LAYERS)
    tried.append({**layout.names, **whole})
    tried += [
        {**layout.names, **whole, role: name}
        for role in OF_LAYERS
        for name in sorted(present, key=lambda name: -_likeness(role, name))
    ]
    for names in tried:
        changed = dataclasses.replace(layout, names=names)
        code = f"layout = dataclasses.replace(layout, names={names!r})"
        yield Change(code, {"rules": changed})


def _likeness(name: str, other: Any) -> float:
    return difflib.SequenceMatcher(None, name, str(other)).ratio()


def _name(table: str) -> str:
    """What a table is called in the code of who made it."""
    return "rules" if table == "rules" else f"layout.{table}"


def _listed(names: Iterable[Any]) -> str:
    return ", ".join(map(repr, sorted(names, key=str))) or "none"
