"""A model with values in it for one evaluation of a loss, and what the loss did to them."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from penzai_shard.errors import ShardingError, raise_all
from penzai_shard.model_variables.variable_collections import BoundCollections
from penzai_shard.named_arrays import unnamed_data
from penzai_shard.named_nodes import value_in_node
from penzai_shard.readers import ArrayReader, foreign_nodes, without_repeats
from penzai_shard.tree_paths import path_text


@dataclasses.dataclass(frozen=True)
class BoundModel:
    """A model for one evaluation of a loss.

    Attributes:
        model: What the loss is called with.
        variables: Penzai's state variables in it, by name.
        others: What the mutable variables of other libraries in it held at first, by name.
        collections: What it is if it is a dictionary of collections of variables.
    """

    model: Any
    variables: Mapping[str, Any]
    others: Mapping[str, Any]
    collections: BoundCollections | None = None

    def state_values(self, names: Mapping[str, Any]) -> dict[str, Any]:
        """The value that each state variable has now.

        Args:
            names: The names of the state variables, with anything.

        Raises:
            ShardingError: The loss left variables in the model that were not there before, or
                took some away.
        """
        if self.collections is not None:
            now = self.collections.values()
            return {name: now[name] for name in names}
        nodes = self._nodes()
        return {
            name: self.variables[name].value
            if name in self.variables
            else value_in_node(*nodes[name])[0]
            for name in names
        }

    def replaced_parameters(self, names: Mapping[str, Any]) -> dict[str, Any]:
        """The new values, without names, of parameters that are not what they were.

        Such a parameter may still be equal: transformations of its library replace what they get.

        Args:
            names: The names of the parameters, with anything.
        """
        if self.collections is not None:
            before = self.collections.before
            now = self.collections.values()
            return {
                name: data
                for name in names
                if (data := unnamed_data(now[name])) is not unnamed_data(before[name])
            }
        nodes = self._nodes()
        found = {
            name: reader.read(node).data
            for name, (reader, node) in nodes.items()
            if name in names and name in self.others
        }
        return {
            name: data
            for name, data in found.items()
            if data is not unnamed_data(self.others[name])
        }

    def _nodes(self) -> dict[str, tuple[ArrayReader, Any]]:
        """The variables of other libraries that are in the model now."""
        if not self.others:
            return {}
        found = {
            path_text(key_path): (reader, node)
            for key_path, reader, node in foreign_nodes(without_repeats(self.model))
            if reader.shares
        }
        problems = [
            f"{name}: this {type(node).__name__} was not there before. Take it out again, for "
            f"instance with nnx.pop, or make it when the model is made."
            for name, (_, node) in found.items()
            if name not in self.others
        ]
        problems += [
            f"{name}: went missing. Leave it in the model."
            for name in self.others
            if name not in found
        ]
        raise_all(ShardingError, "the loss changed which variables the model has:", problems)
        return found
