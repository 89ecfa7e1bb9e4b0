"""Joins what a loss function reports of several microbatches.

Whether the value of a whole batch is the sum, the mean, or the last of these cannot be seen from an
array. Floats are averaged, arrays with the batch axis are concatenated; of all else it is said, by
path.
"""

import reprlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax.numpy as jnp

from penzai_shard.arrays.structure import Leaf
from penzai_shard.errors import Problems, RuleTypeError, ShardingError
from penzai_shard.paths import join_paths, nearest

_CONCATENATE = "concatenate"
_REDUCTIONS: dict[str, Callable[[Any], Any]] = {
    "mean": lambda values: jnp.mean(values, axis=0),
    "sum": lambda values: jnp.sum(values, axis=0),
    "max": lambda values: jnp.max(values, axis=0),
    "min": lambda values: jnp.min(values, axis=0),
    "last": lambda values: values[-1],
}
_WORDS = ", ".join(map(repr, (*_REDUCTIONS, _CONCATENATE)))


def read_reductions(declared: Any) -> dict[str, str]:
    """Reads ``aux_reduction``: a word for all outputs, words by path, or None.

    Raises:
        RuleTypeError: It is something else.

    >>> read_reductions({"loss": "mean", "accuracy": {"count": "sum"}})
    {'loss': 'mean', 'accuracy/count': 'sum'}
    """
    found: dict[str, str] = {}
    problems = Problems("aux_reduction cannot be read:")

    def read(path: str, value: Any) -> None:
        if isinstance(value, Mapping):
            for key, inner in value.items():
                read(join_paths(path, str(key)), inner)
        elif isinstance(value, str) and value in (*_REDUCTIONS, _CONCATENATE):
            found[path] = value
        else:
            problems.add(path, f"{reprlib.repr(value)} is no reduction", f"Write one of {_WORDS}.")

    read("", {} if declared is None else declared)
    problems.raise_if_any(RuleTypeError)
    return found


def reduce_outputs(
    reductions: Mapping[str, str], leaves: Sequence[Leaf], dims: Sequence[int | None]
) -> list[Any]:
    """Joins each output of several microbatches.

    Args:
        reductions: The word for a path and all below it; the longest that fits counts.
        leaves: The outputs; the value of each has the microbatches along a new first dimension.
        dims: The dimension of each output of one microbatch that has its examples, if one has.

    Raises:
        ShardingError: A word is missing, does not fit, or is for no output; all are in it.
    """
    problems = Problems("outputs of several microbatches cannot be joined:")
    paths = [leaf.path for leaf in leaves]
    for key in reductions:
        if not any(_leads_to(key, path) for path in paths):
            near = nearest(key, paths)
            fix = f"Write {near!r}." if near else f"Outputs are: {paths[:5]}."
            problems.add(key, "aux_reduction names it, and there is no output of this path", fix)
    found = []
    for leaf, dim in zip(leaves, dims, strict=True):
        known = [key for key in reductions if _leads_to(key, leaf.path)]
        word = reductions[max(known, key=len)] if known else None
        if word is None and leaf.names is not None and dim is not None:
            word = _CONCATENATE
        if word is None and jnp.issubdtype(leaf.dtype, jnp.inexact):
            word = "mean"
        if word is None:
            fix = f"Write aux_reduction={{{leaf.path!r}: 'sum'}}, or another of {_WORDS}."
            problems.add(leaf.path, f"nothing says how its {leaf.dtype} values become one", fix)
        elif word != _CONCATENATE:
            found.append(_REDUCTIONS[word](leaf.value))
        elif dim is None:
            problems.add(leaf.path, "it has no dimension of examples to join", "Write 'last'.")
        else:
            found.append(join_microbatches(leaf.value, dim))
    problems.raise_if_any(ShardingError)
    return found


def _leads_to(key: str, path: str) -> bool:
    return not key or path == key or path.startswith(f"{key}/")


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
