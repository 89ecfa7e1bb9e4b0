"""Reads a model once, and its arrays quickly at every call after that.

Taking a model apart costs hundreds of Python calls for a block. Models of Penzai are frozen, but
for lists and dictionaries in them and for what their variables hold. Only these are read again, by
a number of Python calls that does not grow with the model.
"""

import operator
from itertools import chain
from typing import Any

import jax
from penzai import pz

from penzai_shard.arrays.structure import flatten, variables_of
from penzai_shard.errors import Problems, ShardingError
from penzai_shard.layers.pure_call import read_settings
from penzai_shard.readers.penzai import raw_values
from penzai_shard.readers.reader import reader_of


class LiveModel:
    """A model that is called again and again.

    Args:
        model: The model.

    Attributes:
        structure: The structure of a dictionary that holds it as ``"body"``.
        settings: What ``read_settings`` gave of that dictionary.
        variables: Its variables, or their frozen values, in the order of the structure.
        numbers: Which arrays of the structure ``read_values`` gives, in its order.

    Raises:
        ShardingError: Two variables have the same label.
    """

    def __init__(self, model: Any) -> None:
        self._tree = {"body": model}
        leaves, self.structure = flatten(self._tree)
        problems = Problems(f"this {type(model).__name__} cannot be called:")
        problems.extend(self.structure.problems)
        problems.raise_if_any(ShardingError)
        self.settings = read_settings(self._tree)
        self.variables = variables_of(self._tree)
        self._lists = _Lists(model)
        self._is_new = True

        # Arrays are read in groups: those of variables that hold a named array, those of other
        # variables, and those that no variable holds. What has no such groups, as modules of NNX
        # and their variables, is taken apart anew at every call.
        self._has_groups = self._lists.are_all
        nodes: dict[bool, list[Any]] = {True: [], False: []}
        numbers: dict[bool, list[int]] = {True: [], False: []}
        for variable, node in zip(self.structure.variables, self.variables, strict=True):
            is_penzai = isinstance(node, pz.Parameter | pz.StateVariable)
            if is_penzai:
                is_named = type(node.value) is pz.nx.NamedArray
                nodes[is_named].append(node)
                numbers[is_named].extend(range(len(leaves))[variable.leaves])
            self._has_groups &= not variable.live or is_penzai
        self._named, self._others = nodes[True], nodes[False]
        held = [*numbers[True], *numbers[False]]
        rest = sorted({*range(len(leaves))} - {*held})
        read = held + rest
        self._constants = [leaves[i].value for i in rest]
        self._axes = [value.named_axes for value in raw_values(self._named)]
        self._form: Any = jax.tree_util.tree_structure(raw_values(self._others))

        # A variable in the value of another would be in two of them.
        values = self._read_groups()
        found = [id(leaves[i].value) for i in read]
        self._has_groups &= values is not None and [*map(id, values)] == found
        self.numbers = tuple(read if self._has_groups else range(len(leaves)))

    def read_values(self) -> list[Any] | None:
        """The arrays of the model now; None if it is no longer as it was read."""
        if self._has_groups:
            return self._read_groups() if self._lists.are_unchanged() else None
        # A structure that cannot be compared, as one with arrays in settings, serves one call.
        leaves, structure = flatten(self._tree)
        if structure != self.structure and not self._is_new:
            return None
        self._is_new = False
        self.variables = variables_of(self._tree)
        return [leaf.value for leaf in leaves]

    def _read_groups(self) -> list[Any] | None:
        # Comprehensions over one attribute and comparisons of lists, in which identical elements
        # are equal at once, are the fastest loops that Python has.
        named = raw_values(self._named)
        try:
            if [value.named_axes for value in named] != self._axes:
                return None
        except AttributeError:
            return None  # A value of another kind.
        values = [value.data_array for value in named]
        if self._others:
            others = raw_values(self._others)
            if self._form != jax.tree_util.tree_structure(others):
                return None
            values += jax.tree_util.tree_leaves(others)
        values += self._constants
        return values


class _Lists:
    """The lists and dictionaries of a model, and what they held when it was read.

    Attributes:
        are_all: Whether nothing else in the model can be changed in place.
    """

    def __init__(self, model: Any) -> None:
        self.are_all = True
        self._lists: list[Any] = []
        self._visit(model)
        self._copies = [item.copy() for item in self._lists]
        # Of numbers and arrays only identical ones are the same: 1, 1.0 and True are equal. For
        # layers that would cost a tenth of a call of 48 blocks.
        contents = [item.values() if isinstance(item, dict) else item for item in self._lists]
        self._with_leaves = [content for content in contents if any(map(_is_leaf, content))]
        self._content = [*chain.from_iterable(self._with_leaves)]

    def are_unchanged(self) -> bool:
        """Whether each holds what it held; equal layers count as the same."""
        try:
            if self._lists != self._copies:
                return False
        except (RuntimeError, TypeError, ValueError):
            return False  # Arrays, which have no order of truth, or are deleted.
        return all(map(operator.is_, chain.from_iterable(self._with_leaves), self._content))

    def _visit(self, node: Any) -> None:
        kind: Any = type(node)
        reader = reader_of(kind)
        is_frozen = getattr(getattr(kind, "__dataclass_params__", None), "frozen", False)
        if reader is not None:
            # What a mutable variable holds is read at every call.
            if not (hasattr(reader, "is_live") and reader.is_live(node)):
                self.are_all &= is_frozen
                self._visit(reader.open(node).data)
        elif not _is_leaf(node):
            if isinstance(node, list | dict):
                self._lists.append(node)
            else:
                self.are_all &= is_frozen or node is None or isinstance(node, tuple)
            for child in jax.tree_util.tree_leaves(node, is_leaf=lambda x: x is not node):
                self._visit(child)


def _is_leaf(value: Any) -> bool:
    return jax.tree_util.all_leaves([value])
