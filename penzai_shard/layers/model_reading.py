"""Reading a model once, and its current arrays at every call after that.

Flattening a model costs hundreds of Python calls per block. A reading keeps what flattening
found: the structure, the variables, the constants. Models are frozen, except for the ordinary
lists and dictionaries in them and for what their variables hold; these are what a reading looks
at again before it is used, with a number of Python calls that does not depend on the depth.

Labels and metadata of variables are taken as they were when the model was read, as no layer
computes with them.

To see an edit, a reading keeps the objects that it saw; it never keeps the values of variables.
It belongs to one layer, and ends with it. What somebody removes from a model in place is let go
by the layer's next call, which reads the model again.
"""

import collections
import dataclasses
import functools
import operator
from collections.abc import Sequence
from itertools import chain
from typing import Any

import jax
import numpy as np
from penzai import pz
from penzai.core.struct import Struct, is_pytree_node_field

from penzai_shard.array_kinds import is_array_like
from penzai_shard.layers import variable_threading
from penzai_shard.layers.compiled_structure import (
    CONSTANT,
    FIXED,
    INCOMPARABLE,
    CompiledStructure,
    Structure,
    compiled_structure,
)
from penzai_shard.library_apis.jax_api import children_of_node
from penzai_shard.library_apis.penzai_api import stored_values
from penzai_shard.model_variables.first_api_effects import effects_as_variables

_MAPPINGS = (dict, collections.OrderedDict, collections.defaultdict)


class ModelReading:
    """What was found in a model when it was flattened.

    Args:
        model: The model.
        options: What ``jax.jit`` is given besides the function.

    Attributes:
        compiled: The compiled form of the model's structure.
        variables: The variables, in the order in which the compiled function counts them.
        constants: The arrays that are not variables.

    Raises:
        VariableConflictError: Two different variables of the model have the same label.
    """

    def __init__(self, model: Any, options: dict[str, Any] | None = None) -> None:
        leaves, tree = jax.tree_util.tree_flatten(effects_as_variables(model))
        distinct = {id(leaf): leaf for leaf in leaves if variable_threading.is_variable(leaf)}
        variable_threading.check_distinct_slots(distinct.values())
        others = [leaf for leaf in leaves if id(leaf) not in distinct]
        by_form: dict[Any, list[Any]] = {"named": [], "bare": [], "general": []}
        for variable in distinct.values():
            by_form[_form(variable)].append(variable)
        self._named, self._bare, self._general = by_form.values()
        self._axes = [value.named_axes for value in stored_values(self._named)]
        self._bare_types = list(map(type, stored_values(self._bare)))
        self._general_structure: Any = jax.tree_util.tree_structure(self._frozen_general())
        self._containers = _Containers(model)
        self.constants = [leaf for leaf in others if is_array_like(leaf)]
        self.variables = [*self._named, *self._bare, *self._general]
        index_of = {id(variable): index for index, variable in enumerate(self.variables)}
        frozen = [_without_sharing(variable.freeze()) for variable in self.variables]
        option_leaves, option_tree = jax.tree_util.tree_flatten(options or {})
        structure = Structure(
            body=tree,
            places=tuple(
                index_of.get(id(leaf), CONSTANT if is_array_like(leaf) else FIXED)
                for leaf in leaves
            ),
            fixed=tuple(leaf for leaf in others if not is_array_like(leaf)),
            variables=jax.tree_util.tree_structure(frozen),
            name=f"Jitted_{type(model).__name__}",
            options=(option_tree, tuple(option_leaves)),
        )
        shareable = not any(map(_has_array_in_metadata, frozen))
        self.compiled = (compiled_structure if shareable else CompiledStructure)(structure)

    def current_arrays(self) -> list[Any] | None:
        """The arrays that the variables hold now; None if the model is not as it was read."""
        return self.arrays() if self._containers.unchanged() else None

    def arrays(self) -> list[Any] | None:
        """The arrays that the variables hold now; None if they hold them in another form."""
        with variable_threading.EXCHANGE:
            # Comprehensions over one attribute, and comparisons of whole lists, in which
            # identical elements are equal at once, are the fastest loops that Python has.
            try:
                values = stored_values(self._named)
                if [value.named_axes for value in values] != self._axes:
                    return None
                arrays = [value.data_array for value in values]
                if self._bare:
                    bare = stored_values(self._bare)
                    if list(map(type, bare)) != self._bare_types:
                        return None
                    arrays += bare
                if self._general:
                    leaves, structure = jax.tree_util.tree_flatten(self._frozen_general())
                    if structure != self._general_structure:
                        return None
                    arrays += leaves
            except INCOMPARABLE:
                return None  # A value of another kind, or metadata that was replaced.
        return arrays

    def _frozen_general(self) -> list[Any]:
        return [variable.freeze() for variable in self._general]


def _form(variable: Any) -> str:
    """How a variable holds its arrays, which says how they are read fastest."""
    if type(variable) in variable_threading.PLAIN_VARIABLES:
        (value,) = stored_values([variable])
        if isinstance(value, jax.Array):
            return "bare"
        if type(value) is pz.nx.NamedArray and isinstance(value.data_array, jax.Array):
            return "named"
    return "general"


def _without_sharing(frozen: Any) -> Any:
    """The frozen variable with metadata of its own, which nobody changes."""
    metadata = getattr(frozen, "metadata", None)
    if not isinstance(metadata, dict):
        return frozen
    return dataclasses.replace(frozen, metadata=dict(metadata))


def _has_array_in_metadata(frozen: Any) -> bool:
    metadata = getattr(frozen, "metadata", None)
    return bool(metadata) and any(
        isinstance(leaf, jax.Array | np.ndarray) for leaf in jax.tree_util.tree_leaves(metadata)
    )


class _Containers:
    """The mutable containers of a model, and what they held when it was read.

    In comparing two lists, Python looks at the elements themselves only where they are not
    identical. So a comparison is fast, and an element that was replaced by another is noticed
    unless both are equal layers, frozen and with the very same variables.
    """

    def __init__(self, model: Any) -> None:
        self._lists: list[list[Any]] = []
        self._mappings: list[dict[Any, Any]] = []
        self._custom: list[tuple[Any, list[Any], Any]] = []
        self._exact = False
        self._visit(model, loose=False)
        self._copies = [list(sequence) for sequence in self._lists]
        self._mapping_copies = [mapping.copy() for mapping in self._mappings]

    def unchanged(self) -> bool:
        """Whether each container holds the same objects in the same order as before."""
        try:
            if self._lists != self._copies or self._mappings != self._mapping_copies:
                return False
            # Numbers and arrays are compared by identity: 1, 1.0 and True are equal.
            if self._exact and not same_objects(
                _elements(self._lists, self._mappings),
                _elements(self._copies, self._mapping_copies),
            ):
                return False
            return all(_same_children(*custom) for custom in self._custom)
        except INCOMPARABLE:
            return False  # Something was replaced: what is identical is not compared.

    def _visit(self, node: Any, loose: bool) -> None:
        """Notes the containers at and below ``node``, which is ``loose`` if it is in one."""
        kind: Any = type(node)
        if kind is list:
            self._lists.append(node)
            for child in node:
                self._visit(child, loose=True)
        elif kind in _MAPPINGS:
            self._mappings.append(node)
            for child in node.values():
                self._visit(child, loose=True)
        elif (fields := _fields_of_struct(kind)) is not None:
            for name in fields:
                self._visit(getattr(node, name), loose=False)
        elif variable_threading.is_variable(node):
            pass
        else:
            children = children_of_node(node)
            if children is None:
                self._exact |= loose
                return
            if not isinstance(node, tuple) and node is not None:
                self._custom.append((node, list(children[0]), children[1]))
            for child in children[0]:
                self._visit(child, loose=loose)


def _same_children(node: Any, children: list[Any], static: Any) -> bool:
    """Whether a node of a class that is not known to be frozen still consists of the same."""
    children_now, static_now = children_of_node(node) or ((), None)
    return same_objects(list(children_now), children) and static_now == static


def _elements(lists: list[list[Any]], mappings: list[dict[Any, Any]]) -> list[Any]:
    return [*chain.from_iterable([*lists, *(mapping.values() for mapping in mappings)])]


def same_objects(first: Sequence[Any], second: Sequence[Any]) -> bool:
    """Whether two sequences hold the very same objects.

    >>> same_objects([1], [1]), same_objects([1], [1.0]), same_objects([1], [1, 2])
    (True, False, False)
    """
    return len(first) == len(second) and all(map(operator.is_, first, second))


@functools.lru_cache(maxsize=1024)
def _fields_of_struct(kind: type) -> tuple[str, ...] | None:
    """Names of the fields of a frozen Penzai class that hold subtrees; None for other classes."""
    if not (issubclass(kind, Struct) and dataclasses.is_dataclass(kind)):
        return None
    return tuple(field.name for field in dataclasses.fields(kind) if is_pytree_node_field(field))
