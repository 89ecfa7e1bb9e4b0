"""A train state as flat lists of arrays and a form.

Flattening a model of named arrays takes Python time per array. A train step therefore does it
once: from then on a state is two lists of arrays and a reference to its form, and the trees are
built only when somebody asks for them.
"""

import dataclasses
import functools
import itertools
import operator
from collections.abc import Iterable
from typing import Any, NamedTuple

import jax

from penzai_shard.model_variables import VariableTable
from penzai_shard.training.optimizer_identity import OptimizerIdentity
from penzai_shard.tree_paths import join_paths, paths_and_leaves

# The fields of a train state that hold arrays, the step's number first.
FIELDS = (
    "step",
    "params",
    "opt_state",
    "state_vars",
    "root_rng",
    "loss_fn_state",
    "unbound_model",
    "guards",
)
# Those that a step only reads, as it does frozen parameters.
CONSTANT_FIELDS = frozenset({"root_rng", "unbound_model"})


class Flattened(NamedTuple):
    """One field of a state: its leaves and their tree structure."""

    leaves: list[Any]
    treedef: Any

    def same_objects(self, other: "Flattened") -> bool:
        """Whether both have one structure and the very same leaves."""
        return self.treedef == other.treedef and all(map(operator.is_, self.leaves, other.leaves))


@dataclasses.dataclass(frozen=True)
class StateForm:
    """All of a train state but its arrays. Two are equal if one program serves both.

    Leaves are counted field by field, in the order of ``FIELDS``.

    Attributes:
        treedefs: Tree structure of each field.
        variables: Table of the model's variables.
        optimizer: The optimizer.
    """

    treedefs: tuple[Any, ...]
    variables: VariableTable
    optimizer: OptimizerIdentity

    @functools.cached_property
    def changes(self) -> tuple[bool, ...]:
        """Of each leaf whether a step replaces it."""
        trained = self.variables.trainable_names
        found: list[bool] = []
        for name, treedef in zip(FIELDS, self.treedefs, strict=True):
            leaves = [name not in CONSTANT_FIELDS] * treedef.num_leaves
            if name == "params":
                # As a dictionary again, so that JAX puts the marks in the order of the leaves.
                params = treedef.unflatten(leaves)
                marks = {
                    key: [key in trained] * len(jax.tree.leaves(params[key])) for key in params
                }
                leaves = jax.tree.leaves(marks)
            found += leaves
        return tuple(found)

    @functools.cached_property
    def key_index(self) -> int:
        """Where the random key is among the leaves that a step only reads."""
        before = self.treedefs[: FIELDS.index("root_rng")]
        return self.changes[: sum(treedef.num_leaves for treedef in before)].count(False)

    def parted(self, leaves: Iterable[Any]) -> tuple[list[Any], list[Any]]:
        """The leaves that a step replaces, and those that it only reads."""
        parts: tuple[list[Any], list[Any]] = ([], [])
        for leaf, changes in zip(leaves, self.changes, strict=True):
            parts[0 if changes else 1].append(leaf)
        return parts

    def merged(self, changing: Iterable[Any], constant: Iterable[Any]) -> list[Any]:
        """The leaves in the order of the fields, from the two lists of ``parted``."""
        parts = iter(constant), iter(changing)
        return [next(parts[changes]) for changes in self.changes]

    def fields_of(self, leaves: Iterable[Any]) -> dict[str, Flattened]:
        """Each field of the state with these leaves, flattened."""
        remaining = iter(leaves)
        return {
            name: Flattened(list(itertools.islice(remaining, treedef.num_leaves)), treedef)
            for name, treedef in zip(FIELDS, self.treedefs, strict=True)
        }

    def paths(self) -> list[str]:
        """Readable path of every leaf."""
        return [
            join_paths(name, path)
            for name, treedef in zip(FIELDS, self.treedefs, strict=True)
            for path, _ in paths_and_leaves(treedef.unflatten(range(treedef.num_leaves)))
        ]


@dataclasses.dataclass(slots=True, eq=False)
class FlatState:
    """A train state as flat lists.

    Attributes:
        form: Its form.
        changing: The arrays that a train step replaces, the step's number first.
        constant: The arrays that a train step only reads: random key, frozen parameters and the
            model's constants.
        program: What produced it, if a train step did; its layout is then known to be right.
        packed: What that program takes for ``constant``: scalars packed into few arrays.
    """

    form: StateForm
    changing: list[Any]
    constant: list[Any]
    program: object | None = None
    packed: list[Any] = dataclasses.field(default_factory=list)

    def leaves(self) -> list[Any]:
        """All arrays in the order of the fields."""
        return self.form.merged(self.changing, self.constant)

    def fields(self) -> dict[str, Flattened]:
        """Each field, flattened."""
        return self.form.fields_of(self.leaves())

    def field(self, name: str) -> Any:
        """The tree of one field, in new containers; parameters in the model's order."""
        leaves, treedef = self.fields()[name]
        tree = jax.tree.unflatten(treedef, leaves)
        if name == "params":
            return {entry.name: tree[entry.name] for entry in self.form.variables.parameters}
        return tree
