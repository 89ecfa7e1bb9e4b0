"""What kind of array a leaf of a tree is: one with values, a description of one, a tracer."""

from typing import Any

import jax
import numpy as np

from penzai_shard.library_apis.jax_api import Tracer

# numpy's dtype kinds for bytes, text, Python objects, time spans and dates.
_KINDS_OF_NO_DEVICE = frozenset("SUOmM")


def is_array_like(value: Any) -> bool:
    """Whether a leaf is an array, a struct that describes one, or a Python number.

    Arrays of text, dates or Python objects cannot be put on a device and do not count, nor do
    those of other libraries whose dtypes JAX does not know.

    >>> is_array_like(jax.numpy.ones(2)), is_array_like(1.5), is_array_like("text")
    (True, True, False)
    """
    if hasattr(value, "shape") and hasattr(value, "dtype"):
        kind = getattr(value.dtype, "kind", None)
        return kind not in _KINDS_OF_NO_DEVICE if kind else _is_dtype_of_jax(value.dtype)
    return isinstance(value, bool | int | float | complex)


def _is_dtype_of_jax(dtype: Any) -> bool:
    """Whether something is a dtype of random keys, say, or a class that stands for one."""
    try:
        jax.numpy.issubdtype(dtype, jax.dtypes.extended)
    except TypeError:
        return False
    return True


def own_copy_of_numpy(value: Any) -> Any:
    """A copy of a NumPy array whose memory can be written to; anything else as it is.

    On a CPU, JAX uses the memory of a NumPy array instead of copying it. Its values would change
    under JAX once somebody writes to it, as the optimizer of another library does.

    >>> array = np.ones(2)
    >>> own_copy_of_numpy(array) is array, own_copy_of_numpy(1.5)
    (False, 1.5)
    """
    return np.array(value) if _is_writable(value) else value


def _is_writable(value: Any) -> bool:
    """Whether somebody can write to the memory of a NumPy array, be it by what it is a view of."""
    while isinstance(value, np.ndarray):
        if value.flags.writeable:
            return True
        value = value.base
    return False


def loses_integers(value: Any) -> bool:
    """Whether JAX would keep other integers than those of a NumPy array, of which it has 32 bits.

    >>> loses_integers(np.array(2**31)), loses_integers(np.array(2**31 - 1))
    (True, False)
    """
    if not isinstance(value, np.ndarray | np.generic) or value.dtype.kind not in "iu":
        return False
    narrow = jax.dtypes.canonicalize_dtype(value.dtype)
    if narrow == value.dtype or not value.size:
        return False
    limits = np.iinfo(narrow)
    return bool(value.min() < limits.min or value.max() > limits.max)


def is_abstract(value: Any) -> bool:
    """Whether a leaf describes an array without holding it.

    >>> is_abstract(jax.ShapeDtypeStruct((), "int32")), is_abstract(jax.numpy.ones(2))
    (True, False)
    """
    return isinstance(value, jax.ShapeDtypeStruct)


def has_abstract(tree: Any) -> bool:
    """Whether a tree has a shape where an array should be.

    >>> has_abstract({"a": jax.ShapeDtypeStruct((2,), "float32"), "b": 1}), has_abstract([1])
    (True, False)
    """
    return any(map(is_abstract, jax.tree_util.tree_leaves(tree)))


def is_traced(value: Any) -> bool:
    """Whether a leaf is a tracer, of which only shape and dtype are known.

    >>> is_traced(jax.numpy.ones(2))
    False
    >>> jax.eval_shape(lambda x: print(is_traced(x)), 1.0)
    True
    """
    return isinstance(value, Tracer)


def is_concrete(value: Any) -> bool:
    """Whether a leaf is an array of JAX that holds its values, or did before it was deleted.

    >>> is_concrete(jax.numpy.ones(2)), is_concrete(1.5)
    (True, False)
    """
    return isinstance(value, jax.Array) and not is_traced(value)


def is_deleted(value: Any) -> bool:
    """Whether a value is an array whose memory is gone, as donation takes it.

    >>> is_deleted(1), is_deleted(jax.numpy.ones(2))
    (False, False)
    """
    return is_concrete(value) and value.is_deleted()
