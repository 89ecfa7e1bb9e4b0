"""One step of training as a pure function of trees: loss, gradient, optimizer."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from penzai_shard.training.aux_reductions import AuxReductions
from penzai_shard.training.loss_contract import (
    check_signature,
    fit_state,
    read_result,
)
from penzai_shard.training.microbatches import Microbatches, split_inputs
from penzai_shard.training.optimizer_calls import update_parameters
from penzai_shard.training.train_state import TrainState

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
    """

    loss_fn: Callable[..., Any]
    accumulate_steps: int
    batch_axis: str
    aux_reductions: AuxReductions

    def __call__(self, state: TrainState, inputs: Mapping[str, Any]) -> tuple[TrainState, Any]:
        """Runs one step.

        Args:
            state: The state to start from.
            inputs: Inputs of the loss by keyword.

        Returns:
            The next state, in the same form, and the loss function's auxiliary output.

        Raises:
            ShardingError: The loss function or the optimizer broke its contract, or the inputs
                cannot be split.
        """
        check_signature(self.loss_fn, inputs)
        parts = self.accumulate_steps
        split = None if parts == 1 else split_inputs(inputs, parts, self.batch_axis)
        rng = jax.random.fold_in(state.root_rng, state.step)
        batch = _Batch(self.loss_fn, state, rng, inputs, split, parts)
        names = state.variables.trainable_names
        trainable = {name: value for name, value in state.params.items() if name in names}
        grads, loss, carried, auxes = batch.gradient(trainable)
        new_trainable, new_opt_state = update_parameters(
            state.optimizer_def,
            grads,
            state.opt_state,
            trainable,
            value=loss,
            value_fn=batch.value,
            grad_fn=lambda params: batch.gradient(params)[0],
        )
        new_state = dataclasses.replace(
            state,
            step=state.step + 1,
            params=state.params
            | fit_state(trainable, new_trainable, "params", _FIX_PARAMS, of_optimizer=True),
            opt_state=fit_state(
                state.opt_state, new_opt_state, "opt_state", _FIX_OPT_STATE, of_optimizer=True
            ),
            state_vars=carried.state_vars,
            loss_fn_state=carried.loss_fn_state,
        )
        return new_state, self.aux_reductions.reduce(auxes, parts)


class _Carried(NamedTuple):
    """What passes from one evaluation of the loss to the next."""

    state_vars: Any
    loss_fn_state: Any


class _Gradient(NamedTuple):
    grads: Any
    loss: jax.Array
    carried: _Carried
    auxes: Any


@dataclasses.dataclass(frozen=True)
class _Batch:
    """The loss of one batch as a function of the trainable parameters alone.

    Attributes:
        loss_fn: The loss function.
        state: The state that the step started from.
        rng: The random key of the step.
        inputs: The inputs.
        split: The inputs in microbatches; None if the batch is evaluated whole.
        parts: The number of microbatches.
    """

    loss_fn: Callable[..., Any]
    state: TrainState
    rng: jax.Array
    inputs: Mapping[str, Any]
    split: Microbatches | None
    parts: int

    @property
    def carried(self) -> _Carried:
        """What the first evaluation starts from."""
        return _Carried(self.state.state_vars, self.state.loss_fn_state)

    def value(self, trainable: Any) -> jax.Array:
        """The loss; of microbatches, their mean."""
        if self.split is None:
            return self._loss(trainable, self.rng, self.carried, self.inputs)[0]

        def body(carried: _Carried, xs: Any) -> Any:
            loss, (_, carried, _) = self._loss(trainable, *self._part(carried, xs))
            return carried, loss

        return jnp.mean(jax.lax.scan(body, self.carried, self._parts())[1])

    def gradient(self, trainable: Any) -> _Gradient:
        """Gradient, loss, new state, and auxiliary outputs, along a new first dimension; of
        microbatches the gradient and the loss are averaged, one after the other in one loop."""
        gradient_of = jax.grad(self._loss, has_aux=True)
        if self.split is None:
            grads, (loss, carried, aux) = gradient_of(
                trainable, self.rng, self.carried, self.inputs
            )
            return _Gradient(grads, loss, carried, jax.tree.map(lambda x: x[None], aux))

        def body(carry: Any, xs: Any) -> Any:
            total, carried = carry
            grads, (loss, carried, aux) = gradient_of(trainable, *self._part(carried, xs))
            total = jax.tree.map(lambda a, g: a + g.astype(a.dtype), total, grads)
            return (total, carried), (loss, aux)

        # Sums of many small gradients need more digits than half precision has.
        zeros = jax.tree.map(
            lambda p: jnp.zeros(p.shape, jnp.promote_types(p.dtype, jnp.float32)), trainable
        )
        (total, carried), (losses, auxes) = jax.lax.scan(body, (zeros, self.carried), self._parts())
        grads = jax.tree.map(lambda t, p: (t / self.parts).astype(p.dtype), total, trainable)
        return _Gradient(grads, jnp.mean(losses), carried, auxes)

    def _parts(self) -> Any:
        assert self.split is not None
        return jnp.arange(self.parts), self.split.stacked

    def _part(self, carried: _Carried, xs: Any) -> tuple[jax.Array, _Carried, Any]:
        """Random key, state and inputs of one microbatch."""
        assert self.split is not None
        index, sliced = xs
        return jax.random.fold_in(self.rng, index), carried, self.split.part(sliced)

    def _loss(
        self, trainable: dict[str, Any], rng: jax.Array, carried: _Carried, inputs: Any
    ) -> tuple[jax.Array, tuple[jax.Array, _Carried, Any]]:
        """One evaluation of the loss function."""
        model, bound = self.state.variables.bind_for_loss(
            self.state.unbound_model, self.state.params | trainable, carried.state_vars
        )
        result = self.loss_fn(model=model, rng=rng, state=carried.loss_fn_state, **inputs)
        loss, new_state, aux = read_result(result)
        new_vars = {name: variable.value for name, variable in bound.items()}
        new = _Carried(
            fit_state(carried.state_vars, new_vars, "state_vars", _FIX_STATE_VAR),
            fit_state(carried.loss_fn_state, new_state, "loss_fn_state", _FIX_LOSS_STATE),
        )
        return loss, (loss, new, jax.tree.map(jnp.asarray, aux))
