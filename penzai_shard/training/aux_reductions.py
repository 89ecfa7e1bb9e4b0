"""Joins what a loss function reports of several microbatches.

Whether the value of a whole batch is the sum, the mean, or the last of these cannot be seen from an
array. Floats are averaged, arrays with the batch axis are concatenated; of all else it is said, by
path.
"""

import reprlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax.numpy as jnp

from penzai_shard.arrays.structure import Leaf, flatten
from penzai_shard.errors import Problems, RuleTypeError, ShardingError

_CONCATENATE = "concatenate"
# Functions of the values of all microbatches, and of the dimension of one that has its examples.
_REDUCTIONS: dict[str, Callable[[Any, Any], Any]] = {
    "mean": lambda values, dim: jnp.mean(values, axis=0),
    "sum": lambda values, dim: jnp.sum(values, axis=0),
    "max": lambda values, dim: jnp.max(values, axis=0),
    "min": lambda values, dim: jnp.min(values, axis=0),
    "last": lambda values, dim: values[-1],
    _CONCATENATE: lambda values, dim: join_microbatches(values, dim),
}
_WORDS = ", ".join(map(repr, _REDUCTIONS))


def read_reductions(declared: Any) -> dict[str, str]:
    """Reads ``aux_reduction``: a word for all outputs, words by path, or None.

    Raises:
        RuleTypeError: It is something else.

    >>> read_reductions({"loss": "mean", "accuracy": {"count": "sum"}})
    {'accuracy/count': 'sum', 'loss': 'mean'}
    """
    leaves, structure = flatten(declared)
    words = dict([*structure.statics, *((leaf.path, leaf.value) for leaf in leaves)])
    problems = Problems("aux_reduction cannot be read:")
    for path, word in words.items():
        if not isinstance(word, str) or word not in _REDUCTIONS:
            problems.add(path, f"{reprlib.repr(word)} is no reduction", f"Write one of {_WORDS}.")
    problems.raise_if_any(RuleTypeError)
    return words


def reduce_outputs(
    reductions: Mapping[str, str], leaves: Sequence[Leaf], dims: Sequence[int | None]
) -> list[Any]:
    """Joins each output of several microbatches.

    Args:
        reductions: The word for each path; that of ``""`` is for all others.
        leaves: The outputs; the value of each has the microbatches along a new first dimension.
        dims: The dimension of each output of one microbatch that has its examples, if one has.

    Raises:
        ShardingError: A word is missing, does not fit, or is for no output; all are in it.
    """
    problems = Problems("outputs of several microbatches cannot be joined:")
    paths = [leaf.path for leaf in leaves]
    for path in reductions.keys() - {"", *paths}:
        fix = f"Outputs are: {paths[:5]}."
        problems.add(path, "aux_reduction names it, and there is no output of this path", fix)
    values = []
    for leaf, dim in zip(leaves, dims, strict=True):
        default = "mean" if jnp.issubdtype(leaf.dtype, jnp.inexact) else ""
        if leaf.names is not None and dim is not None:
            default = _CONCATENATE
        word = reductions.get(leaf.path) or reductions.get("") or default
        if not word:
            fix = f"Write aux_reduction={{{leaf.path!r}: 'sum'}}, or another of {_WORDS}."
            problems.add(leaf.path, f"nothing says how its {leaf.dtype} values become one", fix)
        elif word == _CONCATENATE and dim is None:
            problems.add(leaf.path, "it has no dimension of examples to join", "Write 'last'.")
        else:
            values.append(_REDUCTIONS[word](leaf.value, dim))
    problems.raise_if_any(ShardingError)
    return values


def split_microbatches(value: Any, dim: int, count: int) -> Any:
    """Parts of a dimension along a new first one: every ``count``-th example is of one part.

    So a device whose examples are split further has its own of each part, and sends none.
    """
    shape = value.shape
    parts = value.reshape(*shape[:dim], shape[dim] // count, count, *shape[dim + 1 :])
    return jnp.moveaxis(parts, dim + 1, 0)


def join_microbatches(parts: Any, dim: int) -> Any:
    """Undoes ``split_microbatches``.

    >>> join_microbatches(split_microbatches(jnp.arange(6), 0, 3), 0).tolist()
    [0, 1, 2, 3, 4, 5]
    """
    moved = jnp.moveaxis(parts, 0, dim + 1)
    return moved.reshape(*moved.shape[:dim], -1, *moved.shape[dim + 2 :])
