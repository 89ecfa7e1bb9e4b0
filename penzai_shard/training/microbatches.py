"""Splitting inputs into microbatches by the name of their batch axis.

Gradient accumulation computes the gradient of a large batch in parts that fit in memory. The
split is strided: part ``i`` of ``n`` has the examples ``i``, ``i + n``, and so on. Each device then
keeps the examples that it has, which a split into contiguous parts would not allow.
"""

import collections
import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from penzai import pz

from penzai_shard.errors import ShardingError, raise_all
from penzai_shard.tree_paths import path_text


@dataclasses.dataclass(frozen=True)
class Microbatches:
    """Inputs split into equal parts.

    Attributes:
        stacked: Data arrays of the inputs that were split, the parts along their first dimension.
        whole: The inputs that every part gets whole.
        treedef: Structure of the inputs, named arrays as leaves.
        templates: For each leaf, the named array whose structure a part has, or None for a whole
            one.
    """

    stacked: list[Any]
    whole: list[Any]
    treedef: Any
    templates: tuple[Any, ...]

    def part(self, sliced: list[Any]) -> Any:
        """The inputs of one microbatch.

        Args:
            sliced: One slice of each array in ``stacked``.
        """
        slices, whole = iter(sliced), iter(self.whole)
        leaves = [
            next(whole) if template is None else dataclasses.replace(template, data_array=data)
            for template, data in (
                (template, None if template is None else next(slices))
                for template in self.templates
            )
        ]
        return self.treedef.unflatten(leaves)


def split_inputs(inputs: Any, parts: int, batch_axis: str) -> Microbatches:
    """Splits every named array that has the batch axis.

    Args:
        inputs: The inputs of a train step. Arrays without names, and named arrays without the
            batch axis, go whole to every part.
        parts: How many microbatches.
        batch_axis: Logical axis to split along.

    Returns:
        The split inputs.

    Raises:
        ShardingError: A length does not divide, or no input has the axis.

    >>> split = split_inputs({"x": pz.nx.wrap(jnp.arange(4), "batch")}, 2, "batch")
    >>> split.part([data[0] for data in split.stacked])["x"].data_array.tolist()
    [0, 2]
    """
    flat, treedef = jax.tree_util.tree_flatten_with_path(inputs, is_leaf=pz.nx.is_namedarray)
    stacked: list[Any] = []
    whole: list[Any] = []
    templates: list[Any] = []
    problems: list[str] = []
    unsplit: list[str] = []
    for key_path, leaf in flat:
        path = path_text(key_path)
        if not pz.nx.is_namedarray(leaf) or batch_axis not in leaf.named_shape:
            whole.append(leaf)
            templates.append(None)
            unsplit.append(f"{path}: {_axes_text(leaf)}.")
            continue
        size = leaf.named_shape[batch_axis]
        if size % parts:
            problems.append(
                f"input {path}: logical axis {batch_axis!r} ({size}) does not divide into "
                f"accumulate_steps={parts} microbatches. Pad the batch to "
                f"{-(-size // parts) * parts}, or choose a divisor of {size}."
            )
            continue
        data, template = _split(leaf, size, parts, batch_axis)
        stacked.append(data)
        templates.append(template)
    raise_all(ShardingError, "the inputs cannot be split into microbatches:", problems)
    if not stacked:
        raise ShardingError(
            f"accumulate_steps={parts}, but no input has the logical axis {batch_axis!r}. "
            f'Name it, for instance pz.nx.wrap(x, {batch_axis!r}, "features"), or pass the '
            'name that it has: build_train_step_fn(..., batch_axis="...").',
            unsplit,
        )
    return Microbatches(stacked, whole, treedef, tuple(templates))


def _split(leaf: Any, size: int, parts: int, batch_axis: str) -> tuple[Any, Any]:
    """The data with the parts in front, and the named array that a part fills."""
    shape = leaf.data_array.shape
    dimension = leaf.as_namedarrayview().data_axis_for_name[batch_axis]
    part_size = size // parts
    split = jnp.reshape(
        leaf.data_array, (*shape[:dimension], part_size, parts, *shape[dimension + 1 :])
    )
    data = jnp.moveaxis(split, dimension + 1, 0)
    if isinstance(leaf, pz.nx.NamedArray):
        named_axes = collections.OrderedDict(leaf.named_axes)
        named_axes[batch_axis] = part_size
        return data, pz.nx.NamedArray(named_axes, None)
    part_shape = (*shape[:dimension], part_size, *shape[dimension + 1 :])
    return data, dataclasses.replace(leaf, data_shape=part_shape, data_array=None)


def _axes_text(leaf: Any) -> str:
    if pz.nx.is_namedarray(leaf):
        return f"its logical axes are {tuple(leaf.named_shape)}"
    return "an array without names"
