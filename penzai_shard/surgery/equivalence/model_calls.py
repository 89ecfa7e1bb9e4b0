"""Running a model as a function of its parameters and state, without changing either.

Models keep their parameters in several ways: as mutable variables, as frozen values, as the
parameters of Penzai's first API, or as bare arrays. Each kind becomes a value with a name.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
from penzai import pz

from penzai_shard.model_variables import first_api, is_copy, thawed
from penzai_shard.surgery.equivalence.comparable_arrays import is_float
from penzai_shard.surgery.stripping import strip
from penzai_shard.tree_paths import path_text

Name = Any


@dataclasses.dataclass(frozen=True)
class _Place:
    """Where a named value belongs: in a dictionary of values, and under which name."""

    values: str
    name: Name


class ModelCall:
    """A model and its inputs as a function of named values.

    Args:
        model: The model.
        args: Its positional inputs.
        side_inputs: Its side inputs.

    Attributes:
        model: The model.
        inputs: Its positional and its side inputs.
        parameters: The values of the parameters by name: a variable's label, a parameter's name,
            or the path of an array in a model that has no named parameters.
        state: The frozen values of all other variables, by label.
        arrays: All other arrays, of the model and the inputs, by number.
    """

    def __init__(self, model: Any, args: tuple[Any, ...], side_inputs: Mapping[str, Any]) -> None:
        self.model, self.inputs = model, (args, side_inputs)
        tree, variables = pz.unbind_variables((model, args, dict(side_inputs)))
        self.parameters: dict[Name, Any] = {}
        self.state: dict[Name, Any] = {}
        self.arrays: dict[int, Any] = {}
        self._variables = [
            self._place(
                "parameters" if isinstance(variable, pz.Parameter) else "state",
                getattr(variable, "label", None) or variable.get_slot(),
                variable.freeze(),
            )
            for variable in variables
        ]
        leaves, self._structure = jax.tree_util.tree_flatten(tree, is_leaf=_is_parameter)
        is_named = bool(self.parameters) or any(map(_is_parameter, leaves))
        paths = {} if is_named else _paths_of_arrays(model)
        self._leaves = [self._placed(leaf, paths) for leaf in leaves]

    def _place(self, values: str, name: Name, value: Any) -> _Place:
        getattr(self, values)[name] = value
        return _Place(values, name)

    def _placed(self, leaf: Any, paths: Mapping[int, str]) -> Any:
        """What stands for a leaf of the model and its inputs; the leaf itself if it is no value."""
        if _is_parameter(leaf):
            name = leaf.label if isinstance(leaf, pz.ParameterValue) else leaf.name
            return self._place("parameters", self._own_name(name, leaf), leaf)
        if id(leaf) in paths and is_float(leaf):
            return self._place("parameters", paths[id(leaf)], leaf)
        if _is_array(leaf):
            return self._place("arrays", len(self.arrays), leaf)
        return leaf

    def _own_name(self, name: Name, parameter: Any) -> Name:
        """The name of a parameter; a numbered one if another value in the model has that name."""
        own, number = name, 1
        while own in self.parameters and not is_copy(parameter, self.parameters[own]):
            number += 1
            own = f"{name} ({number})"
        return own

    def __call__(
        self, parameters: Sequence[Any], state: Sequence[Any], arrays: Sequence[Any]
    ) -> tuple[Any, dict[Name, Any]]:
        """Runs the model.

        Args:
            parameters: Values in place of those of ``self.parameters``.
            state: Values in place of those of ``self.state``.
            arrays: Values in place of those of ``self.arrays``.

        Returns:
            The output, variables in it frozen, and the new values of the state variables.
        """
        values: dict[str, Any] = {
            "parameters": dict(zip(self.parameters, parameters, strict=True)),
            "state": dict(zip(self.state, state, strict=True)),
            "arrays": arrays,
        }
        tree = jax.tree_util.tree_unflatten(
            self._structure,
            [
                values[leaf.values][leaf.name] if isinstance(leaf, _Place) else leaf
                for leaf in self._leaves
            ],
        )
        variables = {place: thawed(values[place.values][place.name]) for place in self._variables}
        model, args, side_inputs = pz.bind_variables(tree, list(variables.values()))
        output = pz.freeze_variables(model(*args, **side_inputs))
        new_state = {
            place.name: variable.freeze()
            for place, variable in variables.items()
            if place.values == "state"
        }
        return output, new_state


def _is_parameter(node: Any) -> bool:
    """Whether a node is a parameter that is a value, and no variable."""
    return (
        isinstance(node, pz.ParameterValue) or first_api.parameter_kind(type(node)) == "parameter"
    )


def _is_array(leaf: Any) -> bool:
    return isinstance(leaf, jax.Array | np.ndarray)


def _paths_of_arrays(model: Any) -> dict[int, str]:
    """The path of each array in the model as it is without inserted layers, by the array's id."""
    paths: dict[int, str] = {}
    for key_path, leaf in jax.tree_util.tree_flatten_with_path(strip(model))[0]:
        if _is_array(leaf):
            paths.setdefault(id(leaf), path_text(key_path))
    return paths


def with_values_of(own: Mapping[Name, Any], other: Mapping[Name, Any]) -> dict[Name, Any]:
    """Named values with the data of others of the same names, placed as they themselves are.

    Args:
        own: The values of one model.
        other: The values of another.

    Returns:
        For each name of ``own`` the value of ``other``, or its own where the other has none.
    """
    return {
        name: _placed_like(other[name], value) if name in other else value
        for name, value in own.items()
    }


def _placed_like(value: Any, like: Any) -> Any:
    leaves, structure = jax.tree_util.tree_flatten(value)
    like_leaves = jax.tree_util.tree_leaves(like)
    if len(leaves) != len(like_leaves):
        return value
    return jax.tree_util.tree_unflatten(structure, map(_array_placed_like, leaves, like_leaves))


def _array_placed_like(array: Any, like: Any) -> Any:
    if not isinstance(array, jax.Array) or not isinstance(like, jax.Array):
        return array
    if array.shape != like.shape or not like.committed or array.sharding == like.sharding:
        return array
    return jax.device_put(array, like.sharding)
