"""Computes a layer's intermediates again in the backward pass, in place of keeping them."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
from penzai import pz

from penzai_shard.arrays.structure import Structure
from penzai_shard.errors import Problem, RuleTypeError, ShardingError
from penzai_shard.layers.wrapper import Call, WrapperLayer
from penzai_shard.paths import nearest

_HOST_MEMORY = "pinned_host"
# Unlike functions, names can be written to a file and compared.
_POLICIES: dict[str, Callable[..., Any]] = {
    # The layer's input only.
    "nothing": jax.checkpoint_policies.nothing_saveable,
    # Results of matrix products.
    "dots": jax.checkpoint_policies.dots_saveable,
    # Those of linear layers, and not those of attention.
    "dots_without_batch": jax.checkpoint_policies.dots_with_no_batch_dims_saveable,
    # As if the layer were not wrapped.
    "everything": jax.checkpoint_policies.everything_saveable,
    # Those of linear layers, in the memory of the host.
    "offload_dots": jax.checkpoint_policies.offload_dot_with_no_batch_dims("device", _HOST_MEMORY),
}


@pz.pytree_dataclass
class Checkpointed(WrapperLayer):
    """Wraps a layer so that the backward pass computes its intermediates again.

    Output, gradients, parameter names and assignments of variables stay those of the layer. What
    changes is what is kept between forward and backward pass: the layer's input, and what
    ``policy`` allows.

    Source: Chen et al. 2016, "Training Deep Nets with Sublinear Memory Cost".

    Attributes:
        body: The layer.
        policy: What may be kept: ``"nothing"``, ``"dots"`` (results of matrix products),
            ``"dots_without_batch"`` (those of linear layers), ``"everything"``, ``"offload_dots"``
            (those of linear layers, in the memory of the host), or what ``jax.checkpoint`` takes.
            None keeps nothing.

    Raises:
        RuleTypeError: There is no such policy.

    >>> layer = Checkpointed(pz.nn.Elementwise(jax.numpy.sin))
    >>> float(jax.grad(layer)(0.0))
    1.0
    """

    body: Any
    policy: str | Callable[..., Any] | None = dataclasses.field(
        default=None, metadata={"pytree_node": False}
    )

    def __post_init__(self) -> None:
        if self.policy is None or callable(self.policy) or self.policy in _POLICIES:
            return
        near = nearest(self.policy, _POLICIES) or "dots"
        what = f"there is no policy {self.policy!r}; there are {', '.join(map(repr, _POLICIES))}"
        raise RuleTypeError("Checkpointed:", [Problem("", what, f"Write policy={near!r}.")])

    def _transform(self, call: Call, structure: Structure) -> Call:
        if self.policy == "offload_dots":
            _check_host_memory()
        policy = _POLICIES[self.policy] if isinstance(self.policy, str) else self.policy
        transformed: Call = jax.checkpoint(call, policy=policy)
        return transformed


def _check_host_memory() -> None:
    kinds = [memory.kind for memory in jax.local_devices()[0].addressable_memories()]
    if _HOST_MEMORY not in kinds:
        what = f"this {jax.default_backend()} backend has no memory {_HOST_MEMORY!r}"
        problem = Problem("", what, "Write policy='dots_without_batch'.")
        raise ShardingError("Checkpointed(policy='offload_dots'):", [problem])
