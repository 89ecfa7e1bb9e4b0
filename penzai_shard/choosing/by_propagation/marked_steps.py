"""A step lowered once for all layouts that edit its model alike.

What a layout edits depends on few things: whether layers are split or parameters gathered, and how
activations are laid out between blocks, and what these keep. How arrays are laid out is left
open: each table of a layout and each logical axis is a mesh axis of size 1, which marks the
dimensions that the table's rule for this axis is about.
"""

import dataclasses
from collections.abc import Hashable, Mapping
from typing import Any

from jax.sharding import AbstractMesh

from penzai_shard.axis_rules import AxisRules
from penzai_shard.choosing.candidates import Candidate
from penzai_shard.choosing.training_problem import TrainingProblem
from penzai_shard.inspection.steps.lowered_steps import LoweredStep, lower_step
from penzai_shard.layouts.computing import computing_by
from penzai_shard.layouts.layout_edits import EditRequest, gathering, layout_edits
from penzai_shard.layouts.model_roles import groups_of, logical_axes_of
from penzai_shard.library_apis.shardy_collectives import Mark, MarkedProgram
from penzai_shard.library_apis.shardy_placed import PlacedProgram, Spec
from penzai_shard.meshes import make_mesh
from penzai_shard.named_leaves import leaves_of
from penzai_shard.partition_specs import mesh_axes_by_dimension
from penzai_shard.rule_kinds import LargestDimensionRule, LogicalAxis, OnIndivisible
from penzai_shard.training import shard_batch

_GATHERED_FROM, _GATHERED_TO = "gathered from", "gathered to"
_STORED = ("parameters", "optimizer", _GATHERED_FROM)
_TABLES = ("parameters", "optimizer", "compute", "between", _GATHERED_FROM, _GATHERED_TO)
# Constraints are left out on a mesh of one device.
_REST = "rest"


@dataclasses.dataclass(frozen=True)
class StepTables:
    """A candidate's tables of rules in the model's own names, and what its edits follow from.

    Attributes:
        mesh: The candidate's mesh.
        rules: The table of each name: ``"parameters"``, ``"optimizer"``, ``"compute"``; if there
            is one, ``"between"``; and if parameters are used otherwise than they are stored,
            ``"gathered from"`` and ``"gathered to"``.
        request: What its edits follow from.
        is_idle: Whether a mesh axis does not split the batch.
        microbatches: In how many parts the batch is computed.
        batch: What the model calls the axis of the batch.
        on_indivisible: What becomes of lengths that do not divide.
    """

    mesh: AbstractMesh
    rules: Mapping[str, AxisRules]
    request: EditRequest
    is_idle: bool
    microbatches: int
    batch: tuple[LogicalAxis, ...]
    on_indivisible: OnIndivisible

    @classmethod
    def of(cls, problem: TrainingProblem, candidate: Candidate) -> "StepTables":
        """Those of a candidate.

        Raises:
            ShardingError: The layout does not fit the model.
        """
        layout = candidate.layout
        mesh = candidate.mesh
        pads = candidate.on_indivisible
        laid_out = layout.for_model(problem.model, mesh, on_indivisible=pads)
        request = layout.edit_request(problem.model, mesh, pads)
        rules = {"parameters": request.parameters, "compute": request.compute}
        rules["optimizer"] = laid_out.optimizer or request.parameters
        if request.between is not None:
            rules["between"] = request.between
        if gathering(problem.model, mesh, request):
            rules |= {_GATHERED_FROM: request.parameters, _GATHERED_TO: request.compute}
        used = {name for name, size in mesh.shape.items() if size > 1}
        return cls(
            mesh,
            rules,
            request,
            bool(used - set(request.batch_axes)),
            candidate.microbatches,
            tuple(name for group in groups_of("batch", layout.names) for name in group),
            pads,
        )

    def spec(
        self, what: str, names: tuple[LogicalAxis | None, ...], shape: tuple[int, ...]
    ) -> Spec:
        """The mesh axes of each dimension of an array, by the rules of a table."""
        spec = self.rules[what].spec(names, shape, self.mesh, on_indivisible=self.on_indivisible)
        return tuple(mesh_axes_by_dimension(spec, len(shape)))

    @property
    def splits_layers(self) -> bool:
        """Whether what flows into layers and out of them is pinned."""
        asked = self.request
        return bool(asked.split_in_layers or asked.splits_vocabulary or "between" in self.rules)

    @property
    def splits_vocabulary(self) -> bool:
        """Whether the vocabulary counts as split.

        It makes a difference to a layout of activations between layers. A program in which that is
        left out is the one with the vocabulary split.
        """
        return self.request.splits_vocabulary or "between" not in self.rules

    @property
    def has_gathers(self) -> bool:
        """Whether the program says how parameters are gathered, which may be left out again."""
        asked = self.request
        return _GATHERED_TO in self.rules or bool(asked.split_in_layers and not asked.manual)

    @property
    def gathers_again(self) -> bool:
        """Whether parameters are gathered again in the backward pass."""
        is_left_out = self.has_gathers and _GATHERED_TO not in self.rules
        return self.request.gather_again and not is_left_out

    @property
    def structure(self) -> Hashable:
        """What the program is but for the layouts in it; equal for equal programs."""
        asked = self.request
        return (
            self.splits_layers,
            self.splits_vocabulary,
            asked.rematerialise,
            self.gathers_again,
            asked.manual,
            repr(asked.blocks),
            self.has_gathers,
            self.has_gathers and self.is_idle,
            self.microbatches,
            self.batch,
        )


class MarkedStep:
    """A step whose layouts are marks, lowered.

    Attributes:
        lowered: The lowered step.

    Args:
        problem: The step.
        tables: Those of a candidate; the step then serves all candidates of the same structure.

    Raises:
        PropagationError: As ``MarkedProgram`` does.
    """

    def __init__(self, problem: TrainingProblem, tables: StepTables) -> None:
        inputs = dict(problem.inputs)
        axes = (*logical_axes_of(problem.model), *logical_axes_of(inputs))
        ruled = [name for rules in tables.rules.values() for name in rules.logical_axes]
        self._names: tuple[LogicalAxis, ...] = tuple(dict.fromkeys((*axes, *ruled)))
        self._shapes = tuple(
            (leaf.names, leaf.shape) for leaf in leaves_of(problem.model) if leaf.names is not None
        )
        self.lowered = self._lower(problem, tables)
        self._program = MarkedProgram(self.lowered.lowered)
        self._read = [self._meaning(mark) for mark in self._program.marks]

    def placed(self, tables: StepTables) -> PlacedProgram:
        """The step in the layout of a candidate, with its collectives.

        Args:
            tables: Those of the candidate.

        Raises:
            PlanError: A length does not divide.
            PropagationError: Shardy refuses it.
        """
        specs: list[Spec | None] = [
            self._spec(tables, *meaning) if meaning else ((),) * len(mark.shape)
            for mark, meaning in zip(self._program.marks, self._read, strict=True)
        ]
        return self._program.placed(dict(tables.mesh.shape), specs)

    def _lower(self, problem: TrainingProblem, tables: StepTables) -> LoweredStep:
        marks = {
            what: AxisRules({name: _mark(what, number) for number, name in enumerate(self._names)})
            for what in _TABLES
        }
        sizes = {
            axis: 1
            for rules in marks.values()
            for rule in rules.name_rules
            for axis in rule.mesh_axes
        }
        mesh = make_mesh({**sizes, _REST: 2}, abstract=True)
        request = dataclasses.replace(
            tables.request,
            parameters=marks[_GATHERED_FROM if tables.has_gathers else "compute"],
            compute=marks["compute"],
            used=marks[_GATHERED_TO] if tables.has_gathers else None,
            gather_again=tables.gathers_again,
            # What a candidate has none of is left out again.
            between=marks["between"] if tables.splits_layers else None,
            splits_vocabulary=tables.splits_layers and tables.splits_vocabulary,
            batch_axes=() if tables.is_idle else (_REST,),
        )
        edits = layout_edits(problem.model, mesh, request)
        step, state = problem.built_by(
            edits,
            marks["parameters"],
            marks["optimizer"],
            mesh,
            computing_by(problem.loss_fn, mesh, lambda model: marks["compute"]),
            tables.microbatches,
        )
        of_batch = AxisRules.from_rules(
            rule for rule in marks["compute"].name_rules if rule.logical_axis in tables.batch
        )
        inputs = shard_batch(dict(problem.inputs), mesh, of_batch)
        return lower_step(step, (state,), inputs, "cpu")

    def _meaning(self, mark: Mark) -> tuple[str, tuple[LogicalAxis | None, ...], Any] | None:
        """The table that a mark is of, and the logical axis of each dimension."""
        found = [axes[0] for axes in mark.dimensions if axes]
        if not found:
            return None
        names = [
            self._names[int(axes[0].split(":")[1])] if axes else None for axes in mark.dimensions
        ]
        return found[0].split(":")[0], tuple(names), mark.shape

    def _spec(
        self,
        tables: StepTables,
        what: str,
        names: tuple[LogicalAxis | None, ...],
        shape: tuple[int, ...],
    ) -> Spec | None:
        if what not in tables.rules:
            return None
        rules = tables.rules[what]
        by_largest = any(isinstance(rule, LargestDimensionRule) for rule in rules.rules)
        if what in _STORED and by_largest and (names, shape) not in self._shapes:
            # A statistic of some dimensions of a parameter is split as these are.
            for axes, sizes in self._shapes:
                if set(names) <= set(axes):
                    spec = tables.spec(what, axes, sizes)
                    return tuple(spec[axes.index(name)] if name else () for name in names)
        return tables.spec(what, names, shape)


def _mark(what: str, number: int) -> str:
    return f"{what}:{number}"
