"""The constants that are written into a traced program, and those that two programs share."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core as jax_core


def is_float(value: Any) -> bool:
    """Whether an array, or a dtype's holder, has floating-point or complex numbers."""
    return bool(jnp.issubdtype(value.dtype, jnp.inexact))


def constants_of(closed: Any) -> list[np.ndarray]:
    """All floating-point constants that are written into a program, nested functions included."""
    found: dict[Any, np.ndarray] = {}

    def keep(value: Any) -> None:
        array = np.asarray(value)
        if is_float(array):
            found.setdefault((str(array.dtype), array.shape, array.tobytes()), array)

    def visit(jaxpr: Any) -> None:
        for equation in jaxpr.eqns:
            for variable in equation.invars:
                if isinstance(variable, jax_core.Literal):
                    keep(literal_value(variable))
            for parameter in equation.params.values():
                for part in parameter if isinstance(parameter, tuple | list) else (parameter,):
                    if isinstance(part, jax_core.ClosedJaxpr):
                        for constant in part.consts:
                            keep(constant)
            for inner in jax_core.jaxprs_in_params(equation.params):
                visit(inner)

    for constant in closed.consts:
        if hasattr(constant, "dtype") and not jnp.issubdtype(constant.dtype, jax.dtypes.extended):
            keep(constant)
    visit(closed.jaxpr)
    return list(found.values())


def literal_value(literal: Any) -> np.ndarray:
    """The value of a constant in a program, in its dtype; zero for a random key."""
    if jnp.issubdtype(literal.aval.dtype, jax.dtypes.extended):
        return np.zeros((), np.int32)
    return np.asarray(literal.val, literal.aval.dtype)


class Constants:
    """The constants of an original's program, which those of an edited one are held against.

    An edit that computes in fewer digits rounds the constants in the code, too: a constant that is
    one of the original's in another dtype is read as that one. Any other is new.

    Args:
        originals: What ``constants_of`` found in the original.
    """

    def __init__(self, originals: Sequence[np.ndarray]) -> None:
        self._by_shape: dict[tuple[int, ...], list[np.ndarray]] = {}
        for array in originals:
            self._by_shape.setdefault(array.shape, []).append(array)

    def read(self, value: np.ndarray) -> tuple[np.ndarray, bool]:
        """The constant in float64, and whether it is new.

        >>> constants = Constants([np.float32(0.1)])
        >>> wide, is_new = constants.read(np.asarray(0.1, jnp.bfloat16))
        >>> round(float(wide), 7), is_new, constants.read(np.float32(0.2))[1]
        (0.1, False, True)
        """
        candidates = self._by_shape.get(value.shape, [])
        if any(_equal(widest(value), widest(each)) for each in candidates):
            return widest(value), False
        for each in candidates:
            if each.dtype != value.dtype and (
                _equal(_cast(each, value.dtype), value) or _equal(_cast(value, each.dtype), each)
            ):
                return widest(each), False
        return widest(value), True


def _cast(array: np.ndarray, dtype: Any) -> np.ndarray:
    with np.errstate(over="ignore", invalid="ignore"):
        return array.astype(dtype)


def _equal(one: np.ndarray, other: np.ndarray) -> bool:
    return bool(np.all((one == other) | ((one != one) & (other != other))))


def widest(array: np.ndarray) -> np.ndarray:
    """An array of numbers in float64 or complex128."""
    kind = np.complex128 if jnp.issubdtype(array.dtype, jnp.complexfloating) else np.float64
    return array.astype(kind)
