"""One of each of a model's equal blocks, for which whatever is found is found in all of them."""

import collections
from typing import Any

import jax
from penzai import pz

from penzai_shard.named_leaves import is_named_unit, leaves_of
from penzai_shard.path_folding import folding_key
from penzai_shard.tree_paths import path_text


def without_repeated_blocks(tree: Any) -> Any:
    """A tree without the arrays that differ from an earlier one in the numbers of their path alone.

    Args:
        tree: A model or a train state. It is not run afterwards.

    Returns:
        The tree with None in place of these arrays; of a layer, its arrays by their paths.

    >>> block = {"w": pz.nx.ones({"a": 2})}
    >>> found = without_repeated_blocks({"block_0": block, "block_1": block})
    >>> found["block_0"] == block, found["block_1"]
    (True, {'w': None})
    """
    seen: set[Any] = set()
    # Unlike a dictionary it keeps its order when JAX flattens it.
    by_path: dict[str, Any] = collections.OrderedDict()

    def first_of_its_kind(key_path: Any, unit: Any) -> Any:
        path = path_text(key_path)
        arrays = [(leaf.names, leaf.shape, str(leaf.dtype)) for leaf in leaves_of(unit)]
        label = getattr(unit, "label", "")
        alike = folding_key(path), folding_key(str(label)), type(unit), tuple(arrays)
        if alike in seen:
            return None
        seen.add(alike)
        by_path[path] = unit
        return unit

    fewer = jax.tree_util.tree_map_with_path(first_of_its_kind, tree, is_leaf=is_named_unit)
    return by_path if isinstance(tree, pz.nn.Layer) else fewer
