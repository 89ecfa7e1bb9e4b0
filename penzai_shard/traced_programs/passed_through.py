"""Which arguments of a traced program come out of it as they went in."""

from collections.abc import Sequence
from typing import Any

from penzai_shard.library_apis.jax_api import JaxprEqn
from penzai_shard.traced_programs.walking import called_program, opened, walk

# Operations that give their operands as they are, in another layout perhaps.
_IDENTITIES = frozenset(
    {"copy", "mesh_cast", "optimization_barrier", "pvary", "reshard", "sharding_constraint"}
)


def passed_through(program: Any) -> list[int | None]:
    """For each result of a program the number of the argument that it is, whatever the values.

    Calls, loops and branches are looked into. None stands for a result that is computed, or of
    which that is not known.

    >>> import jax
    >>> def program(x, y):
    ...     return jax.checkpoint(lambda x, y: (y, x + 1))(x, y)
    >>> passed_through(jax.make_jaxpr(program)(1.0, 2.0))
    [1, None]
    """
    return _results(program, range(len(opened(program)[0].invars)))


def _results(program: Any, arguments: Sequence[int | None]) -> list[int | None]:
    def unknown(*_: Any) -> None:
        return None

    return walk(program, arguments, _step, constant=unknown, literal=unknown)


def _step(equation: JaxprEqn, operands: list[int | None]) -> Sequence[int | None]:
    inner, name = called_program(equation), equation.primitive.name
    if inner is not None:
        return _results(inner, operands)
    if name in _IDENTITIES:
        return operands
    match name:
        case "scan":
            constants = equation.params["num_consts"]
            carried = equation.params["num_carry"]
            return _loop(equation.params["jaxpr"], operands, constants, carried)
        case "while":
            first = equation.params["cond_nconsts"]
            constants = equation.params["body_nconsts"]
            carried = len(operands) - first - constants
            return _loop(equation.params["body_jaxpr"], operands[first:], constants, carried)
        case "cond":
            branches = [_results(branch, operands[1:]) for branch in equation.params["branches"]]
            return [r[0] if len(set(r)) == 1 else None for r in zip(*branches, strict=True)]
    return [None] * len(equation.outvars)


def _loop(
    body: Any, operands: Sequence[int | None], constants: int, carried: int
) -> list[int | None]:
    """What a loop gives: what is carried on unchanged, and slices that are stacked again."""
    results = _results(body, range(len(operands)))
    kept = {constants + i for i in range(carried) if results[i] == constants + i}
    sliced = set(range(constants + carried, len(operands)))
    allowed = [kept] * carried + [sliced] * (len(results) - carried)
    return [
        operands[result] if result is not None and result in places else None
        for result, places in zip(results, allowed, strict=True)
    ]
