"""Comparing the parameters of two models: names, logical axes, shapes, dtypes and values."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from penzai_shard.named_leaves import leaves_of
from penzai_shard.surgery.equivalence.differences import Difference, canonical_leaves, difference

_DRAWN_SEED = 20240301


@dataclasses.dataclass(frozen=True)
class NamedValues:
    """How the named values of two models differ.

    Attributes:
        missing: Names that the edited model lacks.
        added: Names that it has alone.
        reshaped: Per name, what its form was and has become.
        changed: Per name of which the values differ, by how much at most.
        renamed: Pairs of a missing and an added name that hold equal values.
    """

    missing: tuple[str, ...]
    added: tuple[str, ...]
    reshaped: Mapping[str, str]
    changed: Mapping[str, Difference]
    renamed: tuple[tuple[str, str], ...]

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
        changed = {}
        for name, value in original.items():
            if name not in edited or edited[name] is value:
                continue
            before, after = form(value), form(edited[name])
            if before != after:
                reshaped[str(name)] = f"{before} became {after}"
            elif compare_values and (found := _values_apart(value, edited[name])):
                changed[str(name)] = found
        renamed = [
            (str(old), str(new))
            for old in missing
            for new in added
            if form(original[old]) == form(edited[new])
            and not is_abstract(original[old])
            and not _values_apart(original[old], edited[new])
        ]
        return cls(
            tuple(map(str, missing)), tuple(map(str, added)), reshaped, changed, tuple(renamed)
        )


def form(value: Any) -> str:
    """Logical axes, shape and dtype, in an order that names alone decide.

    >>> from penzai import pz
    >>> form(pz.nx.ones({"b": 2, "a": 3}))
    'float32[a=3, b=2]'
    """
    described = []
    for leaf in leaves_of(value):
        names = leaf.names or (None,) * len(leaf.shape)
        axes = sorted(
            f"{name}={size}"
            for name, size in zip(names, leaf.shape, strict=True)
            if name is not None
        )
        positional = [
            str(size) for name, size in zip(names, leaf.shape, strict=True) if name is None
        ]
        described.append(f"{leaf.dtype}[{', '.join([*positional, *axes])}]")
    return " ".join(described)


def is_abstract(value: Any) -> bool:
    """Whether a tree has a shape where an array should be."""
    return any(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in jax.tree_util.tree_leaves(value))


def drawn(name: Any, value: Any) -> Any:
    """A tree with random numbers in place of shapes without values.

    They are as large as those of a freshly initialised model: one over the root of the longest
    dimension.
    """
    draw = np.random.default_rng([_DRAWN_SEED, *str(name).encode()])

    def fill(leaf: Any) -> Any:
        if not isinstance(leaf, jax.ShapeDtypeStruct):
            return leaf
        if not jnp.issubdtype(leaf.dtype, jnp.inexact):
            array = jnp.zeros(leaf.shape, leaf.dtype)
        else:
            scale = max([1, *leaf.shape]) ** -0.5
            array = jnp.asarray(draw.normal(size=leaf.shape) * scale, leaf.dtype)
        return array if leaf.sharding is None else jax.device_put(array, leaf.sharding)

    return jax.tree_util.tree_map(fill, value)


def _values_apart(original: Any, edited: Any) -> Difference | None:
    """The largest difference between two trees of one form; None if they are equal."""
    if is_abstract(original) or is_abstract(edited):
        return None
    found = []
    for (name, one), (_, other) in zip(
        canonical_leaves(original), canonical_leaves(edited), strict=True
    ):
        if one is other:
            continue
        if _on_this_host(one) and _on_this_host(other):
            found.append(difference(name, one, other))
        elif not _equal_across_hosts(one, other):
            found.append(Difference(name, np.inf, np.inf))
    apart = [one for one in found if one.ulps or one.relative or one.problem]
    return max(apart, key=lambda one: (one.relative, one.ulps), default=None)


def _on_this_host(array: Any) -> bool:
    return not isinstance(array, jax.Array) or array.is_fully_addressable


def _equal_across_hosts(one: Any, other: Any) -> bool:
    def same(one: Any, other: Any) -> Any:
        return jnp.all((one == other) | ((one != one) & (other != other)))

    return bool(jax.jit(same)(one, jax.device_put(other, one.sharding)))


def some(names: Sequence[str], most: int = 5) -> str:
    """The first names, and how many more there are.

    >>> some(["a", "b", "c"], most=2)
    'a, b and 1 more'
    """
    shown = ", ".join(names[:most])
    return shown if len(names) <= most else f"{shown} and {len(names) - most} more"
