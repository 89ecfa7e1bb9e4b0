"""Train steps that compile once and spend no Python time per array.

A step flattens its state once, when the state was made or changed by hand. From then on it passes
a list of arrays to one compiled program and wraps the list that comes back.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import jax
from jax.sharding import Sharding

from penzai_shard.array_kinds import is_traced
from penzai_shard.errors import ShardingError
from penzai_shard.meshes import auto_context
from penzai_shard.padded_arrays import padded_as, uneven_lengths, without_padding
from penzai_shard.training.aux_reductions import AuxReductions
from penzai_shard.training.compiled_step import (
    CompiledStep,
    check_loss_function,
    flat_of,
    is_committed,
)
from penzai_shard.training.declared_layout import DeclaredAux, DeclaredInputs, DeclaredState
from penzai_shard.training.flat_state import FIELDS, FlatState, StateForm
from penzai_shard.training.gradient_step import GradientStep
from penzai_shard.training.loss_scaling import DynamicLossScaling
from penzai_shard.training.manual_axes import ManualAxes
from penzai_shard.training.microbatches import check_split
from penzai_shard.training.state_layout import (
    Packing,
    as_array,
    packed_scalars,
    unpacked,
    with_strong_type,
    without_shared_buffers,
)
from penzai_shard.training.step_failures import explained, refuse_positional
from penzai_shard.training.train_state import TrainState, from_flat, peek
from penzai_shard.training.update_guards import GuardOptions
from penzai_shard.training.update_layout import UpdateLayout


class LossFunction(Protocol):
    """What ``build_train_step_fn`` takes as a loss; see there."""

    def __call__(
        self, *, model: Any, rng: jax.Array, state: Any, **inputs: Any
    ) -> tuple[Any, Any, Any]:
        """Returns ``(loss, new_state, aux)``."""


def build_train_step_fn(
    loss_fn: LossFunction | Callable[..., tuple[Any, Any, Any]],
    *positional: Any,
    jit: bool = True,
    donate_params_and_state: bool = False,
    input_kwarg_shardings: Mapping[str, Any] | None = None,
    train_state_shardings: Any = None,
    aux_output_shardings: Any = None,
    accumulate_steps: int = 1,
    batch_axis: str | int = "batch",
    aux_reduction: str | Mapping[str, Any] | None = None,
    loss_scaling: str | float | DynamicLossScaling | None = "auto",
    skip_nonfinite: bool = False,
    clip_global_norm: float | None = None,
    step_metrics: str | Sequence[str] = (),
    manual_axes: str | Sequence[str] | None = None,
) -> "TrainStep":
    """Builds the function that does one step of training.

    One compilation serves any number of steps: the new state is always laid out as declared,
    or, if nothing is declared, exactly as the state that went in.

    Args:
        loss_fn: ``loss_fn(model, rng, state, **inputs) -> (loss, new_state, aux)``, called with
            keywords. ``model`` is bound, its parameters frozen and its state variables mutable;
            ``rng`` is the run's key folded with the step's number, ``state`` the loss function's
            own state. The loss is a floating scalar; or, where it is a mean over what differs in
            number from example to example, such as tokens that are not padding, the pair
            ``(sum, count)``, so that microbatches and devices weigh in with their counts; 0 where
            both are 0.
            ``new_state`` is of the form of ``state``, and ``aux`` any tree of arrays.
        jit: Whether to compile. If not, everything runs eagerly, to be debugged; but for the loss
            under ``manual_axes`` if these are not all mesh axes.
        donate_params_and_state: Whether the new state may take the memory of the old one, which
            is then unusable, and so is any model that shares its arrays. Frozen parameters,
            constants and the random key are never donated.
        input_kwarg_shardings: For some inputs by name, a sharding or a tree of shardings.
            Arrays that JAX is free to place are placed so; arrays that have another
            layout are an error.
        train_state_shardings: Declared layout of the state, as `train_state_sharding` makes it,
            or one sharding for everything. Leaves that are None are not declared. It may be of
            a state with another optimizer of the same form.
        aux_output_shardings: The layout of the auxiliary outputs: one sharding for all, or a tree
            of shardings that the outputs extend; None, also in the tree, leaves it to JAX.
        accumulate_steps: Number of microbatches. Above 1, every named input that has the batch
            axis is split (strided, so that each device keeps its examples), and gradients and
            losses are averaged; state passes from one microbatch to the next. All in one
            compiled loop.
        batch_axis: The logical axis to split inputs along; for inputs that are plain arrays the
            number of the dimension, ``batch_axis=0``.
        aux_reduction: How the auxiliary outputs of the microbatches become one: ``"mean"``,
            ``"sum"``, ``"max"``, ``"min"`` or ``"last"``, for all of them or by key or path, such
            as ``{"loss": "mean", "accuracy": "sum"}``; ``"ratio"`` for a pair ``(sum, count)``,
            whose sums become one quotient; ``"concatenate"`` for a named array with the batch
            axis, whose examples are put back in the order of the batch. Outputs that are not
            named are put back so if they have that axis; other floating ones are averaged, and
            the rest is refused.
        loss_scaling: Scales the loss, so that small gradients are not lost in float16, and the
            gradient back. ``"auto"``: dynamically, if the model computes in float16 or trains
            float16 parameters, and else not at all. ``"dynamic"`` or a `DynamicLossScaling`:
            smaller after an overflow, whose step is skipped, and larger after many steps
            without. A number: that scale. None: not at all.
        skip_nonfinite: Whether a step whose loss, gradient or update is not finite changes nothing
            but the step's number, so that the next one has another random key and batch, and
            the counts in ``state.guards``. State variables and the loss function's state too
            stay as they were. Unlike ``optax.apply_if_finite``, which guards the optimizer
            alone, and gives up after some steps. ``TrainState.initial_state`` takes it too.
        clip_global_norm: The largest norm of the gradient over all parameters, devices and
            microbatches; a longer one is shortened before the optimizer sees it. As
            ``optax.clip_by_global_norm`` in the optimizer, which works too.
        step_metrics: What the step adds to the auxiliary outputs, a dictionary then: of
            ``"loss"``; ``"gradient_norm"``, before clipping; ``"skipped"``, of this step;
            ``"skipped_steps"`` and ``"skipped_in_a_row"``, this one included; and
            ``"loss_scale"``, of this step.
        manual_axes: Mesh axes along which every device computes the loss of its own examples, as
            guides to ``jax.shard_map`` write it, instead of leaving it to the compiler. The loss
            function then sees a device's part of every named input that has the batch axis (the
            first of several mesh axes is the major one; inputs that are placed otherwise are
            moved), and all of everything else; parameters that are split over these mesh axes are
            gathered for it. Gradients and losses are averaged over the devices, so the loss must
            be a mean over the batch: a sum is averaged as well. Auxiliary outputs of devices
            become one as those of microbatches do, device by device; those with the batch axis
            are put together along it. ``rng`` is folded with the device's position. A state that
            would differ between the devices is refused. Other mesh axes are left to the compiler.

    Returns:
        ``step(train_state, **inputs) -> (train_state, aux)``.

    Raises:
        ShardingError: Donation was asked for without compilation, or an argument cannot be
            read. Calling the step raises it where state, inputs or loss function are not as
            described here.

    >>> import jax.numpy as jnp, optax
    >>> def loss_fn(model, rng, state, x):
    ...     loss = jnp.sum((model["w"] - x) ** 2)
    ...     return loss, state, {"loss": loss}
    >>> step = build_train_step_fn(loss_fn)
    >>> state = TrainState.initial_state({"w": jnp.zeros(3)}, optax.sgd(0.5), jax.random.key(0))
    >>> state, aux = step(state, x=jnp.ones(3))
    >>> float(aux["loss"]), state.params["w"].tolist()
    (3.0, [1.0, 1.0, 1.0])
    """
    check_loss_function(loss_fn, positional, "build_train_step_fn")
    if donate_params_and_state and not jit:
        raise ShardingError(
            "donate_params_and_state=True needs compilation. Pass jit=True, or do not donate."
        )
    check_split(accumulate_steps, batch_axis)
    reductions = AuxReductions.of(aux_reduction)
    return TrainStep(
        GradientStep(
            loss_fn,
            accumulate_steps,
            batch_axis,
            reductions,
            GuardOptions.read(loss_scaling, skip_nonfinite, clip_global_norm, step_metrics),
            ManualAxes.of(manual_axes, batch_axis, accumulate_steps, reductions),
        ),
        jit=jit,
        donate=donate_params_and_state,
        declared_state=(
            None if train_state_shardings is None else DeclaredState(train_state_shardings)
        ),
        declared_inputs=DeclaredInputs(
            {} if input_kwarg_shardings is None else input_kwarg_shardings
        ),
        declared_aux=DeclaredAux(aux_output_shardings),
    )


@dataclasses.dataclass(eq=False, repr=False)
class TrainStep(CompiledStep):
    """A train step; made by ``build_train_step_fn``.

    It keeps the compiled programs last used, one per form and layout of a state, but no state.
    Several threads may call it.

    Attributes:
        donate: Whether the new state may take the memory of the old one.
    """

    donate: bool

    def __call__(
        self, train_state: TrainState | None = None, /, *positional: Any, **inputs: Any
    ) -> tuple[TrainState, Any]:
        """Does one step.

        Args:
            train_state: The state to start from. Donated if the step was built so.
            *positional: Refused: inputs go by keyword.
            **inputs: Inputs of the loss function; trees of arrays.

        Returns:
            The next state and the loss function's auxiliary output.

        Raises:
            ShardingError: State, inputs or loss function are not as promised; see
                ``build_train_step_fn``.
        """
        flat = flat_of(train_state)
        if positional:
            refuse_positional(positional)
        leaves = self.checked_inputs(inputs)
        program = flat.program
        # A state that this step returned fits the program that made it, without another look. But
        # one that JAX was free to place follows the first inputs that are committed to a place.
        if (
            not isinstance(program, StepProgram)
            or program.owner is not self
            or (program.is_free and any(map(is_committed, leaves)))
        ):
            if any(map(is_traced, (*flat.changing, *flat.constant, *leaves))):
                return self._inline(flat, inputs)
            flat, program = self._prepared(flat, leaves)
        inputs = self.declared_inputs.placed(inputs)
        try:
            with auto_context():
                changing, aux = program.run(*_state_arguments(flat), inputs)
        except (ValueError, TypeError, RuntimeError) as error:
            # JAX names what it refuses by positions in the program, and this by paths.
            better = explained(error, flat, inputs)
            if better is None:
                raise
            raise better from error
        return from_flat(FlatState(flat.form, changing, flat.constant, program, flat.packed)), aux

    def _described_call(self, flat: FlatState, packing: Packing) -> tuple[Any, tuple[Any, ...]]:
        shardings = [getattr(leaf, "sharding", None) for leaf in flat.changing]
        return self._program(flat.form, shardings, packing).run, _state_arguments(flat)

    def _prepared_call(self, flat: FlatState, inputs: list[Any]) -> tuple[Any, tuple[Any, ...]]:
        flat, program = self._prepared(flat, inputs)
        return program.run, _state_arguments(flat)

    def _prepared(self, flat: FlatState, inputs: list[Any]) -> tuple[FlatState, "StepProgram"]:
        """A state that did not come from this step, as its programs take it, and its program."""
        form = flat.form
        leaves, is_free = self.placed_state(flat, inputs)
        changing, constant = form.parted(leaves)
        if self.donate:
            # The step's number, which comes first, is not donated.
            changing[1:] = without_shared_buffers(changing[1:], [changing[0], *constant])
        with auto_context():
            packed, packing = packed_scalars(constant)
        shardings = None if is_free else [leaf.sharding for leaf in changing]
        program = self._program(form, shardings, packing)
        return FlatState(form, changing, constant, program, packed), program

    def _program(
        self, form: StateForm, shardings: list[Sharding | None] | None, packing: Packing
    ) -> "StepProgram":
        """The program for a form and a layout; None is that of a state JAX may place."""
        if self.declared_state is not None and shardings is not None:
            declared, _ = form.parted(self.declared_state.of(form))
            shardings = [
                own if wanted is None else wanted
                for own, wanted in zip(shardings, declared, strict=True)
            ]
        if not form.optimizer.is_current():
            # Something that the optimizer reads was changed, so that it is no longer what the
            # form says. Its program is not shared.
            return self._built(form, shardings, packing)
        key = (form, None if shardings is None else tuple(shardings), packing)
        return self.kept_program(key, lambda: self._built(form, shardings, packing))

    def _built(
        self, form: StateForm, shardings: list[Sharding | None] | None, packing: Packing
    ) -> "StepProgram":
        """A new program; JAX compiles it when it is first run."""

        def train_step(step: Any, rest: list[Any], packed: list[Any], inputs: Any) -> Any:
            new, aux = self._computed(
                form, [step, *rest], unpacked(packed, packing), inputs, shardings
            )
            # Checked while tracing, when the outputs are first known.
            self.declared_aux.of(aux)
            return new, aux

        def eager_train_step(step: Any, rest: list[Any], packed: list[Any], inputs: Any) -> Any:
            new, aux = train_step(step, rest, packed, inputs)
            if shardings is not None:
                new = [jax.device_put(x, s) for x, s in zip(new, shardings, strict=True)]
            return new, self.declared_aux.place(aux, jax.device_put)

        if not self.jit:
            return StepProgram(self, shardings is None, packing, eager_train_step)
        train_step.__qualname__ = "train_step"  # As JAX names it in messages.
        run = jax.jit(
            train_step,
            # Not the step's number: a message about a donated state still says it.
            donate_argnames=("rest",) if self.donate else (),
            out_shardings=(shardings, self.declared_aux.tree),
        )
        return StepProgram(self, shardings is None, packing, run)

    def _inline(self, flat: FlatState, inputs: dict[str, Any]) -> tuple[TrainState, Any]:
        """The step as part of a surrounding trace, which owns layout and compilation."""
        changing = [with_strong_type(leaf) for leaf in flat.changing]
        constant = [as_array(leaf) for leaf in flat.constant]
        declared = None
        if self.declared_state is not None:
            declared, _ = flat.form.parted(self.declared_state.of(flat.form))
        with auto_context():
            new, aux = self._computed(flat.form, changing, constant, inputs, declared)
            if declared is not None:
                new = [
                    leaf if wanted is None else jax.lax.with_sharding_constraint(leaf, wanted)
                    for leaf, wanted in zip(new, declared, strict=True)
                ]
            aux = self.declared_aux.place(aux, jax.lax.with_sharding_constraint)
        return from_flat(FlatState(flat.form, new, constant)), aux

    def _computed(
        self,
        form: StateForm,
        changing: list[Any],
        constant: list[Any],
        inputs: dict[str, Any],
        shardings: list[Sharding | None] | None,
    ) -> tuple[list[Any], Any]:
        """One step on flat lists: the new changing leaves, and the auxiliary output."""
        stored = from_flat(FlatState(form, changing, constant))
        # Padding is taken off here and put back below: all between knows true lengths alone.
        state = without_padding(stored)
        layout = UpdateLayout.of(state, form, shardings)
        layout = dataclasses.replace(layout, uneven=uneven_lengths(stored))
        state, aux = self.computation(state, inputs, layout)
        leaves = [
            leaf
            for name, treedef in zip(FIELDS, form.treedefs, strict=True)
            for leaf in treedef.flatten_up_to(padded_as(peek(state, name), peek(stored, name)))
        ]
        return form.parted(leaves)[0], aux


def _state_arguments(flat: FlatState) -> tuple[Any, ...]:
    """What of a state a program takes, before the inputs."""
    return flat.changing[0], flat.changing[1:], flat.packed


@dataclasses.dataclass(frozen=True)
class StepProgram:
    """The step for one form and one layout of a state.

    Attributes:
        owner: The step that it belongs to.
        is_free: Whether JAX may place the state.
        packing: How it takes the arrays that a step only reads.
        run: Takes the step's number, the other changing leaves, the packed constants and the
            inputs; returns the new changing leaves and the auxiliary output.
    """

    owner: TrainStep
    is_free: bool
    packing: Packing
    run: Any
