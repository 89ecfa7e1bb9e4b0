"""Comparing named values of two models, which are parameters or state before the call."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from penzai_shard.array_kinds import has_abstract, is_abstract
from penzai_shard.named_leaves import leaves_of
from penzai_shard.padded_arrays import PaddedArray, is_padded, pad_to
from penzai_shard.processes import is_on_this_process
from penzai_shard.surgery.equivalence.array_comparisons import (
    ArrayComparison,
    difference,
    incomparable,
)
from penzai_shard.surgery.equivalence.comparable_arrays import (
    canonical_leaves,
    equal_elements,
    is_float,
)

_DRAWN_SEED = 20240301

# Values that differ by no more are taken for one computation, rounded in two ways.
_ULPS_OF_ROUNDING = 2


@dataclasses.dataclass(frozen=True)
class NamedValues:
    """How the named values of two models differ.

    Attributes:
        missing: Names that the edited model lacks.
        added: Names that it has alone.
        reshaped: Per name, what its form was and has become.
        changed: One per name of which the values differ, with the array that differs the most.
        renamed: Per missing name an added one that holds equal values.
    """

    missing: tuple[str, ...]
    added: tuple[str, ...]
    reshaped: Mapping[str, str]
    changed: tuple[ArrayComparison, ...]
    renamed: Mapping[str, str]

    @classmethod
    def of(
        cls, original: Mapping[Any, Any], edited: Mapping[Any, Any], compare_values: bool
    ) -> "NamedValues":
        """Compares values by name.

        Args:
            original: The values of the original by name: trees of arrays.
            edited: Those of the edited model.
            compare_values: Whether to compare more than names, logical axes, shapes and dtypes.
        """
        missing = [name for name in original if name not in edited]
        added = [name for name in edited if name not in original]
        reshaped = {}
        changed = []
        for name, value in original.items():
            if name not in edited or edited[name] is value:
                continue
            before, after = form(value), form(edited[name])
            if before != after:
                reshaped[str(name)] = f"{before} became {after}"
            elif compare_values and (found := _values_apart(value, edited[name])):
                changed.append(dataclasses.replace(found, name=str(name)))
        renamed = {
            str(old): str(new)
            for old in missing
            for new in added
            if form(original[old]) == form(edited[new])
            and not has_abstract(original[old])
            and not _values_apart(original[old], edited[new])
        }
        return cls(
            tuple(map(str, missing)), tuple(map(str, added)), reshaped, tuple(changed), renamed
        )

    def problems(self, is_changed: str) -> list[str]:
        """One line per name of which form or values differ.

        Args:
            is_changed: What to say of changed values; it is added if only rounding is to blame.
        """
        most = max((apart.ulps for apart in self.changed if _is_rounding(apart)), default=0)
        by_rounding = f", by rounding alone (up to {most:.2g} ulp)"
        return [
            *(f"{name}: {text}" for name, text in self.reshaped.items()),
            *(
                f"{apart.name}: {is_changed}{by_rounding if _is_rounding(apart) else ''}"
                for apart in self.changed
            ),
        ]

    @property
    def differs_by_rounding(self) -> bool:
        """Whether some values differ by rounding alone."""
        return any(map(_is_rounding, self.changed))


def _is_rounding(apart: ArrayComparison) -> bool:
    return not apart.problem and apart.ulps <= _ULPS_OF_ROUNDING


def form(value: Any) -> str:
    """Logical axes, shape and dtype, in an order that names alone decide.

    >>> from penzai import pz
    >>> form(pz.nx.ones({"b": 2, "a": 3}))
    'float32[a=3, b=2]'
    """
    described = []
    for leaf in leaves_of(value):
        dimensions = list(zip(leaf.names or (None,) * len(leaf.shape), leaf.shape, strict=True))
        positional = [str(size) for name, size in dimensions if name is None]
        named = sorted(f"{name}={size}" for name, size in dimensions if name is not None)
        described.append(f"{leaf.dtype}[{', '.join([*positional, *named])}]")
    return " ".join(described)


def drawn(name: Any, value: Any) -> Any:
    """A tree with random numbers in place of shapes without values.

    They are as large as those of a freshly initialised model: one over the root of the longest
    dimension.
    """
    draw = np.random.default_rng([_DRAWN_SEED, *str(name).encode()])

    def fill(leaf: Any) -> Any:
        if not is_abstract(leaf):
            return leaf
        if not is_float(leaf):
            array = jnp.zeros(leaf.shape, leaf.dtype)
        else:
            scale = max([1, *leaf.shape]) ** -0.5
            array = jnp.asarray(draw.normal(size=leaf.shape) * scale, leaf.dtype)
        return array if leaf.sharding is None else jax.device_put(array, leaf.sharding)

    def fill_padded(node: Any) -> Any:
        """Of what is stored padded the numbers are drawn that the true array would have."""
        if not is_padded(node) or not is_abstract(node.stored):
            return fill(node)
        true, layout = fill(node.data_array), node.stored.sharding
        stored = pad_to(true, node.stored.shape)
        stored = stored if layout is None else jax.device_put(stored, layout)
        return PaddedArray(stored, node.named_axes, node.padding)

    return jax.tree_util.tree_map(fill_padded, value, is_leaf=is_padded)


def _values_apart(original: Any, edited: Any) -> ArrayComparison | None:
    """The array that differs the most in two trees of one form; None if all are equal."""
    if has_abstract(original) or has_abstract(edited):
        return None
    found = []
    for (name, one), (_, other) in zip(
        canonical_leaves(original), canonical_leaves(edited), strict=True
    ):
        if one is other:
            continue
        if is_on_this_process(one) and is_on_this_process(other):
            found.append(difference(name, one, other))
        elif not _equal_across_hosts(one, other):
            found.append(incomparable(name))
    apart = [one for one in found if not one.ok]
    return max(apart, key=lambda one: (one.relative, one.ulps), default=None)


def _equal_across_hosts(one: Any, other: Any) -> bool:
    equal = jax.jit(lambda one, other: jnp.all(equal_elements(one, other)))
    return bool(equal(one, jax.device_put(other, one.sharding)))


def some(names: Sequence[str], most: int = 5) -> str:
    """The first names, and how many more there are.

    >>> some(["a", "b", "c"], most=2)
    'a, b and 1 more'
    """
    shown = ", ".join(names[:most])
    return shown if len(names) <= most else f"{shown} and {len(names) - most} more"
