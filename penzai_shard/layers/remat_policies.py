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


def _offload_dots() -> CheckpointPolicy:
    return jax.checkpoint_policies.offload_dot_with_no_batch_dims("device", "pinned_host")


POLICIES: dict[str, CheckpointPolicy] = {
    "nothing": jax.checkpoint_policies.nothing_saveable,
    "dots": jax.checkpoint_policies.dots_saveable,
    "dots_without_batch": jax.checkpoint_policies.dots_with_no_batch_dims_saveable,
    "everything": jax.checkpoint_policies.everything_saveable,
    "offload_dots": _offload_dots(),
}
"""The policies that have a name.

* ``nothing``: keep the layer's input alone; least memory, everything is computed again.
* ``dots``: keep the results of all matrix products.
* ``dots_without_batch``: keep those of matrix products without batch dimensions, which is to say
  of the linear layers and not of attention.
* ``everything``: keep all intermediates; as if the layer were not wrapped.
* ``offload_dots``: like ``dots_without_batch``, kept in the host's memory.
"""


def named_policy(name: str) -> CheckpointPolicy:
    """The policy of a name.

    Args:
        name: One of the keys of ``POLICIES``.

    Returns:
        The policy, as ``jax.checkpoint`` takes it; the same object for the same name.

    Raises:
        RuleTypeError: There is no policy of that name; the message lists all there are.

    >>> named_policy("dots") is jax.checkpoint_policies.dots_saveable
    True
    >>> named_policy("dot")
    Traceback (most recent call last):
    penzai_shard.errors.RuleTypeError: there is no checkpoint policy 'dot'. Did you mean 'dots'? ...
    """
    policy = POLICIES.get(name)
    if policy is None:
        near = nearest_name(name, POLICIES)
        hint = f"Did you mean {near!r}? " if near else ""
        names = ", ".join(repr(known) for known in POLICIES)
        raise RuleTypeError(
            f"there is no checkpoint policy {name!r}. {hint}The named ones are {names}; "
            "any other is given as a callable, such as those in jax.checkpoint_policies."
        )
    return policy
