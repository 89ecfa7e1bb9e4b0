"""What a train step and an evaluation step have in common: the way from a state to a program.

A step looks at a state once, when the state was made or changed by hand. From then on it passes a
list of arrays to one compiled program.
"""

import abc
import dataclasses
import threading
from collections.abc import Callable, Hashable
from typing import Any

import jax
from jax.sharding import NamedSharding

from penzai_shard.array_kinds import is_abstract, is_array_like, is_traced, own_copy_of_numpy
from penzai_shard.errors import RuleTypeError, ShardingError
from penzai_shard.meshes import auto_context, has_explicit_axes, onto_auto_twin
from penzai_shard.readers import without_bare_arrays
from penzai_shard.training.declared_layout import DeclaredAux, DeclaredInputs, DeclaredState
from penzai_shard.training.flat_state import FlatState
from penzai_shard.training.loss_contract import RESERVED
from penzai_shard.training.state_layout import (
    Packing,
    as_array,
    committed,
    mesh_of,
    with_strong_type,
)
from penzai_shard.training.step_failures import refuse_donated, refuse_inputs, refuse_other_leaves
from penzai_shard.training.train_state import TrainState, to_flat

# A step keeps the programs of so many structures and layouts of states.
MOST_PROGRAMS = 32


def check_loss_function(loss_fn: Any, positional: tuple[Any, ...], called: str) -> None:
    """Checks the first arguments of a function that builds a step.

    Raises:
        RuleTypeError: There is no loss function, or something stands behind it.

    >>> check_loss_function(max, (), "build_train_step_fn")
    """
    if not callable(loss_fn):
        raise RuleTypeError(
            f"loss_fn must be a function, not {loss_fn!r}. Write loss_fn(model, rng, state, "
            "**inputs) -> (loss, new_state, aux)."
        )
    if positional:
        raise RuleTypeError(
            f"{called} takes the loss function, and all else by keyword. The optimizer "
            "is part of the state: TrainState.initial_state(model, optimizer, root_rng)."
        )


@dataclasses.dataclass(eq=False, repr=False)
class CompiledStep(abc.ABC):
    """A function of a train state and a batch, and the programs that it was compiled to.

    It keeps the programs last used, one per form and layout of a state, but no state. Several
    threads may call it.

    Attributes:
        computation: What it computes.
        jit: Whether it is compiled.
        declared_state: The declared layout of the state, if there is one.
        declared_inputs: That of inputs.
        declared_aux: That of auxiliary outputs.
    """

    computation: Any
    jit: bool
    declared_state: DeclaredState | None
    declared_inputs: DeclaredInputs
    declared_aux: DeclaredAux
    _programs: dict[Any, Any] = dataclasses.field(default_factory=dict, init=False)
    _lock: threading.Lock = dataclasses.field(default_factory=threading.Lock, init=False)

    def trace(self, train_state: TrainState, /, **inputs: Any) -> jax.stages.Traced:
        """The step's ``jax.stages.Traced`` for a state and inputs, without running it.

        Args:
            train_state: The state, concrete; or abstract, with a sharding in every struct.
            **inputs: Inputs, concrete or abstract.

        Returns:
            What ``jax.jit(...).trace(...)`` gives.

        Raises:
            ShardingError: The step was built with ``jit=False``, or as calling it does.
        """
        if not self.jit:
            raise ShardingError("a step built with jit=False has nothing to lower. Pass jit=True.")
        flat = flat_of(train_state)
        leaves = self.checked_inputs(inputs)
        if any(map(is_abstract, flat.changing)):
            # There are no values that could be packed.
            flat = dataclasses.replace(flat, packed=flat.constant)
            packing: Packing = tuple((i, None) for i in range(len(flat.constant)))
            run, arguments = self._described_call(flat, packing)
        else:
            run, arguments = self._prepared_call(flat, leaves)
        inputs = self.declared_inputs.placed(inputs)
        with auto_context():
            traced: jax.stages.Traced = run.trace(*arguments, inputs)
        return traced

    def lower(self, train_state: TrainState, /, **inputs: Any) -> jax.stages.Lowered:
        """The step's ``jax.stages.Lowered`` for a state and inputs, without running it.

        Takes and raises what ``trace`` does.
        """
        return self.trace(train_state, **inputs).lower()

    @abc.abstractmethod
    def _described_call(self, flat: FlatState, packing: Packing) -> tuple[Any, tuple[Any, ...]]:
        """The program for an abstract state, and what of the state it takes."""

    @abc.abstractmethod
    def _prepared_call(self, flat: FlatState, inputs: list[Any]) -> tuple[Any, tuple[Any, ...]]:
        """The same for a concrete state, which is placed."""

    def checked_inputs(self, inputs: dict[str, Any]) -> list[Any]:
        """The leaves of the inputs, which are brought onto the Auto twin of their mesh in place.

        So are tensors of other libraries turned into arrays.
        """
        leaves = jax.tree.leaves(inputs)
        if not all(map(is_array_like, leaves)):
            read = without_bare_arrays(inputs, "a step")
            refuse_inputs(read)
            inputs.update(jax.tree.map(own_copy_of_numpy, read))
            leaves = jax.tree.leaves(inputs)
        if not inputs.keys().isdisjoint(RESERVED):
            taken = sorted(inputs.keys() & set(RESERVED))
            raise ShardingError(
                f"inputs cannot be named {', '.join(taken)}: the loss function gets "
                f"{', '.join(RESERVED)} from the train state. Rename the input."
            )
        if any(map(_is_explicit, leaves)):
            for name in inputs:
                inputs[name] = onto_auto_twin(inputs[name])
        return leaves

    def placed_state(self, flat: FlatState, inputs: list[Any]) -> tuple[list[Any], bool]:
        """The leaves of a state that no step returned, as programs take them.

        Weak types, which a result does not have, are dropped here, and every array is committed
        to its place, so that the state that comes out of a program fits the same program.

        Args:
            flat: The state.
            inputs: The leaves of the inputs.

        Returns:
            The leaves in the order of the fields, and whether JAX is free to place them all.

        Raises:
            ShardingError: The state was donated, is abstract, or is not laid out as declared.
        """
        form = flat.form
        refuse_donated(flat)
        leaves = [
            with_strong_type(leaf) if changes else as_array(leaf)
            for leaf, changes in zip(flat.leaves(), form.changes, strict=True)
        ]
        if any(map(is_abstract, leaves)):
            raise ShardingError(
                "this train state is abstract. Fill it before training, for instance with "
                "restore_train_state(path, state, mesh, rules)."
            )
        refuse_other_leaves(form, leaves)
        if self.declared_state is not None:
            leaves = self.declared_state.checked(form, leaves)
        mesh = mesh_of((*leaves, *inputs))
        # JAX was free to place everything, and stays so: the result mixes with any other.
        is_free = self.declared_state is None and not any(map(is_committed, (*leaves, *inputs)))
        if not is_free:
            with auto_context():
                leaves = committed(leaves, mesh, form.paths)
        return leaves, is_free

    def kept_program(self, key: Hashable, build: Callable[[], Any]) -> Any:
        """The program under a key, built if it is not kept."""
        with self._lock:
            program = self._programs.pop(key, None) or build()
            # The last used are at the end.
            self._programs[key] = program
            while len(self._programs) > MOST_PROGRAMS:
                del self._programs[next(iter(self._programs))]
        return program


def is_committed(leaf: Any) -> bool:
    """Whether an array is committed to its place."""
    return isinstance(leaf, jax.Array) and bool(leaf.committed)


def _is_explicit(leaf: Any) -> bool:
    sharding = jax.typeof(leaf).sharding if is_traced(leaf) else getattr(leaf, "sharding", None)
    return isinstance(sharding, NamedSharding) and has_explicit_axes(sharding.mesh)


def flat_of(train_state: Any) -> FlatState:
    """The flat form of what a step was called with, which must be a train state."""
    if not isinstance(train_state, TrainState):
        kind = type(train_state)
        given = "nothing" if train_state is None else f"a {kind.__name__}"
        if kind.__name__ == TrainState.__name__:
            given = f"one of another library, {kind.__module__}"
        raise ShardingError(
            f"a step takes a TrainState first, step(state, **batch), and got {given}. "
            "Make one: TrainState.initial_state(model, optimizer, jax.random.key(0))."
        )
    return to_flat(train_state)
