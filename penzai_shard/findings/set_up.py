"""Reads what ``lint`` looks at: a model or a train state, its rules or layout, and a batch.

What cannot be read is a finding, and all else is planned without it. So a change of the rules is
tried out as the user would: it is read and planned once more, and offered if that goes better.
"""

import dataclasses
import functools
from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import Any

from jax.sharding import PartitionSpec

from penzai_shard import specs
from penzai_shard.errors import MeshError, Problem, RuleTypeError, ShardingError
from penzai_shard.layouts.layout import Layout
from penzai_shard.layouts.presets import TABLES
from penzai_shard.paths import join_paths, paths_text
from penzai_shard.planning import arguments
from penzai_shard.planning.plan import LeafPlan
from penzai_shard.planning.planner import examine
from penzai_shard.rules import AxisRules, Rule

# Kinds of findings on account of which something fails.
ERRORS = frozenset({"unreadable", "unknown", "taken", "indivisible", "unnamed", "misfit"})
_MOST_PATHS = 4


@dataclasses.dataclass(frozen=True)
class Finding(Problem):
    """One thing that is probably a mistake or a waste.

    Attributes:
        path: Where: the paths of arrays, a layer, ``"rules"``, ``"layout.compute"``, ``"batch"``.
        what: One sentence of fact, without the path and without a full stop.
        fix: What to write instead, with its full stop; ``""`` where that is not evident.
        kind: What code may branch on. Plans fail: ``"unreadable"``, ``"unknown"``, ``"taken"``,
            ``"indivisible"``, ``"unnamed"``, ``"misfit"``. The model cannot be called:
            ``"uncallable"``. Rules: ``"unused"``, ``"under-sharded"``, ``"idle mesh axis"``. What
            flows: ``"whole batch"``, ``"conflict"``. Layers that lay out: ``"idle constraint"``,
            ``"other mesh"``.
        wasted_bytes: What each device holds in vain.
        paths: The arrays or layers that it concerns, if there are several.

    >>> print(Finding("batch", "each device computes all of it", "Split it.", "whole batch"))
    batch: each device computes all of it. Split it.
    """

    wasted_bytes: int = 0
    paths: tuple[str, ...] = ()


def fold_findings(findings: Iterable[Finding]) -> list[Finding]:
    """Findings that say the same of several places as one."""
    alike: dict[tuple[str, str, str], list[Finding]] = {}
    for one in findings:
        alike.setdefault((one.what, one.fix, one.kind), []).append(one)
    folded = []
    for sentences, members in alike.items():
        paths = tuple(dict.fromkeys(one.path for one in members))
        wasted, several = sum(one.wasted_bytes for one in members), paths if len(paths) > 1 else ()
        folded.append(Finding(paths_text(paths, _MOST_PATHS), *sentences, wasted, several))
    return folded


@dataclasses.dataclass(frozen=True)
class SetUp:
    """What is looked at, planned as far as that goes.

    Attributes:
        model: The model or train state.
        request: Mesh and options.
        layout: The layout, if there is one.
        given: The tables of rules as they were given, by name: ``"rules"``, or fields of a layout.
        tables: The same without rules for unknown mesh axes, in the model's own names.
        rows: The plan of each array.
        problems: What cannot be read or planned.
    """

    model: Any
    request: arguments.Request
    layout: Layout | None
    given: Mapping[str, AxisRules]
    tables: Mapping[str, AxisRules]
    rows: Sequence[LeafPlan]
    problems: Sequence[Problem]

    @property
    def mesh(self) -> Any:
        """The mesh, with Auto axes."""
        return self.request.mesh

    @property
    def of_activations(self) -> str:
        """The name of the table for what flows."""
        return "rules" if self.layout is None else "compute"

    @functools.cached_property
    def logical_axes(self) -> frozenset[Hashable]:
        """The names that arrays of the model have."""
        return frozenset(name for row in self.rows for name in row.names or () if name is not None)

    def split(self, row: LeafPlan) -> dict[Hashable, tuple[str, ...]]:
        """The mesh axes of each dimension of an array that is split, by its name or number."""
        names = row.names or range(len(row.shape))
        return split_axes(names, row.spec or PartitionSpec(), self.mesh)

    def axes_of(self, row: LeafPlan) -> set[str]:
        """The mesh axes that split an array."""
        return {axis for axes in self.split(row).values() for axis in axes}

    @functools.cached_property
    def stored_axes(self) -> set[str]:
        """The mesh axes that split an array, or that a rule keeps for larger ones."""
        every = [rule for rules in self.tables.values() for rule in rules.rules]
        by_size = {axis for r in every if r.logical_axis is None for axis in r.mesh_axes}
        return by_size.union(*map(self.axes_of, self.rows))

    def offer(self, table: str, rules: Any) -> str:
        """The sentence that puts other rules in the place of a table's.

        Args:
            table: The name of the table.
            rules: The other rules.

        Returns:
            ``""`` for a layout, or if they cannot be written or a plan by them has a new problem.
        """
        changed = AxisRules(rules)
        text = _write_rules(self.given[table], changed)
        # Of a layout, options are to be changed, which rules do not tell.
        if self.layout is not None or not text:
            return ""
        after = read_set_up(self.model, self.request, changed)
        both = self.problems, after.problems
        before, now = ({(x.kind, x.path, x.what) for x in problems} for problems in both)
        return f"Write rules={text}." if now <= before else ""


def table_path(table: str) -> str:
    """What a table of rules is called in findings."""
    return table if table == "rules" else f"layout.{table}"


def read_set_up(model: Any, request: arguments.Request, rules: Any) -> SetUp:
    """Reads rules in any form, or a layout, and plans by them."""
    problems: list[Problem] = []

    def note(error: ShardingError, path: str, kind: str) -> None:
        for own in error.problems:
            problems.append(Problem(join_paths(path, own.path), own.what, own.fix, kind))

    layout = rules if isinstance(rules, Layout) else None
    given = {"rules": AxisRules({})}
    if layout is not None:
        fields = {name: getattr(layout, name) for name in TABLES}
        given = {name: table for name, table in fields.items() if table is not None}
    else:
        try:
            given = {"rules": arguments.read("lint", request.mesh, rules).rules}
        except MeshError:
            given = {"rules": AxisRules(rules)}
        except RuleTypeError as error:
            note(error, "rules", "unreadable")

    # Rules for mesh axes that there are not are left out.
    tables, sizes = {}, request.mesh.shape
    for name, table in given.items():
        try:
            table.on(sizes)
        except MeshError as error:
            note(error, table_path(name), "unknown")
        tables[name] = AxisRules([r for r in table.rules if {*r.mesh_axes} <= sizes.keys()])
    if layout is not None:
        known: Any = tables
        try:
            named = dataclasses.replace(layout, **known).for_model(model, request.mesh)
            tables = {name: getattr(named, name) for name in tables}
        except ShardingError as error:
            note(error, "layout", "misfit")

    rows: list[LeafPlan] = []
    for name in ("rules", "parameters", "optimizer"):
        if name in tables:
            own_request = dataclasses.replace(request, rules=tables[name])
            plan, found, _ = examine(model, own_request)
            rows += [row for row in plan.leaves if table_of(row.path, tables) == name]
            problems += [own for own in found if table_of(own.path, tables) == name]
    return SetUp(model, request, layout, given, tables, rows, problems)


def table_of(path: str, tables: Mapping[str, AxisRules]) -> str:
    """The name of the table by which an array is stored."""
    if "optimizer" in tables and path.partition("/")[0] == "opt_state":
        return "optimizer"
    return "rules" if "rules" in tables else "parameters"


def split_axes(
    names: Sequence[Hashable | None] | None, spec: Any, mesh: Any
) -> dict[Hashable, tuple[str, ...]]:
    """The mesh axes, of more than one device, that split each logical axis of an array.

    >>> from jax.sharding import PartitionSpec
    >>> from penzai_shard.meshes import make_mesh
    >>> mesh = make_mesh({"data": 4, "pipe": 1}, abstract=True)
    >>> split_axes(("batch", "seq"), PartitionSpec("data", "pipe"), mesh)
    {'batch': ('data',)}
    """
    axes = specs.mesh_axes(spec, len(names)) if names and spec else ()
    pairs = zip(names or (), axes, strict=False)
    used = {name: tuple(a for a in own if mesh.shape[a] > 1) for name, own in pairs}
    return {name: own for name, own in used.items() if name is not None and own}


def _write_rules(old: AxisRules, new: AxisRules) -> str:
    """Other rules as an expression of Python; ``""`` where there is no short one."""
    is_plain = all(rule == Rule(rule.logical_axis or "", rule.mesh_axes) for rule in new.rules)
    # Presets stay as they are.
    written = new.rules if is_plain else [rule for rule in new.rules if rule not in old.rules]
    table: dict[Hashable, Any] = {}
    for rule in written:
        first, *others = rule.mesh_axes or (None,)
        table[rule.logical_axis] = rule.mesh_axes if others else first
    if None in table:
        return ""
    text, meaning = repr(table), AxisRules(table)
    if not is_plain:
        text, meaning = f"AxisRules({table}) | rules", meaning | old
    return text if meaning == new else ""
