"""Dictionaries of collections of variables, as Flax's linen modules have them, and losses.

A loss gets the dictionary and gives it to ``module.apply``; what is not a parameter it assigns
there again: ``model.update(updates)``.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
from penzai import pz

from penzai_shard.array_kinds import is_array_like
from penzai_shard.errors import ShardingError, raise_all
from penzai_shard.named_arrays import dimension_names, named_array, unnamed_data
from penzai_shard.named_nodes import is_named_node
from penzai_shard.readers import loaded_readers, reader_of
from penzai_shard.tree_paths import path_text


def roles_of_collections(model: Any) -> dict[str, str]:
    """What each collection of a model holds, by its name: parameters or state variables.

    Returns:
        The roles; empty for a model that is no dictionary of collections.

    Raises:
        ShardingError: A collection is neither.

    >>> roles_of_collections({"w": 1.0})
    {}
    """
    for reader in loaded_readers():
        roles = reader.collections(model)
        if roles:
            problems = [
                f"{name}: {text}"
                for name, text in roles.items()
                if text not in ("parameter", "state")
            ]
            raise_all(ShardingError, "these collections cannot be trained:", problems)
            return dict(roles)
    return {}


@dataclasses.dataclass(frozen=True)
class BoundCollections:
    """A dictionary of collections that a loss was called with, and may have changed in place.

    Attributes:
        model: The dictionary.
        before: What the state had for each array, by its path.
    """

    model: Any
    before: Mapping[str, Any]

    def values(self) -> dict[str, Any]:
        """The value that each array has now, by its path, with the names that it had.

        Raises:
            ShardingError: There are others than there were.
        """
        flat, _ = jax.tree_util.tree_flatten_with_path(dict(self.model), is_leaf=is_named_node)
        now = {
            path_text(path): leaf
            for path, leaf in flat
            if is_named_node(leaf) or is_array_like(leaf)
        }
        new: dict[str, list[str]] = {}
        for path in now.keys() - self.before.keys():
            new.setdefault(path.partition("/")[0], []).append(path)
        problems = [
            f"{min(paths)}{f' and {len(paths) - 1} more' if paths[1:] else ''}: not there when the "
            f"train state was made. Assign only what was, for instance "
            f"model.update(batch_stats=updates['batch_stats']), and return {name!r} in aux; or "
            "have it in what the state is made of."
            for name, paths in sorted(new.items())
        ]
        problems += [
            f"{path}: went missing. Assign collections as they came, with all that is in them."
            for path in self.before
            if path not in now
        ]
        raise_all(ShardingError, "the loss changed which variables the model has:", problems)
        return {path: _named_as(now[path], old) for path, old in self.before.items()}


def _named_as(new: Any, old: Any) -> Any:
    """A value as the state keeps it: with the names of the old one, whether it is boxed or not."""
    reader = reader_of(new)
    data = new if reader is None else reader.read(new).data
    if not pz.nx.is_namedarray(old) or pz.nx.is_namedarray(data) or not is_array_like(data):
        return data
    fits = jax.numpy.shape(data) == jax.numpy.shape(unnamed_data(old))
    return named_array(data, dimension_names(old) or (), keeps_shape=True) if fits else data
