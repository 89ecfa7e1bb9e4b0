"""What a loss function must take and give, checked while its step is traced."""

import inspect
import textwrap
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from penzai import pz

from penzai_shard.array_kinds import is_array_like
from penzai_shard.errors import ShardingError, raise_all
from penzai_shard.model_variables import VariableTable
from penzai_shard.named_nodes import is_named_node, node_data, node_names
from penzai_shard.rule_kinds import dimension_texts
from penzai_shard.training.state_layout import with_strong_type
from penzai_shard.tree_paths import join_paths, paths_and_leaves

RESERVED = ("model", "rng", "state")
CONTRACT = "loss_fn(model, rng, state, **inputs) -> (loss, new_state, aux)"
_FIX_AUX = "Leave it out of the auxiliary outputs; of a variable return its .value."
_FIX_STATE = "Carry arrays in the state, and keep other things where the loss function is defined."
_GIVEN_PLAIN = "The loss function was given a model of plain arrays"


class Loss(NamedTuple):
    """The loss of some examples.

    Attributes:
        total: The loss; or, if there is a weight, the sum of which it is the mean.
        weight: How many things the sum is over, or what they weigh together; None for a loss
            that is a mean already.
    """

    total: jax.Array
    weight: jax.Array | None


def not_arrays(tree: Any, what: str, fix: str) -> list[str]:
    """One line for each leaf of a tree that cannot go through a compiled program.

    Args:
        tree: The tree.
        what: Name of the tree for messages.
        fix: What to do about such a leaf.

    >>> not_arrays({"x": 1.0, "tag": "a"}, "input", "Drop it.")
    ["input/tag: is the str 'a', not an array. Drop it."]
    """
    return [
        f"{join_paths(what, path)}: is {_value_text(leaf)}, not an array. {fix}"
        for path, leaf in paths_and_leaves(tree)
        if not is_array_like(leaf)
    ]


def _value_text(value: Any) -> str:
    text = repr(value)
    kind = f"the {type(value).__name__}" if len(text) <= 40 else f"a {type(value).__name__}"
    return f"{kind} {text}" if len(text) <= 40 else kind


def check_signature(loss_fn: Callable[..., Any], inputs: Mapping[str, Any]) -> None:
    """Checks that a loss function can be called with these inputs.

    Args:
        loss_fn: The loss function.
        inputs: Inputs of the step by keyword.

    Raises:
        ShardingError: It cannot; the message shows its signature.

    >>> check_signature(lambda model, rng, state, x: None, {"x": 1})
    """
    try:
        signature = inspect.signature(loss_fn)
    except (TypeError, ValueError):
        return
    try:
        signature.bind(**dict.fromkeys(RESERVED), **inputs)
    except TypeError as error:
        given = ", ".join([*RESERVED, *inputs])
        raise ShardingError(
            f"the loss function cannot be called with the keywords {given}: {error}. "
            f"Its signature is {signature}; it must be {CONTRACT}, with one keyword per input "
            "of step(train_state, **inputs)."
        ) from error


def note_named_arrays(
    error: Exception, variables: VariableTable, params: Mapping[str, Any]
) -> None:
    """Adds to an error of a loss function that its model has named arrays, if it was given such.

    What is written for plain arrays, as for the state dictionary of another library, fails on
    arrays that ``name_axes`` named, with messages that do not say so.

    Args:
        error: What the loss function raised.
        variables: What the model's variables were.
        params: Their values by name.
    """
    bare = {
        entry.name: params[entry.name]
        for entry in variables.parameters
        if entry.template is None and not entry.computes_plain
    }
    named = {
        name: dict(array.named_shape)
        for name, array in bare.items()
        if pz.nx.is_namedarray(array) and array.named_shape
    }
    is_given_plain = any(n.startswith(_GIVEN_PLAIN) for n in getattr(error, "__notes__", ()))
    if not named or is_given_plain or isinstance(error, ShardingError):
        return
    name, sizes = next(iter(named.items()))
    error.add_note(
        f"The loss function was given arrays with logical axis names, such as {name!r} "
        f"{sizes}. If it computes with plain arrays, say so where the state is "
        "made: plain_arrays=True, in Layout.build, TrainState.initial_state, "
        "StatefulTrainer.build or choose_layout."
    )


def note_plain_arrays(error: Exception, inputs: Mapping[str, Any]) -> None:
    """Adds to an error of a loss function that its model had plain arrays, and what its inputs had.

    Args:
        error: What the loss function raised.
        inputs: Its inputs by name.
    """
    named = [name for name, value in inputs.items() if is_named_node(value)]
    texts = []
    for name, value in inputs.items():
        data = node_data(value)
        shape = tuple(getattr(data, "shape", ()))
        names = f" {node_names(value)}" if name in named else ""
        texts.append(f"{name} {shape}{names}" if is_array_like(data) else name)
    fix = f" Inputs with logical axis names stay so: unwrap {', '.join(named)}." if named else ""
    error.add_note(f"{_GIVEN_PLAIN}, and inputs: {', '.join(texts)}.{fix}")


def read_result(result: Any) -> tuple[Loss, Any, Any]:
    """Takes the result of a loss function apart.

    Args:
        result: What it returned.

    Returns:
        The loss, of scalar arrays without names, the new state, and the auxiliary output.

    Raises:
        ShardingError: It is not a triple, the loss is not a floating scalar or a pair of a sum
            and a count, or the rest is not made of arrays.

    >>> read_result((pz.nx.wrap(2.0), None, {}))[1:]
    (None, {})
    >>> read_result(((6.0, 4), None, {}))[0].weight
    Array(4, dtype=int32, weak_type=True)
    """
    if not isinstance(result, tuple) or len(result) != 3:
        got = f"a {type(result).__name__}"
        if isinstance(result, tuple):
            got = f"{len(result)} values"
        elif is_array_like(result):
            got = f"one array of shape {np.shape(result)}"
        raise ShardingError(
            f"the loss function returned {got}; it must be {CONTRACT}. "
            "Return (loss, state, {}) if there is nothing else to report."
        )
    loss, state, aux = result
    problems = [
        *not_arrays(aux, "aux", _FIX_AUX),
        *not_arrays(state, "new_state", _FIX_STATE),
    ]
    raise_all(ShardingError, "the loss function returned something that is not an array:", problems)
    if isinstance(loss, tuple | list) and len(loss) == 2 and all(map(_is_any_array, loss)):
        count = _scalar(loss[1], "the count of the loss", jnp.number, "weights.sum()")
        return Loss(_scalar(loss[0], "the sum of the loss"), count), state, aux
    return Loss(_scalar(loss, "the loss"), None), state, aux


def _is_any_array(value: Any) -> bool:
    return is_array_like(value) or is_named_node(value)


def _scalar(
    value: Any, what: str, kind: Any = jnp.floating, named: str = "loss.untag({}).mean()"
) -> jax.Array:
    """A part of the loss as a scalar array without names.

    Args:
        value: The part.
        what: What to call it in messages.
        kind: Its kind of dtype.
        named: How to make a scalar of it.
    """
    axes = [(n, size) for n, size in zip(*_axes_of(value), strict=True) if n is not None]
    if axes:
        texts = ", ".join(dimension_texts(*zip(*axes, strict=True)))
        fix = f"Return its {'mean' if kind is jnp.floating else 'sum'}"
        if pz.nx.is_namedarray(value):
            fix += ": " + named.format(", ".join(repr(name) for name, _ in axes))
        raise ShardingError(f"{what} has logical axes ({texts}); it must be a scalar. {fix}.")
    value = node_data(value)
    if not is_array_like(value):
        raise ShardingError(
            f"the loss is a {type(value).__name__}, not an array; it must be a floating scalar. "
            "Return (loss, state, aux) in this order; the loss may be a pair (sum, count) too."
        )
    if np.shape(value) != () or not jnp.issubdtype(jnp.result_type(value), kind):
        wanted, fix = "floating scalar", "Return its mean: jnp.mean(loss)."
        if kind is not jnp.floating:
            wanted, fix = "scalar number", "Return their sum: jnp.sum(weights)."
        raise ShardingError(
            f"{what} is of shape {np.shape(value)} and dtype {jnp.result_type(value)}; "
            f"it must be a {wanted}. {fix}"
        )
    return jnp.asarray(value)


def _axes_of(value: Any) -> tuple[tuple[Any, ...], tuple[int, ...]]:
    """Names and sizes of a named array's dimensions; nothing of anything else."""
    names = node_names(value) or ()
    return names, np.shape(node_data(value)) if names else ()


def fit_state(old: Any, new: Any, what: str, fix: str, of_optimizer: bool = False) -> Any:
    """A new value of a carried state in the very form of the old one.

    Named arrays get the old order of their axes; everything else must agree already, since the
    next step is to be the same program.

    Args:
        old: The value that the step started with.
        new: The value that it ended with.
        what: Name of the state for messages.
        fix: What to do if they do not agree.
        of_optimizer: Whether an optimizer made the value. In its named arrays may be statistics
            whose dimensions are not those of the names, so that only the data counts; and what
            it computed in mixed precision may be wider than what it is for, and is rounded.

    Returns:
        The new value, with strong types.

    Raises:
        ShardingError: Structure, shape or dtype changed; all offenders are listed.

    >>> fit_state({"w": jnp.ones(2)}, {"w": jnp.ones(3)}, "params", "Keep it.")
    Traceback (most recent call last):
    penzai_shard.errors.ShardingError: params must keep its form from step to step:
      params/w: was float32 of shape (2,), became float32 of shape (3,). Keep it.
    """
    _refuse_other_form(old, new, what, fix)
    is_leaf = None if of_optimizer else pz.nx.is_namedarray
    before_by_path = paths_and_leaves(old, is_leaf)
    problems = []
    fitted = []
    for (path, before), after in zip(
        before_by_path, jax.tree.leaves(new, is_leaf=is_leaf), strict=True
    ):
        if of_optimizer:
            after = _in_dtype_of(before, after)
        if _form(before) != _form(after):
            place = join_paths(what, path)
            problems.append(f"{place}: was {_form(before)}, became {_form(after)}. {fix}")
        elif pz.nx.is_namedarray(before):
            fitted.append(jax.tree.map(with_strong_type, after.order_like(before)))
        else:
            fitted.append(with_strong_type(after))
    raise_all(ShardingError, f"{what} must keep its form from step to step:", problems)
    return jax.tree.unflatten(jax.tree.structure(old, is_leaf=is_leaf), fitted)


def _in_dtype_of(old: Any, new: Any) -> Any:
    dtypes = jnp.result_type(old), jnp.result_type(new)
    both_inexact = all(jnp.issubdtype(dtype, jnp.inexact) for dtype in dtypes)
    return jnp.asarray(new, dtypes[0]) if both_inexact else new


def _refuse_other_form(old: Any, new: Any, what: str, fix: str) -> None:
    """Raises if the structure of a carried value changed; the arguments are as for `fit_state`.

    >>> _refuse_other_form({"a": 1}, {"b": 1}, "opt_state", "Keep it.")
    Traceback (most recent call last):
    penzai_shard.errors.ShardingError: opt_state must keep its form from step to step:
      opt_state/a: went missing. Keep it.
      opt_state/b: was not there before. Keep it.
    """
    old_def: Any
    new_def: Any
    is_named = pz.nx.is_namedarray
    old_def = jax.tree.structure(old, is_leaf=is_named)
    new_def = jax.tree.structure(new, is_leaf=is_named)
    if old_def == new_def:
        return
    before, after = (dict(paths_and_leaves(tree, is_named)) for tree in (old, new))
    problems = [
        f"{join_paths(what, path)}: went missing. {fix}" for path in before if path not in after
    ]
    problems += [
        f"{join_paths(what, path)}: was not there before. {fix}"
        for path in after
        if path not in before
    ]
    headline = f"{what} must keep its form from step to step:"
    forms = (textwrap.shorten(str(form), 300) for form in (old_def, new_def))
    raise ShardingError(headline, problems or [f"{what}: {' became '.join(forms)}. {fix}"])


def _form(leaf: Any) -> str:
    if pz.nx.is_namedarray(leaf):
        axes = ", ".join(
            f"{name}={size}" for name, size in sorted(leaf.named_shape.items(), key=str)
        )
        positional = ", ".join(str(size) for size in leaf.positional_shape)
        return f"{leaf.dtype} of ({'; '.join(part for part in (positional, axes) if part)})"
    return f"{jnp.result_type(leaf)} of shape {np.shape(leaf)}"
