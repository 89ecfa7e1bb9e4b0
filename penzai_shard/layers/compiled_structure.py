"""One compiled function per structure of a model, shared by all models that have it.

Surgery makes new model objects all the time, and most of them are built like one that was already
compiled. What a compiled function depends on is kept here, without any array or model object.
"""

import collections
import dataclasses
import functools
import threading
from collections.abc import Callable, Sequence
from typing import Any

import jax
from penzai import pz

from penzai_shard.layers import variable_threading
from penzai_shard.meshes import auto_context, onto_auto_twin, shardings_on_auto_twin
from penzai_shard.model_variables.first_api_effects import variables_as_effects

MOST_STRUCTURES_KEPT = 128
"""How many structures stay compiled after the last model that has one is gone."""

CONSTANT, FIXED = -1, -2
"""Places of leaves that are not variables: arrays, and anything else."""


class ByEquality:
    """Makes a value that cannot be hashed part of a key; compared by ``==`` alone.

    >>> ByEquality({"a": 1}) == ByEquality({"a": 1}), ByEquality({"a": 1}) == ByEquality({})
    (True, False)
    """

    __slots__ = ("value",)

    def __init__(self, value: Any) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ByEquality) and bool(self.value == other.value)

    def __hash__(self) -> int:
        return hash(ByEquality)


@dataclasses.dataclass(frozen=True)
class ShardingTree:
    """A tree of shardings as part of a key.

    Attributes:
        leaves: The shardings.
        structure: The tree. Named arrays can be nodes of it, whose own ``==`` is elementwise.
    """

    leaves: tuple[Any, ...]
    structure: Any

    @classmethod
    def of(cls, shardings: Any) -> "ShardingTree | None":
        """Reads a tree of shardings, on the Auto twins of their meshes; None stays None."""
        if shardings is None:
            return None
        leaves, structure = jax.tree_util.tree_flatten(shardings_on_auto_twin(shardings))
        return cls(tuple(leaves), structure)

    def tree(self) -> Any:
        """The tree of shardings."""
        return jax.tree_util.tree_unflatten(self.structure, self.leaves)


@dataclasses.dataclass(frozen=True)
class PlainVariable:
    """What a compiled function depends on of a ``pz.Parameter`` or ``pz.StateVariable``.

    Attributes:
        kind: The class.
        label: Its label.
        metadata: Its metadata, copied.
        axes: Logical axis names and sizes if its value is a ``pz.nx.NamedArray``, None if its
            value is an array.
    """

    kind: type
    label: Any
    metadata: ByEquality
    axes: tuple[tuple[Any, int], ...] | None

    def thaw(self, array: Any) -> Any:
        """A new mutable variable of this kind that holds ``array``."""
        value = array
        if self.axes is not None:
            value = pz.nx.NamedArray(
                named_axes=collections.OrderedDict(self.axes), data_array=array
            )
        return self.kind(label=self.label, value=value, metadata=dict(self.metadata.value))


@dataclasses.dataclass(frozen=True)
class Structure:
    """Everything that a compiled function depends on, apart from its arrays.

    Attributes:
        body: The model's tree, with a leaf for every variable and every constant.
        places: For each leaf, the index of its variable, or CONSTANT, or FIXED.
        fixed: The leaves that are not arrays, such as functions, in order.
        plain: The variables whose value is one array, in the order of their arrays.
        general: The tree of the frozen forms of all other variables, which come after those.
        in_shardings: Sharding of the argument, or None.
        out_shardings: Sharding of the output, or None.
        donate_argument: Whether the argument's buffers may be used for the output.
    """

    body: Any
    places: tuple[int, ...]
    fixed: tuple[Any, ...]
    plain: tuple[PlainVariable, ...]
    general: Any
    in_shardings: ShardingTree | None
    out_shardings: ShardingTree | None
    donate_argument: bool


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
            outer = tracing.now
            tracing.now = outer | {id(structure)}
            try:
                with auto_context():
                    return _run(
                        structure,
                        *onto_auto_twin((arrays, constants, argument, side_inputs, extras)),
                    )
            finally:
                tracing.now = outer

        run.__name__ = run.__qualname__ = f"Jitted_{_root_name(structure.body)}"
        options: dict[str, Any] = {}
        if structure.in_shardings is not None:
            options["in_shardings"] = (None, None, structure.in_shardings.tree(), None, None)
        if structure.out_shardings is not None:
            options["out_shardings"] = (structure.out_shardings.tree(), None)
        if structure.donate_argument:
            options["donate_argnums"] = (2,)
        self.structure = structure
        self.key = id(structure)
        self.run: Callable[..., tuple[Any, dict[int, Any]]] = jax.jit(run, **options)

    def outside_of_itself(self) -> "CompiledStructure":
        """This, or another like it if this thread is tracing this one now.

        JAX refuses to trace a function inside its own trace, as a layer asks for that compiles
        itself in its own call.
        """
        return CompiledStructure(self.structure) if self.key in tracing.now else self


def _run(
    structure: Structure,
    arrays: Sequence[Any],
    constants: Sequence[Any],
    argument: Any,
    side_inputs: dict[str, Any],
    extras: tuple[Any, ...] | None,
) -> tuple[Any, dict[int, Any]]:
    """What ``CompiledStructure.run`` compiles."""
    plain_count = len(structure.plain)
    variables = [
        plain.thaw(array)
        for plain, array in zip(structure.plain, arrays[:plain_count], strict=True)
    ]
    general = jax.tree_util.tree_unflatten(structure.general, arrays[plain_count:])
    variables += variable_threading.thaw(general)
    remaining = {CONSTANT: iter(constants), FIXED: iter(structure.fixed)}
    body = jax.tree_util.tree_unflatten(
        structure.body,
        [variables[place] if place >= 0 else next(remaining[place]) for place in structure.places],
    )
    if extras is not None:
        variables += variable_threading.thaw(extras)
        argument, side_inputs = pz.bind_variables(
            (argument, side_inputs), variables, allow_unused=True
        )
    before = variable_threading.contents(variables)
    output = variables_as_effects(body)(argument, **side_inputs)
    variable_threading.check_no_variable(output, "Jitted")
    return output, variable_threading.reassigned(variables, before)


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
    except Exception:
        # A hash or an == of somebody else's class failed, in whatever way it does.
        return CompiledStructure(structure)


def clear_compiled_structures() -> None:
    """Forgets all compiled functions that no model at hand uses."""
    with variable_threading.EXCHANGE:
        _kept.cache_clear()
