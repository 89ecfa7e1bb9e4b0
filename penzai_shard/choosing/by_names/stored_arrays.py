"""What a device stores between steps: its part of the parameters and of the optimizer's state."""

import dataclasses
import functools
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import jax

from penzai_shard.axis_rules import AxisRules
from penzai_shard.choosing.by_names.placements import Dimension, Tensor
from penzai_shard.choosing.training_problem import TrainingProblem
from penzai_shard.meshes import AnyMesh
from penzai_shard.named_arrays import named_array
from penzai_shard.named_leaves import NamedLeaf, leaves_of
from penzai_shard.path_folding import folding_key
from penzai_shard.planning import Planner
from penzai_shard.planning.plan import itemsize
from penzai_shard.reduced_statistics import (
    DimensionsOf,
    dimensions_of_statistics,
    parameters_of,
)
from penzai_shard.rule_kinds import OnIndivisible
from penzai_shard.training import TrainState, train_state_sharding


class _Kind(NamedTuple):
    """Arrays that are alike."""

    leaf: NamedLeaf
    made_of: DimensionsOf | None
    number: int


class StoredParameter(NamedTuple):
    """Parameters that are alike, as they are stored.

    Attributes:
        tensor: One of them.
        where: Its path, without the numbers of blocks.
        number: How many there are.
    """

    tensor: Tensor
    where: str
    number: int


@dataclasses.dataclass(frozen=True)
class StoredArrays:
    """The arrays of a train state, those that are alike as one.

    Attributes:
        parameters: The parameters.
        has_moments: Whether the optimizer keeps an array of the form of a parameter, by which its
            gradient and its update are laid out.
    """

    parameters: tuple[StoredParameter, ...]
    has_moments: bool
    _of_parameters: tuple[_Kind, ...]
    _of_optimizer: tuple[_Kind, ...]
    _state: TrainState

    @classmethod
    def of(cls, problem: TrainingProblem) -> "StoredArrays":
        """Those of a step."""
        state = TrainState.initial_state(problem.model, problem.optimizer, jax.random.key(0))
        made_of = dimensions_of_statistics(state, parameters_of(state))
        parameters = leaves_of(state.params, "params")
        optimizer = leaves_of(state.opt_state, "opt_state")
        stored: dict[tuple[Tensor, str], int] = {}
        for leaf in parameters:
            key = tensor_of(leaf), folding_key(leaf.path.partition("/")[2])
            stored[key] = stored.get(key, 0) + 1
        forms = {(leaf.names, leaf.shape) for leaf in parameters if leaf.shape}
        return cls(
            tuple(StoredParameter(*key, count) for key, count in stored.items()),
            any((leaf.names, leaf.shape) in forms for leaf in optimizer),
            _alike(parameters, made_of),
            _alike(optimizer, made_of),
            state,
        )

    @functools.cached_property
    def representatives(self) -> dict[str, Any]:
        """One of each kind of parameter, by its path, for what asks a model for its names."""
        return {
            leaf.path.partition("/")[2]: named_array(
                jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), leaf.names
            )
            for leaf, _, _ in self._of_parameters
            if leaf.names is not None
        }

    def bytes_per_device(
        self,
        mesh: AnyMesh,
        parameters: AxisRules,
        optimizer: AxisRules,
        on_indivisible: OnIndivisible = "error",
    ) -> tuple[int, int]:
        """What one device holds of the parameters, and of the optimizer's state, in bytes.

        Args:
            mesh: The mesh.
            parameters: The rules that parameters are stored by.
            optimizer: Those of the optimizer's state.
            on_indivisible: What becomes of lengths that do not divide; padding is held too.

        Raises:
            ShardingError: As ``train_state_sharding`` does.
        """
        held = []
        for rules, kinds in ((parameters, self._of_parameters), (optimizer, self._of_optimizer)):
            planner, total = Planner(mesh, rules, on_indivisible), 0
            for leaf, made_of, count in kinds:
                plan, problems = planner.plan_leaf(leaf, made_of)
                if problems:
                    train_state_sharding(
                        self._state, mesh, parameters, optimizer, on_indivisible=on_indivisible
                    )
                total += plan.bytes_per_device * count
            held.append(total)
        return held[0], held[1]


def _alike(leaves: Iterable[NamedLeaf], made_of: Mapping[str, DimensionsOf]) -> tuple[_Kind, ...]:
    found: dict[Any, _Kind] = {}
    for leaf in leaves:
        of = made_of.get(leaf.path)
        key = leaf.names, leaf.shape, str(leaf.dtype), leaf.whole, leaf.problem, of
        known = found.get(key, _Kind(leaf, of, 0))
        found[key] = known._replace(number=known.number + 1)
    return tuple(found.values())


def tensor_of(leaf: NamedLeaf) -> Tensor:
    """An array of a tree."""
    names = leaf.names or (None,) * len(leaf.shape)
    dimensions = tuple(Dimension(*pair) for pair in zip(names, leaf.shape, strict=True))
    return Tensor(dimensions, itemsize(leaf.dtype))
