"""Gradients of what every device holds whole: each device has a part of the sum.

The derivative of a value that is used for all elements of a split dimension is a sum over them. A
device adds up those of its part, and JAX adds the devices' sums. Until then only what is linear
may be done with them.
"""

import itertools
from typing import Any

import jax

from penzai_shard.layers.split_dimensions import MixesElementsError, Operation, Split

_LINEAR = """
    add add_any broadcast_in_dim concatenate convert_element_type copy cumsum div dot_general
    dynamic_slice gather imag mul neg pad real reduce_sum reshape rev select_n sharding_constraint
    slice split squeeze stop_gradient sub transpose"""
LINEAR = frozenset(_LINEAR.split())
"""Operations that are linear in one operand, or in all of them together."""


def partial_axes(op: Operation) -> frozenset[str]:
    """The mesh axes over which a result still has to be added up, in a gradient."""
    given = frozenset(itertools.chain.from_iterable(flow.partial for flow in op.flows))
    reduced: frozenset[str] = frozenset()
    if op.gradient and op.name == "reduce_sum":
        reduced = _axes_of(op.dims()[axis] for axis in op.whole["axes"])
    if op.gradient and op.name == "dot_general":
        (left_sum, right_sum), _ = op.whole["dimension_numbers"]
        reduced = _axes_of(op.dims(0)[i] for i in left_sum) | _axes_of(
            op.dims(1)[i] for i in right_sum
        )
    if not given:
        return reduced
    if op.name not in LINEAR or reduced & given:
        raise MixesElementsError("it is not linear in a gradient that is summed over the devices")
    if op.name == "convert_element_type" and not jax.numpy.issubdtype(
        op.whole["new_dtype"], jax.numpy.inexact
    ):
        raise MixesElementsError("it rounds a gradient that is summed over the devices")
    with_partial = [index for index, flow in enumerate(op.flows) if flow.partial]
    alike = {"add", "add_any", "sub", "concatenate"}
    if op.name in alike or op.name == "select_n":
        flows = op.flows[1:] if op.name == "select_n" else op.flows
        if any(flow.partial != given and not flow.zero for flow in flows) or (
            op.name == "select_n" and op.flows[0].partial
        ):
            raise MixesElementsError("it combines a sum over a part with one over the whole")
    elif op.name == "pad" and (op.flows[1].partial or not op.flows[1].zero):
        raise MixesElementsError("it pads a gradient with something else than zero")
    elif len(with_partial) > 1 or (op.name not in {"mul", "dot_general"} and with_partial != [0]):
        raise MixesElementsError("it is not linear in a gradient that is summed over the devices")
    return given | reduced


def _axes_of(dims: Any) -> frozenset[str]:
    return frozenset(name for dim in dims if isinstance(dim, Split) for name in dim.mesh_axes)
