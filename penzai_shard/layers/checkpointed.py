"""Rematerialisation of a layer's intermediates in the backward pass."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
from penzai import pz

from penzai_shard.layers import variable_threading
from penzai_shard.layers.functional_calls import functional_call
from penzai_shard.layers.remat_policies import check_host_memory, offloads, resolve_policy
from penzai_shard.layers.wrapper_layer import WrapperLayer
from penzai_shard.meshes import onto_auto_twin


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
        call, arguments, variables = functional_call(
            self.body, argument, side_inputs, "Checkpointed"
        )
        checkpointed = jax.checkpoint(call, policy=resolve_policy(self.policy))
        output, changed = checkpointed(*onto_auto_twin(arguments))
        variable_threading.assign(variables, changed)
        return output
