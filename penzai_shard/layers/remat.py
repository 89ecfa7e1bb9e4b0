"""Computes a layer's intermediates again in the backward pass, in place of keeping them."""

import dataclasses
from collections.abc import Callable, Collection
from typing import Any, TypeAlias

import jax
from penzai import pz

from penzai_shard.arrays.structure import Structure
from penzai_shard.errors import Problem, RuleTypeError
from penzai_shard.layers.wrapper import Call, WrapperLayer
from penzai_shard.paths import nearest

Policy: TypeAlias = str | Callable[..., Any]

_HOST_MEMORY = "pinned_host"
# What a gathered parameter is called where a policy decides on it.
GATHERED = "gathered_parameter"
# A gathered parameter must not be kept under another form either: as it was before it got its name,
# cast, or transposed. To redo that for an activation costs little, but where a layer gathers
# activations itself.
_FORM_CHANGES = """
    all_gather all_gather_invariant all_gather_reduced broadcast_in_dim convert_element_type copy
    expand_dims pcast pvary reduce_precision reshape reshard sharding_constraint squeeze transpose
"""


def _all_but_gathered(primitive: Any, *operands: Any, **parameters: Any) -> bool:
    return parameters.get("name") != GATHERED and primitive.name not in _FORM_CHANGES.split()


# Unlike functions, names can be written to a file and compared.
POLICIES: dict[str, Callable[..., Any]] = {
    # The layer's input only.
    "nothing": jax.checkpoint_policies.nothing_saveable,
    # Results of matrix products.
    "dots": jax.checkpoint_policies.dots_saveable,
    # Those of linear layers, and not those of attention.
    "dots_without_batch": jax.checkpoint_policies.dots_with_no_batch_dims_saveable,
    # As if the layer were not wrapped.
    "everything": jax.checkpoint_policies.everything_saveable,
    # All but the parameters that `GatherParameters` gathers.
    "all_but_gathered": _all_but_gathered,
    # Those of linear layers, in the memory of the host.
    "offload_dots": jax.checkpoint_policies.offload_dot_with_no_batch_dims("device", _HOST_MEMORY),
}


def find_policy(policy: Policy | None) -> Callable[..., Any] | None:
    """The function of JAX that a policy stands for; None keeps nothing."""
    return POLICIES[policy] if isinstance(policy, str) else policy


def check_policy(
    called: str, policy: Any, known: Collection[str] = tuple(POLICIES), name: str = "policy"
) -> None:
    """Refuses an argument of a name that is neither a function nor the name of a policy.

    Raises:
        RuleTypeError: It is neither.
    """
    if not callable(policy) and policy not in known:
        fix = f"Write {name}={nearest(policy, known) or 'dots'!r}."
        what = f"there is no policy {policy!r}; there are {', '.join(map(repr, known))}"
        raise RuleTypeError(f"{called}:", [Problem(name, what, fix)])


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
            ``"dots_without_batch"`` (those of linear layers), ``"everything"``,
            ``"all_but_gathered"`` (all but what ``GatherParameters`` gathers, which is gathered
            again), ``"offload_dots"`` (those of linear layers, in the memory of the host), or what
            ``jax.checkpoint`` takes. None keeps nothing.

    Raises:
        RuleTypeError: There is no such policy.

    >>> layer = Checkpointed(pz.nn.Elementwise(jax.numpy.sin))
    >>> float(jax.grad(layer)(0.0))
    1.0
    """

    body: Any
    policy: Policy | None = dataclasses.field(default=None, metadata={"pytree_node": False})

    def __post_init__(self) -> None:
        if self.policy is not None:
            check_policy("Checkpointed", self.policy)

    def _transform(self, call: Call, structure: Structure) -> Call:
        transformed: Call = jax.checkpoint(call, policy=find_policy(self.policy))
        return transformed
