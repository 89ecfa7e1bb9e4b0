"""Sharding trees without a plan, fast enough for a hundred thousand arrays."""

from collections.abc import Collection
from typing import Any

from penzai import pz

from penzai_shard.fused_axes import factors_of
from penzai_shard.named_arrays import dimension_names
from penzai_shard.planning.plan import shared_named_sharding
from penzai_shard.planning.planner import Planner
from penzai_shard.rule_kinds import LogicalAxis


def quick_shardings(planner: Planner, tree: Any) -> tuple[Any, Collection[LogicalAxis]] | None:
    """The sharding tree of a plan and its logical axes, in less time.

    Returns:
        Both, or None for a tree that has something which only the full plan can treat or report.

    >>> import jax
    >>> planner = Planner(jax.sharding.AbstractMesh((2,), ("data",)), {"a": "data"})
    >>> shardings, logical_axes = quick_shardings(planner, [pz.nx.ones({"a": 2})])
    >>> shardings[0].data_array.spec, logical_axes
    (P('data',), {'a'})
    >>> quick_shardings(planner, [1.0]) is None
    True
    """
    quick = _QuickTree(planner)
    try:
        return quick.shardings(tree), quick.logical_axes()
    except _NeedsPlan:
        return None


# Looked up once for every array.
NamedArray = pz.nx.NamedArray


class _NeedsPlan(Exception):
    """The tree has something that only the full plan can treat or report."""


class _QuickTree:
    """Sharding trees for plain containers of well-formed named arrays.

    Arrays alike share one result, so the work per array is one dictionary look-up. Anything else,
    and anything wrong, is left to the plan, which decides with the same planner.
    """

    def __init__(self, planner: Planner) -> None:
        self.planner = planner
        self.made: dict[Any, Any] = {}

    def logical_axes(self) -> set[LogicalAxis]:
        """The logical axes of the arrays that were laid out."""
        return {name for named_array in self.made.values() for name in named_array.named_axes}

    def shardings(self, tree: Any) -> Any:
        kind, build = type(tree), self.shardings
        if kind is dict:
            return self._dict(tree)
        if kind is NamedArray:
            axes = tree.named_axes
            try:
                key = (tree.data_array.shape, *axes, *axes.values())
            except AttributeError:
                raise _NeedsPlan from None
            if key not in self.made:
                self.made[key] = self._lay_out(tree)
            return self.made[key]
        if kind is list or kind is tuple:
            return kind([build(child) for child in tree])
        if tree is None:
            return None
        is_value = kind is pz.ParameterValue or kind is pz.StateVariableValue
        if is_value and type(tree.value) is NamedArray:
            made = object.__new__(kind)
            made.__dict__.update(tree.__dict__)
            made.__dict__["value"] = build(tree.value)
            return made
        raise _NeedsPlan

    def _dict(self, tree: dict[Any, Any]) -> dict[Any, Any]:
        # Most trees of many arrays are flat dictionaries of named arrays: looked up in place.
        made, result = self.made, {}
        for name, node in tree.items():
            if type(node) is NamedArray:
                try:
                    axes = node.named_axes
                    result[name] = made[(node.data_array.shape, *axes, *axes.values())]
                    continue
                except (KeyError, AttributeError):
                    pass  # Laid out, or left to the plan, like any other child.
            result[name] = self.shardings(node)
        return result

    def _lay_out(self, node: Any) -> Any:
        names = dimension_names(node)
        # Fused names that are equal may be of other lengths, which the key does not have.
        if names is None or any(map(factors_of, names)):
            raise _NeedsPlan
        explained = self.planner.decide(names, tuple(node.data_array.shape))
        if explained.problems:
            raise _NeedsPlan
        sharding = shared_named_sharding(self.planner.mesh, explained.spec)
        if explained.stored_sizes != tuple(node.data_array.shape):
            raise _NeedsPlan
        return NamedArray(node.named_axes, sharding)
