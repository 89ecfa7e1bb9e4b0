"""What a linter looks at, and the plan of it as far as there is one."""

import dataclasses
import functools
import warnings
from collections.abc import Mapping
from typing import Any, TypeAlias

from penzai_shard.axis_decisions import SpecExplanation
from penzai_shard.axis_rules import AxisRules
from penzai_shard.errors import PlanError, RuleTypeError, ShardingError, ShardingWarning
from penzai_shard.layouts import Layout
from penzai_shard.layouts.layout_file import TABLES
from penzai_shard.layouts.model_roles import DEFAULT_NAMES, OF_LAYERS
from penzai_shard.linting.constraint_layers import Constraints, constraints_in
from penzai_shard.linting.equal_blocks import without_repeated_blocks
from penzai_shard.linting.findings import FindingKind
from penzai_shard.linting.subject_flows import SubjectFlows
from penzai_shard.meshes import AnyMesh
from penzai_shard.named_leaves import leaves_of
from penzai_shard.planning import LeafPlan, PlanRequest, ShardingPlan
from penzai_shard.rule_kinds import LogicalAxis, NameRule, OnIndivisible, OnUnnamed, Rule

# From so large a part of an array in each device on, it is called wasteful by default.
MIN_BYTES = 2**20
# The tables of a layout that are about arrays which are stored, and those about activations.
# The field of a train state that a layout has a table of its own for.
_OPTIMIZER_STATE = "opt_state"

LayoutProblems: TypeAlias = tuple[tuple[FindingKind, str], ...]


@dataclasses.dataclass(frozen=True, eq=False)
class LintSubject:
    """A model, a mesh, rules and a batch, as they were given to ``lint``.

    What follows from them is worked out when it is asked for, and raises nothing: rules that cannot
    be followed are left out of the plan, and stand in ``problems``.

    Attributes:
        model: A model or a train state, concrete or abstract.
        mesh: The mesh.
        rules: Rules in any form, or a ``Layout``, or something else.
        batch: What the model is called with, concrete or abstract; None if it is not known.
        min_bytes: How large a part a device must hold of an array for it to be called wasteful.
        on_indivisible: As for ``make_plan``.
        on_unnamed: As for ``make_plan``.
        sampled: Whether one of each of the model's equal blocks stands for all of them, as where
            changes are tried out.
        shared: What depends on ``model`` and ``batch`` alone, kept while other rules are tried.
    """

    model: Any
    mesh: AnyMesh
    rules: Any
    batch: Any = None
    min_bytes: int = MIN_BYTES
    on_indivisible: OnIndivisible = "error"
    on_unnamed: OnUnnamed = "error"
    sampled: bool = False
    shared: dict[str, Any] = dataclasses.field(default_factory=dict)

    def changed(self, fields: Mapping[str, Any]) -> "LintSubject":
        """The same with other values of some fields."""
        shared = self.shared
        if {"model", "batch"} & fields.keys():
            # What was traced says itself of which model and batch.
            shared = {"traces": self.shared.setdefault("traces", [])}
        return dataclasses.replace(self, **{"shared": shared, **fields})

    @property
    def sample(self) -> Any:
        """The arrays of the model, without repeated blocks; not a model."""
        if "sample" not in self.shared:
            self.shared["sample"] = without_repeated_blocks(self.model)
        return self.shared["sample"]

    @property
    def given_layout(self) -> Layout | None:
        """The layout, as it was given; None if rules were."""
        return self.rules if isinstance(self.rules, Layout) else None

    @functools.cached_property
    def given_tables(self) -> Mapping[str, AxisRules]:
        """The rules by the name of their table, as given; one table, ``rules``, without a layout.

        Empty if they cannot be read, which ``unreadable`` says.
        """
        if self.given_layout is None:
            try:
                return {"rules": AxisRules.of(self.rules)}
            except RuleTypeError:
                return {}
        tables = {name: getattr(self.given_layout, name) for name in TABLES}
        return {name: rules for name, rules in tables.items() if rules is not None}

    @functools.cached_property
    def unreadable(self) -> tuple[str, ...]:
        """Why the rules cannot be read; empty if they can."""
        if self.given_layout is not None:
            return ()
        try:
            AxisRules.of(self.rules)
        except RuleTypeError as error:
            return error.problems or (str(error),)
        return ()

    @functools.cached_property
    def _resolved(self) -> tuple[Mapping[str, AxisRules], LayoutProblems]:
        """The tables that the mesh and the model have everything for, and what they lack."""
        known: dict[str, Any] = {n: self._known(rules) for n, rules in self.given_tables.items()}
        layout = self.given_layout
        if layout is None:
            return known or {"rules": AxisRules({})}, ()
        layout = dataclasses.replace(layout, **known)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always", ShardingWarning)
            found, problems = _for_model(layout, self.sample, self.mesh, self.on_indivisible)
        doubts: LayoutProblems = tuple(("misfit", str(each.message)) for each in caught)
        return {name: getattr(found, name) for name in known}, (*problems, *doubts)

    @property
    def tables(self) -> Mapping[str, AxisRules]:
        """The rules by the name of their table, in the model's own names.

        Without rules for mesh axes that there are not. One table, ``rules``, without a layout.
        """
        return self._resolved[0]

    @property
    def layout_problems(self) -> LayoutProblems:
        """Why a layout does not fit the model, beside its mesh axes, each with its kind."""
        return self._resolved[1]

    @property
    def storing_tables(self) -> tuple[str, ...]:
        """The names of the tables that say how arrays are stored."""
        return tuple(n for n in self.tables if n in ("rules", "parameters", "optimizer"))

    def _known(self, rules: AxisRules) -> AxisRules:
        return AxisRules.from_rules(
            rule for rule in rules.rules if set(rule.mesh_axes) <= self.mesh.shape.keys()
        )

    def table_of(self, path: str) -> str:
        """The name of the table that decides on the array at a path."""
        of_optimizer = path == _OPTIMIZER_STATE or path.startswith(f"{_OPTIMIZER_STATE}/")
        if of_optimizer and "optimizer" in self.tables:
            return "optimizer"
        return self.table_of_parameters

    @property
    def table_of_parameters(self) -> str:
        """The name of the table that parameters are stored by."""
        return "rules" if self.given_layout is None else "parameters"

    @property
    def table_of_activations(self) -> str:
        """The name of the table that the batch and what flows are laid out by."""
        return "rules" if self.given_layout is None else "compute"

    @functools.cached_property
    def _examined(self) -> tuple[ShardingPlan, tuple[tuple[str, str], ...]]:
        rules = self.tables[self.table_of_parameters]
        request = PlanRequest.read(
            "lint", self.mesh, rules, None, self.on_indivisible, self.on_unnamed
        )
        tree = self.sample if self.sampled else self.model
        return request.examined(tree, self.tables.get("optimizer"))

    @property
    def plan(self) -> ShardingPlan:
        """The plan, in which dimensions that cannot be split stay whole."""
        return self._examined[0]

    @property
    def problems(self) -> tuple[tuple[str, str], ...]:
        """What stands in the way of the plan: the path of an array, and what is wrong with it."""
        return self._examined[1]

    def decision(self, leaf: LeafPlan) -> SpecExplanation:
        """What its table of rules says of an array of the plan."""
        rules = self.tables[self.table_of(leaf.path)]
        return rules.explain(leaf.names, leaf.shape, self.mesh, on_indivisible=self.on_indivisible)

    @functools.cached_property
    def flows(self) -> SubjectFlows:
        """What flows through the model, and how it is laid out."""
        return SubjectFlows.of(self)

    @functools.cached_property
    def constraints(self) -> Constraints:
        """What constraint layers in the model name."""
        if "constraints" not in self.shared:
            self.shared["constraints"] = constraints_in(self.model)
        found: Constraints = self.shared["constraints"]
        return found

    @functools.cached_property
    def known_axes(self) -> frozenset[LogicalAxis]:
        """The logical axes that occur: in arrays, the batch, constraint layers and what flows."""
        named = self.plan.logical_axes | self.batch_axes | self.constraints.logical_axes
        return named | self.flows.logical_axes

    @functools.cached_property
    def batch_axes(self) -> frozenset[LogicalAxis]:
        """The logical axes of the batch."""
        return frozenset(
            name for leaf in leaves_of(self.batch) for name in leaf.names or () if name is not None
        )

    def given_rules(self, table: str) -> tuple[Rule, ...]:
        """The rules of a table as given, which is what a fix changes.

        Of a layout they speak of roles, where ``tables`` has the model's names.
        """
        return self.given_tables.get(table, AxisRules({})).rules

    def name_rules(self, table: str) -> tuple[NameRule, ...]:
        """The rules of a table that name a logical axis, in the model's names."""
        return self.tables[table].name_rules


def _for_model(
    layout: Layout, model: Any, mesh: AnyMesh, on_indivisible: OnIndivisible
) -> tuple[Layout, LayoutProblems]:
    """A layout in a model's names, and why it does not fit; what does not fit stays whole."""
    problems: LayoutProblems = ()
    whole: Mapping[str, Any]
    for whole in ({}, *({role: None} for role in DEFAULT_NAMES), dict.fromkeys(OF_LAYERS)):
        try:
            tried = dataclasses.replace(layout, names={**layout.names, **whole})
            return tried.for_model(model, mesh, on_indivisible=on_indivisible), problems
        except ShardingError as error:
            kind: FindingKind = "indivisible" if isinstance(error, PlanError) else "misfit"
            texts = error.problems or (str(error),)
            problems = problems or tuple((kind, text) for text in texts)
    return dataclasses.replace(layout, names={}, wanted=()), problems
