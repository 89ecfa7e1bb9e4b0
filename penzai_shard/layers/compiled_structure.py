"""One compiled function per structure of a model, shared by all models that have it.

Surgery makes new model objects all the time, and most of them are built like one that was already
compiled. What a compiled function depends on is kept here, without any array or model object.
"""

import dataclasses
import functools
import threading
from collections.abc import Callable, Sequence
from typing import Any

import jax
from penzai import pz

from penzai_shard.layers import variable_threading
from penzai_shard.meshes import auto_context, onto_auto_twin
from penzai_shard.model_variables import thawed

MOST_STRUCTURES_KEPT = 128
"""How many structures stay compiled after the last model that has one is gone."""

CONSTANT, FIXED = -1, -2
"""Places of leaves that are not variables: arrays, and anything else."""

INCOMPARABLE = (AttributeError, RuntimeError, TypeError, ValueError)
"""What ``hash`` and ``==`` raise for objects that were not written for them, such as arrays, some
of them deleted."""


@dataclasses.dataclass(frozen=True)
class Structure:
    """Everything that a compiled function depends on, apart from its arrays.

    Attributes:
        body: The model's tree, with a leaf for every variable and every constant.
        places: For each leaf, the index of its variable, or CONSTANT, or FIXED.
        fixed: The leaves that are not arrays, such as functions, in order.
        variables: The tree of the frozen forms of all variables: a leaf for each of their arrays.
        name: What the compiled function is called in profiles.
        options: What ``jax.jit`` is given besides the function, as a structure and leaves: named
            arrays, whose own ``==`` is elementwise, can be nodes of a tree of shardings.
    """

    body: Any
    places: tuple[int, ...]
    fixed: tuple[Any, ...]
    variables: Any
    name: str
    options: tuple[Any, tuple[Any, ...]]


class _ThisThread(threading.local):
    """What a thread is doing.

    Attributes:
        tracing: The keys of the structures whose functions it is tracing.
        is_alone: Whether it keeps calls of other threads out.
    """

    tracing: frozenset[int] = frozenset()
    is_alone = False


this_thread = _ThisThread()


class CompiledStructure:
    """The jitted function for a structure.

    Args:
        structure: The structure.

    Attributes:
        structure: The structure.
        key: What ``this_thread.tracing`` holds while this thread traces ``run``.
        run: ``run(arrays, constants, argument, side_inputs, extras) -> (output, reassigned)``.
            ``extras`` is None, or a tuple of the frozen variables that occur in the argument or
            side inputs only, whose slots, and those of the model's own variables, are then bound
            there. ``reassigned`` maps the index of each variable that the call reassigned, extras
            counted after the model's own, to what ``variable_threading.assign`` takes.
    """

    def __init__(self, structure: Structure) -> None:
        def run(arrays: Any, constants: Any, argument: Any, side_inputs: Any, extras: Any) -> Any:
            given = arrays, constants, argument, side_inputs, extras
            outer = this_thread.tracing
            this_thread.tracing = outer | {id(structure)}
            try:
                with auto_context():
                    return _run(structure, *onto_auto_twin(given))
            finally:
                this_thread.tracing = outer

        run.__name__ = run.__qualname__ = structure.name
        self.structure = structure
        self.key = id(structure)
        options = jax.tree_util.tree_unflatten(*structure.options)
        self.run: Callable[..., tuple[Any, dict[int, Any]]] = jax.jit(run, **options)


def _run(
    structure: Structure,
    arrays: Sequence[Any],
    constants: Sequence[Any],
    argument: Any,
    side_inputs: dict[str, Any],
    extras: tuple[Any, ...] | None,
) -> tuple[Any, dict[int, Any]]:
    """What ``CompiledStructure.run`` compiles."""
    own: Any = jax.tree_util.tree_unflatten(structure.variables, arrays)
    variables = list(map(thawed, (*own, *(extras or ()))))
    remaining = {CONSTANT: iter(constants), FIXED: iter(structure.fixed)}
    body = jax.tree_util.tree_unflatten(
        structure.body,
        [variables[place] if place >= 0 else next(remaining[place]) for place in structure.places],
    )
    if extras is not None:
        argument, side_inputs = pz.bind_variables(
            (argument, side_inputs), variables, allow_unused=True
        )
    return variable_threading.call_with(variables, body, argument, side_inputs, "Jitted")


_shared = functools.lru_cache(MOST_STRUCTURES_KEPT)(CompiledStructure)


def compiled_structure(structure: Structure) -> CompiledStructure:
    """The compiled form of a structure, the same one for every equal structure.

    Any number of threads may ask at once; all that ask for equal structures get one.

    Args:
        structure: The structure.

    Returns:
        The compiled form. Those used last are kept; a structure that cannot be compared, for
        instance one with an array in a static field, gets its own.
    """
    try:
        with variable_threading.EXCHANGE:
            return _shared(structure)
    except INCOMPARABLE:
        return CompiledStructure(structure)


def clear_compiled_structures() -> None:
    """Forgets all compiled functions that no model at hand uses."""
    with variable_threading.EXCHANGE:
        _shared.cache_clear()
