"""Running a model as a function of its parameters and state, without changing either.

Models keep their parameters in several ways: as mutable variables, as frozen values, as the
parameters of Penzai's first API, or as bare arrays. Here each kind becomes a value with a name.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from penzai import pz
from penzai.core.variables import AbstractVariable, AbstractVariableValue

from penzai_shard.model_variables import first_api, thawed
from penzai_shard.surgery.stripping import strip
from penzai_shard.tree_paths import path_text

Name = Any


def _is_unit(node: Any) -> bool:
    return (
        isinstance(node, pz.ParameterValue) or first_api.parameter_kind(type(node)) == "parameter"
    )


def _is_array(leaf: Any) -> bool:
    return isinstance(leaf, jax.Array | np.ndarray)


@dataclasses.dataclass(frozen=True)
class _Place:
    """What stands at one leaf of the model and its inputs: a named value, or an array."""

    kind: str
    index: Any


class ModelCall:
    """A model and its inputs as a function of named values.

    Args:
        model: The model.
        args: Its positional inputs.
        side_inputs: Its side inputs.

    Attributes:
        parameters: The values of the parameters by name: a variable's label, a parameter's name,
            or the path of an array in a model that has no named parameters.
        state: The frozen values of all other variables, by label.
        arrays: All other arrays, of the model and the inputs.
    """

    def __init__(self, model: Any, args: tuple[Any, ...], side_inputs: Mapping[str, Any]) -> None:
        tree, variables = pz.unbind_variables((model, args, dict(side_inputs)))
        self.parameters: dict[Name, Any] = {}
        self.state: dict[Name, Any] = {}
        self._variables: list[tuple[str, Name]] = []
        for variable in variables:
            kind = "parameter" if isinstance(variable, pz.Parameter) else "state"
            name = getattr(variable, "label", None) or variable.get_slot()
            values = self.parameters if kind == "parameter" else self.state
            values[name] = variable.freeze()
            self._variables.append((kind, name))
        leaves, self._structure = jax.tree_util.tree_flatten(tree, is_leaf=_is_unit)
        units = [leaf for leaf in leaves if _is_unit(leaf)]
        is_named = bool(units) or bool(self.parameters)
        paths = {} if is_named else _paths_of_arrays(model)
        self.arrays: list[Any] = []
        self._leaves: list[Any] = []
        for leaf in leaves:
            place: Any = leaf
            if _is_unit(leaf):
                name = leaf.label if isinstance(leaf, pz.ParameterValue) else leaf.name
                self.parameters[name] = leaf
                place = _Place("parameter", name)
            elif id(leaf) in paths and jnp.issubdtype(leaf.dtype, jnp.inexact):
                name = paths[id(leaf)]
                self.parameters[name] = leaf
                place = _Place("parameter", name)
            elif _is_array(leaf):
                place = _Place("array", len(self.arrays))
                self.arrays.append(leaf)
            self._leaves.append(place)

    def __call__(
        self, parameters: Mapping[Name, Any], state: Mapping[Name, Any], arrays: list[Any]
    ) -> tuple[Any, dict[Name, Any]]:
        """Runs the model.

        Args:
            parameters: Values in place of ``self.parameters``.
            state: Values in place of ``self.state``.
            arrays: Values in place of ``self.arrays``.

        Returns:
            The output, variables in it frozen, and the new values of the state variables.
        """
        leaves = [
            leaf
            if not isinstance(leaf, _Place)
            else parameters[leaf.index]
            if leaf.kind == "parameter"
            else arrays[leaf.index]
            for leaf in self._leaves
        ]
        tree = jax.tree_util.tree_unflatten(self._structure, leaves)
        values: list[AbstractVariableValue] = [
            (parameters if kind == "parameter" else state)[name] for kind, name in self._variables
        ]
        variables: list[AbstractVariable] = [thawed(value) for value in values]
        model, args, side_inputs = pz.bind_variables(tree, variables)
        output = pz.freeze_variables(model(*args, **side_inputs))
        new_state = {
            name: variable.freeze()
            for (kind, name), variable in zip(self._variables, variables, strict=True)
            if kind == "state"
        }
        return output, new_state


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
    value_leaves, structure = jax.tree_util.tree_flatten(value)
    like_leaves = jax.tree_util.tree_leaves(like)
    if len(value_leaves) != len(like_leaves):
        return value
    return jax.tree_util.tree_unflatten(
        structure, map(_array_placed_like, value_leaves, like_leaves)
    )


def _array_placed_like(array: Any, like: Any) -> Any:
    if not isinstance(array, jax.Array) or not isinstance(like, jax.Array):
        return array
    if array.shape != like.shape or not like.committed or array.sharding == like.sharding:
        return array
    return jax.device_put(array, like.sharding)
