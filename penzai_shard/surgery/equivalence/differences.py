"""How far two trees of arrays are apart, in units in the last place and relative to their size."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from penzai_shard.named_leaves import NamedLeaf, leaves_of


@dataclasses.dataclass(frozen=True)
class Difference:
    """How far one array is from its counterpart.

    Attributes:
        name: The array's name.
        ulps: The largest difference of an element, in units in the last place of the larger
            of the two numbers.
        relative: The largest difference of an element, relative to the largest value of the array.
        problem: Why the two cannot be compared; empty if they can.
    """

    name: str
    ulps: float
    relative: float
    problem: str = ""


def difference(name: str, original: Any, edited: Any) -> Difference:
    """Compares two arrays.

    Args:
        name: What to call them.
        original: An array.
        edited: Another.

    Returns:
        The difference; infinite where one has a number and the other has none.

    >>> import numpy as np
    >>> found = difference("w", np.float32([1, 2]), np.float32([1, np.nextafter(np.float32(2), 3)]))
    >>> found.ulps, found.relative < 2e-7
    (1.0, True)
    """
    one, other = to_numpy(original), to_numpy(edited)
    if one.shape != other.shape:
        return Difference(
            name, np.inf, np.inf, f"shape {list(one.shape)} became {list(other.shape)}"
        )
    if one.dtype != other.dtype:
        return Difference(name, np.inf, np.inf, f"dtype {one.dtype} became {other.dtype}")
    if one.size == 0 or np.array_equal(one, other):
        return Difference(name, 0.0, 0.0)
    if not jnp.issubdtype(one.dtype, jnp.inexact):
        return Difference(name, np.inf, np.inf, f"{_count(one != other)} differ")
    ulps = float(_ulps_apart(one, other).max())
    wide_one, wide_other = _widened(one), _widened(other)
    equal = (wide_one == wide_other) | (np.isnan(wide_one) & np.isnan(wide_other))
    finite = np.isfinite(wide_one) & np.isfinite(wide_other)
    if not np.all(equal | finite):
        return Difference(name, np.inf, np.inf, f"{_count(~(equal | finite))} are not finite alike")
    apart = np.abs(np.where(equal, 0, wide_one) - np.where(equal, 0, wide_other)).max()
    if not apart:
        return Difference(name, ulps, 0.0)
    largest = float(np.abs(np.where(finite, wide_one, 0)).max())
    return Difference(name, ulps, float(apart) / largest if largest else float(np.inf))


def _count(differs: np.ndarray) -> str:
    return f"{int(np.sum(differs))} of {differs.size} elements"


def to_numpy(array: Any) -> np.ndarray:
    """An array on the host; a random key as its bits."""
    if isinstance(array, jax.Array) and jnp.issubdtype(array.dtype, jax.dtypes.prng_key):
        array = jax.random.key_data(array)
    return np.asarray(array)


def _widened(array: np.ndarray) -> np.ndarray:
    kind = np.complex128 if jnp.issubdtype(array.dtype, jnp.complexfloating) else np.float64
    return array.astype(kind)


def _ulps_apart(one: np.ndarray, other: np.ndarray) -> np.ndarray:
    """Differences in units in the last place of the larger number of each two."""
    if jnp.issubdtype(one.dtype, jnp.complexfloating):
        return np.maximum(_ulps_apart(one.real, other.real), _ulps_apart(one.imag, other.imag))
    limits = jnp.finfo(one.dtype)
    wide_one, wide_other = one.astype(np.float64), other.astype(np.float64)
    finite = np.isfinite(wide_one) & np.isfinite(wide_other)
    wide_one, wide_other = np.where(finite, wide_one, 0), np.where(finite, wide_other, 0)
    larger = np.maximum(np.abs(wide_one), np.abs(wide_other))
    exponent = np.frexp(np.maximum(larger, float(limits.tiny)))[1] - 1
    return np.abs(wide_one - wide_other) / np.ldexp(float(limits.eps), exponent)


def canonical_leaves(tree: Any) -> list[tuple[str, Any]]:
    """The arrays of a tree by path, dimensions in an order that names alone decide.

    Positional dimensions come first, then named ones sorted by name, so that two results that
    differ in how their data lies, and in nothing else, give the same arrays.

    >>> import jax.numpy as jnp
    >>> from penzai import pz
    >>> [array.shape for _, array in canonical_leaves(pz.nx.ones({"b": 3, "a": 2}))]
    [(2, 3)]
    """
    return [
        (_leaf_name(leaf), _transposed(leaf)) for leaf in leaves_of(tree) if leaf.dtype is not None
    ]


def _leaf_name(leaf: NamedLeaf) -> str:
    if leaf.names is None:
        return leaf.path
    named = sorted(str(name) for name in leaf.names if name is not None)
    return f"{leaf.path}({', '.join(named)})"


def _transposed(leaf: NamedLeaf) -> Any:
    if leaf.names is None:
        return leaf.array
    order = sorted(
        range(len(leaf.names)),
        key=lambda i: (leaf.names[i] is not None, str(leaf.names[i]) if leaf.names[i] else ""),  # type: ignore[index]
    )
    if order == list(range(len(order))):
        return leaf.array
    return jnp.transpose(leaf.array, order)
