"""One named array at a time, be it Penzai's or another library's: its data, its names, its like."""

from typing import Any

import jax
import numpy as np
from penzai import pz

from penzai_shard.array_kinds import is_array_like
from penzai_shard.named_arrays import dimension_names, named_array, with_shape
from penzai_shard.readers import ArrayReader, is_foreign, reader_of
from penzai_shard.rule_kinds import LogicalAxis


def is_named_node(node: Any) -> bool:
    """Whether a node is a named array of Penzai's or something that a reader reads.

    >>> is_named_node(pz.nx.ones({"a": 2})), is_named_node(np.ones(2))
    (True, False)
    """
    return pz.nx.is_namedarray(node) or is_foreign(node)


def node_data(node: Any) -> Any:
    """The data of a named array; anything else as it is.

    >>> node_data(pz.nx.wrap(np.arange(2), "a")).tolist(), node_data(3)
    ([0, 1], 3)
    """
    if pz.nx.is_namedarray(node):
        return node.data_array
    reader = reader_of(node)
    return node if reader is None else reader.read(node).data


def node_names(node: Any) -> tuple[LogicalAxis | None, ...] | None:
    """The logical axis of each dimension of a named array's data; None where they are not known.

    >>> node_names(pz.nx.ones({"a": 2})), node_names(np.ones(2))
    (('a',), None)
    """
    if pz.nx.is_namedarray(node):
        return dimension_names(node)
    reader = reader_of(node)
    if reader is None:
        return None
    held = reader.read(node)
    if not is_array_like(held.data) or (held := held.fitted()).problem:
        return None
    return held.names


def named_like(node: Any, data: Any) -> Any:
    """A named array like another, with data of the same rank and any lengths.

    >>> named_like(pz.nx.ones({"a": 2}), np.ones(3)).named_shape
    {'a': 3}
    """
    shape = tuple(np.shape(data))
    if pz.nx.is_namedarray(node):
        return with_shape(node, shape, data)
    reader = reader_of(node)
    return data if reader is None else reader.resized(node, shape, data)


def value_in_node(reader: ArrayReader, node: Any) -> tuple[Any, str]:
    """What a train state keeps of a node of another library: inside, names are kept in one way.

    Returns:
        The value, a named array if the node gives names; and why its names cannot be used, if so.
    """
    held = reader.read(node)
    if held.problem:
        return held.data, held.problem
    if held.names is not None and not jax.tree_util.all_leaves([held.data]):
        kind = type(held.data).__name__
        return held.data, f"it has axis names, {held.names}, and holds a {kind}, not an array"
    if held.names is None or not is_array_like(held.data):
        return held.data, ""
    held = held.fitted()
    if held.problem:
        return held.data, held.problem
    assert held.names is not None
    return named_array(held.data, held.names, keeps_shape=True), ""
