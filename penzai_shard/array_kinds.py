"""What kind of array a leaf of a tree is: one with values, a description of one, a tracer."""

from typing import Any

import jax

from penzai_shard.library_apis.jax_api import Tracer

# numpy's dtype kinds for bytes, text, Python objects, time spans and dates.
_KINDS_OF_NO_DEVICE = frozenset("SUOmM")


def is_array_like(value: Any) -> bool:
    """Whether a leaf is an array, a struct that describes one, or a Python number.

    Arrays of text, dates or Python objects cannot be put on a device and do not count.

    >>> is_array_like(jax.numpy.ones(2)), is_array_like(1.5), is_array_like("text")
    (True, True, False)
    """
    if hasattr(value, "shape") and hasattr(value, "dtype"):
        return getattr(value.dtype, "kind", None) not in _KINDS_OF_NO_DEVICE
    return isinstance(value, bool | int | float | complex)


def is_abstract(value: Any) -> bool:
    """Whether a leaf describes an array without holding it.

    >>> is_abstract(jax.ShapeDtypeStruct((), "int32")), is_abstract(jax.numpy.ones(2))
    (True, False)
    """
    return isinstance(value, jax.ShapeDtypeStruct)


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
