"""Computes the loss of a classifier or a language model whose classes may be split over devices.

Each device sums over its own classes, and three numbers for each position are reduced over the
devices: the maximum, the sum of exponentials, and the logit of the target. Logits and their
gradients are whole on no device, and the backward pass reduces nothing.
"""

from collections.abc import Hashable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from penzai_shard.arrays.structure import flatten, leaves_of
from penzai_shard.errors import Problems, RuleTypeError

_REDUCTIONS = "mean", "sum", "none"


def cross_entropy(
    logits: Any,
    targets: Any,
    *,
    vocabulary: Hashable = "vocabulary",
    mask: Any = None,
    reduction: str = "mean",
    classes: int | None = None,
) -> Any:
    """The negative log-probability of the right class under a softmax of logits.

    It is the same, and as stable, where nothing is split. Source: Shoeybi et al. 2019,
    "Megatron-LM" (arXiv:1909.08053), section 3.

    Args:
        logits: Unnormalised log-probabilities: a named array, or a plain one whose last dimension
            has the classes. Computed in float32 at least.
        targets: The numbers of the right classes, with the other axes of ``logits``.
        vocabulary: The logical axis of the classes.
        mask: Which positions count, as truth values or weights, with some of the axes of
            ``targets``; of plain arrays it has their shape. None counts all.
        reduction: ``"mean"`` over the positions that count, weighted by the mask, which is 0 if
            none does; ``"sum"``; or ``"none"`` for a loss in nats for each position.
        classes: The number of classes, if the vocabulary is padded. Others have no probability.

    Returns:
        The loss, a scalar or an array. It is NaN where a position that counts has a target that is
        no class.

    Raises:
        RuleTypeError: Axes or dtypes do not fit together; all that do not are in it.

    >>> logits = jnp.log(jnp.array([[1.0, 3.0, 7.0], [1.0, 1.0, 7.0]]))
    >>> cross_entropy(logits, jnp.array([0, 1]), classes=2, reduction="none").tolist()
    [1.3862943649291992, 0.6931471824645996]
    """
    given = {"logits": logits, "targets": targets, "mask": mask}
    arrays = {leaf.path: jnp.asarray(leaf.value) for leaf in leaves_of(given)}
    axes = _read_axes(given, vocabulary, classes, reduction)
    names = [*axes["logits"]]
    axis, count = names.index(vocabulary), classes or axes["logits"][vocabulary]

    def align(path: str) -> Any:
        """An array with the axes of the logits, of length 1 where it has none."""
        own = [*axes[path]]
        array = arrays[path].transpose([own.index(name) for name in names if name in own])
        return array[tuple(slice(None) if name in own else None for name in names)]

    # Sums and maxima need no class in one place.
    values = arrays["logits"].astype(jnp.promote_types(arrays["logits"].dtype, jnp.float32))
    numbers = jax.lax.broadcasted_iota(jnp.int32, values.shape, axis)
    values = jnp.where(numbers < count, values, -jnp.inf)
    values = values - jax.lax.stop_gradient(values.max(axis, keepdims=True))
    # A dtype such as uint8 may be too small for the number of classes.
    target = align("targets").astype(jnp.promote_types(arrays["targets"].dtype, jnp.int32))
    right = jnp.where(numbers == target, values, 0.0).sum(axis, keepdims=True)
    losses = jnp.log(jnp.exp(values).sum(axis, keepdims=True)) - right
    losses = jnp.where((target >= 0) & (target < count), losses, jnp.nan)

    weights = jnp.ones_like(losses) if mask is None else align("mask") + jnp.zeros_like(losses)
    # What does not count must not reach the sum as NaN times zero.
    losses = jnp.where(weights == 0, 0.0, losses * weights)
    if reduction == "none":
        order = [*map(names.index, axes["targets"]), axis]
        return flatten(targets)[1].fill_alike([losses.transpose(order).squeeze(-1)])
    total = weights.sum()
    return losses.sum() / (1 if reduction == "sum" else jnp.where(total == 0, 1, total))


def _read_axes(
    given: Mapping[str, Any], vocabulary: Hashable, classes: Any, reduction: Any
) -> dict[str, dict[Hashable, int]]:
    """The length of each array's axes; those without names are called by their numbers."""
    axes, dtypes = {}, {}
    for leaf in leaves_of(given):
        names = leaf.names or (None,) * len(leaf.shape)
        if leaf.path == "logits" and leaf.names is None:
            names = *names[:-1], vocabulary
        called = [i if name is None else name for i, name in enumerate(names)]
        axes[leaf.path] = dict(zip(called, leaf.shape, strict=True))
        dtypes[leaf.path] = leaf.dtype

    problems = Problems("cross_entropy cannot be computed:")
    positions = dict(axes.get("logits", {}))
    count = positions.pop(vocabulary, 0)
    if not count:
        fix = "Write vocabulary=..., the axis of the classes."
        problems.add("logits", f"they have the axes {positions}, and no {vocabulary!r}", fix)
    for path in {"targets", *axes} - {"logits"}:
        own = axes.get(path, {})
        if not own.items() <= positions.items() or (path == "targets" and own != positions):
            what = f"it has the axes {own}, and the positions of the logits are {positions}"
            problems.add(path, what, "Give one array with the axes of these.")
    if not jnp.issubdtype(dtypes.get("targets", jnp.float32), jnp.integer):
        problems.add("targets", "they are no integers", "Give the numbers of the right classes.")
    if classes is not None and not (type(classes) is int and 0 < classes <= count):
        problems.add("classes", f"it cannot be {classes!r}", f"Write classes={count}, or fewer.")
    if reduction not in _REDUCTIONS:
        problems.add("reduction", f"it cannot be {reduction!r}", f"Write one of {_REDUCTIONS}.")
    problems.raise_if_any(RuleTypeError)
    return axes
