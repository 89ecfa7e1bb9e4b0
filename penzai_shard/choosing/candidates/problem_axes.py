"""The logical axes of a training problem that layouts speak of."""

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import PartitionSpec
from penzai import pz

from penzai_shard.axis_decisions import DimensionDecision
from penzai_shard.axis_rules import AxisRules
from penzai_shard.choosing.candidates.candidate import PaddedAxis
from penzai_shard.choosing.training_problem import TrainingProblem
from penzai_shard.equinox_modules import is_equinox_module
from penzai_shard.errors import PlanError, RuleTypeError, raise_all
from penzai_shard.fused_axes import divided_length
from penzai_shard.layouts.layout_edits import BLOCKS, REGIONS
from penzai_shard.layouts.model_roles import (
    OF_LAYERS,
    FoundAxis,
    Names,
    groups_of,
    logical_axes_of,
    roles_of_model,
)
from penzai_shard.meshes import make_mesh
from penzai_shard.named_arrays import named_array
from penzai_shard.named_leaves import leaves_of
from penzai_shard.partition_specs import part_count
from penzai_shard.rule_kinds import LogicalAxis, NameRule, OnIndivisible

SPLIT_ROLES = ("experts", "vocabulary", *(role for role in OF_LAYERS if role != "experts"))
"""What is split over the mesh axes of the model, in the order in which one array's are chosen."""

# What others call the axes of these roles: MaxText, Flax' examples, t5x, Hugging Face.
_OTHER_NAMES: dict[str, tuple[str, ...]] = {
    "embedding": ("embed", "emb", "hidden", "features"),
    "neurons": ("mlp", "ff", "intermediate"),
    "heads": ("head", "q_heads", "num_heads"),
    "vocabulary": ("vocab",),
    "experts": ("expert", "exp"),
}
# Of a model in which no role is known, so many axes of its parameters are tried, the largest first.
MOST_UNKNOWN_AXES = 4


class LaidOut(NamedTuple):
    """How tables of rules lay out parameters.

    Attributes:
        specs: For each table the spec of each parameter.
        padded: What they store padded.
        is_sane: Whether what they split and pad is worth a price.
    """

    specs: Mapping[str, tuple[PartitionSpec, ...]]
    padded: tuple[PaddedAxis, ...]
    is_sane: bool


@dataclasses.dataclass(frozen=True)
class ProblemAxes:
    """What of a training problem a layout can speak of.

    Attributes:
        names: What the model calls the roles, as a ``Layout`` takes it.
        axes: The logical axes of its parameters.
        split: The roles, or logical axes, that the mesh axes of the model may split.
        stored: The role or logical axis by which parameters may be stored split, if there is one.
        batch: Length of the batch.
        sequence: Lengths of the sequence, as far as they are known.
        has_blocks: Whether its layers are known to the edits of a layout.
        shapes: The different parameters: names and lengths.
    """

    names: Names
    axes: Mapping[LogicalAxis, FoundAxis]
    split: tuple[LogicalAxis, ...]
    stored: LogicalAxis | None
    batch: int
    sequence: tuple[int, ...]
    has_blocks: bool
    shapes: tuple[tuple[tuple[LogicalAxis | None, ...], tuple[int, ...]], ...]

    @classmethod
    def of(cls, problem: TrainingProblem, names: Names, blocks: Any) -> "ProblemAxes":
        """The axes of a problem.

        Args:
            problem: The problem.
            names: What the model calls its axes, as far as it is said.
            blocks: As for ``Layout``.

        Raises:
            RuleTypeError: No input has the logical axis of the batch.
        """
        axes = logical_axes_of(problem.model)
        names = {**_guessed_names(axes, names), **names}
        split: tuple[LogicalAxis, ...] = tuple(
            role for role in SPLIT_ROLES if _present(role, names, axes)
        )
        stored: LogicalAxis | None = "embedding" if _present("embedding", names, axes) else None
        if not split:
            split = _largest(axes, MOST_UNKNOWN_AXES)
        leaves = leaves_of(problem.model)
        shapes = {(leaf.names, leaf.shape): None for leaf in leaves if leaf.names is not None}
        batch, sequence = (_lengths(problem, role, names) for role in ("batch", "seq"))
        if not batch:
            role = groups_of("batch", names)[0][0] if groups_of("batch", names) else "batch"
            raise RuleTypeError(
                f"no input of the loss function has logical axis {role!r}. Name it in inputs, or "
                'say what it is called: names={"batch": "..."}.'
            )
        return cls(
            names,
            axes,
            split,
            stored,
            min(batch),
            lengths_seen(sequence),
            blocks != () and (blocks is not None or _has_known_blocks(problem.model)),
            tuple(shapes),
        )

    @functools.cached_property
    def _tree(self) -> list[Any]:
        return [
            named_array(jax.ShapeDtypeStruct(sizes, np.float32), axes)
            for axes, sizes in self.shapes
        ]

    def laid_out(
        self,
        tables: Mapping[str, AxisRules],
        mesh_shape: Mapping[str, int],
        on_indivisible: OnIndivisible = "error",
    ) -> "LaidOut":
        """How each of some tables of rules lays out the parameters.

        Args:
            tables: The tables.
            mesh_shape: The size of each mesh axis.
            on_indivisible: As for ``make_plan``.

        Raises:
            PlanError: A length does not divide.
        """
        mesh = make_mesh(mesh_shape, abstract=True)
        found = roles_of_model(
            self._tree, mesh, tables, self.names, on_indivisible=on_indivisible
        ).tables
        specs: dict[str, tuple[PartitionSpec, ...]] = {}
        padded: set[PaddedAxis] = set()
        is_sane = True
        for what, table in found.items():
            decided = [
                table.explain(axes, sizes, mesh, on_indivisible=on_indivisible)
                for axes, sizes in self.shapes
            ]
            raise_all(
                PlanError,
                "this layout does not fit the model:",
                [problem for each in decided for problem in each.problems],
            )
            specs[what] = tuple(each.spec for each in decided)
            dimensions = [d for each in decided for d in each.dimensions]
            is_sane = is_sane and all(_is_sanely_split(d, mesh_shape) for d in dimensions)
            padded |= {
                PaddedAxis(d.logical_axis, d.size, d.stored_size)
                for d in dimensions
                if d.stored_size != d.size
            }
        return LaidOut(specs, tuple(sorted(padded, key=str)), is_sane)


def _is_sanely_split(dimension: DimensionDecision, mesh_shape: Mapping[str, int]) -> bool:
    """Whether it may pay to split a dimension so.

    By a rule for its name a dimension is split in what is computed too. If half of it is padding,
    fewer devices compute as fast. Parts of fused axes that cut through the major one are moved
    about wherever that is told from the others.
    """
    name, rule, size = dimension.logical_axis, dimension.rule, dimension.size
    if not isinstance(rule, NameRule) or not dimension.mesh_axes:
        return True
    length = divided_length(name, size, rule.logical_axis)
    is_cut = rule.logical_axis != name and (length or 1) % part_count(rule.mesh_axes, mesh_shape)
    return not is_cut and dimension.stored_size < 2 * size


def _largest(axes: Mapping[LogicalAxis, FoundAxis], count: int) -> tuple[LogicalAxis, ...]:
    ordered = sorted(axes, key=lambda name: (-max(axes[name].sizes), str(name)))
    return tuple(ordered[:count])


def lengths_seen(sequence: tuple[int, ...]) -> tuple[int, ...]:
    """Lengths of a sequence with those of its inputs, where the last one is a target alone."""
    return tuple(dict.fromkeys((*sequence, *(length - 1 for length in sequence if length > 1))))


def _present(role: str, names: Names, axes: Mapping[LogicalAxis, FoundAxis]) -> bool:
    return any(name in axes for group in groups_of(role, names) for name in group)


def _guessed_names(axes: Mapping[LogicalAxis, FoundAxis], names: Names) -> dict[str, LogicalAxis]:
    """What a model calls the roles that it has under no name of Penzai's."""
    found: dict[str, LogicalAxis] = {}
    for role, others in _OTHER_NAMES.items():
        other = next((each for each in others if each in axes), None)
        if role not in names and other is not None and not _present(role, names, axes):
            found[role] = other
    return found


def _lengths(problem: TrainingProblem, role: str, names: Names) -> tuple[int, ...]:
    wanted = [name for group in groups_of(role, names) for name in group]
    inputs = logical_axes_of(dict(problem.inputs))
    return tuple(size for name in wanted if name in inputs for size in sorted(inputs[name].sizes))


def _has_known_blocks(model: Any) -> bool:
    if is_equinox_module(model):
        return False
    return bool(pz.select(model).at_instances_of((*BLOCKS, *REGIONS)).count())
