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

MOST_STRUCTURES_KEPT = 128
"""How many structures stay compiled after the last model that has one is gone."""

CONSTANT, FIXED = -1, -2
"""Places of leaves that are not variables: arrays, and anything else."""

INCOMPARABLE = (AttributeError, TypeError, ValueError)
"""What ``hash`` and ``==`` raise for objects, such as arrays, that were not written for them."""


@dataclasses.dataclass(frozen=True)
class FlatTree:
    """A tree as part of a key. Named arrays can be nodes of it, whose own ``==`` is elementwise.

    Attributes:
        structure: The tree's structure.
        leaves: Its leaves.
    """

    structure: Any
    leaves: tuple[Any, ...]

    @classmethod
    def of(cls, tree: Any) -> "FlatTree":
        """Takes a tree apart."""
        leaves, structure = jax.tree_util.tree_flatten(tree)
        return cls(structure, tuple(leaves))

    def tree(self) -> Any:
        """The tree."""
        return jax.tree_util.tree_unflatten(self.structure, self.leaves)


@dataclasses.dataclass(frozen=True)
class Structure:
    """Everything that a compiled function depends on, apart from its arrays.

    Attributes:
        body: The model's tree, with a leaf for every variable and every constant.
        places: For each leaf, the index of its variable, or CONSTANT, or FIXED.
        fixed: The leaves that are not arrays, such as functions, in order.
        variables: The tree of the frozen forms of all variables: a leaf for each of their arrays.
        options: What ``jax.jit`` is given besides the function.
    """

    body: Any
    places: tuple[int, ...]
    fixed: tuple[Any, ...]
    variables: Any
    options: FlatTree


class _Tracing(threading.local):
    """The structures whose functions this thread is tracing now, by id."""

    now: frozenset[int] = frozenset()


tracing = _Tracing()


class CompiledStructure:
    """The jitted function for a structure.

    Args:
        structure: The structure.

    Attributes:
        structure: The structure.
        key: What ``tracing.now`` holds while this thread traces ``run``.
        run: ``run(arrays, constants, argument, side_inputs, extras) -> (output, reassigned)``.
            ``extras`` is None, or a tuple of the frozen variables that occur in the argument or
            side inputs only, whose slots, and those of the model's own variables, are then bound
            there. ``reassigned`` maps the index of each variable that the call reassigned, extras
            counted after the model's own, to what ``variable_threading.assign`` takes.
    """

    __slots__ = ("key", "run", "structure")

    def __init__(self, structure: Structure) -> None:
        def run(
            arrays: Sequence[Any],
            constants: Sequence[Any],
            argument: Any,
            side_inputs: dict[str, Any],
            extras: tuple[Any, ...] | None,
        ) -> tuple[Any, dict[int, Any]]:
            given = arrays, constants, argument, side_inputs, extras
            outer = tracing.now
            tracing.now = outer | {id(structure)}
            try:
                with auto_context():
                    return _run(structure, *onto_auto_twin(given))
            finally:
                tracing.now = outer

        run.__name__ = run.__qualname__ = f"Jitted_{_root_name(structure.body)}"
        self.structure = structure
        self.key = id(structure)
        self.run: Callable[..., tuple[Any, dict[int, Any]]] = jax.jit(
            run, **structure.options.tree()
        )


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
    variables = variable_threading.thaw((*own, *(extras or ())))
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


def _root_name(body: Any) -> str:
    root = body.node_data()
    return "leaf" if root is None else root[0].__name__


_kept = functools.lru_cache(MOST_STRUCTURES_KEPT)(CompiledStructure)


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
            return _kept(structure)
    except INCOMPARABLE:
        return CompiledStructure(structure)


def clear_compiled_structures() -> None:
    """Forgets all compiled functions that no model at hand uses."""
    with variable_threading.EXCHANGE:
        _kept.cache_clear()
