"""What the handlers of Penzai's first API put into a layer while it runs, as variables.

A handler of that API replaces the references to it in its body by objects that hold its state, its
side input or its list of side outputs, and calls the body. A transformation around a layer inside
that body must carry what such an object holds in, and what was assigned out; otherwise tracers stay
in it.
"""

import dataclasses
from typing import Any

import jax
from penzai import pz
from penzai.core.variables import (
    AbstractVariable,
    AbstractVariableValue,
    StateVariableSlot,
)

from penzai_shard.library_apis.penzai_api import (
    EFFECT_FIELDS,
    SIDE_OUTPUTS,
    share_side_outputs,
    side_outputs,
)
from penzai_shard.model_variables.first_api import looked_up


def _fields() -> dict[type, str]:
    return {
        getattr(module, name): field
        for (module_name, name), field in EFFECT_FIELDS.items()
        if (module := looked_up(f"data_effects.{module_name}")) is not None
    }


def _slot(number: int) -> StateVariableSlot:
    return StateVariableSlot(label=("effect of the first API", number))


@pz.pytree_dataclass
class EffectValue(AbstractVariableValue):
    """What an effect holds, to be passed through a transformation.

    Attributes:
        number: Which of the tree's effects it is.
        owner: The first of those that write to the same list of side outputs; else ``number``.
        template: The effect without what it holds.
        content: What it holds; of a list of side outputs, those that were added, at its owner.
    """

    number: int = dataclasses.field(metadata={"pytree_node": False})
    owner: int = dataclasses.field(metadata={"pytree_node": False})
    template: Any = dataclasses.field(metadata={"pytree_node": False})
    content: Any

    def get_slot(self) -> StateVariableSlot:
        """The place of the effect."""
        return _slot(self.number)

    def unfreeze_as_copy(self) -> "EffectVariable":
        """A new effect of the same kind that holds the same."""
        field = _fields()[type(self.template)]
        content = list(self.content) if field == SIDE_OUTPUTS else self.content
        effect = dataclasses.replace(self.template, **{field: content})
        return EffectVariable(effect, self.number, self.owner)


class EffectVariable(AbstractVariable):
    """An effect in the form that transformations carry.

    Args:
        effect: The object that the handler put into the layer.
        number: Which of the tree's effects it is.
        owner: The first of those that write to the same list of side outputs; else ``number``.
    """

    def __init__(self, effect: Any, number: int, owner: int) -> None:
        self.effect = effect
        self.number = number
        self.owner = owner
        self.field = _fields()[type(effect)]
        # Side outputs that were in the list before belong to others.
        self._start = len(side_outputs(effect)) if self.field == SIDE_OUTPUTS else 0

    def get_slot(self) -> StateVariableSlot:
        """The place of the effect."""
        return _slot(self.number)

    def freeze(self) -> EffectValue:
        """What the effect holds now."""
        content = getattr(self.effect, self.field)
        if self.field == SIDE_OUTPUTS:
            content = tuple(content[self._start :]) if self.owner == self.number else ()
        template = dataclasses.replace(self.effect, **{self.field: None})
        return EffectValue(self.number, self.owner, template, content)

    def update(self, new_frozen_value: AbstractVariableValue) -> None:
        """Gives the effect what a transformation brought out."""
        assert isinstance(new_frozen_value, EffectValue)
        if self.field == SIDE_OUTPUTS:
            side_outputs(self.effect)[self._start :] = new_frozen_value.content
        else:
            setattr(self.effect, self.field, new_frozen_value.content)


def effects_as_variables(tree: Any) -> Any:
    """The tree with a variable for each effect in it; the tree itself if there is none."""
    fields = _fields()
    if not fields:
        return tree
    structure: Any
    leaves, structure = jax.tree_util.tree_flatten(tree)
    variables: dict[int, EffectVariable] = {}
    owners: dict[int, int] = {}
    for leaf in leaves:
        if type(leaf) in fields and id(leaf) not in variables:
            number = len(variables)
            shared = side_outputs(leaf) if fields[type(leaf)] == SIDE_OUTPUTS else leaf
            owner = owners.setdefault(id(shared), number)
            variables[id(leaf)] = EffectVariable(leaf, number, owner)
    if not variables:
        return tree
    return structure.unflatten([variables.get(id(leaf), leaf) for leaf in leaves])


def variables_as_effects(tree: Any) -> Any:
    """The tree with the effects in place of their variables."""
    structure: Any
    leaves, structure = jax.tree_util.tree_flatten(tree)
    variables = {leaf.number: leaf for leaf in leaves if isinstance(leaf, EffectVariable)}
    for variable in variables.values():
        if variable.owner != variable.number:
            share_side_outputs(variable.effect, side_outputs(variables[variable.owner].effect))
    return structure.unflatten(
        [leaf.effect if isinstance(leaf, EffectVariable) else leaf for leaf in leaves]
    )
