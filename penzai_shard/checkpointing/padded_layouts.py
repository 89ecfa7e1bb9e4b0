"""Arrays that are stored padded: a checkpoint has the true ones, and pads what it gives back.

Arrays are read and written in a layout of the true lengths, each device a part of its own, and
padded once they have come; see ``true_layout``. Those of which a device would have more in it than
when they are padded, as no other length divides, go through host memory, one at a time.
"""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any, TypeAlias

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, Sharding

from penzai_shard.array_kinds import is_abstract
from penzai_shard.even_layouts import true_layout
from penzai_shard.named_leaves import NamedLeaf, Stored
from penzai_shard.padded_arrays import Padding, pad_to
from penzai_shard.placement import padded_on_devices, padded_parts


@dataclasses.dataclass(frozen=True)
class PaddedLayout:
    """Where an array is to be, and how it is padded there.

    Attributes:
        sharding: The layout of the padded array.
        padding: How it is padded.
    """

    sharding: Any
    padding: Padding

    def stored_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """The padded shape of an array of some true shape."""
        return (*shape[: len(shape) - len(self.padding.lengths)], *self.padding.lengths)

    def goes_through_host(self, shape: tuple[int, ...]) -> bool:
        """Whether a device has more of the true array in ``true_layout`` than of the padded one.

        >>> mesh = jax.sharding.AbstractMesh((2,), ("data",))
        >>> split = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("data"))
        >>> layout = PaddedLayout(split, Padding((4, 6), (("data",), ())))
        >>> layout.goes_through_host((3, 6)), layout.goes_through_host((3, 5))
        (False, True)
        """
        if not isinstance(self.sharding, NamedSharding):
            return False
        stored = self.sharding.shard_shape(self.stored_shape(shape))
        true = true_layout(self.sharding, shape).shard_shape(shape)
        # In the first one, parts along another dimension make up for the padding.
        return math.prod(true) > math.prod(stored)

    def from_host(self, array: np.ndarray) -> jax.Array:
        """An array in host memory, the same in all processes, padded on its devices."""
        return padded_parts(array, self.stored_shape(array.shape), self.sharding)


Layout: TypeAlias = Sharding | PaddedLayout | None
"""Where an array is to be; None for one of which nothing is said."""


def layout_of(leaf: NamedLeaf) -> Layout:
    """Where an array is, and how it is padded there."""
    sharding = getattr(leaf.array, "sharding", None)
    return sharding if leaf.padding is None else PaddedLayout(sharding, leaf.padding)


def true_layouts(layouts: Mapping[str, Layout], leaves: Mapping[str, NamedLeaf]) -> dict[str, Any]:
    """The layout of each array by name, of its true lengths.

    Args:
        layouts: By name, where the arrays are to be.
        leaves: The arrays, by name.
    """
    found: dict[str, Any] = {}
    for name, leaf in leaves.items():
        layout = layouts.get(name)
        if isinstance(layout, PaddedLayout):
            layout = true_layout(layout.sharding, leaf.shape)
        found[name] = layout
    return found


def stored_by(layouts: Mapping[str, Layout], arrays: dict[str, Any], called: str) -> dict[str, Any]:
    """Arrays as they are to be stored, padded where their layouts say so.

    Args:
        layouts: By name, where the arrays are to be.
        arrays: Arrays by name, true ones or padded so already. Those that are padded here are
            taken out one by one, so that one of them is there twice at a time.
        called: The function that was called, for messages.
    """
    stored = {}
    for name in list(arrays):
        array, layout = arrays.pop(name), layouts.get(name)
        if isinstance(layout, PaddedLayout):
            if (shape := layout.stored_shape(np.shape(array))) != np.shape(array):
                array = padded_on_devices(called, array, shape, layout.sharding)
            array = Stored(array, layout.padding)
        stored[name] = array
    return stored


def stored_like(leaf: NamedLeaf, own: NamedLeaf, called: str) -> Any:
    """An array as another one is stored, padded or not.

    Args:
        leaf: The array.
        own: The other one, of the same lengths.
        called: The function that was called, for messages.
    """
    if leaf.padding == own.padding:
        return leaf.array if leaf.padding is None else Stored(leaf.array, leaf.padding)
    true = leaf.without_padding().array
    if own.padding is None:
        return true
    shape = PaddedLayout(None, own.padding).stored_shape(leaf.shape)
    sharding: Any = getattr(own.array, "sharding", None)
    is_somewhere = isinstance(getattr(sharding, "mesh", None), Mesh) or is_abstract(true)
    padded = (
        padded_on_devices(called, true, shape, sharding) if is_somewhere else pad_to(true, shape)
    )
    return Stored(padded, own.padding)


def leaf_to_save(leaf: NamedLeaf) -> NamedLeaf:
    """An array as it is saved, without padding.

    >>> from penzai_shard.named_leaves import leaves_of
    >>> from penzai_shard.padded_arrays import PaddedArray
    >>> padded = PaddedArray(np.ones(4), {"a": 3}, Padding((4,), (("data",),)))
    >>> leaf_to_save(leaves_of(padded)[0]).array.tolist()
    [1.0, 1.0, 1.0]
    """
    array, layout = leaf.array, layout_of(leaf)
    if (
        not isinstance(layout, PaddedLayout)
        or not layout.goes_through_host(leaf.shape)
        or not array.is_fully_addressable
    ):
        return leaf.without_padding()
    true = np.empty(leaf.shape, array.dtype)
    for shard in (shard for shard in array.addressable_shards if not shard.replica_id):
        place = true[shard.index]
        place[...] = np.asarray(shard.data)[tuple(map(slice, place.shape))]
    return dataclasses.replace(leaf, array=true, padding=None)
