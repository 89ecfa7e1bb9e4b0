"""Makes of a layer's call a pure function of arrays, which is what JAX transforms.

Values of variables go in as arrays. Variables that the call assigns come out of it by number, as a
part of the output: which ones they are is known while the call is traced.
"""

import dataclasses
import functools
import re
import threading
from collections.abc import Mapping, Sequence
from typing import Any

import jax

from penzai_shard.arrays.structure import Structure, flatten, read_variables
from penzai_shard.errors import Problems, ShardingError
from penzai_shard.meshes import auto_context, on_auto_twin

# Held by calls that read variables and assign them, for no other may assign in between. A call may
# run another in it: hence reentrant.
ASSIGNING = threading.RLock()


@dataclasses.dataclass(frozen=True)
class PureCall:
    """A layer's call as a function of arrays; two of equal structures are equal.

    The tree that is called is a dictionary of ``"body"``, ``"argument"`` and ``"side_inputs"``.

    Attributes:
        structure: The structure of that dictionary, or of some of its items.
        settings: What ``read_settings`` gives of them.
        more: The structure of further items, whose variables are none of the first.
    """

    structure: Structure
    settings: str
    more: Structure | None = None

    def __call__(
        self,
        values: Sequence[Any],
        more_values: Sequence[Any] = (),
        others: Mapping[str, Any] | None = None,
    ) -> tuple[Any, dict[int, Any]]:
        """Calls the layer.

        Args:
            values: The arrays of ``structure``.
            more_values: The arrays of ``more``.
            others: Items without variables, which count where no structure has them.

        Returns:
            The output, and the new value of each variable that the call assigned, by its number;
            variables of ``more`` are counted after those of ``structure``.

        Raises:
            ShardingError: The layer changed something else than a variable, or returned one.
        """
        with auto_context():
            values, more_values, others = on_auto_twin((values, more_values, others or {}))
            trees = [self.structure.fill_alike(values)]
            if self.more is not None:
                trees.append(self.more.fill_alike(more_values))
            call = functools.reduce(dict.__or__, trees, dict(others))
            before, fixed_before = _read_live(trees), _read_fixed(call)
            output = call["body"](call["argument"], **call["side_inputs"])
            after, fixed_after = _read_live(trees), _read_fixed(call)

        # JAX gives back what a call returns, and nothing else.
        problems = Problems(f"a call of {type(call['body']).__name__} would lose what it does:")
        for path in sorted(fixed_before | fixed_after):
            if fixed_before.get(path) is not fixed_after.get(path):
                what = "the layer changes it in place, and it is no variable"
                problems.add(path, what, "Hold it in a pz.StateVariable.")
        structure = flatten(output)[1]
        for variable in structure.variables:
            if variable.live:
                path = ", ".join(structure.paths[variable.leaves])
                problems.add(path, "the layer returns a mutable variable", "Return its value.")
        if len(before) != len(after):
            what = f"its variables are {len(before)} before the call, and {len(after)} after it"
            problems.add("", what, "Make all variables with the layer, or call strip(model).")
        problems.raise_if_any(ShardingError)
        pairs = zip(before.items(), after.values(), strict=True)
        return output, {i: new for (i, old), new in pairs if not _is_same(old, new)}


def read_settings(tree: Any) -> str:
    """All settings of a tree as text.

    A structure holds the user's own dictionaries: one that is edited in place still equals itself,
    and a program that was compiled before would run for a layer that is made of it now.
    """
    text = str(jax.tree_util.tree_structure(tree))
    return re.sub(r" at 0x[0-9a-f]+", "", text)  # Of functions, which the structure compares.


# JAX finds what it has traced by the function, and keeps it while the function lives.
find_pure_call = functools.lru_cache(128)(PureCall)


def assign(variables: Sequence[Any], assigned: Mapping[int, Any]) -> None:
    """Gives variables, by number, the values that a call has returned for them."""
    for number, value in assigned.items():
        variables[number].set_value(value)


def _read_live(trees: Sequence[Any]) -> dict[int, Any]:
    """What mutable variables hold, by number; frozen values may be kept in one by the call."""
    values = [value for tree in trees for value in read_variables(tree)]
    variables = [variable for tree in trees for variable in flatten(tree)[1].variables]
    return {i: value for i, value in enumerate(values) if variables[i].live}


def _read_fixed(tree: Any) -> dict[str, Any]:
    """The arrays of a tree that no variable holds, by path."""
    leaves, structure = flatten(tree)
    held = {i for variable in structure.variables for i in range(len(leaves))[variable.leaves]}
    return {leaf.path: leaf.value for i, leaf in enumerate(leaves) if i not in held}


def _is_same(old: Any, new: Any) -> bool:
    """Whether the value of a variable is what it was: the same arrays in the same tree."""
    own, found = map(jax.tree_util.tree_leaves, (old, new))
    structures: list[Any] = [*map(jax.tree_util.tree_structure, (old, new))]
    return structures[0] == structures[1] and [*map(id, own)] == [*map(id, found)]
