"""What stands in a model in place of its variables, and of leaves that are not arrays."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
from penzai.core.variables import AbstractVariableSlot


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True, eq=False)
class StaticLeaf:
    """Stands in a model for a leaf that is not an array, such as a function: static data.

    >>> jax.tree.leaves(StaticLeaf(max)), StaticLeaf(max) == StaticLeaf(max)
    ([], True)
    """

    value: Any

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, StaticLeaf) or type(self.value) is not type(other.value):
            return False
        return same(self.value, other.value)

    def __hash__(self) -> int:
        return hash(type(self.value))


def fill_slots(tree: Any, values: Mapping[AbstractVariableSlot, Any]) -> Any:
    """Replaces each slot that has a value, and puts leaves that are not arrays back.

    >>> from penzai.core.variables import ParameterSlot
    >>> fill_slots([ParameterSlot(label="w"), 2], {ParameterSlot(label="w"): 1})
    [1, 2]
    """

    def fill(leaf: Any) -> Any:
        if isinstance(leaf, StaticLeaf):
            return leaf.value
        return values.get(leaf, leaf) if isinstance(leaf, AbstractVariableSlot) else leaf

    is_leaf = (AbstractVariableSlot, StaticLeaf)
    return jax.tree.map(fill, tree, is_leaf=lambda x: isinstance(x, is_leaf))


def same(a: Any, b: Any) -> bool:
    """Whether two values are equal, as far as they can be compared.

    >>> same(1, 1), same(max, min)
    (True, False)
    """
    try:
        return a is b or bool(a == b)
    except (TypeError, ValueError):
        return False  # Metadata may hold arrays, whose comparison has no truth value.
