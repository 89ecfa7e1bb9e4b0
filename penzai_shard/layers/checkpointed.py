"""Rematerialisation of a layer's intermediates in the backward pass."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
from penzai import pz

from penzai_shard.array_kinds import is_array_like
from penzai_shard.layers import variable_threading
from penzai_shard.layers.remat_policies import check_host_memory, offloads, resolve_policy
from penzai_shard.layers.wrapper_layer import WrapperLayer
from penzai_shard.meshes import onto_auto_twin
from penzai_shard.model_variables import thawed
from penzai_shard.model_variables.first_api_effects import effects_as_variables


def _call_functionally(
    values: tuple[Any, ...], body: Any, argument: Any, side_inputs: dict[str, Any]
) -> tuple[Any, dict[int, Any]]:
    variables = list(map(thawed, values))
    body, argument, side_inputs = pz.bind_variables((body, argument, side_inputs), variables)
    return variable_threading.call_with(variables, body, argument, side_inputs, "Checkpointed")


def _without_fixed_leaves(arguments: tuple[Any, ...]) -> tuple[Callable[..., Any], Any]:
    """The call and its arguments, leaves such as functions taken out, which JAX cannot trace."""
    leaves, structure = jax.tree_util.tree_flatten(arguments)
    fixed = {i: leaf for i, leaf in enumerate(leaves) if not is_array_like(leaf)}
    if not fixed:
        # The same function every time, so that JAX can use again what it traced.
        return _call_functionally, arguments
    count = len(leaves)

    def call(*arrays: Any) -> tuple[Any, dict[int, Any]]:
        remaining = iter(arrays)
        filled = [fixed[i] if i in fixed else next(remaining) for i in range(count)]
        return _call_functionally(*jax.tree_util.tree_unflatten(structure, filled))

    return call, tuple(leaf for i, leaf in enumerate(leaves) if i not in fixed)


@pz.pytree_dataclass
class Checkpointed(WrapperLayer):
    """Wraps a layer so that its intermediates are computed again in the backward pass.

    Output, gradients, parameter names and the updates of state variables stay those of the
    wrapped layer. What changes is the memory held between the forward and the backward pass:
    the layer's input, and what ``policy`` allows. Variables may live in the layer, in the
    argument and in the side inputs.

    Source: Chen et al. 2016, "Training Deep Nets with Sublinear Memory Cost".

    Attributes:
        body: The layer.
        policy: What may be kept: a name (``"nothing"``, ``"dots"``, ``"dots_without_batch"``,
            ``"everything"``, ``"offload_dots"``) or what ``jax.checkpoint`` takes; None keeps
            nothing.

    >>> layer = Checkpointed(pz.nn.Elementwise(jax.numpy.sin))
    >>> float(jax.grad(layer)(0.0))
    1.0
    """

    body: Any
    policy: str | Callable[..., Any] | None = dataclasses.field(
        default=None, metadata={"pytree_node": False}
    )

    def __post_init__(self) -> None:
        """Refuses an unknown policy where it is written, not where the model runs."""
        resolve_policy(self.policy)

    def _run(self, argument: Any, side_inputs: dict[str, Any]) -> Any:
        if offloads(self.policy):
            check_host_memory(f"Checkpointed(policy={self.policy!r})")
        unbound, variables = pz.unbind_variables(
            (effects_as_variables(self.body), argument, side_inputs)
        )
        values = tuple(variable.freeze() for variable in variables)
        call, arguments = _without_fixed_leaves((values, *unbound))
        checkpointed = jax.checkpoint(call, policy=resolve_policy(self.policy))
        output, changed = checkpointed(*onto_auto_twin(arguments))
        variable_threading.assign(variables, changed)
        return output
