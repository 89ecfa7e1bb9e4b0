"""Running a traced program so that some of its results come out padded, padded before any sum."""

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Any

import jax

from penzai_shard.library_apis.jax_api import JaxprEqn, Literal, Var, scan_counts
from penzai_shard.padded_arrays import pad_to
from penzai_shard.traced_programs import (
    called_program,
    evaluate,
    in_place_of,
    is_call_with_options,
    is_plain_call,
    opened,
    walk,
    with_parameters,
)
from penzai_shard.training.padded_sums.operation_shapes import (
    PaddedOperation,
    Shape,
    padded_operation,
    shape_of,
)


@dataclasses.dataclass(frozen=True)
class PaddedValue:
    """A value of a program, and an array that begins with it.

    Attributes:
        array: The array. What is behind the value may be anything.
        shape: The shape of the value.

    >>> PaddedValue(jax.numpy.arange(4), (3,)).at((3,)).tolist()
    [0, 1, 2]
    """

    array: Any
    shape: Shape

    @classmethod
    def of(cls, array: Any, *_: Any) -> "PaddedValue":
        """A value that is held as it is."""
        return cls(array, jax.numpy.shape(array))

    def at(self, shape: Shape) -> Any:
        """The array with some lengths, each at least that of the value."""
        array, lengths = self.array, jax.numpy.shape(self.array)
        if any(have > want for have, want in zip(lengths, shape, strict=True)):
            lengths = tuple(map(min, lengths, shape))
            array = jax.lax.slice(array, (0,) * len(shape), lengths)
        return array if lengths == shape else pad_to(array, shape)

    def whole(self) -> Any:
        """The value as it is."""
        return self.at(self.shape)


def run_padded(
    program: Any, arguments: Sequence[PaddedValue], results: Sequence[Shape | None]
) -> list[PaddedValue]:
    """Runs a program whose results are wanted longer than they are.

    Args:
        program: The program, closed or not.
        arguments: Its arguments.
        results: For each result the lengths that are wanted; None for those of the program.

    Returns:
        Its results, held in arrays of these lengths wherever the program's operations allow for
        it; the rest is padded after it was computed.

    >>> program = jax.make_jaxpr(lambda x: x.T @ x)(jax.numpy.ones((2, 3)))
    >>> (result,) = run_padded(program, [PaddedValue.of(jax.numpy.ones((2, 3)))], [(3, 4)])
    >>> result.array.shape, result.whole().shape
    ((3, 4), (3, 3))
    """
    wanted = _wanted(program, results)
    return walk(
        program,
        arguments,
        functools.partial(_run_equation, wanted),
        constant=PaddedValue.of,
        literal=_literal,
    )


def _literal(literal: Literal) -> PaddedValue:
    # As it is: a number in a program may be weakly typed.
    return PaddedValue(literal.val, jax.numpy.shape(literal.val))


def _wanted(program: Any, results: Sequence[Shape | None]) -> dict[Var, Shape]:
    """Of which lengths the variables of a program are wanted, where those are not their own."""
    jaxpr, _ = opened(program)
    wanted: dict[Var, Shape] = {}
    _want(wanted, jaxpr.outvars, results)
    for equation in reversed(jaxpr.eqns):
        if any(variable in wanted for variable in equation.outvars):
            shapes = [wanted.get(variable) for variable in equation.outvars]
            operands = _operands_wanted(equation, shapes)
            if operands is None:
                for variable in equation.outvars:
                    wanted.pop(variable, None)
            else:
                _want(wanted, equation.invars, operands)
    return wanted


def _want(wanted: dict[Var, Shape], atoms: Sequence[Any], shapes: Sequence[Shape | None]) -> None:
    for atom, shape in zip(atoms, shapes, strict=True):
        if shape is not None and not isinstance(atom, Literal) and shape != shape_of(atom):
            wanted[atom] = tuple(map(max, wanted.get(atom, shape), shape))


def _operands_wanted(
    equation: JaxprEqn, shapes: Sequence[Shape | None]
) -> Sequence[Shape | None] | None:
    """The lengths of operands that are wanted early; None if the results cannot be padded."""
    if is_plain_call(equation) or is_call_with_options(equation):
        inner, _ = opened(called_program(equation))
        found = _wanted(inner, shapes)
        return [found.get(variable) for variable in inner.invars]
    if equation.primitive.name == "scan":
        constants, carried = scan_counts(equation.params)
        after = _wanted_in_loop(equation, shapes)[:carried]
        others = len(equation.invars) - constants - carried
        return [*[None] * constants, *after, *[None] * others]
    operation = _padded(equation, shapes)
    if operation is None:
        return None
    return [None if i in operation.sums else shape for i, shape in enumerate(operation.operands)]


def _padded(equation: JaxprEqn, shapes: Sequence[Shape | None]) -> PaddedOperation | None:
    shape = shapes[0]
    return None if shape is None or len(shapes) > 1 else padded_operation(equation, shape)


def _wanted_in_loop(equation: JaxprEqn, shapes: Sequence[Shape | None]) -> list[Shape | None]:
    """What is wanted of the results of a loop's body, for what is wanted of those of the loop.

    What is carried is as long after each turn as before the first.
    """
    body, _ = opened(equation.params["jaxpr"])
    constants, carried = scan_counts(equation.params)
    # Turns that nobody made cannot be added.
    slices = [
        shape[1:] if shape is not None and shape[0] == shape_of(variable)[0] else None
        for variable, shape in zip(equation.outvars[carried:], shapes[carried:], strict=True)
    ]
    before = body.invars[constants : constants + carried]
    wanted: dict[Var, Shape] = {}
    _want(wanted, before, shapes[:carried])
    while True:
        after = [wanted.get(variable) for variable in before]
        found = _wanted(body, [*after, *slices])
        _want(wanted, before, [found.get(variable) for variable in before])
        if after == [wanted.get(variable) for variable in before]:
            return [*after, *slices]


def _run_equation(
    wanted: Mapping[Var, Shape], equation: JaxprEqn, operands: list[PaddedValue]
) -> list[PaddedValue]:
    shapes = [wanted.get(variable) for variable in equation.outvars]
    results = None
    if any(shape is not None for shape in shapes):
        if is_plain_call(equation):
            return run_padded(called_program(equation), operands, shapes)
        if is_call_with_options(equation):
            results = _call(equation, operands, shapes)
        elif equation.primitive.name == "scan":
            results = _loop(equation, operands, shapes)
        elif (operation := _padded(equation, shapes)) is not None:
            results = _operation(equation, operands, operation)
    if results is None:
        results = evaluate(equation, [operand.whole() for operand in operands])
    return [
        PaddedValue(array, shape_of(variable))
        for array, variable in zip(results, equation.outvars, strict=True)
    ]


def _operation(
    equation: JaxprEqn, operands: list[PaddedValue], operation: PaddedOperation
) -> list[Any]:
    arrays = [
        operand.at(lengths) for operand, lengths in zip(operands, operation.operands, strict=True)
    ]
    if operation.limits is not None:
        most = jax.numpy.iinfo(arrays[1].dtype).max
        limits = [min(limit, most) for limit in operation.limits]
        arrays[1] = jax.numpy.minimum(arrays[1], jax.numpy.array(limits, arrays[1].dtype))
    return evaluate(with_parameters(equation, operation.parameters), arrays)


def _call(
    equation: JaxprEqn, operands: list[PaddedValue], shapes: list[Shape | None]
) -> list[Any] | None:
    inner, _ = opened(called_program(equation))
    found = _wanted(inner, shapes)
    arrays = [
        operand.at(found.get(variable, operand.shape))
        for operand, variable in zip(operands, inner.invars, strict=True)
    ]
    return _evaluated(equation, called_program(equation), arrays, arrays, shapes)


def _loop(
    equation: JaxprEqn, operands: list[PaddedValue], shapes: list[Shape | None]
) -> list[Any] | None:
    constants, carried = scan_counts(equation.params)
    after = _wanted_in_loop(equation, shapes)
    arrays = [operand.whole() for operand in operands]
    for i, shape in enumerate(after[:carried], constants):
        if shape is not None:
            arrays[i] = operands[i].at(shape)
    slices = [
        jax.ShapeDtypeStruct(array.shape[1:], array.dtype) if i >= constants + carried else array
        for i, array in enumerate(arrays)
    ]
    return _evaluated(equation, equation.params["jaxpr"], slices, arrays, after)


def _evaluated(
    equation: JaxprEqn,
    program: Any,
    inside: Sequence[Any],
    arrays: Sequence[Any],
    shapes: Sequence[Shape | None],
) -> list[Any] | None:
    """The operation with results of these lengths in it; None if it cannot have them."""
    jaxpr, _ = opened(program)

    def body(*given: Any) -> list[Any]:
        held = [
            PaddedValue(array, shape_of(variable))
            for array, variable in zip(given, jaxpr.invars, strict=True)
        ]
        results = run_padded(program, held, shapes)
        return [
            result.at(shape or result.shape) for result, shape in zip(results, shapes, strict=True)
        ]

    changed = in_place_of(program, body, inside)
    if changed is None:
        return None
    (name,) = (name for name, value in equation.params.items() if value is program)
    return evaluate(equation.replace(params={**equation.params, name: changed}), arrays)
