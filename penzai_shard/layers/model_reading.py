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
from collections.abc import Iterable
from itertools import chain
from typing import Any, NamedTuple

import jax
import numpy as np
from penzai import pz
from penzai.core.struct import Struct, is_pytree_node_field

from penzai_shard.array_kinds import is_array_like
from penzai_shard.layers import variable_threading
from penzai_shard.layers.compiled_structure import (
    CONSTANT,
    FIXED,
    ByEquality,
    CompiledStructure,
    PlainVariable,
    ShardingTree,
    Structure,
    compiled_structure,
)
from penzai_shard.model_variables.first_api_effects import effects_as_variables

_MAPPINGS = (dict, collections.OrderedDict, collections.defaultdict)


class Inputs(NamedTuple):
    """What one call of a compiled model takes from the model.

    Attributes:
        arrays: The arrays that the variables hold now.
        constants: The arrays that are not variables.
        variables: The variables, in the order in which the compiled function counts them.
    """

    arrays: list[Any]
    constants: list[Any]
    variables: list[Any]


class ModelReading:
    """What was found in a model when it was flattened.

    Args:
        model: The model.
        in_shardings: Sharding of the argument, or None.
        out_shardings: Sharding of the output, or None.
        donate_argument: Whether the argument's buffers may be used for the output.

    Attributes:
        compiled: The compiled form of the model's structure.

    Raises:
        VariableConflictError: Two different variables of the model have the same label.
    """

    __slots__ = (
        "_axes",
        "_bare",
        "_bare_types",
        "_constants",
        "_containers",
        "_general",
        "_general_structure",
        "_named",
        "_variables",
        "compiled",
    )

    def __init__(
        self,
        model: Any,
        in_shardings: Any = None,
        out_shardings: Any = None,
        donate_argument: bool = False,
    ) -> None:
        leaves, tree = jax.tree_util.tree_flatten(effects_as_variables(model))
        distinct = {id(leaf): leaf for leaf in leaves if variable_threading.is_variable(leaf)}
        variable_threading.check_distinct_slots(distinct.values())
        others = [leaf for leaf in leaves if id(leaf) not in distinct]
        self._containers = _Containers(model)
        self._constants = [leaf for leaf in others if is_array_like(leaf)]
        self._named = list(filter(_holds_named_array, distinct.values()))
        self._bare = list(filter(_holds_bare_array, distinct.values()))
        plain = [*self._named, *self._bare]
        known = set(map(id, plain))
        self._general = [variable for key, variable in distinct.items() if key not in known]
        self._variables = [*plain, *self._general]
        self._axes = [variable._raw_value.named_axes for variable in self._named]
        self._bare_types = [type(variable._raw_value) for variable in self._bare]
        self._general_structure: Any = jax.tree_util.tree_structure(self._frozen_general())
        index_of = {id(variable): index for index, variable in enumerate(self._variables)}
        metadata = [dict(variable.metadata) for variable in plain]
        axes = [*(tuple(axes.items()) for axes in self._axes), *(None for _ in self._bare)]
        structure = Structure(
            body=tree,
            places=tuple(
                index_of.get(id(leaf), CONSTANT if is_array_like(leaf) else FIXED)
                for leaf in leaves
            ),
            fixed=tuple(leaf for leaf in others if not is_array_like(leaf)),
            plain=tuple(
                PlainVariable(type(variable), variable.label, ByEquality(own), names)
                for variable, own, names in zip(plain, metadata, axes, strict=True)
            ),
            general=_structure_without_sharing(self._general),
            in_shardings=ShardingTree.of(in_shardings),
            out_shardings=ShardingTree.of(out_shardings),
            donate_argument=donate_argument,
        )
        shareable = not any(map(_holds_array, metadata))
        self.compiled = (compiled_structure if shareable else CompiledStructure)(structure)

    def inputs(self) -> Inputs | None:
        """What a call takes from the model, or None if the model is no longer as it was read."""
        try:
            arrays = self.arrays() if self._containers.unchanged() else None
        except Exception:
            # Something is not what it was, in a way that comparing it cannot cope with. Reading
            # the model again tells what it is, or says what is wrong with it.
            return None
        return None if arrays is None else Inputs(arrays, self._constants, self._variables)

    def arrays(self) -> list[Any] | None:
        """The arrays that the variables hold now; None if they hold them in another form."""
        with variable_threading.EXCHANGE:
            # Comprehensions over one attribute, and comparisons of whole lists, in which
            # identical elements are equal at once, are the fastest loops that Python has here.
            values = [variable._raw_value for variable in self._named]
            if [value.named_axes for value in values] != self._axes:
                return None
            arrays = [value.data_array for value in values]
            if self._bare:
                bare = [variable._raw_value for variable in self._bare]
                if [type(value) for value in bare] != self._bare_types:
                    return None
                arrays += bare
            if self._general:
                leaves, structure = jax.tree_util.tree_flatten(self._frozen_general())
                if structure != self._general_structure:
                    return None
                arrays += leaves
        return arrays

    def _frozen_general(self) -> list[Any]:
        return [variable.freeze() for variable in self._general]


def _holds_named_array(variable: Any) -> bool:
    return (
        type(variable) in variable_threading.PLAIN_VARIABLES
        and type(variable._raw_value) is pz.nx.NamedArray
        and isinstance(variable._raw_value.data_array, jax.Array)
    )


def _holds_bare_array(variable: Any) -> bool:
    return type(variable) in variable_threading.PLAIN_VARIABLES and isinstance(
        variable._raw_value, jax.Array
    )


def _structure_without_sharing(variables: Iterable[Any]) -> Any:
    """Structure of the frozen variables, in which no metadata is the variables' own object."""
    frozen = []
    for variable in variables:
        value = variable.freeze()
        if isinstance(getattr(value, "metadata", None), dict):
            value = dataclasses.replace(value, metadata=dict(value.metadata))
        frozen.append(value)
    return jax.tree_util.tree_structure(frozen)


def _holds_array(metadata: dict[Any, Any]) -> bool:
    return bool(metadata) and any(
        isinstance(leaf, jax.Array | np.ndarray) for leaf in jax.tree_util.tree_leaves(metadata)
    )


class _Containers:
    """The mutable containers of a model, and copies of them to compare with.

    In comparing two lists or dictionaries, Python looks at the elements themselves only where
    they are not identical. So a comparison is fast, and an element that was replaced by another
    is noticed unless both are equal layers, frozen and with the very same variables.
    """

    __slots__ = ("_copies", "_custom", "_exact", "_lists", "_mapping_copies", "_mappings")

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
        if self._lists != self._copies or self._mappings != self._mapping_copies:
            return False
        if self._exact and not self._identical():
            return False
        return all(_same_children(*custom) for custom in self._custom)

    def _identical(self) -> bool:
        """Compares by identity. For containers of numbers and arrays: 1, 1.0 and True are equal."""
        flat = chain.from_iterable
        values = (mapping.values() for mapping in self._mappings)
        copies = (
            [copy[key] for key in mapping]
            for mapping, copy in zip(self._mappings, self._mapping_copies, strict=True)
        )
        return all(map(operator.is_, flat(self._lists), flat(self._copies))) and all(
            map(operator.is_, flat(values), flat(copies))
        )

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
            children = jax.tree_util.default_registry.flatten_one_level(node)
            if children is None:
                self._exact |= loose
                return
            if not isinstance(node, tuple) and node is not None:
                self._custom.append((node, list(children[0]), children[1]))
            for child in children[0]:
                self._visit(child, loose=loose)


def _same_children(node: Any, children: list[Any], static: Any) -> bool:
    """Whether a node of a class that is not known to be frozen still consists of the same."""
    children_now, static_now = jax.tree_util.default_registry.flatten_one_level(node)
    children_now = list(children_now)
    return (
        len(children_now) == len(children)
        and all(map(operator.is_, children_now, children))
        and static_now == static
    )


@functools.lru_cache(maxsize=1024)
def _fields_of_struct(kind: type) -> tuple[str, ...] | None:
    """Names of the fields of a frozen Penzai class that hold subtrees; None for other classes."""
    if not (issubclass(kind, Struct) and dataclasses.is_dataclass(kind)):
        return None
    return tuple(field.name for field in dataclasses.fields(kind) if is_pytree_node_field(field))
