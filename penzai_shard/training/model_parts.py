"""Splits the arrays of a model into those that are trained, frozen, carried along, or constant.

Where a library says which arrays are parameters, all others are constants. Where none does, as in
Equinox, Haliax and plain dictionaries, every array is a parameter; in the dictionary of linen's
collections those below ``params`` are, and the others are carried from step to step.
"""

import dataclasses
import enum
import functools
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from penzai_shard.arrays.inputs import run_inputs
from penzai_shard.arrays.kinds import is_number, is_struct
from penzai_shard.arrays.static_values import same_static
from penzai_shard.arrays.structure import Leaf, Structure
from penzai_shard.errors import Problem, ShardingError
from penzai_shard.planning.arguments import check_tree
from penzai_shard.planning.name_axes import without_names
from penzai_shard.surgery.inserted import flatten_bare

Trainable = Callable[[Any], bool] | None


class Kind(enum.StrEnum):
    """What becomes of an array of a model; a setting is a Python number."""

    TRAINED = "trained"
    FROZEN = "frozen"
    STATE = "state"
    CONSTANT = "constant"
    SETTING = "setting"


@dataclasses.dataclass(frozen=True, eq=False)
class StateTemplate:
    """All of a train state but its arrays. Of two builds of a model and its optimizer it is equal.

    Attributes:
        structure: The rest of the model.
        kinds: What becomes of each array of the model, by path.
        settings: The values of leaves of the model that are Python numbers, by path.
        optimizer: The optimizer.
        plain_arrays: See ``TrainState.initial_state``.
    """

    structure: Structure = dataclasses.field(compare=False)
    kinds: Mapping[str, Kind]
    settings: Mapping[str, Any]
    optimizer: Any
    plain_arrays: bool | None

    def __eq__(self, other: Any) -> bool:
        # Models of structs are frozen, and are those that they become all the same.
        is_like = self.structure.is_like
        return self is other or (same_static(self, other) and is_like(other.structure))

    def __hash__(self) -> int:
        return hash((self.structure, *self.kinds.values()))

    @functools.cached_property
    def names(self) -> dict[str, Any]:
        """The logical axes of each array by path."""
        return dict(zip(self.structure.paths, self.structure.names, strict=True))

    def bind(self, arrays: Mapping[str, Any]) -> Any:
        """The model with these arrays by path, in new variables."""
        values = self._values(arrays)
        if any(variable.live for variable in self.structure.variables):
            return self.structure.fill_alike(values)
        return self.structure.fill(values, live=("parameter", "state"))

    def bind_for_loss(self, arrays: Mapping[str, Any]) -> Any:
        """The model as a loss function gets it: only its state variables can be assigned to."""
        plain, values = self.plain_arrays, self._values(arrays)
        model = self.structure.fill(values, live=("state",), plain=plain is not False)
        equinox = sys.modules.get("equinox")
        is_equinox = equinox is not None and isinstance(model, equinox.Module)
        return without_names(model) if plain or (is_equinox and plain is None) else model

    def _values(self, arrays: Mapping[str, Any]) -> list[Any]:
        known = {**arrays, **self.settings}
        return [known[path] for path in self.structure.paths]


def split_model(
    model: Any, optimizer: Any, trainable: Trainable, plain_arrays: bool | None
) -> tuple[dict[Kind, dict[str, Any]], StateTemplate]:
    """Takes a model apart; for the arguments see ``TrainState.initial_state``.

    Returns:
        The arrays of each kind by path, and the rest of the state.

    Raises:
        ShardingError: Arrays are deleted, two have one path, or none is trained.
    """
    called = "TrainState.initial_state"
    check_tree(called, model)
    values = [leaf.value for leaf in run_inputs(model, called, allow_structs=True)[0]]
    leaves, structure = flatten_bare(model)
    structure.check_paths()
    arrays: dict[Kind, dict[str, Any]] = {kind: {} for kind in Kind}
    found = _find_kinds(model, leaves, structure, trainable)
    kinds = dict(zip(structure.paths, found, strict=True))
    for path, value in zip(structure.paths, values, strict=True):
        arrays[kinds[path]][path] = value
    if not arrays[Kind.TRAINED]:
        problem = Problem("", "no parameter is trained", "Write trainable=lambda parameter: True.")
        raise ShardingError(f"{called}:", [problem])
    return arrays, StateTemplate(structure, kinds, arrays[Kind.SETTING], optimizer, plain_arrays)


def _find_kinds(
    model: Any, leaves: Sequence[Leaf], structure: Structure, trainable: Trainable
) -> Iterator[Kind]:
    from penzai import pz

    has_roles = any(leaf.role for leaf in leaves)
    is_linen = not has_roles and isinstance(model, Mapping) and "params" in model
    # Frozen values of Penzai's parameters are not trained; a model of structs has no others.
    frozen = {i for v in structure.variables if not v.live for i in range(len(leaves))[v.leaves]}
    nodes = jax.tree.leaves(model, is_leaf=_is_frozen_parameter)
    frozen_names = {node.name for node in nodes if _is_frozen_parameter(node)}

    for index, leaf in enumerate(leaves):
        role = leaf.role or ("constant" if has_roles else "parameter")
        if is_linen and leaf.path.split("/")[0] != "params":
            role = "state"
        is_frozen = index in frozen and not is_struct(leaf.value)
        is_trained = not (is_frozen or leaf.path in frozen_names)
        if isinstance(leaf.variable, pz.Parameter) and is_trained:
            is_trained = leaf.variable.metadata.get("trainable", True)
        if trainable is not None and role == "parameter":
            value = name_array(leaf.value, leaf.names)
            is_trained = trainable(pz.ParameterValue(value=value, label=leaf.path))
        is_trained = is_trained and jnp.issubdtype(leaf.dtype, jnp.inexact)
        if is_number(leaf.value):
            yield Kind.SETTING
        elif role == "parameter":
            yield Kind.TRAINED if is_trained else Kind.FROZEN
        else:
            yield Kind(role)


def _is_frozen_parameter(node: Any) -> bool:
    """Whether a node is what Penzai's first API puts in place of a parameter that is fixed."""
    return type(node).__name__ == "FrozenParameter"


def name_array(value: Any, names: Sequence[Any] | None) -> Any:
    """An array with its logical axes, if it has any."""
    from penzai_shard.readers.penzai import make_named

    if names is None or not any(name is not None for name in names) or not hasattr(value, "shape"):
        return value
    return make_named(value, names)
