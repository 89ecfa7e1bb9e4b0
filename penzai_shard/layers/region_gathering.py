"""Gathering parameters in a region, and what JAX then knows of them."""

import enum
from collections.abc import Container, Sequence
from typing import Any

import jax


class Typing(enum.Enum):
    """What JAX is to know about gathered parameters and all that is computed from them.

    To JAX, a parameter that is gathered as varying differs between the devices, and with it all
    that is computed from it alone; its gradient is scattered. Gathered as invarying it does not
    differ, and more of its gradient moves. Untracked, JAX adds up every gradient, and takes no
    notice of a loop that starts with the same on all devices.
    """

    VARYING = enum.auto()
    INVARYING = enum.auto()
    UNTRACKED = enum.auto()


def gather(
    array: Any, mesh_axes: Sequence[tuple[str, ...]], varying: Container[str], typing: Typing
) -> Any:
    """A whole parameter from the devices' parts of it.

    The transpose of the gather is the scatter of the gradients' sum where the devices see
    different activations, and taking one's own part of the gradient where they see the same.
    """
    for dimension, entry in enumerate(mesh_axes):
        groups: list[tuple[str, ...]] = []
        for name in entry:
            if groups and (name in varying) == (groups[-1][0] in varying):
                groups[-1] += (name,)
            else:
                groups.append((name,))
        # The last mesh axis of an entry is the one whose parts are neighbours.
        for group in reversed(groups):
            invarying = typing is not Typing.UNTRACKED and group[0] not in varying
            to = {"to": "invarying"} if invarying else {}
            array = jax.lax.all_gather(array, group, axis=dimension, tiled=True, **to)
    return array
