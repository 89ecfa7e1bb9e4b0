"""Arrays that are stored padded: a checkpoint has the true ones, and pads what it gives back.

Arrays are read in a layout of the true lengths, each device a part of its own, and padded once they
have come; see ``true_layout``.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any, TypeAlias

import numpy as np
from jax.sharding import Mesh, Sharding

from penzai_shard.array_kinds import is_abstract
from penzai_shard.named_leaves import NamedLeaf, Stored
from penzai_shard.padded_arrays import Padding, pad_to, true_layout
from penzai_shard.placement import padded_on_devices


@dataclasses.dataclass(frozen=True)
class PaddedLayout:
    """Where an array is to be, and how it is padded there.

    Attributes:
        sharding: The layout of the padded array.
        padding: How it is padded.
    """

    sharding: Any
    padding: Padding


Layout: TypeAlias = Sharding | PaddedLayout | None
"""Where an array is to be; None for one of which nothing is said."""


def layout_of(leaf: NamedLeaf) -> Layout:
    """Where an array is, and how it is padded there."""
    sharding = getattr(leaf.array, "sharding", None)
    return sharding if leaf.padding is None else PaddedLayout(sharding, leaf.padding)


def layouts_to_read(
    layouts: Mapping[str, Layout], leaves: Mapping[str, NamedLeaf]
) -> dict[str, Any]:
    """The layout in which each array is read, by name: that of its true lengths.

    Args:
        layouts: By name, where the arrays are to be.
        leaves: The arrays, by name.
    """
    return {
        name: true_layout(layout.sharding, leaves[name].shape)
        if isinstance(layout, PaddedLayout)
        else layout
        for name, layout in layouts.items()
    }


def stored_by(layouts: Mapping[str, Layout], arrays: dict[str, Any], called: str) -> dict[str, Any]:
    """Arrays as they are to be stored, padded where their layouts say so.

    Args:
        layouts: By name, where the arrays are to be.
        arrays: True arrays by name. Those that are padded are taken out one by one, so that one of
            them is there twice at a time.
        called: The function that was called, for messages.
    """
    stored = {}
    for name in list(arrays):
        array, layout = arrays.pop(name), layouts.get(name)
        if isinstance(layout, PaddedLayout):
            shape = _stored_shape(np.shape(array), layout.padding)
            array = Stored(padded_on_devices(called, array, shape, layout.sharding), layout.padding)
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
    shape = _stored_shape(leaf.shape, own.padding)
    sharding: Any = getattr(own.array, "sharding", None)
    is_somewhere = isinstance(getattr(sharding, "mesh", None), Mesh) or is_abstract(true)
    padded = (
        padded_on_devices(called, true, shape, sharding) if is_somewhere else pad_to(true, shape)
    )
    return Stored(padded, own.padding)


def _stored_shape(shape: tuple[int, ...], padding: Padding) -> tuple[int, ...]:
    return (*shape[: len(shape) - len(padding.lengths)], *padding.lengths)
