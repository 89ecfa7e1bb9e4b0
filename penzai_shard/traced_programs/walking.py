"""Walking through a traced program equation by equation, and making programs of equations."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from penzai_shard.library_apis.jax_api import (
    ClosedJaxpr,
    DebugInfo,
    Jaxpr,
    JaxprEqn,
    Literal,
    Var,
    jaxpr_as_fun,
)
from penzai_shard.padded_arrays import pinned, splits_unevenly

_CALLS = {
    "checkpoint": "jaxpr",
    "closed_call": "call_jaxpr",
    "composite": "jaxpr",
    "core_call": "call_jaxpr",
    "custom_jvp_call": "call_jaxpr",
    "custom_vjp_call": "call_jaxpr",
    "jit": "jaxpr",
    "pjit": "jaxpr",
    "remat2": "jaxpr",
}
"""Operations that call one program, and the parameter that holds it."""


def opened(program: Any) -> tuple[Jaxpr, Sequence[Any]]:
    """A program and the constants that it closes over, whether it is a closed one or not."""
    return getattr(program, "jaxpr", program), getattr(program, "consts", ())


def inner_programs(equation: JaxprEqn) -> Iterator[Any]:
    """The programs, closed or not, that are parameters of an equation."""
    for value in equation.params.values():
        for inner in value if isinstance(value, tuple | list) else (value,):
            if isinstance(inner, Jaxpr | ClosedJaxpr):
                yield inner


def equations(program: Any) -> Iterator[JaxprEqn]:
    """All equations of a program, those of the programs that it runs included.

    >>> import jax
    >>> program = jax.make_jaxpr(jax.jit(lambda x: jax.lax.sin(x) + 1))(1.0)
    >>> [equation.primitive.name for equation in equations(program)]
    ['jit', 'sin', 'add']
    """
    for equation in opened(program)[0].eqns:
        yield equation
        for inner in inner_programs(equation):
            yield from equations(inner)


def called_program(equation: JaxprEqn) -> Any:
    """The program that an equation is a call of: its operands go in, its results come out.

    Returns:
        The program, or None for any other equation. Loops and branches are others.

    >>> import jax
    >>> (equation,) = jax.make_jaxpr(jax.jit(lambda x: jax.lax.sin(x)))(1.0).eqns
    >>> called_program(equation).eqns[0].primitive.name
    'sin'
    """
    return equation.params.get(_CALLS.get(equation.primitive.name, ""))


def is_jit(primitive: Any) -> bool:
    """Whether a primitive is the call of a function under ``jax.jit``."""
    return primitive.name in ("jit", "pjit")


def walk(
    program: Any,
    arguments: Sequence[Any],
    step: Callable[[JaxprEqn, list[Any]], Sequence[Any]],
    *,
    constant: Callable[[Any, Any], Any] = lambda value, variable: value,
    literal: Callable[[Literal], Any] = lambda literal: literal,
) -> list[Any]:
    """Walks through a program in order, with values of any kind in place of its arrays.

    Args:
        program: The program, closed or not; programs inside are the business of ``step``.
        arguments: What stands for its arguments.
        step: Gives what stands for the results of an equation, from what stands for its operands.
        constant: What stands for a constant that the program closes over, from its value and
            variable. Programs that are not closed have none.
        literal: What stands for a constant that is written into an equation.

    Returns:
        What stands for the program's results.

    >>> import jax
    >>> def depth(equation, operands):
    ...     return [1 + max(operands)] * len(equation.outvars)
    >>> program = jax.make_jaxpr(lambda x: jax.lax.sin(jax.lax.sin(x)) + x)(1.0)
    >>> walk(program, [0], depth)
    [3]
    """
    jaxpr, constants = opened(program)
    known = dict(zip(jaxpr.invars, arguments, strict=True))
    for variable, value in zip(jaxpr.constvars, constants, strict=True):
        known[variable] = constant(value, variable)

    def read(atoms: Sequence[Any]) -> list[Any]:
        return [literal(a) if isinstance(a, Literal) else known[a] for a in atoms]

    for equation in jaxpr.eqns:
        known.update(zip(equation.outvars, step(equation, read(equation.invars)), strict=True))
    return read(jaxpr.outvars)


def program_of(
    equations: Sequence[JaxprEqn], inputs: Sequence[Any], outputs: Sequence[Any], name: str
) -> ClosedJaxpr:
    """A program of given equations.

    Args:
        equations: The equations, in order.
        inputs: The variables that are its arguments.
        outputs: The variables and literals that are its results.
        name: What errors of JAX call it.

    >>> import jax
    >>> (equation,) = jax.make_jaxpr(jax.lax.sin)(1.0).eqns
    >>> program = program_of([equation], equation.invars, equation.outvars, "sine")
    >>> jaxpr_as_fun(program)(0.0)[0].item()
    0.0
    """
    jaxpr = Jaxpr(
        constvars=[],
        invars=list(inputs),
        outvars=list(outputs),
        eqns=list(equations),
        effects=frozenset().union(*(equation.effects for equation in equations)),
        debug_info=DebugInfo(
            traced_for="jit",
            func_src_info=name,
            arg_names=("",) * len(inputs),
            result_paths=("",) * len(outputs),
        ),
    )
    return ClosedJaxpr(jaxpr, [])


def evaluate(equation: JaxprEqn, operands: Sequence[Any]) -> list[Any]:
    """The results of one equation for given operands, in the context that it was traced in.

    >>> import jax
    >>> (equation,) = jax.make_jaxpr(lambda x: x * x)(1.0).eqns
    >>> evaluate(equation, [3.0, 3.0])[0].item()
    9.0
    """
    if equation.primitive.name == "sharding_constraint":
        sharding = equation.params["sharding"]
        # Run at once, the operation takes no layout over which a length does not divide.
        if splits_unevenly(sharding, operands[0].shape):
            return [pinned(operands[0], sharding)]
    # Variables of their own, as an operand may stand in an equation twice, or be a literal.
    inputs: list[Any] = [Var(atom.aval) for atom in equation.invars]
    own = equation.replace(invars=inputs)
    program = program_of([own], inputs, own.outvars, equation.primitive.name)
    return list(jaxpr_as_fun(program)(*operands))
