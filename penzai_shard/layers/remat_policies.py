"""Rematerialisation policies by name: what may be kept between forward and backward pass.

A policy trades memory for computation. The names are short for those of
``jax.checkpoint_policies``, and unlike functions they can be written to a file and compared.
"""

import dataclasses
import math
from collections.abc import Callable
from typing import Any, Literal

import jax
from jax.ad_checkpoint import checkpoint_name

from penzai_shard.errors import RuleTypeError, ShardingError
from penzai_shard.library_apis.jax_api import changes_form_alone
from penzai_shard.rule_kinds import nearest_name

CheckpointPolicy = Callable[..., Any]

HOST_MEMORY = "pinned_host"
"""The kind of the host's memory that offloaded values are kept in, as JAX calls it."""

# What a gathered parameter is called where a policy decides on it.
_GATHERED = "gathered_parameter"


def _all_but_gathered(primitive: Any, *operands: Any, **parameters: Any) -> bool:
    # A gathered parameter must not be kept in another form either: as it was before it got its
    # name, cast or transposed. To redo that for an activation costs little.
    return parameters.get("name") != _GATHERED and not changes_form_alone(primitive)


POLICIES: dict[str, CheckpointPolicy] = {
    "nothing": jax.checkpoint_policies.nothing_saveable,
    "dots": jax.checkpoint_policies.dots_saveable,
    "dots_without_batch": jax.checkpoint_policies.dots_with_no_batch_dims_saveable,
    "everything": jax.checkpoint_policies.everything_saveable,
    "all_but_gathered": _all_but_gathered,
    "offload_dots": jax.checkpoint_policies.offload_dot_with_no_batch_dims("device", HOST_MEMORY),
}
"""The policies that have a name.

* ``nothing``: keep the layer's input alone; least memory, everything is computed again.
* ``dots``: keep the results of all matrix products.
* ``dots_without_batch``: keep those of matrix products without batch dimensions, which is to say
  of the linear layers and not of attention.
* ``everything``: keep all intermediates; as if the layer were not wrapped.
* ``all_but_gathered``: keep all that was computed, but have ``GatherParameters`` gather again.
* ``offload_dots``: like ``dots_without_batch``, kept in the host's memory.
"""


def named_as_gathered(array: Any) -> Any:
    """A gathered parameter under the name by which ``all_but_gathered`` knows it."""
    return checkpoint_name(array, _GATHERED)


def _names(policies: Any) -> str:
    return ", ".join(map(repr, policies))


def _nearest(name: str, policies: Any) -> str:
    near = nearest_name(name, policies)
    return f"Did you mean {near!r}? " if near else ""


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
    names = _names(POLICIES)
    if isinstance(policy, str):
        if policy not in POLICIES:
            raise RuleTypeError(
                f"there is no checkpoint policy {policy!r}. {_nearest(policy, POLICIES)}"
                f"The named ones are {names}; "
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


Saved = bool | Literal["offload"]


@dataclasses.dataclass(frozen=True, repr=False)
class LayerStackPolicy:
    """What a layer stack that runs as a loop keeps between forward and backward pass.

    With n layers, C bytes of a layer's input, I bytes of what a layer computes inside, and groups
    of g layers, one pass forward and backward holds, beside the parameters and their gradients:

    * nothing computed again (``policy=False`` of the stack): ``n * (C + I)``;
    * ``LayerStackPolicy()``: ``n * C + I``, and each layer runs forward twice;
    * ``group_size="sqrt"``: ``(n / g + g) * C + I``, which is about ``2 * sqrt(n) * C + I``, and
      each layer runs forward three times. The parameters of one group, and their gradients, are
      there twice, so it pays where a layer's input is larger than its parameters on each device.

    Source: Chen et al. 2016, "Training Deep Nets with Sublinear Memory Cost"; the choices are those
    of Haliax's ``ScanCheckpointPolicy``.

    Attributes:
        save_carries: Where the input of each layer (of each group, if there are groups) is kept:
            True for the device's memory, ``"offload"`` for the host's. A loop cannot run backward
            without it.
        save_inputs: Whether the slices are kept that each layer takes from the stacked parameters
            and from per-layer state. False slices them again; True keeps a copy of them, which
            saves a message per layer where the stack's own axis is split over devices;
            ``"offload"`` keeps the copy in the host's memory.
        save_internals: What is kept of the computation inside a layer: False for nothing, True
            for everything, or what ``Checkpointed`` takes as its policy, such as ``"dots"``.
            Where there are groups, it is kept for one group at a time.
        group_size: How many layers form a group, of which only the first one's input is kept until
            the backward pass, where the group runs forward again. None for no groups, ``"sqrt"``
            for about the square root of the number of layers. If the number of layers is not a
            multiple of it, the last group is smaller, and the stack's parameters are copied.

    Raises:
        RuleTypeError: A field has another value than these.

    >>> LayerStackPolicy(save_internals="dots").group_size is None
    True
    """

    save_carries: Literal[True, "offload"] = True
    save_inputs: Saved = False
    save_internals: bool | str | CheckpointPolicy = False
    group_size: int | Literal["sqrt"] | None = None

    def __post_init__(self) -> None:
        """Refuses what cannot be meant where it is written."""
        if self.save_carries is not True and self.save_carries != "offload":
            raise RuleTypeError(
                f"save_carries must be True or 'offload', not {self.save_carries!r}. A loop cannot "
                "run backward without the input of each layer; to keep fewer of them: "
                "LayerStackPolicy(group_size='sqrt')."
            )
        if not isinstance(self.save_inputs, bool) and self.save_inputs != "offload":
            raise RuleTypeError(
                f"save_inputs must be True, False or 'offload', not {self.save_inputs!r}."
            )
        if not isinstance(self.save_internals, bool):
            resolve_policy(self.save_internals)
        size = self.group_size
        is_count = isinstance(size, int) and not isinstance(size, bool) and size > 0
        if size is not None and size != "sqrt" and not is_count:
            raise RuleTypeError(
                f"group_size must be a positive number of layers, 'sqrt' or None, not {size!r}."
            )

    def __repr__(self) -> str:
        return self.text(repr)

    def text(self, written: Callable[[Any], str]) -> str:
        """The policy as an expression, without the fields that have their default.

        Args:
            written: How the value of a field is written.

        >>> LayerStackPolicy(group_size=4).text(repr)
        'LayerStackPolicy(group_size=4)'
        """
        shown = [
            f"{field.name}={written(getattr(self, field.name))}"
            for field in dataclasses.fields(self)
            if getattr(self, field.name) != field.default
        ]
        return f"LayerStackPolicy({', '.join(shown)})"

    @property
    def offloads(self) -> bool:
        """Whether something is kept in the host's memory."""
        return "offload" in (self.save_carries, self.save_inputs) or offloads(self.save_internals)

    @property
    def internals(self) -> CheckpointPolicy:
        """What is kept inside a layer, as ``jax.checkpoint`` takes it."""
        if isinstance(self.save_internals, bool):
            return POLICIES["everything" if self.save_internals else "nothing"]
        return resolve_policy(self.save_internals) or POLICIES["nothing"]

    def layers_per_group(self, layers: int) -> int:
        """How many layers form a group in a stack of so many; all of them if there are no groups.

        The square root is rounded to a number that divides, if that keeps few more inputs.

        >>> [LayerStackPolicy(group_size="sqrt").layers_per_group(n) for n in (1, 3, 16, 32, 46)]
        [1, 3, 4, 4, 7]
        """
        if self.group_size is None or layers < 4:
            return layers
        if self.group_size != "sqrt":
            return min(self.group_size, layers)
        root = round(math.sqrt(layers))
        at_best = math.ceil(layers / root) + root
        divisors = [size for size in range(2, layers) if layers % size == 0]
        kept = {size: layers // size + size for size in divisors}
        # Of two that keep equally much, the smaller, which copies fewer parameters.
        nearest = min(divisors, key=lambda size: (kept[size], size), default=None)
        return nearest if nearest and kept[nearest] <= 1.5 * at_best else root


StackPolicyLike = bool | str | LayerStackPolicy | CheckpointPolicy | None

STACK_POLICIES: dict[str, LayerStackPolicy | None] = {
    "carries": LayerStackPolicy(),
    "inputs": LayerStackPolicy(save_inputs=True),
    "nested": LayerStackPolicy(group_size="sqrt"),
    "offload_carries": LayerStackPolicy(save_carries="offload"),
    **{name: LayerStackPolicy(save_internals=name) for name in POLICIES},
    "everything": None,
}
"""The policies of layer stacks that have a name.

* ``carries``: keep the input of each layer alone, as ``"nothing"`` does.
* ``inputs``: keep also the slices of the stacked parameters.
* ``nested``: keep the input of each group of about the square root of the number of layers.
* ``offload_carries``: like ``carries``, kept in the host's memory.
* The names in ``POLICIES``: each layer as under ``Checkpointed`` with this policy.
"""


def resolve_stack_policy(policy: Any) -> LayerStackPolicy | None:
    """What a layer stack keeps, from any form that it is given in.

    Args:
        policy: False or None to keep everything, True for ``"carries"``, a name in
            ``STACK_POLICIES``, a ``LayerStackPolicy``, or a callable such as those in
            ``jax.checkpoint_policies`` for what to keep inside of each layer.

    Returns:
        The policy; None to compute nothing again.

    Raises:
        RuleTypeError: It is none of these; the message lists all names there are.

    >>> resolve_stack_policy(True) == resolve_stack_policy("carries") == LayerStackPolicy()
    True
    """
    if isinstance(policy, str):
        if policy not in STACK_POLICIES:
            raise RuleTypeError(
                f"there is no policy {policy!r} of layer stacks. {_nearest(policy, STACK_POLICIES)}"
                f"The named ones are {_names(STACK_POLICIES)}; for others: "
                "LayerStackPolicy(group_size=4, save_internals='dots')."
            )
        return STACK_POLICIES[policy]
    if policy is None or policy is False:
        return None
    if isinstance(policy, LayerStackPolicy):
        return policy
    if policy is True:
        return LayerStackPolicy()
    if callable(policy):
        return LayerStackPolicy(save_internals=policy)
    raise RuleTypeError(
        "the policy of a layer stack is True, False, a name or a LayerStackPolicy, not "
        f"{policy!r}. The names are {_names(STACK_POLICIES)}."
    )


def offloads(policy: Any) -> bool:
    """Whether a policy of ``Checkpointed`` keeps values in the host's memory, as far as is known.

    >>> offloads("offload_dots"), offloads("dots")
    (True, False)
    """
    return policy in ("offload_dots", POLICIES["offload_dots"])


def check_host_memory(layer: str) -> None:
    """Refuses to offload where JAX cannot keep values in the host's memory.

    Args:
        layer: The layer with its policy, for the message.

    Raises:
        ShardingError: The default backend has no such memory.

    >>> check_host_memory("Checkpointed(policy='offload_dots')")
    """
    kinds = [memory.kind for memory in jax.local_devices()[0].addressable_memories()]
    if HOST_MEMORY not in kinds:
        raise ShardingError(
            f"{layer} keeps values in the host's memory ({HOST_MEMORY}), and JAX has none of that "
            f"kind on this {jax.default_backend()} backend, only {', '.join(kinds) or 'none'}. "
            "Take a policy that does not offload, such as 'nothing'."
        )
