"""One step of training as a pure function of trees: loss, gradient, optimizer."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from penzai_shard.errors import ShardingError, require_extra
from penzai_shard.training.loss_contract import check_signature, fit_state, read_result
from penzai_shard.training.microbatches import split_inputs
from penzai_shard.training.model_variables import VariableTable
from penzai_shard.tree_paths import array_path_text

_FIX_LOSS_STATE = (
    "Return a new_state of the form that came in as state, and pass "
    "TrainState.initial_state(..., loss_fn_state=...) one of that form."
)
_FIX_STATE_VAR = "Assign values of the same shape and dtype: variable.value = new.astype(...)."
_FIX_OPT_STATE = "Use an optimizer whose update keeps the form that its init made."


@dataclasses.dataclass(frozen=True)
class GradientStep:
    """The computation of a train step.

    Attributes:
        loss_fn: ``loss_fn(model, rng, state, **inputs) -> (loss, new_state, aux)``.
        accumulate_steps: Number of microbatches that the gradient is averaged over.
        batch_axis: Logical axis that inputs are split along.
    """

    loss_fn: Callable[..., Any]
    accumulate_steps: int
    batch_axis: str

    def __call__(
        self,
        changing: Mapping[str, Any],
        constant: Mapping[str, Any],
        inputs: Mapping[str, Any],
        variables: VariableTable,
        optimizer_def: Any,
    ) -> tuple[dict[str, Any], Any]:
        """Runs one step.

        Args:
            changing: Trees of the sections ``step``, ``trainable``, ``opt_state``,
                ``state_vars`` and ``loss_fn_state``.
            constant: Trees of ``root_rng``, ``frozen`` and ``unbound_model``.
            inputs: Inputs of the loss by keyword.
            variables: The model's variables.
            optimizer_def: The optimizer.

        Returns:
            The new trees of the changing sections, in the same form, and the loss function's
            auxiliary output.

        Raises:
            ShardingError: The loss function broke its contract, or the inputs cannot be split.
        """
        check_signature(self.loss_fn, inputs)
        rng = jax.random.fold_in(constant["root_rng"], changing["step"])

        def gradient(
            rng: jax.Array, state_vars: Any, loss_fn_state: Any, inputs: Mapping[str, Any]
        ) -> tuple[Any, jax.Array, Any, Any, Any]:
            def loss_of(trainable: dict[str, Any]) -> tuple[jax.Array, Any]:
                model, bound = variables.bind_for_loss(
                    constant["unbound_model"], trainable | constant["frozen"], state_vars
                )
                result = self.loss_fn(model=model, rng=rng, state=loss_fn_state, **inputs)
                loss, new_state, aux = read_result(result)
                new_vars = {name: variable.value for name, variable in bound.items()}
                new_vars = fit_state(state_vars, new_vars, "state_vars", _FIX_STATE_VAR)
                new_state = fit_state(loss_fn_state, new_state, "loss_fn_state", _FIX_LOSS_STATE)
                return loss, (loss, new_vars, new_state, aux)

            grads, rest = jax.grad(loss_of, has_aux=True)(changing["trainable"])
            return grads, *rest

        if self.accumulate_steps == 1:
            grads, loss, state_vars, loss_fn_state, aux = gradient(
                rng, changing["state_vars"], changing["loss_fn_state"], inputs
            )
        else:
            grads, loss, state_vars, loss_fn_state, aux = self._accumulate(
                gradient, rng, changing, inputs
            )
        optax = require_extra("optax", "train")
        trainable, opt_state = changing["trainable"], changing["opt_state"]
        extra = {}
        if isinstance(optimizer_def, optax.GradientTransformationExtraArgs):
            # Optimizers that watch the loss ask for it by this name.
            extra["value"] = loss
        updates, new_opt_state = optimizer_def.update(grads, opt_state, trainable, **extra)
        return {
            "step": changing["step"] + 1,
            "trainable": optax.apply_updates(trainable, updates),
            "opt_state": _in_old_dtypes(opt_state, new_opt_state),
            "state_vars": state_vars,
            "loss_fn_state": loss_fn_state,
        }, aux

    def _accumulate(
        self,
        gradient: Callable[..., Any],
        rng: jax.Array,
        changing: Mapping[str, Any],
        inputs: Mapping[str, Any],
    ) -> tuple[Any, jax.Array, Any, Any, Any]:
        """Averages over microbatches, one after the other in one loop."""
        parts = self.accumulate_steps
        split = split_inputs(inputs, parts, self.batch_axis)

        def body(carry: Any, xs: Any) -> Any:
            total, state_vars, loss_fn_state = carry
            index, sliced = xs
            grads, loss, state_vars, loss_fn_state, aux = gradient(
                jax.random.fold_in(rng, index), state_vars, loss_fn_state, split.part(sliced)
            )
            total = jax.tree.map(lambda a, g: a + g.astype(a.dtype), total, grads)
            return (total, state_vars, loss_fn_state), (loss, aux)

        trainable = changing["trainable"]
        # Sums of many small gradients need more digits than half precision has.
        zeros = jax.tree.map(
            lambda p: jnp.zeros(p.shape, jnp.promote_types(p.dtype, jnp.float32)), trainable
        )
        (total, state_vars, loss_fn_state), (losses, auxes) = jax.lax.scan(
            body,
            (zeros, changing["state_vars"], changing["loss_fn_state"]),
            (jnp.arange(parts), split.stacked),
        )
        grads = jax.tree.map(lambda t, p: (t / parts).astype(p.dtype), total, trainable)
        return grads, jnp.mean(losses), state_vars, loss_fn_state, jax.tree.map(_summary, auxes)


def _summary(values: jax.Array) -> jax.Array:
    """Of one auxiliary output: the mean if it is floating, else what the last microbatch gave."""
    return jnp.mean(values, axis=0) if jnp.issubdtype(values.dtype, jnp.inexact) else values[-1]


def _in_old_dtypes(old: Any, new: Any) -> Any:
    """The optimizer's new state in the dtypes that its init chose, as the layout is for these.

    Updates computed in mixed precision can come out wider than the state that they are for.
    """
    old_def: Any = jax.tree.structure(old)
    if old_def != jax.tree.structure(new):
        raise ShardingError(
            "the optimizer's state must keep its form from step to step: "
            f"{old_def} became {jax.tree.structure(new)}. {_FIX_OPT_STATE}"
        )
    flat, treedef = jax.tree_util.tree_flatten_with_path(old)
    paths = [array_path_text(path) for path, _ in flat]
    before = {path: jnp.asarray(leaf) for path, (_, leaf) in zip(paths, flat, strict=True)}
    after = {
        path: _in_dtype_of(before[path], jnp.asarray(leaf))
        for path, leaf in zip(paths, jax.tree.leaves(new), strict=True)
    }
    fitted = fit_state(before, after, "opt_state", _FIX_OPT_STATE)
    return jax.tree.unflatten(treedef, [fitted[path] for path in paths])


def _in_dtype_of(old: jax.Array, new: jax.Array) -> jax.Array:
    both_inexact = all(jnp.issubdtype(array.dtype, jnp.inexact) for array in (old, new))
    return new.astype(old.dtype) if both_inexact else new
