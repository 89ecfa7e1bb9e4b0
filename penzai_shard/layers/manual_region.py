"""Regions of a program that run per device, and what JAX tracks of the arrays in them.

Inside ``jax.shard_map`` some mesh axes are *manual*: the code says what each device along them
computes. A value's type says along which of them it *varies*, which is to say that devices may
hold different ones.
"""

from collections.abc import Iterable
from typing import Any

import jax
import numpy as np

from penzai_shard.library_apis.jax_api import manual_mesh_axes


def manual_axes() -> frozenset[str]:
    """The mesh axes that a surrounding ``jax.shard_map`` has taken over; empty outside.

    >>> manual_axes()
    frozenset()
    """
    return manual_mesh_axes()


def varying_axes(value: Any) -> frozenset[str]:
    """The manual mesh axes along which devices may hold different values.

    Args:
        value: An array, a tracer, or what stands for its type.

    >>> varying_axes(jax.numpy.ones(2))
    frozenset()
    """
    kind = jax.typeof(value) if isinstance(value, jax.Array | np.ndarray) else value
    tracked = getattr(kind, "manual_axis_type", None) or getattr(kind, "mat", None)
    varying = getattr(kind, "vma", None) if tracked is None else tracked.varying
    return frozenset(varying or ())


def as_varying(array: Any, mesh_axes: Iterable[str]) -> Any:
    """The same array, typed as varying along more mesh axes.

    The transpose of this is the sum over those axes: a gradient that differs between devices
    becomes that of the one value that they all hold.

    Args:
        array: An array inside ``jax.shard_map``.
        mesh_axes: Manual mesh axes.

    >>> float(as_varying(jax.numpy.ones(()), ()))
    1.0
    """
    missing = tuple(sorted(set(mesh_axes) - varying_axes(array)))
    return jax.lax.pcast(array, missing, to="varying") if missing else array
