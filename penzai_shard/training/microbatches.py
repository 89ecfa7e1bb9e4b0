"""Splitting inputs into microbatches by the name of their batch axis.

Gradient accumulation computes the gradient of a large batch in parts that fit in memory. The
split is strided: part ``i`` of ``n`` has the examples ``i``, ``i + n``, and so on. Each device then
keeps the examples that it has, which a split into contiguous parts would not allow.
"""

import collections
import dataclasses
from collections.abc import Callable, Hashable
from typing import Any

import jax
import jax.numpy as jnp
from penzai import pz

from penzai_shard.errors import RuleTypeError, ShardingError, raise_all
from penzai_shard.tree_paths import path_text


@dataclasses.dataclass(frozen=True)
class Microbatches:
    """Inputs split into equal parts, or left whole as a single one.

    Attributes:
        count: Number of parts.
        stacked: The inputs that were split, as named arrays with the parts along a first,
            positional dimension; None in place of one that every part gets whole.
        whole: The inputs that every part gets whole; None in place of one that was split.
        treedef: Structure of the inputs, named arrays as leaves.
    """

    count: int
    stacked: list[Any]
    whole: list[Any]
    treedef: Any

    def part(self, sliced: list[Any]) -> Any:
        """The inputs of one microbatch.

        Args:
            sliced: ``stacked`` with one slice of each array.
        """
        leaves = [w if s is None else s for s, w in zip(sliced, self.whole, strict=True)]
        return self.treedef.unflatten(leaves)

    def in_turn(self, evaluate: Callable[[Any, Any, Any], tuple[Any, Any]], carry: Any) -> Any:
        """Evaluates one microbatch after the other, in one compiled loop.

        Args:
            evaluate: Gets what is carried, the index of the microbatch and its inputs, and returns
                what is carried on and an output. The index of a single one is None.
            carry: What the first one gets.

        Returns:
            What the last one carried on, and the outputs along a new first dimension.
        """
        if self.count == 1:
            carry, output = evaluate(carry, None, self.part(self.stacked))
            return carry, jax.tree.map(lambda x: x[None], output)
        return jax.lax.scan(
            lambda carry, xs: evaluate(carry, xs[0], self.part(xs[1])),
            carry,
            (jnp.arange(self.count), self.stacked),
        )


def check_split(parts: Any, batch_axis: Any, argument: str = "accumulate_steps") -> None:
    """Checks how inputs are to be split.

    Args:
        parts: How many microbatches.
        batch_axis: Logical axis to split along.
        argument: What the number is called, for the message.

    Raises:
        RuleTypeError: The number is not a positive integer, or the other not a logical axis.

    >>> check_split(4, "batch")
    """
    if not isinstance(parts, int) or isinstance(parts, bool) or parts < 1:
        raise RuleTypeError(f"{argument} must be a positive integer, not {parts!r}.")
    if not isinstance(batch_axis, Hashable):
        raise RuleTypeError(f"batch_axis must be a logical axis, not {batch_axis!r}.")


def split_inputs(inputs: Any, parts: int, batch_axis: str) -> Microbatches:
    """Splits every named array that has the batch axis.

    Args:
        inputs: The inputs of a train step. Arrays without names, and named arrays without the
            batch axis, go whole to every part.
        parts: How many microbatches; one gets all inputs as they are.
        batch_axis: Logical axis to split along.

    Returns:
        The split inputs.

    Raises:
        ShardingError: A length does not divide, or no input has the axis.

    >>> split = split_inputs({"x": pz.nx.wrap(jnp.arange(4), "batch")}, 2, "batch")
    >>> split.part(jax.tree.map(lambda data: data[0], split.stacked))["x"].data_array.tolist()
    [0, 2]
    """
    flat, treedef = jax.tree_util.tree_flatten_with_path(inputs, is_leaf=pz.nx.is_namedarray)
    if parts == 1:
        return Microbatches(1, [None] * len(flat), [leaf for _, leaf in flat], treedef)
    stacked: list[Any] = []
    whole: list[Any] = []
    problems: list[str] = []
    unsplit: list[str] = []
    for key_path, leaf in flat:
        path = path_text(key_path)
        if not pz.nx.is_namedarray(leaf) or batch_axis not in leaf.named_shape:
            whole.append(leaf)
            stacked.append(None)
            unsplit.append(f"{path}: {_axes_text(leaf)}.")
            continue
        whole.append(None)
        size = leaf.named_shape[batch_axis]
        if size % parts:
            problems.append(
                f"input {path}: logical axis {batch_axis!r} ({size}) does not divide into "
                f"accumulate_steps={parts} microbatches. Pad the batch to "
                f"{-(-size // parts) * parts}, or choose a divisor of {size}."
            )
        else:
            stacked.append(_stacked(leaf.with_positional_prefix(), parts, batch_axis))
    raise_all(ShardingError, "the inputs cannot be split into microbatches:", problems)
    if len(unsplit) == len(flat):
        raise ShardingError(
            f"accumulate_steps={parts}, but no input has the logical axis {batch_axis!r}. "
            f'Name it, for instance pz.nx.wrap(x, {batch_axis!r}, "features"), or pass the '
            'name that it has: build_train_step_fn(..., batch_axis="...").',
            unsplit,
        )
    return Microbatches(parts, stacked, whole, treedef)


def _stacked(array: pz.nx.NamedArray, parts: int, batch_axis: str) -> pz.nx.NamedArray:
    """The array with the parts along a new first dimension."""
    sizes = collections.OrderedDict(array.named_axes)
    dimension = array.data_array.ndim - len(sizes) + list(sizes).index(batch_axis)
    sizes[batch_axis] //= parts
    # Strided: part i of n gets the examples i, i + n, and so on.
    shape = list(array.data_array.shape)
    shape[dimension : dimension + 1] = sizes[batch_axis], parts
    split = jnp.reshape(array.data_array, shape)
    return pz.nx.NamedArray(sizes, jnp.moveaxis(split, dimension + 1, 0))


def joined(parts: pz.nx.NamedArray, batch_axis: Any) -> pz.nx.NamedArray:
    """An array whose parts are along its first, positional dimension, as the whole batch's.

    Undoes the split of `split_inputs`: the examples get the order that they have in the batch.

    Args:
        parts: The parts, all with the batch axis.
        batch_axis: The logical axis that was split.

    >>> parts = pz.nx.wrap(jnp.asarray([[0, 2], [1, 3]]), "part", "batch").untag("part")
    >>> joined(parts, "batch").data_array.tolist()
    [0, 1, 2, 3]
    """
    array = parts.with_positional_prefix()
    sizes = collections.OrderedDict(array.named_axes)
    data = array.data_array
    dimension = data.ndim - len(sizes) + list(sizes).index(batch_axis)
    # The parts come behind the batch axis, of which they are the minor part.
    data = jnp.moveaxis(data, 0, dimension)
    shape = list(data.shape)
    shape[dimension - 1 : dimension + 1] = [shape[dimension - 1] * shape[dimension]]
    sizes[batch_axis] = shape[dimension - 1]
    return pz.nx.NamedArray(sizes, jnp.reshape(data, shape))


def _axes_text(leaf: Any) -> str:
    if pz.nx.is_namedarray(leaf):
        return f"its logical axes are {tuple(leaf.named_shape)}"
    return "an array without names"
