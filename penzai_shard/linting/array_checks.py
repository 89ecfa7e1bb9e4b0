"""Findings about arrays whose rules cannot be followed."""

import dataclasses
import itertools
from collections.abc import Iterator

from penzai_shard.axis_decisions import UnfitAxis
from penzai_shard.linting.findings import Change, Finding, FindingKind, common_path
from penzai_shard.linting.lint_subject import LintSubject
from penzai_shard.linting.rule_changes import change_of_table
from penzai_shard.linting.split_axes import axis_sizes
from penzai_shard.linting.waste_checks import of_activations
from penzai_shard.partition_specs import part_count
from penzai_shard.planning import LeafPlan
from penzai_shard.planning.rule_doubts import nameless_module_doubts
from penzai_shard.rule_kinds import LargestDimensionRule, NameRule, Rule
from penzai_shard.rule_presets import MIN_SIZE


def unfit_axes(subject: LintSubject) -> Iterator[Finding]:
    """Lengths that do not divide, and mesh axes that two dimensions ask for."""
    alike: dict[tuple[str, UnfitAxis], list[LeafPlan]] = {}
    for leaf in subject.plan.leaves:
        for unfit in subject.decision(leaf).unfit if leaf.names else ():
            alike.setdefault((subject.table_of(leaf.path), unfit), []).append(leaf)
    for (table, unfit), leaves in alike.items():
        paths = tuple(leaf.path for leaf in leaves)
        sizes = axis_sizes(leaves[0].names, leaves[0].shape)
        yield Finding(
            unfit.misfit,
            common_path(paths),
            unfit.problem,
            figures={"logical_axis": str(unfit.logical_axis), "size": sizes[unfit.logical_axis]},
            paths=paths,
            about=f"{table}: {unfit.logical_axis!r}",
            changes=_for_fitting_axes(subject, table, unfit, sizes[unfit.logical_axis]),
        )


def _for_fitting_axes(
    subject: LintSubject, table: str, unfit: UnfitAxis, size: int
) -> Iterator[Change]:
    """Other mesh axes for a logical axis, or none; then something else in its place."""
    name, shape = unfit.logical_axis, subject.mesh.shape
    rules = [r for r in subject.tables[table].rules if not _names(r, name)]
    own = [r for r in subject.tables[table].rules if _names(r, name)]
    wanted = tuple(dict.fromkeys(axis for rule in own for axis in rule.mesh_axes))

    def change(*added: NameRule) -> Change:
        return change_of_table(subject, table, _in_place(subject.given_rules(table), name, added))

    # Some of the mesh axes that it asked for.
    for count in reversed(range(1, len(wanted))):
        for some in itertools.combinations(wanted, count):
            if size % part_count(some, shape) == 0:
                yield change(NameRule(name, some))
    busy = {*wanted, *of_activations(subject)}
    others = [axis for axis in shape if axis not in busy and shape[axis] > 1]
    if unfit.misfit == "doubled":
        yield from (change(NameRule(name, (axis,))) for axis in others if size % shape[axis] == 0)
        # Where the mesh axis is free it is split all the same.
        kept = [rule for rule in own if isinstance(rule, NameRule)]
        yield change(*kept, NameRule(name, ()))
    yield change(NameRule(name, ()))
    sizes = _sizes_beside(subject, name)
    for other in sorted(sizes, key=lambda each: -sizes[each]):
        if not any(_names(rule, other) for rule in rules):
            for axis in wanted:
                split = [NameRule(other, (axis,)), NameRule(other, ())]
                yield change(NameRule(name, ()), split[0])
                yield change(NameRule(name, ()), *split)
    yield from (change(NameRule(name, (axis,))) for axis in others if size % shape[axis] == 0)


def _names(rule: Rule, name: object) -> bool:
    return isinstance(rule, NameRule) and rule.logical_axis == name


def _in_place(rules: tuple[Rule, ...], name: object, added: tuple[NameRule, ...]) -> list[Rule]:
    """Rules with others in the place of those for a logical axis."""
    made: list[Rule] = []
    for rule in rules:
        if not _names(rule, name):
            made.append(rule)
        elif added:
            made += added
            added = ()
    return [*made, *added]


def _sizes_beside(subject: LintSubject, name: object) -> dict[object, int]:
    """The other logical axes of the arrays that have one, with the largest length of each."""
    sizes: dict[object, int] = {}
    for leaf in subject.plan.leaves:
        if leaf.names and name in leaf.names:
            for other, size in zip(leaf.names, leaf.shape, strict=True):
                if other not in (None, name):
                    sizes[other] = max(size, sizes.get(other, 0))
    return sizes


def other_problems(subject: LintSubject) -> Iterator[Finding]:
    """Arrays without names, and what else stands in the way of a plan."""
    leaves = {leaf.path: leaf for leaf in subject.plan.leaves}
    alike: dict[tuple[FindingKind, str], list[tuple[str, str]]] = {}
    for path, problem in subject.problems:
        leaf = leaves[path]
        if leaf.names and problem in subject.decision(leaf).problems:
            continue
        is_unnamed = leaf.names is None and leaf.dtype is not None
        key: tuple[FindingKind, str] = ("unnamed", "") if is_unnamed else ("misfit", problem)
        alike.setdefault(key, []).append((path, problem))
    for (kind, about), members in alike.items():
        paths, problem = [path for path, _ in members], members[0][1]
        yield Finding(
            kind,
            common_path(tuple(paths)),
            problem,
            paths=tuple(paths),
            about=about,
            changes=_for_unnamed(subject) if kind == "unnamed" else (),
        )
    for doubt in nameless_module_doubts(subject.plan):
        yield Finding("unnamed", "model", doubt, changes=_for_unnamed(subject))


def _for_unnamed(subject: LintSubject) -> Iterator[Change]:
    """Rules that split arrays without names too, along their largest dimension."""
    for table in subject.storing_tables[:1]:
        rules = subject.given_rules(table)
        largest = [rule for rule in rules if isinstance(rule, LargestDimensionRule)]
        if largest:
            changed = [
                dataclasses.replace(rule, splits_unnamed=True) if rule in largest else rule
                for rule in rules
                if isinstance(rule, LargestDimensionRule) or rule not in largest
            ]
            yield change_of_table(subject, table, changed)
            continue
        for axis, size in subject.mesh.shape.items():
            if size > 1:
                added = LargestDimensionRule((axis,), MIN_SIZE, splits_unnamed=True)
                yield change_of_table(subject, table, [*rules, added])
