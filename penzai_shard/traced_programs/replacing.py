"""What may stand in the place of an operation, or of a program in one."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.sharding import NamedSharding

from penzai_shard.library_apis.jax_api import (
    ClosedJaxpr,
    Jaxpr,
    JaxprEqn,
    is_weakly_typed,
    manual_mesh_axes,
)
from penzai_shard.meshes import has_explicit_axes
from penzai_shard.traced_programs.walking import is_jit, opened

_CALLS_WITH_OPTIONS = ("checkpoint", "closed_call", "remat2")
_SHARDINGS = ("sharding", "out_sharding")
"""Parameters by which an operation asks for the layout of its result. On Auto mesh axes JAX fills
them in by itself, with a layout that asks for nothing."""


def in_place_of(program: Any, body: Callable[..., list[Any]], arguments: Sequence[Any]) -> Any:
    """A function's program, in the form that another one has.

    Args:
        program: The other one, closed or not.
        body: The function: it has as many results, of the same dtypes.
        arguments: What it will be called with, or structs of that; dtypes are the program's own.

    Returns:
        The program; None if it cannot stand in the place of the other one.

    >>> program = jax.make_jaxpr(jax.lax.sin)(1.0)
    >>> in_place_of(program, lambda x: [jax.lax.cos(x)], [1.0]).eqns[0].primitive.name
    'cos'
    >>> in_place_of(program, lambda x: [x > 0], [1.0])
    """
    jaxpr, _ = opened(program)
    # Inside of jax.shard_map types say more than shape and dtype.
    if jaxpr.effects or manual_mesh_axes():
        return None
    types: list[Any] = [variable.aval for variable in jaxpr.invars]
    structs = [
        jax.ShapeDtypeStruct(jax.numpy.shape(given), own.dtype, weak_type=is_weakly_typed(own))
        for given, own in zip(arguments, types, strict=True)
    ]
    new = jax.make_jaxpr(body)(*structs)
    if _kinds(new.jaxpr) != _kinds(jaxpr) or new.jaxpr.effects:
        return None
    if isinstance(program, ClosedJaxpr):
        return new
    return None if new.consts else new.jaxpr


def _kinds(jaxpr: Jaxpr) -> list[tuple[Any, bool]]:
    """The dtype of each result, and whether it gives way to another."""
    types: list[Any] = [variable.aval for variable in jaxpr.outvars]
    return [(of.dtype, is_weakly_typed(of)) for of in types]


def is_call_with_options(equation: JaxprEqn) -> bool:
    """Whether an operation calls one program, and says of it what another in its place needs too.

    >>> program = jax.make_jaxpr(jax.checkpoint(jax.lax.sin))(1.0)
    >>> [is_call_with_options(equation) for equation in program.eqns]
    [True]
    """
    return equation.primitive.name in _CALLS_WITH_OPTIONS


def is_plain_call(equation: JaxprEqn) -> bool:
    """Whether an equation calls a function under ``jax.jit`` that could as well stand in place.

    >>> is_plain_call(jax.make_jaxpr(jax.jit(jax.lax.sin))(1.0).eqns[0])
    True
    """
    if not is_jit(equation.primitive):
        return False
    options = equation.params
    shardings = (*options["in_shardings"], *options["out_shardings"])
    return not (
        any(isinstance(sharding, jax.sharding.Sharding) for sharding in shardings)
        or any(layout is not None for layout in (*options["in_layouts"], *options["out_layouts"]))
        or any(options["donated_invars"])
        or options["compiler_options_kvs"]
    )


def asks_for_sharding(equation: JaxprEqn) -> bool:
    """Whether an operation other than a constraint asks for the layout of its result.

    >>> asks_for_sharding(jax.make_jaxpr(jax.lax.sin)(1.0).eqns[0])
    False
    """
    return any(_says_something(equation.params.get(name)) for name in _SHARDINGS)


def _says_something(sharding: Any) -> bool:
    if not isinstance(sharding, NamedSharding):
        return sharding is not None
    return has_explicit_axes(sharding.mesh) or any(entry is not None for entry in sharding.spec)


def with_parameters(equation: JaxprEqn, parameters: dict[str, Any]) -> JaxprEqn:
    """An operation with other parameters, for operands of other shapes.

    Args:
        equation: The operation.
        parameters: What is other. The layout of its result is asked for here or not at all.

    >>> (equation,) = jax.make_jaxpr(lambda x: x[:2])(jax.numpy.ones(3)).eqns
    >>> with_parameters(equation, {"limit_indices": (1,)}).params["limit_indices"]
    (1,)
    """
    nothing_asked = {name: None for name in _SHARDINGS if name in equation.params}
    return equation.replace(params={**equation.params, **nothing_asked, **parameters})
