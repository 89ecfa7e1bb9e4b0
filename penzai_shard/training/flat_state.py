"""A train state as flat lists of arrays and a form.

Flattening a model of named arrays takes Python time per array. A train step therefore does it
once: from then on a state is two lists of arrays and a reference to its form, and the trees are
built only when somebody asks for them.
"""

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


class StateForm:
    """All of a train state but its arrays. Two are equal if one program serves both.

    Leaves are counted field by field, in the order of ``FIELDS``.

    Args:
        treedefs: Tree structure of each field.
        variables: Table of the model's variables.
        optimizer: The optimizer.

    Attributes:
        changes: Of each leaf whether a step replaces it.
        key_index: Where the random key is among the leaves that a step only reads.
    """

    def __init__(
        self, treedefs: Iterable[Any], variables: VariableTable, optimizer: OptimizerIdentity
    ) -> None:
        self._parts = (tuple(treedefs), variables, optimizer)
        self._hash = hash(self._parts)
        self.treedefs = dict(zip(FIELDS, self._parts[0], strict=True))
        self.variables = variables
        self.optimizer = optimizer
        counts = (treedef.num_leaves for treedef in self._parts[0])
        bounds = itertools.pairwise(itertools.accumulate(counts, initial=0))
        self._slices = {name: slice(*ends) for name, ends in zip(FIELDS, bounds, strict=True)}
        self.changes = tuple(
            changes for name in FIELDS for changes in self._changes_of(name, variables)
        )
        self.key_index = self.changes[: self._slices["root_rng"].start].count(False)

    def _changes_of(self, name: str, variables: VariableTable) -> list[bool]:
        count = self.treedefs[name].num_leaves
        if name != "params":
            return [name not in CONSTANT_FIELDS] * count
        params = jax.tree.unflatten(self.treedefs[name], range(count))
        trained = variables.trainable_names
        return jax.tree.leaves(
            {key: jax.tree.map(lambda _, key=key: key in trained, params[key]) for key in params}
        )

    def __eq__(self, other: object) -> bool:
        if self is other:
            return True
        if not isinstance(other, StateForm):
            return NotImplemented
        return self._hash == other._hash and self._parts == other._parts

    def __hash__(self) -> int:
        return self._hash

    def parted(self, leaves: Iterable[Any]) -> tuple[list[Any], list[Any]]:
        """The leaves that a step replaces, and those that it only reads."""
        parts: tuple[list[Any], list[Any]] = ([], [])
        for leaf, changes in zip(leaves, self.changes, strict=True):
            parts[0 if changes else 1].append(leaf)
        return parts

    def merged(self, changing: Iterable[Any], constant: Iterable[Any]) -> list[Any]:
        """The leaves in the order of the fields, from what ``parted`` gave."""
        parts = iter(constant), iter(changing)
        return [next(parts[changes]) for changes in self.changes]

    def fields_of(self, leaves: list[Any]) -> dict[str, Flattened]:
        """Each field of the state with these leaves, flattened."""
        return {n: Flattened(leaves[self._slices[n]], self.treedefs[n]) for n in FIELDS}

    def paths(self) -> list[str]:
        """Readable path of every leaf."""
        return [
            join_paths(name, path)
            for name, treedef in self.treedefs.items()
            for path, _ in paths_and_leaves(treedef.unflatten(range(treedef.num_leaves)))
        ]


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

    __slots__ = ("changing", "constant", "form", "packed", "program")

    def __init__(
        self,
        form: StateForm,
        changing: list[Any],
        constant: list[Any],
        program: object | None = None,
        packed: list[Any] | None = None,
    ) -> None:
        self.form = form
        self.changing = changing
        self.constant = constant
        self.program = program
        self.packed = constant if packed is None else packed

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
