"""Computes what a train step does: loss, gradient and update, as a pure function of a state.

Each gradient is brought to the layout of its parameter's moments before the optimizer sees it. XLA
then sums it straight into that layout: fully sharded, a reduce-scatter takes the place of an
all-reduce; under ZeRO-1 each device updates its own part.
"""

import dataclasses
import inspect
import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding

from penzai_shard.arrays.structure import Named, flatten, leaves_of
from penzai_shard.errors import Problem, Problems, ShardingError, require
from penzai_shard.layers.manual import vary_over, varying_axes
from penzai_shard.programs import GRADIENT, LOSS, OPTIMIZER
from penzai_shard.training.manual_step import run_per_device
from penzai_shard.training.microbatches import LossCall, run_microbatches
from penzai_shard.training.model_parts import Kind
from penzai_shard.training.train_state import TrainState, keep_form, read_arrays

optax = require("optax", extra="train")


# Written below the error of a loss function that takes the arrays of a dictionary for plain ones.
_NAMED = "The loss function got named arrays. Write plain_arrays=True, and it gets plain ones."


class Shardings(NamedTuple):
    """Where parameters lie, and where their gradients and updates are computed, by path."""

    parameters: dict[str, NamedSharding]
    moments: dict[str, NamedSharding]


def find_shardings(state: TrainState) -> Shardings:
    """The shardings of a state's parameters, and of the moments that are split finest."""
    lies = {path: value.sharding for path, value in state.trained_arrays.items()}
    parameters = {path: own for path, own in lies.items() if isinstance(own, NamedSharding)}
    moments = dict(parameters)
    for leaf in leaves_of(state):
        path = leaf.statistic.parameter.removeprefix("params/") if leaf.statistic else None
        if path in moments and leaf.shape == state.trained_arrays[path].shape:
            both = moments[path], leaf.value.sharding
            moments[path] = min(both, key=lambda own: math.prod(own.shard_shape(leaf.shape)))
    return Shardings(parameters, moments)


def _pin(gradients: dict[str, Any], shardings: Mapping[str, NamedSharding]) -> dict[str, Any]:
    """Gradients in some layout, each in a scope of its own."""
    for path in gradients:
        with jax.named_scope(f"{GRADIENT}/{path}"):
            gradients |= _constrain({path: gradients[path]}, shardings)
    return gradients


def _constrain(arrays: dict[str, Any], shardings: Mapping[str, NamedSharding]) -> Any:
    if not shardings:
        return arrays
    return jax.lax.with_sharding_constraint(arrays, {path: shardings[path] for path in arrays})


def run_loss(
    call: LossCall, state: TrainState, shardings: Shardings, inputs: Any, with_grads: bool = False
) -> tuple[Any, Any, Any, Any]:
    """Runs a loss function on a batch.

    Args:
        call: The loss function.
        state: The state.
        shardings: Where its parameters and moments lie.
        inputs: The inputs of the loss function.
        with_grads: Whether to find gradients.

    Returns:
        The loss; its gradients by path; state variables and the state of the loss function; and the
        outputs.
    """
    # Inside of jax.shard_map each device has its own gradients.
    inside, outside = (shardings.moments, {}) if not call.manual_axes else ({}, shardings.moments)

    def run(state: TrainState, inputs: Any, gather: Any = dict) -> Any:
        wanted = state.trained_arrays if with_grads else {}

        def find_loss(wanted: Any, *given: Any) -> Any:
            total, found = _call_loss(call, state, gather(state.trained_arrays | wanted), *given)
            # Of a loss that is the same on all devices each has its own.
            return vary_over(total, call.manual_axes), found

        def run_one(*given: Any) -> Any:
            (total, found), gradients = jax.value_and_grad(find_loss, has_aux=True)(wanted, *given)
            weight, *others = found
            return (total, weight, _pin(gradients, inside)), *others

        # Sums of many small numbers lose too much below 32 bits.
        zeros = {
            path: jnp.zeros(array.shape, jnp.promote_types(array.dtype, jnp.float32))
            for path, array in wanted.items()
            if call.accumulate_steps > 1
        }
        return run_microbatches(call, run_one, _pin(zeros, inside), state, inputs)

    if call.manual_axes:
        given = call, state, shardings.parameters, inputs, run, with_grads
        sums, carry, aux = run_per_device(*given)
    else:
        sums, carry, aux = run(state, inputs)
    loss, weight, gradients = sums
    gradients = _pin(gradients, outside)
    if weight is not None:
        loss = loss / weight
        for path, gradient in gradients.items():
            gradients[path] = (gradient / weight).astype(state.trained_arrays[path].dtype)
    return loss, gradients, carry, aux


def update(
    call: LossCall, state: TrainState, shardings: Shardings, inputs: Any, metrics: Sequence[str]
) -> tuple[Any, Any, Any]:
    """What ``TrainState.with_fields`` takes for the state that follows, and the outputs.

    Args:
        call: The loss function.
        state: The state.
        shardings: Where its parameters and moments lie.
        inputs: The inputs of the loss function.
        metrics: What is added to the outputs where it is not there: ``"loss"``,
            ``"gradient_norm"``.
    """
    trained, optimizer = state.trained_arrays, state.optimizer_def
    loss, gradients, carry, aux = run_loss(call, state, shardings, inputs, with_grads=True)

    # Line searches of optax look for arguments of these two names.
    def value_fn(params: Any, grad_fn: Any = None, obj_fn: Any = None) -> Any:
        params = _constrain(params, shardings.parameters)
        there = dataclasses.replace(state, trained_arrays=params)
        return run_loss(call, there, shardings, inputs)[0]

    with jax.named_scope(OPTIMIZER):
        params = _constrain(trained, shardings.moments)
        functions = {"value_fn": value_fn, "grad_fn": jax.grad(value_fn), "obj_fn": value_fn}
        extra = {"value": loss, "grad": gradients, **functions}
        # Optimizers of optax take all of these, some, or none.
        asked = inspect.signature(optimizer.update).parameters
        if all(parameter.kind != parameter.VAR_KEYWORD for parameter in asked.values()):
            extra = {name: value for name, value in extra.items() if name in asked}
        updates, opt_arrays = optimizer.update(gradients, state.opt_arrays, params, **extra)
        params = optax.apply_updates(params, updates)
    before = {"params": trained, "opt_state": state.opt_arrays}
    after = {"params": params, "opt_state": opt_arrays}
    after = keep_form(before, leaves_of(after), "Use an optimizer that keeps it.")
    if metrics:
        if not isinstance(aux, dict | None):
            problem = Problem("aux", f"it is a {type(aux).__name__}", "Return {'aux': aux}.")
            raise ShardingError("step_metrics, as the loss, go to a dictionary:", [problem])
        values = {"loss": loss, "gradient_norm": optax.tree.norm(gradients)}
        # What the loss function reports under these names stays.
        aux = {name: values[name] for name in metrics} | (aux or {})
    return (after["params"], after["opt_state"], *carry), state.step + 1, aux


# The loss function


def _call_loss(
    call: LossCall, state: TrainState, trained: Any, carry: Any, rng: Any, inputs: Any
) -> tuple[Any, tuple[Any, Any, Any]]:
    """Calls the loss function once.

    Returns:
        The loss, or the sum of which it is the mean; then the weight of that sum, or None; state
        variables and the state of the loss function; and the outputs.
    """
    state_arrays, loss_fn_state = carry
    template = state.template
    arrays = trained | state.fixed_arrays
    if call.gather is not None:
        names, kinds = template.names, template.kinds
        parameters = [path for path in arrays if kinds[path] in (Kind.TRAINED, Kind.FROZEN)]
        arrays |= call.gather({path: Named(arrays[path], names[path]) for path in parameters})
    model = template.bind_for_loss(arrays | state_arrays)
    leaves, structure = flatten(model)
    with jax.named_scope(LOSS):
        try:
            result = call.loss_fn(model=call.wrap(model), rng=rng, state=loss_fn_state, **inputs)
        except Exception as error:
            if isinstance(model, Mapping) and any(leaf.names for leaf in leaves):
                error.add_note(_NAMED)
            raise
    values = dict(zip(template.structure.paths, structure.read(model), strict=True))

    problems = Problems("a loss function may change only state variables, alike on all devices:")
    for leaf, (path, value) in zip(leaves, values.items(), strict=True):
        # Transformations of NNX give each variable a new tracer, whether it is assigned or not.
        if template.kinds[path] != Kind.STATE and leaf.variable is None and value is not leaf.value:
            what = "the loss function assigns it, which the step would lose"
            problems.add(path, what, "Return the new value among the outputs.")
    loss, weight, new_state, aux = _read_result(result)
    state_vars = {path: values[path] for path in state_arrays}
    before = {"state_vars": state_arrays, "loss_fn_state": loss_fn_state}
    after = {"state_vars": state_vars, "loss_fn_state": new_state}
    # As far as JAX keeps account of it.
    for leaf in leaves_of(after):
        if axes := tuple(sorted(varying_axes(leaf.value).intersection(call.manual_axes))):
            what = f"it differs along {axes}, as each device sees examples of its own"
            problems.add(leaf.path, what, f"Average it: jax.lax.pmean(value, {axes}).")
    problems.raise_if_any(ShardingError)
    after = keep_form(before, leaves_of(after), "Give it like the one before.")
    return loss, (weight, (after["state_vars"], after["loss_fn_state"]), aux)


def _read_result(result: Any) -> tuple[Any, Any, Any, Any]:
    """Loss, weight, new state and outputs of what a loss function returned."""
    contract = "a loss function gives (loss, new_state, aux):"
    if not isinstance(result, tuple | list) or len(result) != 3:
        length = len(result) if isinstance(result, tuple | list) else 1
        what = f"it returned {length} value{'s' * (length != 1)} and not three"
        raise ShardingError(contract, [Problem("", what, "Return (loss, state, {}).")])
    loss, new_state, aux = result
    read_arrays({"aux": aux, "new_state": new_state}, "A step")
    parts = loss if isinstance(loss, tuple | list) else [loss]
    leaves = leaves_of(parts)
    forms = [f"{leaf.dtype}{list(leaf.shape)}" for leaf in leaves]
    is_right = len(parts) == len(leaves) <= 2 and not any(leaf.shape for leaf in leaves)
    if not (is_right and leaves and jnp.issubdtype(leaves[0].dtype, jnp.floating)):
        what = f"the loss is {forms or type(loss).__name__}, and no float or sum and count"
        raise ShardingError(contract, [Problem("", what, "Return the mean, or the pair.")])
    first, *count = [jnp.asarray(leaf.value) for leaf in leaves]
    return first, count[0] if count else None, new_state, aux
