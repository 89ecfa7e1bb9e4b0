"""The logical axes of a training problem that layouts speak of."""

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
from penzai import pz

from penzai_shard.axis_rules import AxisRules
from penzai_shard.choosing.training_problem import TrainingProblem
from penzai_shard.equinox_modules import is_equinox_module
from penzai_shard.errors import RuleTypeError
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
from penzai_shard.rule_kinds import LogicalAxis

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

    def specs(
        self, tables: Mapping[str, AxisRules], mesh_shape: Mapping[str, int]
    ) -> dict[str, tuple[Any, ...]]:
        """How each of some tables of rules lays out the parameters.

        Raises:
            PlanError: A length does not divide.
        """
        mesh = make_mesh(mesh_shape, abstract=True)
        found = roles_of_model(self._tree, mesh, tables, self.names).tables
        return {
            what: tuple(table.spec(axes, sizes, mesh) for axes, sizes in self.shapes)
            for what, table in found.items()
        }


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
