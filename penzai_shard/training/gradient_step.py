"""One step of training as a pure function of trees: loss, gradient, optimizer."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from penzai_shard.model_variables import BoundModel
from penzai_shard.training.assigned_parameters import refuse_assigned
from penzai_shard.training.aux_reductions import AuxReductions
from penzai_shard.training.device_part import WholeBatch
from penzai_shard.training.loss_contract import (
    Loss,
    check_signature,
    fit_state,
    note_named_arrays,
    read_result,
)
from penzai_shard.training.manual_axes import ManualAxes
from penzai_shard.training.manual_batch import ManualBatch
from penzai_shard.training.microbatches import Microbatches, split_inputs
from penzai_shard.training.optimizer_calls import update_parameters
from penzai_shard.training.padded_sums import computed_rightly, summed_in_equal_parts
from penzai_shard.training.train_state import TrainState
from penzai_shard.training.update_guards import GuardOptions
from penzai_shard.training.update_layout import UpdateLayout

# What profiles and compiled programs call the operations of a step that are of no layer.
LOSS_SCOPE = "loss"
OPTIMIZER_SCOPE = "optimizer"
# What stands in front of a parameter's name where its gradient is brought to its layout.
GRADIENT_SCOPE = "gradient"

_FIX_LOSS_STATE = (
    "Return a new_state of the form that came in as state, and pass "
    "TrainState.initial_state(..., loss_fn_state=...) one of that form."
)
_FIX_STATE_VAR = "Assign values of the same shape and dtype: variable.value = new.astype(...)."
_FIX_OPT_STATE = "Use an optimizer whose update keeps the form that its init made."
_FIX_PARAMS = "Use an optimizer whose updates have the form of the parameters."


@dataclasses.dataclass(frozen=True)
class GradientStep:
    """The computation of a train step.

    Attributes:
        loss_fn: ``loss_fn(model, rng, state, **inputs) -> (loss, new_state, aux)``.
        accumulate_steps: Number of microbatches that the gradient is averaged over.
        batch_axis: Logical axis that inputs are split along.
        aux_reductions: How auxiliary outputs of several microbatches become one.
        guards: What is done between the gradient and the update.
        manual: The mesh axes along which each device computes the loss of its own examples.
    """

    loss_fn: Callable[..., Any]
    accumulate_steps: int
    batch_axis: str | int
    aux_reductions: AuxReductions
    guards: GuardOptions
    manual: ManualAxes | None = None

    def __call__(
        self, state: TrainState, inputs: Mapping[str, Any], layout: UpdateLayout
    ) -> tuple[TrainState, Any]:
        """Runs one step.

        Args:
            state: The state to start from.
            inputs: Inputs of the loss by keyword.
            layout: How gradients and updates are laid out.

        Returns:
            The next state, in the same form, and the loss function's auxiliary output.

        Raises:
            ShardingError: The loss function or the optimizer broke its contract, or the inputs
                cannot be split.
        """
        check_signature(self.loss_fn, inputs)
        rng = jax.random.fold_in(state.root_rng, state.step)
        trainable = _trainable(state)
        guard = self.guards.for_state(state.guards, state.unbound_model, trainable)
        batch: Batch | ManualBatch
        if self.manual is None:
            batch = self.batch(state, rng, inputs, layout, guard.scale)
        else:
            batch = ManualBatch.of(self.manual, self.batch, state, rng, inputs, layout, guard.scale)
        grads, loss, carried, auxes = batch.gradient(trainable)
        carried_in = Carried(state.state_vars, state.loss_fn_state)
        old = _Changing(trainable, state.opt_state, carried_in)

        def update(grads: Any) -> _Changing:
            new_trainable, new_opt_state = update_parameters(
                state.optimizer_def,
                grads,
                state.opt_state,
                layout.for_update(trainable),
                value=loss,
                value_fn=lambda params: batch.value(layout.for_loss(params)),
                grad_fn=lambda params: batch.gradient(layout.for_loss(params))[0],
            )
            return _Changing(
                fit_state(trainable, new_trainable, "params", _FIX_PARAMS, of_optimizer=True),
                fit_state(
                    state.opt_state, new_opt_state, "opt_state", _FIX_OPT_STATE, of_optimizer=True
                ),
                carried,
            )

        with jax.named_scope(OPTIMIZER_SCOPE):
            new, guards, metrics = guard.guarded_update(grads, loss, old, update)
        new_state = dataclasses.replace(
            state,
            step=state.step + 1,
            params=state.params | new.trainable,
            opt_state=new.opt_state,
            state_vars=new.carried.state_vars,
            loss_fn_state=new.carried.loss_fn_state,
            guards=guards,
        )
        return new_state, guard.with_metrics(self._reduced(auxes), metrics)

    def evaluation(
        self, state: TrainState, inputs: Mapping[str, Any], layout: UpdateLayout
    ) -> tuple[jax.Array, Any]:
        """The loss and the auxiliary output of a state and inputs, without a step.

        Raises:
            ShardingError: As for a step.
        """
        check_signature(self.loss_fn, inputs)
        rng = jax.random.fold_in(state.root_rng, state.step)
        batch = self.batch(state, rng, inputs, layout, None)
        loss, auxes = batch.evaluation(_trainable(state))
        return loss, self._reduced(auxes)

    def _reduced(self, auxes: Any) -> Any:
        """The auxiliary outputs of all microbatches as one."""
        of = "the devices"
        if self.manual is None:
            of = f"{self.accumulate_steps} microbatches"
        return self.aux_reductions.reduce(auxes, self.batch_axis, of)

    def batch(
        self,
        state: TrainState,
        rng: jax.Array,
        inputs: Mapping[str, Any],
        layout: UpdateLayout,
        scale: Any,
        device: WholeBatch | None = None,
    ) -> "Batch":
        """A batch, or one device's part of it."""
        microbatches = split_inputs(inputs, self.accumulate_steps, self.batch_axis)
        device = device or WholeBatch()
        return Batch(self.loss_fn, state, rng, microbatches, layout, scale, device)


def _trainable(state: TrainState) -> dict[str, Any]:
    names = state.variables.trainable_names
    return {name: value for name, value in state.params.items() if name in names}


class Carried(NamedTuple):
    """What passes from one evaluation of the loss to the next."""

    state_vars: Any
    loss_fn_state: Any


class _Changing(NamedTuple):
    """All of a state that a step may change, but its number and its guards."""

    trainable: dict[str, Any]
    opt_state: Any
    carried: Carried


@dataclasses.dataclass(frozen=True)
class Batch:
    """The loss of one batch as a function of the trainable parameters alone.

    Attributes:
        loss_fn: The loss function.
        state: The state that the step started from.
        rng: The random key of the step.
        microbatches: The inputs.
        layout: How gradients are laid out.
        scale: What the loss is multiplied by before it is differentiated, or None.
        device: What this is a part of, if it is that of one device.
    """

    loss_fn: Callable[..., Any]
    state: TrainState
    rng: jax.Array
    microbatches: Microbatches
    layout: UpdateLayout
    scale: Any
    device: WholeBatch

    @property
    def carried(self) -> Carried:
        """What the first evaluation starts from."""
        return Carried(self.state.state_vars, self.state.loss_fn_state)

    def value(self, trainable: Any) -> jax.Array:
        """The loss; of microbatches, their mean."""
        return self.evaluation(trainable)[0]

    def evaluation(self, trainable: Any) -> tuple[jax.Array, Any]:
        """Loss, and auxiliary outputs along a new first dimension."""
        loss_of = computed_rightly(self._loss, *self.layout.uneven)

        def evaluate(carried: Carried, index: Any, inputs: Any) -> Any:
            _, (loss, carried, aux) = loss_of(trainable, carried, index, inputs)
            return carried, (loss, aux)

        losses, auxes = self.microbatches.in_turn(evaluate, self.carried)[1]
        return losses.total.sum() / self._divisor(losses), auxes

    def gradient(self, trainable: Any) -> tuple[Any, jax.Array, Carried, Any]:
        """Gradient, loss, what is carried on, and auxiliary outputs along a new first dimension.

        Of microbatches the gradient and the loss are averaged, weighted by counts if the loss has
        any. Each gradient is brought to its
        layout at once, so that no device holds more of it than it keeps.
        """
        parts = self.microbatches.count
        gradient_of = summed_in_equal_parts(
            jax.grad(self._scaled_loss, has_aux=True),
            self.layout.update,
            GRADIENT_SCOPE,
            *self.layout.uneven,
        )
        total = None
        if parts > 1:
            # Sums of many small gradients need more digits than half precision has.
            total = self.layout.for_update(
                jax.tree.map(
                    lambda p: jnp.zeros_like(p, jnp.promote_types(p.dtype, jnp.float32)),
                    trainable,
                )
            )

        def evaluate(carry: Any, index: Any, inputs: Any) -> Any:
            total, carried = carry
            grads, (loss, carried, aux) = gradient_of(trainable, carried, index, inputs)
            with jax.named_scope(GRADIENT_SCOPE):
                grads = self.layout.for_update(grads)
            if total is not None:
                grads = jax.tree.map(lambda a, g: a + g.astype(a.dtype), total, grads)
            return (grads, carried), (loss, aux)

        (grads, carried), (losses, auxes) = self.microbatches.in_turn(
            evaluate, (total, self.carried)
        )
        divisor = self._divisor(losses)
        if self.scale is not None:
            # In float32, where what the scale has saved is not lost again.
            grads = jax.tree.map(
                lambda g: (
                    g.astype(jnp.promote_types(g.dtype, jnp.float32)) / (self.scale * divisor)
                ),
                grads,
            )
        elif parts > 1:
            grads = jax.tree.map(lambda g, p: (g / divisor).astype(p.dtype), grads, trainable)
        return grads, losses.total.sum() / divisor, carried, auxes

    def _divisor(self, losses: Loss) -> Any:
        """What the sum of the microbatches' losses is divided by."""
        if losses.weight is None:
            return self.microbatches.count
        return _divisor_of(losses.total.sum(), self.device.mean(losses.weight.sum()))

    def _scaled_loss(self, *args: Any) -> tuple[jax.Array, Any]:
        """The loss to be differentiated, and what `_loss` returns with it."""
        loss, others = self._loss(*args)
        if self.scale is not None:
            loss = loss.astype(jnp.promote_types(loss.dtype, jnp.float32)) * self.scale
        return loss, others

    def _loss(
        self, trainable: dict[str, Any], carried: Carried, index: Any, inputs: Any
    ) -> tuple[jax.Array, tuple[Loss, Carried, Any]]:
        """One evaluation of the loss function; ``index`` is that of a microbatch, if there are."""
        rng = self.rng if index is None else jax.random.fold_in(self.rng, index)
        params = self.state.params | self.device.whole(trainable)

        def evaluated(params: dict[str, Any]) -> tuple[Any, BoundModel]:
            bound = self.state.variables.bind_for_loss(
                self.state.unbound_model, params, carried.state_vars
            )
            arguments = {"model": bound.model, "rng": rng, "state": carried.loss_fn_state}
            try:
                with jax.named_scope(LOSS_SCOPE):
                    return self.loss_fn(**arguments, **inputs), bound
            except Exception as error:
                note_named_arrays(error, self.state.variables, params)
                raise

        result, bound = evaluated(params)
        loss, new_state, aux = read_result(result)
        new_vars = bound.state_values(carried.state_vars)
        if bound.replaced_parameters(params):
            refuse_assigned(params, lambda params: evaluated(params)[1].replaced_parameters(params))
        new = Carried(
            fit_state(carried.state_vars, new_vars, "state_vars", _FIX_STATE_VAR),
            fit_state(carried.loss_fn_state, new_state, "loss_fn_state", _FIX_LOSS_STATE),
        )
        new = self.device.agreed(carried, new)
        if self.microbatches.count == 1 and loss.weight is not None:
            divisor = _divisor_of(loss.total, self.device.mean(loss.weight))
            loss = Loss(loss.total / divisor, None)
        return self.device.share(loss.total), (loss, new, jax.tree.map(jnp.asarray, aux))


def _divisor_of(total: jax.Array, count: jax.Array) -> jax.Array:
    """What a sum is divided by for a mean; the mean of nothing, as of a batch of padding, is 0."""
    return jnp.where((count == 0) & (total == 0), jnp.ones_like(count), count)
