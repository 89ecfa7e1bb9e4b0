"""The constants and precisions of a traced program, and the constants that two programs share."""

from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from penzai_shard.library_apis.jax_api import Literal
from penzai_shard.surgery.equivalence.comparable_arrays import (
    epsilon_of,
    equal_elements,
    is_float,
    widest,
)
from penzai_shard.traced_programs import equations, inner_programs, opened


def epsilons_of(program: Any) -> set[float]:
    """The machine epsilons of all dtypes that a program rounds to, nested functions included.

    >>> sorted(epsilons_of(jax.make_jaxpr(lambda x: x.astype("bfloat16") + 1)(1.0)))
    [1.1920928955078125e-07, 0.0078125]
    """
    found: set[float] = set()
    for equation in equations(program):
        avals = [variable.aval for variable in (*equation.invars, *equation.outvars)]
        found.update(epsilon_of(a) for a in avals if hasattr(a, "dtype") and is_float(a))
        if equation.primitive.name == "reduce_precision":
            found.add(2.0 ** -equation.params["mantissa_bits"])
    return found


def constants_of(program: Any) -> list[np.ndarray]:
    """All floating-point constants that are written into a program, nested functions included."""
    values = list(program.consts)
    for equation in equations(program):
        values += [literal_value(atom) for atom in equation.invars if isinstance(atom, Literal)]
        for inner in inner_programs(equation):
            values += opened(inner)[1]
    arrays = [
        np.asarray(value)
        for value in values
        if hasattr(value, "dtype") and not jnp.issubdtype(value.dtype, jax.dtypes.extended)
    ]
    floats = filter(is_float, arrays)
    return list({(str(x.dtype), x.shape, x.tobytes()): x for x in floats}.values())


def literal_value(literal: Any) -> np.ndarray:
    """The value of a constant in a program, in its dtype; zero for a random key."""
    if jnp.issubdtype(literal.aval.dtype, jax.dtypes.extended):
        return np.zeros((), np.int32)
    return np.asarray(literal.val, literal.aval.dtype)


class Constants:
    """The constants of an original's program, with which those of an edited one are compared.

    An edit that computes in fewer digits rounds the constants in the code, too: a constant that is
    one of the original's in another dtype is read as that one. Any other is new.

    Args:
        originals: What ``constants_of`` found in the original.
    """

    def __init__(self, originals: Iterable[np.ndarray]) -> None:
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
    return bool(np.all(equal_elements(one, other)))
