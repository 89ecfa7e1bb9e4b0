"""A layer's call as a function of arrays alone, as JAX' transformations take it."""

import functools
from collections.abc import Callable
from typing import Any

import jax
from penzai import pz

from penzai_shard.array_kinds import is_array_like
from penzai_shard.layers import variable_threading
from penzai_shard.model_variables import thawed
from penzai_shard.model_variables.first_api_effects import effects_as_variables


def functional_call(
    body: Any, argument: Any, side_inputs: dict[str, Any], wrapper: str
) -> tuple[Callable[..., tuple[Any, dict[int, Any]]], tuple[Any, ...], tuple[Any, ...]]:
    """A layer's call as a function.

    Args:
        body: The layer.
        argument: Its input.
        side_inputs: Its side inputs.
        wrapper: Name of the wrapper layer, for messages.

    Returns:
        The function, its arguments, and the variables in layer, argument and side inputs. The
        function gives the layer's output and what ``variable_threading.assign`` takes for the
        variables.

    >>> layer = pz.nn.ConstantRescale(by=2.0)
    >>> function, arguments, _ = functional_call(layer, 3.0, {}, "Wrapper")
    >>> function(*arguments)
    (6.0, {})
    """
    unbound, variables = pz.unbind_variables((effects_as_variables(body), argument, side_inputs))
    values = tuple(variable.freeze() for variable in variables)
    function, arguments = _without_fixed_leaves(_calling(wrapper), (values, *unbound))
    return function, arguments, variables


@functools.cache
def _calling(wrapper: str) -> Callable[..., tuple[Any, dict[int, Any]]]:
    """The same function every time, so that JAX can use again what it traced."""

    def call_functionally(
        values: tuple[Any, ...], body: Any, argument: Any, side_inputs: dict[str, Any]
    ) -> tuple[Any, dict[int, Any]]:
        variables = list(map(thawed, values))
        body, argument, side_inputs = pz.bind_variables((body, argument, side_inputs), variables)
        return variable_threading.call_with(variables, body, argument, side_inputs, wrapper)

    return call_functionally


def _without_fixed_leaves(
    function: Callable[..., Any], arguments: tuple[Any, ...]
) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """The call and its arguments, leaves such as functions taken out, which JAX cannot trace."""
    leaves, structure = jax.tree_util.tree_flatten(arguments)
    fixed = {i: leaf for i, leaf in enumerate(leaves) if not is_array_like(leaf)}
    if not fixed:
        return function, arguments
    count = len(leaves)

    def call(*arrays: Any) -> tuple[Any, dict[int, Any]]:
        remaining = iter(arrays)
        filled = [fixed[i] if i in fixed else next(remaining) for i in range(count)]
        return function(*jax.tree_util.tree_unflatten(structure, filled))

    return call, tuple(leaf for i, leaf in enumerate(leaves) if i not in fixed)
