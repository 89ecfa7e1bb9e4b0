"""Evaluation steps: the loss and its outputs, and nothing else changes."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax

from penzai_shard.array_kinds import is_traced
from penzai_shard.meshes import auto_context
from penzai_shard.padded_arrays import uneven_lengths, without_padding
from penzai_shard.training.aux_reductions import AuxReductions
from penzai_shard.training.compiled_step import (
    CompiledStep,
    check_loss_function,
    flat_of,
    is_committed,
)
from penzai_shard.training.declared_layout import DeclaredAux, DeclaredInputs, DeclaredState
from penzai_shard.training.flat_state import FlatState, StateForm
from penzai_shard.training.gradient_step import GradientStep
from penzai_shard.training.microbatches import check_split
from penzai_shard.training.state_layout import Packing, as_array, packed_scalars, unpacked
from penzai_shard.training.step_failures import explained, refuse_positional
from penzai_shard.training.train_state import TrainState, from_flat
from penzai_shard.training.train_step import LossFunction, StepProgram
from penzai_shard.training.update_guards import GuardOptions
from penzai_shard.training.update_layout import UpdateLayout


def build_eval_step_fn(
    loss_fn: LossFunction | Callable[..., tuple[Any, Any, Any]],
    *positional: Any,
    jit: bool = True,
    input_kwarg_shardings: Mapping[str, Any] | None = None,
    train_state_shardings: Any = None,
    aux_output_shardings: Any = None,
    accumulate_steps: int = 1,
    batch_axis: str | int = "batch",
    aux_reduction: str | Mapping[str, Any] | None = None,
) -> "EvalStep":
    """Builds the function that evaluates a loss function on a batch.

    It takes what a train step takes, the same loss function and the same train state, and computes
    no gradient. Nothing of the state changes and nothing is donated: values that the model
    assigns to its state variables, and the loss function's new state, are dropped. One
    compilation serves any number of states and batches of one form.

    Args:
        loss_fn: As for ``build_train_step_fn``. ``rng`` is the key that a train step from this
            state would use: the same for every batch, until the state changes. Whatever is to be
            left out in an evaluation, such as dropout, is up to the loss function or the model.
        jit: Whether to compile.
        input_kwarg_shardings: As for ``build_train_step_fn``.
        train_state_shardings: The declared layout of the state, which is refused if it has another.
        aux_output_shardings: As for ``build_train_step_fn``.
        accumulate_steps: Number of microbatches that the batch is evaluated in, one after the
            other.
        batch_axis: As for ``build_train_step_fn``.
        aux_reduction: As for ``build_train_step_fn``.

    Returns:
        ``eval_step(train_state, **inputs) -> (loss, aux)``.

    Raises:
        ShardingError: An argument cannot be read. Calling the step raises it where state, inputs
            or loss function are not as described for ``build_train_step_fn``.

    >>> import jax.numpy as jnp, optax
    >>> def loss_fn(model, rng, state, x):
    ...     loss = jnp.sum((model["w"] - x) ** 2)
    ...     return loss, state, {"largest": jnp.max(x)}
    >>> state = TrainState.initial_state({"w": jnp.zeros(3)}, optax.sgd(0.5), jax.random.key(0))
    >>> loss, aux = build_eval_step_fn(loss_fn)(state, x=jnp.ones(3))
    >>> float(loss), float(aux["largest"]), int(state.step)
    (3.0, 1.0, 0)
    """
    check_loss_function(loss_fn, positional, "build_eval_step_fn")
    check_split(accumulate_steps, batch_axis)
    return EvalStep(
        GradientStep(
            loss_fn,
            accumulate_steps,
            batch_axis,
            AuxReductions.of(aux_reduction),
            GuardOptions(None, False, None, ()),
        ),
        jit=jit,
        declared_state=(
            None if train_state_shardings is None else DeclaredState(train_state_shardings)
        ),
        declared_inputs=DeclaredInputs(
            {} if input_kwarg_shardings is None else input_kwarg_shardings
        ),
        declared_aux=DeclaredAux(aux_output_shardings),
    )


@dataclasses.dataclass(eq=False, repr=False)
class EvalStep(CompiledStep):
    """An evaluation step; made by ``build_eval_step_fn``.

    It keeps the compiled programs last used, one per form of a state, but no state. Several threads
    may call it.
    """

    def __call__(
        self, train_state: TrainState | None = None, /, *positional: Any, **inputs: Any
    ) -> tuple[jax.Array, Any]:
        """Evaluates one batch.

        Args:
            train_state: The state, which stays as it is.
            *positional: Refused: inputs go by keyword.
            **inputs: Inputs of the loss function; trees of arrays.

        Returns:
            The loss and the loss function's auxiliary output.

        Raises:
            ShardingError: State, inputs or loss function are not as promised; see
                ``build_eval_step_fn``.
        """
        flat = flat_of(train_state)
        if positional:
            refuse_positional(positional, "eval_step(state, ")
        leaves = self.checked_inputs(inputs)
        if any(map(is_traced, (*flat.changing, *flat.constant, *leaves))):
            constant = list(map(as_array, flat.constant))
            with auto_context():
                loss, aux = self._computed(flat.form, flat.changing, constant, inputs)
                return loss, self.declared_aux.place(aux, jax.lax.with_sharding_constraint)
        flat, packing = self._prepared(flat, leaves)
        run = self._program(flat.form, packing)
        inputs = self.declared_inputs.placed(inputs)
        try:
            with auto_context():
                loss, aux = run(flat.changing, flat.packed, inputs)
        except (ValueError, TypeError, RuntimeError) as error:
            better = explained(error, flat, inputs)
            if better is None:
                raise
            raise better from error
        return loss, aux

    def _described_call(self, flat: FlatState, packing: Packing) -> tuple[Any, tuple[Any, ...]]:
        return self._program(flat.form, packing), (flat.changing, flat.packed)

    def _prepared_call(self, flat: FlatState, inputs: list[Any]) -> tuple[Any, tuple[Any, ...]]:
        flat, packing = self._prepared(flat, inputs)
        return self._described_call(flat, packing)

    def _prepared(self, flat: FlatState, inputs: list[Any]) -> tuple[FlatState, Packing]:
        """A state as programs take it, and how its constants are packed."""
        program = flat.program
        if (
            isinstance(program, StepProgram)
            and self.declared_state is None
            and not (program.is_free and any(map(is_committed, inputs)))
        ):
            # A train step returned it.
            return flat, program.packing
        leaves, _ = self.placed_state(flat, inputs)
        changing, constant = flat.form.parted(leaves)
        with auto_context():
            packed, packing = packed_scalars(constant)
        return FlatState(flat.form, changing, constant, None, packed), packing

    def _program(self, form: StateForm, packing: Packing) -> Any:
        """The program for a form; JAX compiles it for each layout that it is called with."""
        return self.kept_program((form, packing), lambda: self._built(form, packing))

    def _built(self, form: StateForm, packing: Packing) -> Any:
        def eval_step(changing: list[Any], packed: list[Any], inputs: Any) -> Any:
            loss, aux = self._computed(form, changing, unpacked(packed, packing), inputs)
            self.declared_aux.of(aux)
            return loss, aux

        def eager_eval_step(changing: list[Any], packed: list[Any], inputs: Any) -> Any:
            loss, aux = eval_step(changing, packed, inputs)
            return loss, self.declared_aux.place(aux, jax.device_put)

        if not self.jit:
            return eager_eval_step
        return jax.jit(eval_step, out_shardings=(None, self.declared_aux.tree))

    def _computed(
        self, form: StateForm, changing: list[Any], constant: list[Any], inputs: dict[str, Any]
    ) -> tuple[jax.Array, Any]:
        stored = from_flat(FlatState(form, changing, constant))
        layout = dataclasses.replace(UpdateLayout.unknown(), uneven=uneven_lengths(stored))
        loss, aux = self.computation.evaluation(without_padding(stored), inputs, layout)
        return loss, aux
