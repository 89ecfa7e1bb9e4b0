"""Rematerialisation policies by name: what may be kept between forward and backward pass.

A policy trades memory for computation. The names are short for those of
``jax.checkpoint_policies``, and unlike functions they can be written to a file and compared.
"""

from collections.abc import Callable
from typing import Any

import jax

from penzai_shard.errors import RuleTypeError
from penzai_shard.rule_kinds import nearest_name

CheckpointPolicy = Callable[..., Any]

POLICIES: dict[str, CheckpointPolicy] = {
    "nothing": jax.checkpoint_policies.nothing_saveable,
    "dots": jax.checkpoint_policies.dots_saveable,
    "dots_without_batch": jax.checkpoint_policies.dots_with_no_batch_dims_saveable,
    "everything": jax.checkpoint_policies.everything_saveable,
    "offload_dots": jax.checkpoint_policies.offload_dot_with_no_batch_dims("device", "pinned_host"),
}
"""The policies that have a name.

* ``nothing``: keep the layer's input alone; least memory, everything is computed again.
* ``dots``: keep the results of all matrix products.
* ``dots_without_batch``: keep those of matrix products without batch dimensions, which is to say
  of the linear layers and not of attention.
* ``everything``: keep all intermediates; as if the layer were not wrapped.
* ``offload_dots``: like ``dots_without_batch``, kept in the host's memory.
"""


def resolve_policy(policy: Any) -> CheckpointPolicy | None:
    """The policy that ``jax.checkpoint`` takes.

    Args:
        policy: None, which saves nothing but the layer's input; one of the names in ``POLICIES``;
            or a callable such as those in ``jax.checkpoint_policies``.

    Returns:
        The policy; the same object for the same name.

    Raises:
        RuleTypeError: It is none of these; the message lists all names there are.

    >>> resolve_policy("dots") is jax.checkpoint_policies.dots_saveable
    True
    >>> resolve_policy("dot")
    Traceback (most recent call last):
    penzai_shard.errors.RuleTypeError: there is no checkpoint policy 'dot'. Did you mean 'dots'? ...
    """
    names = ", ".join(map(repr, POLICIES))
    if isinstance(policy, str):
        if policy not in POLICIES:
            near = nearest_name(policy, POLICIES)
            hint = f"Did you mean {near!r}? " if near else ""
            raise RuleTypeError(
                f"there is no checkpoint policy {policy!r}. {hint}The named ones are {names}; "
                "any other is given as a callable, such as those in jax.checkpoint_policies."
            )
        return POLICIES[policy]
    if policy is None or callable(policy):
        return policy
    raise RuleTypeError(
        f"a checkpoint policy is a name, a callable or None, not {policy!r}. "
        f"Take one of {names}, or a callable such as "
        "jax.checkpoint_policies.dots_with_no_batch_dims_saveable."
    )
