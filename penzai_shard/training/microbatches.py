"""Splitting inputs into microbatches by the name of their batch axis.

Gradient accumulation computes the gradient of a large batch in parts that fit in memory. The
split is strided: part ``i`` of ``n`` has the examples ``i``, ``i + n``, and so on. Each device then
keeps the examples that it has, which a split into contiguous parts would not allow.
"""

import dataclasses
from collections.abc import Callable, Hashable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from penzai import pz

from penzai_shard.errors import RuleTypeError, ShardingError, raise_all
from penzai_shard.named_nodes import is_named_node, named_like, node_data, node_names
from penzai_shard.readers import reader_of
from penzai_shard.tree_paths import path_text


@dataclasses.dataclass(frozen=True)
class Microbatches:
    """Inputs split into equal parts, or left whole as a single one.

    Attributes:
        count: Number of parts.
        stacked: The data of the inputs that were split, with the parts along a new first
            dimension; None in place of one that every part gets whole.
        inputs: The inputs.
        treedef: Structure of the inputs, named arrays as leaves.
    """

    count: int
    stacked: list[Any]
    inputs: list[Any]
    treedef: Any

    def part(self, sliced: list[Any]) -> Any:
        """The inputs of one microbatch.

        Args:
            sliced: ``stacked`` with one slice of each array.
        """
        leaves = [
            node if data is None else named_like(node, data)
            for data, node in zip(sliced, self.inputs, strict=True)
        ]
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

        def evaluate_part(carry: Any, indexed: tuple[Any, list[Any]]) -> tuple[Any, Any]:
            carry, output = evaluate(carry, indexed[0], self.part(indexed[1]))
            return carry, _stackable(output)

        return jax.lax.scan(evaluate_part, carry, (jnp.arange(self.count), self.stacked))


def _stackable(output: Any) -> Any:
    """An output without views, which know all dimensions of their data by number."""
    return jax.tree_util.tree_map(
        lambda node: node.with_positional_prefix() if pz.nx.is_namedarray(node) else node,
        output,
        is_leaf=pz.nx.is_namedarray,
    )


def check_split(parts: Any, batch_axis: Any) -> None:
    """Checks how inputs are to be split.

    Args:
        parts: How many microbatches.
        batch_axis: Logical axis to split along, or the number of a dimension.

    Raises:
        RuleTypeError: The number is not a positive integer, or the other not a logical axis.

    >>> check_split(4, "batch")
    """
    if not isinstance(parts, int) or isinstance(parts, bool) or parts < 1:
        raise RuleTypeError(f"accumulate_steps must be a positive integer, not {parts!r}.")
    is_number = isinstance(batch_axis, int)
    fits = batch_axis >= 0 if is_number else isinstance(batch_axis, Hashable)
    if not fits or isinstance(batch_axis, bool):
        raise RuleTypeError(
            "batch_axis must be a logical axis, or for plain arrays the number of a dimension such "
            f"as 0, not {batch_axis!r}."
        )


def split_inputs(inputs: Any, parts: int, batch_axis: str | int) -> Microbatches:
    """Splits every named array, also of another library, that has the batch axis.

    Args:
        inputs: The inputs of a train step. Arrays without names, and named arrays without the
            batch axis, go whole to every part.
        parts: How many microbatches; one gets all inputs as they are.
        batch_axis: Logical axis to split along. A number is a dimension of arrays without names:
            these are split then, and named ones go whole to every part.

    Returns:
        The split inputs.

    Raises:
        ShardingError: A length does not divide, no input has the axis, or arrays without names
            that are split differ in length.

    >>> split = split_inputs({"x": pz.nx.wrap(jnp.arange(4), "batch")}, 2, "batch")
    >>> split.part([data[0] for data in split.stacked])["x"].data_array.tolist()
    [0, 2]
    """
    flat, treedef = jax.tree_util.tree_flatten_with_path(inputs, is_leaf=is_named_node)
    nodes = [node for _, node in flat]
    if parts == 1:
        return Microbatches(1, [None] * len(flat), nodes, treedef)
    stacked: list[Any] = []
    problems: list[str] = []
    unsplit: list[str] = []
    for key_path, node in flat:
        path, dimension = path_text(key_path), _dimension_of(node, batch_axis)
        stacked.append(None)
        if dimension is None:
            unsplit.append(f"{path}: {_axes_text(node)}.")
            continue
        size = np.shape(node_data(node))[dimension]
        if size % parts:
            kind = "dimension" if isinstance(batch_axis, int) else "logical axis"
            problems.append(
                f"input {path}: {kind} {batch_axis!r} ({size}) does not divide into "
                f"accumulate_steps={parts} microbatches. Pad the batch to "
                f"{-(-size // parts) * parts}, or choose a divisor of {size}."
            )
        else:
            stacked[-1] = _stacked(node_data(node), parts, dimension)
    raise_all(ShardingError, "the inputs cannot be split into microbatches:", problems)
    if isinstance(batch_axis, int):
        _refuse_other_lengths(inputs, parts, batch_axis)
    if len(unsplit) == len(flat):
        raise ShardingError(_nothing_split(parts, batch_axis), unsplit)
    return Microbatches(parts, stacked, nodes, treedef)


def _refuse_other_lengths(inputs: Any, parts: int, dimension: int) -> None:
    """Raises for plain arrays of several lengths, of which some can hardly be of examples.

    A part of the weights of classes, for instance, would be taken for all of them.
    """
    lengths = {
        path_text(key_path): np.shape(node)[dimension]
        for key_path, node in jax.tree_util.tree_leaves_with_path(inputs, is_leaf=is_named_node)
        if _dimension_of(node, dimension) is not None
    }
    if len(set(lengths.values())) > 1:
        raise ShardingError(
            f"accumulate_steps={parts} with batch_axis={dimension} splits this dimension of every "
            "plain input, and they differ in its length. Give what is not of examples to the loss "
            "function itself, functools.partial(loss_fn, weights=weights), or split by name: "
            'name_axes(inputs, {...}) and batch_axis="batch".',
            [f"input {path}: dimension {dimension} is {n} long." for path, n in lengths.items()],
        )


def _dimension_of(node: Any, batch_axis: str | int) -> int | None:
    """Which dimension of an input is split; None if none is."""
    if isinstance(batch_axis, int):
        is_plain = not is_named_node(node) and np.ndim(node) > batch_axis
        return batch_axis if is_plain else None
    names = node_names(node) or ()
    return names.index(batch_axis) if batch_axis in names else None


def _nothing_split(parts: int, batch_axis: str | int) -> str:
    if isinstance(batch_axis, int):
        return (
            f"accumulate_steps={parts}, but no input is an array without names that has a "
            f'dimension {batch_axis}. Of named arrays give the logical axis: batch_axis="batch".'
        )
    return (
        f"accumulate_steps={parts}, but no input has the logical axis {batch_axis!r}. "
        f'Name it, for instance pz.nx.wrap(x, {batch_axis!r}, "features"), or pass the name that '
        'it has: build_train_step_fn(..., batch_axis="..."); for arrays without names the number '
        "of the dimension: batch_axis=0."
    )


def _stacked(data: Any, parts: int, dimension: int) -> jax.Array:
    """The data with the parts along a new first dimension."""
    # Strided: part i of n gets the examples i, i + n, and so on.
    shape = list(data.shape)
    shape[dimension : dimension + 1] = shape[dimension] // parts, parts
    return jnp.moveaxis(jnp.reshape(data, shape), dimension + 1, 0)


def joined(parts: Any, batch_axis: Any) -> Any:
    """An array whose parts are along the first dimension of its data, as the whole batch's.

    Undoes the split of `split_inputs`: the examples get the order that they have in the batch.

    Args:
        parts: A named array, also of another library, with the batch axis, or a plain array. Its
            data has a dimension more than one part, the first one, which has no name.
        batch_axis: The logical axis that was split, or the number of a plain array's dimension.

    >>> parts = pz.nx.wrap(jnp.asarray([[0, 2], [1, 3]]), "part", "batch").untag("part")
    >>> joined(parts, "batch").data_array.tolist()
    [0, 1, 2, 3]
    """
    node = parts.with_positional_prefix() if pz.nx.is_namedarray(parts) else parts
    dimension = stacked_dimension(node, batch_axis)
    assert dimension is not None
    # The parts come behind the batch axis, of which they are the minor part.
    data = jnp.moveaxis(node_data(node), 0, dimension)
    shape = list(data.shape)
    shape[dimension - 1 : dimension + 1] = [shape[dimension - 1] * shape[dimension]]
    return named_like(node, jnp.reshape(data, shape))


def stacked_dimension(parts: Any, axis: Any) -> int | None:
    """Which dimension of its data a logical axis of a stacked named array is; None if none is.

    Args:
        parts: As for `joined`; anything else has no logical axes.
        axis: The logical axis; a number for the dimension of one part of a plain array.
    """
    if isinstance(axis, int):
        is_plain = not is_named_node(parts) and np.ndim(parts) > axis + 1
        return axis + 1 if is_plain else None
    reader = reader_of(parts)
    if reader is not None:
        names = reader.read(parts).names or ()
        return 1 + names.index(axis) if axis in names else None
    names = node_names(parts) or ()
    return names.index(axis) if axis in names else None


def _axes_text(leaf: Any) -> str:
    names = node_names(leaf)
    if names is not None:
        return f"its logical axes are {tuple(name for name in names if name is not None)}"
    return "an array without names"
