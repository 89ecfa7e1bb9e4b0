"""Operations that XLA computes wrongly where a dimension is split into unequal parts.

A device whose part is shorter computes with something behind it, and these operations take that
into the result (jaxlib 0.10.2). They get such a dimension whole on every device.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
from jax.sharding import NamedSharding, PartitionSpec

from penzai_shard.library_apis.jax_api import JaxprEqn, Literal, jaxpr_as_fun
from penzai_shard.traced_programs import (
    called_program,
    equations,
    evaluate,
    in_place_of,
    opened,
    walk,
)
from penzai_shard.training.padded_sums.operation_shapes import shape_of

Dimensions = list[set[int]]
"""For each operand of an operation, the dimensions that are not to be split."""


def with_whole_operands(program: Any, lengths: Iterable[int], mesh: Any) -> Any:
    """A program that computes the same, in which some dimensions of some operands are not split.

    Args:
        program: The program, closed or not.
        lengths: The lengths that are split unevenly.
        mesh: The mesh that they are split over.

    Returns:
        The program; the same one where it has no such operation.

    >>> program = jax.make_jaxpr(lambda x: jax.numpy.sort(x))(jax.numpy.ones(3))
    >>> mesh = jax.make_mesh((2,), ("data",), devices=jax.devices()[:2])
    >>> [one.primitive.name for one in equations(with_whole_operands(program, [3], mesh))]
    ['jit', 'sharding_constraint', 'sort', 'sharding_constraint']
    >>> with_whole_operands(program, [4], mesh) is program
    True
    """
    uneven = frozenset(lengths)
    if not any(map(_pins_of(uneven), equations(program))):
        return program

    def step(equation: JaxprEqn, operands: list[Any]) -> list[Any]:
        whole = _whole_dimensions(equation, uneven)
        if any(whole):
            operands = [
                _pinned(operand, dimensions, mesh)
                for operand, dimensions in zip(operands, whole, strict=True)
            ]
        inner = {
            name: _each(value, lambda one: with_whole_operands(one, uneven, mesh))
            for name, value in equation.params.items()
            if name in _programs_of(equation)
        }
        if inner:
            equation = equation.replace(params={**equation.params, **inner})
        results = evaluate(equation, operands)
        if any(whole):
            # What is laid out like the first operand would be computed in its parts.
            results = [_pinned(result, whole[0], mesh) for result in results]
        return results

    def body(*arguments: Any) -> list[Any]:
        return walk(program, arguments, step, literal=_value)

    jaxpr, _ = opened(program)
    types: list[Any] = [variable.aval for variable in jaxpr.invars]
    structs = [jax.ShapeDtypeStruct(of.shape, of.dtype) for of in types]
    changed = in_place_of(program, body, structs)
    return program if changed is None else changed


def computed_rightly(function: Callable[..., Any], lengths: frozenset[int], mesh: Any) -> Any:
    """A function, computed inside of a program with no dimension split where XLA errs.

    Args:
        function: A function of trees of arrays.
        lengths: The lengths that are split unevenly; none, and it is the function itself.
        mesh: The mesh that they are split over.
    """
    if not lengths:
        return function

    def computed(*arguments: Any) -> Any:
        leaves, form = jax.tree.flatten(arguments)

        def of_leaves(*leaves: Any) -> Any:
            return function(*jax.tree.unflatten(form, leaves))

        program, structs = jax.make_jaxpr(of_leaves, return_shape=True)(*leaves)
        results = jaxpr_as_fun(with_whole_operands(program, lengths, mesh))(*leaves)
        return jax.tree.unflatten(jax.tree.structure(structs), results)

    return computed


def _value(literal: Literal) -> Any:
    return literal.val


def _each(value: Any, change: Callable[[Any], Any]) -> Any:
    return tuple(map(change, value)) if isinstance(value, tuple) else change(value)


_LOOPS_AND_BRANCHES = {
    "scan": ("jaxpr",),
    "while": ("cond_jaxpr", "body_jaxpr"),
    "cond": ("branches",),
}


def _programs_of(equation: JaxprEqn) -> Sequence[str]:
    """The parameters of an operation that hold the programs that it runs."""
    inner = called_program(equation)
    if inner is not None:
        return [name for name, value in equation.params.items() if value is inner]
    return _LOOPS_AND_BRANCHES.get(equation.primitive.name, ())


def _pins_of(uneven: frozenset[int]) -> Callable[[JaxprEqn], bool]:
    return lambda equation: any(_whole_dimensions(equation, uneven))


def _pinned(operand: Any, dimensions: set[int], mesh: Any) -> Any:
    if not dimensions:
        return operand
    entries = [
        None if i in dimensions else PartitionSpec.UNCONSTRAINED for i in range(operand.ndim)
    ]
    return jax.lax.with_sharding_constraint(operand, NamedSharding(mesh, PartitionSpec(*entries)))


def _whole_dimensions(equation: JaxprEqn, uneven: frozenset[int]) -> Dimensions:
    rule = _RULES.get(equation.primitive.name)
    if rule is None:
        return []
    shapes = [shape_of(operand) for operand in equation.invars]
    return [
        {i for i in dimensions if shape[i] in uneven}
        for shape, dimensions in zip(shapes, rule(equation, shapes), strict=True)
    ]


def _scatter(equation: JaxprEqn, shapes: list[tuple[int, ...]]) -> Dimensions:
    """What is behind the updates has the first index."""
    windows = equation.params["dimension_numbers"].update_window_dims
    updates = {i for i in range(len(shapes[2])) if i not in windows}
    return [set(), set(range(len(shapes[1]) - 1)), updates]


def _dynamic_slice(equation: JaxprEqn, shapes: list[tuple[int, ...]]) -> Dimensions:
    """What begins too late is moved back from the end of the padding."""
    sizes = equation.params["slice_sizes"]
    sliced = {i for i, (size, own) in enumerate(zip(sizes, shapes[0], strict=True)) if size != own}
    return [sliced, *[set()] * (len(shapes) - 1)]


def _dynamic_update_slice(equation: JaxprEqn, shapes: list[tuple[int, ...]]) -> Dimensions:
    pairs = zip(shapes[0], shapes[1], strict=True)
    return [{i for i, (own, size) in enumerate(pairs) if size != own}, *[set()] * (len(shapes) - 1)]


def _windows(equation: JaxprEqn, shapes: list[tuple[int, ...]]) -> Dimensions:
    windows = {i for i, size in enumerate(equation.params["window_dimensions"]) if size > 1}
    return [windows for _ in shapes]


def _sort(equation: JaxprEqn, shapes: list[tuple[int, ...]]) -> Dimensions:
    return [{equation.params["dimension"]} for _ in shapes]


_RULES: dict[str, Callable[[JaxprEqn, list[tuple[int, ...]]], Dimensions]] = {
    **dict.fromkeys(
        ("scatter", "scatter-add", "scatter-mul", "scatter-min", "scatter-max", "scatter-sub"),
        _scatter,
    ),
    "dynamic_slice": _dynamic_slice,
    "dynamic_update_slice": _dynamic_update_slice,
    "select_and_gather_add": _windows,
    "select_and_scatter_add": _windows,
    "sort": _sort,
}
