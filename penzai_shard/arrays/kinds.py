"""Tells what stands at a leaf of a tree: an array, a struct, a tracer, a number, or none.

Which numbers count as arrays, and which are settings of a module, is said in ``structure``.
"""

from typing import Any

import jax
import numpy as np

# NumPy's kinds of dtypes for bytes, text, Python objects, spans and dates.
_HOST_KINDS = frozenset("SUOmM")


def is_array(value: Any) -> bool:
    """Whether a leaf is an array, a tracer, or a struct that describes one.

    >>> is_array(np.ones(2)), is_array(jax.ShapeDtypeStruct((), "int32")), is_array(np.array("a"))
    (True, True, False)
    """
    if isinstance(value, jax.Array | jax.ShapeDtypeStruct):
        return True
    is_host = isinstance(value, np.ndarray | np.generic)
    return is_host and value.dtype.kind not in _HOST_KINDS


def is_number(value: Any) -> bool:
    """Whether a leaf is a Python number, which JAX takes for an array."""
    return isinstance(value, bool | int | float | complex)


def is_struct(value: Any) -> bool:
    """Whether a leaf describes an array without holding it."""
    return isinstance(value, jax.ShapeDtypeStruct)


def is_traced(value: Any) -> bool:
    """Whether only the shape and dtype of a leaf are known."""
    return isinstance(value, jax.core.Tracer)


def is_deleted(value: Any) -> bool:
    """Whether a leaf is an array whose memory is gone, as donation takes it."""
    return isinstance(value, jax.Array) and not is_traced(value) and value.is_deleted()


def is_key_type(dtype: Any) -> bool:
    """Whether a dtype is one of typed random keys."""
    return bool(jax.numpy.issubdtype(dtype, jax.dtypes.prng_key))


def device_dtype(dtype: Any) -> Any:
    """The dtype that an array has on a device, where JAX keeps 32 bits unless told otherwise.

    >>> device_dtype(np.dtype("float64"))
    dtype('float32')
    """
    is_kept = dtype is None or is_key_type(dtype)
    return dtype if is_kept else np.dtype(jax.dtypes.canonicalize_dtype(dtype))


def itemsize(dtype: Any) -> int:
    """Bytes of one element; of a random key those of its data."""
    if is_key_type(dtype):
        data = jax.eval_shape(jax.random.key_data, jax.ShapeDtypeStruct((), dtype))
        return int(data.size * data.dtype.itemsize)
    return int(np.dtype(dtype).itemsize)
