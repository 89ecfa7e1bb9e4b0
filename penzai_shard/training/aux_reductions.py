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

from penzai_shard.errors import RuleTypeError, ShardingError, raise_all
from penzai_shard.rule_kinds import nearest_name
from penzai_shard.tree_paths import join_paths, paths_and_leaves

_REDUCTIONS: dict[str, Callable[[jax.Array], jax.Array]] = {
    "mean": lambda values: jnp.mean(values, axis=0),
    "sum": lambda values: jnp.sum(values, axis=0),
    "max": lambda values: jnp.max(values, axis=0),
    "min": lambda values: jnp.min(values, axis=0),
    "last": lambda values: values[-1],
}
_WORDS = ", ".join(map(repr, _REDUCTIONS))


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
            elif isinstance(value, str) and value in _REDUCTIONS:
                found[path] = value
            else:
                where = f"{path}: " if path else ""
                problems.append(f"{where}it must be one of {_WORDS}, not {value!r}.")

        if declared is not None:
            read("", declared)
        raise_all(RuleTypeError, "aux_reduction cannot be read:", problems)
        return cls(found)

    def reduce(self, stacked: Any, of: str = "microbatches") -> Any:
        """Puts the auxiliary outputs of all microbatches together.

        Args:
            stacked: The outputs, those of all microbatches along a new first dimension. Of one,
                only declared outputs are touched, so that they have the same dtype for any number.
            of: What they are of, for messages.

        Returns:
            One tree of outputs. Floating ones that are not declared are averaged.

        Raises:
            ShardingError: An output that is not floating is not declared, a declaration names
                no output, or its word does not fit the output.
        """
        flat = paths_and_leaves(stacked)
        problems = self._unknown([path for path, _ in flat])
        results = []
        for path, values in flat:
            word = self.word(path)
            floating = jnp.issubdtype(values.dtype, jnp.inexact)
            if word is None and len(values) == 1:
                results.append(values[0])
            elif word is None and not floating:
                problems.append(_undeclared(path, values))
            elif word != "last" and jnp.issubdtype(values.dtype, jax.dtypes.extended):
                problems.append(f"{path}: {word!r} is not defined for {values.dtype}. Say 'last'.")
            else:
                results.append(_REDUCTIONS[word or "mean"](values))
        raise_all(
            ShardingError,
            f"the auxiliary outputs of {of} cannot be put together:",
            problems,
        )
        return jax.tree.unflatten(jax.tree.structure(stacked), results)

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


def _undeclared(path: str, values: jax.Array) -> str:
    word = "last" if jnp.issubdtype(values.dtype, jax.dtypes.extended) else "sum"
    fix = repr({path: word} if path else word)
    return (
        f"{path or 'the output'}: of {values.dtype}, which is not averaged by itself. Say how its "
        f"{len(values)} values become one: aux_reduction={fix}, or another of {_WORDS}."
    )


def _some(paths: list[str]) -> str:
    return ", ".join(map(repr, paths[:5])) + (", ..." if len(paths) > 5 else "") or "none"
