"""Arrays in the one form in which those of two models are compared, whatever their layout is."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from penzai_shard.named_leaves import NamedLeaf, leaves_of
from penzai_shard.processes import is_on_this_process, resharded


def is_float(value: Any) -> bool:
    """Whether an array, or a dtype's holder, has floating-point or complex numbers."""
    return bool(jnp.issubdtype(value.dtype, jnp.inexact))


def epsilon_of(value: Any) -> float:
    """The machine epsilon of the dtype of an array, or of a dtype's holder."""
    return float(jnp.finfo(value.dtype).eps)


def to_numpy(array: Any) -> np.ndarray:
    """An array on the host; a random key as its bits.

    One on devices of several processes is gathered on all of them, which all have to ask for.
    """
    if isinstance(array, jax.Array) and jnp.issubdtype(array.dtype, jax.dtypes.prng_key):
        array = jax.random.key_data(array)
    if not is_on_this_process(array) and not array.is_fully_replicated:
        array = resharded(array, NamedSharding(array.sharding.mesh, PartitionSpec()))
    return np.asarray(array)


def widest(array: np.ndarray) -> np.ndarray:
    """An array of numbers in float64 or complex128."""
    kind = np.complex128 if jnp.issubdtype(array.dtype, jnp.complexfloating) else np.float64
    return array.astype(kind)


def equal_elements(one: Any, other: Any) -> Any:
    """Where two arrays are equal; NaN equals NaN."""
    return (one == other) | ((one != one) & (other != other))


def canonical_leaves(tree: Any) -> list[tuple[str, Any]]:
    """The arrays of a tree by path, dimensions in an order that names alone decide.

    They are without padding. Positional dimensions come first, then named ones sorted by name, so
    that two results that differ in the order of their dimensions, and in nothing else, give the
    same arrays.

    >>> import jax.numpy as jnp
    >>> from penzai import pz
    >>> [array.shape for _, array in canonical_leaves(pz.nx.ones({"b": 3, "a": 2}))]
    [(2, 3)]
    """
    return [
        (_leaf_name(leaf), _transposed(leaf.without_padding()))
        for leaf in leaves_of(tree)
        if leaf.dtype is not None
    ]


def _leaf_name(leaf: NamedLeaf) -> str:
    if leaf.names is None:
        return leaf.path
    named = sorted(str(name) for name in leaf.names if name is not None)
    return f"{leaf.path}({', '.join(named)})"


def _transposed(leaf: NamedLeaf) -> Any:
    names = leaf.names or ()
    order = sorted(
        range(len(names)),
        key=lambda dimension: (names[dimension] is not None, str(names[dimension] or "")),
    )
    return leaf.array if order == sorted(order) else jnp.transpose(leaf.array, order)
