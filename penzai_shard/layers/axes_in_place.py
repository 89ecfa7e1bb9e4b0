"""Running a layer without moving the axes of its arrays in memory."""

import collections
from collections.abc import Iterator
from typing import Any

import jax
from penzai import pz

from penzai_shard.layers import variable_threading
from penzai_shard.layers.dimension_orders import OrderedArray, run_in_place
from penzai_shard.layers.functional_calls import functional_call
from penzai_shard.layers.wrapper_layer import WrapperLayer
from penzai_shard.meshes import onto_auto_twin

_PYTHON_NUMBERS = (bool, int, float, complex)


@pz.pytree_dataclass
class AxesInPlace(WrapperLayer):
    """Wraps a layer so that the axes of its arrays stay where they are in memory.

    Penzai's ``nmap`` brings the logical axes that it maps over to the front of every result, which
    moves whole arrays around, forward and backward. The order of named axes means nothing, so
    this layer reads the program of its body and runs the same operations on arrays in the order
    that they have: a transpose only counts dimensions anew, and a matrix product, a sum or a
    softmax runs along the dimension where the logical axis is. An operation without a rule
    for this gets its operands in the order of the program, so that nothing is assumed of it.

    Output, gradients, parameter names and updates of state variables stay those of the wrapped
    layer, up to the rounding of sums in another order. What changes is the time and memory that
    moves cost, and the order of the logical axes in a named output. Positional dimensions
    stay in order.

    It is for layers that are compiled: outside of ``jax.jit`` the body is traced at every call.

    Attributes:
        body: The layer.

    >>> layer = AxesInPlace(pz.nn.Softmax("classes"))
    >>> list(layer(pz.nx.ones({"classes": 4, "batch": 3})).named_shape)
    ['classes', 'batch']
    >>> list(layer.body(pz.nx.ones({"classes": 4, "batch": 3})).named_shape)
    ['batch', 'classes']
    """

    body: Any

    def _run(self, argument: Any, side_inputs: dict[str, Any]) -> Any:
        call, arguments, variables = functional_call(
            self.body, argument, side_inputs, "AxesInPlace"
        )
        structure: Any
        leaves, structure = jax.tree_util.tree_flatten(onto_auto_twin(arguments))
        arrays = [leaf for leaf in leaves if not isinstance(leaf, _PYTHON_NUMBERS)]

        def called(*traced: Any) -> Any:
            # A flag or a number of Python stays what it is, as for the bare layer.
            remaining = iter(traced)
            filled = [
                leaf if isinstance(leaf, _PYTHON_NUMBERS) else next(remaining) for leaf in leaves
            ]
            return call(*jax.tree_util.tree_unflatten(structure, filled))

        program, shapes = jax.make_jaxpr(called, return_shape=True)(*arrays)
        results = iter(run_in_place(program, list(map(OrderedArray.of, arrays))))
        output_shapes, changed_shapes = shapes
        output = jax.tree_util.tree_map(
            lambda like: _like(like, results), output_shapes, is_leaf=pz.nx.is_namedarray
        )
        # A variable's value keeps the order that it had.
        changed = jax.tree_util.tree_map(lambda _: _whole(next(results)), changed_shapes)
        variable_threading.assign(variables, changed)
        return output


def _like(like: Any, results: Iterator[OrderedArray]) -> Any:
    """The next result as what it was; a named array has its axes in the order they came out in."""
    value = next(results)
    if isinstance(like, pz.nx.NamedArray) and len(like.named_axes) == len(value.shape):
        names = list(like.named_axes)
        order = value.order_with(range(len(names)))
        sizes = collections.OrderedDict((names[dim], value.shape[dim]) for dim in order)
        return pz.nx.NamedArray(sizes, value.in_order(order))
    return jax.tree_util.tree_map(lambda _: _whole(value), like)


def _whole(value: OrderedArray) -> jax.Array:
    """A result as an array, also if it is a number that is written into the program."""
    return jax.numpy.asarray(value.whole())
