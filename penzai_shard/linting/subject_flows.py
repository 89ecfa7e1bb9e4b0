"""What flows through the model of a ``LintSubject``, traced once."""

import dataclasses
import functools
import warnings
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from jax.sharding import NamedSharding, PartitionSpec

from penzai_shard.array_kinds import is_abstract, is_concrete
from penzai_shard.axis_rules import AxisRules
from penzai_shard.errors import ShardingError, ShardingWarning
from penzai_shard.layers import ConstrainActivations, GatherParameters, ShardMapped
from penzai_shard.linting.flow_layouts import LaidOutCall, laid_out_calls
from penzai_shard.linting.model_flows import PASSERS, FlowingArray, ModelFlows, flows_through
from penzai_shard.linting.split_axes import split_of
from penzai_shard.meshes import is_same_mesh, mesh_shape_of
from penzai_shard.named_leaves import NamedLeaf, leaves_of
from penzai_shard.partition_specs import mesh_axes_used
from penzai_shard.path_folding import folding_key
from penzai_shard.planning import LeafPlan
from penzai_shard.rule_kinds import SEQUENCE_AXES, LargestDimensionRule, LogicalAxis
from penzai_shard.surgery.tree_nodes import is_layer, nodes_of
from penzai_shard.training import TrainState

if TYPE_CHECKING:
    from penzai_shard.linting.lint_subject import LintSubject

LAYING_OUT = (*PASSERS, ConstrainActivations, GatherParameters, ShardMapped)
"""Layers that say how something is laid out."""


@dataclasses.dataclass(frozen=True)
class SubjectFlows:
    """What flows through a subject's model, and how it is laid out under its rules.

    Attributes:
        subject: The subject.
        model: The model that was looked at: that of a train state, edited by the layout if it was
            not yet.
        is_edited_here: Whether it was edited here, so that its edits are not the user's.
        flows: What flows; None without a batch, or without a model that can be called.
        missing: Why there is nothing, in a sentence; empty if there is.
    """

    subject: "LintSubject"
    model: Any
    is_edited_here: bool
    flows: ModelFlows | None
    missing: str = ""

    @classmethod
    def of(cls, subject: "LintSubject") -> "SubjectFlows":
        """What flows through a subject's model; each model is traced once per batch."""
        layout = subject.given_layout
        by = None if layout is None else (layout, subject.mesh)
        traces: list[Any] = subject.shared.setdefault("traces", [])
        for model, batch, known_by, found in traces:
            if model is subject.model and batch is subject.batch and known_by == by:
                return dataclasses.replace(found, subject=subject)
        found = _found(subject)
        traces.append((subject.model, subject.batch, by, found))
        return found

    @functools.cached_property
    def calls(self) -> tuple[LaidOutCall, ...]:
        """The calls of its layers; none without a batch."""
        if self.flows is None:
            return ()
        return laid_out_calls(self.flows, self._of_input, self.of_parameter)

    @functools.cached_property
    def _leaves(self) -> dict[str, LeafPlan]:
        # Of equal blocks the plan may have one alone.
        leaves = self.subject.plan.leaves
        return {folding_key(leaf.path): leaf for leaf in leaves} | {
            leaf.path: leaf for leaf in leaves
        }

    def leaf_of(self, label: str) -> LeafPlan | None:
        """The plan of a parameter, or of the same one in an equal block, by its label."""
        path = self.path_of(label)
        return self._leaves.get(path) or self._leaves.get(folding_key(path))

    def path_of(self, label: str) -> str:
        """The path of a parameter in the plan, by its label."""
        return f"params/{label}" if isinstance(self.subject.model, TrainState) else label

    def of_parameter(self, label: str) -> Mapping[LogicalAxis, tuple[str, ...]]:
        """How a parameter is stored, by its label."""
        leaf = self.leaf_of(label)
        if leaf is None or leaf.spec is None:
            return {}
        return split_of(leaf.names, leaf.spec, self.sizes)

    def batch_axis(self, leaf: NamedLeaf) -> LogicalAxis | None:
        """The logical axis of an array of the batch that counts its examples; None without one."""
        names = [name for name in leaf.names or () if name is not None]
        layout = self.subject.given_layout
        called = "batch" if layout is None else layout.names.get("batch", "batch")
        if called in names:
            return called
        of_model = self.subject.plan.logical_axes
        others = [name for name in names if name not in of_model and name not in SEQUENCE_AXES]
        return others[0] if others else None

    @functools.cached_property
    def batch_axes(self) -> frozenset[LogicalAxis]:
        """The logical axes that count examples."""
        found = map(self.batch_axis, self.batch_leaves)
        return frozenset(name for name in found if name is not None)

    @functools.cached_property
    def logical_axes(self) -> frozenset[LogicalAxis]:
        """The logical axes of what flows."""
        calls = () if self.flows is None else self.flows.calls
        arrays = (array for call in calls for array in (*call.inputs, *call.outputs))
        return frozenset(name for array in arrays for name in array.sizes)

    @functools.cached_property
    def used_mesh_axes(self) -> frozenset[str]:
        """The mesh axes that an array, the batch or what flows is split over.

        Those too that ``fully_sharded`` splits large arrays over, whether there is one or not.
        """
        used = {
            axis
            for rules in self.subject.tables.values()
            for rule in rules.rules
            if isinstance(rule, LargestDimensionRule)
            for axis in rule.mesh_axes
        }
        for leaf in self.subject.plan.leaves:
            used |= mesh_axes_used(leaf.spec or PartitionSpec())
        for of_batch in self.batch_leaves:
            used.update(*self.of_batch(of_batch).values())
        for call in self.calls:
            for one in call.pinned:
                used.update(*(split.mesh_axes for split in one.after.values()))
        return frozenset(used)

    @property
    def free_mesh_axes(self) -> list[str]:
        """The mesh axes of more than one device that nothing is split over."""
        return [a for a, size in self.sizes.items() if size > 1 and a not in self.used_mesh_axes]

    @property
    def sizes(self) -> Mapping[str, int]:
        """The lengths of the mesh axes."""
        return mesh_shape_of(self.subject.mesh)

    @functools.cached_property
    def batch_rules(self) -> AxisRules:
        """The rules that the batch is placed by."""
        tables = self.subject.tables
        layout = self.subject.given_layout
        if layout is None:
            return tables["rules"]
        return dataclasses.replace(layout, compute=tables["compute"]).batch_rules

    @functools.cached_property
    def batch_leaves(self) -> tuple[NamedLeaf, ...]:
        """The arrays of the batch."""
        return tuple(leaf for leaf in leaves_of(self.subject.batch) if leaf.dtype is not None)

    def of_batch(self, leaf: NamedLeaf) -> Mapping[LogicalAxis, tuple[str, ...]]:
        """How an array of the batch is laid out: as it is placed, or else by the rules."""
        placed = placed_on(leaf.array, self.subject.mesh)
        if placed is not None:
            return split_of(leaf.names, placed.spec, self.sizes)
        explained = self.batch_rules.explain(leaf.names, leaf.shape, self.subject.mesh)
        return split_of(leaf.names, explained.spec, self.sizes)

    def _of_input(self, number: int, array: FlowingArray) -> Mapping[LogicalAxis, tuple[str, ...]]:
        same = [leaf for leaf in self.batch_leaves if leaf.names == array.names]
        fitting = [leaf for leaf in same if leaf.shape == array.shape]
        return self.of_batch(fitting[0]) if fitting else {}


def placed_on(array: Any, mesh: Any) -> NamedSharding | None:
    """How an array says that it is laid out over a mesh; None if it does not say."""
    if is_concrete(array) and not array.committed:
        return None
    if not is_concrete(array) and not is_abstract(array):
        return None
    sharding = getattr(array, "sharding", None)
    fits = isinstance(sharding, NamedSharding) and is_same_mesh(sharding.mesh, mesh)
    return sharding if fits else None


def _found(subject: "LintSubject") -> SubjectFlows:
    model = subject.model
    if isinstance(model, TrainState):
        model = model.model
    if subject.batch is None:
        return SubjectFlows(subject, model, False, None, NO_BATCH)
    if not is_layer(model):
        return SubjectFlows(subject, model, False, None, NOT_CALLABLE.format(type(model).__name__))
    edited, is_edited_here = _edited(subject, model)
    return SubjectFlows(subject, edited, is_edited_here, flows_through(edited, subject.batch))


NO_BATCH = (
    "what flows through the model was not looked at: no batch was given. Give what the model is "
    "called with, or structs of it: lint(model, mesh, rules, batch=tokens)"
)
NOT_CALLABLE = (
    "what flows through the model was not looked at: {} is not a layer that can be called with "
    "the batch"
)


def _edited(subject: "LintSubject", model: Any) -> tuple[Any, bool]:
    """The model with the edits of its layout, unless it has some already."""
    layout = subject.given_layout
    if layout is None or any(isinstance(node, LAYING_OUT) for _, node in nodes_of(model)):
        return model, False
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ShardingWarning)
            options = {"on_indivisible": subject.on_indivisible}
            return layout.recipe(model, subject.mesh, **options).apply(model), True
    except ShardingError:  # What does not fit is found in the rules and the plan.
        return model, False
