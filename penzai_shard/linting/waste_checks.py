"""Findings about memory that is held several times without need.

An array that is whole over a mesh axis is held as often as that has devices. Often that is meant,
as in data parallel training, or cannot be otherwise. A mesh axis is called free for an array if
the rules leave it whole over it without saying so; ``said_to_be_whole`` says what counts as that.
"""

import dataclasses
import math
from collections.abc import Iterator
from typing import Any

from jax.sharding import PartitionSpec

from penzai_shard.linting.findings import Change, Finding, common_path
from penzai_shard.linting.lint_subject import LintSubject
from penzai_shard.linting.rule_changes import change_of_table, replaced
from penzai_shard.partition_specs import mesh_axes_by_dimension
from penzai_shard.planning import LeafPlan, bytes_text
from penzai_shard.rule_kinds import (
    IdentityRule,
    LargestDimensionRule,
    LogicalAxis,
    NameRule,
    Rule,
    array_text,
)
from penzai_shard.rule_presets import MIN_SIZE, TRANSFORMER_MODEL_AXES


def under_sharded(subject: LintSubject) -> Iterator[Finding]:
    """Large arrays that are whole over a mesh axis which is free for them."""
    alike: dict[tuple[str, str, Any], list[LeafPlan]] = {}
    said = {table: said_to_be_whole(subject, table) for table in subject.storing_tables}
    for leaf in (*subject.plan.leaves, *subject.plan.transient):
        if not leaf.names or leaf.bytes_per_device < subject.min_bytes:
            continue
        table = subject.table_of(leaf.path)
        for axis in _mesh_axes_not_of(subject, leaf):
            if axis not in said[table] and free_dimensions(subject, table, leaf, axis):
                key = (table, axis, (leaf.names, leaf.shape, str(leaf.dtype)))
                alike.setdefault(key, []).append(leaf)
    for (table, axis, _), leaves in alike.items():
        yield _under_sharded(subject, table, axis, leaves)


def _under_sharded(subject: LintSubject, table: str, axis: str, leaves: list[LeafPlan]) -> Finding:
    first, size = leaves[0], subject.mesh.shape[axis]
    paths = tuple(leaf.path for leaf in leaves)
    held = sum(leaf.bytes_per_device for leaf in leaves)
    wasted = sum(leaf.bytes_per_device - leaf.bytes_per_device // size for leaf in leaves)
    of_each = f" of {len(leaves)} such arrays" if len(leaves) > 1 else ""
    return Finding(
        "under-sharded",
        common_path(paths),
        f"{array_text(first.names or (), first.shape)} of {first.dtype} is whole over mesh axis "
        f"{axis!r} ({size}), which is free for it: each device holds {bytes_text(held)}{of_each} "
        f"where {bytes_text(held - wasted)} would do.",
        wasted_bytes=wasted,
        figures={
            "mesh_axis": axis,
            "mesh_axis_size": size,
            "shape": list(first.shape),
            "bytes_per_device": held,
            "bytes_per_device_if_split": held - wasted,
        },
        paths=paths,
        about=f"{table}: {axis!r}",
        changes=_for_splitting(subject, table, first, axis),
    )


def said_to_be_whole(subject: LintSubject, table: str) -> frozenset[str]:
    """The mesh axes over which the rules of a table say that arrays are whole.

    Those of presets, which are meant as they are: alternatives of which an array has none, as in
    tensor parallelism. Those that only activations are split over, as in data parallelism. All,
    if there are no rules.
    """
    rules = subject.tables[table].rules
    if not rules:
        return frozenset(subject.mesh.shape)
    stored = {
        axis
        for leaf in subject.plan.leaves
        if subject.table_of(leaf.path) == table
        for axis in _mesh_axes_of(leaf)
    }
    of_presets = {
        axis
        for rule in rules
        if isinstance(rule, NameRule) and rule.yields
        for axis in rule.mesh_axes
    }
    return frozenset(of_presets | (of_activations(subject) - stored))


def free_dimensions(
    subject: LintSubject, table: str, leaf: LeafPlan, axis: str
) -> list[LogicalAxis]:
    """The logical axes of an array that would divide and that no rule names.

    The longest first; before it, those of which every device can compute a part alone, unless the
    mesh axis is one of the batch.
    """
    rules, size = subject.tables[table].rules, subject.mesh.shape[axis]
    for rule in rules:
        if isinstance(rule, LargestDimensionRule) and axis in rule.mesh_axes:
            # It was looked at, and either is as small as the rule says, or does not divide.
            is_small = math.prod(leaf.shape) < rule.min_size
            if not is_small or rule.min_size <= MIN_SIZE:
                return []
    named = set(subject.tables[table].logical_axes)
    split = [bool(axes) for axes in _by_dimension(leaf)]
    free = [
        (length, name)
        for name, length, is_split in zip(leaf.names or (), leaf.shape, split, strict=True)
        if name is not None and name not in named and not is_split and length % size == 0
    ]
    first = () if axis in of_activations(subject) else TRANSFORMER_MODEL_AXES
    return [name for _, name in sorted(free, key=lambda each: (each[1] not in first, -each[0]))]


def of_activations(subject: LintSubject) -> set[str]:
    """The mesh axes that rules and constraint layers split activations over, such as the batch."""
    arrays = subject.plan.logical_axes
    flowing = subject.batch_axes | subject.flows.logical_axes
    found: set[str] = set()
    for rule in subject.constraints.rules:
        # Without a batch it is not known what flows.
        if rule.logical_axis not in arrays and (rule.logical_axis in flowing or not flowing):
            found.update(rule.mesh_axes)
    for table in subject.tables:
        for rule in subject.name_rules(table):
            name = rule.logical_axis
            is_known = rule.is_for_activations or name in subject.known_axes
            if name not in arrays and is_known:
                found.update(rule.mesh_axes)
    return found


def _mesh_axes_of(leaf: LeafPlan) -> set[str]:
    return {axis for axes in _by_dimension(leaf) for axis in axes}


def _by_dimension(leaf: LeafPlan) -> tuple[tuple[str, ...], ...]:
    """The mesh axes of each dimension of an array; none where JAX is to infer them."""
    return mesh_axes_by_dimension(leaf.spec or PartitionSpec(), len(leaf.shape))


def _mesh_axes_not_of(subject: LintSubject, leaf: LeafPlan) -> list[str]:
    if leaf.spec is None:
        return []
    taken = _mesh_axes_of(leaf)
    return [axis for axis, size in subject.mesh.shape.items() if size > 1 and axis not in taken]


def _for_splitting(subject: LintSubject, table: str, leaf: LeafPlan, axis: str) -> Iterator[Change]:
    """Rules by which an array is split over a mesh axis too."""
    rules = _without_idle_identity(subject, table)
    size = math.prod(leaf.shape)
    for rule in rules:
        if isinstance(rule, LargestDimensionRule) and axis in rule.mesh_axes:
            smaller = dataclasses.replace(rule, min_size=min(MIN_SIZE, size))
            yield change_of_table(subject, table, replaced(rules, rule, [smaller]))
    names = free_dimensions(subject, table, leaf, axis)
    for name in names:
        yield change_of_table(subject, table, [*rules, NameRule(name, (axis,))])
    for name in names:
        # Whole where another dimension has the mesh axis.
        split = [NameRule(name, (axis,)), NameRule(name, ())]
        yield change_of_table(subject, table, [*rules, *split])
    largest = LargestDimensionRule((axis,), min(MIN_SIZE, size))
    yield change_of_table(subject, table, [*rules, largest])


def idle_mesh_axes(subject: LintSubject) -> Iterator[Finding]:
    """Mesh axes that nothing is split over."""
    used = used_mesh_axes(subject)
    for axis, size in subject.mesh.shape.items():
        if size > 1 and axis not in used:
            yield Finding(
                "idle mesh axis",
                "mesh",
                f"nothing is split over mesh axis {axis!r} ({size}): no array, nothing that a "
                "constraint layer pins, and no activation that a rule names. So "
                f"{size} devices each hold and compute the same.",
                figures={"mesh_axis": axis, "mesh_axis_size": size},
                about=axis,
                changes=_for_using(subject, axis),
            )


def used_mesh_axes(subject: LintSubject) -> set[str]:
    """The mesh axes that something is split over, or that a rule asks for which is mended first."""
    used = {axis for leaf in subject.plan.leaves for axis in _mesh_axes_of(leaf)}
    used |= of_activations(subject) | subject.constraints.mesh_axes
    used |= subject.flows.used_mesh_axes
    unfit = {
        (subject.table_of(leaf.path), each.logical_axis)
        for leaf in subject.plan.leaves
        if leaf.names
        for each in subject.decision(leaf).unfit
    }
    for table, rules in subject.tables.items():
        of_layers = table not in subject.storing_tables
        for rule in rules.rules:
            if isinstance(rule, LargestDimensionRule) or (
                isinstance(rule, NameRule)
                and (
                    (table, rule.logical_axis) in unfit
                    or (rule.logical_axis in subject.known_axes and (rule.yields or of_layers))
                )
            ):
                used.update(rule.mesh_axes)
    return used


def _for_using(subject: LintSubject, axis: str) -> Iterator[Change]:
    """Rules that split something over a mesh axis."""
    table = subject.storing_tables[0]
    rules = _without_idle_identity(subject, table)
    weight: dict[LogicalAxis, int] = {}
    is_waste = axis not in said_to_be_whole(subject, table)
    for leaf in subject.plan.leaves:
        for name in free_dimensions(subject, table, leaf, axis) if leaf.names else ():
            weight[name] = weight.get(name, 0) + leaf.bytes_per_device
    by_weight = sorted(weight, key=lambda name: -weight[name])
    if is_waste and any(weight[name] >= subject.min_bytes for name in by_weight):
        for name in by_weight:
            yield change_of_table(subject, table, [*rules, NameRule(name, (axis,))])
    yield from _for_larger_batch(subject, axis)
    for name in by_weight:
        yield change_of_table(subject, table, [*rules, NameRule(name, (axis,))])
    for name in by_weight:
        split = [NameRule(name, (axis,)), NameRule(name, ())]
        yield change_of_table(subject, table, [*rules, *split])


def _without_idle_identity(subject: LintSubject, table: str) -> tuple[Rule, ...]:
    """The rules of a table, without "each logical axis to its namesake" if there is none."""
    rules = subject.given_rules(table)
    if any(IdentityRule.mesh_axes_of(n, subject.mesh.shape) for n in subject.known_axes):
        return rules
    return tuple(rule for rule in rules if not isinstance(rule, IdentityRule))


def _for_larger_batch(subject: LintSubject, axis: str) -> Iterator[Change]:
    """The batch split over one more mesh axis, or over all that nothing is split over."""
    table = "compute" if "compute" in subject.tables else "rules"
    rules = _without_idle_identity(subject, table)
    of_batch = [r for r in rules if isinstance(r, NameRule) and r.logical_axis == "batch"]
    used = used_mesh_axes(subject)
    idle = tuple(each for each, size in subject.mesh.shape.items() if size > 1 and each not in used)
    for added in dict.fromkeys([(axis,), idle]):
        if of_batch:
            more = dataclasses.replace(of_batch[0], mesh_axes=(*of_batch[0].mesh_axes, *added))
            yield change_of_table(subject, table, replaced(rules, of_batch[0], [more]))
        else:
            yield change_of_table(subject, table, [*rules, NameRule("batch", added)])
