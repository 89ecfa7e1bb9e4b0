"""Computes what a train step does: loss, gradient and update, as a pure function of a state.

Each gradient is brought to the layout of its parameter's moments before the optimizer sees it. XLA
then sums it straight into that layout: fully sharded, a reduce-scatter takes the place of an
all-reduce; under ZeRO-1 each device updates its own part.
"""

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding

from penzai_shard.arrays.structure import Leaf, flatten, leaves_of
from penzai_shard.errors import Problems, ShardingError, require
from penzai_shard.jax_internals.tracing import JaxprEqn
from penzai_shard.programs import inner_programs, open_program, walk
from penzai_shard.training.aux_reductions import reduce_outputs, split_microbatches
from penzai_shard.training.model_parts import STATE
from penzai_shard.training.train_state import TrainState, refuse_statics, strengthen

optax = require("optax", extra="train")

# Scopes of the operations of a step; a gradient's goes on with the path of its parameter.
LOSS, GRADIENT, OPTIMIZER = "loss", "gradient", "optimizer"


@dataclasses.dataclass(frozen=True)
class LossCall:
    """A loss function and how it is called.

    Attributes:
        loss_fn: The loss function.
        accumulate_steps: The number of microbatches.
        batch_axis: The logical axis of the examples; of plain arrays the number of the dimension.
        reductions: How outputs of several microbatches are joined, by path.
    """

    loss_fn: Callable[..., Any]
    accumulate_steps: int
    batch_axis: Any
    reductions: Mapping[str, str]


class Layout(NamedTuple):
    """Where parameters lie, and where their gradients and updates are computed, by path."""

    parameters: dict[str, NamedSharding]
    moments: dict[str, NamedSharding]


NO_LAYOUT = Layout({}, {})


def find_layout(state: TrainState) -> Layout:
    """The layouts of a state's parameters, and of the moments that are split finest."""
    parameters = {
        path: value.sharding
        for path, value in state.trained_arrays.items()
        if isinstance(value.sharding, NamedSharding) and value.sharding.mesh.size > 1
    }
    moments = dict(parameters)
    arrays = jax.tree.leaves(state.opt_arrays)
    for array, statistic in zip(arrays, state.statistics(), strict=True):
        path = statistic.parameter.removeprefix("params/") if statistic else ""
        if path in moments and array.shape == state.trained_arrays[path].shape:
            both = moments[path], array.sharding
            moments[path] = min(both, key=lambda own: math.prod(own.shard_shape(array.shape)))
    return Layout(parameters, moments)


def _lay_out(arrays: Mapping[str, Any], layout: Mapping[str, NamedSharding]) -> dict[str, Any]:
    return {
        path: jax.lax.with_sharding_constraint(array, layout[path]) if path in layout else array
        for path, array in arrays.items()
    }


def evaluate(
    call: LossCall, state: TrainState, inputs: Mapping[str, Any], trained: Any = None
) -> tuple[Any, Any]:
    """The loss of a batch, and what the loss function reports.

    Args:
        call: The loss function.
        state: The state.
        inputs: The inputs of the loss function.
        trained: Other values of the parameters.
    """

    def run(*given: Any) -> Any:
        params = state.trained_arrays if trained is None else trained
        total, (weight, *others) = _call_loss(call, state, params, *given)
        return (total, weight, None), *others

    (loss, weight, _), _, aux = _run_microbatches(call, run, None, state, inputs)
    return loss if weight is None else loss / weight, aux


def update(
    call: LossCall,
    state: TrainState,
    layout: Layout,
    inputs: Mapping[str, Any],
    step_metrics: Sequence[str],
) -> tuple[Any, Any, Any]:
    """What a step replaces in a state, as ``TrainState.after`` takes it, and the outputs.

    Args:
        call: The loss function.
        state: The state.
        layout: Where its parameters and moments lie.
        inputs: The inputs of the loss function.
        step_metrics: What is added to the outputs: ``"loss"``, ``"gradient_norm"``.
    """
    trained, optimizer = state.trained_arrays, state.optimizer_def

    def differentiate(*given: Any) -> Any:
        def find_loss(trained: Any) -> Any:
            return _call_loss(call, state, trained, *given)

        (total, found), gradients = jax.value_and_grad(find_loss, has_aux=True)(trained)
        weight, *others = found
        for path in gradients:
            with jax.named_scope(f"{GRADIENT}/{path}"):
                gradients |= _lay_out({path: gradients[path]}, layout.moments)
        return (total, weight, gradients), *others

    # Sums of many small numbers lose too much below 32 bits.
    zeros = {
        path: jnp.zeros(array.shape, jnp.promote_types(array.dtype, jnp.float32))
        for path, array in (trained.items() if call.accumulate_steps > 1 else ())
    }
    zeros = _lay_out(zeros, layout.moments)
    (loss, weight, gradients), carried, aux = _run_microbatches(
        call, differentiate, zeros, state, inputs
    )
    if weight is not None:
        loss = loss / weight
        gradients = {
            path: (gradient / weight).astype(trained[path].dtype)
            for path, gradient in gradients.items()
        }

    # Line searches of optax look for arguments of these two names.
    def value_fn(params: Any, grad_fn: Any = None, obj_fn: Any = None) -> Any:
        return evaluate(call, state, inputs, _lay_out(params, layout.parameters))[0]

    with jax.named_scope(OPTIMIZER):
        params = _lay_out(trained, layout.moments)
        extra: dict[str, Any] = {}
        if isinstance(optimizer, optax.GradientTransformationExtraArgs):
            functions = {"value_fn": value_fn, "grad_fn": jax.grad(value_fn), "obj_fn": value_fn}
            extra = {"value": loss, "grad": gradients, **functions}
        updates, opt_arrays = optimizer.update(gradients, state.opt_arrays, params, **extra)
        params = optax.apply_updates(params, updates)
    fix = "Use an optimizer that keeps it."
    params = _keep_form("params", trained, params, fix, rounds=True)
    opt_arrays = _keep_form("opt_state", state.opt_arrays, opt_arrays, fix, rounds=True)
    if step_metrics:
        if not isinstance(aux, dict | None):
            problems = Problems("step_metrics are added to a dictionary:")
            problems.add("aux", f"it is a {type(aux).__name__}", "Return {'aux': aux}.")
            problems.raise_if_any(ShardingError)
        found = {"loss": loss, "gradient_norm": optax.tree.norm(gradients)}
        aux = (aux or {}) | {name: found[name] for name in step_metrics}
    return (params, opt_arrays, *carried), state.step + 1, aux


# Microbatches


def _run_microbatches(
    call: LossCall,
    function: Callable[[Any, Any, Any], Any],
    zeros: Any,
    state: TrainState,
    inputs: Mapping[str, Any],
) -> Any:
    """Runs a function of what is carried, a key and inputs on one microbatch after the other.

    Args:
        call: The loss function.
        function: Gives a loss, its weight and gradients; what is carried on; and outputs.
        zeros: Gradients of nothing.
        state: The state.
        inputs: The inputs of the whole batch.

    Returns:
        The same as ``function``, with sums of losses, weights and gradients.
    """
    rng = jax.random.fold_in(state.root_rng, state.step)
    carried, count = (state.state_arrays, state.loss_fn_state), call.accumulate_steps
    if count == 1:
        return function(carried, rng, inputs)
    leaves, structure = flatten(inputs)
    dims = {
        i: dim for i, leaf in enumerate(leaves) if (dim := _examples_dim(call, leaf)) is not None
    }
    _check_division(call, [(leaves[i].path, leaves[i].shape[dim]) for i, dim in dims.items()])
    parts = {i: split_microbatches(leaves[i].value, dim, count) for i, dim in dims.items()}
    described: Any = None

    def run_one(sums: Any, item: Any) -> Any:
        nonlocal described
        (totals, carried), (number, parts) = sums, item
        given = structure.fill_alike([parts.get(i, leaf.value) for i, leaf in enumerate(leaves)])
        found, carried, aux = function(carried, jax.random.fold_in(rng, number), given)
        loss, weight, gradients = found
        found = loss, 1.0 if weight is None else weight, gradients
        totals = jax.tree.map(lambda x, own: x + jnp.astype(own, x.dtype), totals, found)
        described = flatten(aux)
        return (totals, carried), [leaf.value for leaf in described[0]]

    zero = jnp.zeros((), jnp.float32)
    first = (zero, zero, zeros), carried
    (sums, carried), stacked = jax.lax.scan(run_one, first, (jnp.arange(count), parts))
    outputs = [
        dataclasses.replace(leaf, value=value)
        for leaf, value in zip(described[0], stacked, strict=True)
    ]
    output_dims = [_examples_dim(call, leaf) for leaf in outputs]
    joined = reduce_outputs(call.reductions, outputs, output_dims)
    return sums, carried, described[1].fill_alike(joined)


def _examples_dim(call: LossCall, leaf: Leaf) -> int | None:
    """The dimension of an array along which its examples lie."""
    axis = call.batch_axis
    if isinstance(axis, int):
        return axis if leaf.names is None and len(leaf.shape) > axis else None
    return leaf.names.index(axis) if leaf.names and axis in leaf.names else None


def _check_division(call: LossCall, sizes: Sequence[tuple[str, int]]) -> None:
    count = call.accumulate_steps
    problems = Problems(f"a batch cannot be split into {count} microbatches:")
    for path, size in sizes:
        if size % count:
            fix = f"Write accumulate_steps={math.gcd(size, count)}."
            problems.add(path, f"it has {size} examples", fix, "indivisible")
    if not sizes:
        what = f"no input has the axis {call.batch_axis!r}"
        problems.add("", what, "Write batch_axis='batch'; of plain arrays batch_axis=0.")
    problems.raise_if_any(ShardingError)


# The loss function


def _call_loss(
    call: LossCall, state: TrainState, trained: Any, carried: Any, rng: Any, inputs: Any
) -> tuple[Any, tuple[Any, Any, Any]]:
    """Calls the loss function once.

    Returns:
        The loss, or the sum of which it is the mean; then the weight of that sum, or None; state
        variables and the state of the loss function; and the outputs.
    """
    state_arrays, loss_fn_state = carried
    others = state.fixed_arrays | state_arrays

    def run(trained: Any) -> tuple[Any, list[Any], list[Any]]:
        model = state.template.bind_for_loss(trained | others)
        leaves, structure = flatten(model)
        with jax.named_scope(LOSS):
            result = call.loss_fn(model=model, rng=rng, state=loss_fn_state, **inputs)
        return result, [leaf.value for leaf in leaves], structure.read(model)

    result, before, after = run(trained)
    _refuse_assigned(state, before, after, run, trained)
    loss, weight, new_state, aux = _read_result(result)
    values = dict(zip(state.template.structure.paths, after, strict=True))
    found = {path: values[path] for path in state_arrays}
    carried = (
        _keep_form("state_vars", state_arrays, found, "Assign an array like the one before."),
        _keep_form("loss_fn_state", loss_fn_state, new_state, "Return it as it was given."),
    )
    return loss, (weight, carried, aux)


def _refuse_assigned(
    state: TrainState,
    before: Sequence[Any],
    after: Sequence[Any],
    run: Callable[[Any], Any],
    trained: Any,
) -> None:
    """Refuses a loss that assigns what the optimizer updates, or what is constant."""
    paths, kinds = state.template.structure.paths, state.template.kinds
    changed = [
        i for i, path in enumerate(paths) if kinds[path] != STATE and after[i] is not before[i]
    ]
    if not changed:
        return
    # Transformations of NNX give each variable a new tracer: the program tells which are the same.
    program = jax.make_jaxpr(lambda trained: [run(trained)[2][i] for i in changed])(trained)
    results = walk(program, jax.tree.leaves(trained), _follow)
    problems = Problems("a loss function may change state variables only:")
    for index, result in zip(changed, results, strict=True):
        if result is not before[index]:
            what = "the loss function assigns it, which the step would lose"
            problems.add(paths[index], what, "Return the new value among the outputs.")
    problems.raise_if_any(ShardingError)


def _follow(equation: JaxprEqn, operands: list[Any]) -> list[Any]:
    """The operands that calls hand through; None for what is computed."""
    inner = list(inner_programs(equation))
    if len(inner) == 1 and len(open_program(inner[0])[0].invars) == len(operands):
        return walk(inner[0], operands, _follow)
    return [None] * len(equation.outvars)


def _read_result(result: Any) -> tuple[Any, Any, Any, Any]:
    """Loss, weight, new state and outputs of what a loss function returned."""
    contract = "a loss function gives (loss, new_state, aux):"
    problems = Problems(contract)
    if not isinstance(result, tuple | list) or len(result) != 3:
        what = f"it returned a {type(result).__name__} and no three values"
        problems.add("", what, "Return (loss, state, {}).")
        problems.raise_if_any(ShardingError)
    loss, new_state, aux = result
    is_sum = isinstance(loss, tuple | list) and len(loss) == 2
    scalars = [*loss] if is_sum else [loss]
    for index, value in enumerate(scalars):
        leaves = leaves_of(value)
        kind = jnp.number if index else jnp.floating
        if [leaf.shape for leaf in leaves] != [()] or not jnp.issubdtype(leaves[0].dtype, kind):
            found = [f"{leaf.dtype}{list(leaf.shape)}" for leaf in leaves] or type(value).__name__
            what = f"its {'count' if index else 'loss'} is {found} and no {kind.__name__} scalar"
            problems.add("", what, "Return a scalar, for instance the mean.")
        else:
            scalars[index] = jnp.asarray(leaves[0].value)
    _, structure = flatten({"aux": aux, "new_state": new_state})
    if structure.variables:
        what = "there are variables in what it returned"
        problems.add("", what, "Return the .value of each.")
    problems.raise_if_any(ShardingError)
    refuse_statics(structure.statics, contract)
    return scalars[0], scalars[1] if is_sum else None, new_state, aux


def _keep_form(field: str, before: Any, after: Any, fix: str, *, rounds: bool = False) -> Any:
    """A new value in the form of the old one, so that the next step is the same program.

    Args:
        field: Which field of the state it is.
        before: The value of the state that the step got.
        after: The value of the state that follows.
        fix: What to do about another form.
        rounds: Whether floats of another precision are rounded to what they were.
    """
    leaves, structure = flatten({field: before})
    old, new = ({leaf.path: leaf for leaf in of} for of in (leaves, leaves_of({field: after})))

    def describe(leaf: Leaf | None) -> str:
        if leaf is None:
            return "not there"
        is_rounded = rounds and jnp.issubdtype(leaf.dtype, jnp.inexact)
        return f"{'float' if is_rounded else leaf.dtype}{list(leaf.shape)} {leaf.names or ''}"

    problems = Problems("arrays of a train state must keep their form:")
    for path in {**old, **new}:
        was, became = describe(old.get(path)), describe(new.get(path))
        if was != became:
            problems.add(path, f"it was {was.strip()}, and became {became.strip()}", fix)
    problems.raise_if_any(ShardingError)
    values = [strengthen(new[path].value) for path in old]
    pairs = zip(values, leaves, strict=True)
    rounded = [x if x.dtype == leaf.dtype else x.astype(leaf.dtype) for x, leaf in pairs]
    return structure.fill_alike(rounded)[field]
