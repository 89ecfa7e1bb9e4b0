"""Finds what is wrong in rules and in the plan by them: errors, rules for nothing, and waste.

An array wastes memory if it is whole over a mesh axis although nobody said so: neither a rule that
maps its axes to None, nor a preset that splits by that mesh axis, nor the batch, for which arrays
are copies on purpose.
"""

import dataclasses
import functools
import itertools
import math
from collections.abc import Collection, Hashable, Iterator

from penzai_shard.findings.set_up import Finding, SetUp, table_of, table_path
from penzai_shard.planning.plan import LeafPlan
from penzai_shard.planning.planner import find_near_name
from penzai_shard.rules import TRANSFORMER_AXES, AxisRules, Rule

# Usual names of axes along which results depend on one another; only activations have them.
SEQUENCE_AXES = frozenset(
    {"seq", "sequence", "kv_seq", "tokens", "kv_tokens", "positions", "time", "length"}
)
# What presets leave whole by default is not worth splitting.
_MOST_WHOLE = 2**18


def is_for_activations(rule: Rule) -> bool:
    """Whether no array of a model is expected to have the logical axis of a rule."""
    name = rule.logical_axis
    is_named_so = isinstance(name, str) and name.startswith(("activation_", "act_"))
    return rule.for_activations or is_named_so or name in SEQUENCE_AXES | {"batch"}


def find_near_names(rules: AxisRules, present: Collection[Hashable]) -> dict[Rule, str]:
    """The rules for names that are not there and are nearly one that is there and has no rule.

    >>> find_near_names(AxisRules({"neuron": "data", "batch": "data"}), ["neurons"])
    {Rule(logical_axis='neuron', mesh_axes=('data',), ...): 'neurons'}
    """
    # The names of a preset are alternatives.
    asked = [rule for rule in rules.rules if not rule.optional]
    return {rule: near for rule in asked if (near := find_near_name(rule, rules, present))}


# Rules for nothing


def find_unused(set_up: SetUp, known: Collection[Hashable]) -> Iterator[Finding]:
    """Rules whose logical axis nothing has, and presets of which nothing has any.

    Args:
        set_up: What is looked at.
        known: The logical axes of all that is known: arrays, batch, what flows.
    """
    names = ", ".join(map(repr, sorted(known, key=str))) or "none"
    for table, rules in set_up.tables.items():
        path, near = table_path(table), find_near_names(rules, known)
        first = {rule.logical_axis: rule for rule in reversed(rules.rules)}
        for rule in rules.rules:
            name, meant = rule.logical_axis, near.get(rule)
            is_harmless = not rule.mesh_axes or rule.optional or is_for_activations(rule)
            if rule.mesh_axes and not first[name].mesh_axes:
                what = f"rule {rule} never applies: one before maps {name!r} to None"
            elif meant:
                what = f"rule {rule} names no logical axis; the nearest is {meant!r}"
            elif name is None or name in known or is_harmless:
                continue
            else:
                what = f"rule {rule} names no logical axis; there are {names}"
            instead = [dataclasses.replace(rule, logical_axis=meant)] if meant else []
            own = [[other] if other != rule else instead for other in set_up.given[table].rules]
            fix = set_up.offer(table, itertools.chain.from_iterable(own)) if known else ""
            yield Finding(path, what, fix, "unused")
        # The names of a preset are alternatives.
        presets = [rule for rule in rules.rules if rule.optional]
        for axes in dict.fromkeys(rule.mesh_axes for rule in presets):
            given = [rule.logical_axis for rule in presets if rule.mesh_axes == axes]
            if known and {*given}.isdisjoint(known):
                what = f"no logical axis is one of {given}, to be split over {axes}; "
                what += f"there are {names}"
                yield Finding(path, what, "Name those that are to be split.", "unused")


# Waste


def find_waste(
    set_up: SetUp, known: Collection[Hashable], used: set[str], min_bytes: int
) -> Iterator[Finding]:
    """Large arrays that are whole over a free mesh axis, and mesh axes that split nothing.

    Args:
        set_up: What is looked at, all of it planned.
        known: As for ``find_unused``.
        used: The mesh axes over which something that flows is split.
        min_bytes: Below this an array is not worth a finding.
    """
    used = {*used}
    for table, rules in set_up.tables.items():
        for rule in rules.rules:
            name = rule.logical_axis
            # A preset splits where that is worth it, and a layout what flows.
            may_split = rule.optional or table in ("compute", "between_blocks")
            is_at_work = name in known or is_for_activations(rule)
            if is_at_work and (may_split or name not in set_up.logical_axes):
                used.update(rule.mesh_axes)
    yield from _find_whole_arrays(set_up, used, min_bytes)
    for axis, size in set_up.mesh.shape.items():
        if size > 1 and axis not in used | set_up.stored_axes:
            what = f"nothing is split over mesh axis {axis!r}: {size} devices each hold and compute"
            yield Finding("mesh", f"{what} the same", kind="idle mesh axis")


def _find_whole_arrays(set_up: SetUp, of_flows: set[str], min_bytes: int) -> Iterator[Finding]:
    sizes = set_up.mesh.shape
    on_purpose = {table: _find_whole_axes(set_up, table, of_flows) for table in set_up.tables}

    @functools.cache  # An offer is planned, and equal arrays have the same.
    def offer(table: str, name: Hashable, axis: str) -> str:
        return set_up.offer(table, AxisRules({name: axis}) | set_up.given[table])

    for row in set_up.rows:
        table = table_of(row.path, set_up.tables)
        if row.spec is None or row.bytes_per_device < min_bytes:
            continue
        asked = {axis for axis in sizes if _is_asked(set_up, set_up.tables[table], row, axis)}
        split = set_up.axes_of(row) | on_purpose[table]
        # One mesh axis of an array at a time: two may want the same dimension.
        for axis in sorted(sizes, key=lambda x: (x not in asked, -sizes[x])):
            name = None if axis in asked else _find_free_name(set_up, table, row, axis)
            is_wasted = name is not None or axis in asked or {*(row.names or ())} <= {None}
            if is_wasted and sizes[axis] > 1 and axis not in split:
                why = f": {row.reason}" if name is None else f", which could split {name!r}"
                what = f"whole over mesh axis {axis!r} ({sizes[axis]}){why}"
                fix = "" if name is None else offer(table, name, axis)
                saved = row.bytes_per_device - row.bytes_per_device // sizes[axis]
                yield Finding(row.path, what, fix, "under-sharded", saved)
                break


def _find_whole_axes(set_up: SetUp, table: str, of_flows: set[str]) -> set[str]:
    """The mesh axes over which arrays are whole on purpose: those of presets and of the batch."""
    rules = set_up.tables[table].rules
    if not rules:
        return {*set_up.mesh.shape}
    rows = (row for row in set_up.rows if table_of(row.path, set_up.tables) == table)
    stored = {axis for row in rows for axis in set_up.axes_of(row)}
    presets = {axis for rule in rules if rule.optional for axis in rule.mesh_axes}
    return presets | (of_flows - stored)


def _is_asked(set_up: SetUp, rules: AxisRules, row: LeafPlan, axis: str) -> bool:
    """Whether a rule is to split an array over a mesh axis: by a name, or its largest dimension."""
    asking = [rule for rule in rules.rules if axis in rule.mesh_axes]
    whole = {rule.logical_axis for rule in rules.rules if not rule.mesh_axes}
    names = {*(row.names or ())} - whole - {*set_up.split(row), None}
    sizes = [rule.min_size for rule in asking if rule.logical_axis is None]
    is_preset = any(math.prod(row.shape) >= size or size <= _MOST_WHOLE for size in sizes)
    return is_preset or any(rule.logical_axis in names for rule in asking)


def _find_free_name(set_up: SetUp, table: str, row: LeafPlan, axis: str) -> Hashable | None:
    """The best logical axis of an array to split, of those that no rule names and that divide."""
    rules, size = set_up.tables[table], set_up.mesh.shape[axis]
    known = {*rules.logical_axes, *set_up.split(row), None}
    pairs = zip(row.names or (), row.shape, strict=False)
    free = {name: n for name, n in pairs if name not in known and n % size == 0}
    # Devices compute parts of these by themselves; of others the longest has the most to split.
    return min(free, key=lambda name: (name not in TRANSFORMER_AXES, -free[name]), default=None)
