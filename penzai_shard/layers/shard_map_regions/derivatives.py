"""Derivatives that a function brings along itself, and gradients of what every device holds whole.

The derivative of a value that is used for all elements of a split dimension is a sum over them. A
device adds up those of its part, and JAX adds the devices' sums. Until then only what is linear
may be done with them.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from penzai_shard.layers.manual_region import as_varying, varying_axes
from penzai_shard.layers.shard_map_regions.split_values import (
    UNIFORM,
    Flow,
    MixesElementsError,
    Operation,
    mesh_axes_of,
)
from penzai_shard.traced_programs import evaluate

_LINEAR = """
    add add_any broadcast_in_dim concatenate convert_element_type copy cumsum div dot_general
    dynamic_slice gather imag mul neg pad real reduce_sum reshape rev select_n sharding_constraint
    slice split squeeze stop_gradient sub transpose"""
LINEAR = frozenset(_LINEAR.split())
"""Operations that are linear in one operand, or in all of them together."""

_NOT_LINEAR = "it is not linear in a gradient that is summed over the devices"


def partial_axes(op: Operation) -> frozenset[str]:
    """The mesh axes over which a result still has to be added up, in a gradient."""
    given = frozenset().union(*(flow.partial for flow in op.flows))
    reduced = _reduced_axes(op) if op.gradient else frozenset()
    if not given:
        return reduced
    if op.name not in LINEAR or reduced & given:
        raise MixesElementsError(_NOT_LINEAR)
    if op.name == "convert_element_type" and not jax.numpy.issubdtype(
        op.whole["new_dtype"], jax.numpy.inexact
    ):
        raise MixesElementsError("it rounds a gradient that is summed over the devices")
    with_partial = [index for index, flow in enumerate(op.flows) if flow.partial]
    if op.name in ("add", "add_any", "sub", "concatenate", "select_n"):
        # All operands are sums alike, but for what decides between them.
        chosen = op.name == "select_n"
        if any(flow.partial != given and not flow.zero for flow in op.flows[chosen:]) or (
            chosen and op.flows[0].partial
        ):
            raise MixesElementsError("it combines a sum over a part with one over the whole")
    elif op.name == "pad" and (op.flows[1].partial or not op.flows[1].zero):
        raise MixesElementsError("it pads a gradient with something else than zero")
    elif len(with_partial) > 1 or (op.name not in ("mul", "dot_general") and with_partial != [0]):
        raise MixesElementsError(_NOT_LINEAR)
    return given | reduced


def _reduced_axes(op: Operation) -> frozenset[str]:
    """The mesh axes over which the reduced dimensions of a sum or product are split."""
    if op.name == "reduce_sum":
        return mesh_axes_of(op.dims()[axis] for axis in op.whole["axes"])
    if op.name == "dot_general":
        (left, right), _ = op.whole["dimension_numbers"]
        return mesh_axes_of([*(op.dims(0)[i] for i in left), *(op.dims(1)[i] for i in right)])
    return frozenset()


@dataclasses.dataclass(frozen=True)
class Derivative:
    """The derivative of a call that brings its own, as a program to be followed.

    Attributes:
        whole: It with the whole lengths: of the call's inputs and of what moves them.
        part: It with the lengths of a part.
        backward: Whether it goes from the results to the inputs.
        flows: What its inputs are.
        expected: What its results are if it treats elements independently.
        summed_axes: The mesh axes over which JAX adds up the gradient of what devices hold whole.
    """

    whole: Any
    part: Any
    backward: bool
    flows: list[Flow]
    expected: list[Flow]
    summed_axes: frozenset[str]

    def check_results(self, found: Sequence[Flow]) -> None:
        """Refuses results that are split in another way than what they are the derivatives of."""
        for flow, expected in zip(found, self.expected, strict=True):
            alike = all(
                one == other or UNIFORM in (one, other)
                for one, other in zip(flow.dims, expected.dims, strict=True)
            )
            wanted = self.summed_axes - flow.mesh_axes if self.backward else frozenset()
            # What is the same for all elements of a split dimension may be a sum over it. Each
            # device then gives its elements its own part of that, and nothing adds the parts up.
            spread = self.backward and UNIFORM in flow.dims
            fits = flow.zero or (flow.partial == wanted and not spread)
            if not alike or flow.random or not fits:
                raise MixesElementsError("its derivative is not split as what it is derived from")


def derivative_of_call(
    whole: Any,
    part: Any,
    inputs: Sequence[Flow],
    results: Sequence[Flow],
    summed_axes: frozenset[str],
) -> Derivative:
    """The derivative of a ``jax.custom_jvp`` or ``jax.custom_vjp`` function.

    Args:
        whole: The call with the whole lengths.
        part: The call with the lengths of a part.
        inputs: What its inputs are.
        results: What its results are.
        summed_axes: As in ``Derivative``.

    Raises:
        MixesElementsError: It cannot be traced.
    """
    moving, moved = (
        [flow for atom, flow in zip(atoms, flows, strict=True) if differentiable(atom)]
        for atoms, flows in ((whole.invars, inputs), (whole.outvars, results))
    )
    backward = whole.primitive.name == "custom_vjp_call"
    if backward:
        # What moves a result is a part of a sum where devices hold the same, and not zero where
        # the result is.
        moved = [
            dataclasses.replace(flow, partial=summed_axes - flow.mesh_axes, zero=False)
            for flow in moved
        ]
        moving, moved = moved, moving
    try:
        of_whole = _traced(whole, backward)
    except Exception as error:
        # The user's own rule may raise anything. It may work in a way that is not followed, and is
        # refused with what it raised.
        raise MixesElementsError(f"its derivative cannot be followed: {error}") from error
    try:
        of_part = _traced(part, backward)
    except Exception as error:  # The same.
        raise MixesElementsError(f"its derivative fails on a part: {error}") from error
    return Derivative(of_whole, of_part, backward, [*inputs, *moving], moved, summed_axes)


def differentiable(atom: Any) -> bool:
    """Whether a value of a program has derivatives."""
    return jax.numpy.issubdtype(getattr(atom.aval, "dtype", np.int32), np.inexact)


def _traced(equation: Any, backward: bool) -> Any:
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

    def structs(atoms: Sequence[Any]) -> list[Any]:
        return [jax.ShapeDtypeStruct(atom.aval.shape, atom.aval.dtype) for atom in atoms]

    directions = filter(differentiable, equation.outvars if backward else equation.invars)
    return jax.make_jaxpr(run)(structs(equation.invars), structs(list(directions)))
