"""What one variable of a model was, kept beside its value in a train state."""

import dataclasses
from typing import Any

import jax
from penzai.core.variables import AbstractVariableSlot, ParameterSlot, StateVariableSlot

from penzai_shard.array_kinds import is_abstract
from penzai_shard.model_variables.slots import same
from penzai_shard.model_variables.variables import thawed, with_value
from penzai_shard.named_arrays import unnamed_data
from penzai_shard.readers import reader_of


@dataclasses.dataclass(frozen=True, eq=False)
class VariableEntry:
    """What one variable of a model was, without its value.

    Attributes:
        name: Its key in ``params`` or ``state_vars``.
        kind: ``"parameter"`` or ``"state"``.
        template: The frozen variable, or parameter of the first API, with ``None`` for its
            value; what another library puts around an array, without that; ``None`` itself for
            a bare weight.
        mutable: Whether the model held it as a mutable variable.
        trainable: Whether the optimizer changes it.
        computes_plain: Whether the model's code computes with the plain array, as that of modules
            of Equinox does: a loss function then gets it without its names.
        in_collection: Whether the model is a dictionary of collections of variables, as Flax's
            linen modules have it.
    """

    name: str
    kind: str
    template: Any
    mutable: bool
    trainable: bool
    computes_plain: bool = False
    in_collection: bool = False

    def slot(self) -> AbstractVariableSlot:
        """The placeholder that stands in the model where the variable was."""
        slot_type = ParameterSlot if self.kind == "parameter" else StateVariableSlot
        return slot_type(label=self.name)

    def frozen(self, value: Any) -> Any:
        """The frozen variable with a value."""
        if self.template is None:
            return value
        reader = reader_of(self.template)
        if reader is not None:
            return reader.with_data(self.template, unnamed_data(value))
        return with_value(self.template, value)

    def for_loss(self, value: Any) -> Any:
        """What the model's code computes with."""
        return unnamed_data(value) if self.computes_plain else self.frozen(value)

    def thawed(self, value: Any) -> Any:
        """The variable as the model held it: a new mutable one if it was mutable."""
        frozen = self.frozen(value)
        # Shape structs and shardings cannot be put into a mutable variable.
        holds_arrays = all(
            hasattr(leaf, "dtype") and not is_abstract(leaf) for leaf in jax.tree.leaves(value)
        )
        return thawed(frozen) if self.mutable and holds_arrays else frozen

    def __eq__(self, other: object) -> bool:
        """Whether both describe the same variable, labels that Penzai made up left aside."""
        return isinstance(other, VariableEntry) and same(self._described(), other._described())

    def __hash__(self) -> int:
        return hash((self.name, self.kind, self.trainable))

    def _described(self) -> tuple[Any, ...]:
        metadata = getattr(self.template, "metadata", None)
        reader = reader_of(self.template)
        if reader is not None:
            held = reader.read(self.template)
            metadata = (held.names, held.sizes, jax.tree.structure(self.template))
        known = (self.name, self.kind, self.mutable, self.trainable, self.computes_plain)
        return (*known, type(self.template), metadata)
