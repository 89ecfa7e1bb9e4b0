"""The loss of a classifier, or of a language model, whose classes may be split over devices."""

from typing import Any, Literal, get_args

import jax
import jax.numpy as jnp
from penzai import pz

from penzai_shard.errors import RuleTypeError, raise_all
from penzai_shard.rule_kinds import LogicalAxis

Reduction = Literal["mean", "sum", "none"]


def cross_entropy(
    logits: pz.nx.NamedArrayBase,
    targets: pz.nx.NamedArrayBase,
    *,
    vocabulary: LogicalAxis = "vocabulary",
    mask: pz.nx.NamedArrayBase | None = None,
    reduction: Reduction = "mean",
) -> Any:
    """The negative log-probability of the right class under a softmax of logits.

    Made for logits that are split along the vocabulary (``vocabulary=`` of the presets of
    ``Layout``): each device sums over its own classes, and three numbers per position are reduced
    over the devices: the maximum, the sum of exponentials and the target's logit. Whole logits, or
    whole gradients of them, are nowhere, and the backward pass reduces nothing. It computes the
    same, stably, where nothing is split.

    Source: Shoeybi et al. 2019, "Megatron-LM" (arXiv:1909.08053), section 3.

    Args:
        logits: Unnormalised log-probabilities, a named array without positional dimensions.
            Computed in float32 at least.
        targets: The right classes: integers, with the logical axes of ``logits`` but the
            vocabulary's.
        vocabulary: The logical axis of the classes.
        mask: Which positions count, such as those that are not padding: truth values, or weights;
            any of the logical axes of ``targets``. None counts all.
        reduction: ``"mean"`` over the positions that count, weighted by the mask; 0 if none counts.
            ``"sum"``, or ``"none"`` for a named array with a loss, in nats, for each position.

    Returns:
        The loss, a scalar or a named array. NaN where a position that counts has a target that is
        not a class.

    Raises:
        RuleTypeError: The logical axes or dtypes do not fit together; all problems are reported.

    >>> logits = pz.nx.wrap(jnp.log(jnp.array([[1.0, 3.0], [1.0, 1.0]]))).tag("seq", "vocabulary")
    >>> losses = cross_entropy(logits, pz.nx.arange("seq", 2), reduction="none")
    >>> losses.data_array
    Array([1.3862944, 0.6931472], dtype=float32)
    >>> float(cross_entropy(logits, pz.nx.arange("seq", 2), mask=pz.nx.arange("seq", 2) == 1))
    0.6931471824645996
    """
    raise_all(
        RuleTypeError,
        "cross_entropy cannot be computed:",
        _problems(logits, targets, vocabulary, mask, reduction),
    )
    logits = logits.astype(jnp.promote_types(logits.dtype, jnp.float32))
    losses = pz.nx.nmap(_loss_of_one)(logits.untag(vocabulary), targets)
    if reduction == "none" and mask is None:
        return losses
    weights = pz.nx.ones(losses.named_shape, losses.dtype)
    if mask is not None:
        weights = weights * mask.astype(losses.dtype)
    # A loss that does not count must not reach the sum as NaN times zero.
    losses = pz.nx.nmap(lambda loss, w: jnp.where(w == 0, 0.0, loss * w))(losses, weights)
    if reduction == "none":
        return losses
    total = _sum(losses)
    if reduction == "sum":
        return total
    count = _sum(weights)
    return total / jnp.where(count == 0, 1, count)


def _sum(array: Any) -> Any:
    return array.untag(*array.named_shape).sum().unwrap()


def _loss_of_one(logits: jax.Array, target: jax.Array) -> jax.Array:
    """The loss of one position; by sums alone, which need no class in one place."""
    classes = jnp.arange(logits.shape[0])
    # The number of classes may be more than a dtype such as uint8 can say.
    target = target.astype(jnp.promote_types(target.dtype, classes.dtype))
    shifted = logits - jax.lax.stop_gradient(logits.max())
    is_right = classes == target
    right = jnp.where(is_right, shifted, 0.0).sum()
    loss = jnp.log(jnp.exp(shifted).sum()) - right
    is_class = (target >= 0) & (target < logits.shape[0])
    return jnp.where(is_class, loss, jnp.nan)


def _problems(logits: Any, targets: Any, vocabulary: Any, mask: Any, reduction: Any) -> list[str]:
    """What does not fit together."""
    given = {"logits": logits, "targets": targets} | ({} if mask is None else {"mask": mask})
    problems = [
        f"{what}: a named array is needed, not {type(array).__name__}. Name its dimensions: "
        "pz.nx.wrap(array).tag(...)."
        for what, array in given.items()
        if not isinstance(array, pz.nx.NamedArrayBase)
    ]
    if reduction not in get_args(Reduction):
        problems.append(
            f"reduction={reduction!r}: it is one of {', '.join(map(repr, get_args(Reduction)))}."
        )
    if problems:
        return problems
    problems += [
        f"{what}: it has positional dimensions {array.positional_shape}. Name them: "
        f"{what}.tag(...)."
        for what, array in given.items()
        if array.positional_shape
    ]
    axes = {what: set(array.named_shape) for what, array in given.items()}
    if vocabulary not in axes["logits"]:
        return [
            *problems,
            f"logits: they have no logical axis {vocabulary!r}, but {_text(axes['logits'])}. Say "
            "which one has the classes: vocabulary=...",
        ]
    positions = axes["logits"] - {vocabulary}
    if axes["targets"] != positions:
        problems.append(
            f"targets: their logical axes are {_text(axes['targets'])}, and those of the logits "
            f"without {vocabulary!r} are {_text(positions)}. Both need the same."
        )
    if mask is not None and not axes["mask"] <= positions:
        problems.append(
            f"mask: it has the logical axes {_text(axes['mask'] - positions)}, which the targets "
            "do not have."
        )
    sizes = dict(logits.named_shape)
    problems += [
        f"{what}: logical axis {name!r} has length {size}, and {sizes[name]} in the logits."
        for what in given
        for name, size in given[what].named_shape.items()
        if name in positions and size != sizes[name]
    ]
    if not jnp.issubdtype(targets.dtype, jnp.integer):
        problems.append(f"targets: they are integers, the numbers of classes, not {targets.dtype}.")
    return problems


def _text(names: Any) -> str:
    return ", ".join(map(repr, sorted(names, key=str))) or "none"
