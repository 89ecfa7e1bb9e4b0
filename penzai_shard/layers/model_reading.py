"""Reading a model once, and its current arrays at every call after that.

Flattening a model costs hundreds of Python calls per block. A reading keeps what flattening
found: the structure, the variables, the constants. Models are frozen, except for the ordinary
lists and dictionaries in them and for what their variables hold; these are what a reading looks
at again before it is used, with a number of Python calls that does not depend on the depth.

A reading keeps no part of the model alive: when one of the objects that it saw is dropped, it
calls ``forget``, whose duty is to drop the reading.
"""

import collections
import dataclasses
import functools
import operator
import weakref
from collections.abc import Callable, Iterable
from itertools import chain
from typing import Any, NamedTuple

import jax
import numpy as np
from penzai import pz
from penzai.core.struct import Struct, is_pytree_node_field

from penzai_shard.layers import variable_threading
from penzai_shard.layers.compiled_structure import (
    ByEquality,
    PlainVariable,
    Structure,
    compile_structure,
    compiled_function,
)

Forget = Callable[[Any], None]
Children = tuple[list[Any], Any]

_raw_value = operator.attrgetter("_raw_value")
_data_array = operator.attrgetter("data_array")
_named_axes = operator.attrgetter("named_axes")
_label_and_metadata = operator.attrgetter("label", "metadata")
_MAPPINGS = (dict, collections.OrderedDict, collections.defaultdict)


class Inputs(NamedTuple):
    """What one call of a compiled model takes from the model.

    Attributes:
        arrays: The arrays that the variables hold now.
        constants: The leaves that are no variables.
        variables: The variables, in the order that the compiled function counts them in.
    """

    arrays: list[Any]
    constants: list[Any]
    variables: list[Any]


class ModelReading:
    """What was found in a model when it was flattened.

    Args:
        model: The model.
        forget: Called, with an argument to ignore, when an object of the model is dropped.
        in_shardings: Sharding of the argument, or None.
        out_shardings: Sharding of the output, or None.
        donate_argument: Whether the argument's buffers may be used for the output.

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
        "_labels",
        "_named",
        "_plain",
        "_variables",
        "compiled",
    )

    compiled: Callable[..., tuple[Any, dict[int, Any]]]

    def __init__(
        self,
        model: Any,
        forget: Forget,
        in_shardings: Any = None,
        out_shardings: Any = None,
        donate_argument: bool = False,
    ) -> None:
        leaves, tree = jax.tree_util.tree_flatten(model)
        self._containers = _Containers(model, forget)

        distinct = {id(leaf): leaf for leaf in leaves if variable_threading.is_variable(leaf)}
        variable_threading.check_distinct_slots(distinct.values())
        groups: dict[str, list[Any]] = {"named": [], "bare": [], "general": []}
        for variable in distinct.values():
            groups[_group_of(variable)].append(variable)
        named, bare, general = groups.values()
        plain = [*named, *bare]
        variables = [*plain, *general]
        constants = [leaf for leaf in leaves if id(leaf) not in distinct]

        self._axes = [variable._raw_value.named_axes for variable in named]
        self._bare_types = [type(variable._raw_value) for variable in bare]
        self._labels = [(variable.label, dict(variable.metadata)) for variable in plain]
        self._general_structure = jax.tree_util.tree_structure([v.freeze() for v in general])

        # A leaf that lies in a list or dictionary can be dropped without any object of the model
        # being dropped with it.
        hold = _HeldWeakly if self._containers.hold_leaves else _Held
        self._named, self._bare, self._plain = hold(named), hold(bare), hold(plain)
        self._general, self._variables = hold(general), hold(variables)
        self._constants = hold(constants)

        index_of = {id(variable): index for index, variable in enumerate(variables)}
        axes: list[Any] = [tuple(names.items()) for names in self._axes]
        axes += [None] * len(bare)
        structure = Structure(
            body=tree,
            places=tuple(index_of.get(id(leaf), -1) for leaf in leaves),
            plain=tuple(
                PlainVariable(type(variable), label, ByEquality(metadata), variable_axes)
                for variable, (label, metadata), variable_axes in zip(
                    plain, self._labels, axes, strict=True
                )
            ),
            general=_structure_without_sharing(general),
            in_shardings=ByEquality(in_shardings),
            out_shardings=ByEquality(out_shardings),
            donate_argument=donate_argument,
        )
        shareable = not any(_holds_array(variable.metadata) for variable in plain)
        self.compiled = (compiled_function if shareable else compile_structure)(structure)

    def inputs(self) -> Inputs | None:
        """What a call takes from the model, or None if the model is no longer as it was read."""
        try:
            if not self._containers.unchanged():
                return None
            named = list(map(_raw_value, self._named.get()))
            if any(kind is not pz.nx.NamedArray for kind in set(map(type, named))):
                return None
            if list(map(_named_axes, named)) != self._axes:
                return None
            if list(map(_label_and_metadata, self._plain.get())) != self._labels:
                return None
            arrays = list(map(_data_array, named))
            if self._bare_types:
                bare = list(map(_raw_value, self._bare.get()))
                if list(map(type, bare)) != self._bare_types:
                    return None
                arrays += bare
            if general := self._general.get():
                structure: Any
                values, structure = jax.tree_util.tree_flatten([v.freeze() for v in general])
                if structure != self._general_structure:
                    return None
                arrays += values
            return Inputs(arrays, self._constants.get(), self._variables.get())
        except Exception:
            # Something here is not what it was, in a way that comparing cannot cope with: a
            # dropped leaf, or an == that fails. Reading the model again says what is wrong.
            return None


class _Held:
    """A list of leaves."""

    __slots__ = ("_leaves",)

    def __init__(self, leaves: list[Any]) -> None:
        self._leaves = leaves

    def get(self) -> list[Any]:
        return self._leaves


class _HeldWeakly(_Held):
    """A list of leaves that does not keep them alive; reading a dropped one is an error."""

    __slots__ = ()

    def __init__(self, leaves: list[Any]) -> None:
        super().__init__([_weak_reference(leaf) for leaf in leaves])

    def get(self) -> list[Any]:
        leaves = [reference() for reference in self._leaves]
        if any(leaf is None for leaf in leaves):
            raise ReferenceError("a leaf of the model was dropped")
        return leaves


def _weak_reference(leaf: Any) -> Callable[[], Any]:
    try:
        return weakref.ref(leaf)
    except TypeError:
        # Numbers and the like, which are neither large nor shared.
        return functools.partial(_identity, leaf)


def _identity(leaf: Any) -> Any:
    return leaf


def _group_of(variable: Any) -> str:
    if type(variable) in variable_threading.PLAIN_VARIABLES:
        value = variable._raw_value
        if type(value) is pz.nx.NamedArray and isinstance(value.data_array, jax.Array):
            return "named"
        if isinstance(value, jax.Array):
            return "bare"
    return "general"


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
    """The mutable containers of a model, and what was in them.

    Objects of the model are told apart by their ids. That is safe because each is watched: once
    one of them is gone, and its id free for another, the reading is forgotten.
    """

    __slots__ = (
        "_custom",
        "_element_ids",
        "_kept",
        "_keys",
        "_lengths",
        "_lists",
        "_mappings",
        "_value_ids",
        "_watches",
        "hold_leaves",
    )

    def __init__(self, model: Any, forget: Forget) -> None:
        self.hold_leaves = False
        self._lists: list[list[Any]] = []
        self._mappings: list[dict[Any, Any]] = []
        self._custom: list[tuple[Any, Children]] = []
        self._watches: list[Any] = []
        self._kept: list[Any] = []
        self._visit(model, forget, loose=False)
        self._lengths = list(map(len, self._lists))
        self._element_ids = list(map(id, chain.from_iterable(self._lists)))
        self._keys = list(map(list, self._mappings))
        self._value_ids = list(map(id, chain.from_iterable(map(_values_of, self._mappings))))

    def unchanged(self) -> bool:
        """Whether each container holds the same objects in the same order as before."""
        if list(map(len, self._lists)) != self._lengths:
            return False
        if list(map(id, chain.from_iterable(self._lists))) != self._element_ids:
            return False
        if self._mappings:
            if list(map(list, self._mappings)) != self._keys:
                return False
            values = chain.from_iterable(map(_values_of, self._mappings))
            if list(map(id, values)) != self._value_ids:
                return False
        return all(_same_children(node, children) for node, children in self._custom)

    def _visit(self, node: Any, forget: Forget, loose: bool) -> None:
        """Notes the containers at and below ``node``, which is ``loose`` if it lies in one."""
        kind: Any = type(node)
        if kind is list:
            self._lists.append(node)
            for child in node:
                self._visit(child, forget, loose=True)
        elif kind in _MAPPINGS:
            self._mappings.append(node)
            for child in node.values():
                self._visit(child, forget, loose=True)
        elif (fields := _fields_of_struct(kind)) is not None:
            self._watches.append(weakref.ref(node, forget))
            for name in fields:
                self._visit(getattr(node, name), forget, loose=False)
        elif variable_threading.is_variable(node) or isinstance(node, jax.Array | np.ndarray):
            self.hold_leaves |= loose
        else:
            children = jax.tree_util.default_registry.flatten_one_level(node)
            if children is not None and not isinstance(node, tuple):
                self._custom.append((node, (list(children[0]), children[1])))
            if loose:
                # It cannot be watched, so its id stays its own only while it is kept.
                self._kept.append(node)
            for child in children[0] if children is not None else ():
                self._visit(child, forget, loose=loose)


_values_of = operator.methodcaller("values")


def _same_children(node: Any, before: Children) -> bool:
    now = jax.tree_util.default_registry.flatten_one_level(node)
    if now is None:
        return False
    children = list(now[0])
    return (
        len(children) == len(before[0])
        and all(map(operator.is_, children, before[0]))
        and now[1] == before[1]
    )


@functools.lru_cache(maxsize=1024)
def _fields_of_struct(kind: type) -> tuple[str, ...] | None:
    """Names of the fields of a frozen Penzai class that hold subtrees; None for other classes."""
    if not (issubclass(kind, Struct) and dataclasses.is_dataclass(kind)):
        return None
    return tuple(field.name for field in dataclasses.fields(kind) if is_pytree_node_field(field))
