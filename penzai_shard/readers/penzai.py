"""Reads Penzai's named arrays, its variables, and the parameters of its first API.

A named array's dimensions are its positional ones, which come first, and then its named ones. An
optimizer's statistic of a named array is a named array too, whose data has another shape.
"""

import dataclasses
import sys
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
from penzai import pz
from penzai.core.variables import AutoStateVarLabel, LabeledVariable, LabeledVariableValue

from penzai_shard.readers.reader import AxisSizes, Content

_V1_PARAMETERS = "penzai.deprecated.v1.nn.parameters"


class _NamedArrays:
    library = "penzai"

    def reads(self, kind: type) -> bool:
        return kind is pz.nx.NamedArray

    def open(self, node: Any) -> Content:
        data, names = node.data_array, tuple(node.named_axes)
        sizes = tuple(node.named_axes.values())
        shape = getattr(data, "shape", None)
        if shape is None or tuple(shape[max(len(shape) - len(sizes), 0) :]) != sizes:
            fixed = None if shape is None and jax.tree_util.all_leaves([data]) else sizes
            return Content(data, AxisSizes(names, fixed, sizes), names, sizes)
        front = (None,) * (len(shape) - len(names))
        return Content(data, AxisSizes(names, None, sizes), front + names)

    def close(self, template: AxisSizes, data: Any) -> Any:
        # Past the constructor, which refuses data that is no array.
        node = object.__new__(pz.nx.NamedArray)
        sizes = template.of(data)
        node.__dict__["named_axes"] = OrderedDict(zip(template.names, sizes, strict=True))
        node.__dict__["data_array"] = data
        return node


@dataclasses.dataclass(frozen=True)
class _ViewTemplate:
    names: tuple[Any, ...]
    # The data's dimension of each name and of each positional dimension, in the view's order.
    dim_of_name: tuple[tuple[Any, int], ...]
    dim_of_position: tuple[int, ...]
    shape: tuple[int, ...] = dataclasses.field(compare=False, repr=False)


class _NamedArrayViews:
    library = "penzai"

    def reads(self, kind: type) -> bool:
        return kind is pz.nx.NamedArrayView

    def open(self, node: Any) -> Content:
        shape = tuple(node.data_shape)
        by_dim = {dim: name for name, dim in node.data_axis_for_name.items()}
        names = tuple(by_dim.get(dim) for dim in range(len(shape)))
        dims = tuple(node.data_axis_for_name.items())
        template = _ViewTemplate(names, dims, tuple(node.data_axis_for_logical_axis), shape)
        data = node.data_array
        differs = tuple(getattr(data, "shape", ())) != shape
        return Content(data, template, names, shape if differs else None)

    def close(self, template: _ViewTemplate, data: Any) -> Any:
        shape = tuple(getattr(data, "shape", template.shape))
        node = object.__new__(pz.nx.NamedArrayView)
        node.__dict__["data_shape"] = shape if len(shape) == len(template.shape) else template.shape
        node.__dict__["data_axis_for_name"] = dict(template.dim_of_name)
        node.__dict__["data_axis_for_logical_axis"] = template.dim_of_position
        node.__dict__["data_array"] = data
        return node


@dataclasses.dataclass(frozen=True)
class _VariableTemplate:
    kind: type
    label: Any
    metadata: dict[Any, Any]
    # An automatic label is the number of an object: two builds of a model differ in it.
    own_label: Any = dataclasses.field(compare=False, repr=False)


class _Variables:
    """Parameters and state variables, mutable or frozen; a closed one is frozen."""

    library = "penzai"

    def reads(self, kind: type) -> bool:
        return issubclass(kind, LabeledVariable | LabeledVariableValue)

    def open(self, node: Any) -> Content:
        kind, is_live = type(node), self.is_live(node)
        if is_live:
            # The type of the frozen value; the value itself may be a struct by now, or None.
            kind = pz.ParameterValue if isinstance(node, pz.Parameter) else pz.StateVariableValue
        is_automatic = isinstance(node.label, AutoStateVarLabel)
        label = None if is_automatic else node.label
        return Content(
            node.value,
            _VariableTemplate(kind, label, dict(node.metadata), node.label),
            label="" if is_automatic else str(node.label),
            role="state" if issubclass(kind, pz.StateVariableValue) else "parameter",
            identity=id(node) if is_live else (kind, node.label),
        )

    def close(self, template: _VariableTemplate, data: Any) -> Any:
        node: Any = object.__new__(template.kind)
        node.__dict__.update(label=template.own_label, value=data, metadata=dict(template.metadata))
        return node

    def is_live(self, node: Any) -> bool:
        return isinstance(node, LabeledVariable)

    def thaw(self, node: Any) -> Any:
        # A mutable variable makes arrays of what it gets, which structs and shardings cannot be.
        described = jax.ShapeDtypeStruct | jax.sharding.Sharding
        if any(isinstance(value, described) for value in jax.tree_util.tree_leaves(node.value)):
            return node
        if isinstance(node.label, AutoStateVarLabel):
            # The number of another object, which may stand in the same tree.
            return pz.StateVariable(node.value, metadata=node.metadata)
        return node.unfreeze_as_copy()


class _Slots:
    """The empty places of variables, as in a layer that was made without a key."""

    library = "penzai"

    def reads(self, kind: type) -> bool:
        return issubclass(kind, pz.ParameterSlot | pz.StateVariableSlot)

    def open(self, node: Any) -> Content:
        fix = "Give the initialiser its init_base_rng: jax.random.key(0), or bind the variables."
        return Content(None, node, label=str(node.label), problem=("its place is empty", fix))

    def close(self, template: Any, data: Any) -> Any:
        return template


class _FirstApiTemplate(NamedTuple):
    kind: type
    name: str
    initializer: Any = None
    value_structure: Any = None


class _FirstApiParameters:
    """Parameters of ``penzai.deprecated.v1``; one that is not initialised holds structs."""

    library = _V1_PARAMETERS

    def reads(self, kind: type) -> bool:
        v1 = sys.modules[_V1_PARAMETERS]
        return issubclass(kind, (v1.Parameter, v1.FrozenParameter, v1.UninitializedParameter))

    def open(self, node: Any) -> Content:
        template = _FirstApiTemplate(type(node), node.name)
        data = node
        if isinstance(node, sys.modules[_V1_PARAMETERS].UninitializedParameter):
            template = template._replace(
                initializer=node.initializer, value_structure=node.value_structure
            )
            data = node.as_empty_parameter()
        return Content(data.value, template, label=node.name, role="parameter")

    def close(self, template: _FirstApiTemplate, data: Any) -> Any:
        if template.initializer is None:
            return template.kind(data, template.name)
        leaves = jax.tree_util.tree_leaves(data)
        if all(isinstance(x, jax.ShapeDtypeStruct) and x.sharding is None for x in leaves):
            return template.kind(template.initializer, template.name, template.value_structure)
        # Values, shardings and restore structs are those of the parameter that it becomes.
        return sys.modules[_V1_PARAMETERS].Parameter(data, template.name)


def make_named(array: Any, names: Sequence[Any]) -> Any:
    """An array with names; a view where a positional dimension follows a named one.

    Args:
        array: An array, struct or tracer.
        names: A name for each dimension, None for a positional one.
    """
    front = next((dim for dim, name in enumerate(names) if name is not None), len(names))
    shape = tuple(array.shape)
    if None not in names[front:]:
        return _NamedArrays().close(AxisSizes(tuple(names[front:]), None, shape[front:]), array)
    dims = tuple((name, dim) for dim, name in enumerate(names) if name is not None)
    positions = tuple(dim for dim, name in enumerate(names) if name is None)
    return _NamedArrayViews().close(_ViewTemplate(tuple(names), dims, positions, shape), array)


def raw_values(variables: Sequence[Any]) -> list[Any]:
    """What mutable variables hold: ``value`` is a Python call for each of them."""
    return [variable._raw_value for variable in variables]


READERS = [_NamedArrays(), _NamedArrayViews(), _Variables(), _Slots(), _FirstApiParameters()]
