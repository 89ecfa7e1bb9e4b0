"""Walks through traced programs (jaxprs), and makes programs out of equations.

A program is a ``Jaxpr``, or a ``ClosedJaxpr`` that also holds the constants it closes over; every
function here takes both. Calls, loops and branches hold further programs as parameters.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from penzai_shard.jax_internals.tracing import ClosedJaxpr, DebugInfo, Jaxpr, JaxprEqn, Literal

# Scopes of the operations of a train step; a gradient's goes on with the path of its parameter.
LOSS, GRADIENT, OPTIMIZER = "loss", "gradient", "optimizer"

_ELEMENTWISE = """
    abs acos acosh add add_any and asin asinh atan atan2 atanh bessel_i0e bessel_i1e cbrt ceil
    clamp clz complex conj convert_element_type copy cos cosh digamma div eq eq_to erf erf_inv
    erfc exp exp2 expm1 floor ge gt igamma igammac imag integer_pow is_finite le le_to lgamma
    log log1p logistic lt lt_to max min mul mulhi ne neg nextafter not or polygamma
    population_count pow real reduce_precision regularized_incomplete_beta rem round rsqrt
    select_n shift_left shift_right_arithmetic shift_right_logical sign sin sinh sqrt square
    stop_gradient sub tan tanh xor zeta"""
_MOVING_OR_CHOOSING = """
    argmax argmin bitcast_convert_type broadcast_in_dim concatenate copy_p cummax cummin
    dynamic_slice dynamic_update_slice expand_dims gather iota optimization_barrier pad random_bits
    random_fold_in random_gamma random_seed random_split random_unwrap random_wrap reduce_and
    reduce_max reduce_min reduce_or reshape rev scatter slice sort split squeeze threefry2x32 tile
    top_k transpose unstack"""
_CALLS = """
    checkpoint closed_call cond custom_jvp_call custom_vjp_call jit remat2 scan while"""

# Primitives whose result at an index depends on the operands at this index only (or on the only
# element of a scalar), by one formula for all indices.
ELEMENTWISE = frozenset(_ELEMENTWISE.split())
# Primitives that give the same bits in any layout: each element comes of few others by one formula,
# or by an exact choice. Sums of floats are not of this kind, since partial sums depend on the
# layout. Calls, loops and branches are judged by the operations in them.
EXACT = ELEMENTWISE | frozenset(_MOVING_OR_CHOOSING.split() + _CALLS.split())


def open_program(program: Any) -> tuple[Jaxpr, Sequence[Any]]:
    """A program without its constants, and the constants: none if it is not a closed one."""
    return getattr(program, "jaxpr", program), getattr(program, "consts", ())


def inner_programs(equation: JaxprEqn) -> Iterator[Any]:
    """The programs that are parameters of an equation."""
    for value in equation.params.values():
        for inner in value if isinstance(value, tuple | list) else (value,):
            if isinstance(inner, Jaxpr | ClosedJaxpr):
                yield inner


def equations_in(program: Any) -> Iterator[JaxprEqn]:
    """All equations of a program, and of the programs in it.

    >>> import jax
    >>> program = jax.make_jaxpr(jax.jit(lambda x: jax.lax.sin(x) + 1))(1.0)
    >>> [equation.primitive.name for equation in equations_in(program)]
    ['jit', 'sin', 'add']
    """
    for equation in open_program(program)[0].eqns:
        yield equation
        for inner in inner_programs(equation):
            yield from equations_in(inner)


def walk(
    program: Any,
    arguments: Sequence[Any],
    step: Callable[[JaxprEqn, list[Any]], Sequence[Any]],
    *,
    constant: Callable[[Any], Any] = lambda value: value,
    literal: Callable[[Literal], Any] = lambda literal: literal,
) -> list[Any]:
    """Walks through a program in order, with values of any kind in place of its arrays.

    Args:
        program: The program. Programs inside are the business of ``step``.
        arguments: What stands for its arguments.
        step: Gives what stands for the results of an equation, from what stands for its operands.
        constant: Gives what stands for a constant of the program.
        literal: Gives what stands for a scalar that is written into an equation.

    Returns:
        What stands for the program's results.

    >>> import jax
    >>> def depth(equation, operands):
    ...     return [1 + max(operands)] * len(equation.outvars)
    >>> program = jax.make_jaxpr(lambda x: jax.lax.sin(jax.lax.sin(x)) + x)(1.0)
    >>> walk(program, [0], depth)
    [3]
    """
    jaxpr, constants = open_program(program)
    known = dict(zip(jaxpr.invars, arguments, strict=True))
    known.update(zip(jaxpr.constvars, map(constant, constants), strict=True))

    def read(atoms: Sequence[Any]) -> list[Any]:
        return [literal(atom) if isinstance(atom, Literal) else known[atom] for atom in atoms]

    for equation in jaxpr.eqns:
        known.update(zip(equation.outvars, step(equation, read(equation.invars)), strict=True))
    return read(jaxpr.outvars)


def make_program(
    equations: Sequence[JaxprEqn], arguments: Sequence[Any], results: Sequence[Any], name: str
) -> ClosedJaxpr:
    """A program of given equations.

    Args:
        equations: The equations, in order.
        arguments: The variables that it takes.
        results: The variables and literals that it gives.
        name: What errors of JAX call it.

    >>> import jax
    >>> (equation,) = jax.make_jaxpr(jax.lax.sin)(1.0).eqns
    >>> make_program([equation], equation.invars, equation.outvars, "sine")
    { lambda ; a:f32[]. let b:f32[] = sin a in (b,) }
    """
    jaxpr = Jaxpr(
        constvars=[],
        invars=list(arguments),
        outvars=list(results),
        eqns=list(equations),
        effects=frozenset().union(*(equation.effects for equation in equations)),
        debug_info=DebugInfo("jit", name, ("",) * len(arguments), ("",) * len(results)),
    )
    return ClosedJaxpr(jaxpr, [])
