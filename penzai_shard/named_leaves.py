"""A tree's arrays with their logical axis names.

Trees hold named arrays in several ways: as ``NamedArray`` and ``NamedArrayView``, inside mutable
variables and their frozen values, inside the parameters of Penzai's first API, and as plain arrays
without names. This module is the one that knows them. ``map_arrays`` visits every array and puts
something else (an index, a sharding) in its place; the result has the structure of the tree after
``pz.freeze_variables``.
"""

import collections
import dataclasses
import functools
import sys
from collections.abc import Callable, Hashable
from typing import Any

import jax
import numpy as np
from penzai import pz
from penzai.core.variables import LabeledVariable, LabeledVariableValue

from penzai_shard.reduced_statistics import align_names
from penzai_shard.rule_kinds import LogicalAxis
from penzai_shard.tree_paths import join_paths, path_text


@dataclasses.dataclass(frozen=True)
class NamedLeaf:
    """One array of a tree: what it is and what its dimensions are called.

    Attributes:
        path: Where it is; for a parameter or state variable, its label.
        names: The logical axis of each dimension in the order of the data, None for a positional
            dimension; None altogether for an array without names.
        shape: Its shape.
        dtype: Its dtype, or None if the tree does not say.
        array: What stands in the tree as the data: an array, a struct, a tracer.
        whole: For a statistic that keeps only some of a parameter's dimensions, the names and
            sizes of all of them: its layout is that of the parameter, where they are kept.
        note: How the names were found, where that is not plain; empty otherwise.
        problem: Why the names cannot be right; empty when they can.
    """

    path: str
    names: tuple[LogicalAxis | None, ...] | None
    shape: tuple[int, ...]
    dtype: Any
    array: Any
    whole: tuple[tuple[LogicalAxis | None, ...], tuple[int, ...]] | None = None
    note: str = ""
    problem: str = ""


Visit = Callable[[NamedLeaf], Any]

# Modules of optional or deprecated libraries are looked up, not imported: a tree can hold their
# objects only if somebody has imported them already.
_V1_PARAMETERS = "penzai.deprecated.v1.nn.parameters"


@functools.lru_cache(maxsize=1024)
def _unit_kind(node_type: Hashable) -> str | None:
    """Which kind of named unit a type is, or None for containers and plain leaves."""
    assert isinstance(node_type, type)
    if issubclass(node_type, pz.nx.NamedArray):
        return "named_array"
    if issubclass(node_type, pz.nx.NamedArrayView):
        return "named_array_view"
    if issubclass(node_type, LabeledVariable):
        return "variable"
    if issubclass(node_type, LabeledVariableValue):
        return "variable_value"
    if node_type.__module__ == _V1_PARAMETERS:
        v1 = sys.modules[_V1_PARAMETERS]
        if issubclass(node_type, v1.Parameter | v1.FrozenParameter):
            return "v1_parameter"
        if issubclass(node_type, v1.UninitializedParameter):
            return "v1_uninitialized"
    return None


def is_named_unit(node: Any) -> bool:
    """Whether a node is a named array, a variable or a parameter, and is read as a whole.

    >>> is_named_unit(pz.nx.ones({"a": 2})), is_named_unit({"w": 1})
    (True, False)
    """
    return _unit_kind(node.__class__) is not None


def is_array_like(value: Any) -> bool:
    """Whether a leaf is an array, a struct that describes one, or a Python number.

    >>> is_array_like(np.ones(2)), is_array_like(1.5), is_array_like("text")
    (True, True, False)
    """
    return (hasattr(value, "shape") and hasattr(value, "dtype")) or isinstance(
        value, bool | int | float | complex
    )


def map_arrays(tree: Any, visit: Visit, path: str = "") -> Any:
    """Puts ``visit(leaf)`` in place of every array of a tree.

    Mutable variables are replaced by their frozen values, uninitialised parameters by
    parameters; everything else of the structure is kept. A variable that occurs several times
    is visited once and its result used again.

    Args:
        tree: Any pytree.
        visit: Called with a ``NamedLeaf`` for every array. Leaves that are no arrays (strings,
            functions) are passed too, with names None and no dtype.
        path: Prepended to all paths.

    Returns:
        A tree with the results in place of the arrays.

    >>> map_arrays({"w": pz.nx.ones({"a": 2, "b": 3})}, lambda leaf: leaf.names)["w"].data_array
    ('a', 'b')
    """
    seen: dict[int, Any] = {}

    def at_unit(key_path: Any, node: Any) -> Any:
        here = join_paths(path, path_text(key_path))
        if isinstance(node, LabeledVariable):
            if id(node) not in seen:
                seen[id(node)] = _map_unit(node, visit, here)
            return seen[id(node)]
        return _map_unit(node, visit, here)

    return jax.tree_util.tree_map_with_path(at_unit, tree, is_leaf=is_named_unit)


def leaves_of(tree: Any, path: str = "") -> list[NamedLeaf]:
    """Every array of a tree with its names, in the order of flattening.

    >>> [leaf.path for leaf in leaves_of({"w": pz.nx.ones({"a": 2}), "b": np.ones(3)})]
    ['b', 'w']
    """
    found: list[NamedLeaf] = []
    map_arrays(tree, found.append, path)
    return found


def _map_unit(node: Any, visit: Visit, path: str) -> Any:
    match _unit_kind(node.__class__):
        case None:
            return visit(_plain_leaf(node, path))
        case "named_array" | "named_array_view":
            return _map_named_array(node, visit, path)
        case "variable":
            return _map_unit(node.freeze(), visit, path)
        case "variable_value":
            value = map_arrays(node.value, visit, str(node.label))
            return dataclasses.replace(node, value=value)
        case "v1_parameter":
            return dataclasses.replace(node, value=map_arrays(node.value, visit, node.name))
        case _:
            return _map_unit(node.as_empty_parameter(), visit, path)


def _plain_leaf(value: Any, path: str) -> NamedLeaf:
    if not is_array_like(value):
        return NamedLeaf(path, None, (), None, value)
    return NamedLeaf(path, None, tuple(np.shape(value)), jax.dtypes.result_type(value), value)


def _map_named_array(node: Any, visit: Visit, path: str) -> Any:
    data = node.data_array
    if hasattr(data, "shape") and hasattr(data, "dtype"):
        return with_data(node, visit(_named_leaf(node, data, path, None)))
    leaves = jax.tree_util.tree_leaves(data)
    if data is None or (len(leaves) == 1 and leaves[0] is data):
        # The data array is missing or is no array: only its names count.
        return with_data(node, visit(_nameless_data_leaf(node, data, path)))
    # Some optimizers keep several statistics, or none, where the parameter has one array.
    mapped = jax.tree_util.tree_map_with_path(
        lambda key_path, part: visit(
            _named_leaf(node, part, join_paths(path, path_text(key_path)), key_path)
        ),
        data,
    )
    return with_data(node, mapped)


def with_data(node: Any, data: Any) -> Any:
    """A named array like another, with other data; nothing is checked.

    >>> with_data(pz.nx.ones({"a": 2}), "anything").data_array
    'anything'
    """
    made = object.__new__(type(node))
    made.__dict__.update(node.__dict__)
    made.__dict__["data_array"] = data
    return made


def dimension_names(node: Any) -> tuple[LogicalAxis | None, ...] | None:
    """The logical axis of each data dimension of a named array, None for positional ones.

    Returns None where the data array's shape contradicts the names.

    >>> dimension_names(pz.nx.ones({"a": 2, "b": 3}).untag("b"))
    ('a', None)
    """
    shape = tuple(node.data_array.shape)
    if isinstance(node, pz.nx.NamedArrayView):
        if tuple(node.data_shape) != shape:
            return None
        names: list[LogicalAxis | None] = [None] * len(shape)
        for name, dimension in node.data_axis_for_name.items():
            names[dimension] = name
        return tuple(names)
    sizes = tuple(node.named_axes.values())
    positional = len(shape) - len(sizes)
    if positional < 0 or shape[positional:] != sizes:
        return None
    return (None,) * positional + tuple(node.named_axes)


def named_sizes(node: Any) -> dict[LogicalAxis, int]:
    """Sizes of the named dimensions in the order of the data, whatever the data array is.

    >>> named_sizes(pz.nx.ones({"a": 2, "b": 3}))
    {'a': 2, 'b': 3}
    """
    if isinstance(node, pz.nx.NamedArrayView):
        by_dimension = sorted(node.data_axis_for_name.items(), key=lambda item: item[1])
        return {name: node.data_shape[dimension] for name, dimension in by_dimension}
    return dict(collections.OrderedDict(node.named_axes))


def _named_leaf(node: Any, data: Any, path: str, part: Any) -> NamedLeaf:
    shape, dtype = tuple(np.shape(data)), jax.dtypes.result_type(data)
    if part is None:
        names = dimension_names(node)
        if names is not None:
            return NamedLeaf(path, names, shape, dtype, data)
    sizes = named_sizes(node)
    aligned = align_names(sizes, shape, path, part)
    whole = (tuple(sizes), tuple(sizes.values()))
    return NamedLeaf(path, aligned.names, shape, dtype, data, whole, aligned.note, aligned.problem)


def _nameless_data_leaf(node: Any, data: Any, path: str) -> NamedLeaf:
    if isinstance(node, pz.nx.NamedArrayView):
        names = dimension_names(with_data(node, np.empty(node.data_shape, np.int8)))
        return NamedLeaf(path, names, tuple(node.data_shape), None, data)
    sizes = named_sizes(node)
    return NamedLeaf(path, tuple(sizes), tuple(sizes.values()), None, data)
