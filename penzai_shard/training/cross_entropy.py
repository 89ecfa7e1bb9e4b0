"""Computes the loss of a classifier or a language model whose classes may be split over devices.

Each device sums over its own classes, and three numbers for each position are reduced over the
devices: the maximum, the sum of exponentials, and the logit of the target. Logits and their
gradients are whole on no device, and the backward pass reduces nothing.
"""

from collections.abc import Hashable, Mapping
from typing import Any, Literal, TypeAlias, get_args

import jax
import jax.numpy as jnp

from penzai_shard.arrays.structure import flatten, leaves_of
from penzai_shard.errors import Problems, RuleTypeError

Reduction = Literal["mean", "sum", "none"]
_Names: TypeAlias = tuple[Hashable, ...]


def cross_entropy(
    logits: Any,
    targets: Any,
    *,
    vocabulary: Hashable = "vocabulary",
    mask: Any = None,
    reduction: Reduction = "mean",
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
    problems = Problems("cross_entropy cannot be computed:")
    given = {"logits": logits, "targets": targets} | ({} if mask is None else {"mask": mask})
    arrays = {name: _read_array(name, array, vocabulary, problems) for name, array in given.items()}
    problems.raise_if_any(RuleTypeError)
    names, logits = arrays["logits"]
    axis = names.index(vocabulary)
    count = logits.shape[axis] if classes is None else classes
    _check(arrays, vocabulary, count, reduction)

    def align(array: tuple[_Names, Any]) -> Any:
        """An array with the axes of the logits, of length 1 where it has none."""
        own, value = array
        value = value.transpose([own.index(name) for name in names if name in own])
        return value[tuple(slice(None) if name in own else None for name in names)]

    # Sums and maxima need no class in one place.
    logits = logits.astype(jnp.promote_types(logits.dtype, jnp.float32))
    numbers = jax.lax.broadcasted_iota(jnp.int32, logits.shape, axis)
    # A dtype such as uint8 may be too small for the number of classes.
    target = align(arrays["targets"])
    target = target.astype(jnp.promote_types(target.dtype, jnp.int32))
    logits = jnp.where(numbers < count, logits, -jnp.inf)
    logits = logits - jax.lax.stop_gradient(logits.max(axis, keepdims=True))
    right = jnp.where(numbers == target, logits, 0.0).sum(axis, keepdims=True)
    losses = jnp.log(jnp.exp(logits).sum(axis, keepdims=True)) - right
    losses = jnp.where((target >= 0) & (target < count), losses, jnp.nan)

    weights = jnp.ones_like(losses)
    if mask is not None:
        weights = weights * align(arrays["mask"])
        # What does not count must not reach the sum as NaN times zero.
        losses = jnp.where(weights == 0, 0.0, losses * weights)
    if reduction == "none":
        rest = [name for name in names if name != vocabulary]
        order = [rest.index(name) for name in arrays["targets"][0]]
        return flatten(targets)[1].fill_alike([losses.squeeze(axis).transpose(order)])
    if reduction == "sum":
        return losses.sum()
    total = weights.sum()
    return losses.sum() / jnp.where(total == 0, 1, total)


def _read_array(
    name: str, array: Any, vocabulary: Hashable, problems: Problems
) -> tuple[_Names, Any]:
    """The axes of an array and the array without them; those of a plain one are numbers."""
    leaves = leaves_of(array)
    if len(leaves) != 1 or leaves[0].path:
        problems.add(name, f"it is a {type(array).__name__}", "Give one array.")
        return (), None
    (leaf,) = leaves
    names = tuple(leaf.names or range(len(leaf.shape)))
    if leaf.names is None and name == "logits":
        names = *names[:-1], vocabulary
    if name == "logits" and vocabulary not in names:
        what = f"they have no axis {vocabulary!r}, but {names}"
        problems.add(name, what, "Write vocabulary=..., the axis of the classes.")
    if None in names:
        problems.add(name, f"dimensions have no name: {names}", "Name them: array.tag(...).")
    return names, jnp.asarray(leaf.value)


def _check(
    arrays: Mapping[str, tuple[_Names, Any]], vocabulary: Hashable, count: Any, reduction: Any
) -> None:
    """Refuses what does not fit together."""
    problems = Problems("cross_entropy cannot be computed:")
    names, logits = arrays["logits"]
    sizes = dict(zip(names, logits.shape, strict=True))
    length = sizes.pop(vocabulary)
    for name in arrays.keys() - {"logits"}:
        own = dict(zip(arrays[name][0], arrays[name][1].shape, strict=True))
        if not own.items() <= sizes.items() or (name == "targets" and own != sizes):
            what = f"it has the axes {own}, and the positions of the logits are {sizes}"
            problems.add(name, what, "Give it the axes of the logits but the vocabulary.")
    dtype = arrays["targets"][1].dtype
    if not jnp.issubdtype(dtype, jnp.integer):
        problems.add("targets", f"they are {dtype}", "Give the numbers of classes, integers.")
    if type(count) is not int or not 0 < count <= length:
        problems.add("classes", f"{count!r} is not 1 to {length}", f"Write classes={length}.")
    if reduction not in get_args(Reduction):
        fix = f"Write one of {get_args(Reduction)}."
        problems.add("reduction", f"it cannot be {reduction!r}", fix)
    problems.raise_if_any(RuleTypeError)
