"""Penzai's named arrays taken apart and made, whatever stands in the place of their data."""

import collections
from collections.abc import Sequence
from typing import Any

import numpy as np
from penzai import pz

from penzai_shard.padded_arrays import PaddedArray, Padding
from penzai_shard.rule_kinds import LogicalAxis, PositionalDimension


def named_array(data: Any, names: Sequence[LogicalAxis | None], keeps_shape: bool = False) -> Any:
    """An array with a name for each dimension, None for a positional one.

    Args:
        data: An array, or a struct that describes one.
        names: One for each of its dimensions.
        keeps_shape: Whether it must say the length of all dimensions when other data is put in, as
            optimizers do; a ``NamedArray`` says that of named ones alone.

    Returns:
        A ``NamedArray``, or a ``NamedArrayView`` where that cannot say it.

    >>> named_array(np.ones((2, 3)), ("a", None)).named_shape
    {'a': 2}
    """
    shape = tuple(np.shape(data))
    positional = [i for i, name in enumerate(names) if name is None]
    if positional == list(range(len(positional))) and not (keeps_shape and positional):
        sizes = zip(names, shape, strict=True)
        return pz.nx.NamedArray(
            named_axes=collections.OrderedDict(
                (name, size) for name, size in sizes if name is not None
            ),
            data_array=data,
        )
    return pz.nx.NamedArrayView(
        data_shape=shape,
        data_axis_for_logical_axis=tuple(positional),
        data_axis_for_name={name: i for i, name in enumerate(names) if name is not None},
        data_array=data,
    )


def unnamed_data(value: Any) -> Any:
    """The data array of a named array, without padding; anything else as it is.

    >>> unnamed_data(pz.nx.wrap(np.arange(2)).tag("a")).tolist(), unnamed_data(3)
    ([0, 1], 3)
    """
    return value.data_array if pz.nx.is_namedarray(value) else value


def stored_data(node: Any) -> Any:
    """What a named array stores: its data array, or the padded one.

    >>> stored_data(pz.nx.wrap(np.arange(2), "a")).tolist()
    [0, 1]
    """
    return node.stored if isinstance(node, PaddedArray) else node.data_array


def with_data(node: Any, data: Any) -> Any:
    """A named array like another that stores other data; nothing is checked.

    >>> with_data(pz.nx.ones({"a": 2}), "anything").data_array
    'anything'
    """
    made = object.__new__(type(node))
    made.__dict__.update(node.__dict__)
    made.__dict__["stored" if isinstance(node, PaddedArray) else "data_array"] = data
    return made


def stored_with(node: Any, data: Any, padding: Padding | None) -> Any:
    """A named array like another that stores other data, and pads it otherwise or not at all.

    >>> stored_with(pz.nx.ones({"a": 3}), np.ones(4), Padding((4,), (("x",),))).named_shape
    {'a': 3}
    """
    if padding is not None:
        sizes = dimension_sizes(node).items()
        named = {name: size for name, size in sizes if not isinstance(name, PositionalDimension)}
        return PaddedArray(data, named, padding)
    if isinstance(node, PaddedArray):
        return pz.nx.NamedArray(node.named_axes, data)
    return with_data(node, data)


def can_be_padded(node: Any) -> bool:
    """Whether the positional dimensions of a named array come first, in their order.

    >>> can_be_padded(pz.nx.ones({"a": 2, "b": 2}).untag("b"))
    False
    """
    if not isinstance(node, pz.nx.NamedArrayView):
        return True
    positional = tuple(node.data_axis_for_logical_axis)
    return positional == tuple(range(len(positional)))


def with_shape(node: Any, shape: tuple[int, ...], data: Any) -> Any:
    """A named array like another, with data of other lengths; nothing is checked.

    >>> with_shape(pz.nx.ones({"a": 2}), (3,), np.ones(3)).named_axes["a"]
    3
    """
    if isinstance(node, PaddedArray):
        node = pz.nx.NamedArray(node.named_axes, None)
    made = with_data(node, data)
    if isinstance(node, pz.nx.NamedArrayView):
        made.__dict__["data_shape"] = tuple(shape)
    else:
        sizes = shape[len(shape) - len(node.named_axes) :]
        made.__dict__["named_axes"] = type(node.named_axes)(
            zip(node.named_axes, sizes, strict=True)
        )
    return made


def dimension_names(
    node: Any, shape: tuple[int, ...] | None = None
) -> tuple[LogicalAxis | None, ...] | None:
    """The logical axis of each data dimension of a named array, None for positional ones.

    Args:
        node: A named array or view.
        shape: The shape of its data, if that is not known from what it stores.

    Returns:
        The names, or None where the shape contradicts them.

    >>> dimension_names(pz.nx.ones({"a": 2, "b": 3}).untag("b"))
    ('a', None)
    """
    lengths = tuple(node.named_axes.values()) if isinstance(node, pz.nx.NamedArray) else ()
    if shape is None:
        shape = tuple(np.shape(stored_data(node)))
        lengths = node.padding.lengths if isinstance(node, PaddedArray) else lengths
    if isinstance(node, pz.nx.NamedArrayView):
        if tuple(node.data_shape) != shape:
            return None
        names: list[LogicalAxis | None] = [None] * len(shape)
        for name, dimension in node.data_axis_for_name.items():
            names[dimension] = name
        return tuple(names)
    positional = len(shape) - len(lengths)
    if positional < 0 or shape[positional:] != lengths:
        return None
    return (None,) * positional + tuple(node.named_axes)


def dimension_sizes(node: Any) -> dict[LogicalAxis, int]:
    """Sizes of the dimensions in the order of the data, whatever the data array is.

    Positional dimensions are there as ``PositionalDimension``, if their length is known without the
    data: a view knows it.

    >>> dimension_sizes(pz.nx.ones({"a": 2, "b": 3}))
    {'a': 2, 'b': 3}
    >>> dimension_sizes(pz.nx.ones({"a": 2, "b": 3}).untag("b"))
    {'a': 2, PositionalDimension(number=1): 3}
    """
    shape = shape_without_data(node)
    names = dimension_names(node, shape) or ()
    return {
        PositionalDimension(i) if name is None else name: size
        for i, (name, size) in enumerate(zip(names, shape, strict=True))
    }


def shape_without_data(node: Any) -> tuple[int, ...]:
    """The shape of a view's data; that of the named dimensions of a ``NamedArray``."""
    is_view = isinstance(node, pz.nx.NamedArrayView)
    return tuple(node.data_shape if is_view else node.named_axes.values())
