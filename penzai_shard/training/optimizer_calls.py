"""Calling an optax optimizer, with all that optax's optimizers may ask for."""

import re
import traceback
from collections.abc import Callable, Mapping
from typing import Any

import jax

from penzai_shard.errors import RuleTypeError, ShardingError, require_extra

_UNEXPECTED = re.compile(r"unexpected keyword argument '(\w+)'")
# What an optimizer raises that cannot take what it is given. Anything else is not about its form.
_UNFIT = (TypeError, ValueError, AttributeError, LookupError, NotImplementedError, AssertionError)
_MISSING = re.compile(r"missing \d+ required keyword-only arguments?: (.+)")


def check_optimizer(optimizer_def: Any, model: Any = None) -> None:
    """Checks that something is an optimizer.

    Args:
        optimizer_def: What was given as the optimizer.
        model: What was given as the model, to see whether they were swapped.

    Raises:
        RuleTypeError: It has no ``init`` and ``update``; the message says what to write.

    >>> check_optimizer("adam")
    Traceback (most recent call last):
    penzai_shard.errors.RuleTypeError: the optimizer is the text 'adam'. Pass the optimizer \
itself, for instance optax.adam(1e-3).
    """
    if _is_optimizer(optimizer_def):
        return
    if _is_optimizer(model):
        raise RuleTypeError(
            f"the optimizer was given in the place of the model, and the "
            f"{type(optimizer_def).__name__} in that of the optimizer. The model comes first: "
            "TrainState.initial_state(model, optimizer, root_rng)."
        )
    if isinstance(optimizer_def, str):
        word = optimizer_def if optimizer_def.isidentifier() else "adam"
        raise RuleTypeError(
            f"the optimizer is the text {optimizer_def!r}. Pass the optimizer itself, for "
            f"instance optax.{word}(1e-3)."
        )
    if callable(optimizer_def) and hasattr(optimizer_def, "__name__"):
        name = optimizer_def.__name__
        is_optax = str(optimizer_def.__module__).partition(".")[0] == "optax"
        raise RuleTypeError(
            f"the optimizer is the function {name}, which was not called. Write "
            + (f"optax.{name}(1e-3)." if is_optax else f"{name}(...).")
        )
    raise RuleTypeError(
        f"the optimizer is a {type(optimizer_def).__name__}, without init and update. Pass one "
        "of optax, for instance optax.adam(1e-3)."
    )


def _is_optimizer(value: Any) -> bool:
    return callable(getattr(value, "init", None)) and callable(getattr(value, "update", None))


def initial_optimizer_state(optimizer_def: Any, params: Mapping[str, Any]) -> Any:
    """The optimizer's state before the first step.

    Raises:
        ShardingError: The optimizer cannot take these parameters.
    """
    try:
        return optimizer_def.init(params)
    except _UNFIT as error:
        if isinstance(error, ShardingError):
            raise
        raise ShardingError(
            f"the optimizer {_innermost(error) or 'given'} cannot start from the trainable "
            f"parameters, which are a dictionary of arrays by name: {type(error).__name__}: {error}"
        ) from error


def update_parameters(
    optimizer_def: Any,
    grads: Any,
    opt_state: Any,
    params: Any,
    *,
    value: jax.Array,
    value_fn: Callable[[Any], Any],
    grad_fn: Callable[[Any], Any],
) -> tuple[Any, Any]:
    """One update of the parameters.

    Optimizers that take further arguments get what optax's ask for: ``value``, ``grad`` and
    ``value_fn`` (line searches, as in ``optax.lbfgs``), ``grad_fn`` (``optax.contrib.sam``) and
    ``obj_fn`` (``optax.contrib.sophia``). The functions evaluate the loss on the same batch, with
    the same random key and state.

    Args:
        optimizer_def: The optimizer.
        grads: The gradient at the parameters.
        opt_state: The optimizer's state.
        params: The parameters.
        value: The loss at the parameters.
        value_fn: The loss at other parameters.
        grad_fn: The gradient at other parameters.

    Returns:
        The new parameters and the optimizer's new state.

    Raises:
        ShardingError: The optimizer failed, or asks for something that a step does not have.
    """
    optax = require_extra("optax", "train")
    extra: dict[str, Any] = {}
    if isinstance(optimizer_def, optax.GradientTransformationExtraArgs):

        def loss_at(params: Any, grad_fn: Any = None, obj_fn: Any = None) -> Any:
            # Line searches insist that this takes whatever else the update was given.
            del grad_fn, obj_fn
            return value_fn(params)

        extra = {
            "value": value,
            "grad": grads,
            "value_fn": loss_at,
            "grad_fn": lambda params, *_: grad_fn(params),
            "obj_fn": lambda params: value_fn(params),
        }
    while True:
        try:
            updates, new_opt_state = optimizer_def.update(grads, opt_state, params, **extra)
            return optax.apply_updates(params, updates), new_opt_state
        except TypeError as error:
            # An optimizer may take only some of these, and inside a chain each may take others.
            refused = _UNEXPECTED.search(str(error))
            if refused is None or refused[1] not in extra:
                raise _failure(error, extra) from error
            del extra[refused[1]]
        except _UNFIT as error:
            if isinstance(error, ShardingError):
                raise
            raise _failure(error, extra) from error


def _failure(error: Exception, extra: Mapping[str, Any]) -> ShardingError:
    name = _innermost(error) or "given"
    missing = _MISSING.search(str(error))
    if missing is not None:
        had = ", ".join(extra) or "no further arguments"
        return ShardingError(
            f"the optimizer {name} asks for {missing[1]}, which a train step does not have; it "
            f"passes {had}. Use another optimizer, or wrap its update so that it gets them."
        )
    return ShardingError(
        f"the optimizer {name} failed in its update: {type(error).__name__}: {error}"
    )


def _innermost(error: Exception) -> str:
    """The function of optax that an error comes from, by its traceback."""
    found = ""
    for frame, _ in traceback.walk_tb(error.__traceback__):
        if str(frame.f_globals.get("__name__")).split(".", maxsplit=1)[0] == "optax":
            name = frame.f_code.co_qualname.split(".", maxsplit=1)[0]
            found = found if name.startswith(("_", "<")) else name
    return found
