"""Padding arrays, and taking padding off, where a tree is stored otherwise than it is given.

The sharding tree of a plan has a ``PaddedArray`` in place of each named array that is to be stored
padded. A tree that is to be laid out by it gets the same ones first.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding
from penzai import pz

from penzai_shard.array_kinds import is_abstract, is_deleted, is_traced, loses_integers
from penzai_shard.even_layouts import layouts_between, true_layout
from penzai_shard.meshes import auto_context, onto_auto_twin
from penzai_shard.named_arrays import stored_data, stored_with, unnamed_data
from penzai_shard.padded_arrays import is_padded, pad_to
from penzai_shard.processes import put_all

Pad = Callable[[Any, tuple[int, ...], NamedSharding], Any]
"""From an array to the padded one: its data, the padded shape, and where that is to be."""


def stored_as_planned(tree: Any, shardings: Any, pad: Pad) -> Any:
    """The tree with each named array stored as a sharding tree says, padded or not.

    Args:
        tree: A tree of arrays, structs or tracers; mutable variables in it stay as they are.
        shardings: Its sharding tree.
        pad: Pads the data of one array.

    >>> from penzai_shard.padded_arrays import PaddedArray, Padding
    >>> array, layout = pz.nx.ones({"a": 3}), PaddedArray(None, {"a": 3}, Padding((4,), (("x",),)))
    >>> stored_as_planned([array], [layout], lambda data, shape, _: pad_to(data, shape))[0].stored
    Array([1., 1., 1., 0.], dtype=float32)
    """
    if not _has_padding(tree) and not _has_padding(shardings):
        return tree

    def stored(node: Any, layout: Any) -> Any:
        if not pz.nx.is_namedarray(node):
            return node
        padding = layout.padding if is_padded(layout) else None
        before = node.padding if is_padded(node) else None
        data = stored_data(node)
        if padding == before or is_deleted(data):
            # What was deleted is refused where arrays without a value are.
            return node if padding == before else stored_with(node, data, padding)
        true = unnamed_data(node)
        if padding is None:
            return stored_with(node, true, None)
        positional = np.ndim(true) - len(padding.lengths)
        shape = (*np.shape(true)[:positional], *padding.lengths)
        return stored_with(node, pad(true, shape, layout.stored), padding)

    return jax.tree_util.tree_map(stored, tree, shardings, is_leaf=pz.nx.is_namedarray)


def _has_padding(tree: Any) -> bool:
    return any(map(is_padded, jax.tree_util.tree_leaves(tree, is_leaf=is_padded)))


def padded_struct(data: Any, shape: tuple[int, ...], layout: Any) -> jax.ShapeDtypeStruct:
    """A struct of the padded array, whatever describes the true one; touches no device."""
    dtype = data.dtype if is_abstract(data) else jax.typeof(data).dtype
    return jax.ShapeDtypeStruct(shape, dtype, sharding=layout)


def padded_on_devices(called: str, data: Any, shape: tuple[int, ...], layout: NamedSharding) -> Any:
    """An array with zeros behind it, laid out; every device gets its own part alone.

    Args:
        called: The function that was called, for messages.
        data: The true array; inside of a program it is padded, and its layout said by others. One
            without a value, or with values that JAX does not have, comes back as it is.
        shape: The padded shape.
        layout: Where it is to be.
    """
    if is_traced(data):
        return pad_to(data, shape)
    if is_abstract(data):
        return padded_struct(data, shape, layout)
    if loses_integers(data):
        return data
    if not isinstance(data, jax.Array) and jax.process_count() == 1:
        return padded_parts(np.asarray(data), shape, layout)
    with auto_context():
        data = onto_auto_twin(data)
        if isinstance(data, jax.Array) and data.sharding.device_set == layout.device_set:
            between: tuple[NamedSharding, ...] = ()
            if data.sharding == true_layout(layout, np.shape(data)):
                between = layouts_between(layout, np.shape(data))[::-1]
            return _padding_to(shape, layout, between)(data)
        # Padded where it is, as on its new devices it may have no layout of equal parts.
        padded = pad_to(data, shape)
        return put_all([padded], [layout], lambda: [f"an array {np.shape(data)}"], called)[0]


def padded_parts(data: np.ndarray, shape: tuple[int, ...], layout: NamedSharding) -> jax.Array:
    """An array in host memory with zeros behind it, of which each device gets its own part alone.

    Args:
        data: The true array, the same in all processes.
        shape: The padded shape.
        layout: Where it is to be.

    >>> mesh = jax.make_mesh((4, 2), ("data", "model"))
    >>> layout = NamedSharding(mesh, jax.sharding.PartitionSpec("data"))
    >>> padded_parts(np.ones(3), (4,), layout).tolist()
    [1.0, 1.0, 1.0, 0.0]
    """
    dtype = jax.dtypes.canonicalize_dtype(data.dtype)

    def part(index: tuple[slice, ...] | None) -> np.ndarray:
        index = index or ()
        lengths = [stop - start for start, stop, _ in map(slice.indices, index, shape)]
        return pad_to(data[index], lengths).astype(dtype, copy=False)

    return jax.make_array_from_callback(shape, layout, part)


@functools.lru_cache(maxsize=4096)
def _padding_to(
    shape: tuple[int, ...], layout: NamedSharding, between: tuple[NamedSharding, ...] = ()
) -> Any:
    def padded(data: Any) -> Any:
        stored = pad_to(data, shape)
        for step in between:
            stored = jax.lax.with_sharding_constraint(stored, step)
        return stored

    return jax.jit(padded, out_shardings=layout)
