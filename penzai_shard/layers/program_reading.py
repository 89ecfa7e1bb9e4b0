"""What can be read of a traced program: its collectives, its derivatives, equal constants."""

import pathlib
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from penzai_shard.layers.manual_region import as_varying, varying_axes
from penzai_shard.traced_programs import equations, evaluate, location_text, public_name

ENTRY = str(pathlib.Path(__file__).with_name("region_call.py"))
"""Where a layer is called; what called the region is no part of where an operation is."""

COLLECTIVE = (
    *("psum", "pmax", "pmin", "pbroadcast", "ppermute", "pgather", "all_gather", "all_to_all"),
    *("ragged_all_to_all", "reduce_scatter", "unreduced_", "axis_index", "psend", "precv"),
)


def collectives(program: Any) -> list[tuple[str, str]]:
    """The operations of a program that move data between devices, or ask which device it is.

    Args:
        program: The program.

    Returns:
        For each of them its name in ``jax.lax``, and where it is, without repetition.
    """
    found = {
        (public_name(equation), location_text([equation], ENTRY)): None
        for equation in equations(program)
        if equation.primitive.name.startswith(COLLECTIVE)
    }
    return list(found)


def has_own_gradient(program: Any) -> bool:
    """Whether a program contains a ``jax.custom_vjp`` function."""
    return any(one.primitive.name == "custom_vjp_call" for one in equations(program))


def must_be_untracked(program: Any) -> bool:
    """Whether JAX fails to compile an operation of a program where it tracks what varies."""
    return any(one.primitive.name == "regularized_incomplete_beta" for one in equations(program))


def derivative(equation: Any, backward: bool) -> Any:
    """The derivative of one operation, traced: of its inputs and of what moves them."""
    moving = [index for index, atom in enumerate(equation.invars) if differentiable(atom)]

    def typed(values: Sequence[Any], atoms: Sequence[Any]) -> list[Any]:
        return [as_varying(v, varying_axes(a.aval)) for v, a in zip(values, atoms, strict=True)]

    def run(values: Sequence[Any], directions: Sequence[Any]) -> Any:
        values = typed(values, equation.invars)

        def of_moving(*moved: Any) -> list[Any]:
            given = list(values)
            for index, value in zip(moving, moved, strict=True):
                given[index] = value
            found = evaluate(equation, given)
            return [f for f, a in zip(found, equation.outvars, strict=True) if differentiable(a)]

        primals = [values[index] for index in moving]
        if backward:
            atoms = [atom for atom in equation.outvars if differentiable(atom)]
            return jax.vjp(of_moving, *primals)[1](typed(directions, atoms))
        atoms = [equation.invars[index] for index in moving]
        return jax.jvp(of_moving, tuple(primals), tuple(typed(directions, atoms)))[1]

    directions = equation.outvars if backward else equation.invars
    return jax.make_jaxpr(run)(
        [_struct(atom) for atom in equation.invars],
        [_struct(atom) for atom in directions if differentiable(atom)],
    )


def _struct(atom: Any) -> Any:
    return jax.ShapeDtypeStruct(atom.aval.shape, atom.aval.dtype)


def differentiable(atom: Any) -> bool:
    """Whether a value of a program has derivatives."""
    return jax.numpy.issubdtype(getattr(atom.aval, "dtype", np.int32), np.inexact)


def same_value(one: Any, other: Any) -> bool:
    """Whether two parameters or constants are the same."""
    if one is other:
        return True
    if isinstance(one, jax.core.Tracer) or isinstance(other, jax.core.Tracer):
        return False
    if type(one) is not type(other):
        return False
    if isinstance(one, tuple | list):
        return len(one) == len(other) and all(map(same_value, one, other))
    if hasattr(one, "eqns") or hasattr(one, "jaxpr"):
        return str(one) == str(other) and same_value(
            tuple(getattr(one, "consts", ())), tuple(getattr(other, "consts", ()))
        )
    if hasattr(one, "dtype") and hasattr(one, "shape"):
        if (one.dtype, one.shape) != (other.dtype, other.shape):
            return False
        with jax.ensure_compile_time_eval():
            if jax.dtypes.issubdtype(one.dtype, jax.dtypes.prng_key):
                one, other = (jax.random.key_data(value) for value in (one, other))
            return np.asarray(one).tobytes() == np.asarray(other).tobytes()
    return bool(one == other) or (one != one and other != other)
