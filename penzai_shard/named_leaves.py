"""A tree's arrays with their logical axis names.

Trees hold named arrays in several ways: as ``NamedArray`` and ``NamedArrayView``, inside mutable
variables and their frozen values, inside the parameters of Penzai's first API, in what other
libraries put around their arrays (see ``readers``), and as plain arrays without names. This module
is the one that knows them. ``map_arrays`` visits every array and puts
something else (an index, a sharding) in its place; the result has the structure of the tree after
``pz.freeze_variables``.
"""

import dataclasses
import functools
from collections.abc import Callable, Hashable
from typing import Any

import jax
import numpy as np
from penzai import pz
from penzai.core.variables import AutoStateVarLabel, LabeledVariable, LabeledVariableValue

from penzai_shard.array_kinds import is_array_like
from penzai_shard.equinox_modules import (
    declared_axis_names,
    is_equinox_module_type,
    is_module_value,
)
from penzai_shard.model_variables import first_api
from penzai_shard.named_arrays import (
    can_be_padded,
    dimension_names,
    dimension_sizes,
    shape_without_data,
    stored_data,
    stored_with,
    with_data,
)
from penzai_shard.padded_arrays import PaddedArray, Padding
from penzai_shard.readers import (
    ReadArray,
    naming_in,
    not_a_tree,
    read_node,
    reader_of,
    reader_of_type,
)
from penzai_shard.reduced_statistics import DimensionsOf, ParameterSizes, align_names
from penzai_shard.rule_kinds import LogicalAxis, PositionalDimension
from penzai_shard.tree_paths import join_paths, path_text


@dataclasses.dataclass(frozen=True)
class NamedLeaf:
    """One array of a tree: what it is and what its dimensions are called.

    Attributes:
        path: Where it is; for a parameter or state variable, its label, unless that is automatic.
        names: The logical axis of each dimension in the order of the data, None for a positional
            dimension; None altogether for an array without names.
        shape: Its shape, without padding.
        dtype: Its dtype, or None if the tree does not say.
        array: What stands in the tree as the data: an array, a struct, a tracer; padded, where
            there is ``padding``.
        whole: For a statistic that keeps only some of a parameter's dimensions, which these are:
            its layout is that of the parameter in them.
        note: How the names were found, where that is not plain; empty otherwise.
        problem: Why the names cannot be right; empty when they can.
        in_nameless_module: Whether it has no names because it is in a module of Equinox, whose
            arrays have none of their own; other values in it are no arrays and stay as they are.
        naming: What a user writes to give it names, if another library holds it; for messages.
        held: What the reader of another library's array said of it.
        padding: How it is stored, if it is stored padded.
        can_be_padded: Whether what holds it in the tree can hold it padded.
    """

    path: str
    names: tuple[LogicalAxis | None, ...] | None
    shape: tuple[int, ...]
    dtype: Any
    array: Any
    whole: DimensionsOf | None = None
    note: str = ""
    problem: str = ""
    in_nameless_module: bool = False
    naming: str = ""
    held: ReadArray | None = None
    padding: Padding | None = None
    can_be_padded: bool = False

    def without_padding(self) -> "NamedLeaf":
        """The same array as it is without padding."""
        if self.padding is None:
            return self
        named = [n for n in zip(self.names or (), self.shape, strict=True) if n[0] is not None]
        true = PaddedArray(self.array, dict(named), self.padding).data_array
        return dataclasses.replace(self, array=true, padding=None)


@dataclasses.dataclass(frozen=True)
class Stored:
    """What ``map_arrays`` puts in place of a named array's data, and how that is padded.

    Attributes:
        data: What is put there.
        padding: How it is padded; None for a named array without padding.
    """

    data: Any
    padding: Padding | None


Visit = Callable[[NamedLeaf], Any]

# Fields of optimizer states that hold an array of numbers which belong to no parameter: the
# Newton-Schulz coefficients of optax's Muon.
_COEFFICIENT_FIELDS = frozenset({"ns_coeffs"})


@functools.lru_cache(maxsize=1024)
def _unit_kind(node_type: Hashable) -> str | None:
    """Which kind of named unit a type is, or None for containers and plain leaves."""
    assert isinstance(node_type, type)
    if issubclass(node_type, pz.nx.NamedArray | pz.nx.NamedArrayView):
        return "named_array"
    if issubclass(node_type, LabeledVariable | LabeledVariableValue):
        return "named_value"
    if first_api.parameter_kind(node_type):
        return "named_value"
    if is_equinox_module_type(node_type):
        return "nameless_module"
    return None if reader_of_type(node_type) is None else "foreign_array"


def is_named_unit(node: Any) -> bool:
    """Whether a node is a named array, a variable or a parameter, and is read as a whole.

    So is what other libraries put around their arrays.

    >>> is_named_unit(pz.nx.ones({"a": 2})), is_named_unit({"w": 1})
    (True, False)
    """
    return _unit_kind(node.__class__) not in (None, "nameless_module")


def _is_known(node: Any) -> bool:
    return _unit_kind(node.__class__) is not None


def map_arrays(tree: Any, visit: Visit, path: str = "") -> Any:
    """Puts ``visit(leaf)`` in place of every array of a tree.

    Mutable variables are replaced by their frozen values, uninitialised parameters by
    parameters; everything else of the structure stays. A variable that occurs several times,
    frozen or not, is visited once and its result used again.

    Args:
        tree: Any pytree.
        visit: Called with a ``NamedLeaf`` for every array. Leaves that are not arrays (strings,
            functions) are visited too, with names None and no dtype. What it returns is stored as
            the array was, padded or not, unless it is a ``Stored``.
        path: Prepended to all paths.

    Returns:
        A tree with the results in place of the arrays.

    >>> map_arrays({"w": pz.nx.ones({"a": 2, "b": 3})}, lambda leaf: leaf.names)["w"].data_array
    ('a', 'b')
    """
    plain_naming = functools.cache(lambda: naming_in(tree))
    return _ArrayMapper(visit, ParameterSizes(tree), plain_naming).tree(tree, path, path)


class _ArrayMapper:
    """``map_arrays``, with the place in the whole tree where labels stand for the path."""

    def __init__(
        self,
        visit: Visit,
        parameters: ParameterSizes,
        plain_naming: Callable[[], str],
        in_nameless_module: bool = False,
    ) -> None:
        self.visit = visit
        self.parameters = parameters
        self.plain_naming = plain_naming
        self.in_nameless_module = in_nameless_module
        self.seen: dict[Hashable, Any] = {}

    def tree(self, tree: Any, path: str, place: str) -> Any:
        is_leaf = is_named_unit if self.in_nameless_module else _is_known
        declared = declared_axis_names(tree) if self.in_nameless_module else {}

        def at_unit(key_path: Any, node: Any) -> Any:
            text = path_text(key_path)
            own_path, own_place = join_paths(path, text), join_paths(place, text)
            if _is_coefficients(key_path) and is_array_like(node):
                return self.visit(_coefficients_leaf(node, own_path))
            if text in declared and is_array_like(node):
                return self.visit(_declared_leaf(node, own_path, declared[text]))
            return self.unit(node, own_path, own_place)

        return jax.tree_util.tree_map_with_path(at_unit, tree, is_leaf=is_leaf)

    def unit(self, node: Any, path: str, place: str) -> Any:
        match _unit_kind(node.__class__):
            case None:
                leaf = _plain_leaf(node, path, self.in_nameless_module)
                if naming := self.plain_naming():
                    leaf = dataclasses.replace(leaf, naming=naming)
                return self.visit(leaf)
            case "nameless_module":
                inside = _ArrayMapper(self.visit, self.parameters, self.plain_naming, True)
                return inside.tree(node, path, place)
            case "named_array":
                return self.named_array(node, path, place)
            case "foreign_array":
                return self.foreign_array(node, path, place)
        identity = _identity(node)
        if identity not in self.seen:
            self.seen[identity] = self.named_value(node, path, place)
        return self.seen[identity]

    def named_value(self, node: Any, path: str, place: str) -> Any:
        """The value of a variable or of a parameter, which has a name of its own."""
        if isinstance(node, LabeledVariable):
            node = node.freeze()
        elif first_api.parameter_kind(type(node)) == "uninitialized":
            node = node.as_empty_parameter()
        label = node.label if isinstance(node, LabeledVariableValue) else node.name
        if not isinstance(label, AutoStateVarLabel):
            # An automatic label is the id of an object, which says nothing to anyone.
            path, place = str(label), join_paths(place, str(label))
        return dataclasses.replace(node, value=self.tree(node.value, path, place))

    def named_array(self, node: Any, path: str, place: str) -> Any:
        data = stored_data(node)
        names = dimension_names(node) if is_array_like(data) else None
        if not _is_missing(data) and names is None:
            return with_data(node, self.statistics(data, dimension_sizes(node), path, place))
        # Where the data array is missing or is not an array, only its names count.
        leaf = _dataless_leaf(node, data, path) if names is None else _plain_leaf(data, path)
        names = leaf.names if names is None else names
        leaf = dataclasses.replace(leaf, names=names, can_be_padded=can_be_padded(node))
        if isinstance(node, PaddedArray):
            positional = leaf.shape[: len(leaf.shape) - len(node.named_axes)]
            shape = (*positional, *node.named_axes.values())
            leaf = dataclasses.replace(leaf, shape=shape, padding=node.padding)
        result = self.visit(leaf)
        if isinstance(result, Stored):
            return stored_with(node, result.data, result.padding)
        return with_data(node, result)

    def foreign_array(self, node: Any, path: str, place: str) -> Any:
        """What another library puts around one of its arrays."""
        reader = reader_of(node)
        assert reader is not None
        identity = id(node) if reader.shares else object()
        if identity not in self.seen:
            data = self.foreign_data(read_node(reader, node), reader.naming, path, place)
            self.seen[identity] = reader.with_data(node, data)
        return self.seen[identity]

    def foreign_data(self, held: ReadArray, naming: str, path: str, place: str) -> Any:
        """What stands in place of the data that another library holds."""
        is_array = is_array_like(held.data)
        if held.problem:
            return self.visit(_foreign_leaf(held, path, naming))
        if held.data is None or (held.names is None and not is_array):
            # A variable may hold a tree of arrays, which have no names.
            return self.tree(held.data, path, place)
        sizes = self.sizes_of(held, path)
        fits = is_array and (sizes is None or (*sizes.values(),) == np.shape(held.data))
        if fits or _is_missing(held.data):
            return self.visit(_foreign_leaf(held, path, naming))
        return self.statistics(held.data, sizes, path, place)

    def sizes_of(self, held: ReadArray, path: str) -> dict[LogicalAxis, int] | None:
        """Names and sizes of the parameter that another library's array belongs to, or is."""
        if held.names and held.sizes is None:
            shape = np.shape(held.data) if is_array_like(held.data) else None
            return self.parameters.of(path, held.names, shape)
        return None if held.sizes is None else dict(zip(held.names or (), held.sizes, strict=True))

    def statistics(
        self, data: Any, sizes: dict[LogicalAxis, int] | None, path: str, place: str
    ) -> Any:
        """What an optimizer put in the place of a named array's data, or several such arrays."""

        def visit(key_path: Any, part: Any) -> Any:
            key_path = None if part is data else key_path
            own = join_paths(path, path_text(key_path or ()))
            return self.visit(_statistic_leaf(sizes, part, own, place, key_path))

        # Some optimizers keep several statistics, or none, where the parameter has one array.
        return jax.tree_util.tree_map_with_path(visit, data)


def _is_missing(data: Any) -> bool:
    """Whether there is no array, nor a tree of them, in the place of an array."""
    leaves = jax.tree_util.tree_leaves(data)
    return not is_array_like(data) and (data is None or (len(leaves) == 1 and leaves[0] is data))


def _identity(node: Any) -> Hashable:
    """Equal for two occurrences of one variable, also of a frozen one that was taken apart."""
    if isinstance(node, LabeledVariable):
        return id(node)
    if isinstance(node, LabeledVariableValue):
        data = stored_data(node.value) if pz.nx.is_namedarray(node.value) else node.value
        # Statistics of a parameter are named by where they are.
        is_statistic = data is not node.value and dimension_names(node.value) is None
        if is_array_like(data) and not is_statistic:
            return type(node), node.label, id(data)
    return object()


def leaves_of(tree: Any, path: str = "") -> list[NamedLeaf]:
    """Every array of a tree with its names, in the order of flattening.

    >>> [leaf.path for leaf in leaves_of({"w": pz.nx.ones({"a": 2}), "b": np.ones(3)})]
    ['b', 'w']
    """
    found: list[NamedLeaf] = []
    map_arrays(tree, found.append, path)
    return found


def _plain_leaf(value: Any, path: str, in_nameless_module: bool = False) -> NamedLeaf:
    shape, dtype = (), None
    if is_array_like(value) and not (in_nameless_module and is_module_value(value)):
        shape, dtype = tuple(np.shape(value)), jax.dtypes.result_type(value)
    elif problem := not_a_tree(value):
        return NamedLeaf(path, None, shape, dtype, value, problem=problem)
    return NamedLeaf(path, None, shape, dtype, value, in_nameless_module=in_nameless_module)


def _is_coefficients(key_path: Any) -> bool:
    if not key_path or not isinstance(key_path[-1], jax.tree_util.GetAttrKey):
        return False
    return key_path[-1].name in _COEFFICIENT_FIELDS


def _coefficients_leaf(value: Any, path: str) -> NamedLeaf:
    """An array that has nothing to name: all its dimensions are positional."""
    leaf = _plain_leaf(value, path)
    return dataclasses.replace(leaf, names=(None,) * len(leaf.shape), note="coefficients")


def _declared_leaf(value: Any, path: str, names: tuple[str, ...]) -> NamedLeaf:
    """A plain array in a module of Equinox whose class gives its dimensions names.

    What computes with it gets them from nowhere else, so they cannot be kept with the array.
    """
    problem = (
        f"the axis names {names} that its field declares are not read. Give them to the array: "
        f"name_axes(module, {{{path!r}: {names}}})"
    )
    return dataclasses.replace(_plain_leaf(value, path, True), problem=problem)


def _statistic_leaf(
    sizes: dict[LogicalAxis, int] | None, data: Any, path: str, place: str, part: Any
) -> NamedLeaf:
    """What an optimizer keeps in the place of a parameter of these names and sizes, if known."""
    leaf = _plain_leaf(data, path)
    if leaf.dtype is None:
        return leaf
    if sizes is None:
        problem = (
            "several arrays are in the place of one, and which of its logical axes each has is "
            "known only beside the parameter that they belong to. Give the whole train state, with "
            "its parameters in a field params"
        )
        return dataclasses.replace(leaf, names=(), problem=problem)
    aligned = align_names(sizes, leaf.shape, place, part)
    names = tuple(map(_positional, sizes))
    own = tuple(map(_positional, aligned.names))
    kept = tuple(None if name is None else names.index(name) for name in own)
    return dataclasses.replace(
        leaf,
        names=own,
        whole=DimensionsOf(names, tuple(sizes.values()), kept),
        note=aligned.note,
        problem=aligned.problem,
    )


def _positional(name: LogicalAxis | None) -> LogicalAxis | None:
    return None if isinstance(name, PositionalDimension) else name


def _dataless_leaf(node: Any, data: Any, path: str) -> NamedLeaf:
    shape = shape_without_data(node)
    return NamedLeaf(path, dimension_names(node, shape), shape, None, data)


def _foreign_leaf(held: ReadArray, path: str, naming: str) -> NamedLeaf:
    leaf = _plain_leaf(held.data, path)
    if not is_array_like(held.data) and not held.problem:
        return leaf
    fitted = held.fitted()
    return dataclasses.replace(
        leaf,
        names=fitted.names,
        problem=fitted.problem,
        note=fitted.note,
        naming=naming,
        held=fitted,
    )
