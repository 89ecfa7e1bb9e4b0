"""Whether two frozen variables of one name are one variable."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from penzai.core.variables import AbstractVariable


def is_copy(variable: Any, first: Any) -> bool:
    """Whether a variable is another copy of a frozen one.

    A frozen parameter is a plain value: placing a model, ``jax.tree.map`` and checkpoints give
    each of its places an object, and arrays, of its own.

    Args:
        variable: A variable, mutable or frozen, of either API of Penzai.
        first: Another one of the same name.

    Returns:
        Whether both hold the same array, or are frozen with equal values. Of values that are not
        known, structs and tracers, shape and dtype count.

    >>> from penzai import pz
    >>> def frozen(value):
    ...     return pz.ParameterValue(label="w", value=jnp.asarray(value), metadata={})
    >>> is_copy(frozen([1.0]), frozen([1.0])), is_copy(frozen([1.0]), frozen([2.0]))
    (True, False)
    """
    if variable.value is first.value:
        return True
    if type(variable) is not type(first) or isinstance(first, AbstractVariable):
        return False
    my_form: Any
    their_form: Any
    mine, my_form = jax.tree.flatten(variable.value)
    theirs, their_form = jax.tree.flatten(first.value)
    return bool(my_form == their_form) and all(map(_equal_arrays, mine, theirs))


def _equal_arrays(a: Any, b: Any) -> bool:
    if a is b:
        return True
    dtype = jnp.result_type(a)
    if np.shape(a) != np.shape(b) or dtype != jnp.result_type(b):
        return False
    if any(isinstance(x, jax.ShapeDtypeStruct | jax.core.Tracer) for x in (a, b)):
        return True
    if jnp.issubdtype(dtype, jax.dtypes.prng_key):
        a, b = jax.random.key_data(a), jax.random.key_data(b)
    has_nan = jnp.issubdtype(dtype, jnp.inexact)
    if getattr(a, "sharding", None) == getattr(b, "sharding", None):
        return bool(jnp.array_equal(a, b, equal_nan=has_nan))
    return bool(np.array_equal(np.asarray(a), np.asarray(b), equal_nan=has_nan))
