"""Splits batches for a loss function, runs it on the parts, and joins what it reports of them.

Whether the value of a whole batch is the sum, the mean, or the last of these cannot be seen from an
array. Floats are averaged, arrays with the batch axis are concatenated; of all else it is said, by
path, and so it is of plain arrays that may have examples.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from penzai_shard.arrays.structure import Leaf, Named, Structure, flatten
from penzai_shard.errors import Problems, ShardingError, check_arguments
from penzai_shard.layers.manual import fold_rng_over_axis, vary_over
from penzai_shard.training.train_state import TrainState

_CONCATENATE = "concatenate"
# Functions of values along a new first dimension.
_REDUCTIONS: dict[str, Callable[..., Any]] = {
    **{"mean": jnp.mean, "sum": jnp.sum, "max": jnp.max, "min": jnp.min},
    "last": lambda values, axis: values[-1],
}
_WORDS = ", ".join(map(repr, [*_REDUCTIONS, _CONCATENATE]))


@dataclasses.dataclass(frozen=True)
class LossCall:
    """A loss function and how it is called.

    Attributes:
        loss_fn: The loss function.
        accumulate_steps: The number of microbatches.
        batch_axis: The logical axis of the examples; of plain arrays the number of the dimension.
        reductions: How outputs of several microbatches or devices are joined, by path.
        manual_axes: The mesh axes over which each device computes the loss of its own examples.
        wrap: What the loss function gets in place of the model, as a function of it.
        gather: Gives parameters as the loss function computes with them, by path; None leaves that
            to the compiler.
    """

    loss_fn: Callable[..., Any]
    accumulate_steps: int
    batch_axis: Any
    reductions: Mapping[str, str]
    manual_axes: tuple[str, ...]
    wrap: Callable[[Any], Any] = lambda model: model
    gather: Callable[[Mapping[str, Named]], Any] | None = None


def read_reductions(declared: Any) -> dict[str, str]:
    """Reads ``aux_reduction``: a word for all outputs, words by path, or None.

    Raises:
        RuleTypeError: It is something else.

    >>> read_reductions({"loss": "mean", "accuracy": {"count": "sum"}})
    {'accuracy/count': 'sum', 'loss': 'mean'}
    """
    leaves, structure = flatten(declared)
    words = dict([*structure.statics, *((leaf.path, leaf.value) for leaf in leaves)])
    known, fix = (*_REDUCTIONS, _CONCATENATE), f"one of {_WORDS}"
    checks = {
        path: (word, isinstance(word, str) and word in known, fix) for path, word in words.items()
    }
    check_arguments("aux_reduction", checks)
    return words


# The examples of a batch


def _examples_dim(call: LossCall, leaf: Leaf) -> int | None:
    """The dimension of an array along which its examples lie."""
    axis = call.batch_axis
    if isinstance(axis, int):
        return axis if leaf.names is None and len(leaf.shape) > axis else None
    return leaf.names.index(axis) if leaf.names and axis in leaf.names else None


def find_examples(call: LossCall, leaves: Sequence[Leaf], count: int) -> dict[int, int]:
    """The dimension of each input that has its examples, by its number.

    Raises:
        ShardingError: No input has the axis, or the examples do not divide into ``count`` parts.
    """
    problems = Problems(f"a batch cannot be split into {count} parts:")
    dims = {i: dim for i, x in enumerate(leaves) if (dim := _examples_dim(call, x)) is not None}
    for index, dim in dims.items():
        leaf, fix = leaves[index], f"Give a multiple of {count}."
        if leaf.shape[dim] % count:
            problems.add(leaf.path, f"it has {leaf.shape[dim]} examples", fix, "indivisible")
    if not dims:
        fix = "Write batch_axis='batch'; of plain arrays batch_axis=0."
        problems.add("", f"no input has the axis {call.batch_axis!r}", fix)
    problems.raise_if_any(ShardingError)
    return dims


def split_microbatches(value: Any, dim: int, count: int) -> Any:
    """Parts of a dimension along a new first one: every ``count``-th example is of one part.

    So a device whose examples are split further has its own of each part, and sends none.
    """
    shape = value.shape
    parts = value.reshape(*shape[:dim], shape[dim] // count, count, *shape[dim + 1 :])
    return jnp.moveaxis(parts, dim + 1, 0)


def join_examples(parts: Any, dim: int, place: int) -> Any:
    """The examples of several microbatches or devices along their own dimension.

    Args:
        parts: The examples, those of one after the other along a new first dimension.
        dim: The dimension of the examples of one.
        place: 0 if a part has neighbours, as a device has; 1 if it has every ``count``-th example.

    >>> join_examples(split_microbatches(jnp.arange(6), 0, 3), 0, 1).tolist()
    [0, 1, 2, 3, 4, 5]
    """
    moved = jnp.moveaxis(parts, 0, dim + place)
    return moved.reshape(*moved.shape[:dim], -1, *moved.shape[dim + 2 :])


# Outputs


def _find_word(reductions: Mapping[str, str], path: str) -> str:
    """The word of the longest declared path that leads to an output, if one does."""
    leading = [own for own in reductions if not own or f"{path}/".startswith(f"{own}/")]
    return reductions[max(leading, key=len)] if leading else ""


def reduce_outputs(
    call: LossCall, form: tuple[Sequence[Leaf], Structure], stacks: Sequence[Any], place: int
) -> Any:
    """Joins each output of several microbatches or devices.

    Args:
        call: The loss function.
        form: The outputs of one, and their structure.
        stacks: Those of all, along a new first dimension.
        place: As for ``join_examples``.

    Raises:
        ShardingError: A word is missing, does not fit, or is for no output; all are in it.
    """
    problems = Problems("outputs of several microbatches or devices cannot be joined:")
    leaves, structure = form
    paths = [leaf.path for leaf in leaves]
    for path, word in call.reductions.items():
        if path and not any(_find_word({path: word}, own) for own in paths):
            fix = f"Outputs are: {paths[:5]}."
            problems.add(path, "aux_reduction names it, and there is no output of this path", fix)
    values = []
    for leaf, stack in zip(leaves, stacks, strict=True):
        dim = _examples_dim(call, leaf)
        default = "mean" if jnp.issubdtype(leaf.dtype, jnp.inexact) else ""
        if dim is not None:
            # Without names nobody knows whether these are examples.
            default = "" if leaf.names is None else _CONCATENATE
        word = _find_word(call.reductions, leaf.path) or default
        if not word:
            what = f"nothing says how its {leaf.dtype}{list(leaf.shape)} become one"
            fix = f"Write aux_reduction={{{leaf.path!r}: 'sum'}}, or another of {_WORDS}."
            problems.add(leaf.path, what, fix)
        elif word != _CONCATENATE:
            values.append(_REDUCTIONS[word](stack, axis=0))
        elif dim is None:
            problems.add(leaf.path, "it has no dimension of examples to join", "Write 'last'.")
        else:
            values.append(join_examples(stack, dim, place))
    problems.raise_if_any(ShardingError)
    return structure.fill_alike(values)


# One after the other


def run_microbatches(
    call: LossCall, function: Callable[..., Any], zeros: Any, state: TrainState, inputs: Any
) -> Any:
    """Runs a function of a carry, a key and inputs on one microbatch after the other.

    Args:
        call: The loss function.
        function: Gives a loss, its weight and gradients; the next carry, of state variables and the
            state of the loss function; and outputs.
        zeros: Gradients of nothing.
        state: The state.
        inputs: The inputs of the whole batch.

    Returns:
        The same as ``function``, with sums of losses, weights and gradients.
    """
    rng = jax.random.fold_in(state.root_rng, state.step)
    if call.manual_axes:
        rng = fold_rng_over_axis(rng, call.manual_axes)
    carry, count = (state.state_arrays, state.loss_fn_state), call.accumulate_steps
    if count == 1:
        return function(carry, rng, inputs)
    leaves, structure = flatten(inputs)
    dims = find_examples(call, leaves, count)
    parts = {i: split_microbatches(leaves[i].value, dim, count) for i, dim in dims.items()}
    aux_form: Any = None

    def run_one(sums: Any, item: Any) -> Any:
        nonlocal aux_form
        (totals, carry), (number, parts) = sums, item
        given = structure.fill_alike([parts.get(i, leaf.value) for i, leaf in enumerate(leaves)])
        (loss, weight, grads), carry, aux = function(carry, jax.random.fold_in(rng, number), given)
        found = loss, 1.0 if weight is None else weight, grads
        totals = jax.tree.map(lambda x, own: x + jnp.astype(own, x.dtype), totals, found)
        aux_form = flatten(aux)
        return (totals, carry), [leaf.value for leaf in aux_form[0]]

    zero = jnp.zeros((), jnp.float32)
    sums = jax.tree.map(lambda x: vary_over(x, call.manual_axes), (zero, zero, zeros))
    (sums, carry), stacks = jax.lax.scan(run_one, (sums, carry), (jnp.arange(count), parts))
    return sums, carry, reduce_outputs(call, aux_form, stacks, place=1)
