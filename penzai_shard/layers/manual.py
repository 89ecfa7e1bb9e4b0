"""Answers what code under ``jax.shard_map`` asks: which mesh axes are manual, and where it runs.

Along a *manual* mesh axis the code says what each device computes. The type of a value says along
which of these axes it *varies*, so that devices may hold different ones; JAX keeps account of it
under ``check_vma=True`` only.
"""

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any, TypeVar

import jax
from jax import lax
from penzai import pz

_Rng = TypeVar("_Rng", jax.Array, pz.RandomStream)


def manual_axes() -> frozenset[str]:
    """The mesh axes that a surrounding ``jax.shard_map`` has taken over.

    >>> manual_axes()
    frozenset()
    """
    return frozenset(jax.sharding.get_abstract_mesh().manual_axes)


def varying_axes(value: Any) -> frozenset[str]:
    """The manual mesh axes along which devices may hold different values.

    Args:
        value: A value, or a type as ``jax.typeof`` gives it.
    """
    kind: Any = value if isinstance(value, jax.core.AbstractValue) else jax.typeof(value)
    return frozenset(kind.manual_axis_type.varying)


def vary_over(array: Any, mesh_axes: Iterable[str]) -> Any:
    """The same array, whose type says that it varies along more mesh axes.

    The transpose is the sum over them: a gradient that differs between devices becomes the one of
    the value that they share.
    """
    missing = tuple(sorted({*mesh_axes} - varying_axes(array)))
    return lax.pcast(array, missing, to="varying") if missing else array


def device_position(mesh_axes: Sequence[str]) -> Any:
    """The position of the device along manual mesh axes that count as one, the first major."""
    position: Any = 0
    for axis in mesh_axes:
        position = position * lax.axis_size(axis) + lax.axis_index(axis)
    return position


def fold_rng_over_axis(rng: _Rng, axis_name: str | Sequence[str]) -> _Rng:
    """Makes another random key for each device along a mesh axis, in code that runs per device.

    Under ``jax.shard_map`` every device holds a copy of a key and draws the same numbers from it.
    Dropout needs other ones for each part of a batch. Devices at one position along the axis still
    share their key. Where the compiler splits the work nothing is to be folded: a key gives the
    numbers of the whole array, and each device makes its part of them.

    Source: Lippe 2024, "UvA Deep Learning Tutorials", data parallel training in JAX.

    Args:
        rng: A random key, or a ``pz.RandomStream``, whose counter the new stream shares.
        axis_name: A mesh axis of the surrounding ``jax.shard_map``, or several, which count as one:
            the first is the major one.

    Returns:
        The key or stream, folded with the position of the device.

    Raises:
        NameError: The code does not run per device along the mesh axis.
        TypeError: ``rng`` is neither a random key nor a stream.

    >>> import penzai_shard as pzs
    >>> P = jax.sharding.PartitionSpec
    >>> def draw(key):
    ...     return jax.random.uniform(pzs.fold_rng_over_axis(key, "data"), (1,))
    >>> options = {"mesh": pzs.make_mesh({"data": 8}), "in_specs": P(), "out_specs": P("data")}
    >>> len(set(jax.shard_map(draw, **options)(jax.random.key(0)).tolist()))
    8
    """
    if isinstance(rng, pz.RandomStream):
        key = fold_rng_over_axis(rng.base_key, axis_name)
        stream: _Rng = dataclasses.replace(rng, base_key=key)
        return stream
    axes = (axis_name,) if isinstance(axis_name, str) else tuple(axis_name)
    return jax.random.fold_in(rng, device_position(axes))
