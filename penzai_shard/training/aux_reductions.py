"""A loss function's auxiliary outputs of several microbatches become one.

Under gradient accumulation a loss function is called once per microbatch, and what it reports is
of one microbatch alone. Whether the whole batch's value is the sum, the mean or the last of these
cannot be seen from an array, so it is said, by the output's path.
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from penzai_shard.array_kinds import is_array_like
from penzai_shard.errors import RuleTypeError, ShardingError, raise_all
from penzai_shard.named_nodes import is_named_node
from penzai_shard.rule_kinds import nearest_name
from penzai_shard.training.microbatches import joined, stacked_dimension
from penzai_shard.tree_paths import join_paths, path_text, paths_and_leaves

_REDUCTIONS: dict[str, Callable[[jax.Array], jax.Array]] = {
    "mean": lambda values: jnp.mean(values, axis=0),
    "sum": lambda values: jnp.sum(values, axis=0),
    "max": lambda values: jnp.max(values, axis=0),
    "min": lambda values: jnp.min(values, axis=0),
    "last": lambda values: values[-1],
}
_WORDS = ", ".join(map(repr, _REDUCTIONS))
# Of a pair of outputs, and of a named array with the batch axis.
_RATIO, _CONCATENATE = "ratio", "concatenate"
_ALL_WORDS = ", ".join(map(repr, (*_REDUCTIONS, _RATIO, _CONCATENATE)))


@dataclasses.dataclass(frozen=True)
class AuxReductions:
    """How auxiliary outputs of several microbatches become one.

    Attributes:
        declared: The word for each path, or the one for everything under the empty path.
    """

    declared: Mapping[str, str]

    @classmethod
    def of(cls, declared: Any) -> "AuxReductions":
        """Reads a declaration.

        Args:
            declared: One word for all outputs; a mapping from outputs, by key or by path, to
                words or to further mappings; or None.

        Raises:
            RuleTypeError: It is something else.

        >>> AuxReductions.of({"loss": "mean", "accuracy": {"count": "sum"}}).declared
        {'loss': 'mean', 'accuracy/count': 'sum'}
        """
        found: dict[str, str] = {}
        problems: list[str] = []

        def read(path: str, value: Any) -> None:
            if isinstance(value, Mapping):
                for key, inner in value.items():
                    read(join_paths(path, str(key)), inner)
            elif isinstance(value, str) and value in (*_REDUCTIONS, _RATIO, _CONCATENATE):
                found[path] = value
            else:
                where = f"{path}: " if path else ""
                problems.append(f"{where}it must be one of {_ALL_WORDS}, not {value!r}.")

        if declared is not None:
            read("", declared)
        raise_all(RuleTypeError, "aux_reduction cannot be read:", problems)
        return cls(found)

    def reduce(self, stacked: Any, batch_axis: Any = None, of: str = "microbatches") -> Any:
        """Puts the auxiliary outputs of all microbatches together.

        Args:
            stacked: The outputs, those of all microbatches along a new first dimension. Of one,
                only declared outputs are touched, so that they have the same dtype for any number.
            batch_axis: The logical axis that inputs were split along.
            of: What they are of, for messages.

        Returns:
            One tree of outputs. Of those that are not declared, named arrays with the batch axis
            are concatenated along it, and other floating ones are averaged.

        Raises:
            ShardingError: An output that is not floating is not declared, a declaration names
                no output, or its word does not fit the output.
        """
        problems = self._unknown([path for path, _ in paths_and_leaves(stacked)])

        def is_one(path: Any, node: Any) -> bool:
            return is_named_node(node) or (_is_pair(node) and self.word(path_text(path)) == _RATIO)

        flat, treedef = jax.tree_util.tree_flatten_with_path(
            stacked, is_leaf=is_one, is_leaf_takes_path=True
        )
        results = []
        for key_path, value in flat:
            path = path_text(key_path)
            try:
                results.append(_reduced(value, self.word(path), batch_axis))
            except _UnfitError as error:
                fix = error.word and repr({path: error.word} if path else error.word)
                problems.append(
                    f"{path or 'the output'}: {error}"
                    + (f"{fix}, or another of {_WORDS}." if fix else "")
                )
        raise_all(
            ShardingError,
            f"the auxiliary outputs of {of} cannot be put together:",
            problems,
        )
        return jax.tree.unflatten(treedef, results)

    def word(self, path: str) -> str | None:
        """The word of the longest declared path that leads to an output."""
        leading = [
            key for key in self.declared if not key or path == key or path.startswith(key + "/")
        ]
        return self.declared[max(leading, key=len)] if leading else None

    def _unknown(self, paths: list[str]) -> list[str]:
        problems = []
        for key in self.declared:
            if key and not any(path == key or path.startswith(key + "/") for path in paths):
                near = nearest_name(key, set(paths))
                hint = f"Did you mean {near!r}?" if near else f"The outputs are {_some(paths)}."
                problems.append(f"aux_reduction names {key!r}, which is not an output. {hint}")
        return problems


def _is_pair(node: Any) -> bool:
    if not isinstance(node, tuple | list) or len(node) != 2:
        return False
    return all(is_named_node(part) or is_array_like(part) for part in node)


class _UnfitError(Exception):
    """Why an output cannot be put together, and what to write.

    Args:
        reason: The message, or its beginning if a declaration is missing.
        word: The word to declare, if one is missing.
    """

    def __init__(self, reason: str, word: str | None = None) -> None:
        super().__init__(reason)
        self.word = word


def _reduced(value: Any, word: str | None, batch_axis: Any) -> Any:
    """One output of all microbatches as one."""
    if word == _RATIO:
        return _ratio(value)
    is_array = is_named_node(value) or jax.tree_util.all_leaves([value])
    has_batch = is_array and stacked_dimension(value, batch_axis) is not None
    if word == _CONCATENATE and not has_batch:
        array = "an array with the dimension" if isinstance(batch_axis, int) else "a named array"
        axis = "" if isinstance(batch_axis, int) else "with the axis "
        raise _UnfitError(f"'concatenate' needs {array} {axis}{batch_axis!r}.")
    if word == _CONCATENATE or (word is None and has_batch and is_named_node(value)):
        return joined(value, batch_axis)
    return jax.tree.map(lambda values: _reduced_array(values, word), value)


def _reduced_array(values: jax.Array, word: str | None) -> jax.Array:
    if word is None and len(values) == 1:
        return values[0]
    is_key = jnp.issubdtype(values.dtype, jax.dtypes.extended)
    if word is None and not jnp.issubdtype(values.dtype, jnp.inexact):
        raise _UnfitError(
            f"of {values.dtype}, which is not averaged by itself. Say how its {len(values)} "
            "values become one: aux_reduction=",
            "last" if is_key else "sum",
        )
    if word != "last" and is_key:
        raise _UnfitError(f"{word!r} is not defined for {values.dtype}. Say 'last'.")
    return _REDUCTIONS[word or "mean"](values)


def _ratio(pair: Any) -> Any:
    """The sum of the first of a pair over that of the second."""
    if not _is_pair(pair):
        raise _UnfitError("'ratio' is for a pair (sum, count) of arrays. Return one.")
    structures: list[Any] = [jax.tree.structure(part) for part in pair]
    if structures[0] != structures[1]:
        raise _UnfitError(
            "'ratio' is for a pair (sum, count) that are alike: two arrays, or two named arrays "
            "of the same logical axes. Return such a pair."
        )

    def total(values: jax.Array) -> jax.Array:
        if jnp.issubdtype(values.dtype, jnp.inexact):
            values = values.astype(jnp.promote_types(values.dtype, jnp.float32))
        return jnp.sum(values, axis=0)

    return jax.tree.map(lambda above, below: total(above) / total(below), *pair)


def _some(paths: list[str]) -> str:
    return ", ".join(map(repr, paths[:5])) + (", ..." if len(paths) > 5 else "") or "none"
