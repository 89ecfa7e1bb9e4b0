"""Which parameter an optimizer's arrays belong to, where none of them has names.

Statistics of named parameters carry their names. Those of parameters without names are known by
where they are: an optimizer keeps them in trees like that of the parameters.
"""

from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from penzai_shard.reduced_statistics.aligned_names import DimensionsOf, align_names
from penzai_shard.reduced_statistics.parameter_sizes import OPTIMIZER, PARAMETERS
from penzai_shard.tree_paths import path_text


def parameters_of(tree: Any) -> Any:
    """The parameters in a train state, of this library or of another one; None without any.

    >>> parameters_of({"params": {"w": 1.0}, "opt_state": ()}), parameters_of({"w": 1.0})
    ({'w': 1.0}, None)
    """
    fields, _ = jax.tree_util.tree_flatten_with_path(tree, is_leaf=lambda node: node is not tree)
    by_name = {path_text(key_path): field for key_path, field in fields}
    return by_name.get(PARAMETERS) if OPTIMIZER in by_name else None


def dimensions_of_statistics(tree: Any, parameters: Any) -> dict[str, DimensionsOf]:
    """What statistics of other shapes than their parameter are made of, by their paths.

    Args:
        tree: A tree with optimizer states in it.
        parameters: The parameters that they belong to.

    Returns:
        An entry for each array in a part of the tree that is like ``parameters``, or like some of
        them by name, if the shape is another one but made of its parameter's dimensions.

    >>> parameters = {"w": np.ones((8, 4))}
    >>> dimensions_of_statistics({"v_row": {"w": np.ones(8)}}, parameters)
    {'v_row/w': DimensionsOf(names=None, sizes=(8, 4), kept=(0,))}
    """
    known = {
        tuple(map(str, key_path)): tuple(np.shape(leaf))
        for key_path, leaf in jax.tree_util.tree_leaves_with_path(parameters)
    }

    structure: Any = jax.tree_util.tree_structure(parameters)

    def is_like_parameters(node: Any) -> bool:
        if isinstance(node, Mapping) and isinstance(parameters, Mapping):
            return bool(node) and node.keys() <= parameters.keys()
        if type(node) is not type(parameters):
            return False
        if not isinstance(node, tuple | list):
            return True
        # Chained optimizers are in a tuple too, which may be as long, around those that are meant.
        try:
            parts = structure.flatten_up_to(node)
        except ValueError:
            return False
        return not any(
            is_like_parameters(inner)
            for part in parts
            for inner in jax.tree_util.tree_leaves(part, is_leaf=is_like_parameters)
        )

    found = {}
    parts, _ = jax.tree_util.tree_flatten_with_path(tree, is_leaf=is_like_parameters)
    for place, part in parts:
        if not is_like_parameters(part):
            continue
        for key_path, leaf in jax.tree_util.tree_leaves_with_path(part):
            path = path_text((*place, *key_path))
            made_of = _dimensions(known, path, key_path, tuple(np.shape(leaf)))
            if made_of is not None:
                found[path] = made_of
    return found


def _dimensions(
    known: Mapping[tuple[str, ...], tuple[int, ...]],
    path: str,
    key_path: tuple[Any, ...],
    shape: tuple[int, ...],
) -> DimensionsOf | None:
    """What one array is made of; None if that is a whole parameter, or not known."""
    keys = tuple(map(str, key_path))
    end = next((end for end in range(len(keys), 0, -1) if keys[:end] in known), None)
    sizes = known[keys[:end]] if end is not None else ()
    if not sizes or not shape or shape == sizes:
        return None
    if shape[-len(sizes) :] == sizes:
        # A history of the parameter, with its length in front.
        return DimensionsOf(None, sizes, (*(None,) * (len(shape) - len(sizes)), *range(len(sizes))))
    numbered: dict[Any, int] = dict(enumerate(sizes))
    aligned = align_names(numbered, shape, path, key_path[end:])
    kept: tuple[Any, ...] = aligned.names
    return None if aligned.problem else DimensionsOf(None, sizes, kept)
