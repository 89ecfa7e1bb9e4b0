"""Carrying mutable variables through a JAX transformation and back.

A transformation sees frozen values only. Inside it each value becomes a temporary variable; after
the wrapped call the variables that were reassigned, and only those, leave it as an output. Which
ones were is known while tracing, so the keys of that output are part of its static structure.
"""

import threading
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import jax
from penzai import pz
from penzai.core.variables import (
    AbstractVariable,
    AbstractVariableValue,
    VariableConflictError,
)

from penzai_shard.errors import RuleTypeError
from penzai_shard.library_apis.penzai_api import store_value
from penzai_shard.model_variables.first_api_effects import variables_as_effects
from penzai_shard.padded_arrays import padded_as_before
from penzai_shard.readers import foreign_nodes
from penzai_shard.tree_paths import path_text

PLAIN_VARIABLES = (pz.Parameter, pz.StateVariable)

EXCHANGE = threading.RLock()
"""Held while the values of a model's variables are read or assigned together, never while a model
runs. Reentrant, as reading a model runs other people's code, which may call a layer in turn."""


def is_variable(leaf: Any) -> bool:
    """Whether a leaf is a mutable variable, which JAX cannot take as an argument."""
    return isinstance(leaf, AbstractVariable)


def contains_variable(tree: Any) -> bool:
    """Whether any leaf of the tree is a mutable variable.

    >>> contains_variable({"step": pz.StateVariable(0)}), contains_variable({"step": 0})
    (True, False)
    """
    return any(map(is_variable, jax.tree_util.tree_leaves(tree)))


def frozen_together(variables: Iterable[AbstractVariable]) -> tuple[AbstractVariableValue, ...]:
    """The values of the variables at one moment, between the assignments of other threads."""
    with EXCHANGE:
        return tuple(variable.freeze() for variable in variables)


def call_with(
    variables: Sequence[AbstractVariable],
    layer: Any,
    argument: Any,
    side_inputs: dict[str, Any],
    wrapper: str,
) -> tuple[Any, dict[int, Any]]:
    """Calls a layer inside a transformation, with temporary variables.

    Args:
        variables: The temporary variables, which are in the layer, the argument and side inputs.
        layer: The layer.
        argument: Its input.
        side_inputs: Its side inputs.
        wrapper: Name of the wrapper layer, for messages.

    Returns:
        The layer's output, and what ``reassigned`` gives for the variables.

    Raises:
        ValueError: The layer returned a mutable variable.
        RuleTypeError: The layer changed variables of another library, which nobody carries out.
    """
    before = contents(variables)
    layer = variables_as_effects(layer)
    others = held_by_others(layer)
    output = layer(argument, **side_inputs)
    check_no_variable(output, wrapper)
    changed = [
        path
        for path, held in held_by_others(layer).items()
        if path not in others or any(a is not b for a, b in zip(held, others[path], strict=False))
    ]
    if changed:
        raise RuleTypeError(
            f"{wrapper} carries what a layer changes out of it for variables of Penzai, and this "
            f"{type(layer).__name__} changed others: {', '.join(changed)}. Use the transformation "
            "of its own library, such as nnx.jit or nnx.remat, in place of the wrapper."
        )
    return output, reassigned(variables, before)


def held_by_others(layer: Any) -> dict[str, list[Any]]:
    """What the state variables of other libraries in a layer hold, by path."""
    return {
        path_text(key_path): jax.tree_util.tree_leaves(reader.read(node).data)
        for key_path, reader, node in foreign_nodes(layer)
        if reader.shares and reader.role(node) == "state"
    }


def content_of(variable: Any) -> Any:
    """The value of a plain ``pz.Parameter`` or ``pz.StateVariable``, others' frozen form."""
    return variable.value if type(variable) in PLAIN_VARIABLES else variable.freeze()


def contents(variables: Iterable[AbstractVariable]) -> list[Any]:
    """What each variable holds now, to be given to ``reassigned`` later."""
    return [jax.tree_util.tree_flatten(variable.freeze()) for variable in variables]


def reassigned(variables: Sequence[AbstractVariable], before: Sequence[Any]) -> dict[int, Any]:
    """The new contents of the variables that hold something else than before, by index.

    Args:
        variables: The variables.
        before: What ``contents`` gave for them.

    Returns:
        A pytree: for each reassigned variable what ``content_of`` gives, stored padded where it
        was so before and has the same lengths; ``assign`` takes it.

    >>> variables = [pz.StateVariable(1), pz.StateVariable(2)]
    >>> before = contents(variables)
    >>> variables[1].value = variables[1].value + 1
    >>> {index: int(value) for index, value in reassigned(variables, before).items()}
    {1: 3}
    """
    changed = {}
    for index, (variable, (old_leaves, old_structure)) in enumerate(
        zip(variables, before, strict=True)
    ):
        frozen = variable.freeze()
        leaves, structure = jax.tree_util.tree_flatten(frozen)
        same = structure == old_structure and all(
            new is old for new, old in zip(leaves, old_leaves, strict=True)
        )
        if not same:
            # What a layer has computed has true lengths.
            content = padded_as_before(frozen, old_structure.unflatten(old_leaves))
            changed[index] = content.value if type(variable) in PLAIN_VARIABLES else content
    return changed


def assign(variables: Sequence[AbstractVariable], changed: Mapping[int, Any]) -> None:
    """Gives variables, by index, the contents that ``reassigned`` returned for them."""
    for index, content in changed.items():
        variable = variables[index]
        if type(variable) in PLAIN_VARIABLES:
            # The setter would convert each leaf; out of a transformation they come as arrays.
            store_value(variable, content)
        else:
            variable.update(content)


def check_no_variable(output: Any, wrapper: str) -> None:
    """Refuses an output that contains a mutable variable.

    Args:
        output: What the wrapped layer returned.
        wrapper: Name of the wrapper layer, for the message.

    Raises:
        ValueError: The output contains a mutable variable, which cannot leave a transformation.
    """
    found = [
        f"{jax.tree_util.keystr(path) or 'the output itself'}: {type(leaf).__name__}"
        f" {getattr(leaf, 'label', '')!r}"
        for path, leaf in jax.tree_util.tree_leaves_with_path(output)
        if is_variable(leaf)
    ]
    if found:
        raise ValueError(
            f"the layer inside {wrapper} returned mutable variables, which cannot leave it: "
            f"{'; '.join(found)}. Return variable.value, or variable.freeze(), instead."
        )


def check_distinct_slots(variables: Iterable[AbstractVariable]) -> None:
    """Refuses two different variables that stand for the same slot.

    Args:
        variables: Variables, each of them once.

    Raises:
        VariableConflictError: Two of them have the same kind and label, so that one of them
            would silently get the other's value.
    """
    seen: set[Any] = set()
    for variable in variables:
        plain = type(variable) in PLAIN_VARIABLES
        slot = (type(variable), variable.label) if plain else variable.get_slot()
        if slot in seen:
            raise VariableConflictError(
                f"two different {type(variable).__name__} objects have the same label "
                f"{getattr(variable, 'label', slot)!r}. Give one of them another label, or use "
                "one object in both places to share it."
            )
        seen.add(slot)
