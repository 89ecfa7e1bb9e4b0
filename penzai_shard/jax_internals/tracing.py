"""Gives access to traced programs (jaxprs), of which ``jax`` itself promises nothing.

``jax.extend.core`` is JAX's interface for libraries such as this one; it may change with any
release. Everything here was read from and run on jax 0.10.2.
https://docs.jax.dev/en/latest/jax.extend.core.html
"""

from collections.abc import Mapping
from typing import Any

from jax._src import source_info_util
from jax._src.interpreters import partial_eval
from jax._src.named_sharding import UNSPECIFIED
from jax.extend import core

# A program with the constants that it closes over.
ClosedJaxpr = core.ClosedJaxpr
# What errors of JAX call a program; `Jaxpr` warns without one.
DebugInfo = core.DebugInfo
# A program whose constants are given apart.
Jaxpr = core.Jaxpr
# One operation.
JaxprEqn = core.JaxprEqn
# A scalar that is written into an operation.
Literal = core.Literal
# The result of an operation; equal only to itself.
Var = core.Var
# The function that runs a program, operation by operation unless traced.
jaxpr_as_fun = core.jaxpr_as_fun

# Parameters of `custom_jvp_call` and `custom_vjp_call` that only differentiation reads. JAX makes
# them anew for each call, so that by them no two calls of one function would be equal.
DERIVATIVE_RULES = frozenset({"jvp_jaxpr_fun", "fwd_jaxpr_thunk", "bwd", "out_trees"})


def count_signatures(jitted: Any) -> int:
    """For how many types and layouts of its arguments JAX keeps the quick way into a function.

    >>> import jax
    >>> double = jax.jit(lambda x: 2 * x)
    >>> double(1.0), count_signatures(double)
    (Array(2., dtype=float32, weak_type=True), 1)
    """
    count: int = jitted._cache_size()
    return count


def drop_dead_code(jaxpr: Jaxpr) -> Any:
    """A program without the operations of which none of its results and no effect comes.

    >>> import jax
    >>> drop_dead_code(jax.make_jaxpr(lambda x: (jax.lax.sin(x), x)[1])(1.0).jaxpr).eqns
    []
    """
    return partial_eval.dce_jaxpr(jaxpr, [True] * len(jaxpr.outvars), instantiate=True)[0]


def is_weak_type(value: Any) -> bool:
    """Whether a value's dtype gives way to that of what it is combined with.

    ``jax.dtypes`` has no public name for it; arrays, tracers and types have the attribute.

    >>> import jax
    >>> is_weak_type(jax.numpy.asarray(1.0)), is_weak_type(jax.numpy.ones(2))
    (True, False)
    """
    return bool(getattr(value, "weak_type", False))


def scan_counts(parameters: Mapping[str, Any]) -> tuple[int, int]:
    """How many operands of a ``scan`` are constants, and how many go from turn to turn.

    >>> import jax
    >>> loop = jax.make_jaxpr(lambda x: jax.lax.scan(lambda c, _: (c + 1, c), x, None, 3))(0)
    >>> scan_counts(loop.eqns[-1].params)
    (0, 1)
    """
    if "num_consts" in parameters:
        return parameters["num_consts"], parameters["num_carry"]
    # Since jax 0.12: the trees of constants, of what is carried, and of what is gone through.
    constants, carried, _ = parameters["ft_in"].unpack()
    return len(constants), len(carried)


def source_frames(equation: JaxprEqn) -> list[tuple[str, str, int]]:
    """File, function and line of each call that led to an operation, the innermost first.

    Calls in JAX and in Python's own library are left out.

    >>> import jax
    >>> (equation,) = jax.make_jaxpr(lambda x: jax.lax.sin(x))(1.0).eqns
    >>> source_frames(equation)[0][1]
    '<lambda>'
    """
    frames = source_info_util.user_frames(equation.source_info.traceback)
    return [(frame.file_name, frame.function_name, frame.start_line) for frame in frames]


def without_shardings(call: JaxprEqn) -> dict[str, Any]:
    """The parameters of a call under ``jax.jit`` that was given no shardings.

    What JAX writes for "no sharding" has no public name; ``None`` is something else here.

    >>> import jax
    >>> (call,) = jax.make_jaxpr(jax.jit(jax.lax.sin))(1.0).eqns
    >>> without_shardings(call) == call.params
    True
    """
    plain = {}
    for name, nothing in (("shardings", UNSPECIFIED), ("layouts", None)):
        plain[f"in_{name}"] = (nothing,) * len(call.invars)
        plain[f"out_{name}"] = (nothing,) * len(call.outvars)
    return call.params | plain
