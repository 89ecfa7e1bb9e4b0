"""A train state as one flat list of arrays plus a structure.

Flattening a model of named arrays takes Python time per array. A train step therefore does it
once: from then on a state is a list of arrays and a reference to its structure, and the trees are
built only when somebody asks for them.
"""

from collections.abc import Iterator
from typing import Any

import jax

from penzai_shard.model_variables import VariableTable
from penzai_shard.training.optimizer_identity import OptimizerIdentity
from penzai_shard.tree_paths import array_path_text, join_paths

STEPPED_SECTIONS = ("step", "trainable", "opt_state", "state_vars", "loss_fn_state")
KEPT_SECTIONS = ("root_rng", "frozen", "unbound_model")
SECTIONS = STEPPED_SECTIONS + KEPT_SECTIONS

# Where each section is found in a train state; both kinds of parameters are in ``params``.
FIELD_OF_SECTION = {section: section for section in SECTIONS} | {
    "trainable": "params",
    "frozen": "params",
}


class StateStructure:
    """The tree structures of all sections of a train state, without any array.

    Two are equal if the same program serves both.

    Attributes:
        treedefs: Tree structure of each section, in the order of ``SECTIONS``.
        variables: Table of the model's variables.
        optimizer: The optimizer.
        stepped_slices: Where each stepped section lies in the list of stepped leaves.
        kept_slices: The same for the leaves that a step leaves alone.
    """

    def __init__(
        self, treedefs: tuple[Any, ...], variables: VariableTable, optimizer: OptimizerIdentity
    ) -> None:
        self.treedefs = dict(zip(SECTIONS, treedefs, strict=True))
        self.variables = variables
        self.optimizer = optimizer
        self.stepped_slices = self._slices(STEPPED_SECTIONS)
        self.kept_slices = self._slices(KEPT_SECTIONS)
        self._parts = (treedefs, variables, optimizer)
        self._hash = hash(self._parts)

    def __eq__(self, other: object) -> bool:
        if self is other:
            return True
        if not isinstance(other, StateStructure):
            return NotImplemented
        return self._hash == other._hash and self._parts == other._parts

    def __hash__(self) -> int:
        return self._hash

    def _slices(self, sections: tuple[str, ...]) -> dict[str, slice]:
        slices = {}
        start = 0
        for section in sections:
            stop = start + self.treedefs[section].num_leaves
            slices[section] = slice(start, stop)
            start = stop
        return slices

    def build(self, section: str, stepped: list[Any], kept: list[Any]) -> Any:
        """The tree of one section, in new containers."""
        if section in self.stepped_slices:
            leaves = stepped[self.stepped_slices[section]]
        else:
            leaves = kept[self.kept_slices[section]]
        return jax.tree.unflatten(self.treedefs[section], leaves)

    def merge_params(self, trainable: dict[str, Any], frozen: dict[str, Any]) -> dict[str, Any]:
        """All parameters in the model's order."""
        return {
            entry.name: (trainable if entry.trainable else frozen)[entry.name]
            for entry in self.variables.parameters
        }

    def paths(self, sections: tuple[str, ...]) -> Iterator[str]:
        """Readable path of every leaf of some sections, in order."""
        for section in sections:
            treedef = self.treedefs[section]
            numbered = jax.tree.unflatten(treedef, range(treedef.num_leaves))
            for key_path, _ in jax.tree_util.tree_flatten_with_path(numbered)[0]:
                yield join_paths(FIELD_OF_SECTION[section], array_path_text(key_path))


class FlatState:
    """A train state as flat lists.

    Attributes:
        structure: Its structure.
        stepped: Arrays that a train step replaces: step, trainable parameters, optimizer state,
            state variables and the loss function's state, in this order.
        kept: Arrays that a train step only reads: random key, frozen parameters and the model's
            constants.
        program: What produced it, if a train step did; its layout is then known to be right.
        passed: What that program takes for ``kept``: scalars packed into few arrays.
    """

    __slots__ = ("kept", "passed", "program", "stepped", "structure")

    def __init__(
        self,
        structure: StateStructure,
        stepped: list[Any],
        kept: list[Any],
        program: object | None = None,
        passed: list[Any] | None = None,
    ) -> None:
        self.structure = structure
        self.stepped = stepped
        self.kept = kept
        self.program = program
        self.passed = kept if passed is None else passed

    def section(self, section: str) -> Any:
        """The tree of one section, in new containers."""
        return self.structure.build(section, self.stepped, self.kept)

    def field(self, field: str) -> Any:
        """The tree of one field of a train state, in new containers."""
        if field == "params":
            return self.structure.merge_params(self.section("trainable"), self.section("frozen"))
        return self.section(field)
